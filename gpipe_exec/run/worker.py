"""One rank of a run, started by torchrun: builds its stage, runs the steps, leaves its records.

    python -m torch.distributed.run ... -m gpipe_exec.run.worker RUN_DIR --steps 10 --warmup 3 --device cpu

The plan is RUN_DIR/plan.yaml. What a rank measures, and the traceback of its failure, lie in RUN_DIR/ranks, a file per
rank, written whole.
"""

import argparse
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from gpipe_exec.alternatives.rehearsal import (
    PacedCollectives,
    PacedTransport,
    PacedWire,
    WholeCollectives,
    rehearsed_workload,
)
from gpipe_exec.devices.accelerator import bytes_of_device, local_device, memory_of_device
from gpipe_exec.devices.allocator import storage_bytes, trace_bytes
from gpipe_exec.devices.autopsy import BUILD_S, Watchdog, answer_where, beat, fail
from gpipe_exec.devices.clocks import clock_offset
from gpipe_exec.devices.environment import find_own_models
from gpipe_exec.devices.groups import start_processes
from gpipe_exec.devices.process import die_with_parent, leave, take_turns
from gpipe_exec.devices.recorder import Recorder
from gpipe_exec.devices.supervision import FIRST_S
from gpipe_exec.engine.delivery import Acknowledged, SentAside
from gpipe_exec.engine.messages import Value, flatten, unflatten
from gpipe_exec.engine.optimizers import make_optimizer
from gpipe_exec.engine.pipeline import Pipeline, pin_to_cores
from gpipe_exec.engine.precision import DTYPES, computes_with_copies
from gpipe_exec.engine.slices import divided_loss, whole_loss
from gpipe_exec.engine.transport import PeerToPeer, Transport
from gpipe_exec.layers import Workload, build_workload
from gpipe_exec.measure.calibrate import calibrate
from gpipe_exec.measure.timing import LayerClock, LayerTimer, boundaries_of
from gpipe_exec.run.findings import OVERHEADS, TIMES, predict_with_findings
from gpipe_exec.run.records import MemoryRecord, RankRecord, gather
from gpipe_sim.base.files import write_text
from gpipe_sim.make.planfile import load_plan
from gpipe_sim.plan.plan import Plan


def main() -> None:
    """Parse the arguments and run; a failure is written down and printed, and ends the process at once."""
    arguments = make_parser().parse_args()
    die_with_parent()
    rank = int(os.environ["RANK"])
    find_own_models()
    try:
        answer_where(arguments.run, rank)
        _run(arguments, load_plan(arguments.run / "plan.yaml"), rank)
    except BaseException as error:
        fail(arguments.run, rank, error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
    dist.destroy_process_group()
    leave()


def make_parser() -> argparse.ArgumentParser:
    """The worker's own command line, which the launcher writes."""
    parser = argparse.ArgumentParser(prog="gpipe_exec.run.worker", description="one rank of a run, under torchrun")
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

    def parameters(self) -> list[nn.Parameter]:
        """For this rank's optimizer."""

    def step(self, inputs: Value, targets: Any, update: Callable[[], object] | None = None) -> torch.Tensor:
        """One mini-batch, forward and backward, and the update as soon as it can be."""

    def lowered(self) -> AbstractContextManager[None]:
        """Meanwhile the layers have the weights that they compute with."""

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
    device = local_device("cpu" if arguments.device == "rehearse" else arguments.device)
    shares_core = arguments.device == "cpu" and pin_to_cores()
    if shares_core:
        take_turns(short=True)  # the threads that carry messages, which are started from here on
    # The launcher notices a hang first; this is for the case that the launcher is gone. Ranks wait for each other while
    # some of them still build their layers.
    patience = timedelta(seconds=arguments.timeout + BUILD_S)
    # No launcher sees all machines: each rank watches itself.
    alone = int(os.environ["WORLD_SIZE"]) > int(os.environ["LOCAL_WORLD_SIZE"])
    start_processes(device, patience, timedelta(seconds=arguments.timeout + FIRST_S) if alone else None)
    if arguments.device == "rehearse":
        overheads = calibrate(plan.link(0) if arguments.links == "real" and plan.num_ranks > 1 else None, asleep=True)
        if rank == 0:
            write_text(arguments.run / OVERHEADS, json.dumps(overheads._asdict()))
    recorder = Recorder(device)
    job = _make_job(arguments, plan, device, recorder)
    if shares_core:
        take_turns(short=False)
    clock = LayerClock(device, shares_core=shares_core)
    beat(arguments.run, rank)  # built: the first step comes next
    layer_times = _LayerTimes(job, plan, device, clock) if arguments.reprofile else None
    record = RankRecord(rank=rank, clock=[clock_offset()])
    watchdog = Watchdog(arguments.run, rank, arguments.timeout) if alone else None
    for step in range(arguments.warmup + arguments.steps):
        recorder.enabled = step >= arguments.warmup
        if layer_times:
            layer_times.measure(counts=recorder.enabled)
        job.step()
        record.finish_step(recorder.steps[-1] if recorder.enabled else None, arguments.run)
        if watchdog:
            watchdog.step_finished()
    if watchdog:
        watchdog.stop()
    record.clock.append(clock_offset())
    if layer_times:
        layer_times.save(arguments.run)
    record.memory = _watch_memory(job, device, recorder, num_steps=1 if plan.tensor == 1 else 2)
    record.finish(arguments.run)
    job.engine.close()
    if alone:
        _gather_from_machines(arguments, plan, record)


def _make_job(arguments: argparse.Namespace, plan: Plan, device: torch.device, recorder: Recorder) -> _Job:
    wires: dict[int, PacedWire] = {}

    def carry(direct: PeerToPeer, edge: int) -> Transport:
        if arguments.links == "plan":
            wire = wires.setdefault(direct.peer, PacedWire())
            return PacedTransport(direct, plan.link(edge), arguments.stretch, wire)
        return SentAside(direct) if plan.scenario.cluster.overlap else Acknowledged(SentAside(direct))

    engine: Engine
    if arguments.device == "rehearse":
        stages = _stages(plan)
        _, replica = plan.place_of(dist.get_rank())
        workload, update = rehearsed_workload(
            plan, stages, arguments.stretch, began=lambda: recorder.latest_s, replica=replica
        )
        is_paced = arguments.links == "plan"
        engine = Pipeline(
            workload.layers,
            plan,
            workload.loss,
            device=device,
            recorder=recorder,
            carry=carry,
            collect=PacedCollectives(plan, arguments.stretch) if is_paced else WholeCollectives(plan),
            checks=False,
            precision="pure",
        )
        return _Job(workload, engine, *_share(plan, workload), update, list)
    workload = build_workload(plan.scenario, on_meta=True)
    if arguments.engine == "torch":
        from gpipe_exec.alternatives.torch_engine import TorchPipeline

        engine = TorchPipeline(workload, plan, device=device, recorder=recorder)
    else:
        engine = Pipeline(workload.layers, plan, workload.loss, device=device, recorder=recorder)
    parameters = engine.parameters()
    optimizer = make_optimizer(plan.scenario.optimizer, parameters) if parameters else None

    def step() -> None:
        if optimizer:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state() -> list[torch.Tensor]:
        values = [value for entry in (optimizer.state if optimizer else {}).values() for value in entry.values()]
        return [value for value in values if isinstance(value, torch.Tensor)]

    return _Job(workload, engine, *_share(plan, workload), step, state)


def _stages(plan: Plan) -> tuple[int, ...]:
    """Those of this process."""
    position, _ = plan.place_of(dist.get_rank())
    return plan.stages_of(plan.pipeline[position])


def _share(plan: Plan, workload: Workload) -> tuple[Value, Any]:
    """Inputs and targets of this replica: its samples of the whole batch, and nothing of the others'."""
    whole = workload.sample(plan.scenario.batch)
    if plan.replicas == 1:
        return whole
    _, replica = plan.place_of(dist.get_rank())
    mine = slice(replica * plan.samples, (replica + 1) * plan.samples)
    parts = [flatten(value) for value in whole]
    inputs, targets = (unflatten(nesting, [tensor[mine].clone() for tensor in tensors]) for tensors, nesting in parts)
    return inputs, targets


class _LayerTimes:
    """What the layers of this rank's stages cost, timed in turns with the steps.

    Where cores drift, a profile taken minutes ago says what they were. Timed between the steps, layers and steps meet
    the same machine, and what is left between prediction and measurement is the model's own error.
    """

    def __init__(self, job: _Job, plan: Plan, device: torch.device, clock: LayerClock) -> None:
        self._job, self._num_microbatches, self._num_members = job, plan.num_microbatches, plan.tensor
        layers = range(plan.profile.num_layers)
        shares = [layers[plan.stages[stage]] for stage in _stages(plan)]
        mixed = computes_with_copies(plan.dtype, plan.scenario.precision)
        lowered = DTYPES[plan.dtype] if mixed else None
        # Here layers are divided already, and what they take follows from the whole ones.
        whole = build_workload(plan.scenario, on_meta=True).layers if plan.tensor > 1 else job.workload.layers
        parts = plan.tensor if plan.scenario.plan.sequence_split else 1
        workload = job.workload
        if plan.tensor > 1:
            workload = workload._replace(loss=whole_loss(workload.loss))
        with job.engine.lowered():
            self._timers = {
                size: LayerTimer(
                    workload,
                    shares,
                    size,
                    plan.num_microbatches,
                    device,
                    clock,
                    lowered,
                    boundaries_of(whole, shares, workload.sample(size)[0], lowered, parts),
                )
                for size in sorted({*plan.sizes})
            }

    def measure(self, *, counts: bool) -> None:
        """About as many micro-batches as a step has, for each of their sizes."""
        with self._job.engine.lowered(), divided_loss(self._num_members):
            for timer in self._timers.values():
                for _ in range(-(-self._num_microbatches // timer.in_a_row)):
                    timer.measure()
                if not counts:
                    timer.clear()
        self._job.engine.module.zero_grad(set_to_none=True)

    def save(self, run: Path) -> None:
        """Size -> columns, over all ranks."""
        found = {size: timer.columns() for size, timer in self._timers.items()}
        if dist.get_rank() == 0:
            write_text(run / TIMES, json.dumps(found))


def _watch_memory(job: _Job, device: torch.device, recorder: Recorder, num_steps: int) -> MemoryRecord:
    """One more step, with the allocator watched. Before it there are parameters, optimizer state and, on the first
    rank, the mini-batch.

    In a tensor group several, of which the lowest peak counts: what a collective was given is now and then seen let go
    of too late (`allocator`), never too early.
    """
    static = [*job.engine.module.parameters(), *job.engine.module.buffers(), *job.state()]
    if job.engine.is_first:
        static += flatten(job.inputs)[0]
    is_cpu = device.type == "cpu"  # elsewhere inputs are in host memory, and go to the device in the step
    static_bytes = storage_bytes(static) if is_cpu else bytes_of_device(device).active
    recorder.steps, recorder.enabled = [], True
    traces = [trace_bytes(device, job.step)[0] for _ in range(num_steps)]
    lowest = min(range(num_steps), key=lambda number: traces[number].peak_bytes)
    trace = traces[lowest]
    return MemoryRecord(
        static_bytes=static_bytes,
        step=recorder.steps[lowest],
        trace=trace.thinned(),
        reserved_bytes=None if is_cpu else bytes_of_device(device).reserved,
        device_bytes=memory_of_device(device),
    )


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
