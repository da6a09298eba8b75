"""torchtitan: a function that sets a plan in a configuration.

Its schedules are torch's (`torch_names`). An order that none of them has is loaded from a file, which `gpipe export
--to csv` writes; the schedule's name then only says how stages are placed: in order or looped, or v.
"""

import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from gpipe_sim.export.torch_names import PLACING, torch_name
from gpipe_sim.export.words import Tool, Written, comment, has_16_bits, listed, pattern_of, recomputes, sharded
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import program_of
from gpipe_sim.scenario.schema import Transformer

RELEASE = "0.3"
"""Whose names are written: 0.3.0 has taken this export (`make targets`)."""
TOOL = Tool(
    stages_differ=False,
    dtypes=("fp32", "bf16"),
    optimizers=("adam",),
    shards=("none", "parameters"),
    precisions=("mixed_fp32_gradients", "pure"),
    groups=True,
)


def write(plan: Plan, plan_path: str) -> Written:
    """Configurations are functions that return a Trainer.Config; ours changes one. It looks which release is installed,
    and its classes have slots: a name that they do not know is an AttributeError, never ignored."""
    model, K, M, size = plan.scenario.model, plan.num_ranks, plan.num_microbatches, plan.sizes[0]
    name = torch_name(plan)
    schedule = name or PLACING[pattern_of(plan) or "looped"]
    file = None if name else f"{PurePath(plan_path).stem}.csv"
    computes = "float32" if plan.dtype in ("fp32", "fp64") else "bfloat16"
    holds = computes if plan.scenario.precision == "pure" else "float32"
    D, is_sharded = plan.replicas, sharded(plan, TOOL) == "parameters" and plan.replicas > 1
    recompute = any(recomputes(plan))
    sequence, parts = (model.sequence, _modules(plan, model)) if isinstance(model, Transformer) else (None, None)
    rows = "".join(f"        {json.dumps(part)},\n" for part in parts or ())
    settings: dict[str, Any] = {
        "parallelism.pipeline_parallel_degree": K,
        "parallelism.pipeline_parallel_schedule": f'"{schedule}"',
        "parallelism.pipeline_parallel_schedule_csv": file and json.dumps(file),
        "parallelism.module_fqns_per_model_part": parts and f"[\n{rows}    ]",
        "parallelism.pipeline_parallel_microbatch_size": size,
        "parallelism.data_parallel_replicate_degree": 1 if is_sharded else D,
        "parallelism.data_parallel_shard_degree": D if is_sharded else 1,
        "parallelism.tensor_parallel_degree": plan.tensor if plan.tensor > 1 else None,
        "parallelism.enable_sequence_parallel": plan.scenario.plan.sequence_split if plan.tensor > 1 else None,
        # Gathered once in a step, as the plan has it.
        "parallelism.fsdp_reshard_after_forward": '"never"' if is_sharded else None,
        "training.local_batch_size": M * size if K > 1 else size,
        "training.global_batch_size": D * M * size,
        "training.seq_len": sequence,
        "training.dtype": f'"{holds}"',
        "training.mixed_precision_param": f'"{computes}"',
        "activation_checkpoint": "FullAC.Config()" if recompute else "None",
    }
    full = "\nfrom torchtitan.distributed.activation_checkpoint import FullAC" if recompute else ""
    shape = f" of {model.layers} layers of width {model.hidden}" if isinstance(model, Transformer) else ""
    order = f"The order is in a file of its own: gpipe export {plan_path} --to csv --out {file}" if file else ""
    note = "".join(f"{line}\n" for line in comment(order)) + "\n\n" if order else ""
    lines = "".join(f"    config.{name} = {value}\n" for name, value in settings.items() if value is not None)
    body = f'''from importlib.metadata import version
{full}

{note}def apply_plan(config):
    """Set the plan in the Trainer.Config of its model{shape}, and return it."""
    if not version("torchtitan").startswith("{RELEASE}."):
        raise RuntimeError(f"written for torchtitan {RELEASE}, found {{version('torchtitan')}}: its names differ")
{lines}    return config
'''
    return Written(body, list(_cannot(plan)))


def _modules(plan: Plan, model: Transformer) -> list[list[str]]:
    """The names of each stage's modules in torchtitan's decoders."""
    names = ["tok_embeddings", *(f"layers.{index}" for index in range(model.layers)), "norm", "lm_head"]
    return [names[stage] for stage in plan.stages]


def _cannot(plan: Plan) -> Iterator[str]:
    kind = plan.scenario.model.kind
    if kind != "transformer":
        yield (
            f"Of a model of kind {kind} neither modules nor sequence are known: its stages of {listed(plan.balance)} "
            "layers, and the tokens of a micro-batch, are not written."
        )
    if plan.num_ranks == 1 and plan.num_stages > 1:
        yield (
            f"It has a pipeline from two ranks on: the {plan.num_stages} stages run as one module, and "
            "micro-batches one after the other, whatever their order."
        )
    if pattern_of(plan) is None:
        yield f"Stages are in order, looped or v: it cannot run a plan that has them on ranks {listed(plan.placement)}."
    elif torch_name(plan) is None and plan.pipeline != plan.ranks:
        yield f"The order's rows are ranks: sort them as the pipeline has the plan's, {listed(plan.pipeline)}."
    if any(recomputes(plan)):
        yield {
            "stage": "Blocks are recomputed one by one, and their inputs kept; embedding, norm and head are not.",
            "layer": "Embedding, norm and head are not recomputed.",
            "attention": "Attention is not recomputed by itself: whole blocks are.",
        }[plan.recompute_unit]
        if (program_of(plan).at["I"] >= 0).any():
            yield "Where a backward is split, blocks are recomputed twice."
    if isinstance(plan.scenario.model, Transformer) and plan.scenario.model.attention == "classic":
        yield "Attention is a fused kernel that keeps no scores, where there is one: less time and memory than planned."
    if has_16_bits(plan) and plan.scenario.precision != "pure" and plan.replicas == 1:
        yield "Its own decoders compute with bf16 copies also where nothing is sharded; what other models do is theirs."
    if has_16_bits(plan) and plan.scenario.precision == "pure":
        yield "Gradients are added up in fp32 until they are summed, and need 2 bytes more each."
