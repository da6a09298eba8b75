"""The waterfall sums to the step, the critical path explains it, and the verdict names the right cause."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from plans import equal_stages, layers, plan, random_plans, scenario

from gpipe_sim.explain.predict import predict
from gpipe_sim.explain.waterfall import PARTS, critical_path
from gpipe_sim.make.making import make_plan
from gpipe_sim.step.metrics import step_time_s
from gpipe_sim.step.simulate import simulate


def check_waterfall(plan) -> dict[str, float]:
    prediction = predict(plan)
    parts = prediction.breakdown_s
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(prediction.step_time_s, rel=1e-12)
    for part, seconds in parts.items():
        if part not in ("contention", "jitter"):
            assert seconds >= -1e-9 * prediction.step_time_s, part
    return parts


@given(random_plans())
def test_waterfall_sums_to_the_step_and_is_not_negative(plan):
    assert check_waterfall(plan)["contention"] == 0


@given(random_plans(shared=True))
def test_waterfall_sums_to_the_step_with_shared_nics_and_cores(plan):
    check_waterfall(plan)


def test_waterfall_prices_each_cause_by_itself():
    model = layers([1.0, 1.0, 2.0], [2.0, 2.0, 4.0], [3.0, 3.0, 0.0], overhead=0.5)
    made = plan(model, 4, batch=8, bandwidth="1 B/s", checkpoint="always", recompute="on_demand")
    parts = check_waterfall(made)
    one_call = 8 * 12 + 6 * 0.5
    assert parts["compute"] == pytest.approx(one_call / 3)
    assert parts["small_batches"] == pytest.approx((4 - 1) * 6 * 0.5 / 3)
    assert parts["recompute"] == pytest.approx((8 * 4 + 4 * 3 * 0.5) / 3)
    slowest = 8 * 8 + 4 * 3 * 0.5
    assert parts["imbalance"] == pytest.approx(slowest - (one_call + 3 * 3.0 + 38) / 3)
    assert parts["communication"] > 0
    assert parts["overhead"] == parts["contention"] == parts["jitter"] == parts["update"] == 0


def test_engine_overhead_is_a_part_of_its_own():
    made = equal_stages(2, 4)
    slow = replace(made, profile=replace(made.profile, action_overhead_s=0.25))
    assert check_waterfall(made)["overhead"] == 0
    assert check_waterfall(slow)["overhead"] == pytest.approx(
        0.25 * (2 * 4 + 2 - 1)
    )  # the first action's comes before the step


def test_jitter_is_the_mean_over_samples_less_the_step_without():
    made = equal_stages(4, 4, cluster={"jitter": {"cv": 0.3, "samples": 20, "seed": 1}})
    times = [step_time_s(simulate(made, sample=sample)) for sample in range(20)]
    parts = check_waterfall(made)
    assert parts["jitter"] == pytest.approx(sum(times) / 20 - step_time_s(simulate(made)))
    assert parts["jitter"] > 0, "waiting for the slowest neighbour costs more than the fast ones gain"


def test_contention_shows_where_ranks_share_a_core():
    made = equal_stages(3, 4, cluster={"devices_per_node": 3, "cores": 1})
    assert check_waterfall(made)["contention"] > 0


@given(random_plans())
def test_critical_path_runs_without_gaps_from_the_start_to_the_end_of_the_step(plan):
    step = simulate(plan)
    path = critical_path(plan, step)
    total = step_time_s(step)
    assert path[0].start_s == plan.profile.action_overhead_s
    assert path[-1].end_s - path[0].start_s == pytest.approx(total)
    check_path(plan, path)


@given(random_plans(shared=True))
def test_the_same_holds_where_nics_and_cores_are_shared(plan):
    check_path(plan, critical_path(plan, simulate(plan)))


def test_critical_path_along_a_thousand_queued_messages():
    for window in ("all", 2):
        made = plan(layers([1.0, 1.0], [1.0, 1.0], [5.0, 0.0]), 1500, bandwidth="1 B/s", window=window)
        check_path(made, critical_path(made, simulate(made)))


def check_path(plan, path) -> None:
    overhead = plan.profile.action_overhead_s
    for before, after in pairwise(path):
        gap = after.start_s - before.end_s
        assert gap == pytest.approx(overhead if after.lane == "compute" else 0.0, abs=1e-9 * path[-1].end_s)


def test_critical_path_of_a_slow_link_is_that_link():
    made = plan(layers([1.0, 1.0], [1.0, 1.0], [50.0, 0.0]), 4, bandwidth="1 B/s")
    path = critical_path(made, simulate(made))
    on_link = sum(span.end_s - span.start_s for span in path if span.lane == "send")
    assert on_link == pytest.approx(8 * 50)


# --- verdict -------------------------------------------------------------------------------------------------------


def test_verdict_advises_more_micro_batches_for_a_large_bubble():
    verdict = predict(equal_stages(4, 2, batch=64)).verdict
    assert verdict.startswith("What limits this plan is fill and drain, 60% of the step: 16 micro-batches")
    assert "from 60.0% to 15.8%" in verdict


def test_verdict_advises_a_schedule_that_is_faster_on_the_same_ranks_with_its_time():
    """Also where backwards cannot be split, and not where nothing would be gained."""
    eight = [1.0] * 8
    whole = plan(layers(eight, [2.0] * 8), 8, stages=4, schedule="1f1b")
    assert "interleaved_1f1b with 2 stages per rank would take 57.0 s instead of 66.0 s" in predict(whole).verdict
    halves = plan(layers(eight, [2.0] * 8, weights=eight), 8, stages=4, schedule="1f1b")
    assert "zb_v with 2 stages per rank would take 51.0 s instead of 66.0 s" in predict(halves).verdict
    assert "instead of" not in predict(plan(layers(eight, weights=eight), 8, stages=8, schedule="zb_v")).verdict
    assert "zb_h1 would take" in predict(equal_stages(4, 8, schedule="1f1b")).verdict


def test_verdict_uses_the_closed_form_of_the_schedule():
    verdict = predict(equal_stages(8, 4, schedule="interleaved_1f1b", stages_per_rank=2, batch=64)).verdict
    assert "16 micro-batches would bring the ideal bubble from 27.3% to 8.6%" in verdict


def test_verdict_names_the_rank_where_it_has_several_stages():
    uneven = layers([1.0, 5.0, 1.0, 1.0], weights=[1.0] * 4)
    assert "rank 1 (stages 1 and 2) is the slowest" in predict(plan(uneven, 16, schedule="zb_v")).verdict
    full = plan(layers([1.0] * 4, saved=[float(2**30)] + [1.0] * 3, weights=[1.0] * 4), 32, schedule="zb_v")
    small = replace(full.scenario.cluster.device, memory=float(2**30))
    cluster = full.scenario.cluster.model_copy(update={"device": small})
    tight = replace(full, scenario=replace(full.scenario, cluster=cluster))
    assert predict(tight).verdict.startswith("Does not fit: rank 0 (stages 0 and 3) needs")


def test_verdict_makes_the_order_anew_where_it_was_made_for_a_plan():
    made = plan(layers([1.0] * 2, saved=[float(2**34)] * 2), 2, batch=4, schedule="auto")
    verdict = predict(made).verdict
    assert verdict.startswith("Does not fit: stage 0 needs")
    assert "would need" in verdict


def test_verdict_names_the_stage_that_is_too_slow():
    verdict = predict(plan(layers([1.0, 5.0, 1.0, 1.0]), 64)).verdict
    assert "imbalance" in verdict
    assert "stage 1 is the slowest and a single layer (layer1)" in verdict


def test_verdict_names_the_straggler():
    verdict = predict(equal_stages(4, 64, cluster={"devices_per_node": 4, "slowdown": {2: 2.0}})).verdict
    assert "rank 2 is a straggler, 2 times slower" in verdict


def test_equally_slow_ranks_are_no_imbalance():
    slow = {"devices_per_node": 4, "slowdown": dict.fromkeys(range(4), 2.0)}
    parts = predict(equal_stages(4, 64, cluster=slow)).breakdown_s
    assert parts["imbalance"] == pytest.approx(0)
    assert parts["compute"] == pytest.approx(2 * 64 * 3)


def test_verdict_counts_recomputation_when_it_names_the_slowest_stage():
    model = layers([1.0, 1.05, 1.0], [1.0, 1.05, 1.0])
    verdict = predict(plan(model, 64, checkpoint={"per_stage": ["always", "never", "never"]})).verdict
    assert "stage 0 is the slowest" in verdict


def test_verdict_tries_a_remedy_before_it_recommends_it():
    made = plan(layers([1.0, 1.0], saved=[float(2**30), 1.0]), 32)
    assert "checkpoint: always would need" in predict(made).verdict
    one = plan(layers([1.0, 1.0], saved=[float(2**30), 1.0]), 1, batch=32)
    assert "would need" in predict(one).verdict
    assert "2 micro-batches" in predict(one).verdict
    hopeless = plan(layers([1.0], saved=[float(2**36)], parameters=2**36), 1)
    assert "even checkpoint: always would need" in predict(hopeless).verdict


def test_with_jitter_the_verdict_and_fits_agree():
    made = equal_stages(4, 16, schedule="1f1b", cluster={"jitter": {"cv": 0.8, "samples": 30, "seed": 3}})
    prediction = predict(made)
    limit = max(prediction.peak_memory_bytes) - 1
    device = replace(made.scenario.cluster.device, memory=float(limit))
    cluster = made.scenario.cluster.model_copy(update={"device": device})
    tight = predict(replace(made, scenario=replace(made.scenario, cluster=cluster)))
    assert not tight.fits
    assert tight.verdict.startswith("Does not fit")


def test_verdict_names_the_bandwidth_that_would_hide_a_slow_link():
    verdict = predict(plan(layers([1.0, 1.0], [2.0, 2.0], [80.0, 0.0]), 16, bandwidth="10 B/s")).verdict
    assert "a message from stage 0 to 1 takes 8.00 s, longer than the slowest forward (1.00 s), and 80.0 B/s" in verdict


def test_verdict_prices_the_step_without_recomputation():
    verdict = predict(equal_stages(2, 64, checkpoint="always")).verdict
    assert "without it the step would take 195 s" in verdict
    assert "fits in 16.0 GiB" in verdict


def test_verdict_says_first_of_all_that_a_plan_does_not_fit():
    made = plan(layers([1.0, 1.0], saved=[float(2**30), 1.0]), 32)
    verdict = predict(made).verdict
    assert verdict.startswith("Does not fit: stage 0 needs 32.0 GiB of 16.0 GiB, the largest part activations")


def test_verdict_is_content_with_a_plan_that_wastes_little():
    assert "no other cause takes 5 %" in predict(equal_stages(2, 64)).verdict


def test_verdict_sees_what_small_micro_batches_waste():
    data = {
        "model": {"kind": "transformer", "layers": 8, "hidden": 64, "heads": 2, "vocab": 100, "sequence": 16},
        "batch": 256,
        "cluster": {"device": "a100-80gb", "link": "nvlink3"},
        "plan": {"stages": 1, "microbatches": 256, "checkpoint": "never"},
    }
    assert "small micro-batches" in predict(make_plan(scenario(data))).verdict
