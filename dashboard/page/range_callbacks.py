"""Callbacks of knobs while they are dragged, and of the curves beneath them."""

import json
from typing import Any

import dash
from dash import Input, Output, no_update
from dash import State as Given

from dashboard.jobs.tasks import Task, Tasks
from dashboard.page import controls, ids, knobs
from dashboard.page.callbacks import state_of, timeline_of
from dashboard.page.cards import once_more
from dashboard.page.first_screen import tiles
from dashboard.page.moves import limit_sentence
from dashboard.page.ranges import drawing, ranges
from dashboard.page.state import Library, current
from gpipe_sim.base.files import InputError

_READINGS = tuple(f"{knob}-shown" for knob in (ids.BANDWIDTH, ids.LATENCY, ids.JITTER))

_SHOW: Any = """(preview, query) => {
    window.answered();
    const keep = dash_clientside.no_update, over = preview && preview.over === query;
    return over ? preview.shown.map(value => value ?? keep) : Array(NUMBER).fill(keep);
}"""
"""What was asked of another address is no longer of interest."""


def register(app: dash.Dash, library: Library, tasks: Tasks) -> None:
    """Both of them."""
    _register_preview(app, library, tasks)
    _register_ranges(app, library, tasks)


def _register_preview(app: dash.Dash, library: Library, tasks: Tasks) -> None:
    shown = (
        Output(ids.GANTT, "data-timeline", allow_duplicate=True),
        Output(ids.NUMBERS, "children", allow_duplicate=True),
        Output(ids.VERDICT, "children", allow_duplicate=True),
        *(Output(name, "children", allow_duplicate=True) for name in _READINGS),
    )

    @app.callback(
        Output(ids.PREVIEW, "data"),
        Input(ids.DRAGGED, "data"),
        Given(ids.URL, "search"),
        Given(ids.TABS, "value"),
        Given(ids.TOKEN, "data"),
        prevent_initial_call=True,
    )
    def preview(dragged: dict[str, Any], query: str | None, tab: str, token: str) -> Any:
        """What the plan on screen would come to with a knob at the value under the pointer."""
        tasks.leave(token, ids.MOVES, ids.RANGES)
        state = state_of(query)
        try:
            here = current(state, library)
            turned = controls.steered(state, library, {dragged["knob"]: dragged["value"]})
            there = current(turned, library, token)
        except InputError:
            return {"over": None}
        drawn = timeline_of(turned, library) if tab == ids.PLAN_TAB else None
        numbers = [drawn, tiles(there, here), limit_sentence(there), *knobs.readings(there.plan)]
        return {"over": query, "shown": numbers}

    app.clientside_callback(  # type: ignore[no-untyped-call]
        _SHOW.replace("NUMBER", str(len(shown))),
        *shown,
        Input(ids.PREVIEW, "data"),
        Given(ids.URL, "search"),
        prevent_initial_call=True,
    )


def _register_ranges(app: dash.Dash, library: Library, tasks: Tasks) -> None:
    @app.callback(
        Output(ids.RANGES, "data-ranges"),
        Output(ids.RANGES_TICK, "max_intervals"),
        Input(ids.HISTORY, "data"),
        Input(ids.RANGES_TICK, "n_intervals"),
        Given(ids.TOKEN, "data"),
        prevent_initial_call=True,
    )
    def draw(history: list[str], ticks: int | None, token: str) -> tuple[str, Any]:
        """A curve beneath each knob, once there is nothing else to do for this page."""
        state = state_of(history[-1])

        def work(task: Task) -> dict[str, Any]:
            moves = tasks.known(token, ids.MOVES)
            while moves is not None and not moves.ended.wait(0.05):
                task.advance(0)
            shown = knobs.shown(current(state, library).plan)
            found: dict[str, Any] = {}
            for knob, curve in ranges(state, library, task):
                found = task.result = found | {knob: drawing(knob, curve, shown[knob])}
            return found

        task = tasks.ask(token, ids.RANGES, state.question, work, patience_s=1.0)
        try:
            more = not task.has_result
            found = task.result or {} if more else task.value()
        except InputError:
            more, found = False, {}
        return json.dumps({"curves": found, "more": more}), once_more(ticks) if more else no_update
