"""`gpipe simulate`: predict every plan of scenario files and plan files, and say why."""

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpipe_sim.base.files import InputError, Problem
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
    from gpipe_sim.plan.plan import Plan


_MANY_ACTIONS = 50_000
"""From this many on, it takes so long to simulate a single plan that a bar shows how far it is."""


class Engine(StrEnum):
    """How a step is predicted."""

    SIMPY = "simpy"
    FAST = "fast"


def simulate(
    files: Annotated[
        list[Path], scenario_argument("Scenarios, by file or name (gpipe catalog), or plan files.", "SCENARIO...")
    ],
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
    tokens: Tokens = None,
) -> None:
    """Predict step time, bubble and memory of every plan in the scenario files, and say why."""
    if trace and trace == html:
        raise InputError([Problem("--html", "", f"found {html}, which --trace writes, expected another file")])
    num_tokens = to_tokens(tokens)
    questions = load_questions(files, overrides or [])
    if trace and sum(len(plans) for _, plans in questions) != 1:
        found = sum(len(plans) for _, plans in questions)
        message = f"needs a single plan, found {found}; choose one with --set, such as --set plan.stages=4"
        raise InputError([Problem("--trace", "", message)])
    answers, interrupted = predict_plans(questions, engine)
    if trace and not interrupted:  # files come before printing, of which whoever reads it may have seen enough
        from gpipe_sim.show.trace import to_trace

        prediction = answers[0][1][0]
        write(trace, to_trace(prediction.step), "trace, to open in ui.perfetto.dev")
    if html and any(found for _, found in answers):
        everything = [prediction for _, predictions in answers for prediction in predictions]
        write_report(html, everything, ", ".join(name for name, _ in answers), num_tokens)
    if as_json:
        documents = [{"scenario": name, "results": [p.to_dict(num_tokens) for p in found]} for name, found in answers]
        print(json.dumps(documents[0] if len(files) == 1 else documents, indent=2))
    else:
        _print_answers(answers, num_tokens)
    if interrupted:
        raise KeyboardInterrupt


Asked = tuple[str, list["Plan"]]
"""A file's name for itself, and its plans."""
Answer = tuple[str, list["Prediction"]]
"""A scenario's name and the predictions of its plans."""


def load_questions(files: Sequence[Path], overrides: Sequence[str]) -> list[Asked]:
    """The plans of every file; the mistakes of all of them, if there are any."""
    from gpipe_sim.make.making import make_plan, order_notes
    from gpipe_sim.make.planfile import is_plan, parse_plan
    from gpipe_sim.scenario.reading import parse_scenario, read_document

    sweeps, questions, problems = [], [], []
    for path in files:
        try:
            document = read_document(path)
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
    by_file = {scenario.beside(scenario.plan.schedule): scenario for sweep in sweeps for scenario in sweep}
    for file, scenario in by_file.items():  # a note is told once, however many plans have their order from the file
        for note in order_notes(scenario):
            say(f"{file}: {note}")
    guesses = dict.fromkeys(plan.profile.stretched(plan.sizes) for _, plans in questions for plan in plans)
    for guess in filter(None, guesses):
        say(guess)
    return questions


def predict_plans(questions: Sequence[Asked], engine: Engine | None = None) -> tuple[list[Answer], bool]:
    """Predict every plan, showing progress. Interrupted, it returns what is finished, and that it was.

    A single plan is simulated unless the engine says otherwise: whoever asks for one looks at its timeline.
    """
    from gpipe_sim.explain.predict import predict, predict_all

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
    from gpipe_sim.step.evaluate import obstacle

    found = [(plan, obstacle(plan)) for plan in plans]
    shared = [(plan, reason) for plan, reason in found if reason]
    if shared:
        plan, reason = shared[0]
        which = f"{len(shared)} of {len(found)} plans need --engine simpy" if len(found) > 1 else "expected simpy"
        message = f"found fast, {which}: in {plan.scenario.name}, {reason}"
        raise InputError([Problem("--engine", "", message)])


def _print_answers(answers: Sequence[Answer], tokens: float | None) -> None:
    from gpipe_sim.show.terminal import make_console, plan_details, results_table

    console = make_console()
    for name, found in answers:
        if found:
            console.print(results_table(name, found, console.width, tokens=tokens))
        if len(found) == 1:
            console.print(plan_details(found[0], console.width, tokens))
