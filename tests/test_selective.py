"""Attention recomputed by itself, executed: what it computes, keeps and costs."""

import numpy as np
import pytest
from plans import scenario

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gpipe_exec import Pipeline, attention  # noqa: E402
from gpipe_exec.alternatives.rehearsal import rehearsed_workload  # noqa: E402
from gpipe_exec.devices.allocator import storage_bytes, trace_bytes  # noqa: E402
from gpipe_exec.engine.optimizers import make_optimizer  # noqa: E402
from gpipe_exec.layers import build_workload  # noqa: E402
from gpipe_exec.measure.worker import memory_of_layers  # noqa: E402
from gpipe_sim.cost.profile import Profile  # noqa: E402
from gpipe_sim.cost.recompute import recomputed_in_backward  # noqa: E402
from gpipe_sim.explain.predict import predict  # noqa: E402
from gpipe_sim.make.making import make_plan  # noqa: E402
from gpipe_sim.plan.plan import Plan  # noqa: E402

SHAPE = {"kind": "transformer", "layers": 3, "hidden": 32, "heads": 4, "vocab": 60, "sequence": 48}


def scenario_of(dtype="fp32", model=SHAPE, **choices):
    data = {"name": "test", "model": model | {"attention": "classic"}, "batch": 6, "dtype": dtype}
    data |= {"cluster": {"device": {"memory": "16 GiB", "compute": "1 TFLOP/s", "bandwidth": "1 GB/s"}}}
    data["cluster"]["link"] = "nvlink3"
    profile = {"profile": choices.pop("profile")} if "profile" in choices else {}
    spec = {"stages": 1, "microbatches": 3, "checkpoint": "always", "recompute_unit": "attention"}
    return scenario(data | profile | {"plan": spec | choices})


def measured_plan(folder, **choices) -> Plan:
    """With the bytes of its layers as a measurement has them, and the analytic seconds."""
    given = scenario_of(**choices)
    analytic = make_plan(given).profile
    table = {name: analytic.table[name][:, :1] for name in analytic.table}
    columns = memory_of_layers(build_workload(given), 2, torch.device("cpu"))
    table |= {name: np.array(values, float)[:, None] for name, values in columns.items()}
    values = {**vars(analytic), "table": table, "sizes": (2,), "source": "measured"}
    values.pop("_known")
    Profile(**values).save(folder / "profile.json")
    return make_plan(scenario_of(profile=str(folder / "profile.json"), **choices))


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors are tiny: a second thread would only be waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LIKE_LLAMA = {"kv_heads": 2, "positions": "rotary", "gated": True, "norm": "rms"}


@pytest.mark.parametrize(
    ("mode", "schedule", "shape"),
    [("always", "gpipe", {}), ("except_last", "1f1b", LIKE_LLAMA), ("except_last", "interleaved_1f1b", {})],
)
def test_gradients_are_those_of_attention_that_is_kept(mode, schedule, shape):
    def trained(**choices):
        v = {"stages": 3, "stages_per_rank": 3} if schedule == "interleaved_1f1b" else {}
        planned = make_plan(scenario_of("fp64", SHAPE | shape, schedule=schedule, **v, **choices))
        workload = build_workload(planned.scenario)
        pipe = Pipeline(workload.layers, planned, workload.loss)
        losses = [pipe.step(*workload.sample(6)) for _ in range(2)]
        pipe.close()
        return [*losses, *(parameter.grad for parameter in pipe.parameters())]

    selective, kept = trained(checkpoint=mode), trained(checkpoint="never", recompute_unit="stage")
    assert all(map(torch.equal, selective, kept))


@pytest.mark.parametrize(("checkpoint", "optimizer"), [("never", "sgd"), ("always", "adam"), ("except_last", "sgd")])
def test_memory_is_what_the_allocator_counts(tmp_path, checkpoint, optimizer):
    planned = measured_plan(tmp_path, checkpoint=checkpoint)
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
    static = storage_bytes([*pipe.parameters(), *pipe.module.buffers(), *state, inputs])
    trace, _ = trace_bytes(torch.device("cpu"), lambda: pipe.step(inputs, targets, step))
    (expected,) = predict(planned).peak_memory_bytes
    assert static + trace.peak_bytes == pytest.approx(expected, rel=0.015)
    pipe.close()


def test_a_measured_profile_says_what_attention_is_of_each_layer(tmp_path):
    """Of the blocks, and of nothing else; a forward that recomputes it keeps that much less, exactly."""
    profile = measured_plan(tmp_path).profile
    dropped = profile.table["attention_bytes"][:, 0]
    assert dropped[0] == dropped[-2] == dropped[-1] == 0.0
    softmax = 4 * 2 * 4 * 48 * 48
    assert all(dropped[1:-2] == dropped[1])
    assert 0.5 * softmax < dropped[1] < profile.table["saved_bytes"][1, 0]
    own = recomputed_in_backward(profile, "attention").table
    for name in ("workspace_forward_bytes", "workspace_backward_bytes", "workspace_accumulate_bytes"):
        assert own[name].tolist() == profile.table[f"attention_{name}"].tolist()
        assert own[name][0] == profile.table[name][0]


class Own(nn.Module):
    """Attention of one's own, with dropout, said to be attention or not."""

    def __init__(self, says: bool) -> None:
        super().__init__()
        self.qkv, self.says = nn.Linear(8, 24), says

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + (attention(self.core, q, k, v) if self.says else self.core(q, k, v))

    def core(self, q, k, v):
        return functional.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.3) @ v


def own(says: bool, unit: str) -> Pipeline:
    planned = make_plan(scenario_of("fp64", SHAPE | {"layers": 1}, recompute_unit=unit, balance=[4]))
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), Own(says), nn.LayerNorm(8), nn.Linear(8, 8)).double()
    return Pipeline(layers, planned, functional.mse_loss)


def test_dropout_drops_the_same_when_attention_is_recomputed():
    inputs = torch.randn(6, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for unit in ("attention", "stage"):
        pipe = own(says=True, unit=unit)
        torch.manual_seed(3)
        pipe.step(inputs, inputs)
        found.append([parameter.grad for parameter in pipe.parameters()])
        pipe.close()
    assert all(map(torch.equal, *found))


def test_layers_that_do_not_say_what_attention_is_are_refused():
    pipe = own(says=False, unit="attention")
    inputs = torch.randn(6, 5, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"plan.recompute_unit: found attention, .* gpipe_exec.attention"):
        pipe.step(inputs, inputs)
    pipe.close()


def test_a_rehearsal_holds_what_is_kept_then(tmp_path):
    planned = measured_plan(tmp_path)
    workload, update = rehearsed_workload(planned, [0], 1e-6)
    pipe = Pipeline(workload.layers, planned, workload.loss, checks=False)
    inputs, targets = workload.sample(6)
    trace, _ = trace_bytes(torch.device("cpu"), lambda: pipe.step(inputs, targets, update))
    static = storage_bytes([*pipe.parameters(), *pipe.module.buffers(), inputs])
    (expected,) = predict(planned).peak_memory_bytes
    assert static + trace.peak_bytes == pytest.approx(expected, rel=0.02)
    pipe.close()
