"""A comparison to plotly figures: predicted and measured timelines on one axis, residuals, the attribution."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from dashboard.figures import gantt
from dashboard.style import INK, NO_LEGEND, figure, memory_unit, rank_shades, time_unit
from gpipe_sim import palette
from gpipe_sim.compare import PARTS, Comparison
from gpipe_sim.metrics import step_time_s
from gpipe_sim.step import Step
from gpipe_sim.units import format_seconds

_COLORS = {"compute": palette.KINDS["F"], "communication": palette.LANES["send"], "overhead": "#666666"}


def timelines(comparison: Comparison) -> tuple[go.Figure, go.Figure]:
    """Gantt charts of the predicted and of the median measured step, with the same range and unit of time."""
    steps = (comparison.prediction.step, comparison.typical)
    longest = max(map(step_time_s, steps))
    charts = tuple(gantt(step) for step in steps)
    size, unit = time_unit(longest)
    for step, chart in zip(steps, charts, strict=True):
        own_size, _ = time_unit(step_time_s(step))
        chart.update_xaxes(range=[0, 1.02 * longest / own_size], title=f"time, {unit}" if own_size == size else None)
    return charts[0], charts[1]


def residuals(predicted: Step, measured: Sequence[Step]) -> go.Figure:
    """Measured less predicted seconds of every action, medians over steps, against the action's predicted start."""
    size, unit = time_unit(step_time_s(predicted))
    traces = []
    for kind, name in palette.KIND_NAMES.items():
        x, y, texts = [], [], []
        for position, timeline in enumerate(predicted.ranks):
            durations = np.median([s.ranks[position].end_s - s.ranks[position].start_s for s in measured], axis=0)
            for row, action in enumerate(timeline.actions):
                if action.kind == kind:
                    x.append(timeline.start_s[row] / size)
                    y.append((durations[row] - (timeline.end_s[row] - timeline.start_s[row])) * 1e3)
                    texts.append(str(action))
        marker = {"color": palette.KINDS[kind], "size": 7}
        traces.append(go.Scatter(x=x, y=y, mode="markers", marker=marker, name=name, hovertext=texts))
    return figure(
        *[trace for trace in traces if len(trace.x)],
        height=340,
        x={"title": {"text": f"predicted start, {unit}"}},
        y={"title": {"text": "measured - predicted, ms"}},
    )


def memory(comparison: Comparison) -> go.Figure:
    """Bytes of each rank over time: what the model says, and what the allocator held."""
    predicted, measured = comparison.prediction.step, comparison.measured.memory or ()
    end = max(step_time_s(predicted), step_time_s(comparison.typical))
    most = max(curve.peak_bytes for curve in (*predicted.memory, *measured))
    (scale, unit), (size, bytes_unit) = time_unit(end), memory_unit(most)
    shades = rank_shades(len(predicted.ranks))
    traces = []
    for curves, how, dash in ((predicted.memory, "predicted", "solid"), (measured, "measured", "dot")):
        for timeline, curve, shade in zip(predicted.ranks, curves, shades, strict=True):
            name = f"rank {timeline.rank}, {how}"
            traces.append(
                go.Scatter(
                    x=np.append(curve.times, max(end, curve.times[-1])) / scale,
                    y=np.append(curve.total, curve.total[-1]) / size,
                    mode="lines",
                    line={"shape": "hv", "width": 1.5, "color": shade, "dash": dash},
                    name=name,
                    hovertemplate=f"{name}: %{{y:.2f}} {bytes_unit} at %{{x:.4~g}} {unit}<extra></extra>",
                )
            )
    y = {"title": {"text": f"memory, {bytes_unit}"}, "rangemode": "tozero"}
    return figure(*traces, height=380, x={"title": {"text": f"time, {unit}"}}, y=y)


def attribution(comparison: Comparison) -> go.Figure:
    """How much of predicted - measured each cause explains; the bars sum to the error."""
    seconds = [comparison.attribution_s[part] for part in PARTS]
    size, unit = time_unit(max(map(abs, seconds)))
    bars = go.Bar(
        orientation="h",
        x=[value / size for value in [*seconds, sum(seconds)]],
        y=[*PARTS, "error"],
        marker={"color": [*(_COLORS.get(part, "#BBBBBB") for part in PARTS), INK], "line": {"width": 0}},
        text=[format_seconds(value) for value in [*seconds, sum(seconds)]],
        hovertemplate="%{y}: %{text}<extra></extra>",
    )
    x = {"title": {"text": f"predicted - measured, {unit}"}}
    return figure(bars, height=340, x=x, y={"autorange": "reversed", "showgrid": False}, margin=dict(NO_LEGEND))
