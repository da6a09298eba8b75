"""Step to numbers. Each metric is defined here once; K stages, M micro-batches, R ranks."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpipe_sim.profile import Array
from gpipe_sim.scenario import ScheduleName
from gpipe_sim.step import Step


def _first_start_s(step: Step) -> float:
    return min(float(timeline.start_s[0]) for timeline in step.ranks)


def step_time_s(step: Step) -> float:
    """From the first action's start until the last rank has finished its own update.

    That is the max over ranks of (last backward + update): updates hide in the drain.
    """
    return max(float(timeline.end_s[-1]) for timeline in step.ranks) - _first_start_s(step)


def pipeline_time_s(step: Step) -> float:
    """T: from the first action's start to the last backward's end."""
    last_backward = max(float(timeline.end_s[timeline.actions.are("B")].max()) for timeline in step.ranks)
    return last_backward - _first_start_s(step)


def busy_s(step: Step) -> Array:
    """Seconds in F, R and B of each rank."""
    return np.array([timeline.busy_s() for timeline in step.ranks])


def bubble_fraction(step: Step) -> float:
    """1 - busy / (R T): the share of the ranks' time in which nothing is computed (GPipe, section 2.3)."""
    return 1.0 - float(busy_s(step).sum()) / (len(step.ranks) * pipeline_time_s(step))


def bubble_ideal(schedule: ScheduleName, num_stages: int, num_microbatches: int) -> float:
    """(K-1) / (M+K-1): the bubble of equal stages and free links, for `gpipe` and `1f1b` alike; `naive` has M = 1.

    `bubble_fraction` equals it exactly for equal micro-batches and no, or on-demand `always`, recompute. Early
    recompute fills part of the bubble, so that the simulated one is smaller.
    """
    M = 1 if schedule == "naive" else num_microbatches
    return (num_stages - 1) / (M + num_stages - 1)


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
    """Everything in numbers."""
    return StepMetrics(
        step_time_s=step_time_s(step),
        pipeline_time_s=pipeline_time_s(step),
        busy_s=busy_s(step),
        peak_memory_bytes=np.array([curve.peak_bytes for curve in step.memory], dtype=np.int64),
        activation_bytes=np.array([curve.activation_bytes for curve in step.memory], dtype=np.int64),
    )
