"""What each rank leaves behind, and the measured run that it adds up to.

Every rank writes `ranks/rank<r>.json` after each step, whole, so that a run that fails keeps what it has. Rows are the
rank's actions; times are those of its own clock, with offsets to rank 0's beside them.
"""

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpipe_exec.allocator import Trace
from gpipe_exec.recorder import StepRecord
from gpipe_sim.files import parse_json, write_text
from gpipe_sim.metrics import step_time_s
from gpipe_sim.plan import Plan
from gpipe_sim.profile import Array
from gpipe_sim.runs import Measured, save_measured
from gpipe_sim.schedule import rank_actions, sender_of, takes_message
from gpipe_sim.step import MemoryCurve, RankTimeline, Step
from gpipe_sim.trace import to_trace


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """The step in which the allocator was watched."""

    static_bytes: int
    """What was there before it began."""
    step: StepRecord
    trace: Trace


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

    def save(self, run: Path) -> None:
        """Write it down."""
        write_text(_file(run, self.rank), json.dumps(asdict(self)))
        write_text(_progress(run, self.rank), str(self.done))


def _file(run: Path, rank: int) -> Path:
    return run / "ranks" / f"rank{rank}.json"


def _progress(run: Path, rank: int) -> Path:
    """A number in a file of its own: who watches the run must not slow it down."""
    return run / "ranks" / f"rank{rank}.done"


def load_record(run: Path, rank: int) -> RankRecord | None:
    """What a rank has left so far."""
    if not _file(run, rank).is_file():
        return None
    data: dict[str, Any] = parse_json(_file(run, rank).read_text(), str(_file(run, rank))).data
    if data["memory"]:
        memory = data["memory"]
        step, trace = StepRecord(**memory["step"]), Trace(**memory["trace"])
        data["memory"] = MemoryRecord(static_bytes=memory["static_bytes"], step=step, trace=trace)
    return RankRecord(**data | {"steps": [StepRecord(**step) for step in data["steps"]]})


def steps_done(run: Path, num_ranks: int) -> list[int]:
    """Steps that each rank has finished."""
    files = [_progress(run, rank) for rank in range(num_ranks)]
    return [int(file.read_text()) if file.is_file() else 0 for file in files]


def gather(plan: Plan, run: Path, *, device: str, engine: str, stretch: float, links: str = "plan") -> Measured | None:
    """The steps that every rank has recorded, written to measured.json with a trace of the median one.

    A rehearsal ran `stretch` times slower than the plan: its times are divided by it.
    """
    records = [load_record(run, rank) for rank in range(plan.num_stages)]
    present = [record for record in records if record is not None]
    num_steps = min((len(record.steps) for record in present), default=0)
    if len(present) < len(records) or num_steps == 0:
        return None
    steps = tuple(
        _step(plan, [_aligned(record.steps[index], record.clock) for record in present], stretch)
        for index in range(num_steps)
    )
    typical = steps[int(np.argsort([step_time_s(step) for step in steps])[(num_steps - 1) // 2])]
    memory = [record.memory for record in present if record.memory]
    measured = Measured(device=device, engine=engine, stretch=stretch, links=links, steps=steps)
    if len(memory) == len(present):
        peaks = tuple(watched.static_bytes + watched.trace.peak_bytes for watched in memory)
        curves = tuple(_curve(watched, timeline) for watched, timeline in zip(memory, typical.ranks, strict=True))
        measured = replace(measured, peak_memory_bytes=peaks, memory=curves)
    save_measured(measured, run / "measured.json")
    for position, timeline in enumerate(typical.ranks):
        memory_of_rank = (measured.memory[position],) if measured.memory else ()
        trace = to_trace(Step(ranks=(timeline,), memory=memory_of_rank))
        write_text(run / "traces" / f"rank{timeline.rank}_trace.json", trace)
    return measured


def _aligned(record: StepRecord, clock: Sequence[tuple[float, float]]) -> StepRecord:
    """The record on rank 0's clock."""
    times, offsets = np.array(clock).T

    def moved(column: list[float]) -> list[float]:
        local = np.array(column)
        return list(local + np.interp(local, times, offsets))

    return StepRecord(**{name: moved(column) for name, column in asdict(record).items()})


def _step(plan: Plan, records: Sequence[StepRecord], stretch: float) -> Step:
    """One step from the ranks' records; time counts from its first action."""
    origin = min(record.start[0] for record in records)
    actions = rank_actions(plan)

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
            sender = sender_of(action)
            if takes_message(plan, action) and math.isnan(delivered[sender]):
                delivered[sender] = float(taken)
    timelines = []
    for position, (found, record) in enumerate(zip(actions, records, strict=True)):
        start, end = seconds(record.start), seconds(record.end)
        sent = np.array([delivered[action] for action in found])
        arrived = [delivered[sender_of(a)] if takes_message(plan, a) else math.nan for a in found]
        timelines.append(
            RankTimeline(
                rank=plan.ranks[position],
                stage=found[0].stage,
                actions=found,
                start_s=start,
                end_s=end,
                # The sender notes a delivery a little after the receiver may have begun to compute with it.
                arrived_s=np.minimum(arrived, start),
                send_start_s=np.where(np.isnan(sent), math.nan, end),
                send_end_s=sent,
                blocking=not plan.scenario.cluster.overlap,
            )
        )
    return Step(ranks=tuple(timelines))


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
