"""Pieces that panels are made of: charts with their headings, tables, progress."""

from collections.abc import Iterable
from typing import Any

import dash_ag_grid as dag
import dash_mantine_components as dmc
import plotly.graph_objects as go
from dash import dcc, html

from dashboard.charts.style import NOTHING, graph_config

_CONFIG: Any = graph_config() | {"displayModeBar": False}
"""Without the bar of buttons, which has a stop of the keyboard for each of them."""
CHART_HEIGHT = 340
"""Pixels of most charts."""


def explained(content: Any, meaning: str) -> html.Div:
    """With what it means, which `page.js` shows when it is pointed at for a while or reached with the keyboard.

    A tooltip of the library's would look through the whole page whenever anything changes.
    """
    tip: Any = {"data-tip": meaning}
    return html.Div(content, **tip)


def graph(name: str, about: str, height: int = CHART_HEIGHT) -> html.Div:
    """A chart that callbacks fill; `about` is what a screen reader says of it.

    Its box has a height of its own, which every figure fills: a box that took its height from its figure would lose it
    for as long as the figure is replaced.
    """
    chart = dcc.Graph(figure=NOTHING, id=name, config=_CONFIG, responsive=True, style={"height": height})
    label: Any = {"aria-label": about}
    return html.Div(chart, role="group", **label)


def still(figure: go.Figure, name: str) -> dcc.Graph:
    """A chart that comes with its figure, in a box of that figure's height."""
    height = figure.layout.height
    return dcc.Graph(figure=figure, id=name, config=_CONFIG, responsive=True, style={"height": height})


def card(title: str, caption: str, *content: Any) -> dmc.Paper:
    """A chart with its heading."""
    head = [dmc.Title(title, order=2, size="h5"), dmc.Text(caption, size="sm", c="dimmed")]
    return dmc.Paper([*head, *content], withBorder=True, p="md", radius="md", miw=0)


def pair(*cards: Any) -> dmc.SimpleGrid:
    """Beside each other where there is room."""
    return dmc.SimpleGrid(list(cards), cols={"base": 1, "lg": 2}, spacing="md")


PLAN_COLUMNS = ("K", "M", "checkpoint", "step ms", "samples/s", "bubble %", "closed form %", "peak GiB", "fits")
RUN_COLUMNS = (
    "run",
    "device",
    "K",
    "M",
    "schedule",
    "predicted ms",
    "measured ms",
    "error %",
    "bubble, points",
    "memory %",
)


def table(name: str, about: str, names: Iterable[str], **options: Any) -> html.Div:
    """Rows to sort and to choose from: with the mouse, or with the arrow keys and space."""
    grid = dag.AgGrid(
        id=name,
        columnDefs=columns(names),
        rowData=[],
        columnSize="responsiveSizeToFit",
        defaultColDef={
            "sortable": True,
            "resizable": True,
            "minWidth": 90,
            "wrapHeaderText": True,
            "autoHeaderHeight": True,
        },
        dashGridOptions={
            "rowSelection": {"mode": "singleRow", "enableClickSelection": True, "checkboxes": False},
            **options.pop("dashGridOptions", {}),
        },
        style={"height": 360},
        **options,
    )
    label: Any = {"aria-label": about}
    return html.Div(grid, className="themed-grid", role="group", **label)


def columns(names: Iterable[str]) -> list[dict[str, Any]]:
    """Of a table, headed as they are named; the first is wide enough for the name of a run."""
    found = [{"field": name, "headerName": name} for name in names]
    return [one | ({"minWidth": 220} if one["field"] == "run" else {}) for one in found]


def progress(text: str, percent: float | None) -> html.Div:
    """How far a piece of work is; without a share where nobody knows how much there is to do."""
    bar = dmc.Progress(
        value=100 if percent is None else percent,
        striped=percent is None,
        animated=percent is None,
        **{"aria-label": text},
    )
    return html.Div([dmc.Text(text, size="sm"), bar], className="progress")


def once_more(ticks: int | None) -> int:
    """How often a clock may have ticked until the next answer: once more.

    A clock that went on by itself would ask again before a slow server has answered, and each question takes the place
    of the one before.
    """
    return (ticks or 0) + 1
