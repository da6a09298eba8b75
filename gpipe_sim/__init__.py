"""Predict how a pipeline-parallel training step behaves, before running it.

The names below are in the order of the data flow, a newcomer's table of contents:

    scenario file --load_scenario--> Scenario --make_plan--> Plan --simulate--> Step --step_metrics--> StepMetrics
                                                              |'----evaluate, many at once------------^
                                                              '----predict----> Prediction
"""

import importlib
import os
import sys

if os.path.basename(sys.argv[0]) in ("gpipe", "simulate") and "OPENBLAS_NUM_THREADS" not in os.environ:
    # Our own command multiplies no matrices: numpy need not start a pool of BLAS threads for it.
    # Only this process is meant, so the setting is gone again before anything else can inherit it.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    importlib.import_module("numpy")
    del os.environ["OPENBLAS_NUM_THREADS"]

from gpipe_sim.files import InputError
from gpipe_sim.scenario import Scenario
from gpipe_sim.sweep import Sweep, load_scenario
from gpipe_sim.catalog import Device, Link
from gpipe_sim.profile import Profile, load_profile
from gpipe_sim.costs import build_profile
from gpipe_sim.partition import partition
from gpipe_sim.plan import Plan, make_plan
from gpipe_sim.schedule import Action, rank_actions
from gpipe_sim.simulate import DeadlockError, Effects, simulate
from gpipe_sim.step import MemoryCurve, Span, Step
from gpipe_sim.metrics import StepMetrics, bubble_fraction, bubble_ideal, pipeline_time_s, step_metrics, step_time_s
from gpipe_sim.evaluate import evaluate, evaluate_samples
from gpipe_sim.explain import critical_path
from gpipe_sim.predict import Prediction, predict, predict_all
from gpipe_sim.trace import to_trace

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
    "to_trace",
]
