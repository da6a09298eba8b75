"""``schedule: auto``: an order that is made for the times at hand, under a limit of memory.

    what is known              where stages sit, how long F, I and W take, how long messages travel, what is held
          |
    starts                     the named orders that fit the placement, and orders made by rules: a clock runs over
          |                    the pipeline, and a rank that is free does the best of what it could do now
    moves on the longest path  an action that others wait for is moved forward, or what stands before it is moved back
          |
    the best that was seen     never slower than a start

Everything is judged by the same model: an action begins when its rank is free and its message has arrived, and
messages travel beside the computation. Bytes are held from F to I and from I to W. Nothing depends on the clock of
this machine: the work is bounded by a number of evaluations.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import inf
from typing import Literal, NamedTuple

from gpipe_sim.plan.actions import Action, Letter
from gpipe_sim.plan.orders import SCHEDULES, position_of

Goal = Literal["end", "longest_span"]
"""What is made small first: the end of the step, or the longest time of a rank from its first action to its last. The
second matters where a rank begins its next step without waiting for the others."""

Orders = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What an order is made for. Micro-batches are of equal size, so that one number stands for all of them."""

    positions: tuple[int, ...]
    """For each stage, which rank holds it."""
    num_microbatches: int
    forward_s: tuple[float, ...]
    """F of each stage."""
    inputs_s: tuple[float, ...]
    """I of each stage."""
    weights_s: tuple[float, ...]
    """W of each stage."""
    may_split: bool
    """Whether I and W may be run apart; if not, backwards are whole."""
    forward_delay_s: tuple[float, ...]
    """From the end of each stage's F to its arrival at the next stage; one less than stages. 0 on the same rank."""
    backward_delay_s: tuple[float, ...]
    """From the end of each next stage's I or B to its arrival at the stage; one less than stages."""
    held_bytes: tuple[float, ...]
    """By each stage for each micro-batch, from the beginning of F to the end of I or B."""
    weights_bytes: tuple[float, ...]
    """The same from the end of I to the end of W."""
    limit_bytes: tuple[float, ...]
    """Of these on each rank; infinity where there is none."""
    whole_s: tuple[float, ...] = ()
    """B of each stage; if nothing is said, as long as I and W."""

    def __post_init__(self) -> None:
        S = len(self.positions)
        of_stages = (self.forward_s, self.inputs_s, self.weights_s, self.held_bytes, self.weights_bytes)
        of_edges = (self.forward_delay_s, self.backward_delay_s)
        assert all(len(values) == S for values in of_stages), "one value for each stage"
        assert len(self.whole_s) in (0, S), "one value for each stage, or none"
        assert all(len(values) == S - 1 for values in of_edges), "one value for each two stages"
        assert set(self.positions) == set(range(self.num_ranks)), "every rank holds a stage"
        assert self.num_microbatches > 0

    @property
    def num_ranks(self) -> int:
        """K."""
        return len(self.limit_bytes)

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.positions)

    def least_bytes(self, rank: int) -> float:
        """What a rank holds of one micro-batch when its last forward has run. No order holds less."""
        return sum(size for size, position in zip(self.held_bytes, self.positions, strict=True) if position == rank)


@dataclass(frozen=True, kw_only=True)
class MadeOrder:
    """The best order that was found, and what the model says of it."""

    orders: Orders
    end_s: float
    longest_span_s: float
    """Of a rank from its first action to its last."""
    peak_bytes: tuple[float, ...]
    """Of each rank."""
    origin: str
    """The named schedule or the rule that it was made from."""
    num_evaluations: int


# --- the model -------------------------------------------------------------------------------------------------------

_LETTERS: tuple[Letter, ...] = ("F", "I", "W", "B")
_ROUNDING = 1 + 1e-12
"""Sums of bytes that are not whole numbers may be off by their last digits."""


class _Score(NamedTuple):
    """Smaller is better. The second and third decide between orders with the same first."""

    first: float
    second: float
    total: float


@dataclass(frozen=True)
class _Model:
    """The workload with a number for each action: kind x S x M + stage x M + micro-batch, kinds F, I, W and B."""

    work: Workload
    goal: Goal
    n: int
    """S M: numbers of each kind."""
    seconds: list[float]
    """Of each action."""
    forward_delay: list[float]
    """After each F, until the next stage has it."""
    backward_delay: list[float]
    """After each I or B, until the stage before has it."""
    adds: list[float]
    """Bytes that are held more when the action begins."""
    drops: list[float]
    """Bytes that are held less when it has ended."""

    bound: float
    """No order has a better first score: each rank works so long, after the first activations have come to it."""

    @classmethod
    def of(cls, work: Workload, goal: Goal) -> "_Model":
        M, S = work.num_microbatches, work.num_stages
        halves_s = [i + w for i, w in zip(work.inputs_s, work.weights_s, strict=True)]
        whole_s = list(work.whole_s) or halves_s
        least_s = list(map(min, halves_s, whole_s)) if work.may_split else whole_s
        grows = [max(w - h, 0.0) for h, w in zip(work.held_bytes, work.weights_bytes, strict=True)]
        shrinks = [max(h - w, 0.0) for h, w in zip(work.held_bytes, work.weights_bytes, strict=True)]
        nothing = [0.0] * S
        arrival, busy, begins = 0.0, [0.0] * work.num_ranks, [inf] * work.num_ranks
        for stage, rank in enumerate(work.positions):
            busy[rank] += M * (work.forward_s[stage] + least_s[stage])
            begins[rank] = min(begins[rank], arrival if goal == "end" else 0.0)
            arrival += work.forward_s[stage] + [*work.forward_delay_s, 0.0][stage]

        def each(*kinds: Iterable[float]) -> list[float]:
            return [value for kind in kinds for value in kind for _ in range(M)]

        return cls(
            work=work,
            goal=goal,
            n=S * M,
            seconds=each(work.forward_s, work.inputs_s, work.weights_s, whole_s),
            forward_delay=each([*work.forward_delay_s, 0.0]),
            backward_delay=each([0.0, *work.backward_delay_s]),
            adds=each(work.held_bytes, grows, nothing, nothing),
            drops=each(nothing, shrinks, work.weights_bytes, work.held_bytes),
            bound=max(map(sum, zip(begins, busy, strict=True))),
        )

    def ends(self, orders: Sequence[Sequence[int]]) -> list[float] | None:
        """When each action ends; None if the orders cannot finish.

        A rank runs on until a message is not there; who sends it wakes the rank up.
        """
        n, M, seconds = self.n, self.work.num_microbatches, self.seconds
        forward_delay, backward_delay = self.forward_delay, self.backward_delay
        ends = [0.0] * (4 * n)
        forward = [0.0] * M + [inf] * (n - M)  # when each stage has the activations of each micro-batch
        gradient = [inf] * (n - M) + [0.0] * M
        waits_forward, waits_gradient = [-1] * n, [-1] * n
        index, clocks = [0] * len(orders), [0.0] * len(orders)
        ready = list(range(len(orders)))
        while ready:
            rank = ready.pop()
            order, now = orders[rank], clocks[rank]
            at, size = index[rank], len(orders[rank])
            while at < size:
                action = order[at]
                if action < n:
                    arrival = forward[action]
                    if arrival > now:
                        if arrival == inf:
                            waits_forward[action] = rank
                            break
                        now = arrival
                    now += seconds[action]
                    taker = action + M
                    if taker < n:
                        forward[taker] = now + forward_delay[action]
                        if waits_forward[taker] >= 0:
                            ready.append(waits_forward[taker])
                elif 2 * n <= action < 3 * n:
                    now += seconds[action]
                else:
                    cell = action % n
                    arrival = gradient[cell]
                    if arrival > now:
                        if arrival == inf:
                            waits_gradient[cell] = rank
                            break
                        now = arrival
                    now += seconds[action]
                    taker = cell - M
                    if taker >= 0:
                        gradient[taker] = now + backward_delay[cell]
                        if waits_gradient[taker] >= 0:
                            ready.append(waits_gradient[taker])
                ends[action] = now
                at += 1
            index[rank], clocks[rank] = at, now
        if any(at < len(order) for at, order in zip(index, orders, strict=True)):
            return None
        return ends

    def score(self, orders: Sequence[Sequence[int]], ends: Sequence[float]) -> _Score:
        """How good orders are that end so."""
        last = [ends[order[-1]] for order in orders]
        spans = [end - ends[order[0]] + self.seconds[order[0]] for end, order in zip(last, orders, strict=True)]
        end, span = max(last), max(spans)
        return _Score(end, span, sum(spans)) if self.goal == "end" else _Score(span, end, sum(spans))

    def peak(self, order: Sequence[int]) -> float:
        """Bytes that a rank holds at most."""
        held = most = 0.0
        adds, drops = self.adds, self.drops
        for action in order:
            held += adds[action]
            if held > most:
                most = held
            held -= drops[action]
        return most

    def fits(self, rank: int, order: Sequence[int]) -> bool:
        """Whether a rank keeps its limit."""
        return self.peak(order) <= self.work.limit_bytes[rank] * _ROUNDING

    def number(self, kind: Letter, stage: int, microbatch: int) -> int:
        """The number of an action."""
        return _LETTERS.index(kind) * self.n + stage * self.work.num_microbatches + microbatch

    def action(self, number: int) -> Action:
        """The action of a number."""
        kind, cell = divmod(number, self.n)
        return Action(_LETTERS[kind], *divmod(cell, self.work.num_microbatches))


# --- orders by rules -------------------------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """How a rank chooses what to do next."""

    ahead: float
    """How many forwards a stage may be ahead of its backwards, as a multiple of those that fill the time until the
    first gradient comes back."""
    prefers: Literal["F", "I"]
    """Of a forward and a backward that could both run."""
    pace: float
    """The least time from one micro-batch to the next at the first stage, as a share of the busiest rank's time for
    one. With 0 a micro-batch begins as soon as there is room for it."""
    patience: float
    """The share of a W's time that a rank would rather wait for an F or I than begin the W."""
    frees: bool
    """Whether a W that makes room for a forward comes before an I."""


_AHEAD = (1.0, 0.5, inf, 0.8, 0.65, 1.25, 0.4, 0.3, 0.2)
"""ZB-H2 and ZB-V are 1, ZB-H1 is 0.5, GPipe is infinite; less than 0.5 is for little memory."""
_PACE_AND_PATIENCE = ((0.0, 0.5), (0.5, 0.5), (1.1, 1.0))
"""As fast as memory allows, half as fast as the ranks work in the end, and a little slower than they could."""
_PREFERS: tuple[Literal["F", "I"], ...] = ("F", "I")
_RULE_COST = 3
"""An order is made by a rule in the time of so many evaluations."""
_RULES_REFINED = 4
"""Around so many of the best rules, finer ones are tried."""


def _round_trips(work: Workload, backward_s: Sequence[float]) -> list[float]:
    """From the end of each stage's first forward until its gradient could be there."""
    trips = [0.0] * work.num_stages
    for stage in range(work.num_stages - 2, -1, -1):
        there = work.forward_delay_s[stage] + work.forward_s[stage + 1]
        back = work.backward_delay_s[stage] + backward_s[stage + 1]
        trips[stage] = trips[stage + 1] + there + back
    return trips


def _by_rule(model: _Model, rule: _Rule, split: bool) -> list[list[int]] | None:
    """Orders as a clock runs over the pipeline: whenever a rank is free, it chooses by the rule among what is ready.

    A stage runs its micro-batches in order, and a rank begins no forward that would leave too little for the remaining
    forwards of the oldest micro-batch. So this one always comes through, and then all that it held is free for the
    next. None if the limit is too low for split backwards that hold more after I than before.
    """
    work, n, M = model.work, model.n, model.work.num_microbatches
    S, K = work.num_stages, work.num_ranks
    positions, limits = work.positions, [limit * _ROUNDING for limit in work.limit_bytes]
    seconds, letter = model.seconds, n if split else 3 * n
    backward_s = [seconds[letter + stage * M] for stage in range(S)]
    charges = list(map(max, work.held_bytes, work.weights_bytes)) if split else list(work.held_bytes)
    stages_of = [[stage for stage in range(S) if positions[stage] == rank] for rank in range(K)]
    forward_s = [sum(work.forward_s[stage] for stage in stages) for stages in stages_of]
    trips = _round_trips(work, backward_s)
    ahead = [float(M)] * S
    for stage in range(S):
        if rule.ahead < inf and forward_s[positions[stage]] > 0:
            ahead[stage] = 1 + rule.ahead * trips[stage] / forward_s[positions[stage]] + 1e-9
    busy_s = [sum(work.forward_s[s] + work.inputs_s[s] + work.weights_s[s] for s in stages) for stages in stages_of]
    forward = [rule.pace * max(busy_s) * microbatch for microbatch in range(M)] + [inf] * (n - M)
    gradient = [inf] * n
    next_forward, next_backward = [0] * S, [0] * S
    weights: list[list[int]] = [[] for _ in range(K)]  # cells whose W is to come, and how many of them have been run
    weights_run = [0] * K
    held, free = [0.0] * K, [0.0] * K
    orders: list[list[int]] = [[] for _ in range(K)]
    events = [(0.0, rank) for rank in range(K)]
    while events:
        now, rank = heappop(events)
        if free[rank] > now:
            continue
        stages = stages_of[rank]
        oldest = min([next_forward[stage] for stage in stages])
        need = held[rank]
        for stage in stages:
            if next_forward[stage] == oldest:
                need += charges[stage]
        best_forward = best_backward = -1
        blocked, arrives = False, inf
        for stage in stages:
            microbatch = next_forward[stage]
            if microbatch < M and microbatch - next_backward[stage] + 1 <= ahead[stage]:
                arrival = forward[stage * M + microbatch]
                if need + (charges[stage] if microbatch != oldest else 0.0) > limits[rank]:
                    blocked = blocked or arrival <= now
                elif arrival > now:
                    arrives = min(arrives, arrival)
                elif best_forward < 0 or microbatch < next_forward[best_forward]:
                    best_forward = stage
            microbatch = next_backward[stage]
            if microbatch < next_forward[stage]:
                arrival = gradient[stage * M + microbatch]
                if arrival > now:
                    arrives = min(arrives, arrival)
                elif best_backward < 0 or microbatch <= next_backward[best_backward]:
                    best_backward = stage
        pending = weights_run[rank] < len(weights[rank])
        if pending and blocked and best_forward < 0 and (rule.frees or best_backward < 0):
            kind = "W"
        elif best_forward >= 0 and (best_backward < 0 or rule.prefers == "F"):
            kind = "F"
        elif best_backward >= 0:
            kind = "I"
        elif pending and arrives - now >= rule.patience * seconds[2 * n + weights[rank][weights_run[rank]]]:
            kind = "W"
        else:
            if arrives < inf:
                heappush(events, (arrives, rank))
            continue
        if kind == "F":
            cell = best_forward * M + next_forward[best_forward]
            action = cell
            next_forward[best_forward] += 1
            held[rank] += charges[best_forward]
            end = now + seconds[action]
            if best_forward == S - 1:
                gradient[cell] = end
            else:
                arrival = forward[cell + M] = end + model.forward_delay[cell]
                taker = positions[best_forward + 1]
                if taker != rank and free[taker] <= arrival:
                    heappush(events, (arrival, taker))
        elif kind == "I":
            cell = best_backward * M + next_backward[best_backward]
            action = letter + cell
            next_backward[best_backward] += 1
            end = now + seconds[action]
            if split:
                held[rank] -= charges[best_backward] - work.weights_bytes[best_backward]
                weights[rank].append(cell)
            else:
                held[rank] -= charges[best_backward]
            if best_backward > 0:
                arrival = gradient[cell - M] = end + model.backward_delay[cell]
                taker = positions[best_backward - 1]
                if taker != rank and free[taker] <= arrival:
                    heappush(events, (arrival, taker))
        else:
            cell = weights[rank][weights_run[rank]]
            weights_run[rank] += 1
            action = 2 * n + cell
            end = now + seconds[action]
            held[rank] -= work.weights_bytes[cell // M]
        orders[rank].append(action)
        free[rank] = end
        heappush(events, (end, rank))
    return orders if sum(map(len, orders)) == n * (3 if split else 2) else None


# --- orders that are given -------------------------------------------------------------------------------------------


def _named(work: Workload) -> Iterator[tuple[str, Orders]]:
    """The named orders for this placement."""
    K, M = work.num_ranks, work.num_microbatches
    stages_per_rank, rest = divmod(work.num_stages, K)
    if rest:
        return
    for schedule in SCHEDULES.values():
        where = tuple(position_of(schedule.pattern, stage, K) for stage in range(work.num_stages))
        if where == work.positions and schedule.refuses(K, stages_per_rank, M) is None:
            orders = schedule.orders(K, stages_per_rank, M, "reverse")
            yield schedule.name, orders
            if (other := schedule.orders(K, stages_per_rank, M, "fifo")) != orders:
                yield schedule.name, other


def _variants(model: _Model, orders: Orders) -> Iterator[list[list[int]]]:
    """The orders as they are, and with split or whole backwards, as far as these may be split."""
    numbers = [[model.number(*action) for action in order] for order in orders]
    n = model.n
    is_split = any(n <= action < 3 * n for order in numbers for action in order)
    has_whole = any(action >= 3 * n for order in numbers for action in order)
    if model.work.may_split:
        yield numbers
        if has_whole:
            yield [
                [half for action in order for half in ((action - 2 * n, action - n) if action >= 3 * n else (action,))]
                for order in numbers
            ]
    elif is_split:  # B where the I was, and no W
        yield [
            [action + 2 * n if n <= action < 2 * n else action for action in order if not 2 * n <= action < 3 * n]
            for order in numbers
        ]
    else:
        yield numbers


# --- moves on the longest path ---------------------------------------------------------------------------------------


class _Move(NamedTuple):
    """Take the action at one place of a rank's order out, and put it in at another."""

    rank: int
    out: int
    into: int


def _blocks(model: _Model, orders: Sequence[Sequence[int]], ends: Sequence[float]) -> Iterator[tuple[int, int, int]]:
    """The longest path, from its end back to its beginning: on which rank, from which action to which.

    rank 0   F0 F1 F2 ......
    rank 1      F0 F1 F2 I0 ..          a path leaves a rank where an action began as its message arrived
    """
    n, M = model.n, model.work.num_microbatches
    place = [-1] * (4 * n)
    for order in orders:
        for index, action in enumerate(order):
            place[action] = index
    if model.goal == "end":
        rank = max(range(len(orders)), key=lambda rank: ends[orders[rank][-1]])
    else:
        span = [ends[order[-1]] - ends[order[0]] + model.seconds[order[0]] for order in orders]
        rank = span.index(max(span))
    last, rounding = len(orders[rank]) - 1, 1e-9 * max(ends)
    while True:
        order, first = orders[rank], last
        while first > 0 and ends[order[first - 1]] >= ends[order[first]] - model.seconds[order[first]] - rounding:
            first -= 1
        yield rank, first, last
        action = order[first]
        stage = action % n // M
        if action < n:
            if stage == 0:
                return
            sender = action - M
        elif action < 2 * n or action >= 3 * n:
            if stage == model.work.num_stages - 1:
                return
            sender = action % n + M + n
            if place[sender] < 0:
                sender += 2 * n
        else:
            return
        rank = model.work.positions[sender % n // M]
        last = place[sender]


_NEAR = 4
"""Places over which an action is moved, other than a W."""


def _moves(model: _Model, orders: Sequence[Sequence[int]], ends: Sequence[float]) -> list[_Move]:
    """What could make the longest path shorter: W to anywhere, others over a short way.

    Others wait for the last action of each of its blocks. So this one may go forward, and what stands before it, above
    all a W, may go behind it. The first action of a block came late, so others may go before it.
    """
    n = model.n
    moves = []
    for rank, first, last in _blocks(model, orders, ends):
        if first == last:
            continue
        order = orders[rank]
        end = len(order) - 1
        moves += [_Move(rank, index, last) for index in range(first, last) if 2 * n <= order[index] < 3 * n]
        moves += [_Move(rank, index, last) for index in range(max(first, last - _NEAR), last)]
        moves += [_Move(rank, last, index) for index in range(max(first, last - _NEAR), last)]
        moves += [_Move(rank, index, first) for index in range(first + 1, min(first + _NEAR, last) + 1)]
        moves += [_Move(rank, index, end) for index in range(first, last) if 2 * n <= order[index] < 3 * n]
    return moves


def _moved(model: _Model, order: Sequence[int], move: _Move) -> list[int] | None:
    """The order after a move; None if an action would pass one of its own stage and micro-batch."""
    action = order[move.out]
    cell, low, high = action % model.n, min(move.out, move.into), max(move.out, move.into)
    if any(other % model.n == cell and other != action for other in order[low : high + 1]):
        return None
    changed = list(order)
    changed.insert(move.into, changed.pop(move.out))
    return changed


_MEMORY = 30
"""A move may make an order worse, but not worse than the order was so many moves ago."""


class _Search:
    """The best orders so far, and how many more may be evaluated."""

    def __init__(self, model: _Model, num_evaluations: int) -> None:
        self.model = model
        self.left = num_evaluations
        self.found: list[tuple[_Score, str, list[list[int]]]] = []

    def consider(self, origin: str, orders: list[list[int]] | None) -> _Score | None:
        """Evaluate a start, if it keeps the limit."""
        if orders is None or not all(self.model.fits(rank, order) for rank, order in enumerate(orders)):
            return None
        self.left -= 1
        if (ends := self.model.ends(orders)) is None:
            return None
        score = self.model.score(orders, ends)
        if not any(found[0] == score and found[2] == orders for found in self.found):
            self.found.append((score, origin, orders))
            self.found.sort(key=lambda found: found[0])
        return score

    def consider_rule(self, rule: _Rule) -> _Score | None:
        """Make a start by a rule and evaluate it."""
        if not self.goes_on():
            return None
        self.left -= _RULE_COST
        return self.consider("rules", _by_rule(self.model, rule, self.model.work.may_split))

    def goes_on(self) -> bool:
        """Whether something better may be found, and there are evaluations left for it."""
        best = min((found[0].first for found in self.found), default=inf)
        return best == inf or (self.left > 0 and best > self.model.bound * _ROUNDING)

    def improve(self, index: int, num_evaluations: int) -> None:
        """Move actions of one of the starts, and keep the best.

        A move is kept if it is not worse than the order was some moves ago: Burke and Bykov, The late acceptance
        hill-climbing heuristic, European Journal of Operational Research 258 (2017).
        """
        model, choice = self.model, random.Random(index)
        score, origin, orders = self.found[index]
        ends = model.ends(orders)
        assert ends is not None
        best = (score, orders)
        before = [score] * _MEMORY
        moves = _moves(model, orders, ends)
        for step in range(num_evaluations):
            if not moves:
                break
            move = choice.choice(moves)
            before[step % _MEMORY], limit = score, max(score, before[step % _MEMORY])
            changed = _moved(model, orders[move.rank], move)
            if changed is None or not model.fits(move.rank, changed):
                continue
            candidate = [*orders[: move.rank], changed, *orders[move.rank + 1 :]]
            self.left -= 1
            if (times := model.ends(candidate)) is None or (new := model.score(candidate, times)) > limit:
                continue
            orders, score, ends = candidate, new, times
            moves = _moves(model, orders, ends)
            if score < best[0]:
                best = (score, orders)
        if best[0] < self.found[index][0]:
            self.found[index] = (best[0], f"{origin}, moved", best[1])


def _try_rules(search: _Search) -> None:
    """Rules that differ in how far and how fast forwards run ahead; then, around the best of them, finer ones."""
    tried: list[tuple[_Score, _Rule]] = []
    for ahead, prefers, (pace, patience) in product(_AHEAD, _PREFERS, _PACE_AND_PATIENCE):
        rule = _Rule(ahead, prefers, pace, patience, False)
        if score := search.consider_rule(rule):
            tried.append((score, rule))
    for _, rule in sorted(tried)[:_RULES_REFINED]:
        finer = [rule._replace(pace=pace) for pace in (0.3, 0.75, 0.95)]
        if search.model.work.may_split:
            finer += [rule._replace(patience=patience) for patience in (0.0, 0.5, 1.0) if patience != rule.patience]
            finer += [rule._replace(patience=patience, frees=True) for patience in (0.0, 0.5, 1.0)]
        for rule in finer:
            search.consider_rule(rule)


_STARTS_MOVED = 3
"""Of the best starts, so many are improved by moves."""


def make_order(
    work: Workload,
    *,
    goal: Goal = "end",
    starts: Sequence[tuple[str, Orders]] = (),
    num_evaluations: int | None = None,
) -> MadeOrder:
    """The best order that is found for the workload with so many evaluations; the starts are evaluated in any case.

    It is never slower than the named orders and the `starts` that keep the limit. If nothing is said, there are 800
    evaluations, and fewer for more than 1,600 actions, so that it takes about a second. A ValueError says which rank
    cannot hold a single micro-batch.
    """
    for rank, limit in enumerate(work.limit_bytes):
        if (least := work.least_bytes(rank)) > limit:
            raise ValueError(f"rank {rank} holds {least:g} bytes of one micro-batch, its limit is {limit:g}")
    model = _Model.of(work, goal)
    if num_evaluations is None:
        num_evaluations = min(800, 1_300_000 // (3 * model.n))
    search = _Search(model, num_evaluations)
    for name, orders in [*_named(work), *starts]:
        for variant in _variants(model, orders):
            search.consider(name, variant)
    _try_rules(search)
    if not search.found:
        search.consider("rules", _by_rule(model, _Rule(0.5, "F", 0.0, 0.0, False), split=False))
    each = search.left // _STARTS_MOVED
    for index in range(min(_STARTS_MOVED, len(search.found))):
        if search.goes_on():
            search.improve(index, each)
    score, origin, best = min(search.found, key=lambda found: found[0])
    end, span = (score.first, score.second) if goal == "end" else (score.second, score.first)
    return MadeOrder(
        orders=tuple(tuple(map(model.action, order)) for order in best),
        end_s=end,
        longest_span_s=span,
        peak_bytes=tuple(map(model.peak, best)),
        origin=origin,
        num_evaluations=num_evaluations - search.left,
    )
