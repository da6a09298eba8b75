"""The tab of a whole training: days, goodput and money of the plan on screen, with what fails on the way."""

import dash_mantine_components as dmc
from dash import html

from dashboard.page import ids
from dashboard.page.cards import card, graph, pair


def weeks_panel() -> dmc.Stack:
    """How many tokens, and what their training takes."""
    tokens = dmc.TextInput(
        id=ids.WEEKS_TOKENS, label="Tokens", description="such as 300B or 1T", value="1T", debounce=500, w=200
    )
    return dmc.Stack(
        [
            tokens,
            html.Div(id=ids.WEEKS_TOLD, role="status"),
            card(
                "What the time goes to",
                "The training of median length; campaign: in the scenario says what fails, and what is done about it.",
                graph(ids.WEEKS_LOSSES, "what the training's time goes to"),
            ),
            pair(
                card(
                    "How often to save",
                    "All intervals have the same luck; marked is the one that is used.",
                    graph(ids.WEEKS_INTERVALS, "goodput by time between checkpoints"),
                ),
                card("Days", "Of all seeds.", graph(ids.WEEKS_DAYS, "days over seeds")),
            ),
        ]
    )
