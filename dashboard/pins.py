"""Two plans side by side: pinned in the address, drawn on one axis."""

from dataclasses import replace
from typing import Any

import dash
import dash_mantine_components as dmc
from dash import Input, Output, ctx, html, no_update
from dash import State as Given

from dashboard import figures, ids
from dashboard.callbacks import problem_list, state_of
from dashboard.cards import card, still
from dashboard.report import key_numbers
from dashboard.state import Library, current, settled
from dashboard.style import time_unit
from gpipe_sim.files import InputError
from gpipe_sim.metrics import step_time_s
from gpipe_sim.predict import Prediction


def register(app: dash.Dash, library: Library) -> None:
    """Pinning, and what is shown of it."""

    @app.callback(
        Output(ids.URL, "search", allow_duplicate=True),
        Input(ids.PIN_A, "n_clicks"),
        Input(ids.PIN_B, "n_clicks"),
        Input(ids.UNPIN, "n_clicks"),
        Given(ids.URL, "search"),
        prevent_initial_call=True,
    )
    def pin(_a: int, _b: int, _c: int, query: str | None) -> Any:
        state = state_of(query)
        if ctx.triggered_id == ids.UNPIN:
            return replace(state, pins={}).to_query()
        try:
            exact = settled(state, library)
        except InputError:
            return no_update
        name = "a" if ctx.triggered_id == ids.PIN_A else "b"
        return replace(exact, pins={**state.pins, name: exact.question.to_query()}).to_query()

    @app.callback(
        Output(ids.PINNED, "children"), Input(ids.query_of(ids.PINNED_TAB), "data"), prevent_initial_call=True
    )
    def show(query: str | None) -> Any:
        state = state_of(query)
        if not state.pins:
            return dmc.Text("Pin two plans on the Plan tab to see them here on one axis.")
        try:
            plans = {name: current(state_of(pin), library) for name, pin in sorted(state.pins.items())}
        except InputError as error:
            return problem_list(error.problems)
        return side_by_side(plans)


def side_by_side(plans: dict[str, Prediction]) -> Any:
    """Gantt charts with one range of time, and the numbers of each."""
    longest = max(step_time_s(prediction.step) for prediction in plans.values())
    parts = []
    for name, prediction in plans.items():
        chart = figures.gantt(prediction.step)
        own, _ = time_unit(step_time_s(prediction.step))
        chart.update_xaxes(range=[0, 1.02 * longest / own])
        plan = prediction.plan
        what = f"{plan.scenario.name}, K={plan.num_stages}, M={plan.num_microbatches}, {plan.schedule}"
        parts.append(card(f"{name.upper()}: {what}", prediction.verdict, still(chart, f"gantt-{name}")))
    heads = [entry[0] for entry in key_numbers(next(iter(plans.values())))]
    rows = [[name.upper(), *(entry[1] for entry in key_numbers(prediction))] for name, prediction in plans.items()]
    if len(plans) == 2:
        rows.append(["B against A", *against(*plans.values())])
    table = dmc.Table(data={"head": ["", *heads], "body": rows}, id="pinned-numbers", mb="md")
    return [table, dmc.Stack(parts)] if parts else html.Div()


def against(first: Prediction, second: Prediction) -> list[str]:
    """How the second differs from the first in each of the key numbers."""

    def relative(before: float, after: float) -> str:
        return f"{after / before - 1:+.1%}" if before else ""

    points = 100 * (second.bubble_fraction - first.bubble_fraction)
    return [
        relative(first.step_time_s, second.step_time_s),
        relative(first.throughput_samples_s, second.throughput_samples_s),
        f"{points:+.1f} points",
        relative(max(first.peak_memory_bytes), max(second.peak_memory_bytes)),
    ]
