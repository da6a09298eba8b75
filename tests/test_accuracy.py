"""How right all runs so far were: the record that `gpipe run` keeps, and what `gpipe accuracy` says of it."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from commands import run
from hypothesis import given
from hypothesis import strategies as st

from gpipe_sim.runs.accuracy import RECORD, accuracy_of, by_group, rank_correlation, record, recorded
from gpipe_sim.runs.directory import RunSummary, _began

RUN = RunSummary(
    name="20261116T100000Z-one",
    utc=datetime(2026, 11, 16, 10, tzinfo=UTC),
    device="cpu",
    schedule="gpipe",
    checkpoint="never",
    num_stages=2,
    num_microbatches=4,
    predicted_s=1.1,
    measured_s=1.0,
    error=0.1,
    bubble_error=-0.02,
    memory_errors=(0.01, -0.03),
)
SLOWER = replace(
    RUN,
    name="two",
    device="rehearse",
    predicted_s=1.9,
    measured_s=2.0,
    error=-0.05,
    bubble_error=0.0,
    memory_errors=None,
)


def test_a_line_that_was_cut_off_does_not_swallow_the_next(tmp_path):
    record(tmp_path, SLOWER)
    (tmp_path / RECORD).write_bytes((tmp_path / RECORD).read_bytes()[:-10])
    record(tmp_path, RUN)
    assert recorded(tmp_path) == [RUN]


def test_a_name_that_only_looks_like_a_date_is_none():
    assert _began("20269999T999999Z-x") is None
    assert _began("20260102T030405Z-x") == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_a_record_gives_back_what_was_added_to_it_and_skips_what_is_no_run(tmp_path):
    record(tmp_path, RUN)
    with open(tmp_path / RECORD, "a") as file:
        file.write('{"name": "cut off"\nnull\n[]\n{"name": 1}\n')
    record(tmp_path, SLOWER)
    assert recorded(tmp_path) == [RUN, SLOWER]


@pytest.mark.parametrize(
    "change",
    [
        *({"name": []}, {"device": None}, {"schedule": {}}, {"checkpoint": "\x1b[2J"}, {"device": "\ud800"}),
        *({"error": float("nan")}, {"error": 1e400}, {"error": 10**400}, {"predicted_s": "x"}, {"measured_s": None}),
        *({"utc": "0001-01-01T00:00:00"}, {"memory_errors": {}}, {"memory_errors": [None]}, {"num_stages": 1.5}),
    ],
    ids=repr,
)
def test_a_line_that_says_what_no_run_can_is_skipped(tmp_path, change):
    record(tmp_path, RUN)
    line = json.loads((tmp_path / RECORD).read_text()) | {"name": "other"} | change
    with open(tmp_path / RECORD, "a") as file:
        file.write(json.dumps(line) + "\n" + "[" * 100_000 + "\n")
    assert recorded(tmp_path) == [RUN]


def test_a_run_that_is_recorded_twice_counts_once_as_it_was_last(tmp_path):
    record(tmp_path, RUN)
    record(tmp_path, replace(RUN, error=0.2))
    assert [one.error for one in recorded(tmp_path)] == [0.2]


def test_means_and_worst_cases_are_of_absolute_errors():
    found = accuracy_of([RUN, SLOWER])
    assert found.step_time_mean == pytest.approx(0.075)
    assert found.step_time_worst == pytest.approx(0.1)
    assert found.bubble_mean == pytest.approx(0.01)
    assert (found.memory_mean, found.memory_worst) == (pytest.approx(0.02), pytest.approx(0.03))
    assert found.order is None, "two runs have no order to speak of"
    assert accuracy_of([SLOWER]).memory_mean is None


def test_groups_hold_every_run_once():
    groups = by_group([RUN, SLOWER, SLOWER])
    assert {value: one.runs for value, one in groups["device"].items()} == {"cpu": 1, "rehearse": 2}
    assert all(sum(one.runs for one in some.values()) == 3 for some in groups.values())


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=20, unique=True))
def test_rank_correlation_knows_the_order_and_nothing_else(values):
    assert rank_correlation(values, [value**3 for value in values]) == pytest.approx(1.0)
    assert rank_correlation(values, [-value for value in values]) == pytest.approx(-1.0)


def test_equal_values_share_their_rank():
    assert rank_correlation([1, 1, 2], [1, 1, 5]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)


def test_the_command_tells_what_the_record_says(tmp_path, capsys):
    for one in (RUN, SLOWER):
        record(tmp_path, one)
    document = json.loads(run(capsys, "accuracy", "--runs", tmp_path, "--json")[1])
    assert document["all"]["step_time_worst"] == pytest.approx(0.1)
    assert set(document["by"]) == {"device", "schedule", "checkpoint"}
    assert [one["name"] for one in document["runs"]] == [RUN.name, SLOWER.name]
    _, table, _ = run(capsys, "accuracy", "--runs", tmp_path)
    assert "device rehearse" in table
    assert "7.5%" in table


def test_a_folder_without_runs_is_told_so(tmp_path, capsys):
    status, _, told = run(capsys, "accuracy", "--runs", tmp_path / "none")
    assert status == 2
    assert "has no compared run" in told
