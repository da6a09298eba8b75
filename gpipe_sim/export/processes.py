"""Plans on our own engine, on several nodes: how many processes each of them starts, and the commands that they run.

One node: `gpipe run` does it all. Several: `gpipe run --nodes` prepares the run directory, every node starts its own
ranks, and the first, where rank 0 gathers what was measured, compares.
"""

import re
from collections import Counter

from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import Layers, ProfileModel


def processes_per_node(plan: Plan) -> tuple[int, ...]:
    """Processes of each node that has any, which need not be equally many: those of all replicas."""
    if device_of(plan) == "rehearse":
        return (plan.world,)  # on one clock
    cluster = plan.scenario.cluster
    numbers = [plan.global_rank(rank, replica) for rank in plan.ranks for replica in range(plan.replicas)]
    found = Counter(cluster.node_of(number) for number in numbers)
    return tuple(found[node] for node in sorted(found))


def device_of(plan: Plan) -> str:
    """What the plan runs on."""
    if isinstance(plan.scenario.model, Layers | ProfileModel):
        return "rehearse"
    if plan.profile.source == "measured":
        return plan.profile.device
    return "cpu" if plan.scenario.cluster.device.name == "cpu" else "cuda"


def what_is_rehearsed(plan: Plan) -> tuple[str, ...]:
    """Why a plan is not run for real, if it is not."""
    if device_of(plan) != "rehearse":
        return ()
    kind = plan.scenario.model.kind
    return (f"A model of kind {kind} has costs but no arithmetic: the plan is rehearsed, on one node.",)


def job_name(plan: Plan) -> str:
    """The scenario's name, as every scheduler takes it."""
    return re.sub(r"[^\w.-]+", "-", plan.scenario.name, flags=re.ASCII)


def preparing(plan: Plan) -> str:
    """A command that writes the run directory; those that it prints are for people who start each node themselves.

    The directory is the same for any number of nodes; the command only wants one that divides the ranks.
    """
    nodes = len(processes_per_node(plan))
    return (
        f'gpipe run "$PLAN" --device {device_of(plan)} --nodes {nodes if plan.world % nodes == 0 else plan.world} \\\n'
        '    --rdzv-endpoint "$ENDPOINT" --out "$RUN_DIR" > /dev/null'
    )


def starting(plan: Plan, node: str, indent: str = "") -> str:
    """A command that starts a node's ranks; `node` is the shell's variable with its number."""
    processes = processes_per_node(plan)
    lines = [
        f"processes=({' '.join(map(str, processes))})",
        f'exec python -m gpipe_exec.run.machine --nproc-per-node "${{processes[${node}]}}" \\',
        f'    --nnodes {len(processes)} --node-rank "${node}" --rdzv-backend static --rdzv-endpoint "$ENDPOINT" \\',
        f'    -m gpipe_exec.run.worker "$RUN_DIR" --steps 10 --warmup 3 --device {device_of(plan)}',
    ]
    return "\n".join(indent + line for line in lines)
