"""What is exported, taken by the tools that it is for: `make targets` runs this where they are installed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_export import transformer_plan

from gpipe_sim.export.frameworks import export_plan
from gpipe_sim.export.words import blocks_per_stage
from gpipe_sim.make.planfile import order_of_plan

WORKERS = Path(__file__).parent / "workers"


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        find_spec(package.split(".")[0]) is None, reason=f"{package} is not installed: make targets"
    )


@needs("torchtitan")
@pytest.mark.parametrize(
    "choices",
    [
        {"balance": [4, 4], "schedule": "1f1b"},
        {"balance": [2, 2, 2, 2], "stages_per_rank": 2, "schedule": "interleaved_1f1b"},
        {"balance": [4, 4], "schedule": "gpipe", "backward": "reverse"},
        {"balance": [4, 4], "schedule": "1f1b", "checkpoint": "always"},
    ],
    ids=["by name", "interleaved", "from a file", "recomputed"],
)
def test_torchtitan_splits_schedules_and_computes_a_step_as_exported(tmp_path, choices):
    plan = transformer_plan(layers=5, **choices)
    exported = tmp_path / "plan.py"
    exported.write_text(export_plan(plan, "torchtitan", plan_path="plan.yaml").text)
    (tmp_path / "plan.csv").write_text(order_of_plan(plan))
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.num_ranks)]
    done = subprocess.run(
        [*ranks, WORKERS / "torchtitan_step.py", exported],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("gradients agree") == plan.num_ranks


@needs("deepspeed")
@pytest.mark.parametrize(
    "choices",
    [
        {"balance": [4, 4], "checkpoint": {"per_stage": ["always", "never"]}, "recompute": "on_demand"},
        {"balance": [5, 3], "replicas": 2, "batch": 16},
        {"balance": [5, 3], "replicas": 2, "batch": 16, "shard": "optimizer"},
        {"balance": [5, 3], "general": {"dtype": "bf16"}},
        {"balance": [5, 3], "general": {"dtype": "bf16", "precision": "mixed_fp32_gradients"}},
    ],
    ids=["recomputed", "replicas", "shards", "bf16", "bf16 with sums in fp32"],
)
def test_deepspeed_runs_what_is_exported_with_the_gradients_of_one_process(tmp_path, choices):
    general = {"optimizer": "sgd"} | choices.get("general", {})
    plan = transformer_plan(layers=5, **choices | {"general": general})
    exported = export_plan(plan, "deepspeed", plan_path="plan.yaml")
    assert exported.cannot == ()
    (tmp_path / "plan.py").write_text(exported.text)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.world)]
    done = subprocess.run(
        [*ranks, WORKERS / "deepspeed_step.py", tmp_path / "plan.py"],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("loss and gradients agree") == plan.world


@needs("megatron.core")
@pytest.mark.parametrize("balance", [[3, 2, 3], [2, 4, 2], [4, 2, 2]])
def test_megatron_core_builds_its_configuration_from_the_exported_layout(balance):
    from megatron.core.transformer import TransformerConfig

    plan = transformer_plan(layers=5, balance=balance)
    text = export_plan(plan, "megatron", plan_path="plan.yaml").text
    script = text + '\nprintf "%s\\n" "${PLAN_ARGS[@]}"'
    flags = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("\n")
    layout = flags[flags.index("--pipeline-model-parallel-layout") + 1]
    config = TransformerConfig(
        num_layers=5,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=plan.num_ranks,
        pipeline_dtype="float32",
        pipeline_model_parallel_layout=layout,
    )
    parsed = config.pipeline_model_parallel_layout.layout
    blocks = tuple(sum(layer.name == "decoder" for layer in rank[0]) for rank in parsed)
    assert blocks == blocks_per_stage(plan, plan.scenario.model)
