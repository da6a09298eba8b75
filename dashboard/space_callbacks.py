"""Callbacks of what lies around the plan on screen: the space of plans, and the search for the best."""

import math
from typing import Any

import dash
import dash_mantine_components as dmc
from dash import Input, Output, ctx, dcc, no_update
from dash import State as Given

from dashboard import ids, knobs, sweeps
from dashboard.callbacks import problem_list, state_of
from dashboard.cards import columns, progress
from dashboard.space import BANDWIDTHS, Around, around, table_row, with_choice
from dashboard.state import Library, State, cluster_of, current, open_space, settled, with_plan
from dashboard.style import NOTHING
from dashboard.tasks import SupersededError, Tasks
from gpipe_sim.advise import Advice, advise
from gpipe_sim.files import InputError

CHARTS = (ids.HEATMAP, ids.FRONT, ids.BY_BANDWIDTH, ids.BUBBLE_BY_M, ids.MEMORY_BY_M)
_SPACE_QUERY = Input(ids.query_of(ids.SPACE_TAB), "data")


def register(app: dash.Dash, library: Library, tasks: Tasks) -> None:
    """All of them."""
    _register_charts(app, library, tasks)
    _register_choice(app, library)
    _register_search(app, library, tasks)


def _register_charts(app: dash.Dash, library: Library, tasks: Tasks) -> None:
    @app.callback(
        *(Output(name, "figure") for name in CHARTS),
        Output(ids.TABLE, "rowData"),
        Output(ids.TABLE, "columnDefs"),
        Output(ids.SPACE_PROGRESS, "children"),
        Output(ids.SPACE_TICK, "disabled"),
        _SPACE_QUERY,
        Input(ids.METRIC, "value"),
        Input(ids.SPACE_TICK, "n_intervals"),
        Given(ids.TOKEN, "data"),
        prevent_initial_call=True,
    )
    def draw(query: str | None, metric: sweeps.Metric, _ticks: int, token: str) -> list[Any]:
        if query is None:  # the tab has not been opened yet
            return [no_update] * 9
        state = state_of(query)
        task = tasks.ask(token, "space", state.question, lambda task: around(state, library, task))
        if not task.ended.is_set():
            share = f"{task.done:.0f} of {task.total} steps" if task.total else "beginning"
            percent = 100 * task.done / task.total if task.total else 0.0
            return [no_update] * 7 + [progress(f"Predicting the plans around this one: {share}", percent), False]
        try:
            return [*space_figures(task.value(), metric), None, True]
        except SupersededError:  # by another request of this page, which will be answered
            return [no_update] * 9
        except InputError:
            return [NOTHING] * 5 + [[], no_update, None, True]


def space_figures(found: Around, metric: sweeps.Metric) -> list[Any]:
    """The charts, rows and columns of the Space tab."""
    plan = found.here.plan
    same_mode = found.like_here
    of_K = sorted(
        (one for one in found.plans if one.plan.num_stages == plan.num_stages), key=lambda p: p.plan.num_microbatches
    )
    along = [one for one in of_K if one in same_mode]
    rows = [table_row(one) for one in found.plans]
    return [
        sweeps.heatmap(same_mode, metric) if same_mode else NOTHING,
        sweeps.time_memory(found.plans, plan.memory_limit) if found.plans else NOTHING,
        sweeps.by_bandwidth(BANDWIDTHS, found.links) if found.links else NOTHING,
        sweeps.bubble_by_microbatches(along) if along else NOTHING,
        sweeps.memory_by_microbatches(of_K, plan.memory_limit) if of_K else NOTHING,
        rows,
        columns(rows[0] if rows else ()),
    ]


def _register_choice(app: dash.Dash, library: Library) -> None:
    @app.callback(
        Output(ids.URL, "search", allow_duplicate=True),
        *(Input(name, "clickData") for name in CHARTS),
        Input(ids.TABLE, "selectedRows"),
        Given(ids.URL, "search"),
        prevent_initial_call=True,
    )
    def choose(*given: Any) -> Any:
        """A click makes that point the plan on screen."""
        *clicks, rows, query = given
        chosen = {**dict(zip(CHARTS, clicks, strict=True)), ids.TABLE: rows}[ctx.triggered_id]
        if not chosen:
            return no_update
        state = settled(state_of(query), library)
        if ctx.triggered_id == ids.TABLE:
            row = chosen[0]
            return with_choice(state, row["K"], row["M"], row["checkpoint"]).to_query()
        point = chosen["points"][0]
        if ctx.triggered_id == ids.HEATMAP:
            return with_choice(state, point["y"], point["x"]).to_query()
        if ctx.triggered_id == ids.BY_BANDWIDTH:
            plan = current(state, library).plan
            bandwidth = float(point["x"]) * 1e9
            return knobs.turned(state, plan, ids.BANDWIDTH, math.log10(bandwidth)).to_query()
        if ctx.triggered_id == ids.FRONT:
            return with_choice(state, *point["customdata"]).to_query() if "customdata" in point else no_update
        K = current(state, library).plan.num_stages
        mode = None
        if ctx.triggered_id == ids.MEMORY_BY_M:
            modes = ("never", "except_last", "always")
            if point["curveNumber"] >= len(modes):  # the limit's line
                return no_update
            mode = modes[point["curveNumber"]]
        return with_choice(state, K, point["x"], mode).to_query()


# --- the search ----------------------------------------------------------------------------------------------------


def _register_search(app: dash.Dash, library: Library, tasks: Tasks) -> None:
    @app.callback(
        Output(ids.ADVICE, "children"),
        Output(ids.SEARCH_TICK, "disabled"),
        Input(ids.RECOMMEND, "n_clicks"),
        Input(ids.SEARCH_TICK, "n_intervals"),
        _SPACE_QUERY,
        Given(ids.TOKEN, "data"),
        prevent_initial_call=True,
    )
    def recommend(clicks: int | None, _ticks: int, query: str | None, token: str) -> tuple[Any, Any]:
        """Search when asked to. A search under way follows the knobs; one that is done is gone once they are turned."""
        if not clicks:
            return no_update, no_update
        state = state_of(query)
        key, last = (clicks, cluster_of(state)), tasks.known(token, "search")
        if last is not None and last.ended.is_set() and last.key[0] == clicks and last.key != key:
            return dmc.Text("The scenario has changed since: search again.", size="sm", c="dimmed", mt="xs"), True
        task = tasks.ask(token, "search", key, lambda task: advise(open_space(state, library), task.advance))
        if not task.ended.is_set():
            text = f"Searching: {task.done:.0f} questions answered, {task.seconds:.1f} s"
            return progress(text, None), False
        try:
            return _advice(task.value(), state, library), True
        except SupersededError:
            return no_update, no_update
        except InputError as error:
            return problem_list(error.problems), True


def _advice(advice: Advice, state: State, library: Library) -> list[Any]:
    chosen = with_plan(state, advice.recommended.plan, library)
    sentences = [advice.reason, advice.naive_sentence]
    link = dcc.Link("take this plan", href=chosen.to_query(), id="take-advice")
    return [*(dmc.Text(text, mt="xs") for text in sentences if text), link]
