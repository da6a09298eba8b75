"""Predicted beside measured: errors, and an attribution that sums exactly to predicted - measured.

Where does an error come from? Each measured step is simulated again with its own figures in place of the model's, one
cause after the other; what each substitution changes is that cause's share:

    predicted          T0
    + its own compute spans                    T1      compute        T0 - T1
    + its own transfers                        T2      communication  T1 - T2
    + its own collectives, of replicas         T3      collectives    T2 - T3
    + its own gaps between actions             T4      overhead       T3 - T4
    measured           T                               unexplained    T4 - T

Replicas that are predicted alike are measured each by itself: every one is simulated with its own figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpipe_sim.base import html
from gpipe_sim.base.arrays import Array, median_index
from gpipe_sim.base.units import format_seconds
from gpipe_sim.explain.predict import Prediction, predict
from gpipe_sim.plan.actions import KINDS, Action
from gpipe_sim.plan.plan import Plan
from gpipe_sim.runs.directory import Measured
from gpipe_sim.step import metrics
from gpipe_sim.step.simulate import Replay, simulate
from gpipe_sim.step.step import Step

PARTS = ("compute", "communication", "collectives", "overhead", "unexplained")


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
    """Of the step whose time is the median, or the mean of two; they sum to predicted - measured step time."""

    @property
    def typical(self) -> Step:
        """The measured step whose time is the median."""
        return self.measured.steps[median_index(self.step_times_s)]

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
        device_memory_bytes  reserved (the most that the allocator had taken of the device, in use or not) and total;
                             null where it is not known, as on a CPU
        busy_s               predicted and measured (of the median step) seconds in F, R and B
        attribution_s        part to its share of predicted - measured; they sum to it
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
            "device_memory_bytes": {
                "reserved": self.measured.reserved_memory_bytes,
                "total": self.measured.device_memory_bytes,
            },
            "busy_s": {
                "predicted": (predicted.utilization * predicted.pipeline_time_s).tolist(),
                "measured": self.busy_s.tolist(),
            },
            "attribution_s": self.attribution_s,
            "measured_cv": self.measured_cv,
            "steps": len(self.step_times_s),
        }

    def _repr_html_(self) -> str:
        time, bubble = (self.to_dict()[name] for name in ("step_time", "bubble_fraction"))
        predicted, measured = time["predicted_s"], time["measured_s"]
        rows = [
            ("step time", format_seconds(predicted), format_seconds(measured), f"{time['error']:+.1%}"),
            (
                "bubble",
                f"{bubble['predicted']:.1%}",
                f"{bubble['measured']:.1%}",
                f"{100 * bubble['error']:+.1f} points",
            ),
        ]
        bars = [
            ("predicted", [html.Bar(0, predicted, KINDS["F"].colour)], format_seconds(predicted)),
            ("measured", [html.Bar(0, measured, KINDS["B"].colour)], format_seconds(measured)),
        ]
        drawn = html.chart("step time, predicted and measured", bars)
        return html.paragraph(self.sentence) + drawn + html.table(("", "predicted", "measured", "error"), rows)

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
            "collectives": "what replicas do together took other times than the links say",
            "overhead": "the gaps between actions differ from the engine overhead of the profile",
            "unexplained": "something that neither compute, messages, collectives nor gaps account for",
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
    typical = measured.steps[median_index(times)]
    by_time, half = np.argsort(times, kind="stable"), (len(times) - 1) // 2
    middle = by_time[half : len(times) - half]  # whose mean the median is
    shares = [attribute(plan, measured.steps[index], prediction.step_time_s) for index in middle]
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
    replicas = measured.replicas or (measured,)
    collectives, figures = _collectives(plan, replicas), [_own_figures(one) for one in replicas]
    levels = [predicted_s]
    for replays in (
        [Replay(compute=own.compute) for own in figures],
        [Replay(compute=own.compute, transfers=own.transfers) for own in figures],
        [replace(own, gaps=None, collectives=collectives) for own in figures],
        [replace(own, collectives=collectives) for own in figures],
    ):
        levels.append(metrics.step_time_s(simulate(plan, replay=replays, memory=False)))
    levels.append(metrics.step_time_s(measured))
    return {part: before - after for part, before, after in zip(PARTS, levels, levels[1:], strict=False)}


def _own_figures(measured: Step) -> Replay:
    """What one replica took for its actions, messages and gaps."""
    compute = {
        action: float(timeline.end_s[row] - timeline.start_s[row])
        for timeline in measured.ranks
        for row, action in enumerate(timeline.actions)
    }
    end = {action: t.end_s[row] for t in measured.ranks for row, action in enumerate(t.actions)}
    senders = measured.program.senders()
    transfers, gaps = {}, {}
    for timeline in measured.ranks:
        free, collected = 0.0, timeline.collected_s
        for row, action in enumerate(timeline.actions):
            arrived = float(timeline.arrived_s[row])
            if arrived >= 0:
                sender = senders[action]
                transfers[sender] = max(0.0, arrived - float(end[sender]))
                free = max(free, arrived)
            free = float(np.fmax(free, collected[row]))
            gaps[action] = max(0.0, float(timeline.start_s[row]) - free)
            free = float(timeline.end_s[row])
            if timeline.blocking and timeline.send_end_s[row] >= free:  # here the sender waited
                transfers[action] = float(timeline.send_end_s[row]) - free
                free = float(timeline.send_end_s[row])
    return Replay(compute=compute, transfers=transfers, gaps=gaps)


def _collectives(plan: Plan, replicas: Sequence[Step]) -> dict[Action, float]:
    """Seconds of each collective, from when all replicas had ended what it comes after, and the lane was free."""
    found: dict[Action, float] = {}
    for alike in zip(*(one.ranks for one in replicas), strict=True):
        free = 0.0
        for number, collective in enumerate(alike[0].lane):
            ready = max(float(t.end_s[collective.after]) for t in alike) if collective.after >= 0 else 0.0
            ended = max(float(timeline.lane_end_s[number]) for timeline in alike)
            if not np.isnan(ended):
                found[collective.action] = max(0.0, ended - max(free, ready))
                free = ended
    return found
