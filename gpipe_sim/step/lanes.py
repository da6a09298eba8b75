"""Lanes in the simulation: one for each position of the pipeline, shared by the ranks that have it in all replicas.

A collective starts when the lane is free and the last replica has ended what it comes after; for all it ends at once.
Where other traffic passes the same NICs, its part between nodes proceeds at a fair rate (`fairshare`), as many flows
from each node as that has ranks in the group:

    sum        |==scatter inside==|==sum between nodes==|==gather inside==|
    scatter    |==inside==|==between==|            gather    |==between==|==inside==|
"""

from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple

import numpy as np
from simpy import AllOf, Environment, Event

from gpipe_sim.cost.collectives import CollectiveKind, collective_s
from gpipe_sim.plan.actions import Action
from gpipe_sim.plan.figures import Effects, Figures, collective_kinds
from gpipe_sim.plan.lanes import Collective, Lane
from gpipe_sim.plan.plan import Nic, Plan
from gpipe_sim.plan.program import Program
from gpipe_sim.plan.stages import sum_by_stage
from gpipe_sim.step.fairshare import FairShare


class LaneProcess:
    """The collectives of one position, one at a time."""

    def __init__(
        self,
        env: Environment,
        lane: Lane,
        num_replicas: int,
        carry: Callable[[Collective], Generator[Event, None, None]],
    ) -> None:
        """`carry` takes the time of a collective once it has started."""
        self._env, self._carry = env, carry
        self.lane = lane
        self.start_s, self.end_s = np.full((2, len(lane)), np.nan)
        self._missing = [num_replicas if collective.after >= 0 else 0 for collective in lane]
        """Replicas that have not ended what each collective comes after."""
        self._ready, self._ended = ([Event(env) for _ in lane] for _ in range(2))
        if lane:
            env.process(self._work())

    @property
    def rows(self) -> set[int]:
        """Of a rank's actions, those that a collective comes after, or that wait for one."""
        return {row for collective in self.lane for row in (collective.after, collective.before)} - {-1}

    def before(self, row: int) -> list[Event]:
        """What an action waits for."""
        pairs = zip(self.lane, self._ended, strict=True)
        return [ended for collective, ended in pairs if collective.before == row and not ended.processed]

    def action_ended(self, row: int) -> None:
        """One of the replicas has come so far."""
        for number, collective in enumerate(self.lane):
            if collective.after == row:
                self._missing[number] -= 1
                if self._missing[number] == 0:
                    self._ready[number].succeed()

    def _work(self) -> Generator[Event, None, None]:
        for number, collective in enumerate(self.lane):
            if self._missing[number]:
                yield self._ready[number]
            self.start_s[number] = self._env.now
            yield from self._carry(collective)
            self.end_s[number] = self._env.now
            self._ended[number].succeed()


def lane_processes(
    env: Environment,
    plan: Plan,
    program: Program,
    figures: Figures,
    effects: Effects,
    nics: FairShare[Nic],
    num_replicas: int,
    measured: Mapping[Action, float],
) -> list[LaneProcess]:
    """A lane for each position. Collectives that were `measured` take so many seconds."""
    is_shared = effects.sharing and effects.communication and effects.collectives

    def carry(collective: Collective) -> Generator[Event, None, None]:
        if collective.action in measured:
            yield env.timeout(measured[collective.action])
            return
        rank = plan.placement[collective.stage]
        if not is_shared or plan.shared_nics.isdisjoint(plan.ring_nics(rank)):
            yield env.timeout(float(figures.collective_s[collective.kind][collective.stage, 0]))
            return
        phases, network = _phases(plan, collective), plan.group_network(rank)
        assert network is not None, "what passes a NIC has a network"
        own_rate = network.bandwidth / plan.collective_sharers
        yield env.timeout(phases.before_s)
        flows = [
            nics.run(phases.between_bytes, own_rate, plan.shared_nics.intersection(route))
            for member in range(1 if plan.simulated_replicas == 1 else plan.group[0])
            for route in plan.ring(rank, member)
        ]
        yield AllOf(env, flows)
        yield env.timeout(phases.latency_s + phases.after_s)

    return [LaneProcess(env, lane, num_replicas, carry) for lane in program.lanes]


class _Phases(NamedTuple):
    """What `spanning_s` adds up, apart."""

    before_s: float
    between_bytes: float
    """Of each flow."""
    latency_s: float
    """Between nodes."""
    after_s: float


_SHARE_BEFORE: Mapping[CollectiveKind, float] = {"sum": 0.5, "scatter": 1.0, "gather": 0.0}
"""Of what a collective does inside a node, the part that comes before what it does between nodes."""


def _phases(plan: Plan, collective: Collective) -> _Phases:
    kind, ratio = collective_kinds(plan)[collective.kind]
    (per_node, nodes), link = plan.group, plan.inside_link
    network = plan.group_network(plan.placement[collective.stage])
    assert network is not None, "what passes a NIC has a network"
    weights = sum_by_stage(plan.profile.parameter_bytes, np.array([plan.balance]))[0, collective.stage]
    size, passes = ratio * float(weights), 2 if kind == "sum" else 1
    inside = collective_s(kind, size, per_node, link.bandwidth, link.latency)
    return _Phases(
        before_s=inside * _SHARE_BEFORE[kind],
        between_bytes=passes * (nodes - 1) / nodes * size / per_node,
        latency_s=passes * (nodes - 1) * network.latency,
        after_s=inside * (1 - _SHARE_BEFORE[kind]),
    )
