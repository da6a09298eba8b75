"""Beyond one stage on each rank and whole backwards: interleaved and split schedules.

Tables, estimates and bounds of this package are of pipelines in which a rank holds one stage. The other schedules start
from what those have in common with them: the work of all layers is spread over K ranks, and the schedule leaves so much
of it as bubble:

    estimate = work / K / (1 - ideal bubble of the schedule) + way of a message through all stages, there and back
    bound    = work / K, which no schedule can beat

The most promising setups of each schedule are evaluated with plain cuts in the order of their estimates, and the best
of each schedule improved, first with other windows and orders.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from gpipe_sim.base.limits import CELLS
from gpipe_sim.make.making import order_of_backwards
from gpipe_sim.plan.orders import SCHEDULES, position_of
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.stages import microbatch_sizes
from gpipe_sim.scenario.schema import Checkpoint
from gpipe_sim.search.improve import Improver
from gpipe_sim.search.judge import Candidate
from gpipe_sim.search.searcher import Searcher
from gpipe_sim.search.setups import FASTEST_FIRST, Setup

SCAN_WORK, IMPROVE_WORK = 600_000, 300_000
"""Work in actions, as that of a question: about a second for a million of them."""
_EACH = 6
"""So many setups of each schedule and number of stages on a rank are evaluated: every one needs a program of its own,
which takes as long as evaluating dozens of its plans."""
_MOST_COUNTS = 12
"""So many numbers of micro-batches are tried with each schedule and number of ranks."""
_TOGETHER = 4
"""So many setups are evaluated before the best is looked at again."""
_WORTH_IT = 1.1
"""A setup whose estimate is above the best plan by this factor is left out: estimates are off by less."""
_IMPROVED = 3
"""So many of the best setups are improved, each of another schedule."""


class Prospect(NamedTuple):
    """A setup and what it promises."""

    estimate_s: float
    bound_s: float
    setup: Setup


def look_beyond(searcher: Searcher, limit: float) -> bool:
    """Evaluate such setups as may be better than what was found; whether it is proven that none is."""
    judge = searcher.judge
    setups = sorted(prospects(searcher), key=lambda one: (one.estimate_s, one.setup.num_stages))
    end, best_s, seen = judge.work + SCAN_WORK, _best_s(searcher, limit), len(judge.found)
    left = deque(_most_promising(setups))
    while left and judge.work < end:
        some = [left.popleft() for _ in range(min(_TOGETHER, len(left)))]
        worth_it = [one for one in some if one.estimate_s <= best_s * _WORTH_IT]
        judge.judge([plan for one in worth_it for plan in _plans(searcher, one.setup)])
        best_s, seen = min(best_s, _best_s(searcher, limit, seen)), len(judge.found)
    chosen: dict[str, Candidate] = {}
    for candidate in sorted(judge.found.values(), key=lambda c: c.step_time_s):
        if candidate.peak_bytes <= limit and _is_beyond(candidate.plan):
            chosen.setdefault(candidate.plan.schedule, candidate)
    improver = Improver(searcher.space, judge, limit)
    for candidate in list(chosen.values())[:_IMPROVED]:
        setup = Setup.of(candidate.plan)
        alike = [one.setup for one in setups if _frame(one.setup) == _frame(setup)]
        judge.judge([searcher.plan(other, candidate.plan.balance, candidate.plan.checkpoint) for other in alike])
        improver.improve(candidate, IMPROVE_WORK // _IMPROVED)
    best_s = _best_s(searcher, limit)
    return all(one.bound_s >= best_s for one in setups)


def _frame(setup: Setup) -> tuple[str, int, int, tuple[int, ...]]:
    """All of a setup but windows and orders of backwards and recomputations."""
    return setup.schedule, setup.num_stages, setup.num_microbatches, setup.placement


def _most_promising(setups: Iterable[Prospect]) -> Iterator[Prospect]:
    """Of each schedule and number of stages on a rank the first few frames, each once."""
    counts, seen = Counter[tuple[str, int]](), set[object]()
    for one in setups:
        kind = one.setup.schedule, one.setup.num_stages // len(set(one.setup.placement))
        if _frame(one.setup) not in seen and counts[kind] < _EACH:
            seen.add(_frame(one.setup))
            counts[kind] += 1
            yield one


def _best_s(searcher: Searcher, limit: float, after: int = 0) -> float:
    """The fastest within the limit, of those that were found after so many or known from elsewhere."""
    found = islice(searcher.judge.found.values(), after, None)
    return min([searcher.known_s(limit), *(c.step_time_s for c in found if c.peak_bytes <= limit)])


def _is_beyond(plan: Plan) -> bool:
    return plan.stages_per_rank > 1 or SCHEDULES[plan.schedule].splits


def prospects(searcher: Searcher) -> Iterator[Prospect]:
    """Every such setup of the space, with what it promises."""
    space, profile, cluster = searcher.space, searcher.profile, searcher.scenario.cluster
    devices = cluster.ranks_for(searcher.scenario.plan.copies) or max(space.stages, default=1)
    by_speed = sorted(range(devices), key=lambda rank: (cluster.slowdown.get(rank, 1.0), rank))
    for name, v in space.beyond:
        schedule = SCHEDULES[name]
        if schedule.splits and not profile.splits:
            continue
        if v > 1 and not cluster.overlap:
            continue  # senders that wait can wait for each other, where a rank has several stages
        for K in space.ranks_of(v):
            if K > devices or v * K > profile.num_layers or not searcher.scenario.can_have(K):
                continue
            ranks = sorted(by_speed[:K])
            placement = tuple(ranks[position_of(schedule.pattern, stage, K)] for stage in range(v * K))
            placements = [placement] if space.placements is None else _given(space.placements, placement)
            for M in _counts(searcher, K):
                if schedule.refuses(K, v, M) or v * K * M > CELLS:
                    continue
                for placed in placements:
                    yield from _of(searcher, name, v, K, M, placed)


def _given(placements: tuple[tuple[int, ...] | None, ...], own: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Those of the given placements that the schedule can have: its own pattern, on whichever ranks."""
    ranks = [own if one is None else one for one in placements]
    pattern = [list(dict.fromkeys(own)).index(rank) for rank in own]
    return [
        one for one in ranks if len(one) == len(own) and [list(dict.fromkeys(one)).index(r) for r in one] == pattern
    ]


def _of(searcher: Searcher, name: str, v: int, K: int, M: int, placement: tuple[int, ...]) -> Iterator[Prospect]:
    space, cluster, profile = searcher.space, searcher.scenario.cluster, searcher.profile
    sizes = microbatch_sizes(searcher.scenario.samples, M)
    work = sum(float((profile.at(n).forward_s + profile.at(n).backward_s).sum()) for n in sizes)
    capacity = sum(1.0 / cluster.slowdown.get(rank, 1.0) for rank in set(placement))
    bubble = SCHEDULES[name].bubble_ideal(K, v, M)
    way = 2 * (v * K - 1) * cluster.link.latency
    for backward in dict.fromkeys(order_of_backwards(name, order) for order in space.backwards):
        for recompute in space.recomputes:
            for window in space.windows:
                setup = Setup(v * K, M, name, recompute, backward, window, placement)
                yield Prospect(work / capacity / (1 - bubble) + way, work / capacity, setup)


def _counts(searcher: Searcher, num_ranks: int) -> list[int]:
    """Numbers of micro-batches: those of the best plans so far, and some spread over all, multiples of K first."""
    counts, batch = searcher.space.microbatches, searcher.scenario.samples
    if len(counts) <= _MOST_COUNTS:
        return list(counts)
    found = sorted(searcher.judge.found.values(), key=lambda c: c.step_time_s)
    best = list(dict.fromkeys(candidate.plan.num_microbatches for candidate in found[:200]))[:3]
    even = [M for M in counts if batch % M == 0 and M % num_ranks == 0] or [M for M in counts if batch % M == 0]
    even = even or list(counts)
    spread = [even[i] for i in np.unique(np.geomspace(1, len(even), _MOST_COUNTS - len(best)).astype(int) - 1)]
    return list(dict.fromkeys([*best, *spread]))


def _plans(searcher: Searcher, setup: Setup) -> Iterator[Plan]:
    """The smallest bottleneck and equal layers, in modes that all stages share."""
    S, L, space = setup.num_stages, searcher.profile.num_layers, searcher.space
    slowdown = searcher.scenario.cluster.slowdown
    given: list[tuple[Checkpoint, ...]] = [(mode,) * S for mode in FASTEST_FIRST]
    if space.checkpoints is not None:
        whole = [modes if isinstance(modes, tuple) else (modes,) * S for modes in space.checkpoints]
        given = [modes for modes in whole if len(modes) == S]
    slowdowns = tuple([slowdown.get(rank, 1.0) for rank in setup.placement])
    for modes in given:
        if space.balances is None:
            yield searcher.plan(setup, searcher.smallest_bottleneck(setup.num_microbatches, modes, slowdowns), modes)
            yield searcher.plan(setup, tuple(L // S + (stage < L % S) for stage in range(S)), modes)
        for balance in space.balances or ():
            if len(balance) == S:
                yield searcher.plan(setup, balance, modes)
