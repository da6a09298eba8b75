"""The fast evaluator gives the simulator's answer, for any plans at once, wherever nothing is shared."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import equal_stages, layers, plan, random_plans

from gpipe_sim.explain.predict import predict, predict_all
from gpipe_sim.plan.figures import Effects, similar
from gpipe_sim.plan.orders import SCHEDULES, position_of
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import Shape, shape_of
from gpipe_sim.step.evaluate import evaluate, evaluate_samples, obstacle
from gpipe_sim.step.metrics import StepMetrics, step_metrics
from gpipe_sim.step.simulate import simulate
from gpipe_sim.step.waves import graph_of

EXACT = 1e-9


def check_equal(found: StepMetrics, expected: StepMetrics) -> None:
    assert found.step_time_s == pytest.approx(expected.step_time_s, rel=EXACT)
    assert found.pipeline_time_s == pytest.approx(expected.pipeline_time_s, rel=EXACT)
    assert found.longest_rank_span_s == pytest.approx(expected.longest_rank_span_s, rel=EXACT)
    assert found.busy_s == pytest.approx(expected.busy_s, rel=EXACT)
    assert found.bubble_fraction == pytest.approx(expected.bubble_fraction, abs=EXACT)
    assert found.peak_memory_bytes.tolist() == expected.peak_memory_bytes.tolist()
    assert found.activation_bytes.tolist() == expected.activation_bytes.tolist()


def with_jitter(made: Plan) -> Plan:
    jitter = equal_stages(2, 2, cluster={"jitter": {"cv": 0.3, "samples": 4, "seed": 5}}).scenario.cluster.jitter
    cluster = made.scenario.cluster.model_copy(update={"jitter": jitter})
    return replace(made, scenario=replace(made.scenario, cluster=cluster))


# --- the simulator's answer ----------------------------------------------------------------------------------------


@given(random_plans(max_microbatches=10))
def test_a_plan_is_evaluated_as_it_is_simulated(plan):
    (found,) = evaluate([plan])
    check_equal(found, step_metrics(simulate(plan)))


@given(random_plans(shared=True), st.booleans(), st.booleans())
def test_the_same_holds_with_effects_switched_off(plan, overhead, communication):
    effects = Effects(overhead=overhead, communication=communication, sharing=False)
    (found,) = evaluate([plan], effects=effects)
    check_equal(found, step_metrics(simulate(plan, effects=effects)))


@given(random_plans())
def test_the_same_holds_for_each_sample_of_jitter(plan):
    made = with_jitter(plan)
    for sample, found in zip((3, 0, 2), evaluate_samples(made, [3, 0, 2]), strict=True):
        check_equal(found, step_metrics(simulate(made, sample=sample)))


@settings(max_examples=200)
@given(
    st.integers(2, 6),
    st.integers(2, 10),
    st.sampled_from([0.1, 0.3, 1 / 3]),
    st.sampled_from([1, 2, "all"]),
    st.sampled_from(list(product(("gpipe", "1f1b"), ("never", "always"), (True, False)))),
)
def test_the_same_holds_where_equal_stages_make_many_things_happen_at_once(K, M, seconds, window, others):
    """Sums in another order would differ in their last digit, and what is released as something else is taken would
    be held beside it."""
    schedule, checkpoint, overlap = others
    made = plan(
        layers([seconds] * K, [2 * seconds] * K, [1.0] * K, [4.0] * K),
        M,
        bandwidth=f"{1 / seconds!r} B/s",
        latency=seconds,
        schedule=schedule,
        checkpoint=checkpoint,
        window=window,
        cluster={"overlap": overlap},
    )
    check_equal(evaluate([made])[0], step_metrics(simulate(made)))


def test_times_alone_can_be_asked_for():
    made = equal_stages(3, 4)
    (found,) = evaluate([made], memory=False)
    assert found.step_time_s == evaluate([made])[0].step_time_s
    assert len(found.peak_memory_bytes) == len(found.activation_bytes) == 0


# --- many at once --------------------------------------------------------------------------------------------------


def same(one: StepMetrics, other: StepMetrics) -> bool:
    return all(
        (getattr(one, name) == getattr(other, name)).all()
        for name in ("busy_s", "peak_memory_bytes", "activation_bytes")
    ) and (one.step_time_s, one.pipeline_time_s) == (other.step_time_s, other.pipeline_time_s)


@given(st.lists(random_plans(max_stages=3, max_microbatches=3), max_size=4), st.randoms())
def test_plans_are_evaluated_together_as_they_are_alone(plans, random):
    modes = ("never", "always", "except_last")
    others = [
        replace(plan, checkpoint=tuple(random.choice(modes) for _ in plan.checkpoint)) for plan in plans for _ in "ab"
    ]
    mixed = random.sample(plans + others, len(plans + others))
    assert all(same(one, *evaluate([plan])) for one, plan in zip(evaluate(mixed), mixed, strict=True))


def test_more_plans_than_are_solved_at_once_keep_their_order():
    made = equal_stages(2, 3)
    plans = [replace(made, profile=replace(made.profile, action_overhead_s=i / 8)) for i in range(1100)]
    found = evaluate(plans)
    assert [same(found[i], *evaluate([plans[i]])) for i in (0, 511, 512, 1099)] == [True] * 4
    times = [one.step_time_s for one in found]
    assert times == sorted(set(times))


@given(random_plans())
def test_plans_that_differ_in_what_they_recompute_have_the_same_dependencies(plan):
    always, mixed = (replace(plan, checkpoint=modes) for modes in (("always",) * plan.num_stages, plan.checkpoint))
    if any(any(mixed.recomputed(stage)) for stage in range(plan.num_stages)):
        assert shape_of(mixed) == shape_of(always)
        assert graph_of(shape_of(mixed)) is graph_of(shape_of(always))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_finish_with_any_window_and_those_of_one_stage_also_with_blocking_sends(name):
    schedule = SCHEDULES[name]
    for K, v, M, order in product((1, 2, 3, 5), (1, 2, 3), (1, 2, 5, 9), ("reverse", "fifo")):
        if schedule.refuses(K, v, M):
            continue
        positions = tuple(position_of(schedule.pattern, stage, K) for stage in range(K * v))
        recomputations = (("early", False), ("early", True), ("on_demand", True))
        for window, (recompute, recomputes) in product((1, 2, 4, None), recomputations):
            limit = window if (window or M) < M else None
            for blocking in (False, True) if v == 1 else (False,):
                shape = Shape(positions, M, name, order, None, recompute, recomputes, limit, blocking)
                assert graph_of(shape) is not None


# --- predictions ---------------------------------------------------------------------------------------------------


@given(random_plans(shared=True), st.booleans())
def test_predictions_of_many_plans_equal_those_of_each(plan, jitter):
    made = with_jitter(plan) if jitter else plan
    found, again = predict_all([made, made], fast=obstacle(made) is None)
    expected = predict(made)
    assert found.step_times_s == pytest.approx(expected.step_times_s, rel=EXACT)
    assert found.pipeline_time_s == pytest.approx(expected.pipeline_time_s, rel=EXACT)
    assert found.utilization == pytest.approx(expected.utilization, rel=EXACT)
    tolerance = EXACT * expected.step_time_s
    assert found.breakdown_s == pytest.approx(expected.breakdown_s, abs=tolerance)
    for name in ("peak_memory_bytes", "activation_bytes", "parameter_bytes", "fullest_sample"):
        assert getattr(found, name) == getattr(again, name) == getattr(expected, name)


@given(random_plans())
def test_the_fullest_sample_is_the_one_that_takes_most_memory(plan):
    made = with_jitter(plan)
    (prediction,) = predict_all([made], fast=True)
    peaks = [max(curve.peak_bytes for curve in simulate(made, sample=sample).memory) for sample in range(4)]
    assert peaks[prediction.fullest_sample] == max(peaks) == max(prediction.peak_memory_bytes)


# --- what is shared ------------------------------------------------------------------------------------------------


def on_two_nodes(placement: list[int]) -> Plan:
    network = {"bandwidth": "0.2 B/s", "latency": "0 s"}
    return equal_stages(4, 64, placement=placement, cluster={"nodes": 2, "devices_per_node": 2, "network": network})


def test_what_is_shared_is_named_and_refused():
    neighbours, apart = on_two_nodes([0, 1, 2, 3]), on_two_nodes([0, 2, 1, 3])
    assert obstacle(neighbours) is None
    assert obstacle(apart) == "messages share the NIC of node 0, 1"
    crowded = equal_stages(3, 2, cluster={"devices_per_node": 3, "cores": 2})
    assert obstacle(crowded) == "ranks share the cores of node 0"
    for shared in (apart, crowded):
        assert obstacle(shared, effects=Effects(sharing=False)) is None
        with pytest.raises(ValueError, match="needs the event simulation"):
            evaluate([shared])


def test_plans_that_share_are_simulated_among_those_that_are_evaluated():
    plans = [on_two_nodes(placement) for placement in ([0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0])]
    found = [prediction.step_time_s for prediction in predict_all(plans)]
    assert found == pytest.approx([predict(plan).step_time_s for plan in plans], rel=EXACT)
    assert [prediction.breakdown_s["contention"] > 0 for prediction in predict_all(plans)] == [False, True, False]


def test_plans_are_told_apart_by_what_their_cluster_is_and_not_by_which_object_it_is():
    one = equal_stages(2, 2)
    again = replace(one, scenario=replace(one.scenario, cluster=one.scenario.cluster.model_copy()))
    faster = replace(one.scenario.cluster.link, bandwidth=1e9)
    other = replace(
        one, scenario=replace(one.scenario, cluster=one.scenario.cluster.model_copy(update={"link": faster}))
    )
    assert similar(again) == similar(one) != similar(other)
    assert hash(similar(again)) == hash(similar(one))
