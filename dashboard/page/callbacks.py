"""Thin callbacks: from the address to what is shown, and from controls and clicks back to the address."""

import base64
import binascii
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import dash
import dash_mantine_components as dmc
from dash import Input, Output, ctx, html, no_update
from dash import State as Given

from dashboard.charts import one_step as figures
from dashboard.charts.style import NOTHING
from dashboard.charts.timeline import timeline_data
from dashboard.jobs.tasks import Tasks
from dashboard.page import controls, form, ids, knobs
from dashboard.page.cards import once_more
from dashboard.page.first_screen import about, move_cards, tiles, trying
from dashboard.page.layout import DEFAULT
from dashboard.page.moves import limit_sentence, what_next
from dashboard.page.state import Library, State, command, current, is_same, on_screen, points, settled, text_of
from dashboard.report import assumptions
from gpipe_sim.base.files import InputError, Problem
from gpipe_sim.base.units import format_seconds
from gpipe_sim.explain.predict import Prediction
from gpipe_sim.explain.waterfall import critical_path
from gpipe_sim.step.step import Step

_INPUTS = (
    ids.RANKS,
    ids.STAGES_PER_RANK,
    ids.MICROBATCHES,
    ids.BATCH,
    ids.SCHEDULE,
    ids.REPLICAS,
    ids.TENSOR,
    ids.DEVICE,
)
"""Knobs that show what is wrong with them by themselves."""
_SEGMENTS = (ids.CHECKPOINT, ids.RECOMPUTE, ids.SHARD)


def register(app: dash.Dash, library: Library, tasks: Tasks) -> None:
    """Those of the address, the controls, the plan on screen and the scenario's text."""
    _register_browser(app)
    _register_state(app, library, tasks)
    _register_plan(app, library, tasks)
    _register_text(app, library)


def state_of(query: str | None) -> State:
    """The state of the page's address."""
    return State.from_query(query, DEFAULT)


def problem_list(problems: Sequence[Problem], title: str = "This cannot be planned") -> Any:
    """Mistakes, in the words of the page."""
    if not problems:
        return None
    return dmc.Alert([html.Div(in_words(problem)) for problem in problems], title=title, color="orange", mb="md")


def in_words(problem: Problem) -> str:
    """A control by its name on the page, a line of the text by its number, anything else by its field."""
    named = {field: knobs.LABELS[knob] for knob, field in knobs.FIELDS.items()}
    named = {field.path: field.label for field in form.FIELDS.values()} | named
    what = named.get(problem.field, problem.field)
    line = f"line {problem.line}: " if problem.line else ""
    return f"{line}{what}: {problem.message}" if what else f"{line}{problem.message}"


# --- what the browser does by itself ---------------------------------------------------------------------------------


_FOLLOW_HASH = """(hash, tab, run) => {
    const keep = dash_clientside.no_update, [named, opened] = (hash || '').slice(1).split('/');
    if (['tabs', 'run-opened'].includes(dash_clientside.callback_context.triggered_id)) {
        const address = tab === 'plan' ? '' : tab === 'runs' && run ? `#runs/${run}` : '#' + tab;
        return [keep, address === (hash || '') ? keep : address, keep];
    }
    return [document.querySelector(`[role=tab][id$='tab-${CSS.escape(named)}']`) ? named : keep, keep, opened || keep];
}"""
"""The address names the tab and, on that of runs, the run that is opened."""


_TELL = """async (query, drawn, tab, clicks, past, others, pins, searched, ...known) => {
    await new Promise(go => setTimeout(go, 20));
    const keep = dash_clientside.no_update, now = query || '', told = known.map(() => keep), place = TABS.indexOf(tab);
    const ofTray = ([key]) => ['a', 'b', 'c', 'd', 'critical'].includes(key);
    const aside = '?' + new URLSearchParams([...new URLSearchParams(now)].filter(ofTray));
    const search = clicks ? `${clicks} ${now}` : null;
    if (place >= 0 && known[place] !== query) told[place] = query;
    let history = keep;
    past = past || [];
    if (past[past.length - 1] !== now)
        history = past[past.length - 2] === now ? past.slice(0, -1) : [...past, now].slice(-50);
    return [history, history === keep ? keep : history.length < 2, drawn === others ? keep : drawn,
        aside === pins ? keep : aside, search === searched ? keep : search, ...told];
}"""
"""Everybody who depends on the address is told of it, and only of what concerns them, once the timeline is painted.

The history has the addresses that were on screen, oldest first; going back to the last but one forgets the last. The
tray depends on the pins, the search on having been asked for, and some tabs on being looked at."""


def _register_browser(app: dash.Dash) -> None:
    """The colour scheme, the tab that the address names, and what each tab is told of the address while it is seen."""
    browser = app.clientside_callback
    scheme = Output(ids.PROVIDER, "forceColorScheme")
    browser("s => s === 'auto' ? undefined : s", scheme, Input(ids.THEME, "value"))  # type: ignore[no-untyped-call]
    browser(  # type: ignore[no-untyped-call]
        _FOLLOW_HASH,
        Output(ids.TABS, "value"),
        Output(ids.URL, "hash"),
        Output(ids.RUN_OPENED, "data"),
        Input(ids.URL, "hash"),
        Input(ids.TABS, "value"),
        Input(ids.RUN_OPENED, "data"),
    )
    browser(  # type: ignore[no-untyped-call]
        "() => { document.getElementById('main').focus(); return dash_clientside.no_update; }",
        Output(ids.SKIP, "title"),
        Input(ids.SKIP, "n_clicks"),
        prevent_initial_call=True,
    )
    browser(  # type: ignore[no-untyped-call]
        "(opened, navbar) => ({...navbar, collapsed: {mobile: !opened}})",
        Output(ids.SHELL, "navbar"),
        Input(ids.MENU, "opened"),
        Given(ids.SHELL, "navbar"),
        prevent_initial_call=True,
    )
    told = (ids.HISTORY, ids.OTHERS, ids.PINS_SHOWN, ids.SEARCHED, *map(ids.query_of, ids.QUERY_TABS))
    browser(  # type: ignore[no-untyped-call]
        _TELL.replace("TABS", json.dumps(ids.QUERY_TABS)),
        Output(ids.HISTORY, "data"),
        Output(ids.UNDO, "disabled"),
        *(Output(name, "data") for name in told[1:]),
        Input(ids.URL, "search"),
        Input(ids.DRAWN, "data"),
        Input(ids.TABS, "value"),
        Input(ids.RECOMMEND, "n_clicks"),
        *(Given(name, "data") for name in told),
    )
    browser(  # type: ignore[no-untyped-call]
        "(undos, past) => past && past.length > 1 ? past[past.length - 2] : dash_clientside.no_update",
        Output(ids.URL, "search", allow_duplicate=True),
        Input(ids.UNDO, "n_clicks"),
        Given(ids.HISTORY, "data"),
        prevent_initial_call=True,
    )


# --- the address and the controls ------------------------------------------------------------------------------------


def _register_state(app: dash.Dash, library: Library, tasks: Tasks) -> None:
    @app.callback(
        Output(ids.URL, "search"),
        Output(ids.SHOWN, "data"),
        Output(ids.GANTT, "data-timeline"),
        Output(ids.DRAWN, "data"),
        *(Output(name, value) for name, value in controls.KNOBS.items()),
        Input(ids.URL, "search"),
        Input(ids.TABS, "value"),
        *(Input(name, value) for name, value in controls.KNOBS.items()),
        Given(ids.SHOWN, "data"),
        Given(ids.DRAWN, "data"),
        Given(ids.TOKEN, "data"),
    )
    def follow(query: str | None, tab: str, *given: Any) -> list[Any]:
        """A turned knob changes the address; the address sets the knobs. One callback, since each causes the other.

        It also draws what a person looks at while turning: one request from a knob to the timeline.
        """
        *found, last_shown, last_drawn, token = given
        values = dict(zip(controls.KNOBS, found, strict=True))
        turned = controls.turned_since(values, last_shown)
        if turned:
            tasks.leave(token, ids.MOVES, ids.RANGES)
        state = controls.steered(state_of(query), library, turned)
        with suppress(InputError):
            current(state, library, token)
        address = state.to_query()
        chart: list[Any] = [no_update, no_update]
        if tab == ids.PLAN_TAB and address != last_drawn:
            chart = [timeline_of(state, library), address]
        return [address if turned else no_update, *_showing(state, library, values, chart)]

    @app.callback(
        Output(ids.URL, "search", allow_duplicate=True),
        Output(ids.FORM_SHOWN, "data"),
        *(Output(name, value) for name, value in controls.FORM.items()),
        Input(ids.query_of(ids.SCENARIO_TAB), "data"),
        *(Input(name, value) for name, value in controls.FORM.items()),
        Given(ids.URL, "search"),
        Given(ids.FORM_SHOWN, "data"),
        prevent_initial_call=True,
    )
    def fill_in(seen: str | None, *given: Any) -> list[Any]:
        """The same for the form."""
        *found, query, last_shown = given
        values = dict(zip(controls.FORM, found, strict=True))
        turned = controls.turned_since(values, last_shown)
        state = controls.steered(state_of(query), library, turned)
        if seen is None:  # the tab has not been opened yet
            return [no_update] * (2 + len(values))
        return [state.to_query() if turned else no_update, *_showing(state, library, values, [])]


def _showing(state: State, library: Library, values: controls.Values, more: list[Any]) -> list[Any]:
    """What these controls should show, and those values of them that are others than the page has."""
    shown = controls.shown(state, library)
    wanted = {name: shown.get(name, value) for name, value in values.items()}
    return [wanted, *more, *(no_update if wanted[name] == value else wanted[name] for name, value in values.items())]


def timeline_of(state: State, library: Library) -> str:
    """What the page's timeline draws of the plan on screen; nothing where there is none."""
    try:
        prediction = current(state, library)
    except InputError:
        return ""
    plan, step = prediction.plan, prediction.step
    return timeline_data(
        plan, step, critical_path(plan, step) if state.critical else None, ghost=_ghost(state, library)
    )


def _ghost(state: State, library: Library) -> tuple[str, Step] | None:
    """The first pinned plan that is not on screen, to compare with."""
    here = current(state, library)
    for name, pin in state.pins.items():
        if (found := _known(state_of(pin), library)) is not None and not is_same(found, here):
            return f"{name.upper()}, {format_seconds(found.step_time_s)}", found.step
    return None


# --- one plan --------------------------------------------------------------------------------------------------------


def _register_plan(app: dash.Dash, library: Library, tasks: Tasks) -> None:
    @app.callback(
        Output(ids.ABOUT, "children"),
        Output(ids.NUMBERS, "children"),
        Output(ids.VERDICT, "children"),
        Output(ids.PROBLEMS, "children"),
        Output(ids.ASSUMPTIONS, "children"),
        Output(ids.COMMANDS, "children"),
        Output(ids.COPY, "value"),
        *(Output(f"{knob}-shown", "children") for knob in (ids.BANDWIDTH, ids.LATENCY, ids.JITTER)),
        *(Output(knob, "error") for knob in _INPUTS),
        *(Output(f"{knob}-error", "children") for knob in _SEGMENTS),
        *(Output(name, "error") for name in form.FIELDS),
        Output(ids.WRONG, "data"),
        Input(ids.HISTORY, "data"),
        Given(ids.WRONG, "data"),
        Given(ids.TOKEN, "data"),
        prevent_initial_call=True,
    )
    def judge(history: list[str], wrong: bool | None, token: str) -> list[Any]:
        """The figures of the plan on screen; where there is none, why, and no figures of another plan."""
        state = state_of(history[-1])
        try:
            prediction = current(state, library, token)
        except InputError as error:
            nothing = dmc.Text("No plan: see what is wrong above.", size="sm", className="quiet")
            return [
                None,
                nothing,
                "",
                problem_list(error.problems),
                None,
                *(no_update for _ in range(5)),
                *_beside(error),
                True,
            ]
        told = html.Ul([html.Li(line) for line in assumptions([prediction])])
        exact = settled(state, library)
        commands = "\n".join(
            [
                command(exact, library, "simulate"),
                command(exact, library, "plan", "--out plan.yaml"),
                "gpipe run plan.yaml",
            ]
        )
        numbers = tiles(prediction, _known(state_of(history[-2]), library) if len(history) > 1 else None)
        beside = _beside(None) if wrong else [no_update] * len(_beside(None))
        problems = None if wrong else no_update
        shown = [about(prediction), numbers, limit_sentence(prediction), problems, told, commands, commands]
        return [*shown, *knobs.readings(prediction.plan), *beside, False if wrong else no_update]

    @app.callback(
        Output(ids.MOVES, "children"),
        Output(ids.MOVES_TICK, "max_intervals"),
        Input(ids.HISTORY, "data"),
        Input(ids.MOVES_TICK, "n_intervals"),
        Given(ids.TOKEN, "data"),
        prevent_initial_call=True,
    )
    def advise(history: list[str], ticks: int | None, token: str) -> tuple[Any, Any]:
        """What to change next, as it is found out."""
        state = state_of(history[-1])
        task = tasks.ask(token, ids.MOVES, state.question, lambda task: what_next(state, library, task))
        if not task.has_result:
            return trying(task.done, task.total), once_more(ticks)
        try:
            return move_cards(task.value()), no_update
        except InputError:  # which is told of the plan itself
            return None, no_update

    @app.callback(
        *(Output(name, "figure") for name in (ids.MEMORY, ids.MEMORY_PARTS, ids.WATERFALL, ids.UTILIZATION)),
        Input(ids.OTHERS, "data"),
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
    return [wrong.get(knobs.FIELDS[knob]) for knob in (*_INPUTS, *_SEGMENTS)] + [told.get(name) for name in form.FIELDS]


def _known(state: State, library: Library) -> Prediction | None:
    """The plan of a state that was on screen before, if there was one."""
    try:
        return current(state, library)
    except InputError:
        return None


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
