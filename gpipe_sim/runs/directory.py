"""The run directory: everything about one execution of a plan, readable on any machine.

    runs/<utc>-<name>/
      scenario.yaml, profile.json     what was asked, and what each layer costs
      plan.yaml          the plan, which holds both, to stand alone
      predicted.json     what was expected: the keys of `simulate --json`
      measured.json      what happened: every recorded step, rank by rank
      environment.json   where: host, versions, device
      traces/rank<r>_trace.json
      logs/              what each rank printed
      ranks/             what each rank leaves on its way: the steps it has done, their times, where it stood if it hung
      compare.json, report.html       written by `gpipe run` at its end; `gpipe compare` writes compare.json again

Files are written whole: a crash never leaves half a file under its final name.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter, ValidationError

from gpipe_sim.base.files import Document, InputError, Problem, Strict, problems_of, read_json, write_text
from gpipe_sim.base.limits import AMOUNT, STEPS
from gpipe_sim.make.planfile import load_plan
from gpipe_sim.plan.actions import Action
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import program_of, rank_actions
from gpipe_sim.step.step import MemoryCurve, RankTimeline, Step, joined_replicas


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What was measured in a run."""

    device: str
    engine: str
    steps: tuple[Step, ...]
    """After warm-up, times relative to each step's first action, in the plan's own seconds; of all replicas."""
    stretch: float = 1.0
    """How many times slower than the plan a rehearsal ran; its times are divided by it."""
    links: str = "plan"
    """Whose pace a rehearsal's messages had: the plan's links', or that of the real ones."""
    peak_memory_bytes: tuple[int, ...] | None = None
    """Per rank, from the allocator in a step of its own; None where that step did not finish. Of replicas, as the next
    three, the one that holds most."""
    reserved_memory_bytes: tuple[int, ...] | None = None
    """Per rank, the most that the allocator had taken from its device, in use or not; None on the CPU, as the next."""
    device_memory_bytes: tuple[int, ...] | None = None
    """Per rank, all that its device has."""
    memory: tuple[MemoryCurve, ...] | None = None
    """What the allocator held over that step, laid over the median step; one part, `allocated`."""

    @property
    def how(self) -> str:
        """How it was executed, in words."""
        if self.device != "rehearse":
            return f"Executed on {self.device} by the {self.engine} engine."
        rehearsal = (
            "A rehearsal: the engine, its processes and its waiting are real. Layers take their profiled time and hold "
            "their profiled bytes without computing; "
        )
        if self.links == "real":
            return f"{rehearsal}messages are whole, and pass the real links between the ranks."
        slower = f"It ran {self.stretch:.4g} times slower; times are divided by that."
        if self.stretch == 1:
            slower = "It ran at the plan's own speed."
        return (
            f"{rehearsal}messages carry at most 64 KiB, and arrive when the plan's links would have delivered all of "
            f"it. {slower}"
        )


_Moment = Annotated[float, Field(ge=-AMOUNT, le=AMOUNT)]
_Moments = Annotated[list[_Moment], Field(fail_fast=True)]
_Sizes = Annotated[list[Annotated[int, Field(ge=0, le=int(AMOUNT))]], Field(fail_fast=True)]
_MaybeMoments = Annotated[list[_Moment | None], Field(fail_fast=True)]


class _RankEntry(Strict):
    """One rank in one step: a value for each of its actions, in their order; null where nothing was sent or taken."""

    start_s: _Moments
    """When each action started, from the step's first action on."""
    end_s: _Moments
    """When it ended."""
    arrived_s: _MaybeMoments
    """When the message that it needs was there."""
    send_start_s: _MaybeMoments
    """When its own message was handed over."""
    send_end_s: _MaybeMoments
    """When that was delivered."""
    lane_start_s: _MaybeMoments = Field(default_factory=list)
    """When each collective of replicas started, in their own order; empty where there is one replica."""
    lane_end_s: _MaybeMoments = Field(default_factory=list)
    """When it had ended on this rank."""


class _CurveEntry(Strict):
    """What the allocator of one rank held over a step."""

    times_s: Annotated[_Moments, Field(min_length=1)]
    """Moments, ascending."""
    allocated_bytes: _Moments
    """Held from each of them on."""


class _MeasuredFile(Strict):
    """What happened, in the plan's own seconds."""

    format: Literal["gpipe-measured-1"]
    """The version of this format."""
    device: str
    """``cpu``, ``cuda`` or ``rehearse``."""
    engine: str
    """``gpipe``, ours, or ``torch``."""
    stretch: Annotated[float, Field(ge=1 / AMOUNT, le=AMOUNT)] = 1.0
    """How many times slower than the plan a rehearsal ran; its times are divided by it already."""
    links: Literal["plan", "real"] = "plan"
    """Whether a rehearsal's messages took the time of the plan's links, or went over real ones in full size."""
    steps: Annotated[
        list[Annotated[list[_RankEntry], Field(fail_fast=True)]], Field(min_length=1, max_length=STEPS, fail_fast=True)
    ]
    """Every step after the warm-up, each with an entry per process: the first rank of all replicas, then the next."""
    peak_memory_bytes: _Sizes | None = None
    """Per rank, from the allocator in a step of its own that is not timed; of its replicas, the one that holds most."""
    reserved_memory_bytes: _Sizes | None = None
    """Per rank, the most that the allocator had taken from its device, in use or not; not known on a CPU."""
    device_memory_bytes: _Sizes | None = None
    """Per rank, all that its device has."""
    memory: Annotated[list[_CurveEntry], Field(fail_fast=True)] | None = None
    """Per rank, of that step; on a GPU only its peak is known."""


_COLUMNS = tuple(name for name in _RankEntry.model_fields if not name.startswith("lane"))
_LANE_COLUMNS = ("lane_start_s", "lane_end_s")


def new_run_directory(runs: Path, name: str) -> Path:
    """``<utc>-<name>`` under `runs`, with a number if that moment is taken; the name cannot leave the folder."""
    stem = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', name).strip('.') or 'run'}"
    for attempt in range(1000):
        path = runs / (stem if attempt == 0 else f"{stem}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise InputError([Problem(str(runs), "", "has a thousand runs of this moment, expected fewer")])


def save_measured(measured: Measured, path: Path) -> None:
    """Write measured.json."""

    def column(values: Sequence[float]) -> list[float | None]:
        return [None if math.isnan(value) else value for value in values]

    data = {
        "format": "gpipe-measured-1",
        "device": measured.device,
        "engine": measured.engine,
        "stretch": measured.stretch,
        "links": measured.links,
        "steps": [
            [
                {name: column(getattr(timeline, name).tolist()) for name in (*_COLUMNS, *_LANE_COLUMNS)}
                for alike in zip(*(one.ranks for one in step.replicas or (step,)), strict=True)
                for timeline in alike
            ]
            for step in measured.steps
        ],
        "peak_memory_bytes": list(measured.peak_memory_bytes) if measured.peak_memory_bytes else None,
        "reserved_memory_bytes": measured.reserved_memory_bytes,
        "device_memory_bytes": measured.device_memory_bytes,
        "memory": [
            {"times_s": curve.times.tolist(), "allocated_bytes": curve.total.tolist()} for curve in measured.memory
        ]
        if measured.memory
        else None,
    }
    write_text(path, json.dumps(data))


def load_run(directory: Path) -> tuple[Plan, Measured]:
    """The plan of a run directory and what was measured of it."""
    _need_files(directory, "plan.yaml", "measured.json")
    plan = load_plan(directory / "plan.yaml")
    return plan, parse_measured(read_json(directory / "measured.json"), plan)


def _need_files(directory: Path, *names: str) -> None:
    """Refuse a directory that lacks one of them, or has a pipe there, at which a reader would wait forever."""
    for name in names:
        if not (directory / name).is_file():
            raise InputError([Problem(str(directory), name, "is missing, expected the directory of a finished run")])


def parse_measured(document: Document, plan: Plan) -> Measured:
    """What a document says was measured of a plan; its rows must be the plan's actions."""
    try:
        content = _MeasuredFile.model_validate(document.data)
    except ValidationError as error:
        raise InputError(problems_of(error, document, ())) from error
    program, actions, D = program_of(plan), rank_actions(plan), plan.replicas
    lanes = [program.lanes[plan.pipeline.index(rank)] for rank in plan.ranks]
    takers = set(program.senders())
    of_processes = [(found, lane) for found, lane in zip(actions, lanes, strict=True) for _ in range(D)]
    for index, step in enumerate(content.steps):
        expected = [[len(found)] * len(_COLUMNS) + [len(lane)] * len(_LANE_COLUMNS) for found, lane in of_processes]
        if [[len(getattr(entry, name)) for name in (*_COLUMNS, *_LANE_COLUMNS)] for entry in step] != expected:
            message = "has other actions than the plan, expected a row for each of its own"
            raise InputError([document.problem(("steps", index), message)])
        for process, entry in enumerate(step):
            if wrong := _disorder(entry) or _unsent(takers, of_processes[process][0], entry):
                raise InputError([document.problem(("steps", index, process), wrong)])
        if not any(end > start for entry in step for start, end in zip(entry.start_s[:-1], entry.end_s, strict=False)):
            raise InputError([document.problem(("steps", index), "takes no time at all, expected some")])
    for name in ("peak_memory_bytes", "reserved_memory_bytes", "device_memory_bytes", "memory"):
        found = getattr(content, name)
        if found is not None and len(found) != len(actions):
            raise InputError([document.problem((name,), f"has {len(found)} entries, expected one for each rank")])
    for index, curve in enumerate(content.memory or ()):
        if len(curve.times_s) != len(curve.allocated_bytes):
            message = "has times and bytes of different length, expected as many"
            raise InputError([document.problem(("memory", index), message)])
    blocking = not plan.scenario.cluster.overlap

    def replica(entries: Sequence[_RankEntry]) -> Step:
        timelines = [
            RankTimeline(
                rank=plan.ranks[number],
                actions=actions[number],
                blocking=blocking,
                lane=lanes[number],
                **{name: _array(getattr(entry, name)) for name in (*_COLUMNS, *_LANE_COLUMNS)},
            )
            for number, entry in enumerate(entries)
        ]
        return Step(program=program, ranks=tuple(timelines))

    steps = [joined_replicas([replica(step[number::D]) for number in range(D)]) for step in content.steps]
    curves = [
        MemoryCurve(times=np.array(entry.times_s), parts={"allocated": np.array(entry.allocated_bytes)})
        for entry in content.memory or ()
    ]
    return Measured(
        device=content.device,
        engine=content.engine,
        stretch=content.stretch,
        links=content.links,
        steps=tuple(steps),
        peak_memory_bytes=tuple(content.peak_memory_bytes) if content.peak_memory_bytes else None,
        reserved_memory_bytes=tuple(content.reserved_memory_bytes) if content.reserved_memory_bytes else None,
        device_memory_bytes=tuple(content.device_memory_bytes) if content.device_memory_bytes else None,
        memory=tuple(curves) or None,
    )


def _disorder(entry: _RankEntry) -> str | None:
    """What is wrong with the order of a rank's actions in time."""
    for row, (start, end) in enumerate(zip(entry.start_s, entry.end_s, strict=True)):
        if end < start:
            return f"action {row} ends at {end:g}, before its start at {start:g}, expected an end after it"
        if row and start < entry.start_s[row - 1]:
            return f"action {row} starts at {start:g}, before the one before it, expected their order"
    for row, (begin, finish) in enumerate(zip(entry.lane_start_s, entry.lane_end_s, strict=True)):
        if begin is not None and finish is not None and finish < begin:
            return f"collective {row} ends at {finish:g}, before its start at {begin:g}, expected an end after it"
    return None


def _unsent(takers: set[Action], actions: Sequence[Action], entry: _RankEntry) -> str | None:
    """What arrived where nothing was sent."""
    for action, arrived in zip(actions, entry.arrived_s, strict=True):
        if arrived is not None and action not in takers:
            return f"has a message that arrived for {action}, which takes none, expected null in arrived_s"
    return None


def _array(values: Sequence[float | None]) -> Any:
    return np.array([math.nan if value is None else value for value in values])


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One compared run in a line; errors are (predicted - measured) / measured, that of the bubble is in points."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    name: str
    """Of its directory."""
    utc: AwareDatetime | None
    """When it was started, as the directory's name says."""
    device: str
    schedule: str
    checkpoint: str
    """The stages' mode, ``per stage`` where they differ."""
    num_stages: int
    num_microbatches: int
    predicted_s: float
    measured_s: float
    error: float
    """Of the step time."""
    bubble_error: float
    memory_errors: tuple[float, ...] | None
    """Of each rank's peak; None where it was not measured."""


_SUMMARY = TypeAdapter(RunSummary)


def parse_summary(data: object) -> RunSummary:
    """A summary of numbers that are some, from a file that may say anything; a ValueError if it does."""
    return _SUMMARY.validate_python(data)


def summaries(runs: Path) -> list[RunSummary]:
    """Every compared run in a folder that can be read, oldest first."""
    found = []
    for path in sorted(runs.glob("*/compare.json")):
        try:
            found.append(summary_of(path.parent))
        except (OSError, ValueError, LookupError, TypeError):  # someone else's file
            continue
    return found


def _began(name: str) -> datetime | None:
    """When a run was started, as its directory's name says, if it begins with a date."""
    try:
        return datetime.strptime(name[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:  # another name, or one that only looks like a date
        return None


def summary_of(directory: Path) -> RunSummary:
    """Of a run that has been compared."""
    place = "environment.json" if (directory / "environment.json").is_file() else "measured.json"
    _need_files(directory, "compare.json", "plan.yaml", place)
    compared = read_json(directory / "compare.json").data
    plan = load_plan(directory / "plan.yaml")
    device = read_json(directory / place).data["device"]
    time, peaks = compared["step_time"], compared["peak_memory_bytes"]["error"]
    return parse_summary(
        {
            "name": directory.name,
            "utc": _began(directory.name),
            "device": device,
            "schedule": plan.schedule,
            "checkpoint": plan.checkpoint[0] if len(set(plan.checkpoint)) == 1 else "per stage",
            "num_stages": plan.num_stages,
            "num_microbatches": plan.num_microbatches,
            "predicted_s": time["predicted_s"],
            "measured_s": time["measured_s"],
            "error": time["error"],
            "bubble_error": compared["bubble_fraction"]["error"],
            "memory_errors": peaks,
        }
    )
