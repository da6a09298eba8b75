"""Execution with real processes and real tensors: the pipeline computes what one process computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

TESTS = Path(__file__).parent


def torchrun(num_processes: int, worker: str) -> str:
    """Run a worker script with one process per rank; its failure is the test's."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    done = subprocess.run(
        [*command, str(TESTS / "workers" / worker)],
        env=os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
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
