"""Where nothing was found to fit: a proof that nothing does, or the plan that comes nearest.

Whatever the setup, a stage holds its weights, the optimizer's state, and one micro-batch in its backward. If even the
cut for which that is least is above the limit, for every number of stages, nothing fits. Otherwise the setups that
need least are cut for as little memory as they can have, and moved on from there towards the limit.
"""

from itertools import islice

import numpy as np

from gpipe_sim.plan.stages import microbatch_sizes
from gpipe_sim.search.cuts import allowed, at_ends, shortest, tables_end
from gpipe_sim.search.improve import Improver
from gpipe_sim.search.order import StageOrder
from gpipe_sim.search.searcher import Searcher
from gpipe_sim.search.tables import IntervalTables, Position

_LOOKED_AT = 60
"""So many setups are asked how little they can hold; of more, evenly chosen ones."""
_STARTS = 4
"""From so many setups the search for less memory starts."""
_WORK = 400_000
"""Work, in actions, from each of them."""
_ROOM = (1.0, 1.02, 1.1, 1.3)
"""Times the least that a setup can hold, a limit for which it is cut."""


def come_near(searcher: Searcher, limit: float) -> bool:
    """Evaluate plans that take as little memory as can be; whether it is proven that none is within the limit."""
    if not searcher.subspaces:
        return True
    bounds = _evaluate_smallest(searcher, limit)
    all_were = len(searcher.subspaces) <= _LOOKED_AT
    return _least_of_all(searcher) > limit or (all_were and min(bounds) > limit)


def look_within(searcher: Searcher, limit: float) -> None:
    """Evaluate plans that take as little memory as can be, of those setups only that may stay within the limit."""
    if searcher.subspaces and _least_of_all(searcher) <= limit:
        _evaluate_smallest(searcher, limit, worth_it=limit)


def _evaluate_smallest(searcher: Searcher, limit: float, worth_it: float = np.inf) -> list[float]:
    """Plans that hold as little as can be; the least bytes of the setups that were looked at. Those that need more than
    `worth_it` bytes are left at that."""
    every = -(-len(searcher.subspaces) // _LOOKED_AT)
    found = [
        (searcher.cutter.least_bytes(one.setup, one.borders, one.modes), number, one)
        for number, one in enumerate(islice(searcher.subspaces, 0, None, every))
    ]
    found.sort()
    improver = Improver(searcher.space, searcher.judge, limit)
    for least, _, one in found[:_STARTS]:
        if least > worth_it:
            break
        plans = [
            searcher.plan(one.setup, cut.balance, cut.modes)
            for room in _ROOM
            for cut in searcher.cutter.cuts(one.setup, one.borders, one.modes, least * room + 1)[:2]
        ]
        if candidates := searcher.judge.judge(plans):
            best = improver.improve(min(candidates, key=improver.cost), _WORK)
            if best.peak_bytes <= limit:
                break
    return [least for least, _, _ in found]


def _least_of_all(searcher: Searcher) -> float:
    """Bytes of the fullest stage, at least, in the setup that needs least, whichever that is."""
    space, profile = searcher.space, searcher.profile
    sizes = sorted({n for M in space.microbatches for n in microbatch_sizes(space.scenario.samples, M)})
    order = StageOrder(before_first=1, before_second=1, in_flight=1, last_first=True)
    at = Position(1.0, None, None, False, False, False, 1, order, 1)
    best = np.inf
    kinds = dict.fromkeys((one.setup.num_stages, one.borders, one.modes) for one in searcher.subspaces)
    made: dict[tuple[int, ...], IntervalTables] = {}
    for K, borders, modes in kinds:
        if borders not in made:
            longest = len(borders) - 1
            made[borders] = IntervalTables(profile, space.scenario, borders, sizes, longest, 1)
        tables = made[borders]
        found = tables_end(tables, 0.0)
        for k in reversed(range(K)):
            least = np.min([tables.least_bytes(at, mode) for mode in allowed(modes, k)], axis=0)
            found = shortest(tables, np.maximum(least, at_ends(tables, found)))
        best = min(best, float(found[0]))
    return best
