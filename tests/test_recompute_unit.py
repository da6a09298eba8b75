"""Recomputation layer by layer, inside each backward: simulated, evaluated, in files, and executed."""

import numpy as np
import pytest
from plans import equal_stages, plan, scenario
from plans import layers as layer_costs

from gpipe_sim.base.files import InputError, parse_yaml
from gpipe_sim.explain.predict import predict, predict_all
from gpipe_sim.make.making import make_plan
from gpipe_sim.make.planfile import parse_plan, plan_text

GiB = 2**30


def transformer_plan(**choices):
    model = {"kind": "transformer", "preset": "gpt2-xl", "layers": 21}
    cluster = {"device": "a100-80gb", "link": "nvlink3"}
    spec = {"stages": 4, "microbatches": 8, "schedule": "1f1b", "balance": [6, 6, 6, 6]} | choices
    return make_plan(scenario({"name": "test", "model": model, "batch": 32, "cluster": cluster, "plan": spec}))


def test_a_backward_takes_its_layers_forwards_longer_and_nothing_else_changes():
    model = layer_costs([1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0])
    by_layer = predict(plan(model, 8, schedule="1f1b", checkpoint="always", recompute_unit="layer"))
    longer = predict(plan(layer_costs([1.0] * 4, [3.0, 3.0, 3.0, 2.0]), 8, schedule="1f1b"))
    assert by_layer.step_time_s == longer.step_time_s
    assert by_layer.breakdown_s["recompute"] == pytest.approx(8 * 3 / 4)
    assert sum(by_layer.breakdown_s.values()) == pytest.approx(by_layer.step_time_s)
    assert "R" not in {action.kind for timeline in by_layer.step.ranks for action in timeline.actions}


def test_the_last_micro_batch_is_spared_where_the_mode_spares_it():
    made = equal_stages(3, 4, checkpoint="except_last", recompute_unit="layer")
    timeline = predict(made).step.ranks[0]
    lengths = {
        a.microbatch: e - s
        for a, s, e in zip(timeline.actions, timeline.start_s, timeline.end_s, strict=True)
        if a.kind == "B"
    }
    assert lengths == pytest.approx({0: 3.0, 1: 3.0, 2: 3.0, 3: 2.0})


def test_an_input_is_kept_for_each_layer():
    never, by_stage, by_layer = (
        predict(transformer_plan(checkpoint=mode, recompute_unit=unit))
        for mode, unit in (("never", "stage"), ("always", "stage"), ("always", "layer"))
    )
    on_rank_1 = [found.activation_bytes[1] for found in (never, by_stage, by_layer)]
    boundary = 4 * 2 * 1024 * 1600
    saved = 34 * boundary / 2
    # Rank 1 of four holds three micro-batches: an input of each of six layers, beside the one that is recomputed.
    held = by_layer.step.memory[1]
    assert max(held.parts["activations"]) == pytest.approx(3 * 6 * boundary)
    assert on_rank_1[2] < 3 * 6 * boundary + 2 * saved + 12 * boundary
    assert on_rank_1[2] < on_rank_1[0] / 2


@pytest.mark.parametrize("mode", ["always", "except_last", "never", {"per_stage": ["always", "never"] * 2}])
def test_simulated_and_evaluated_are_the_same(mode):
    plans = [transformer_plan(checkpoint=mode, recompute_unit="layer", microbatches=M) for M in (4, 8)]
    for slow, fast in zip(map(predict, plans), predict_all(plans, fast=True), strict=True):
        assert fast.step_time_s == pytest.approx(slow.step_time_s, rel=1e-9)
        assert fast.peak_memory_bytes == slow.peak_memory_bytes
    if mode == "never":
        assert (
            predict(plans[0]).to_dict()["step_time_s"]
            == predict(transformer_plan(checkpoint="never", microbatches=4)).step_time_s
        )


def test_backwards_that_are_split_are_refused():
    for schedule in ("zb_h1", "auto"):
        with pytest.raises(InputError, match=f"plan.recompute_unit: found layer, expected stage with {schedule}"):
            transformer_plan(schedule=schedule, recompute_unit="layer")


def test_a_plan_file_says_it():
    made = transformer_plan(checkpoint="always", recompute_unit="layer")
    again = parse_plan(parse_yaml(plan_text(made), "plan.yaml"))
    assert again.recompute_unit == "layer"
    assert predict(again).step_time_s == pytest.approx(predict(made).step_time_s, rel=1e-12)
    assert "recompute_unit" not in {
        key: None for key in parse_yaml(plan_text(transformer_plan()), "plan.yaml").data if key != "scenario"
    }


def test_layers_that_recompute_themselves_have_the_same_gradients():
    torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")
    from torch import nn

    from gpipe_exec.engine.stage import Stage

    def stage(by_layer):
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
            nn.Linear(8, 6),
        ).double()
        made = Stage(
            module=module,
            device=torch.device("cpu"),
            is_first=False,
            loss=nn.functional.mse_loss,
            recomputed=(False, False),
            by_layer=by_layer,
        )
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(2, 5, 6, dtype=torch.float64, generator=generator)
        targets = torch.randn(2, 5, 6, dtype=torch.float64, generator=generator)
        torch.manual_seed(2)
        for microbatch in (0, 1):
            made.forward(microbatch, inputs[microbatch], targets[microbatch], 0.5)
        back = [made.backward(microbatch, []) for microbatch in (1, 0)]
        made.averages.commit()
        return [
            *(gradient for gradients in back for gradient in gradients),
            *(p.grad for p in module.parameters()),
        ], module

    (plain, one), (again, other) = stage(()), stage((True, False))
    for ours, theirs in zip(again, plain, strict=True):
        assert torch.equal(ours, theirs)
    for name, buffer in one.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name)), name
    assert np.isfinite(float(plain[0].sum()))
