"""Start a run with torchrun, watch over it, and put together what the ranks leave behind.

The launcher ends when the run ends, and the run ends when the launcher does, whatever ends it: a worker that raises or
dies takes the others with it, one that hangs is ended after `timeout` seconds without a finished step, and Ctrl-C ends
them all. What was measured until then is kept.
"""

import errno
import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from gpipe_exec.autopsy import MARK, failure, marked, where_ranks_stand
from gpipe_exec.findings import predict_with_findings, write_prediction
from gpipe_exec.layers import WorkloadError, build_workload
from gpipe_exec.process import die_with_parent
from gpipe_exec.records import gather, steps_done
from gpipe_sim.files import InputError, Problem, write_text
from gpipe_sim.plan import Plan
from gpipe_sim.predict import predict
from gpipe_sim.runs import Measured
from gpipe_sim.scenario import Scenario


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
    mark = uuid.uuid4().hex
    logs = run / "logs"
    logs.mkdir(exist_ok=True)
    meet = ["--standalone"] if settings.endpoint is None else ["--rdzv-endpoint", settings.endpoint]
    arguments = [*meet, "--redirects", "3", "--log-dir", str(logs)]
    command = _command(plan.num_stages, arguments, run, settings)
    environment = worker_environment(plan.scenario) | {MARK: mark}
    standing: Mapping[int, str] = {}
    with open(logs / "torchrun.log", "w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C is for us, who end them
            preexec_fn=die_with_parent,
        )
        try:
            hung = _supervise(process, plan, run, settings, advance)
            if hung:
                standing = where_ranks_stand(run, plan.num_stages, mark)
        finally:
            _end(process, mark)
    failed = hung or process.returncode != 0
    try:
        plan = predict_with_findings(plan, run, settings.stretch)
        measured = gather(
            plan, run, device=settings.device, engine=settings.engine, stretch=settings.stretch, links=settings.links
        )
    except OSError as error:
        # What the ranks have written is whole: `gpipe compare` can put it together once there is room.
        raise RunError(f"{run} cannot be written: {error.strerror}; ranks keep what they measured in it") from error
    if failed:
        raise RunError(failure(run, plan.num_stages, settings.timeout, hung=hung, standing=standing))
    assert measured is not None, "a run that ended well has steps"
    return measured


def prepare(plan: Plan, run: Path, settings: Settings) -> None:
    """Write what is known before the run: everything that another machine needs to take part."""
    write_prediction(plan, run)
    write_text(run / "environment.json", json.dumps(_environment(settings), indent=2))


def commands_for_machines(plan: Plan, run: Path, settings: Settings, num_nodes: int) -> list[str]:
    """What to type on each of several machines; rank 0 is on the first, and gathers the results there."""
    if plan.num_stages % num_nodes:
        message = f"found {num_nodes} machines for {plan.num_stages} ranks, expected a number that divides them"
        raise InputError([Problem("--nodes", "", message)])
    commands = []
    for node in range(num_nodes):
        where = ["--nnodes", str(num_nodes), "--node-rank", str(node), "--rdzv-backend", "static"]
        where += ["--rdzv-endpoint", str(settings.endpoint)]
        command = _command(plan.num_stages // num_nodes, where, run, settings, python="python")
        commands.append(" ".join(f"{name}={value}" for name, value in _STEADY.items()) + " " + shlex.join(command))
    return commands


def _command(
    processes: int, arguments: Sequence[str], run: Path, settings: Settings, python: str = sys.executable
) -> list[str]:
    """torchrun with one process per rank of this machine."""
    return [
        *(python, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), *arguments),
        *("-m", "gpipe_exec.worker", str(run), "--steps", str(settings.steps), "--warmup", str(settings.warmup)),
        *("--device", settings.device, "--engine", settings.engine),
        *("--stretch", repr(settings.stretch), "--links", settings.links, "--timeout", str(settings.timeout)),
        *(["--reprofile"] if settings.reprofile else []),
    ]


_STEADY = {
    "OMP_NUM_THREADS": "1",
    # Keep freed memory for the next step, instead of giving it back and faulting it in again page by page.
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**36),
    "MALLOC_TOP_PAD_": str(2**26),
}


def worker_environment(scenario: Scenario) -> dict[str, str]:
    """This process's, with one thread per rank and a steady allocator unless set otherwise, and the user's own modules
    to be found."""
    beside = str(Path(scenario.document.file).resolve().parent)
    path = os.pathsep.join(filter(None, [beside, os.environ.get("PYTHONPATH")]))
    return _STEADY | os.environ | {"PYTHONPATH": path}


def _supervise(
    process: "subprocess.Popen[bytes]", plan: Plan, run: Path, settings: Settings, advance: Callable[[], None]
) -> bool:
    """Wait for the end, reporting progress; True if it was not to be expected any more."""
    done, last = 0, time.monotonic()
    step_s = 2.0 * predict(plan).step_time_s * settings.stretch if settings.device == "rehearse" else 0.0
    patience = settings.timeout + step_s + 30.0  # to start up
    while True:
        ended = process.poll() is not None
        now_done = min(steps_done(run, plan.num_stages))
        for _ in range(now_done - done):
            advance()
            last, patience = time.monotonic(), settings.timeout + step_s
        done = max(done, now_done)
        if ended or time.monotonic() - last > patience:
            return not ended
        time.sleep(0.1)


def _end(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Leave no process of the run behind: ask torchrun first, then kill whatever carries the run's mark."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pid in marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


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
    problems = [Problem("torch", "", "has no distributed support, expected a build with it")]
    if dist.is_available():
        problems = [*_device_problems(plan, settings, num_machines), *_endpoint_problems(settings.endpoint)]
        if settings.device != "rehearse":
            problems += _model_problems(plan)
        if settings.engine == "torch":
            from gpipe_exec.torch_engine import what_torch_cannot

            problems += [Problem("--engine torch", "", reason) for reason in what_torch_cannot(plan, settings.device)]
    if problems:
        raise InputError(problems)


def _device_problems(plan: Plan, settings: Settings, num_machines: int) -> Iterator[Problem]:
    device, profile = settings.device, plan.profile
    if device == "cuda" and num_machines == 1 and torch.cuda.device_count() < plan.num_stages:
        message = f"found {torch.cuda.device_count()} GPUs for a plan of {plan.num_stages} ranks, expected one for each"
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
            layers = build_workload(plan.scenario).layers
    except WorkloadError as error:
        yield document.problem(("model",), str(error))
        return
    except (RuntimeError, NotImplementedError):  # a model that needs real tensors is checked when it runs
        return
    if len(layers) != plan.profile.num_layers:
        message = f"has {len(layers)} layers, but the plan was made for {plan.profile.num_layers}"
        yield document.problem(("model",), message)
    elif plan.profile.source == "measured":
        for index, layer in enumerate(layers):
            found = sum(parameter.numel() * parameter.element_size() for parameter in layer.parameters())
            profiled = plan.profile.parameter_bytes[index]
            if found != profiled:
                message = f"layer {index} has {found} bytes of parameters, but the profile's has {profiled:.0f}"
                yield document.problem(("profile",), f"was made for another model: {message}")
                return
