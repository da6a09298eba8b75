"""torchrun by hand: a script to start on each of the plan's machines, which runs the plan on our own engine."""

import shlex
from pathlib import PurePath

from gpipe_sim.export.processes import (
    device_of,
    job_name,
    preparing,
    processes_per_node,
    starting,
    what_is_rehearsed,
)
from gpipe_sim.export.words import Written
from gpipe_sim.plan.plan import Plan


def write(plan: Plan, plan_path: str) -> Written:
    """The script for a plan that lies at `plan_path` as seen from where it is started."""
    return Written(script(plan, plan_path), list(what_is_rehearsed(plan)), opening="#!/bin/bash\n")


def script(plan: Plan, plan_path: str) -> str:
    """What each machine runs; of several, the first prepares, and compares in the end.

    They share a folder, or the run directory is copied to the same place on all of them once the first has made it.
    """
    several, device = len(processes_per_node(plan)) > 1, device_of(plan)
    opening = f"""
set -euo pipefail
PLAN={shlex.quote(plan_path)}
export RUN_DIR="${{RUN_DIR:-runs/{job_name(plan)}}}"
export GPIPE_MODELS={shlex.quote(str(PurePath(plan_path).parent))}
"""
    if not several:
        return f"""{opening}
# Runs, measures and compares, in an environment that has gpipe and torch.
gpipe run "$PLAN" --device {device} --out "$RUN_DIR"
"""
    return f"""{opening}
# On each machine, in a folder that all of them share and an environment that has gpipe and torch:
#     NODE=0 ENDPOINT=node0:29500 bash this.sh          NODE counts machines, ENDPOINT is a free port of the first
: "${{NODE:?expected the number of this machine, 0 for the first}}"
: "${{ENDPOINT:?expected a port of the first machine, such as node0:29500}}"
export NODE ENDPOINT OMP_NUM_THREADS=1

if [ "$NODE" = 0 ]; then
{_indented(preparing(plan))}
fi
while [ ! -e "$RUN_DIR/environment.json" ]; do sleep 1; done

bash -c '
{starting(plan, "NODE", "    ")}
'
if [ "$NODE" = 0 ]; then
    gpipe compare "$RUN_DIR"
fi
"""


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
