"""Space: what a search may choose, and what a scenario leaves of it.

A value fixed under ``plan:`` stays, a list is chosen from, and what is left out is searched.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

import numpy as np

from gpipe_sim.base.limits import CELLS
from gpipe_sim.cost.analytic import build_profile
from gpipe_sim.plan.orders import SCHEDULES
from gpipe_sim.scenario.mesh import SUMS_INSIDE, Dimensions
from gpipe_sim.scenario.schema import (
    AUTO,
    BackwardOrder,
    Checkpoint,
    Recompute,
    RecomputeUnit,
    Scenario,
    Shard,
    Transformer,
    is_order_file,
)

_Value = TypeVar("_Value")
Objective = Literal["time", "money", "memory"]

_MOST_SIZES = 500
"""At most so many sizes of micro-batches are searched; of more, such that each is the next one's equal share."""

_MOST_PAIRS = 4000
"""Up to so many pairs of K and M all M up to 128 are searched."""

OPEN_WINDOWS: tuple[int | None, ...] = (2, None, 1)
"""Windows that are tried where none is given, the default first: all receives at once are never slower than fewer, and
one at a time takes the least memory."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """What may be chosen. Everything else is the scenario's."""

    scenario: Scenario
    stages: tuple[int, ...]
    """S; where a rank holds one, as many as ranks."""
    are_ranks: bool
    """Whether the numbers of stages were left open: then they are numbers of ranks, whatever each holds."""
    microbatches: tuple[int, ...]
    schedules: tuple[str, ...]
    """Those with one stage on each rank and whole backwards; `naive` is what each of the others is with one
    micro-batch."""
    automatic: bool
    """Whether an order is to be made for the best plans."""
    beyond: tuple[tuple[str, int], ...]
    """The other schedules, each with a number of stages on each rank."""
    checkpoints: tuple[tuple[Checkpoint, ...] | Checkpoint, ...] | None
    """Modes of the stages, one for all or one for each; None leaves each stage its choice."""
    recomputes: tuple[Recompute, ...]
    """Left open, early: it waits for less, so it is never slower."""
    backwards: tuple[BackwardOrder, ...]
    placements: tuple[tuple[int, ...] | None, ...] | None
    """Ranks of the stages, None among them being in order; None instead of them is any ranks in any order."""
    windows: tuple[int | None, ...]
    balances: tuple[tuple[int, ...], ...] | None
    """None is any cut."""
    frames: tuple[tuple[int, Shard, Dimensions], ...] = ((1, "none", SUMS_INSIDE),)
    """Numbers of replicas, what they divide, and how they are numbered: each is searched by itself, a pipeline with its
    share of the batch."""
    open_counts: bool = True
    """Whether the numbers of micro-batches were left open."""
    is_joint: bool = False
    """Whether numbers of replicas and tensor groups are searched with everything else (`joint`); the next five are for
    that, and none of them is anything that can be. Where stages are given, plans are chosen from those in `swept`."""
    replicas_open: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()
    shards: tuple[Shard, ...] = ()
    units: tuple[RecomputeUnit, ...] = ()
    orders: tuple[Dimensions, ...] = ()
    objective: Objective = "time"
    """What the best plan has least of."""
    swept: tuple[Scenario, ...] = ()
    """Points of the scenario that are whole plans, which `gpipe simulate` would sweep: the answer is no worse."""

    def framed(self) -> Iterator["Space"]:
        """A space for each frame, of the plans that can be there."""
        for replicas, shard, order in self.frames:
            chosen = self.scenario.plan.model_copy(update={"replicas": replicas, "shard": shard, "order": order})
            scenario = replace(self.scenario, plan=chosen)
            counts = tuple(M for M in self.microbatches if M <= scenario.samples)
            if self.open_counts and replicas > 1:
                counts = tuple(sorted(_sensible_counts(scenario.samples, len(self.stages))))
            swept = tuple(
                point
                for point in self.swept
                if point.plan.replicas == replicas
                and (replicas == 1 or (point.plan.shard, point.plan.order) == (shard, order))
            )
            stages = tuple(K for K in self.stages if not self.are_ranks or scenario.can_have(K))
            if stages and counts:
                changed = replace(self, scenario=scenario, stages=stages, microbatches=counts, swept=swept)
                yield replace(changed, frames=((replicas, shard, order),))

    def ranks_of(self, stages_per_rank: int) -> list[int]:
        """K, where each rank holds so many stages."""
        if self.are_ranks:
            return list(self.stages)
        return [S // stages_per_rank for S in self.stages if S % stages_per_rank == 0]


def is_plain(schedule: str) -> bool:
    """Whether it has one stage on each rank, and whole backwards."""
    known = SCHEDULES.get(schedule)
    return known is not None and known.stages_per_rank == 1 and not known.splits


_INTERLEAVED = (2, 3, 4)
"""Stages on each rank that are tried where the schedule leaves their number open."""


def space_of(points: Sequence[Scenario]) -> Space:
    """What may be chosen for a scenario, given by its points."""
    first = points[0]
    given = first.document.data.get("plan") or {}
    specs = [point.plan for point in points]
    num_layers, devices = build_profile(first, (1,)).num_layers, first.cluster.num_devices
    stages = {spec.num_stages for spec in specs}
    if None in stages:
        if devices is None:
            message = "is missing, expected how many devices may be used, such as 8"
            raise first.error("cluster.devices_per_node", message)
        stages = {*range(1, min(devices, num_layers) + 1)}
    for spec in specs:
        if is_order_file(spec.schedule):
            message = f"found {spec.schedule}, which is one plan, expected a schedule by its name, or none"
            raise first.error("plan.schedule", message)
    named = _distinct(spec.schedule for spec in specs) if "schedule" in given else tuple(SCHEDULES)
    automatic = AUTO in named
    if automatic:  # an order is made for the plan that the named ones lead to
        named = tuple(SCHEDULES)
    is_uneven = bool(first.cluster.slowdown)
    is_joint = _is_joint(first, given) or (
        isinstance(first.model, Transformer)
        and any(s.recompute_unit != "stage" or s.tensor > 1 or (is_uneven and s.replicas > 1) for s in specs)
    )
    if not is_joint and any(spec.recompute_unit != "stage" for spec in specs):
        raise first.error("plan.recompute_unit", "is not searched yet, expected stage; gpipe simulate knows the others")
    frames = _distinct(
        (spec.replicas, spec.shard, spec.order) if spec.replicas > 1 else (1, "none", SUMS_INSIDE) for spec in specs
    )
    if is_uneven and not is_joint and {replicas for replicas, *_ in frames} != {1}:
        message = "is not searched with cluster.slowdown yet, expected 1; gpipe simulate knows more"
        raise first.error("plan.replicas", message)
    each = _distinct(spec.stages_per_rank for spec in specs) if "stages_per_rank" in given else None
    schedules = tuple(name for name in named if is_plain(name) and (each is None or 1 in each))
    is_open = "stages" not in given and "balance" not in given
    beyond = tuple(_beyond(named, each, may_interleave=is_open or each is not None))
    given_counts = {spec.microbatches for spec in specs if spec.microbatches}
    microbatches = given_counts or _sensible_counts(first.batch, len(stages))
    balances = _distinct(spec.balance for spec in specs)
    return Space(
        scenario=replace(first, swept={}),  # its lists are chosen from
        stages=tuple(sorted(filter(None, stages))),
        microbatches=(1,) if schedules == ("naive",) and not beyond else tuple(sorted(microbatches)),
        schedules=schedules,
        automatic=automatic,
        beyond=beyond,
        are_ranks=is_open,
        frames=frames,
        open_counts=not given_counts,
        is_joint=is_joint,
        replicas_open=_distinct(spec.replicas for spec in specs) if "replicas" in given else (),
        tensors=_distinct(spec.tensor for spec in specs) if "tensor" in given else (),
        shards=_distinct(spec.shard for spec in specs) if "shard" in given else (),
        orders=_distinct(spec.order for spec in specs) if "order" in given else (),
        units=_distinct(spec.recompute_unit for spec in specs) if "recompute_unit" in given else (),
        checkpoints=_distinct(spec.checkpoint for spec in specs) if "checkpoint" in given else None,
        recomputes=_distinct(spec.recompute for spec in specs) if "recompute" in given else ("early",),
        backwards=_distinct(spec.backward for spec in specs) if "backward" in given else get_args(BackwardOrder),
        placements=_distinct(spec.placement for spec in specs) if "placement" in given else None,
        windows=_distinct(spec.window for spec in specs) if "window" in given else OPEN_WINDOWS,
        balances=None if None in balances else tuple(filter(None, balances)),
        swept=tuple(
            point
            for point in points
            if point.plan.num_stages and point.plan.num_microbatches and (is_joint or is_plain(point.plan.schedule))
        ),
    )


def _is_joint(scenario: Scenario, given: Mapping[str, object]) -> bool:
    """Whether stages, replicas and tensor groups are open together: of a transformer that can be sliced, on devices of
    which it is known how many there are, and nothing is said of where stages are."""
    cluster = scenario.cluster
    pinned = {"stages", "balance", "placement", "stages_per_rank"} & given.keys() or {
        "replicas",
        "tensor",
    } <= given.keys()
    known = not (cluster.links or cluster.cores)
    analytic = isinstance(scenario.model, Transformer) and scenario.profile is None
    return analytic and known and (cluster.num_devices or 1) > 1 and not pinned and given.get("schedule") != AUTO


def _beyond(
    named: tuple[str, ...], each: tuple[int | None, ...] | None, *, may_interleave: bool
) -> Iterator[tuple[str, int]]:
    """The schedules that are not plain, with the numbers of stages that each rank may hold."""
    for name in named:
        if is_plain(name):
            continue
        fixed = SCHEDULES[name].stages_per_rank
        possible: tuple[int, ...] = _INTERLEAVED if fixed is None else (fixed,)
        if each is not None:
            possible = tuple(v for v in each if v and (fixed is None or v == fixed))
        for v in possible:
            if v == 1 or may_interleave:
                yield name, v


def _distinct(values: Iterable[_Value]) -> tuple[_Value, ...]:
    return tuple(dict.fromkeys(values))


def _sensible_counts(batch: int, num_choices_of_stages: int) -> set[int]:
    """Numbers of micro-batches to search: all up to 128, and beyond that the fewest for each micro-batch size. With
    very many numbers of stages, all up to 16, beyond that the fewest for each size, and powers of two."""
    dense = 128 if num_choices_of_stages * min(batch, 128) <= _MOST_PAIRS else 16
    sizes = range(1, batch // dense + 1)
    if len(sizes) > _MOST_SIZES:
        sizes = np.unique(np.geomspace(1, len(sizes), _MOST_SIZES).astype(int)).tolist()
    counts = {*range(1, min(batch, dense) + 1), *(-(-batch // size) for size in sizes if -(-batch // size) <= CELLS)}
    return counts | {2**n for n in range(batch.bit_length()) if 2**n <= min(batch, 128)}
