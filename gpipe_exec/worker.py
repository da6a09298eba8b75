"""One rank of a run, started by torchrun: builds its stage, runs the steps, leaves its records.

    python -m torch.distributed.run ... -m gpipe_exec.worker RUN_DIR --steps 10 --warmup 3 --device cpu

The plan is RUN_DIR/plan.yaml. What a rank measures, and the traceback of its failure, lie in RUN_DIR/ranks, a file per
rank, written whole.
"""

import argparse
import contextlib
import json
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from gpipe_exec.allocator import storage_bytes, trace_bytes
from gpipe_exec.autopsy import Watchdog, answer_where
from gpipe_exec.calibrate import calibrate
from gpipe_exec.clocks import clock_offset
from gpipe_exec.delivery import Acknowledged, SentAside
from gpipe_exec.findings import OVERHEADS, TIMES, predict_with_findings
from gpipe_exec.layers import Workload, build_workload
from gpipe_exec.messages import PeerToPeer, Transport, Value, flatten
from gpipe_exec.pipeline import Pipeline, default_device, pin_to_cores
from gpipe_exec.process import die_with_parent, leave, take_turns
from gpipe_exec.recorder import Recorder
from gpipe_exec.records import MemoryRecord, RankRecord, gather
from gpipe_exec.rehearsal import PacedTransport, rehearsed_workload
from gpipe_exec.timing import LayerTimer, layer_clock
from gpipe_sim.files import write_text
from gpipe_sim.plan import Plan
from gpipe_sim.planfile import load_plan
from gpipe_sim.scenario import Optimizer

OPTIMIZERS: dict[Optimizer, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
}


def main() -> None:
    """Parse the arguments and run; a failure is written down before it is raised."""
    arguments = make_parser().parse_args()
    die_with_parent()
    rank = int(os.environ["RANK"])
    try:
        answer_where(arguments.run, rank)
        _run(arguments, load_plan(arguments.run / "plan.yaml"), rank)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            with contextlib.suppress(OSError):  # a full disk, perhaps the cause: the launcher will find it full, too
                write_text(arguments.run / "ranks" / f"rank{rank}.error", traceback.format_exc())
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    leave()


def make_parser() -> argparse.ArgumentParser:
    """The worker's own command line, which the launcher writes."""
    parser = argparse.ArgumentParser(prog="gpipe_exec.worker", description="one rank of a run, under torchrun")
    parser.add_argument("run", type=Path, help="the run directory, with its plan.yaml")
    parser.add_argument("--steps", type=int, required=True, help="steps to measure")
    parser.add_argument("--warmup", type=int, required=True, help="steps before them")
    parser.add_argument("--device", choices=["cpu", "cuda", "rehearse"], required=True)
    parser.add_argument("--engine", choices=["gpipe", "torch"], default="gpipe")
    parser.add_argument("--stretch", type=float, default=1.0, help="how many times slower than the plan to rehearse")
    parser.add_argument("--links", choices=["plan", "real"], default="plan", help="whose pace rehearsed messages have")
    parser.add_argument("--reprofile", action="store_true", help="time the layers between the steps")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds without a step after which to give up")
    return parser


class Engine(Protocol):
    """What executes a plan's steps on this rank."""

    @property
    def module(self) -> nn.Module:
        """This rank's layers."""

    @property
    def is_first(self) -> bool:
        """Whether this rank takes the inputs."""

    def step(self, inputs: Value, targets: Any, update: Callable[[], object] | None = None) -> torch.Tensor:
        """One mini-batch, forward and backward, and the update as soon as it can be."""

    def close(self) -> None:
        """Let go of threads."""


class _Job(NamedTuple):
    """What one rank repeats."""

    workload: Workload
    engine: Engine
    inputs: Value
    targets: Any
    update: Callable[[], None]
    state: Callable[[], list[torch.Tensor]]
    """The optimizer's tensors."""

    def step(self) -> None:
        dist.barrier()
        self.engine.step(self.inputs, self.targets, self.update)


def _run(arguments: argparse.Namespace, plan: Plan, rank: int) -> None:
    device = default_device() if arguments.device == "cuda" else torch.device("cpu")
    shares_core = arguments.device == "cpu" and pin_to_cores()
    if arguments.device == "cuda":
        torch.cuda.set_device(device)
    if shares_core:
        take_turns(short=True)  # the threads that carry messages, which are started from here on
    # The launcher notices a hang first; this is for the case that the launcher is gone.
    patience = timedelta(seconds=arguments.timeout + 30)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
    if arguments.device == "rehearse":
        overheads = calibrate(plan.link(0) if arguments.links == "real" and plan.num_stages > 1 else None, asleep=True)
        if rank == 0:
            write_text(arguments.run / OVERHEADS, json.dumps(overheads._asdict()))
    recorder = Recorder(device)
    job = _make_job(arguments, plan, device, recorder)
    if shares_core:
        take_turns(short=False)
    now = layer_clock(device, shares_core=shares_core)
    layer_times = _LayerTimes(job, plan, device, now) if arguments.reprofile else None
    record = RankRecord(rank=rank, clock=[clock_offset(device)])
    # No launcher sees all machines: each rank watches itself.
    alone = dist.get_world_size() > int(os.environ["LOCAL_WORLD_SIZE"])
    watchdog = Watchdog(arguments.run, rank, arguments.timeout) if alone else None
    for step in range(arguments.warmup + arguments.steps):
        recorder.enabled = step >= arguments.warmup
        if layer_times:
            layer_times.measure(counts=recorder.enabled)
        job.step()
        record.done, record.steps = step + 1, recorder.steps
        record.save(arguments.run)
        if watchdog:
            watchdog.step_finished()
    if watchdog:
        watchdog.stop()
    record.clock.append(clock_offset(device))
    if layer_times:
        layer_times.save(arguments.run)
    record.memory = _watch_memory(job, device, recorder)
    record.save(arguments.run)
    job.engine.close()
    if alone:
        _gather_from_machines(arguments, plan, record)


def _make_job(arguments: argparse.Namespace, plan: Plan, device: torch.device, recorder: Recorder) -> _Job:
    def carry(direct: PeerToPeer, edge: int) -> Transport:
        if arguments.links == "plan":
            return PacedTransport(direct, plan.link(edge), arguments.stretch)
        return SentAside(direct) if plan.scenario.cluster.overlap else Acknowledged(SentAside(direct))

    engine: Engine
    if arguments.device == "rehearse":
        stage = plan.placement.index(plan.ranks[dist.get_rank()])
        workload, update = rehearsed_workload(plan, stage, arguments.stretch, began=lambda: recorder.latest_s)
        engine = Pipeline(
            workload.layers,
            plan,
            workload.loss,
            device=device,
            recorder=recorder,
            carry=carry,
        )
        return _Job(workload, engine, *workload.sample(plan.scenario.batch), update, list)
    workload = build_workload(plan.scenario)
    if arguments.engine == "torch":
        from gpipe_exec.torch_engine import TorchPipeline

        engine = TorchPipeline(workload, plan, device=device, recorder=recorder)
    else:
        engine = Pipeline(workload.layers, plan, workload.loss, device=device, recorder=recorder)
    parameters = list(engine.module.parameters())
    optimizer = OPTIMIZERS[plan.scenario.optimizer](parameters) if parameters else None

    def step() -> None:
        if optimizer:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state() -> list[torch.Tensor]:
        values = [value for entry in (optimizer.state if optimizer else {}).values() for value in entry.values()]
        return [value for value in values if isinstance(value, torch.Tensor)]

    return _Job(workload, engine, *workload.sample(plan.scenario.batch), step, state)


class _LayerTimes:
    """What the layers of this rank's stage cost, timed in turns with the steps.

    Where cores drift, a profile taken minutes ago says what they were. Timed between the steps, layers and steps meet
    the same machine, and what is left between prediction and measurement is the model's own error.
    """

    def __init__(self, job: _Job, plan: Plan, device: torch.device, now: Callable[[], float]) -> None:
        self._job, self._num_microbatches = job, plan.num_microbatches
        share = range(plan.profile.num_layers)[plan.stages[plan.placement.index(plan.ranks[dist.get_rank()])]]
        self._timers = {
            size: LayerTimer(job.workload, share, size, plan.num_microbatches, device, now)
            for size in sorted({*plan.sizes})
        }

    def measure(self, *, counts: bool) -> None:
        """About as many micro-batches as a step has, for each of their sizes."""
        for timer in self._timers.values():
            before = len(timer.passes)
            for _ in range(-(-self._num_microbatches // timer.in_a_row)):
                timer.measure()
            if not counts:
                del timer.passes[before:]
        self._job.engine.module.zero_grad(set_to_none=True)

    def save(self, run: Path) -> None:
        """Size -> columns, over all ranks."""
        found = {size: timer.columns() for size, timer in self._timers.items()}
        if dist.get_rank() == 0:
            write_text(run / TIMES, json.dumps(found))


def _watch_memory(job: _Job, device: torch.device, recorder: Recorder) -> MemoryRecord:
    """One more step, with the allocator watched. Before it there are parameters, optimizer state and, on the first
    rank, the mini-batch."""
    static = [*job.engine.module.parameters(), *job.engine.module.buffers(), *job.state()]
    if job.engine.is_first:
        static += flatten(job.inputs)[0]
    recorder.steps, recorder.enabled = [], True
    trace, _ = trace_bytes(device, job.step)
    return MemoryRecord(static_bytes=storage_bytes(static), step=recorder.steps[0], trace=trace.thinned())


def _gather_from_machines(arguments: argparse.Namespace, plan: Plan, record: RankRecord) -> None:
    records: list[RankRecord | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(record, records)
    for one in records or ():
        if one is not None:
            one.save(arguments.run)
    if records:
        how = {name: getattr(arguments, name) for name in ("device", "engine", "stretch", "links")}
        gather(predict_with_findings(plan, arguments.run, arguments.stretch), arguments.run, **how)


if __name__ == "__main__":
    main()
