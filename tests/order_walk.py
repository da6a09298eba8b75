"""A step as a walk: run every rank's actions in order, each as soon as what it needs is there.

Written for tests, and on its own: it knows the rules at the head of `orders`, and nothing of the program's evaluators.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

EQUAL = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
"""Seconds by which ideal bubbles are defined."""


class Walk(NamedTuple):
    starts: dict[tuple[str, int, int], float]
    ends: dict[tuple[str, int, int], float]
    spans: list[float]
    """From each rank's first action to its last."""
    end: float

    def bubble(self, busy: float) -> float:
        """The share of the ranks' time in which they wait, when they work `busy` seconds together."""
        return 1 - busy / (len(self.spans) * self.end)


def walk(
    orders: Sequence[Sequence[tuple[str, int, int]]],
    seconds: Callable[[str, int], float] = lambda kind, stage: EQUAL[kind],
    latency: Callable[[int, int], float] = lambda sender, taker: 0.0,
) -> Walk:
    """Start and end of every action; a message between ranks takes its latency. An order that cannot finish fails."""
    rank_of = {stage: rank for rank, order in enumerate(orders) for _, stage, _ in order}
    last = max(rank_of)
    starts: dict[tuple[str, int, int], float] = {}
    ends: dict[tuple[str, int, int], float] = {}
    done, free = [0] * len(orders), [0.0] * len(orders)
    gone_on = True
    while gone_on:
        gone_on = False
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                kind, stage, microbatch = order[done[rank]]
                needs = []
                if kind in "BI":
                    needs = [("F", stage, microbatch)] + [("B", stage + 1, microbatch)] * (stage < last)
                elif kind == "W":
                    needs = [("B", stage, microbatch)]
                elif stage > 0:
                    needs = [("F", stage - 1, microbatch)]
                if any(need not in ends for need in needs):
                    break
                start = free[rank]
                for need in needs:
                    away = rank_of[need[1]] != rank
                    start = max(start, ends[need] + (latency(need[1], stage) if away else 0.0))
                free[rank] = start + seconds(kind, stage)
                starts[kind, stage, microbatch] = start
                ends["B" if kind == "I" else kind, stage, microbatch] = free[rank]
                done[rank] += 1
                gone_on = True
    waiting = [order[position] for order, position in zip(orders, done, strict=True) if position < len(order)]
    assert not waiting, f"cannot finish, waiting at {waiting}"
    spans = [free[rank] - starts[order[0]] for rank, order in enumerate(orders)]
    return Walk(starts, ends, spans, max(free))
