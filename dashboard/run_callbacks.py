"""Callbacks of the Runs tab: start and stop a run, list all of them, compare one."""

import base64
import binascii
import json
from pathlib import Path
from typing import Any

import dash
import dash_mantine_components as dmc
import numpy as np
from dash import Input, Output, ctx, dcc, html, no_update
from dash import State as Given

from dashboard import comparisons, ids
from dashboard.archive import unpack_run
from dashboard.callbacks import problem_list, state_of
from dashboard.jobs import Jobs, run_directory
from dashboard.layout import card
from dashboard.state import Library, current
from dashboard.style import graph_config
from gpipe_sim.compare import Comparison, compare_run
from gpipe_sim.files import InputError, Problem, write_text
from gpipe_sim.runs import load_run
from gpipe_sim.units import format_seconds


def register(app: dash.Dash, library: Library, jobs: Jobs) -> None:
    """All of them."""
    _register_job(app, library, jobs)
    _register_list(app, jobs)


def _register_job(app: dash.Dash, library: Library, jobs: Jobs) -> None:
    @app.callback(
        Output(ids.RUN_NAME, "data"),
        Output(ids.RUNS_MESSAGE, "children", allow_duplicate=True),
        Input(ids.RUN_START, "n_clicks"),
        Given(ids.URL, "search"),
        Given(ids.RUN_DEVICE, "value"),
        prevent_initial_call=True,
    )
    def start(_: int, query: str | None, device: Any) -> tuple[Any, Any]:
        try:
            if device not in ("rehearse", "cpu", "cuda"):
                raise InputError([Problem("device", "", "expected rehearse, cpu or cuda")])
            return jobs.start(current(state_of(query), library).plan, device), None
        except InputError as error:
            return no_update, problem_list(error.problems)

    @app.callback(
        Output(ids.RUN_PROGRESS, "value"),
        Output(ids.RUN_LOG, "children"),
        Output(ids.RUN_STOP, "disabled"),
        Output(ids.RUN_TICK, "disabled"),
        Output(ids.RUNS_REFRESH, "n_clicks"),
        Input(ids.RUN_NAME, "data"),
        Input(ids.RUN_TICK, "n_intervals"),
        Input(ids.RUN_STOP, "n_clicks"),
        Given(ids.RUNS_REFRESH, "n_clicks"),
        prevent_initial_call=True,
    )
    def follow(name: str | None, _ticks: int, _stops: int, refreshed: int | None) -> tuple[Any, ...]:
        if not name:
            return (no_update,) * 5
        try:
            if ctx.triggered_id == ids.RUN_STOP:
                jobs.stop(name)
            progress = jobs.progress(name)
        except InputError:
            return (no_update,) * 5
        ended = progress.state != "running"
        share = 100.0 if progress.state == "finished" else 100 * progress.done / progress.total
        log = progress.log if progress.log else "starting"
        return share, f"{name}: {progress.state}\n{log}", ended, ended, (refreshed or 0) + 1 if ended else no_update


def _register_list(app: dash.Dash, jobs: Jobs) -> None:
    @app.callback(
        Output(ids.RUNS, "rowData"),
        Output(ids.RUNS, "columnDefs"),
        Output(ids.ACCURACY, "children"),
        Input(ids.TABS, "value"),
        Input(ids.RUNS_REFRESH, "n_clicks"),
        Input(ids.RUNS_MESSAGE, "children"),
    )
    def show(tab: str, _refreshed: int | None, _message: Any) -> tuple[Any, ...]:
        if tab != "runs":
            return (no_update,) * 3
        rows = list_runs(jobs.folder)
        names = ("run", "device", "predicted ms", "measured ms", "error %")
        return rows, [{"field": name} for name in names], accuracy(rows)

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

    @app.callback(Output(ids.RUN_COMPARISON, "children"), Input(ids.RUNS, "selectedRows"), prevent_initial_call=True)
    def compare(rows: list[dict[str, Any]] | None) -> Any:
        if not rows:
            return None
        try:
            directory = run_directory(jobs.folder, str(rows[0]["run"]))
            return comparison_cards(compare_run(*load_run(directory)))
        except InputError as error:
            return problem_list(error.problems)


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Every run that was compared, or can be, newest first."""
    rows = []
    for directory in sorted(folder.glob("*"), reverse=True):
        if directory.name.startswith(".") or not (directory / "measured.json").is_file():
            continue
        row: dict[str, Any] = {
            "run": directory.name,
            "device": "",
            "predicted ms": None,
            "measured ms": None,
            "error %": None,
        }
        try:
            if not (directory / "compare.json").is_file():
                comparison = compare_run(*load_run(directory))
                write_text(directory / "compare.json", json.dumps(comparison.to_dict(), indent=2))
            time = json.loads((directory / "compare.json").read_text())["step_time"]
            row |= {
                "predicted ms": round(1e3 * time["predicted_s"], 2),
                "measured ms": round(1e3 * time["measured_s"], 2),
                "error %": round(100 * time["error"], 2),
            }
            row["device"] = json.loads((directory / "environment.json").read_text()).get("device", "")
        except (InputError, OSError, ValueError, KeyError, TypeError):
            pass  # a run that cannot be read stands in the list without its figures
        rows.append(row)
    return rows


def accuracy(rows: list[dict[str, Any]]) -> Any:
    """How right the predictions of all runs were."""
    errors = np.abs([row["error %"] for row in rows if row["error %"] is not None])
    if not len(errors):
        return dmc.Text("No run has been compared yet.", size="sm", c="dimmed")
    text = f"{len(errors)} runs: step time off by {errors.mean():.1f} % on average, {errors.max():.1f} % at worst."
    return dmc.Text(text, size="sm")


def comparison_cards(comparison: Comparison) -> Any:
    """Predicted over measured, and where the error comes from."""

    def graph(figure: Any, name: str) -> dcc.Graph:
        return dcc.Graph(figure=figure, config=graph_config(), id=name)

    predicted, measured = comparisons.timelines(comparison)
    time = comparison.to_dict()["step_time"]
    told = f"predicted {format_seconds(time['predicted_s'])}, measured {format_seconds(time['measured_s'])}"
    cards = [
        card(
            "Predicted and measured",
            f"{told}. {comparison.sentence}",
            graph(predicted, "compare-predicted"),
            graph(measured, "compare-measured"),
        ),
        dmc.SimpleGrid(
            [
                card(
                    "Where the error comes from",
                    "The bars sum to the error.",
                    graph(comparisons.attribution(comparison), "compare-attribution"),
                ),
                card(
                    "Residuals",
                    "Measured less predicted time of every action.",
                    graph(
                        comparisons.residuals(comparison.prediction.step, comparison.measured.steps),
                        "compare-residuals",
                    ),
                ),
            ],
            cols={"base": 1, "lg": 2},
        ),
    ]
    if comparison.measured.memory:
        memory = graph(comparisons.memory(comparison), "compare-memory")
        cards.append(card("Memory over time", "Solid: predicted. Dotted: the allocator.", memory))
    return dmc.Stack([*cards, html.P(comparison.measured.how)])
