"""The program: the right actions, once each, in the order that the papers draw, and messages between them."""

import itertools
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import equal_stages, random_order, random_plans

from gpipe_sim.plan.order import ActionList
from gpipe_sim.plan.orders import SCHEDULES
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import DeadlockError, compile_program, program_of, rank_actions
from gpipe_sim.scenario.schema import ScheduleName
from gpipe_sim.step.waves import make_graph


def written(plan, stage: int) -> str:
    return " ".join(map(str, program_of(plan).order[plan.positions[stage]]))


def test_every_schedule_that_a_scenario_can_name_is_there():
    assert tuple(SCHEDULES) == get_args(ScheduleName)


def test_only_breadth_first_schedules_have_a_choice_of_backwards():
    choosing = ("gpipe", "interleaved_gpipe")
    assert {equal_stages(2, 1, schedule=name).backward for name in SCHEDULES if name not in choosing} == {"fifo"}


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
    program = program_of(plan)
    for position, actions in enumerate(program.order):
        assert len(set(actions)) == len(actions)
        assert {action.stage for action in actions} == set(plan.stages_of(plan.pipeline[position]))
        place = {action: row for row, action in enumerate(actions)}
        assert actions[-1].kind == "U"
        for stage in plan.stages_of(plan.pipeline[position]):
            for m, again in enumerate(plan.recomputed(stage)):
                forward, backward = place["F", stage, m], place.get(("B", stage, m), place.get(("I", stage, m)))
                assert forward < backward
                assert (("B", stage, m) in place) != (("I", stage, m) in place)
                assert (("I", stage, m) in place) == (("W", stage, m) in place)
                assert place.get(("W", stage, m), backward) >= backward
                assert (("R", stage, m) in place) == again
                if again:
                    assert forward < place["R", stage, m] == backward - 1


# --- messages ------------------------------------------------------------------------------------------------------


def anywhere(data, schedule: str = "any.csv") -> Plan:
    """Stages on any ranks, in an order drawn from all that can finish."""
    K, S, M = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    placement = data.draw(st.lists(st.integers(0, K - 1), min_size=S, max_size=S))
    named = equal_stages(S, M, checkpoint=data.draw(st.sampled_from(["never", "always", "except_last"])))
    plan = replace(named, placement=tuple(placement), schedule=schedule)
    return replace(plan, order=random_order(plan.positions, M, data.draw(st.randoms(use_true_random=False))))


@given(st.data())
def test_messages_go_between_ranks_only_each_from_the_action_that_makes_it_to_the_one_that_needs_it(data):
    plan = anywhere(data)
    senders, edges = program_of(plan).senders(), itertools.pairwise(plan.positions)
    crossing = {stage for stage, (here, there) in enumerate(edges) if here != there}
    assert len(senders) == 2 * plan.num_microbatches * len(crossing)
    for taker, sender in senders.items():
        assert taker.microbatch == sender.microbatch
        assert min(taker.stage, sender.stage) in crossing
        assert abs(taker.stage - sender.stage) == 1
        assert sender.kind == "F" if taker.kind == "F" else sender.kind in "BI"
        assert (taker.stage > sender.stage) == (taker.kind == "F")


@given(st.data(), st.sampled_from([1, 2, None]))
def test_a_receive_is_posted_when_an_earlier_message_of_its_channel_is_taken(data, window):
    program, M = program_of(plan := anywhere(data)), plan.num_microbatches
    poster = program.poster(window)
    for first in range(0, program.num_messages, M):
        takers = np.sort(program.taker[first : first + M])
        for message in range(first, first + M):
            place = int(np.searchsorted(takers, program.taker[message]))
            assert program.turn[message] == place
            ahead = M if window is None else window
            assert poster[message] == (takers[place - ahead] if place >= ahead else -1)


def test_channels_between_the_same_two_ranks_share_a_wire_and_are_served_in_the_order_of_sending():
    plan = equal_stages(4, 2, schedule="interleaved_gpipe", stages_per_rank=2)
    program = program_of(plan)
    shared = [message for message, before in enumerate(program.wired_after) if before >= 0]
    pairs = [(program.sender[program.wired_after[message]], program.sender[message]) for message in shared]
    assert pairs
    assert all(before < after for before, after in pairs)
    assert (program_of(equal_stages(4, 2)).wired_after == -1).all()


def test_an_order_in_which_a_rank_has_something_before_what_it_needs_is_refused():
    made = equal_stages(2, 1, placement=[0, 1])
    together = replace(made, placement=(0, 0), schedule="any.csv")
    order = (ActionList.of([("F", 1, 0), ("F", 0, 0), ("B", 1, 0), ("B", 0, 0)]),)
    with pytest.raises(DeadlockError, match="1F0 comes before 0F0"):
        program_of(replace(together, order=order))


def test_a_message_may_go_from_any_stage_to_any_later_one():
    """A skip connection from the first of three ranks to the last, beside the chain: the last waits for both."""
    made = equal_stages(3, 1)
    routes = [(0, 1), (1, 2), (0, 2)]
    program = compile_program(program_of(made).order, made.positions, routes=routes)
    last = program.at["F"][2, 0]
    assert sorted(program.action(int(program.sender[m]))[1] for m in program.takes[last]) == [("F", 0, 0), ("F", 1, 0)]
    graph = make_graph(program, None, blocking=False)
    seconds = np.zeros((len(graph.letters) * 3 + 3, 1))
    seconds[:3] = 1.0  # F of each stage
    latency = np.array([[5.0], [0.0]])  # by edge: the earlier stage of a channel
    times = graph.times(seconds, np.zeros((2, 1)), latency)
    assert times[graph.end[last], 0] == 1 + 5 + 1 + 1  # the chain's first hop is late, and so is the skip
