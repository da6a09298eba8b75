"""Search: which plan is fastest and fits, over K, M, schedule, checkpoint of each stage and the cut, jointly.

A *frame* fixes K, M, schedule and recompute. Within a frame the cut and the stages' checkpoint modes are found in two
steps; frames are visited in the order of what the first step promises.

1. **Cut.** The one with the smallest bottleneck, each stage recomputing only what its memory demands; exact, for a
   batch of frames at once (`cuts`). Batches that even perfectly equal stages would not make worth it are left out. A
   very long model is cut between groups of layers at first, so many that each stage has several.
2. **Step.** What the bottleneck leaves out (fill and drain of uneven stages, queues, windows, buffers) is settled by
   the evaluator: the cut and its neighbours (a piece moved to another stage, one stage's mode changed) are evaluated,
   the best is taken, and so on while it improves.

A space of few possibilities is enumerated instead, and so solved exactly. The front of time against memory is found by
asking again with less and less memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, islice, pairwise, permutations, product
from math import comb

import numpy as np

from gpipe_sim.costs import build_profile
from gpipe_sim.cuts import Cutter, Frame, group_size
from gpipe_sim.evaluate import evaluate, obstacle
from gpipe_sim.intervals import MODES
from gpipe_sim.limits import CELLS
from gpipe_sim.metrics import StepMetrics, step_metrics
from gpipe_sim.plan import Plan, microbatch_sizes, order_of_backwards
from gpipe_sim.scenario import Checkpoint
from gpipe_sim.simulate import simulate
from gpipe_sim.space import Space

ENUMERATED = 6000
"""Plans in a space up to which all of them are evaluated: a second or so."""
_SIMULATED = 20
"""As how many of them a plan counts that must be simulated."""

_SLACK = 0.02
"""How much worse than the best found a frame may promise to be and is still looked at: promises are not exact."""
_TOGETHER, _LOOKED_AT = 8, 24
"""Frames that are evaluated at once, and at most, for one question."""
_ATTEMPTS = 3
"""To find a cut for one question, each with less memory than the last."""
_FEW_STAGES = 8
"""Up to so many, a piece may move between any two stages; beyond, between neighbours."""
_REFINED = 3
"""Frames of each question whose best plan is improved further."""
_EFFORT, _MORE_EFFORT = 1_000_000, 8_000_000
"""Stages times micro-batches of all neighbours that are evaluated to improve one plan, and one that matters: a plan of
many has a bottleneck that is hard to miss, and little to gain otherwise."""
_LESS_MEMORY, _HARDLY_LESS = 0.7, 0.95
"""Each question for the front allows this share of the memory that the last answer took; where that is too little, a
larger one, up to this."""
_NEARLY = 1.02
"""How exactly the least memory that would be enough is looked for where nothing fits."""


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
    less = _LESS_MEMORY
    while found is not None and found.peak_bytes > 0 and less < _HARDLY_LESS:  # layers without bytes take nothing
        smaller = fastest_within(found.peak_bytes * less)
        found, less = (found, float(np.sqrt(less))) if smaller is None else (smaller, less)
    searcher.polish(limit)
    return sorted(searcher.found.values(), key=lambda c: (c.step_time_s, c.peak_bytes))


class _Search:
    """One space: costs of every interval of layers, and what has been evaluated."""

    def __init__(self, space: Space) -> None:
        self.space, self.scenario = space, space.scenario
        Ms = space.microbatches
        self.profile = build_profile(self.scenario, {n for M in Ms for n in microbatch_sizes(self.scenario.batch, M)})
        self.found: dict[tuple[object, ...], Candidate] = {}
        self.enumerated = self.num_possibilities() <= ENUMERATED
        if self.enumerated:
            self.judge([plan for frame in self.frames() for plan in self.possibilities(frame)])

    # --- frames ----------------------------------------------------------------------------------------------------

    def frames(self) -> Iterator[Frame]:
        space, most = self.space, self.profile.num_layers
        for schedule in space.schedules:
            orders = dict.fromkeys(order_of_backwards(schedule, order) for order in space.backwards)
            for K, M, recompute, order, placement, window in product(
                space.stages, space.microbatches, space.recomputes, orders, space.placements, space.windows
            ):
                if K > most or K * M > CELLS or (placement is not None and len(placement) != K):
                    continue
                if M > 1 if schedule == "naive" else M == 1 and "naive" in space.schedules:
                    continue  # one micro-batch makes all schedules the same
                yield Frame(K, M, schedule, recompute, order, placement, window)

    def ask(self, limit: float) -> None:
        """Find the fastest plans whose ranks stay within so many bytes."""
        if self.enumerated:
            return
        demanded, reached, tried = limit, list[Candidate](), list[Candidate]()
        for _ in range(_ATTEMPTS):
            promises = islice(self.cutter.promises(demanded), _LOOKED_AT)
            while some := list(islice(promises, _TOGETHER)):
                best = min((candidate.step_time_s for candidate in reached), default=np.inf)
                worth_it = [promise.plan() for promise in some if promise.step_time_s <= best * (1 + _SLACK)]
                judged = self.judge(worth_it)
                tried += judged
                reached += [c for c in self.made_to_fit(judged, limit) if c.peak_bytes <= limit]
                if len(worth_it) < len(some):
                    break
            # Promises count what a stage holds at least: demand less by as much as a better one was over.
            best = min((candidate.step_time_s for candidate in reached), default=np.inf)
            over = [c.peak_bytes for c in tried if c.peak_bytes > limit and c.step_time_s < best]
            if not over:
                break
            demanded *= limit / min(over)
        if not reached and tried:
            smallest = self.shrink(min(tried, key=lambda c: c.peak_bytes), limit)
            reached = [smallest] if smallest.peak_bytes <= limit else []
        for candidate in best_of_frames(reached)[:_REFINED]:
            self.refine(candidate, limit, _EFFORT)

    def polish(self, limit: float) -> None:
        """Improve the best of all questions once more: one that asked for less memory may have led further."""
        within = [candidate for candidate in self.found.values() if candidate.peak_bytes <= limit]
        for candidate in best_of_frames(within)[:_REFINED] if not self.enumerated else ():
            self.refine(candidate, limit, _MORE_EFFORT)

    @cached_property
    def cutter(self) -> Cutter:
        """Of all frames."""
        space = self.space
        modes = space.checkpoints or (None,)
        return Cutter(self.scenario, self.profile, list(self.frames()), modes, space.balances)

    # --- evaluation ------------------------------------------------------------------------------------------------

    def judge(self, plans: Sequence[Plan]) -> list[Candidate]:
        """Evaluate plans, each once."""
        keys = [_key(plan) for plan in plans]
        new = {key: plan for key, plan in zip(keys, plans, strict=True) if key not in self.found}
        quick = [plan for plan in new.values() if obstacle(plan) is None]
        slow = [plan for plan in new.values() if obstacle(plan) is not None]
        results = [*zip(quick, evaluate(quick), strict=True)] if quick else []
        results += [(plan, step_metrics(simulate(plan))) for plan in slow]
        for plan, metrics in results:
            self.found[_key(plan)] = Candidate(plan, metrics)
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

    def refine(self, candidate: Candidate, limit: float, effort: int) -> None:
        """Make it faster, within the limit."""
        self.improve(candidate, lambda c: c.step_time_s if c.peak_bytes <= limit else np.inf, effort)

    def shrink(self, candidate: Candidate, limit: float) -> Candidate:
        """Make it smaller, until it is within the limit."""
        return self.improve(candidate, lambda c: max(c.peak_bytes, limit), _MORE_EFFORT, recompute_more=True)

    def improve(
        self, candidate: Candidate, cost: Callable[[Candidate], float], effort: int, *, recompute_more: bool = False
    ) -> Candidate:
        """Take the neighbour that costs least while it costs less; where none does, move smaller pieces."""
        piece = group_size(self.profile.num_layers, candidate.plan.num_stages)
        while piece:
            around = list(self.neighbours(candidate.plan, piece, recompute_more=recompute_more))
            effort -= sum(plan.num_stages * plan.num_microbatches * _weight(plan) for plan in around)
            if effort < 0:
                break
            best = min((candidate, *self.judge(around)), key=cost)
            if cost(best) < cost(candidate) * (1 - 1e-9):
                candidate = best
            else:
                piece //= 2
        return candidate

    def neighbours(self, plan: Plan, piece: int, *, recompute_more: bool = False) -> Iterator[Plan]:
        """So many layers moved from one stage to another, the borders between them moving along, or one stage's mode
        changed: to recompute less, or more, which is smaller and never faster."""
        K = plan.num_stages
        borders = [0, *accumulate(plan.balance)]
        far = K - 1 if K <= _FEW_STAGES else 1
        if self.space.balances is None:
            for giver, taker in permutations(range(K), 2):
                if abs(giver - taker) <= far:
                    moved = list(borders)
                    first, last = sorted((giver, taker))
                    for border in range(first + 1, last + 1):
                        moved[border] += -piece if giver < taker else piece
                    balance = tuple([after - before for before, after in pairwise(moved)])
                    if min(balance) > 0:
                        yield replace(plan, balance=balance)
        if self.space.checkpoints is None:
            for stage, mode in product(range(K), MODES):
                more = MODES.index(mode) - MODES.index(plan.checkpoint[stage])
                if more != 0 and (more > 0) == recompute_more:
                    yield replace(plan, checkpoint=(*plan.checkpoint[:stage], mode, *plan.checkpoint[stage + 1 :]))

    def num_possibilities(self) -> int:
        """Plans in the space, those that must be simulated counted several times; not all where there are many."""
        total = 0
        for frame in self.frames():
            K = frame.num_stages
            cuts = comb(self.profile.num_layers - 1, K - 1) if self.space.balances is None else len(self.space.balances)
            modes = len(MODES) ** K if self.space.checkpoints is None else len(self.space.checkpoints)
            some = frame.plan(self.scenario, self.profile, (1,) * K, (MODES[0],) * K)
            total += cuts * modes * _weight(some)
            if total > ENUMERATED:
                break
        return total

    def possibilities(self, frame: Frame) -> Iterator[Plan]:
        """Every cut with every choice of modes."""
        K = frame.num_stages
        inner = range(1, self.profile.num_layers)
        balances: Iterable[tuple[int, ...]] = (
            tuple(np.diff([0, *chosen, self.profile.num_layers]).tolist()) for chosen in combinations(inner, K - 1)
        )
        if self.space.balances is not None:
            balances = [balance for balance in self.space.balances if len(balance) == K]
        for balance in balances:
            for modes in self.modes(K):
                yield frame.plan(self.scenario, self.profile, balance, modes)

    def modes(self, K: int) -> Iterable[tuple[Checkpoint, ...]]:
        if self.space.checkpoints is None:
            return product(MODES, repeat=K)
        spread = [modes if isinstance(modes, tuple) else (modes,) * K for modes in self.space.checkpoints]
        return [modes for modes in spread if len(modes) == K]


def _key(plan: Plan) -> tuple[object, ...]:
    """Equal for equal plans of one search."""
    return Frame.of(plan), plan.balance, plan.checkpoint


def best_of_frames(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The fastest of each frame, fastest first."""
    best: dict[Frame, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.step_time_s):
        best.setdefault(Frame.of(candidate.plan), candidate)
    return list(best.values())


def _weight(plan: Plan) -> int:
    return 1 if obstacle(plan) is None else _SIMULATED


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
