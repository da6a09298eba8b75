"""Where to cut in a setup: good cuts by dynamic programming, and a bound that no cut can beat.

With f, b and r a micro-batch's forward, backward and recomputation, c a message and l its latency, a step takes at
least

    S = sum (f + b + 2 (c + l))            one micro-batch there and back (*chain*)
      + max (the other forwards)           of a stage or a link, before the last stage turns to its first backward
      + max (the other backwards)          of a stage or a link, after that                           (both: *extra*)

and at least what a rank is *busy* with, after the first micro-batch has reached it and before the last has returned
from it; and, if at most h micro-batches are in flight at a stage, ceil(M / h) round trips from there. All of that is
a sum or maximum over stages, each of which knows its part by its own interval, so dynamic programming from the last
stage finds the least of it:

    least[k, i] = min over l of combine(stage k from border i to i + l, least[k + 1, i + l])

A stage takes the fastest mode that fits, since recomputing less never makes a step slower. Good cuts are those with the
smallest chain among all whose slowest stage (*slack*, which is about what the other micro-batches add) is within a
limit, for some limits from the smallest possible one upwards.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_sim.base.arrays import Array
from gpipe_sim.cost.profile import Profile
from gpipe_sim.plan.stages import microbatch_sizes
from gpipe_sim.scenario.schema import Checkpoint, Scenario
from gpipe_sim.search.order import stage_orders
from gpipe_sim.search.setups import FASTEST_FIRST, Setup
from gpipe_sim.search.tables import IntervalTables, Position

_ALL_LENGTHS = 128
"""Up to so many layers a stage may be of any length at once."""
_TIMES_AVERAGE = 2
"""A stage of a longer model may hold at most twice the average number of layers in the first attempt."""
_MOST_CELLS = 4_000_000
"""Longer stages are not tried where tables of all stages would have more entries: a second of work."""
_ROOM = (1 + 1e-12, 1.01, 1.04)
"""Limits of the slowest stage, over the smallest possible: rounding aside, and a little more for a shorter chain."""
_LIMITS, _FEW_LIMITS = 5, 3
"""So many limits from the smallest to the largest are tried, and for models of more than `_ALL_LENGTHS` layers so
many."""
_EVENNESS = 1e-3
"""Of cuts with the same chain and limit, those with even stages are preferred: the weight of squared slacks."""
_KEPT = 48
"""Tables of so many numbers of micro-batches are kept for the next setup."""

Modes = tuple[Checkpoint, ...] | Checkpoint | None
"""One for each stage, one for all, or each stage's own choice."""


class Cut(NamedTuple):
    """Where the layers are cut, the stages' modes, and about how long a step takes."""

    balance: tuple[int, ...]
    modes: tuple[Checkpoint, ...]
    estimate_s: float


class Outlook(NamedTuple):
    """What is known of a setup before any of its plans is evaluated."""

    bound_s: float
    """No plan that fits is faster; infinite if none fits, for certain."""
    estimate_s: float
    """About what its best plan takes."""


class StageTable(NamedTuple):
    """A stage in its position as every interval, in the fastest mode that fits."""

    chain: Array
    slack: Array
    extra: Array
    busy: Array
    mode: npt.NDArray[np.int8]


class Cutter:
    """Finds cuts and bounds of the setups of one scenario."""

    def __init__(self, scenario: Scenario, profile: Profile) -> None:
        self.scenario, self.profile = scenario, profile
        self._tables: dict[tuple[tuple[int, ...], int, int], IntervalTables] = {}

    def tables(self, borders: tuple[int, ...], num_microbatches: int, longest: int) -> IntervalTables:
        """Of all intervals between these borders up to a longest one."""
        key = borders, num_microbatches, longest
        if key not in self._tables:
            while len(self._tables) >= _KEPT:
                self._tables.pop(next(iter(self._tables)))
            sizes = microbatch_sizes(self.scenario.samples, num_microbatches)
            self._tables[key] = IntervalTables(self.profile, self.scenario, borders, sizes, longest)
        return self._tables[key]

    def positions(self, setup: Setup) -> list[Position]:
        """Where each stage of a setup stands."""
        K, cluster = setup.num_stages, self.scenario.cluster
        plan = setup.plan(self.scenario, self.profile, (1,) * K, (FASTEST_FIRST[0],) * K)
        links = [None, *(plan.link(k) for k in range(K - 1)), None]
        orders = stage_orders(setup.schedule, K, setup.num_microbatches, setup.backward)
        return [
            Position(
                slowdown=plan.slowdown(k),
                after=links[k + 1],
                before=links[k],
                is_first=k == 0,
                blocking=not cluster.overlap,
                on_demand=setup.recompute == "on_demand",
                receives_ahead=setup.receives_ahead,
                order=orders[k],
                forwards_first=orders[-1].before_first,
            )
            for k in range(K)
        ]

    def outlook(self, setup: Setup, borders: tuple[int, ...], modes: Modes, limit: float) -> Outlook:
        """What cuts between these borders can reach, with stages within the limit."""
        chain, bound = self._chain(setup, borders, modes, limit, ())
        return Outlook(bound, chain.estimate())

    def cuts(
        self, setup: Setup, borders: tuple[int, ...], modes: Modes, limit: float, spared: Sequence[float] = ()
    ) -> list[Cut]:
        """Cuts between these borders, the best by estimate first, with stages within the limit less what each of them
        must spare."""
        return self._chain(setup, borders, modes, limit, spared)[0].cuts()

    def _chain(
        self, setup: Setup, borders: tuple[int, ...], modes: Modes, limit: float, spared: Sequence[float]
    ) -> tuple["_Chain", float]:
        """The stages of a setup, none longer than could matter, and the bound."""
        count = len(borders) - 1
        longest = count if count <= _ALL_LENGTHS else min(count, -(-_TIMES_AVERAGE * count // setup.num_stages))
        while True:
            tables = self.tables(borders, setup.num_microbatches, longest)
            chain = _Chain(setup, self.positions(setup), tables, modes, limit, spared)
            bound, beyond = chain.bound(), chain.bound_beyond_longest(limit)
            if bound <= beyond or longest == count or setup.num_stages * longest * count > _MOST_CELLS:
                return chain, min(bound, beyond)
            longest = min(count, 2 * longest)

    def least_bytes(self, setup: Setup, borders: tuple[int, ...], modes: Modes) -> float:
        """No cut in this setup has a fullest stage that holds less."""
        tables = self.tables(borders, setup.num_microbatches, len(borders) - 1)
        found = tables_end(tables, 0.0)
        for k, at in reversed(list(enumerate(self.positions(setup)))):
            least = np.min([tables.least_bytes(at, mode) for mode in allowed(modes, k)], axis=0)
            found = shortest(tables, np.maximum(least, at_ends(tables, found)))
        return float(found[0])


def allowed(modes: Modes, stage: int) -> tuple[Checkpoint, ...]:
    """The modes that a stage may take, fastest first."""
    if modes is None:
        return FASTEST_FIRST
    return (modes[stage],) if isinstance(modes, tuple) else (modes,)


def tables_end(tables: IntervalTables, value: float) -> Array:
    """A value for every border: this one at the last, infinite before."""
    found = np.full(len(tables.borders), np.inf)
    found[-1] = value
    return found


def at_ends(tables: IntervalTables, at_borders: Array) -> Array:
    """Values at borders as values at the ends of intervals."""
    found: Array = at_borders[tables.end]
    return found


def shortest(tables: IntervalTables, values: Array) -> Array:
    """For every border, the least over all intervals that begin there; none begins at the last."""
    return np.append(values.min(axis=0), np.inf)


class _Chain:
    """The stages of one setup within one limit."""

    def __init__(
        self,
        setup: Setup,
        positions: Sequence[Position],
        tables: IntervalTables,
        modes: Modes,
        limit: float,
        spared: Sequence[float],
    ) -> None:
        self.setup, self.positions, self.tables = setup, positions, tables
        known: dict[tuple[Position, tuple[Checkpoint, ...], float], StageTable] = {}
        self.waits = [setup.num_microbatches / at.order.in_flight - 1 for at in positions]
        """Round trips that each stage waits for after the first."""
        self.stages: list[StageTable] = []
        for k, at in enumerate(positions):
            key = at, allowed(modes, k), limit - (spared[k] if spared else 0.0)
            if key not in known:
                known[key] = self._stage(*key)
            self.stages.append(known[key])
        self.shortest_chain = self._least(lambda k, after: self.stages[k].chain + after)
        """Stage, border -> the least chain of the stages from there on."""

    def _stage(self, at: Position, modes: Sequence[Checkpoint], limit: float) -> StageTable:
        tables = self.tables
        parts = [np.full(tables.valid.shape, np.inf) for _ in range(4)]
        chosen = np.zeros(tables.valid.shape, np.int8)
        left = tables.valid
        for mode in modes:  # the fastest that fits
            fits = left if limit == np.inf else left & (tables.least_bytes(at, mode) <= limit)
            for part, new in zip(parts, tables.seconds(at, mode), strict=True):
                np.copyto(part, new, where=fits)
            np.copyto(chosen, FASTEST_FIRST.index(mode), where=fits)
            left = left & ~fits
            if not left.any():
                break
        chain, slack, extra, busy = parts
        return StageTable(chain, slack, extra, busy, chosen)

    def _least(self, combined: Callable[[int, Array], Array]) -> list[Array]:
        """Dynamic programming from the last stage: for each stage and border, the least of the stages from there on."""
        found = [tables_end(self.tables, 0.0)]
        for k in reversed(range(len(self.stages))):
            found.append(shortest(self.tables, combined(k, at_ends(self.tables, found[-1]))))
        return found[::-1]

    def reached_s(self, stage: int) -> Array:
        """Border -> seconds, at least, that a micro-batch takes to a stage that begins there, and back from it."""
        tables, profile = self.tables, self.tables.profile
        layers = np.append(0.0, np.cumsum(tables.least.forward_s + tables.least.backward_s))[tables.borders]
        slowdown = min([at.slowdown for at in self.positions[:stage]], default=1.0)
        links = [at.after for at in self.positions[:stage]]
        waits = sum(2 * (link.latency + profile.hop_overhead_s + profile.action_overhead_s) for link in links if link)
        found: Array = layers * slowdown + waits
        return found

    def bound(self) -> float:
        """The least step of all cuts, with stages up to the longest."""
        M, chain = self.setup.num_microbatches, float(self.shortest_chain[0][0])
        if chain == np.inf:
            return np.inf
        found = tables_end(self.tables, 0.0)
        for k in reversed(range(len(self.stages))):
            stage, reached = self.stages[k], self.reached_s(k)
            own = np.maximum(chain + stage.extra, reached[None, :-1] + stage.busy)
            found = shortest(self.tables, np.maximum(own, at_ends(self.tables, found)))
            trips = -(-M // self.positions[k].order.in_flight)
            found = np.maximum(found, reached + trips * self.shortest_chain[k])
        return float(found[0]) - self.tables.profile.action_overhead_s

    def bound_beyond_longest(self, limit: float) -> float:
        """The least step of all cuts with a longer stage: it is busier than any part of it, and holds more."""
        tables = self.tables
        if tables.longest >= len(tables.borders) - 1:
            return np.inf
        seconds, held = tables.total("forward_s") + tables.total("backward_s"), tables.profile.parameter_bytes
        busy, weights = (np.append(0.0, np.cumsum(layers))[tables.borders] for layers in (seconds, held))
        slowdown = min(at.slowdown for at in self.positions)
        longer, weighs = (sums[tables.longest + 1 :] - sums[: -tables.longest - 1] for sums in (busy, weights))
        return float(longer[weighs * tables.per_weight <= limit].min(initial=np.inf)) * slowdown

    @cached_property
    def smallest_slack(self) -> float:
        """Of the slowest stage, at least."""
        return float(self._least(lambda k, after: np.maximum(self.stages[k].slack, after))[0][0])

    def estimate(self) -> float:
        """About what the best cut takes."""
        chain = float(self.shortest_chain[0][0])
        return np.inf if chain == np.inf else chain + self.uneven_s + max(self.smallest_slack, self.waits[0] * chain)

    @cached_property
    def uneven_s(self) -> float:
        """About what a larger micro-batch, if some are, takes longer there and back than the smallest."""
        slowdown = min(at.slowdown for at in self.positions)
        return self.tables.uneven_s * slowdown * (1 - 1 / len(self.stages))

    def cuts(self) -> list[Cut]:
        """Different ones, the best by estimate first."""
        smallest = self.smallest_slack
        if smallest == np.inf:
            return []
        found = {self._cut(smallest * room, smallest) for room in _ROOM}
        loosest = self._cut(np.inf, smallest)
        widest = max([smallest, *self._added(loosest)])
        count = _LIMITS if len(self.tables.borders) <= _ALL_LENGTHS else _FEW_LIMITS
        limits = np.geomspace(max(smallest, 1e-300), max(widest, 1e-300), count)[1:-1]
        found |= {self._cut(float(limit), smallest) for limit in limits} | {loosest}
        made = [self._finished(lengths) for lengths in found if lengths]
        return sorted(made, key=lambda cut: (cut.estimate_s, cut.balance, cut.modes))

    def _cut(self, limit: float, scale: float) -> tuple[int, ...]:
        """Lengths, in borders, of the stages of the cut with the shortest chain whose slowest stage is within a limit,
        as are the waits of a stage that has as many micro-batches in flight as it may; empty if there is none."""
        tables = self.tables
        least, choices = tables_end(tables, 0.0), list[npt.NDArray[np.intp]]()
        weight = _EVENNESS / max(scale, 1e-300) if limit < np.inf else 0.0
        for k in reversed(range(len(self.stages))):
            stage = self.stages[k]
            values = stage.chain + at_ends(tables, least)
            if limit < np.inf:
                values = np.where(stage.slack <= limit, values, np.inf)
                values = values + weight * np.where(values < np.inf, stage.slack, 0.0) ** 2
            choices.append(values.argmin(axis=0))
            least = shortest(tables, values)
            if limit < np.inf and self.waits[k] > 0:
                least = np.where(self.waits[k] * least <= limit, least, np.inf)
        if least[0] == np.inf:
            return ()
        begin, lengths = 0, []
        for choice in reversed(choices):
            lengths.append(int(choice[begin]) + 1)
            begin += lengths[-1]
        return tuple(lengths)

    def _added(self, lengths: tuple[int, ...]) -> list[float]:
        """What the other micro-batches add: the slack of each stage, and its waits for round trips."""
        where = self._intervals(lengths)
        slacks = [float(stage.slack[at]) for stage, at in zip(self.stages, where, strict=True)]
        chains = [float(stage.chain[at]) for stage, at in zip(self.stages, where, strict=True)]
        trips = np.cumsum(chains[::-1])[::-1].tolist()
        return slacks + [wait * trip for wait, trip in zip(self.waits, trips, strict=True)]

    def _intervals(self, lengths: tuple[int, ...]) -> list[tuple[int, int]]:
        """Where each stage is in the tables."""
        begins = np.cumsum([0, *lengths]).tolist()
        return [(length - 1, begin) for length, begin in zip(lengths, begins, strict=False)]

    def _finished(self, lengths: tuple[int, ...]) -> Cut:
        where = self._intervals(lengths)
        chain = sum(float(stage.chain[at]) for stage, at in zip(self.stages, where, strict=True))
        modes = tuple([FASTEST_FIRST[stage.mode[at]] for stage, at in zip(self.stages, where, strict=True)])
        balance = tuple(np.diff(self.tables.borders[np.cumsum([0, *lengths])]).tolist())
        return Cut(balance, modes, chain + self.uneven_s + max(self._added(lengths)))
