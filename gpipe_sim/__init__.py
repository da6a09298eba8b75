"""Predict how a pipeline-parallel training step behaves, before running it.

What it offers is in `contents`, in the order of the data flow:

    scenario file --load_scenario--> Scenario --make_plan--> Plan --simulate--> Step --step_metrics--> StepMetrics
                                                              |'----evaluate, many at once------------^
                                                              '----predict----> Prediction

All of it is imported when the first of these names is asked for: `gpipe --help` need not wait for a simulator.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_sim.contents import *
else:

    def __getattr__(name: str) -> object:
        is_private = name.startswith("_") and name != "__all__"
        contents = None if is_private else import_module("gpipe_sim.contents")
        if contents is None or name not in ("__all__", *contents.__all__):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(contents, name)
