"""A question: the fastest plan within so many bytes. Its answer is found in four steps.

    scan      setups by their estimates, a few spread over all M first: cut, and evaluate these cuts and plain ones
    siblings  the best cuts in other setups that differ in one choice, or a little in M
    prove     branch and bound in every setup that is left, if it is small enough: that may be the answer for certain
    improve   the best setups of all, and of each value of each choice: move on from their best plan

Each leaves out only setups whose bound is above the best plan so far, and stops when its share of the work is done. As
setups do not depend on each other but for that, more choices do not lead to a worse answer while there is work left.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from math import comb

import numpy as np

from gpipe_sim.make.making import order_of_backwards
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import Checkpoint
from gpipe_sim.search.cuts import Cut, Outlook
from gpipe_sim.search.exact import solve
from gpipe_sim.search.improve import Improver
from gpipe_sim.search.judge import Candidate
from gpipe_sim.search.searcher import Searcher, Subspace
from gpipe_sim.search.setups import FASTEST_FIRST, Setup

SCAN_WORK, IMPROVE_WORK, PROVE_WORK = 1_600_000, 1_600_000, 600_000
"""Work of each step for the device's memory, in actions: about a second each for a million of them."""
SIBLINGS_WORK = 400_000
"""The same, for setups that differ little from the best."""
FRONT_SHARE = 12
"""A question for the front may take this fraction of it."""
_FRONT_SETUPS = 400
"""A question for the front chooses from so many setups at most, of those that came into question before."""
_PER_CUT = 1500
"""Work, in actions, that a bound of a setup takes however few its layers are: about 1.5 ms."""
_TOGETHER = 4
"""So many setups are cut and evaluated before the best is looked at again."""
_ALIKE = 1.5
"""Numbers of micro-batches within this factor are alike: one is off by as much from its estimate as the other."""
_COARSE = 0.6
"""At most this share of the scan's work is for a few setups spread over all M, half of it for their bounds."""
_SIMULATED = 300_000
"""Work, in actions, of plans that must be simulated, after which the rest of a batch is left out."""
_CUTS = 3
"""So many cuts of a setup are evaluated."""
_ATTEMPTS = 3
"""So often a setup is cut again with less memory where its best cut was above the limit."""
_NEIGHBOURS = 2
"""Of so many of the best setups, as many smaller and as many larger M are looked at."""
_IMPROVED = 4
"""So many of the best setups are improved, and as many siblings are looked at."""
_MOST_PLANS = 3_000_000
"""Up to so many plans a setup is solved by branch and bound; of more, too many partial plans would be left."""


class Question:
    """The fastest plan within so many bytes."""

    def __init__(self, searcher: Searcher, limit: float, share: int) -> None:
        self.searcher, self.space, self.judge, self.limit, self.share = (
            searcher,
            searcher.space,
            searcher.judge,
            limit,
            share,
        )
        self._outlooks: dict[Subspace, Outlook] = {}
        self._ratios: dict[tuple[object, ...], dict[int, float]] = {}
        """What setups are alike in -> M -> the estimate from its tables over the rough one."""
        self._factors: dict[tuple[object, ...], dict[int, float]] = {}
        """The same -> M -> the step of the best plan over the estimate."""
        self._cuts: dict[Subspace, list[Cut]] = {}
        self._evaluated: dict[Subspace, None] = {}
        """In the order in which they were: of those that promise the same, the first comes first, every time."""
        self._best: dict[Setup, Candidate] = {}
        """The fastest of each setup within the limit."""
        self.is_exact = False
        """Whether it is proven that no plan within the limit is faster than the answer, or that there is none."""
        self._seen = 0
        self.best: Candidate | None = None

    def answer(self, wanted: float = np.inf) -> Candidate | None:
        """By the four steps at the top; where the answer takes more memory than is wanted, by the first two."""
        complete = self.scan()
        self.try_siblings()
        if self.best_s < np.inf and self.best is not None and self.best.peak_bytes > wanted:
            return self.best
        solved = self.prove(complete=complete)
        if not solved or not self.searcher.is_complete:
            self.improve()
            self.try_siblings()
        # That a smaller window is never faster is not certain where messages share a NIC.
        is_certain = self.limit < np.inf or len(self.space.windows) == 1 or not self.judge.has_simulated
        self.is_exact = solved and is_certain and self.searcher.is_complete
        return self.best

    @property
    def best_s(self) -> float:
        """Step time of the fastest within the limit, of this space or known from elsewhere."""
        self._look()
        known_s = self.searcher.known_s(self.limit)
        return known_s if self.best is None else min(self.best.step_time_s, known_s)

    def _look(self) -> None:
        """Take note of what was evaluated since."""
        for candidate in islice(self.judge.found.values(), self._seen, None):
            if candidate.peak_bytes <= self.limit:
                setup = Setup.of(candidate.plan)
                if setup not in self._best or candidate.step_time_s < self._best[setup].step_time_s:
                    self._best[setup] = candidate
                if self.best is None or candidate.step_time_s < self.best.step_time_s:
                    self.best = candidate
        self._seen = len(self.judge.found)

    # --- scan --------------------------------------------------------------------------------------------------------

    def scan(self) -> bool:
        """Cut setups in the order of their estimates, and evaluate; whether all were that could matter."""
        begin = self.judge.work
        end = begin + SCAN_WORK // self.share
        self.judge.judge(list(self._swept()), self.best_s)
        everything = list(self._open_subspaces())
        coarse = [one for one in everything if self._is_coarse(one)]
        for one in coarse:
            if self.searcher.bounds[one] < self.best_s and self.judge.work - begin < _COARSE / 2 * (end - begin):
                self.outlook(one)
        self._evaluate(coarse, begin + int(_COARSE * (end - begin)))
        return self._evaluate(everything, end)

    def _evaluate(self, subspaces: Sequence[Subspace], end: int) -> bool:
        """Cut and evaluate setups in the order of their estimates, up to so much work; whether all were that matter."""
        waiting = [
            (self._estimate_s(one), number, one) for number, one in enumerate(subspaces) if one not in self._evaluated
        ]
        heapify(waiting)
        while some := list(islice(self._next(waiting, end), _TOGETHER)):
            self._evaluate_now(some)
        cut = [one for _, _, one in sorted(waiting) if one in self._cuts and self.outlook(one).bound_s < self.best_s]
        self._evaluate_now(cut[:_TOGETHER])
        return not waiting

    def _evaluate_now(self, some: Sequence[Subspace]) -> None:
        """The plans of setups that are cut."""
        tried = self.judge.judge([plan for one in some for plan in self._plans(one)], self.best_s, _SIMULATED)
        self._fit(some, tried)
        self._calibrate(some)
        self._evaluated |= dict.fromkeys(some)

    def _next(self, waiting: list[tuple[float, int, Subspace]], end: int) -> Iterator[Subspace]:
        """Setups that may hold a better plan, the lowest estimate first, once it is no rough one any more."""
        while waiting and self.judge.work < end:
            estimate, number, one = heappop(waiting)
            if self.searcher.bounds[one] >= self.best_s or self.outlook(one).bound_s >= self.best_s:
                continue
            if (again := self._estimate_s(one)) > estimate * (1 + 1e-9):
                heappush(waiting, (again, number, one))
            elif one not in self._cuts:
                self.judge.work += 2 * self._cutting_work(one)
                self._cuts[one] = self.searcher.cutter.cuts(one.setup, one.borders, one.modes, self.limit)
                heappush(waiting, (max(estimate, self._estimate_s(one)), number, one))
            else:
                yield one

    def _calibrate(self, some: Sequence[Subspace]) -> None:
        """By how much the best plans of these setups are slower than they were estimated to be."""
        for one in some:
            found, cuts = self._best.get(one.setup), self._cuts[one]
            if found is not None and cuts and cuts[0].estimate_s > 0:
                key = one.setup.num_stages, one.setup.schedule, one.modes, one.setup.placement
                self._factors.setdefault(key, {})[one.setup.num_microbatches] = found.step_time_s / cuts[0].estimate_s

    def _is_coarse(self, one: Subspace) -> bool:
        """Whether it is one of a few setups that are looked at first: of M that make equal micro-batches, or are powers
        of two, which are spread over all M."""
        setup, space = one.setup, self.space
        first = order_of_backwards(setup.schedule, space.backwards[0])
        windows = {min(setup.num_microbatches, window or setup.num_microbatches) for window in space.windows}
        M = setup.num_microbatches
        return (
            (space.scenario.samples % M == 0 or M & (M - 1) == 0)
            and setup.backward == first
            and setup.receives_ahead == (max(windows) if self.limit == np.inf else min(windows))
        )

    def _estimate_s(self, one: Subspace) -> float:
        """From the setup's cuts or, before they are made, from what is known of a similar setup."""
        setup = one.setup
        key = setup.num_stages, setup.schedule, one.modes, setup.placement
        factor = _nearest(self._factors.get(key, {}), setup.num_microbatches, _ALIKE)
        if one in self._cuts:
            cuts = self._cuts[one]
            return max(self._outlooks[one].bound_s, factor * cuts[0].estimate_s) if cuts else np.inf
        if one in self._outlooks:
            return max(self._outlooks[one].bound_s, factor * self._outlooks[one].estimate_s)
        ratios = self._ratios.get(key) or self._ratios.get((*key[:3], None), {})
        return factor * self.searcher.estimates[one] * _nearest(ratios, setup.num_microbatches)

    def _open_subspaces(self) -> Iterable[Subspace]:
        """Those that may hold the answer: where memory is no matter, a smaller window is never faster."""
        subspaces = self.searcher.subspaces
        if self.share >= FRONT_SHARE:
            known = self.searcher.looked_at
            subspaces = [one for one in subspaces if one in known or not known][:_FRONT_SETUPS]
        if self.limit == np.inf and len(self.space.windows) > 1:
            widest = max(np.inf if window is None else window for window in self.space.windows)
            return [one for one in subspaces if one.setup.receives_ahead == min(widest, one.setup.num_microbatches)]
        return subspaces

    def outlook(self, one: Subspace) -> Outlook:
        """Of a setup within this limit, made once."""
        if one not in self._outlooks:
            self.searcher.looked_at.add(one)
            self.judge.work += self._cutting_work(one)
            setup = one.setup
            found = self.searcher.cutter.outlook(setup, one.borders, one.modes, self.limit)
            self._outlooks[one] = found
            ratio = found.estimate_s / max(self.searcher.estimates[one], 1e-300)
            for placement in (setup.placement, None):
                key = setup.num_stages, setup.schedule, one.modes, placement
                self._ratios.setdefault(key, {})[setup.num_microbatches] = ratio
        return self._outlooks[one]

    def _cutting_work(self, one: Subspace) -> int:
        cells = one.setup.num_stages * min(len(one.borders), 128)
        return (_PER_CUT + cells * max(1, len(one.borders) // 128)) * (1 if self.limit == np.inf else 2)

    def _plans(self, one: Subspace) -> Iterator[Plan]:
        """The best cuts by estimate, and plain ones."""
        cuts = self._cuts[one]
        for cut in cuts[:_CUTS]:
            yield self.searcher.plan(one.setup, cut.balance, cut.modes)
        yield from self._plain(one, cuts)

    def _plain(self, one: Subspace, cuts: Sequence[Cut]) -> Iterator[Plan]:
        """The smallest bottleneck and equal layers, in modes that all stages share and in those of the best cut."""
        setup, K = one.setup, one.setup.num_stages
        shared: list[tuple[Checkpoint, ...]] = [(mode,) * K for mode in FASTEST_FIRST]
        if one.modes is not None:
            shared = [one.modes if isinstance(one.modes, tuple) else (one.modes,) * K]
        elif self.limit == np.inf:
            shared = shared[:1]
        elif cuts and shared[0] not in {cut.modes for cut in cuts[:_CUTS]}:
            shared = shared[1:]  # if all could do without recomputing, one of these would
        for modes in dict.fromkeys([*shared, *(cut.modes for cut in cuts[:1])]):
            for balance in self._plain_cuts(setup, modes) if self.space.balances is None else [self._only_cut(one)]:
                yield self.searcher.plan(setup, balance, modes)

    def _only_cut(self, one: Subspace) -> tuple[int, ...]:
        return tuple(np.diff(one.borders).tolist())

    def _plain_cuts(self, setup: Setup, modes: tuple[Checkpoint, ...]) -> Iterator[tuple[int, ...]]:
        K, L, slowdown = setup.num_stages, self.searcher.profile.num_layers, self.space.scenario.cluster.slowdown
        slowdowns = tuple([slowdown.get(rank, 1.0) for rank in setup.placement])
        yield self.searcher.smallest_bottleneck(setup.num_microbatches, modes, slowdowns)
        yield tuple(L // K + (stage < L % K) for stage in range(K))

    def _swept(self) -> Iterator[Plan]:
        """What `gpipe simulate` would sweep, as far as it may be better than the best."""
        searcher = self.searcher
        for point in self.space.swept:
            spec = point.plan
            K, M = spec.num_stages, spec.num_microbatches
            if K not in self.space.stages or M not in self.space.microbatches or K > searcher.profile.num_layers:
                continue
            backward = order_of_backwards(spec.schedule, spec.backward)
            placement = spec.placement or tuple(range(K))
            setup = Setup(K, M, spec.schedule, spec.recompute, backward, spec.window, placement)
            modes = spec.checkpoint if isinstance(spec.checkpoint, tuple) else (spec.checkpoint,) * K
            balance = spec.balance or next(iter(self._plain_cuts(setup, modes)))
            yield searcher.plan(setup, balance, modes)

    def _fit(self, some: Sequence[Subspace], tried: Sequence[Candidate]) -> None:
        """Cut again with less memory where the estimate's best was above the limit, as much less as it was above."""
        for one in some if self.limit < np.inf else ():
            spared = np.zeros(one.setup.num_stages)
            for _ in range(_ATTEMPTS):
                mine = [c for c in tried if Setup.of(c.plan) == one.setup and c.step_time_s < self.best_s]
                over = [c for c in mine if c.peak_bytes > self.limit]
                if not over:
                    break
                fastest = min(over, key=lambda c: c.step_time_s)
                spared = spared + self._above(fastest)
                self.judge.work += 2 * self._cutting_work(one)
                cuts = self.searcher.cutter.cuts(one.setup, one.borders, one.modes, self.limit, tuple(spared))
                plans = [self.searcher.plan(one.setup, cut.balance, cut.modes) for cut in cuts[:_CUTS]]
                tried = self.judge.judge(plans, self.best_s, _SIMULATED)

    def _above(self, candidate: Candidate) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        """By how many bytes each stage is above the limit."""
        plan = candidate.plan
        peaks = dict(zip(plan.ranks, candidate.metrics.peak_memory_bytes.tolist(), strict=True))
        return np.array([max(0.0, peaks[rank] - self.limit) for rank in plan.placement])

    # --- siblings, improvement, proof ------------------------------------------------------------------------------

    def try_siblings(self) -> None:
        """The best cuts in setups that differ in a choice other than K and ranks, or a little in M."""
        if self.share >= FRONT_SHARE:
            return
        self._look()
        best = sorted(self._best.values(), key=lambda c: c.step_time_s)[:_IMPROVED]
        setups = self.searcher.by_setup
        plans = []
        for rank, candidate in enumerate(best):
            setup = Setup.of(candidate.plan)
            others = [
                setup._replace(schedule=schedule, backward=order_of_backwards(schedule, backward), window=window)
                for schedule in self.space.schedules
                for backward in self.space.backwards
                for window in self.space.windows
            ]
            if rank < _NEIGHBOURS:
                apart = {M: abs(M - setup.num_microbatches) for M in self.space.microbatches}
                near = sorted(apart, key=lambda M: apart[M])[1 : 1 + 2 * _NEIGHBOURS]
                others += [setup._replace(num_microbatches=M) for M in near]
            plans += [
                self.searcher.plan(other, candidate.plan.balance, candidate.plan.checkpoint)
                for other in dict.fromkeys(others)
                if other in setups and self.searcher.bounds[setups[other]] <= self.best_s
            ]
        end = self.judge.work + SIBLINGS_WORK
        for first in range(0, len(plans), _TOGETHER):
            if self.judge.work < end:
                self.judge.judge(plans[first : first + _TOGETHER], self.best_s, _SIMULATED)

    def improve(self) -> None:
        """The best setups, and the best of each value of each choice, as far as their bounds are below the best."""
        self._look()
        ordered = sorted(self._best.values(), key=lambda c: (c.step_time_s, c.peak_bytes))
        chosen = dict.fromkeys(ordered[:_IMPROVED])
        for field in ("schedule", "backward", "window", "recompute"):
            first: dict[object, Candidate] = {}
            for candidate in ordered:
                first.setdefault(getattr(candidate.plan, field), candidate)
            chosen |= dict.fromkeys(first.values())
        work = IMPROVE_WORK // self.share
        improver = Improver(self.space, self.judge, self.limit)
        bounds = {one.setup: self.outlook(one).bound_s for one in self._outlooks}
        for number, candidate in enumerate(chosen):
            if bounds.get(Setup.of(candidate.plan), 0.0) < self.best_s:
                before = self.judge.work
                improver.improve(candidate, work // 2 if number == 0 else work // (len(chosen) - number))
                work -= self.judge.work - before

    def prove(self, *, complete: bool) -> bool:
        """Branch and bound in every setup that may hold a better plan, if all of them were looked at, and otherwise in
        those that were evaluated; whether nothing is left."""
        end = self.judge.work + PROVE_WORK // self.share
        solved = complete
        subspaces = self._open_subspaces() if complete else sorted(self._evaluated, key=self._estimate_s)
        for one in subspaces:
            if self.searcher.bounds[one] >= self.best_s:
                continue
            if self.judge.work > end:
                return False
            if self.outlook(one).bound_s < self.best_s:
                if not self._is_small(one):
                    solved = False
                    continue
                left = end - self.judge.work
                self.judge.work += self._cutting_work(one)
                solved &= solve(
                    self.searcher.cutter,
                    self.judge,
                    one.setup,
                    one.borders,
                    one.modes,
                    self.limit,
                    lambda: self.best_s,
                    left,
                )
        return solved

    def _is_small(self, one: Subspace) -> bool:
        """Whether it has few enough plans for branch and bound to be worth a try."""
        K = one.setup.num_stages
        modes = len(FASTEST_FIRST) ** K if one.modes is None else 1
        return comb(len(one.borders) - 2, K - 1) * modes <= _MOST_PLANS


def _nearest(by_count: Mapping[int, float], num_microbatches: int, alike: float = np.inf) -> float:
    """The value of the nearest number of micro-batches, if it is within a factor; otherwise 1."""
    M, best, value = num_microbatches, alike, 1.0
    for other, its in by_count.items():
        if (apart := max(other, M) / min(other, M)) <= best:
            best, value = apart, its
    return value
