"""Exported plans: the names that each tool knows, files that parse, and what they cannot express, where it is so."""

import ast
import json
import os
import shlex
import socket
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import equal_stages, random_plans, scenario

from gpipe_sim.catalog import DType
from gpipe_sim.export import TARGETS, Exported, blocks_per_stage, export_plan
from gpipe_sim.plan import Plan, make_plan
from gpipe_sim.planfile import save_plan
from gpipe_sim.scenario import Optimizer, Transformer
from gpipe_sim.slurm import processes_per_node

ROOT = Path(__file__).parents[1]
FRAMEWORKS = ("torchtitan", "megatron", "deepspeed")


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
        "model": {"kind": "transformer", "layers": layers, "hidden": 64, "heads": 4, "vocab": 1000, "sequence": 32},
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


def titan(plan: Plan) -> SimpleNamespace:
    """The configuration after torchtitan would have called the exported function."""
    text = export(plan, "torchtitan").text.replace("from torchtitan.distributed.activation_checkpoint import", "#")
    names: dict[str, Any] = {"FullActivationRematConfig": lambda: "full"}
    exec(compile(text, "plan.py", "exec"), names)
    config = SimpleNamespace(parallelism=SimpleNamespace(), training=SimpleNamespace())
    assert names["apply_plan"](config) is config
    return config


def titan_toml(plan: Plan) -> dict[str, Any]:
    _, _, old = export(plan, "torchtitan").text.partition("TOML")
    return tomllib.loads("\n".join(line.removeprefix("#   ") for line in old.splitlines()[1:]))


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


@pytest.mark.parametrize("target", TARGETS)
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
    parts = titan(plan).parallelism.pipeline_parallel_module_fqns_per_model_part
    assert [len(part) for part in parts] == balance


def test_torchtitan_has_the_plans_numbers_under_its_names():
    config = titan(transformer_plan())
    assert vars(config.parallelism) == {
        "pipeline_parallel_degree": 3,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_module_fqns_per_model_part": [
            ["tok_embeddings", "layers.0", "layers.1"],
            ["layers.2", "layers.3"],
            ["layers.4", "norm", "lm_head"],
        ],
        "num_pp_microbatches": 4,
        "data_parallel_shard_degree": 1,
    }
    assert vars(config.training) == {
        "num_tokens_per_microbatch_per_dp_rank": 2 * 32,
        "num_tokens_per_train_step": 8 * 32,
        "max_context_length": 32,
        "dtype": "float32",
    }
    assert config.activation_checkpoint is None
    assert titan(transformer_plan(checkpoint="always")).activation_checkpoint == "full"


def test_torchtitans_old_releases_read_the_same_as_toml():
    old = titan_toml(transformer_plan(checkpoint="always", schedule="gpipe"))
    assert old["parallelism"]["pipeline_parallel_schedule"] == "GPipe"
    assert old["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert old["parallelism"]["module_fqns_per_model_part"][-1] == ["layers.4", "norm", "output"]
    assert old["training"] == {"local_batch_size": 8, "global_batch_size": 8, "seq_len": 32, "dtype": "float32"}
    assert old["activation_checkpoint"] == {"mode": "full"}


def test_megatron_has_the_plans_numbers_under_its_flags():
    flags = " ".join(megatron(transformer_plan(checkpoint="always", general={"dtype": "bf16"})))
    assert flags == (
        "--pipeline-model-parallel-size 3 --micro-batch-size 2 --global-batch-size 8 --num-layers 5 --hidden-size 64 "
        "--ffn-hidden-size 256 --num-attention-heads 4 --vocab-size 1000 --untie-embeddings-and-output-weights "
        "--seq-length 32 --max-position-embeddings 32 --position-embedding-type rope "
        "--pipeline-model-parallel-layout Et*2|t*2|tL --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --bf16 --optimizer adam"
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
    assert arguments.pop("activation_checkpoint_interval") == "int(RECOMPUTED[int(os.environ['RANK'])])"
    assert arguments == {"num_stages": "3", "loss_fn": "loss_fn", "partition_method": "'uniform'"}


# --- what cannot -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", FRAMEWORKS)
def test_unequal_micro_batches_are_rounded_up_and_what_would_be_exact_is_said(target):
    text = said(transformer_plan(batch=10), target)
    assert "4 of 3, a batch of 12, are written for a batch of 10. A batch of 8 or 12 would be exact." in text
    assert titan(transformer_plan(batch=10)).training.num_tokens_per_train_step == 12 * 32


def test_a_gpipe_schedule_is_said_to_be_1f1b_where_there_is_none():
    plan = transformer_plan(schedule="gpipe", backward="fifo")
    assert "There is no GPipe schedule" in said(plan, "megatron")
    assert "There is no GPipe schedule" in said(plan, "deepspeed")
    assert said(plan, "torchtitan") == ""
    assert titan(plan).parallelism.pipeline_parallel_schedule == "GPipe"
    assert said(transformer_plan(schedule="gpipe", backward="reverse"), "torchtitan").startswith("GPipe's backwards")


@pytest.mark.parametrize(("target", "instead"), [("torchtitan", "GPipe"), ("megatron", "1F1B"), ("deepspeed", "1F1B")])
def test_a_schedule_that_they_do_not_have_is_said_to_be_missing(target, instead):
    plan = replace(transformer_plan(), schedule="eager")
    assert said(plan, target) == f"There is no schedule eager: {instead} runs."


@pytest.mark.parametrize("target", TARGETS)
def test_with_one_micro_batch_all_schedules_are_the_same(target):
    for schedule in ("naive", "gpipe", "1f1b"):
        assert said(transformer_plan(schedule=schedule, microbatches=1, backward="reverse"), target) == ""


def test_torchtitan_cannot_run_1f1b_with_fewer_micro_batches_than_stages():
    plan = transformer_plan(microbatches=2)
    assert "1F1B needs as many micro-batches as stages, 3, and the plan has 2: GPipe is written." in said(
        plan, "torchtitan"
    )
    assert titan(plan).parallelism.pipeline_parallel_schedule == "GPipe"
    assert said(plan, "megatron") == ""


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
    assert "no fp32 copy of the weights" in said(transformer_plan(general={"dtype": "bf16"}), "torchtitan")


def test_a_model_that_is_no_transformer_has_no_shape_to_write():
    plan = equal_stages(3, 4, schedule="1f1b")
    assert "neither modules nor sequence are known" in said(plan, "torchtitan")
    assert not hasattr(titan(plan).parallelism, "pipeline_parallel_module_fqns_per_model_part")
    assert "stages of 1 1 1 layers" in said(plan, "megatron")
    assert "--num-layers" not in megatron(plan)
    assert said(plan, "deepspeed") == ""  # its layers are the user's in any case
    assert (
        said(plan, "slurm") == "A model of kind layers has costs but no arithmetic: the plan is rehearsed, on one node."
    )
    assert "--device rehearse" in export(plan, "slurm").text


# --- any plan --------------------------------------------------------------------------------------------------------


@given(random_plans(shared=True), st.text(min_size=1), st.text("ab /'\"$`\n-.", min_size=1))
def test_files_of_any_plan_name_and_path_parse_and_say_in_comments_what_they_cannot(plan, name, path):
    plan = replace(plan, scenario=replace(plan.scenario, name=name))
    for target in TARGETS:
        exported = export(plan, target, path)
        comments = " ".join(line[2:].strip() for line in exported.text.splitlines() if line.startswith("#"))
        for sentence in exported.cannot:
            assert sentence.endswith(".")
            assert sentence in comments
        if target in ("torchtitan", "deepspeed"):
            compile(exported.text, "plan.py", "exec")


@pytest.mark.parametrize("path", ["plan.yaml", "a folder/it's $HOME `x`.yaml", "-n\nx.yaml"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_scripts_are_bash_and_hold_the_path_as_it_is(path, nodes):
    cluster = {"nodes": nodes, "devices_per_node": 4 // nodes, "network": "100gbit"}
    script = export(transformer_plan(cluster=cluster), "slurm", path).text
    bash(script, "-n")
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
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step time" in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    assert len(json.loads((run / "measured.json").read_text())["steps"]) == 10
    assert (run / "compare.json").is_file()


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
