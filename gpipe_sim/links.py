"""Links in the simulation: a FIFO for each direction of each edge.

    sender     ==2F0==|                       a message is sent when its action ends,
    link              |..queue..|##bytes/bw##|     starts once its receive is posted and the link is free,
    receiver                                  |~latency~|==3F0==   and arrives a latency after its last byte.

Latency delays, it does not occupy. The receiver keeps `window` receives posted per edge: consuming a message posts the
next receive. A dedicated link needs no event of its own: when a message starts, its arrival is known, and only a rank
that is already waiting for it needs to be woken. Links through a shared NIC proceed at fair rates (`fairshare`), which
do need events.
"""

from array import array
from collections import deque
from collections.abc import Collection, Mapping
from heapq import heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from simpy import Environment, Event
from simpy.events import NORMAL

from gpipe_sim.fairshare import FairShare
from gpipe_sim.plan import Nic
from gpipe_sim.profile import Array

_UNKNOWN = float("inf")
_NO_LIMIT = 2**62


class _Wake(Event):
    """An event whose time is settled after someone already waits for it."""

    def at(self, time: float) -> None:
        """Exactly then: a delay would be added to the clock again, and rounded."""
        self._ok, self._value = True, None
        heappush(self.env._queue, (time, NORMAL, next(self.env._eid), self))


class Edge(NamedTuple):
    """The properties of one edge, the same in both directions."""

    bandwidth: float
    latency: float
    window: int | None


class Link:
    """One direction of one edge, all to itself."""

    def __init__(self, env: Environment, name: str, sizes: Array, edge: Edge) -> None:
        self.env = env
        self.name = name
        self.sizes = sizes
        self.occupancy = array("d", (sizes / edge.bandwidth).tobytes())
        self.latency = edge.latency
        self.posted = _NO_LIMIT if edge.window is None else edge.window
        """How many receives have been posted so far."""
        self.position = array("q", [_NO_LIMIT]) * len(sizes)
        """Micro-batch -> its place in the order in which the receiver posts."""
        self.start = array("d", [_UNKNOWN]) * len(sizes)
        self.arrival = array("d", [_UNKNOWN]) * len(sizes)
        self.free = 0.0
        self.queue: deque[int] = deque()
        self.waiting: dict[int, list[_Wake]] = {}

    def expect(self, microbatches: npt.NDArray[np.int32]) -> None:
        """The receiver will take them in this order."""
        np.frombuffer(self.position, dtype=np.int64)[microbatches] = np.arange(len(microbatches))

    def send(self, microbatch: int, now: float) -> None:
        """The sender's action has ended."""
        self.queue.append(microbatch)
        self.advance(now)

    def post(self, now: float) -> None:
        """The receiver has taken a message and posts its next receive."""
        self.posted += 1
        if self.queue:
            self.advance(now)

    def advance(self, now: float) -> None:
        """Start every message whose turn has come."""
        queue, position = self.queue, self.position
        while queue and position[queue[0]] < self.posted:
            microbatch = queue.popleft()
            start = self.free if self.free > now else now
            self.start[microbatch] = start
            self.free = free = start + self.occupancy[microbatch]
            self.arrival[microbatch] = free + self.latency
            if self.waiting:
                self.wake(microbatch)

    def wake(self, microbatch: int) -> None:
        """The message's arrival is now known to whoever waits for it."""
        for waiter in self.waiting.pop(microbatch, ()):
            waiter.at(self.arrival[microbatch])

    def wait(self, microbatch: int) -> Event:
        """An event at the message's arrival."""
        wake = _Wake(self.env)
        if self.arrival[microbatch] < _UNKNOWN:
            wake.at(self.arrival[microbatch])
        else:
            self.waiting.setdefault(microbatch, []).append(wake)
        return wake


class ReplayedLink(Link):
    """One direction of an edge, some of whose messages take the time that they were measured to take."""

    def __init__(self, env: Environment, name: str, sizes: Array, edge: Edge, given: Mapping[int, float]) -> None:
        super().__init__(env, name, sizes, edge)
        self.given = given

    def send(self, microbatch: int, now: float) -> None:
        """A measured message takes its measured time, whatever the link says."""
        if microbatch not in self.given:
            super().send(microbatch, now)
            return
        self.start[microbatch] = now
        self.arrival[microbatch] = now + self.given[microbatch]
        self.wake(microbatch)


class SharedLink(Link):
    """One direction of an edge whose messages pass NICs that other traffic passes too."""

    def __init__(
        self, env: Environment, name: str, sizes: Array, edge: Edge, nics: FairShare[Nic], uses: Collection[Nic]
    ) -> None:
        super().__init__(env, name, sizes, edge)
        self.nics, self.uses, self.bandwidth = nics, uses, edge.bandwidth
        self.carrying = False

    def advance(self, now: float) -> None:
        """Start the next message, if its turn has come and none is on its way."""
        if self.carrying or not self.queue or self.position[self.queue[0]] >= self.posted:
            return
        microbatch = self.queue.popleft()
        self.carrying = True
        self.start[microbatch] = now
        flow = self.nics.run(float(self.sizes[microbatch]), self.bandwidth, self.uses)
        assert flow.callbacks is not None, "a fresh event has not been processed"
        flow.callbacks.append(lambda _: self.carried(microbatch))

    def carried(self, microbatch: int) -> None:
        """The message's last byte has left the NIC."""
        self.carrying = False
        self.arrival[microbatch] = self.env.now + self.latency
        self.wake(microbatch)
        self.advance(self.env.now)
