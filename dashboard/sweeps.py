"""Many predictions to plotly figures: heat maps over K and M, time against memory, lines along a swept field."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Literal

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboard.style import INK, MAX_TICKS, NO_LEGEND, RULE, figure, limit_line, memory_unit, time_unit
from gpipe_sim import palette
from gpipe_sim.predict import Prediction, fastest, pareto, varying
from gpipe_sim.units import format_bytes, format_seconds

Metric = Literal["step_time_s", "bubble_fraction", "peak_memory_bytes"]

METRICS: Mapping[Metric, str] = {
    "step_time_s": "step time",
    "bubble_fraction": "bubble",
    "peak_memory_bytes": "peak memory",
}


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


def heatmap(predictions: Sequence[Prediction], metric: Metric) -> go.Figure:
    """A metric over K (up) and M (across). Colours compare plans that fit; the others are grey and marked ×.

    Where several plans share K and M the cell shows the `fastest`, and its hover text says of how many.
    """
    cells: dict[tuple[int, int], list[Prediction]] = {}
    for prediction in predictions:
        cells.setdefault((prediction.plan.num_stages, prediction.plan.num_microbatches), []).append(prediction)
    Ks, Ms = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    largest = max(_value(prediction, metric) for prediction in predictions)
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
    grey = [[0, "#b4b4b4"], [1, "#b4b4b4"]]  # Viridis has no grey of its own
    return figure(
        go.Heatmap(layer(True), colorscale="Viridis", colorbar=bar, showscale=some_fit, name="fits"),
        go.Heatmap(layer(False), colorscale=grey, showscale=False, name="does not fit"),
        height=max(190, 90 + 46 * len(Ks)),
        x={"title": {"text": "micro-batches M"}, "type": "category", "showgrid": False},
        y={"title": {"text": "stages K"}, "type": "category", "showgrid": False},
        margin=dict(NO_LEGEND),
    )


def time_memory(predictions: Sequence[Prediction], limit_bytes: float | None = None) -> go.Figure:
    """Step time against peak memory: down and to the left is better, and the front joins what nothing beats in both.

    The front is drawn through plans that fit; where none does, through all.
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
            "customdata": [[p.plan.num_stages, p.plan.num_microbatches, p.plan.checkpoint[0]] for p in found],
        }

    fitting = [prediction for prediction in predictions if prediction.fits]
    front = {
        "mode": "lines+markers",
        "line": {"color": palette.KINDS["U"], "width": 2, "shape": "hv"},
        "marker": {"symbol": "circle-open", "size": 15, "line": {"width": 2}},
        "cliponaxis": False,
    }
    traces = [go.Scatter(points(pareto(fitting or predictions)), **front, name="best trade-offs")]
    marks = {"fits": (True, "circle", palette.KINDS["F"]), "does not fit": (False, "x", palette.CRITICAL)}
    for name, (fits, symbol, color) in marks.items():
        found = [prediction for prediction in predictions if prediction.fits == fits]
        marker = {"symbol": symbol, "color": color, "size": 9}
        traces += [go.Scatter(points(found), mode="markers", marker=marker, name=name)] if found else []
    if limit_bytes is not None:
        traces.append(limit_line(limit_bytes, most, (0.0, 1.05 * slowest / scale), size))
    return figure(
        *traces,
        height=380,
        x={"title": {"text": f"step time, {unit}"}, "rangemode": "tozero"},
        y={"title": {"text": f"peak memory, {bytes_unit}"}, "rangemode": "tozero"},
    )


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
