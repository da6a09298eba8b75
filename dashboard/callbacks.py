"""Thin callbacks: from the address to what is shown, and from controls and clicks back to the address."""

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import dash
import dash_mantine_components as dmc
import plotly.graph_objects as go
from dash import Input, Output, ctx, html, no_update
from dash import State as Given

from dashboard import controls, figures, form, ids, knobs
from dashboard.layout import DEFAULT
from dashboard.report import assumptions, key_numbers
from dashboard.state import Library, State, command, current, on_screen, points, settled, text_of
from dashboard.style import NOTHING
from gpipe_sim.explain import critical_path
from gpipe_sim.files import InputError, Problem

_NUMBERS = (ids.STAGES, ids.MICROBATCHES, ids.BATCH, ids.DEVICE)
_SEGMENTS = (ids.CHECKPOINT, ids.RECOMPUTE, ids.SCHEDULE)


def register(app: dash.Dash, library: Library) -> None:
    """Those of the address, the controls, the plan on screen and the scenario's text."""
    _register_browser(app)
    _register_state(app, library)
    _register_plan(app, library)
    _register_text(app, library)


def state_of(query: str | None) -> State:
    """The state of the page's address."""
    return State.from_query(query, DEFAULT)


def problem_list(problems: Sequence[Problem]) -> Any:
    """Mistakes, as the command line words them."""
    if not problems:
        return None
    lines = [html.Div(str(problem)) for problem in problems]
    return dmc.Alert(lines, title="This cannot be planned", color="orange", mb="md")


# --- what the browser does by itself ---------------------------------------------------------------------------------


_FOLLOW_HASH = """(hash, tab) => {
    const keep = dash_clientside.no_update, named = (hash || '').slice(1);
    if (dash_clientside.callback_context.triggered_id === 'tabs') return [keep, tab === 'plan' ? '' : '#' + tab];
    return [TABS.includes(named) ? named : keep, keep];
}"""


def _register_browser(app: dash.Dash) -> None:
    """The colour scheme, the tab that the address names, and what each tab is told of the address while it is seen."""
    browser = app.clientside_callback
    scheme = Output(ids.PROVIDER, "forceColorScheme")
    browser("s => s === 'auto' ? null : s", scheme, Input(ids.THEME, "value"))  # type: ignore[no-untyped-call]
    browser(  # type: ignore[no-untyped-call]
        _FOLLOW_HASH.replace("TABS", json.dumps(ids.TABS_ALL)),
        Output(ids.TABS, "value"),
        Output(ids.URL, "hash"),
        Input(ids.URL, "hash"),
        Input(ids.TABS, "value"),
    )
    browser(  # type: ignore[no-untyped-call]
        "() => { document.getElementById('main').focus(); return dash_clientside.no_update; }",
        Output(ids.SKIP, "title"),
        Input(ids.SKIP, "n_clicks"),
        prevent_initial_call=True,
    )
    for tab in (ids.SPACE_TAB, ids.PINNED_TAB, ids.SCENARIO_TAB):
        browser(  # type: ignore[no-untyped-call]
            f"(query, tab, known) => tab === '{tab}' && query !== known ? query : dash_clientside.no_update",
            Output(ids.query_of(tab), "data"),
            Input(ids.URL, "search"),
            Input(ids.TABS, "value"),
            Given(ids.query_of(tab), "data"),
        )


# --- the address and the controls ------------------------------------------------------------------------------------


def _register_state(app: dash.Dash, library: Library) -> None:
    @app.callback(
        Output(ids.URL, "search"),
        Output(ids.SHOWN, "data"),
        Output(ids.GANTT, "figure"),
        Output(ids.DRAWN, "data"),
        *(Output(name, value) for name, value in controls.CONTROLS.items()),
        Input(ids.URL, "search"),
        Input(ids.TABS, "value"),
        *(Input(name, value) for name, value in controls.CONTROLS.items()),
        Given(ids.SHOWN, "data"),
        Given(ids.DRAWN, "data"),
    )
    def follow(query: str | None, tab: str, *given: Any) -> list[Any]:
        """A turned knob changes the address; the address sets the knobs. One callback, since each causes the other.

        It also draws what a person looks at while turning: one request from a knob to the timeline.
        """
        *found, last_shown, last_drawn = given
        values = dict(zip(controls.CONTROLS, found, strict=True))
        turned = controls.turned_since(values, last_shown)
        state = controls.steered(state_of(query), library, turned)
        wanted = values | controls.shown(state, library)
        changes = [no_update if wanted[name] == values[name] else wanted[name] for name in controls.CONTROLS]
        address = state.to_query()
        chart: list[Any] = [no_update, no_update]
        if tab == ids.PLAN_TAB and address != last_drawn:
            chart = [_timeline(state, library), address]
        return [address if turned else no_update, wanted, *chart, *changes]


def _timeline(state: State, library: Library) -> go.Figure:
    try:
        prediction = current(state, library)
    except InputError:
        return NOTHING
    plan, step = prediction.plan, prediction.step
    return figures.gantt(step, critical_path(plan, step) if state.critical else None)


# --- one plan --------------------------------------------------------------------------------------------------------


def _register_plan(app: dash.Dash, library: Library) -> None:
    @app.callback(
        Output(ids.NUMBERS, "children"),
        Output(ids.VERDICT, "children"),
        Output(ids.PROBLEMS, "children"),
        Output(ids.ASSUMPTIONS, "children"),
        Output(ids.COMMANDS, "children"),
        Output(ids.COPY, "value"),
        *(Output(f"{knob}-shown", "children") for knob in (ids.BANDWIDTH, ids.LATENCY, ids.JITTER)),
        *(Output(knob, "error") for knob in _NUMBERS),
        *(Output(f"{knob}-error", "children") for knob in _SEGMENTS),
        *(Output(name, "error") for name in form.FIELDS),
        Input(ids.URL, "search"),
    )
    def judge(query: str | None) -> list[Any]:
        state = state_of(query)
        try:
            prediction = current(state, library)
        except InputError as error:
            return [no_update, "", problem_list(error.problems), *(no_update for _ in range(6)), *_beside(error)]
        numbers = [_number(*entry) for entry in key_numbers(prediction)]
        told = html.Ul([html.Li(line) for line in assumptions([prediction])])
        exact = settled(state, library)
        commands = "\n".join(
            [
                command(exact, library, "simulate"),
                command(exact, library, "plan", "--out plan.yaml"),
                "gpipe run plan.yaml",
            ]
        )
        readings = knobs.readings(prediction.plan)
        return [numbers, prediction.verdict, None, told, commands, commands, *readings, *_beside(None)]

    @app.callback(
        *(Output(name, "figure") for name in (ids.MEMORY, ids.MEMORY_PARTS, ids.WATERFALL, ids.UTILIZATION)),
        Input(ids.DRAWN, "data"),
        prevent_initial_call=True,
    )
    def draw_others(query: str | None) -> list[Any]:
        """They follow once the timeline is there."""
        try:
            prediction = current(state_of(query), library)
        except InputError:
            return [NOTHING] * 4
        plan, step = prediction.plan, prediction.step
        return [
            figures.memory_over_time(step, plan.memory_limit),
            figures.memory_parts(step, plan.memory_limit),
            figures.waterfall(prediction.breakdown_s),
            figures.utilization(step, prediction.utilization),
        ]


def _beside(error: InputError | None) -> list[str | None]:
    """The messages beside knobs and fields."""
    problems = error.problems if error else []
    wrong = {problem.field: problem.message for problem in problems}
    told = form.told(problems)
    return [wrong.get(knobs.FIELDS[knob]) for knob in (*_NUMBERS, *_SEGMENTS)] + [
        told.get(name) for name in form.FIELDS
    ]


def _number(name: str, value: str, note: str, kind: str) -> html.Div:
    color = {"good": "teal", "bad": "orange"}.get(kind, "dimmed")
    return html.Div(
        [
            dmc.Text(name, size="xs", c="dimmed"),
            dmc.Text(value, size="xl", fw=600, id=f"number-{name.replace(' ', '-')}"),
            dmc.Text(note, size="xs", c=color),
        ]
    )


# --- the scenario's text ---------------------------------------------------------------------------------------------


def _register_text(app: dash.Dash, library: Library) -> None:
    @app.callback(
        Output(ids.EDITOR, "value"),
        Output(ids.EDITED, "data"),
        Output(ids.FORM_MODEL, "hidden"),
        Output(ids.FORM_OTHER_MODEL, "children"),
        Input(ids.query_of(ids.SCENARIO_TAB), "data"),
        Given(ids.EDITOR, "value"),
        Given(ids.EDITED, "data"),
        prevent_initial_call=True,
    )
    def show_text(query: str | None, typed: str | None, last: dict[str, str] | None) -> tuple[Any, ...]:
        """The text of the scenario on screen; what somebody has typed and not yet applied is left alone."""
        state = state_of(query)
        try:
            text, model = text_of(state, library), on_screen(state, library).data.get("model")
        except InputError:
            return (no_update,) * 4
        kind = model.get("kind") if isinstance(model, dict) else None
        about = "" if kind == "transformer" else f"A model of kind {kind} has no form: it is edited in the text."
        source = _source(state)
        unsaved = last is not None and source == last["source"] and typed not in (last["text"], text)
        if unsaved:
            return no_update, no_update, kind != "transformer", about
        changed = no_update if typed == text else text
        return changed, {"source": source, "text": text}, kind != "transformer", about

    @app.callback(
        Output(ids.URL, "search", allow_duplicate=True),
        Output(ids.EDITOR_PROBLEMS, "children"),
        Output(ids.EDITED, "data", allow_duplicate=True),
        Input(ids.EDIT_APPLY, "n_clicks"),
        Input(ids.UPLOAD, "contents"),
        Given(ids.EDITOR, "value"),
        Given(ids.URL, "search"),
        prevent_initial_call=True,
    )
    def take_text(_: int, uploaded: str | None, edited: str | None, query: str | None) -> tuple[Any, ...]:
        """A scenario from the browser; one that is wrong is told beside its text and changes nothing."""
        own = ctx.triggered_id != ids.UPLOAD
        try:
            text = edited or "" if own else _decoded(uploaded)
            state = State(text=text, pins=state_of(query).pins)
            points(state, library)
        except InputError as error:
            return no_update, problem_list(error.problems), no_update
        return state.to_query(), None, {"source": _source(state), "text": text} if own else no_update


def _source(state: State) -> str:
    """What tells one scenario from another."""
    return replace(state.question, settings={}).to_query()


def _decoded(contents: str | None) -> str:
    try:
        return base64.b64decode((contents or "").partition(",")[2]).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise InputError([Problem("upload", "", "is no text, expected a scenario as YAML")]) from error
