"""The torch layers of named models, and of the user's own: the same model that the simulator counts."""

import math
import sys
from pathlib import Path

import pytest
from plans import layers as layer_costs
from plans import scenario

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from gpipe_exec.layers import (  # noqa: E402
    DTYPES,
    WorkloadError,
    build_workload,
    convnet,
    load_workload,
    mlp,
    transformer,
)
from gpipe_sim.cost.transformer import num_parameters, transformer_layers  # noqa: E402
from gpipe_sim.scenario.presets import PRESETS  # noqa: E402
from gpipe_sim.scenario.schema import Transformer  # noqa: E402

SHAPE = {"kind": "transformer", "layers": 3, "hidden": 12, "heads": 3, "vocab": 31, "sequence": 7}


def named_scenario(model, dtype="fp32", **more):
    cluster = {"device": "a100-80gb", "link": "nvlink3"}
    return scenario({"name": "test", "model": model, "batch": 4, "dtype": dtype, "cluster": cluster} | more)


@pytest.mark.parametrize("shape", [{}, {"layers": 1, "ffn": 20}, {"hidden": 9, "attention": "classic"}])
def test_the_transformer_has_the_layers_and_parameters_that_the_simulator_counts(shape):
    model = Transformer(**SHAPE | shape)
    made = [sum(parameter.numel() for parameter in layer.parameters()) for layer in transformer(model).layers]
    assert made == [layer.parameters for layer in transformer_layers(model, "fp32")]
    assert len(made) == model.num_layers


TODAY = {"norm": "rms", "gated": True, "positions": "rotary", "heads": 6, "kv_heads": 2}
VARIANTS = [TODAY, {"positions": "learned", "context": 9}, {"bias": "qkv", "head_width": 6}, {"tied": True}]


def shrunk(shape):
    """A preset's kind of model, small enough to be built here: heads and widths divided, proportions kept."""
    heads, kv_heads = shape["heads"], shape.get("kv_heads", shape["heads"])
    small = {"layers": 2, "vocab": 31, "sequence": 7, "heads": heads // kv_heads * 2, "kv_heads": 2}
    small |= {"hidden": 4 * small["heads"], "context": 9}
    if "head_width" in shape:
        small["head_width"] = 6
    if "ffn" in shape:
        small["ffn"] = round(shape["ffn"] / shape["hidden"] * small["hidden"])
    return dict(shape) | small


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_shrunk_has_as_many_real_parameters_as_are_counted(name):
    model = Transformer(kind="transformer", **shrunk(PRESETS[name].shape))
    layers = transformer(model).layers
    assert sum(parameter.numel() for parameter in layers.parameters()) == num_parameters(model)
    made = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    assert made == [layer.parameters for layer in transformer_layers(model, "fp32")]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_mixed_precision_weights_are_built_in_fp32(dtype):
    layers, _, _ = build_workload(named_scenario(SHAPE, dtype))
    assert {tensor.dtype for tensor in layers.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_transformer_is_built_in_the_scenarios_dtype(dtype):
    layers, sample, loss = build_workload(named_scenario(SHAPE, dtype, precision="pure"))
    assert {tensor.dtype for tensor in [*layers.parameters(), *layers.buffers()]} == {DTYPES[dtype]}
    tokens, targets = sample(2)
    logits = layers(tokens)
    assert (logits.dtype, logits.shape) == (DTYPES[dtype], (2, 7, 31))
    assert loss(logits, targets).item() == pytest.approx(math.log(31), rel=0.3)


@pytest.mark.parametrize("shape", [{}, *VARIANTS])
def test_flash_and_classic_attention_are_the_same_function(shape):
    flash, classic = (
        transformer(Transformer(**SHAPE | shape, attention=kind)).layers.double() for kind in ("flash", "classic")
    )
    classic.load_state_dict(flash.state_dict())
    tokens = torch.randint(31, (4, 7), generator=torch.Generator().manual_seed(0))
    losses = [layers(tokens).square().mean() for layers in (flash, classic)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(flash.parameters(), classic.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("shape", [{}, *VARIANTS])
@pytest.mark.parametrize("attention", ["flash", "classic"])
def test_no_token_sees_a_later_one(attention, shape):
    layers = transformer(Transformer(**SHAPE | shape, attention=attention)).layers.double()
    tokens = torch.arange(7)[None]
    changed = tokens.clone()
    changed[0, 4:] = 30
    torch.testing.assert_close(layers(changed)[:, :4], layers(tokens)[:, :4], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(layers(changed)[:, 4:], layers(tokens)[:, 4:])


def test_rotary_scores_depend_on_the_distance_of_two_tokens_only():
    block = transformer(Transformer(**SHAPE | TODAY)).layers[1].double()
    vector = torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key = (block._rotated(part.expand(1, 1, 7, 2))[0, 0] for part in vector)
    scores = query @ key.T
    for distance in range(-6, 7):
        assert scores.diagonal(distance).std(correction=0) < 1e-6  # angles are kept in float32
    assert (scores[0] - scores[0, 0]).abs().max() > 1e-3


def test_positions_of_every_kind_tell_places_apart():
    for positions in ("sinusoidal", "learned", "rotary"):
        torch.manual_seed(0)
        layers = transformer(Transformer(**SHAPE | {"heads": 6, "positions": positions})).layers.double()
        one, other = torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), torch.tensor([[3, 2, 1, 4, 5, 6, 7]])
        assert (layers(one)[:, -1] - layers(other)[:, -1]).abs().max() > 1e-6


@pytest.mark.parametrize(("model", "num_layers"), [(mlp, 8), (convnet, 7)])
def test_mlp_and_convnet_run_forward_and_backward(model, num_layers):
    layers, sample, loss = model()
    assert len(layers) == num_layers
    inputs, targets = sample(4)
    found = loss(layers(inputs), targets)
    found.backward()
    assert found.ndim == 0
    assert found.isfinite()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layers.parameters())


@pytest.mark.parametrize(
    ("made", "inputs", "targets"),
    [
        (lambda: transformer(Transformer(**SHAPE)), (7,), (7,)),
        (mlp, (512,), (512,)),
        (convnet, (3, 32, 32), ()),
    ],
)
@pytest.mark.parametrize("n", [1, 5])
def test_a_sample_has_n_inputs_and_targets_and_is_the_same_each_time(made, inputs, targets, n):
    sample = made().sample
    found = sample(n)
    assert [tuple(tensor.shape) for tensor in found] == [(n, *inputs), (n, *targets)]
    assert all(map(torch.equal, found, sample(n)))


def test_targets_are_the_next_tokens():
    inputs, targets = transformer(Transformer(**SHAPE)).sample(6)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_weights_follow_from_the_seed():
    first, again, other = (build_workload(named_scenario(SHAPE), seed).layers[1].up.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# --- the user's own ------------------------------------------------------------------------------------------------

SOUND = """
from torch import nn
def model():
    return nn.Sequential(nn.Linear(3, 3)), lambda n: None, nn.functional.mse_loss
"""


def written(folder: Path, name: str, text: str) -> Path:
    (folder / f"{name}.py").write_text(text)
    return folder


def test_a_model_is_found_beside_the_scenario_file(tmp_path):
    layers, _, loss = load_workload("found_beside:model", written(tmp_path, "found_beside", SOUND))
    assert isinstance(layers[0], torch.nn.Linear)
    assert loss is torch.nn.functional.mse_loss


def test_a_folder_that_is_on_the_path_already_keeps_its_place(tmp_path, monkeypatch):
    folder = written(tmp_path, "found_first", SOUND)
    monkeypatch.setattr(sys, "path", [str(folder.resolve()), *sys.path])
    before = list(sys.path)
    load_workload("found_first:model", folder)
    assert sys.path == before


def test_a_scenario_names_a_model_that_comes_with_the_tool():
    model = {"kind": "python", "function": "gpipe_exec.layers:convnet"}
    layers, sample, _ = build_workload(named_scenario(model, "fp64", profile="unread.json"))
    images, labels = sample(2)
    assert (images.dtype, labels.dtype) == (torch.float64, torch.int64)
    assert layers(images).shape == (2, 10)


@pytest.mark.parametrize(
    ("function", "text", "message"),
    [
        ("absent_model:model", None, "absent_model:model: there is no module absent_model"),
        ("other_name:model", "", "other_name:model: module 'other_name' has no attribute 'model', expected a function"),
        ("needs_more:model", "import nothing_like_it", "needs_more:model: there is no module nothing_like_it"),
        ("two_things:model", "model = lambda: (1, 2)", "two_things:model: .*expected a function that returns"),
        ("no_function:model", "model = 3", "no_function:model: 'int' object is not callable, expected a function"),
        ("no_layers:model", "model = lambda: (1, print, print)", r"no_layers:model: expected \(nn.Module, sample"),
    ],
)
def test_what_is_wrong_with_a_model_is_said(tmp_path, function, text, message):
    if text is not None:
        written(tmp_path, function.partition(":")[0], text)
    with pytest.raises(WorkloadError, match=message):
        load_workload(function, tmp_path)


def test_a_model_that_is_only_costs_cannot_be_built():
    with pytest.raises(WorkloadError, match="a model of kind layers has costs but no arithmetic"):
        build_workload(named_scenario(layer_costs([1.0, 1.0])))
