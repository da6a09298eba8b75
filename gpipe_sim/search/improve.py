"""From a good plan to a better one: neighbours are evaluated, the best is taken, and so on while it improves.

A *move* changes a little: a border, all borders between two stages, a stage's mode, the ranks of two positions. Where
no single move helps, two at once may: layers move to a stage that must recompute for them, another one need not any
more. Where that does not help either, some random moves lead away, and single moves back, to another valley or not.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, permutations

from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import Checkpoint
from gpipe_sim.search.choices import Space
from gpipe_sim.search.judge import Candidate, Judge, actions_of
from gpipe_sim.search.setups import FASTEST_FIRST

Move = Callable[[Plan], Plan | None]
"""What becomes of a plan; None if nothing can."""

_FEW_STAGES = 8
"""Up to so many stages, a piece may move between any two of them; beyond, between neighbours."""
_MOST_PAIRS = 1200
"""At most so many pairs of moves are evaluated in a round, evenly chosen: about a tenth of a second for 8 stages."""
_MOVES_TO_PAIR = 200
"""Of more moves no pairs are tried: too few of them would be looked at to matter."""
_IN_VAIN = 12
"""After so many random ways that led to nothing better, the search ends even if there is work left."""
_RANDOM_MOVES = 4
"""So many random moves lead away from where nothing helps."""


class Improver:
    """Moves within a space, within a limit of memory."""

    def __init__(self, space: Space, judge: Judge, limit: float) -> None:
        self.space, self.judge, self.limit = space, judge, limit

    def cost(self, candidate: Candidate) -> tuple[float, float]:
        """What is made smaller: bytes above the limit first, then seconds."""
        return max(0.0, candidate.peak_bytes - self.limit), candidate.step_time_s

    def improve(self, start: Candidate, work: int) -> Candidate:
        """The best that was found from there with so much work."""
        end = self.judge.work + work
        best = self.descend(start, end)
        luck, in_vain = random.Random(0), 0
        while self.judge.work < end and in_vain < _IN_VAIN:
            plan = best.plan
            moves = list(self.moves(plan, 1))
            for _ in range(_RANDOM_MOVES if moves else 0):
                plan = luck.choice(moves)(plan) or plan
            found = self.judge.judge([plan])
            other = self.descend(found[0], end) if found else best
            in_vain = in_vain + 1 if self.cost(best) <= self.cost(other) else 0
            best = min(best, other, key=self.cost)
        return best

    def descend(self, candidate: Candidate, end: int) -> Candidate:
        """Single moves, then pairs of them, while they help; large pieces of long models first."""
        num_layers, K = candidate.plan.profile.num_layers, candidate.plan.num_stages
        piece = max(1, num_layers // K // 8)
        while self.judge.work < end:
            moves = list(self.moves(candidate.plan, piece))
            around = [move(candidate.plan) for move in moves]
            if candidate.peak_bytes <= self.limit:  # to recompute more is never faster
                around = [plan for plan in around if plan is not None and not _recomputes_more(plan, candidate.plan)]
            better = self._best_of(candidate, around, end)
            if better is candidate and piece == 1:
                pairs = list(combinations(moves, 2)) if len(moves) <= _MOVES_TO_PAIR else []
                pairs = pairs[:: -(-len(pairs) // _MOST_PAIRS)] if pairs else []
                both = ((first(candidate.plan), second) for first, second in pairs)
                better = self._best_of(candidate, [second(plan) for plan, second in both if plan], end)
                if better is candidate:
                    break
            elif better is candidate:
                piece //= 2
            candidate = better
        return candidate

    def _best_of(self, candidate: Candidate, plans: Sequence[Plan | None], end: int) -> Candidate:
        """The best of a plan and its neighbours, as many as the work allows."""
        around = [plan for plan in plans if plan is not None]
        allowed = (end - self.judge.work) // actions_of(candidate.plan)
        found = self.judge.judge(around[: max(allowed, 1)], candidate.step_time_s, end - self.judge.work)
        best = min((candidate, *found), key=self.cost)
        over, seconds = self.cost(candidate)
        return best if self.cost(best) < (over, seconds * (1 - 1e-9)) else candidate

    def moves(self, plan: Plan, piece: int) -> Iterator[Move]:
        """All that the space allows."""
        K = plan.num_stages
        if self.space.balances is None:
            far = K - 1 if K <= _FEW_STAGES else 1
            for giver, taker in permutations(range(K), 2):
                if abs(giver - taker) <= far:
                    yield _moved(giver, taker, piece)
        if self.space.checkpoints is None:
            for stage in range(K):
                for change in (-1, 1):
                    yield _with_mode(stage, change)
        else:
            for modes in self.space.checkpoints:
                whole = modes if isinstance(modes, tuple) else (modes,) * K
                if len(whole) == K and whole != plan.checkpoint:
                    yield _with_modes(whole)
        cluster = plan.scenario.cluster
        ranks = plan.num_ranks
        if self.space.placements is None and ranks > 1 and (cluster.slowdown or cluster.nodes > 1):
            for first, second in combinations(range(ranks), 2):
                if second - first == 1 or ranks <= _FEW_STAGES:
                    yield _exchanged(first, second)
            most = ranks if plan.mesh.messages_inside else cluster.ranks_for(plan.replicas * plan.tensor) or ranks
            unused = sorted({*range(most)} - {*plan.placement})
            slowest = max(plan.pipeline, key=lambda rank: cluster.slowdown.get(rank, 1.0))
            for rank in unused[:_FEW_STAGES]:
                yield _on_rank(plan.pipeline.index(slowest), rank)


def _recomputes_more(plan: Plan, other: Plan) -> bool:
    """Whether it differs in that only."""
    more, less = (sum(map(FASTEST_FIRST.index, one.checkpoint)) for one in (plan, other))
    return plan.balance == other.balance and plan.placement == other.placement and more > less


def _moved(giver: int, taker: int, piece: int) -> Move:
    def move(plan: Plan) -> Plan | None:
        borders = [0, *accumulate(plan.balance)]
        first, last = sorted((giver, taker))
        for border in range(first + 1, last + 1):
            borders[border] += -piece if giver < taker else piece
        balance = tuple([after - before for before, after in pairwise(borders)])
        return replace(plan, balance=balance) if min(balance) > 0 else None

    return move


def _with_mode(stage: int, change: int) -> Move:
    def move(plan: Plan) -> Plan | None:
        index = FASTEST_FIRST.index(plan.checkpoint[stage]) + change
        if not 0 <= index < len(FASTEST_FIRST):
            return None
        modes = (*plan.checkpoint[:stage], FASTEST_FIRST[index], *plan.checkpoint[stage + 1 :])
        return replace(plan, checkpoint=modes)

    return move


def _with_modes(modes: tuple[Checkpoint, ...]) -> Move:
    return lambda plan: replace(plan, checkpoint=modes)


def _exchanged(first: int, second: int) -> Move:
    """All that two positions hold changes places."""

    def move(plan: Plan) -> Plan | None:
        a, b = plan.pipeline[first], plan.pipeline[second]
        other = {a: b, b: a}
        return replace(plan, placement=tuple([other.get(rank, rank) for rank in plan.placement]))

    return move


def _on_rank(position: int, rank: int) -> Move:
    """All that a position holds moves to a rank that holds nothing."""

    def move(plan: Plan) -> Plan | None:
        if rank in plan.placement:
            return None
        left = plan.pipeline[position]
        return replace(plan, placement=tuple([rank if one == left else one for one in plan.placement]))

    return move
