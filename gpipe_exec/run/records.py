"""What each rank leaves behind, and the measured run that it adds up to.

Every rank adds a line to `ranks/rank<r>.steps` after each step, so that a run that fails keeps what it has; what is of
no step is in `ranks/rank<r>.json`. Rows are the rank's actions; times are those of its own clock, with offsets to rank
0's beside them.
"""

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gpipe_exec.devices.allocator import Trace
from gpipe_exec.devices.recorder import StepRecord
from gpipe_sim.base.arrays import Array, median_index
from gpipe_sim.base.files import parse_json, read_json, write_text
from gpipe_sim.plan.lanes import Lane
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import program_of, rank_actions
from gpipe_sim.runs.directory import Measured, save_measured
from gpipe_sim.show.trace import to_trace
from gpipe_sim.step.metrics import step_time_s
from gpipe_sim.step.step import MemoryCurve, RankTimeline, Step, joined_replicas

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """The step in which the allocator was watched."""

    static_bytes: int
    """What was there before it began."""
    step: StepRecord
    trace: Trace
    reserved_bytes: int | None = None
    """The most that the allocator had taken from the device, in use or not; None on the CPU, as the next."""
    device_bytes: int | None = None
    """All that the device has."""


@dataclass(kw_only=True)
class RankRecord:
    """Everything one rank measures."""

    rank: int
    host: str = field(default_factory=platform.node)
    done: int = 0
    """Steps finished, warm-up included."""
    clock: list[tuple[float, float]] = field(default_factory=list)
    """(time on this rank's clock, seconds to add to have rank 0's), early and late in the run."""
    steps: list[StepRecord] = field(default_factory=list)
    memory: MemoryRecord | None = None

    def finish_step(self, step: StepRecord | None, run: Path) -> None:
        """Write down one step more; None while warming up."""
        if self.done == 0:
            self.save(run)
        self.done += 1
        if step is not None:
            self.steps.append(step)
            with open(_steps(run, self.rank), "a", encoding="utf-8") as file:
                file.write(_line(step))
        write_text(_progress(run, self.rank), str(self.done))

    def finish(self, run: Path) -> None:
        """Everything is done, and written down."""
        self._save_all_but_steps(run)
        write_text(_finished(run, self.rank), "")

    def save(self, run: Path) -> None:
        """Write it down as a whole."""
        write_text(_steps(run, self.rank), "".join(map(_line, self.steps)))
        self._save_all_but_steps(run)
        write_text(_progress(run, self.rank), str(self.done))

    def _save_all_but_steps(self, run: Path) -> None:
        data = asdict(replace(self, steps=[]))
        del data["steps"], data["done"]
        write_text(_file(run, self.rank), json.dumps(data))


def _line(step: StepRecord) -> str:
    return json.dumps(vars(step)) + "\n"


def _steps(run: Path, rank: int) -> Path:
    return run / "ranks" / f"rank{rank}.steps"


def _finished(run: Path, rank: int) -> Path:
    return run / "ranks" / f"rank{rank}.finished"


def has_finished(run: Path, rank: int) -> bool:
    """Whether a rank has done all its work; one that leaves before, with whatever status, has failed."""
    return _finished(run, rank).is_file()


def _file(run: Path, rank: int) -> Path:
    return run / "ranks" / f"rank{rank}.json"


def _progress(run: Path, rank: int) -> Path:
    """A number in a file of its own: who watches the run must not slow it down."""
    return run / "ranks" / f"rank{rank}.done"


def load_record(run: Path, rank: int) -> RankRecord | None:
    """What a rank has left so far."""
    if not _file(run, rank).is_file():
        return None
    data: dict[str, Any] = read_json(_file(run, rank)).data
    lines = (
        _steps(run, rank).read_text(encoding="utf-8").split("\n")[:-1]
    )  # what follows the last end of a line was cut off
    steps = [StepRecord(**parse_json(line, str(_steps(run, rank))).data) for line in lines]
    if data["memory"]:
        memory = data["memory"]
        step, trace = StepRecord(**memory["step"]), Trace(**memory["trace"])
        data["memory"] = MemoryRecord(**memory | {"step": step, "trace": trace})
    return RankRecord(**data, done=steps_done(run, rank + 1)[rank], steps=steps)


def steps_done(run: Path, num_ranks: int) -> list[int]:
    """Steps that each rank has finished."""
    files = [_progress(run, rank) for rank in range(num_ranks)]
    return [int(file.read_text()) if file.is_file() else 0 for file in files]


def gather(plan: Plan, run: Path, *, device: str, engine: str, stretch: float, links: str = "plan") -> Measured | None:
    """The steps that every rank has recorded, written to measured.json with a trace of the median one.

    A rehearsal ran `stretch` times slower than the plan: its times are divided by it.
    """
    records = [load_record(run, rank) for rank in range(plan.world)]
    present = [record for record in records if record is not None]
    num_steps = min((len(record.steps) for record in present), default=0)
    if len(present) < len(records) or num_steps == 0:
        return None
    steps = tuple(
        _step(plan, groups_as_one([_aligned(record.steps[index], record.clock) for record in present], plan), stretch)
        for index in range(num_steps)
    )
    typical = steps[median_index([step_time_s(step) for step in steps])]
    memory = [record.memory for record in present if record.memory]
    measured = Measured(device=device, engine=engine, stretch=stretch, links=links, steps=steps)
    if len(memory) == len(present):
        # Members of a tensor group hold the same: what one is seen to hold more is what nobody saw let go of.
        T = plan.tensor
        memory = [min(memory[first : first + T], key=_peak_bytes) for first in range(0, len(memory), T)]
        memory = [max(alike, key=_peak_bytes) for alike in _holding_the_same(memory, plan)]
        peaks = tuple(map(_peak_bytes, memory))
        curves = tuple(_curve(watched, timeline) for watched, timeline in zip(memory, typical.ranks, strict=True))
        reserved = tuple(one.reserved_bytes for one in memory if one.reserved_bytes is not None)
        totals = tuple(one.device_bytes for one in memory if one.device_bytes is not None)
        measured = replace(measured, peak_memory_bytes=peaks, memory=curves)
        if len(reserved) == len(totals) == len(memory):
            measured = replace(measured, reserved_memory_bytes=reserved, device_memory_bytes=totals)
    save_measured(measured, run / "measured.json")
    for replica, one in enumerate(typical.replicas or (typical,)):
        for number, timeline in enumerate(one.ranks):
            rank = plan.global_rank(timeline.rank, replica)
            memory_of_rank = (measured.memory[number],) if measured.memory and one.ranks is typical.ranks else ()
            alone = Step(program=one.program, ranks=(replace(timeline, rank=rank),), memory=memory_of_rank)
            write_text(run / "traces" / f"rank{rank}_trace.json", to_trace(alone))
    return measured


def _holding_the_same(of_processes: Sequence[T], plan: Plan) -> list[Sequence[T]]:
    """What there is of each process or tensor group, together for those that hold the same stages, in the order of
    `Plan.ranks`."""
    D = plan.replicas
    return [of_processes[first : first + D] for first in range(0, len(of_processes), D)]


def groups_as_one(of_processes: Sequence[StepRecord], plan: Plan) -> list[StepRecord]:
    """A record for each tensor group: what its members do together begins, and ends, with the last of them."""
    T = plan.tensor
    groups = [of_processes[first : first + T] for first in range(0, len(of_processes), T)]
    columns = StepRecord.__dataclass_fields__
    return [
        StepRecord(**{name: np.max([getattr(one, name) for one in group], axis=0).tolist() for name in columns})
        if T > 1
        else group[0]
        for group in groups
    ]


def _peak_bytes(watched: MemoryRecord) -> int:
    return watched.static_bytes + watched.trace.peak_bytes


def _aligned(record: StepRecord, clock: Sequence[tuple[float, float]]) -> StepRecord:
    """The record on rank 0's clock."""
    times, offsets = np.array(clock).T

    def moved(column: list[float]) -> list[float]:
        local = np.array(column)
        return list(local + np.interp(local, times, offsets))

    return StepRecord(**{name: moved(column) for name, column in asdict(record).items()})


def _step(plan: Plan, records: Sequence[StepRecord], stretch: float) -> Step:
    """One step from the records of all processes; time counts from its first action."""
    if plan.replicas > 1:
        for number, alike in enumerate(_holding_the_same(records, plan)):
            _settle_lanes(alike, program_of(plan).lanes[plan.pipeline.index(plan.ranks[number])])
    origin = float(np.nanmin([moment for record in records for moment in (record.start[0], *record.lane_start)]))
    return joined_replicas(
        [_replica(plan, records[replica :: plan.replicas], stretch, origin) for replica in range(plan.replicas)]
    )


def _settle_lanes(alike: Sequence[StepRecord], lane: Lane) -> None:
    """A collective starts when the last replica is ready for it, and those before it on the lane have ended.

    That it has ended is noted by a thread, a little after the rank may have gone on.
    """
    ready = np.max([record.lane_start for record in alike], axis=0)
    for record in alike:
        waiting = [record.start[one.before] if one.before >= 0 else math.inf for one in lane]
        end = np.fmin(record.lane_end, waiting)
        record.lane_start = list(np.minimum(np.fmax(ready, np.append(-math.inf, end)[:-1]), end))
        record.lane_end = list(end)


def _replica(plan: Plan, records: Sequence[StepRecord], stretch: float, origin: float) -> Step:
    actions, senders = rank_actions(plan), program_of(plan).senders()

    def seconds(column: list[float]) -> Array:
        relative: Array = (np.array(column) - origin) / stretch
        return relative

    delivered = {
        action: float(when)
        for found, record in zip(actions, records, strict=True)
        for action, when in zip(found, seconds(record.delivered), strict=True)
    }
    for found, record in zip(actions, records, strict=True):  # torch's engine notes no delivery: when it was taken
        for action, taken in zip(found, seconds(record.start), strict=True):
            sender = senders.get(action)
            if sender is not None and math.isnan(delivered[sender]):
                delivered[sender] = float(taken)
    timelines = []
    for position, (found, record) in enumerate(zip(actions, records, strict=True)):
        start, end = seconds(record.start), seconds(record.end)
        sent = np.array([delivered[action] for action in found])
        arrived = [delivered[senders[a]] if a in senders else math.nan for a in found]
        timelines.append(
            RankTimeline(
                rank=plan.ranks[position],
                actions=found,
                start_s=start,
                end_s=end,
                # The sender notes a delivery a little after the receiver may have begun to compute with it.
                arrived_s=np.minimum(arrived, start),
                send_start_s=np.where(np.isnan(sent), math.nan, end),
                send_end_s=sent,
                blocking=not plan.scenario.cluster.overlap,
                lane=program_of(plan).lanes[plan.pipeline.index(plan.ranks[position])],
                lane_start_s=seconds(record.lane_start),
                lane_end_s=seconds(record.lane_end),
            )
        )
    return Step(program=program_of(plan), ranks=tuple(timelines))


def _curve(memory: MemoryRecord, typical: RankTimeline) -> MemoryCurve:
    """Bytes over the time of the median step: watching slows a step, so its actions are moved to where they belong.

    watched   |==0F0==|   |====0F1====|        each moment keeps its place within, or between, its actions
    median    |=0F0=||==0F1==|
    """
    watched = np.maximum.accumulate(np.array([memory.step.start, memory.step.end]).T.ravel())
    median = np.array([typical.start_s, typical.end_s]).T.ravel()
    times = np.interp(memory.trace.times_s, watched, median)
    held = np.array(memory.trace.held_bytes, dtype=float)
    return MemoryCurve(times=times, parts={"allocated": memory.static_bytes + held})
