"""Space: what a search may choose, and what a scenario leaves of it.

A value fixed under ``plan:`` stays, a list is chosen from, and what is left out is searched.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from gpipe_sim.costs import build_profile
from gpipe_sim.limits import CELLS
from gpipe_sim.scenario import BackwardOrder, Checkpoint, Recompute, Scenario, ScheduleName
from gpipe_sim.schedule import SCHEDULES

_Value = TypeVar("_Value")

_MOST_SIZES = 500
"""Sizes of micro-batches that are searched; of more, such that each is the next one's equal share."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """What may be chosen. Everything else is the scenario's."""

    scenario: Scenario
    stages: tuple[int, ...]
    microbatches: tuple[int, ...]
    schedules: tuple[ScheduleName, ...]
    """`naive` is what each of the others is with one micro-batch."""
    checkpoints: tuple[tuple[Checkpoint, ...] | Checkpoint, ...] | None
    """Modes of the stages, one for all or one for each; None leaves each stage its choice."""
    recomputes: tuple[Recompute, ...]
    """Left open, early: it waits for less, so it is never slower."""
    backwards: tuple[BackwardOrder, ...]
    placements: tuple[tuple[int, ...] | None, ...]
    windows: tuple[int | None, ...]
    balances: tuple[tuple[int, ...], ...] | None
    """None is any cut."""


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
    schedules = _distinct(spec.schedule for spec in specs) if "schedule" in given else tuple(SCHEDULES)
    microbatches = {spec.microbatches for spec in specs if spec.microbatches} or _sensible_counts(first.batch)
    balances = _distinct(spec.balance for spec in specs)
    return Space(
        scenario=replace(first, swept={}),  # its lists are chosen from
        stages=tuple(sorted(filter(None, stages))),
        microbatches=(1,) if schedules == ("naive",) else tuple(sorted(microbatches)),
        schedules=schedules,
        checkpoints=_distinct(spec.checkpoint for spec in specs) if "checkpoint" in given else None,
        recomputes=_distinct(spec.recompute for spec in specs) if "recompute" in given else ("early",),
        backwards=_distinct(spec.backward for spec in specs),
        placements=_distinct(spec.placement for spec in specs),
        windows=_distinct(spec.window for spec in specs),
        balances=None if None in balances else tuple(filter(None, balances)),
    )


def _distinct(values: Iterable[_Value]) -> tuple[_Value, ...]:
    return tuple(dict.fromkeys(values))


def _sensible_counts(batch: int) -> set[int]:
    """Numbers of micro-batches to search: all up to 128, and beyond that the fewest for each micro-batch size."""
    sizes = range(1, batch // 128 + 1)
    if len(sizes) > _MOST_SIZES:
        sizes = np.unique(np.geomspace(1, len(sizes), _MOST_SIZES).astype(int)).tolist()
    return {*range(1, min(batch, 128) + 1), *(-(-batch // size) for size in sizes if -(-batch // size) <= CELLS)}
