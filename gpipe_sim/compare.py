"""Predicted beside measured: errors, and an attribution that sums exactly to predicted - measured.

Where does an error come from? Each measured step is simulated again with its own figures in place of the model's, one
cause after the other; what each substitution changes is that cause's share:

    predicted          T0
    + its own compute spans                    T1      compute        T0 - T1
    + its own transfers                        T2      communication  T1 - T2
    + its own gaps between actions             T3      overhead       T2 - T3
    measured           T                               unexplained    T3 - T
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpipe_sim import metrics
from gpipe_sim.plan import Plan
from gpipe_sim.predict import Prediction, predict
from gpipe_sim.profile import Array
from gpipe_sim.runs import Measured
from gpipe_sim.schedule import sender_of
from gpipe_sim.simulate import Replay, simulate
from gpipe_sim.step import Step

PARTS = ("compute", "communication", "overhead", "unexplained")


_TINY_BYTES = 2**16
"""Where a model without sizes is rehearsed, a few empty tensors are no error of 100 %."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """A prediction and what was measured of the same plan; medians over steps, unless it says otherwise."""

    prediction: Prediction
    measured: Measured
    step_times_s: Array
    """Measured, step by step."""
    bubble_fraction: float
    busy_s: Array
    """Measured, per rank."""
    attribution_s: dict[str, float]
    """Means over steps; they sum to the mean of predicted - measured step time."""

    @property
    def typical(self) -> Step:
        """The measured step whose time is the median."""
        return self.measured.steps[int(np.argsort(self.step_times_s)[(len(self.step_times_s) - 1) // 2])]

    @property
    def step_time_s(self) -> float:
        """The measured step time: the median over steps."""
        return float(np.median(self.step_times_s))

    @property
    def measured_cv(self) -> float:
        """Spread of the measurement: standard deviation over mean of the steps."""
        return float(self.step_times_s.std() / self.step_times_s.mean())

    def to_dict(self) -> dict[str, Any]:
        """The keys of ``--json``, for other programs to rely on; lists are per rank, in ascending order of ranks.

        step_time            predicted_s, measured_s (median over steps) and error, (predicted - measured) / measured
        bubble_fraction      predicted, measured (of the median step) and error, predicted - measured
        peak_memory_bytes    predicted, measured (by the allocator) and error, (predicted - measured) / measured, of
                             64 KiB at least
        busy_s               predicted and measured (of the median step) seconds in F, R and B
        attribution_s        part to its share of predicted - measured; they sum to its mean over steps
        measured_cv          standard deviation over mean of the measured steps
        steps                how many were measured
        """
        predicted, peaks = self.prediction, self.measured.peak_memory_bytes
        return {
            "step_time": _error(predicted.step_time_s, self.step_time_s, "_s"),
            "bubble_fraction": {
                "predicted": predicted.bubble_fraction,
                "measured": self.bubble_fraction,
                "error": predicted.bubble_fraction - self.bubble_fraction,
            },
            "peak_memory_bytes": {
                "predicted": list(predicted.peak_memory_bytes),
                "measured": list(peaks) if peaks else None,
                "error": [
                    (p - m) / max(m, _TINY_BYTES) for p, m in zip(predicted.peak_memory_bytes, peaks, strict=True)
                ]
                if peaks
                else None,
            },
            "busy_s": {
                "predicted": (predicted.utilization * predicted.pipeline_time_s).tolist(),
                "measured": self.busy_s.tolist(),
            },
            "attribution_s": self.attribution_s,
            "measured_cv": self.measured_cv,
            "steps": len(self.step_times_s),
        }

    @property
    def sentence(self) -> str:
        """Where the error comes from, in one sentence."""
        error = (self.prediction.step_time_s - self.step_time_s) / self.step_time_s
        largest = max(PARTS, key=lambda part: abs(self.attribution_s[part]))
        share = self.attribution_s[largest] / self.step_time_s
        way = "short" if error < 0 else "long"
        causes = {
            "compute": "layers took other times than the profile says",
            "communication": "messages took other times than the links say",
            "overhead": "the gaps between actions differ from the engine overhead of the profile",
            "unexplained": "something that neither compute, messages nor gaps account for",
        }
        if abs(error) <= self.measured_cv:
            return f"The prediction is {abs(error):.1%} too {way}, within the {self.measured_cv:.1%} that steps vary."
        return (
            f"The prediction is {abs(error):.1%} too {way}; most of it ({share:+.1%}) is {largest}: {causes[largest]}."
        )


def _error(predicted: float, measured: float, unit: str) -> dict[str, float]:
    return {
        f"predicted{unit}": predicted,
        f"measured{unit}": measured,
        "error": (predicted - measured) / measured,
    }


def compare_run(plan: Plan, measured: Measured) -> Comparison:
    """Compare a plan's prediction with its run."""
    prediction = predict(plan, keep_step=True)
    times = np.array([metrics.step_time_s(step) for step in measured.steps])
    typical = measured.steps[int(np.argsort(times)[(len(times) - 1) // 2])]
    shares = [attribute(plan, step, prediction.step_time_s) for step in measured.steps]
    return Comparison(
        prediction=prediction,
        measured=measured,
        step_times_s=times,
        bubble_fraction=metrics.bubble_fraction(typical),
        busy_s=metrics.busy_s(typical),
        attribution_s={part: float(np.mean([share[part] for share in shares])) for part in PARTS},
    )


def attribute(plan: Plan, measured: Step, predicted_s: float) -> dict[str, float]:
    """The shares of one step; they sum to predicted - measured."""
    compute = {
        action: float(timeline.end_s[row] - timeline.start_s[row])
        for timeline in measured.ranks
        for row, action in enumerate(timeline.actions)
    }
    end = {action: t.end_s[row] for t in measured.ranks for row, action in enumerate(t.actions)}
    transfers, gaps = {}, {}
    for timeline in measured.ranks:
        free = 0.0
        for row, action in enumerate(timeline.actions):
            arrived = float(timeline.arrived_s[row])
            if arrived >= 0:
                sender = sender_of(action)
                transfers[sender] = max(0.0, arrived - float(end[sender]))
                free = max(free, arrived)
            gaps[action] = max(0.0, float(timeline.start_s[row]) - free)
            free = float(timeline.end_s[row])
            if timeline.blocking and timeline.send_end_s[row] >= free:  # here the sender waited
                transfers[action] = float(timeline.send_end_s[row]) - free
                free = float(timeline.send_end_s[row])

    levels = [predicted_s]
    for replay in (
        Replay(compute=compute),
        Replay(compute=compute, transfers=transfers),
        Replay(compute=compute, transfers=transfers, gaps=gaps),
    ):
        levels.append(metrics.step_time_s(simulate(plan, replay=replay, memory=False)))
    levels.append(metrics.step_time_s(measured))
    return {part: before - after for part, before, after in zip(PARTS, levels, levels[1:], strict=False)}
