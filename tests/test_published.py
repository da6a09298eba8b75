"""Published figures that follow exactly from published inputs."""

import pytest
from plans import equal_stages, layers, plan

from gpipe_sim.metrics import bubble_fraction, pipeline_time_s
from gpipe_sim.simulate import simulate

# Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241. Table 9: profiled T_F, T_B, T_W and T_comm in
# milliseconds for 8 stages and m micro-batches; Table 5: the bubble rate of 1F1B computed from them.
ZERO_BUBBLE = {
    ("1.5B", 24): (18.522, 18.086, 9.337, 0.601, 0.2431),
    ("1.5B", 32): (18.513, 18.086, 9.331, 0.626, 0.1985),
    ("1.5B", 64): (18.546, 18.097, 9.321, 0.762, 0.1240),
    ("6.2B", 24): (29.718, 29.444, 19.927, 0.527, 0.2347),
    ("6.2B", 32): (29.802, 29.428, 19.530, 0.577, 0.1898),
    ("6.2B", 64): (29.935, 29.621, 19.388, 0.535, 0.1091),
}


@pytest.mark.parametrize(("model", "m"), ZERO_BUBBLE)
def test_1f1b_bubble_rates_of_zero_bubble_follow_from_its_profiled_times(model, m):
    forward, backward, weight, comm, published = ZERO_BUBBLE[model, m]
    stages = layers([forward / 1e3] * 8, [(backward + weight) / 1e3] * 8)
    made = plan(stages, m, schedule="1f1b", latency=comm / 1e3)
    assert round(bubble_fraction(simulate(made)), 4) == published


@pytest.mark.parametrize("M", [1, 2, 4, 32])
def test_one_device_that_recomputes_all_but_the_last_micro_batch_takes_3m_plus_m_minus_1(M):
    """torchgpipe measured 0.858 of the throughput without recomputation for M = 2; 3M / (3M+M-1) is 0.857."""
    without, with_it = (
        pipeline_time_s(simulate(equal_stages(1, M, checkpoint=mode))) for mode in ("never", "except_last")
    )
    assert without / with_it == pytest.approx(3 * M / (3 * M + M - 1))


def test_four_stages_and_four_micro_batches_take_14_unit_steps():
    """S. Boehm, Pipeline-Parallelism: forward and backward of one unit each."""
    assert pipeline_time_s(simulate(equal_stages(4, 4, f=1.0, b=1.0))) == 14


def test_1f1b_holds_four_micro_batches_where_gpipe_holds_eight():
    """The same article, for four stages and eight micro-batches."""
    held = {}
    for schedule in ("gpipe", "1f1b"):
        curve = simulate(equal_stages(4, 8, schedule=schedule)).memory[0]
        held[schedule] = curve.parts["activations"].max() / 4.0
    assert held == {"gpipe": 8, "1f1b": 4}
