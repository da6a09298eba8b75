"""Published figures beside ours: the exact ones hold, and nothing is judged on a cell that it was fitted to."""

import json
from pathlib import Path

import pytest

from gpipe_sim.cli import main
from gpipe_sim.evidence import fits, literature
from gpipe_sim.evidence.everything import NUM_PARTS, all_figures
from gpipe_sim.evidence.literature import published_tables

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def figures():
    return all_figures()


@pytest.fixture
def changed(monkeypatch, tmp_path):
    """A function that lets the literature say something else."""

    def change(edit) -> None:
        data = json.loads(literature.DATA.read_text())
        edit(data["tables"])
        path = tmp_path / "published.json"
        path.write_text(json.dumps(data))
        monkeypatch.setattr(literature, "DATA", path)
        forget()

    yield change
    monkeypatch.undo()
    forget()


def forget() -> None:
    published_tables.cache_clear()
    fits.amoebanet_costs.cache_clear()


def test_nothing_fails(figures):
    assert [f.name for f in figures if f.fails] == []


def test_every_exact_figure_holds_but_where_a_paper_contradicts_itself(figures):
    missing = {(f.table, f.name.split(",")[0]) for f in figures if f.kind == "exact" and f.status != "holds"}
    contradictions = {
        (name, row["config"])
        for name, table in published_tables().items()
        for row in table.rows
        if "contradiction" in row
    }
    assert missing == contradictions


def test_a_known_reason_is_given_only_where_a_figure_misses(figures):
    assert {f.name for f in figures if f.known} == {f.name for f in figures if f.status == "misses"}


def test_every_table_has_figures_and_every_kind_is_there(figures):
    assert {f.table for f in figures} == set(published_tables())
    assert {f.kind for f in figures} == {"exact", "calibrated", "trend"}
    assert all(f.tolerance is not None for f in figures if f.kind != "trend" and not f.is_fitted)


def test_zero_bubbles_rates_are_reproduced_to_the_last_digit(figures):
    rates = [f for f in figures if f.name.endswith("bubble rate")]
    assert len(rates) == 6
    assert all(round(f.predicted, 4) == f.published for f in rates)


def test_what_is_judged_does_not_depend_on_what_was_published(figures, changed):
    """Every judged cell of a calibrated table is changed: the predictions stay, and the errors do not."""

    def edit(tables) -> None:
        for row in tables["gpipe_table1_transformer"]["rows"][2:]:
            row["activations"] = "1.0"
        for row in tables["gpipe_table1_amoebanet"]["rows"]:
            if row["config"] != "Pipeline-2":
                row["activations"] = "1.0"
        for row in tables["torchgpipe_memory"]["rows"][1:]:
            row["activations"] = "1.0"
        for row in tables["torchgpipe_speed"]["rows"]:
            if row["n"] > 2:
                row["throughput"] = "1.0"
        for row in tables["zero_bubble"]["rows"]:
            if row["m"] > 24:
                row["throughput"] = "1.0"

    changed(edit)
    before = {(f.table, f.name): f for f in figures if f.kind == "calibrated" and f.table != "gpipe_breakdown"}
    after = {(f.table, f.name): f for f in all_figures() if (f.table, f.name) in before}
    assert {key: f.predicted for key, f in after.items()} == {key: f.predicted for key, f in before.items()}
    judged = [f for f in after.values() if not f.is_fitted]
    assert len(judged) == 3 + 4 + 4 + 6 + 4
    assert all(f.published == 1.0 and f.status == "misses" for f in judged)


def test_what_is_fitted_does_depend_on_it(figures, changed):
    def edit(tables) -> None:
        tables["gpipe_table1_transformer"]["rows"][0]["activations"] = "23.4"
        for row in tables["torchgpipe_speed"]["rows"][:3]:
            row["throughput"] = str(2 * float(row["throughput"]))
        tables["zero_bubble"]["rows"][0]["throughput"] = "5.9"

    changed(edit)
    before = {(f.table, f.name): f.predicted for f in figures}
    after = {(f.table, f.name): f.predicted for f in all_figures()}
    assert after["torchgpipe_speed", "n=8, m=32, batch 1280"] == pytest.approx(
        2 * before["torchgpipe_speed", "n=8, m=32, batch 1280"], rel=1e-4
    )
    name = "1.5B, m=64, throughput"
    assert after["zero_bubble", name] == pytest.approx(before["zero_bubble", name] / 2)
    name = "Naive-1, activations"
    assert after["gpipe_table1_transformer", name] == pytest.approx(2 * before["gpipe_table1_transformer", name])


# --- the command -----------------------------------------------------------------------------------------------------


def run(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["validate", *arguments])
    return int(stopped.value.code or 0), capsys.readouterr().out


def test_json_has_a_figure_for_each_with_its_source(figures, capsys):
    status, out = run(capsys, "--json")
    document = json.loads(out)
    assert status == 0
    assert set(document) == {"summary", "figures"}
    assert len(document["figures"]) == len(figures)
    keys = "table title figure unit kind published predicted error tolerance allowance status reason basis source"
    assert all(set(entry) == set(keys.split()) and entry["source"] for entry in document["figures"])
    assert document["summary"]["exact"]["fails"] == 0


def test_a_wrong_exact_figure_fails_the_command_and_is_named(changed, capsys):
    changed(lambda tables: tables["gpipe_table1_transformer"]["rows"][2].update(parameters="6.3B"))
    status, out = run(capsys)
    assert status == 1
    assert "Pipeline-8, parameters misses: no reason is known" in " ".join(out.split())


def test_a_trend_in_the_wrong_direction_fails_the_command(changed, capsys):
    changed(lambda tables: tables["gpipe_table2"]["rows"][2].update({"2": "9.9"}))
    status, _ = run(capsys)
    assert status == 1


def test_progress_is_told_part_by_part():
    parts = []
    all_figures(lambda: parts.append(1))
    assert len(parts) == NUM_PARTS


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_picture_has_a_point_for_every_number(figures):
    pytest.importorskip("plotly")
    from dashboard.charts.literature import points, predicted_against_published

    expected = {(point.published, point.predicted) for point in points(figures)}
    chart = predicted_against_published(figures)
    across = [trace for trace in chart.data if trace.xaxis == "x" and trace.mode == "markers"]
    assert {pair for trace in across for pair in zip(trace.x, trace.y, strict=True)} == expected
    errors = [trace for trace in chart.data if trace.xaxis == "x2"]
    judged = [point for point in points(figures) if point.figure.kind != "trend"]
    assert sum(len(trace.x) for trace in errors) == len(judged)
