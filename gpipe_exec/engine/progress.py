"""Does a step end? A model of hosts, compute streams and communicators, without time: only who waits for whom.

    host           tells works to the streams of its device, one after the other, and waits for none of them
    compute        a stream: its works run in the order of telling; some wait for a transfer first
    communicator   a stream on each rank: a transfer is begun when the one before it has ended and the compute stream
                   has come to where it was told; it ends when its other half has begun too

A work *begins* when its host has told it, the one before it on its stream has ended and what it needs has ended; it
*ends* at once, or when the work that it *meets* has begun as well. Works that can never end wait for each other.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gpipe_exec.engine.wires import Receive, Wire, communicators, posts_of, wire_of
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
    meets: "Work | None" = None
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
        work.ended = work.begun and (work.meets is None or work.meets.begun)
        return work.ended


def meet(one: Work, other: Work) -> None:
    """Neither ends before the other has begun."""
    one.meets, other.meets = other, one


def step_of(
    program: Program,
    window: int | None,
    *,
    blocking: bool = False,
    warm: bool = True,
    host_computes: bool = False,
    num_steps: int = 1,
) -> Machine:
    """The steps of a program where communicators run in order.

    Cold, a communicator is made when its two hosts first use it, and each waits there for the other. Where the host
    computes, it also waits for each action, as on the CPU.
    """
    machine, numbers = Machine(), communicators(program)
    M = program.num_microbatches
    microbatches = program.microbatches
    sends: dict[tuple[int, int, int], tuple[Work, Work]] = {}
    """Step, channel, micro-batch -> told by its host, and the transfer."""
    receives: dict[tuple[int, int, int], Work] = {}
    joins: dict[Wire, list[Work]] = {}
    notices: list[tuple[Work, tuple[int, int, int]]] = []

    def transfer(name: str, position: int, wire: Wire) -> tuple[Work, Work]:
        told = machine.add(f"{name} is told", ("host", position))
        if not warm and position not in {work.stream[1] for work in joins.get(wire, ())}:
            joins.setdefault(wire, []).append(told)
        return told, machine.add(name, ("wire", numbers[wire], position), told, machine.latest(("compute", position)))

    def post(step: int, position: int, begun: Iterable[Receive]) -> None:
        for channel, m in begun:
            name = f"the receive of {program.channels[channel].name}, micro-batch {m}"
            _, receives[step, channel, m] = transfer(name, position, wire_of(program.channels[channel]))

    for step in range(num_steps):
        for position in range(program.num_ranks):
            host, compute = ("host", position), ("compute", position)
            first = int(program.first[position])
            posts = posts_of(program, position, window, in_order=True, blocking=blocking)

            post(step, position, posts[0])
            for row, action in enumerate(program.order[position]):
                taken, sent = int(program.takes[first + row, 0]), int(program.sends[first + row, 0])
                arrival = None
                if taken >= 0:
                    key = (step, taken // M, int(microbatches[taken]))
                    arrival = receives[key]
                    if program.channels[taken // M].is_forward:  # its form is told from host to host
                        notices.append((machine.add(f"the notice for {action}", host), key))
                waits = machine.add(f"{action} waits", compute, machine.add(f"{action} is told", host), arrival)
                if host_computes:
                    machine.add(f"the host waits for {action}", host, waits)
                post(step, position, posts[2 * row + 1])
                machine.add(str(action), compute, machine.latest(host))
                if sent >= 0:
                    channel, m = sent // M, int(microbatches[sent])
                    name = f"the send of {program.channels[channel].name}, micro-batch {m}"
                    sends[step, channel, m] = transfer(name, position, wire_of(program.channels[channel]))
                    if blocking:
                        delivered = machine.add(f"{action} waits for its delivery", compute, sends[step, channel, m][1])
                        if host_computes:
                            machine.add(f"the host waits for the delivery of {action}", host, delivered)
                post(step, position, posts[2 * row + 2])
    for key, (_, sending) in sends.items():
        meet(sending, receives[key])
    for notice, key in notices:
        notice.needs.append(sends[key][0])
    for pair in joins.values():
        meet(*pair)
    return machine


def refuse_deadlock(program: Program, window: int | None, *, blocking: bool) -> None:
    """Senders that wait may wait for each other; without them nothing can (`wires`)."""
    if blocking and (stuck := step_of(program, window, blocking=True).stuck()):
        raise DeadlockError(f"the step cannot finish: {_listed(work.name for work in stuck)}, expected overlap: true")


def _listed(names: Iterable[str]) -> str:
    return "; ".join(names)
