"""Traces of torch's profiler as measured steps: runs of torch.distributed.pipelining that our engine had no part in.

A trace is a file of a rank: `torch.profiler.profile(...).export_chrome_trace(...)`, as JSON, compressed or not. What it
names tells when the rank was in which action, what it launched meanwhile tells when that computed:

    user_annotation   |----PP:1RECV_F0----|--------PP:1F0--------|          or Forward 0, or forward_one_chunk
    launched                    recv           op   op     op
    gloo:recv, nccl             |~~~~~~~~~~~~~~|
    cpu_op, kernel                              |==| |==|   |==|
                                               ^arrived_s         the message that 1F0 takes
                                                ^start_s       ^end_s

Which names there are depends on torch's schedule:

    PP:2F0, PP:2RECV_F0, PP:(2F1;3B0)OVERLAP_F_B     every schedule but the next two, and those from a file
    Forward 0, Backward 0                            ScheduleGPipe: the rank's only stage
    forward_one_chunk, backward_one_chunk            Schedule1F1B, which names nothing: where it was recorded with
                                                     `with_stack=True`

On a GPU (a trace with kernels) an action's time is that of the kernels and copies that were launched in it, NCCL's left
out; elsewhere it is that of its operators, c10d's left out. The loss belongs to the forward before it. The update is
what torch calls Optimizer.step.
"""

import itertools
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from gpipe_sim.base import limits
from gpipe_sim.base.arrays import Array
from gpipe_sim.base.events import read_trace
from gpipe_sim.base.files import InputError, Problem
from gpipe_sim.base.limits import shown
from gpipe_sim.plan.actions import Action, Letter
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import program_of, rank_actions
from gpipe_sim.runs.directory import Measured
from gpipe_sim.step.step import RankTimeline, Step

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})", re.ASCII)
_RUNTIME = re.compile(r"PP:(?:\((?P<pair>[^()]*)\)OVERLAP_F_B|(?P<one>[0-9A-Z_]+))", re.ASCII)
_RECEIVE = re.compile(r"([0-9]{1,9})RECV_([FB])([0-9]{1,9})", re.ASCII)
_SINGLE = re.compile(r"(Forward|Backward) ([0-9]{1,9})", re.ASCII)
_CHUNK = re.compile(r".*pipelining.stage\.py\([0-9]+\): (forward|backward)_one_chunk", re.ASCII)
_UPDATE = "Optimizer.step#"
_AUTOGRAD = "autograd::engine::evaluate_function"
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_SAME_MOMENT_S = 1e-3
"""Clocks of one host may disagree by so much: the profiler turns ticks of the processor into time."""


class _Span(NamedTuple):
    """Something that lasts, in seconds of the trace."""

    start: float
    end: float
    name: str


class _Work(NamedTuple):
    """Something that computes, or a message."""

    launched: float
    start: float
    end: float


class _Range(NamedTuple):
    """When the host was in an action, or in several, one after the other."""

    start: float
    end: float
    actions: tuple[Action, ...] = ()
    taker: Action | None = None
    """What takes the message that is received in it, if that is what it is for."""


@dataclass(kw_only=True)
class _Trace:
    """What one rank's file tells, everything in the order of its launch."""

    file: Path
    rank: int
    host: str
    base_ns: int
    """When its seconds begin."""
    has_device: bool
    annotations: list[_Span]
    """What torch calls what its stages do."""
    updates: list[_Span]
    chunks: list[_Span]
    """Calls of a stage's forward and backward."""
    work: list[_Work]
    messages: list[_Work]
    autograd: list[float]
    """When functions of a backward began, on the host."""


def measure_traces(plan: Plan, folder: Path) -> Measured:
    """The steps that the traces in a folder show, one file for each rank of one pipeline."""
    _refuse_what_traces_do_not_tell(plan)
    if not folder.is_dir():
        raise InputError([Problem(str(folder), "", "is no folder, expected one with a trace of each rank")])
    files = sorted(file for file in folder.iterdir() if file.name.endswith((".json", ".json.gz")) and file.is_file())
    if len(files) != plan.num_ranks:
        expected = f"expected {plan.num_ranks}, those of the ranks of one pipeline"
        raise InputError([Problem(str(folder), "", f"has {len(files)} traces (.json or .json.gz), {expected}")])
    traces = sorted((_read(file) for file in files), key=lambda trace: trace.rank)
    for one, other in itertools.pairwise(traces):
        if one.rank == other.rank:
            message = f"is of rank {one.rank}, as {one.file.name} is, expected one trace of each"
            raise InputError([Problem(str(other.file), "distributedInfo.rank", message)])
    takers = set(program_of(plan).senders())
    rows = [
        list(_steps_of(plan, trace, actions, takers)) for trace, actions in zip(traces, rank_actions(plan), strict=True)
    ]
    counts = {trace.file.name: len(found) for trace, found in zip(traces, rows, strict=True)}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} in {name}" for name, count in counts.items())
        raise InputError([Problem(str(folder), "", f"has steps: {found}; expected as many in each")])
    steps = [_step(plan, ranks) for ranks in zip(*_on_one_clock(plan, traces, rows), strict=True)]
    device = "cuda" if any(trace.has_device for trace in traces) else "cpu"
    return Measured(device=device, engine="torch", steps=tuple(steps))


def _refuse_what_traces_do_not_tell(plan: Plan) -> None:
    if any(action.kind == "R" for actions in rank_actions(plan) for action in actions):
        message = (
            "has recomputations of their own, which torch has inside the backward, "
            "expected plan.recompute_unit: layer, or plan.checkpoint: never"
        )
        raise InputError([Problem("--traces", "", f"the plan {message}")])
    if plan.tensor > 1:
        message = (
            f"has tensor groups of {plan.tensor}, whose collectives are not read from traces, expected plan.tensor: 1"
        )
        raise InputError([Problem("--traces", "", f"the plan {message}")])
    if plan.replicas > 1:
        message = (
            f"has {plan.replicas} replicas, whose collectives are not read from traces, "
            "expected the plan of one, with its share of the batch"
        )
        raise InputError([Problem("--traces", "", f"the plan {message}")])


# --- a file -----------------------------------------------------------------------------------------------------------


def _read(file: Path) -> _Trace:
    """A trace; of its events only what is needed is kept while it is read, for it may have millions."""
    found = _Found()

    def keep(event: dict[str, Any]) -> None:
        category, name = str(event.get("cat")), str(event.get("name"))
        if event.get("ph") != "X" or not _is_told(category, name):
            return
        try:
            found.add(category, name, event)
        except (TypeError, ValueError, OverflowError) as error:
            message = "has an event whose ts or dur is no number, expected microseconds"
            raise InputError([Problem(str(file), "traceEvents", message)]) from error

    content = read_trace(file, keep, ("distributedInfo", "baseTimeNanoseconds", "host_name"))
    if "traceEvents" not in content:
        raise InputError([Problem(str(file), "traceEvents", "is missing, expected a trace of torch's profiler")])
    rank = content["distributedInfo"].get("rank") if isinstance(content.get("distributedInfo"), dict) else None
    if type(rank) is not int:
        message = "is missing, expected the rank: a trace recorded after init_process_group has it"
        raise InputError([Problem(str(file), "distributedInfo.rank", message)])
    base = content.get("baseTimeNanoseconds", 0)
    if type(base) is not int or not 0 <= base < 2**63:
        message = f"found {shown(base)}, expected nanoseconds since 1970"
        raise InputError([Problem(str(file), "baseTimeNanoseconds", message)])
    return found.trace(file, rank, str(content.get("host_name")), base)


def _is_told(category: str, name: str) -> bool:
    """Whether an event is needed."""
    if category == "python_function":
        return _CHUNK.fullmatch(name) is not None
    return category in ("cpu_op", "user_annotation", *_DEVICE_WORK, *_LAUNCHES)


def _is_message(span: _Span) -> bool:
    """Whether a device's work is NCCL's."""
    return "nccl" in span.name.lower()


class _Found:
    """What is told by the events of a trace, while it is read.

    A device's work belongs to the moment when the host launched it; compute is what the busiest stream does.
    """

    def __init__(self) -> None:
        self.has_device = False
        self.annotations: list[_Span] = []
        self.updates: list[_Span] = []
        self.chunks: list[_Span] = []
        self.autograd: list[float] = []
        self.operators: list[_Work] = []
        self.receives: list[_Work] = []
        self.launches: dict[object, float] = {}
        self.of_device: list[tuple[object, object, _Span]] = []

    def add(self, category: str, name: str, event: Mapping[str, Any]) -> None:
        """One more event."""
        start = _seconds(event.get("ts"))
        span = _Span(start, start + _seconds(event.get("dur") or 0), name)
        if not math.isfinite(span.end) or span.end < span.start:
            raise ValueError(span)
        arguments = event.get("args")
        correlation, stream = (
            (arguments.get("correlation"), arguments.get("stream")) if isinstance(arguments, dict) else (None, None)
        )
        self.has_device |= category == "kernel"
        if category in _LAUNCHES:
            self.launches[_key(correlation)] = span.start
        elif category in _DEVICE_WORK:
            self.of_device.append((_key(correlation), _key(stream), span))
        elif category == "python_function":
            self.chunks.append(span)
        elif category == "cpu_op":
            if name.startswith(_AUTOGRAD):
                self.autograd.append(span.start)
            if not name.startswith(("c10d::", "record_param_comms")):
                self.operators.append(_Work(span.start, span.start, span.end))
        elif name == "gloo:recv":
            self.receives.append(_Work(span.start, span.start, span.end))
        elif name.startswith(_UPDATE):
            self.updates.append(span)
        elif _RUNTIME.fullmatch(name) or _SINGLE.fullmatch(name):
            self.annotations.append(span)

    def trace(self, file: Path, rank: int, host: str, base_ns: int) -> _Trace:
        """All of it, everything in the order of its launch."""
        work, messages = ([], []) if self.has_device else (self.operators, self.receives)
        busy: Counter[object] = Counter()
        for _, stream, span in self.of_device:
            busy[stream] += 0.0 if _is_message(span) else span.end - span.start  # type: ignore[assignment]  # seconds
        most = max(busy.values(), default=0)
        for correlation, stream, span in self.of_device:
            if correlation in self.launches and (_is_message(span) or busy[stream] == most):
                to = messages if _is_message(span) else work
                to.append(_Work(self.launches[correlation], span.start, span.end))
        for found in (self.annotations, self.updates, self.chunks, work, messages, self.autograd):
            cast(list[Any], found).sort()
        return _Trace(
            file=file,
            rank=rank,
            host=host,
            base_ns=base_ns,
            has_device=self.has_device,
            annotations=self.annotations,
            updates=self.updates,
            chunks=self.chunks,
            work=work,
            messages=messages,
            autograd=self.autograd,
        )


def _seconds(microseconds: object) -> float:
    if isinstance(microseconds, bool) or not isinstance(microseconds, int | float):
        raise TypeError(microseconds)
    return microseconds * 1e-6


def _key(value: object) -> object:
    """A number of the trace's, or nothing."""
    return value if type(value) in (int, str) else None


# --- a rank -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Rows:
    """One rank in one step: a row for each of its actions, in seconds of its own clock."""

    start: Array
    end: Array
    arrived: Array
    """NaN where nothing was received."""

    def moved(self, by: float) -> "_Rows":
        """The same on another clock."""
        return _Rows(start=self.start + by, end=self.end + by, arrived=self.arrived + by)


def _steps_of(plan: Plan, trace: _Trace, actions: Sequence[Action], takers: Container[Action]) -> Iterator[_Rows]:
    """Every step of a rank; its actions must be the plan's, in their order."""
    expected = [action for action in actions if action.kind != "U"]
    ranges = _ranges(trace, expected, plan.num_stages)
    found = [(position, action) for position, span in enumerate(ranges) for action in span.actions]
    for row, (_, action) in enumerate(found):
        step, index = divmod(row, len(expected))
        if action != expected[index]:
            message = f"action {index} of step {step} is {action}, expected {expected[index]}, as in the plan"
            raise InputError([Problem(str(trace.file), "traceEvents", message)])
    if not found or len(found) % len(expected):
        message = f"has {len(found)} actions, expected a multiple of {len(expected)}: whole steps"
        raise InputError([Problem(str(trace.file), "traceEvents", message)])
    if len(found) > limits.STEPS * len(expected):
        message = f"has {len(found) // len(expected)} steps, expected at most {limits.STEPS}: profile fewer"
        raise InputError([Problem(str(trace.file), "traceEvents", message)])
    lasts = [position for position, _ in found[len(expected) - 1 :: len(expected)]]
    starts = [*(ranges[position].start for position, _ in found[len(expected) :: len(expected)]), math.inf]
    for before, last, until in zip([-1, *lasts], lasts, starts, strict=False):
        first, end = (bisect_left(trace.updates, (at,)) for at in (ranges[last].end, until))
        updates = trace.updates[first:end]
        since = ranges[before].end if before >= 0 else -math.inf
        yield _rows(trace, ranges[before + 1 : last + 1], since, updates, takers)


def _ranges(trace: _Trace, expected: Sequence[Action], num_stages: int) -> list[_Range]:
    """When the host was in which action."""
    runtime = [(span, match) for span in trace.annotations if (match := _RUNTIME.fullmatch(span.name))]
    if runtime:
        return [_runtime_range(span, match) for span, match in runtime]
    stages = {action.stage for action in expected}
    single = [(span, match) for span in trace.annotations if (match := _SINGLE.fullmatch(span.name))]
    if len(stages) == 1 and single:
        kinds: dict[str, Letter] = {"Forward": "F", "Backward": "B"}
        (stage,) = stages
        ranges = [_Range(a.start, a.end, (Action(kinds[m[1]], stage, int(m[2])),)) for a, m in single]
    elif len(stages) == 1 and trace.chunks:
        letters: dict[bool, Letter] = {True: "F", False: "B"}
        (stage,) = stages
        counts: Counter[Letter] = Counter()
        order = {kind: [action.microbatch for action in expected if action.kind == kind] for kind in letters.values()}
        ranges = []
        for span in trace.chunks:
            kind = letters[span.name.endswith("forward_one_chunk")]
            microbatches = order[kind]
            microbatch = microbatches[counts[kind] % len(microbatches)] if microbatches else counts[kind]
            ranges.append(_Range(span.start, span.end, (Action(kind, stage, microbatch),)))
            counts[kind] += 1
    else:
        message = (
            "names no stages, expected torch's PP:2F0, or Forward 0 and Backward 0; Schedule1F1B names nothing: record "
            "it with_stack=True, or run it from a file of `gpipe export --to csv`"
        )
        raise InputError([Problem(str(trace.file), "traceEvents", message)])
    if stage < num_stages - 1:
        return ranges
    # The loss is computed after the last stage's forward, before whatever comes next.
    ends = [span.start if before.actions[0].kind == "F" else before.end for before, span in itertools.pairwise(ranges)]
    return [span._replace(end=end) for span, end in zip(ranges, [*ends, ranges[-1].end], strict=True)]


def _runtime_range(span: _Span, match: re.Match[str]) -> _Range:
    """What one of torch's names stands for; messages, shards and sums are no actions."""
    names = match["pair"].split(";") if match["pair"] else [match["one"]]
    actions = tuple(_action(found) for name in names if (found := _ACTION.fullmatch(name.strip())))
    receive = _RECEIVE.fullmatch(match["one"] or "")
    return _Range(span.start, span.end, actions, _action(receive) if receive else None)


def _action(found: re.Match[str]) -> Action:
    return Action(cast(Letter, found[2]), int(found[1]), int(found[3]))


def _rows(
    trace: _Trace, ranges: Sequence[_Range], before: float, updates: Sequence[_Span], takers: Container[Action]
) -> _Rows:
    """One step of a rank. What launches nothing, as a first stage's I, lasts no time, once its message is there.

    `before` is when the step before it had ended.
    """
    start, end, arrived = [], [], []
    received: dict[tuple[int, int, bool], float] = {}
    free = ranges[0].start
    for span in ranges:
        if span.taker is not None:
            messages = _launched(trace.messages, span.start, span.end)
            received[_direction(span.taker)] = max((message.end for message in messages), default=math.nan)
        for action, (since, until) in zip(span.actions, _windows(trace, span), strict=True):
            work = _launched(trace.work, since, until)
            came = math.nan
            if action in takers:
                first = work[0].launched if work else until
                unnamed = (message.end for message in _launched(trace.messages, before, first))
                came = received.pop(_direction(action), math.nan)
                came = max(unnamed, default=math.nan) if math.isnan(came) else came
            began = min((one.start for one in work), default=np.fmax(free, came))
            free = max((one.end for one in work), default=began)
            if action in takers:  # at the latest it came when it was taken
                came = np.fmin(began, came)
            start.append(began)
            end.append(free)
            arrived.append(came)
            before = work[-1].launched if work else since
    work = [one for span in updates for one in _launched(trace.work, span.start, span.end)]
    start.append(min((one.start for one in work), default=free))
    end.append(max((one.end for one in work), default=free))
    arrived.append(math.nan)
    if any(later < earlier for earlier, later in itertools.pairwise(start)):
        message = "has actions that compute at once, expected one after the other"
        raise InputError([Problem(str(trace.file), "traceEvents", message)])
    return _Rows(start=np.array(start), end=np.array(end), arrived=np.array(arrived))


def _direction(action: Action) -> tuple[int, int, bool]:
    """What a message is for: torch calls it RECV_B whether a whole backward takes it or its first half."""
    return action.stage, action.microbatch, action.kind == "F"


def _windows(trace: _Trace, span: _Range) -> list[tuple[float, float]]:
    """When the host was in each of a range's actions: of two, the second is a backward."""
    if len(span.actions) < 2:
        return [(span.start, span.end)] * len(span.actions)
    first, second = span.actions[0].kind, span.actions[1].kind
    at = bisect_left(trace.autograd, span.start)
    if len(span.actions) > 2 or first != "F" or second == "F":
        message = f"has {';'.join(map(str, span.actions))} in one, expected a forward and a backward"
        raise InputError([Problem(str(trace.file), "traceEvents", message)])
    boundary = min(trace.autograd[at], span.end) if at < len(trace.autograd) else span.end
    return [(span.start, boundary), (boundary, span.end)]


def _launched(work: Sequence[_Work], since: float, until: float) -> Sequence[_Work]:
    """What was launched from one moment to another."""
    return work[bisect_left(work, (since,)) : bisect_left(work, (until,))]


# --- all of them ------------------------------------------------------------------------------------------------------


def _on_one_clock(plan: Plan, traces: Sequence[_Trace], rows: Sequence[Sequence[_Rows]]) -> list[list[_Rows]]:
    """Every rank's steps on the clock of the pipeline's first.

    No message arrives before it is sent. Where clocks of two hosts say otherwise, the later one of two neighbours is
    moved to the middle of what messages there and back allow.
    """
    first = traces[0].base_ns
    moved = [
        [step.moved((trace.base_ns - first) * 1e-9) for step in of_rank]
        for trace, of_rank in zip(traces, rows, strict=True)
    ]
    order = [plan.ranks.index(rank) for rank in plan.pipeline]
    for before, after in itertools.pairwise(order):
        slack = _slack(plan, moved)
        least, most = -slack.get((before, after), math.inf), slack.get((after, before), math.inf)
        if traces[before].host != traces[after].host and not least <= 0 <= most and least <= most:
            by = (least + most) / 2 if math.isfinite(most) and math.isfinite(least) else (least if least > 0 else most)
            moved[after] = [step.moved(by) for step in moved[after]]
    for (before, after), slack_s in _slack(plan, moved).items():
        if slack_s < -_SAME_MOMENT_S:
            message = (
                f"takes a message {-slack_s:.3g} s before {traces[before].file.name} has computed it, "
                "expected traces of one run, those of a host by one clock"
            )
            raise InputError([Problem(str(traces[after].file), "traceEvents", message)])
    return moved


def _slack(plan: Plan, rows: Sequence[Sequence[_Rows]]) -> dict[tuple[int, int], float]:
    """From one rank to another, the least time that a message took."""
    actions = rank_actions(plan)
    at = {action: (rank, row) for rank, found in enumerate(actions) for row, action in enumerate(found)}
    slack: dict[tuple[int, int], float] = {}
    for taker, sender in program_of(plan).senders().items():
        (source, sent), (target, taken) = at[sender], at[taker]
        for one, other in zip(rows[source], rows[target], strict=True):
            took = float(other.arrived[taken] - one.end[sent])
            slack[source, target] = min(slack.get((source, target), math.inf), took)
    return slack


def _step(plan: Plan, ranks: Sequence[_Rows]) -> Step:
    """One step of all ranks; time counts from its first action."""
    origin = min(float(rows.start[0]) for rows in ranks)
    actions, program = rank_actions(plan), program_of(plan)
    arrivals = {
        a: float(t)
        for found, rows in zip(actions, ranks, strict=True)
        for a, t in zip(found, rows.arrived, strict=True)
    }
    delivered = {sender: arrivals[taker] - origin for taker, sender in program.senders().items()}
    timelines = []
    for rank, found, rows in zip(plan.ranks, actions, ranks, strict=True):
        sent = np.array([delivered.get(action, math.nan) for action in found])
        end = rows.end - origin
        timelines.append(
            RankTimeline(
                rank=rank,
                actions=found,
                start_s=rows.start - origin,
                end_s=end,
                arrived_s=rows.arrived - origin,
                send_start_s=np.where(np.isnan(sent), math.nan, np.fmin(end, sent)),
                send_end_s=sent,
                blocking=not plan.scenario.cluster.overlap,
            )
        )
    return Step(program=program, ranks=tuple(timelines))
