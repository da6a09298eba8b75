"""Precision: what the engine holds, computes and refuses in mixed and pure precision."""

import copy

import numpy as np
import pytest
from plans import scenario

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gpipe_exec import Pipeline  # noqa: E402
from gpipe_exec.devices.allocator import storage_bytes, trace_bytes  # noqa: E402
from gpipe_exec.engine.optimizers import make_optimizer  # noqa: E402
from gpipe_exec.engine.precision import DTYPES, Mixed, lower  # noqa: E402
from gpipe_exec.layers import build_workload  # noqa: E402
from gpipe_exec.measure.worker import memory_of_layers  # noqa: E402
from gpipe_sim.base.files import InputError  # noqa: E402
from gpipe_sim.cost.profile import Profile  # noqa: E402
from gpipe_sim.explain.predict import predict  # noqa: E402
from gpipe_sim.make.making import make_plan  # noqa: E402

SHAPE = {"kind": "transformer", "layers": 2, "hidden": 64, "heads": 2, "vocab": 300, "sequence": 16}
DEVICE = {"memory": "16 GiB", "compute": "1 TFLOP/s", "bandwidth": "1 GB/s"}


def scenario_of(**more):
    data = {
        "name": "test",
        "model": SHAPE,
        "batch": 6,
        "dtype": "bf16",
        "cluster": {"device": DEVICE, "link": "nvlink3"},
    }
    choices = {"stages": 1, "microbatches": 3, "checkpoint": "never"} | more.pop("plan", {})
    return scenario(data | {"plan": choices} | more)


def columns_of(planned):
    """The bytes of a plan's layers as a measurement would have them."""
    workload = build_workload(planned)
    if planned.precision != "pure":
        lower(workload.layers, DTYPES[planned.dtype], in_fp32=planned.precision == "mixed_fp32_gradients")
    return memory_of_layers(workload, 2, torch.device("cpu"))


@pytest.mark.parametrize(
    ("precision", "checkpoint", "optimizer"),
    [
        ("mixed", "never", "adam"),
        ("pure", "never", "adam"),
        ("mixed", "always", "momentum"),
        ("pure", "always", "sgd"),
        ("mixed_fp32_gradients", "never", "adam"),
        ("mixed_fp32_gradients", "always", "sgd"),
    ],
)
def test_the_model_counts_what_the_engine_holds_to_one_percent_of_the_allocator(
    tmp_path, precision, checkpoint, optimizer
):
    given = scenario_of(precision=precision, optimizer=optimizer, plan={"checkpoint": checkpoint})
    analytic = make_plan(given).profile
    table = {name: analytic.table[name][:, :1] for name in analytic.table}
    table |= {name: np.array(values, float)[:, None] for name, values in columns_of(given).items()}
    values = {**vars(analytic), "table": table, "sizes": (2,), "source": "measured"}
    values.pop("_known")
    Profile(**values).save(tmp_path / "profile.json")
    planned = make_plan(
        scenario_of(
            precision=precision,
            optimizer=optimizer,
            plan={"checkpoint": checkpoint},
            profile=str(tmp_path / "profile.json"),
        )
    )
    workload = build_workload(planned.scenario)
    pipe = Pipeline(workload.layers, planned, workload.loss, checks=False)
    update = make_optimizer(planned.scenario.optimizer, pipe.parameters())

    def step() -> None:
        update.step()
        update.zero_grad(set_to_none=True)

    inputs, targets = workload.sample(6)
    for _ in range(2):
        pipe.step(inputs, targets, step)
    state = [v for entry in update.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
    static = [*pipe.parameters(), *pipe.module.buffers(), *state, inputs]
    trace, _ = trace_bytes(torch.device("cpu"), lambda: pipe.step(inputs, targets, step))
    (expected,) = predict(planned).peak_memory_bytes
    assert storage_bytes(static) + trace.peak_bytes == pytest.approx(expected, rel=0.01)
    per_parameter = storage_bytes([*pipe.parameters(), *state]) / sum(p.numel() for p in pipe.parameters())
    states = {"adam": 2, "momentum": 1, "sgd": 0}[optimizer]
    assert per_parameter == pytest.approx((2 if precision == "pure" else 4) * (1 + states), rel=0.01)


# --- what is computed ------------------------------------------------------------------------------------------------


def small(batchnorm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6) if batchnorm else nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(6, 3))


def plan_of(dtype="bf16", precision="mixed", **choices):
    layer = {"name": "layer", "repeat": 3, "forward": "1 ms", "backward_weights": "1 ms"}
    data = {"model": {"kind": "layers", "layers": [layer]}, "dtype": dtype, "precision": precision}
    return make_plan(scenario_of(**data, plan={"stages": 1, "microbatches": 2} | choices))


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 6, generator=generator), torch.randint(3, (6,), generator=generator)


def loss_of(output, targets):
    return functional.cross_entropy(output.float(), targets)


def expected_gradients(dtype, count=2, in_fp32=False):
    """Each micro-batch in the lower dtype, its gradients added there and raised at the end, or added in fp32."""
    lowered = copy.deepcopy(small()).to(dtype)
    inputs, targets = batch()
    size = len(inputs) // count
    sums = [torch.zeros(parameter.shape) for parameter in lowered.parameters()]
    for part, answers in zip(inputs.to(dtype).split(size), targets.split(size), strict=True):
        (loss_of(lowered(part), answers) / count).backward()
        if in_fp32:
            for one, parameter in zip(sums, lowered.parameters(), strict=True):
                one += parameter.grad
                parameter.grad = None
    return sums if in_fp32 else [parameter.grad.float() for parameter in lowered.parameters()]


@pytest.mark.parametrize(
    "choices",
    [{}, {"checkpoint": "always"}, {"schedule": "zb_h1"}, {"recompute_unit": "layer", "checkpoint": "always"}],
)
def test_gradients_added_up_in_fp32_are_exactly_those_of_the_micro_batches_added_in_fp32(choices):
    """The others, added in 16 bits, are not."""
    exact, rounded = (
        Pipeline(small(), plan_of(precision=precision, backward="fifo", microbatches=6, **choices), loss_of)
        for precision in ("mixed_fp32_gradients", "mixed")
    )
    for pipe in (exact, rounded):
        pipe.step(*batch())
    expected = expected_gradients(torch.bfloat16, 6, in_fp32=True)
    pairs = list(zip(exact.parameters(), expected, strict=True))
    for parameter, sums in pairs:
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, sums, rtol=1e-6, atol=1e-8)
    assert not all(
        torch.allclose(parameter.grad, sums, rtol=1e-4)
        for parameter, sums in zip(rounded.parameters(), expected, strict=True)
    )
    exact.step(*batch())
    for parameter, sums in pairs:
        torch.testing.assert_close(parameter.grad, 2 * sums, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("choices", [{}, {"checkpoint": "always"}, {"schedule": "zb_h1"}])
def test_mixed_precision_computes_in_the_dtype_and_has_fp32_weights_and_gradients(choices):
    pipe = Pipeline(small(), plan_of(backward="fifo", **choices), loss_of)
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    pipe.step(*batch())
    assert {p.dtype for p in pipe.parameters()} == {p.grad.dtype for p in pipe.parameters()} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(before, pipe.parameters(), strict=True))
    for parameter, expected in zip(pipe.parameters(), expected_gradients(torch.bfloat16), strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=2e-3)


def test_gradients_of_two_mixed_steps_add_up_in_fp32():
    one, two = (Pipeline(small(), plan_of(), loss_of) for _ in range(2))
    one.step(*batch())
    for _ in range(2):
        two.step(*batch(), weight=0.5)
    for first, second in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad, rtol=0, atol=1e-6)


def test_layers_have_their_weights_again_after_a_step_that_fails():
    pipe = Pipeline(small(), plan_of(), loss_of)
    with pytest.raises(ValueError, match="samples"):
        pipe.step(batch()[0], torch.zeros(5))
    assert {p.dtype for p in pipe.parameters()} == {torch.float32}


def test_weights_of_16_bits_are_raised_and_batchnorm_keeps_its_own():
    pipe = Pipeline(small(batchnorm=True).to(torch.bfloat16), plan_of(), loss_of)
    loss = pipe.step(*batch())
    assert loss.isfinite()
    assert {p.dtype for p in pipe.parameters()} == {torch.float32}
    assert pipe.module[0][1].running_mean.dtype == torch.float32
    assert pipe.evaluate(*batch()).isfinite()


def test_float64_weights_are_refused_in_mixed_precision():
    with pytest.raises(ValueError, match=r"float64.*expected float32"):
        Pipeline(small().double(), plan_of(), loss_of)


# --- fp16 ------------------------------------------------------------------------------------------------------------


def test_fp16_gradients_too_small_for_it_survive_by_the_scale():
    def tiny(output, targets):
        return loss_of(output, targets) * 1e-6

    pipe, pure = Pipeline(small(), plan_of("fp16"), tiny), Pipeline(small().half(), plan_of("fp16", "pure"), tiny)
    inputs, targets = batch()
    pipe.step(inputs, targets)
    pure.step(inputs.half(), targets)
    whole = small()
    tiny(whole(inputs), targets).backward()
    for ours, theirs, expected in zip(pipe.parameters(), pure.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=0.05, atol=2e-9)
        assert not torch.allclose(theirs.grad.float(), expected.grad, rtol=0.05, atol=2e-9)


@pytest.mark.parametrize("precision", ["mixed", "mixed_fp32_gradients"])
def test_a_step_that_overflows_is_skipped_exactly_and_the_scale_is_halved(precision):
    """The update is not called, nor do gradients change that were there; Adam does not move."""

    def loss(output, targets):
        return loss_of(output, targets) * (1e9 if overflow else 1.0)

    pipe = Pipeline(small(), plan_of("fp16", precision), loss, checks=False)
    optimizer = torch.optim.Adam(pipe.parameters())
    overflow, called = False, []
    pipe.step(*batch(), optimizer.step)
    assert not pipe.overflowed
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    scale, overflow = pipe._mixed.scale, True
    pipe.step(*batch(), lambda: called.append(1))
    assert pipe.overflowed
    assert called == []
    assert pipe._mixed.scale == scale / 2
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, pipe.parameters(), strict=True))
    overflow = False
    pipe.step(*batch())
    kept = [parameter.grad.clone() for parameter in pipe.parameters()]
    overflow = True
    pipe.step(*batch())
    assert all(torch.equal(a, p.grad) for a, p in zip(kept, pipe.parameters(), strict=True))


def test_the_scale_grows_again_after_steps_without_overflow():
    mixed = Mixed(nn.Linear(1, 1), torch.float16)
    first = mixed.scale
    for _ in range(2000):
        mixed.raise_gradients()
    assert mixed.scale == 2 * first


def test_the_scale_is_saved_with_a_checkpoint(tmp_path):
    pipe = Pipeline(small(), plan_of("fp16"), loss_of)
    pipe._mixed.scale = 8.0
    pipe.save(tmp_path / "saved", None, 3)
    again = Pipeline(small(), plan_of("fp16"), loss_of)
    assert again.load(tmp_path / "saved", None) == {"step": 3}
    assert again._mixed.scale == 8.0


# --- what is said ----------------------------------------------------------------------------------------------------


def test_left_out_precision_is_mixed_and_pure_needs_less():
    left_out, mixed, pure = (
        make_plan(scenario_of(**more)) for more in ({}, {"precision": "mixed"}, {"precision": "pure"})
    )
    assert predict(left_out).peak_memory_bytes == predict(mixed).peak_memory_bytes
    assert predict(pure).peak_memory_bytes[0] < predict(mixed).peak_memory_bytes[0]


def test_mixed_precision_of_fp32_is_refused():
    with pytest.raises(InputError, match="precision: found mixed with dtype fp32, expected it with bf16 or fp16"):
        scenario_of(dtype="fp32", precision="mixed")


def test_a_profile_of_the_other_precision_is_refused(tmp_path):
    values = vars(make_plan(scenario_of()).profile) | {"precision": "pure"}
    values.pop("_known")
    Profile(**values).save(tmp_path / "profile.json")
    with pytest.raises(InputError, match="made with pure, but the scenario's precision is mixed"):
        make_plan(scenario_of(profile=str(tmp_path / "profile.json")))
    assert make_plan(scenario_of(profile=str(tmp_path / "profile.json"), precision="pure")).profile.precision == "pure"
