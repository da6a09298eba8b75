"""What a schedule's order implies for bounds and memory: all that the search knows of schedules, read off their lists.

stage 1 of 4, 1f1b    F0 F1 F2 B0 F3 B1 ...    forwards before the first backward 3, before the second 4
last stage of gpipe   F0 F1 F2 F3 B3 B2 ...    forwards before the first backward M: forwards are a phase
"""

from functools import lru_cache
from typing import NamedTuple

from gpipe_sim.plan.orders import SCHEDULES
from gpipe_sim.scenario.schema import BackwardOrder


class StageOrder(NamedTuple):
    """Of one stage's list."""

    before_first: int
    """Forwards before the first backward."""
    before_second: int
    """Forwards before the second backward, if there is one."""
    in_flight: int
    """Micro-batches between their forward and the end of their backward, at most."""
    last_first: bool
    """Whether the first backward is that of the last micro-batch."""


@lru_cache(maxsize=4096)
def stage_orders(
    schedule: str, num_stages: int, num_microbatches: int, backward: BackwardOrder
) -> tuple[StageOrder, ...]:
    """Of every stage."""
    return tuple([stage_order(schedule, k, num_stages, num_microbatches, backward) for k in range(num_stages)])


@lru_cache(maxsize=2**16)
def stage_order(schedule: str, stage: int, K: int, M: int, backward: BackwardOrder) -> StageOrder:
    """Of one stage; none has more forwards before its first backward than the first stage."""
    forwards, before, first = 0, list[int](), -1
    for kind, _, microbatch in SCHEDULES[schedule].order(stage, K, 1, M, backward):
        forwards += kind == "F"
        if kind == "B":
            first = microbatch if not before else first
            before.append(forwards)
        if len(before) == min(2, M):
            break
    most = min(M, max(SCHEDULES[schedule].in_flight(stage, stage, K, 1, M), before[0]))
    return StageOrder(before[0], before[-1], most, M > 1 and first == M - 1)
