"""What can be taken away: the plan, the scenario, a trace, the table, a report."""

import csv
import io
from collections.abc import Sequence
from typing import Any

import dash
from dash import Input, Output, ctx, no_update
from dash import State as Given

from dashboard.page import ids
from dashboard.page.callbacks import state_of
from dashboard.page.neighbourhood import around, table_row
from dashboard.page.state import Library, State, current, points, settled
from dashboard.report import report_page
from gpipe_sim.base.files import InputError, yaml_text
from gpipe_sim.make.planfile import plan_text
from gpipe_sim.show.trace import to_trace


def register(app: dash.Dash, library: Library) -> None:
    """What each button gives."""

    @app.callback(
        Output(ids.DOWNLOAD, "data"),
        *(
            Input(name, "n_clicks")
            for name in (ids.GET_PLAN, ids.GET_SCENARIO, ids.GET_TRACE, ids.GET_CSV, ids.GET_REPORT)
        ),
        Given(ids.URL, "search"),
        prevent_initial_call=True,
    )
    def download(*given: Any) -> Any:
        state = state_of(given[-1])
        try:
            prediction = current(state, library)
        except InputError:
            return no_update
        name = prediction.plan.scenario.name
        wanted = ctx.triggered_id
        if wanted == ids.GET_PLAN:
            return {"content": plan_text(prediction.plan), "filename": f"{name}.plan.yaml"}
        if wanted == ids.GET_SCENARIO:
            return {"content": scenario_text(state, library), "filename": f"{name}.yaml"}
        if wanted == ids.GET_TRACE:
            return {"content": to_trace(prediction.step), "filename": f"{name}.trace.json"}
        if wanted == ids.GET_CSV:
            rows = [table_row(one) for one in around(state, library).plans]
            return {"content": csv_text(rows), "filename": f"{name}.csv"}
        return {"content": report_page([prediction], name), "filename": f"{name}.html"}


def scenario_text(state: State, library: Library) -> str:
    """The scenario with its settings put in, as a file that simulates to what is on screen."""
    (point,) = points(settled(state, library), library)
    return yaml_text(point.document.data)


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    """A table as CSV."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
