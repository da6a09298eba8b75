"""Slurm: a batch script that runs a plan on our own engine, on its nodes, and compares it with its prediction."""

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

_SRUN = 'srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1'


def write(plan: Plan, plan_path: str) -> Written:
    """The script for a plan that lies at `plan_path` as seen from the folder of submission."""
    device, processes, name = device_of(plan), processes_per_node(plan), job_name(plan)
    directives = ["#!/bin/bash", f"#SBATCH --job-name={name}", f"#SBATCH --nodes={len(processes)}"]
    directives += ["#SBATCH --ntasks-per-node=1", f"#SBATCH --cpus-per-task={max(processes)}"]
    directives += [f"#SBATCH --gpus-per-node={max(processes)}"] if device == "cuda" else []
    directives += ["#SBATCH --output=%x-%j.out", "#", ""]
    setup = f"""
# Submit it from a folder that all nodes share, in an environment that has gpipe and torch.
set -euo pipefail
PLAN={shlex.quote(plan_path)}
export RUN_DIR="runs/{name}-$SLURM_JOB_ID"
export GPIPE_MODELS={shlex.quote(str(PurePath(plan_path).parent))}
"""
    run = _on_one_node(device) if len(processes) == 1 else _on_several(plan)
    return Written(setup + run, list(what_is_rehearsed(plan)), opening="\n".join(directives))


def _on_one_node(device: str) -> str:
    return f"""
# Runs, measures and compares.
{_SRUN} gpipe run "$PLAN" --device {device} --out "$RUN_DIR"
"""


def _on_several(plan: Plan) -> str:
    return f"""
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export ENDPOINT="${{HOSTS[0]}}:$((29500 + SLURM_JOB_ID % 1000))" OMP_NUM_THREADS=1

# Writes the run directory.
{preparing(plan)}

{_SRUN} bash -c '
{starting(plan, "SLURM_NODEID", "    ")}
'

gpipe compare "$RUN_DIR"
"""
