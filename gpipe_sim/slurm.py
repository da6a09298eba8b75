"""Slurm: a batch script that runs a plan on our own engine, on the plan's nodes, and compares it with its prediction.

One node: `gpipe run` does it all. Several: `gpipe run --nodes` prepares the run directory, every node starts its own
ranks, and the first, where rank 0 gathers what was measured, compares.
"""

import re
import shlex
from collections import Counter
from pathlib import PurePath
from typing import NamedTuple

from gpipe_sim.plan import Plan
from gpipe_sim.scenario import Layers, ProfileModel


class BatchScript(NamedTuple):
    """A script in two parts, comments may stand between them."""

    directives: str
    """The first line, and what Slurm reads."""
    commands: str
    cannot: tuple[str, ...]
    """What is done differently from the plan."""


def batch_script(plan: Plan, plan_path: str) -> BatchScript:
    """The script for a plan that lies at `plan_path` as seen from the folder of submission."""
    cannot: tuple[str, ...] = ()
    device, processes = _device(plan), processes_per_node(plan)
    if device == "rehearse":
        processes = (plan.num_stages,)  # on one clock
        kind = plan.scenario.model.kind
        cannot = (f"A model of kind {kind} has costs but no arithmetic: the plan is rehearsed, on one node.",)
    name = re.sub(r"[^\w.-]+", "-", plan.scenario.name, flags=re.ASCII)
    directives = ["#!/bin/bash", f"#SBATCH --job-name={name}", f"#SBATCH --nodes={len(processes)}"]
    directives += ["#SBATCH --ntasks-per-node=1", f"#SBATCH --cpus-per-task={max(processes)}"]
    directives += [f"#SBATCH --gpus-per-node={max(processes)}"] if device == "cuda" else []
    directives += ["#SBATCH --output=%x-%j.out", "#", ""]
    setup = f"""
# Submit it from a folder that all nodes share, in an environment that has gpipe and torch.
set -euo pipefail
PLAN={shlex.quote(plan_path)}
export RUN_DIR="runs/{name}-$SLURM_JOB_ID"
export PYTHONPATH={shlex.quote(str(PurePath(plan_path).parent))}"${{PYTHONPATH:+:$PYTHONPATH}}"
"""
    run = _on_one_node(device) if len(processes) == 1 else _on_several(plan, device, processes)
    return BatchScript("\n".join(directives), setup + run, cannot)


def processes_per_node(plan: Plan) -> tuple[int, ...]:
    """Ranks of each node that has any, which need not be equally many."""
    ranks = Counter(plan.scenario.cluster.node_of(rank) for rank in plan.ranks)
    return tuple(ranks[node] for node in sorted(ranks))


def _device(plan: Plan) -> str:
    if isinstance(plan.scenario.model, Layers | ProfileModel):
        return "rehearse"
    if plan.profile.source == "measured":
        return plan.profile.device
    return "cpu" if plan.scenario.cluster.device.name == "cpu" else "cuda"


_SRUN = 'srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1'


def _on_one_node(device: str) -> str:
    return f"""
# Runs, measures and compares.
{_SRUN} gpipe run "$PLAN" --device {device} --out "$RUN_DIR"
"""


def _on_several(plan: Plan, device: str, processes: tuple[int, ...]) -> str:
    """The run directory is the same for any number of nodes; the command only wants one that divides the ranks."""
    nodes = len(processes)
    return f"""
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export ENDPOINT="${{HOSTS[0]}}:$((29500 + SLURM_JOB_ID % 1000))" OMP_NUM_THREADS=1

# Writes the run directory. The commands that it prints are for machines without Slurm.
gpipe run "$PLAN" --device {device} --nodes {nodes if plan.num_stages % nodes == 0 else plan.num_stages} \\
    --rdzv-endpoint "$ENDPOINT" --out "$RUN_DIR" > /dev/null

{_SRUN} bash -c '
    processes=({" ".join(map(str, processes))})
    exec python -m torch.distributed.run --nproc-per-node "${{processes[$SLURM_NODEID]}}" --nnodes {nodes} \\
        --node-rank "$SLURM_NODEID" --rdzv-backend static --rdzv-endpoint "$ENDPOINT" \\
        -m gpipe_exec.worker "$RUN_DIR" --steps 10 --warmup 3 --device {device}
'

gpipe compare "$RUN_DIR"
"""
