"""Never silently wrong: what training computes is what one process computes on the whole batch, or it is refused."""

import random
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from processes import run_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gpipe_exec import Pipeline  # noqa: E402

sys.path.append(str(Path(__file__).parent / "workers"))

import training  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors are tiny: a second thread would only be waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("check", training.CHECKS, ids=lambda check: check.__name__)
def test_one_process_with_several_stages(check):
    check()


def test_several_processes():
    assert "training is exact" in run_ranks(3, "training.py")


# --- losses ----------------------------------------------------------------------------------------------------------


def weighted_classes(logits, targets):
    weights = torch.linspace(0.1, 3, training.VOCAB, dtype=logits.dtype)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), weights)


@pytest.mark.parametrize(
    "loss",
    [
        training.mean_over_tokens,
        weighted_classes,
        lambda logits, targets: logits.square().sum(),
        lambda logits, targets: logits.square().mean().sqrt(),
    ],
    ids=["padding", "class weights", "a sum", "a root of a mean"],
)
@pytest.mark.parametrize("what", ["step", "evaluate"])
def test_a_loss_that_is_no_plain_mean_is_refused(loss, what):
    pipe = Pipeline(training.model(), training.plan_of(), loss)
    with pytest.raises(ValueError, match=r"not a plain mean over samples.*let the loss return \(sum, count\)"):
        getattr(pipe, what)(*training.batch(1))
    pipe.close()
    unchecked = Pipeline(training.model(), training.plan_of(), loss, checks=False)
    getattr(unchecked, what)(*training.batch(1))
    unchecked.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_plain_mean_is_accepted_also_where_it_is_nearly_zero(dtype):
    def loss(logits, targets):
        return (logits - logits.mean().detach() + 1e-9).mean()

    for one in (training.by_sample, lambda logits, targets: logits.mean() * 1e-3, loss):
        pipe = Pipeline(training.model().to(dtype), training.plan_of(M=2, batch=10), one)
        if one is not loss:  # one that subtracts the mean of its own micro-batch is none
            pipe.step(*training.batch(1))
        pipe.close()


def test_an_output_without_samples_cannot_be_checked_and_that_is_said():
    class Scalar(nn.Module):
        def forward(self, x):
            return x, x.sum()

    def loss(output, targets):
        return output[0].square().mean() + output[1] * 0

    pipe = Pipeline(nn.Sequential(*training.model()[:-1], Scalar()), training.plan_of(), loss)
    with pytest.raises(ValueError, match=r"a tensor of shape \(\), in which samples are not the first dimension"):
        pipe.step(*training.batch(1))
    pipe.close()


def test_a_loss_that_changes_its_mind_is_refused():
    results = iter([training.over_tokens] * 4 + [training.by_sample] * 4)
    pipe = Pipeline(training.model(), training.plan_of(), lambda *given: next(results)(*given))
    pipe.step(*training.batch(1))
    with pytest.raises(ValueError, match="in one step and one number in another"):
        pipe.step(*training.batch(1))
    pipe.close()


# --- values between layers -------------------------------------------------------------------------------------------


@dataclass
class Output(OrderedDict):
    """Like the outputs of Hugging Face's models: a dict of what is there, and attributes."""

    last: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    def __post_init__(self):
        for field in ("last", "mask"):
            if getattr(self, field) is not None:
                self[field] = getattr(self, field)


def passes_an_output_on(layer, value):
    value = value if isinstance(value, Output) else Output(value)
    assert value.mask is None
    return Output(last=value.last * layer.weight)


def passes_none_on(layer, value):
    x, nothing, mapping = value if isinstance(value, tuple) else (value, None, OrderedDict(b=value, a=None))
    assert nothing is None and list(mapping) == ["b", "a"]
    return x * layer.weight, None, OrderedDict(b=x, a=None)


def passes_text_on(layer, value):
    return value, "text"


@pytest.mark.parametrize("function", [passes_an_output_on, passes_none_on], ids=lambda function: function.__name__)
def test_values_between_stages_keep_their_classes(function):
    expected = gradients(function, "never", stages_per_rank=1)
    assert all(map(torch.equal, gradients(function, "always"), expected))


def test_an_error_names_layer_stage_and_rank():
    with pytest.raises(TypeError, match="found a str, expected tensors, or None, in") as raised:
        gradients(passes_text_on, "never")
    assert raised.value.__notes__ == ["in layer 1 (Of) of stage 0 on rank 0"]


# --- recomputation ---------------------------------------------------------------------------------------------------


class Of(nn.Module):
    """A layer from a function of its input, of a weight and of its state."""

    def __init__(self, function):
        super().__init__()
        self.function, self.state = function, {}
        self.weight = nn.Parameter(torch.linspace(-1, 1, training.WIDTH))

    def forward(self, value):
        return self.function(self, value)


def writes_into_its_dict(layer, value):
    if not isinstance(value, dict):
        value = {"h": value}
    value["h"] = torch.tanh(value["h"] * layer.weight + 0.1)
    return value


def writes_into_its_list(layer, value):
    if not isinstance(value, list):
        value = [value]
    value[0] = torch.tanh(value[0] * layer.weight + 0.1)
    return value


def draws_from_python(layer, value):
    return value * layer.weight * random.random()


def draws_from_numpy(layer, value):
    return value * layer.weight * np.random.random()


def draws_one_normal_number(layer, value):
    """Of two that are made at a time; the other is kept."""
    return value * layer.weight * np.random.randn()


def draws_from_torch(layer, value):
    return value * layer.weight * torch.rand(1)


def gradients(function, mode, **choices):
    layers = nn.Sequential(*(Of(function) for _ in range(training.NUM_LAYERS))).double()
    plan = training.plan_of(checkpoint=mode, **{"schedule": "interleaved_gpipe", "stages_per_rank": 4} | choices)

    def loss(output, targets):
        while not isinstance(output, torch.Tensor):
            output = next(iter(output.values())) if isinstance(output, dict) else output[0]
        final = output
        return final.square().mean()

    pipe = Pipeline(layers, plan, loss)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    points = torch.linspace(0, 1, training.BATCH * training.WIDTH, dtype=torch.float64)
    for _ in range(2):
        pipe.step(points.view(training.BATCH, -1), torch.zeros(training.BATCH))
    pipe.close()
    return [parameter.grad for parameter in layers.parameters()]


@pytest.mark.parametrize(
    "function",
    [
        writes_into_its_dict,
        writes_into_its_list,
        draws_from_python,
        draws_from_numpy,
        draws_one_normal_number,
        draws_from_torch,
    ],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize(
    ("schedule", "v", "unit"),
    [
        *[("interleaved_gpipe", 4, unit) for unit in ("stage", "layer")],
        *[("gpipe", 1, unit) for unit in ("stage", "layer")],
        ("zb_v", 2, "stage"),
    ],
)
def test_recomputation_repeats_what_was_computed(function, schedule, v, unit):
    choices = {"schedule": schedule, "stages_per_rank": v}
    expected = gradients(function, "never", **choices)
    for mode in ("always", "except_last"):
        assert all(map(torch.equal, gradients(function, mode, recompute_unit=unit, **choices), expected))


def own_generator(layer, value):
    generator = layer.state.setdefault("generator", torch.Generator().manual_seed(1))
    return value * layer.weight * torch.rand(value.shape, generator=generator, dtype=value.dtype)


def counts_its_calls(layer, value):
    layer.state["calls"] = layer.state.get("calls", 0) + 1
    return value * layer.weight + 0.01 * layer.state["calls"]


def changes_its_input(layer, value):
    return value.mul_(2) if not value.requires_grad else value * 2


def reuses_its_output(layer, value):
    with torch.no_grad():
        out = layer.state.setdefault("out", torch.zeros(training.BATCH, training.WIDTH, dtype=value.dtype))
        return out.copy_(value.mean(0).expand_as(out))


def changes_its_input_inside(layer, value):
    """Of a layer behind the first of a stage, where only a recomputation of the layer alone needs its input."""
    return value * layer.weight if not value.requires_grad or value.is_leaf else value.mul_(layer.weight)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (own_generator, r"layer [0-6] \(Of\) of stage \d on rank 0 computes something else when it is recomputed"),
        (counts_its_calls, r"layer [0-6] \(Of\) of stage \d on rank 0 computes something else when it is recomputed"),
        (changes_its_input_inside, r"layer 1 \(Of\), of stage 0 on rank 0, which recomputes itself, changes its input"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_layer_cannot_repeat_alone_is_refused_by_name(function, message):
    with pytest.raises(ValueError, match=message):
        gradients(function, "always", recompute_unit="layer")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (own_generator, r"layer 6 \(Of\) of stage 3 on rank 0 computes something else when it is recomputed"),
        (counts_its_calls, r"layer 6 \(Of\) of stage 3 on rank 0 computes something else when it is recomputed"),
        (changes_its_input, r"layer 0 \(Of\), the first of stage 0 on rank 0, changes its input in place"),
        (reuses_its_output, r"layer 1 \(Of\), the last of stage 0 on rank 0, writes into its output of an earlier"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_repeated_is_refused_by_name(function, message):
    with pytest.raises(ValueError, match=message):
        gradients(function, "always")
