"""The evaluator as the search uses it: each plan once, in large batches, the work counted.

Plans that share a NIC or cores must be simulated, which is slow. Without sharing nothing takes longer, so that what the
evaluator says of the plan without sharing is a bound: a plan whose bound is above the best is not simulated. The order
is that of a guess, which is what the evaluator says of the plan with half the network.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gpipe_sim.plan.figures import Effects
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import Checkpoint
from gpipe_sim.search.setups import Setup
from gpipe_sim.step.evaluate import evaluate, obstacle
from gpipe_sim.step.metrics import StepMetrics, step_metrics
from gpipe_sim.step.simulate import simulate

_PER_CALL = 4000
"""Work, in actions, that a call of the evaluator takes whatever it is given: about 4 ms."""
_PER_NEW_SHAPE = 12
"""To sort out what waits for what takes as long as evaluating so many plans."""
_PER_SIMULATION = 40
"""To simulate a plan takes as long as evaluating so many."""

_SEEMS_SLOWER = 1.05
"""A plan that is estimated to take longer than the best by this factor is not simulated, unless all are."""

NOT_SHARED = Effects(sharing=False)

Key = tuple[Setup, tuple[int, ...], tuple[Checkpoint, ...]]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that was evaluated."""

    plan: Plan
    metrics: StepMetrics

    @property
    def step_time_s(self) -> float:
        """Without jitter."""
        return self.metrics.step_time_s

    @cached_property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return int(self.metrics.peak_memory_bytes.max())

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its device's memory."""
        return self.peak_bytes <= self.plan.memory_limit


def key_of(plan: Plan) -> Key:
    """Equal for equal plans of one scenario."""
    return Setup.of(plan), plan.balance, plan.checkpoint


class Judge:
    """Every plan that was evaluated in a search."""

    def __init__(self) -> None:
        self.found: dict[Key, Candidate] = {}
        self.work = 0
        """So far, in actions; with what a call and a simulation cost beside them."""
        self._bounds: dict[Key, float] = {}
        self._guesses: dict[Key, float] = {}
        self._shapes: set[tuple[object, ...]] = set()

    @property
    def has_simulated(self) -> bool:
        """Whether any plan shares NICs or cores."""
        return bool(self._bounds)

    def judge(self, plans: Sequence[Plan], best_s: float = np.inf, simulate_work: float = np.inf) -> list[Candidate]:
        """The candidates of these plans. Of those that must be simulated, some are left out: those that are not faster
        than the best, given by its step time, and the last ones, if all would take more work than this."""
        new = {key_of(plan): plan for plan in plans}
        new = {key: plan for key, plan in new.items() if key not in self.found}
        quick, shared = list[Plan](), list[Plan]()
        for plan in new.values():
            (quick if obstacle(plan) is None else shared).append(plan)
        if quick:
            self._count(quick)
            for plan, metrics in zip(quick, evaluate(quick), strict=True):
                self.found[key_of(plan)] = Candidate(plan, metrics)
        if shared:
            self._simulate(shared, best_s, simulate_work)
        return [self.found[key] for key in map(key_of, plans) if key in self.found]

    def _simulate(self, plans: Sequence[Plan], best_s: float, work: float) -> None:
        """By about how long they take; of large plans those are left out that seem to be slower than the best."""
        unknown = [plan for plan in plans if key_of(plan) not in self._bounds]
        for changed, known in ((_as_it_is, self._bounds), (_with_half_the_network, self._guesses)):
            if unknown:
                self._count(unknown)
                figures = evaluate([changed(plan) for plan in unknown], effects=NOT_SHARED, memory=False)
                known |= {key_of(plan): one.step_time_s for plan, one in zip(unknown, figures, strict=True)}
        end = self.work + work
        for plan in sorted(plans, key=lambda plan: self._guesses[key_of(plan)]):
            key = key_of(plan)
            if self.work > end:
                break
            if self._bounds[key] >= best_s or (end < np.inf and self._guesses[key] >= best_s * _SEEMS_SLOWER):
                continue
            self.work += _PER_SIMULATION * actions_of(plan)
            candidate = Candidate(plan, step_metrics(simulate(plan)))
            self.found[key] = candidate
            best_s = min(best_s, candidate.step_time_s if candidate.fits else np.inf)

    def _count(self, plans: Sequence[Plan]) -> None:
        shapes = {(*Setup.of(plan)[:6], len(set(plan.checkpoint)) > 1): plan for plan in plans}
        new = [plan for shape, plan in shapes.items() if shape not in self._shapes]
        self._shapes |= shapes.keys()
        self.work += sum(map(actions_of, plans)) + _PER_NEW_SHAPE * sum(map(actions_of, new))
        self.work += _PER_CALL * len(shapes)


def _as_it_is(plan: Plan) -> Plan:
    return plan


def _with_half_the_network(plan: Plan) -> Plan:
    """As if two messages always shared a node's way out, which is about what they do."""
    cluster = plan.scenario.cluster
    if cluster.network is None:
        return plan
    network = replace(cluster.network, bandwidth=cluster.network.bandwidth / 2)
    spine = cluster.spine and replace(cluster.spine, bandwidth=cluster.spine.bandwidth / 2)
    halved = cluster.model_copy(update={"network": network, "spine": spine})
    return replace(plan, scenario=replace(plan.scenario, cluster=halved))


def actions_of(plan: Plan) -> int:
    """About how many actions and messages a step has, of all replicas that differ: what evaluating it takes."""
    return plan.num_stages * plan.num_microbatches * plan.simulated_replicas
