"""Many predictions to plotly figures: heat maps over K and M, time against memory, lines along a swept field."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from dashboard.charts.style import INK, MAX_TICKS, NO_LEGEND, RULE, figure, limit_line, memory_unit, time_unit
from gpipe_sim.base.units import format_bytes, format_seconds
from gpipe_sim.explain.predict import Prediction, fastest, pareto, varying
from gpipe_sim.explain.waterfall import LABELS
from gpipe_sim.scenario.schema import Checkpoint
from gpipe_sim.show import palette

Metric = Literal["step_time_s", "bubble_fraction", "peak_memory_bytes"]

METRICS: Mapping[Metric, str] = {
    "step_time_s": "step time",
    "bubble_fraction": "bubble",
    "peak_memory_bytes": "peak memory",
}


MODES: tuple[Checkpoint, ...] = ("never", "except_last", "always")
"""From the fastest to the smallest."""


CELLS = sample_colorscale("Viridis", np.linspace(0.5, 1, 9))
"""The colours of a heat map's cells: the half of their scale on which black letters can be read."""


def _value(prediction: Prediction, metric: Metric) -> float:
    return max(prediction.peak_memory_bytes) if metric == "peak_memory_bytes" else float(getattr(prediction, metric))


def _write(value: float, metric: Metric) -> str:
    formats = {"step_time_s": format_seconds, "bubble_fraction": "{:.1%}".format, "peak_memory_bytes": format_bytes}
    return formats[metric](value)


def _describe(prediction: Prediction) -> str:
    """Hover text: name, settings and the three metrics."""
    scenario, limit = prediction.plan.scenario, format_bytes(prediction.plan.memory_limit)
    lines = [scenario.name, prediction.settings] if scenario.swept else [scenario.name]
    lines += [f"{name} {_write(_value(prediction, metric), metric)}" for metric, name in METRICS.items()]
    return "<br>".join(map(escape, [*lines, f"{'fits' if prediction.fits else 'does not fit'} in {limit}"]))


def heatmap(predictions: Sequence[Prediction], metric: Metric, largest: float | None = None) -> go.Figure:
    """A metric over K (up) and M (across). Colours compare plans that fit; the others are grey and marked ×.

    Where several plans share K and M the cell shows the `fastest`, and its hover text says of how many. `largest` is
    the value that chooses the unit, if it is not the largest of these.
    """
    cells: dict[tuple[int, int], list[Prediction]] = {}
    for prediction in predictions:
        cells.setdefault((prediction.plan.num_ranks, prediction.plan.num_microbatches), []).append(prediction)
    Ks, Ms = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    largest = largest or max(_value(prediction, metric) for prediction in predictions)
    size, unit = {
        "step_time_s": time_unit(largest),
        "bubble_fraction": (0.01, "%"),
        "peak_memory_bytes": memory_unit(largest),
    }[metric]

    def layer(fits: bool) -> dict[str, Any]:
        shown = {place: found for place, plans in cells.items() if (found := fastest(plans)).fits == fits}

        def grid(cell: Callable[[tuple[int, int]], Any], absent: str | None = "") -> list[list[Any]]:
            return [[cell((K, M)) if (K, M) in shown else absent for M in Ms] for K in Ks]

        def hover(place: tuple[int, int]) -> str:
            many = len(cells[place])
            among = f"<br>the fastest {'that fits ' if fits else ''}of {many} with these K and M" if many > 1 else ""
            return f"K = {place[0]}, M = {place[1]}<br>{_describe(shown[place])}{among}"

        return {
            "x": list(map(str, Ms)),
            "y": list(map(str, Ks)),
            "z": grid(lambda place: _value(shown[place], metric) / size, absent=None),
            "text": grid(lambda place: ("" if fits else "× ") + _write(_value(shown[place], metric), metric)),
            "hovertext": grid(hover),
            "texttemplate": "%{text}",
            "hovertemplate": "%{hovertext}<extra></extra>",
            "hoverongaps": False,
            "xgap": 2,
            "ygap": 2,
        }

    bar = {"title": {"text": f"{METRICS[metric]}, {unit}", "side": "right"}, "thickness": 12, "outlinewidth": 0}
    some_fit = any(prediction.fits for prediction in predictions)
    grey = [[0, "rgba(128,128,128,0.16)"], [1, "rgba(128,128,128,0.16)"]]  # muted on a light page and on a dark one
    return figure(
        go.Heatmap(
            layer(True), colorscale=CELLS, colorbar=bar, showscale=some_fit, name="fits", textfont={"color": "black"}
        ),
        go.Heatmap(layer(False), colorscale=grey, showscale=False, name="does not fit", textfont={"color": INK}),
        height=max(190, 90 + 46 * len(Ks)),
        x={"title": {"text": "micro-batches M"}, "type": "category", "showgrid": False},
        y={"title": {"text": "ranks K"}, "type": "category", "showgrid": False},
        margin=dict(NO_LEGEND),
        showlegend=False,
    )


def facets(predictions: Sequence[Prediction], metric: Metric, here: Prediction) -> go.Figure:
    """A heat map for each checkpoint mode, below each other, in one scale of colours.

    The plan on screen has a frame, and the best, if it fits, a star. A cell's customdata is its mode.
    """
    by_mode = {mode: [p for p in predictions if set(p.plan.checkpoint) == {mode}] for mode in MODES}
    by_mode = {mode: found for mode, found in by_mode.items() if found}
    best, largest = fastest(predictions), max(_value(prediction, metric) for prediction in predictions)
    chart = make_subplots(
        rows=len(by_mode),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.07,
        subplot_titles=[f"checkpoint {mode}" for mode in by_mode],
    )
    for row, (mode, found) in enumerate(by_mode.items(), start=1):
        one = heatmap(found, metric, largest)
        for trace in one.data:
            trace.customdata = [[mode] * len(trace.x)] * len(trace.y)
            if best in found and trace.name == "fits" and best.fits:
                K, M = str(best.plan.num_ranks), str(best.plan.num_microbatches)
                text = [list(cells) for cells in trace.text]
                text[trace.y.index(K)][trace.x.index(M)] += " \u2605"
                trace.text = text
            if trace.name == "fits":
                bar = trace.colorbar.to_plotly_json()
                trace.update(coloraxis="coloraxis", colorbar=None, showscale=None)
            chart.add_trace(trace, row, 1)
        if mode_of(here) == mode:
            (x, y), line = _cell(here, predictions), {"color": palette.CRITICAL, "width": 3}
            chart.add_shape(type="rect", x0=x - 0.5, x1=x + 0.5, y0=y - 0.5, y1=y + 0.5, line=line, row=row, col=1)
    shared = figure(height=120 + 130 * len(by_mode), x={}, y={}).layout
    chart.update_layout({key: shared[key] for key in shared if key not in ("xaxis", "yaxis")})
    chart.update_layout(
        coloraxis={"colorscale": CELLS, "colorbar": bar, "showscale": any(one.fits for one in predictions)},
        showlegend=False,
        margin=dict(NO_LEGEND) | {"t": 24},
        dragmode=False,  # the page's own: it keeps the plans in a rectangle
    )
    for axes, values in ((chart.update_xaxes, "num_microbatches"), (chart.update_yaxes, "num_ranks")):
        order = list(map(str, sorted({getattr(one.plan, values) for one in predictions})))
        axes(type="category", categoryorder="array", categoryarray=order, showgrid=False)
    chart.update_yaxes(title="ranks K")
    chart.update_xaxes(title="micro-batches M", row=len(by_mode))
    chart.update_annotations(font_size=12)
    return chart


def mode_of(prediction: Prediction) -> Checkpoint:
    """The checkpoint mode of all stages; where they differ, the mode among whose plans it is shown."""
    modes = set(prediction.plan.checkpoint)
    return modes.pop() if len(modes) == 1 else "always"


def _cell(prediction: Prediction, among: Sequence[Prediction]) -> tuple[int, int]:
    """The number of a plan's column and row among those that are shown."""
    plans = [one.plan for one in (*among, prediction)]
    columns = sorted({plan.num_microbatches for plan in plans})
    rows = sorted({plan.num_ranks for plan in plans})
    return columns.index(prediction.plan.num_microbatches), rows.index(prediction.plan.num_ranks)


def time_memory(
    predictions: Sequence[Prediction], limit_bytes: float | None = None, here: Prediction | None = None
) -> go.Figure:
    """Step time against peak memory: down and to the left is better, and the front joins what nothing beats in both.

    The front is drawn through plans that fit; where none does, through all. The axes show what fits, and a double click
    everything. With `here`, the plan on screen, it has a ring, and the best, if it fits, a star.
    """
    slowest, most = (max(_value(p, metric) for p in predictions) for metric in ("step_time_s", "peak_memory_bytes"))
    (scale, unit), (size, bytes_unit) = time_unit(slowest), memory_unit(most)

    def points(found: Sequence[Prediction]) -> dict[str, Any]:
        return {
            "x": [prediction.step_time_s / scale for prediction in found],
            "y": [max(prediction.peak_memory_bytes) / size for prediction in found],
            "hovertext": list(map(_describe, found)),
            "hovertemplate": "%{hovertext}<extra></extra>",
            # What a click on a point chooses.
            "customdata": [[p.plan.num_ranks, p.plan.num_microbatches, p.plan.checkpoint[0]] for p in found],
        }

    fitting = [prediction for prediction in predictions if prediction.fits]
    front = {
        "mode": "lines+markers",
        "line": {"color": palette.KINDS["U"], "width": 2, "shape": "hv"},
        "marker": {"symbol": "circle-open", "size": 15, "line": {"width": 2}},
        "cliponaxis": False,
    }
    traces = [go.Scatter(points(pareto(fitting or predictions)), **front, name="best trade-offs")]
    marks = {"fits": (True, "circle", palette.KINDS["F"]), "does not fit": (False, "x", INK)}
    for name, (fits, symbol, color) in marks.items():
        found = [prediction for prediction in predictions if prediction.fits == fits]
        marker = {"symbol": symbol, "color": color, "size": 9}
        traces += [go.Scatter(points(found), mode="markers", marker=marker, name=name)] if found else []
    if limit_bytes is not None:
        traces.append(limit_line(limit_bytes, most, (0.0, 1.05 * slowest / scale), size))
    shown = fitting + ([here] if here is not None else [])
    x: dict[str, Any] = {"title": {"text": f"step time, {unit}"}, "rangemode": "tozero"}
    y: dict[str, Any] = {"title": {"text": f"peak memory, {bytes_unit}"}, "rangemode": "tozero"}
    if fitting and len(fitting) < len(predictions):
        highest = max(limit_bytes or 0.0, *(max(one.peak_memory_bytes) for one in shown))
        x["range"] = [0, 1.15 * max(one.step_time_s for one in shown) / scale]
        y["range"] = [0, 1.15 * highest / size]
    if here is not None:
        ring = {"symbol": "square-open", "size": 18, "color": palette.CRITICAL, "line": {"width": 3}}
        traces.append(go.Scatter(points([here]), mode="markers", marker=ring, name="on screen"))
        star = {"symbol": "star", "size": 13, "color": palette.CRITICAL}
        best = fastest(predictions)
        traces += [go.Scatter(points([best]), mode="markers", marker=star, name="best")] if best.fits else []
    return figure(*traces, height=380, x=x, y=y, **({} if here is None else {"dragmode": False}))


def sweep_lines(predictions: Sequence[Prediction]) -> go.Figure:
    """Step time, and below it the bubble beside its closed form, against the one field that is swept.

    Numbers keep their distances (on a logarithmic axis where they span more than a decade); anything else, such as
    ``25 GB/s``, stands in the order of the file.
    """
    fields = varying(predictions)
    if len(fields) != 1:
        raise ValueError(f"found {len(fields)} swept fields ({', '.join(fields)}), expected one")
    field = fields[0]
    written = [prediction.plan.scenario.swept[field] for prediction in predictions]
    numeric = all(isinstance(value, int | float) for value in written)
    if numeric:
        predictions = sorted(predictions, key=lambda prediction: prediction.plan.scenario.swept[field])
        written = sorted(written)
    x = written if numeric else [escape(str(value)) for value in written]
    size, unit = time_unit(max(prediction.step_time_s for prediction in predictions))

    chart = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    hover = {"hovertext": list(map(_describe, predictions)), "hovertemplate": "%{hovertext}<extra></extra>"}
    marker = {
        "size": 8,
        "symbol": ["circle" if prediction.fits else "x" for prediction in predictions],
        "color": [palette.KINDS["F"] if prediction.fits else palette.CRITICAL for prediction in predictions],
    }
    lines: list[tuple[int, str, list[float], dict[str, Any]]] = [
        (1, "step time (× does not fit)", [p.step_time_s / size for p in predictions], {"color": palette.KINDS["F"]}),
        (2, "bubble", [p.bubble_fraction for p in predictions], {"color": palette.KINDS["B"]}),
        (2, "its closed form", [p.bubble_ideal for p in predictions], {"color": INK, "dash": "dot"}),
    ]
    for panel, name, y, line in lines:
        look = hover | {"marker": marker} if panel == 1 else {"hovertemplate": "%{y:.2%}", "marker": {"size": 6}}
        chart.add_trace(go.Scatter(x=x, y=y, mode="lines+markers", name=name, line=line, **look), panel, 1)
    spread = numeric and min(written) > 0 and max(written) / min(written) > 10
    ticks = {"tickvals": x, "ticktext": list(map(str, x))} if len(x) <= MAX_TICKS else {}
    chart.update_xaxes(type="log" if spread else "linear" if numeric else "category", gridcolor=RULE, **ticks)
    chart.update_yaxes(gridcolor=RULE, zerolinecolor=RULE, rangemode="tozero")
    shared = figure(height=420, x={}, y={}).layout
    chart.update_layout({key: shared[key] for key in shared if key not in ("xaxis", "yaxis")})
    chart.update_layout(
        xaxis2_title=escape(field), yaxis_title=f"step time, {unit}", yaxis2={"title": "bubble", "tickformat": ".0%"}
    )
    return chart


def waterfalls(predictions: Mapping[str, Prediction]) -> go.Figure:
    """The steps of several plans by cause, a bar for each, on one axis."""
    size, unit = time_unit(max(prediction.step_time_s for prediction in predictions.values()))
    parts = [
        part
        for part in palette.BREAKDOWN
        if any(abs(one.breakdown_s[part]) > 1e-3 * one.step_time_s for one in predictions.values())
    ]
    traces = []
    for part in parts:
        seconds = [prediction.breakdown_s[part] for prediction in predictions.values()]
        traces.append(
            go.Bar(
                orientation="h",
                y=list(predictions),
                x=[value / size for value in seconds],
                name=LABELS[part],
                marker={"color": palette.BREAKDOWN[part], "line": {"width": 0}},
                hovertext=list(map(format_seconds, seconds)),
                hovertemplate="%{y}: %{hovertext}",
            )
        )
    return figure(
        *traces,
        height=130 + 34 * len(predictions),
        x={"title": {"text": f"time, {unit}"}},
        y={"autorange": "reversed", "showgrid": False},
        barmode="relative",
    )


# --- along one knob, for the page ------------------------------------------------------------------------------------


def knee(bandwidths: Sequence[float], step_times_s: Sequence[float], tolerance: float = 0.05) -> float | None:
    """The lowest bandwidth, of ascending ones, from which on a step is within 5 % of the fastest."""
    fastest_s = min(step_times_s)
    slow = [
        bandwidth
        for bandwidth, seconds in zip(bandwidths, step_times_s, strict=True)
        if seconds > fastest_s * (1 + tolerance)
    ]
    later = [bandwidth for bandwidth in bandwidths if not slow or bandwidth > max(slow)]
    return min(later) if slow and later else None


def by_bandwidth(bandwidths: Sequence[float], predictions: Sequence[Prediction]) -> go.Figure:
    """Step time against a link's bandwidth, with the knee marked."""
    times = [prediction.step_time_s for prediction in predictions]
    size, unit = time_unit(max(times))
    marker = {"size": 7, "color": [palette.KINDS["F"] if p.fits else palette.CRITICAL for p in predictions]}
    traces = [
        go.Scatter(
            x=[bandwidth / 1e9 for bandwidth in bandwidths],
            y=[seconds / size for seconds in times],
            mode="lines+markers",
            line={"color": palette.KINDS["F"]},
            marker=marker,
            name="step time",
            hovertext=list(map(_describe, predictions)),
            hovertemplate="%{x:.4~g} GB/s<br>%{hovertext}<extra></extra>",
        )
    ]
    if (bend := knee(bandwidths, times)) is not None:
        traces.append(
            go.Scatter(
                x=[bend / 1e9] * 2,
                y=[0, max(times) / size],
                mode="lines",
                line={"color": INK, "dash": "dot"},
                name=f"knee, {bend / 1e9:.3g} GB/s",
                hoverinfo="name",
            )
        )
    x = {"title": {"text": "bandwidth, GB/s"}, "type": "log"}
    return figure(*traces, height=340, x=x, y={"title": {"text": f"step time, {unit}"}, "rangemode": "tozero"})


def _microbatch_axis(counts: Sequence[int]) -> dict[str, Any]:
    """Doubling M is as far everywhere; the ticks are the counts that are there."""
    marks = sorted(set(counts))
    return {"title": {"text": "micro-batches M"}, "type": "log", "tickvals": marks, "ticktext": list(map(str, marks))}


def bubble_by_microbatches(predictions: Sequence[Prediction]) -> go.Figure:
    """The bubble and its closed form against M."""
    counts = [prediction.plan.num_microbatches for prediction in predictions]
    lines = [
        ("bubble", [p.bubble_fraction for p in predictions], {"color": palette.KINDS["B"]}),
        ("(K-1)/(M+K-1)", [p.bubble_ideal for p in predictions], {"color": INK, "dash": "dot"}),
    ]
    traces = [
        go.Scatter(x=counts, y=y, mode="lines+markers", line=line, name=name, hovertemplate="M = %{x}: %{y:.2%}")
        for name, y, line in lines
    ]
    y = {"title": {"text": "bubble"}, "tickformat": ".0%", "rangemode": "tozero"}
    return figure(*traces, height=340, x=_microbatch_axis(counts), y=y)


def memory_by_microbatches(predictions: Sequence[Prediction], limit_bytes: float) -> go.Figure:
    """The fullest rank's peak against M, a line for each checkpoint mode."""
    most = max(max(prediction.peak_memory_bytes) for prediction in predictions)
    size, unit = memory_unit(most)
    colors = {"never": palette.KINDS["B"], "except_last": palette.KINDS["R"], "always": palette.KINDS["F"]}
    traces: list[go.Scatter] = []
    for mode, color in colors.items():
        found = [prediction for prediction in predictions if set(prediction.plan.checkpoint) == {mode}]
        traces.append(
            go.Scatter(
                x=[prediction.plan.num_microbatches for prediction in found],
                y=[max(prediction.peak_memory_bytes) / size for prediction in found],
                mode="lines+markers",
                line={"color": color},
                name=mode,
                hovertemplate=f"M = %{{x}}, {mode}: %{{y:.3~g}} {unit}<extra></extra>",
            )
        )
    counts = [prediction.plan.num_microbatches for prediction in predictions]
    traces.append(limit_line(limit_bytes, most, (min(counts), max(counts)), size))
    y = {"title": {"text": f"peak memory, {unit}"}, "rangemode": "tozero"}
    return figure(*traces, height=340, x=_microbatch_axis(counts), y=y)
