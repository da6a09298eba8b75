"""`gpipe profile`: measure what each layer costs on this machine, or import such figures from elsewhere."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpipe_sim.base.files import InputError, Problem
from gpipe_sim.commands.common import need_torch, progress, say, scenario_argument, write
from gpipe_sim.commands.run import RunDevice, run_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpipe_sim.cost.profile import Profile
    from gpipe_sim.scenario.schema import Scenario


class ProfileDevice(StrEnum):
    """Where layers can be measured."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def profile(
    scenario_file: Annotated[
        Path | None,
        scenario_argument("A scenario whose model to measure on this machine, by file or name.", "[SCENARIO]"),
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
    one_by_one: Annotated[
        bool | None,
        typer.Option(
            "--one-by-one/--together",
            help="One layer at a time on the device, each kind once, so that a model may be larger than the device; or "
            "all layers at once. Left out: one by one on GPUs, together on a CPU.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds without any measurement after which to give up.")
    ] = 120,
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
        measure(scenario_file, run_device(RunDevice(device)), out, timeout, one_by_one=one_by_one)


def _import_profile(graph: Path, batch: int | None, out: Path) -> None:
    from gpipe_sim.cost.pipedream import import_pipedream

    if batch is None:
        raise InputError([Problem("--batch", "", "is missing: the file does not say how many samples were profiled")])
    imported = import_pipedream(graph, batch)
    write(out, imported.to_json(), "profile, for model: {kind: profile, path: ...}")
    _summarise(imported)
    typer.echo("times of input nodes, which are those of loading data, are left out")


def measure(
    scenario_file: Path, device: str, out: Path, timeout: float = 120, *, one_by_one: bool | None = None
) -> None:
    """Measure the scenario's model with as many ranks as its plans have at most, and write its profile.

    On GPUs there are no more ranks than GPUs: one is enough to measure layers, two are to measure their link.
    """
    from gpipe_exec.devices.accelerator import num_accelerators
    from gpipe_exec.measure.profiler import MeasureError, measure_profile, sizes_for
    from gpipe_sim.scenario.reading import load_scenario

    sweep = load_scenario(scenario_file)
    if sweep[0].model.kind in ("layers", "profile"):
        message = f"a model of kind {sweep[0].model.kind} has costs but no arithmetic to measure"
        raise sweep[0].error("model.kind", message)
    sizes = sizes_for(sweep)
    T = _members(sweep)
    num_ranks = T * max(
        -(-(scenario.plan.num_stages or 1) // scenario.plan.num_per_rank) * scenario.plan.replicas for scenario in sweep
    )
    if device != "cpu":
        if num_accelerators() < T > 1:
            raise sweep[0].error(
                "plan.tensor", f"found {T}, expected at most the {num_accelerators()} GPUs that are here"
            )
        num_ranks = max(T, min(num_ranks, num_accelerators() // T * T))
    alone = device != "cpu" and T == 1 if one_by_one is None else one_by_one
    if alone and T > 1:
        message = f"measures layers alone, expected --together with plan.tensor {T}: a group holds its layers at once"
        raise InputError([Problem("--one-by-one", "", message)])
    how = ", layers one by one" if alone else ""
    say(f"measuring on {device} with {num_ranks} ranks, micro-batches of {', '.join(map(str, sizes))}{how}")
    try:
        with progress("profiling", len(sizes), quiet=True) as advance:
            work = out.with_name(f"{out.name}.work")
            measured = measure_profile(sweep[0], sizes, num_ranks, device, work, advance, timeout, one_by_one=alone)
    except MeasureError as error:
        print(f"gpipe: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    write(out, measured.to_json(), "profile, for profile: ... in the scenario")
    _summarise(measured)


def _members(sweep: "Sequence[Scenario]") -> int:
    """T, of which a profile has one."""
    from gpipe_exec.engine.slices import refuse_tensor_of

    kinds = {(scenario.plan.tensor, scenario.plan.tensor > 1 and scenario.plan.sequence_split) for scenario in sweep}
    if len(kinds) > 1:
        found = ", ".join(str(T) for T in sorted({T for T, _ in kinds}))
        message = f"found {found}, expected one, and one sequence_split: a profile is measured for one of each"
        raise sweep[0].error("plan.tensor", message)
    for scenario in sweep:
        refuse_tensor_of(scenario)
    return sweep[0].plan.tensor


def _summarise(measured: "Profile") -> None:
    import numpy as np

    from gpipe_sim.base.units import format_bandwidth, format_bytes, format_seconds

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
