"""What waits for what in a step, sorted into waves that can be computed at once.

An action waits for the action before it on its rank and for its message; a message for its sender, for the message
before it on its link and for its receive to be posted:

    taken   = max(rank free, message arrived)                 rank free: the action before it ended
    end     = taken + overhead + seconds                                 (blocking: its message was delivered)
    free    = max(end of sender, link free, receive posted) + bytes / bandwidth
    arrival = free + latency

These times depend on the plan's figures, what waits for what only on its shape. Everything in one wave waits for
earlier waves only, so that a wave is a few array operations, over its ranks and over any number of plans:

    wave     0   1   2   3   4
    stage 0  F0  F1  F2
    stage 1      F0  F1  F2
    stage 2          F0  F1  F2    ...

A rank may have an R in its list that a plan does not need: it takes no time, so plans that differ in what they
recompute still have the same shape.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, starmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_sim.plan import Plan
from gpipe_sim.profile import Array
from gpipe_sim.scenario import BackwardOrder, Recompute, ScheduleName
from gpipe_sim.schedule import gradient_taker, stage_order

Indices = npt.NDArray[np.intp]
Rows = slice | Indices
"""Rows of an array: a slice wherever they are evenly spaced, which costs no copy."""

_TIME_0: Rows = slice(0, 1)
"""Nothing is waited for."""
_KINDS = "FRBU"


class Shape(NamedTuple):
    """What plans must have in common to have the same dependencies."""

    num_stages: int
    num_microbatches: int
    schedule: ScheduleName
    backward: BackwardOrder
    recompute: Recompute
    recomputes: bool
    """Whether anything is recomputed at all."""
    window: int | None
    """None if every receive is posted at once."""
    blocking: bool


def shape_of(plan: Plan, *, communication: bool = True) -> Shape:
    """The plan's shape; without communication nothing blocks."""
    recomputes = any(any(plan.recomputed(stage)) for stage in range(plan.num_stages))
    return Shape(
        plan.num_stages,
        plan.num_microbatches,
        plan.schedule,
        plan.backward,
        plan.recompute if recomputes else "early",
        recomputes,
        plan.window if plan.window is not None and plan.window < plan.num_microbatches else None,
        communication and not plan.scenario.cluster.overlap,
    )


class Wave(NamedTuple):
    """Where a wave's times go, and which rows of the tables given to `Graph.times` they come from."""

    taken: slice
    end: slice
    free: slice
    """When each message frees its link."""
    arrival: slice
    seconds: Rows
    rank_free: Rows
    message: Rows
    """Arrivals of the messages that the actions take."""
    occupancy: Rows
    edge: Rows
    sender_end: Rows
    link_free: Rows
    posted: Rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """The dependencies of every plan of one shape. Times are rows of one table, wave by wave; row 0 is the time 0."""

    waves: tuple[Wave, ...]
    num_times: int
    place: dict[str, Indices]
    """Kind (F, B and, if anything is recomputed, R) -> stage, micro-batch -> place in the stage's list."""
    taken: Indices
    """Stage, place -> row of the time at which the rank turns to that action."""
    end: Indices
    delivered: dict[str, Indices]
    """Kind (F, B) -> stage, micro-batch -> row of its message's arrival, or of its own end if it sends nothing."""

    def times(self, seconds: Array, occupancy: Array, latency: Array, *, posted: bool = False) -> Array:
        """Solve the equations at the top of this file for every plan at once: rows of times, a column per plan.

        `seconds` has rows by kind (F, R, B), stage and micro-batch, then a row per stage for U, all with their
        overhead; `occupancy` has rows by edge and micro-batch; `latency` by edge. If everything is `posted` at once,
        windows do not matter.
        """
        times = np.empty((self.num_times, seconds.shape[1]))
        times[0] = 0.0

        def pick(table: Array, rows: Rows) -> Array:
            return table[rows] if isinstance(rows, slice) else table.take(rows, axis=0)

        for wave in self.waves:
            taken, free = times[wave.taken], times[wave.free]
            if wave.message is _TIME_0:
                taken[:] = pick(times, wave.rank_free)
            else:
                np.maximum(pick(times, wave.rank_free), pick(times, wave.message), out=taken)
            np.add(taken, pick(seconds, wave.seconds), out=times[wave.end])
            if not len(free):
                continue
            start = pick(times, wave.sender_end)
            if wave.link_free is not _TIME_0:
                start = np.maximum(start, pick(times, wave.link_free), out=free)
            if wave.posted is not _TIME_0 and not posted:
                start = np.maximum(start, pick(times, wave.posted), out=free)
            np.add(start, pick(occupancy, wave.occupancy), out=free)
            np.add(free, pick(latency, wave.edge), out=times[wave.arrival])
        return times


@lru_cache(maxsize=48)
def graph_of(shape: Shape) -> Graph | None:
    """The dependencies of plans of this shape, in waves; None if the schedule cannot finish."""
    program = _Program(shape)
    waves = list(program.waves())
    finished = sum(len(actions) for actions, _ in waves) == program.num_actions
    return program.graph(waves) if finished else None


class _Program:
    """Every action and message of a shape, numbered: actions by stage and place in its list, messages by link and
    place in the order of sending. Links 0 to K-2 lead forward, links K-1 to 2K-3 back over the same edges.

    The number -1 is that of no action or message at all.
    """

    def __init__(self, shape: Shape) -> None:
        K, M = shape.num_stages, shape.num_microbatches
        self.shape, self.num_links = shape, 2 * (K - 1)
        again = (shape.recomputes,) * M
        orders = [zip(*stage_order(shape.schedule, k, K, M, shape.backward, again), strict=True) for k in range(K)]
        kinds, microbatches = zip(*orders, strict=True)
        letters = np.frombuffer("".join(map("".join, kinds)).encode(), dtype=np.uint8)
        self.kind = np.select([letters == ord(kind) for kind in _KINDS], list(range(len(_KINDS)))).reshape(K, -1)
        self.microbatch = np.array(microbatches)
        self.length = self.kind.shape[1]
        self.first = np.arange(K)[:, None] * self.length
        self.num_actions, self.num_messages = K * self.length, self.num_links * M
        stages, places = np.nonzero(self.microbatch >= 0)
        where = np.full((3, K, M), -1)
        where[self.kind[stages, places], stages, self.microbatch[stages, places]] = places
        self.place: dict[str, Indices] = dict(zip(_KINDS, where, strict=False))
        self.action = {kind: self.first + place for kind, place in self.place.items()}
        self._connect()

    def _connect(self) -> None:
        """Who sends and who takes each message, and who posts its receive."""
        M, window, numbers = self.shape.num_microbatches, self.shape.window, np.arange(self.num_messages)
        taker = gradient_taker(self.shape.recompute, self.shape.recomputes)
        senders = np.concatenate([self.action["F"][:-1], self.action["B"][1:]])
        takers = np.concatenate([self.action["F"][1:], self.action[taker][:-1]])
        order = np.argsort(senders, axis=1)
        takers = np.take_along_axis(takers, order, axis=1)
        self.sender, self.sent_microbatch = np.take_along_axis(senders, order, axis=1).ravel(), order.ravel()
        self.source, self.message = np.full((2, self.num_actions), -1)
        """The message that each action takes and the one that it sends."""
        self.source[takers.ravel()] = numbers
        self.message[self.sender] = numbers
        self.poster = np.full(self.num_messages, -1)
        if window is not None:
            posting = np.argsort(takers, axis=1)
            later = numbers[::M, None] + posting[:, window:]
            self.poster[later] = np.take_along_axis(takers, posting[:, :-window], axis=1)

    def waves(self) -> Iterator[tuple[Indices, Indices]]:
        """Actions and messages of each wave: every rank and every link goes one further, unless it must wait."""
        action_done, message_done = (np.zeros(n + 1, dtype=bool) for n in (self.num_actions, self.num_messages))
        action_done[-1] = message_done[-1] = True
        source, sender, poster = (np.append(numbers, -1) for numbers in (self.source, self.sender, self.poster))
        held_by = np.append(-1, self.message) if self.shape.blocking else np.full_like(source, -1)
        held_by[self.first] = -1
        next_action, last_action = self.first[:, 0].copy(), self.first[:, 0] + self.length
        next_message = np.arange(self.num_links) * self.shape.num_microbatches
        last_message = next_message + self.shape.num_microbatches
        while True:
            ready = (next_action < last_action) & message_done[source[next_action]] & message_done[held_by[next_action]]
            actions = next_action[ready]
            action_done[actions] = True
            next_action += ready
            goes = (next_message < last_message) & action_done[sender[next_message]] & action_done[poster[next_message]]
            messages = next_message[goes]
            message_done[messages] = True
            next_message += goes
            if not len(actions) and not len(messages):
                return
            yield actions, messages

    def graph(self, waves: Sequence[tuple[Indices, Indices]]) -> Graph:
        """Number the rows of the table of times, wave by wave, and say for each which rows it comes from."""
        K, M = self.shape.num_stages, self.shape.num_microbatches
        actions, messages = (np.concatenate(parts) for parts in zip(*waves, strict=True))
        num = np.array([[len(part) for part in wave] for wave in waves])
        bounds = np.concatenate([np.zeros((1, 2), dtype=int), np.cumsum(num, axis=0)])
        rows = np.cumsum(np.insert(np.repeat(num, 2, axis=1).ravel(), 0, 1))
        taken_rows, end_rows, free_rows, arrival_rows = rows[:-1].reshape(-1, 4).T
        taken, end = np.empty((2, self.num_actions), dtype=int)
        free, arrival = np.zeros((2, self.num_messages + 1), dtype=int)  # no message: row 0
        for numbers, begins, order, column in (
            (taken, taken_rows, actions, 0),
            (end, end_rows, actions, 0),
            (free, free_rows, messages, 1),
            (arrival, arrival_rows, messages, 1),
        ):
            numbers[order] = np.repeat(begins - bounds[:-1, column], num[:, column]) + np.arange(len(order))

        delivered = np.where(self.message >= 0, arrival[self.message], end)
        rank_free = np.append(0, (delivered if self.shape.blocking else end)[:-1])
        rank_free[self.first] = 0
        link_free = np.append(0, free)[: self.num_messages]
        link_free[::M] = 0
        posted = np.where(self.poster >= 0, taken[self.poster], 0)
        kind, stage, microbatch = self.kind.ravel(), np.repeat(np.arange(K), self.length), self.microbatch.ravel()
        seconds = np.where(kind == _KINDS.index("U"), 3 * K * M + stage, (kind * K + stage) * M + microbatch)
        edge = np.repeat(np.arange(self.num_links) % max(K - 1, 1), M)
        # In the order of a Wave's fields.
        of_actions = (seconds, rank_free, arrival[self.source])
        of_messages = (edge * M + self.sent_microbatch, edge, end[self.sender], link_free, posted)
        sources = [_stretches(wanted[actions], bounds[:, 0]) for wanted in of_actions]
        sources += [_stretches(wanted[messages], bounds[:, 1]) for wanted in of_messages]
        places = list(starmap(slice, pairwise(rows.tolist())))
        return Graph(
            waves=tuple(Wave(*places[4 * i : 4 * i + 4], *found) for i, found in enumerate(zip(*sources, strict=True))),
            num_times=int(rows[-1]),
            place={kind: place for kind, place in self.place.items() if kind != "R" or self.shape.recomputes},
            taken=taken.reshape(K, -1),
            end=end.reshape(K, -1),
            delivered={kind: delivered[self.action[kind]] for kind in ("F", "B")},
        )


def _stretches(rows: Indices, bounds: Indices) -> list[Rows]:
    """Cut rows into stretches, each a slice if it is evenly spaced, or a single row if all of it is the same."""
    found: list[Rows] = [slice(0, 0)] * (len(bounds) - 1)
    where = np.flatnonzero(np.diff(bounds))
    firsts, lasts = bounds[where], bounds[where + 1] - 1
    steps = np.append(np.diff(rows), 0)
    bends = np.cumsum(np.append(0, np.diff(steps) != 0))  # how often the spacing has changed
    even = bends[firsts] == bends[np.maximum(lasts - 1, firsts)]
    step = np.where(lasts > firsts, steps[firsts], 0)
    columns = (where, firsts, lasts, even, step, rows[firsts], rows[lasts])
    for wave, first, last, is_even, by, begin, end in zip(*(column.tolist() for column in columns), strict=True):
        if not is_even:
            found[wave] = rows[first : last + 1]
        elif by == 0:
            found[wave] = slice(begin, begin + 1) if begin > 0 else _TIME_0
        else:
            stop = end + (1 if by > 0 else -1)
            found[wave] = slice(begin, stop if stop >= 0 else None, by)
    return found
