"""A step without events has every time and every byte of the simulated one."""

import numpy as np
import pytest

from gpipe_sim.make.making import make_plan
from gpipe_sim.scenario.reading import load_scenario, shipped_scenarios
from gpipe_sim.step.evaluated import evaluated_step
from gpipe_sim.step.simulate import simulate

COLUMNS = ("start_s", "end_s", "arrived_s", "send_start_s", "send_end_s")
SEVERAL = ("plan.stages=8", "plan.stages_per_rank=2")


def plan_of(*overrides: str):
    given = ("plan.microbatches=8", "plan.recompute=early", "plan.checkpoint=never")
    (point,) = load_scenario(shipped_scenarios() / "checkpoint.yaml", *given, *overrides)
    return make_plan(point)


@pytest.mark.parametrize(
    "overrides",
    [
        ("plan.schedule=gpipe",),
        ("plan.schedule=1f1b", "plan.window=1"),
        ("plan.schedule=zb_h1",),
        ("plan.schedule=gpipe", "plan.checkpoint=always"),
        ("plan.schedule=1f1b", "plan.checkpoint=always", "plan.recompute=on_demand"),
        ("plan.schedule=gpipe", "cluster.overlap=false"),
    ],
)
def test_an_evaluated_step_is_the_simulated_one(overrides):
    plan = plan_of(*overrides)
    simulated, evaluated = simulate(plan), evaluated_step(plan)
    assert evaluated is not None
    for one, other in zip(simulated.ranks, evaluated.ranks, strict=True):
        assert one.actions == other.actions
        for name in COLUMNS:
            np.testing.assert_allclose(getattr(other, name), getattr(one, name), rtol=1e-9, atol=1e-12, err_msg=name)
    for curve, again in zip(simulated.memory, evaluated.memory, strict=True):
        assert again.peak_bytes == pytest.approx(curve.peak_bytes, abs=1)


@pytest.mark.parametrize("overrides", [("plan.checkpoint=except_last",), ("plan.schedule=zb_v", *SEVERAL)])
def test_what_only_events_tell_is_not_evaluated(overrides):
    assert evaluated_step(plan_of(*overrides)) is None
