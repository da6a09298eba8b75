"""Replicas: D copies of a pipeline, each with its share of the batch, and what they divide among themselves."""

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import equal_stages, layers, plan, random_plans
from test_evaluate import EXACT, check_equal, with_jitter

from gpipe_sim.base.files import Document, InputError, parse_yaml
from gpipe_sim.explain.predict import predict, predict_all
from gpipe_sim.explain.waterfall import critical_path
from gpipe_sim.explain.worth import worth_of
from gpipe_sim.make.making import make_plan
from gpipe_sim.make.planfile import parse_plan, plan_text
from gpipe_sim.plan.figures import Effects
from gpipe_sim.plan.plan import Plan, only_one_pipeline
from gpipe_sim.plan.program import program_of
from gpipe_sim.scenario.mesh import MESSAGES_INSIDE, SUMS_INSIDE, Mesh
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.scenario.schema import Optimizer, Precision
from gpipe_sim.search.advise import advise, why_not_copies
from gpipe_sim.search.choices import space_of
from gpipe_sim.search.tables import IntervalTables
from gpipe_sim.step.evaluate import evaluate, evaluate_samples, obstacle
from gpipe_sim.step.memory import step_bytes
from gpipe_sim.step.metrics import step_metrics, step_time_s
from gpipe_sim.step.simulate import simulate

SHARDS = ("none", "optimizer", "parameters")
NODES = {"nodes": 2, "devices_per_node": 4, "network": {"bandwidth": "1 GB/s"}}


def replicated(K: int, D: int, M: int, *, batch: int | None = None, **settings: object) -> Plan:
    """K equal stages, D times, a sample per micro-batch."""
    return equal_stages(K, M, batch=batch or D * M, replicas=D, **settings)


def test_a_replica_has_its_share_of_the_batch():
    plan = replicated(2, 3, 4, batch=3 * 6)
    assert (plan.num_ranks, plan.world, plan.samples, plan.sizes) == (2, 6, 6, (2, 2, 1, 1))


def test_ranks_are_numbered_with_the_replica_innermost():
    plan = replicated(3, 2, 4, placement=[2, 0, 1])
    numbers = [[plan.global_rank(rank, replica) for replica in range(2)] for rank in plan.ranks]
    assert numbers == [[0, 1], [2, 3], [4, 5]]
    assert [plan.process(0, replica) for replica in range(2)] == [4, 5]  # the pipeline begins on rank 2
    places = [plan.place_of(process) for process in range(plan.world)]
    assert [plan.process(position, replica) for position, replica in places] == list(range(plan.world))


def test_ranks_of_a_replica_may_follow_each_other_instead():
    plan = replicated(3, 2, 4, placement=[2, 0, 1], order=["tensor", "pipeline", "data"])
    numbers = [[plan.global_rank(rank, replica) for replica in range(2)] for rank in plan.ranks]
    assert numbers == [[0, 3], [1, 4], [2, 5]]
    assert [plan.process(0, replica) for replica in range(2)] == [2, 5]
    again = parse_plan(parse_yaml(plan_text(plan), "plan.yaml"))
    assert again.dimensions == plan.dimensions == ("tensor", "pipeline", "data")


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.sampled_from([SUMS_INSIDE, MESSAGES_INSIDE]))
def test_every_device_has_one_place_in_a_mesh(ranks, replicas, tensor, order):
    mesh = Mesh(ranks, replicas, tensor, order)
    numbers = [mesh.number(rank, replica) for rank in range(ranks) for replica in range(replicas)]
    assert sorted(numbers) == list(range(0, ranks * replicas * tensor, tensor))
    for number in range(ranks * replicas * tensor):
        assert mesh.number(*mesh.place(number)) == number // tensor * tensor
    for per_node in range(1, 9):
        members, nodes = mesh.group(per_node)
        if mesh.is_alike(per_node) and per_node % tensor == 0:
            for rank in range(ranks):
                at = [mesh.number(rank, replica) // per_node for replica in range(replicas)]
                assert {at.count(node) for node in at} == {members} or nodes == 1
                assert len(set(at)) == nodes


def test_the_order_decides_what_crosses_the_network():
    """Two nodes of two: messages are large in one model and weights in the other."""
    cluster = {"nodes": 2, "devices_per_node": 2, "network": {"bandwidth": "10 B/s"}}
    for messages, weights, better in ((50.0, 1.0, MESSAGES_INSIDE), (1.0, 500.0, SUMS_INSIDE)):
        model = layers([1.0] * 2, [2.0] * 2, [messages] * 2, [4.0] * 2, parameters=weights)
        settings = {"batch": 8, "bandwidth": "100 B/s", "replicas": 2, "cluster": cluster}
        both = [plan(model, 4, order=list(order), **settings) for order in (SUMS_INSIDE, MESSAGES_INSIDE)]
        assert [(one.group, bool(one.nic_route(0))) for one in both] == [((2, 1), True), ((1, 2), False)]
        assert min(both, key=lambda one: step_time_s(simulate(one))).dimensions == better


def test_with_one_replica_ranks_have_their_own_numbers():
    plan = equal_stages(3, 4, placement=[0, 2, 5], cluster={"devices_per_node": 6})
    assert [plan.global_rank(rank) for rank in plan.ranks] == [0, 2, 5]
    assert [plan.process(position) for position in range(3)] == [0, 1, 2]


def test_slowdowns_nodes_and_cores_are_those_of_the_rank_in_the_cluster():
    plan = replicated(2, 4, 2, cluster=NODES | {"slowdown": {5: 2.0}, "cores": 4})
    assert [[plan.slowdown(stage, d) for d in range(4)] for stage in range(2)] == [[1, 1, 1, 1], [1, 2, 1, 1]]
    assert [[plan.node_of(rank, d) for d in range(4)] for rank in range(2)] == [[0] * 4, [1] * 4]
    assert [plan.core(1, d) for d in range(4)] == [0, 1, 2, 3]
    assert plan.crowded_nodes == frozenset()


@pytest.mark.parametrize(
    ("choices", "cluster", "message"),
    [
        ({"replicas": 3}, {}, "plan.replicas: found 3, expected a divisor of the batch of 8"),
        ({"replicas": 8}, {}, "plan.microbatches: found 2, expected at most a replica's share of the batch, 1"),
        ({"replicas": 4}, {"devices_per_node": 6}, "plan.replicas: found 4, expected at most 3: each replica needs 2"),
        ({"replicas": 0}, {}, "plan.replicas: "),
        ({}, {"spine": {"bandwidth": "1 GB/s"}}, "cluster.nodes_per_switch: is missing"),
        ({}, {"nodes_per_switch": 2}, "cluster.spine: is missing"),
        ({}, NODES | {"nodes_per_switch": 1, "spine": {"bandwidth": "2 GB/s"}}, "cluster.spine: has more bandwidth"),
        (
            {"order": ["pipeline", "data", "tensor"]},
            {},
            "plan.order: found ['pipeline', 'data', 'tensor'], expected [te",
        ),
        (
            {"replicas": 4, "order": ["tensor", "pipeline", "data"]},
            {"nodes": 3, "devices_per_node": 3, "network": {"bandwidth": "1 GB/s"}},
            "plan.replicas: found 4 of 2 devices each, expected as many in each node of 3",
        ),
        ({"shard": "gradients"}, {}, "plan.shard: "),
        (
            {"replicas": 2, "placement": [0, 3]},
            {"devices_per_node": 6},
            "plan.placement: found rank 3, expected at most 2",
        ),
        ({"replicas": 2}, {"slowdown": {4: 2.0}}, "cluster.slowdown.4: found 4, expected 0 to 3 with 2 stages and 2"),
        (
            {"replicas": 4},
            {"nodes": 4, "devices_per_node": 3, "network": {"bandwidth": "1 GB/s"}},
            "plan.replicas: found 4, expected a divisor or a multiple of the 3 devices of a node",
        ),
    ],
)
def test_what_cannot_be_is_refused_where_it_stands(choices, cluster, message):
    with pytest.raises(InputError) as error:
        equal_stages(2, 2, batch=8, cluster=cluster, **choices)
    assert message in str(error.value)


def test_replicas_are_swept_like_other_choices():
    data = {
        "model": {"kind": "layers", "layers": [{"name": "layer", "repeat": 2, "forward": "1 ms"}]},
        "batch": 8,
        "cluster": {"device": {"memory": "1 GiB"}, "link": {"bandwidth": "1 GB/s"}},
        "plan": {"stages": 2, "microbatches": 2, "replicas": [1, 2, 4], "shard": ["none", "optimizer"]},
    }
    found = [(point.plan.replicas, point.plan.shard) for point in parse_scenario(Document("test.yaml", data))]
    assert found == [(1, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer"), (4, "none"), (4, "optimizer")]


def test_a_plan_file_holds_them_and_says_nothing_of_a_single_pipeline():
    plan = replicated(2, 2, 4, shard="optimizer")
    again = parse_plan(parse_yaml(plan_text(plan), "plan.yaml"))
    assert (again.replicas, again.shard, again.sizes) == (2, "optimizer", plan.sizes)
    assert "replicas" not in parse_yaml(plan_text(equal_stages(2, 4)), "plan.yaml").data


def test_what_knows_one_pipeline_only_says_so():
    with pytest.raises(InputError, match=r"plan.replicas: found 2, expected 1: --engine torch"):
        only_one_pipeline(replicated(2, 2, 4), "--engine torch")


# --- collectives ---------------------------------------------------------------------------------------------------


def times(made: Plan, D: int, shard: str) -> Plan:
    """The same plan D times, each with its batch: a slowdown of rank k is now one of rank k / D in one replica."""
    return replace(made, replicas=D, shard=shard, scenario=replace(made.scenario, batch=made.scenario.batch * D))


replicated_plans = st.builds(times, random_plans(max_microbatches=5), st.integers(2, 4), st.sampled_from(SHARDS))

WEIGHTS = layers([1.0] * 2, [2.0] * 2, [1.0] * 2, [4.0] * 2, parameters=100)


@pytest.mark.parametrize(
    ("shard", "lane"),
    [
        ("none", [("0S", 15.02, 16.02)]),  # 2 (D-1)/D of 100 B at 100 B/s
        ("optimizer", [("0S", 15.02, 15.52), ("0G", 15.52, 16.02)]),
        ("parameters", [("0G", 0.0, 0.5), ("0S", 15.52, 16.02)]),
    ],
)
def test_a_lane_sums_after_the_last_backward_and_gathers_before_the_first_forward_or_after_the_update(shard, lane):
    step = simulate(plan(WEIGHTS, 4, batch=8, bandwidth="100 B/s", replicas=2, shard=shard))
    rank = step.ranks[0]
    found = [(str(one.action), *at) for one, *at in zip(rank.lane, rank.lane_start_s, rank.lane_end_s, strict=True)]
    assert [name for name, *_ in found] == [name for name, *_ in lane]
    assert [at for _, *at in found] == [pytest.approx(at) for _, *at in lane]
    assert step_time_s(step) == pytest.approx(16.02)


@settings(max_examples=30)
@given(replicated_plans)
def test_each_collective_comes_once_after_its_backwards_and_before_the_update(made):
    program, step = program_of(made), simulate(made, memory=False)
    kinds = {"none": ["S"], "optimizer": ["S", "G"], "parameters": ["S", "G"]}[made.shard]
    expected = sorted((kind, stage) for kind in kinds for stage in range(made.num_stages))
    assert sorted((one.kind, one.stage) for lane in program.lanes for one in lane) == expected
    for one in step.replicas or (step,):
        for timeline in one.ranks:
            assert (timeline.lane_start_s[1:] >= timeline.lane_end_s[:-1]).all()
            ends = timeline.actions.are("B") | timeline.actions.are("W")
            for collective, start, end in zip(timeline.lane, timeline.lane_start_s, timeline.lane_end_s, strict=True):
                own = timeline.actions.stages == collective.stage
                if collective.kind == "S":
                    assert start >= timeline.end_s[ends & own].max()
                    assert timeline.start_s[-1] >= end
                elif made.shard == "parameters":
                    assert timeline.start_s[timeline.actions.are("F") & own].min() >= end
                else:
                    assert start >= timeline.end_s[-1]


@settings(max_examples=60)
@given(replicated_plans)
def test_replicas_are_evaluated_as_they_are_simulated(made):
    (found,) = evaluate([made])
    check_equal(found, step_metrics(simulate(made)))


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_dividing_more_never_raises_memory_with_any_optimizer_and_precision(optimizer, precision):
    shape = {"kind": "transformer", "layers": 4, "hidden": 512, "heads": 8, "sequence": 256, "vocab": 5000}
    fixed = {"stages": 2, "replicas": 4, "microbatches": 2, "schedule": "1f1b", "checkpoint": "never"}
    data = {"name": "test", "model": shape, "batch": 32, "precision": precision, "optimizer": optimizer}
    data |= {"cluster": {"device": "a100-80gb", "link": "nvlink3"}, "plan": fixed | {"shard": list(SHARDS)}}
    whole, *divided = predict_all([make_plan(point) for point in parse_scenario(Document("test.yaml", data))])
    for one in divided:
        assert all(less <= more for less, more in zip(one.peak_memory_bytes, whole.peak_memory_bytes, strict=True))
    assert divided[0].peak_memory_bytes < whole.peak_memory_bytes or optimizer == "sgd"


@settings(max_examples=12)
@given(replicated_plans)
def test_the_same_holds_for_each_sample_of_jitter_which_every_replica_has_for_itself(made):
    jittered = with_jitter(made)
    for sample, found in zip((3, 0), evaluate_samples(jittered, [3, 0]), strict=True):
        check_equal(found, step_metrics(simulate(jittered, sample=sample)))


@settings(max_examples=20)
@given(replicated_plans)
def test_with_collectives_for_nothing_alike_replicas_are_as_one(made):
    cluster = made.scenario.cluster.model_copy(update={"slowdown": {}})
    made = replace(made, scenario=replace(made.scenario, cluster=cluster))
    alone = replace(made, replicas=1, shard="none", scenario=replace(made.scenario, batch=made.samples))
    free = step_metrics(simulate(replace(made, shard="none"), effects=Effects(collectives=False)))
    check_equal(free, step_metrics(simulate(alone)))


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(2, 5))
def test_on_a_perfect_network_replicas_are_as_many_times_as_fast(K, M, D):
    one, many = (predict(replicated(K, count, M)) for count in (1, D))
    assert many.step_time_s == pytest.approx(one.step_time_s, rel=EXACT)
    assert many.throughput_samples_s == pytest.approx(D * one.throughput_samples_s, rel=EXACT)
    assert worth_of(many.plan, many.step_time_s).devices == D * K


@settings(max_examples=20)
@given(replicated_plans)
def test_sharding_never_raises_a_ranks_memory(made):
    peaks = {shard: step_metrics(simulate(replace(made, shard=shard))).peak_memory_bytes for shard in SHARDS}
    assert (peaks["optimizer"] <= peaks["none"]).all()
    assert (peaks["parameters"] <= peaks["none"] + 1).all()  # shards are rounded up


@settings(max_examples=40)
@given(replicated_plans, st.floats(1.1, 10.0))
def test_a_slower_link_never_makes_a_step_faster(made, factor):
    link = made.scenario.cluster.link
    slower = made.scenario.cluster.model_copy(update={"link": replace(link, bandwidth=link.bandwidth / factor)})
    slow = replace(made, scenario=replace(made.scenario, cluster=slower))
    found, slow_found = evaluate([made, slow], memory=False)
    assert slow_found.step_time_s >= found.step_time_s * (1 - EXACT)


def test_a_straggler_in_one_replica_holds_up_the_sums_of_all():
    alike, held_up = (
        simulate(plan(WEIGHTS, 4, batch=8, bandwidth="100 B/s", replicas=2, cluster={"slowdown": slowdown}))
        for slowdown in ({}, {3: 2.0})
    )
    assert (len(alike.replicas), len(held_up.replicas)) == (0, 2)
    other, slow = held_up.replicas
    assert other.ranks[0].last_backward_s == pytest.approx(alike.ranks[0].last_backward_s)
    assert other.ranks[0].lane_start_s == pytest.approx(slow.ranks[0].last_backward_s)
    assert other.ranks[0].last_end_s == slow.ranks[0].last_end_s == step_time_s(held_up)


def between_nodes(D: int, **settings: object) -> Plan:
    cluster = {"nodes": 2 * D // 2, "devices_per_node": 2, "network": {"bandwidth": "20 B/s"}}
    return plan(WEIGHTS, 4, batch=4 * D, bandwidth="100 B/s", replicas=D, **{"cluster": cluster} | settings)


def test_replicas_on_a_node_share_its_nic_and_one_stands_for_all():
    """D = 2 on nodes of 2: both send at the same time, so that each has half of the NIC; all of them say the same."""
    made = between_nodes(2)
    assert (made.group, made.sharers, made.shared_nics, obstacle(made)) == ((2, 1), 2, frozenset(), None)
    (found,) = evaluate([made])
    check_equal(found, step_metrics(simulate(made)))
    barely = made.scenario.cluster.model_copy(update={"slowdown": {0: 1.0 + 1e-12}})
    all_of_them = replace(made, scenario=replace(made.scenario, cluster=barely))
    assert all_of_them.simulated_replicas == 2
    assert obstacle(all_of_them) is not None
    assert step_time_s(simulate(all_of_them)) == pytest.approx(found.step_time_s, rel=1e-6)


@st.composite
def meshes_on_nodes(draw):
    """K equal stages D times on nodes with NICs, numbered either way, behind switches or not."""
    K, D, per_node = draw(st.integers(1, 4)), draw(st.sampled_from([2, 3, 4, 6])), draw(st.integers(1, 6))
    order = draw(st.sampled_from([SUMS_INSIDE, MESSAGES_INSIDE]))
    assume(Mesh(K, D, 1, order).is_alike(per_node))
    bandwidth = draw(st.sampled_from([10, 50, 200]))
    cluster = {"nodes": -(-K * D // per_node), "devices_per_node": per_node, "nics": draw(st.sampled_from([1, 2, 4]))}
    cluster |= {"network": {"bandwidth": f"{bandwidth} B/s", "latency": "10 ms"}}
    slower = draw(st.sampled_from([None, 1, 2, 5]))
    if slower:
        spine = {"bandwidth": f"{bandwidth / slower} B/s", "latency": "10 ms"}
        cluster |= {"nodes_per_switch": draw(st.integers(1, 3)), "spine": spine}
    model = layers([1.0] * K, [2.0] * K, [8.0] * K, [4.0] * K, parameters=draw(st.sampled_from([10, 200])))
    choices = {"replicas": D, "order": list(order), "shard": draw(st.sampled_from(SHARDS)), "batch": 4 * D}
    return plan(model, 4, bandwidth="100 B/s", cluster=cluster, **choices)


@settings(max_examples=80)
@given(meshes_on_nodes())
def test_one_replica_stands_for_all_however_devices_are_numbered(made):
    """All of them simulated, which a slowdown that does not count makes necessary, and one for all: the same."""
    barely = made.scenario.cluster.model_copy(update={"slowdown": {0: 1.0 + 1e-12}})
    all_of_them = replace(made, scenario=replace(made.scenario, cluster=barely))
    assert all_of_them.simulated_replicas == made.replicas
    alone = step_time_s(simulate(made, memory=False))
    assert step_time_s(simulate(all_of_them, memory=False)) == pytest.approx(alone, rel=1e-6)
    if obstacle(made) is None:
        assert evaluate([made], memory=False)[0].step_time_s == pytest.approx(alone, rel=1e-9)


def test_replicas_that_share_nics_unevenly_are_all_simulated():
    """Three on a node with two NICs: one has its own, and the other two wait for each other."""
    model = layers([1.0] * 4, [2.0] * 4, [8.0] * 4, [4.0] * 4, parameters=100)
    cluster = {"nodes": 4, "devices_per_node": 3, "network": {"bandwidth": "10 B/s"}}
    for nics, simulated in ((1, 1), (2, 3), (3, 1)):
        made = plan(model, 4, batch=12, bandwidth="100 B/s", replicas=3, cluster=cluster | {"nics": nics})
        assert made.simulated_replicas == simulated


@settings(max_examples=40)
@given(meshes_on_nodes(), st.floats(1.1, 10.0))
def test_a_slower_nic_never_makes_a_step_faster(made, factor):
    cluster = made.scenario.cluster
    networks = {"network": cluster.network, "spine": cluster.spine}
    slower = {name: one and replace(one, bandwidth=one.bandwidth / factor) for name, one in networks.items()}
    slowed = replace(made, scenario=replace(made.scenario, cluster=cluster.model_copy(update=slower)))
    if obstacle(made) is None:  # where traffic shares a NIC, less of it may come out better
        before, after = (step_time_s(simulate(one, memory=False)) for one in (made, slowed))
        assert after >= before * (1 - 1e-9)


@settings(max_examples=40)
@given(meshes_on_nodes())
def test_a_spine_as_fast_as_the_network_is_none_and_a_slower_one_never_helps(made):
    cluster = made.scenario.cluster
    flat, wide = (cluster.model_copy(update={"spine": spine}) for spine in (None, cluster.spine and cluster.network))
    seconds, without, with_it = (
        step_time_s(simulate(replace(made, scenario=replace(made.scenario, cluster=one)), memory=False))
        for one in (cluster, flat, wide)
    )
    assert with_it == pytest.approx(without, rel=1e-9)
    if obstacle(made) is None:  # where traffic shares a NIC, less of it may come out better
        assert seconds >= without * (1 - 1e-9)


@pytest.mark.parametrize("shard", SHARDS)
def test_sums_and_messages_share_nics_fairly(shard):
    """D = 4 on nodes of 2: a stage's four ranks are on two nodes, whose sums meet messages of the other stage."""
    made = between_nodes(4, shard=shard)
    assert made.group == (2, 2)
    assert "messages and collectives share the NIC" in str(obstacle(made))
    barely = made.scenario.cluster.model_copy(update={"slowdown": {0: 1.0 + 1e-12}})
    all_of_them = simulate(replace(made, scenario=replace(made.scenario, cluster=barely)))
    alone = step_time_s(simulate(made, effects=Effects(sharing=False)))
    assert step_time_s(simulate(made)) == pytest.approx(step_time_s(all_of_them), rel=1e-6)
    assert step_time_s(simulate(made)) >= alone


def test_replicas_that_share_cores_are_all_simulated():
    made = replicated(1, 4, 3, cluster={"cores": 2})
    assert made.simulated_replicas == 4
    assert step_time_s(simulate(made)) == pytest.approx(2 * step_time_s(simulate(replicated(1, 2, 3))))


def test_each_rank_updates_its_share_of_the_weights():
    """The bytes of a rank with D = 4: 100 of weights, as much of gradients, and Adam's state twice that, in fp32."""
    model = layers([1.0], [2.0], [0.0], [0.0], parameters=100)
    held = {shard: predict(plan(model, 1, batch=4, replicas=4, shard=shard)) for shard in SHARDS}
    assert [held[shard].peak_memory_bytes[0] for shard in SHARDS] == [400, 250, 250]


@settings(max_examples=30)
@given(replicated_plans, st.sampled_from(["sgd", "momentum", "adam"]))
def test_dividing_more_never_raises_the_memory_of_a_rank(made, optimizer):
    scenario = replace(made.scenario, optimizer=optimizer)
    plans = [replace(made, shard=shard, scenario=scenario) for shard in SHARDS]
    peaks = [step_metrics(simulate(one)).peak_memory_bytes for one in plans]
    # A rank's own shard is a part of what is gathered, so that nothing is held twice.
    assert (peaks[0] >= peaks[1]).all()
    assert (peaks[0] >= peaks[2]).all()


@settings(max_examples=12)
@given(replicated_plans)
def test_the_waterfall_has_a_part_for_collectives_and_still_sums_to_the_step(made):
    prediction = predict(made)
    assert sum(prediction.breakdown_s.values()) == pytest.approx(prediction.step_time_s, rel=EXACT)
    free = step_time_s(simulate(made, effects=Effects(collectives=False), memory=False))
    assert prediction.breakdown_s["collectives"] == pytest.approx(prediction.step_time_s - free, abs=1e-6)
    (fast,) = predict_all([made], fast=True)
    assert fast.breakdown_s == pytest.approx(prediction.breakdown_s, abs=1e-6)


@settings(max_examples=30)
@given(replicated_plans)
def test_the_critical_path_leads_through_collectives(made):
    cluster = made.scenario.cluster.model_copy(update={"slowdown": {}})
    made = replace(made, scenario=replace(made.scenario, cluster=cluster))
    step = simulate(made)
    path = critical_path(made, step)
    gaps = np.array([later.start_s - earlier.end_s for earlier, later in pairwise(path)])
    assert (abs(gaps) <= made.profile.action_overhead_s + made.profile.hop_overhead_s + 1e-9).all()
    assert path[-1].end_s == max(timeline.last_end_s for timeline in step.ranks)


# --- the planner ---------------------------------------------------------------------------------------------------


def to_choose_from(memory: str, **choices: object) -> dict[str, object]:
    """Four layers with weights on eight devices, of which two are in each of four nodes."""
    return {
        "model": layers([1.0, 2.0, 1.0, 1.5], [2.0, 4.0, 2.0, 3.0], [1.0] * 4, [4.0] * 4, parameters=100),
        "batch": 16,
        "dtype": "fp32",
        "cluster": {"device": {"memory": memory}, "link": {"bandwidth": "400 B/s"}}
        | {"nodes": 4, "devices_per_node": 2, "network": {"bandwidth": "100 B/s"}},
        "plan": {"schedule": ["gpipe", "1f1b"], "checkpoint": ["never", "always"], **choices},
    }


def test_the_planner_chooses_replicas_and_shards_and_is_never_worse_than_a_sweep():
    memory = "1200 B"
    data = to_choose_from(memory, replicas=[1, 2, 4, 8], shard=list(SHARDS))
    found = advise(space_of(list(parse_scenario(Document("test.yaml", data)))))
    swept = []
    for K, D in ((1, 8), (2, 4), (4, 2), (1, 4), (2, 2), (4, 1)):
        counts = [M for M in (1, 2, 4, 8, 16) if M <= 16 // D]
        choices = {"stages": K, "replicas": D, "shard": list(SHARDS), "microbatches": counts}
        points = parse_scenario(Document("test.yaml", to_choose_from(memory, **choices)))
        swept += list(predict_all([make_plan(point) for point in points]))
    fitting = [one.step_time_s for one in swept if one.fits]
    assert found.fits == bool(fitting)
    assert found.recommended.step_time_s <= min(fitting, default=np.inf) * (1 + EXACT)


def test_the_planner_says_why_not_copies_of_the_whole_model():
    data = to_choose_from("1000 B", replicas=[1, 2, 4, 8])
    found = advise(space_of(list(parse_scenario(Document("test.yaml", data)))))
    assert found.recommended.plan.replicas > 1 < found.recommended.plan.num_ranks
    assert str(why_not_copies(found)).startswith("8 copies of the whole model would not fit: they need 1.")
    assert "D=" in found.reason


@pytest.mark.parametrize("shard", SHARDS)
def test_the_planner_counts_the_bytes_of_weights_as_the_memory_does(shard):
    choices = {
        "stages": 1,
        "replicas": 4,
        "shard": shard,
        "microbatches": 4,
        "schedule": "gpipe",
        "checkpoint": "never",
    }
    (point,) = parse_scenario(Document("test.yaml", to_choose_from("9000 B", **choices)))
    made = make_plan(point)
    tables = IntervalTables(made.profile, made.scenario, [0, 4], made.sizes, 4)
    held = step_bytes([made])
    assert tables.per_weight * made.profile.parameter_bytes.sum() == (held.parameters + held.optimizer).sum()


def test_numbers_of_replicas_that_are_left_out_are_one():
    space = space_of(list(parse_scenario(Document("test.yaml", to_choose_from("4000 B")))))
    assert [frame[:2] for frame in space.frames] == [(1, "none")]
