"""Execution with real processes and real tensors: the pipeline computes what one process computes."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plans import layers, plan

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from gpipe_exec.torch_engine import what_torch_cannot  # noqa: E402

TESTS = Path(__file__).parent


def torchrun(num_processes: int, worker: str, **environment: str) -> str:
    """Run a worker script with one process per rank; its failure is the test's."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    done = subprocess.run(
        [*command, str(TESTS / "workers" / worker)],
        env=os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_three_steps_of_any_plan_equal_three_steps_of_one_process_on_the_whole_batch(K):
    """Loss, gradients, parameters and evaluation, in float64: every schedule, M = 1..8 of a batch of 11, every
    checkpoint and recompute mode, windows, blocking sends, placements, nested values between stages."""
    assert "152 plans are exact" in torchrun(K, "exactness.py")


@pytest.mark.parametrize("K", [1, 2, 3])
def test_dropout_is_recomputed_identically_and_batchnorm_averages_over_the_mini_batch(K):
    assert "dropout and batchnorm are exact" in torchrun(K, "randomness.py")


@pytest.mark.parametrize("K", [1, 2, 4])
def test_the_same_on_gpus(K):
    if torch.cuda.device_count() < K:
        pytest.skip(f"needs {K} GPUs")
    assert "152 plans are exact" in torchrun(K, "exactness.py", GPIPE_TEST_DEVICE="cuda")


def test_clocks_of_ranks_agree_with_themselves():
    """Asked over the network, the offset of a clock to itself is zero up to the time that the answer takes."""
    assert "clocks agree" in torchrun(3, "clocks.py")


# --- torch's own engine ----------------------------------------------------------------------------------------------


def test_torchs_engine_computes_the_same_gradients():
    assert "8 plans are exact" in torchrun(2, "torch_engine.py")


FITS_TORCH = {"backward": "fifo", "checkpoint": "never", "recompute": "on_demand"}


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({}, None),
        ({"schedule": "1f1b"}, None),
        ({"checkpoint": "always"}, None),
        ({"backward": "reverse"}, "first in first out"),
        ({"checkpoint": "except_last"}, "all micro-batches of all stages or none"),
        ({"checkpoint": {"per_stage": ["always", "never"]}}, "all micro-batches of all stages or none"),
        ({"checkpoint": "always", "recompute": "early"}, "when the gradient has arrived"),
        ({"batch": 5}, "micro-batches of one size"),
        ({"schedule": "1f1b", "microbatches": 1}, "as many micro-batches as stages"),
        ({"schedule": "naive", "microbatches": 1}, "no schedule naive"),
        ({"cluster": {"overlap": False}}, "does not wait for its sends"),
        ({"placement": [1, 0]}, "stage k on rank k"),
    ],
)
def test_what_torchs_engine_cannot_do_is_said(choices, reason):
    made = plan(layers([1.0, 1.0]), **{"microbatches": 4, "stages": 2} | FITS_TORCH | choices)
    said = list(what_torch_cannot(made, "cpu"))
    assert said == [] if reason is None else reason in " ".join(said)


def test_torchs_engine_does_not_run_another_schedule_in_place_of_one_that_it_does_not_know():
    made = plan(layers([1.0, 1.0]), **{"microbatches": 4, "stages": 2} | FITS_TORCH)
    assert list(what_torch_cannot(replace(made, schedule="eager"), "cpu")) == [
        "has no schedule eager, expected gpipe or 1f1b"
    ]
