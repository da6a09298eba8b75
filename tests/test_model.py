"""What a transformer's shape alone says, against the formulas and tables of the papers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_sim.cost.transformer import (
    DTYPE_BYTES,
    bytes_per_parameter,
    flops_per_sample,
    num_parameters,
    transformer_layers,
)
from gpipe_sim.scenario.presets import PRESETS, find_preset
from gpipe_sim.scenario.schema import Transformer, preset_model


def transformer(**changes):
    shape = {"layers": 2, "hidden": 2048, "heads": 32, "vocab": 32000, "sequence": 1024}
    return Transformer(kind="transformer", **shape | changes)


def block(dtype="bf16", **changes):
    return transformer_layers(transformer(**changes), dtype)[1]


@st.composite
def shapes(draw):
    heads = draw(st.integers(1, 64))
    return {"heads": heads, "hidden": heads * draw(st.integers(1, 128)), "sequence": draw(st.integers(1, 8192))}


dtypes = st.sampled_from(list(DTYPE_BYTES))


@pytest.mark.parametrize(
    ("num_blocks", "published", "last_digit"),
    [(3, 282.2e6, 0.1e6), (13, 785.8e6, 0.1e6), (103, 5.3e9, 0.1e9), (415, 21.0e9, 0.1e9), (1663, 83.9e9, 0.1e9)],
)
def test_parameter_counts_are_those_of_gpipe_table_1(num_blocks, published, last_digit):
    model = transformer(layers=num_blocks, ffn=8192)
    assert num_parameters(model) == pytest.approx(published, rel=0.003, abs=last_digit / 2)


@given(shapes(), st.integers(1, 50))
def test_a_block_has_12_h_squared_plus_13_h_parameters(shape, num_blocks):
    h = shape["hidden"]
    model = transformer(**shape, layers=num_blocks, vocab=1000)
    assert num_parameters(model) == num_blocks * (12 * h * h + 13 * h) + 2 * 1000 * h + 2 * h


@given(shapes())
def test_classic_attention_saves_what_korthikanti_counts(shape):
    s, h, a = shape["sequence"], shape["hidden"], shape["heads"]
    layer = block(**shape, attention="classic")
    assert layer.saved_bytes == pytest.approx(s * h * (34 + 5 * a * s / h), rel=1e-12)


@given(shapes())
def test_flash_attention_saves_nothing_quadratic_in_the_sequence(shape):
    assert block(**shape, attention="flash").saved_bytes == 34 * shape["sequence"] * shape["hidden"]


@given(shapes(), st.sampled_from(["classic", "flash"]))
def test_a_block_takes_24_s_h_squared_plus_4_s_squared_h_flops(shape, attention):
    s, h = shape["sequence"], shape["hidden"]
    assert block(**shape, attention=attention).flops == 24 * s * h * h + 4 * s * s * h


def test_the_head_takes_two_flops_per_weight_and_token():
    embedding, *_, norm, head = transformer_layers(transformer(), "bf16")
    assert head.flops == 2 * 1024 * 2048 * 32000
    assert embedding.flops == norm.flops == 0


def test_a_narrower_feed_forward_has_proportionally_less_of_everything_in_it():
    wide, narrow = block(ffn=8192), block(ffn=2048)
    assert wide.parameters - narrow.parameters == (2 * 2048 + 1) * 6144
    assert wide.flops - narrow.flops == 4 * 1024 * 2048 * 6144
    assert wide.saved_bytes - narrow.saved_bytes == 2 * 2 * 1024 * 6144


def test_the_feed_forward_is_four_times_as_wide_as_hidden_unless_told():
    assert transformer_layers(transformer(), "bf16") == transformer_layers(transformer(ffn=4 * 2048), "bf16")


@given(st.integers(1, 30))
def test_layers_come_in_the_order_of_the_forward_pass(num_blocks):
    model = transformer(layers=num_blocks)
    names = [layer.name for layer in transformer_layers(model, "bf16")]
    assert names == ["embedding", *(f"block.{i}" for i in range(num_blocks)), "norm", "head"]
    assert len(names) == model.num_layers


@given(shapes(), st.sampled_from(["fp32", "bf16", "fp16"]), st.sampled_from(["classic", "flash"]))
def test_what_a_layer_leaves_behind_includes_its_output(shape, dtype, attention):
    for layer in transformer_layers(transformer(**shape, attention=attention), dtype):
        assert layer.saved_bytes >= layer.output_bytes > 0
        assert layer.kernels >= 1
        assert layer.workspace_bytes >= 0


@given(shapes(), dtypes)
def test_a_hidden_state_crosses_every_edge_inside_the_model(shape, dtype):
    *inside, _ = transformer_layers(transformer(**shape), dtype)
    assert {layer.output_bytes for layer in inside} == {DTYPE_BYTES[dtype] * shape["sequence"] * shape["hidden"]}


@pytest.mark.parametrize(
    ("optimizer", "dtype", "expected"),
    [
        ("sgd", "fp32", (4, 4, 0)),
        ("momentum", "fp32", (4, 4, 4)),
        ("rmsprop", "fp32", (4, 4, 4)),
        ("adam", "fp32", (4, 4, 8)),
        ("adam", "fp64", (8, 8, 16)),
        ("sgd", "bf16", (2, 2, 4)),
        ("momentum", "fp16", (2, 2, 8)),
        ("rmsprop", "bf16", (2, 2, 8)),
        ("adam", "bf16", (2, 2, 12)),
        ("adam", "fp16", (2, 2, 12)),
    ],
)
def test_bytes_per_parameter_are_weight_gradient_and_state(optimizer, dtype, expected):
    assert bytes_per_parameter(optimizer, dtype) == expected


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("momentum", 1), ("rmsprop", 1), ("adam", 2)])
def test_pure_precision_has_nothing_but_its_dtype(optimizer, states):
    for dtype, word in DTYPE_BYTES.items():
        assert bytes_per_parameter(optimizer, dtype, "pure") == (word, word, word * states)


def test_published_totals_per_parameter():
    assert sum(bytes_per_parameter("rmsprop", "fp32")) == 12  # GPipe, Table 1
    assert sum(bytes_per_parameter("adam", "bf16")) == 16  # ZeRO, section 3.1


# --- models of today -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name):
    published = PRESETS[name]
    assert num_parameters(preset_model(name)) == pytest.approx(published.parameters, rel=0, abs=published.rounding), (
        published.source
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [("Llama-2-13B", "llama-2-13b"), ("llama2_13b", "llama-2-13b"), ("Llama-3.1-405B", "llama-3-405b"), ("gpt3", None)],
)
def test_a_preset_is_found_however_it_is_spelt(written, meant):
    assert find_preset(written) is (PRESETS[meant] if meant else None)


def test_what_is_said_beside_a_preset_comes_first():
    model = Transformer(kind="transformer", preset="llama-3-70b", layers=12, sequence=4096)
    assert (model.preset, model.layers, model.sequence, model.num_kv_heads) == ("llama-3-70b", 12, 4096, 8)


def test_heads_that_share_keys_and_values_have_smaller_projections():
    everyone, shared = block(), block(kv_heads=8)
    assert everyone.parameters - shared.parameters == 2 * (2048 + 1) * (2048 - 512)
    assert everyone.flops - shared.flops == 4 * 1024 * 2048 * (2048 - 512)
    assert everyone.saved_bytes - shared.saved_bytes == 2 * 2 * 1024 * (2048 - 512)
    assert block(kv_heads=32) == everyone


def test_a_gate_is_a_third_matrix_of_the_feed_forward():
    plain, gated = block(ffn=5000), block(ffn=5000, gated=True)
    assert gated.parameters - plain.parameters == (2048 + 1) * 5000
    assert gated.flops - plain.flops == 2 * 1024 * 2048 * 5000
    assert gated.saved_bytes - plain.saved_bytes == 2 * 1024 * 5000


def test_models_with_rms_norms_have_neither_biases_nor_dropout_unless_told():
    rms = block(norm="rms")
    assert rms.parameters == 12 * 2048**2 + 2 * 2048
    assert rms.saved_bytes == 32 * 1024 * 2048
    assert block(norm="rms", dropout=True, attention="classic").saved_bytes == block(attention="classic").saved_bytes
    assert block(norm="rms", bias="all").parameters == block().parameters - 2 * 2048
    assert block(norm="rms", bias="qkv").parameters == rms.parameters + 3 * 2048


def test_learned_positions_have_a_row_for_each_position_of_the_context():
    plain, learned, longer = (transformer(**more) for more in ({}, {"positions": "learned"}, {"context": 4096}))
    assert num_parameters(learned) - num_parameters(plain) == 1024 * 2048
    assert num_parameters(longer) == num_parameters(plain) == num_parameters(transformer(positions="rotary"))
    assert num_parameters(transformer(positions="learned", context=4096)) - num_parameters(plain) == 4096 * 2048


def test_tied_weights_are_counted_once_and_held_at_both_ends():
    own, tied = transformer(), transformer(tied=True)
    assert num_parameters(own) - num_parameters(tied) == 32000 * 2048
    assert transformer_layers(tied, "bf16") == transformer_layers(own, "bf16")


@given(shapes())
def test_causal_attention_counts_the_pairs_in_which_no_token_sees_a_later_one(shape):
    s, h = shape["sequence"], shape["hidden"]
    pairs = s * (s + 1) // 2
    assert block(**shape, causal=True).flops == 24 * s * h * h + 4 * pairs * h


def test_a_model_takes_six_flops_per_weight_and_token_beside_attention():
    model = transformer(norm="rms", vocab=100)
    weights = num_parameters(model) - 100 * 2048 - 5 * 2048  # neither a lookup nor norms are products
    assert flops_per_sample(model) == 6 * 1024 * weights + 2 * 12 * 1024**2 * 2048


def test_a_fused_loss_keeps_the_logits_and_nothing_beside_them():
    plain, fused = (transformer_layers(transformer(fused_loss=fused), "bf16")[-1] for fused in (False, True))
    tokens = 2 * transformer().sequence * transformer().vocab
    assert (plain.saved_bytes, plain.output_bytes, plain.workspace_bytes) == (2 * tokens, tokens, tokens)
    assert (fused.saved_bytes, fused.output_bytes, fused.workspace_bytes) == (tokens, 0, 0)
    assert (plain.flops, plain.parameters) == (fused.flops, fused.parameters)
