"""The SimPy model of a step: ranks that work through their actions, links that carry messages between them.

Each rank is a process that takes its actions in order, each as soon as its input has arrived; `links` carry messages
between them. Ranks that share cores proceed at fair rates (`fairshare`).
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from simpy import Environment, Event

from gpipe_sim.fairshare import FairShare
from gpipe_sim.jitter import jitter_factors
from gpipe_sim.links import Edge, Link, ReplayedLink, SharedLink
from gpipe_sim.memory import memory_curves
from gpipe_sim.plan import Plan, backward_route
from gpipe_sim.profile import Array
from gpipe_sim.schedule import Action, Kind, gradient_takers, rank_actions
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


_Instruction = tuple[float, float, int, Link | None, Link | None]
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

    def _seconds(self, sample: int | None) -> dict[Kind, list[list[float]]]:
        """Kind -> stage -> micro-batch -> seconds of compute, the update's as its only entry."""
        forward, backward = self.plan.forward_s, self.plan.backward_s
        times: dict[Kind, Array] = {"F": forward, "R": forward, "B": backward, "U": self.plan.update_s[:, None]}
        if sample is not None:
            factors = jitter_factors(self.plan, [sample])
            times = {kind: values * factors[kind][:, :, 0] for kind, values in times.items()}
        return {kind: values.tolist() for kind, values in times.items()}

    def _links(self) -> tuple[list[Link], list[Link]]:
        """Two links per edge, fairly shared where other traffic passes the same NIC."""
        plan, env, effects, sizes = self.plan, self.env, self.effects, self.plan.message_bytes.tolist()
        hop = plan.profile.hop_overhead_s if effects.overhead else 0.0
        network, transfers = plan.scenario.cluster.network, self.replay.transfers
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
                sender, kind = (stage, "F") if links is forward else (stage + 1, "B")
                given = {a.microbatch: t for a, t in transfers.items() if a.stage == sender and a.kind == kind}
                if given:
                    links.append(ReplayedLink(env, name, sizes[stage], edge, given))
                elif shared and effects.communication and effects.sharing:
                    links.append(SharedLink(env, name, sizes[stage], edge, nics, shared))
                else:
                    links.append(Link(env, name, sizes[stage], edge))
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
