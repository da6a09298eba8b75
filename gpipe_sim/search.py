"""Search: which plan is fastest and fits, over K, M, schedule, checkpoint of each stage and the cut, jointly.

A *frame* fixes K, M, schedule and recompute. Within a frame the cut and the stages' checkpoint modes are found in two
steps; frames are visited in the order of what the first step promises.

1. **Cut.** The one with the smallest bottleneck, each stage recomputing only what its memory demands; exact, for all K
   and M at once (`cuts`).
2. **Step.** What the bottleneck leaves out (fill and drain of uneven stages, queues, windows, buffers) is settled by
   the evaluator: the cut and its neighbours (a layer moved to another stage, one stage's mode changed) are evaluated,
   the best is taken, and so on while it improves.

A space of few possibilities is enumerated instead, and so solved exactly. The front of time against memory is found by
asking again with less and less memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import combinations, pairwise, permutations, product
from math import comb

import numpy as np

from gpipe_sim.costs import build_profile
from gpipe_sim.cuts import MODES, Frame, Intervals, Promise, promises
from gpipe_sim.evaluate import evaluate, obstacle
from gpipe_sim.limits import CELLS
from gpipe_sim.metrics import StepMetrics, step_metrics
from gpipe_sim.plan import Plan, microbatch_sizes, order_of_backwards
from gpipe_sim.scenario import Checkpoint, Recompute, Scenario, ScheduleName
from gpipe_sim.schedule import SCHEDULES
from gpipe_sim.simulate import simulate

ENUMERATED = 6000
"""Plans in a space up to which all of them are evaluated: a second or so."""

_SLACK = 0.02
"""How much worse than the best found a frame may promise to be and is still looked at: promises are not exact."""
_TOGETHER, _LOOKED_AT = 8, 24
"""Frames that are evaluated at once, and at most, for one question."""
_ATTEMPTS = 3
_FEW_STAGES = 8
"""Up to so many, a piece may move between any two stages; beyond, between neighbours."""
_REFINED = 2
"""Frames of each question whose best plan is improved further."""
_LESS_MEMORY = 0.7
"""Each question for the front allows this share of the memory that the last answer took."""
_NEARLY = 1.02
"""How exactly the least memory that would be enough is looked for where nothing fits."""
_MOST_NUMBERS = 16_000_000
"""In the tables of all intervals of all stages: half a gigabyte."""
_MOST_SIZES = 500
"""Sizes of micro-batches that are searched; of more, such that each is the next one's equal share."""
_MAX_LAYERS = 160
"""Longer models are cut between groups of layers only."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """What may be chosen. Everything else is the scenario's."""

    scenario: Scenario
    stages: tuple[int, ...]
    microbatches: tuple[int, ...]
    schedules: tuple[ScheduleName, ...] = field(default_factory=lambda: tuple(SCHEDULES))
    """All that there are; `naive` is what each of them is with one micro-batch."""
    checkpoints: tuple[tuple[Checkpoint, ...] | Checkpoint, ...] | None = None
    """Modes of the stages, one for all or one for each; None leaves each stage its choice."""
    recomputes: tuple[Recompute, ...] = ("early",)
    """Early waits for less, so it is never slower."""
    balances: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that was evaluated."""

    plan: Plan
    metrics: StepMetrics

    @property
    def step_time_s(self) -> float:
        """Without jitter."""
        return self.metrics.step_time_s

    @cached_property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return int(self.metrics.peak_memory_bytes.max())

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its device's memory."""
        return self.peak_bytes <= self.plan.memory_limit

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal plans."""
        plan = self.plan
        return plan.balance, plan.checkpoint, plan.num_microbatches, plan.schedule, plan.recompute


def space_of(points: Sequence[Scenario]) -> Space:
    """What `gpipe plan` may choose: a value under ``plan:`` stays, a list is chosen from, the rest is searched."""
    first = points[0]
    given = first.document.data.get("plan") or {}
    specs = [point.plan for point in points]
    num_layers, devices = build_profile(first, (1,)).num_layers, first.cluster.num_devices
    schedules = tuple(dict.fromkeys(spec.schedule for spec in specs)) if "schedule" in given else tuple(SCHEDULES)
    stages = {spec.num_stages for spec in specs if spec.num_stages}
    if not stages and devices is None:
        raise first.error("cluster.devices_per_node", "is missing, expected how many devices may be used, such as 8")
    stages = stages or set(range(1, min(devices or 1, num_layers) + 1))
    microbatches = {spec.microbatches for spec in specs if spec.microbatches} or _sensible_counts(first.batch)
    if schedules == ("naive",):
        microbatches = {1}
    balances = tuple(dict.fromkeys(spec.balance for spec in specs if spec.balance)) or None
    return Space(
        scenario=first,
        stages=tuple(sorted(stages)),
        microbatches=tuple(sorted(microbatches)),
        schedules=schedules,
        checkpoints=tuple(dict.fromkeys(spec.checkpoint for spec in specs)) if "checkpoint" in given else None,
        recomputes=tuple(dict.fromkeys(spec.recompute for spec in specs)) if "recompute" in given else ("early",),
        balances=balances,
    )


def _sensible_counts(batch: int) -> set[int]:
    """Numbers of micro-batches to search: all up to 128, and beyond that the fewest for each micro-batch size."""
    sizes = range(1, batch // 128 + 1)
    if len(sizes) > _MOST_SIZES:
        sizes = np.unique(np.geomspace(1, len(sizes), _MOST_SIZES).astype(int)).tolist()
    return {*range(1, min(batch, 128) + 1), *(-(-batch // size) for size in sizes if -(-batch // size) <= CELLS)}


def search(space: Space, advance: Callable[[], None] = lambda: None) -> list[Candidate]:
    """Every plan that was evaluated on the way to the front, fastest first; `advance` is called for each question."""
    searcher = _Search(space)

    def fastest_within(limit: float) -> Candidate | None:
        searcher.ask(limit)
        advance()
        within = [candidate for candidate in searcher.found.values() if candidate.peak_bytes <= limit]
        return min(within, key=lambda c: c.step_time_s, default=None)

    limit = float(space.scenario.cluster.device.memory - space.scenario.cluster.memory_reserve)
    fastest = fastest_within(np.inf)
    found = fastest if fastest is not None and fastest.peak_bytes <= limit else fastest_within(limit)
    if fastest is not None and found is None:  # between too little and enough, the least that would be enough
        too_little, enough = limit, float(fastest.peak_bytes)
        while enough > too_little * _NEARLY:
            middle = float(np.sqrt(too_little * enough))
            nearer = fastest_within(middle)
            too_little, enough = (middle, enough) if nearer is None else (too_little, float(nearer.peak_bytes))
    while found is not None and found.peak_bytes > 0:  # layers without bytes take nothing, and less there is not
        found = fastest_within(found.peak_bytes * _LESS_MEMORY)
    searcher.polish(limit)
    return sorted(searcher.found.values(), key=lambda c: (c.step_time_s, c.peak_bytes))


class _Search:
    """One space: costs of every interval of layers, and what has been evaluated."""

    def __init__(self, space: Space) -> None:
        self.space, self.scenario = space, space.scenario
        Ms = space.microbatches
        self.profile = build_profile(self.scenario, {n for M in Ms for n in microbatch_sizes(self.scenario.batch, M)})
        self.found: dict[tuple[object, ...], Candidate] = {}
        num_layers = self.profile.num_layers
        step = -(-num_layers // _MAX_LAYERS)
        self.cuts = np.unique(np.append(np.arange(0, num_layers, step), num_layers))
        """Where a stage may begin or end."""
        self.enumerated = self.num_possibilities() <= ENUMERATED
        if self.enumerated:
            self.judge([plan for frame in self.frames() for plan in self.possibilities(frame)])

    # --- frames ----------------------------------------------------------------------------------------------------

    def frames(self) -> Iterator[Frame]:
        space = self.space
        for K, M, schedule, recompute in product(space.stages, space.microbatches, space.schedules, space.recomputes):
            single = M == 1 or schedule == "naive"
            if K >= len(self.cuts) or K * M > CELLS or (schedule == "naive" and M > 1):
                continue
            if single and schedule != "naive" and "naive" in space.schedules:
                continue  # one micro-batch makes all schedules the same
            yield Frame(K, M, schedule, recompute)

    def plan(self, frame: Frame, balance: tuple[int, ...], checkpoint: tuple[Checkpoint, ...]) -> Plan:
        spec = self.scenario.plan
        return Plan(
            scenario=self.scenario,
            profile=self.profile,
            balance=balance,
            placement=spec.placement or tuple(range(frame.num_stages)),
            num_microbatches=frame.num_microbatches,
            checkpoint=checkpoint,
            schedule=frame.schedule,
            recompute=frame.recompute,
            backward=order_of_backwards(frame.schedule, spec.backward),
            window=spec.window,
        )

    def ask(self, limit: float) -> None:
        """Find the fastest plans whose ranks stay within so many bytes."""
        if self.enumerated:
            return
        demanded, reached, tried = limit, list[Candidate](), list[Candidate]()
        for _ in range(_ATTEMPTS):
            promises = sorted(self.promises(demanded), key=lambda promise: promise.step_time_s)[:_LOOKED_AT]
            tried = []
            for first in range(0, len(promises), _TOGETHER):
                best = min((candidate.step_time_s for candidate in reached), default=np.inf)
                some = [p.plan() for p in promises[first:][:_TOGETHER] if p.step_time_s <= best * (1 + _SLACK)]
                tried += self.made_to_fit(self.judge(some), limit)
                reached = [candidate for candidate in tried if candidate.peak_bytes <= limit]
            if reached or not tried:
                break
            # Promises count what a stage holds at least: demand less by as much as the best of them was over.
            demanded *= limit / min(candidate.peak_bytes for candidate in tried)
        if not reached and tried:
            smallest = self.shrink(min(tried, key=lambda c: c.peak_bytes), limit)
            reached = [smallest] if smallest.peak_bytes <= limit else []
        for candidate in sorted(reached, key=lambda c: c.step_time_s)[:_REFINED]:
            self.refine(candidate, limit)

    def polish(self, limit: float) -> None:
        """Improve the best of all questions once more: one that asked for less memory may have led further."""
        within = [candidate for candidate in self.found.values() if candidate.peak_bytes <= limit]
        for candidate in sorted(within, key=lambda c: c.step_time_s)[:_REFINED] if not self.enumerated else ():
            self.refine(candidate, limit)

    # --- evaluation ------------------------------------------------------------------------------------------------

    def judge(self, plans: Sequence[Plan]) -> list[Candidate]:
        """Evaluate plans, each once."""
        keys = [Candidate(plan, None).key for plan in plans]  # type: ignore[arg-type]
        new = {key: plan for key, plan in zip(keys, plans, strict=True) if key not in self.found}
        quick = [plan for plan in new.values() if obstacle(plan) is None]
        slow = [plan for plan in new.values() if obstacle(plan) is not None]
        results = [*zip(quick, evaluate(quick), strict=True)] if quick else []
        results += [(plan, step_metrics(simulate(plan))) for plan in slow]
        for plan, metrics in results:
            candidate = Candidate(plan, metrics)
            self.found[candidate.key] = candidate
        return [self.found[key] for key in keys]

    def made_to_fit(self, candidates: Sequence[Candidate], limit: float) -> list[Candidate]:
        """While a stage is above the limit, let it recompute more, if it may choose."""
        changed = {c: self._smaller(c, limit) for c in candidates if c.peak_bytes > limit}
        smaller = [plan for plan in changed.values() if plan is not None]
        kept = [candidate for candidate in candidates if changed.get(candidate) is None]
        return kept + (self.made_to_fit(self.judge(smaller), limit) if smaller else [])

    def _smaller(self, candidate: Candidate, limit: float) -> Plan | None:
        plan = candidate.plan
        modes = list(plan.checkpoint)
        for rank, peak in zip(plan.ranks, candidate.metrics.peak_memory_bytes, strict=True):
            stage = plan.placement.index(rank)
            if peak > limit and modes[stage] != MODES[-1]:
                modes[stage] = MODES[MODES.index(modes[stage]) + 1]
        may_choose = self.space.checkpoints is None and tuple(modes) != plan.checkpoint
        return replace(plan, checkpoint=tuple(modes)) if may_choose else None

    def refine(self, candidate: Candidate, limit: float) -> None:
        """Take the fastest neighbour within the limit while it is faster."""
        while True:
            around = [c for c in self.judge(list(self.neighbours(candidate.plan))) if c.peak_bytes <= limit]
            best = min((candidate, *around), key=lambda c: c.step_time_s)
            if best.step_time_s >= candidate.step_time_s * (1 - 1e-9):
                return
            candidate = best

    def shrink(self, candidate: Candidate, limit: float) -> Candidate:
        """Take the smallest neighbour while it is smaller, until it is within the limit."""
        while candidate.peak_bytes > limit:
            around = self.judge(list(self.neighbours(candidate.plan, recompute_more=True)))
            smallest = min((candidate, *around), key=lambda c: c.peak_bytes)
            if smallest is candidate:
                break
            candidate = smallest
        return candidate

    def neighbours(self, plan: Plan, *, recompute_more: bool = False) -> Iterator[Plan]:
        """A piece moved from one stage to another, the borders between them moving along, or one stage's mode changed:
        to recompute less, or more, which is smaller and never faster."""
        K = plan.num_stages
        places = [0, *np.searchsorted(self.cuts, np.cumsum(plan.balance)).tolist()]
        far = K - 1 if K <= _FEW_STAGES else 1
        if self.space.balances is None:
            for giver, taker in permutations(range(K), 2):
                if abs(giver - taker) <= far:
                    moved = list(places)
                    first, last = sorted((giver, taker))
                    for border in range(first + 1, last + 1):
                        moved[border] += -1 if giver < taker else 1
                    if all(before < after for before, after in pairwise(moved)):
                        yield replace(plan, balance=tuple(np.diff(self.cuts[moved]).tolist()))
        if self.space.checkpoints is None:
            for stage, mode in product(range(K), MODES):
                more = MODES.index(mode) - MODES.index(plan.checkpoint[stage])
                if more != 0 and (more > 0) == recompute_more:
                    yield replace(plan, checkpoint=(*plan.checkpoint[:stage], mode, *plan.checkpoint[stage + 1 :]))

    def num_possibilities(self) -> int:
        """Plans in the space; an upper bound where it is large."""
        total = 0
        for frame in self.frames():
            K = frame.num_stages
            cuts = comb(len(self.cuts) - 2, K - 1) if self.space.balances is None else len(self.space.balances)
            total += cuts * (len(MODES) ** K if self.space.checkpoints is None else len(self.space.checkpoints))
            if total > ENUMERATED:
                break
        return total

    def possibilities(self, frame: Frame) -> Iterator[Plan]:
        """Every cut with every choice of modes."""
        K = frame.num_stages
        inner = self.cuts[1:-1].tolist()
        balances: Iterable[tuple[int, ...]] = (
            tuple(np.diff([0, *chosen, self.profile.num_layers]).tolist()) for chosen in combinations(inner, K - 1)
        )
        if self.space.balances is not None:
            balances = [balance for balance in self.space.balances if len(balance) == K]
        for balance in balances:
            for modes in self.modes(K):
                yield self.plan(frame, balance, modes)

    def modes(self, K: int) -> Iterable[tuple[Checkpoint, ...]]:
        if self.space.checkpoints is None:
            return product(MODES, repeat=K)
        spread = [modes if isinstance(modes, tuple) else (modes,) * K for modes in self.space.checkpoints]
        return [modes for modes in spread if len(modes) == K]

    # --- cuts ------------------------------------------------------------------------------------------------------

    def promises(self, limit: float) -> Iterator[Promise]:
        """For each frame the plan with the smallest bottleneck, and about how long its step takes."""
        frames = list(self.frames())
        if self.space.balances is not None:
            for frame, balance in product(frames, self.space.balances):
                if len(balance) == frame.num_stages:
                    free: list[tuple[Checkpoint, ...]] = [(MODES[0],) * len(balance)]
                    for modes in self.modes(len(balance)) if self.space.checkpoints else free:
                        yield Promise(0.0, partial(self.plan, frame, balance, modes))
            return
        for schedule, recompute in product(self.space.schedules, self.space.recomputes):
            mine = [frame for frame in frames if (frame.schedule, frame.recompute) == (schedule, recompute)]
            counts = sorted({frame.num_microbatches for frame in mine})
            together = max(1, _MOST_NUMBERS // (len(self.cuts) ** 2 * max(self.space.stages)))
            for first in range(0, len(counts), together):
                some = tuple(counts[first : first + together])
                chunk = [frame for frame in mine if frame.num_microbatches in some]
                for given in self.space.checkpoints or (None,):
                    yield from promises(self.intervals(some), chunk, self.plan, given, limit)

    @cache  # noqa: B019  # lives as long as one search
    def intervals(self, counts: tuple[int, ...]) -> Intervals:
        """Costs of all intervals of layers for these numbers of micro-batches: the same for every question."""
        sizes = [microbatch_sizes(self.scenario.batch, M) for M in counts]
        return Intervals(self.profile, self.scenario.optimizer, self.cuts, sizes)


def fits(space: Space) -> bool:
    """Whether any plan of the space stays within the devices' memory."""
    limit = float(space.scenario.cluster.device.memory - space.scenario.cluster.memory_reserve)
    searcher = _Search(space)
    searcher.ask(limit)
    return any(candidate.fits for candidate in searcher.found.values())


def front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those for which no other is both faster and smaller, fastest first."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.step_time_s, c.peak_bytes)):
        if not found or candidate.peak_bytes < found[-1].peak_bytes:
            found.append(candidate)
    return found
