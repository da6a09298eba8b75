"""Start the ranks of a run, watch over it, and put together what the ranks leave behind.

The launcher ends when the run ends, and the run ends when the launcher does, whatever ends it: a worker that raises or
dies takes the others with it, one that hangs is ended after `timeout` seconds without a finished step, and Ctrl-C ends
them all. What was measured until then is kept.
"""

import errno
import json
import os
import platform
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gpipe_exec.alternatives.rehearsal import refuse_rehearsal
from gpipe_exec.devices.accelerator import num_accelerators
from gpipe_exec.devices.autopsy import BUILD_S, beats_of, failure, where_ranks_stand
from gpipe_exec.devices.environment import STEADY, worker_environment
from gpipe_exec.devices.supervision import FIRST_S, STARTING_S, Watched, ranks_of_this_machine
from gpipe_exec.engine.precision import DTYPES
from gpipe_exec.engine.shards import refuse_shards
from gpipe_exec.engine.slices import refuse_tensor
from gpipe_exec.layers import WorkloadError, build_workload, parameter_bytes
from gpipe_exec.run.findings import predict_with_findings, write_prediction
from gpipe_exec.run.records import gather, has_finished, steps_done
from gpipe_sim.base.files import InputError, Problem, write_text
from gpipe_sim.cost.collectives import sliced_layers
from gpipe_sim.explain.predict import predict
from gpipe_sim.plan.plan import Plan, only_one_pipeline, only_single_members, only_what_runs
from gpipe_sim.runs.directory import Measured
from gpipe_sim.scenario.schema import PythonModel, Transformer


class RunError(RuntimeError):
    """The run failed; the message says which rank, and why."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to run."""

    device: str = "cpu"
    engine: str = "gpipe"
    steps: int = 10
    warmup: int = 3
    timeout: float = 30.0
    """Seconds without progress after which a run counts as hung, beyond what a rehearsed step takes."""
    stretch: float = 1.0
    """How many times slower than the plan a rehearsal runs."""
    links: str = "plan"
    """A rehearsal's messages: `plan`, small and delivered at the pace of the plan's links; `real`, whole and as they
    come."""
    reprofile: bool = False
    """Whether to time the layers between the steps, and to predict from that."""
    endpoint: str | None = None
    """host:port where the ranks meet; a free port of this machine if left out."""


def execute(plan: Plan, run: Path, settings: Settings, advance: Callable[[], None] = lambda: None) -> Measured:
    """Execute the plan on this machine and fill its run directory; `advance` is called for every finished step."""
    prepare(plan, run, settings)
    logs = run / "logs"
    logs.mkdir(exist_ok=True)
    standing: Mapping[int, str] = {}
    worker, environment = _worker(run, settings), worker_environment(plan.scenario)
    fork, endpoint = settings.device != "cuda", settings.endpoint
    with ranks_of_this_machine(plan.world, worker, logs, environment, fork=fork, endpoint=endpoint) as watched:
        hung = _supervise(watched, plan, run, settings, advance)
        if hung:
            standing = where_ranks_stand(run, plan.world, watched.ranks())
    finished = [has_finished(run, rank) for rank in range(plan.world)]
    failed = hung or watched.process.returncode != 0 or not all(finished)  # all of them may leave early, with status 0
    try:
        plan = predict_with_findings(plan, run, settings.stretch)
        measured = gather(
            plan, run, device=settings.device, engine=settings.engine, stretch=settings.stretch, links=settings.links
        )
    except OSError as error:
        # What the ranks have written is whole: `gpipe compare` can put it together once there is room.
        raise RunError(f"{run} cannot be written: {error.strerror}; ranks keep what they measured in it") from error
    if failed or measured is None:
        hang = f"no step finished for {settings.timeout:g} s" if hung else None
        told = failure(run, finished, ended=watched.ended, hung=hang, standing=standing)
        ending = f"{min(steps_done(run, plan.world))} steps had finished; its logs are in {logs}"
        raise RunError(f"{told}{'' if told.endswith(chr(10)) else '; '}{ending}")
    return measured


def prepare(plan: Plan, run: Path, settings: Settings) -> None:
    """Write what is known before the run: everything that another machine needs to take part."""
    write_prediction(plan, run)
    write_text(run / "environment.json", json.dumps(_environment(settings), indent=2))


def commands_for_machines(plan: Plan, run: Path, settings: Settings, num_nodes: int) -> list[str]:
    """What to type on each of several machines; rank 0 is on the first, and gathers the results there."""
    if plan.world % num_nodes:
        message = f"found {num_nodes} machines for {plan.world} ranks, expected a number that divides them"
        raise InputError([Problem("--nodes", "", message)])
    commands = []
    for node in range(num_nodes):
        where = ["--nnodes", str(num_nodes), "--node-rank", str(node), "--rdzv-backend", "static"]
        where += ["--rdzv-endpoint", str(settings.endpoint)]
        where += ["--rdzv-conf", f"timeout={settings.timeout + FIRST_S:.0f}"]  # to wait for each other at the start
        command = ["python", "-m", "gpipe_exec.run.machine", "--nproc-per-node", str(plan.world // num_nodes)]
        command += [*where, "-m", *_worker(run, settings)]
        commands.append(" ".join(f"{name}={value}" for name, value in STEADY.items()) + " " + shlex.join(command))
    return commands


def _worker(run: Path, settings: Settings) -> list[str]:
    """The module that a rank runs, and its arguments."""
    return [
        *("gpipe_exec.run.worker", str(run), "--steps", str(settings.steps), "--warmup", str(settings.warmup)),
        *("--device", settings.device, "--engine", settings.engine),
        *("--stretch", repr(settings.stretch), "--links", settings.links, "--timeout", str(settings.timeout)),
        *(["--reprofile"] if settings.reprofile else []),
    ]


def _supervise(watched: Watched, plan: Plan, run: Path, settings: Settings, advance: Callable[[], None]) -> bool:
    """Wait for the end, reporting progress; True if it was not to be expected any more."""
    done, last, place = 0, time.monotonic(), _place(run)
    step_s = 2.0 * predict(plan).step_time_s * settings.stretch if settings.device == "rehearse" else 0.0
    patience, began, cpu_s, built = settings.timeout + step_s + FIRST_S, last, 0.0, False
    while True:
        ended = watched.wait(0.1)
        if _place(run) != place:
            raise RunError(f"{run} is gone, or another folder is in its place; {done} steps had finished")
        now_done = min(steps_done(run, plan.world))
        for _ in range(now_done - done):
            advance()
            last, patience = time.monotonic(), settings.timeout + step_s
        done = max(done, now_done)
        if done == 0 and not built and beats_of(run) >= plan.world:
            built, began = True, time.monotonic()
        if (
            done == 0
            and watched.cpu_s() > cpu_s + 0.5
            and time.monotonic() - began < (STARTING_S if built else BUILD_S)
        ):
            last, cpu_s = time.monotonic(), watched.cpu_s()  # importing and building, however slow the machine is
        if ended or time.monotonic() - last > patience:
            return not ended


def _place(run: Path) -> tuple[int, int] | None:
    """Equal as long as it is the same folder."""
    try:
        found = run.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


# --- before anything starts ----------------------------------------------------------------------------------------


def _environment(settings: Settings) -> dict[str, object]:
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **asdict(settings),
    }


def check_runnable(plan: Plan, settings: Settings, num_machines: int = 1) -> None:
    """Refuse what cannot work before anything starts. Of other machines nothing is known."""
    only_what_runs(plan, "gpipe run")
    if settings.engine == "torch":
        only_one_pipeline(plan, "--engine torch")
        only_single_members(plan, "--engine torch")
    if settings.device == "rehearse":
        refuse_rehearsal(plan)
    else:
        refuse_shards(plan)
        refuse_tensor(plan)
    problems = [Problem("torch", "", "has no distributed support, expected a build with it")]
    if dist.is_available():
        problems = [*_device_problems(plan, settings, num_machines), *_endpoint_problems(settings.endpoint)]
        # What only prints commands for other machines executes nothing that a scenario names.
        if settings.device != "rehearse" and (num_machines == 1 or not isinstance(plan.scenario.model, PythonModel)):
            problems += _model_problems(plan)
        if settings.engine == "torch":
            from gpipe_exec.alternatives.torch_engine import what_torch_cannot

            problems += [Problem("--engine torch", "", reason) for reason in what_torch_cannot(plan, settings.device)]
    if problems:
        raise InputError(problems)


def _device_problems(plan: Plan, settings: Settings, num_machines: int) -> Iterator[Problem]:
    device, profile = settings.device, plan.profile
    if device == "cuda" and num_machines == 1 and num_accelerators() < plan.world:
        message = f"found {num_accelerators()} GPUs for a plan of {plan.world} ranks, expected one for each"
        yield Problem("--device cuda", "", message)
    if device in ("cpu", "cuda") and profile.source == "measured" and profile.device != device:
        message = f"was measured on {profile.device}, but the run is on {device}, expected one measured there"
        yield plan.scenario.document.problem(("profile",), message)


def _endpoint_problems(endpoint: str | None) -> Iterator[Problem]:
    """A port of this machine must be free; of another machine nothing is known."""
    if endpoint is None:
        return
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        yield Problem("--rdzv-endpoint", "", f"found {endpoint!r}, expected host:port such as node0:29500")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                yield Problem("--rdzv-endpoint", "", f"port {port} of {host} is in use, expected a free one")


def _model_problems(plan: Plan) -> Iterator[Problem]:
    """The model must be the one that the plan's profile was made for."""
    document = plan.scenario.document
    try:
        with torch.device("meta"):  # shapes only: no memory, no time
            layers = build_workload(plan.scenario, on_meta=True).layers
    except WorkloadError as error:
        yield document.problem(("model",), str(error))
        return
    except (RuntimeError, NotImplementedError):  # a model that needs real tensors is checked when it runs
        return
    if len(layers) != plan.profile.num_layers:
        message = f"has {len(layers)} layers, but the plan was made for {plan.profile.num_layers}"
        yield document.problem(("model",), message)
    elif plan.profile.source == "measured":
        for index, found in enumerate(_held_bytes(layers, plan)):
            profiled = plan.profile.parameter_bytes[index]
            if found != profiled:
                message = f"layer {index} has {found} bytes of parameters, but the profile's has {profiled:.0f}"
                yield document.problem(("profile",), f"was made for another model: {message}")
                return


def _held_bytes(layers: nn.Sequential, plan: Plan) -> list[int]:
    """Of each layer's weights on one process."""
    model, scenario = plan.scenario.model, plan.scenario
    if plan.tensor == 1 or not isinstance(model, Transformer):
        return [parameter_bytes(layer, scenario) for layer in layers]
    word = DTYPES[scenario.dtype].itemsize
    slices = sliced_layers(model, scenario.dtype, plan.tensor, sequence=scenario.plan.sequence_split)
    return [one.layer.parameters * word for one in slices]
