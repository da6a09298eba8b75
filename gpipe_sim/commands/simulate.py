"""`gpipe simulate`: predict every plan of scenario files and plan files, and say why."""

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpipe_sim.commands.common import AsJson, Html, Overrides, progress, say, write, write_report
from gpipe_sim.files import InputError, Problem

if TYPE_CHECKING:
    from gpipe_sim.plan import Plan
    from gpipe_sim.predict import Prediction


_MANY_ACTIONS = 50_000
"""From this many on, it takes so long to simulate a single plan that a bar shows how far it is."""


class Engine(StrEnum):
    """How a step is predicted."""

    SIMPY = "simpy"
    FAST = "fast"


def simulate(
    files: Annotated[list[Path], typer.Argument(help="Scenario files, or plan files.", metavar="SCENARIO...")],
    overrides: Overrides = None,
    engine: Annotated[
        Engine | None,
        typer.Option(
            help="How to predict: simpy, the event simulation; fast, the same times solved for many plans at once, "
            "where no NIC or core is shared. Left out, a sweep is fast wherever it can be."
        ),
    ] = None,
    as_json: AsJson = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace of the plan for Perfetto or chrome://tracing.")
    ] = None,
    html: Html = None,
) -> None:
    """Predict step time, bubble and memory of every plan in the scenario files, and say why."""
    if trace and trace == html:
        raise InputError([Problem("--html", "", f"found {html}, which --trace writes, expected another file")])
    questions = load_questions(files, overrides or [])
    if trace and sum(len(plans) for _, plans in questions) != 1:
        found = sum(len(plans) for _, plans in questions)
        message = f"needs a single plan, found {found}; choose one with --set, such as --set plan.stages=4"
        raise InputError([Problem("--trace", "", message)])
    answers, interrupted = predict_plans(questions, engine)
    if as_json:
        documents = [{"scenario": name, "results": [p.to_dict() for p in found]} for name, found in answers]
        print(json.dumps(documents[0] if len(files) == 1 else documents, indent=2))
    else:
        _print_answers(answers)
    if trace and not interrupted:
        from gpipe_sim.trace import to_trace

        prediction = answers[0][1][0]
        write(trace, to_trace(prediction.step), "trace, to open in ui.perfetto.dev")
    if html and any(found for _, found in answers):
        everything = [prediction for _, predictions in answers for prediction in predictions]
        write_report(html, everything, ", ".join(name for name, _ in answers))
    if interrupted:
        raise KeyboardInterrupt


Question = tuple[str, list["Plan"]]
"""A file's name for itself, and its plans."""
Answer = tuple[str, list["Prediction"]]
"""A scenario's name and the predictions of its plans."""


def load_questions(files: Sequence[Path], overrides: Sequence[str]) -> list[Question]:
    """The plans of every file; the mistakes of all of them, if there are any."""
    from gpipe_sim.files import read_yaml
    from gpipe_sim.plan import make_plan
    from gpipe_sim.planfile import is_plan, parse_plan
    from gpipe_sim.sweep import parse_scenario

    sweeps, questions, problems = [], [], []
    for path in files:
        try:
            document = read_yaml(path)
            if is_plan(document):
                if overrides:
                    problems.append(Problem("--set", "", f"{path} is a plan, which is fixed, expected a scenario"))
                chosen = parse_plan(document)
                questions.append((chosen.scenario.name, [chosen]))
            else:
                sweeps.append(parse_scenario(document, *overrides))
                questions.append((sweeps[-1].name, []))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    empty = (plans for _, plans in questions if not plans)
    with progress("planning", sum(map(len, sweeps)), quiet=True) as advance:
        for sweep, plans in zip(sweeps, empty, strict=True):
            for scenario in sweep:
                try:
                    plans.append(make_plan(scenario))
                except InputError as error:
                    problems += error.problems
                advance()
    if problems:
        raise InputError(problems)
    return questions


def predict_plans(questions: Sequence[Question], engine: Engine | None = None) -> tuple[list[Answer], bool]:
    """Predict every plan, showing progress. Interrupted, it returns what is finished, and that it was.

    A single plan is simulated unless the engine says otherwise: whoever asks for one looks at its timeline.
    """
    from gpipe_sim.predict import predict, predict_all

    plans = [plan for _, found in questions for plan in found]
    if engine is Engine.FAST:
        _check_nothing_shared(plans)
    answers: list[Answer] = [(name, []) for name, _ in questions]
    total = sum(jitter.samples if (jitter := plan.scenario.cluster.jitter) else 1 for plan in plans)
    try:
        long = any(2 * plan.num_stages * plan.num_microbatches >= _MANY_ACTIONS for plan in plans)
        with progress(f"simulating {len(plans)} plan{'s' * (len(plans) > 1)}", total, long=long) as advance:
            for (_, done), (_, found) in zip(answers, questions, strict=True):
                if len(plans) == 1 and engine is not Engine.FAST:
                    done.append(predict(found[0], keep_step=True, advance=advance))
                    continue
                fast = None if engine is None else engine is Engine.FAST
                for prediction in predict_all(found, fast=fast, advance=advance):
                    done.append(prediction)  # one by one, to have them if we are interrupted
    except KeyboardInterrupt:
        say(f"interrupted: {sum(len(done) for _, done in answers)} of {len(plans)} plans are finished")
        return answers, True
    return answers, False


def _check_nothing_shared(plans: "Sequence[Plan]") -> None:
    from gpipe_sim.evaluate import obstacle

    found = [(plan, obstacle(plan)) for plan in plans]
    shared = [(plan, reason) for plan, reason in found if reason]
    if shared:
        plan, reason = shared[0]
        which = f"{len(shared)} of {len(found)} plans need --engine simpy" if len(found) > 1 else "expected simpy"
        message = f"found fast, {which}: in {plan.scenario.name}, {reason}"
        raise InputError([Problem("--engine", "", message)])


def _print_answers(answers: Sequence[Answer]) -> None:
    from gpipe_sim.terminal import make_console, plan_details, results_table

    console = make_console()
    for name, found in answers:
        if found:
            console.print(results_table(name, found, console.width))
        if len(found) == 1:
            console.print(plan_details(found[0], console.width))
