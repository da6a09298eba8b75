"""`gpipe run` and `gpipe compare`: execute a plan for real, and lay what was measured beside what was predicted."""

import json
import os
import sys
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpipe_sim.base.files import InputError, Problem
from gpipe_sim.commands.common import AsJson, Html, importing, need_torch, progress, say, scenario_argument, write

MEASURED = "measured.json"

if TYPE_CHECKING:
    from gpipe_exec.run.launch import Settings
    from gpipe_sim.plan.plan import Plan


class RunDevice(StrEnum):
    """Where a plan is executed."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    REHEARSE = "rehearse"


class RunEngine(StrEnum):
    """What executes it."""

    GPIPE = "gpipe"
    TORCH = "torch"


class RunLinks(StrEnum):
    """Whose pace the messages of a rehearsal have."""

    PLAN = "plan"
    REAL = "real"


def run(
    plan_file: Annotated[Path, scenario_argument("A plan file, or a scenario with a single plan.", "PLAN")],
    device: Annotated[
        RunDevice,
        typer.Option(help="auto takes GPUs if there are any; rehearse takes each layer's time without its arithmetic."),
    ] = RunDevice.AUTO,
    engine: Annotated[
        RunEngine, typer.Option(help="Ours, or torch.distributed.pipelining as a cross-check.")
    ] = RunEngine.GPIPE,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them that are not measured.")] = 3,
    stretch: Annotated[
        float | None,
        typer.Option(min=1e-6, help="With rehearse: how many times slower; if left out, until actions last 20 ms."),
    ] = None,
    links: Annotated[
        RunLinks,
        typer.Option(
            help="With rehearse: plan sends little and delivers it when the plan's links would have; real sends whole "
            "messages over the links that are there, also between machines, and stretches nothing."
        ),
    ] = RunLinks.PLAN,
    reprofile: Annotated[
        bool,
        typer.Option(
            "--reprofile",
            help="Time the layers again in turns with the steps, and predict from that: what is left of the error is "
            "the model's own, not a machine's that has become slower or faster since its profile.",
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without a finished step after which to give up.")] = 30,
    nodes: Annotated[
        int, typer.Option(min=1, help="Machines. With more than one, print the command to start on each of them.")
    ] = 1,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the ranks meet: a port of the first machine.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory to make; runs/<utc>-<name> if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Execute a plan for real with one process per rank, measure it, and compare it with its prediction."""
    from gpipe_sim.make.planfile import read_plan

    plan = read_plan(plan_file)
    need_torch("gpipe run")
    from gpipe_exec.alternatives.rehearsal import default_stretch
    from gpipe_exec.run.launch import Settings

    if stretch is not None and device is not RunDevice.REHEARSE:
        raise InputError([Problem("--stretch", "", "is for rehearsals only, expected --device rehearse with it")])
    if links is RunLinks.REAL and device is not RunDevice.REHEARSE:
        message = "is for rehearsals only, expected --device rehearse with it: other runs have real links anyway"
        raise InputError([Problem("--links", "", message)])
    if links is RunLinks.REAL and stretch not in (None, 1.0):
        raise InputError([Problem("--stretch", "", f"found {stretch:g}, expected 1: real links do not stretch")])
    is_stretched = device is RunDevice.REHEARSE and links is RunLinks.PLAN
    settings = Settings(
        device=run_device(device),
        engine=engine,
        steps=steps,
        warmup=warmup,
        timeout=timeout,
        stretch=(stretch or default_stretch(plan)) if is_stretched else 1.0,
        links=links,
        reprofile=reprofile,
        endpoint=rdzv_endpoint,
    )
    if reprofile and settings.device == "rehearse":
        message = "needs layers that compute, expected another device than rehearse"
        raise InputError([Problem("--reprofile", "", message)])
    if nodes > 1:
        _print_commands(plan, settings, nodes, out)
        return
    directory = execute_plan(plan, settings, out)
    report = directory / "report.html" if find_spec("plotly") else None
    if report is None:
        say("there is no report.html, which needs the package plotly: gpipe-planner[report] would have it")
    show_comparison(directory, report, as_json=as_json, first=True)


def execute_plan(plan: "Plan", settings: "Settings", out: Path | None) -> Path:
    """Run a plan and return its run directory; a run that fails ends the command with status 1."""
    from gpipe_exec.run.launch import RunError, check_runnable, execute

    check_runnable(plan, settings)
    _announce(plan, settings)
    directory = _run_directory(plan, out)
    say(f"running {plan.world} ranks, {settings.warmup} + {settings.steps} steps, in {directory}")
    try:
        with progress("steps", settings.warmup + settings.steps, quiet=True) as advance:
            execute(plan, directory, settings, advance)
    except RunError as error:
        print(f"gpipe: {error}", file=sys.stderr)
        _say_what_is_kept(directory)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        say("interrupted, and all its processes are ended")
        _say_what_is_kept(directory)
        raise
    except OSError as error:
        print(f"gpipe: {error.filename or directory}: {error.strerror}", file=sys.stderr)
        raise typer.Exit(1) from error
    return directory


def _say_what_is_kept(directory: Path) -> None:
    """Of a run that did not end well, unless it has been put together already."""
    if not (directory / MEASURED).is_file() and any(directory.glob("ranks/rank*.json")):
        say(f"what its ranks measured is kept: gpipe compare {directory}")


def _run_directory(plan: "Plan", out: Path | None) -> Path:
    from gpipe_sim.runs.directory import new_run_directory

    if out is None:
        return new_run_directory(Path("runs"), plan.scenario.name)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError([Problem("--out", "", f"found {out} with something in it, expected a new or empty folder")])
    out.mkdir(parents=True, exist_ok=True)
    try:
        (out / "ranks").mkdir()  # of two that want the same empty folder, one is the first to make this in it
    except FileExistsError as error:
        raise InputError(
            [Problem("--out", "", f"another run has taken {out}, expected a folder of its own")]
        ) from error
    return out


def _announce(plan: "Plan", settings: "Settings") -> None:
    """Say what a rehearsal leaves out, and how long it takes; and what the plan does not know of this machine."""
    if (
        settings.device == "cpu"
        and plan.tensor == 1
        and plan.scenario.cluster.cores is None
        and plan.world > (cores := _num_cores())
    ):
        say(f"{plan.world} ranks share {cores} cores, which the plan does not know: add `cores: {cores}` to it")
    if settings.device != "rehearse":
        return
    from gpipe_exec.alternatives.rehearsal import what_is_left_out
    from gpipe_sim.base.units import format_seconds
    from gpipe_sim.explain.predict import predict

    seconds = format_seconds(predict(plan).step_time_s * settings.stretch)
    if settings.links == "real":
        say(f"a rehearsal with whole messages over the links that are there: {seconds} a step by the plan's links")
    else:
        slower = f", {settings.stretch:.4g} times slower than the plan: {seconds} a step; times are divided by it"
        say("a rehearsal" + (slower if settings.stretch != 1 else f" at the plan's own speed: {seconds} a step"))
    for what in what_is_left_out(plan, settings.links):
        say(f"not rehearsed: {what}")


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print_commands(plan: "Plan", settings: "Settings", nodes: int, out: Path | None) -> None:
    """What to start on each of several machines, and what to do before and after."""
    from gpipe_exec.run.launch import check_runnable, commands_for_machines, prepare

    if settings.endpoint is None:
        message = "is missing: with several machines, expected host:port of the first, such as node0:29500"
        raise InputError([Problem("--rdzv-endpoint", "", message)])
    if settings.device == "rehearse" and settings.links == "plan":
        message = "a rehearsal of the plan's links needs one clock, expected a single machine or --links real"
        raise InputError([Problem("--nodes", "", message)])
    check_runnable(plan, settings, num_machines=nodes)
    directory = _run_directory(plan, out)
    commands = commands_for_machines(plan, directory, settings, nodes)
    prepare(plan, directory, settings)
    say(f"copy {directory} to the same place on every machine, or share it; then start, from the same folder,")
    for node, command in enumerate(commands):
        typer.echo(f"# machine {node}")
        typer.echo(command)
    say(f"afterwards, on machine 0: gpipe compare {directory}")


def run_device(device: RunDevice) -> str:
    """The device that is meant: a GPU if there is one and nothing else was said."""
    if device is not RunDevice.AUTO:
        return str(device)
    from gpipe_exec.devices.accelerator import available_kind

    return available_kind()


def compare(
    run_directory: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run; with --traces, the plan that was run.")
    ],
    traces: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Traces of torch's profiler, one for each rank, of a run of torch.distributed.pipelining or "
            "torchtitan: they become a run directory.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --traces, the run directory to make; runs/<utc>-<name> if left out.")
    ] = None,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Lay what was measured beside what was predicted, and say where the error comes from."""
    if traces is None:
        if out is not None:
            raise InputError([Problem("--out", "", "is for traces only, expected --traces with it")])
        show_comparison(run_directory, html, as_json=as_json)
        return
    from gpipe_sim.make.planfile import read_plan, save_plan
    from gpipe_sim.runs.directory import save_measured
    from gpipe_sim.runs.kineto import measure_traces

    plan = read_plan(run_directory)
    measured = measure_traces(plan, traces)
    directory = _run_directory(plan, out)
    say(f"{len(measured.steps)} steps of {plan.num_ranks} ranks on {measured.device}, in {directory}")
    save_plan(plan, directory / "plan.yaml")
    save_measured(measured, directory / MEASURED)
    show_comparison(directory, html, as_json=as_json, first=True)


def _gather_again(directory: Path) -> None:
    """Put together what the ranks of a run have left that ended before that could be done, if they have."""
    from gpipe_sim.base.files import read_json
    from gpipe_sim.make.planfile import load_plan

    if not any(directory.glob("ranks/rank*.json")) or not (directory / "environment.json").is_file():
        return
    plan, settings = load_plan(directory / "plan.yaml"), read_json(directory / "environment.json").data
    need_torch("gpipe compare")
    from gpipe_exec.run.records import gather

    try:
        gather(plan, directory, **{name: settings[name] for name in ("device", "engine", "stretch", "links")})
    except InputError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        message = "do not go together with environment.json, expected both as the run has left them"
        raise InputError([Problem(str(directory), "ranks", message)]) from error


def show_comparison(directory: Path, html: Path | None, *, as_json: bool, first: bool = False) -> None:
    """Compare a run with its prediction, print that, and keep it in the run's directory; the first time, also in the
    record of all runs beside it."""
    from gpipe_sim.runs.compare import compare_run
    from gpipe_sim.runs.directory import load_run
    from gpipe_sim.show.terminal import comparison_table, make_console

    if not (directory / MEASURED).is_file():
        _gather_again(directory)
    comparison = compare_run(*load_run(directory))
    write(directory / "compare.json", json.dumps(comparison.to_dict(), indent=2), "the comparison")
    if first:
        from gpipe_sim.runs.accuracy import record
        from gpipe_sim.runs.directory import summary_of

        record(directory.parent, summary_of(directory))
    if html is not None:
        with importing("--html", "report"):
            from dashboard.report import comparison_page
        write(html, comparison_page(comparison), "report, to open in a browser")
    if as_json:
        print(json.dumps(comparison.to_dict(), indent=2))
    else:
        make_console().print(comparison_table(comparison))
