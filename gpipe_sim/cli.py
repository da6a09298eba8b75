"""The `gpipe` command: reads arguments, calls the library, prints. Results go to standard output, the rest to error.

Exit status: 0 done; 1 it ran and failed; 2 the input is wrong; 130 interrupted. Other packages are imported inside the
command that needs them, so that `gpipe simulate` starts quickly.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpipe_sim.files import InputError, Problem, write_text

if TYPE_CHECKING:
    from gpipe_sim.plan import Plan
    from gpipe_sim.predict import Prediction
    from gpipe_sim.profile import Profile
    from gpipe_sim.scenario import Scenario
    from gpipe_sim.sweep import Sweep

app = typer.Typer(
    name="gpipe",
    help="Plan pipeline-parallel training: predict how a plan behaves before running it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; every expected failure ends here as a message and an exit status."""
    from gpipe_sim.simulate import DeadlockError

    try:
        try:
            app(args=None if arguments is None else list(arguments), prog_name="gpipe")
        finally:
            sys.stdout.flush()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except DeadlockError as error:
        print(f"gpipe: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("gpipe: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def main_simulate() -> None:
    """The `simulate` script: `gpipe simulate` under a name of its own."""
    main(["simulate", *sys.argv[1:]])


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpipe-planner {version('gpipe-planner')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


class Engine(StrEnum):
    """How a step is predicted."""

    SIMPY = "simpy"


# --- simulate ------------------------------------------------------------------------------------------------------


@app.command()
def simulate(
    scenarios: Annotated[list[Path], typer.Argument(help="Scenario files.", metavar="SCENARIO...")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Replace a field, such as plan.microbatches=32; repeatable."),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="How to predict: the SimPy event simulation.")] = Engine.SIMPY,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace of the plan for Perfetto or chrome://tracing.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report as one HTML page that opens offline.")
    ] = None,
) -> None:
    """Predict step time, bubble and memory of every plan in the scenario files, and say why."""
    from gpipe_sim.sweep import load_scenario

    sweeps, problems = [], []
    for path in scenarios:
        try:
            sweeps.append(load_scenario(path, *(overrides or [])))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    if trace and trace == html:
        raise InputError([Problem("--html", "", f"found {html}, which --trace writes, expected another file")])
    if trace and sum(map(len, sweeps)) != 1:
        plans = sum(map(len, sweeps))
        message = f"needs a single plan, found {plans}; choose one with --set, such as --set plan.stages=4"
        raise InputError([Problem("--trace", "", message)])
    answers, interrupted = _predict_all(sweeps)
    if as_json:
        documents = [{"scenario": name, "results": [p.to_dict() for p in found]} for name, found in answers]
        print(json.dumps(documents[0] if len(scenarios) == 1 else documents, indent=2))
    else:
        _print_answers(answers)
    if trace and not interrupted:
        from gpipe_sim.trace import to_trace

        prediction = answers[0][1][0]
        _write(trace, to_trace(prediction.step), "trace, to open in ui.perfetto.dev")
    if html and any(found for _, found in answers):
        found = [prediction for _, predictions in answers for prediction in predictions]
        _write_report(html, found, ", ".join(name for name, _ in answers))
    if interrupted:
        raise KeyboardInterrupt


Answer = tuple[str, list["Prediction"]]
"""A scenario's name and the predictions of its plans."""


def _predict_all(sweeps: "Sequence[Sweep]") -> tuple[list[Answer], bool]:
    """Plan and predict every point, showing progress. Interrupted, it returns what is finished, and that it was."""
    from gpipe_sim.predict import predict

    num_plans = sum(map(len, sweeps))
    answers: list[Answer] = [(sweep.name, []) for sweep in sweeps]
    try:
        plans = _make_plans(sweeps, num_plans)
        total = sum(_samples(scenario) for sweep in sweeps for scenario in sweep)
        with _progress(f"simulating {num_plans} plan{'s' * (num_plans > 1)}", total) as advance:
            for (_, done), found in zip(answers, plans, strict=True):
                for plan in found:
                    done.append(predict(plan, keep_step=num_plans == 1, advance=advance))
    except KeyboardInterrupt:
        _say(f"interrupted: {sum(len(done) for _, done in answers)} of {num_plans} plans are finished")
        return answers, True
    return answers, False


def _make_plans(sweeps: "Sequence[Sweep]", num_plans: int) -> "list[list[Plan]]":
    """The plans of every sweep; the mistakes of all of them, if there are any."""
    from gpipe_sim.plan import make_plan

    plans: list[list[Plan]] = []
    problems: list[Problem] = []
    with _progress("planning", num_plans, quiet=True) as advance:
        for sweep in sweeps:
            plans.append([])
            for scenario in sweep:
                try:
                    plans[-1].append(make_plan(scenario))
                except InputError as error:
                    problems += error.problems
                advance()
    if problems:
        raise InputError(problems)
    return plans


def _samples(scenario: "Scenario") -> int:
    jitter = scenario.cluster.jitter
    return jitter.samples if jitter else 1


@contextmanager
def _progress(what: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """A bar on standard error if there is more than one thing to wait for; a line where nobody sees it move."""
    if total < 2 or not sys.stderr.isatty():
        if total > 1 and not quiet:
            _say(what)
        yield lambda: None
        return
    from rich.progress import Progress

    from gpipe_sim.terminal import make_console

    with Progress(console=make_console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def _print_answers(answers: Sequence[Answer]) -> None:
    from gpipe_sim.terminal import make_console, plan_details, results_table

    console = make_console()
    for name, found in answers:
        if found:
            console.print(results_table(name, found, console.width))
        if len(found) == 1:
            console.print(plan_details(found[0], console.width))


# --- run ---------------------------------------------------------------------------------------------------------


class RunDevice(StrEnum):
    """Where a plan is executed."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@app.command()
def run(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, or a scenario with a single plan.")],
    device: Annotated[RunDevice, typer.Option(help="Where to run; auto takes GPUs if there are any.")] = RunDevice.AUTO,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them that are not measured.")] = 3,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without a finished step after which to give up.")] = 30,
    out: Annotated[Path | None, typer.Option(help="The run directory to make; runs/<utc>-<name> if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Execute a plan for real with one process per rank, measure it, and compare it with its prediction."""
    from gpipe_sim.planfile import read_plan

    plan = read_plan(plan_file)
    _need_torch("gpipe run")
    directory = _execute(plan, _run_device(device), steps=steps, warmup=warmup, timeout=timeout, out=out)
    _show_comparison(directory, directory / "report.html", as_json=as_json)


def _execute(plan: "Plan", device: str, *, steps: int, warmup: int, timeout: float, out: Path | None) -> Path:
    """Run a plan and return its run directory; a run that fails ends the command with status 1."""
    from gpipe_exec.launch import RunError, Settings, check_runnable, execute
    from gpipe_sim.runs import new_run_directory

    check_runnable(plan, device)
    if out is not None and out.exists() and any(out.iterdir()):
        raise InputError([Problem("--out", "", f"found {out} with files in it, expected a new or empty folder")])
    directory = out or new_run_directory(Path("runs"), plan.scenario.name)
    directory.mkdir(parents=True, exist_ok=True)
    settings = Settings(device=device, steps=steps, warmup=warmup, timeout=timeout)
    _say(f"running {plan.num_stages} ranks on {device}, {warmup} + {steps} steps, in {directory}")
    try:
        with _progress("steps", warmup + steps, quiet=True) as advance:
            execute(plan, directory, settings, advance)
    except RunError as error:
        print(f"gpipe: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    return directory


def _need_torch(command: str) -> None:
    if find_spec("torch") is None:
        message = "needs the package torch, expected an installation with gpipe-planner[exec]"
        raise InputError([Problem(command, "", message)])


def _run_device(device: RunDevice) -> str:
    if device is not RunDevice.AUTO:
        return str(device)
    from gpipe_exec.pipeline import default_device

    return default_device().type


@app.command()
def compare(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the comparison as one HTML page that opens offline.")
    ] = None,
) -> None:
    """Lay what was measured beside what was predicted, and say where the error comes from."""
    _show_comparison(run_directory, html, as_json=as_json)


def _show_comparison(directory: Path, html: Path | None, *, as_json: bool) -> None:
    from gpipe_sim.compare import compare_run
    from gpipe_sim.runs import load_run
    from gpipe_sim.terminal import comparison_table, make_console

    comparison = compare_run(*load_run(directory))
    _write(directory / "compare.json", json.dumps(comparison.to_dict(), indent=2), "the comparison")
    if html is not None:
        from dashboard.report import comparison_page

        _write(html, comparison_page(comparison), "report, to open in a browser")
    if as_json:
        print(json.dumps(comparison.to_dict(), indent=2))
    else:
        make_console().print(comparison_table(comparison))


# --- the rest ------------------------------------------------------------------------------------------------------


@app.command()
def profile(
    scenario_file: Annotated[
        Path | None, typer.Argument(metavar="[SCENARIO]", help="A scenario whose model to measure on this machine.")
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option("--import", metavar="FILE", help="Instead, read a profile in PipeDream's format (graph.txt)."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="With --import: samples in the profiled batch; the file does not say.")
    ] = None,
    device: Annotated[
        RunDevice, typer.Option(help="Where to measure; auto takes a GPU if there is one.")
    ] = RunDevice.AUTO,
    out: Annotated[Path, typer.Option(help="The profile file to write.")] = Path("profile.json"),
) -> None:
    """Measure what each layer of a model costs on this machine, or import such figures from elsewhere."""
    if (scenario_file is None) == (graph is None):
        raise InputError(
            [Problem("gpipe profile", "", "expected a scenario to measure or --import FILE, one of the two")]
        )
    if graph is not None:
        _import_profile(graph, batch, out)
    elif scenario_file is not None:
        _need_torch("gpipe profile")
        _measure(scenario_file, _run_device(device), out)


def _import_profile(graph: Path, batch: int | None, out: Path) -> None:
    from gpipe_sim.pipedream import import_pipedream

    if batch is None:
        raise InputError([Problem("--batch", "", "is missing: the file does not say how many samples were profiled")])
    imported = import_pipedream(graph, batch)
    _write(out, imported.to_json(), "profile, for model: {kind: profile, path: ...}")
    _summarise(imported)
    typer.echo("times of input nodes, which are those of loading data, are left out")


def _measure(scenario_file: Path, device: str, out: Path) -> None:
    from gpipe_exec.profiler import measure_profile, sizes_for
    from gpipe_sim.sweep import load_scenario

    sweep = load_scenario(scenario_file)
    if sweep[0].model.kind in ("layers", "profile"):
        message = f"a model of kind {sweep[0].model.kind} has costs but no arithmetic to measure"
        raise sweep[0].error("model.kind", message)
    sizes = sizes_for(sweep)
    num_ranks = max(scenario.plan.num_stages or 1 for scenario in sweep)
    _say(f"measuring on {device} with {num_ranks} ranks, micro-batches of {', '.join(map(str, sizes))}")
    with _progress("profiling", len(sizes), quiet=True) as advance:
        work = out.with_name(f"{out.name}.work")
        measured = measure_profile(sweep[0], sizes, num_ranks, device, work, advance)
    _write(out, measured.to_json(), "profile, for profile: ... in the scenario")
    _summarise(measured)


def _summarise(measured: "Profile") -> None:
    from gpipe_sim.units import format_bandwidth, format_bytes, format_seconds

    size = measured.sizes[-1]
    forward, backward = (format_seconds(getattr(measured.at(size), name).sum()) for name in ("forward_s", "backward_s"))
    parameters = format_bytes(measured.parameter_bytes.sum())
    typer.echo(
        f"{measured.num_layers} layers, {forward} forward and {backward} backward for {size} samples, "
        f"{parameters} of parameters"
    )
    if measured.link:
        latency = format_seconds(measured.link.latency)
        typer.echo(f"link {format_bandwidth(measured.link.bandwidth)}, latency {latency}")


@app.command()
def catalog() -> None:
    """List the devices and links that scenarios can name, with their peak figures and where they come from."""
    from rich.table import Table

    from gpipe_sim.catalog import LINKS, device_names, find_device
    from gpipe_sim.terminal import make_console
    from gpipe_sim.units import format_bandwidth, format_bytes, format_compute, format_seconds

    devices = Table("device", "memory", "bandwidth", "peak compute", "source", title="Devices", title_justify="left")
    for device in map(find_device, device_names()):
        peaks = ", ".join(f"{dtype} {format_compute(peak)}" for dtype, peak in device.compute.items())
        memory, bandwidth = format_bytes(device.memory), format_bandwidth(device.bandwidth)
        devices.add_row(device.name, memory, bandwidth, peaks, device.source)
    links = Table("link", "each direction", "typical latency", "source", title="Links", title_justify="left")
    for link in LINKS.values():
        links.add_row(link.name, format_bandwidth(link.bandwidth), format_seconds(link.latency), link.source)
    console = make_console()
    console.print(devices)
    console.print(links)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for what it makes.")] = Path("runs/demo"),
) -> None:
    """The whole loop on this machine: sweep a large model, then profile, plan, run and compare a small one."""
    from gpipe_sim.predict import fastest
    from gpipe_sim.sweep import load_scenario, shipped_scenarios
    from gpipe_sim.terminal import make_console, plan_details, results_table

    console = make_console()

    def best_of(sweep: "Sweep") -> "tuple[Prediction, list[Prediction]]":
        ((_, found),), interrupted = _predict_all([sweep])
        if interrupted:
            raise KeyboardInterrupt
        return fastest(found), found

    console.print("1. Which plan for an 8-billion-parameter transformer on one node of H100s?", style="bold")
    best, found = best_of(load_scenario(shipped_scenarios() / "demo.yaml"))
    console.print(results_table("the fastest that fits", [best], console.width))
    console.print(plan_details(best, console.width))
    _write_report(out / "report.html", found, "demo")

    console.print("\n2. How right is that on this machine? A small transformer, profiled here", style="bold")
    small, profile_file = shipped_scenarios() / "demo_cpu.yaml", (out / "profile.json").resolve()
    _measure(small, "cpu", profile_file)
    best, found = best_of(load_scenario(small, f"profile={profile_file}", "cluster.link=measured"))
    console.print(results_table("predicted from the profile", found, console.width))

    console.print(f"\n3. The fastest of them ({best.settings}), run by two processes", style="bold")
    run_directory = _execute(best.plan, "cpu", steps=6, warmup=2, timeout=60, out=None)
    _show_comparison(run_directory, run_directory / "report.html", as_json=False)
    typer.echo(f"\nopen {out / 'report.html'} and {run_directory / 'report.html'}")


def _write_report(path: Path, predictions: "Sequence[Prediction]", title: str) -> None:
    try:
        from dashboard.report import report_page
    except ModuleNotFoundError as error:
        message = f"needs the package {error.name}, expected an installation with gpipe-planner[report]"
        raise InputError([Problem("--html", "", message)]) from error
    _write(path, report_page(predictions, title), "report, to open in a browser")


def _write(path: Path, text: str, what: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise InputError([Problem(str(path), "", f"cannot be written: {error.strerror}")]) from error
    _say(f"wrote {path}: {what}")


def _say(message: str) -> None:
    print(f"gpipe: {message}", file=sys.stderr, flush=True)
