"""Tensor groups, attention recomputed by itself, nodes with several NICs or with other devices: predicted, refused."""

import pytest
from plans import layers as layer_costs
from plans import plan, scenario

from gpipe_sim.base.files import InputError, parse_yaml
from gpipe_sim.cost.collectives import collective_s
from gpipe_sim.explain.predict import predict, predict_all
from gpipe_sim.make.making import make_plan
from gpipe_sim.make.planfile import parse_plan, plan_text
from gpipe_sim.plan.plan import only_single_members, only_what_runs

GiB = 2**30
LINK = {"bandwidth": "200 GB/s", "latency": "5 us"}
NETWORK = {"bandwidth": "25 GB/s", "latency": "10 us"}


def gpt(*, model=None, cluster=None, batch=32, precision="mixed", **choices):
    """Sixteen blocks with classic attention on nodes of eight A100."""
    shape = {"layers": 16, "hidden": 2048, "heads": 16, "sequence": 1024, "vocab": 51200, "attention": "classic"}
    own = {"device": "a100-80gb", "nodes": 2, "devices_per_node": 8, "link": LINK, "network": NETWORK}
    spec = {"stages": 1, "microbatches": 4, "schedule": "1f1b", "checkpoint": "never"} | choices
    data = {"name": "test", "model": {"kind": "transformer"} | shape | (model or {}), "batch": batch}
    return make_plan(scenario(data | {"precision": precision, "cluster": own | (cluster or {}), "plan": spec}))


def test_a_group_of_one_is_what_there_was():
    bare, one = predict(gpt(stages=2)), predict(gpt(stages=2, tensor=1, sequence_split=False))
    assert one.step_time_s == bare.step_time_s
    assert one.peak_memory_bytes == bare.peak_memory_bytes
    assert one.breakdown_s["tensor"] == 0


def test_on_a_perfect_link_a_group_is_as_much_faster_as_it_is_large():
    free = {
        "link": {"bandwidth": "inf GB/s"},
        "device": {"like": "a100-80gb", "launch": "0 s", "bandwidth": "1e9 GB/s"},
    }
    alone, four = (predict(gpt(cluster=free, tensor=T)) for T in (1, 4))
    assert alone.pipeline_time_s == pytest.approx(4 * four.pipeline_time_s)


def test_what_a_group_adds_are_four_collectives_of_each_block_in_each_pass():
    free, linked = (predict(gpt(tensor=4, cluster={"link": one})) for one in ({"bandwidth": "inf GB/s"}, LINK))
    boundary = 8 * 2 * 1024 * 2048
    each = collective_s("gather", boundary, 4, 200e9, 5e-6)
    waiting = 4 * 2 * (4 * 16 + 2) * each  # four micro-batches; embedding and head have one in each pass
    assert linked.pipeline_time_s - free.pipeline_time_s == pytest.approx(waiting)
    assert linked.breakdown_s["tensor"] == pytest.approx(waiting, rel=0.1), "latency is there once in one large call"
    assert sum(linked.breakdown_s.values()) == pytest.approx(linked.step_time_s)


def test_a_group_that_spans_nodes_pays_the_network_and_one_within_a_node_does_not():
    inside, across = (predict(gpt(tensor=8, cluster={"devices_per_node": each})) for each in (8, 4))
    assert across.step_time_s > 1.5 * inside.step_time_s
    assert "span 2 nodes" in across.verdict
    rails = predict(gpt(tensor=8, cluster={"devices_per_node": 4, "nics": 4}))
    assert inside.step_time_s < rails.step_time_s < across.step_time_s


@pytest.mark.parametrize("split", [True, False])
def test_memory_of_a_rank_falls_with_the_size_of_its_group(split):
    peaks = [max(predict(gpt(tensor=T, sequence_split=split)).peak_memory_bytes) for T in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    whole = max(predict(gpt(tensor=8, sequence_split=False)).peak_memory_bytes)
    assert max(predict(gpt(tensor=8)).peak_memory_bytes) < whole


def test_what_is_kept_follows_korthikanti():
    """Per block and sample sh(34 + 5as/h) / T, without the quadratic part 34sh / T (equations 4 and 6)."""
    s, h, a, T = 1024, 2048, 16, 4
    block = s * h * (34 + 5 * a * s / h) / T
    kept, selective = (
        predict(gpt(tensor=T, stages=2, microbatches=1, batch=1, balance=[9, 10], checkpoint=mode, recompute_unit=unit))
        for mode, unit in (("never", "stage"), ("always", "attention"))
    )
    embedding = 3 * s * h / T
    assert max(kept.step.memory[0].parts["activations"]) == pytest.approx(8 * block + embedding)
    assert max(selective.step.memory[0].parts["activations"]) == pytest.approx(8 * 34 * s * h / T + embedding)


def test_attention_alone_costs_less_time_than_whole_layers_and_more_than_nothing():
    steps = [
        predict(gpt(tensor=2, checkpoint=mode, recompute_unit=unit)).step_time_s
        for mode, unit in (("never", "stage"), ("always", "attention"), ("always", "layer"))
    ]
    assert steps == sorted(steps)
    assert steps[1] - steps[0] < 0.5 * (steps[2] - steps[0])


def test_simulated_and_evaluated_are_the_same_with_groups_replicas_and_rails():
    plans = [
        gpt(stages=2, tensor=T, replicas=D, recompute_unit=unit, checkpoint="always", cluster={"nics": nics})
        for T, D, unit, nics in ((2, 2, "attention", 1), (4, 2, "layer", 8), (2, 4, "attention", 8), (8, 1, "layer", 1))
    ]
    for slow, fast in zip(map(predict, plans), predict_all(plans), strict=True):
        assert fast.step_time_s == pytest.approx(slow.step_time_s, rel=1e-9)
        assert fast.peak_memory_bytes == slow.peak_memory_bytes
        assert (
            slow.plan.world == slow.to_dict()["devices"] == slow.plan.num_ranks * slow.plan.replicas * slow.plan.tensor
        )


def test_a_tensor_group_pays_the_spine_only_where_it_is_behind_several_switches():
    spine = {"spine": {"bandwidth": "1 GB/s"}}
    steps = [
        predict(gpt(tensor=16, cluster=cluster)).step_time_s
        for cluster in ({}, spine | {"nodes_per_switch": 2}, spine | {"nodes_per_switch": 1})
    ]
    assert steps[0] == steps[1] < steps[2]


def test_more_nics_are_never_slower_and_share_what_devices_send():
    steps = [predict(gpt(replicas=16, batch=64, cluster={"nics": nics})).step_time_s for nics in (1, 2, 4, 8)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 1.1 * steps[-1]


def test_a_straggler_holds_up_its_group():
    slow, plain = (predict(gpt(tensor=4, cluster={"slowdown": factors})) for factors in ({2: 2.0}, {}))
    assert slow.pipeline_time_s == pytest.approx(2 * plain.pipeline_time_s)


def test_gradients_in_fp32_take_eighteen_bytes_for_a_weight():
    first = gpt(precision="mixed_fp32_gradients", tensor=4).profile.parameter_bytes.sum() / 2
    parts = predict(gpt(precision="mixed_fp32_gradients", tensor=4)).step.memory[0].parts
    held = max(parts["parameters"]) + max(parts["optimizer"]) + max(parts["gradients"])
    assert held == pytest.approx(18 * first)


def test_instead_of_gradients_in_fp32_autograd_gets_tensors_of_a_blocks_weights():
    whole, sliced = (gpt(precision="mixed_fp32_gradients", tensor=tensor).profile for tensor in (1, 2))
    plain = gpt(precision="mixed").profile
    size = plain.sizes[0]
    for name in ("workspace_backward_bytes", "workspace_accumulate_bytes"):
        column = getattr(whole.at(size), name)
        usual = plain.at(size).workspace_backward_bytes
        if name == "workspace_accumulate_bytes":  # gradients are added to what is there, and not made beside it
            usual = usual - 2 * whole.parameter_bytes
        more = column - usual
        assert more[0] == 0
        assert more[1:-1] == pytest.approx(whole.parameter_bytes[1])
        assert more[-1] == pytest.approx(whole.parameter_bytes[1] + whole.parameter_bytes[-1])
    assert sliced.parameter_bytes[1] == pytest.approx(whole.parameter_bytes[1] / 2, rel=0.01)


def test_a_plan_file_says_it():
    made = gpt(tensor=4, stages=2, checkpoint="always", recompute_unit="attention")
    again = parse_plan(parse_yaml(plan_text(made), "plan.yaml"))
    assert (again.tensor, again.recompute_unit, again.world) == (4, "attention", 8)
    assert predict(again).step_time_s == predict(made).step_time_s
    text = plan_text(made).replace("\ntensor: 4", "\ntensor: 2")
    with pytest.raises(InputError, match=r"plan.yaml:\d+: tensor: found 2, expected the 4 that the profile is of"):
        parse_plan(parse_yaml(text, "plan.yaml"))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"tensor": 3}, "plan.tensor: found 3, expected a divisor of the heads, 16"),
        ({"tensor": 32}, "plan.tensor: found 32, expected a divisor of the heads, 16"),
        ({"tensor": 8, "stages": 4}, "plan.tensor: found 8, expected at most 4: each of 4 ranks is so many devices"),
        (
            {"tensor": 4, "replicas": 8},
            "plan.replicas: found 8, expected at most 4: each replica needs 4 of 16 devices",
        ),
        (
            {"tensor": 4, "cluster": {"devices_per_node": 6}},
            "expected a divisor or a multiple of the 6 devices of a node",
        ),
        ({"tensor": 2, "cluster": {"cores": 2}}, "plan.tensor: found 2, expected 1 with cluster.cores"),
        ({"recompute_unit": "attention", "model": {"attention": "flash"}}, "flash attention keeps nothing"),
        ({"recompute_unit": "attention", "schedule": "zb_h1"}, "found attention, expected stage with zb_h1"),
    ],
)
def test_what_cannot_be_is_refused(choices, message):
    with pytest.raises(InputError, match=message):
        gpt(**choices)


def test_layers_written_by_hand_cannot_be_sliced():
    for choice, message in (
        ({"tensor": 2}, "do not say what a slice"),
        ({"recompute_unit": "attention"}, "do not say"),
    ):
        with pytest.raises(InputError, match=message):
            plan(layer_costs([1.0, 1.0], [2.0, 2.0]), 4, **choice)


def test_a_profile_is_of_one_size_of_groups(tmp_path):
    sliced = gpt(tensor=2)
    sliced.profile.save(tmp_path / "two.json")
    data = {"name": "test", "model": {"kind": "profile", "path": str(tmp_path / "two.json")}, "batch": 32}
    cluster = {"device": "a100-80gb", "link": LINK}
    spec = {"stages": 1, "microbatches": 4, "schedule": "1f1b", "checkpoint": "never"}
    again = make_plan(scenario(data | {"cluster": cluster, "plan": spec | {"tensor": 2}}))
    assert predict(again).step_time_s == pytest.approx(predict(sliced).step_time_s)
    with pytest.raises(InputError, match=r"plan.tensor: found 4, expected 2: .* was measured with 2"):
        make_plan(scenario(data | {"cluster": cluster, "plan": spec | {"tensor": 4}}))


def test_what_nothing_executes_yet_is_refused_where_it_would_run():
    with pytest.raises(InputError, match=r"model.fused_loss: found .* gpipe run does not know"):
        only_what_runs(gpt(model={"fused_loss": True}), "gpipe run")
    with pytest.raises(InputError, match=r"plan.tensor: found 2, expected 1: --engine torch does not know"):
        only_single_members(gpt(tensor=2), "--engine torch")


def mixed(*groups, **choices):
    data = {"model": {"kind": "transformer", "preset": "gpt2-medium"}, "name": "test", "batch": 8}
    cluster = {"groups": list(groups), "devices_per_node": 2, "link": LINK, "network": NETWORK}
    spec = {"stages": 4, "microbatches": 8, "schedule": "1f1b", "checkpoint": "never"} | choices
    return make_plan(scenario(data | {"cluster": cluster, "plan": spec}))


def test_groups_of_one_kind_are_a_plain_cluster():
    two = predict(mixed({"nodes": 1, "device": "a100-80gb"}, {"device": "a100-80gb"}))
    one = predict(mixed({"nodes": 2, "device": "a100-80gb"}))
    assert two.step_time_s == one.step_time_s
    assert two.plan.scenario.cluster.slowdown == {}
    assert two.worth().to_dict() | {"price_source": ""} == one.worth().to_dict() | {"price_source": ""}


def test_other_devices_are_as_fast_as_they_attain_and_the_smallest_memory_is_the_limit():
    made = mixed({"device": "a100-80gb"}, {"device": "h100-80gb"})
    assert [made.rank_slowdown(rank) for rank in range(4)] == pytest.approx([1, 1, 312 / 989, 312 / 989])
    assert made.balance[3] > made.balance[0], "more layers where they take less time"
    worth = predict(made).worth()
    assert worth.peak_flops == pytest.approx((312e12 + 989e12) / 2)
    assert worth.price.per_hour == pytest.approx((1.30 + 3.00) / 2)
    small = mixed({"device": "a100-80gb"}, {"device": "a100-40gb"})
    assert small.memory_limit == pytest.approx(38.5 * GiB)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "a100-80gb"}, "device is given beside groups"),
        ({"devices_per_node": None}, "cluster.devices_per_node: is missing: with groups"),
        ({"groups": [{"nodes": 1}]}, "device: is missing"),
    ],
)
def test_groups_that_cannot_be_are_refused(changes, message):
    cluster = {"groups": [{"device": "a100-80gb"}], "devices_per_node": 2, "link": LINK, "network": NETWORK} | changes
    cluster = {name: value for name, value in cluster.items() if value is not None}
    data = {"model": {"kind": "transformer", "preset": "gpt2"}, "name": "test", "batch": 8, "cluster": cluster}
    with pytest.raises(InputError, match=message):
        scenario(data | {"plan": {"stages": 2, "microbatches": 4}})


def test_measured_layers_are_of_one_kind_of_device():
    cluster = {"groups": [{"device": "a100-80gb"}], "devices_per_node": 2, "link": LINK}
    data = {"name": "test", "batch": 8, "model": layer_costs([1.0], [2.0]), "cluster": cluster}
    with pytest.raises(InputError, match=r"cluster.groups: is of analytic transformers only"):
        scenario(data | {"plan": {"stages": 1, "microbatches": 4}})
