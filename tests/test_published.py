"""A published figure that is not in a table: it follows from the schedule alone. The others are in test_evidence.py."""

import pytest
from plans import equal_stages

from gpipe_sim.step.metrics import pipeline_time_s
from gpipe_sim.step.simulate import simulate


@pytest.mark.parametrize("M", [1, 2, 4, 32])
def test_one_device_that_recomputes_all_but_the_last_micro_batch_takes_3m_plus_m_minus_1(M):
    """torchgpipe measured 0.858 of the throughput without recomputation for M = 2; 3M / (3M+M-1) is 0.857."""
    without, with_it = (
        pipeline_time_s(simulate(equal_stages(1, M, checkpoint=mode))) for mode in ("never", "except_last")
    )
    assert without / with_it == pytest.approx(3 * M / (3 * M + M - 1))
