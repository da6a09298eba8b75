"""Scenario files: what is written means what it says, and every mistake is told at its line, all at once."""

import copy
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_sim.base.files import Document, InputError, parse_yaml
from gpipe_sim.scenario.catalog import LINKS, Link, find_device
from gpipe_sim.scenario.reading import load_scenario, parse_scenario
from gpipe_sim.scenario.schema import Layers, ProfileModel, PythonModel, Transformer

EXAMPLE = """\
name: transformer48_8xa100
model:
  kind: transformer
  layers: 48
  hidden: 2048
  heads: 32
  ffn: 8192
  vocab: 32000
  sequence: 1024
batch: 256
dtype: bf16
optimizer: adam
cluster:
  device: a100-80gb
  memory_reserve: 2 GiB
  nodes: 1
  devices_per_node: 8
  link: {bandwidth: 300 GB/s, latency: 5 us}
  network: {bandwidth: 25 GB/s, latency: 15 us}
  links: {2: {bandwidth: 12 GB/s, latency: 9 us}}
  overlap: true
  cores: 8
  slowdown: {3: 1.2}
  jitter: {cv: 0.05, samples: 200, seed: 0}
plan:
  stages: [2, 4, 8]
  microbatches: [1, 4, 32]
  checkpoint: always
  schedule: gpipe
  recompute: early
  backward: reverse
  balance: auto
  placement: auto
  window: 2
"""

BY_HAND = """\
name: by_hand
model:
  kind: layers
  layers:
    - {name: wide, repeat: 3, forward: 1 ms, backward: 3 ms, overhead: 10 us,
       output: 1 MiB, saved: 2 MiB, parameters: 4 MB}
    - name: narrow
      forward: 2 ms
batch: 8
cluster:
  device: {memory: 16 GiB}
  link: {bandwidth: inf GB/s}
plan:
  stages: 2
  microbatches: 4
"""


def read(text, *overrides):
    return parse_scenario(parse_yaml(text, "s.yaml"), *overrides)


def problems(text, *overrides):
    with pytest.raises(InputError) as caught:
        read(text, *overrides)
    return caught.value.problems


def problem(text, *overrides):
    (only,) = problems(text, *overrides)
    return only


def changed(old, new, text=EXAMPLE):
    assert text.count(old) == 1, old
    return text.replace(old, new)


def without(line_start, text=EXAMPLE):
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if not line.strip().startswith(line_start)]
    assert len(kept) == len(lines) - 1, line_start
    return "".join(kept)


def line_of(fragment, text):
    (line,) = (number for number, line in enumerate(text.splitlines(), 1) if fragment in line)
    return line


# --- what is written ------------------------------------------------------------------------------------------------


def test_the_example_means_what_it_says_in_si_units():
    scenario = read(EXAMPLE)[0]
    assert scenario.name == "transformer48_8xa100"
    assert (scenario.batch, scenario.dtype, scenario.optimizer, scenario.profile) == (256, "bf16", "adam", None)

    model = scenario.model
    assert isinstance(model, Transformer)
    assert (model.layers, model.hidden, model.heads, model.ffn_width) == (48, 2048, 32, 8192)
    assert (model.vocab, model.sequence, model.num_layers) == (32000, 1024, 51)

    cluster = scenario.cluster
    assert cluster.device == find_device("a100-80gb")
    assert cluster.memory_reserve == 2 * 2**30
    assert (cluster.nodes, cluster.devices_per_node, cluster.num_devices, cluster.cores) == (1, 8, 8, 8)
    assert (cluster.link.bandwidth, cluster.link.latency) == (300e9, 5e-6)
    assert (cluster.network.bandwidth, cluster.network.latency) == (25e9, 15e-6)
    assert cluster.links == {2: Link(name="custom", bandwidth=12e9, latency=9e-6)}
    assert cluster.overlap is True
    assert cluster.slowdown == {3: 1.2}
    assert (cluster.jitter.cv, cluster.jitter.samples, cluster.jitter.seed) == (0.05, 200, 0)

    plan = scenario.plan
    assert (plan.checkpoint, plan.schedule, plan.recompute, plan.backward) == ("always", "gpipe", "early", "reverse")
    assert (plan.balance, plan.placement, plan.window) == (None, None, 2)


def test_the_examples_two_lists_make_nine_points():
    sweep = read(EXAMPLE)
    assert sweep.name == "transformer48_8xa100"
    assert len(sweep) == len(list(sweep)) == 9
    assert [(point.plan.stages, point.plan.microbatches) for point in sweep] == [
        (2, 1), (2, 4), (2, 32), (4, 1), (4, 4), (4, 32), (8, 1), (8, 4), (8, 32),
    ]  # fmt: skip


def test_layers_by_hand_carry_their_own_costs():
    model = read(BY_HAND)[0].model
    assert isinstance(model, Layers)
    assert model.num_layers == 4
    wide, narrow = model.layers
    assert (wide.repeat, wide.forward, wide.backward, wide.overhead) == (3, 1e-3, 3e-3, 1e-5)
    assert (wide.output, wide.saved, wide.parameters) == (2**20, 2**21, 4e6)
    assert (narrow.repeat, narrow.forward, narrow.backward, narrow.overhead) == (1, 2e-3, None, 0)


def with_model(model, rest=""):
    return f"name: t\nmodel: {model}\nbatch: 8\ncluster: {{device: cpu, link: pcie4}}\n{rest}"


def test_a_profile_alone_is_a_model():
    model = read(with_model("{kind: profile, path: p.json}"))[0].model
    assert isinstance(model, ProfileModel)
    assert (model.path, model.num_layers) == ("p.json", None)


def test_a_python_model_is_named_by_its_function_and_needs_a_profile():
    model = "{kind: python, function: 'my.models:build'}"
    scenario = read(with_model(model, "profile: measured.json\n"))[0]
    assert isinstance(scenario.model, PythonModel)
    assert scenario.model.function == "my.models:build"
    found = problem(with_model(model))
    assert found.field == "profile"
    assert "is missing" in found.message


def test_a_preset_is_all_of_a_model():
    model = read(with_model("{kind: transformer, preset: Llama-2-7B, layers: 4}"))[0].model
    assert (model.preset, model.layers, model.hidden, model.norm, model.sequence) == (
        "llama-2-7b",
        4,
        4096,
        "rms",
        4096,
    )


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("positions=rotary", "head_width=63"), "model.head_width: makes heads of width 63, expected an even width"),
        (("positions=learned", "context=8"), "model.sequence: found 1024, expected at most the 8 positions of context"),
    ],
)
def test_positions_are_possible(overrides, told):
    with pytest.raises(InputError, match=re.escape(told)):
        read(EXAMPLE, *(f"model.{override}" for override in overrides))


def test_what_an_unknown_preset_would_have_said_is_not_told_as_missing():
    found = problem(with_model("{kind: transformer, preset: bert}"))
    assert found.field == "model.preset"
    assert "llama-2-7b" in found.message


@pytest.mark.parametrize("attention", ["classic", "flash"])
def test_a_transformer_takes_either_kind_of_attention(attention):
    assert read(EXAMPLE, f"model.attention={attention}")[0].model.attention == attention


def test_the_runtime_of_a_gpu_keeps_some_of_its_memory_unless_told_otherwise():
    text = "model: {kind: profile, path: p.json}\nbatch: 8\ncluster: {device: a100-80gb, link: pcie4}\n"
    assert read(text)[0].cluster.memory_limit == 78.5 * 2**30
    assert read(text, "cluster.memory_reserve=0 GiB")[0].cluster.memory_limit == 80 * 2**30


def test_what_a_scenario_leaves_out_has_a_default():
    scenario = read("model: {kind: profile, path: p.json}\nbatch: 8\ncluster: {device: cpu, link: pcie4}\n")[0]
    assert (scenario.name, scenario.dtype, scenario.optimizer) == ("s", "bf16", "adam")
    cluster, plan = scenario.cluster, scenario.plan
    assert (cluster.reserve, cluster.nodes, cluster.num_devices, cluster.overlap) == (0, 1, None, True)
    assert (cluster.network, cluster.cores, cluster.jitter) == (None, None, None)
    assert (cluster.links, cluster.slowdown) == ({}, {})
    assert (plan.stages, plan.microbatches, plan.checkpoint, plan.schedule) == (None, None, "always", "gpipe")
    assert (plan.recompute, plan.backward, plan.window) == ("early", "reverse", 2)
    assert (plan.balance, plan.placement) == (None, None)


def test_a_device_may_be_written_out():
    written = "device: {memory: 80 GiB, compute: 312 TFLOP/s, bandwidth: 2039 GB/s, efficiency: 0.4, launch: 3 us}"
    device = read(changed("device: a100-80gb", written))[0].cluster.device
    assert (device.memory, device.bandwidth, device.efficiency, device.launch) == (80 * 2**30, 2039e9, 0.4, 3e-6)
    assert device.compute["bf16"] == 312e12


def test_a_link_may_be_named():
    assert read(EXAMPLE, "cluster.link=nvlink3")[0].cluster.link == LINKS["nvlink3"]


def test_an_infinite_bandwidth_is_a_free_link():
    assert read(EXAMPLE, "cluster.link={bandwidth: inf GB/s}")[0].cluster.link.bandwidth == float("inf")


@pytest.mark.parametrize(
    ("field", "written", "value"),
    [
        ("window", "all", None),
        ("window", "5", 5),
        ("checkpoint", "except_last", "except_last"),
        ("checkpoint", "{per_stage: [always, never]}", ("always", "never")),
        ("schedule", "1f1b", "1f1b"),
        ("recompute", "on_demand", "on_demand"),
        ("backward", "fifo", "fifo"),
        ("balance", "[25, 26]", (25, 26)),
        ("placement", "[1, 0]", (1, 0)),
    ],
)
def test_every_choice_of_a_plan_can_be_made(field, written, value):
    (point,) = read(EXAMPLE, "plan.stages=2", "plan.microbatches=4", f"plan.{field}={written}")
    assert getattr(point.plan, field) == value


def test_naive_is_one_microbatch_without_saying_so():
    (point,) = read(without("microbatches:"), "plan.schedule=naive", "plan.stages=2")
    assert point.plan.num_microbatches == 1


def test_an_explicit_balance_says_how_many_stages_there_are():
    (point,) = read(without("stages:"), "plan.balance=[25, 26]", "plan.microbatches=4")
    assert (point.plan.stages, point.plan.num_stages) == (None, 2)


def test_ranks_fill_one_node_after_the_other():
    text = changed("nodes: 1", "nodes: 2").replace("devices_per_node: 8", "devices_per_node: 4")
    cluster = read(text)[0].cluster
    assert [cluster.node_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_paths_are_relative_to_the_scenarios_file(tmp_path):
    file = tmp_path / "deep" / "s.yaml"
    file.parent.mkdir()
    file.write_text(EXAMPLE + "profile: ../p.json\n")
    assert load_scenario(file)[0].profile.resolve() == tmp_path / "p.json"


def test_a_link_may_be_written_once_and_used_twice():
    text = changed("link: {bandwidth: 300", "link: &fast {bandwidth: 300")
    text = changed("network: {bandwidth: 25 GB/s, latency: 15 us}", "network: {<<: *fast, latency: 15 us}", text)
    network = read(text)[0].cluster.network
    assert (network.bandwidth, network.latency) == (300e9, 15e-6)


# --- sweeps ---------------------------------------------------------------------------------------------------------


def test_swept_holds_each_value_as_it_was_written():
    sweep = read(EXAMPLE, "plan.stages=2", "plan.microbatches=4", "cluster.link.bandwidth=[10 Gbit/s, 25 GB/s]")
    assert [point.swept for point in sweep] == [
        {"cluster.link.bandwidth": "10 Gbit/s"},
        {"cluster.link.bandwidth": "25 GB/s"},
    ]
    assert [point.cluster.link.bandwidth for point in sweep] == [1.25e9, 25e9]


def test_a_file_without_lists_is_one_point_that_sweeps_nothing():
    (point,) = read(BY_HAND)
    assert point.swept == {}


def test_a_list_of_one_is_a_sweep_too():
    (point,) = read(BY_HAND, "plan.stages=[2]")
    assert point.swept == {"plan.stages": 2}


@pytest.mark.parametrize(
    "path",
    [
        "cluster.link.bandwidth",
        "cluster.network.bandwidth",
        "cluster.links.2.bandwidth",
        "cluster.link.latency",
        "cluster.network.latency",
        "cluster.links.2.latency",
    ],
)
def test_every_bandwidth_and_latency_can_be_swept(path):
    values = ["1 GB/s", "2 GB/s"] if path.endswith("bandwidth") else ["1 us", "2 us"]
    sweep = read(EXAMPLE, "plan.stages=4", "plan.microbatches=4", f"{path}=[{', '.join(values)}]")
    assert [point.swept for point in sweep] == [{path: value} for value in values]


def test_a_devices_memory_bandwidth_can_be_swept():
    device = "{memory: 16 GiB, compute: 10 TFLOP/s, bandwidth: [100 GB/s, 200 GB/s]}"
    sweep = read(changed("device: a100-80gb", f"device: {device}"), "plan.stages=2", "plan.microbatches=4")
    assert [point.cluster.device.bandwidth for point in sweep] == [100e9, 200e9]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("checkpoint", ["never", "always", {"per_stage": ["always", "never"]}]),
        ("schedule", ["gpipe", "1f1b"]),
        ("recompute", ["early", "on_demand"]),
        ("backward", ["reverse", "fifo"]),
        ("window", [1, 2, "all"]),
        ("balance", ["auto", [25, 26], [26, 25]]),
        ("placement", [[0, 1], [1, 0]]),
    ],
)
def test_every_field_of_the_plan_can_be_swept(field, values):
    document = parse_yaml(EXAMPLE, "s.yaml")
    document.data["plan"] |= {"stages": 2, "microbatches": 4, field: values}
    assert [point.swept for point in parse_scenario(document)] == [{f"plan.{field}": value} for value in values]


def test_a_balance_or_placement_is_a_list_by_nature():
    (point,) = read(EXAMPLE, "plan.stages=2", "plan.microbatches=4", "plan.balance=[25, 26]", "plan.placement=[3, 5]")
    assert point.swept == {}
    assert (point.plan.balance, point.plan.placement) == ((25, 26), (3, 5))


@given(
    stages=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    microbatches=st.lists(st.integers(1, 256), min_size=1, max_size=3),
    latencies=st.lists(st.sampled_from(["1 us", "2 us", "3 ms"]), min_size=1, max_size=3),
    plan_first=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_the_last_list_of_the_file_varies_fastest(stages, microbatches, latencies, plan_first):
    data = parse_yaml(EXAMPLE, "s.yaml").data
    data["cluster"]["link"]["latency"] = latencies
    data["plan"] |= {"stages": stages, "microbatches": microbatches}
    lists = {"cluster.link.latency": latencies, "plan.stages": stages, "plan.microbatches": microbatches}
    if plan_first:
        data["cluster"] = data.pop("cluster")
        lists["cluster.link.latency"] = lists.pop("cluster.link.latency")
    sweep = parse_scenario(Document("s.yaml", data))
    assert [tuple(point.swept.items()) for point in sweep] == [
        tuple(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())
    ]


@pytest.mark.parametrize("path", ["plan.stages", "plan.schedule", "cluster.link.latency"])
def test_an_empty_list_sweeps_over_nothing(path):
    found = problem(EXAMPLE, f"{path}=[]")
    assert found.field == path
    assert "empty list" in found.message


@pytest.mark.parametrize("path", ["plan.balance", "plan.placement"])
def test_an_empty_balance_or_placement_is_wrong(path):
    assert {found.field for found in problems(EXAMPLE, f"{path}=[]")} == {path}


@pytest.mark.parametrize("path", ["batch", "dtype", "model.layers", "cluster.overlap", "cluster.memory_reserve"])
def test_a_list_anywhere_else_is_no_sweep(path):
    (found,) = {found.field for found in problems(EXAMPLE, f"{path}=[1, 2]")}
    assert found == path


def test_a_wrong_value_in_a_list_is_reported_once_and_at_its_own_line():
    text = changed("[1, 4, 32]", "\n    - 1\n    - many\n    - 32")
    found = problem(text)
    assert found.where == f"s.yaml:{line_of('many', text)}"
    assert found.field == "plan.microbatches"


def test_what_is_wrong_at_one_point_of_a_sweep_is_wrong():
    found = problem(EXAMPLE, "batch=16")
    assert (found.where, found.field) == (f"s.yaml:{line_of('microbatches', EXAMPLE)}", "plan.microbatches")
    assert "found 32" in found.message


# --- mistakes -------------------------------------------------------------------------------------------------------

MISTAKES = [
    # as it stands, the mistake, the field, what was found, what would be right
    ("batch: 256", "batch: 0", "batch", "0", "at least 1"),
    ("batch: 256", "batch: 256.0", "batch", "256.0", "a whole number"),
    ("batch: 256", "batch: true", "batch", "true", "a whole number"),
    ("batch: 256", "batch: many", "batch", "'many'", "a whole number"),
    ("batch: 256", "batch:", "batch", "nothing", "a whole number"),
    ("name: transformer48_8xa100", "name: 48", "name", "48", "text"),
    ("name: transformer48_8xa100", "name: ''", "name", "''", "text"),
    ("dtype: bf16", "dtype: int8", "dtype", "'int8'", "fp64, fp32, bf16, fp16"),
    ("dtype: bf16", "dtype: bfloat16", "dtype", "'bfloat16'", "did you mean 'bf16'?"),
    ("optimizer: adam", "optimizer: adamw", "optimizer", "'adamw'", "did you mean 'adam'?"),
    ("kind: transformer", "kind: transfomer", "model.kind", "'transfomer'", "did you mean 'transformer'?"),
    ("kind: transformer", "kind: resnet", "model.kind", "'resnet'", "transformer, layers, profile, python"),
    ("  layers: 48", "  layers: -1", "model.layers", "-1", "at least 1"),
    ("heads: 32", "heads: 33", "model.heads", "33", "a divisor of hidden 2048"),
    ("ffn: 8192", "kv_heads: 5", "model.kv_heads", "5", "a divisor of the 32 heads"),
    ("ffn: 8192", "norm: batch", "model.norm", "'batch'", "layer, rms"),
    ("ffn: 8192", "gated: 1", "model.gated", "1", "true or false"),
    ("ffn: 8192", "preset: lama-2-7b", "model.preset", "'lama-2-7b'", "did you mean 'llama-2-7b'?"),
    ("sequence: 1024", "sequence: 1 k", "model.sequence", "'1 k'", "a whole number"),
    ("ffn: 8192", "attention: linear", "model.attention", "'linear'", "classic, flash"),
    ("device: a100-80gb", "device: a100-80", "cluster.device", "'a100-80'", "did you mean 'a100-80gb'?"),
    ("device: a100-80gb", "device: abacus", "cluster.device", "'abacus'", "p40"),
    ("device: a100-80gb", "device: {memory: 80, compute: 1 TFLOP/s}", "cluster.device.memory", "80", "'80 GiB'"),
    ("memory_reserve: 2 GiB", "memory_reserve: 2", "cluster.memory_reserve", "2 has no unit", "'80 GiB'"),
    ("memory_reserve: 2 GiB", "memory_reserve: 2 GB/s", "cluster.memory_reserve", "'GB/s'", "a size"),
    ("memory_reserve: 2 GiB", "memory_reserve: 80 GiB", "cluster.memory_reserve", "leaves nothing", "80.0 GiB"),
    ("  nodes: 1", "  nodes: 0", "cluster.nodes", "0", "at least 1"),
    ("devices_per_node: 8", "devices_per_node: eight", "cluster.devices_per_node", "'eight'", "a whole number"),
    ("bandwidth: 300 GB/s", "bandwidth: 300", "cluster.link.bandwidth", "300 has no unit", "'25 GB/s'"),
    ("bandwidth: 300 GB/s", "bandwidth: 300 GB", "cluster.link.bandwidth", "'GB'", "'25 GB/s'"),
    ("latency: 15 us", "latency: 15", "cluster.network.latency", "15 has no unit", "'10 us'"),
    ("latency: 9 us", "latency: -9 us", "cluster.links.2.latency", "'-9 us'", "not negative"),
    ("links: {2:", "links: {7:", "cluster.links.7", "7", "0 to 6"),
    ("links: {2:", "links: {-1:", "cluster.links.-1", "-1", "0 to 6"),
    ("overlap: true", "overlap: yes", "cluster.overlap", "'yes'", "true or false"),
    ("cores: 8", "cores: 0", "cluster.cores", "0", "at least 1"),
    ("slowdown: {3: 1.2}", "slowdown: {3: 0}", "cluster.slowdown.3", "0", "more than 0"),
    ("slowdown: {3: 1.2}", "slowdown: {3: slow}", "cluster.slowdown.3", "'slow'", "a number"),
    ("slowdown: {3: 1.2}", "slowdown: {8: 1.2}", "cluster.slowdown.8", "8", "0 to 7"),
    ("slowdown: {3: 1.2}", "slowdown: 1.2", "cluster.slowdown", "1.2", "a mapping"),
    ("{cv: 0.05,", "{cv: -1,", "cluster.jitter.cv", "-1", "at least 0"),
    ("{cv: 0.05,", "{cv: .nan,", "cluster.jitter.cv", "nan", "a finite number"),
    ("{cv: 0.05, samples: 200, seed: 0}", "0.05", "cluster.jitter", "0.05", "a mapping"),
    ("stages: [2, 4, 8]", "stages: 0", "plan.stages", "0", "at least 1"),
    ("stages: [2, 4, 8]", "stages: 16", "plan.stages", "16", "at most 8"),
    ("microbatches: [1, 4, 32]", "microbatches: 257", "plan.microbatches", "257", "at most the batch of 256"),
    ("checkpoint: always", "checkpoint: allways", "plan.checkpoint", "'allways'", "did you mean 'always'?"),
    ("checkpoint: always", "checkpoint: true", "plan.checkpoint", "true", "never, always, except_last"),
    ("checkpoint: always", "checkpoint: {per_stage: [alway]}", "plan.checkpoint", "'alway'", "did you mean 'always'?"),
    ("checkpoint: always", "checkpoint: {every: 2}", "plan.checkpoint", "'every'", "{per_stage: [...]}"),
    ("schedule: gpipe", "schedule: gpip", "plan.schedule", "'gpip'", "did you mean 'gpipe'?"),
    ("schedule: gpipe", "schedule: eager", "plan.schedule", "'eager'", "naive, gpipe, 1f1b"),
    ("recompute: early", "recompute: never", "plan.recompute", "'never'", "early, on_demand"),
    ("backward: reverse", "backward: revers", "plan.backward", "'revers'", "did you mean 'reverse'?"),
    ("balance: auto", "balance: even", "plan.balance", "'even'", "auto or a list of whole numbers"),
    ("balance: auto", "balance: [51, 0]", "plan.balance", "[51, 0]", "at least 1"),
    ("placement: auto", "placement: [0, 1.5]", "plan.placement", "[0, 1.5]", "at least 0"),
    ("window: 2", "window: 0", "plan.window", "0", "at least 1, or all"),
    ("window: 2", "window: none", "plan.window", "'none'", "at least 1, or all"),
]


@pytest.mark.parametrize(("right", "wrong", "field", "found", "expected"), MISTAKES)
def test_a_mistake_is_told_at_its_line_with_what_was_found_and_what_is_right(right, wrong, field, found, expected):
    text = changed(right, wrong)
    told = problem(text)
    assert told.where == f"s.yaml:{line_of(wrong, text)}"
    assert told.field == field
    assert found in told.message
    assert expected in told.message
    assert str(told) == f"{told.where}: {told.field}: {told.message}"


@pytest.mark.parametrize(
    ("right", "wrong", "field"),
    [
        ("\nbatch:", "\nbach:", "bach"),
        ("\n  hidden:", "\n  hiden:", "model.hiden"),
        ("\n  memory_reserve:", "\n  memory_reserved:", "cluster.memory_reserved"),
        ("link: {bandwidth: 300", "link: {bandwith: 300", "cluster.link.bandwith"),
        ("{bandwidth: 12 GB/s, latency:", "{bandwidth: 12 GB/s, latncy:", "cluster.links.2.latncy"),
        ("samples: 200", "sample: 200", "cluster.jitter.sample"),
        ("\n  microbatches:", "\n  micro_batches:", "plan.micro_batches"),
    ],
)
def test_a_misspelt_key_is_told_with_the_key_that_was_meant(right, wrong, field):
    text = changed(right, wrong)
    (told,) = (found for found in problems(text) if found.field == field)
    meant = right.strip(" \n").rstrip(": 0123456789").split()[-1].strip("{:,")
    assert told.where == f"s.yaml:{line_of(wrong.strip(), text)}"
    assert f"did you mean '{meant}'?" in told.message


def test_a_key_like_no_other_is_told_with_all_that_there_are():
    told = problem(EXAMPLE + "  zzz: 1\n")
    assert told.where == f"s.yaml:{line_of('zzz', EXAMPLE + 'zzz')}"
    assert "expected one of stages, stages_per_rank, microbatches" in told.message


@pytest.mark.parametrize(
    ("line", "field"),
    [("batch:", "batch"), ("hidden:", "model.hidden"), ("device:", "cluster.device"), ("link:", "cluster.link")],
)
def test_what_is_missing_is_told_at_the_section_that_lacks_it(line, field):
    text = without(line)
    told = problem(text)
    section = field.partition(".")[0] + ":" if "." in field else "name:"
    assert (told.where, told.field) == (f"s.yaml:{line_of(section, text)}", field)
    assert "is missing" in told.message


def test_missing_sections_are_told_together():
    fields = [found.field for found in problems("name: t\n")]
    assert fields == ["batch", "model", "cluster"]


def test_all_mistakes_of_a_file_are_told_at_once_in_the_order_of_its_lines():
    text = EXAMPLE
    for right, wrong in [
        ("hidden:", "hiden:"),
        ("batch: 256", "batch: -1"),
        ("dtype:", "dtpye:"),
        ("a100-80gb", "a100-80g"),
        ("bandwidth: 300 GB/s", "bandwidth: 300"),
        ("[1, 4, 32]", "[1, four, 32]"),
        ("schedule: gpipe", "schedule: gpip"),
    ]:
        text = changed(right, wrong, text)
    assert [(found.line, found.field) for found in problems(text)] == [
        (2, "model.hidden"),
        (5, "model.hiden"),
        (10, "batch"),
        (11, "dtpye"),
        (14, "cluster.device"),
        (18, "cluster.link.bandwidth"),
        (27, "plan.microbatches"),
        (29, "plan.schedule"),
    ]


def test_an_error_prints_one_line_for_each_mistake():
    with pytest.raises(InputError) as caught:
        read(changed("batch: 256", "batch: 0").replace("gpipe", "gpip"))
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert all(re.fullmatch(r"s\.yaml:\d+: [\w.]+: found .+, .+", line) for line in lines)


def test_a_mistake_in_a_layer_by_hand_is_told_at_that_layer():
    text = changed("forward: 2 ms", "forward: 2", BY_HAND)
    told = problem(text)
    assert (told.where, told.field) == (f"s.yaml:{line_of('forward: 2', text)}", "model.layers.1.forward")
    text = changed("saved: 2 MiB", "stored: 2 MiB", BY_HAND)
    told = problem(text)
    assert (told.where, told.field) == (f"s.yaml:{line_of('stored', text)}", "model.layers.0.stored")


@pytest.mark.parametrize(("written", "most"), [("", "4.00 ms"), ("\n      backward: 3 ms", "3.00 ms")])
def test_the_weights_part_of_a_backward_is_no_more_than_all_of_it(written, most):
    text = changed("forward: 2 ms", f"forward: 2 ms{written}\n      backward_weights: 5 ms", BY_HAND)
    told = problem(text)
    assert (told.where, told.field) == (f"s.yaml:{line_of('5 ms', text)}", "model.layers.1.backward_weights")
    assert told.message == f"found 5.00 ms, expected at most backward, {most}"
    assert read(text.replace("5 ms", most))


def test_a_model_of_no_layers_is_wrong():
    told = problem(with_model("{kind: layers, layers: []}"))
    assert told.field == "model.layers"


@pytest.mark.parametrize("function", ["build", "my.models", "my.models:", ":build", "my/models.py:build", "a:b:c"])
def test_a_function_is_named_by_module_and_name(function):
    told = problem(with_model(f"{{kind: python, function: '{function}'}}", "profile: p.json\n"))
    assert told.field == "model.function"
    assert "package.module:function" in told.message


# --- contradictions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (["plan.schedule=naive", "plan.microbatches=4"], "plan.microbatches", "naive"),
        (["plan.microbatches=257"], "plan.microbatches", "at most the batch of 256"),
        (["model.layers=1", "plan.stages=8"], "plan.stages", "the model has 4 layers"),
        (["plan.stages=9"], "plan.stages", "at most 8"),
        (["plan.stages=2", "plan.balance=[17, 17, 17]"], "plan.balance", "each of 2 stages"),
        (["plan.stages=2", "plan.balance=[25, 25]"], "plan.balance", "adds up to 50, expected the model's 51"),
        (["plan.stages=2", "plan.checkpoint={per_stage: [always]}"], "plan.checkpoint", "each of 2 stages"),
        (
            ["plan.stages=4", "plan.stages_per_rank=2", "plan.placement=[1, 1, 1, 0]"],
            "plan.placement",
            "each rank 2 times",
        ),
        (["plan.stages=2", "plan.placement=[0, 1, 2]"], "plan.placement", "2 ranks, one for each stage"),
        (["plan.stages=2", "plan.placement=[0, 8]"], "plan.placement", "at most 7"),
    ],
)
def test_a_plan_that_contradicts_itself_or_its_model_is_wrong(overrides, field, words):
    text = without("microbatches:")
    told = problem(text, *overrides)
    assert (told.where, told.field) == (f"--set {next(o for o in overrides if o.startswith(field))}", field)
    assert words in told.message


def test_two_nodes_need_a_network_and_devices_per_node():
    text = without("network:", without("devices_per_node:", changed("nodes: 1", "nodes: 2")))
    assert {found.field for found in problems(text)} == {"cluster.network", "cluster.devices_per_node"}
    assert {found.line for found in problems(text)} == {line_of("cluster:", text)}


def test_one_node_needs_no_network():
    assert read(without("network:"))[0].cluster.network is None


def test_a_dtype_that_the_device_has_no_figure_for_is_told_with_those_it_has():
    told = problem(changed("a100-80gb", "v100-16gb"))
    assert (told.line, told.field) == (line_of("dtype:", EXAMPLE), "dtype")
    assert "fp64, fp32, fp16" in told.message
    assert "v100-16gb" in told.message


def test_a_measured_profile_needs_no_figures_of_the_device():
    assert read(changed("a100-80gb", "v100-16gb") + "profile: p.json\n")[0].profile == Path("p.json")
    assert read(changed("a100-80gb", "{memory: 16 GiB}") + "profile: p.json\n")[0].cluster.device.compute == {}


def test_a_transformer_without_a_profile_needs_a_compute_rate():
    assert problem(changed("a100-80gb", "{memory: 16 GiB}")).field == "cluster.device.compute"


def test_a_mistake_in_one_section_does_not_hide_a_contradiction_in_another():
    found = problems(changed("batch: 256", "batch: 16").replace("overlap: true", "overlap: maybe"))
    assert [told.field for told in found] == ["cluster.overlap", "plan.microbatches"]


# --- YAML -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong", "key"),
    [
        ("  checkpoint: always", "  stages: 3", "stages"),
        ("optimizer: adam", "batch: 3", "batch"),
        ("slowdown: {3: 1.2}", "slowdown: {3: 1.2, 3: 1.3}", "3"),
    ],
)
def test_a_key_given_twice_is_told_at_the_second(right, wrong, key):
    text = changed(right, wrong)
    told = problem(text)
    assert told.where == f"s.yaml:{line_of(wrong, text)}"
    assert told.field.split(".")[-1] == key
    assert "twice" in told.message


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("  layers: 48", "\tlayers: 48"),
        ("  layers: 48", "  layers: 48: 49"),
        ("  layers: 48", "   layers: 48"),
        ("batch: 256", "batch: *everything"),
        ("batch: 256", "batch: '256' 257"),
        ("batch: 256", "batch: @256"),
    ],
)
def test_what_is_not_yaml_is_told_at_its_line(right, wrong):
    text = changed(right, wrong)
    told = problem(text)
    assert told.where == f"s.yaml:{line_of(wrong, text)}"
    assert told.message.startswith("not YAML: ")


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "just text\n", "42\n"])
def test_a_file_that_is_no_mapping_is_told_what_it_should_hold(text):
    told = problem(text)
    assert told.where == "s.yaml:1"
    assert "name, model, batch, cluster and plan" in told.message


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "cannot be read: No such file"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not text in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_by_name(tmp_path, make, words):
    path = tmp_path / "s.yaml"
    make(path)
    with pytest.raises(InputError) as caught:
        load_scenario(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


# --- overrides ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("plan.microbatches=8", lambda s: s.plan.microbatches, 8),
        ("batch=512", lambda s: s.batch, 512),
        ("name=other=name", lambda s: s.name, "other=name"),
        ("cluster.link.bandwidth=1 GB/s", lambda s: s.cluster.link.bandwidth, 1e9),
        ("cluster.links.2.latency=1 ms", lambda s: s.cluster.links[2].latency, 1e-3),
        ("cluster.links.0={bandwidth: 1 GB/s}", lambda s: s.cluster.links[0].bandwidth, 1e9),
        ("cluster.slowdown.0=2", lambda s: s.cluster.slowdown, {0: 2.0, 3: 1.2}),
        ("cluster.jitter=null", lambda s: s.cluster.jitter, None),
        ("cluster.overlap=false", lambda s: s.cluster.overlap, False),
        ("plan.window=all", lambda s: s.plan.window, None),
        ("plan.stages.0=1", lambda s: s.plan.stages, 1),
    ],
)
def test_an_override_sets_a_field_as_if_it_were_written_so(override, get, value):
    assert get(read(EXAMPLE, override)[0]) == value


def test_an_override_may_be_a_list_and_so_a_sweep():
    sweep = read(BY_HAND, "plan.microbatches=[1, 2, 4]")
    assert [point.swept for point in sweep] == [{"plan.microbatches": m} for m in (1, 2, 4)]


def test_an_override_may_replace_a_sweep_by_one_value():
    assert len(read(EXAMPLE, "plan.stages=4")) == 3


def test_an_override_may_make_a_section_that_the_file_leaves_out():
    text = BY_HAND.partition("plan:")[0]
    assert read(text, "plan.stages=2")[0].plan.stages == 2


def test_the_last_of_two_overrides_holds():
    assert read(BY_HAND, "batch=16", "batch=32")[0].batch == 32


@pytest.mark.parametrize("override", ["plan.microbatches", "=3", ""])
def test_an_override_is_a_path_and_a_value(override):
    told = problem(EXAMPLE, override)
    assert told.where == f"--set {override}"
    assert "expected path=value" in told.message


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("plan.stags=2", "plan.stags", "did you mean 'stages'?"),
        ("pln.stages=2", "pln", "did you mean 'plan'?"),
        ("batch.size=2", "batch", "no keys to set"),
        ("plan.stages.9=2", "plan.stages.9", "no such entry"),
        ("plan.stages.first=2", "plan.stages.first", "no such entry"),
        ("plan.stages=many", "plan.stages", "expected a whole number"),
        ("cluster.link.latency=3", "cluster.link.latency", "3 has no unit"),
        ("cluster.links.5.latency=3 us", "cluster.links.5.bandwidth", "is missing"),
    ],
)
def test_a_mistake_in_an_override_is_told_at_the_override(override, field, words):
    told = problem(EXAMPLE, override)
    assert (told.where, told.field) == (f"--set {override}", field)
    assert words in told.message


def test_an_override_that_is_not_yaml_is_told_at_the_override():
    told = problem(EXAMPLE, "plan.stages=[2, 4")
    assert told.where.startswith("--set plan.stages=[2, 4")
    assert "not YAML" in told.message


def test_a_mistake_that_shows_only_later_is_still_told_at_its_line():
    error = read(EXAMPLE)[0].error("plan.balance", "does not suit the profile")
    assert str(error) == f"s.yaml:{line_of('balance', EXAMPLE)}: plan.balance: does not suit the profile"


# --- whatever is written --------------------------------------------------------------------------------------------

_WORDS = st.sampled_from(
    ["auto", "all", "always", "naive", "1f1b", "cpu", "p40", "pcie3", "1 us", "inf GB/s", "0 B", "80 GiB", "layers", ""]
)
_SCALARS = st.none() | st.booleans() | st.integers(-2, 60) | st.floats() | _WORDS | st.text(max_size=4)
_KEYS = st.sampled_from(["per_stage", "bandwidth", "latency", "kind", "memory", 0, 1])
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3), max_leaves=5
)
_DATA = [parse_yaml(text, "s.yaml").data for text in (EXAMPLE, BY_HAND)]


def paths_of(node, path=()):
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from paths_of(value, (*path, key))


@st.composite
def mutated_data(draw):
    data = copy.deepcopy(draw(st.sampled_from(_DATA)))
    for _ in range(draw(st.integers(1, 3))):
        paths = list(paths_of(data))
        if not paths:
            break
        path = draw(st.sampled_from(paths))
        parent = data
        for key in path[:-1]:
            parent = parent[key]
        change = draw(st.sampled_from(["replace", "delete", "rename"]))
        if change == "replace" or (change == "rename" and isinstance(parent, list)):
            parent[path[-1]] = draw(_VALUES)
        elif change == "delete":
            del parent[path[-1]]
        else:
            parent[draw(_SCALARS)] = parent.pop(path[-1])
    return data


def parses_or_is_an_input_error(document):
    try:
        sweep = parse_scenario(document)
    except InputError as error:
        assert error.problems
        assert all(re.match(r"s\.yaml:\d+$", found.where) and found.message for found in error.problems)
    else:
        assert len(sweep) >= 1


@given(mutated_data())
@settings(max_examples=200, deadline=None)
def test_any_change_of_the_data_parses_or_is_an_input_error(data):
    parses_or_is_an_input_error(Document("s.yaml", data))


@given(st.sampled_from([EXAMPLE, BY_HAND]), st.data())
@settings(max_examples=150, deadline=None)
def test_any_change_of_the_text_parses_or_is_an_input_error(text, data):
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 5, len(text))))
    inserted = data.draw(st.text("[]{}:,-#&*!|>'\"%@` \n\tab0.", max_size=4))
    mutated = text[:start] + inserted + text[end:]
    try:
        document = parse_yaml(mutated, "s.yaml")
    except InputError as error:
        assert all(found.message and 1 <= found.line <= mutated.count("\n") + 2 for found in error.problems)
    else:
        parses_or_is_an_input_error(document)


@pytest.mark.parametrize(
    "text",
    ["name: 2024-13-45\n", "batch: !!int abc\n", "batch: !!bool abc\n", "batch: " + "[" * 2000, "batch: " + "9" * 5000],
)
def test_what_yaml_itself_cannot_convert_is_a_mistake_and_not_a_crash(text):
    assert problems(text)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("a100", "'a100-40gb' or 'a100-80gb'"),
        ("H100", "'h100-80gb'"),
        ("h100-80g", "'h100-80gb'"),
        ("tpu-v3", "'tpu-v3-core'"),
    ],
)
def test_a_device_that_is_almost_named_is_told_with_its_full_name(name, meant):
    assert f"did you mean {meant}?" in problem(changed("a100-80gb", name)).message


def test_an_empty_list_does_not_hide_other_mistakes():
    fields = [found.field for found in problems(changed("[2, 4, 8]", "[]").replace("batch: 256", "batch: many"))]
    assert fields == ["batch", "plan.stages"]


def test_a_plan_with_everything_commented_out_is_an_empty_plan():
    text = EXAMPLE[: EXAMPLE.index("plan:")] + "plan:\n"
    (scenario,) = parse_scenario(parse_yaml(text, "s.yaml"))
    assert scenario.plan.stages is None


def test_an_override_may_have_spaces_and_does_not_change_the_document():
    document = parse_yaml(EXAMPLE, "s.yaml")
    overridden = parse_scenario(document, "plan.stages = 2", "plan.microbatches = 8")
    assert [s.plan.stages for s in overridden] == [2]
    assert len(parse_scenario(document)) == 9


def test_a_bandwidth_where_a_link_belongs_is_told_how_to_write_it():
    told = problem(changed("link: {bandwidth: 300 GB/s, latency: 5 us}", "link: 300 GB/s"))
    assert "expected {bandwidth: 300 GB/s, latency: 10 us}" in told.message


def test_a_key_given_twice_does_not_hide_other_mistakes():
    text = changed("  checkpoint: always", "  stages: 3").replace("batch: 256", "batch: many")
    assert {found.field for found in problems(text)} == {"batch", "plan.stages"}


def test_the_mistakes_of_all_overrides_are_told_at_once():
    assert len(problems(EXAMPLE, "plan", "plan.stages.x=3", "batch=no")) == 3


def test_one_figure_of_a_named_link_can_be_set_and_swept():
    text = changed("link: {bandwidth: 300 GB/s, latency: 5 us}", "link: nvlink3")
    overrides = ("cluster.link.bandwidth=[25 GB/s, 10 GB/s]", "plan.stages=2", "plan.microbatches=8")
    links = [scenario.cluster.link for scenario in parse_scenario(parse_yaml(text, "s.yaml"), *overrides)]
    assert [link.bandwidth for link in links] == [25e9, 10e9]
    assert {link.latency for link in links} == {5e-6}


def test_an_edge_or_rank_that_no_stage_has_is_told():
    text = without("devices_per_node:")
    found = problems(text, "plan.stages=3", "plan.microbatches=8")
    assert {problem.field for problem in found} == {"cluster.links.2", "cluster.slowdown.3"}
    assert "expected 0 to 1 with 3 stages" in found[0].message
