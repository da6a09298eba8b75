"""The highest points of the memory curves, of many plans at once and without the curves.

Bytes are added only when a rank does something itself: it turns to an action and posts a receive, starts it, ends it.
(Posted bytes that arrive merely become inputs.) Between two such events its messages are delivered and it holds less
and less. So its peak is at one of its own events, whose order is known without sorting:

    event      0   F0 start  F0 end   F1 start  F1 end  ...
    change    +c      +a       -b        +a       -b
    delivered                     '--- F0's output: taken off at the first event at or after its delivery
    total     running sum; the peak is its maximum
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gpipe_sim.base.arrays import Array, Flags, Indices
from gpipe_sim.step.memory import Roles, StepBytes, holdings, sum_by_position

_FEW = 4
"""Events after a send that are looked at one by one for its delivery."""
_NARROW = 32
"""Up to so many plans numpy's running sum is faster than one addition after the other of whole rows."""


_OF_ITS_OWN = {"F start", "F end", "R start", "R end", "back start", "back end", "W start", "W end"}
"""Moments that have an event for each stage and micro-batch, and share none with each other."""


class RankEvents(NamedTuple):
    """Every rank's own events, in order, one rank after the other."""

    times: Array
    """By event and plan. A rank's first event is its beginning, at 0; its last but one the end of its update; its last
    is at infinity."""
    first: Indices
    """Position -> its first event; and, at the end, how many there are."""
    rows: Mapping[str, Indices]
    """Moment -> stage, micro-batch -> event; -1 where the stage and micro-batch have no such moment."""
    delivered: Mapping[str, tuple[Indices, Array]]
    """Moment -> event at which it was sent, and time of its delivery, by stage, micro-batch and plan."""


def peaks(held: StepBytes, role: Roles, positions: Sequence[int], events: RankEvents) -> tuple[Array, Array]:
    """The highest total and, of it, the activation memory, by position and plan, as the curves would have them."""
    times, rows, num_plans = events.times, events.rows, events.times.shape[1]
    change: dict[str, Array] = {}
    for _, begin, end, amount in holdings(held, role):
        change[begin] = change[begin] + amount if begin in change else amount
        change[end] = change[end] - amount if end in change else -amount

    total = np.empty(times.shape)
    untouched = np.ones(len(total), dtype=bool)
    for moment in _OF_ITS_OWN & change.keys():
        where, changed = _those_there(rows[moment], change[moment])
        total[where] = changed  # the first to touch these rows, which need not be zero before
        untouched[where] = False
    total[untouched] = 0.0
    total[events.first[:-1]] += sum(held.constant(positions).values())
    for moment, changed in change.items():
        if moment in ("U end", "F arrived", *events.delivered) or moment in _OF_ITS_OWN:
            continue  # what arrives was there already, as a posted receive
        if moment in ("F posted", "gradient posted"):
            _add_posted(total, rows[moment], changed)
        else:
            where, changed = _those_there(rows[moment], changed)
            total[where] += changed
    total[events.first[1:] - 2] += sum_by_position(change["U end"].sum(axis=1), positions)
    last = (events.first[1:] - 1)[list(positions)]
    for moment, (sent, delivered) in events.delivered.items():
        if moment in change and change[moment].any():
            event = _next_event(times, sent, last, delivered, wanted=change[moment] != 0)
            np.add.at(total.ravel(), (event * num_plans + np.arange(num_plans)).ravel(), _full(change[moment], event))
    _accumulate(total, events.first)
    # Events at the same time are one, the last of them.
    np.copyto(total[:-1], 0.0, where=times[1:] <= times[:-1])
    return _highest(held, positions, events, total)


def _those_there(where: Indices, changed: Array) -> tuple[Indices, Array]:
    """Without the stages and micro-batches that have no such moment."""
    there = where >= 0
    return (where, changed) if there.all() else (where[there], changed[there])


def _add_posted(total: Array, where: Indices, changed: Array) -> None:
    """Receives are posted one by one, but at the beginning of a rank, where as many are as its window allows."""
    posted, firsts, counts = np.unique(where, return_index=True, return_counts=True)
    flat = changed.reshape(-1, changed.shape[-1])
    alone = counts == 1
    total[posted[alone]] += flat[firsts[alone]]
    for event in posted[~alone]:
        total[event] += changed[where == event].sum(axis=0)


def _full(values: Array, like: Indices) -> Array:
    return np.broadcast_to(values, like.shape).ravel()


def _highest(held: StepBytes, positions: Sequence[int], events: RankEvents, total: Array) -> tuple[Array, Array]:
    """The peaks, and what of them is not of the model: gradients count from the moment a stage has them."""
    highest, model = np.zeros((2, len(events.first) - 1, total.shape[1]))
    gradients_from = np.where(events.rows["done"] >= 0, events.rows["done"], total.shape[0]).min(axis=1)
    constant = sum_by_position(held.parameters + held.optimizer, positions)
    for position, (begin, end) in enumerate(pairwise(events.first.tolist())):
        stages = sorted(
            (stage for stage, at in enumerate(positions) if at == position), key=lambda s: gradients_from[s]
        )
        borders = [begin, *gradients_from[stages].tolist(), end]
        held_so_far = constant[position]
        for number, (left, right) in enumerate(pairwise(borders)):
            if number:
                held_so_far = held_so_far + held.gradients[stages[number - 1]]
            here = total[left:right].max(axis=0, initial=-np.inf)
            model[position] = np.where(here > highest[position], held_so_far, model[position])
            highest[position] = np.maximum(highest[position], here)
    return highest, highest - model


def _accumulate(values: Array, first: Indices) -> None:
    """The running sums of every rank, in place; of all ranks at once where they have as many events."""
    lengths = np.diff(first)
    if len(set(lengths.tolist())) == 1:
        blocks = [values.reshape(len(lengths), lengths[0], -1)]
    else:
        blocks = [values[begin:end][None] for begin, end in pairwise(first.tolist())]
    for block in blocks:
        if block.shape[2] <= _NARROW:
            np.add.accumulate(block, axis=1, out=block)
            continue
        for event in range(1, block.shape[1]):
            block[:, event] += block[:, event - 1]


def _next_event(times: Array, earliest: Indices, last: Indices, moments: Array, wanted: Flags) -> Indices:
    """The first event at or after each wanted moment, in every column at once; none is before `earliest`.

    `last` is the last event of each stage's rank. Most follow within a few events, which is quickly checked. For the
    rest there is a binary search.
    """
    event = earliest[:, :, None]
    for ahead in range(_FEW):
        later = moments > times[np.minimum(earliest + ahead, last[:, None])]
        if not later.any():
            return np.broadcast_to(event, moments.shape)
        event = event + later
    later &= wanted
    stage, _, plan = np.nonzero(later)
    if len(stage):
        moment, low, high = moments[later], event[later], last[stage]
        for _ in range(int((high - low).max()).bit_length() + 1):
            middle = (low + high) // 2
            before = times[middle, plan] < moment
            low, high = np.where(before, middle + 1, low), np.where(before, high, middle)
        event[later] = low
    return event
