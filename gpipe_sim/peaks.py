"""The highest points of the memory curves, of many plans at once and without the curves.

Bytes are added only when a rank does something itself: it turns to an action and posts a receive, starts it, ends it.
(Posted bytes that arrive merely become inputs.) Between two such events its messages are delivered and it holds less
and less. So its peak is at one of its own events, whose order is known without sorting:

    event      0   F0 start  F0 end   F1 start  F1 end  ...
    change    +c      +a       -b        +a       -b
    delivered                     '--- F0's output: taken off at the first event at or after its delivery
    total     running sum; the peak is its maximum
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gpipe_sim.memory import Flags, Indices, StepBytes, holdings
from gpipe_sim.profile import Array

_FEW = 4
"""Events after a send that are looked at one by one for its delivery."""


class RankEvents(NamedTuple):
    """Every rank's own events, in order."""

    times: Array
    """By event, stage and plan. The first is the beginning, at 0; the last but one the end of the update; the last is
    at infinity."""
    rows: Mapping[str, Indices]
    """Moment -> stage, micro-batch -> event; also ``F taken`` and ``gradient taken``."""
    delivered: Mapping[str, Array]
    """Moment -> stage, micro-batch, plan -> time."""


def peaks(held: StepBytes, events: RankEvents, window: int | None) -> tuple[Array, Array]:
    """The highest total and, of it, the activation memory, by stage and plan, as the curves would have them."""
    times, rows = events.times, events.rows
    stages = np.arange(times.shape[1])[:, None]
    first_backward = rows["B end"] == rows["B end"].min(axis=1, keepdims=True)
    change: dict[str, Array] = {}
    for _, begin, end, amount in holdings(held, first_backward):
        change[begin] = change[begin] + amount if begin in change else amount
        change[end] = change[end] - amount if end in change else -amount

    total = np.zeros(times.shape)
    total[0] = sum(held.constant().values())
    for moment in rows.keys() & change.keys():
        total[rows[moment], stages] += change[moment]
    total[-2] += change["U end"].sum(axis=1)
    for moment, taken in (("F posted", rows["F taken"]), ("gradient posted", rows["gradient taken"])):
        order = np.argsort(taken, axis=1)
        ahead = order.shape[1] if window is None else window
        total[0] += change[moment][stages, order[:, :ahead]].sum(axis=1)
        if ahead < order.shape[1]:
            total[taken[stages, order[:, :-ahead]], stages] += change[moment][stages, order[:, ahead:]]
    for moment, sent in (("F delivered", rows["F end"]), ("B delivered", rows["B end"])):
        if change[moment].any():
            event = _next_event(times, sent, events.delivered[moment], wanted=change[moment] != 0)
            where = np.ravel_multi_index((event, stages[:, :, None], np.arange(times.shape[2])), total.shape)
            np.add.at(total.ravel(), where.ravel(), np.broadcast_to(change[moment], where.shape).ravel())
    _accumulate(total)
    total[:-1] *= times[1:] > times[:-1]  # events at the same time are one, the last of them
    first_gradient = rows["B end"].min(axis=1)
    before = np.array([total[:row, stage].max(axis=0) for stage, row in enumerate(first_gradient)])
    after = np.array([total[row:, stage].max(axis=0) for stage, row in enumerate(first_gradient)])
    model = held.parameters + held.optimizer + np.where(after > before, held.gradients, 0.0)
    highest = np.maximum(before, after)
    return highest, highest - model


def _accumulate(values: Array) -> None:
    """The running sum over the first axis, in place; row by row where rows are long, which is far faster."""
    if values[0].size < 64:
        np.cumsum(values, axis=0, out=values)
    else:
        for before, row in pairwise(values):
            row += before


def _next_event(times: Array, earliest: Indices, moments: Array, wanted: Flags) -> Indices:
    """The first event at or after each wanted moment, in every column at once; none is before `earliest`.

    Most follow within a few events, which is quickly checked. For the rest there is a binary search.
    """
    stages, event = np.arange(times.shape[1])[:, None], earliest[:, :, None]
    for ahead in range(_FEW):
        later = moments > times[np.minimum(earliest + ahead, len(times) - 1), stages]
        event = event + later
    later &= wanted
    stage, _, plan = np.nonzero(later)
    if len(stage):
        columns = np.ascontiguousarray(times.transpose(1, 2, 0))
        first = (stage * times.shape[2] + plan) * len(times)
        moment, low, high = moments[later], first + event[later], first + len(times) - 1
        for _ in range(len(times).bit_length()):
            middle = (low + high) // 2
            before = columns.take(middle) < moment
            low, high = np.where(before, middle + 1, low), np.where(before, high, middle)
        event[later] = low - first
    return event
