"""Schedules as lists: the right actions, once each, in the order that the papers draw."""

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import equal_stages, random_plans

from gpipe_sim.scenario import ScheduleName
from gpipe_sim.schedule import SCHEDULES, in_flight, rank_actions, stage_actions


def written(plan, stage: int) -> str:
    return " ".join(str(action) for action in stage_actions(plan, stage))


def test_every_schedule_that_a_scenario_can_name_is_there():
    assert tuple(SCHEDULES) == get_args(ScheduleName)


def test_only_gpipe_has_a_choice_of_backwards():
    assert {equal_stages(2, 1, schedule=name).backward for name in SCHEDULES if name != "gpipe"} == {"fifo"}


def test_naive_sends_the_whole_batch_through():
    plan = equal_stages(3, 1, batch=6, schedule="naive")
    assert written(plan, 1) == "1F0 1B0 1U"
    assert plan.sizes == (6,)


def test_gpipe_runs_backwards_in_reverse_order_of_micro_batches():
    assert written(equal_stages(2, 3), 0) == "0F0 0F1 0F2 0B2 0B1 0B0 0U"


def test_gpipe_can_run_backwards_first_in_first_out():
    assert written(equal_stages(2, 3, backward="fifo"), 1) == "1F0 1F1 1F2 1B0 1B1 1B2 1U"


def test_1f1b_warms_up_by_one_forward_less_on_each_stage():
    plan = equal_stages(3, 4, schedule="1f1b")
    assert written(plan, 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0U"
    assert written(plan, 1) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1U"
    assert written(plan, 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2U"


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(K=st.integers(1, 6), M=st.integers(1, 8))
def test_so_many_micro_batches_are_in_flight_as_the_order_of_actions_says(schedule, K, M):
    for stage in range(K):
        order = SCHEDULES[schedule](stage, K, 1 if schedule == "naive" else M, "fifo")
        held = itertools.accumulate(1 if kind == "F" else -1 for kind, _ in order)
        assert in_flight(schedule, stage, K, 1 if schedule == "naive" else M) == max(held)


def test_recomputation_stands_directly_before_its_backward():
    assert written(equal_stages(2, 2, checkpoint="always"), 0) == "0F0 0F1 0R1 0B1 0R0 0B0 0U"
    assert (
        written(equal_stages(2, 3, checkpoint="always", schedule="1f1b"), 0) == "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2 0U"
    )


def test_except_last_spares_the_last_micro_batch():
    assert written(equal_stages(2, 3, checkpoint="except_last"), 0) == "0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0 0U"


def test_checkpoint_may_differ_by_stage():
    plan = equal_stages(2, 2, checkpoint={"per_stage": ["always", "never"]})
    assert written(plan, 0) == "0F0 0F1 0R1 0B1 0R0 0B0 0U"
    assert written(plan, 1) == "1F0 1F1 1B1 1B0 1U"


def test_placement_sets_which_rank_runs_which_stage():
    lists = rank_actions(equal_stages(3, 1, placement=[2, 0, 1]))
    assert [actions[0].stage for actions in lists] == [1, 2, 0]


@given(random_plans())
def test_every_action_happens_exactly_once_and_in_a_possible_order(plan):
    for stage in range(plan.num_stages):
        actions = stage_actions(plan, stage)
        assert len(set(actions)) == len(actions)
        place = {(action.kind, action.microbatch): row for row, action in enumerate(actions)}
        again = plan.recomputed(stage)
        assert len(actions) == 2 * plan.num_microbatches + sum(again) + 1
        for microbatch in range(plan.num_microbatches):
            assert place["F", microbatch] < place["B", microbatch]
            if again[microbatch]:
                assert place["F", microbatch] < place["R", microbatch] == place["B", microbatch] - 1
        assert actions[-1].kind == "U"
