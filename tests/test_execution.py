"""Execution with real processes and real tensors: the pipeline computes what one process computes."""

from dataclasses import replace

import pytest
from plans import layers, plan
from processes import run_ranks

from gpipe_sim.plan.order import ActionList

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from gpipe_exec.alternatives.torch_engine import what_torch_cannot  # noqa: E402


@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_three_steps_of_any_plan_equal_three_steps_of_one_process_on_the_whole_batch(K):
    """Loss, gradients, parameters and evaluation, in float64: every schedule, M = 1..8 of a batch of 11, every
    checkpoint and recompute mode, windows, blocking sends, placements, nested values between stages. Of 284 plans each
    runs with two of the numbers of ranks."""
    assert "142 plans are exact" in run_ranks(K, "exactness.py")


@pytest.mark.parametrize("K", [1, 2, 3])
def test_dropout_is_recomputed_identically_and_batchnorm_averages_over_the_mini_batch(K):
    assert "dropout and batchnorm are exact" in run_ranks(K, "randomness.py")


@pytest.mark.parametrize("K", [1, 2, 4])
def test_the_same_on_gpus(K):
    if torch.accelerator.device_count() < K:
        pytest.skip(f"needs {K} GPUs")
    assert "284 plans are exact" in run_ranks(K, "exactness.py", GPIPE_TEST_DEVICE="cuda")


def test_a_form_that_changes_is_told_again_and_never_read_into_a_buffer_of_another():
    """Other lengths, autocast switched on and off, shapes that depend on the data, and edges without any gradient."""
    assert "every form arrives" in run_ranks(2, "forms.py")


def test_clocks_of_ranks_agree_with_themselves():
    """Asked over the network, the offset of a clock to itself is zero up to the time that the answer takes."""
    assert "clocks agree" in run_ranks(3, "clocks.py")


# --- torch's own engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("K", "num_plans", "num_loaded"), [(1, 108, 50), (2, 105, 50), (3, 96, 50)])
def test_torchs_engine_computes_the_same_gradients(K, num_plans, num_loaded):
    """Twice, in float64, with spans in the order of our program: every schedule, with and without recomputation, M = 1
    to 6; by each of torch's classes, and by its runtime from files, with placements and orders drawn at random."""
    printed = run_ranks(K, "torch_engine.py")
    assert f"{num_plans} plans are exact" in printed
    assert f"{num_loaded} _PipelineScheduleRuntime" in printed
    for name in (
        "GPipe",
        "1F1B",
        "LoopedBFS",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ):
        assert f" Schedule{name}" in printed


FITS_TORCH = {"backward": "fifo", "checkpoint": "never", "recompute": "on_demand"}


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({}, None),
        ({"schedule": "1f1b"}, None),
        ({"checkpoint": "always"}, None),
        ({"backward": "reverse"}, None),
        ({"checkpoint": "except_last"}, "all micro-batches of a stage or none"),
        ({"checkpoint": {"per_stage": ["always", "never"]}}, None),
        ({"checkpoint": "always", "recompute": "early"}, "when the gradient has arrived"),
        ({"batch": 5}, "micro-batches of one size"),
        ({"schedule": "1f1b", "microbatches": 1}, None),
        ({"schedule": "naive", "microbatches": 1}, None),
        ({"schedule": "zb_h1"}, None),
        ({"schedule": "zb_h1", "checkpoint": "always"}, "recomputes twice where a backward is split"),
        ({"schedule": "interleaved_1f1b", "stages_per_rank": 2, "checkpoint": "always"}, None),
        ({"cluster": {"overlap": False}}, "does not wait for its sends"),
        ({"placement": [1, 0]}, None),
    ],
)
def test_what_torchs_engine_cannot_do_is_said(choices, reason):
    costs = layers([1.0, 1.0], [2.0, 2.0], weights=[1.0, 1.0])
    made = plan(costs, **{"microbatches": 4, "stages": 2} | FITS_TORCH | choices)
    said = list(what_torch_cannot(made, "cpu"))
    assert said == [] if reason is None else reason in " ".join(said)


def test_torchs_engine_counts_losses_as_they_come_and_refuses_an_order_that_mixes_them():
    made = plan(layers([1.0]), microbatches=2)
    order = (ActionList.of([("F", 0, 1), ("F", 0, 0), ("B", 0, 0), ("B", 0, 1)]),)
    (said,) = what_torch_cannot(replace(made, schedule="any.csv", order=order), "cpu")
    assert "expected the last stage's forwards in the order of micro-batches" in said
    (said,) = what_torch_cannot(made, "rehearse")
    assert said == "computes, expected --device cpu or cuda"


@pytest.mark.parametrize(("K", "D"), [(1, 2), (2, 2), (1, 4)])
def test_replicas_compute_what_one_process_computes_of_the_whole_batch(K, D, tmp_path):
    """Equal and unequal shares, losses that count, gradients that add up, clipping, running averages, checkpoints."""
    number = 9 if K == 1 else 24
    assert f"{number} plans of {D} replicas are exact" in run_ranks(K * D, "replicas.py", K, tmp_path)
