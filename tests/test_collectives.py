"""Ring times of collectives, and what a transformer's layers cost each rank of a tensor group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_sim.cost.collectives import TensorGroup, collective_s, sliced_collectives_s, sliced_layers, spanning_s
from gpipe_sim.cost.transformer import num_parameters, transformer_layers
from gpipe_sim.scenario.catalog import LINKS, Link
from gpipe_sim.scenario.schema import Transformer, preset_model

GiB = 2**30


def korthikanti(heads, hidden, layers):
    """A model of Korthikanti et al., arXiv 2205.05198, Table 3."""
    shape = {"heads": heads, "hidden": hidden, "layers": layers, "sequence": 2048, "vocab": 51200}
    return Transformer(kind="transformer", attention="classic", positions="learned", tied=True, **shape)


@given(st.integers(1, 1000), st.floats(0, 1e12), st.floats(1e6, 1e12), st.floats(0, 1))
def test_a_sum_takes_as_long_as_a_scatter_and_a_gather(n, size, bandwidth, latency):
    parts = [collective_s(kind, size, n, bandwidth, latency) for kind in ("scatter", "gather")]
    assert collective_s("sum", size, n, bandwidth, latency) == pytest.approx(sum(parts))
    assert collective_s("sum", size, n, bandwidth, latency) == pytest.approx(
        2 * (n - 1) / n * size / bandwidth + 2 * (n - 1) * latency
    )


def test_a_rank_alone_has_nothing_to_exchange():
    assert collective_s("sum", 1e9, 1, 1e9, 1.0) == 0
    assert spanning_s("sum", 1e9, 1, 1, LINKS["nvlink3"], LINKS["100gbit"]) == 0


def test_a_group_that_spans_nodes_crosses_the_network_with_each_nodes_bytes_once():
    link, network = Link(name="in", bandwidth=100.0, latency=0.0), Link(name="out", bandwidth=10.0, latency=0.0)
    # Eight ranks on two nodes: three quarters of 800 bytes inside, twice; half of them between the nodes, twice.
    assert spanning_s("sum", 800.0, 4, 2, link, network) == pytest.approx(2 * 600 / 100 + 2 * 400 / 10)
    assert spanning_s("gather", 800.0, 4, 2, link, network) == pytest.approx(600 / 100 + 400 / 10)
    ring = collective_s("sum", 800.0, 8, network.bandwidth, 0.0)
    assert spanning_s("sum", 800.0, 4, 2, link, network) < ring, "a ring through all ranks sends nearly all of it"


@pytest.mark.parametrize(
    ("shape", "microbatch", "published_gib"), [((64, 6144, 48), 4, 59.25), ((96, 12288, 96), 1, 66.84375)]
)
def test_kept_activations_of_a_tensor_group_are_those_of_korthikanti_equation_2(shape, microbatch, published_gib):
    """Equation 2 by all layers of the model on the first stage, which holds as many micro-batches as there are stages.

    Of the 175B model, interleaved by 3, it holds 1 + (p-1)/(p v) = 1 + 7/24 times as many.
    """
    blocks = sliced_layers(korthikanti(*shape), "bf16", 8, sequence=False)[1:-2]
    held = sum(block.layer.saved_bytes for block in blocks) * microbatch
    interleaving = 1.0 if shape[2] == 48 else 1 + 7 / 24
    assert held * interleaving / GiB == pytest.approx(published_gib, rel=1e-3)


@given(st.sampled_from([2, 4, 8]), st.sampled_from([(64, 6144, 2), (96, 12288, 1)]))
def test_with_the_sequence_split_all_that_is_kept_is_divided(tensor, shape):
    model = korthikanti(*shape)
    for whole, own in zip(transformer_layers(model, "bf16"), sliced_layers(model, "bf16", tensor), strict=True):
        assert own.layer.saved_bytes == pytest.approx(whole.saved_bytes / tensor)
        assert own.layer.flops == pytest.approx(whole.flops / tensor)


def test_one_rank_holds_what_there_is():
    model = preset_model("gpt2")
    assert [own.layer for own in sliced_layers(model, "bf16", 1)] == transformer_layers(model, "bf16")
    alone = TensorGroup(per_node=1, nodes=1, link=LINKS["nvlink3"], network=LINKS["nvlink3"])
    assert all(sliced_collectives_s(own, 4, alone) == 0 for own in sliced_layers(model, "bf16", 1))


@pytest.mark.parametrize("name", ["gpt2-medium", "llama-2-7b", "qwen2.5-7b"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_all_ranks_together_hold_the_model_and_what_each_has_whole(name, tensor):
    model = preset_model(name)
    own = sum(sliced.layer.parameters for sliced in sliced_layers(model, "bf16", tensor))
    head = model.vocab * model.hidden if model.tied else 0
    everything = num_parameters(model) + head
    norm = transformer_layers(model, "bf16")[-2].parameters
    whole = (2 * model.layers + 1) * norm + model.num_positions * model.hidden
    whole += 2 * model.hidden * model.layers if model.biases == "all" else 0
    padding = 2 * (-model.vocab % tensor) * model.hidden
    assert own * tensor == everything + (tensor - 1) * whole + padding


def test_keys_and_values_with_fewer_heads_than_ranks_are_held_by_several():
    few, enough = (preset_model("qwen2.5-7b").model_copy(update={"heads": 32, "kv_heads": n}) for n in (4, 8))
    assert sliced_layers(few, "bf16", 8)[1] == sliced_layers(enough, "bf16", 8)[1]


def test_a_block_passes_its_boundary_four_times_in_each_pass():
    model = preset_model("llama-2-7b")
    block = sliced_layers(model, "bf16", 8)[1]
    boundary = 2 * 4096 * 4096
    link = LINKS["nvlink3"]
    two_sums = 2 * collective_s("sum", 3 * boundary, 8, link.bandwidth, link.latency)
    group = TensorGroup(per_node=8, nodes=1, link=link, network=link)
    assert sliced_collectives_s(block, 3, group) == pytest.approx(two_sums)
