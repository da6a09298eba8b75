"""Export: a chosen plan in the words of those who run it elsewhere, with what those words cannot say.

    torchtitan   a Python function that sets the plan in a configuration (and, in comments, the TOML of old releases)
    megatron     a bash array of Megatron-LM's flags
    deepspeed    a Python file: DeepSpeed's configuration, and the PipelineModule, which only code can describe
    slurm        a batch script that runs the plan on our own engine and compares it with its prediction

Where a tool has no word for a choice, the nearest is written, which recomputes rather than not, and a sentence in
`Exported.cannot` says what is different. How far ahead receives are posted (`window`) is left to each engine. Names are
those of the tools' own sources in November 2026.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from textwrap import wrap
from typing import Any, Literal, NamedTuple, get_args

from gpipe_sim.catalog import DType
from gpipe_sim.plan import Plan
from gpipe_sim.scenario import Optimizer, Transformer
from gpipe_sim.slurm import batch_script

Target = Literal["torchtitan", "megatron", "deepspeed", "slurm"]
TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A plan for one target."""

    text: str
    """The whole file; what cannot be expressed stands in its comments too."""
    cannot: tuple[str, ...]
    """What the target cannot express of the plan or does differently, a sentence each; empty if it fits."""


def export_plan(plan: Plan, target: Target, *, plan_path: str) -> Exported:
    """Write the plan, which was read from `plan_path`, for a target."""
    written = _WRITERS[target](plan, plan_path)
    tool = _TOOLS.get(target)
    cannot = (*written.cannot, *(_differences(plan, tool) if tool else ()))
    header = "\n".join(_header(plan, target, plan_path, cannot))
    return Exported(text=f"{written.opening}{header}\n\n{written.body.strip()}\n", cannot=cannot)


class _Written(NamedTuple):
    body: str
    cannot: list[str]
    """What only this target's form cannot express; `_differences` knows the rest."""
    opening: str = ""
    """What has to stand before the comments."""


def _header(plan: Plan, target: Target, plan_path: str, cannot: tuple[str, ...]) -> Iterator[str]:
    modes = plan.checkpoint[:1] if len(set(plan.checkpoint)) == 1 else plan.checkpoint
    name, path = (_printable(text) for text in (plan.scenario.name, plan_path))
    yield from _comment(f"Plan {name} for {target}, exported from {path}:")
    yield from _comment(
        f"{plan.num_stages} stages of {_words(plan.balance)} layers, batch {plan.scenario.batch} in "
        f"{plan.num_microbatches} micro-batches, {plan.schedule}, checkpoint {_words(modes)}."
    )
    yield from _comment("Not expressed, or done differently:" if cannot else "All of the plan is expressed.")
    for sentence in cannot:
        yield from _comment(sentence, "* ")


def _printable(text: str) -> str:
    """Without what no source file may hold."""
    return "".join(character if character.isprintable() else " " for character in text)


def _comment(text: str, bullet: str = "") -> list[str]:
    """Comment lines; a line break in a name must not end the comment."""
    indent = "# " + " " * len(bullet)
    return wrap(" ".join(text.split()), 118, initial_indent=f"# {bullet}", subsequent_indent=indent)


def _words(values: tuple[object, ...] | list[int]) -> str:
    return " ".join(map(str, values))


# --- what no word exists for ---------------------------------------------------------------------------------------


class _Tool(NamedTuple):
    """What a training framework has words for."""

    gpipe: bool
    """All forwards before all backwards; the alternative is 1F1B."""
    stages_differ: bool
    """Whether each stage may have its own checkpoint mode."""
    dtypes: tuple[DType, ...]
    optimizers: tuple[Optimizer, ...]


_TOOLS: dict[Target, _Tool] = {
    "torchtitan": _Tool(True, False, ("fp32", "bf16"), ("adam",)),
    "megatron": _Tool(False, False, ("fp32", "bf16", "fp16"), ("adam", "sgd", "momentum")),
    "deepspeed": _Tool(False, True, ("fp32", "bf16", "fp16"), get_args(Optimizer)),
}
_NEAREST: dict[DType, DType] = {"fp64": "fp32", "fp16": "bf16"}


def _differences(plan: Plan, tool: _Tool) -> Iterator[str]:
    """What any framework but ours may lack."""
    N, M, size, recompute = plan.scenario.batch, plan.num_microbatches, plan.sizes[0], _recomputes(plan)
    if plan.schedule == "gpipe" and M > 1:
        if not tool.gpipe:
            yield "There is no GPipe schedule: 1F1B runs, with the same ideal bubble and fewer activations held."
        elif plan.backward == "reverse":
            yield "GPipe's backwards run first in first out (backward: fifo), not in reverse."
    elif plan.schedule not in ("naive", "gpipe", "1f1b") and M > 1:
        yield f"There is no schedule {plan.schedule}: {'GPipe' if tool.gpipe else '1F1B'} runs."
    if N % M:
        yield (
            f"Micro-batches have one size: {M} of {size}, a batch of {M * size}, are written for a batch of {N}. "
            f"A batch of {N - N % M} or {N - N % M + M} would be exact."
        )
    if len(set(recompute)) > 1 and not tool.stages_differ:
        yield f"Stages cannot differ in checkpointing ({_words(plan.checkpoint)}): all of them recompute."
    if any(again and not all(plan.recomputed(stage)) for stage, again in enumerate(recompute)):
        yield "There is no except_last: the last micro-batch is recomputed too."
    if plan.recompute == "early" and any(recompute[:-1]):
        yield "Recomputation starts when the gradient has arrived (recompute: on_demand), not early."
    if plan.dtype not in tool.dtypes:
        yield f"There is no {plan.dtype}: {_NEAREST[plan.dtype]} is written."
    if plan.scenario.optimizer not in tool.optimizers:
        yield f"There is no optimizer {plan.scenario.optimizer}: adam, whose state is larger, takes its place."
    if plan.placement != tuple(range(plan.num_stages)):
        yield f"Stage k runs on rank k: order the hosts as the plan's ranks, {_words(plan.placement)}, would be."


def _recomputes(plan: Plan) -> tuple[bool, ...]:
    """For each stage, whether it recomputes any micro-batch."""
    return tuple(any(plan.recomputed(stage)) for stage in range(plan.num_stages))


def blocks_per_stage(plan: Plan, model: Transformer) -> tuple[int, ...]:
    """How many of each stage's layers are transformer blocks, the only layers that Megatron-LM counts.

    balance  3 2 3    embedding block block | block block | block norm head
    blocks   2 2 1
    """
    end = model.layers + 1
    return tuple(max(0, min(stage.stop, end) - max(stage.start, 1)) for stage in plan.stages)


# --- torchtitan ----------------------------------------------------------------------------------------------------


def _torchtitan(plan: Plan, plan_path: str) -> _Written:
    """Configurations are functions that return a Trainer.Config; ours changes one. Its classes have slots: a name that
    the installed version does not know is an AttributeError there, never ignored."""
    model, K, M, size = plan.scenario.model, plan.num_stages, plan.num_microbatches, plan.sizes[0]
    schedule = "1F1B" if plan.schedule == "1f1b" and M >= K else "GPipe"
    dtype = "float32" if plan.dtype in ("fp32", "fp64") else "bfloat16"
    recompute = any(_recomputes(plan))
    sequence, parts = (model.sequence, _modules(plan, model)) if isinstance(model, Transformer) else (None, None)
    rows = "".join(f"        {json.dumps(part)},\n" for part in parts or ())
    new = {
        "parallelism.pipeline_parallel_degree": K,
        "parallelism.pipeline_parallel_schedule": f'"{schedule}"',
        "parallelism.pipeline_parallel_module_fqns_per_model_part": parts and f"[\n{rows}    ]",
        "parallelism.num_pp_microbatches": M,
        "parallelism.data_parallel_shard_degree": 1,
        "training.num_tokens_per_microbatch_per_dp_rank": sequence and f"{size} * {sequence}",
        "training.num_tokens_per_train_step": sequence and f"{M} * {size} * {sequence}",
        "training.max_context_length": sequence,
        "training.dtype": f'"{dtype}"',
        "activation_checkpoint": "FullActivationRematConfig()" if recompute else "None",
    }
    old = {
        "parallelism.pipeline_parallel_degree": K,
        "parallelism.pipeline_parallel_schedule": schedule,
        "parallelism.module_fqns_per_model_part": parts and [*parts[:-1], [*parts[-1][:-1], "output"]],
        "parallelism.pipeline_parallel_microbatch_size": size,
        "training.local_batch_size": M * size if K > 1 else size,
        "training.global_batch_size": M * size,
        "training.seq_len": sequence,
        "training.dtype": dtype,
        "activation_checkpoint.mode": "full" if recompute else "none",
    }
    remat = "from torchtitan.distributed.activation_checkpoint import FullActivationRematConfig\n\n\n"
    shape = f" of {model.layers} layers of width {model.hidden}" if isinstance(model, Transformer) else ""
    settings = "".join(f"    config.{name} = {value}\n" for name, value in new.items() if value is not None)
    toml = "".join(f"#   {name} = {json.dumps(value)}\n" for name, value in old.items() if value is not None)
    body = f'''{remat if recompute else ""}def apply_plan(config):
    """Set the plan in the Trainer.Config of its model{shape}, and return it."""
{settings}    return config


# Releases 0.2 read TOML, with other names:
#
{toml}'''
    return _Written(body, list(_not_in_torchtitan(plan)))


def _modules(plan: Plan, model: Transformer) -> list[list[str]]:
    """The names of each stage's modules in torchtitan's decoders."""
    names = ["tok_embeddings", *(f"layers.{index}" for index in range(model.layers)), "norm", "lm_head"]
    return [names[stage] for stage in plan.stages]


def _not_in_torchtitan(plan: Plan) -> Iterator[str]:
    kind, K, M = plan.scenario.model.kind, plan.num_stages, plan.num_microbatches
    if kind != "transformer":
        yield (
            f"Of a model of kind {kind} neither modules nor sequence are known: its stages of {_words(plan.balance)} "
            "layers, and the tokens of a micro-batch, are not written."
        )
    if plan.schedule == "1f1b" and 1 < M < K:
        yield f"1F1B needs as many micro-batches as stages, {K}, and the plan has {M}: GPipe is written."
    if any(_recomputes(plan)):
        yield "Blocks are recomputed one by one, and their inputs kept; embedding, norm and head are not recomputed."
    if plan.dtype in ("bf16", "fp16"):
        yield "bf16 is not mixed precision without sharding: no fp32 copy of the weights, less memory, other numerics."


# --- Megatron-LM ---------------------------------------------------------------------------------------------------


def _megatron(plan: Plan, plan_path: str) -> _Written:
    """Flags of pretrain_gpt.py. Recomputation goes by chunks of one size for all stages: the largest that divides them,
    a whole stage where stages are equal."""
    model, size, chunk, cannot = plan.scenario.model, plan.sizes[0], 1, []
    flags = [f"--pipeline-model-parallel-size {plan.num_stages}", f"--micro-batch-size {size}"]
    flags.append(f"--global-batch-size {size * plan.num_microbatches}")
    if isinstance(model, Transformer):
        blocks = blocks_per_stage(plan, model)
        chunk = gcd(*blocks)
        flags += [f"--num-layers {model.layers}", f"--hidden-size {model.hidden}"]
        flags += [f"--ffn-hidden-size {model.ffn_width}", f"--num-attention-heads {model.heads}"]
        flags += [f"--vocab-size {model.vocab}", "--untie-embeddings-and-output-weights"]
        flags += [f"--seq-length {model.sequence}", f"--max-position-embeddings {model.sequence}"]
        flags += ["--position-embedding-type rope"]
        flags += ["--attention-backend unfused"] if model.attention == "classic" else []
        flags += [f"--pipeline-model-parallel-layout '{_layout(blocks)}'"] if len(set(blocks)) > 1 else []
        if plan.num_stages > 1 and plan.balance[-1] == 1:
            empty = ", which leaves the stage before it empty" if plan.balance[-2] == 1 else ""
            cannot.append(f"The final norm runs with the head, on the last stage{empty}.")
    else:
        cannot.append(
            f"A model of kind {model.kind} has no shape for flags: neither it nor its cut into stages of "
            f"{_words(plan.balance)} layers is written."
        )
    if any(_recomputes(plan)):
        flags += ["--recompute-granularity full", "--recompute-method uniform", f"--recompute-num-layers {chunk}"]
        each = "Blocks are recomputed one by one" if chunk == 1 else f"Blocks are recomputed {chunk} at a time"
        cannot.append(f"{each}, and their inputs kept; embedding, norm and head are not recomputed.")
    flags += [f"--{plan.dtype}"] if plan.dtype in ("bf16", "fp16") else []
    momentum = {"sgd": 0, "momentum": 0.9}.get(plan.scenario.optimizer)
    flags.append("--optimizer adam" if momentum is None else f"--optimizer sgd --sgd-momentum {momentum}")
    lines = "".join(f"    {flag}\n" for flag in flags)
    usage = '# Source this, then: torchrun ... pretrain_gpt.py "${PLAN_ARGS[@]}" and flags for data and learning rate.'
    return _Written(f"PLAN_ARGS=(\n{lines})\n{usage}", cannot)


def _layout(blocks: tuple[int, ...]) -> str:
    """``(2, 3, 1)`` blocks -> ``Et*2|t*3|tL``: E is the embedding, L norm, head and loss."""
    return "E" + "|".join("t" if count == 1 else f"t*{count}" if count else "" for count in blocks) + "L"


# --- DeepSpeed -----------------------------------------------------------------------------------------------------

_DEEPSPEED_OPTIMIZERS: dict[Optimizer, dict[str, Any]] = {
    "sgd": {"type": "SGD", "params": {"lr": 1e-3}},
    "momentum": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}},
    "rmsprop": {"type": "RMSprop", "params": {"lr": 1e-4}},
    "adam": {"type": "Adam", "params": {"lr": 1e-4}},
}


def _deepspeed(plan: Plan, plan_path: str) -> _Written:
    """Its partition methods take no balance. But one module per stage, cut uniformly, is exactly the plan's cut, and a
    checkpoint interval of one such module is exactly a stage."""
    config: dict[str, Any] = {
        "train_batch_size": plan.sizes[0] * plan.num_microbatches,
        "train_micro_batch_size_per_gpu": plan.sizes[0],
        "gradient_accumulation_steps": plan.num_microbatches,
        "optimizer": _DEEPSPEED_OPTIMIZERS[plan.scenario.optimizer],
        # The input of the first stage needs no gradient, and only such checkpoints allow for that.
        "pipeline": {"use_reentrant": False},
    }
    if plan.dtype in ("bf16", "fp16"):
        config[plan.dtype] = {"enabled": True}
    body = f'''
import json
import os

from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

# The learning rate is a placeholder. The same text may be a file, ds_config.json.
CONFIG = json.loads("""
{json.dumps(config, indent=4)}
""")
STAGES = {[(stage.start, stage.stop) for stage in plan.stages]}
RECOMPUTED = {list(_recomputes(plan))}


class Stage(nn.Sequential):
    def __init__(self, make_layer, start, stop):
        super().__init__(*(make_layer(index) for index in range(start, stop)))


def make_module(make_layer, loss_fn):
    """make_layer(index) builds one of your model's {sum(plan.balance)} layers; loss_fn(outputs, labels) is its loss.

    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=CONFIG)
    """
    return PipelineModule(
        layers=[LayerSpec(Stage, make_layer, start, stop) for start, stop in STAGES],
        num_stages={plan.num_stages},
        loss_fn=loss_fn,
        partition_method="uniform",
        activation_checkpoint_interval=int(RECOMPUTED[int(os.environ["RANK"])]),
    )
'''
    return _Written(body, [])


# --- all of them ---------------------------------------------------------------------------------------------------


def _slurm(plan: Plan, plan_path: str) -> _Written:
    script = batch_script(plan, plan_path)
    return _Written(script.commands, list(script.cannot), opening=script.directives)


_WRITERS: dict[Target, Callable[[Plan, str], _Written]] = {
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "slurm": _slurm,
}
