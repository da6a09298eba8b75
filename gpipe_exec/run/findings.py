"""What a run finds out about the machine before and between its steps, and the plan predicted with it.

Nothing of it comes from the steps that are predicted: the engine's own cost is found with a pipeline of its own
(`calibrate`), and the times of layers, where asked for, by timing each by itself in turns with the steps (`timing`).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpipe_exec.alternatives.rehearsal import with_engine_overhead
from gpipe_sim.base.files import write_text, yaml_text
from gpipe_sim.explain.predict import predict
from gpipe_sim.make.planfile import save_plan
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import ProfileModel, Scenario

OVERHEADS = Path("ranks", "overheads.json")
"""What the engine itself was found to cost before a rehearsal."""
TIMES = Path("ranks", "times.json")
"""What the layers were found to cost between the steps, if that was asked for."""


def write_prediction(plan: Plan, run: Path) -> None:
    """The plan, what it stands on, and what is expected of it."""
    save_plan(plan, run / "plan.yaml")
    write_text(run / "scenario.yaml", yaml_text(_scenario_beside_profile(plan.scenario)))
    plan.profile.save(run / "profile.json")
    write_text(run / "predicted.json", json.dumps(predict(plan).to_dict(), indent=2))


def predict_with_findings(plan: Plan, run: Path, stretch: float) -> Plan:
    """The plan with what the run has found out, its prediction written anew if that is anything."""
    found = plan
    if (run / OVERHEADS).is_file():
        found = with_engine_overhead(found, **json.loads((run / OVERHEADS).read_text()), stretch=stretch)
    if (run / TIMES).is_file():
        times = {int(size): columns for size, columns in json.loads((run / TIMES).read_text()).items()}
        found = replace(found, profile=found.profile.retimed(times))
    if found is not plan:
        write_prediction(found, run)
    return found


def _scenario_beside_profile(scenario: Scenario) -> dict[str, Any]:
    """The scenario as it was written, its profile, if it names one, being the run directory's."""
    data: dict[str, Any] = scenario.document.data | {"name": scenario.name}
    if isinstance(scenario.model, ProfileModel):
        return data | {"model": data["model"] | {"path": "profile.json"}}
    return data | ({"profile": "profile.json"} if scenario.profile else {})
