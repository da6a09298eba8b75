"""What waits for what in a step, sorted into waves that can be computed at once.

An action waits for the action before it on its rank and for its message; a message for its sender, for the message
before it on its channel, for its turn on the wire and for its receive to be posted:

    taken   = max(rank free, message arrived)                 rank free: the action before it ended
    end     = taken + overhead + seconds                                 (blocking: its message was delivered)
    wire    = max(end of sender, wire of the message before it there) + bytes / bandwidth
    free    = max(wire, max(channel free, receive posted) + bytes / bandwidth)
    arrival = free + latency

Where no wire is shared, a message's wire is free for it at once: wire = end of sender + bytes / bandwidth.

These times depend on the plan's figures, what waits for what only on its program. Everything in one wave waits for
earlier waves only, so that a wave is a few array operations, over its ranks and over any number of plans:

    wave     0   1   2   3   4
    rank 0   F0  F1  F2
    rank 1       F0  F1  F2
    rank 2           F0  F1  F2    ...

A rank may have an R in its list that a plan does not need: it takes no time, so plans that differ in what they
recompute still have the same program.

Collectives of replicas (`plan.lanes`) are no part of the waves. A first forward that waits for a gather waits for a
*gate*, a time that is known beforehand; sums and updates, for which nothing waits, follow after the last wave.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import NamedTuple

import numpy as np

from gpipe_sim.base.arrays import Array, Indices
from gpipe_sim.base.kept import kept
from gpipe_sim.plan.actions import COLLECTIVES, KINDS, Letter
from gpipe_sim.plan.program import Program, Shape, program_of_shape

Rows = slice | Indices
"""Rows of an array: a slice wherever they are evenly spaced, which costs no copy."""

_TIME_0: Rows = slice(0, 1)
"""Nothing is waited for."""

_ROOM = 2**19
"""Stages times micro-batches of all graphs that are kept; each takes some three hundred bytes."""


class Wave(NamedTuple):
    """Where a wave's times go, and which rows of the tables given to `Graph.times` they come from."""

    taken: slice
    end: slice
    free: slice
    """When each message frees its channel."""
    arrival: slice
    wire: slice
    """When each message's turn on its wire ends; empty where no wire is shared. These need not be the wave's messages,
    which may still wait for their receives."""
    seconds: Rows
    rank_free: tuple[Rows, ...]
    messages: tuple[Rows, ...]
    """Arrivals of the messages that the actions take."""
    occupancy: Rows
    edge: Rows
    sent: Rows
    """When each message was sent: its sender's end or, where wires are shared, the end of its turn there."""
    channel_free: Rows
    posted: Rows
    wired_occupancy: Rows
    wired_end: Rows
    """Ends of the senders of those that get their turn on the wire."""
    wire_free: Rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """The dependencies of one program. Times are rows of one table, wave by wave; row 0 is the time 0."""

    program: Program
    waves: tuple[Wave, ...]
    num_times: int
    is_wired: bool
    """Whether any wire is shared."""
    letters: tuple[Letter, ...]
    """The kinds in the table of seconds, in its order, U at its end."""
    taken: Indices
    """Action -> row of the time at which its rank turns to it."""
    end: Indices
    """Action -> row of its end."""
    delivered: Indices
    """Action -> row of its message's arrival, or of its own end if it sends nothing."""
    num_gates: int
    """Stages, if their first forwards wait for gates: row 1 on has those."""

    def times(
        self,
        seconds: Array,
        occupancy: Array,
        latency: Array,
        *,
        posted: bool = False,
        gates: Array | None = None,
    ) -> Array:
        """Solve the equations at the top of this file for every plan at once: rows of times, a column per plan.

        `seconds` has rows by kind, stage and micro-batch, then a row per position for U, all with their overhead;
        `occupancy` has rows by edge and micro-batch; `latency` by edge; `gates` by stage. If everything is `posted` at
        once, windows do not matter.
        """
        times = np.empty((self.num_times, seconds.shape[1]))
        times[0] = 0.0
        if self.num_gates:
            times[1 : 1 + self.num_gates] = gates

        def pick(table: Array, rows: Rows) -> Array:
            return table[rows] if isinstance(rows, slice) else table.take(rows, axis=0)

        for wave in self.waves:
            taken, free = times[wave.taken], times[wave.free]
            if len(taken):
                ready = pick(times, wave.rank_free[0])
                for rows in (*wave.rank_free[1:], *wave.messages):
                    if rows is not _TIME_0:
                        ready = np.maximum(ready, pick(times, rows), out=taken)
                if ready is not taken:
                    taken[:] = ready
                np.add(taken, pick(seconds, wave.seconds), out=times[wave.end])
            wire = times[wave.wire]
            if len(wire):
                np.maximum(pick(times, wave.wired_end), pick(times, wave.wire_free), out=wire)
                np.add(wire, pick(occupancy, wave.wired_occupancy), out=wire)
            if not len(free):
                continue
            carried = pick(occupancy, wave.occupancy)
            if self.is_wired:
                start = pick(times, wave.channel_free)
                if wave.posted is not _TIME_0 and not posted:
                    start = np.maximum(start, pick(times, wave.posted), out=free)
                np.add(start, carried, out=free)
                np.maximum(free, pick(times, wave.sent), out=free)
            else:
                start = pick(times, wave.sent)
                if wave.channel_free is not _TIME_0:
                    start = np.maximum(start, pick(times, wave.channel_free), out=free)
                if wave.posted is not _TIME_0 and not posted:
                    start = np.maximum(start, pick(times, wave.posted), out=free)
                np.add(start, carried, out=free)
            np.add(free, pick(latency, wave.edge), out=times[wave.arrival])
        return times


@kept(Shape.num_cells, room=_ROOM, most=48)
def graph_of(shape: Shape) -> Graph | None:
    """The dependencies of plans of this shape, in waves; None if the schedule cannot finish."""
    return make_graph(program_of_shape(shape), shape.window, blocking=shape.blocking)


def make_graph(program: Program, window: int | None, *, blocking: bool) -> Graph | None:
    """The dependencies of a program, in waves; None if it cannot finish."""
    poster = program.poster(window)
    waves = list(_waves(program, poster, blocking=blocking))
    if sum(len(actions) for actions, _, _ in waves) < program.num_actions:
        return None
    return _graph(program, poster, waves, blocking=blocking)


def _wires(program: Program) -> tuple[Indices, Indices]:
    """Messages wire by wire in the order of sending, and where each wire begins; nothing where no wire is shared."""
    if not (program.wired_after >= 0).any():
        return np.empty(0, dtype=int), np.zeros(1, dtype=int)
    M, by_wire = program.num_microbatches, dict[tuple[int, int], list[int]]()
    for number, channel in enumerate(program.channels):
        by_wire.setdefault((channel.sender, channel.receiver), []).append(number)
    found = []
    for channels in by_wire.values():
        messages = (np.array(channels)[:, None] * M + np.arange(M)).ravel()
        found.append(messages[np.argsort(program.sender[messages], kind="stable")])
    return np.concatenate(found), np.cumsum([0, *map(len, found)])


def _waves(program: Program, poster: Indices, *, blocking: bool) -> Iterator[tuple[Indices, Indices, Indices]]:
    """Actions, turns on wires and messages of each wave: every rank, wire and channel goes one further, unless it must
    wait."""
    M = program.num_microbatches
    action_done, message_done = (np.zeros(n + 1, dtype=bool) for n in (program.num_actions, program.num_messages))
    action_done[-1] = message_done[-1] = True
    none = np.full((1, 1), -1)
    takes = np.concatenate([program.takes, np.repeat(none, program.takes.shape[1], axis=1)])
    held_by = np.concatenate([np.repeat(none, program.sends.shape[1], axis=1), program.sends])
    if not blocking:
        held_by[:] = -1
    held_by[program.first[:-1]] = -1
    sender, posting = (np.append(found, -1) for found in (program.sender, poster))
    on_wires, wire_first = _wires(program)
    next_turn, last_turn = wire_first[:-1].copy(), wire_first[1:]
    turned = np.full(program.num_messages + 1, len(on_wires) == 0)
    turned[-1] = True
    on_wires = np.append(on_wires, -1)
    next_action, last_action = program.first[:-1].copy(), program.first[1:]
    next_message = np.arange(len(program.channels)) * M
    last_message = next_message + M
    while True:
        ready = (next_action < last_action) & message_done[takes[next_action]].all(axis=1)
        ready &= message_done[held_by[next_action]].all(axis=1)
        actions = next_action[ready]
        action_done[actions] = True
        next_action = next_action + ready
        turns = (next_turn < last_turn) & action_done[sender[on_wires[next_turn]]]
        wired = on_wires[next_turn[turns]]
        turned[wired] = True
        next_turn = next_turn + turns
        goes = (next_message < last_message) & action_done[sender[next_message]] & action_done[posting[next_message]]
        goes &= turned[next_message]
        messages = next_message[goes]
        message_done[messages] = True
        next_message = next_message + goes
        if not len(actions) and not len(messages) and not len(wired):
            return
        yield actions, messages, wired


def _graph(
    program: Program, poster: Indices, waves: Sequence[tuple[Indices, Indices, Indices]], *, blocking: bool
) -> Graph:
    """Number the rows of the table of times, wave by wave, and say for each which rows it comes from."""
    M, num_actions, num_messages = program.num_microbatches, program.num_actions, program.num_messages
    actions, messages, wired = (np.concatenate(parts) for parts in zip(*waves, strict=True))
    num = np.array([[len(part) for part in wave] for wave in waves])
    bounds = np.concatenate([np.zeros((1, 3), dtype=int), np.cumsum(num, axis=0)])
    is_wired = len(wired) > 0
    gate = _gates(program)
    num_gates = len(program.at["F"]) if gate.any() else 0
    rows = np.cumsum(np.insert(num[:, [0, 0, 1, 1, 2]].ravel(), 0, 1 + num_gates))  # in the order of a Wave's fields
    begins = rows[:-1].reshape(-1, 5).T
    taken, end = np.empty((2, num_actions), dtype=int)
    free, arrival, wire = np.zeros((3, num_messages + 1), dtype=int)  # no message: row 0
    for numbers, begin, order, which in (
        (taken, begins[0], actions, 0),
        (end, begins[1], actions, 0),
        (free, begins[2], messages, 1),
        (arrival, begins[3], messages, 1),
        (wire, begins[4], wired, 2),
    ):
        numbers[order] = np.repeat(begin - bounds[:-1, which], num[:, which]) + np.arange(len(order))

    delivered = np.where(program.sends >= 0, arrival[program.sends], end[:, None])
    rank_free: list[Indices] = [np.append(0, ends)[:-1] for ends in (delivered.T if blocking else end[None])]
    for ends in rank_free:
        ends[program.first[:-1]] = 0
    rank_free += [gate] if num_gates else []
    channel_free = np.append(0, free)[:num_messages]
    channel_free[::M] = 0
    sent = wire[:num_messages] if is_wired else end[program.sender]
    wire_free = wire[program.wired_after]  # row 0 where none is before
    posted = np.where(poster >= 0, taken[poster], 0)
    letters, seconds = _rows_of_seconds(program)
    edge = np.repeat([channel.edge for channel in program.channels], M).astype(int)
    microbatch = program.microbatches

    def by_wave(wanted: Indices, order: Indices, column: int) -> list[Rows]:
        return _stretches(wanted[order], bounds[:, column])

    def all_by_wave(columns: Sequence[Indices]) -> list[tuple[Rows, ...]]:
        return list(zip(*(by_wave(column, actions, 0) for column in columns), strict=True))

    # In the order of a Wave's fields.
    sources = [
        by_wave(seconds, actions, 0),
        all_by_wave(rank_free),
        all_by_wave(list(arrival[program.takes].T)),
        *(by_wave(column, messages, 1) for column in (edge * M + microbatch, edge, sent, channel_free, posted)),
        *(by_wave(column, wired, 2) for column in (edge * M + microbatch, end[program.sender], wire_free)),
    ]
    places = list(starmap(slice, pairwise(rows.tolist())))
    return Graph(
        program=program,
        waves=tuple(Wave(*places[5 * i : 5 * i + 5], *found) for i, found in enumerate(zip(*sources, strict=True))),  # type: ignore[arg-type]  # mixed columns
        num_times=int(rows[-1]),
        is_wired=is_wired,
        letters=letters,
        taken=taken,
        end=end,
        delivered=delivered[:, 0],
        num_gates=num_gates,
    )


def _gates(program: Program) -> Indices:
    """Action -> row of the gate that it waits for, that of its stage; 0 for none."""
    rows = np.zeros(program.num_actions, dtype=int)
    for first, lane in zip(program.first.tolist(), program.lanes, strict=False):
        for collective in lane:
            if collective.kind == "G" and collective.before >= 0:
                rows[first + collective.before] = 1 + collective.stage
    return rows


def _rows_of_seconds(program: Program) -> tuple[tuple[Letter, ...], Indices]:
    """The kinds that a table of seconds needs, and the row of each action there."""
    M, S = program.num_microbatches, len(program.at["F"])
    own = [letter for letter in KINDS if letter != "U" and letter not in COLLECTIVES]
    letters = tuple(letter for letter in own if letter == "F" or (program.at[letter] >= 0).any())
    rows = np.empty(program.num_actions, dtype=int)
    for place, letter in enumerate(letters):
        actions = program.at[letter]
        there = actions >= 0
        rows[actions[there]] = place * S * M + np.flatnonzero(there.ravel())
    rows[program.first[1:] - 1] = len(letters) * S * M + np.arange(program.num_ranks)
    return letters, rows


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
