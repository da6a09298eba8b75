"""Megatron-LM: flags of pretrain_gpt.py. It has two schedules, 1F1B and interleaved 1F1B."""

from collections.abc import Iterator
from math import gcd

from gpipe_sim.export.words import Tool, Written, blocks_per_stage, has_16_bits, listed, pattern_of, recomputes, sharded
from gpipe_sim.plan.orders import group_size
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import Transformer

TOOL = Tool(
    stages_differ=False,
    dtypes=("fp32", "bf16", "fp16"),
    optimizers=("adam", "sgd", "momentum"),
    shards=("none", "optimizer"),
    precisions=("mixed", "mixed_fp32_gradients"),
    groups=True,
    fused_loss=True,
    orders=True,
)


def write(plan: Plan, plan_path: str) -> Written:
    """Recomputation goes by chunks of one size for all stages: the largest that divides them, a whole stage where
    stages are equal."""
    model, size, chunk, cannot = plan.scenario.model, plan.sizes[0], 1, list(_schedule(plan))
    flags = [f"--pipeline-model-parallel-size {plan.num_ranks}", f"--micro-batch-size {size}"]
    flags.append(f"--global-batch-size {size * plan.num_microbatches * plan.replicas}")
    if plan.tensor > 1:
        flags.append(f"--tensor-model-parallel-size {plan.tensor}")
        flags += ["--sequence-parallel"] if plan.scenario.plan.sequence_split else []
    flags += ["--use-tp-pp-dp-mapping"] if plan.mesh.messages_inside else []
    if plan.replicas > 1 and sharded(plan, TOOL) == "optimizer":
        flags.append("--use-distributed-optimizer")
    v, equal = plan.stages_per_rank, True
    if isinstance(model, Transformer):
        blocks = blocks_per_stage(plan, model)
        chunk, equal = gcd(*blocks), len(set(blocks)) == 1
        flags += [f"--num-layers {model.layers}", f"--hidden-size {model.hidden}"]
        flags += [f"--ffn-hidden-size {model.ffn_width}", f"--num-attention-heads {model.heads}"]
        flags += [f"--vocab-size {model.vocab}", *([] if model.tied else ["--untie-embeddings-and-output-weights"])]
        flags += [f"--seq-length {model.sequence}"]
        flags += [f"--max-position-embeddings {model.num_positions or model.sequence}"]
        flags += [f"--position-embedding-type {'learned_absolute' if model.num_positions else 'rope'}"]
        flags += _shape(model)
        flags += ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl te"] if model.fused_loss else []
        flags += ["--attention-backend unfused"] if model.attention == "classic" else []
        flags += [] if equal else [f"--pipeline-model-parallel-layout '{_layout(blocks)}'"]
        padded = -(-model.vocab // (128 * plan.tensor)) * 128 * plan.tensor
        if padded != model.vocab:
            cannot.append(
                f"The vocabulary is padded to {padded:,}, a multiple of 128 for each device of a tensor group."
            )
        if plan.num_stages > 1 and plan.balance[-1] == 1:
            empty = ", which leaves the stage before it empty" if plan.balance[-2] == 1 else ""
            cannot.append(f"The final norm runs with the head, on the last stage{empty}.")
    else:
        cannot.append(
            f"A model of kind {model.kind} has no shape for flags: neither it nor its cut into stages of "
            f"{listed(plan.balance)} layers is written."
        )
    if v > 1:
        flags += [f"--num-virtual-stages-per-pipeline-rank {v}"] if equal else []  # a layout says it by its length
        group = _group(plan)
        flags += [f"--microbatch-group-size-per-virtual-pipeline-stage {group}"] if group != plan.num_ranks else []
    if any(recomputes(plan)) and plan.recompute_unit == "attention":
        flags += ["--recompute-granularity selective", "--recompute-modules core_attn"]
    elif any(recomputes(plan)):
        chunk = 1 if plan.recompute_unit == "layer" else chunk
        flags += ["--recompute-granularity full", "--recompute-method uniform", f"--recompute-num-layers {chunk}"]
        each = "Blocks are recomputed one by one" if chunk == 1 else f"Blocks are recomputed {chunk} at a time"
        cannot.append(f"{each}, and their inputs kept; embedding, norm and head are not recomputed.")
    flags += [f"--{plan.dtype}", *_gradients(plan)] if has_16_bits(plan) else []
    momentum = {"sgd": 0, "momentum": 0.9}.get(plan.scenario.optimizer)
    flags.append("--optimizer adam" if momentum is None else f"--optimizer sgd --sgd-momentum {momentum}")
    lines = "".join(f"    {flag}\n" for flag in flags)
    usage = f"""
# Source this, then, with {plan.world} processes in all, which say by their number how many replicas there are:
# torchrun ... pretrain_gpt.py "${{PLAN_ARGS[@]}}" and flags for data and learning rate."""
    return Written(f"PLAN_ARGS=(\n{lines}){usage}", cannot)


def _shape(model: Transformer) -> list[str]:
    """What differs from GPT's blocks."""
    shared = model.num_kv_heads < model.heads
    flags = ["--group-query-attention", f"--num-query-groups {model.num_kv_heads}"] if shared else []
    flags += [f"--kv-channels {model.head_width}"] if model.head_width else []
    flags += ["--swiglu"] if model.gated else []
    flags += ["--normalization RMSNorm"] if model.norm == "rms" else []
    flags += [] if model.biases == "all" else ["--disable-bias-linear"]
    flags += ["--add-qkv-bias"] if model.biases == "qkv" else []
    return flags if model.drops else [*flags, "--attention-dropout 0.0", "--hidden-dropout 0.0"]


def _gradients(plan: Plan) -> list[str]:
    """What they are added up in: where nothing is said, fp32 with bf16, and fp16 with itself."""
    if plan.scenario.precision == "mixed_fp32_gradients":
        return ["--accumulate-allreduce-grads-in-fp32"]
    return ["--grad-reduce-in-bf16"] if plan.dtype == "bf16" else []


def _schedule(plan: Plan) -> Iterator[str]:
    """What runs instead of the plan's schedule: with several stages on a rank it is always interleaved 1F1B."""
    K, v, M = plan.num_ranks, plan.stages_per_rank, plan.num_microbatches
    if plan.num_stages != K * v:
        yield f"Ranks hold equally many stages: it cannot run a plan that has them on ranks {listed(plan.placement)}."
        return
    if v == 1:
        if plan.schedule == "gpipe" and M > 1:
            yield "There is no GPipe schedule: 1F1B runs, with the same ideal bubble and fewer activations held."
        elif plan.schedule not in ("naive", "gpipe", "1f1b", "interleaved_1f1b"):
            yield f"There is no schedule {plan.schedule}: 1F1B runs."
        return
    if plan.schedule != "interleaved_1f1b":
        loop = "" if pattern_of(plan) == "looped" else ", and stage s is on rank s mod K"
        yield f"There is no schedule {plan.schedule}: interleaved 1F1B runs{loop}."
    if K == 1:
        yield "Interleaved 1F1B needs more than one rank: it refuses this plan."
    elif M < K:
        yield f"Interleaved 1F1B needs as many micro-batches as ranks, {K}, and the plan has {M}: it refuses this plan."
    elif M % (M // K) and plan.schedule == "interleaved_1f1b":
        smaller = group_size(K, M) - 1
        yield f"Groups of micro-batches cannot be of {smaller + 1} and {smaller}: all {M} are one group."


def _group(plan: Plan) -> int:
    """Micro-batches that go through a stage in a row: as many as there are ranks, or the plan's own groups."""
    K, M = plan.num_ranks, plan.num_microbatches
    if M < K or M % K == 0:
        return K
    return group_size(K, M) if M % (M // K) == 0 else M


def _layout(blocks: tuple[int, ...]) -> str:
    """``(2, 3, 1)`` blocks -> ``Et*2|t*3|tL``: E is the embedding, L norm, head and loss.

    With several stages on each rank it goes on with the second ones: as stages are numbered in a loop.
    """
    return "E" + "|".join("t" if count == 1 else f"t*{count}" if count else "" for count in blocks) + "L"
