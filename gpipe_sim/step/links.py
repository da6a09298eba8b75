"""Carriers in the simulation: one for each channel of the program, first in first out.

    sender     ==2F0==|                       a message is sent when its action ends,
    link              |..queue..|##bytes/bw##|     starts once its receive is posted and the link is free,
    receiver                                  |~latency~|==3F0==   and arrives a latency after its last byte.

Latency delays, it does not occupy. Consuming a message posts the receive of a later one (`Program.poster`). A dedicated
link needs no event of its own: when a message starts, its arrival is known, and only a rank that is already waiting for
it needs to be woken. Links through a shared NIC proceed at fair rates (`fairshare`), which do need events.

Carriers that lead from one rank to the same other one share a wire. It gives every message its turn in the order of
sending; a message whose receive is not posted by then stands aside, and the wire goes on without it:

    wire       |#a0#|#a1#|#b0#|        a1's receive is posted late: it takes its time then, b0 did not wait for it

Messages are numbered from 0 in the order of sending, on each carrier.
"""

from array import array
from collections import deque
from collections.abc import Collection, Mapping

from simpy import Environment, Event

from gpipe_sim.base.arrays import Array, Indices
from gpipe_sim.plan.plan import Nic
from gpipe_sim.step.fairshare import FairShare

_UNKNOWN = float("inf")
_NO_LIMIT = 2**62


class Wire:
    """What several carriers between the same two ranks share."""

    def __init__(self) -> None:
        self.free = 0.0
        """When it has given all that was sent so far its turn."""
        self.waiting: deque[SharedCarrier] = deque()
        """Where NICs are shared: whose message is next, one entry a message."""
        self.busy = False


class Carrier:
    """The messages of one channel."""

    def __init__(
        self, env: Environment, name: str, occupancy: Array, latency: float, turn: Indices, window: int | None
    ) -> None:
        """`occupancy` is in seconds, a message each; `turn` says in which order the receiver takes them."""
        self.env = env
        self.name = name
        self.occupancy = array("d", occupancy.tobytes())
        self.latency = latency
        self.turn = array("i", turn.tobytes())
        self.posted = _NO_LIMIT if window is None else window
        """How many receives have been posted so far."""
        self.start = array("d", [_UNKNOWN]) * len(occupancy)
        self.arrival = array("d", [_UNKNOWN]) * len(occupancy)
        self.free = 0.0
        self.num_sent = self.num_started = 0
        self.waiting: dict[int, list[Event]] = {}
        self.wire: Wire | None = None
        """If it is shared."""
        self.turns = array("d")
        """When the wire gave each message its turn."""

    def send(self, now: float) -> None:
        """The sender's action has ended, and the next message is sent."""
        wire = self.wire
        if wire is not None:
            earliest = wire.free if wire.free > now else now
            wire.free = earliest + self.occupancy[self.num_sent]
            self.turns.append(earliest)
        self.num_sent += 1
        self.advance(now)

    def post(self, now: float) -> None:
        """The receiver has taken a message and posts its next receive."""
        self.posted += 1
        if self.num_started < self.num_sent:
            self.advance(now)

    def advance(self, now: float) -> None:
        """Start every message whose turn has come."""
        message, last, turn, posted = self.num_started, self.num_sent, self.turn, self.posted
        while message < last and turn[message] < posted:
            start = self.free if self.free > now else now
            if self.wire is not None and self.turns[message] > start:
                start = self.turns[message]
            self.start[message] = start
            self.free = free = start + self.occupancy[message]
            self.arrival[message] = free + self.latency
            if self.waiting:
                self.wake(message)
            message += 1
        self.num_started = message

    def wake(self, message: int) -> None:
        """The message's arrival is now known to whoever waits for it."""
        for waiter in self.waiting.pop(message, ()):
            waiter.succeed()

    def wait(self, message: int) -> Event:
        """An event at the message's arrival or, where that is not known yet, when it becomes known.

        The clock may be short of the arrival by a rounding error after it: who waits looks again, and the difference
        of two close numbers is exact.
        """
        if self.arrival[message] < _UNKNOWN:
            return self.env.timeout(self.arrival[message] - self.env.now)
        known = Event(self.env)
        self.waiting.setdefault(message, []).append(known)
        return known


class ReplayedCarrier(Carrier):
    """A channel some of whose messages take the time that they were measured to take, whatever the link says."""

    given: Mapping[int, float]
    """Message -> seconds from its sending to its arrival."""

    def advance(self, now: float) -> None:
        """As the link does, unless the time was measured."""
        while self.num_started < self.num_sent:
            message = self.num_started
            if message in self.given:
                self.start[message] = now
                self.arrival[message] = now + self.given[message]
                self.num_started += 1
                self.wake(message)
            else:
                super().advance(now)
                if self.num_started == message:
                    return


class SharedCarrier(Carrier):
    """A channel whose messages pass NICs that other traffic passes too; one message of its wire at a time."""

    sizes: Array
    """Bytes of each message."""
    bandwidth: float
    nics: FairShare[Nic]
    uses: Collection[Nic]
    line: Wire
    """Its own, or the one that it shares with others."""

    def send(self, now: float) -> None:
        """The next message queues up for the wire."""
        self.num_sent += 1
        self.line.waiting.append(self)
        self.advance(now)

    def advance(self, now: float) -> None:
        """Start the first message on the wire whose receive is posted, if none is on its way."""
        line = self.line
        if line.busy:
            return
        for carrier in line.waiting:
            message = carrier.num_started
            if carrier.turn[message] < carrier.posted:
                line.waiting.remove(carrier)  # its first entry, which is this one
                carrier.begin(message, now)
                return

    def begin(self, message: int, now: float) -> None:
        """The message's first byte leaves."""
        self.line.busy = True
        self.num_started += 1
        self.start[message] = now
        flow = self.nics.run(float(self.sizes[message]), self.bandwidth, self.uses)
        assert flow.callbacks is not None, "a fresh event has not been processed"
        flow.callbacks.append(lambda _: self.carried(message))

    def carried(self, message: int) -> None:
        """The message's last byte has left the NIC."""
        self.line.busy = False
        self.arrival[message] = self.env.now + self.latency
        self.wake(message)
        self.advance(self.env.now)
