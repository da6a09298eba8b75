"""`gpipe accuracy`: how right the predictions of all runs so far were."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpipe_sim.base.files import InputError, Problem
from gpipe_sim.commands.common import AsJson

if TYPE_CHECKING:
    from gpipe_sim.runs.accuracy import Accuracy


def accuracy(
    runs: Annotated[Path, typer.Option(metavar="DIR", help="The folder with the runs and their record.")] = Path(
        "runs"
    ),
    as_json: AsJson = False,
) -> None:
    """Print how right all runs so far were: mean and worst errors and the order, by device, schedule and checkpoint."""
    from gpipe_sim.runs.accuracy import accuracy_of, by_group, recorded

    found = recorded(runs)
    if not found:
        raise InputError(
            [Problem(str(runs), "", "has no compared run, expected the folder that `gpipe run` writes to")]
        )
    overall, groups = accuracy_of(found), by_group(found)
    if as_json:
        document = {
            "all": asdict(overall),
            "by": {group: {value: asdict(one) for value, one in some.items()} for group, some in groups.items()},
            "runs": [asdict(run) | {"utc": run.utc.isoformat() if run.utc else None} for run in found],
        }
        print(json.dumps(document, indent=2))
        return
    _print(overall, groups)
    dates = [run.utc.date().isoformat() for run in found if run.utc]
    if dates:
        typer.echo(f"runs from {dates[0]} to {dates[-1]}")


def _print(overall: "Accuracy", groups: "dict[str, dict[str, Accuracy]]") -> None:
    from rich.table import Table

    from gpipe_sim.show.terminal import make_console

    table = Table(header_style="bold")
    table.add_column("runs of", no_wrap=True)
    for heading in ("runs", "step time", "worst", "bubble", "peak memory", "worst", "order"):
        table.add_column(heading, justify="right", no_wrap=True)

    def row(name: str, one: "Accuracy") -> None:
        memory = ["-" if value is None else f"{value:.1%}" for value in (one.memory_mean, one.memory_worst)]
        times = [f"{one.step_time_mean:.1%}", f"{one.step_time_worst:.1%}", f"{100 * one.bubble_mean:.1f} points"]
        table.add_row(name, str(one.runs), *times, *memory, "-" if one.order is None else f"{one.order:.2f}")

    row("all", overall)
    for group, some in groups.items():
        table.add_section()
        for value, one in some.items():
            row(f"{group} {value}", one)
    make_console().print(table)
