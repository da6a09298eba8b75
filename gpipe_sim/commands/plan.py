"""`gpipe plan`: the best configuration, why, how sure, and what would change it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpipe_sim.commands.common import AsJson, Html, Overrides, progress, say, write, write_report
from gpipe_sim.files import InputError, Problem

if TYPE_CHECKING:
    from gpipe_sim.advise import Advice
    from gpipe_sim.predict import Prediction
    from gpipe_sim.space import Space

NOTHING_FITS = 3
"""The exit status."""


def plan(
    scenario_file: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario file.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the recommended plan to this file.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also print what would change the answer: stages, links, memory.")
    ] = False,
    runs: Annotated[
        Path, typer.Option(metavar="DIR", help="Past runs, whose errors tell how far to trust a margin.")
    ] = Path("runs"),
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Find the fastest plan that fits, over stages, micro-batches, schedule, checkpointing and the cut.

    A value fixed under plan: stays, a list is chosen from, and what is left out is searched.
    """
    from gpipe_sim.accuracy import recorded
    from gpipe_sim.advise import advise, certainty, sensitivities
    from gpipe_sim.predict import predict_all

    space = _space(scenario_file, overrides or [])
    with progress("searching", 8, quiet=True) as advance:
        advice = advise(space, advance)
    found = list(predict_all([candidate.plan for candidate in advice.front]))
    sure = certainty(advice, [run.error for run in recorded(runs)]) if advice.fits else None
    if as_json:
        print(json.dumps(_document(space, advice, found, sure), indent=2))
    else:
        _print(space, advice, found, sure)
        for sentence in sensitivities(advice) if explain and advice.fits else ():
            typer.echo(sentence)
    if html:
        write_report(html, found, space.scenario.name)
    if not advice.fits:
        _say_remedies(space, advice)
        raise typer.Exit(NOTHING_FITS)
    if out is not None:
        from gpipe_sim.planfile import plan_text

        write(out, plan_text(advice.recommended.plan), "the plan, for gpipe simulate, run and export")


def _space(path: Path, overrides: list[str]) -> "Space":
    from gpipe_sim.space import space_of
    from gpipe_sim.sweep import load_scenario

    sweep = load_scenario(path, *overrides)
    others = {field for point in sweep for field in point.swept if not field.startswith("plan.")}
    if others:
        message = f"a list is no choice of ours here: choose one value, such as --set {min(others)}=..."
        raise InputError([Problem(str(path), min(others), message)])
    return space_of(list(sweep))


def _document(space: "Space", advice: "Advice", found: "list[Prediction]", sure: str | None) -> dict[str, object]:
    from gpipe_sim.search import front

    best = set(map(id, front(advice.front)))
    return {
        "scenario": space.scenario.name,
        "results": [prediction.to_dict() for prediction in found],
        "recommended": advice.front.index(advice.recommended) if advice.fits else None,
        "pareto": [index for index, candidate in enumerate(advice.front) if id(candidate) in best],
        "reason": advice.reason,
        "certainty": sure,
    }


def _print(space: "Space", advice: "Advice", found: "list[Prediction]", sure: str | None) -> None:
    from gpipe_sim.terminal import make_console, plan_details, results_table

    console = make_console()
    name = f"{space.scenario.name}: time against memory"
    console.print(results_table(name, found, console.width, mark=advice.front.index(advice.recommended)))
    if advice.fits:
        console.print(plan_details(found[advice.front.index(advice.recommended)], console.width))
        console.print()
    console.print(advice.reason, style="bold")
    for sentence in (advice.naive_sentence if advice.fits else None, sure):
        if sentence:
            console.print(sentence)


def _say_remedies(space: "Space", advice: "Advice") -> None:
    from gpipe_sim.advise import remedies

    say("no plan fits")
    for remedy in remedies(space, advice.recommended):
        say(remedy)
