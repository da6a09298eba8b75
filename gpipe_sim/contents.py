"""The table of contents: every name that `gpipe_sim` offers, in the order of the data flow."""

from gpipe_sim.base.files import InputError
from gpipe_sim.scenario.schema import Scenario
from gpipe_sim.scenario.reading import Sweep, load_scenario
from gpipe_sim.scenario.catalog import Device, Link
from gpipe_sim.cost.profile import Profile, load_profile
from gpipe_sim.cost.analytic import build_profile
from gpipe_sim.plan.partition import partition
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.actions import Action
from gpipe_sim.plan.program import DeadlockError, rank_actions
from gpipe_sim.plan.figures import Effects
from gpipe_sim.step.simulate import simulate
from gpipe_sim.step.step import MemoryCurve, Span, Step
from gpipe_sim.step.metrics import (
    StepMetrics,
    bubble_fraction,
    bubble_ideal,
    pipeline_time_s,
    step_metrics,
    step_time_s,
)
from gpipe_sim.step.evaluate import evaluate, evaluate_samples
from gpipe_sim.explain.waterfall import critical_path
from gpipe_sim.explain.predict import Prediction, predict, predict_all
from gpipe_sim.explain.predictions import Predictions, sweep
from gpipe_sim.show.trace import to_trace

__all__ = [
    "InputError",
    "Scenario",
    "Sweep",
    "load_scenario",
    "Device",
    "Link",
    "Profile",
    "build_profile",
    "load_profile",
    "partition",
    "Plan",
    "make_plan",
    "Action",
    "rank_actions",
    "DeadlockError",
    "Effects",
    "simulate",
    "Span",
    "Step",
    "MemoryCurve",
    "StepMetrics",
    "bubble_fraction",
    "bubble_ideal",
    "pipeline_time_s",
    "step_metrics",
    "step_time_s",
    "evaluate",
    "evaluate_samples",
    "critical_path",
    "Prediction",
    "predict",
    "predict_all",
    "Predictions",
    "sweep",
    "to_trace",
]
