"""Predicted against published: the picture of `gpipe validate`."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboard.charts.style import INK, RULE
from gpipe_sim.evidence.literature import CLAIMS, Figure, published_tables, several
from gpipe_sim.show.palette import CRITICAL

_COLORS = {"exact": "#0072B2", "calibrated": "#E69F00", "trend": "#999999"}


class Point(NamedTuple):
    """One published number; a figure of several has as many."""

    figure: Figure
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """As `Figure.error`."""
        return self.predicted / self.published - 1


def points(figures: Sequence[Figure]) -> Iterator[Point]:
    """Every number of every figure; statements have none."""
    for figure in figures:
        theirs, ours = figure.published, figure.predicted
        if isinstance(theirs, str) or isinstance(ours, str):
            continue
        pairs = zip(several(theirs), several(ours), strict=True)
        yield from (Point(figure, float(one), float(other)) for one, other in pairs)


def predicted_against_published(figures: Sequence[Figure]) -> go.Figure:
    """Left: every number, on the diagonal if it is right. Right: the errors of those that claim more than a trend.

    Hollow markers are no evidence: a trend claims an order only, and a fitted figure was put in.
    """
    found = list(points(figures))
    chart = make_subplots(1, 2, column_widths=[0.45, 0.55], horizontal_spacing=0.29)
    lowest, highest = (extreme(point.published for point in found) for extreme in (min, max))
    line = {"color": INK, "width": 1, "dash": "dot"}
    diagonal = go.Scatter(x=[lowest, highest], y=[lowest, highest], mode="lines", line=line, showlegend=False)
    chart.add_trace(diagonal, 1, 1)
    titles = [published_tables()[name].title for name in dict.fromkeys(point.figure.table for point in found)]
    for kind in CLAIMS:
        for status, symbol in (("holds", "circle"), ("fitted", "circle-open"), ("misses", "x")):
            some = [p for p in found if p.figure.kind == kind and p.figure.status == status]
            if not some:
                continue
            shape = "circle-open" if kind == "trend" and status == "holds" else symbol
            color = CRITICAL if status == "misses" else _COLORS[kind]
            marker = {"color": color, "symbol": shape, "size": 8, "line": {"width": 1.5, "color": color}}
            name = kind if status == "holds" else f"{kind}, {status}"
            text = [f"{published_tables()[p.figure.table].title}: {p.figure.name}" for p in some]
            across = go.Scatter(
                x=[p.published for p in some],
                y=[p.predicted for p in some],
                mode="markers",
                marker=marker,
                name=name,
                text=text,
            )
            chart.add_trace(across, 1, 1)
            if kind != "trend":
                errors = go.Scatter(
                    x=[100 * p.error for p in some],
                    y=[published_tables()[p.figure.table].title for p in some],
                    mode="markers",
                    marker=marker,
                    showlegend=False,
                    text=text,
                )
                chart.add_trace(errors, 1, 2)
    chart.update_xaxes({"type": "log", "title": "published"}, row=1, col=1)
    chart.update_yaxes({"type": "log", "title": "predicted"}, row=1, col=1)
    chart.update_xaxes({"title": "error, %", "zeroline": True, "zerolinecolor": INK}, row=1, col=2)
    exact_titles = [t for t in titles if any(p.figure.kind != "trend" and _title(p) == t for p in found)]
    chart.update_yaxes({"categoryorder": "array", "categoryarray": exact_titles[::-1]}, row=1, col=2)
    chart.update_xaxes(gridcolor=RULE, automargin=True)
    chart.update_yaxes(gridcolor=RULE, automargin=True)
    chart.update_layout(
        height=460,
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 10, "r": 16, "t": 40, "b": 10},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    )
    return chart


def _title(point: Point) -> str:
    return published_tables()[point.figure.table].title
