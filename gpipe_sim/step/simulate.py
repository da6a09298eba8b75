"""The SimPy model of a step: ranks that work through the program's actions, carriers between them.

Each rank is a process that takes its actions in order, each as soon as its messages have arrived; `links` carry
messages between them. Ranks that are pinned to the same core proceed at fair rates (`fairshare`). Replicas meet in the
collectives of their `lanes`; where they are alike, one of them stands for all.
"""

from array import array
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import NamedTuple

import numpy as np
from simpy import Environment, Event
from simpy.core import EmptySchedule

from gpipe_sim.base.arrays import Array, Flags, Indices
from gpipe_sim.plan.actions import Action, Letter
from gpipe_sim.plan.figures import ALL_EFFECTS, Effects, Figures, figures_of
from gpipe_sim.plan.order import ActionList
from gpipe_sim.plan.plan import Plan, backward_route
from gpipe_sim.plan.program import DeadlockError, Program, compile_program, program_of, shape_of
from gpipe_sim.step.fairshare import FairShare
from gpipe_sim.step.jitter import jitter_factors
from gpipe_sim.step.lanes import lane_processes
from gpipe_sim.step.links import Carrier, ReplayedCarrier, SharedCarrier, Wire
from gpipe_sim.step.memory import memory_curves
from gpipe_sim.step.step import RankTimeline, Step, joined_replicas


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Measured figures that take the place of the model's: what a step would have taken with them.

    Nothing is shared in a replay: sharing is in the figures already.
    """

    compute: Mapping[Action, float] = field(default_factory=dict)
    """Seconds of each action."""
    transfers: Mapping[Action, float] = field(default_factory=dict)
    """Sender -> seconds from the end of the action to the delivery of its message."""
    gaps: Mapping[Action, float] | None = None
    """Seconds between being ready for each action and its start, instead of the engine's overhead."""
    collectives: Mapping[Action, float] = field(default_factory=dict)
    """Seconds of each collective, the same in all replicas."""


_EVENTS = 50_000
"""SimPy events between two calls of `advance`: a fraction of a second."""


def simulate(
    plan: Plan,
    *,
    effects: Effects = ALL_EFFECTS,
    sample: int | None = None,
    actions: Sequence[Iterable[Action]] | None = None,
    replay: Sequence[Replay] | None = None,
    memory: bool = True,
    advance: Callable[[float], None] = lambda _: None,
) -> Step:
    """Predict one step of the plan.

    `sample` draws that sample of the scenario's jitter; without it, compute times are the profile's. `actions` replaces
    the plan's own order, rank by rank as `rank_actions` has them, by the same actions in another order. `replay` puts
    measured figures, of each replica, in the place of modelled ones. `advance` is called with shares of the actions as
    they are simulated, which sum to 1.
    """
    program = program_of(plan) if actions is None else _reordered(plan, actions)
    if replay is not None:
        effects = replace(effects, sharing=False)
    replays = replay or [Replay()] * plan.simulated_replicas
    each = [_figures(plan, effects, sample, replica) for replica in range(len(replays))]
    world = _World(plan, program, each[0], effects, replays)
    pairs = zip(each, replays, strict=True)
    replicas = [_Replica(world, figures, own, number) for number, (figures, own) in enumerate(pairs)]
    world.run(replicas, advance)
    timelines = [replica.timelines() for replica in replicas]
    steps = [
        Step(program=program, ranks=ranks, memory=memory_curves(plan, program, ranks) if memory else ())
        for ranks in timelines
    ]
    return joined_replicas(steps)


def _figures(plan: Plan, effects: Effects, sample: int | None, replica: int) -> Figures:
    figures = figures_of([plan], effects, replica)
    if sample is None:
        return figures
    factors = jitter_factors(plan, [sample], replica)
    return replace(figures, seconds={letter: values * factors[letter] for letter, values in figures.seconds.items()})


def _reordered(plan: Plan, actions: Sequence[Iterable[Action]]) -> Program:
    """The program of the plan's own actions in another order."""
    order = tuple(ActionList.of(actions[plan.ranks.index(rank)]) for rank in plan.pipeline)
    if list(map(set, order)) != list(map(set, program_of(plan).order)):
        raise ValueError("the action lists have other actions than the plan, expected its own in another order")
    on_demand, shard = plan.recompute == "on_demand", shape_of(plan).shard
    return compile_program(order, plan.positions, on_demand=on_demand, shard=shard)


_Way = tuple[Carrier | None, Carrier | None]
"""Where an action takes its message from, and where it sends its own."""


class _Rows(NamedTuple):
    """What a rank's process needs of each action: columns, because there may be millions.

    An action that takes or sends more than one message is preceded, or followed, by rows without any work, one for each
    further message.
    """

    overheads: Iterable[float]
    """The engine's, before each action."""
    seconds: "array[float]"
    messages: "array[int]"
    """The number of the message that is taken, on its carrier."""
    ways: "array[int]"
    """The number of the action's way."""
    meets: Iterable[int]
    """One more than the row, in the rank's list, of an action that waits for a collective, or that one comes after."""
    is_action: Flags | None
    """Which rows are actions; None if all of them are."""


class _Carried(NamedTuple):
    """When each message began and arrived; the last number is that of no message, and not a number."""

    starts: Array
    arrivals: Array

    @classmethod
    def by(cls, carriers: Sequence[Carrier]) -> "_Carried":
        """These carriers, one after the other."""
        starts, arrivals = ([getattr(carrier, name) for carrier in carriers] for name in ("start", "arrival"))
        return cls(*(np.concatenate([*map(np.frombuffer, columns), [np.nan]]) for columns in (starts, arrivals)))


class _World:
    """One plan under one set of effects: what its replicas share, and the events of all of them."""

    def __init__(
        self, plan: Plan, program: Program, figures: Figures, effects: Effects, replays: Sequence[Replay]
    ) -> None:
        self.plan, self.program, self.effects = plan, program, effects
        self.env = Environment()
        self.nics = FairShare(self.env, {nic: plan.nic_capacity(nic) for nic in plan.shared_nics})
        self.cores = self._cores()
        measured = replays[0].collectives
        self.lanes = lane_processes(self.env, plan, program, figures, effects, self.nics, len(replays), measured)

    def run(self, replicas: Sequence["_Replica"], advance: Callable[[float], None]) -> None:
        """All events; refuse what cannot finish."""
        in_order = [self.plan.pipeline.index(rank) for rank in self.plan.ranks]
        processes = [
            (replica, position, self.env.process(replica.rank(position)))
            for replica in replicas
            for position in in_order
        ]
        self._run_events(replicas, advance)
        stuck = [(replica, position) for replica, position, process in processes if process.is_alive]
        if stuck:
            reasons = [f"rank {replica.rank_at(position)} {replica.waiting(position)}" for replica, position in stuck]
            raise DeadlockError("the schedule cannot finish: " + "; ".join(reasons))

    def _run_events(self, replicas: Sequence["_Replica"], advance: Callable[[float], None]) -> None:
        """All of them, telling after some how many of the actions have ended."""
        total, done, step = len(replicas) * self.program.num_actions, 0, self.env.step
        with suppress(EmptySchedule):
            while True:
                for _ in range(_EVENTS):
                    step()
                before, done = done, sum(len(ends) for replica in replicas for ends in replica.ends)
                advance((done - before) / total)
        advance(1 - done / total)

    def _cores(self) -> dict[int, FairShare[int]]:
        """The cores of each node whose ranks outnumber them."""
        cores = self.plan.scenario.cluster.cores
        if cores is None or not self.effects.sharing:
            return {}
        return {node: FairShare(self.env, dict.fromkeys(range(cores), 1.0)) for node in self.plan.crowded_nodes}


class _Replica:
    """One pipeline: builds its carriers and processes, and collects its timelines."""

    def __init__(self, world: _World, figures: Figures, replay: Replay, number: int) -> None:
        self.plan, self.program, self.effects, self.env = world.plan, world.program, world.effects, world.env
        self.world, self.figures, self.replay, self.number = world, figures, replay, number
        plan, program, effects = self.plan, self.program, self.effects
        self.blocking = shape_of(plan, communication=effects.communication).blocking
        self.carriers = self._carriers()
        self.waits: dict[int, tuple[str, Carrier, int] | None] = {}
        """Position -> how, on which carrier and for which message it waits, while it is waiting; None: for replicas."""
        positions = range(program.num_ranks)
        self.ways: dict[int, _Way] = {}
        """By number; the number says which carriers they are."""
        seconds = self._seconds()
        self.rows = [self._rows(position, seconds) for position in positions]
        self.starts = [array("d") for _ in positions]
        self.ends = [array("d") for _ in positions]

    def timelines(self) -> tuple[RankTimeline, ...]:
        """What its ranks did, in the order of `Plan.ranks`."""
        carried = _Carried.by(self.carriers)
        return tuple(self._timeline(self.plan.pipeline.index(rank), carried) for rank in self.plan.ranks)

    def rank(self, position: int) -> Generator[Event, None, None]:
        """A rank: wait for the input, compute, send the result on."""
        env, timeout, blocking = self.env, self.env.timeout, self.blocking
        rows, starts, ends = self.rows[position], self.starts[position].append, self.ends[position].append
        ways, rank = self.ways, self.plan.pipeline[position]
        cores, lane = self.world.cores.get(self.plan.node_of(rank, self.number)), self.world.lanes[position]
        core = self.plan.core(rank, self.number) if cores else 0
        now = env.now
        for overhead, seconds, message, way, meets in zip(*rows[:5], strict=False):  # overheads have no end
            source, target = ways[way]
            if meets:
                for ended in lane.before(meets - 1):
                    self.waits[position] = None
                    yield ended
                now = env.now
            if source is not None:
                while source.arrival[message] > now:
                    self.waits[position] = ("waits for", source, message)
                    yield source.wait(message)
                    now = env.now
                source.post(now)
            if cores is None:
                starts(now + overhead)
                yield timeout(overhead + seconds)
            else:
                yield timeout(overhead)
                starts(env.now)
                yield cores.run(seconds, 1.0, (core,))
            now = env.now
            ends(now)
            if meets:
                lane.action_ended(meets - 1)
            if target is not None:
                target.send(now)
                sent = target.num_sent - 1
                while blocking and target.arrival[sent] > now:
                    self.waits[position] = ("is held sending", target, sent)
                    yield target.wait(sent)
                    now = env.now

    def rank_at(self, position: int) -> int:
        """The number in the cluster of its rank at a position."""
        return self.plan.global_rank(self.plan.pipeline[position], self.number)

    def waiting(self, position: int) -> str:
        """What a rank is waiting for, in words."""
        waits = self.waits[position]
        if waits is None:
            return "waits for the other replicas"
        how, carrier, message = waits
        number = self.carriers.index(carrier) * self.program.num_microbatches + message
        return f"{how} {carrier.name} of micro-batch {self.program.microbatches[number]}"

    def _seconds(self) -> Array:
        """Of compute, of every action."""
        program, seconds = self.program, np.empty(self.program.num_actions)
        for letter, values in self.figures.seconds.items():
            if letter == "U":
                seconds[program.first[1:] - 1] = values[:, 0]
            else:
                actions = program.at[letter]
                there = actions >= 0
                seconds[actions[there]] = values[:, :, 0][there]
        return seconds

    def _rows(self, position: int, of_all: Array) -> _Rows:
        """Look up once what the process would otherwise look up for every action, given the seconds of all."""
        program, M = self.program, self.program.num_microbatches
        first, last = program.first[position], program.first[position + 1]
        actions, seconds = program.order[position], of_all[first:last]
        overhead = float(self.figures.overhead_s[0])
        overheads: Iterable[float] = repeat(overhead)
        if self.replay.compute or self.replay.gaps is not None:
            measured, gaps = self.replay.compute, self.replay.gaps or {}
            seconds = np.array([measured.get(a, modelled) for a, modelled in zip(actions, seconds, strict=True)])
            overheads = [gaps.get(action, overhead) for action in actions]
        takes, sends = program.takes[first:last], program.sends[first:last]
        meets: Iterable[int] = repeat(0)
        if rows_that_meet := self.world.lanes[position].rows:
            meets = [row + 1 if row in rows_that_meet else 0 for row in range(len(actions))]
        is_action = None
        if takes.shape[1] > 1 or sends.shape[1] > 1:
            takes, sends, seconds, overheads, meets, is_action = _spread(takes, sends, seconds, overheads, meets)
        taken, carriers = takes[:, 0], [*self.carriers, None]
        number = (taken // M).astype(np.int64) * len(carriers) + sends[:, 0] // M + 1  # -1 // M: that of no carrier
        for way in set(number.tolist()) - self.ways.keys():
            self.ways[way] = carriers[way // len(carriers)], carriers[way % len(carriers) - 1]
        return _Rows(
            overheads,
            array("d", seconds.tobytes()),
            array("i", (taken % M).astype(np.int32).tobytes()),
            array("q", number.tobytes()),
            meets,
            is_action,
        )

    def _carriers(self) -> list[Carrier]:
        """One for each channel, fairly shared where other traffic passes the same NIC."""
        plan, program, env, effects = self.plan, self.program, self.env, self.effects
        transfers: dict[tuple[int, Letter], dict[int, float]] = {}
        for (kind, stage, microbatch), seconds in self.replay.transfers.items():
            transfers.setdefault((stage, kind), {})[microbatch] = seconds
        window = plan.window if effects.communication else None
        M, sizes = program.num_microbatches, plan.message_bytes
        wires: dict[tuple[int, int], Wire] = {}
        carriers: list[Carrier] = []
        for number, channel in enumerate(program.channels):
            of_channel = slice(number * M, (number + 1) * M)
            microbatches = program.microbatches[of_channel]
            occupancy = self.figures.occupancy_s[channel.edge, microbatches, 0]
            latency = float(self.figures.latency_s[channel.edge, 0])
            route = plan.nic_route(channel.edge, self.number)
            passed = plan.shared_nics.intersection(route if channel.is_forward else backward_route(route))
            kinds: tuple[Letter, ...] = ("F",) if channel.is_forward else ("B", "I")
            given = {
                microbatch: seconds
                for kind in kinds
                for microbatch, seconds in transfers.get((channel.source, kind), {}).items()
            }
            arguments = (env, channel.name, occupancy, latency, program.turn[of_channel], window)
            wire = wires.setdefault((channel.sender, channel.receiver), Wire())
            carrier: Carrier
            if given:
                carrier = ReplayedCarrier(*arguments)
                carrier.given = {i: given[m] for i, m in enumerate(microbatches.tolist()) if m in given}
            elif passed and effects.communication and effects.sharing:
                carrier = SharedCarrier(*arguments)
                carrier.sizes = sizes[channel.edge, microbatches]
                carrier.bandwidth = plan.link(channel.edge).bandwidth / plan.sharers
                carrier.nics, carrier.uses, carrier.line = self.world.nics, passed, wire
            else:
                carrier = Carrier(*arguments)
                carrier.wire = wire if (program.wired_after[of_channel] >= 0).any() else None
            carriers.append(carrier)
        return carriers

    def _timeline(self, position: int, carried: "_Carried") -> RankTimeline:
        program = self.program
        first, last = program.first[position], program.first[position + 1]
        starts, ends = np.frombuffer(self.starts[position]), np.frombuffer(self.ends[position])
        is_action = self.rows[position].is_action
        if is_action is not None:
            starts, ends = starts[is_action], ends[is_action]
        takes, sends = program.takes[first:last], program.sends[first:last]
        return RankTimeline(
            rank=self.plan.pipeline[position],
            actions=program.order[position],
            start_s=starts,
            end_s=ends,
            arrived_s=np.fmax.reduce(carried.arrivals[takes], axis=1),
            send_start_s=np.fmin.reduce(carried.starts[sends], axis=1),
            send_end_s=np.fmax.reduce(carried.arrivals[sends], axis=1),
            blocking=self.blocking,
            lane=program.lanes[position],
            lane_start_s=self.world.lanes[position].start_s,
            lane_end_s=self.world.lanes[position].end_s,
        )


def _spread(
    takes: Indices, sends: Indices, seconds: Array, overheads: Iterable[float], meets: Iterable[int]
) -> tuple[Indices, Indices, Array, list[float], list[int], Flags]:
    """Rows with one message to take and one to send at most: further ones get rows of their own, without work."""
    rows: list[tuple[int, int, float, float, int, bool]] = []
    columns = takes.tolist(), sends.tolist(), seconds.tolist(), overheads, meets
    for taken, sent, work, overhead, meeting in zip(*columns, strict=False):
        rows += [(message, -1, 0.0, 0.0, 0, False) for message in taken[1:] if message >= 0]
        rows.append((taken[0], sent[0], work, overhead, meeting, True))
        rows += [(-1, message, 0.0, 0.0, 0, False) for message in sent[1:] if message >= 0]
    first, second, work_s, overhead_s, met, is_action = zip(*rows, strict=True)
    one_column = (np.array(column, dtype=np.int32)[:, None] for column in (first, second))
    return *one_column, np.array(work_s), list(overhead_s), list(met), np.array(is_action)  # type: ignore[return-value]
