"""Callbacks of what lies around the plan on screen: the space of plans, and the search for the best."""

import math
from typing import Any

import dash
import dash_mantine_components as dmc
from dash import Input, Output, ctx, dcc, no_update
from dash import State as Given

from dashboard.charts import many_plans as sweeps
from dashboard.charts.style import NOTHING
from dashboard.jobs.tasks import Tasks
from dashboard.page import ids, knobs
from dashboard.page.callbacks import problem_list, state_of
from dashboard.page.cards import once_more, progress
from dashboard.page.neighbourhood import BANDWIDTHS, Around, around, table_row, with_choice
from dashboard.page.state import LARGE_CELLS, Library, State, cluster_of, current, open_space, settled, with_plan
from gpipe_sim.base.files import InputError
from gpipe_sim.search.advise import Advice, advise

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
        Output(ids.SPACE_PROGRESS, "children"),
        Output(ids.SPACE_TICK, "max_intervals"),
        _SPACE_QUERY,
        Input(ids.METRIC, "value"),
        Input(ids.SPACE_TICK, "n_intervals"),
        Given(ids.TOKEN, "data"),
        prevent_initial_call=True,
    )
    def draw(query: str | None, metric: sweeps.Metric, ticks: int | None, token: str) -> list[Any]:
        if query is None:  # the tab has not been opened yet
            return [no_update] * 8
        state = state_of(query)
        task = tasks.ask(token, "space", state.question, lambda task: around(state, library, task))
        if not task.ended.is_set():
            share = f"{task.done:.0f} of {task.total} steps" if task.total else "beginning"
            percent = 100 * task.done / task.total if task.total else 0.0
            told = progress(f"Predicting the plans around this one: {share}", percent)
            return [no_update] * 6 + [told, once_more(ticks)]
        try:
            return [*space_figures(task.value(), metric), left_out(task.value()), no_update]
        except InputError:
            return [NOTHING] * 5 + [[], None, no_update]


def left_out(found: Around) -> Any:
    """A word where there is less to see than there could be."""
    if not found.here_is_large:
        return None
    told = f"Of plans with more than {LARGE_CELLS} stages times micro-batches only the one on screen is shown here."
    return dmc.Text(told, size="sm", c="dimmed")


def space_figures(found: Around, metric: sweeps.Metric) -> list[Any]:
    """The charts and rows of the Space tab."""
    plan = found.here.plan
    same_mode = found.like_here
    of_K = sorted(
        (one for one in found.plans if one.plan.num_ranks == plan.num_ranks), key=lambda p: p.plan.num_microbatches
    )
    along = [one for one in of_K if one in same_mode]
    return [
        sweeps.facets(found.plans, metric, found.here) if found.plans else NOTHING,
        sweeps.time_memory(found.plans, plan.memory_limit, found.here) if found.plans else NOTHING,
        sweeps.by_bandwidth(BANDWIDTHS, found.links) if found.links else NOTHING,
        sweeps.bubble_by_microbatches(along) if along else NOTHING,
        sweeps.memory_by_microbatches(of_K, plan.memory_limit) if of_K else NOTHING,
        [table_row(one) for one in found.plans],
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
        plan = current(state, library).plan
        if ctx.triggered_id == ids.TABLE:
            row = chosen[0]
            return with_choice(state, plan, row["K"], row["M"], row["checkpoint"]).to_query()
        point = chosen["points"][0]
        if ctx.triggered_id == ids.HEATMAP:
            return with_choice(state, plan, point["y"], point["x"], point["customdata"]).to_query()
        if ctx.triggered_id == ids.BY_BANDWIDTH:
            bandwidth = float(point["x"]) * 1e9
            return knobs.turned(state, plan, ids.BANDWIDTH, math.log10(bandwidth)).to_query()
        if ctx.triggered_id == ids.FRONT:
            return with_choice(state, plan, *point["customdata"]).to_query() if "customdata" in point else no_update
        mode = None
        if ctx.triggered_id == ids.MEMORY_BY_M:
            if point["curveNumber"] >= len(sweeps.MODES):  # the limit's line
                return no_update
            mode = sweeps.MODES[point["curveNumber"]]
        return with_choice(state, plan, plan.num_ranks, point["x"], mode).to_query()


# --- the search ----------------------------------------------------------------------------------------------------


def _register_search(app: dash.Dash, library: Library, tasks: Tasks) -> None:
    @app.callback(
        Output(ids.ADVICE, "children"),
        Output(ids.SEARCH_TICK, "max_intervals"),
        Input(ids.SEARCHED, "data"),
        Input(ids.SEARCH_TICK, "n_intervals"),
        Given(ids.TOKEN, "data"),
        prevent_initial_call=True,
    )
    def recommend(searched: str | None, ticks: int | None, token: str) -> tuple[Any, Any]:
        """Search when asked to. A search under way follows the knobs; one that is done is gone once they are turned."""
        if not searched:
            return no_update, no_update
        clicks, _, query = searched.partition(" ")
        state = state_of(query)
        key, last = (clicks, cluster_of(state)), tasks.known(token, "search")
        if last is not None and last.ended.is_set() and last.key[0] == clicks and last.key != key:
            return dmc.Text("The scenario has changed since: search again.", size="sm", mt="xs"), no_update
        task = tasks.ask(token, "search", key, lambda task: advise(open_space(state, library), task.advance))
        if not task.ended.is_set():
            text = f"Searching: {task.done:.0f} questions answered, {task.seconds:.1f} s"
            return progress(text, None), once_more(ticks)
        try:
            return _advice(task.value(), state, library), no_update
        except InputError as error:
            return problem_list(error.problems), no_update


def _advice(advice: Advice, state: State, library: Library) -> list[Any]:
    chosen = with_plan(state, advice.recommended.plan, library)
    if chosen.question == state.question:
        sure = (
            "It is proven that none that fits is faster." if advice.is_exact else "No faster one was found that fits."
        )
        return [dmc.Text(f"This is the best plan. {sure}", mt="xs", size="sm", fw=600)]
    sentences = [advice.reason, advice.naive_sentence]
    link = dcc.Link("take this plan", href=chosen.to_query(), id="take-advice")
    return [*(dmc.Text(text, mt="xs", size="sm") for text in sentences if text), link]
