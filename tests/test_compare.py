"""The attribution of an error: it sums exactly, and finds the cause that was planted."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import equal_stages, random_plans

from gpipe_sim.runs.compare import attribute, compare_run
from gpipe_sim.runs.directory import Measured
from gpipe_sim.step.metrics import step_time_s
from gpipe_sim.step.simulate import Replay, simulate


def shares(plan, happened) -> dict[str, float]:
    """The attribution of a step of `happened` that was predicted with `plan`."""
    predicted = step_time_s(simulate(plan))
    found = attribute(plan, simulate(happened), predicted)
    assert sum(found.values()) == pytest.approx(predicted - step_time_s(simulate(happened)), abs=1e-9)
    return found


def scaled(plan, column: str, factor: float):
    table = plan.profile.table | {column: plan.profile.table[column] * factor}
    return replace(plan, profile=replace(plan.profile, table=table))


@given(random_plans(), st.floats(0.5, 2.0))
def test_shares_sum_to_the_error_whatever_was_different(plan, factor):
    shares(plan, scaled(scaled(plan, "forward_s", factor), "output_bytes", 1 / factor))


@given(random_plans(), st.floats(0.5, 2.0))
def test_with_its_own_figures_a_step_is_reproduced(plan, factor):
    happened = scaled(scaled(plan, "backward_s", factor), "output_bytes", 1 / factor)
    assert shares(plan, happened)["unexplained"] == pytest.approx(0, abs=1e-6 * step_time_s(simulate(happened)))


def test_slower_compute_is_blamed_on_compute():
    made = equal_stages(3, 4, bandwidth="10 B/s")
    found = shares(made, scaled(made, "forward_s", 2.0))
    assert found["compute"] == pytest.approx(
        step_time_s(simulate(made)) - step_time_s(simulate(scaled(made, "forward_s", 2.0)))
    )
    assert found["communication"] == pytest.approx(0)
    assert found["overhead"] == pytest.approx(0)


def test_slower_messages_are_blamed_on_communication():
    made = equal_stages(3, 4, bandwidth="10 B/s")
    found = shares(made, scaled(made, "output_bytes", 10.0))
    assert found["communication"] < 0
    assert found["compute"] == pytest.approx(0)


def test_gaps_between_actions_are_blamed_on_overhead():
    made = equal_stages(3, 4)
    found = shares(made, replace(made, profile=replace(made.profile, action_overhead_s=0.1)))
    assert found["overhead"] < 0
    assert found["compute"] == pytest.approx(0)


def test_the_sentence_names_the_cause_or_says_that_it_is_within_the_spread():
    made = equal_stages(2, 4)
    slow = scaled(made, "forward_s", 1.5)
    comparison = compare_run(made, Measured(device="cpu", engine="gpipe", steps=(simulate(slow),) * 3))
    assert "too short; most of it" in comparison.sentence
    assert "is compute" in comparison.sentence
    steps = tuple(simulate(scaled(made, "forward_s", factor)) for factor in (0.8, 1.01, 1.2))
    assert "within the" in compare_run(made, Measured(device="cpu", engine="gpipe", steps=steps)).sentence


@pytest.mark.parametrize("factors", [(1.0, 1.1, 5.0), (0.9, 1.0, 1.1, 7.0)], ids=["odd", "even"])
def test_what_is_printed_sums_to_what_is_printed_also_beside_an_outlier(factors):
    made = equal_stages(2, 4)
    steps = tuple(simulate(scaled(made, "forward_s", factor)) for factor in factors)
    comparison = compare_run(made, Measured(device="cpu", engine="gpipe", steps=steps))
    error = comparison.prediction.step_time_s - comparison.step_time_s
    assert sum(comparison.attribution_s.values()) == pytest.approx(error, abs=1e-12)


def test_a_replay_without_figures_is_the_prediction():
    made = equal_stages(3, 4, bandwidth="2 B/s")
    assert step_time_s(simulate(made, replay=[Replay()])) == step_time_s(simulate(made))
