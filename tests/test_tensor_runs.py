"""Tensor groups, executed: exact in float64, refused where they would not be."""

import pytest
from plans import scenario
from processes import run_ranks

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from torch import nn  # noqa: E402

from gpipe_exec import Pipeline  # noqa: E402
from gpipe_exec.engine.slices import plain_name, refuse_tensor  # noqa: E402
from gpipe_exec.layers import build_workload  # noqa: E402
from gpipe_sim.base.files import InputError  # noqa: E402
from gpipe_sim.make.making import make_plan  # noqa: E402

SHAPE = {"kind": "transformer", "layers": 2, "hidden": 16, "heads": 4, "vocab": 26, "sequence": 8}
DEVICE = {"memory": "16 GiB", "compute": "1 TFLOP/s", "bandwidth": "1 GB/s"}


def plan_of(model=SHAPE, **choices):
    data = {"name": "test", "model": model, "batch": 4, "dtype": "fp32"}
    data |= {"cluster": {"device": DEVICE, "link": "nvlink3"}}
    return make_plan(scenario(data | {"plan": {"stages": 1, "tensor": 2, "microbatches": 2} | choices}))


@pytest.mark.parametrize(("K", "D"), [(1, 1), (2, 1), (1, 2)])
def test_training_is_that_of_one_process(K, D):
    """Every schedule and shard, with and without a split sequence: losses, gradients, norms, updates, checkpoints."""
    assert "plans are exact" in run_ranks(2 * K * D, "tensor.py", K, D)


@pytest.mark.parametrize(
    ("shape", "T", "message"),
    [
        ({"kv_heads": 2}, 4, "model.kv_heads: found 2, expected a multiple of plan.tensor, 4"),
        ({"vocab": 27}, 2, "model.vocab: found 27, expected a multiple of plan.tensor, 2"),
    ],
)
def test_what_cannot_be_divided_equally_is_refused_at_its_field(shape, T, message):
    with pytest.raises(InputError, match=message):
        refuse_tensor(plan_of(SHAPE | shape, tensor=T))


def test_layers_must_be_as_many_processes_as_the_plan_says():
    plan = plan_of()
    workload = build_workload(plan.scenario)
    with pytest.raises(ValueError, match="1 process for a plan of 1 ranks, each of 2 members, expected one for each"):
        Pipeline(workload.layers, plan, workload.loss)


def test_names_are_those_of_the_whole_model():
    names = ["1.qkv.parametrizations.weight.original", "3.parametrizations.weight.original", "0.positions.weight"]
    assert list(map(plain_name, names)) == ["1.qkv.weight", "3.weight", "0.positions.weight"]


def test_a_loss_in_float64_is_computed_in_float64():
    plan = plan_of(tensor=1)
    workload = build_workload(plan.scenario)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert torch.equal(workload.loss(logits, targets), expected)
