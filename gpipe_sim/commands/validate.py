"""`gpipe validate`: published figures beside what the simulator and the memory model say of them."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from gpipe_sim.commands.common import AsJson, progress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpipe_sim.evidence.literature import Figure, Value


def validate(
    as_json: AsJson = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Only runs on GPUs: how far predictions are, beside the tools of others.")
    ] = False,
) -> None:
    """Check the simulator and the memory model against figures that others have published.

    Exits with 1 if an exact or calibrated figure is out of its tolerance, or a trend has the wrong direction, and no
    reason for it is given.
    """
    if gpu:
        _gpu_runs(as_json=as_json)
        return
    from gpipe_sim.evidence.everything import NUM_PARTS, all_figures
    from gpipe_sim.evidence.literature import summary
    from gpipe_sim.show.terminal import make_console

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


def _gpu_runs(*, as_json: bool) -> None:
    """Every set of published runs: how many were fitted and judged, and the errors."""
    from rich.table import Table

    from gpipe_sim.evidence.gpu_runs import NUM_SETS, gpu_results
    from gpipe_sim.show.terminal import make_console

    with progress("predicting published runs", NUM_SETS, quiet=True) as advance:
        found = [one.to_dict() for one in gpu_results(advance)]
    if as_json:
        print(json.dumps({"sets": found}, indent=2))
        return
    table = Table(header_style="bold")
    for name in ("set", "fitted", "judged", "mean error", "median", "worst", "its own tool"):
        table.add_column(name, justify="left" if name == "set" else "right", no_wrap=True)
    for one in found:
        shown = {"mean_error": ".1%", "median_error": ".1%", "worst_error": "+.1%", "own_mean_error": ".1%"}
        errors = ["" if one[name] is None else format(one[name], form) for name, form in shown.items()]
        table.add_row(one["set"], str(one["fitted"]), str(one["judged"]), *errors)
    console = make_console()
    console.print(table)
    for source in dict.fromkeys(one["source"] for one in found):
        console.print(source)


def _report(figures: "Sequence[Figure]", width: int) -> "Iterator[RenderableType]":
    """A table for each table of the literature, with where it is from and what is not right; then the sums."""
    from rich.table import Table
    from rich.text import Text

    from gpipe_sim.evidence.literature import published_tables, summary
    from gpipe_sim.show.palette import CRITICAL

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
