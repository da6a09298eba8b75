"""`gpipe plan`, `gpipe export`, and plans that go from one command to the next."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run
from test_accuracy import RUN

from gpipe_sim.make.planfile import load_plan
from gpipe_sim.runs.accuracy import record

SCENARIO = """
name: small
model: {kind: transformer, layers: 5, hidden: 1024, heads: 16, vocab: 32000, sequence: 1024}
batch: 6
cluster:
  device: a100-80gb
  devices_per_node: 3
  link: {bandwidth: 300 GB/s, latency: 5 us}
plan: {replicas: 1, tensor: 1}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    return path


def test_json_has_the_keys_of_the_contract(scenario, capsys):
    status, out, _ = run(capsys, "plan", scenario, "--json")
    assert status == 0
    answer = json.loads(out)
    assert {"scenario", "results", "recommended", "pareto", "reason"} <= set(answer)
    best = answer["results"][answer["recommended"]]
    assert best["fits"]
    assert best["step_time_s"] == min(result["step_time_s"] for result in answer["results"] if result["fits"])
    for index in answer["pareto"]:
        one = answer["results"][index]
        for other in answer["results"]:
            faster = other["step_time_s"] < one["step_time_s"]
            assert not (faster and max(other["peak_memory_bytes"]) < max(one["peak_memory_bytes"]))


def test_a_plan_written_by_one_command_is_predicted_the_same_by_the_next(scenario, capsys, tmp_path):
    plan_file = tmp_path / "plan.yaml"
    _, out, _ = run(capsys, "plan", scenario, "--json", "--out", plan_file)
    answer = json.loads(out)
    planned = answer["results"][answer["recommended"]]
    status, out, _ = run(capsys, "simulate", plan_file, "--json")
    assert status == 0
    (simulated,) = json.loads(out)["results"]
    for key, value in planned.items():
        if key == "breakdown_s":
            assert simulated[key] == pytest.approx(value, rel=1e-9, abs=1e-12)
        elif isinstance(value, float) or (isinstance(value, list) and isinstance(value[0], float)):
            assert simulated[key] == pytest.approx(value, rel=1e-9), key
        else:
            assert simulated[key] == value, key
    assert list(load_plan(plan_file).balance) == planned["balance"]


def test_the_answer_is_a_table_a_reason_the_naive_choice_and_how_sure(scenario, capsys, tmp_path):
    status, out, _ = run(capsys, "plan", scenario, "--explain", "--runs", tmp_path)
    assert status == 0
    text = " ".join(out.split())
    assert "time against memory" in text
    assert "the fastest of all, and it fits" in text
    assert "Equal layers, always recomputed, M=4K would take" in text
    assert "ahead of the runner-up" in text
    assert "1 % faster gains: stage" in text


def test_nothing_fits_is_status_3_with_what_would(scenario, capsys):
    status, out, err = run(
        capsys, "plan", scenario, "--set", "cluster.memory_reserve=79.125 GiB", "--set", "cluster.devices_per_node=2"
    )
    assert status == 3
    assert "no plan was found that fits in 896 MiB" in " ".join(out.split())
    assert "no plan was found that fits" in err
    assert "stages instead of 2 would fit" in err


def test_a_sweep_over_the_cluster_is_no_choice(scenario, capsys):
    status, _, err = run(capsys, "plan", scenario, "--set", "cluster.link.bandwidth=[1 GB/s, 2 GB/s]")
    assert status == 2
    assert "cluster.link.bandwidth: a list is no choice of ours here" in err


def test_past_runs_tell_how_far_to_trust_a_margin(scenario, capsys, tmp_path):
    for name, error in (("a", 0.5), ("b", -0.3)):
        record(tmp_path, replace(RUN, name=name, error=error))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "compare.json").write_text("[]")
    _, out, _ = run(capsys, "plan", scenario, "--runs", tmp_path)
    assert "less than the 40.0% by which predictions were off here, over 2 runs" in " ".join(out.split())


def test_a_plan_file_cannot_be_overridden(scenario, capsys, tmp_path):
    run(capsys, "plan", scenario, "--out", tmp_path / "plan.yaml")
    status, _, err = run(capsys, "simulate", tmp_path / "plan.yaml", "--set", "plan.stages=2")
    assert status == 2
    assert "is a plan, which is fixed" in err


@pytest.mark.parametrize("target", ["torchtitan", "megatron", "deepspeed", "slurm"])
def test_export_writes_a_file_and_says_what_it_cannot_express(scenario, capsys, tmp_path, target):
    run(capsys, "plan", scenario, "--set", "plan.schedule=gpipe", "--out", tmp_path / "plan.yaml")
    status, out, err = run(capsys, "export", tmp_path / "plan.yaml", "--to", target)
    assert status == 0
    assert len(out) > 200
    if target in ("megatron", "deepspeed"):
        assert "gpipe" in err.lower() or "1f1b" in err.lower()
    status, nothing, err = run(capsys, "export", tmp_path / "plan.yaml", "--to", target, "--out", tmp_path / "out")
    assert nothing == ""
    assert (tmp_path / "out").read_text() == out


def test_a_plan_whose_name_is_no_text_cannot_be_named_in_what_is_exported(scenario, tmp_path):
    odd = scenario.rename(tmp_path / "odd\udcff.yaml")
    odd.write_text(SCENARIO + "plan: {stages: 2, microbatches: 4}\n")
    command = [sys.executable, "-m", "gpipe_sim.cli", "export", odd, "--to", "slurm", "--out", tmp_path / "job.sh"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "odd\\udcff.yaml: has a name that is not text in UTF-8" in done.stderr
    assert not (tmp_path / "job.sh").exists()
