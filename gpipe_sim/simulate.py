"""The SimPy model of a step: ranks that work through their actions, links that carry messages between them.

Each rank is a process that takes its actions in order, each as soon as its input has arrived; `links` carry messages
between them. Ranks that are pinned to the same core proceed at fair rates (`fairshare`).
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

from gpipe_sim.fairshare import FairShare
from gpipe_sim.jitter import jitter_factors
from gpipe_sim.links import Edge, Link, ReplayedLink, SharedLink
from gpipe_sim.memory import memory_curves
from gpipe_sim.plan import Plan, backward_route
from gpipe_sim.profile import Array
from gpipe_sim.schedule import Action, ActionList, Kind, gradient_takers, rank_actions
from gpipe_sim.step import RankTimeline, Step


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


_EVENTS = 50_000
"""Between two calls of `advance`: a fraction of a second."""


class DeadlockError(RuntimeError):
    """The schedule cannot finish; the message names who waits for what."""


def simulate(
    plan: Plan,
    *,
    effects: Effects = ALL_EFFECTS,
    sample: int | None = None,
    actions: Sequence[Sequence[Action]] | None = None,
    replay: Replay | None = None,
    memory: bool = True,
    advance: Callable[[float], None] = lambda _: None,
) -> Step:
    """Predict one step of the plan.

    `sample` draws that sample of the scenario's jitter; without it, compute times are the profile's. `actions` replaces
    the plan's own schedule, rank by rank, by the same actions in another order. `replay` puts measured figures in the
    place of modelled ones. `advance` is called with shares of the actions as they are simulated, which sum to 1.
    """
    if actions is not None and list(map(set, actions)) != list(map(set, rank_actions(plan))):
        raise ValueError("the action lists have other actions than the plan, expected its own in another order")
    if replay is not None:
        effects = replace(effects, sharing=False)
    lists = rank_actions(plan) if actions is None else tuple(map(ActionList.of, actions))
    timelines = _Simulation(plan, effects, sample, lists, replay or Replay()).run(advance)
    return Step(ranks=timelines, memory=memory_curves(plan, timelines) if memory else ())


class _Program(NamedTuple):
    """What a rank's process needs of each action: columns, because there may be millions.

    An action's *way* is how it receives and sends: 1 it takes a message, +2 it sends one, +4 of the backward pass.
    """

    overheads: Iterable[float]
    """The engine's, before each action."""
    seconds: "array[float]"
    microbatches: "array[int]"
    ways: bytes
    sources: tuple[Link | None, ...]
    """Way -> the link that it receives from."""
    targets: tuple[Link | None, ...]
    """Way -> the link that it sends to."""


class _Simulation:
    """One plan under one set of effects: builds the links and processes, runs them, collects the timelines."""

    def __init__(
        self,
        plan: Plan,
        effects: Effects,
        sample: int | None,
        actions: tuple[ActionList, ...],
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

    def run(self, advance: Callable[[float], None]) -> tuple[RankTimeline, ...]:
        self.programs = [self._program(actions) for actions in self.actions]
        self.starts = [array("d") for _ in self.programs]
        self.ends = [array("d") for _ in self.programs]
        processes = [self.env.process(self._rank(position)) for position in range(len(self.programs))]
        self._run_events(advance)
        stuck = [position for position, process in enumerate(processes) if process.is_alive]
        if stuck:
            reasons = [f"rank {self.plan.ranks[position]} {self.waits[position]}" for position in stuck]
            raise DeadlockError("the schedule cannot finish: " + "; ".join(reasons))
        return tuple(self._timeline(position) for position in range(len(self.programs)))

    def _run_events(self, advance: Callable[[float], None]) -> None:
        """All of them, telling after some how many of the actions have ended."""
        total, done, step = sum(map(len, self.actions)), 0, self.env.step
        with suppress(EmptySchedule):
            while True:
                for _ in range(_EVENTS):
                    step()
                before, done = done, sum(map(len, self.ends))
                advance((done - before) / total)
        advance(1 - done / total)

    def _rank(self, position: int) -> Generator[Event, None, None]:
        """A rank: wait for the input, compute, send the result on."""
        env, timeout, blocking = self.env, self.env.timeout, self.blocking
        program, starts, ends = self.programs[position], self.starts[position].append, self.ends[position].append
        sources, targets = program.sources, program.targets
        cores = self.cores.get(self._node(position))
        core = self.plan.core(position) if cores else 0
        now = env.now
        for overhead, seconds, microbatch, way in zip(*program[:4], strict=False):  # overheads have no end
            source, target = sources[way], targets[way]
            if source is not None:
                if source.arrival[microbatch] > now:
                    self.waits[position] = f"waits for {source.name} of micro-batch {microbatch}"
                    yield source.wait(microbatch)
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
            if target is not None:
                target.send(microbatch, now)
                if blocking and target.arrival[microbatch] > now:
                    self.waits[position] = f"is held sending {target.name} of micro-batch {microbatch}"
                    yield target.wait(microbatch)
                    now = env.now

    def _program(self, actions: ActionList) -> _Program:
        """Look up once what the process would otherwise look up for every action."""
        plan, stage, microbatches = self.plan, actions.stage, actions.microbatches
        first, last = stage == 0, stage == plan.num_stages - 1
        forward, again, backward = (actions.are(kind) for kind in ("F", "R", "B"))
        takes_gradient = backward
        if plan.recompute == "on_demand":
            by_recompute = np.array([kind == "R" for kind in gradient_takers(plan, stage)])
            takes_gradient = np.where(by_recompute[microbatches], again, backward)
        takes = takes_gradient if first else forward if last else forward | takes_gradient
        sends = forward if first else backward if last else forward | backward
        if first and last:
            takes = sends = np.zeros(len(actions), dtype=bool)
        incoming = (None if first else self.forward_links[stage - 1], None if last else self.backward_links[stage])
        outgoing = (None if last else self.forward_links[stage], None if first else self.backward_links[stage - 1])
        for link, is_its in zip(incoming, (forward, ~forward), strict=True):
            if link is not None:
                link.expect(microbatches[takes & is_its])
        seconds = np.full(len(actions), self.seconds["U"][stage, 0])
        for of_kind, are in ((self.seconds["F"], forward), (self.seconds["R"], again), (self.seconds["B"], backward)):
            seconds[are] = of_kind[stage, microbatches[are]]
        overheads: Iterable[float] = repeat(self.action_overhead)
        if self.replay.compute or self.replay.gaps is not None:
            measured, gaps = self.replay.compute, self.replay.gaps or {}
            seconds = np.array([measured.get(a, modelled) for a, modelled in zip(actions, seconds, strict=True)])
            overheads = [gaps.get(action, self.action_overhead) for action in actions]
        return _Program(
            overheads,
            array("d", seconds.tobytes()),
            array("i", microbatches.tobytes()),
            (takes + 2 * sends + 4 * ~forward).astype(np.uint8).tobytes(),
            tuple([incoming[way // 4] if way & 1 else None for way in range(8)]),
            tuple([outgoing[way // 4] if way & 2 else None for way in range(8)]),
        )

    def _node(self, position: int) -> int:
        return self.plan.scenario.cluster.node_of(self.plan.ranks[position])

    def _seconds(self, sample: int | None) -> dict[Kind, Array]:
        """Kind -> stage -> micro-batch -> seconds of compute, the update's as its only entry."""
        forward, backward = self.plan.forward_s, self.plan.backward_s
        times: dict[Kind, Array] = {"F": forward, "R": forward, "B": backward, "U": self.plan.update_s[:, None]}
        if sample is not None:
            factors = jitter_factors(self.plan, [sample])
            times = {kind: values * factors[kind][:, :, 0] for kind, values in times.items()}
        return times

    def _links(self) -> tuple[list[Link], list[Link]]:
        """Two links per edge, fairly shared where other traffic passes the same NIC."""
        plan, env, effects, sizes = self.plan, self.env, self.effects, self.plan.message_bytes
        hop = plan.profile.hop_overhead_s if effects.overhead else 0.0
        network = plan.scenario.cluster.network
        transfers: dict[tuple[Kind, int], dict[int, float]] = {}
        for (kind, stage, microbatch), seconds in self.replay.transfers.items():
            transfers.setdefault((kind, stage), {})[microbatch] = seconds
        nics = FairShare(env, dict.fromkeys(plan.shared_nics, network.bandwidth) if network else {})
        forward: list[Link] = []
        backward: list[Link] = []
        for stage in range(plan.num_stages - 1):
            link, route = plan.link(stage), plan.nic_route(stage)
            edge = Edge(link.bandwidth, link.latency + hop, plan.window)
            if not effects.communication:
                edge = Edge(float("inf"), hop, None)
            for links, uses, name in (
                (forward, route, f"the output of stage {stage}"),
                (backward, backward_route(route), f"the gradient from stage {stage + 1}"),
            ):
                shared = plan.shared_nics.intersection(uses)
                given = transfers.get(("F", stage) if links is forward else ("B", stage + 1))
                if given:
                    links.append(ReplayedLink(env, name, sizes[stage], edge, given))
                elif shared and effects.communication and effects.sharing:
                    links.append(SharedLink(env, name, sizes[stage], edge, nics, shared))
                else:
                    links.append(Link(env, name, sizes[stage], edge))
        return forward, backward

    def _cores(self) -> dict[int, FairShare[int]]:
        """The cores of each node whose ranks outnumber them."""
        cores = self.plan.scenario.cluster.cores
        if cores is None or not self.effects.sharing:
            return {}
        return {node: FairShare(self.env, dict.fromkeys(range(cores), 1.0)) for node in self.plan.crowded_nodes}

    def _timeline(self, position: int) -> RankTimeline:
        actions, program = self.actions[position], self.programs[position]
        ways, microbatches = np.frombuffer(program.ways, dtype=np.uint8), actions.microbatches
        columns = np.full((3, len(actions)), np.nan)
        arrived, send_start, send_end = columns
        for way in set(program.ways):
            source, target = program.sources[way], program.targets[way]
            rows = np.flatnonzero(ways == way)
            if source:
                arrived[rows] = np.frombuffer(source.arrival)[microbatches[rows]]
            if target:
                send_start[rows] = np.frombuffer(target.start)[microbatches[rows]]
                send_end[rows] = np.frombuffer(target.arrival)[microbatches[rows]]
        return RankTimeline(
            rank=self.plan.ranks[position],
            stage=actions.stage,
            actions=actions,
            start_s=np.frombuffer(self.starts[position]),
            end_s=np.frombuffer(self.ends[position]),
            arrived_s=arrived,
            send_start_s=send_start,
            send_end_s=send_end,
            blocking=self.blocking,
        )
