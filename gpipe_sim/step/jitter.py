"""Luck: lognormal factors on compute times.

A factor is set by seed, sample, kind, stage and micro-batch alone, never by the order of events, so that two plans that
share an action share its luck. It is a hash of these numbers, not the next draw of a generator: any number of factors
are computed at once, and none needs a generator of its own.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpipe_sim.base.arrays import Array
from gpipe_sim.plan.actions import COLLECTIVES, KINDS, Letter
from gpipe_sim.plan.plan import Plan

_Words = npt.NDArray[np.uint64]


def jitter_factors(plan: Plan, samples: Sequence[int], replica: int = 0) -> dict[Letter, Array]:
    """Kind -> stage, micro-batch, sample -> what the plan's jitter makes of a replica's compute time.

    U has no micro-batches, and positions in the place of stages. Each replica has luck of its own, the first that of a
    plan without others.
    """
    S, M, jitter = plan.num_stages, plan.num_microbatches, plan.scenario.cluster.jitter
    stages, microbatches = np.arange(S)[:, None, None], np.arange(M)[:, None]
    found: dict[Letter, Array] = {}
    for letter, kind in KINDS.items():
        if letter in COLLECTIVES:
            continue
        rows, columns = (stages, microbatches) if letter != "U" else (stages[: plan.num_ranks], microbatches[:1])
        if jitter is None:
            found[letter] = np.ones((len(rows), len(columns), len(samples)))
        else:
            seed = jitter.seed % 2**64
            own = [replica] if replica else []
            found[letter] = lognormal(jitter.cv, seed, np.array(samples), kind.number, rows, columns, *own)
    found["U"] = found["U"][:, 0]
    return found


def lognormal(cv: float, *key: npt.ArrayLike) -> Array:
    """Factors with mean 1 and the given coefficient of variation, one for each key, whose parts are broadcast.

    The key's hash gives two uniform numbers, these a normal one (Box and Muller, 1958).
    """
    words = np.zeros(1, dtype=np.uint64)
    for part in key:
        words = _mix(words + np.atleast_1d(part).astype(np.uint64))
    first, second = ((_mix(words + np.uint64(i)) >> np.uint64(11)).astype(float) * 2.0**-53 for i in (1, 2))
    normal = np.sqrt(-2.0 * np.log1p(-first)) * np.cos(2.0 * np.pi * second)
    sigma = np.sqrt(np.log1p(cv * cv))
    factors: Array = np.exp(sigma * normal - sigma * sigma / 2)
    return factors


def _mix(words: _Words) -> _Words:
    """A step of SplitMix64 (Steele, Lea and Flood, 2014): each bit of the result depends on every bit given."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
