"""Layers to contiguous stages: the cut whose slowest stage is fastest, exactly, and the most even one among equals.

    layer costs   3  1  1  1 | 2  2  2 | 4  2      K = 3, largest stage 6
                  `--- 6 ---'  `- 6 -'  `-6-'

This is usually, not always, the fastest pipeline: fill and drain see the *sum* over stages, links see the bytes at the
cuts. The planner optimises the step itself; this is the default cut and the planner's starting point.
"""

from bisect import bisect_right

import numpy as np

from gpipe_sim.base.arrays import Array

_SAME = 1e-12
"""Relative difference below which two sums of the same layers in another order count as equal."""

_ROUNDING = 4 * float(np.finfo(float).eps)
"""Of the sum of all layers: what the difference of two running sums may be off by, however small it is itself."""


def partition(costs: Array) -> tuple[int, ...]:
    """How many layers each stage gets, given `costs[k, l]`, the seconds that layer l would take on stage k.

    Rows differ when stages recompute differently or sit on devices of different speed. Two steps:

    1. The smallest bound B that the largest stage can have, by bisection down to neighbouring floats. For a given B,
       `_reachable` finds after each stage every layer at which a cut within B can stand; B is possible if the last
       stage can end at the last layer. (To let each stage take as many layers as fit is enough only where stages are
       equally fast, `_is_enough`: a dear layer may have to be left to a later, faster stage.)
    2. Among all cuts within B, one with the smallest sum of squared stage costs, by dynamic programming from the last
       stage. Of cuts that are still equal, early stages get fewer layers: they hold activations longest.
    """
    num_stages, num_layers = costs.shape
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_stages} stages need at least as many layers, found {num_layers}")
    sums = np.concatenate([np.zeros((num_stages, 1)), np.cumsum(costs, axis=1)], axis=1)
    return _most_even(sums, _smallest_bound(sums) * (1 + _SAME))


def _smallest_bound(sums: Array) -> float:
    largest_layer = float(np.diff(sums, axis=1).min(axis=0).max())
    low, high = np.nextafter(largest_layer, 0.0), float(sums[:, -1].max())
    equal = (sums == sums[0]).all()
    of_one, num_stages = sums[0].tolist(), len(sums)
    while low < (middle := (low + high) / 2) < high:
        if _is_enough(of_one, num_stages, middle) if equal else _reachable(sums, middle):
            high = middle
        else:
            low = middle
    return high


def _is_enough(sums: list[float], num_stages: int, bound: float) -> bool:
    """Whether some cut into equally fast stages has none above the bound: each takes as many layers as fit.

    Of fewer stages than there are to be, some can be cut again.
    """
    end, last = 0, len(sums) - 1
    for _ in range(num_stages):
        end = bisect_right(sums, sums[end] + bound) - 1
        if end == last:
            return True
    return False


def _reachable(sums: Array, bound: float) -> bool:
    """Whether some cut has no stage above the bound.

    `ends[i]` says whether the stages so far can end before layer i. From an end at i the next stage can end at any of
    i+1 .. last(i); marking +1 and -1 at the borders of each such range and summing up gives the union of all.
    """
    num_stages, num_layers = sums.shape[0], sums.shape[1] - 1
    ends = np.zeros(num_layers + 1, dtype=bool)
    ends[0] = True
    for stage in range(num_stages):
        begins = np.flatnonzero(ends[: num_layers - (num_stages - 1 - stage)])
        last = np.searchsorted(sums[stage], sums[stage, begins] + bound, side="right") - 1
        borders = np.bincount(begins + 1, minlength=num_layers + 3) - np.bincount(last + 1, minlength=num_layers + 3)
        ends = np.cumsum(borders)[: num_layers + 1] > 0
        if not ends.any():
            return False
    return bool(ends[num_layers])


def _most_even(sums: Array, bound: float) -> tuple[int, ...]:
    """Dynamic programming: `best[i]` is the least sum of squares of cutting layers i.. into the stages from k on."""
    num_stages, num_layers = sums.shape[0], sums.shape[1] - 1
    best = np.full(num_layers + 1, np.inf)
    best[num_layers] = 0.0
    choices = np.zeros((num_stages, num_layers + 1), dtype=int)
    for stage in reversed(range(num_stages)):
        later, best = best, np.full(num_layers + 1, np.inf)
        within = bound + _ROUNDING * sums[stage, -1]
        for length in range(1, num_layers - num_stages + 2):
            cost = sums[stage, length:] - sums[stage, :-length]
            allowed = cost <= within
            if not allowed.any():
                break
            candidate = np.where(allowed, cost * cost + later[length:], np.inf)
            better = candidate < best[: num_layers + 1 - length] * (1 - _SAME)
            best[: num_layers + 1 - length][better] = candidate[better]
            choices[stage, : num_layers + 1 - length][better] = length
    balance, begin = [], 0
    for stage in range(num_stages):
        balance.append(int(choices[stage, begin]))
        begin += balance[-1]
    return tuple(balance)
