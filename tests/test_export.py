"""Exported plans: the names that each tool knows, files that parse, and what they cannot express, where it is so."""

import ast
import itertools
import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import equal_stages, random_plans, scenario
from ruamel.yaml import YAML

from gpipe_sim.base.files import InputError
from gpipe_sim.export.frameworks import TARGETS, export_plan
from gpipe_sim.export.processes import processes_per_node
from gpipe_sim.export.torch_names import torch_name
from gpipe_sim.export.words import Exported, blocks_per_stage, pattern_of
from gpipe_sim.make.making import make_plan
from gpipe_sim.make.planfile import save_plan
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.catalog import DType
from gpipe_sim.scenario.schema import Optimizer, Transformer

ROOT = Path(__file__).parents[1]
FRAMEWORKS = ("torchtitan", "megatron", "deepspeed")
OURS = ("slurm", "torchrun", "kubernetes")


def transformer_plan(
    *,
    layers: int = 5,
    batch: int = 8,
    general: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    **plan: Any,
) -> Plan:
    """A plan that every target can express, unless `plan` says otherwise."""
    data = {
        "name": "small",
        "model": {"kind": "transformer", "layers": layers, "hidden": 64, "heads": 4, "vocab": 1024, "sequence": 32},
        "batch": batch,
        "dtype": "fp32",
        "cluster": {"device": "a100-80gb", "link": "nvlink3"} | (cluster or {}),
        "plan": {"balance": [3, 2, 3], "microbatches": 4, "checkpoint": "never", "schedule": "1f1b"} | plan,
    }
    return make_plan(scenario(data | (general or {})))


def export(plan: Plan, target: str, plan_path: str = "plan.yaml") -> Exported:
    (known,) = (name for name in TARGETS if name == target)
    return export_plan(plan, known, plan_path=plan_path)


def said(plan: Plan, target: str) -> str:
    return "\n".join(export(plan, target).cannot)


def titan(plan: Plan, release: str = "0.3.0") -> SimpleNamespace:
    """The configuration after torchtitan, where this release of it is installed, would have called the function."""
    text = export(plan, "torchtitan").text
    text = text.replace("from torchtitan.distributed.activation_checkpoint import FullAC", "")
    text = text.replace("from importlib.metadata import version", "")
    full = SimpleNamespace(Config=lambda: "full")
    names: dict[str, Any] = {"FullAC": full, "version": {"torchtitan": release}.__getitem__}
    exec(compile(text, "plan.py", "exec"), names)
    config = SimpleNamespace(parallelism=SimpleNamespace(), training=SimpleNamespace())
    assert names["apply_plan"](config) is config
    return config


def megatron(plan: Plan) -> list[str]:
    """The flags as bash hands them to pretrain_gpt.py."""
    script = export(plan, "megatron").text + '\nprintf "%s\\n" "${PLAN_ARGS[@]}"'
    return bash(script).stdout.splitlines()


def deepspeed(plan: Plan) -> dict[str, Any]:
    """The values of the exported file's constants, as Python reads them."""
    tree = ast.parse(export(plan, "deepspeed").text)
    constants = [node for node in tree.body if isinstance(node, ast.Assign | ast.Import)]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(constants, []), "plan.py", "exec"), names)
    return names


def bash(script: str, *options: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        ["bash", *options, "-c", script], capture_output=True, text=True, env=os.environ | environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


# --- what can be expressed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", (*FRAMEWORKS, *OURS))
def test_nothing_is_said_of_a_plan_that_fits(target):
    exported = export(transformer_plan(), target)
    assert exported.cannot == ()
    assert "# All of the plan is expressed." in exported.text


def test_embedding_norm_and_head_are_not_blocks():
    plan = transformer_plan(balance=[3, 2, 3])
    assert isinstance(plan.scenario.model, Transformer)
    assert blocks_per_stage(plan, plan.scenario.model) == (2, 2, 1)


@given(st.integers(1, 9), st.data())
def test_every_block_is_on_one_stage(blocks, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, blocks + 2))))
    balance = [end - start for start, end in zip([0, *cuts], [*cuts, blocks + 3], strict=True)]
    plan = transformer_plan(layers=blocks, balance=balance)
    assert isinstance(plan.scenario.model, Transformer)
    assert sum(blocks_per_stage(plan, plan.scenario.model)) == blocks
    parts = titan(plan).parallelism.module_fqns_per_model_part
    assert [len(part) for part in parts] == balance


def test_megatron_has_flags_for_the_models_of_today():
    model = {"kind": "transformer", "layers": 5, "hidden": 64, "heads": 4, "vocab": 1024, "sequence": 32}
    today = {"kv_heads": 2, "norm": "rms", "gated": True, "positions": "rotary", "tied": True}
    flags = megatron(transformer_plan(general={"model": model | today}))
    pairs = ["--group-query-attention", "--num-query-groups", "2", "--swiglu", "--normalization", "RMSNorm"]
    pairs += ["--disable-bias-linear", "--attention-dropout", "0.0", "--hidden-dropout", "0.0"]
    assert pairs == flags[flags.index(pairs[0]) :][: len(pairs)]
    assert "--untie-embeddings-and-output-weights" not in flags
    learned = megatron(
        transformer_plan(general={"model": model | {"positions": "learned", "context": 99, "bias": "qkv"}})
    )
    assert learned[learned.index("--max-position-embeddings") + 1] == "99"
    assert "learned_absolute" in learned
    assert "--add-qkv-bias" in learned


def test_torchtitan_has_the_plans_numbers_under_its_names():
    config = titan(transformer_plan())
    assert vars(config.parallelism) == {
        "pipeline_parallel_degree": 3,
        "pipeline_parallel_schedule": "1F1B",
        "module_fqns_per_model_part": [
            ["tok_embeddings", "layers.0", "layers.1"],
            ["layers.2", "layers.3"],
            ["layers.4", "norm", "lm_head"],
        ],
        "pipeline_parallel_microbatch_size": 2,
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 1,
    }
    assert vars(config.training) == {
        "local_batch_size": 8,
        "global_batch_size": 8,
        "seq_len": 32,
        "dtype": "float32",
        "mixed_precision_param": "float32",
    }
    assert config.activation_checkpoint is None
    assert titan(transformer_plan(checkpoint="always")).activation_checkpoint == "full"


def test_another_release_of_torchtitan_is_refused():
    with pytest.raises(RuntimeError, match=r"written for torchtitan 0\.3, found 0\.2\.1"):
        titan(transformer_plan(), release="0.2.1")


def test_an_order_of_dimensions_and_a_fused_loss_are_said_to_those_who_know_them():
    model = {"kind": "transformer", "layers": 5, "hidden": 64, "heads": 4, "vocab": 1000, "sequence": 32}
    order = ["tensor", "pipeline", "data"]
    plan = transformer_plan(general={"model": model | {"fused_loss": True}}, batch=16, replicas=2, order=order)
    assert "--use-tp-pp-dp-mapping" in megatron(plan)
    assert "--cross-entropy-loss-fusion" in megatron(plan)
    for target in ("torchtitan", "deepspeed"):
        assert "The loss is not said to be fused" in said(plan, target)
        assert "what shares a node is not as the plan has it" in said(plan, target)
    plain = transformer_plan(batch=16, replicas=2)
    assert not {"--use-tp-pp-dp-mapping", "--cross-entropy-loss-fusion"} & set(megatron(plain))


def test_megatron_has_the_plans_numbers_under_its_flags():
    flags = " ".join(megatron(transformer_plan(checkpoint="always", general={"dtype": "bf16"})))
    assert flags == (
        "--pipeline-model-parallel-size 3 --micro-batch-size 2 --global-batch-size 8 --num-layers 5 --hidden-size 64 "
        "--ffn-hidden-size 256 --num-attention-heads 4 --vocab-size 1024 --untie-embeddings-and-output-weights "
        "--seq-length 32 --max-position-embeddings 32 --position-embedding-type rope "
        "--pipeline-model-parallel-layout Et*2|t*2|tL --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --bf16 --grad-reduce-in-bf16 --optimizer adam"
    )


def test_megatron_needs_no_layout_for_equal_stages_and_then_recomputes_whole_ones():
    flags = megatron(transformer_plan(layers=6, balance=[3, 2, 4], checkpoint="always"))
    assert "--pipeline-model-parallel-layout" not in flags
    assert flags[flags.index("--recompute-num-layers") + 1] == "2"


@pytest.mark.parametrize(
    ("balance", "layout"),
    [([1, 4, 3], "E|t*4|tL"), ([4, 2, 2], "Et*3|t*2|L"), ([7, 1], "Et*5|L"), ([2, 5, 1], "Et|t*4|L")],
)
def test_megatrons_layout_has_every_block_and_embedding_and_loss_at_its_ends(balance, layout):
    assert layout in megatron(transformer_plan(balance=balance))


def test_deepspeed_has_the_plans_numbers_under_its_keys():
    names = deepspeed(
        transformer_plan(checkpoint={"per_stage": ["always", "never", "always"]}, general={"dtype": "fp16"})
    )
    assert names["CONFIG"] == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "pipeline": {"use_reentrant": False},
        "fp16": {"enabled": True},
    }
    assert names["STAGES"] == [(0, 3), (3, 5), (5, 8)]
    assert names["RECOMPUTED"] == [True, False, True]


def test_deepspeeds_module_has_one_sequential_per_stage():
    """The arguments of PipelineModule, as its file calls it."""
    tree = ast.parse(export(transformer_plan(), "deepspeed").text)
    (call,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "PipelineModule"
    )
    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    assert arguments.pop("layers") == "[LayerSpec(Stage, make_layer, start, stop) for start, stop in STAGES]"
    assert arguments.pop("activation_checkpoint_interval") == "int(RECOMPUTED[int(os.environ['RANK']) // 1])"
    assert arguments == {"num_stages": "3", "loss_fn": "loss_fn", "partition_method": "'uniform'"}


# --- what cannot -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", FRAMEWORKS)
def test_unequal_micro_batches_are_rounded_up_and_what_would_be_exact_is_said(target):
    text = said(transformer_plan(batch=10), target)
    assert "4 of 3, a batch of 12, is written for one of 10. A batch of 8 or 12 would be exact." in text
    assert titan(transformer_plan(batch=10)).training.global_batch_size == 12


def test_a_gpipe_schedule_is_said_to_be_1f1b_where_there_is_none():
    plan = transformer_plan(schedule="gpipe", backward="fifo")
    assert "There is no GPipe schedule" in said(plan, "megatron")
    assert "There is no GPipe schedule" in said(plan, "deepspeed")
    assert said(plan, "torchtitan") == ""
    assert titan(plan).parallelism.pipeline_parallel_schedule == "GPipe"


@pytest.mark.parametrize("target", ["megatron", "deepspeed"])
def test_a_schedule_that_they_do_not_have_is_said_to_be_missing(target):
    for plan in (replace(transformer_plan(), schedule="eager"), transformer_plan(schedule="zb_h1")):
        assert said(plan, target) == f"There is no schedule {plan.schedule}: 1F1B runs."


@pytest.mark.parametrize("target", (*FRAMEWORKS, *OURS))
def test_with_one_micro_batch_all_schedules_are_the_same(target):
    for schedule in ("naive", "gpipe", "1f1b"):
        assert said(transformer_plan(schedule=schedule, microbatches=1, backward="reverse"), target) == ""


TWO_ON_EACH = {"balance": [2, 2, 1, 3], "stages_per_rank": 2}


@pytest.mark.parametrize(
    ("choices", "name"),
    [
        ({"schedule": "gpipe", "backward": "fifo"}, "GPipe"),
        ({"schedule": "zb_h1"}, "InterleavedZeroBubble"),
        ({"schedule": "interleaved_1f1b", **TWO_ON_EACH}, "Interleaved1F1B"),
        ({"schedule": "interleaved_gpipe", "backward": "reverse", **TWO_ON_EACH}, "LoopedBFS"),
        ({"schedule": "zb_v", **TWO_ON_EACH}, "ZBVZeroBubble"),
        ({"schedule": "dualpipe_v", **TWO_ON_EACH}, "DualPipeV"),
    ],
)
def test_torchtitan_knows_torchs_schedules_by_name_and_has_a_part_for_each_stage(choices, name):
    plan = transformer_plan(**choices)
    parallelism = titan(plan).parallelism
    assert said(plan, "torchtitan") == ""
    assert parallelism.pipeline_parallel_schedule == name
    assert not hasattr(parallelism, "pipeline_parallel_schedule_csv")
    assert parallelism.pipeline_parallel_degree == plan.num_ranks
    assert len(parallelism.module_fqns_per_model_part) == plan.num_stages


def test_torchtitan_says_that_one_rank_is_no_pipeline():
    one = {"stages": 2, "stages_per_rank": 2, "balance": [4, 4], "schedule": "interleaved_gpipe", "backward": "reverse"}
    plan = transformer_plan(**one)
    assert plan.num_ranks == 1
    assert "It has a pipeline from two ranks on: the 2 stages run as one module" in said(plan, "torchtitan")
    assert said(transformer_plan(stages=1, balance=[8], microbatches=1, schedule="gpipe"), "torchtitan") == ""


@pytest.mark.parametrize(
    ("choices", "placing"),
    [
        ({"schedule": "gpipe", "backward": "reverse"}, "1F1B"),
        ({"microbatches": 2}, "1F1B"),
        ({"schedule": "zb_h2"}, "1F1B"),
        ({"schedule": "auto", **TWO_ON_EACH}, "Interleaved1F1B"),
        ({"schedule": "dualpipe_v", "microbatches": 2, **TWO_ON_EACH}, "ZBVZeroBubble"),
    ],
)
def test_torchtitan_loads_every_other_order_from_a_file_and_the_name_places_stages(choices, placing):
    plan = transformer_plan(**choices)
    parallelism = titan(plan).parallelism
    assert said(plan, "torchtitan") == ""
    assert parallelism.pipeline_parallel_schedule == placing
    assert parallelism.pipeline_parallel_schedule_csv == "plan.csv"
    assert "gpipe export plan.yaml --to csv --out plan.csv" in export(plan, "torchtitan").text


def test_torchtitan_cannot_place_stages_anyhow_nor_split_a_backward_that_recomputes():
    plan = replace(transformer_plan(balance=[2, 2, 1, 3]), placement=(0, 1, 1, 0), schedule="auto")
    assert pattern_of(plan) == "v"
    assert "on ranks 0 0 1 1" in said(replace(plan, placement=(0, 0, 1, 1)), "torchtitan")
    recomputed = transformer_plan(schedule="zb_h1", checkpoint="always", recompute="on_demand")
    assert "Where a backward is split, blocks are recomputed twice." in said(recomputed, "torchtitan")


def test_megatron_has_virtual_stages_for_interleaved_1f1b():
    plan = transformer_plan(layers=4, balance=[2, 1, 1, 3], stages_per_rank=2, schedule="interleaved_1f1b")
    flags = megatron(plan)
    assert said(plan, "megatron") == ""
    assert flags[flags.index("--pipeline-model-parallel-size") + 1] == "2"
    assert flags[flags.index("--num-virtual-stages-per-pipeline-rank") + 1] == "2"
    assert "--pipeline-model-parallel-layout" not in flags
    unequal = megatron(transformer_plan(schedule="interleaved_1f1b", **TWO_ON_EACH))
    assert "Et|t*2|t|tL" in unequal
    assert "--num-virtual-stages-per-pipeline-rank" not in unequal  # only one of the two may be given


def test_megatrons_groups_of_micro_batches_are_equal_and_not_smaller_than_the_pipeline():
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    choices = {"schedule": "interleaved_1f1b", "balance": [2, 1, 1, 2, 1, 1], "stages_per_rank": 2}
    for M, group in ((6, None), (8, "4"), (7, "7")):
        plan = transformer_plan(microbatches=M, batch=M, **choices)
        flags = megatron(plan)
        assert (flags[flags.index(flag) + 1] if flag in flags else None) == group
        assert ("cannot be of 4 and 3: all 7 are one group" in said(plan, "megatron")) == (M == 7)
    assert "needs as many micro-batches as ranks, 3, and the plan has 2" in said(
        transformer_plan(microbatches=2, **choices), "megatron"
    )


def test_megatron_runs_interleaved_1f1b_instead_of_any_schedule_with_several_stages_on_a_rank():
    assert said(transformer_plan(schedule="zb_v", **TWO_ON_EACH), "megatron") == (
        "There is no schedule zb_v: interleaved 1F1B runs, and stage s is on rank s mod K."
    )
    assert said(transformer_plan(schedule="interleaved_gpipe", **TWO_ON_EACH), "megatron") == (
        "There is no schedule interleaved_gpipe: interleaved 1F1B runs."
    )


def test_deepspeed_joins_the_stages_of_a_rank():
    plan = transformer_plan(schedule="interleaved_1f1b", **TWO_ON_EACH)
    assert said(plan, "deepspeed") == (
        "A rank holds one stage: the plan's are joined, in order, to 2 of 4 4 layers.\n"
        "There is no schedule interleaved_1f1b: 1F1B runs."
    )
    assert deepspeed(plan)["STAGES"] == [(0, 4), (4, 8)]
    assert "num_stages=2" in export(plan, "deepspeed").text


def test_modes_that_differ_by_stage_become_recomputation_everywhere_but_in_deepspeed():
    plan = transformer_plan(checkpoint={"per_stage": ["never", "always", "never"]}, recompute="on_demand")
    for target in ("torchtitan", "megatron"):
        assert "Stages cannot differ in checkpointing (never always never)" in said(plan, target)
    assert titan(plan).activation_checkpoint == "full"
    assert "--recompute-granularity" in megatron(plan)
    assert said(plan, "deepspeed") == ""


@pytest.mark.parametrize("target", FRAMEWORKS)
def test_except_last_and_early_recomputation_are_said_to_be_lost(target):
    text = said(transformer_plan(checkpoint="except_last", recompute="early"), target)
    assert "There is no except_last" in text
    assert "(recompute: on_demand), not early" in text
    text = said(transformer_plan(checkpoint="always", recompute="on_demand"), target)
    assert "except_last" not in text
    assert "early" not in text
    # A single micro-batch is the last: nothing is recomputed, and nothing is lost.
    assert said(transformer_plan(checkpoint="except_last", microbatches=1), target) == ""


def test_the_last_stage_waits_for_no_gradient_so_early_is_on_demand_there():
    plan = transformer_plan(checkpoint={"per_stage": ["never", "never", "always"]}, recompute="early")
    assert said(plan, "deepspeed") == ""


def test_megatron_runs_the_final_norm_beside_the_head():
    assert (
        said(transformer_plan(balance=[3, 4, 1]), "megatron") == "The final norm runs with the head, on the last stage."
    )
    assert "leaves the stage before it empty" in said(transformer_plan(balance=[6, 1, 1]), "megatron")
    assert said(transformer_plan(balance=[3, 4, 1]), "torchtitan") == ""


@pytest.mark.parametrize("target", FRAMEWORKS)
def test_other_ranks_than_the_stages_own_are_said(target):
    assert "the plan's ranks, 0 2 1, would be" in said(transformer_plan(placement=[0, 2, 1]), target)


def test_dtypes_and_optimizers_that_do_not_exist_are_said():
    lacking = {
        (target, name)
        for target in FRAMEWORKS
        for kind, names in (("dtype", get_args(DType)), ("optimizer", get_args(Optimizer)))
        for name in names
        if "There is no" in said(transformer_plan(general={kind: name}), target)
    }
    everywhere = {(target, "fp64") for target in FRAMEWORKS}
    titans = {("torchtitan", name) for name in ("fp16", "sgd", "momentum", "rmsprop")}
    assert lacking == everywhere | titans | {("megatron", "rmsprop")}
    assert "what other models do is theirs" in said(transformer_plan(general={"dtype": "bf16"}), "torchtitan")


def test_a_model_that_is_no_transformer_has_no_shape_to_write():
    plan = equal_stages(3, 4, schedule="1f1b")
    assert "neither modules nor sequence are known" in said(plan, "torchtitan")
    assert not hasattr(titan(plan).parallelism, "module_fqns_per_model_part")
    assert "stages of 1 1 1 layers" in said(plan, "megatron")
    assert "--num-layers" not in megatron(plan)
    assert said(plan, "deepspeed") == ""  # its layers are the user's in any case
    assert (
        said(plan, "slurm") == "A model of kind layers has costs but no arithmetic: the plan is rehearsed, on one node."
    )
    assert "--device rehearse" in export(plan, "slurm").text


# --- replicas --------------------------------------------------------------------------------------------------------


def replicated(shard: str = "none", **general: Any) -> Plan:
    """Two replicas of a pipeline of two ranks."""
    return transformer_plan(balance=[4, 4], batch=16, replicas=2, shard=shard, general=general)


def test_every_framework_has_words_of_its_own_for_replicas():
    plan = replicated()
    for target in (*FRAMEWORKS, *OURS):
        assert said(plan, target) == ""
        assert "on 2 replicas" in export(plan, target).text or "in 2 replicas" in export(plan, target).text
    config = titan(plan)
    assert config.parallelism.data_parallel_replicate_degree == 2
    assert config.parallelism.data_parallel_shard_degree == 1
    assert (config.training.local_batch_size, config.training.global_batch_size) == (8, 16)
    flags = megatron(plan)
    assert flags[flags.index("--global-batch-size") + 1] == "16"
    assert "--use-distributed-optimizer" not in flags
    assert "with 4 processes in all" in export(plan, "megatron").text
    names = deepspeed(plan)
    assert names["CONFIG"]["train_batch_size"] == 16
    assert "zero_optimization" not in names["CONFIG"]
    assert 'RECOMPUTED[int(os.environ["RANK"]) // 2]' in export(plan, "deepspeed").text


def test_shards_of_the_optimizer_are_written_or_what_is_sharded_instead_is_said():
    plan = replicated("optimizer")
    assert "--use-distributed-optimizer" in megatron(plan)
    assert deepspeed(plan)["CONFIG"]["zero_optimization"] == {"stage": 1}
    assert said(plan, "megatron") == said(plan, "deepspeed") == ""
    instead = "Replicas of a pipeline do not shard the optimizer alone: they shard parameters and optimizer."
    assert said(plan, "torchtitan") == instead
    assert titan(plan).parallelism.data_parallel_shard_degree == 2


def test_shards_of_the_parameters_are_torchtitans_own():
    plan = replicated("parameters")
    parallelism = titan(plan).parallelism
    assert said(plan, "torchtitan") == ""
    assert (parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree) == (1, 2)
    assert parallelism.fsdp_reshard_after_forward == "never"
    instead = "Replicas of a pipeline do not shard parameters and optimizer: they shard the optimizer alone."
    assert said(plan, "megatron") == said(plan, "deepspeed") == instead
    assert "--use-distributed-optimizer" in megatron(plan)


@pytest.mark.parametrize("split", [True, False])
def test_tensor_groups_are_torchtitans_and_megatrons_own_and_refused_elsewhere(split):
    plan = transformer_plan(balance=[4, 4], batch=16, replicas=2, tensor=2, sequence_split=split)
    parallelism = titan(plan).parallelism
    assert (parallelism.tensor_parallel_degree, parallelism.enable_sequence_parallel) == (2, split)
    flags = megatron(plan)
    assert flags[flags.index("--tensor-model-parallel-size") + 1] == "2"
    assert ("--sequence-parallel" in flags) == split
    assert "with 8 processes in all" in export(plan, "megatron").text
    for target in ("deepspeed", *OURS):
        with pytest.raises(InputError, match=f"plan.tensor: found 2, expected 1: export to {target}"):
            export(plan, target)


def test_precision_is_the_plans_or_what_it_is_instead_is_said():
    names = ("mixed", "mixed_fp32_gradients", "pure")
    mixed, summed, pure = (replicated("parameters", dtype="bf16", precision=precision) for precision in names)
    for plan in (mixed, summed):
        assert (titan(plan).training.dtype, titan(plan).training.mixed_precision_param) == ("float32", "bfloat16")
    assert (titan(pure).training.dtype, titan(pure).training.mixed_precision_param) == ("bfloat16", "bfloat16")
    assert said(summed, "torchtitan") == ""
    assert said(mixed, "torchtitan") == (
        "Gradients are added up and summed in fp32 (precision: mixed_fp32_gradients), and need 2 bytes more each."
    )
    assert said(pure, "torchtitan") == (
        "Gradients are added up in fp32 until they are summed, and need 2 bytes more each."
    )
    for target in ("megatron", "deepspeed"):
        assert "Precision is mixed where there is bf16" in said(pure, target)
        assert "Precision" not in said(mixed, target)


def test_megatron_pads_the_vocabulary_and_it_is_said_to_what():
    model = {"kind": "transformer", "layers": 5, "hidden": 64, "heads": 4, "vocab": 32000, "sequence": 32}
    for tensor, text in (
        (1, ""),
        (4, "The vocabulary is padded to 32,256, a multiple of 128 for each device of a tensor group."),
    ):
        plan = transformer_plan(balance=[4, 4], tensor=tensor, general={"model": model})
        assert said(plan, "megatron") == text


def test_megatron_adds_gradients_up_in_what_the_plan_says_and_not_in_its_own_default():
    """Without a flag it would be fp32 with bf16, two bytes per parameter more than a plan in mixed precision has."""
    flags = {"--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"}

    def found(dtype, precision):
        plan = transformer_plan(general={"dtype": dtype, "precision": precision})
        assert said(plan, "megatron") == ""
        return flags & set(megatron(plan))

    assert found("bf16", "mixed") == {"--grad-reduce-in-bf16"}
    assert found("fp16", "mixed") == set()
    for dtype in ("bf16", "fp16"):
        assert found(dtype, "mixed_fp32_gradients") == {"--accumulate-allreduce-grads-in-fp32"}


def test_deepspeed_adds_gradients_up_in_fp32_with_its_first_stage_of_zero_alone():
    """`make targets` sees that its optimizer then does."""
    summed = transformer_plan(general={"dtype": "bf16", "precision": "mixed_fp32_gradients"})
    config = deepspeed(summed)["CONFIG"]
    assert (config["data_types"], config["zero_optimization"]) == ({"grad_accum_dtype": "fp32"}, {"stage": 1})
    assert said(summed, "deepspeed") == ""
    assert "data_types" not in deepspeed(transformer_plan(general={"dtype": "bf16"}))["CONFIG"]
    half = transformer_plan(general={"dtype": "fp16", "precision": "mixed_fp32_gradients"})
    assert said(half, "deepspeed") == "Gradients are added up and summed in fp16 (precision: mixed), not in fp32."
    assert said(replicated(dtype="bf16"), "deepspeed") == (
        "With bf16 replicas divide the optimizer's state in any case."
    )


def test_attention_is_recomputed_by_itself_by_megatron_and_elsewhere_it_is_said_what_is():
    model = {"kind": "transformer", "layers": 5, "hidden": 64, "heads": 4, "vocab": 1024, "sequence": 32}
    plan = transformer_plan(
        checkpoint="always", recompute_unit="attention", general={"model": model | {"attention": "classic"}}
    )
    flags = megatron(plan)
    assert said(plan, "megatron") == ""
    assert flags[flags.index("--recompute-granularity") + 1] == "selective"
    assert flags[flags.index("--recompute-modules") + 1] == "core_attn"
    assert "--recompute-num-layers" not in flags
    assert flags[flags.index("--attention-backend") + 1] == "unfused"
    assert titan(plan).activation_checkpoint == "full"
    assert "Attention is not recomputed by itself: whole blocks are." in said(plan, "torchtitan")
    assert "Attention is a fused kernel that keeps no scores" in said(plan, "torchtitan")
    assert said(plan, "deepspeed") == "Attention is not recomputed by itself: whole stages are."
    for target in OURS:
        assert said(plan, target) == ""


def test_an_order_is_written_for_tensor_groups_too_since_torchtitans_export_asks_for_it():
    plan = transformer_plan(balance=[4, 4], schedule="gpipe", backward="reverse", tensor=2)
    assert "--to csv" in export(plan, "torchtitan").text
    assert export(plan, "csv").text == export(replace(plan, tensor=1), "csv").text


# --- the order -------------------------------------------------------------------------------------------------------


def torchs_order(schedule: Any) -> list[list[str]]:
    """What each rank does in one of torch's schedules; the two actions of an overlapped pair in turn."""
    rows = [
        [action for action in schedule.pipeline_order[rank] if action is not None]
        for rank in range(schedule.pp_group_size)
    ]
    return [[str(part) for action in row for part in action.sub_actions or [action]] for row in rows]


def torchs_stages(plan: Plan) -> list[SimpleNamespace]:
    """As much of the first rank's stages as torch needs to make an order."""
    numbers = {"group_size": plan.num_ranks, "num_stages": plan.num_stages, "group_rank": 0}
    return [SimpleNamespace(**numbers, is_last=False, submod=None) for _ in range(plan.stages_per_rank)]


def rows_of(plan: Plan) -> list[list[str]]:
    return [row.split(",") for row in export(plan, "csv").text.splitlines()]


@given(random_plans(max_stages=6))
def test_torchs_runtime_loads_the_exported_order_of_any_plan(tmp_path_factory, plan):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    path = tmp_path_factory.getbasetemp() / "order.csv"
    path.write_text(export(plan, "csv").text)
    runtime = schedules._PipelineScheduleRuntime(torchs_stages(plan), plan.num_microbatches)
    runtime._load_csv(str(path), format="compute_only")
    assert torchs_order(runtime) == rows_of(plan)
    ranks = {stage: plan.ranks.index(rank) for stage, rank in enumerate(plan.placement)}
    assert runtime.stage_index_to_group_rank == ranks


@pytest.mark.parametrize(
    ("schedule", "v"),
    [
        ("interleaved_gpipe", 1),
        ("interleaved_gpipe", 2),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 3),
        ("zb_h1", 1),
        ("zb_v", 2),
        ("dualpipe_v", 2),
    ],
)
def test_a_class_of_torchs_that_is_named_has_the_plans_order_and_any_other_refuses_or_differs(schedule, v):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    name_of_all = torch_name(equal_stages(v, 2, schedule=schedule, stages_per_rank=v, backward="reverse"))
    assert name_of_all is not None
    kind = schedules.get_schedule_class(name_of_all)
    for K, M, backward in itertools.product((1, 2, 4), range(1, 10), ("fifo", "reverse")):
        plan = equal_stages(K * v, M, schedule=schedule, stages_per_rank=v, backward=backward)
        name = torch_name(plan)
        assert name in (name_of_all, None)
        try:
            same = torchs_order(kind(torchs_stages(plan), M)) == rows_of(plan)
        except ValueError:
            same = False
        assert same == (name is not None)


def test_an_order_says_nothing_else():
    exported = export(transformer_plan(balance=[8], microbatches=2), "csv")
    assert exported.text == "0F0,0B0,0F1,0B1\n"
    assert exported.cannot == (
        "Only the order is written: the cut, the micro-batches' size and checkpointing are set in the code.",
    )
    assert "begin on rank 1" in said(transformer_plan(placement=[1, 0, 2]), "csv")


# --- any plan --------------------------------------------------------------------------------------------------------


@given(random_plans(shared=True), st.text(min_size=1), st.text("ab /'\"$`\n-.", min_size=1))
def test_files_of_any_plan_name_and_path_parse_and_say_in_comments_what_they_cannot(plan, name, path):
    plan = replace(plan, scenario=replace(plan.scenario, name=name))
    for target in TARGETS:
        exported = export(plan, target, path)
        comments = " ".join(line[2:].strip() for line in exported.text.splitlines() if line.startswith("#"))
        for sentence in exported.cannot:
            assert sentence.endswith(".")
            assert sentence in comments or target == "csv"
        if target in ("torchtitan", "deepspeed"):
            compile(exported.text, "plan.py", "exec")


@pytest.mark.parametrize("path", ["plan.yaml", "a folder/it's $HOME `x`.yaml", "-n\nx.yaml"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_scripts_are_bash_and_hold_the_path_as_it_is(path, nodes):
    cluster = {"nodes": nodes, "devices_per_node": 4 // nodes, "network": "100gbit"}
    script = export(transformer_plan(cluster=cluster), "slurm", path).text
    bash(script, "-n")
    bash(export(transformer_plan(cluster=cluster), "torchrun", path).text, "-n")
    bash(export(transformer_plan(), "megatron", path).text, "-n")
    (line,) = (part for part in script.split("\nexport")[0].partition("\nPLAN=")[2:])
    assert shlex.split(line) == [path]


# --- Slurm -----------------------------------------------------------------------------------------------------------


def directives(plan: Plan) -> list[str]:
    lines = export(plan, "slurm").text.splitlines()
    assert lines[0] == "#!/bin/bash"
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def test_a_batch_script_asks_for_the_plans_nodes_and_devices():
    cluster = {"nodes": 2, "devices_per_node": 2, "network": "100gbit"}
    plan = transformer_plan(cluster=cluster)
    assert processes_per_node(plan) == (2, 1)
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "--job-name=small"} <= set(directives(plan))
    assert "processes=(2 1)" in export(plan, "slurm").text
    on_cpus = directives(transformer_plan(cluster={"device": "cpu"}))
    assert "--nodes=1" in on_cpus
    assert not any("gpu" in line for line in on_cpus)


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
started=()
for node in 0 1; do
    SLURM_NODEID=$node "$@" & started+=($!)
done
for process in "${started[@]}"; do wait "$process" || exit 1; done
"""
SCONTROL = """#!/bin/bash
printf "127.0.0.1\\n127.0.0.1\\n"
"""


def test_on_one_node_one_command_does_it_all():
    script = export(transformer_plan(cluster={"device": "cpu"}), "slurm").text
    assert 'gpipe run "$PLAN" --device cpu --out "$RUN_DIR"' in script.splitlines()[-1]


def test_a_batch_script_runs_measures_and_compares_on_two_nodes(tmp_path):
    """This machine stands in for every node: srun starts its command once for each."""
    pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")
    cluster = {"device": "cpu", "nodes": 2, "devices_per_node": 2, "network": "10gbit"}
    plan = transformer_plan(cluster=cluster, microbatches=2)
    save_plan(plan, tmp_path / "plan.yaml")
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": str(free_port() - 29500),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_CPUS_PER_TASK": "2",
    }
    script = export(plan, "slurm").text
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step time" in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    assert len(json.loads((run / "measured.json").read_text())["steps"]) == 10
    assert (run / "compare.json").is_file()


NOTED = """#!/bin/bash
echo "$(basename $0) $@" >> "calls.$NODE"
if [ "$1" = run ]; then mkdir -p "$RUN_DIR" && touch "$RUN_DIR/environment.json"; fi
"""


def test_a_script_for_each_machine_does_what_a_batch_script_does(tmp_path):
    """What Kubernetes' pods run, too. The commands, which the test before this one runs, are only noted."""
    plan = transformer_plan(cluster={"device": "cpu", "nodes": 2, "devices_per_node": 2, "network": "10gbit"})
    for name in ("gpipe", "python"):
        (tmp_path / name).write_text(NOTED)
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), "/usr/bin", "/bin"])
    script = f"cd {shlex.quote(str(tmp_path))}\n" + export(plan, "torchrun").text
    for node in ("0", "1"):
        bash(script, PATH=path, NODE=node, ENDPOINT="node0:29500")
    first, second = ((tmp_path / f"calls.{node}").read_text().splitlines() for node in "01")
    batch = " ".join(export(plan, "slurm").text.replace("\\\n", " ").split())
    assert first[0] == "gpipe run plan.yaml --device cpu --nodes 3 --rdzv-endpoint node0:29500 --out runs/small"
    assert first[2] == "gpipe compare runs/small"
    for call, node, processes in ((first[1], 0, 2), (second[0], 1, 1)):
        told = call.replace("node0:29500", '"$ENDPOINT"').replace("runs/small", '"$RUN_DIR"')
        told = told.replace(f"--node-rank {node}", '--node-rank "$SLURM_NODEID"')
        told = told.replace(f"--nproc-per-node {processes}", '--nproc-per-node "${processes[$SLURM_NODEID]}"')
        assert told in batch
    assert len(second) == 1


@pytest.mark.parametrize(("nodes", "each"), [(1, 4), (2, 2)])
def test_a_pytorchjob_has_a_pod_for_each_node_that_runs_torchruns_script(nodes, each):
    cluster = {"nodes": nodes, "devices_per_node": each, "network": "100gbit"}
    plan = transformer_plan(cluster=cluster)
    job = YAML(typ="safe").load(export(plan, "kubernetes", "it's a plan.yaml").text)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    pods = job["spec"]["pytorchReplicaSpecs"]
    assert {name: pod["replicas"] for name, pod in pods.items()} == {"Master": 1} | ({"Worker": 1} if nodes > 1 else {})
    script = export(plan, "torchrun", "it's a plan.yaml").text
    for pod in pods.values():
        (container,) = pod["template"]["spec"]["containers"]
        (text,) = container["args"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "3" if nodes == 1 else "2"}
        told = 'export NODE="$PET_NODE_RANK" ENDPOINT="$MASTER_ADDR:$MASTER_PORT"\n'
        assert text.startswith(told) == (nodes > 1)
        assert text.removeprefix(told).strip() in script
    assert ("Pods are alike" in said(plan, "kubernetes")) == (nodes > 1)


def free_port() -> int:
    """A free port among those that scripts choose from."""
    for port in range(29500, 30500):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port from 29500 to 30499 is free")
