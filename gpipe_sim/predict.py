"""Prediction: everything that `simulate` says of one plan, and the keys under which `--json` says it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gpipe_sim import metrics
from gpipe_sim.explain import breakdown_s
from gpipe_sim.plan import Plan
from gpipe_sim.profile import Array
from gpipe_sim.simulate import simulate
from gpipe_sim.step import Step
from gpipe_sim.verdict import verdict


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """A plan and what is expected of it; with jitter, times are means over all samples."""

    plan: Plan
    step_times_s: Array
    """Of each jitter sample; one entry without jitter."""
    pipeline_time_s: float
    utilization: Array
    """Busy over pipeline time, per rank."""
    peak_memory_bytes: tuple[int, ...]
    """Per rank, the highest over all samples."""
    activation_bytes: tuple[int, ...]
    """Per rank, the peak less parameters, gradients and optimizer state."""
    parameter_bytes: tuple[int, ...]
    """Per rank."""
    fullest_sample: int | None
    """The jitter sample that takes most memory."""
    breakdown_s: dict[str, float]
    """The waterfall, in its order; it sums to `step_time_s`."""
    kept_step: Step | None = field(default=None, repr=False)

    @cached_property
    def step(self) -> Step:
        """The timeline; with jitter, of the sample whose step time is the median.

        A sweep holds numbers only, and simulates again the few plans that someone looks at.
        """
        if self.kept_step is not None:
            return self.kept_step
        has_jitter = self.plan.scenario.cluster.jitter is not None
        return simulate(self.plan, sample=_median_index(self.step_times_s) if has_jitter else None)

    @property
    def step_time_s(self) -> float:
        """The mean over samples."""
        return float(self.step_times_s.mean())

    @property
    def step_time_p50_s(self) -> float:
        """The median over samples."""
        return float(np.quantile(self.step_times_s, 0.5))

    @property
    def step_time_p95_s(self) -> float:
        """What 95 % of the samples do not exceed."""
        return float(np.quantile(self.step_times_s, 0.95))

    @property
    def throughput_samples_s(self) -> float:
        """Samples per second."""
        return self.plan.scenario.batch / self.step_time_s

    @property
    def bubble_fraction(self) -> float:
        """As `metrics.bubble_fraction`, of the means."""
        return 1.0 - float(self.utilization.mean())

    @property
    def bubble_ideal(self) -> float:
        """The closed form for the plan's K and M."""
        return metrics.bubble_ideal(self.plan.schedule, self.plan.num_stages, self.plan.num_microbatches)

    @property
    def settings(self) -> str:
        """The swept fields and their values: ``stages 4, network.bandwidth 25 GB/s``; else the scenario's name."""
        scenario = self.plan.scenario
        return ", ".join(f"{path.split('.', 1)[1]} {value}" for path, value in scenario.swept.items()) or scenario.name

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its device's memory."""
        return max(self.peak_memory_bytes) <= self.plan.memory_limit

    @cached_property
    def verdict(self) -> str:
        """What limits the plan, and what to change next."""
        fullest = self.step if self.fits else simulate(self.plan, sample=self.fullest_sample)
        return verdict(self.plan, fullest, self.breakdown_s)

    def to_dict(self) -> dict[str, Any]:
        """The keys of the command line's contract."""
        plan = self.plan
        result = {
            "set": dict(plan.scenario.swept),
            "stages": plan.num_stages,
            "ranks": len(plan.ranks),
            "microbatches": plan.num_microbatches,
            "checkpoint": plan.checkpoint[0] if len(set(plan.checkpoint)) == 1 else list(plan.checkpoint),
            "schedule": plan.schedule,
            "recompute": plan.recompute,
            "backward": plan.backward,
            "balance": list(plan.balance),
            "step_time_s": self.step_time_s,
            "pipeline_time_s": self.pipeline_time_s,
            "throughput_samples_s": self.throughput_samples_s,
            "bubble_fraction": self.bubble_fraction,
            "bubble_ideal": self.bubble_ideal,
            "bubble_over_ideal_time": metrics.over_ideal_time(self.bubble_fraction),
            "peak_memory_bytes": list(self.peak_memory_bytes),
            "activation_bytes": list(self.activation_bytes),
            "parameter_bytes": list(self.parameter_bytes),
            "fits": self.fits,
            "breakdown_s": self.breakdown_s,
            "utilization": self.utilization.tolist(),
        }
        if plan.scenario.cluster.jitter:
            result |= {"step_time_p50_s": self.step_time_p50_s, "step_time_p95_s": self.step_time_p95_s}
        return result


def predict(plan: Plan, *, keep_step: bool = False, advance: Callable[[], None] = lambda: None) -> Prediction:
    """Simulate the plan, once or, with jitter, once for each sample; `advance` is called after each."""
    nominal = simulate(plan)
    jitter = plan.scenario.cluster.jitter
    times, pipeline, busy, peaks = [], [], [], []
    for sample in range(jitter.samples) if jitter else [None]:
        step = nominal if sample is None else simulate(plan, sample=sample)
        times.append(metrics.step_time_s(step))
        pipeline.append(metrics.pipeline_time_s(step))
        busy.append(metrics.busy_s(step))
        peaks.append([(curve.peak_bytes, curve.activation_bytes) for curve in step.memory])
        advance()
    mean_pipeline = float(np.mean(pipeline))
    fullest = int(np.argmax([max(sample) for sample in peaks]))
    highest = [max(sample[rank] for sample in peaks) for rank in range(len(plan.ranks))]
    return Prediction(
        plan=plan,
        step_times_s=np.array(times),
        pipeline_time_s=mean_pipeline,
        utilization=np.mean(busy, axis=0) / mean_pipeline,
        peak_memory_bytes=tuple(peak for peak, _ in highest),
        activation_bytes=tuple(activations for _, activations in highest),
        parameter_bytes=tuple(int(curve.parts["parameters"][0]) for curve in nominal.memory),
        fullest_sample=fullest if jitter else None,
        breakdown_s=breakdown_s(plan, nominal, mean_pipeline, float(np.mean(times))),
        kept_step=nominal if keep_step and jitter is None else None,
    )


def _median_index(values: Array) -> int:
    return int(np.argsort(values)[(len(values) - 1) // 2])


# --- many predictions ----------------------------------------------------------------------------------------------


def varying(predictions: Iterable[Prediction]) -> list[str]:
    """The swept fields that have more than one value among these predictions."""
    values: dict[str, set[str]] = {}
    for prediction in predictions:
        for path, value in prediction.plan.scenario.swept.items():
            values.setdefault(path, set()).add(str(value))
    return [path for path, found in values.items() if len(found) > 1]


def fastest(predictions: Iterable[Prediction]) -> Prediction:
    """The fastest that fits or, where none does, the fastest."""
    return min(predictions, key=lambda prediction: (not prediction.fits, prediction.step_time_s))


def pareto(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Those for which no other is both faster and smaller, fastest first."""
    front: list[Prediction] = []
    for prediction in sorted(predictions, key=lambda p: (p.step_time_s, max(p.peak_memory_bytes))):
        if not front or max(prediction.peak_memory_bytes) < max(front[-1].peak_memory_bytes):
            front.append(prediction)
    return front
