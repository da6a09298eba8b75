"""`gpipe plan`: the best configuration, why, how sure, and what would change it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from gpipe_sim.base.files import InputError, Problem, did_you_mean
from gpipe_sim.base.limits import shown
from gpipe_sim.commands.common import (
    AsJson,
    Html,
    Overrides,
    Tokens,
    progress,
    say,
    scenario_argument,
    to_tokens,
    write,
    write_report,
)

if TYPE_CHECKING:
    from gpipe_sim.explain.predict import Prediction
    from gpipe_sim.search.advise import Advice
    from gpipe_sim.search.choices import Objective, Space

NOTHING_FITS = 3
"""The exit status."""


def plan(
    scenario_file: Annotated[Path, scenario_argument("A scenario, by file or name.")],
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
    tokens: Tokens = None,
    objective: Annotated[
        str,
        typer.Option(
            metavar="time|money|memory|days",
            help="What the best plan that fits has least of. With --tokens, money is that of the training, failures "
            "and checkpoints included, as campaign: in the scenario has them; days always are.",
        ),
    ] = "time",
) -> None:
    """Find the fastest plan that fits, over stages, micro-batches, schedule, ranks, checkpointing and the cut.

    Of a transformer on a cluster, also over replicas, what they divide, and tensor groups, if stages are left open.

    A value fixed under plan: stays, a list is chosen from, and what is left out is searched.
    """
    from gpipe_sim.campaign.campaign import run_campaign
    from gpipe_sim.explain.predict import predict_all
    from gpipe_sim.runs.accuracy import recorded
    from gpipe_sim.search.advise import advise, certainty, schedule_sentence, sensitivities
    from gpipe_sim.search.training import choose_for_training

    num_tokens = to_tokens(tokens)
    space = replace(_space(scenario_file, overrides or []), objective=_to_objective(objective))
    trains = objective == "days" or (objective == "money" and num_tokens is not None)
    with progress("searching", 8, quiet=True) as advance:
        advice = advise(space, advance)
    training = None
    if trains and advice.fits:
        advice, training = choose_for_training(space, advice, "money" if objective == "money" else "days", num_tokens)
    chosen = advice.recommended.plan
    if guess := chosen.profile.stretched(chosen.sizes):
        say(guess)
    found = list(predict_all([candidate.plan for candidate in advice.front]))
    sure = certainty(advice, [run.error for run in recorded(runs)]) if advice.fits else None
    if html:  # files come before printing: whoever reads what is printed may have seen enough
        best = found[advice.front.index(advice.recommended)] if advice.fits else None
        whole = run_campaign(chosen, best.step_time_s, num_tokens) if best is not None and training else None
        write_report(html, found, space.scenario.name, num_tokens, chosen=best, reason=advice.reason, training=whole)
    if out is not None and advice.fits:
        from gpipe_sim.make.planfile import plan_text

        write(out, plan_text(chosen), "the plan, for gpipe simulate, run and export")
    if as_json:
        document = _document(space, advice, found, sure, num_tokens)
        document |= {"objective": objective, "training": training and training._asdict()}
        print(json.dumps(document, indent=2))
    else:
        _print(space, advice, found, sure, num_tokens)
        if sentence := schedule_sentence(advice):
            typer.echo(sentence)
        for sentence in sensitivities(advice) if explain and advice.fits else ():
            typer.echo(sentence)
    if not advice.fits:
        _say_remedies(space, advice)
        raise typer.Exit(NOTHING_FITS)


def _to_objective(value: str) -> "Objective":
    from gpipe_sim.search.choices import Objective

    if value == "days":  # of the plans that are fast
        return "time"
    if value not in get_args(Objective):
        known = (*get_args(Objective), "days")
        raise InputError([Problem("--objective", "objective", f"found {shown(value)}, {did_you_mean(value, known)}")])
    return value  # type: ignore[return-value]  # the check above, which mypy cannot follow


def _space(path: Path, overrides: list[str]) -> "Space":
    from gpipe_sim.scenario.reading import load_scenario
    from gpipe_sim.search.choices import space_of

    sweep = load_scenario(path, *overrides)
    others = {field for point in sweep for field in point.swept if not field.startswith("plan.")}
    if others:
        message = f"a list is no choice of ours here: choose one value, such as --set {min(others)}=..."
        raise InputError([Problem(str(path), min(others), message)])
    return space_of(list(sweep))


def _document(
    space: "Space", advice: "Advice", found: "list[Prediction]", sure: str | None, tokens: float | None
) -> dict[str, object]:
    from gpipe_sim.search.search import front

    best = front(advice.front)
    return {
        "scenario": space.scenario.name,
        "results": [prediction.to_dict(tokens) for prediction in found],
        "recommended": advice.front.index(advice.recommended) if advice.fits else None,
        "pareto": [index for index, candidate in enumerate(advice.front) if any(candidate is one for one in best)],
        "reason": advice.reason,
        "certainty": sure,
        "exact": advice.is_exact,
    }


def _print(space: "Space", advice: "Advice", found: "list[Prediction]", sure: str | None, tokens: float | None) -> None:
    from gpipe_sim.search.advise import why_not_copies, why_not_one_group
    from gpipe_sim.show.terminal import make_console, plan_details, results_table

    console = make_console()
    name = f"{space.scenario.name}: time against memory"
    mark = advice.front.index(advice.recommended)
    console.print(results_table(name, found, console.width, mark=mark, tokens=tokens))
    if advice.fits:
        console.print(plan_details(found[mark], console.width, tokens))
        console.print()
    console.print(advice.reason, style="bold")
    for sentence in (
        advice.naive_sentence if advice.fits else None,
        why_not_copies(advice) if advice.fits else None,
        why_not_one_group(advice) if advice.fits else None,
        sure,
    ):
        if sentence:
            console.print(sentence)


def _say_remedies(space: "Space", advice: "Advice") -> None:
    from gpipe_sim.search.advise import remedies

    say("no plan fits" if advice.is_exact else "no plan was found that fits")
    for remedy in remedies(space, advice.recommended):
        say(remedy)
