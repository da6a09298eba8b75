"""Comparisons to plotly figures: predicted and measured over each other, residuals, the attribution, all runs."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dashboard.charts.one_step import HOVER, Strip, drawn, gantt_height, rank_ticks, stages_by_rank
from dashboard.charts.style import INK, MAX_TICKS, NO_LEGEND, figure, memory_unit, rank_shades, time_unit
from gpipe_sim.base.units import format_seconds
from gpipe_sim.runs.compare import PARTS, Comparison
from gpipe_sim.runs.directory import RunSummary
from gpipe_sim.show import palette
from gpipe_sim.step.metrics import step_time_s
from gpipe_sim.step.step import Step

_COLORS = {
    "compute": palette.KINDS["F"],
    "communication": palette.LANES["send"],
    "collectives": palette.KINDS["S"],
    "overhead": "#666666",
}


_UPPER, _LOWER = -0.2, 0.2
"""Where in a rank's row its two strips lie, and how wide they are."""
_THIN = 0.34


def timelines(comparison: Comparison) -> go.Figure:
    """The predicted and the median measured step over each other: two strips per rank, in the same colours.

    rank 0   [F0][F1][F2]            [B2]...       predicted
             [F0][F1] [F2]             [B2]...     measured

    Waiting and messages are left out: what is late shows by itself.
    """
    predicted, measured = comparison.prediction.step, comparison.typical
    row = {timeline.rank: index for index, timeline in enumerate(predicted.ranks)}
    longest = max(map(step_time_s, (predicted, measured)))
    size, unit = time_unit(longest)
    strips, stages = [], stages_by_rank(predicted)
    for how, offset, step in (("predicted", _UPPER, predicted), ("measured", _LOWER, measured)):
        spans = [span for span in step.spans() if span.lane == "compute"]
        for kind, name in palette.KIND_NAMES.items():
            found = [span for span in spans if span.action.kind == kind]
            found.sort(key=lambda span: bool(stages) and span.action.stage > stages[span.rank][0])
            look = {"legendgroup": kind, "showlegend": how == "predicted"}  # one entry switches both
            hover = f"{how} {HOVER}<extra>{name}</extra>"
            strips.append(
                Strip(name, palette.KINDS[kind], offset, _THIN, found, True, stages=stages, hover=hover, look=look)
            )
    height = gantt_height(len(row))
    ticks = rank_ticks(predicted)
    if len(row) <= MAX_TICKS // 2:
        names = [f"{name} {how}" for name in ticks["ticktext"] for how in ("predicted", "measured")]
        places = [place + offset for place in ticks["tickvals"] for offset in (_UPPER, _LOWER)]
        ticks |= {"tickvals": places, "ticktext": names}
    traces, shapes = drawn(strips, row, size, height)
    return figure(
        *traces,
        height=height,
        shapes=shapes,
        x={"title": {"text": f"time, {unit}"}, "range": [0, 1.02 * longest / size]},
        y=ticks | {"range": [len(row) - 0.5, -0.5]},
        barmode="overlay",
        uniformtext={"minsize": 7 if stages else 8, "mode": "hide"},
    )


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
        y={"title": {"text": "measured - predicted, ms"}, "rangemode": "tozero"},
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


def accuracy(summaries: Sequence[RunSummary]) -> go.Figure:
    """Predicted against measured step time of every run, both logarithmic; on the diagonal it was predicted right."""
    ends = [bound(run.measured_s, run.predicted_s) for bound in (min, max) for run in summaries]
    low, high = min(ends) / 1.5, max(ends) * 1.5
    size, unit = time_unit(high / 1.5)
    edges = [low / size, high / size]
    diagonal = {"mode": "lines", "line": {"color": INK, "dash": "dot", "width": 1}, "hoverinfo": "skip"}
    traces = [go.Scatter(x=edges, y=edges, name="as predicted", **diagonal)]
    for index, device in enumerate(sorted({run.device for run in summaries})):
        found = [run for run in summaries if run.device == device]
        color, symbol = _DEVICE_LOOKS[index % len(_DEVICE_LOOKS)]
        traces.append(
            go.Scatter(
                x=[run.measured_s / size for run in found],
                y=[run.predicted_s / size for run in found],
                mode="markers",
                marker={"color": color, "symbol": symbol, "size": 10},
                name=escape(device) or "unknown",
                hovertext=list(map(_described, found)),
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    axis: dict[str, Any] = {"type": "log", "range": np.log10(edges).tolist()}
    x, y = (axis | {"title": {"text": f"{how} step time, {unit}"}} for how in ("measured", "predicted"))
    return figure(*traces, height=420, x=x, y=y)


_DEVICE_LOOKS = (
    (palette.KINDS["F"], "circle"),
    (palette.KINDS["B"], "diamond"),
    (palette.KINDS["U"], "square"),
    (palette.LANES["send"], "triangle-up"),
)


def _described(run: RunSummary) -> str:
    times = f"predicted {format_seconds(run.predicted_s)}, measured {format_seconds(run.measured_s)}"
    what = f"{run.num_stages} stages, M={run.num_microbatches}, {run.schedule}, recompute {run.checkpoint}"
    return "<br>".join(map(escape, [run.name, what, f"{times}: {run.error:+.1%}"]))
