"""Step to a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per rank with named threads for compute, send, receive and the collectives of replicas, arrows from each
message to the action that it starts, and memory by part as counters. Messages that overlap in flight get a further send
thread each.
"""

import json
from collections.abc import Iterator
from typing import Any

from gpipe_sim.show.palette import KIND_NAMES
from gpipe_sim.step.step import RankTimeline, Step, stages_text

_COMPUTE, _RECEIVE, _SEND = 0, 1, 2
_COLLECTIVE = 1000
"""Below all send threads."""
_MICROSECONDS = 1e6


def to_trace(step: Step) -> str:
    """The trace file's text."""
    events = [event for timeline in step.ranks for event in _rank_events(timeline)]
    events += _arrows(step)
    for timeline, curve in zip(step.ranks, step.memory, strict=False):  # a measured step may have no memory
        for index, time in enumerate(curve.times):
            parts = {part: values[index] for part, values in curve.parts.items()}
            counter = {"ph": "C", "name": "memory (bytes)", "pid": timeline.rank, "ts": time * _MICROSECONDS}
            events.append(counter | {"args": parts})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _rank_events(timeline: RankTimeline) -> Iterator[dict[str, Any]]:
    yield _name("process_name", timeline.rank, 0, f"rank {timeline.rank}: {stages_text(timeline.stages)}")
    lane = [(_COLLECTIVE, "collectives")] if timeline.lane else []
    for thread, name in ((_COMPUTE, "compute"), (_RECEIVE, "receive"), *lane, (_SEND, "send")):
        yield _name("thread_name", timeline.rank, thread, name)
    busy_until: list[float] = []
    """Of each send thread."""
    for span in timeline.spans():
        thread = {"compute": _COMPUTE, "collective": _COLLECTIVE}.get(span.lane, _RECEIVE)
        if span.lane == "send":
            free = [line for line, until in enumerate(busy_until) if until <= span.start_s]
            line = free[0] if free else len(busy_until)
            if not free:
                busy_until.append(0.0)
                if line > 0:
                    yield _name("thread_name", timeline.rank, _SEND + line, f"send ({line + 1})")
            busy_until[line] = span.end_s
            thread = _SEND + line
        is_own = span.lane in ("compute", "collective")
        name = str(span.action) if is_own else f"{span.lane} {span.action}"
        yield {
            "ph": "X",
            "name": name,
            "cat": KIND_NAMES[span.action.kind] if is_own else span.lane,
            "pid": timeline.rank,
            "tid": thread,
            "ts": span.start_s * _MICROSECONDS,
            "dur": (span.end_s - span.start_s) * _MICROSECONDS,
            "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
        }


def _arrows(step: Step) -> Iterator[dict[str, Any]]:
    """From the end of the action that sent a message to the start of the one that took it."""
    place = {action: (timeline, row) for timeline in step.ranks for row, action in enumerate(timeline.actions)}
    senders, arrows = step.program.senders(), 0
    for timeline in step.ranks:
        for row, action in enumerate(timeline.actions):
            if not timeline.arrived_s[row] >= 0 or senders[action] not in place:
                continue
            source, sent = place[senders[action]]
            arrows += 1
            common = {"cat": "message", "name": "message", "id": arrows, "tid": _COMPUTE}
            yield common | {"ph": "s", "pid": source.rank, "ts": float(source.end_s[sent]) * _MICROSECONDS}
            arrival = float(timeline.start_s[row]) * _MICROSECONDS
            yield common | {"ph": "f", "bp": "e", "pid": timeline.rank, "ts": arrival}


def _name(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}
