"""What shows itself in a notebook, and the notebook of the tour, cell by cell."""

import ast
import importlib.util
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpipe_sim import load_scenario, make_plan, predict, simulate, sweep
from gpipe_sim.base import html
from gpipe_sim.runs.compare import compare_run
from gpipe_sim.runs.directory import Measured
from gpipe_sim.step.metrics import step_time_s

TOUR = Path(__file__).parents[1] / "examples" / "tour.ipynb"


def cells() -> list[dict]:
    return json.loads(TOUR.read_text())["cells"]


def text_of(cell: dict) -> str:
    return "".join(cell["source"])


def execute(code: str, names: dict) -> object:
    """As a notebook does: what the last line comes to is shown."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last is not None else None


def test_the_tour_runs_from_its_first_cell_to_its_last_and_shows_tables_and_charts(capsys):
    names: dict = {}
    shown = [execute(text_of(cell), names) for cell in cells() if cell["cell_type"] == "code"]
    charts = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(charts) == 6
    assert all("<svg" in chart and "<table" in chart for chart in charts)
    told = capsys.readouterr().out
    assert told.count("not done yet") == 3 + 4 + 1 + 1
    assert ": right" not in told


def test_the_exercises_of_the_tour_tell_right_from_wrong(capsys):
    """Each is followed by a solution, which is put in the place of the function that is left to write."""
    names: dict = {}
    before, exercises = "", 0
    for cell in cells():
        text = text_of(cell)
        if "exercise" in cell["metadata"].get("tags", ()):
            before = text
        elif cell["cell_type"] == "markdown" and "One solution" in text:
            exercises += 1
            (solution,) = re.findall("```python\n(.*?)```", text, re.DOTALL)
            blank = re.compile(r"def \w+\([^)]*\):\n    return None  # your code\n")
            execute(blank.sub(lambda _, code=solution: code, before), names)
            told = capsys.readouterr().out
            assert told
            assert all(line.endswith(": right") for line in told.splitlines()), told
            wrong = blank.search(before).group(0).replace("return None  # your code", "return [0.5]")
            execute(blank.sub(lambda _, code=wrong: code, before), names)
            assert "expected" in capsys.readouterr().out
        elif cell["cell_type"] == "code" and "def check" in text:
            execute(text, names)
    assert exercises == 4


def test_the_tour_is_stored_without_results():
    assert all(cell["outputs"] == [] for cell in cells() if cell["cell_type"] == "code")


def test_a_sweep_is_a_sequence_of_predictions_and_becomes_a_table():
    found = sweep("bubble", "plan.microbatches=[4, 8, 16]")
    assert [one.plan.num_microbatches for one in found] == [4, 8, 16]
    assert found.fastest is found[2]
    records = found.to_records()
    assert [record["microbatches"] for record in records] == [4, 8, 16]
    assert records[0]["step_time_s"] == found[0].step_time_s
    assert not any(isinstance(value, list | dict) for record in records for value in record.values())
    if importlib.util.find_spec("pandas") is None:
        with pytest.raises(ImportError, match="pip install pandas"):
            found.to_pandas()
    else:
        assert list(found.to_pandas()["step_time_s"]) == [one.step_time_s for one in found]


def test_predictions_plans_sweeps_and_comparisons_show_a_table_and_a_chart_that_are_well_formed():
    plan = make_plan(load_scenario("bubble", "plan.microbatches=2")[0])
    prediction = predict(plan)
    comparison = compare_run(plan, Measured(device="x", engine="gpipe", steps=(simulate(plan, memory=False),)))
    for shown in (plan, prediction, sweep("bubble"), comparison):
        page = ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")
        assert page.find("table") is not None
        assert page.find("svg") is not None


def test_a_chart_is_drawn_to_scale_and_what_people_wrote_is_escaped():
    page = ElementTree.fromstring(html.chart("a & b", [("<one>", [html.Bar(0, 1, "#000")], ""), ("two", [], "")]))
    assert page.find("text").text == "<one>"
    wide = ElementTree.fromstring(html.chart("t", [("a", [html.Bar(0, 4, "#000"), html.Bar(4, 5, "#111")], "")]))
    first, second = (float(bar.attrib["width"]) for bar in wide.findall("rect"))
    assert first == pytest.approx(4 * second, rel=1e-3)
    cut = ElementTree.fromstring(f"<div>{html.table(['n'], [[n] for n in range(100)], most=10)}</div>")
    assert len(cut.findall(".//tr")) == 11
    assert cut.find("p").text == "and 90 more"


def test_every_plot_for_notebooks_is_a_figure():
    plots = pytest.importorskip("dashboard.plots", reason="figures need plotly: gpipe-planner[report]")
    found = sweep("bubble", "plan.microbatches=[4, 8]")
    plan = found[0].plan
    comparison = compare_run(plan, Measured(device="x", engine="gpipe", steps=(simulate(plan, memory=False),)))
    timeline = plots.plot_timeline(found[0], critical=True)
    assert max(max(bar.base + bar.x) for bar in timeline.data if bar.type == "bar") == pytest.approx(
        1e3 * step_time_s(found[0].step)
    )
    for figure in (
        plots.plot_memory(found[0]),
        plots.plot_waterfall(found[0]),
        plots.plot_sweep(found),
        plots.plot_sweep(sweep("demo", "plan.stages=[4, 8]", "plan.microbatches=[8, 16]", "plan.checkpoint=never")),
        plots.plot_front(found),
        plots.plot_comparison(comparison),
    ):
        assert figure.data
