"""Figures for notebooks: each takes what `gpipe_sim` returns, and returns a plotly figure."""

from collections.abc import Sequence

import plotly.graph_objects as go

from dashboard.charts import comparisons, many_plans, one_step
from dashboard.charts.many_plans import Metric
from gpipe_sim.explain.predict import Prediction, varying
from gpipe_sim.explain.waterfall import critical_path
from gpipe_sim.runs.compare import Comparison


def plot_timeline(prediction: Prediction, *, critical: bool = False) -> go.Figure:
    """What each rank does when; with the critical path if it is asked for."""
    step = prediction.step
    return one_step.gantt(step, critical_path(prediction.plan, step) if critical else None)


def plot_memory(prediction: Prediction) -> go.Figure:
    """Bytes of each rank over time, under the device's limit."""
    return one_step.memory_over_time(prediction.step, prediction.plan.memory_limit)


def plot_waterfall(prediction: Prediction) -> go.Figure:
    """Where the time goes: the step by cause."""
    return one_step.waterfall(prediction.breakdown_s)


def plot_sweep(predictions: Sequence[Prediction], metric: Metric = "step_time_s") -> go.Figure:
    """A metric along the one swept field or, of several, over K and M."""
    if len(varying(predictions)) == 1:
        return many_plans.sweep_lines(predictions)
    return many_plans.heatmap(predictions, metric)


def plot_front(predictions: Sequence[Prediction]) -> go.Figure:
    """Time against memory, and the best trade-offs."""
    return many_plans.time_memory(predictions, predictions[0].plan.memory_limit)


def plot_comparison(comparison: Comparison) -> go.Figure:
    """The predicted step over the measured one."""
    return comparisons.timelines(comparison)
