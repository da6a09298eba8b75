"""Step to numbers. Each metric is defined here once; K ranks with v stages each, M micro-batches."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpipe_sim.base.arrays import Array
from gpipe_sim.plan.orders import SCHEDULES
from gpipe_sim.step.step import RankTimeline, Step


def _timelines(step: Step) -> list[RankTimeline]:
    """Those of all replicas, where they differ."""
    return [timeline for one in step.replicas or (step,) for timeline in one.ranks]


def _first_start_s(step: Step) -> float:
    return min(timeline.first_start_s for timeline in _timelines(step))


def step_time_s(step: Step) -> float:
    """From the first action's start until the last rank has finished its own update and collectives.

    Without collectives that is the max over ranks of (last backward + update): updates hide in the drain.
    """
    return max(timeline.last_end_s for timeline in _timelines(step)) - _first_start_s(step)


def pipeline_time_s(step: Step) -> float:
    """T: from the first action's start to the end of the last backward, or W."""
    return max(timeline.last_backward_s for timeline in _timelines(step)) - _first_start_s(step)


def longest_rank_span_s(step: Step) -> float:
    """Over ranks, the longest time from a rank's own first action to its last backward, or W.

    Qi et al. (2024) take bubble rates from it: a rank that starts late and one that ends early do not idle.
    """
    return max(timeline.last_backward_s - float(timeline.start_s[0]) for timeline in _timelines(step))


def busy_s(step: Step) -> Array:
    """Seconds of compute (everything but updates) of each rank; where replicas differ, their mean."""
    by_replica = [[timeline.busy_s() for timeline in one.ranks] for one in step.replicas or (step,)]
    mean: Array = np.mean(by_replica, axis=0)
    return mean


def bubble_fraction(step: Step) -> float:
    """1 - busy / (K T): the share of the ranks' time in which nothing is computed (GPipe, section 2.3)."""
    return 1.0 - float(busy_s(step).sum()) / (len(step.ranks) * pipeline_time_s(step))


def bubble_ideal(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """The bubble of equal stages and free links, F, I and W equally long: (K-1) / (v M+K-1) for most schedules.

    `bubble_fraction` equals it exactly for equal micro-batches and no, or on-demand `always`, recompute. Early
    recompute fills part of the bubble, so that the simulated one is smaller.
    """
    return SCHEDULES[schedule].bubble_ideal(num_ranks, stages_per_rank, num_microbatches)


def over_ideal_time(utilization: float) -> float:
    """Idle time over busy time, x / (1-x) for a bubble fraction x: the (K-1)/M of Narayanan et al. (2021).

    By what is not bubble, u = 1-x, which remains exact where hardly anything is: 1/u - 1.
    """
    return 1.0 / utilization - 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMetrics:
    """The figures of one step, without its timeline; lists are per rank, in the order of `Plan.ranks`."""

    step_time_s: float
    pipeline_time_s: float
    longest_rank_span_s: float
    busy_s: Array
    peak_memory_bytes: npt.NDArray[np.int64]
    """Empty, as the next, where only times were asked for."""
    activation_bytes: npt.NDArray[np.int64]
    """The peak less parameters, gradients and optimizer state."""

    @property
    def utilization(self) -> Array:
        """Busy over pipeline time."""
        return self.busy_s / self.pipeline_time_s

    @property
    def bubble_fraction(self) -> float:
        """As the function of that name."""
        return 1.0 - float(self.utilization.mean())


def step_metrics(step: Step) -> StepMetrics:
    """Everything in numbers; of the memory of replicas that differ, each rank's highest."""
    fullest = [
        max(of_rank, key=lambda curve: curve.peak_bytes)
        for of_rank in zip(*(one.memory for one in step.replicas or (step,)), strict=True)
    ]
    return StepMetrics(
        step_time_s=step_time_s(step),
        pipeline_time_s=pipeline_time_s(step),
        longest_rank_span_s=longest_rank_span_s(step),
        busy_s=busy_s(step),
        peak_memory_bytes=np.array([curve.peak_bytes for curve in fullest], dtype=np.int64),
        activation_bytes=np.array([curve.activation_bytes for curve in fullest], dtype=np.int64),
    )
