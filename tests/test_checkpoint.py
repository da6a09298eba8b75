"""Checkpoints: whole or not there, of this model or refused, and runs that go on after a rank was killed."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from processes import run_ranks, torchrun  # noqa: E402

from gpipe_exec import Pipeline, read_model  # noqa: E402
from gpipe_exec.engine.checkpoint import CheckpointError, whole_checkpoints  # noqa: E402

sys.path.append(str(Path(__file__).parent / "workers"))

import replanned  # noqa: E402
import training  # noqa: E402


def saved(folder, *steps, layers=None):
    pipe = Pipeline(layers or training.model(), training.plan_of(), training.over_tokens)
    for step in steps:
        pipe.save(folder, None, step)
    pipe.close()


def loaded(folder, layers=None):
    pipe = Pipeline(layers or training.model(), training.plan_of(), training.over_tokens)
    try:
        return pipe.load(folder, None)
    finally:
        pipe.close()


def test_where_nothing_was_saved_there_is_nothing_to_go_on_from(tmp_path):
    assert loaded(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="nowhere: there is no checkpoint"):
        read_model(tmp_path / "nowhere")


def test_the_last_whole_checkpoint_is_taken_and_half_written_ones_are_removed(tmp_path):
    saved(tmp_path, 1, 2, 3)
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["00000002", "00000003"]
    (tmp_path / "00000003").rename(tmp_path / "writing-00000004")
    (tmp_path / "00000009").mkdir()
    assert loaded(tmp_path) == {"step": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000009"]


def test_random_states_go_on(tmp_path):
    def draw():
        return random.random(), np.random.random(), float(torch.rand(1))

    saved(tmp_path, 1)
    expected = draw()
    loaded(tmp_path)
    assert draw() == expected


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    saved(tmp_path, 1)
    other = training.model()
    other[7] = torch.nn.Linear(training.WIDTH, 3).double()
    with pytest.raises(
        CheckpointError, match=r"not a checkpoint of this model: 7.weight is of shape \(7, 6\), expected"
    ):
        loaded(tmp_path, other)


def test_a_run_whose_ranks_are_killed_anywhere_ends_as_if_nothing_had_happened(tmp_path):
    """Before a step, in a forward, at an update, while a checkpoint is written, before it gets its name, and after."""
    options = ("--max-restarts", "6", "--monitor-interval", "0.1")
    printed = torchrun(2, "restarts.py", tmp_path, launcher=options)
    assert "attempt 6 ended as if nothing had happened" in printed


def undisturbed_losses():
    """Of one process on the whole batches."""
    whole = training.model()
    optimizer = torch.optim.Adam(whole.parameters(), lr=0.05)
    for step in range(replanned.STEPS):
        inputs, targets = training.batch(step)
        loss = training.mean_over_tokens(whole(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


def test_with_fewer_processes_a_killed_run_plans_again_and_goes_on_with_the_losses_of_an_undisturbed_one(tmp_path):
    """Three ranks until one is killed before step 5, two from the checkpoint of step 4 on."""
    run_ranks(3, "replanned.py", tmp_path, 5, fails=True)
    said = run_ranks(2, "replanned.py", tmp_path, -1)
    assert said.startswith("2 processes for a plan of 3 ranks, planned again: K=2, M=4, 1f1b, recompute all stages: ")
    assert said.count("planned again") == 1
    told = [line.split() for line in (tmp_path / "losses").read_text().splitlines()]
    assert [(int(K), int(step)) for K, step, _ in told] == [(3, n) for n in range(5)] + [(2, n) for n in range(4, 8)]
    expected = list(undisturbed_losses())
    for _, step, loss in told:
        assert float.fromhex(loss) == pytest.approx(expected[int(step)], rel=1e-9), f"step {step}"
