"""Export: a chosen plan in the words of those who run it elsewhere, with what those words cannot say.

    torchtitan   a Python function that sets the plan in a configuration
    megatron     a bash array of Megatron-LM's flags
    deepspeed    a Python file: DeepSpeed's configuration, and the PipelineModule, which only code can describe
    slurm        a batch script that runs the plan on our own engine and compares it with its prediction
    torchrun     the same as a script to start on each machine
    kubernetes   the same as a PyTorchJob
    csv          the order alone, a row of actions for each rank, which torch.distributed.pipelining loads

Where a tool has no word for a choice, the nearest is written, which recomputes rather than not, and a sentence in
`Exported.cannot` says what is different. How far ahead receives are posted (`window`) is left to each engine. Names are
those of the tools' own sources in November 2026; `PROVEN` says how far each of them has taken what is written.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, get_args

from gpipe_sim.export import deepspeed, kubernetes, megatron, slurm, torchrun, torchtitan
from gpipe_sim.export.words import Exported, Tool, Written, comment, differences, listed
from gpipe_sim.make.planfile import order_of_plan
from gpipe_sim.plan.plan import Plan, only_single_members, only_what_runs
from gpipe_sim.scenario.schema import Transformer

Target = Literal["torchtitan", "megatron", "deepspeed", "slurm", "torchrun", "kubernetes", "csv"]
TARGETS: tuple[Target, ...] = get_args(Target)
PROVEN: dict[Target, str] = {
    "torchtitan": "torchtitan 0.3.0 has taken it: configuration, split, schedule and a step on two CPUs; its trainer "
    "needs a GPU and has not run",
    "megatron": "megatron-core 0.16.1 has built its configurations from the flags, and each rank's model with as many "
    "parameters as planned; its training has not run",
    "deepspeed": "DeepSpeed 0.19.8 has run it on CPUs, with and without replicas, with the gradients of one process",
    "slurm": "it has run on two nodes that one machine stood in for, without Slurm itself",
    "torchrun": "it has run on two nodes that one machine stood in for",
    "kubernetes": "written for the training operator 1.9; its script has run as torchrun's, the job itself has not",
    "csv": "torch 2.13 has loaded and run it",
}
"""How far each target has been seen to take what is written for it (`make targets`, tests/test_export.py)."""


def export_plan(plan: Plan, target: Target, *, plan_path: str) -> Exported:
    """Write the plan, which was read from `plan_path`, for a target."""
    if target == "csv":
        return _order(plan)
    writer, tool = _WRITERS[target]
    needed = _but_for_what_is_said(plan, tool)
    only_what_runs(needed, f"export to {target}")
    only_single_members(needed, f"export to {target}")
    written = writer(plan, plan_path)
    cannot = (*written.cannot, *(differences(plan, tool) if tool else ()))
    header = "\n".join(_header(plan, target, plan_path, cannot))
    return Exported(text=f"{written.opening}{header}\n\n{written.body.strip()}\n", cannot=cannot)


def _but_for_what_is_said(plan: Plan, tool: Tool | None) -> Plan:
    """The plan without what a tool has words for, or `differences` for what it lacks."""
    if tool is None:
        return plan
    model = plan.scenario.model
    if not isinstance(model, Transformer):
        return plan
    scenario = replace(plan.scenario, model=model.model_copy(update={"fused_loss": False}))
    return replace(plan, scenario=scenario, tensor=1 if tool.groups else plan.tensor)


def _header(plan: Plan, target: Target, plan_path: str, cannot: tuple[str, ...]) -> Iterator[str]:
    modes = plan.checkpoint[:1] if len(set(plan.checkpoint)) == 1 else plan.checkpoint
    yield from comment(f"Plan {plan.scenario.name} for {target}, exported from {plan_path}:")
    ranks = f" on {plan.num_ranks} ranks" if plan.num_ranks < plan.num_stages else ""
    shard = (
        "" if plan.shard == "none" else f" that shard {'the optimizer' if plan.shard == 'optimizer' else plan.shard}"
    )
    replicas = f" in {plan.replicas} replicas{shard}" if plan.replicas > 1 else ""
    replicas += f", tensor groups of {plan.tensor}" if plan.tensor > 1 else ""
    yield from comment(
        f"{plan.num_stages} stages of {listed(plan.balance)} layers{ranks}{replicas}, batch {plan.scenario.batch} in "
        f"{plan.num_microbatches} micro-batches, {plan.schedule}, checkpoint {listed(modes)}."
    )
    yield from comment(f"How far it is proven: {PROVEN[target]}.")
    yield from comment("Not expressed, or done differently:" if cannot else "All of the plan is expressed.")
    for sentence in cannot:
        yield from comment(sentence, "* ")


def _order(plan: Plan) -> Exported:
    """The file has no place for comments: torch would read them as actions."""
    cannot = ["Only the order is written: the cut, the micro-batches' size and checkpointing are set in the code."]
    if plan.pipeline != plan.ranks:
        cannot.append(f"Rows are ranks, and stages begin on rank {plan.pipeline[0]}: a loader must place them so, too.")
    return Exported(text=order_of_plan(plan), cannot=tuple(cannot))


_WRITERS: dict[Target, tuple[Callable[[Plan, str], Written], Tool | None]] = {
    "torchtitan": (torchtitan.write, torchtitan.TOOL),
    "megatron": (megatron.write, megatron.TOOL),
    "deepspeed": (deepspeed.write, deepspeed.TOOL),
    "slurm": (slurm.write, None),
    "torchrun": (torchrun.write, None),
    "kubernetes": (kubernetes.write, None),
}
