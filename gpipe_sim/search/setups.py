"""Setups: everything of a plan but its cut and its stages' modes, and which of them a space has.

Ranks matter only by their slowdown and their node. Where few placements differ in that, all of them are setups:

    ranks        0  1  2  3          on 3 stages: 0 1 3, 0 3 1, 3 0 1      leave the slow one out
    slowdown     1  1  5  1                       0 1 2, 0 2 1, 2 0 1      or put it somewhere
                                                  (0 3 2 is 0 1 2 again: ranks 1 and 3 are alike)

Where many do, those are that a person would try; `improve` exchanges ranks from there.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import permutations, product
from math import perm
from typing import NamedTuple

from gpipe_sim.base.limits import CELLS
from gpipe_sim.cost.profile import Profile
from gpipe_sim.make.making import order_of_backwards
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import BackwardOrder, Checkpoint, Cluster, Recompute, Scenario
from gpipe_sim.search.choices import Space

FASTEST_FIRST: tuple[Checkpoint, ...] = ("never", "except_last", "always")
"""Modes from the fastest to the one that holds least."""

_MOST_PERMUTATIONS = 2000
"""Up to so many placements of K stages all are looked through for those that differ: some milliseconds."""
_MOST_PLACEMENTS = 24
"""Up to so many placements of K stages that differ are all setups."""


class Setup(NamedTuple):
    """What is fixed while cut and modes are sought."""

    num_stages: int
    num_microbatches: int
    schedule: str
    recompute: Recompute
    backward: BackwardOrder
    window: int | None
    placement: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> "Setup":
        """All of a plan but its cut and modes."""
        return cls(
            plan.num_stages,
            plan.num_microbatches,
            plan.schedule,
            plan.recompute,
            plan.backward,
            plan.window,
            plan.placement,
        )

    @property
    def receives_ahead(self) -> int:
        """Receives that are posted before the first is needed: all, where the window has no limit."""
        return self.num_microbatches if self.window is None else min(self.window, self.num_microbatches)

    def plan(
        self, scenario: Scenario, profile: Profile, balance: tuple[int, ...], checkpoint: tuple[Checkpoint, ...]
    ) -> Plan:
        """The plan with this cut and these modes."""
        return Plan(
            scenario=scenario,
            profile=profile,
            balance=balance,
            placement=self.placement,
            num_microbatches=self.num_microbatches,
            checkpoint=checkpoint,
            schedule=self.schedule,
            recompute=self.recompute,
            backward=self.backward,
            window=self.window,
            replicas=scenario.plan.replicas,
            shard=scenario.plan.shard,
            tensor=scenario.plan.tensor,
            dimensions=scenario.plan.order,
            recompute_unit=scenario.plan.recompute_unit,
        )


def setups_of(space: Space, num_layers: int) -> Iterator[Setup]:
    """Every setup of a space, each once."""
    cluster, D = space.scenario.cluster, space.scenario.plan.copies
    for K, M in product(space.stages, space.microbatches):
        if K > num_layers or K * M > CELLS or not space.scenario.can_have(K):
            continue
        windows = {M if window is None else min(window, M): window for window in reversed(space.windows)}
        if space.placements is None and space.scenario.plan.mesh(K).messages_inside:
            placements = [tuple(range(K))]  # on other ranks, replicas would meet the borders of nodes elsewhere
        elif space.placements is None:
            placements = list(open_placements(K, _kinds(cluster, K, D)))
        else:
            given = (tuple(range(K)) if one is None else one for one in space.placements)
            placements = list(dict.fromkeys(one for one in given if len(one) == K))
        for schedule in space.schedules:
            if M > 1 if schedule == "naive" else M == 1 and "naive" in space.schedules:
                continue  # one micro-batch makes all schedules the same
            orders = dict.fromkeys(order_of_backwards(schedule, order) for order in space.backwards)
            orders = dict.fromkeys(list(orders)[:1] if M == 1 else orders)
            for recompute, order, window, placement in product(space.recomputes, orders, windows.values(), placements):
                yield Setup(K, M, schedule, recompute, order, window, placement)


def _kinds(cluster: Cluster, num_stages: int, copies: int) -> "Kinds":
    """Slowdown and node of each rank: ranks that are equal in both can be exchanged."""
    ranks = range(cluster.ranks_for(copies) or num_stages)
    return tuple((cluster.slowdown.get(rank, 1.0), cluster.node_of(rank * copies)) for rank in ranks)


Kinds = tuple[tuple[float, int], ...]


def has_every_placement(space: Space) -> bool:
    """Whether the setups of a space are on all ranks in all orders that it allows."""
    cluster, D = space.scenario.cluster, space.scenario.plan.copies
    possible = [K for K in space.stages if space.scenario.can_have(K)]
    if space.placements is None and any(space.scenario.plan.mesh(K).messages_inside for K in possible):
        return False
    return space.placements is not None or all(_all_placements(K, _kinds(cluster, K, D)) for K in possible)


def open_placements(num_stages: int, kinds: Kinds) -> tuple[tuple[int, ...], ...]:
    """Placements of K stages that are worth a setup of their own, in order first."""
    return _all_placements(num_stages, kinds) or _sensible_placements(num_stages, kinds)


@lru_cache(maxsize=256)
def _all_placements(num_stages: int, kinds: Kinds) -> tuple[tuple[int, ...], ...]:
    """All that differ; none if there are too many."""
    in_order = tuple(range(num_stages))
    if len(set(kinds)) == 1:
        return (in_order,)
    if perm(len(kinds), num_stages) > _MOST_PERMUTATIONS:
        return ()
    found = {_signature(in_order, kinds): in_order}
    for one in permutations(range(len(kinds)), num_stages):
        found.setdefault(_signature(one, kinds), one)
    return tuple(found.values()) if len(found) <= _MOST_PLACEMENTS else ()


@lru_cache(maxsize=256)
def _sensible_placements(num_stages: int, kinds: Kinds) -> tuple[tuple[int, ...], ...]:
    in_order = tuple(range(num_stages))
    found = {_signature(in_order, kinds): in_order}
    for one in _sensible(num_stages, kinds):
        found.setdefault(_signature(one, kinds), one)
    return tuple(found.values())


def _signature(placement: tuple[int, ...], kinds: Kinds) -> tuple[tuple[float, int], ...]:
    """Equal for placements that differ in names of ranks and nodes only."""
    names: dict[int, int] = {}
    return tuple((kinds[rank][0], names.setdefault(kinds[rank][1], len(names))) for rank in placement)


def _sensible(num_stages: int, kinds: Kinds) -> Iterator[tuple[int, ...]]:
    """The fastest ranks, and those of the fewest nodes: in order, or the slow ones of a node last or first."""
    ranks = range(len(kinds))
    for slowest in sorted({slowdown for slowdown, _ in kinds}):
        by_node: dict[int, list[int]] = {}
        for rank in sorted(ranks, key=lambda rank: kinds[rank][0]):
            if kinds[rank][0] <= slowest:
                by_node.setdefault(kinds[rank][1], []).append(rank)
        fullest = sorted(by_node.values(), key=lambda own: (-len(own), own[0]))
        packed = [rank for own in fullest for rank in own][:num_stages]
        fastest = sorted((rank for own in by_node.values() for rank in own), key=lambda rank: kinds[rank][0])
        for chosen in (packed, fastest[:num_stages]):
            if len(chosen) == num_stages:
                yield tuple(sorted(chosen))
                yield tuple(sorted(chosen, key=lambda rank: (kinds[rank][1], kinds[rank][0])))
                yield tuple(sorted(chosen, key=lambda rank: (kinds[rank][1], -kinds[rank][0])))
