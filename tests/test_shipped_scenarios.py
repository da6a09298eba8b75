"""Every shipped scenario opens with its question, and its answer is the one that its text claims."""

import pytest

from gpipe_sim.plan import make_plan
from gpipe_sim.predict import Prediction, predict
from gpipe_sim.sweep import load_scenario, shipped_scenarios

FILES = sorted(shipped_scenarios().glob("*.yaml"))


def answers(name: str, *overrides: str) -> list[Prediction]:
    return [
        predict(make_plan(scenario)) for scenario in load_scenario(shipped_scenarios() / f"{name}.yaml", *overrides)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_opens_with_the_question_that_it_answers(path):
    first_line = path.read_text().splitlines()[0]
    assert first_line.startswith("# ")
    assert first_line.endswith("?")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_is_named_as_its_file_and_can_be_planned(path):
    sweep = load_scenario(path)
    assert sweep.name == path.stem
    assert all(make_plan(scenario).num_stages for scenario in sweep)


def test_bubble_shrinks_from_three_quarters_to_4_5_percent():
    bubbles = [prediction.bubble_fraction for prediction in answers("bubble")]
    assert bubbles == pytest.approx([3 / (M + 3) for M in (1, 2, 4, 8, 16, 32, 64)], abs=1e-9)


def test_checkpointing_fits_where_never_does_not_and_early_recompute_is_faster():
    found = {(p.plan.checkpoint[0], p.plan.recompute): p for p in answers("checkpoint")}
    assert not found["never", "early"].fits
    assert found["always", "early"].fits
    assert found["never", "early"].step_time_s < found["except_last", "early"].step_time_s
    assert found["except_last", "early"].step_time_s < found["always", "early"].step_time_s
    assert found["always", "early"].step_time_s < found["always", "on_demand"].step_time_s


def test_transformer48_does_not_scale_with_one_micro_batch_and_does_with_32():
    time = {(p.plan.num_stages, p.plan.num_microbatches): p.step_time_s for p in answers("gpipe_transformer48")}
    assert time[2, 1] / time[8, 1] < 1.3
    assert time[2, 32] / time[8, 32] > 3


def test_the_84_billion_parameter_model_fits_on_128_cores():
    (prediction,) = answers("gpipe_83b9")
    assert prediction.fits
    assert sum(prediction.parameter_bytes) / 2 == pytest.approx(83.9e9, rel=0.003)
    curve = prediction.step.memory[1]
    model = sum(curve.parts[part].max() for part in ("parameters", "optimizer", "gradients"))
    assert model / 2**30 == pytest.approx(7.3, abs=0.1)


def test_the_bandwidth_wall_stands_at_10_gbit():
    time = {p.plan.scenario.swept["cluster.network.bandwidth"]: p.step_time_s for p in answers("bandwidth_wall")}
    assert time["25 Gbit/s"] < 1.05 * time["400 Gbit/s"]
    assert time["10 Gbit/s"] > 1.25 * time["400 Gbit/s"]
    assert time["5 Gbit/s"] > 1.6 * time["10 Gbit/s"]


def test_two_flows_really_share_a_nic():
    in_order, in_turns = answers("shared_nic")
    assert not in_order.plan.shared_nics
    assert in_turns.plan.shared_nics
    assert in_order.breakdown_s["contention"] == 0
    assert in_turns.breakdown_s["contention"] > 0.1 * in_turns.step_time_s


def test_the_automatic_cut_relieves_the_straggler():
    equal, auto = answers("straggler", "cluster.jitter.samples=10")
    assert auto.plan.balance[3] < 8
    assert auto.step_time_s < 0.95 * equal.step_time_s
    assert auto.breakdown_s["jitter"] > 0


def test_a_large_vocabulary_makes_equal_counts_uneven():
    equal, auto = answers("uneven")
    assert equal.breakdown_s["imbalance"] > 0.25 * equal.step_time_s
    assert auto.plan.balance[-1] < 8
    assert auto.step_time_s < 0.8 * equal.step_time_s


def test_zero_bubbles_published_rate_is_reproduced():
    (prediction,) = answers("zero_bubble_1f1b")
    assert round(prediction.bubble_fraction, 4) == 0.2431
