"""Does a step end? A model of hosts, compute streams and communicators, without time: only who waits for whom.

    host           tells works to the streams of its device, one after the other, and waits for none of them
    compute        a stream: its works run in the order of telling; some wait for a transfer first
    communicator   a stream on each rank: a transfer is begun when the one before it has ended and the compute stream
                   has come to where it was told; it ends when its other half has begun too, a collective when all
                   of its parts have

A work *begins* when its host has told it, the one before it on its stream has ended and what it needs has ended; it
*ends* at once, or when the works that it *meets* have begun as well. Works that can never end wait for each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpipe_exec.engine.wires import Receive, communicators, posts_of, wire_of
from gpipe_sim.plan.lanes import Collective
from gpipe_sim.plan.program import DeadlockError, Program

Stream = tuple[str | int, ...]
"""Its name: what it is, and whose."""


@dataclass(eq=False, slots=True)
class Work:
    """Something on a stream."""

    name: str
    stream: Stream
    needs: list["Work"] = field(default_factory=list)
    """What must have ended before it begins."""
    meets: "list[Work]" = field(default_factory=list)
    """What must have begun before it ends."""
    begun: bool = False
    ended: bool = False


class Machine:
    """Streams of works."""

    def __init__(self) -> None:
        self._streams: dict[Stream, list[Work]] = {}

    def add(self, name: str, stream: Stream, *needs: Work | None) -> Work:
        """At the end of a stream."""
        work = Work(name, stream, [need for need in needs if need is not None])
        self._streams.setdefault(stream, []).append(work)
        return work

    def latest(self, stream: Stream) -> Work | None:
        """What was added last."""
        works = self._streams.get(stream)
        return works[-1] if works else None

    def latest_of(self, place: "Place") -> list[Work]:
        """What was added last to each of a rank's streams."""
        return [works[-1] for stream, works in self._streams.items() if stream[-2:] == place and stream[0] != "host"]

    def stuck(self) -> list[Work]:
        """Run everything; the first work of each stream that can never end."""
        places = dict.fromkeys(self._streams, 0)
        moving = True
        while moving:
            moving = False
            for stream, works in self._streams.items():
                place = places[stream]
                while place < len(works) and self._advances(works[place]):
                    place += 1
                moving |= place > places[stream] or (place < len(works) and self._begins(works[place]))
                places[stream] = place
        return [works[places[stream]] for stream, works in self._streams.items() if places[stream] < len(works)]

    def _begins(self, work: Work) -> bool:
        """Whether it begins just now."""
        if work.begun or not all(need.ended for need in work.needs):
            return False
        work.begun = True
        return True

    def _advances(self, work: Work) -> bool:
        """Whether it has ended."""
        self._begins(work)
        work.ended = work.begun and all(other.begun for other in work.meets)
        return work.ended


def meet(*works: Work) -> None:
    """None of them ends before all have begun."""
    for work in works:
        work.meets = [other for other in works if other is not work]


Place = tuple[int, int]
"""A position and a replica."""
Members = tuple[Place, ...]


class _Told:
    """Hosts that tell works to their streams, and the communicators among them."""

    def __init__(self, *, warm: bool) -> None:
        self.machine, self._warm = Machine(), warm
        self._joins: dict[tuple[Stream, Members], dict[Place, Work]] = {}
        """Communicator and who takes part -> the first use by each."""
        self._meetings: dict[tuple[object, ...], list[Work]] = {}

    def latest(self, what: str, place: Place) -> Work | None:
        """The latest of a rank's own stream."""
        return self.machine.latest((what, *place))

    def host(self, name: str, place: Place, *needs: Work | None) -> Work:
        """The host does, or waits for, something."""
        return self.machine.add(name, ("host", *place), *needs)

    def compute(self, name: str, place: Place, *needs: Work | None) -> Work:
        """The host has told it to the compute stream."""
        return self.machine.add(name, ("compute", *place), self.latest("host", place), *needs)

    def transfer(self, name: str, place: Place, communicator: Stream, members: Members) -> tuple[Work, Work]:
        """Told by the host, which stops there if the communicator is cold; and the transfer."""
        told = self.host(f"{name} is told", place)
        if not self._warm:
            self._joins.setdefault((communicator, members), {}).setdefault(place, told)
        stream = ("communicator", *communicator, *place)
        return told, self.machine.add(name, stream, told, self.latest("compute", place))

    def collective(self, name: str, place: Place, communicator: Stream, members: Members, step: int) -> Work:
        """Ends when all members have begun it."""
        _, work = self.transfer(name, place, communicator, members)
        self._meetings.setdefault((communicator, members, name, step), []).append(work)
        return work

    def synchronize(self, place: Place) -> None:
        """The host waits for all streams of its device."""
        self.host("the host waits for its device", place, *self.machine.latest_of(place))

    def end(self) -> Machine:
        """Everything is told."""
        for works in (*self._meetings.values(), *(list(first.values()) for first in self._joins.values())):
            meet(*works)
        return self.machine


def step_of(
    program: Program,
    window: int | None,
    *,
    blocking: bool = False,
    warm: bool = True,
    host_computes: bool = False,
    num_steps: int = 1,
    replicas: int = 1,
    tied: Sequence[int] = (),
    records: bool = False,
    early_sums: bool = True,
) -> Machine:
    """The steps of a program where communicators run in order, with the collectives of its replicas.

    Cold, a communicator is made when the hosts first use it, and each waits there for the others. Where the host
    computes, it also waits for each action, as on the CPU. The positions of `tied` share a parameter. Where a step is
    recorded (`records`), its host waits for its device as it begins and as it ends. Gradients of replicas are summed in
    the middle of a step, or (`early_sums`) at its end.
    """
    numbers, told = communicators(program), _Told(warm=warm)
    M, microbatches = program.num_microbatches, program.microbatches
    last = _last_position(program)
    sends: dict[tuple[int, ...], tuple[Work, Work]] = {}
    """Step, replica, channel, micro-batch -> told by its host, and the transfer."""
    receives: dict[tuple[int, ...], Work] = {}
    notices: list[tuple[Work, tuple[int, ...]]] = []

    def post(step: int, place: Place, begun: Iterable[Receive]) -> None:
        for channel, m in begun:
            name = f"the receive of {program.channels[channel].name}, micro-batch {m}"
            _, receives[step, place[1], channel, m] = told.transfer(name, place, *way(channel, place[1]))

    def way(channel: int, replica: int) -> tuple[Stream, Members]:
        wire = wire_of(program.channels[channel])
        return ("messages", numbers[wire]), tuple((position, replica) for position in wire)

    def rank(step: int, place: Place) -> None:
        position, replica = place
        alike = tuple((position, other) for other in range(replicas))
        pipeline = tuple((other, replica) for other in range(program.num_ranks))
        first, lane = int(program.first[position]), program.lanes[position]
        posts = posts_of(program, position, window, in_order=True, blocking=blocking)
        under_way: dict[str, Work] = {}

        def begin(collective: Collective) -> None:
            name = str(collective.action)
            under_way[name] = told.collective(name, place, ("alike", position), alike, step)

        def wait_for(kind: str, row: int | None = None) -> None:
            for one in lane:
                if one.kind == kind and (row is None or one.before == row):
                    told.compute(f"{one.action} is waited for", place, under_way[str(one.action)])

        if records:
            told.synchronize(place)
        post(step, place, posts[0])
        for one in lane:
            if one.kind == "G" and one.before >= 0:
                begin(one)
        for row, action in enumerate(program.order[position]):
            taken, sent = int(program.takes[first + row, 0]), int(program.sends[first + row, 0])
            arrival = None
            if taken >= 0:
                key = (step, replica, taken // M, int(microbatches[taken]))
                arrival = receives[key]
                if program.channels[taken // M].is_forward:  # its form is told from host to host
                    notices.append((told.host(f"the notice for {action}", place), key))
            told.host(f"{action} is told", place)
            waits = told.compute(f"{action} waits", place, arrival)
            if host_computes:
                told.host(f"the host waits for {action}", place, waits)
            wait_for("G", row)
            post(step, place, posts[2 * row + 1])
            if action.kind == "U":
                if not early_sums:
                    for one in lane:
                        if one.kind == "S":
                            begin(one)
                wait_for("S")
                if lane:  # which gradients there are
                    told.host("the host waits for the sums", place, told.latest("compute", place))
                if position in tied:
                    holders = tuple((other, replica) for other in tied)
                    told.compute(
                        "the tied sum is waited for",
                        place,
                        told.collective("the tied sum", place, ("tied",), holders, step),
                    )
                if position == last and replicas > 1:
                    told.compute(
                        "the summed loss is waited for",
                        place,
                        told.collective("the sum of the loss", place, ("alike", position), alike, step),
                    )
                if program.num_ranks > 1:
                    hears = told.collective("the loss", place, ("pipeline",), pipeline, step)
                    if position != last:
                        told.compute("the loss is waited for", place, hears)
            told.compute(str(action), place)
            if sent >= 0:
                channel, m = sent // M, int(microbatches[sent])
                name = f"the send of {program.channels[channel].name}, micro-batch {m}"
                sends[step, replica, channel, m] = told.transfer(name, place, *way(channel, replica))
                if blocking:
                    delivered = told.compute(
                        f"{action} waits for its delivery", place, sends[step, replica, channel, m][1]
                    )
                    if host_computes:
                        told.host(f"the host waits for the delivery of {action}", place, delivered)
            if early_sums:
                for one in lane:
                    if one.kind == "S" and one.after == row:
                        begin(one)
            post(step, place, posts[2 * row + 2])
        for one in lane:
            if one.kind == "G" and one.before < 0:
                begin(one)
        wait_for("G", -1)
        if records:
            told.synchronize(place)

    for step in range(num_steps):
        for position in range(program.num_ranks):
            for replica in range(replicas):
                rank(step, (position, replica))
    for key, (_, sending) in sends.items():
        meet(sending, receives[key])
    for notice, key in notices:
        notice.needs.append(sends[key][0])
    return told.end()


def _last_position(program: Program) -> int:
    """Where the loss is computed."""
    last = len(program.at["F"]) - 1
    return next(position for position, actions in enumerate(program.order) if last in actions.stages.tolist())


def refuse_deadlock(program: Program, window: int | None, *, blocking: bool) -> None:
    """Senders that wait may wait for each other; without them nothing can (`wires`)."""
    if blocking and (stuck := step_of(program, window, blocking=True).stuck()):
        raise DeadlockError(f"the step cannot finish: {_listed(work.name for work in stuck)}, expected overlap: true")


def _listed(names: Iterable[str]) -> str:
    return "; ".join(names)
