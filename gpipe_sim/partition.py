"""Layers to contiguous stages: the cut whose slowest stage is fastest, exactly, and the most even one among equals.

    layer costs   3  1  1  1 | 2  2  2 | 4  2      K = 3, largest stage 6
                  `--- 6 ---'  `- 6 -'  `-6-'

This is usually, not always, the fastest pipeline: fill and drain see the *sum* over stages, links see the bytes at the
cuts. The planner optimises the step itself; this is the default cut and the planner's starting point.
"""

from bisect import bisect_right
from itertools import accumulate

import numpy as np

from gpipe_sim.profile import Array

_SAME = 1e-12
"""Relative difference below which two sums of the same layers in another order count as equal."""


def partition(costs: Array) -> tuple[int, ...]:
    """How many layers each stage gets, given `costs[k, l]`, the seconds that layer l would take on stage k.

    Rows differ when stages recompute differently or sit on devices of different speed. Two steps:

    1. The smallest bound B that the largest stage can have, by bisection. For a given B, let each stage in turn take
       as many layers as fit, leaving at least one for each later stage. This reaches at least as far after every stage
       as any other cut within B does, since what remains for later stages only shrinks; so it succeeds if any cut
       does. Each success replaces B by the largest stage really met, each failure raises the lower end, until no
       number lies between: B is then the optimum to the last bit.
    2. Among all cuts within B, one with the smallest sum of squared stage costs, by dynamic programming from the last
       stage. Of cuts that are still equal, early stages get fewer layers: they hold activations longest.
    """
    num_stages, num_layers = costs.shape
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_stages} stages need at least as many layers, found {num_layers}")
    sums = [list(accumulate(row, initial=0.0)) for row in costs.tolist()]
    return _most_even(np.array(sums), _smallest_bound(sums) * (1 + _SAME))


def _smallest_bound(sums: list[list[float]]) -> float:
    low, high = 0.0, _largest_stage(sums, float("inf"))
    assert high is not None, "without a bound every cut is allowed"
    while low < (middle := (low + high) / 2) < high:
        found = _largest_stage(sums, middle)
        if found is None:
            low = middle
        else:
            high = min(found, middle)
    return high


def _largest_stage(sums: list[list[float]], bound: float) -> float | None:
    """The largest stage of the greedy cut within the bound; None if no cut is."""
    num_stages, num_layers = len(sums), len(sums[0]) - 1
    begin, largest = 0, 0.0
    for stage, total in enumerate(sums):
        end = min(bisect_right(total, total[begin] + bound) - 1, num_layers - (num_stages - 1 - stage))
        if end <= begin:
            return None
        largest = max(largest, total[end] - total[begin])
        begin = end
    return largest if begin == num_layers else None


def _most_even(sums: Array, bound: float) -> tuple[int, ...]:
    """Dynamic programming: `best[i]` is the least sum of squares of cutting layers i.. into the stages from k on."""
    num_stages, num_layers = sums.shape[0], sums.shape[1] - 1
    best = np.full(num_layers + 1, np.inf)
    best[num_layers] = 0.0
    choices = np.zeros((num_stages, num_layers + 1), dtype=int)
    for stage in reversed(range(num_stages)):
        later, best = best, np.full(num_layers + 1, np.inf)
        for length in range(1, num_layers - num_stages + 2):
            cost = sums[stage, length:] - sums[stage, :-length]
            allowed = cost <= bound
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
