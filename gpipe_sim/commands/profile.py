"""`gpipe profile`: measure what each layer costs on this machine, or import such figures from elsewhere."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from gpipe_sim.commands.common import need_torch, progress, say, write
from gpipe_sim.commands.run import RunDevice, run_device
from gpipe_sim.files import InputError, Problem

if TYPE_CHECKING:
    from gpipe_sim.profile import Profile


class ProfileDevice(StrEnum):
    """Where layers can be measured."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


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
        ProfileDevice, typer.Option(help="Where to measure; auto takes a GPU if there is one.")
    ] = ProfileDevice.AUTO,
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
        need_torch("gpipe profile")
        measure(scenario_file, run_device(RunDevice(device)), out)


def _import_profile(graph: Path, batch: int | None, out: Path) -> None:
    from gpipe_sim.pipedream import import_pipedream

    if batch is None:
        raise InputError([Problem("--batch", "", "is missing: the file does not say how many samples were profiled")])
    imported = import_pipedream(graph, batch)
    write(out, imported.to_json(), "profile, for model: {kind: profile, path: ...}")
    _summarise(imported)
    typer.echo("times of input nodes, which are those of loading data, are left out")


def measure(scenario_file: Path, device: str, out: Path) -> None:
    """Measure the scenario's model with as many ranks as its plans have at most, and write its profile."""
    from gpipe_exec.profiler import measure_profile, sizes_for
    from gpipe_sim.sweep import load_scenario

    sweep = load_scenario(scenario_file)
    if sweep[0].model.kind in ("layers", "profile"):
        message = f"a model of kind {sweep[0].model.kind} has costs but no arithmetic to measure"
        raise sweep[0].error("model.kind", message)
    sizes = sizes_for(sweep)
    num_ranks = max(scenario.plan.num_stages or 1 for scenario in sweep)
    say(f"measuring on {device} with {num_ranks} ranks, micro-batches of {', '.join(map(str, sizes))}")
    with progress("profiling", len(sizes), quiet=True) as advance:
        work = out.with_name(f"{out.name}.work")
        measured = measure_profile(sweep[0], sizes, num_ranks, device, work, advance)
    write(out, measured.to_json(), "profile, for profile: ... in the scenario")
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
    if measured.spread is not None:
        typer.echo(f"half of all times of a layer lie within {float(np.median(measured.spread)):.1%} of each other")
    if measured.link:
        latency = format_seconds(measured.link.latency)
        typer.echo(f"link {format_bandwidth(measured.link.bandwidth)}, latency {latency}")
    if measured.source == "measured":
        action, hop = (format_seconds(s) for s in (measured.action_overhead_s, measured.hop_overhead_s))
        typer.echo(f"the engine itself takes {action} per action and {hop} per hop")
