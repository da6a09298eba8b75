"""Callbacks of the Runs tab: start and stop a run, list all of them, compare one."""

import base64
import binascii
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import dash
import dash_mantine_components as dmc
import numpy as np
from dash import Input, Output, ctx, no_update
from dash import State as Given

from dashboard.charts import comparisons
from dashboard.jobs.archive import unpack_run
from dashboard.jobs.runs import Jobs, run_directory
from dashboard.page import ids
from dashboard.page.callbacks import problem_list, state_of
from dashboard.page.cards import RUN_COLUMNS, card, columns, once_more, pair, still
from dashboard.page.state import Library, current
from gpipe_sim.base.files import InputError, Problem, write_text
from gpipe_sim.base.units import format_seconds
from gpipe_sim.runs.accuracy import recorded
from gpipe_sim.runs.compare import Comparison, compare_run
from gpipe_sim.runs.directory import RunSummary, load_run


def register(app: dash.Dash, library: Library, jobs: Jobs) -> None:
    """All of them."""
    _register_job(app, library, jobs)
    _register_list(app, jobs)


def _register_job(app: dash.Dash, library: Library, jobs: Jobs) -> None:
    @app.callback(
        Output(ids.RUN_NAME, "data"),
        Output(ids.RUN_OPENED, "data", allow_duplicate=True),
        Output(ids.RUNS_MESSAGE, "children", allow_duplicate=True),
        Input(ids.RUN_START, "n_clicks"),
        Input(ids.TABS, "value"),
        Given(ids.RUN_OPENED, "data"),
        Given(ids.URL, "search"),
        Given(ids.RUN_DEVICE, "value"),
        Given(ids.RUN_PROFILE, "checked"),
        prevent_initial_call=True,
    )
    def start(_: int, tab: str, opened: str | None, query: str | None, device: Any, profile: Any) -> tuple[Any, ...]:
        """Begin a run, or find the one that is under way, whoever began it, or that the address names."""
        running = jobs.running()
        if ctx.triggered_id == ids.TABS:
            found = running or opened
            return (found if tab == ids.RUNS_TAB and found else no_update), no_update, no_update
        if running:
            return running, running, dmc.Text(f"{running} is under way: one run at a time.", size="sm")
        try:
            if device not in ("rehearse", "cpu", "cuda"):
                raise InputError([Problem("device", "", "expected rehearse, cpu or cuda")])
            name = jobs.start(current(state_of(query), library).plan, device, profile=bool(profile))
            return name, name, None
        except InputError as error:
            return no_update, no_update, problem_list(error.problems, "This cannot be run")

    @app.callback(
        Output(ids.RUN_PROGRESS, "value"),
        Output(ids.RUN_PHASE, "children"),
        Output(ids.RUN_LOG, "children"),
        Output(ids.RUN_START, "disabled"),
        Output(ids.RUN_STOP, "disabled"),
        Output(ids.RUN_TICK, "max_intervals"),
        Output(ids.RUNS_REFRESH, "n_clicks"),
        Input(ids.RUN_NAME, "data"),
        Input(ids.RUN_TICK, "n_intervals"),
        Input(ids.RUN_STOP, "n_clicks"),
        Given(ids.RUNS_REFRESH, "n_clicks"),
    )
    def follow(name: str | None, ticks: int | None, _stops: int, refreshed: int | None) -> tuple[Any, ...]:
        """How far the run is that this page began or found; once it has ended, the list of runs is read again."""
        if not name:
            return (no_update,) * 7
        try:
            if ctx.triggered_id == ids.RUN_STOP:
                jobs.stop(name)
            progress = jobs.progress(name)
        except InputError:
            return (no_update,) * 7
        ended = progress.state != "running"
        share = 100.0 if progress.state == "finished" else 100 * progress.done / progress.total
        told = f"{name}: {progress.state}\n{progress.log or 'starting'}"
        next_tick, refresh = (no_update, (refreshed or 0) + 1) if ended else (once_more(ticks), no_update)
        buttons = (not (ended and jobs.allowed), ended or not jobs.allowed)
        return share, progress.phase, told, *buttons, next_tick, refresh


def _register_list(app: dash.Dash, jobs: Jobs) -> None:
    @app.callback(
        Output(ids.RUNS, "rowData"),
        Output(ids.RUNS, "columnDefs"),
        Output(ids.ACCURACY, "children"),
        Input(ids.TABS, "value"),
        Input(ids.RUNS_REFRESH, "n_clicks"),
        Input(ids.RUNS_MESSAGE, "children"),
        prevent_initial_call=True,
    )
    def show(tab: str, _refreshed: int | None, _message: Any) -> tuple[Any, ...]:
        if tab != "runs":
            return (no_update,) * 3
        names, found = compare_new(jobs.folder), recorded(jobs.folder)
        known = {run.name: run for run in found}
        rows = [_row(name, known.get(name)) for name in names]
        return rows, columns(RUN_COLUMNS), accuracy(found)

    @app.callback(
        Output(ids.RUNS_MESSAGE, "children"),
        Input(ids.RUNS_UPLOAD, "contents"),
        Given(ids.RUNS_UPLOAD, "filename"),
        prevent_initial_call=True,
    )
    def upload(contents: str | None, filename: str | None) -> Any:
        try:
            data = base64.b64decode((contents or "").partition(",")[2], validate=True)
            added = unpack_run(data, jobs.folder, filename or "run")
        except (InputError, binascii.Error) as error:
            problems = error.problems if isinstance(error, InputError) else [Problem("upload", "", "is no file")]
            return problem_list(problems)
        return dmc.Text(f"added {added.name}", size="sm")

    app.clientside_callback(  # type: ignore[no-untyped-call]
        "rows => rows?.length ? rows[0].run : dash_clientside.no_update",
        Output(ids.RUN_OPENED, "data", allow_duplicate=True),
        Input(ids.RUNS, "selectedRows"),
        prevent_initial_call=True,
    )

    @app.callback(
        Output(ids.RUN_COMPARISON, "children"),
        Input(ids.RUN_OPENED, "data"),
        Input(ids.RUNS, "rowData"),
        prevent_initial_call=True,
    )
    def compare(opened: str | None, _rows: list[dict[str, Any]] | None) -> Any:
        """The run that was chosen, that the address names, or that has just ended."""
        try:
            directory = run_directory(jobs.folder, opened or "")
            if not (directory / "measured.json").is_file():
                return None
            return comparison_cards(compare_run(*load_run(directory)))
        except InputError as error:
            return problem_list(error.problems) if opened else None


def compare_new(folder: Path) -> list[str]:
    """Compare every run that was not; the names of all that were measured, newest first."""
    names = [path.parent.name for path in sorted(folder.glob("[!.]*/measured.json"), reverse=True)]
    for name in names:
        if not (folder / name / "compare.json").is_file():
            with suppress(InputError, OSError):
                comparison = compare_run(*load_run(folder / name))
                write_text(folder / name / "compare.json", json.dumps(comparison.to_dict(), indent=2))
    return names


def _row(name: str, run: RunSummary | None) -> dict[str, Any]:
    """A run that cannot be read stands without its figures."""
    if run is None:
        return {"run": name}
    worst = max(run.memory_errors, key=abs) if run.memory_errors else None
    values = (
        name,
        run.device,
        run.num_stages,
        run.num_microbatches,
        run.schedule,
        round(1e3 * run.predicted_s, 2),
        round(1e3 * run.measured_s, 2),
        round(100 * run.error, 2),
        round(100 * run.bubble_error, 2),
        None if worst is None else round(100 * worst, 2),
    )
    return dict(zip(RUN_COLUMNS, values, strict=True))


def accuracy(runs: Sequence[RunSummary]) -> Any:
    """How right the predictions of all runs were."""
    if not runs:
        return dmc.Text("No run has been compared yet.", size="sm", c="dimmed")
    errors = 100 * np.abs([run.error for run in runs])
    off = f"step time off by {errors.mean():.1f} % on average, {errors.max():.1f} % at worst."
    text = f"{len(errors)} run{'s' * (len(errors) > 1)}: {off}"
    return [dmc.Text(text, size="sm", mt="xs"), still(comparisons.accuracy(runs), "accuracy-chart")]


def comparison_cards(comparison: Comparison) -> Any:
    """Predicted over measured, and where the error comes from."""
    time = comparison.to_dict()["step_time"]
    told = f"predicted {format_seconds(time['predicted_s'])}, measured {format_seconds(time['measured_s'])}"
    cards = [
        card(
            "Predicted over measured",
            f"{told}. {comparison.sentence}",
            still(comparisons.timelines(comparison), "compare-timelines"),
        ),
        pair(
            card(
                "Where the error comes from",
                "The bars sum to the error.",
                still(comparisons.attribution(comparison), "compare-attribution"),
            ),
            card(
                "Residuals",
                "Measured less predicted time of every action.",
                still(
                    comparisons.residuals(comparison.prediction.step, comparison.measured.steps), "compare-residuals"
                ),
            ),
        ),
    ]
    if comparison.measured.memory:
        memory = still(comparisons.memory(comparison), "compare-memory")
        cards.append(card("Memory over time", "Solid: predicted. Dotted: the allocator.", memory))
    return dmc.Stack([*cards, dmc.Text(comparison.measured.how, size="sm", c="dimmed")])
