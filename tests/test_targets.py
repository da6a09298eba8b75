"""What is exported, taken by the tools that it is for: `make targets` runs this where they are installed."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_export import transformer_plan

from gpipe_sim.cost.transformer import transformer_layers
from gpipe_sim.export.frameworks import export_plan
from gpipe_sim.make.planfile import order_of_plan
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import Transformer

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
        {"balance": [3, 2, 1, 2], "stages_per_rank": 2, "schedule": "zb_v"},
        {"balance": [4, 4], "schedule": "gpipe", "backward": "reverse"},
        {"balance": [4, 4], "schedule": "1f1b", "checkpoint": "always"},
    ],
    ids=["by name", "interleaved", "zero bubble", "from a file", "recomputed"],
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


LLAMA = {"kv_heads": 2, "norm": "rms", "gated": True, "positions": "rotary"}
CLASSIC = {"attention": "classic"}


@needs("megatron.core")
@pytest.mark.parametrize(
    ("choices", "model", "general"),
    [
        ({"balance": [5, 3], "checkpoint": "always"}, {}, {}),
        ({"balance": [2, 4, 2], "batch": 16}, LLAMA, {"dtype": "bf16"}),
        ({"balance": [2, 1, 2, 3], "stages_per_rank": 2, "schedule": "interleaved_1f1b"}, {}, {}),
        (
            {"balance": [4, 4], "tensor": 2, "checkpoint": "always", "recompute_unit": "attention"},
            CLASSIC,
            {"dtype": "bf16", "precision": "mixed_fp32_gradients"},
        ),
        ({"balance": [4, 4], "replicas": 2, "shard": "optimizer", "batch": 16}, {}, {"dtype": "fp32"}),
    ],
    ids=["recomputed", "llama", "interleaved", "tensor groups, attention recomputed", "replicas"],
)
def test_megatron_core_builds_configurations_and_models_of_the_planned_size_from_the_exported_flags(
    tmp_path, choices, model, general
):
    shape = {"kind": "transformer", "layers": 5, "hidden": 64, "heads": 4, "vocab": 1024, "sequence": 32} | model
    plan = transformer_plan(layers=5, general={"model": shape} | general, **choices)
    script = export_plan(plan, "megatron", plan_path="plan.yaml").text + '\nprintf "%s\\n" "${PLAN_ARGS[@]}"'
    flags = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    (tmp_path / "told.json").write_text(json.dumps({"flags": flags, "parameters": parameters_of(plan)}))
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.world)]
    done = subprocess.run(
        [*ranks, WORKERS / "megatron_model.py", tmp_path / "told.json"],
        capture_output=True, text=True, timeout=300, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("parameters agree") == plan.world


def parameters_of(plan: Plan) -> list[int]:
    """How many parameters each stage has."""
    model = plan.scenario.model
    assert isinstance(model, Transformer)
    counts = [layer.parameters for layer in transformer_layers(model, plan.dtype)]
    return [sum(counts[stage]) for stage in plan.stages]
