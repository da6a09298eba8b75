"""Wires: which receives are begun when, and which operations share a communicator.

A *wire* leads from one rank to another and carries the messages of all channels between the two. There are two kinds of
backend:

    tags       messages find their receive by a number (gloo): receives of a channel are begun in the order of taking
    in order   no numbers (NCCL): the operations of a communicator run on each rank in the order in which they are
               begun, and a send ends when its receive has begun

In order, two rules make that no operation ever waits for one that waits for it, whatever the program:

    1. On each communicator a rank has one wire only, so one peer and one direction (`communicators`).
    2. The receives of a wire are begun in the order of its sends, each at the latest before the first action that takes
       it or anything sent after it (`posts_of`).

By the second, an action waits only for messages whose receives have all been begun; by the first, nothing else is in
front of them. What an action waits for is then what the program says, which has no cycle. `progress` checks it.

Receives are begun at *moments* of a rank: 0 is the step's begin, 2 a + 1 when action a has taken its message, 2 a + 2
when action a has ended (so that 2 a is also just before action a takes its message).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpipe_sim.plan.program import Channel, Program

Wire = tuple[int, int]
"""The positions of the rank that sends and of the one that receives."""

AHEAD = 1
"""In order, a receive is begun at most so many actions before the one that takes it: until it is served it occupies the
device. Where senders wait it is begun sooner, so that they wait less."""


class Receive(NamedTuple):
    """A receive to begin."""

    channel: int
    microbatch: int


def wire_of(channel: Channel) -> Wire:
    """From which position to which."""
    return channel.sender, channel.receiver


def communicators(program: Program) -> dict[Wire, int]:
    """The number of each wire's communicator, as few as a greedy choice finds, so that no rank has two wires on one.

    Of a chain of ranks these are four: even and odd edges, in each direction.
    """
    found: dict[Wire, int] = {}
    forward_first = sorted(
        {wire_of(channel) for channel in program.channels}, key=lambda wire: (wire[0] > wire[1], wire)
    )
    for wire in forward_first:
        taken = {number for other, number in found.items() if {*other} & {*wire}}
        found[wire] = next(number for number in range(len(found) + 1) if number not in taken)
    return found


def posts_of(
    program: Program,
    position: int,
    window: int | None,
    *,
    in_order: bool,
    blocking: bool = False,
    forwards_only: bool = False,
) -> list[list[Receive]]:
    """Moment -> the receives that a rank begins then.

    Taking a message begins the receive that comes `window` turns later on its channel. A gradient looks like the output
    that it belongs to, so its receive is begun after that output was sent. With `forwards_only` the rank runs its
    forwards and nothing else, and rows count those.
    """
    M, first = program.num_microbatches, int(program.first[position])
    kinds = program.order[position].kinds
    rows = np.full(len(kinds), -1)
    kept = [row for row, kind in enumerate(kinds) if not forwards_only or chr(kind) == "F"]
    rows[kept] = np.arange(len(kept))
    posters = program.poster(window)
    microbatches = program.microbatches
    lanes: dict[int | Wire, list[tuple[int, int, int, Receive]]] = {}
    for number, channel in enumerate(program.channels):
        if channel.receiver != position or (forwards_only and not channel.is_forward):
            continue
        lane = lanes.setdefault(wire_of(channel) if in_order else number, [])
        for message in range(number * M, (number + 1) * M):
            m, taker = int(microbatches[message]), int(rows[program.taker[message] - first])
            moment = 0 if posters[message] < 0 else 2 * int(rows[posters[message] - first]) + 1
            if not channel.is_forward:
                moment = max(moment, 2 * int(rows[program.at["F"][channel.target, m] - first]) + 2)
            if in_order and not blocking:
                moment = max(moment, 2 * (taker - AHEAD))
            turn = int(program.sender[message]) if in_order else int(program.turn[message])
            lane.append((turn, moment, 2 * taker, Receive(number, m)))
    posts: list[list[Receive]] = [[] for _ in range(2 * len(kept) + 1)]
    for lane in lanes.values():
        lane.sort()
        for moment, receive in zip(_in_turn(lane), (entry[-1] for entry in lane), strict=True):
            posts[moment].append(receive)
    return posts


def _in_turn(lane: Sequence[tuple[int, int, int, Receive]]) -> list[int]:
    """The moments of receives that are begun one after the other: none before the one in front of it, and none later
    than anything behind it is needed."""
    latest = np.minimum.accumulate([needed for _, _, needed, _ in reversed(lane)])[::-1]
    earliest = np.maximum.accumulate([moment for _, moment, _, _ in lane])
    found: list[int] = np.minimum(latest, earliest).tolist()
    return found
