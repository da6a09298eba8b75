"""Start a run with torchrun, watch over it, and put together what the ranks leave behind.

The launcher ends when the run ends, and the run ends when the launcher does: a worker that raises or dies takes the
others with it, one that hangs is ended after `timeout` seconds without a finished step, and Ctrl-C ends them all. What
was measured until then is kept.
"""

import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gpipe_exec.layers import WorkloadError, build_workload
from gpipe_sim.files import InputError, Problem, write_text
from gpipe_sim.plan import Plan
from gpipe_sim.planfile import save_plan
from gpipe_sim.predict import predict
from gpipe_sim.runs import Measured, save_measured
from gpipe_sim.scenario import Scenario
from gpipe_sim.schedule import Action, gradient_takers, rank_actions, sender_of
from gpipe_sim.step import RankTimeline, Step
from gpipe_sim.trace import to_trace

_MARK = "GPIPE_RUN_ID"
"""In the environment of every process of a run, so that none can be missed when it ends."""


class RunError(RuntimeError):
    """The run failed; the message says which rank, and why."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to run."""

    device: str = "cpu"
    steps: int = 10
    warmup: int = 3
    timeout: float = 30.0
    """Seconds without progress after which a run counts as hung."""


def execute(plan: Plan, run: Path, settings: Settings, advance: Callable[[], None] = lambda: None) -> Measured:
    """Execute the plan on this machine and fill its run directory; `advance` is called for every finished step."""
    save_plan(plan, run / "plan.yaml")
    write_text(run / "predicted.json", json.dumps(predict(plan).to_dict(), indent=2))
    write_text(run / "environment.json", json.dumps(_environment(settings), indent=2))
    mark = uuid.uuid4().hex
    logs = run / "logs"
    logs.mkdir()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.num_stages)),
        *("--redirects", "3", "--log-dir", str(logs), "-m", "gpipe_exec.worker", str(run)),
        *("--steps", str(settings.steps), "--warmup", str(settings.warmup)),
        *("--device", settings.device, "--timeout", str(settings.timeout)),
    ]
    environment = worker_environment(plan.scenario) | {_MARK: mark}
    with open(logs / "torchrun.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            hung = _supervise(process, plan, run, settings, advance)
        finally:
            _end(process, mark)
    measured = _gather(plan, run, settings)
    if hung or process.returncode != 0:
        raise RunError(_failure(plan, run, settings, hung=hung))
    assert measured is not None, "a run that ended well has steps"
    return measured


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
    patience = settings.timeout + 30.0  # to start up
    while process.poll() is None:
        now_done = min((_done(run, rank) for rank in range(plan.num_stages)), default=0)
        for _ in range(now_done - done):
            advance()
            last, patience = time.monotonic(), settings.timeout
        done = max(done, now_done)
        if time.monotonic() - last > patience:
            return True
        time.sleep(0.1)
    for _ in range(min((_done(run, rank) for rank in range(plan.num_stages)), default=0) - done):
        advance()
    return False


def _done(run: Path, rank: int) -> int:
    record = _record(run, rank)
    return int(record["done"]) if record else 0


def _record(run: Path, rank: int) -> dict[str, Any] | None:
    path = run / "ranks" / f"rank{rank}.json"
    return dict(json.loads(path.read_text())) if path.is_file() else None


def _end(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Leave no process of the run behind: ask torchrun first, then kill whatever carries the run's mark."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pid in _marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _marked(mark: str) -> list[int]:
    """Processes with this run's mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{_MARK}={mark}".encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def _failure(plan: Plan, run: Path, settings: Settings, *, hung: bool) -> str:
    """Which rank failed and why, in the words of its own traceback."""
    errors = {rank: run / "ranks" / f"rank{rank}.error" for rank in range(plan.num_stages)}
    written = [rank for rank, path in errors.items() if path.is_file()]
    # A rank whose neighbour died also fails, when its connection breaks: the first to write is the cause.
    first = min(written, key=lambda rank: errors[rank].stat().st_mtime_ns, default=None)
    kept = min((_done(run, rank) for rank in range(plan.num_stages)), default=0)
    ending = f"{kept} steps had finished; its logs are in {run / 'logs'}"
    if first is not None:
        return f"rank {first} failed:\n{errors[first].read_text()}{ending}"
    if hung:
        slowest = min(range(plan.num_stages), key=lambda rank: _done(run, rank))
        return f"no step finished for {settings.timeout:g} s, rank {slowest} is the furthest behind; {ending}"
    log = (run / "logs" / "torchrun.log").read_text()
    told = [line.strip() for line in log.splitlines() if "exitcode" in line or "Signal" in line or "rank" in line]
    return f"a worker was killed ({'; '.join(told[:4]) or 'torchrun did not say which'}); {ending}"


# --- what the ranks left -------------------------------------------------------------------------------------------


def _gather(plan: Plan, run: Path, settings: Settings) -> Measured | None:
    """The steps that every rank has recorded, written to measured.json with a trace of the median one."""
    records = [_record(run, rank) for rank in range(plan.num_stages)]
    columns = [list(record["steps"]) if record else [] for record in records]
    num_steps = min(map(len, columns))
    if num_steps == 0:
        return None
    steps = tuple(_step(plan, [rank_steps[index] for rank_steps in columns]) for index in range(num_steps))
    peaks = [record.get("peak_memory_bytes") if record else None for record in records]
    measured = Measured(
        device=settings.device,
        engine="gpipe",
        steps=steps,
        peak_memory_bytes=tuple(peak for peak in peaks if peak) if all(peaks) else None,
    )
    save_measured(measured, run / "measured.json")
    times = [max(float(timeline.end_s[-1]) for timeline in step.ranks) for step in steps]
    typical = steps[int(np.argsort(times)[(len(times) - 1) // 2])]
    for timeline in typical.ranks:
        write_text(run / "traces" / f"rank{timeline.rank}_trace.json", to_trace(Step(ranks=(timeline,))))
    return measured


def _step(plan: Plan, records: list[dict[str, list[float]]]) -> Step:
    """One step from the ranks' records; time counts from its first action, on this machine's one clock."""
    origin = min(record["start"][0] for record in records)
    actions = rank_actions(plan)
    delivered = {
        action: record["delivered"][row] - origin
        for found, record in zip(actions, records, strict=True)
        for row, action in enumerate(found)
    }
    timelines = []
    for position, (found, record) in enumerate(zip(actions, records, strict=True)):
        start, end = (np.array(record[name]) - origin for name in ("start", "end"))
        sent = np.array([delivered[action] for action in found])
        timelines.append(
            RankTimeline(
                rank=plan.ranks[position],
                stage=found[0].stage,
                actions=found,
                start_s=start,
                end_s=end,
                # The sender notes a delivery a little after the receiver may have begun to compute with it.
                arrived_s=np.minimum([_arrival(plan, action, delivered) for action in found], start),
                send_start_s=np.where(np.isnan(sent), math.nan, end),
                send_end_s=sent,
                blocking=not plan.scenario.cluster.overlap,
            )
        )
    return Step(ranks=tuple(timelines))


def _arrival(plan: Plan, action: Action, delivered: dict[Action, float]) -> float:
    """When the message that the action takes had been delivered; NaN if it takes none."""
    takes = action.kind == "F" or (
        action.kind != "U" and gradient_takers(plan, action.stage)[action.microbatch] == action.kind
    )
    return delivered.get(sender_of(action), math.nan) if takes else math.nan


def _environment(settings: Settings) -> dict[str, object]:
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": settings.device,
        "steps": settings.steps,
        "warmup": settings.warmup,
    }


def check_runnable(plan: Plan, device: str) -> None:
    """Refuse what cannot work before anything starts: too few GPUs, no arithmetic, a model of other layers."""
    problems = []
    if not dist.is_available():
        problems.append(Problem("torch", "", "has no distributed support, expected a build with it"))
    if device == "cuda" and torch.cuda.device_count() < plan.num_stages:
        message = f"found {torch.cuda.device_count()} GPUs for a plan of {plan.num_stages} ranks, expected one for each"
        problems.append(Problem("--device cuda", "", message))
    try:
        with torch.device("meta"):  # shapes only: no memory, no time
            found = len(build_workload(plan.scenario).layers)
        if found != plan.profile.num_layers:
            message = f"has {found} layers, but the plan was made for {plan.profile.num_layers}"
            problems.append(plan.scenario.document.problem(("model",), message))
    except WorkloadError as error:
        problems.append(plan.scenario.document.problem(("model",), str(error)))
    except (RuntimeError, NotImplementedError):  # a model that needs real tensors is checked when it runs
        pass
    if problems:
        raise InputError(problems)
