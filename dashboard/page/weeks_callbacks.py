"""Callbacks of the tab of a whole training: days, goodput and money of the plan on screen."""

from dataclasses import replace
from typing import Any

import dash
import dash_mantine_components as dmc
from dash import Input, Output, no_update
from dash import State as Given

from dashboard.charts import campaigns
from dashboard.charts.style import NOTHING
from dashboard.jobs.tasks import Task, Tasks
from dashboard.page import ids
from dashboard.page.callbacks import problem_list, state_of
from dashboard.page.cards import once_more, progress
from dashboard.page.state import Library, State, current
from gpipe_sim.base.files import InputError, Problem
from gpipe_sim.base.units import parse_tokens
from gpipe_sim.campaign.campaign import Campaign, headline, run_campaign
from gpipe_sim.show.campaign import amount

_SEEDS = 200
"""Trainings that the page draws at most: `gpipe campaign` draws all that the scenario asks for."""


def register(app: dash.Dash, library: Library, tasks: Tasks) -> None:
    """Its only callback: a training is drawn aside, and told of meanwhile."""

    @app.callback(
        Output(ids.WEEKS_TOLD, "children"),
        *(Output(name, "figure") for name in (ids.WEEKS_LOSSES, ids.WEEKS_INTERVALS, ids.WEEKS_DAYS)),
        Output(ids.WEEKS_TICK, "max_intervals"),
        Input(ids.query_of(ids.WEEKS_TAB), "data"),
        Input(ids.WEEKS_TOKENS, "value"),
        Input(ids.WEEKS_TICK, "n_intervals"),
        Given(ids.TOKEN, "data"),
        prevent_initial_call=True,
    )
    def draw(query: str | None, tokens: str, ticks: int | None, token: str) -> list[Any]:
        if query is None:  # the tab has not been opened yet
            return [no_update] * 5
        state = state_of(query)
        task = tasks.ask(token, "weeks", (state.question, tokens), lambda task: train(state, library, tokens, task))
        if not task.ended.is_set():
            return [progress("Training, with many kinds of luck", None), *[no_update] * 3, once_more(ticks)]
        try:
            found = task.value()
        except InputError as error:
            return [problem_list(error.problems), *[NOTHING] * 3, no_update]
        figures = [campaigns.losses_over_time(found), campaigns.goodput_by_interval(found)]
        told = [dmc.Text(sentence(found), fw=600), what_would_help(found)]
        return [told, *figures, campaigns.days_by_seed([found]), no_update]


def train(state: State, library: Library, tokens: str, task: Task | None = None) -> Campaign:
    """The training of the plan on screen."""
    try:
        wanted = parse_tokens(tokens)
    except ValueError as error:
        raise InputError([Problem("tokens", "", str(error))]) from error
    prediction = current(state, library)
    plan = prediction.plan
    spec = plan.scenario.campaign.model_copy(update={"seeds": min(plan.scenario.campaign.seeds, _SEEDS)})
    plan = replace(plan, scenario=replace(plan.scenario, campaign=spec))
    return run_campaign(plan, prediction.step_time_s, wanted, task.advance if task else None)


def sentence(found: Campaign) -> str:
    """Days, goodput and money, and what would help most."""
    money = "" if found.money is None else f", {amount(float(found.money.mean()), found.price)}"
    told = f"{found.days.mean():,.4g} days{money}, goodput {found.outcomes.goodput.mean():.1%}. {headline(found)}."
    best = max(found.worths, key=lambda worth: worth.days_saved)
    helps = f" Most would help {best.change}: {best.days_saved:,.3g} days." if best.days_saved > 0 else ""
    return told + helps


def what_would_help(found: Campaign) -> dmc.Table:
    """What each single change would bring, as the report has it."""
    rows = [
        [
            worth.change,
            f"{worth.days_saved:+,.3g}",
            "" if worth.money_saved is None else amount(worth.money_saved, found.price),
        ]
        for worth in found.worths
    ]
    return dmc.Table(
        data={"head": ["what would help", "days saved", "money saved"], "body": rows}, id=ids.WEEKS_WORTHS, maw=640
    )
