"""The evidence: every published figure that this project claims to predict, in the order of `published.json`."""

from collections.abc import Callable, Iterator

from gpipe_sim.evidence import exact, fits, trends
from gpipe_sim.evidence.literature import Figure, published_tables

_PARTS: tuple[Callable[[], Iterator[Figure]], ...] = (
    exact.transformer_sizes,
    exact.gpipe_amoebanet,
    exact.torchgpipe_amoebanet,
    exact.zero_bubble,
    exact.korthikanti_memory,
    exact.korthikanti_times,
    exact.boehm,
    fits.transformer_activations,
    fits.amoebanet_activations,
    fits.breakdown,
    fits.amoebanet_speed,
    fits.zero_bubble_throughputs,
    trends.table2,
    trends.early_recompute,
)
NUM_PARTS = len(_PARTS)


def all_figures(advance: Callable[[], None] = lambda: None) -> list[Figure]:
    """Predict everything; `advance` is called after each of `NUM_PARTS` parts."""
    figures: list[Figure] = []
    for part in _PARTS:
        figures += part()
        advance()
    order = list(published_tables())
    return sorted(figures, key=lambda figure: order.index(figure.table))
