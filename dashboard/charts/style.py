"""The look that all figures share, and the units of their axes.

Every figure has a transparent background and grey lettering, so that it stands on a light page and on a dark one. A
time axis counts in the unit of the longest time on it, a memory axis likewise; hovering always names the unit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from gpipe_sim.base.units import format_bytes
from gpipe_sim.show import palette

CONFIG: Mapping[str, Any] = {
    "displaylogo": False,
    "displayModeBar": "hover",
    "responsive": True,
    "modeBarButtonsToRemove": ["sendChartToCloud"],
}
"""Of every figure: no logo, and no button that would upload the chart."""


def graph_config() -> Any:
    """`CONFIG` as a graph takes it."""
    return dict(CONFIG)


TYPEFACE = "-apple-system, BlinkMacSystemFont, Segoe UI, Roboto, Helvetica, Arial, sans-serif"
"""The page's, which is that of its controls."""
INK, RULE = "#808080", "rgba(128,128,128,0.25)"
NO_LEGEND: Mapping[str, int] = {"l": 10, "r": 16, "t": 12, "b": 10}
MAX_TICKS = 16
"""Beyond this many, ranks are thinned out on axes and left out of legends."""

_FAR = 3
"""A limit this many times above the data starts hidden: it would flatten everything else."""

_CLEAR = "rgba(0,0,0,0)"


def figure(*traces: Any, height: int, x: Mapping[str, Any], y: Mapping[str, Any], **layout: Any) -> go.Figure:
    """The look that all figures share."""
    axis: dict[str, Any] = {"gridcolor": RULE, "zerolinecolor": RULE, "automargin": True}
    return go.Figure(
        traces,
        {
            "height": height,
            "font": {"family": TYPEFACE, "size": 12, "color": INK},
            "paper_bgcolor": _CLEAR,
            "plot_bgcolor": _CLEAR,
            "modebar": {"bgcolor": _CLEAR},
            "margin": dict(NO_LEGEND) | {"t": 34},
            "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
            "xaxis": axis | dict(x),
            "yaxis": axis | dict(y),
            **layout,
        },
    )


NOTHING = figure(height=220, x={"visible": False}, y={"visible": False})
"""Where there is no plan to draw, or not yet: as empty on a dark page as on a light one."""


def time_unit(longest_s: float) -> tuple[float, str]:
    """The unit in which the longest time is at least one: its size in seconds, and its name."""
    return next(((size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms")) if longest_s >= size), (1e-6, "us"))


def memory_unit(most_bytes: float) -> tuple[float, str]:
    """The unit in which the largest amount is at least one: its size in bytes, and its name."""
    return next(((2.0**n, unit) for n, unit in ((30, "GiB"), (20, "MiB")) if most_bytes >= 2**n), (2.0**10, "KiB"))


def rank_shades(num_ranks: int) -> list[str]:
    """A colour for each rank, dark to light; never so dark or so light that it is lost on the page."""
    shades: list[str] = sample_colorscale("Viridis", np.linspace(0.35, 0.9, num_ranks))
    return shades


def limit_line(limit_bytes: float, most_bytes: float, ends: Sequence[float], size: float) -> go.Scatter:
    """The device's memory as a dashed line from one end to the other."""
    return go.Scatter(
        x=list(ends),
        y=[limit_bytes / size] * 2,
        mode="lines",
        line={"color": palette.CRITICAL, "dash": "dash", "width": 2},
        name=f"limit {format_bytes(limit_bytes)}",
        hoverinfo="name",
        visible="legendonly" if limit_bytes > _FAR * most_bytes else True,
    )
