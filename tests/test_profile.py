"""Profiles: costs as a function of the micro-batch size, from shapes, from hand-written layers and from files."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_sim.base.files import InputError, parse_yaml
from gpipe_sim.cost.analytic import build_profile
from gpipe_sim.cost.profile import COLUMNS, SPLIT_COLUMNS, Profile, load_profile
from gpipe_sim.scenario.catalog import Link
from gpipe_sim.scenario.reading import load_scenario, parse_scenario

TRANSFORMER = """\
model: {kind: transformer, layers: 2, hidden: 1024, heads: 16, vocab: 32000, sequence: 512}
batch: 64
cluster: {device: a100-80gb, link: nvlink3}
"""

BY_HAND = """\
model:
  kind: layers
  layers:
    - {name: wide, repeat: 2, forward: 1 ms, backward: 3 ms, overhead: 10 us,
       output: 1 MiB, saved: 3 MiB, parameters: 4 MB}
    - {name: narrow, forward: 2 ms, output: 2 MiB}
batch: 8
cluster: {device: {memory: 16 GiB}, link: pcie4}
"""


def scenario_of(text):
    (scenario,) = parse_scenario(parse_yaml(text, "s.yaml"))
    return scenario


def profile_of(sizes, rows, **changes):
    """A profile whose every column has these rows, one for each layer."""
    values = np.array(rows, dtype=float)
    facts = {
        "source": "measured",
        "device": "cpu",
        "dtype": "fp32",
        "names": tuple(f"layer{i}" for i in range(len(rows))),
        "sizes": tuple(sizes),
        "table": {column: values.copy() for column in COLUMNS},
        "parameter_bytes": np.arange(len(rows), dtype=float),
        "optimizer_s": np.zeros(len(rows)),
    }
    return Profile(**facts | changes)


def costs_at(profile, size):
    costs = profile.at(size)
    return {column: getattr(costs, column).tolist() for column in COLUMNS}


def everywhere(values):
    return dict.fromkeys(COLUMNS, values)


# --- interpolation --------------------------------------------------------------------------------------------------


def test_costs_at_a_known_size_are_exactly_the_known_ones():
    profile = profile_of([1, 3, 8], [[0.1, 0.2, 0.7], [1e-9, 3e-9, 1e9]])
    assert costs_at(profile, 1) == everywhere([0.1, 1e-9])
    assert costs_at(profile, 3) == everywhere([0.2, 3e-9])
    assert costs_at(profile, 8) == everywhere([0.7, 1e9])


def test_costs_between_known_sizes_lie_on_the_line_between_them():
    profile = profile_of([2, 4, 8], [[10, 20, 100]])
    assert profile.at(3).forward_s == pytest.approx([15])
    assert profile.at(6).forward_s == pytest.approx([60])
    assert profile.at(7).forward_s == pytest.approx([80])


def test_costs_beyond_known_sizes_continue_the_nearest_line():
    profile = profile_of([2, 4, 8], [[10, 14, 30]])
    assert profile.at(1).backward_s == pytest.approx([8])
    assert profile.at(10).backward_s == pytest.approx([38])
    assert profile.at(16).backward_s == pytest.approx([62])


def test_costs_continued_downwards_are_at_least_in_proportion():
    assert profile_of([4, 8], [[1, 9]]).at(1).forward_s.tolist() == [0.25]


def test_a_single_known_size_makes_costs_proportional():
    profile = profile_of([4], [[2.0], [6.0]])
    assert profile.at(4).saved_bytes.tolist() == [2, 6]
    assert profile.at(1).saved_bytes.tolist() == [0.5, 1.5]
    assert profile.at(12).saved_bytes.tolist() == [6, 18]


def test_a_profile_of_one_size_says_so_where_it_is_used_for_another():
    one, two = profile_of([8], [[4.0]]), profile_of([4, 8], [[2.0, 4.0]])
    assert one.stretched([8]) is None
    assert "micro-batches of 8 only" in one.stretched([8, 4])
    assert two.stretched([1]) is None


sizes_lists = st.lists(st.integers(1, 500), min_size=2, max_size=5, unique=True).map(sorted)
amounts = st.floats(0, 1e12)


@given(sizes_lists, st.data())
def test_costs_between_two_known_sizes_are_between_their_costs(sizes, data):
    row = data.draw(st.lists(amounts, min_size=len(sizes), max_size=len(sizes)))
    size = data.draw(st.integers(sizes[0], sizes[-1]))
    left = max(i for i in range(len(sizes)) if sizes[i] <= size)
    right = min(i for i in range(len(sizes)) if sizes[i] >= size)
    (cost,) = profile_of(sizes, [row]).at(size).forward_s
    low, high = sorted([row[left], row[right]])
    assert low * (1 - 1e-12) <= cost <= high * (1 + 1e-12)


@given(sizes_lists, amounts, amounts, st.integers(1, 1000))
def test_costs_that_are_a_constant_and_a_rate_are_right_at_every_size(sizes, constant, rate, size):
    profile = profile_of(sizes, [[constant + rate * n for n in sizes]])
    assert profile.at(size).forward_s[0] == pytest.approx(constant + rate * size, rel=1e-9, abs=1e-9)


# --- transformers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["classic", "flash"])
def test_small_microbatches_cost_more_per_sample(attention):
    scenario = scenario_of(TRANSFORMER.replace("sequence: 512", f"sequence: 512, attention: {attention}"))
    sizes = [1, 2, 4, 8, 16, 32, 64]
    profile = build_profile(scenario, sizes)
    for column in ("forward_s", "backward_s"):
        per_sample = np.array([getattr(profile.at(n), column) / n for n in sizes])
        assert (np.diff(per_sample, axis=0) < 0).all()


def test_a_larger_microbatch_never_takes_less_time_as_a_whole():
    profile = build_profile(scenario_of(TRANSFORMER), range(1, 64))
    times = np.array([profile.at(n).forward_s for n in range(1, 65)])
    assert (np.diff(times, axis=0) >= 0).all()


def test_a_large_block_runs_at_the_attained_compute_rate():
    profile = build_profile(scenario_of(TRANSFORMER), [64])
    s, h, n = 512, 1024, 64
    flops = n * (24 * s * h * h + 4 * s * s * h)
    assert profile.at(64).forward_s[1] == pytest.approx(flops / (0.5 * 312e12) + 12 * 5e-6)


def test_a_layer_without_arithmetic_runs_at_the_memorys_bandwidth():
    profile = build_profile(scenario_of(TRANSFORMER), [64])
    norm, s, h, n = profile.names.index("norm"), 512, 1024, 64
    moved = 2 * (2 * h) + 2 * n * 2 * s * h
    assert profile.at(64).forward_s[norm] == pytest.approx(moved / 2039e9 + 5e-6)


def test_a_transformers_backward_takes_two_forwards():
    costs = build_profile(scenario_of(TRANSFORMER), [8]).at(8)
    assert costs.backward_s[1:] == pytest.approx(2 * costs.forward_s[1:])
    assert costs.backward_s[0] > 2 * costs.forward_s[0], (
        "a lookup reads a few rows, its gradient is as large as the table"
    )


def test_a_faster_device_is_faster_at_every_layer():
    slow = build_profile(scenario_of(TRANSFORMER), [8]).at(8)
    fast = build_profile(scenario_of(TRANSFORMER.replace("a100-80gb", "h100-80gb")), [8]).at(8)
    assert (fast.forward_s < slow.forward_s).all()


def test_a_transformers_profile_says_what_it_is():
    profile = build_profile(scenario_of(TRANSFORMER), [8])
    assert (profile.source, profile.device, profile.dtype) == ("analytic", "a100-80gb", "bf16")
    assert profile.names == ("embedding", "block.0", "block.1", "norm", "head")
    assert profile.num_layers == 5
    assert profile.sizes == (8, 64)
    assert profile.input_bytes == 512 * 8


def test_sizes_in_bytes_grow_with_the_microbatch():
    profile = build_profile(scenario_of(TRANSFORMER), [4])
    for column in ("saved_bytes", "output_bytes"):
        assert getattr(profile.at(8), column) == pytest.approx(2 * getattr(profile.at(4), column))
    assert profile.at(4).output_bytes[0] == 4 * 2 * 512 * 1024
    assert profile.at(4).saved_bytes[1] == 4 * 34 * 512 * 1024


def test_parameters_and_their_update_follow_the_optimizer_and_the_dtype():
    embedding = 32000 * 1024
    mixed = build_profile(scenario_of(TRANSFORMER), [8])
    assert mixed.parameter_bytes[0] == 2 * embedding
    # Adam reads and writes weights and state, and reads gradients: 2 * 2 + 2 + 2 * 12 bytes.
    assert mixed.optimizer_s[0] == pytest.approx(30 * embedding / 2039e9)
    single = build_profile(scenario_of(TRANSFORMER + "dtype: fp32\noptimizer: sgd\n"), [8])
    assert single.parameter_bytes[0] == 4 * embedding
    assert single.optimizer_s[0] == pytest.approx(12 * embedding / 2039e9)


# --- layers by hand -------------------------------------------------------------------------------------------------


def test_layers_by_hand_cost_exactly_what_is_written():
    profile = build_profile(scenario_of(BY_HAND), [1])
    assert profile.names == ("wide.0", "wide.1", "narrow")
    costs = profile.at(1)
    assert costs.forward_s.tolist() == [1e-5 + 1e-3, 1e-5 + 1e-3, 2e-3]
    assert costs.backward_s.tolist() == [1e-5 + 3e-3, 1e-5 + 3e-3, 4e-3]
    assert costs.output_bytes.tolist() == [2**20, 2**20, 2**21]
    assert costs.saved_bytes.tolist() == [3 * 2**20, 3 * 2**20, 2**21]
    assert costs.workspace_no_grad_bytes.tolist() == costs.workspace_forward_bytes.tolist() == [0, 0, 0]
    assert costs.workspace_backward_bytes.tolist() == [0, 0, 0]
    assert profile.parameter_bytes.tolist() == [4e6, 4e6, 0]
    assert profile.optimizer_s.tolist() == [0, 0, 0]


@given(st.integers(1, 64))
@settings(max_examples=20, deadline=None)
def test_overhead_is_per_call_and_the_rest_per_sample(size):
    costs = build_profile(scenario_of(BY_HAND), [size]).at(size)
    assert costs.forward_s == pytest.approx([1e-5 + size * 1e-3, 1e-5 + size * 1e-3, size * 2e-3], rel=1e-12)
    assert costs.output_bytes.tolist() == [size * 2**20, size * 2**20, size * 2**21]


def test_layers_by_hand_are_as_exact_between_the_sizes_that_were_asked_for():
    profile = build_profile(scenario_of(BY_HAND), [2])
    assert profile.at(5).forward_s == pytest.approx([5.01e-3, 5.01e-3, 10e-3], rel=1e-12)


# --- split backwards ------------------------------------------------------------------------------------------------


def split_by_hand(wide="1 ms", narrow="", kept=""):
    """The layers by hand, with what is said of the weights' part of their backwards."""
    text = BY_HAND.replace("backward: 3 ms", f"backward: 3 ms, backward_weights: {wide}{kept}")
    return text.replace("forward: 2 ms", f"forward: 2 ms{narrow}")


def test_halves_by_hand_have_an_overhead_each_and_share_the_rest():
    costs = build_profile(scenario_of(split_by_hand(narrow=", backward_weights: 4 ms")), [2]).at(2)
    assert costs.backward_inputs_s == pytest.approx([1e-5 + 4e-3, 1e-5 + 4e-3, 0])
    assert costs.backward_weights_s == pytest.approx([1e-5 + 2e-3, 1e-5 + 2e-3, 8e-3])
    assert costs.kept_bytes.tolist() == costs.saved_bytes.tolist()
    assert not costs.workspace_inputs_bytes.any()


def test_what_is_kept_by_hand_beyond_what_was_saved_is_room_that_the_first_half_needs():
    scenario = scenario_of(split_by_hand(narrow=", backward_weights: 1 ms, kept: 5 MiB", kept=", kept: 1 MiB"))
    costs = build_profile(scenario, [1]).at(1)
    assert costs.kept_bytes.tolist() == [2**20, 2**20, 5 * 2**20]
    assert costs.workspace_inputs_bytes.tolist() == [0, 0, 3 * 2**20]


@pytest.mark.parametrize(
    ("text", "splits"),
    [
        (TRANSFORMER, True),
        (BY_HAND, False),
        (split_by_hand(), False),
        (split_by_hand(narrow=", backward: 0 s"), True),
        (split_by_hand(narrow=", backward_weights: 0 s"), True),
    ],
)
def test_a_profile_splits_where_every_backward_that_takes_time_says_how(text, splits):
    profile = build_profile(scenario_of(text), [2])
    assert profile.splits == splits
    assert (profile.at(2).kept_bytes is not None) == splits


@pytest.mark.parametrize("attention", ["classic", "flash"])
def test_a_transformers_halves_add_up_and_are_divided_by_flops(attention):
    scenario = scenario_of(TRANSFORMER.replace("sequence: 512", f"sequence: 512, attention: {attention}"))
    costs = build_profile(scenario, [1, 8]).at(8)
    assert costs.backward_inputs_s + costs.backward_weights_s == pytest.approx(costs.backward_s, rel=1e-15)
    embedding, block, _, norm, head = costs.backward_weights_s / costs.backward_s
    s, h = 512, 1024
    assert block == pytest.approx(24 * s * h * h / (2 * (24 * s * h * h + 4 * s * s * h)))
    assert (embedding, norm, head) == (1, 0, pytest.approx(0.5))
    assert costs.kept_bytes[1] == 8 * 32 * s * h, "Zero Bubble, Table 1"


def test_a_profile_with_other_times_has_the_halves_that_were_timed():
    profile = build_profile(scenario_of(TRANSFORMER), [4, 8])
    times = {name: [float(i)] * 5 for i, name in enumerate(["forward_s", "backward_s", *SPLIT_COLUMNS[:2], "spread"])}
    costs = profile.retimed({4: times}).at(4)
    found = [costs.forward_s, costs.backward_s, costs.backward_inputs_s, costs.backward_weights_s]
    assert [set(values.tolist()) for values in found] == [{0}, {1}, {2}, {3}]
    assert costs.kept_bytes.tolist() == profile.at(4).kept_bytes.tolist()
    unsplit = profile_of([4], [[1.0]] * 5)
    assert not unsplit.retimed({4: times}).splits


def test_columns_of_halves_are_in_all_layers_or_in_none(tmp_path):
    document = json.loads(build_profile(scenario_of(TRANSFORMER), [4]).to_json())
    del document["layers"][2]["kept_bytes"]
    path = written(tmp_path / "p.json", sizes=document["sizes"], layers=document["layers"])
    (told,) = problems(path)
    assert told.field == "layers.2.kept_bytes"
    assert "is missing, expected all of backward_inputs_s, " in told.message


# --- files ----------------------------------------------------------------------------------------------------------


def same(a, b):
    if a.table.keys() != b.table.keys():
        return False
    arrays = [(a.table[column], b.table[column]) for column in a.table]
    arrays += [(a.parameter_bytes, b.parameter_bytes), (a.optimizer_s, b.optimizer_s)]
    facts = ["source", "device", "dtype", "names", "sizes", "environment"]
    facts += ["input_bytes", "action_overhead_s", "hop_overhead_s"]
    links = [(link.bandwidth, link.latency) if link else None for link in (a.link, b.link)]
    return (
        all(x.tolist() == y.tolist() for x, y in arrays)
        and all(getattr(a, fact) == getattr(b, fact) for fact in facts)
        and links[0] == links[1]
    )


printable = st.text(st.characters(exclude_categories=["Cc", "Cs"]))
"""Any text that a file may have."""


@st.composite
def profiles(draw):
    sizes = draw(st.lists(st.integers(1, 4096), min_size=1, max_size=4, unique=True).map(sorted))
    num_layers = draw(st.integers(1, 4))
    columns = draw(st.sampled_from([COLUMNS, (*COLUMNS, *SPLIT_COLUMNS)]))
    row = st.lists(amounts, min_size=len(sizes), max_size=len(sizes))
    rows = st.lists(row, min_size=num_layers, max_size=num_layers).map(np.array)
    per_layer = st.lists(amounts, min_size=num_layers, max_size=num_layers).map(np.array)
    links = st.builds(Link, name=st.just("measured"), bandwidth=st.floats(1, 1e12), latency=st.floats(0, 1))
    return profile_of(
        sizes,
        np.zeros((num_layers, len(sizes))),
        source=draw(st.sampled_from(["analytic", "measured", "imported"])),
        device=draw(printable),
        dtype=draw(st.sampled_from(["fp64", "fp32", "bf16", "fp16"])),
        table={column: draw(rows) for column in columns},
        parameter_bytes=draw(per_layer),
        optimizer_s=draw(per_layer),
        input_bytes=draw(amounts),
        action_overhead_s=draw(amounts),
        hop_overhead_s=draw(amounts),
        link=draw(st.none() | links),
        environment=draw(st.dictionaries(printable, printable, max_size=3)),
        skips=draw(st.sampled_from([(), ((-1, num_layers - 1, (0.0,) * len(sizes)),) * (num_layers > 1)])),
    )


@given(profile=profiles())
@settings(deadline=None)
def test_a_saved_profile_reads_back_equal_to_the_last_bit(tmp_path_factory, profile):
    path = tmp_path_factory.mktemp("profile") / "p.json"
    profile.save(path)
    assert same(load_profile(path), profile)
    assert [file.name for file in path.parent.iterdir()] == ["p.json"]


@pytest.mark.parametrize("text", [TRANSFORMER, BY_HAND])
def test_an_analytic_profile_reads_back_equal(tmp_path, text):
    profile = build_profile(scenario_of(text), [1, 2, 5])
    profile.save(tmp_path / "new" / "p.json")
    assert same(load_profile(tmp_path / "new" / "p.json"), profile)


def written(path, **changes):
    """A small profile file with some of its keys replaced, one key to a line."""
    profile = profile_of([2, 4], [[1, 2], [3, 4]], link=Link(name="measured", bandwidth=1e9, latency=1e-6))
    document = json.loads(profile.to_json()) | changes
    path.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in document.items()) + "\n}\n")
    return path


def problems(path):
    with pytest.raises(InputError) as caught:
        load_profile(path)
    return caught.value.problems


def line_of(fragment, path):
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if fragment in line)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("format", "gpipe-profile-0", "gpipe-profile-1"),
        ("source", "guessed", "analytic, measured, imported"),
        ("dtype", "int8", "fp64, fp32, bf16, fp16"),
        ("device", 3, "expected text"),
        ("sizes", [], "at least 1"),
        ("sizes", [4, 2], "ascending"),
        ("sizes", [2, 2], "ascending"),
        ("input_bytes", -1, "at least 0"),
        ("input_bytes", float("nan"), "finite"),
        ("input_bytes", "8 B", "a number"),
        ("layers", [], "at least 1"),
        ("layers", {}, "a list"),
        ("environment", [], "a mapping"),
        ("colour", "red", "unknown key"),
    ],
)
def test_a_mistake_in_a_profile_is_told_at_its_line(tmp_path, key, value, words):
    path = written(tmp_path / "p.json", **{key: value})
    (told,) = problems(path)
    assert (told.where, told.field) == (f"{path}:{line_of(json.dumps(key), path)}", key)
    assert words in told.message


@pytest.mark.parametrize(
    ("skip", "field", "words"),
    [
        ({"made": 0, "used": 1, "bytes": [1, 2]}, "skips.0.used", "found 1, expected a layer from 2 to 2"),
        ({"made": 0, "used": 3, "bytes": [1, 2]}, "skips.0.used", "found 3, expected a layer from 2 to 2"),
        ({"made": 0, "used": 2, "bytes": [1]}, "skips.0.bytes", "expected 2 values"),
        ({"made": 0, "used": 2, "bytes": [1, 5]}, "layers.1.output_bytes", "less than the 5.0 bytes of skips"),
    ],
)
def test_a_skip_that_cannot_be_is_refused(tmp_path, skip, field, words):
    path = tmp_path / "p.json"
    document = json.loads(profile_of([2, 4], [[1, 6], [3, 4], [1, 2]]).to_json())
    path.write_text(json.dumps(document | {"skips": [skip]}))
    (told,) = problems(path)
    assert told.field == field
    assert words in told.message


def test_what_is_handed_on_grows_with_the_microbatch_like_any_other_bytes():
    profile = profile_of([2, 4], [[9, 9], [9, 9], [9, 9]], skips=((0, 2, (3.0, 7.0)),))
    assert profile.at(3).skips[0].bytes == 5.0
    assert profile.at(3).handed_on_bytes.tolist() == [0, 5, 0]


def test_a_misspelt_key_of_a_profile_is_told_with_the_key_that_was_meant(tmp_path):
    path = written(tmp_path / "p.json", action_overheads=1.0)
    (told,) = problems(path)
    assert "did you mean 'action_overhead_s'?" in told.message


def test_a_mistake_in_a_layer_is_told_with_its_number_and_line(tmp_path):
    path = tmp_path / "p.json"
    text = profile_of([2, 4], [[1, 2], [3, 4]]).to_json()
    before, second, after = text.partition('"name": "layer1"')
    path.write_text(before + second + after.replace('"optimizer_s": 0.0', '"optimizer_s": -1.5'))
    (told,) = problems(path)
    assert (told.where, told.field) == (f"{path}:{line_of('-1.5', path)}", "layers.1.optimizer_s")


def test_a_column_needs_one_value_for_each_size(tmp_path):
    path = written(tmp_path / "p.json", sizes=[2, 4, 8])
    told = problems(path)
    assert [problem.field for problem in told] == [f"layers.{i}.{column}" for i in (0, 1) for column in COLUMNS]
    assert all("expected 3 values" in problem.message for problem in told)


def test_all_mistakes_of_a_profile_are_told_at_once(tmp_path):
    path = written(tmp_path / "p.json", source="guessed", input_bytes=-1, link={"bandwidth_bytes_s": 0, "latency_s": 0})
    fields = {problem.field for problem in problems(path)}
    assert fields == {"source", "input_bytes", "link.bandwidth_bytes_s"}


@pytest.mark.parametrize("text", ["", "{", "{\n}}", '{\n"format":\n', "gpipe-profile-1"])
def test_what_is_not_json_is_told_at_its_line(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    (told,) = problems(path)
    assert told.line >= 1
    assert told.message.startswith("not JSON: ")


@pytest.mark.parametrize("text", ["[]", "null", "3", '"text"'])
def test_json_that_is_no_profile_is_told(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    (told,) = problems(path)
    assert told.where == f"{path}:1"
    assert "a mapping" in told.message


def test_a_profile_file_that_is_not_there_is_told_by_name(tmp_path):
    (told,) = problems(tmp_path / "none.json")
    assert str(told).startswith(f"{tmp_path / 'none.json'}: cannot be read")


# --- scenarios that name a profile ----------------------------------------------------------------------------------


def load(tmp_path, text):
    (tmp_path / "s.yaml").write_text(text)
    return load_scenario(tmp_path / "s.yaml")[0]


IMPORTED = "model: {kind: profile, path: p.json}\nbatch: 8\ncluster: {device: cpu, link: pcie4}\n"


@pytest.mark.parametrize(
    "text",
    [
        IMPORTED,
        IMPORTED.replace("{kind: profile, path: p.json}", "{kind: python, function: 'm:f'}")
        + "dtype: fp32\nprofile: p.json\n",
        BY_HAND + "dtype: fp32\nprofile: p.json\n",
    ],
)
def test_a_scenario_stands_on_the_profile_that_it_names(tmp_path, text):
    profile = profile_of([2, 4], [[1, 2], [3, 4], [5, 6]])
    profile.save(tmp_path / "p.json")
    assert same(build_profile(load(tmp_path, text), [1, 2, 3]), profile)


@pytest.mark.parametrize(
    ("text", "line", "field"), [(IMPORTED, 1, "model.path"), (TRANSFORMER + "profile: p.json\n", 4, "profile")]
)
def test_a_named_profile_that_is_not_there_is_told_in_the_scenario(tmp_path, text, line, field):
    with pytest.raises(InputError) as caught:
        build_profile(load(tmp_path, text), [1])
    (told,) = caught.value.problems
    assert (told.where, told.field) == (f"{tmp_path / 's.yaml'}:{line}", field)
    assert f"there is no file {tmp_path / 'p.json'}" in told.message


@pytest.mark.parametrize(
    ("num_layers", "dtype", "words"), [(2, "bf16", "2 layers, but the model has 5"), (5, "fp32", "made with fp32")]
)
def test_a_profile_of_another_model_is_told_in_the_scenario(tmp_path, num_layers, dtype, words):
    profile_of([1], [[1]] * num_layers, dtype=dtype).save(tmp_path / "p.json")
    with pytest.raises(InputError) as caught:
        build_profile(load(tmp_path, TRANSFORMER + "profile: p.json\n"), [1])
    (told,) = caught.value.problems
    assert (told.line, told.field) == (4, "profile")
    assert words in told.message
