"""A step as the page's own timeline draws it: columns of numbers, as compact as they can be sent.

The drawing is in `dashboard/page/assets/timeline.js`. One entry per action, rank after rank:

    first     where each rank's actions begin; one more at the end
    start     end    arrived    send_start    send_end      seconds, NaN where there is none
    kind      stage    microbatch
    sender    the action whose message it took, -1 where it took none
    collected    when the collectives that it waits for had ended, NaN where there is none

for each rank its memory, from one moment to the next, and for each collective of its lane five numbers: the rank's row,
which of `lane_kinds` it is, its stage, its start and its end.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpipe_sim.base.arrays import Array
from gpipe_sim.plan.actions import COLLECTIVES
from gpipe_sim.plan.plan import Plan
from gpipe_sim.show import palette
from gpipe_sim.step.metrics import step_time_s
from gpipe_sim.step.step import MemoryCurve, Span, Step

_MOST_POINTS = 2000
"""Of a memory curve: of a longer one, the highest of each stretch of time."""


def timeline_data(
    plan: Plan,
    step: Step,
    critical: Sequence[Span] | None = None,
    axis_s: float | None = None,
    ghost: tuple[str, Step] | None = None,
) -> str:
    """Everything that is drawn, as JSON; arrays are base64 of little-endian numbers.

    `axis_s` is what the whole width stands for, if it is not the step: so several have one axis. `ghost` is another
    step and its name, of which is shown, behind this one, when its ranks were busy.
    """
    ranks, letters = step.ranks, [letter for letter in palette.KINDS if letter not in COLLECTIVES]
    code = np.zeros(256, dtype=np.uint8)
    code[[ord(letter) for letter in letters]] = range(len(letters))
    row = {timeline.rank: index for index, timeline in enumerate(ranks)}

    def column(name: str) -> str:
        return _packed(np.concatenate([getattr(timeline, name) for timeline in ranks]), "<f4")

    actions = [timeline.actions for timeline in ranks]
    lane = [
        (index, COLLECTIVES.index(one.kind), one.stage, start, end)
        for index, timeline in enumerate(ranks)
        for one, start, end in zip(timeline.lane, timeline.lane_start_s, timeline.lane_end_s, strict=True)
    ]
    curves = [_thinned(curve, step_time_s(step)) for curve in step.memory]
    found: dict[str, Any] = {
        "step_time": step_time_s(step),
        "begin": min(timeline.first_start_s for timeline in ranks),
        "ranks": [timeline.rank for timeline in ranks],
        "stages": [list(timeline.stages) for timeline in ranks],
        "kinds": [_kind(letter) for letter in letters],
        "lane_kinds": [_kind(letter) for letter in COLLECTIVES],
        "lane": _packed(np.array(lane, dtype=float).ravel(), "<f4"),
        "replicas": plan.replicas,
        "limit": plan.memory_limit,
        "first": _packed(np.cumsum([0, *map(len, actions)]), "<i4"),
        "start": column("start_s"),
        "end": column("end_s"),
        "arrived": column("arrived_s"),
        "collected": column("collected_s"),
        "send_start": column("send_start_s"),
        "send_end": column("send_end_s"),
        "kind": _packed(np.concatenate([code[np.frombuffer(one.kinds, dtype=np.uint8)] for one in actions]), "u1"),
        "stage": _packed(np.concatenate([one.stages for one in actions]), "<i4"),
        "microbatch": _packed(np.concatenate([one.microbatches for one in actions]), "<i4"),
        "sender": _packed(_senders(plan, step), "<i4"),
        "memory_first": _packed(np.cumsum([0, *(len(times) for times, _ in curves)]), "<i4"),
        "memory_time": _packed(np.concatenate([times for times, _ in curves] or [np.empty(0)]), "<f4"),
        "memory": _packed(np.concatenate([total for _, total in curves] or [np.empty(0)]), "<f4"),
    }
    if ghost is not None:
        name, other = ghost
        axis_s = max(axis_s or 0.0, step_time_s(step), step_time_s(other))
        found["ghost"] = {"name": name, "step_time": step_time_s(other), "busy": _packed(_busy(other), "<f4")}
    if axis_s is not None:
        found["axis"] = axis_s
    if critical is not None:
        where = {"compute": 0, "send": 1, "collective": 2}
        spans = [(row[span.rank], where.get(span.lane, 0), span.start_s, span.end_s) for span in critical]
        found["critical"] = _packed(np.array(spans, dtype=float).ravel(), "<f4")
    return json.dumps(found)


def _busy(step: Step) -> Array:
    """Row, start and end of every stretch in which a rank was busy without a pause, one after the other."""
    found = []
    for row, timeline in enumerate(step.ranks):
        pause = timeline.start_s[1:] > timeline.end_s[:-1] + 1e-9 * step_time_s(step)
        starts = timeline.start_s[np.append(True, pause)]
        ends = timeline.end_s[np.append(pause, True)]
        found.append(np.stack([np.full(len(starts), row), starts, ends], axis=1))
    busy: Array = np.concatenate(found).ravel()
    return busy


def _kind(letter: str) -> dict[str, str]:
    return {"letter": letter, "name": palette.KIND_NAMES[letter], "colour": palette.KINDS[letter]}


def _packed(values: Any, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values).astype(kind).tobytes()).decode()


def _senders(plan: Plan, step: Step) -> Any:
    """The action, counted in the order of the step's ranks, that sent what each action took; of several, one."""
    program = step.program
    sizes = np.diff(program.first)
    position_of = {rank: position for position, rank in enumerate(plan.pipeline)}
    positions = [position_of[timeline.rank] for timeline in step.ranks]
    begins = np.zeros(len(sizes), dtype=int)
    begins[positions] = np.cumsum([0, *sizes[positions][:-1]])
    at_position = np.repeat(np.arange(len(sizes)), sizes)
    place = begins[at_position] + np.arange(program.num_actions) - program.first[at_position]
    message = program.takes.max(axis=1)
    sent = place[program.sender[np.maximum(message, 0)]] if program.num_messages else np.zeros(len(message), dtype=int)
    found = np.empty(program.num_actions, dtype=int)
    found[place] = np.where(message >= 0, sent, -1)
    return found


def _thinned(curve: MemoryCurve, end_s: float) -> tuple[Array, Array]:
    """Times and bytes; of a long curve, the highest of each of many stretches of the step."""
    times, total = curve.times, curve.total
    if len(times) <= _MOST_POINTS:
        return times, total
    bounds = np.searchsorted(times, np.linspace(0, end_s, _MOST_POINTS // 2))
    bounds = np.unique(np.minimum(bounds, len(times) - 1))
    highest: Array = np.maximum.reduceat(total, bounds)
    return times[bounds], highest
