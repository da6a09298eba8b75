"""The scenarios that the server offers, each with the question that it answers."""

from itertools import takewhile
from pathlib import Path
from typing import Any

import dash
import dash_mantine_components as dmc
from dash import ALL, Input, Output, html, no_update
from dash import State as Given

from dashboard.page import ids
from dashboard.page.state import Library
from gpipe_sim.base.files import read_text
from gpipe_sim.scenario.reading import question_of


def answer_of(path: Path) -> str:
    """What a scenario's file says of its question: the comment at its beginning, but for the first line."""
    comment = takewhile(lambda line: line.startswith("#"), read_text(path).splitlines())
    return " ".join(line.removeprefix("#").strip() for line in list(comment)[1:]).strip()


def gallery_panel() -> html.Div:
    """Filled when it is first opened: so many cards would slow down whatever is shown before."""
    return html.Div(id=ids.GALLERY_CARDS)


def gallery_cards(library: Library) -> dmc.Stack:
    """A card for each scenario."""
    cards = [_card(name, question_of(path), answer_of(path)) for name, path in sorted(library.files.items())]
    about = "Each of these scenarios answers a question. Open one: every knob then turns it."
    return dmc.Stack(
        [dmc.Text(about, size="sm"), dmc.SimpleGrid(cards, cols={"base": 1, "sm": 2, "xl": 3}, spacing="md")]
    )


def _card(name: str, question: str, more: str) -> dmc.Paper:
    button = dmc.Button(
        "Open",
        id={"type": ids.GALLERY, "scenario": name},
        size="compact-sm",
        variant="default",
        **{"aria-label": f"open {name}"},
    )
    return dmc.Paper(
        [
            dmc.Group([dmc.Text(name, size="sm", className="quiet"), button], justify="space-between"),
            dmc.Title(question or name, order=2, size="h5", mt=6),
            dmc.Text(more, size="sm", className="quiet told", mt=6),
        ],
        withBorder=True,
        p="md",
        radius="md",
    )


_OPEN: Any = """(clicks) => {
    const chosen = dash_clientside.callback_context.triggered_id;
    if (!chosen || !clicks.some(Boolean)) return dash_clientside.no_update;
    dash_clientside.set_props('scenario', {value: chosen.scenario});
    return 'plan';
}"""
"""As if it had been chosen among the knobs; then to the plan."""


def register(app: dash.Dash, library: Library) -> None:
    """The cards come from here; the browser opens a scenario by itself."""

    @app.callback(
        Output(ids.GALLERY_CARDS, "children"),
        Input(ids.TABS, "value"),
        Given(ids.GALLERY_CARDS, "children"),
        prevent_initial_call=True,
    )
    def fill(tab: str, cards: Any) -> Any:
        return no_update if cards or tab != ids.GALLERY_TAB else gallery_cards(library)

    app.clientside_callback(  # type: ignore[no-untyped-call]
        _OPEN,
        Output(ids.TABS, "value", allow_duplicate=True),
        Input({"type": ids.GALLERY, "scenario": ALL}, "n_clicks"),
        prevent_initial_call=True,
    )
