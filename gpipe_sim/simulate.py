"""The SimPy model of a step: ranks that work through their actions, links that carry messages between them.

Each rank is a process that takes its actions in order, each as soon as its input has arrived. A link is a FIFO for
each direction of each edge:

    sender     ==2F0==|                       a message is sent when its action ends,
    link              |..queue..|##bytes/bw##|     starts once its receive is posted and the link is free,
    receiver                                  |~latency~|==3F0==   and arrives a latency after its last byte.

Latency delays, it does not occupy. The receiver keeps `window` receives posted per edge: consuming a message posts the
next receive. Dedicated links need no event of their own: when a message starts, its arrival is known, and only a rank
that is already waiting for it needs to be woken. Links through a shared NIC and ranks on shared cores proceed at
fair rates (`fairshare`), which do need events.
"""

from collections import deque
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from simpy import Environment, Event

from gpipe_sim.fairshare import FairShare
from gpipe_sim.memory import memory_curves
from gpipe_sim.plan import Nic, Plan, backward_route
from gpipe_sim.profile import Array
from gpipe_sim.schedule import Action, gradient_takers, rank_actions
from gpipe_sim.step import RankTimeline, Step

_UNKNOWN = float("inf")
_NO_LIMIT = 2**62


@dataclass(frozen=True, kw_only=True)
class Effects:
    """Which costs of the real world are modelled. Switching one off is the counterfactual that prices it."""

    overhead: bool = True
    """The engine's own time per action and per hop."""
    communication: bool = True
    """Links, receive windows and blocking sends."""
    sharing: bool = True
    """NICs and cores shared by several users."""


ALL_EFFECTS = Effects()


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


class DeadlockError(RuntimeError):
    """The schedule cannot finish; the message names who waits for what."""


def simulate(
    plan: Plan,
    *,
    effects: Effects = ALL_EFFECTS,
    sample: int | None = None,
    actions: tuple[tuple[Action, ...], ...] | None = None,
    replay: Replay | None = None,
    memory: bool = True,
) -> Step:
    """Predict one step of the plan.

    `sample` draws that sample of the scenario's jitter; without it, compute times are the profile's. `actions` replaces
    the plan's own schedule, rank by rank, by the same actions in another order. `replay` puts measured figures in the
    place of modelled ones.
    """
    if actions is not None and list(map(set, actions)) != list(map(set, rank_actions(plan))):
        raise ValueError("the action lists have other actions than the plan, expected its own in another order")
    if replay is not None:
        effects = replace(effects, sharing=False)
    simulation = _Simulation(plan, effects, sample, actions or rank_actions(plan), replay or Replay())
    timelines = simulation.run()
    return Step(ranks=timelines, memory=memory_curves(plan, timelines) if memory else ())


class _Wake(Event):
    """An event whose time is settled after someone already waits for it."""

    def at(self, time: float) -> None:
        self._ok, self._value = True, None
        self.env.schedule(self, delay=time - self.env.now)


class _Edge(NamedTuple):
    """The properties of one edge, the same in both directions."""

    bandwidth: float
    latency: float
    window: int | None


class _Link:
    """One direction of one edge, all to itself."""

    def __init__(self, env: Environment, name: str, sizes: list[float], edge: _Edge) -> None:
        self.env = env
        self.name = name
        self.sizes = sizes
        self.occupancy = [size / edge.bandwidth for size in sizes]
        self.latency = edge.latency
        self.posted = _NO_LIMIT if edge.window is None else edge.window
        """How many receives have been posted so far."""
        self.expected = 0
        self.position = [_NO_LIMIT] * len(sizes)
        """Micro-batch -> its place in the order in which the receiver posts."""
        self.start = [_UNKNOWN] * len(sizes)
        self.arrival = [_UNKNOWN] * len(sizes)
        self.free = 0.0
        self.queue: deque[int] = deque()
        self.waiting: dict[int, list[_Wake]] = {}

    def expect(self, microbatch: int) -> None:
        """The receiver will take this one after those it expected before."""
        self.position[microbatch] = self.expected
        self.expected += 1

    def send(self, microbatch: int, now: float) -> None:
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


class _ReplayedLink(_Link):
    """One direction of an edge, some of whose messages take the time that they were measured to take."""

    def __init__(
        self, env: Environment, name: str, sizes: list[float], edge: _Edge, given: Mapping[int, float]
    ) -> None:
        super().__init__(env, name, sizes, edge)
        self.given = given

    def send(self, microbatch: int, now: float) -> None:
        if microbatch not in self.given:
            super().send(microbatch, now)
            return
        self.start[microbatch] = now
        self.arrival[microbatch] = now + self.given[microbatch]
        self.wake(microbatch)


class _SharedLink(_Link):
    """One direction of an edge whose messages pass NICs that other traffic passes too."""

    def __init__(
        self, env: Environment, name: str, sizes: list[float], edge: _Edge, nics: FairShare[Nic], uses: Collection[Nic]
    ) -> None:
        super().__init__(env, name, sizes, edge)
        self.nics, self.uses, self.bandwidth = nics, uses, edge.bandwidth
        self.carrying = False

    def advance(self, now: float) -> None:
        if self.carrying or not self.queue or self.position[self.queue[0]] >= self.posted:
            return
        microbatch = self.queue.popleft()
        self.carrying = True
        self.start[microbatch] = now
        flow = self.nics.run(self.sizes[microbatch], self.bandwidth, self.uses)
        assert flow.callbacks is not None, "a fresh event has not been processed"
        flow.callbacks.append(lambda _: self.carried(microbatch))

    def carried(self, microbatch: int) -> None:
        self.carrying = False
        self.arrival[microbatch] = self.env.now + self.latency
        self.wake(microbatch)
        self.advance(self.env.now)


_Instruction = tuple[float, float, int, _Link | None, _Link | None]
"""What a rank's process needs of an action: the engine's overhead before it, its seconds, its micro-batch, the link
that it receives from and the link that it sends to."""


class _Simulation:
    """One plan under one set of effects: builds the links and processes, runs them, collects the timelines."""

    def __init__(
        self,
        plan: Plan,
        effects: Effects,
        sample: int | None,
        actions: tuple[tuple[Action, ...], ...],
        replay: Replay,
    ) -> None:
        self.plan, self.effects, self.actions, self.replay = plan, effects, actions, replay
        self.env = Environment()
        cluster = plan.scenario.cluster
        self.blocking = effects.communication and not cluster.overlap
        self.action_overhead = plan.profile.action_overhead_s if effects.overhead else 0.0
        self.forward_links, self.backward_links = self._links()
        self.seconds = self._seconds(sample)
        self.cores = self._cores()
        self.waits: dict[int, str] = {}
        """Rank -> what it is waiting for, while it is waiting."""

    def run(self) -> tuple[RankTimeline, ...]:
        self.programs = [self._program(actions) for actions in self.actions]
        self.starts: list[list[float]] = [[] for _ in self.programs]
        self.ends: list[list[float]] = [[] for _ in self.programs]
        processes = [self.env.process(self._rank(position)) for position in range(len(self.programs))]
        self.env.run()
        stuck = [position for position, process in enumerate(processes) if process.is_alive]
        if stuck:
            reasons = [f"rank {self.plan.ranks[position]} {self.waits[position]}" for position in stuck]
            raise DeadlockError("the schedule cannot finish: " + "; ".join(reasons))
        return tuple(self._timeline(position) for position in range(len(self.programs)))

    def _rank(self, position: int) -> Generator[Event, None, None]:
        """A rank: wait for the input, compute, send the result on."""
        env, timeout, blocking = self.env, self.env.timeout, self.blocking
        starts, ends = self.starts[position], self.ends[position]
        cores = self.cores.get(self._node(position))
        now = env.now
        for overhead, seconds, microbatch, source, target in self.programs[position]:
            if source is not None:
                if source.arrival[microbatch] > now:
                    self.waits[position] = f"waits for {source.name} of micro-batch {microbatch}"
                    yield source.wait(microbatch)
                    now = env.now
                source.post(now)
            if cores is None:
                starts.append(now + overhead)
                yield timeout(overhead + seconds)
            else:
                yield timeout(overhead)
                starts.append(env.now)
                yield cores.run(seconds, 1.0, ("cores",))
            now = env.now
            ends.append(now)
            if target is not None:
                target.send(microbatch, now)
                if blocking and target.arrival[microbatch] > now:
                    self.waits[position] = f"is held sending {target.name} of micro-batch {microbatch}"
                    yield target.wait(microbatch)
                    now = env.now

    def _program(self, actions: tuple[Action, ...]) -> list[_Instruction]:
        """Look up once what the process would otherwise look up for every action."""
        program: list[_Instruction] = []
        takers = {stage: gradient_takers(self.plan, stage) for stage in {action.stage for action in actions}}
        forward, backward, last = self.forward_links, self.backward_links, self.plan.num_stages - 1
        measured, gaps, overhead = self.replay.compute, self.replay.gaps, self.action_overhead
        for action in actions:
            kind, stage, microbatch = action
            source = target = None
            if kind == "F":
                source = forward[stage - 1] if stage > 0 else None
                target = forward[stage] if stage < last else None
            elif kind != "U":
                source = backward[stage] if stage < last and takers[stage][microbatch] == kind else None
                target = backward[stage - 1] if stage > 0 and kind == "B" else None
            if source is not None:
                source.expect(microbatch)
            seconds = self.seconds[kind][stage][microbatch]
            if measured:
                seconds = measured.get(action, seconds)
            if gaps is not None:
                overhead = gaps.get(action, self.action_overhead)
            program.append((overhead, seconds, microbatch, source, target))
        return program

    def _node(self, position: int) -> int:
        return self.plan.scenario.cluster.node_of(self.plan.ranks[position])

    def _seconds(self, sample: int | None) -> dict[str, list[list[float]]]:
        """Kind -> stage -> micro-batch -> seconds of compute, the update's as its only entry."""
        forward, backward = self.plan.forward_s, self.plan.backward_s
        times = {"F": forward, "R": forward, "B": backward, "U": self.plan.update_s[:, None]}
        jitter = self.plan.scenario.cluster.jitter
        if sample is not None and jitter is not None:
            for index, kind in enumerate(times):
                times[kind] = times[kind] * lognormal(jitter.cv, (jitter.seed, sample, index), times[kind].shape)
        return {kind: values.tolist() for kind, values in times.items()}

    def _links(self) -> tuple[list[_Link], list[_Link]]:
        """Two links per edge, fairly shared where other traffic passes the same NIC."""
        plan, env, effects, sizes = self.plan, self.env, self.effects, self.plan.message_bytes.tolist()
        hop = plan.profile.hop_overhead_s if effects.overhead else 0.0
        network, transfers = plan.scenario.cluster.network, self.replay.transfers
        nics = FairShare(env, dict.fromkeys(plan.shared_nics, network.bandwidth) if network else {})
        forward: list[_Link] = []
        backward: list[_Link] = []
        for stage in range(plan.num_stages - 1):
            link, route = plan.link(stage), plan.nic_route(stage)
            edge = _Edge(link.bandwidth, link.latency + hop, plan.window)
            if not effects.communication:
                edge = _Edge(float("inf"), hop, None)
            for links, uses, name in (
                (forward, route, f"the output of stage {stage}"),
                (backward, backward_route(route), f"the gradient from stage {stage + 1}"),
            ):
                shared = plan.shared_nics.intersection(uses)
                sender, kind = (stage, "F") if links is forward else (stage + 1, "B")
                given = {a.microbatch: t for a, t in transfers.items() if a.stage == sender and a.kind == kind}
                if given:
                    links.append(_ReplayedLink(env, name, sizes[stage], edge, given))
                elif shared and effects.communication and effects.sharing:
                    links.append(_SharedLink(env, name, sizes[stage], edge, nics, shared))
                else:
                    links.append(_Link(env, name, sizes[stage], edge))
        return forward, backward

    def _cores(self) -> dict[int, FairShare[str]]:
        """A pool of cores for each node whose ranks outnumber them."""
        cores = self.plan.scenario.cluster.cores
        if cores is None or not self.effects.sharing:
            return {}
        return {node: FairShare(self.env, {"cores": float(cores)}) for node in self.plan.crowded_nodes}

    def _timeline(self, position: int) -> RankTimeline:
        nothing, program = float("nan"), self.programs[position]
        return RankTimeline(
            rank=self.plan.ranks[position],
            stage=self.actions[position][0].stage,
            actions=self.actions[position],
            start_s=np.array(self.starts[position]),
            end_s=np.array(self.ends[position]),
            arrived_s=np.array([source.arrival[m] if source else nothing for _, _, m, source, _ in program]),
            send_start_s=np.array([target.start[m] if target else nothing for _, _, m, _, target in program]),
            send_end_s=np.array([target.arrival[m] if target else nothing for _, _, m, _, target in program]),
            blocking=self.blocking,
        )


def lognormal(cv: float, key: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """Factors with mean 1 and the given coefficient of variation, one row per stage.

    A factor is set by seed, sample, kind, stage and micro-batch alone, never by the order of events, so that two plans
    that share an action share its luck.
    """
    sigma = np.sqrt(np.log1p(cv * cv))
    rows = [np.random.default_rng([*key, stage]).standard_normal(shape[1]) for stage in range(shape[0])]
    factors: Array = np.exp(sigma * np.array(rows) - sigma * sigma / 2)
    return factors
