"""What the writers of all targets share: what they return, and what no framework but ours has a word for."""

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap
from typing import NamedTuple

from gpipe_sim.plan.orders import Pattern, position_of
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.catalog import DType
from gpipe_sim.scenario.schema import Optimizer, Precision, Shard, Transformer


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A plan for one target."""

    text: str
    """The whole file; what cannot be expressed stands in its comments too, where it has any."""
    cannot: tuple[str, ...]
    """What the target cannot express of the plan or does differently, a sentence each; empty if it fits."""


class Written(NamedTuple):
    """What a target's writer makes of a plan."""

    body: str
    cannot: list[str]
    """What only this target's form cannot express; `differences` knows the rest."""
    opening: str = ""
    """What has to stand before the comments."""


class Tool(NamedTuple):
    """What a training framework has words for."""

    stages_differ: bool
    """Whether each stage may have its own checkpoint mode."""
    dtypes: tuple[DType, ...]
    optimizers: tuple[Optimizer, ...]
    shards: tuple[Shard, ...]
    """What replicas may divide in a pipeline."""
    precisions: tuple[Precision, ...]
    """Of 16 bits."""
    groups: bool
    """Whether it knows tensor groups."""
    fused_loss: bool = False
    """Whether the loss may be computed where the logits are."""
    orders: bool = False
    """Whether the ranks of a replica may be numbered before its replicas."""


_NEAREST: dict[DType, DType] = {"fp64": "fp32", "fp16": "bf16"}


def differences(plan: Plan, tool: Tool) -> Iterator[str]:
    """What any framework but ours may lack."""
    D, n, M, size, recompute = plan.replicas, plan.samples, plan.num_microbatches, plan.sizes[0], recomputes(plan)
    if n % M:
        smaller = n - n % M
        yield (
            f"Micro-batches have one size: {M} of {size}, a batch of {D * M * size}, is written for one of {D * n}."
            f" A batch of {D * smaller} or {D * (smaller + M)} would be exact."
        )
    if D > 1 and plan.shard not in tool.shards:
        yield f"Replicas of a pipeline do not shard {_SHARDED[plan.shard]}: they shard {_SHARDED[sharded(plan, tool)]}."
    if has_16_bits(plan) and plan.scenario.precision not in tool.precisions:
        yield _PRECISIONS[plan.scenario.precision].format(dtype=plan.dtype)
    if len(set(recompute)) > 1 and not tool.stages_differ:
        yield f"Stages cannot differ in checkpointing ({listed(plan.checkpoint)}): all of them recompute."
    if any(again and not all(plan.dropped(stage)) for stage, again in enumerate(recompute)):
        yield "There is no except_last: the last micro-batch is recomputed too."
    if plan.recompute == "early" and plan.recompute_unit == "stage" and any(recompute[:-1]):
        yield "Recomputation starts when the gradient has arrived (recompute: on_demand), not early."
    if plan.dtype not in tool.dtypes:
        yield f"There is no {plan.dtype}: {_NEAREST[plan.dtype]} is written."
    if plan.scenario.optimizer not in tool.optimizers:
        yield f"There is no optimizer {plan.scenario.optimizer}: adam, whose state is larger, takes its place."
    if isinstance(plan.scenario.model, Transformer) and plan.scenario.model.fused_loss and not tool.fused_loss:
        yield "The loss is not said to be fused: logits and their gradients may need more memory on the last rank."
    if plan.mesh.messages_inside and not tool.orders:
        yield "Processes are numbered with replicas first, then ranks: what shares a node is not as the plan has it."
    if plan.pipeline != tuple(range(plan.num_ranks)):
        yield f"Ranks of a pipeline ascend: order the hosts as the plan's ranks, {listed(plan.pipeline)}, would be."


_PRECISIONS: dict[Precision, str] = {
    "pure": "Precision is mixed where there is {dtype}: weights and optimizer have 32 bits too, and need more.",
    "mixed": "Gradients are added up and summed in fp32 (precision: mixed_fp32_gradients), and need 2 bytes more each.",
}
"""What another precision is instead."""
_SHARDED: dict[Shard, str] = {
    "none": "nothing",
    "optimizer": "the optimizer alone",
    "parameters": "parameters and optimizer",
}


def has_16_bits(plan: Plan) -> bool:
    """Whether it computes with 16 bits, so that its precision matters."""
    return plan.dtype in ("bf16", "fp16")


def sharded(plan: Plan, tool: Tool) -> Shard:
    """What replicas divide there: what the plan says, or else the most that they can."""
    return plan.shard if plan.shard in tool.shards else tool.shards[-1]


def recomputes(plan: Plan) -> tuple[bool, ...]:
    """For each stage, whether it recomputes any micro-batch."""
    return tuple(any(plan.dropped(stage)) for stage in range(plan.num_stages))


def blocks_per_stage(plan: Plan, model: Transformer) -> tuple[int, ...]:
    """How many of each stage's layers are transformer blocks, the only layers that Megatron-LM counts.

    balance  3 2 3    embedding block block | block block | block norm head
    blocks   2 2 1
    """
    end = model.layers + 1
    return tuple(max(0, min(stage.stop, end) - max(stage.start, 1)) for stage in plan.stages)


def pattern_of(plan: Plan) -> Pattern | None:
    """How stages are placed on the pipeline's ranks; None if no named schedule places them so."""
    K = plan.num_ranks
    fitting: dict[Pattern, bool] = {
        "in_order": plan.num_stages == K,
        "looped": plan.num_stages % K == 0,
        "v": plan.num_stages == 2 * K,
    }
    for pattern, fits in fitting.items():
        if fits and plan.positions == tuple(position_of(pattern, stage, K) for stage in range(plan.num_stages)):
            return pattern
    return None


def listed(values: tuple[object, ...] | list[int]) -> str:
    """Values with spaces between them."""
    return " ".join(map(str, values))


def comment(text: str, bullet: str = "") -> list[str]:
    """Comment lines; a line break in a name must not end the comment."""
    indent = "# " + " " * len(bullet)
    return wrap(" ".join(printable(text).split()), 118, initial_indent=f"# {bullet}", subsequent_indent=indent)


def printable(text: str) -> str:
    """Without what no source file may hold."""
    return "".join(character if character.isprintable() else " " for character in text)
