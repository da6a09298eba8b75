"""`gpipe validate`: published figures beside what the simulator and the memory model say of them."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import typer

from gpipe_sim.commands.common import AsJson, progress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpipe_sim.literature import Figure, Value


def validate(as_json: AsJson = False) -> None:
    """Check the simulator and the memory model against figures that others have published.

    Exits with 1 if an exact or calibrated figure is out of its tolerance, or a trend has the wrong direction, and no
    reason for it is given.
    """
    from gpipe_sim.evidence import NUM_PARTS, all_figures
    from gpipe_sim.literature import summary
    from gpipe_sim.terminal import make_console

    with progress("comparing with the literature", NUM_PARTS, quiet=True) as advance:
        figures = all_figures(advance)
    if as_json:
        print(json.dumps({"summary": summary(figures), "figures": [f.to_dict() for f in figures]}, indent=2))
    else:
        console = make_console()
        for part in _report(figures, console.width):
            console.print(part)
    if any(figure.fails for figure in figures):
        raise typer.Exit(1)


def _report(figures: "Sequence[Figure]", width: int) -> "Iterator[RenderableType]":
    """A table for each table of the literature, with where it is from and what is not right; then the sums."""
    from rich.table import Table
    from rich.text import Text

    from gpipe_sim.literature import published_tables, summary
    from gpipe_sim.palette import CRITICAL

    for name, group in groupby(figures, key=lambda figure: figure.table):
        source, found = published_tables()[name], list(group)
        table = Table(title=Text(source.title, "bold"), title_justify="left", header_style="bold", width=width)
        table.add_column("figure", ratio=1)
        table.add_column("published", justify="right")
        table.add_column("predicted", justify="right")
        table.add_column("error", justify="right", no_wrap=True)
        table.add_column("within", justify="right", no_wrap=True)
        table.add_column("kind", no_wrap=True)
        table.add_column("", no_wrap=True)
        for figure in found:
            label = f"{figure.name} ({figure.unit})" if figure.unit else figure.name
            error = "" if figure.error is None else f"{figure.error:+.2%}"
            within = "" if figure.tolerance is None or figure.is_fitted else f"{figure.tolerance:.2%}"
            texts = label, _text(figure.published), _text(figure.predicted), error, within, figure.kind, figure.status
            table.add_row(*texts, style=CRITICAL if figure.status == "misses" else "")
        yield table
        yield Text(f"{source.source}. {source.settings}.")
        if source.corrections:
            yield Text(f"Corrected: {source.corrections}.")
        for basis in dict.fromkeys(f"{figure.kind.capitalize()}: {figure.basis}." for figure in found):
            yield Text(basis)
        for figure in found:
            if figure.status == "misses":
                yield Text(f"{figure.name} misses: {figure.known or 'no reason is known'}.", CRITICAL)
        yield Text()
    for kind, counts in summary(figures).items():
        judged = counts["holds"] + counts["misses_with_reason"] + counts["fails"]
        fitted = f", {counts['fitted']} more were fitted to" if counts["fitted"] else ""
        known = f", {counts['misses_with_reason']} miss for the reason given" if counts["misses_with_reason"] else ""
        fails = f", {counts['fails']} fail" if counts["fails"] else ""
        yield Text(f"{kind}: {counts['holds']} of {judged} hold{known}{fails}{fitted}", "bold")


def _text(value: "Value") -> str:
    if isinstance(value, str):
        return value
    return " ".join(f"{number:.4g}" for number in (value if isinstance(value, tuple) else (value,)))
