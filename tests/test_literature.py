"""What agreement with a published figure means: digits, tolerances, directions, and what is no evidence."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpipe_sim.evidence.literature import Figure, Printed, printed, published_tables, summary

numbers = st.floats(1e-3, 1e6)


def figure(published, predicted, kind="exact", tolerance: float | None = 0.05, **more) -> Figure:
    return Figure(
        table="boehm",
        name="it",
        kind=kind,
        published=published,
        predicted=predicted,
        basis="",
        tolerance=tolerance,
        **more,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("83.9B", Printed(83.9e9, 0.05e9)),
        ("282.2M", Printed(282.2e6, 0.05e6)),
        ("39", Printed(39.0, 0.5)),
        ("0.1240", Printed(0.124, 0.00005)),
    ],
)
def test_a_printed_number_is_known_to_half_a_unit_of_its_last_digit(text, expected):
    assert printed(text) == pytest.approx(expected)


@given(numbers, st.floats(-0.5, 0.5), st.floats(0.0, 0.5))
def test_a_figure_holds_within_its_tolerance_and_misses_beyond(published, error, tolerance):
    assume(abs(abs(error) - tolerance) > 1e-9)
    found = figure(published, published * (1 + error), tolerance=tolerance)
    assert found.status == ("holds" if abs(error) < tolerance else "misses")
    assert found.fails == (abs(error) > tolerance)


def test_of_several_numbers_the_worst_counts():
    assert figure((1.0, 10.0), (1.01, 9.0)).error == pytest.approx(-0.1)
    assert figure((1.0, 10.0), (1.01, 9.0)).status == "misses"


@given(st.lists(numbers, min_size=2, max_size=5, unique=True), st.floats(0.1, 10.0), st.floats(0.1, 3.0))
def test_a_trend_claims_directions_and_no_sizes(published, factor, power):
    predicted = tuple(factor * value**power for value in published)
    assume(len(set(predicted)) == len(predicted))
    trend = figure(tuple(published), predicted, kind="trend", tolerance=None)
    assert trend.status == "holds"
    assert trend.error is None
    reversed_ = figure(tuple(published), tuple(-value for value in predicted), kind="trend", tolerance=None)
    assert reversed_.status == "misses"


def test_a_statement_holds_if_it_is_the_same():
    assert figure("fits", "fits", kind="trend", tolerance=None).status == "holds"
    assert figure("fits", "does not fit", kind="trend", tolerance=None).fails


def test_a_fitted_figure_is_shown_and_never_judged():
    for predicted in (1.0, 2.0):
        assert figure(1.0, predicted, kind="calibrated", is_fitted=True).status == "fitted"


def test_a_miss_with_a_known_reason_is_a_miss_and_no_failure():
    found = figure(1.0, 2.0, known="the columns of the paper differ")
    assert (found.status, found.fails) == ("misses", False)
    assert found.to_dict()["reason"] == "the columns of the paper differ"
    assert figure(1.0, 1.0, known="the columns of the paper differ").to_dict()["reason"] is None


def test_the_summary_counts_every_figure_once():
    found = [figure(1.0, 1.0), figure(1.0, 2.0), figure(1.0, 2.0, known="why"), figure(1.0, 1.0, is_fitted=True)]
    counts = summary(found)
    assert counts["exact"] == {"holds": 1, "misses_with_reason": 1, "fails": 1, "fitted": 1}
    assert sum(sum(of_kind.values()) for of_kind in counts.values()) == len(found)


def test_every_table_says_where_it_is_from():
    for table in published_tables().values():
        assert table.source
        assert table.settings
        assert table.rows
