"""DeepSpeed: its configuration, and the PipelineModule. It has one schedule, 1F1B, and one stage on each rank."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args

from gpipe_sim.export.words import Tool, Written, has_16_bits, listed, recomputes, sharded
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import Optimizer

TOOL = Tool(
    stages_differ=True,
    dtypes=("fp32", "bf16", "fp16"),
    optimizers=get_args(Optimizer),
    shards=("none", "optimizer"),
    precisions=("mixed", "mixed_fp32_gradients"),
    groups=False,
)
_OPTIMIZERS: dict[Optimizer, dict[str, Any]] = {
    "sgd": {"type": "SGD", "params": {"lr": 1e-3}},
    "momentum": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}},
    "rmsprop": {"type": "RMSprop", "params": {"lr": 1e-4}},
    "adam": {"type": "Adam", "params": {"lr": 1e-4}},
}


def write(plan: Plan, plan_path: str) -> Written:
    """Its partition methods take no balance. But one module per stage, cut uniformly, is exactly the plan's cut, and a
    checkpoint interval of one such module is exactly a stage."""
    stages, recomputed = _joined(plan)
    D = plan.replicas
    config: dict[str, Any] = {
        "train_batch_size": plan.sizes[0] * plan.num_microbatches * D,
        "train_micro_batch_size_per_gpu": plan.sizes[0],
        "gradient_accumulation_steps": plan.num_microbatches,
        "optimizer": _OPTIMIZERS[plan.scenario.optimizer],
        # The input of the first stage needs no gradient, and only such checkpoints allow for that.
        "pipeline": {"use_reentrant": False},
    }
    if has_16_bits(plan):
        config[plan.dtype] = {"enabled": True}
    if _sums_in_fp32(plan):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    # Gradients in fp32 are known to its first stage of ZeRO alone.
    if (D > 1 and sharded(plan, TOOL) == "optimizer") or _sums_in_fp32(plan):
        config |= {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    body = f'''
import json
import os

from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

# The learning rate is a placeholder. The same text may be a file, ds_config.json.
CONFIG = json.loads("""
{json.dumps(config, indent=4)}
""")
STAGES = {stages}
RECOMPUTED = {recomputed}


class Stage(nn.Sequential):
    def __init__(self, make_layer, start, stop):
        super().__init__(*(make_layer(index) for index in range(start, stop)))


def make_module(make_layer, loss_fn):
    """make_layer(index) builds one of your model's {sum(plan.balance)} layers; loss_fn(outputs, labels) is its loss.

    Start {plan.world} processes: {_numbering(plan)}.
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=CONFIG)
    """
    return PipelineModule(
        layers=[LayerSpec(Stage, make_layer, start, stop) for start, stop in STAGES],
        num_stages={plan.num_ranks},
        loss_fn=loss_fn,
        partition_method="uniform",
        activation_checkpoint_interval=int(RECOMPUTED[int(os.environ["RANK"]) // {D}]),
    )
'''
    return Written(body, list(_cannot(plan, stages)))


def _sums_in_fp32(plan: Plan) -> bool:
    """Whether gradients are added up in fp32, which it can with bf16 only."""
    return plan.dtype == "bf16" and plan.scenario.precision == "mixed_fp32_gradients"


def _numbering(plan: Plan) -> str:
    """How DeepSpeed counts them: as plans do, replicas innermost."""
    if plan.replicas == 1:
        return "process r is stage r's"
    return f"process r is stage r // {plan.replicas}'s, in replica r % {plan.replicas}"


def _joined(plan: Plan) -> tuple[list[tuple[int, int]], list[bool]]:
    """The layers of each rank, and whether they are recomputed; several stages of a rank become as many in a row."""
    S, K = plan.num_stages, plan.num_ranks
    firsts = [S * rank // K for rank in range(K + 1)]
    spans = [range(first, end) for first, end in pairwise(firsts)]
    again = recomputes(plan)
    stages = [(plan.stages[span[0]].start, plan.stages[span[-1]].stop) for span in spans]
    return stages, [any(again[stage] for stage in span) for span in spans]


def _cannot(plan: Plan, stages: list[tuple[int, int]]) -> Iterator[str]:
    if plan.num_stages > plan.num_ranks:
        joined = listed([stop - start for start, stop in stages])
        yield f"A rank holds one stage: the plan's are joined, in order, to {plan.num_ranks} of {joined} layers."
    if plan.dtype == "bf16" and plan.replicas > 1 and plan.shard == "none":
        yield "With bf16 replicas divide the optimizer's state in any case."
    if plan.dtype == "fp16" and plan.scenario.precision == "mixed_fp32_gradients":
        yield "Gradients are added up and summed in fp16 (precision: mixed), not in fp32."
    if plan.recompute_unit == "layer" and any(recomputes(plan)):
        yield "A stage is recomputed at once, and its input kept, not that of each layer."
    if plan.recompute_unit == "attention" and any(recomputes(plan)):
        yield "Attention is not recomputed by itself: whole stages are."
    if plan.schedule == "gpipe" and plan.num_microbatches > 1:
        yield "There is no GPipe schedule: 1F1B runs, with the same ideal bubble and fewer activations held."
    elif plan.schedule not in ("naive", "gpipe", "1f1b"):
        yield f"There is no schedule {plan.schedule}: 1F1B runs."
