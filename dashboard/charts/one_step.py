"""One step to plotly figures: pure functions, shared by the HTML report and the dashboard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dashboard.charts.style import INK, MAX_TICKS, NO_LEGEND, figure, limit_line, memory_unit, rank_shades, time_unit
from gpipe_sim.base.arrays import Array
from gpipe_sim.base.units import format_seconds
from gpipe_sim.explain.waterfall import LABELS
from gpipe_sim.plan.actions import COLLECTIVES
from gpipe_sim.show import palette
from gpipe_sim.step.metrics import step_time_s
from gpipe_sim.step.step import MEMORY_PARTS, Span, Step, stages_text

MAX_SPANS = 20_000
"""Beyond this many spans, two for each action, messages and waiting are left out."""

MAX_HOVERS = 10_000
"""Beyond this many spans one outline for each kind of action is drawn, which says nothing of its parts."""

MAX_BARS = 4000
"""Beyond this many bars a browser takes seconds to draw or zoom them; lines on the graphics card do not."""


def rank_ticks(step: Step) -> dict[str, Any]:
    """An axis with a row or column for each rank, in the order of the step; the stage is named where it differs."""
    names = [f"{t.rank}" if t.stages == (t.rank,) else f"{t.rank} ({stages_text(t.stages)})" for t in step.ranks]
    every = -(-len(names) // MAX_TICKS)
    ticks = {"tickvals": list(range(len(names)))[::every], "ticktext": names[::every], "title": {"text": "rank"}}
    return ticks | {"showgrid": False, "zeroline": False, "ticks": "outside", "tickcolor": "rgba(0,0,0,0)"}


_BAR, _LANE = 0.62, 0.12
"""Heights in a rank's row, which is 1 high: its actions, and the thin bars of its messages."""
_SEND = (_BAR + _LANE) / 2 + 0.02
"""A message lies below the action that sends it; waiting is drawn in the middle of the row, where no action is."""

HOVER = "%{hovertext}<br>%{customdata[0]:.5~s}s to %{customdata[1]:.5~s}s<br>takes %{customdata[2]:.4~s}s"


@dataclass(frozen=True)
class Strip:
    """Spans that are drawn alike: one trace."""

    name: str
    color: str
    offset: float
    """From the middle of the rank's row, down."""
    width: float
    """In rows."""
    spans: Sequence[Span]
    labelled: bool = False
    """Whether the micro-batch's number stands in each bar that has room for it."""
    stages: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Rank -> its stages, where ranks have several: bars name theirs, and those of later stages are lighter."""
    hover: str = HOVER + "<extra>%{fullData.name}</extra>"
    look: Mapping[str, Any] = field(default_factory=dict)


MAX_NUMBERS = 600
"""Up to this many bars numbers come and go as one zooms; beyond, they are there only if they can be read at once."""


def draw(strips: Sequence[Strip], row: Mapping[int, int], size: float, height: int) -> list[Any]:
    """A trace for each strip: bars, or, of so many that a browser could not keep up, lines on the graphics card."""
    total = sum(len(strip.spans) for strip in strips)
    as_lines, row_px = total > MAX_BARS, (height - 90) / len(row)
    with_numbers = total <= MAX_NUMBERS or _readable(strips)
    traces: list[Any] = []
    for strip in strips:
        found = strip.spans
        if not found:
            continue
        start = np.array([span.start_s for span in found])
        end = np.array([span.end_s for span in found])
        y = np.array([row[span.rank] for span in found]) + strip.offset
        shared: dict[str, Any] = {"name": strip.name, "hovertemplate": strip.hover, **strip.look}
        hover, times = [str(span.action) for span in found], np.stack([start, end, end - start], axis=1)
        if as_lines:
            gap = np.full(len(found), np.nan)
            shape: dict[str, Any] = {
                "type": "scattergl",
                "x": np.stack([start / size, end / size, gap], axis=1).ravel(),
                "y": np.stack([y, y, gap], axis=1).ravel(),
                "mode": "lines",
                "line": {"color": strip.color, "width": max(1.0, strip.width * row_px)},
                "hovertext": [text for text in hover for _ in range(3)],
                "customdata": np.repeat(times, 3, axis=0).astype(np.float32),
            }
        else:
            shape = {
                "type": "bar",
                "orientation": "h",
                "base": start / size,
                "x": (end - start) / size,
                "y": y,
                "width": strip.width,
                "marker": {"color": _colors(strip), "line": {"width": 0}},
                "hovertext": hover,
                "customdata": times,
                **(_numbers(found, with_stage=bool(strip.stages)) if strip.labelled and with_numbers else {}),
            }
        traces.append(shared | shape)
    return traces


def _colors(strip: Strip) -> str | list[str]:
    """One for all, or by stage."""
    if not strip.stages:
        return strip.color
    return [palette.shade(strip.color, span.action.stage, strip.stages[span.rank]) for span in strip.spans]


def stages_by_rank(step: Step) -> dict[int, Sequence[int]]:
    """Rank -> its stages; nothing where each has one."""
    found: dict[int, Sequence[int]] = {timeline.rank: timeline.stages for timeline in step.ranks}
    return found if any(len(stages) > 1 for stages in found.values()) else {}


def _readable(strips: Sequence[Strip]) -> bool:
    """Whether a typical bar is wide enough for a number, in a chart as wide as most screens allow."""
    spans = [span for strip in strips if strip.labelled for span in strip.spans]
    end = max((span.end_s for span in spans), default=0.0)
    widths = [span.end_s - span.start_s for span in spans]
    needed = _NAME_PX if any(strip.stages for strip in strips) else _NUMBER_PX
    return bool(widths) and float(np.median(widths)) / end * _CHART_PX >= needed


_CHART_PX, _NUMBER_PX, _NAME_PX = 1000, 12, 18


def outlines(strips: Sequence[Strip], row: Mapping[int, int], size: float) -> list[dict[str, Any]]:
    """A shape for each strip, all of its spans in one path: quick for any number of them, but nothing to hover over."""
    shapes = []
    for strip in strips:
        if strip.spans:
            starts = np.array([span.start_s for span in strip.spans]) / size
            ends = np.array([span.end_s for span in strip.spans]) / size
            half = strip.width / 2
            sides = {index: (index + strip.offset - half, index + strip.offset + half) for index in row.values()}
            edges = [sides[row[span.rank]] for span in strip.spans]
            path = "".join(
                f"M{start:.7g},{top:.4g}H{end:.7g}V{bottom:.4g}H{start:.7g}Z"
                for start, end, (top, bottom) in zip(starts.tolist(), ends.tolist(), edges, strict=True)
            )
            look = {"fillcolor": strip.color, "line": {"width": 0}, "name": strip.name, "showlegend": True}
            shapes.append({"type": "path", "path": path, **look, **strip.look})
    return shapes


def drawn(strips: Sequence[Strip], row: Mapping[int, int], size: float, height: int) -> tuple[list[Any], list[Any]]:
    """Traces and shapes of the strips, whichever a browser draws in time."""
    if sum(len(strip.spans) for strip in strips) <= MAX_HOVERS:
        return draw(strips, row, size, height), []
    end = max(span.end_s for strip in strips for span in strip.spans) / size
    bounds = go.Scatter(x=[0, end], y=[0, len(row) - 1], mode="markers", marker={"opacity": 0}, showlegend=False)
    return [bounds.update(hoverinfo="skip")], outlines(strips, row, size)


def _numbers(spans: Sequence[Span], *, with_stage: bool) -> dict[str, Any]:
    """The micro-batch and, where ranks have several stages, the stage and the kind above it."""
    actions = [span.action for span in spans]
    numbers = [str(action.microbatch) if action.microbatch >= 0 else "" for action in actions]
    digits = max(map(len, numbers))
    numbers = [number.rjust(digits, "\u2007") for number in numbers]  # all as wide, so all shown or none
    if with_stage:
        named = zip(actions, numbers, strict=True)
        numbers = [f"{action.stage}{action.kind}<br>{number}" if number.strip() else "" for action, number in named]
    return {"text": numbers, "textposition": "inside", "textangle": 0, "insidetextanchor": "middle"}


def _spans(step: Step) -> list[Span]:
    """All of them or, of a step with very many, the actions alone."""
    if 2 * sum(len(timeline.actions) for timeline in step.ranks) <= MAX_SPANS:
        return list(step.spans())
    return [
        Span(timeline.rank, "compute", action, start, end)
        for timeline in step.ranks
        for action, start, end in zip(timeline.actions, timeline.start_s.tolist(), timeline.end_s.tolist(), strict=True)
    ]


def gantt_height(num_rows: int) -> int:
    """Pixels: rows get thinner as there are more of them."""
    return 90 + num_rows * max(8, min(44, 640 // num_rows))


def gantt(step: Step, critical: Sequence[Span] | None = None, title: str | None = None) -> go.Figure:
    """Who does what when: a row per rank, rank 0 on top, one trace for each kind of action and of message lane.

    rank 0   [F0][F1][F2]             [B2]...      actions, with the micro-batch's number where there is room
              ----====                             messages on their way
    rank 1   .....[F0]                             waiting for a message; above, what replicas do together

    Where ranks have several stages, an action's stage is named, and those of a rank's later stages are lighter.
    The critical path, as `explain.critical_path` gives it, is outlined and can be switched off in the legend.
    """
    row = {timeline.rank: index for index, timeline in enumerate(step.ranks)}
    size, unit = time_unit(step_time_s(step))
    spans, stages = _spans(step), stages_by_rank(step)
    as_lines = len(spans) > MAX_BARS
    strips = []
    for lane, name, offset in (("receive", "waiting", 0.0), ("send", "message", _SEND)):
        strips.append(Strip(name, palette.LANES[lane], offset, _LANE, [span for span in spans if span.lane == lane]))
    for kind, name in palette.KIND_NAMES.items():
        if kind in COLLECTIVES:
            together = [span for span in spans if span.lane == "collective" and span.action.kind == kind]
            strips.append(Strip(name, palette.KINDS[kind], -_SEND, _LANE, together))
            continue
        found = [span for span in spans if span.lane == "compute" and span.action.kind == kind]
        found.sort(key=lambda span: bool(stages) and span.action.stage > stages[span.rank][0])  # legends show the first
        strips.append(Strip(name, palette.KINDS[kind], 0.0, _BAR, found, labelled=True, stages=stages))
    height = gantt_height(len(row))
    traces, shapes = drawn(strips, row, size, height)
    if critical:
        traces.append(_outline(critical, row, size, gl=as_lines))
    return figure(
        *traces,
        height=height,
        x={"title": {"text": f"time, {unit}"}, "rangemode": "tozero"},
        y=rank_ticks(step) | {"range": [len(row) - 0.5, -0.5]},
        barmode="overlay",
        shapes=shapes,
        uniformtext={"minsize": 7 if stages else 8, "mode": "hide"},
        title={"text": escape(title), "automargin": True, "yref": "container"} if title else None,
    )


def _outline(critical: Sequence[Span], row: Mapping[int, int], size: float, *, gl: bool) -> Any:
    """A frame around each unbroken run of work, and a line along each message that leads to the next rank."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    runs: list[list[Span]] = []
    for span in critical:
        last = runs[-1][-1] if runs else None
        if last and span.lane == last.lane == "compute" and span.rank == last.rank:
            runs[-1].append(span)
        else:
            runs.append([span])
    for index, run in enumerate(runs):
        start, end, y = run[0].start_s / size, run[-1].end_s / size, float(row[run[0].rank])
        if run[0].lane == "compute":
            top, bottom = y - _BAR / 2, y + _BAR / 2
            xs += [start, end, end, start, start, None]
            ys += [top, top, bottom, bottom, top, None]
        else:
            following = runs[index + 1][0].rank if index + 1 < len(runs) else run[0].rank
            xs += [start, start, end, end, None]
            ys += [y, y + _SEND, y + _SEND, row[following], None]
    kind = go.Scattergl if gl else go.Scatter
    line = {"color": palette.CRITICAL, "width": 2}
    return kind(x=xs, y=ys, mode="lines", line=line, name="critical path", hoverinfo="skip")


def memory_over_time(step: Step, limit_bytes: float) -> go.Figure:
    """Bytes of each rank from one moment to the next, under the device's limit."""
    most, end = max(curve.peak_bytes for curve in step.memory), step_time_s(step)
    (scale, unit), (size, bytes_unit) = time_unit(end), memory_unit(most)
    kind = go.Scattergl if sum(len(curve.times) for curve in step.memory) > 5 * MAX_BARS else go.Scatter
    shades = rank_shades(len(step.ranks))
    traces = [
        kind(
            x=np.append(curve.times, max(end, curve.times[-1])) / scale,
            y=np.append(curve.total, curve.total[-1]) / size,
            mode="lines",
            line={"shape": "hv", "width": 1.5, "color": shade},
            name=f"rank {timeline.rank}",
            showlegend=len(step.ranks) <= MAX_TICKS,
            hovertemplate=f"%{{y:.2f}} {bytes_unit} at %{{x:.4~g}} {unit}",
        )
        for curve, timeline, shade in zip(step.memory, step.ranks, shades, strict=True)
    ]
    return figure(
        *traces,
        limit_line(limit_bytes, most, (0.0, end / scale), size),
        height=340,
        x={"title": {"text": f"time, {unit}"}},
        y={"title": {"text": f"memory, {bytes_unit}"}, "rangemode": "tozero"},
    )


def memory_parts(step: Step, limit_bytes: float) -> go.Figure:
    """What each rank's peak is made of; the parts that do not depend on the data lie at the bottom."""
    peaks, ranks = [curve.at_peak() for curve in step.memory], list(range(len(step.ranks)))
    most = max(curve.peak_bytes for curve in step.memory)
    size, unit = memory_unit(most)
    traces = [
        go.Bar(
            x=ranks,
            y=[peak[part] / size for peak in peaks],
            marker={"color": palette.MEMORY[part], "line": {"width": 0}},
            name=part,
            customdata=[timeline.rank for timeline in step.ranks],
            hovertemplate=f"rank %{{customdata}}: %{{y:.2f}} {unit}",
        )
        for part in MEMORY_PARTS
        if any(peak[part] for peak in peaks)
    ]
    return figure(
        *traces,
        limit_line(limit_bytes, most, (-0.5, len(ranks) - 0.5), size),
        height=340,
        x=rank_ticks(step) | {"range": [-0.5, len(ranks) - 0.5]},
        y={"title": {"text": f"memory at the peak, {unit}"}, "rangemode": "tozero"},
        barmode="stack",
    )


def utilization(step: Step, busy_share: Array) -> go.Figure:
    """The share of the pipeline's time that each rank computes; what is missing to 1 is its bubble."""
    bar = go.Bar(
        x=list(range(len(step.ranks))),
        y=busy_share,
        marker={"color": palette.KINDS["F"], "line": {"width": 0}},
        texttemplate="%{y:.0%}" if len(step.ranks) <= MAX_TICKS else None,
        customdata=[timeline.rank for timeline in step.ranks],
        hovertemplate="rank %{customdata}: %{y:.1%}<extra></extra>",
    )
    y = {"title": {"text": "busy"}, "range": [0, 1], "tickformat": ".0%"}
    return figure(bar, height=340, x=rank_ticks(step), y=y, margin=dict(NO_LEGEND))


def waterfall(breakdown_s: Mapping[str, float]) -> go.Figure:
    """From useful compute to the step time: each bar begins where the one above ends. Causes of nothing are absent."""
    total = sum(breakdown_s.values())
    size, unit = time_unit(total)
    parts = [part for part, seconds in breakdown_s.items() if abs(seconds) > 1e-9 * total]
    seconds = np.array([breakdown_s[part] for part in parts])
    begins = np.cumsum(seconds) - seconds
    texts = [f"{format_seconds(value)}, {value / total:.0%}" for value in seconds]
    bars = go.Bar(
        orientation="h",
        base=np.append(begins, 0.0) / size,
        x=np.append(seconds, total) / size,
        y=[*(LABELS[part] for part in parts), "step time"],
        marker={"color": [*(palette.BREAKDOWN[part] for part in parts), INK], "line": {"width": 0}},
        text=[*texts, format_seconds(total)],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{text}<extra></extra>",
    )
    reach = max(total, float((begins + seconds).max())) / size
    return figure(
        bars,
        height=340,
        x={"title": {"text": f"time, {unit}"}, "range": [0, 1.3 * reach]},
        y={"autorange": "reversed", "showgrid": False},
        margin=dict(NO_LEGEND),
    )
