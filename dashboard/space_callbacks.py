"""Callbacks of what lies around the plan on screen: the space of plans, the search, and two plans side by side."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import dash
import dash_mantine_components as dmc
from dash import Input, Output, ctx, dcc, no_update
from dash import State as Given

from dashboard import figures, ids, knobs, sweeps
from dashboard.callbacks import NOTHING, problem_list, state_of
from dashboard.layout import card
from dashboard.report import key_numbers
from dashboard.state import Library, State, current, explore, open_space, settled, with_plan
from dashboard.style import graph_config, time_unit
from gpipe_sim.advise import advise
from gpipe_sim.files import InputError
from gpipe_sim.metrics import step_time_s
from gpipe_sim.predict import Prediction


def register(app: dash.Dash, library: Library) -> None:
    """All of them."""
    _register_charts(app, library)
    _register_pins(app, library)


_BANDWIDTHS = [10 ** (8 + 0.2 * n) for n in range(21)]
"""100 MB/s to 1 TB/s."""


def _powers(most: int, also: int) -> list[int]:
    return sorted({*(2**n for n in range(most.bit_length()) if 2**n <= most), also})


@lru_cache(maxsize=16)
def around(state: State, library: Library) -> tuple[list[Prediction], list[Prediction], list[float]]:
    """Over K, M and checkpoint mode; over the bandwidth; and those bandwidths."""
    plan = current(state, library).plan
    cluster = plan.scenario.cluster
    grid: dict[str, Sequence[object]] = {
        "plan.stages": _powers(min(cluster.num_devices or 16, plan.profile.num_layers), plan.num_stages),
        "plan.microbatches": _powers(min(plan.scenario.batch, 512), plan.num_microbatches),
        "plan.checkpoint": ["never", "except_last", "always"],
    }
    if plan.schedule == "naive":
        grid["plan.microbatches"] = [1]
    space = explore(state.with_settings(plan__balance=None, plan__placement=None), library, grid)
    name = "cluster.network.bandwidth" if cluster.network is not None else "cluster.link.bandwidth"
    links = explore(state, library, {name: [knobs.link_text(bandwidth) for bandwidth in _BANDWIDTHS]})
    return space, links, _BANDWIDTHS


def _here(state: State, library: Library) -> tuple[list[Prediction], Prediction]:
    """What of the space differs from the plan on screen in K and M only."""
    prediction = current(state, library)
    modes = set(prediction.plan.checkpoint)
    mode = modes.pop() if len(modes) == 1 else "always"
    return [p for p in around(state, library)[0] if set(p.plan.checkpoint) == {mode}], prediction


def _register_charts(app: dash.Dash, library: Library) -> None:
    charts = (ids.HEATMAP, ids.FRONT, ids.BY_BANDWIDTH, ids.BUBBLE_BY_M, ids.MEMORY_BY_M)

    @app.callback(
        *(Output(name, "figure") for name in charts),
        Output(ids.TABLE, "rowData"),
        Output(ids.TABLE, "columnDefs"),
        Input(ids.URL, "search"),
        Input(ids.TABS, "value"),
        Input(ids.METRIC, "value"),
    )
    def draw(query: str | None, tab: str, metric: sweeps.Metric) -> list[Any]:
        if tab != "space":
            return [no_update] * 7
        state = state_of(query)
        try:
            space, links, bandwidths = around(state, library)
            same_mode, prediction = _here(state, library)
        except InputError:
            return [NOTHING] * 5 + [[], no_update]
        K, limit = prediction.plan.num_stages, prediction.plan.memory_limit
        along = sorted((p for p in same_mode if p.plan.num_stages == K), key=lambda p: p.plan.num_microbatches)
        each_mode = sorted((p for p in space if p.plan.num_stages == K), key=lambda p: p.plan.num_microbatches)
        rows = [table_row(one) for one in space]
        columns = [{"field": name} for name in (rows[0] if rows else {})]
        return [
            sweeps.heatmap(same_mode, metric) if same_mode else NOTHING,
            sweeps.time_memory(space, limit) if space else NOTHING,
            sweeps.by_bandwidth(bandwidths, links) if len(links) == len(bandwidths) else NOTHING,
            sweeps.bubble_by_microbatches(along) if along else NOTHING,
            sweeps.memory_by_microbatches(each_mode, limit) if each_mode else NOTHING,
            rows,
            columns,
        ]

    @app.callback(
        Output(ids.URL, "search", allow_duplicate=True),
        *(Input(name, "clickData") for name in charts),
        Input(ids.TABLE, "selectedRows"),
        Given(ids.URL, "search"),
        prevent_initial_call=True,
    )
    def choose(*given: Any) -> Any:
        """A click makes that point the plan on screen."""
        *clicks, rows, query = given
        state = settled(state_of(query), library)
        chosen = {**dict(zip(charts, clicks, strict=True)), ids.TABLE: rows}[ctx.triggered_id]
        if not chosen:
            return no_update
        if ctx.triggered_id == ids.TABLE:
            row = chosen[0]
            return _with_plan(state, row["K"], row["M"], row["checkpoint"]).to_query()
        point = chosen["points"][0]
        if ctx.triggered_id == ids.HEATMAP:
            return _with_plan(state, point["y"], point["x"]).to_query()
        if ctx.triggered_id == ids.BY_BANDWIDTH:
            plan = current(state, library).plan
            bandwidth = float(point["x"]) * 1e9
            return knobs.turned(state, plan, ids.BANDWIDTH, math.log10(bandwidth)).to_query()
        if ctx.triggered_id == ids.FRONT:
            return _with_plan(state, *point["customdata"]).to_query() if "customdata" in point else no_update
        K = current(state, library).plan.num_stages
        mode = ("never", "except_last", "always")[point["curveNumber"]] if ctx.triggered_id == ids.MEMORY_BY_M else None
        return _with_plan(state, K, point["x"], mode).to_query()

    @app.callback(
        Output(ids.ADVICE, "children"),
        Input(ids.RECOMMEND, "n_clicks"),
        Given(ids.URL, "search"),
        prevent_initial_call=True,
    )
    def recommend(_: int, query: str | None) -> Any:
        state = state_of(query)
        try:
            advice = advise(open_space(state, library))
        except InputError as error:
            return problem_list(error.problems)
        chosen = with_plan(state, advice.recommended.plan)
        sentences = [advice.reason, advice.naive_sentence]
        link = dcc.Link("take this plan", href=chosen.to_query(), id="take-advice")
        return [*(dmc.Text(text, mt="xs") for text in sentences if text), link]


def _with_plan(state: State, K: object, M: object, mode: str | None = None) -> State:
    changes: dict[str, str | None] = {"plan__stages": str(K), "plan__microbatches": str(M)}
    changes |= {"plan__balance": None, "plan__placement": None}
    if mode is not None:
        changes["plan__checkpoint"] = mode
    return state.with_settings(**changes)


def table_row(prediction: Prediction) -> dict[str, Any]:
    """One plan of the table."""
    plan = prediction.plan
    return {
        "K": plan.num_stages,
        "M": plan.num_microbatches,
        "checkpoint": plan.checkpoint[0],
        "step ms": round(1e3 * prediction.step_time_s, 3),
        "samples/s": round(prediction.throughput_samples_s, 3),
        "bubble %": round(100 * prediction.bubble_fraction, 2),
        "closed form %": round(100 * prediction.bubble_ideal, 2),
        "peak GiB": round(max(prediction.peak_memory_bytes) / 2**30, 3),
        "fits": "yes" if prediction.fits else "no",
    }


# --- two plans side by side ----------------------------------------------------------------------------------------


def _register_pins(app: dash.Dash, library: Library) -> None:
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
        return replace(exact, pins={**state.pins, name: exact.to_query(with_pins=False)}).to_query()

    @app.callback(Output(ids.PINNED, "children"), Input(ids.URL, "search"), Input(ids.TABS, "value"))
    def show(query: str | None, tab: str) -> Any:
        state = state_of(query)
        if tab != "pinned":
            return no_update
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
    _size, _unit = time_unit(longest)
    parts = []
    for name, prediction in plans.items():
        chart = figures.gantt(prediction.step)
        own, _ = time_unit(step_time_s(prediction.step))
        chart.update_xaxes(range=[0, 1.02 * longest / own])
        graph = dcc.Graph(figure=chart, config=graph_config(), id=f"gantt-{name}")
        parts.append(card(f"{name.upper()}: {prediction.settings}", prediction.verdict, graph))
    heads = [entry[0] for entry in key_numbers(next(iter(plans.values())))]
    rows = [[name.upper(), *(entry[1] for entry in key_numbers(prediction))] for name, prediction in plans.items()]
    table = dmc.Table(data={"head": ["", *heads], "body": rows}, id="pinned-numbers", mb="md")
    return [table, *parts]
