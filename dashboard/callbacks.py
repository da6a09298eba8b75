"""Thin callbacks: from the address to what is shown, and from knobs and clicks back to the address."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import dash
import dash_mantine_components as dmc
import plotly.graph_objects as go
from dash import Input, Output, ctx, html, no_update
from dash import State as Given

from dashboard import figures, ids, knobs
from dashboard.layout import DEFAULT
from dashboard.report import assumptions, key_numbers
from dashboard.state import Library, State, command, current, document_of, points, settled
from gpipe_sim.explain import critical_path
from gpipe_sim.files import InputError, Problem, yaml_text
from gpipe_sim.plan import Plan

NOTHING = go.Figure(layout={"height": 220, "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"})
"""Where there is no plan to draw."""
_NUMBERS = (ids.STAGES, ids.MICROBATCHES, ids.BATCH)
_SEGMENTS = (ids.CHECKPOINT, ids.RECOMPUTE, ids.SCHEDULE)


def register(app: dash.Dash, library: Library) -> None:
    """Those of the address, the knobs and the plan on screen."""
    _register_state(app, library)
    _register_plan(app, library)
    scheme = Output(ids.PROVIDER, "forceColorScheme")
    app.clientside_callback("s => s === 'auto' ? null : s", scheme, Input(ids.THEME, "value"))  # type: ignore[no-untyped-call]


def state_of(query: str | None) -> State:
    """The state of the page's address."""
    return State.from_query(query, DEFAULT)


def problem_list(problems: Sequence[Problem]) -> Any:
    """Mistakes, as the command line words them."""
    if not problems:
        return None
    lines = [html.Div(str(problem)) for problem in problems]
    return dmc.Alert(lines, title="This cannot be planned", color="orange", mb="md")


def _property(knob: str) -> str:
    return "checked" if knob == ids.OVERLAP else "value"


# --- the address and the knobs ---------------------------------------------------------------------------------------


def _register_state(app: dash.Dash, library: Library) -> None:
    @app.callback(
        Output(ids.URL, "search"),
        Output(ids.SCENARIO, "value"),
        *(Output(knob, _property(knob)) for knob in ids.KNOBS),
        Input(ids.URL, "search"),
        Input(ids.SCENARIO, "value"),
        *(Input(knob, _property(knob)) for knob in ids.KNOBS),
    )
    def follow(query: str | None, scenario: str | None, *values: Any) -> list[Any]:
        """A turned knob changes the address; the address sets the knobs. One callback, since each causes the other."""
        state, turned = state_of(query), ctx.triggered_id
        if turned == ids.SCENARIO and scenario:
            state = State(scenario=scenario, pins=state.pins)
        elif turned in ids.KNOBS:
            state, plan = _settled(state, library)
            state = knobs.turned(state, plan, turned, dict(zip(ids.KNOBS, values, strict=True))[turned])
        address = no_update if turned in (None, ids.URL) else state.to_query()
        try:
            shown = knobs.shown(current(state, library).plan)
        except InputError:
            return [address, state.scenario, *(no_update for _ in ids.KNOBS)]
        return [address, state.scenario, *(shown[knob] for knob in ids.KNOBS)]

    @app.callback(
        Output(ids.EDITOR, "value"),
        Output(ids.EDITED, "data"),
        Input(ids.URL, "search"),
        Given(ids.EDITED, "data"),
    )
    def show_text(query: str | None, edited: str | None) -> tuple[Any, Any]:
        """The text of another scenario; while it is the one that is being edited, the editor is left alone."""
        state = state_of(query)
        source = _source(state)
        if source == edited:
            return no_update, no_update
        try:
            return state.text or yaml_text(document_of(state, library).data), source
        except InputError:
            return no_update, no_update

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
        try:
            text = _decoded(uploaded) if ctx.triggered_id == ids.UPLOAD else edited or ""
            state = State(text=text, pins=state_of(query).pins)
            points(state, library)
        except InputError as error:
            return no_update, problem_list(error.problems), no_update
        return state.to_query(), None, no_update if ctx.triggered_id == ids.UPLOAD else _source(state)


def _source(state: State) -> str:
    """What tells one scenario from another."""
    return replace(state, settings={}, pins={}).to_query()


def _settled(state: State, library: Library) -> tuple[State, Plan | None]:
    try:
        return settled(state, library), current(state, library).plan
    except InputError:
        return state, None


def _decoded(contents: str | None) -> str:
    try:
        return base64.b64decode((contents or "").partition(",")[2]).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise InputError([Problem("upload", "", "is no text, expected a scenario as YAML")]) from error


# --- one plan --------------------------------------------------------------------------------------------------------


def _register_plan(app: dash.Dash, library: Library) -> None:
    @app.callback(
        Output(ids.NUMBERS, "children"),
        Output(ids.VERDICT, "children"),
        Output(ids.PROBLEMS, "children"),
        Output(ids.ASSUMPTIONS, "children"),
        Output(ids.COMMANDS, "children"),
        *(Output(f"{knob}-shown", "children") for knob in (ids.BANDWIDTH, ids.LATENCY, ids.JITTER)),
        *(Output(knob, "error") for knob in _NUMBERS),
        *(Output(f"{knob}-error", "children") for knob in _SEGMENTS),
        Input(ids.URL, "search"),
    )
    def judge(query: str | None) -> list[Any]:
        state = state_of(query)
        try:
            prediction = current(state, library)
        except InputError as error:
            wrong = {problem.field: problem.message for problem in error.problems}
            beside = [wrong.get(knobs.FIELDS[knob]) for knob in (*_NUMBERS, *_SEGMENTS)]
            return [no_update, "", problem_list(error.problems), *(no_update for _ in range(5)), *beside]
        numbers = [_number(*entry) for entry in key_numbers(prediction)]
        told = html.Ul([html.Li(line) for line in assumptions([prediction])])
        nothing = [None] * (len(_NUMBERS) + len(_SEGMENTS))
        exact = settled(state, library)
        commands = "\n".join(
            [
                command(exact, library, "simulate"),
                command(exact, library, "plan", "--out plan.yaml"),
                "gpipe run plan.yaml",
            ]
        )
        return [numbers, prediction.verdict, None, told, commands, *knobs.readings(prediction.plan), *nothing]

    @app.callback(
        *(Output(name, "figure") for name in (ids.GANTT, ids.MEMORY, ids.MEMORY_PARTS, ids.WATERFALL, ids.UTILIZATION)),
        Input(ids.URL, "search"),
        Input(ids.CRITICAL, "checked"),
    )
    def draw(query: str | None, critical: bool) -> list[Any]:
        try:
            prediction = current(state_of(query), library)
        except InputError:
            return [NOTHING] * 5
        plan, step = prediction.plan, prediction.step
        path = critical_path(plan, step) if critical else None
        return [
            figures.gantt(step, path),
            figures.memory_over_time(step, plan.memory_limit),
            figures.memory_parts(step, plan.memory_limit),
            figures.waterfall(prediction.breakdown_s),
            figures.utilization(step, prediction.utilization),
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
