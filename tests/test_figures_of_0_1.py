"""Scenarios that version 0.1 shipped give the figures that they gave then, but for the receives of gradients:
0.1 counted them from the step's begin, and they are begun after their outputs were sent."""

import json
from pathlib import Path

import pytest

from gpipe_sim.explain.predict import predict_all
from gpipe_sim.make.making import make_plan
from gpipe_sim.scenario.reading import load_scenario, shipped_scenarios

FIGURES_OF_0_1 = json.loads((Path(__file__).parent / "data" / "figures_0_1.json").read_text())
"""What version 0.1 said of the scenarios that do not depend on this machine; per plan, peaks as least, most and sum."""


@pytest.mark.parametrize("name", FIGURES_OF_0_1)
def test_scenarios_of_version_0_1_give_the_same_figures_as_then(name):
    sweep = load_scenario(shipped_scenarios() / f"{name}.yaml")
    predictions = predict_all([make_plan(point) for point in sweep])
    for found, expected in zip(predictions, FIGURES_OF_0_1[name], strict=True):
        step_time = expected["step_time_s"]
        assert found.step_time_s == pytest.approx(step_time, rel=1e-12)
        assert found.pipeline_time_s == pytest.approx(expected["pipeline_time_s"], rel=1e-12)
        assert found.bubble_fraction == pytest.approx(expected["bubble_fraction"], rel=1e-12)
        peaks = found.peak_memory_bytes
        assert [min(peaks), max(peaks), sum(peaks)] == expected["peak_memory_bytes"]
        assert sum(found.activation_bytes) == expected["activation_bytes"]
        for part, seconds in expected["breakdown_s"].items():
            assert found.breakdown_s[part] == pytest.approx(seconds, abs=1e-12 * step_time)
