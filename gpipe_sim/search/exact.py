"""Branch and bound: the fastest plan of a setup for certain, where there are not too many.

Stages are chosen from the first to the last, all partial plans of so many stages at a time, a row each:

    stage 0          stage 1              stage 2
    a | ...          a | b | ...          a | b | c d e
    a b | ...        a | b c | ...        a | b c | d e         and each with every mode that may fit
    a b c | ...      a b | c | ...        ...

A row goes on if what `cuts` says of its stages, and of the best that can follow, is below the best plan known. What is
left at the end is evaluated, the lowest bound first, until the next bound is above the best.
"""

from collections.abc import Callable

import numpy as np

from gpipe_sim.base.arrays import Array, Indices
from gpipe_sim.plan.plan import Plan
from gpipe_sim.search.cuts import Cutter, Modes, allowed, at_ends, shortest, tables_end
from gpipe_sim.search.judge import Judge, actions_of
from gpipe_sim.search.setups import FASTEST_FIRST, Setup

_MOST_ROWS = 200_000
"""At most so many partial plans are held: about 50 MB."""
_AT_ONCE = 256
"""So many plans are evaluated before the best is looked at again."""


def solve(
    cutter: Cutter,
    judge: Judge,
    setup: Setup,
    borders: tuple[int, ...],
    modes: Modes,
    limit: float,
    best_s: Callable[[], float],
    work: int,
) -> bool:
    """Evaluate every plan of the setup that might fit and be faster than the best; whether all of them were.

    `best_s` is the step time of the best that fits so far, and `work` how much the evaluation may take.
    """
    rows = _rows(cutter, setup, borders, modes, limit, best_s())
    if rows is None:
        return False
    bounds, lengths, chosen = rows
    end, order, where = judge.work + work, np.argsort(bounds, kind="stable"), np.array(borders)

    def plan(row: int) -> Plan:
        balance = tuple(np.diff(where[np.cumsum([0, *lengths[row]])]).tolist())
        return setup.plan(cutter.scenario, cutter.profile, balance, tuple(FASTEST_FIRST[i] for i in chosen[row]))

    for first in range(0, len(order), _AT_ONCE):
        best = best_s()
        some = [int(row) for row in order[first : first + _AT_ONCE] if bounds[row] < best]
        if not some:
            break
        plans = [plan(row) for row in some]
        if judge.work + len(plans) * actions_of(plans[0]) > end:
            return False
        judge.judge(plans, best)
    return True


def _rows(
    cutter: Cutter, setup: Setup, borders: tuple[int, ...], modes: Modes, limit: float, best_s: float
) -> tuple[Array, Indices, Indices] | None:
    """Bounds, lengths and modes of all plans below the best; None if there are too many."""
    tables = cutter.tables(borders, setup.num_microbatches, len(borders) - 1)
    positions, M = cutter.positions(setup), setup.num_microbatches
    seconds = [{mode: tables.seconds(at, mode) for mode in allowed(modes, k)} for k, at in enumerate(positions)]
    fits = [
        {mode: tables.least_bytes(at, mode) <= limit for mode in allowed(modes, k)} for k, at in enumerate(positions)
    ]
    chains, slowest = [tables_end(tables, 0.0)], [tables_end(tables, 0.0)]
    for k in reversed(range(setup.num_stages)):
        own = [np.where(fits[k][mode], seconds[k][mode].chain, np.inf) for mode in seconds[k]]
        chains.append(shortest(tables, np.min(own, axis=0) + at_ends(tables, chains[-1])))
        own = [np.where(fits[k][mode], seconds[k][mode].extra, np.inf) for mode in seconds[k]]
        slowest.append(shortest(tables, np.maximum(np.min(own, axis=0), at_ends(tables, slowest[-1]))))
    chains, slowest = chains[::-1], slowest[::-1]

    num_borders = len(borders) - 1
    begin, reached, extra, bound = np.zeros(1, int), np.zeros(1), np.zeros(1), np.zeros(1)
    lengths, chosen = np.zeros((1, 0), int), np.zeros((1, 0), int)
    overhead = cutter.profile.action_overhead_s
    for k, at in enumerate(positions):
        left = setup.num_stages - 1 - k
        parts = list[tuple[Array, ...]]()
        spans = range(1, num_borders - left + 1) if left else [None]
        for mode, mine in seconds[k].items():
            for span in spans:
                length = num_borders - begin if span is None else np.full(len(begin), span)
                able = np.flatnonzero(begin + length <= num_borders - left)
                where = length[able] - 1, begin[able]
                able = able[fits[k][mode][where]]
                where = length[able] - 1, begin[able]
                end = begin[able] + length[able]
                chain = reached[able] + mine.chain[where]
                most = np.maximum(extra[able], mine.extra[where])
                trips = -(-M // at.order.in_flight)
                least = np.maximum(bound[able], chain + chains[k + 1][end] + np.maximum(most, slowest[k + 1][end]))
                least = np.maximum(least, reached[able] + mine.busy[where])
                least = np.maximum(least, reached[able] + trips * (mine.chain[where] + chains[k + 1][end]))
                good = least - overhead < best_s
                kept = able[good]
                parts.append(
                    (
                        end[good],
                        chain[good],
                        most[good],
                        least[good],
                        kept,
                        length[kept],
                        np.full(len(kept), FASTEST_FIRST.index(mode)),
                    )
                )
        begin, reached, extra, bound, rows, taken, mode_index = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        if len(begin) > _MOST_ROWS:
            return None
        lengths = np.column_stack([lengths[rows], taken])
        chosen = np.column_stack([chosen[rows], mode_index])
    return bound - overhead, lengths, chosen
