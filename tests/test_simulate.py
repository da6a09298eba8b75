"""The event simulation obeys the laws of pipelines: closed forms, causality, monotonicity, fair sharing."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plans import ONE_STAGE, equal_stages, layers, plan, random_plans, seconds

from gpipe_sim.plan.actions import Action
from gpipe_sim.plan.figures import rank_work_s
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import DeadlockError, program_of, rank_actions
from gpipe_sim.step.metrics import bubble_fraction, bubble_ideal, pipeline_time_s, step_time_s
from gpipe_sim.step.simulate import simulate

EXACT = 1e-9


def time_of(plan: Plan) -> float:
    return pipeline_time_s(simulate(plan, memory=False))


# --- closed forms --------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 40), st.sampled_from(["gpipe", "1f1b"]))
def test_bubble_equals_closed_form_for_equal_stages(K, M, schedule):
    step = simulate(equal_stages(K, M, schedule=schedule))
    assert bubble_fraction(step) == pytest.approx((K - 1) / (M + K - 1), abs=EXACT)
    assert bubble_ideal(schedule, K, M) == pytest.approx((K - 1) / (M + K - 1), abs=EXACT)


@given(st.integers(1, 6), st.integers(1, 12))
def test_bubble_equals_closed_form_when_everything_is_recomputed_on_demand(K, M):
    step = simulate(equal_stages(K, M, checkpoint="always", recompute="on_demand"))
    assert bubble_fraction(step) == pytest.approx((K - 1) / (M + K - 1), abs=EXACT)


def test_bubble_of_four_stages_is_three_quarters_with_one_micro_batch_and_three_35ths_with_32():
    assert bubble_fraction(simulate(equal_stages(4, 1))) == pytest.approx(0.75, abs=EXACT)
    assert bubble_fraction(simulate(equal_stages(4, 32))) == pytest.approx(3 / 35, abs=EXACT)


def test_naive_keeps_one_device_in_k_busy():
    assert bubble_fraction(simulate(equal_stages(4, 1, batch=16, schedule="naive"))) == pytest.approx(0.75, abs=EXACT)


def test_early_recompute_fills_part_of_the_bubble():
    early = simulate(equal_stages(4, 4, checkpoint="always"))
    late = simulate(equal_stages(4, 4, checkpoint="always", recompute="on_demand"))
    assert bubble_fraction(early) == pytest.approx(0.36, abs=EXACT)
    assert bubble_fraction(late) == pytest.approx(3 / 7, abs=EXACT)


@given(st.integers(1, 6), st.integers(1, 10), seconds, seconds)
def test_equal_stages_have_closed_form_times_in_every_recompute_mode(K, M, f, b):
    r = f
    times = {
        ("always", "on_demand"): (M + K - 1) * (f + r + b),
        ("always", "early"): (M + K - 1) * (f + b) + M * r,
        ("except_last", "early"): (M + K - 1) * (f + b) + (M - 1) * r,
    }
    for (mode, recompute), expected in times.items():
        made = equal_stages(K, M, f=f, b=b, checkpoint=mode, recompute=recompute)
        assert time_of(made) == pytest.approx(expected, rel=EXACT)


@st.composite
def uneven_gpipe(draw):
    """f, b over stages and c over links, with a latency, and M."""
    K = draw(st.integers(1, 6))
    f, b = (draw(st.lists(seconds, min_size=K, max_size=K)) for _ in range(2))
    c = draw(st.lists(st.floats(0.0, 12.0), min_size=K - 1, max_size=K - 1))
    return f, b, c, draw(st.floats(0.0, 3.0)), draw(st.integers(1, 9))


def uneven_plan(f, b, c, latency, M, **choices) -> Plan:
    return plan(layers(f, b, [*c, 0.0]), M, bandwidth="1 B/s", latency=latency, **choices)


@given(uneven_gpipe(), st.booleans())
def test_gpipe_equals_closed_form_for_uneven_stages_and_links_without_or_with_on_demand_recompute(case, recomputed):
    f, b, c, latency, M = case
    choices = {"checkpoint": "always", "recompute": "on_demand"} if recomputed else {}
    backward = [x + y for x, y in zip(f, b, strict=True)] if recomputed else b
    way = sum(c) + latency * len(c)
    expected = sum(f) + way + (M - 1) * max(f + c) + sum(backward) + way + (M - 1) * max(backward + c)
    assert time_of(uneven_plan(*case, **choices)) == pytest.approx(expected, rel=EXACT)


@given(uneven_gpipe())
def test_gpipe_equals_closed_form_with_early_recompute_where_recomputation_hides(case):
    f, b, c, latency, M = case
    r, way = f, sum(c) + latency * len(c)
    for k in range(len(f)):
        rest = sum(f[j] + b[j] for j in range(k + 1, len(f))) + 2 * sum(x + latency for x in c[k:])
        assume(r[k] <= r[-1] + rest)
    both = [x + y for x, y in zip(r, b, strict=True)]
    expected = sum(f) + way + (M - 1) * max(f + c) + r[-1] + sum(b) + way + (M - 1) * max(both + c)
    assert time_of(uneven_plan(*case, checkpoint="always")) == pytest.approx(expected, rel=EXACT)


# --- causality -----------------------------------------------------------------------------------------------------


def enabling_times(plan: Plan) -> dict[Action, float]:
    """When each action ends, as the least solution of the model's equations, found by iterating them from zero.

    An independent statement of the model: an action is taken when its rank is free and its message there; a message
    starts when it is sent, its link free and its receive posted; a blocking rank is free when its message is there.
    """
    K, M, on_demand = plan.num_stages, plan.num_microbatches, plan.recompute == "on_demand"
    lists = {actions[0].stage: actions for actions in rank_actions(plan)}
    overhead, hop = plan.profile.action_overhead_s, plan.profile.hop_overhead_s
    seconds = {"F": plan.forward_s, "R": plan.forward_s, "B": plan.backward_s}
    takes: dict[tuple[str, int], list[Action]] = {}
    for k in range(K):
        takes["F", k] = [a for a in lists[k] if a.kind == "F"]
        again = [on_demand and recomputed for recomputed in plan.recomputed(k)]
        takes["B", k] = [a for a in lists[k] if a.kind in "RB" and again[a.microbatch] == (a.kind == "R")]
    taken: dict[Action, float] = {}
    end: dict[Action, float] = {}
    arrival: dict[Action, float] = {}
    for _ in range(4 * K * M + 10):
        before = dict(end), dict(arrival)
        for k in range(K):
            free = 0.0
            for action in lists[k]:
                kind, _, m = action
                needs = Action("F", k - 1, m) if kind == "F" else Action("B", k + 1, m)
                ready = (
                    arrival.get(needs, 0.0)
                    if 0 <= needs.stage < K and action in takes["F" if kind == "F" else "B", k]
                    else 0.0
                )
                taken[action] = max(free, ready)
                work = plan.update_s[k] if kind == "U" else seconds[kind][k, m]
                end[action] = free = taken[action] + overhead + work
                if not plan.scenario.cluster.overlap:
                    free = max(free, arrival.get(action, 0.0))
            for kind, there, edge in (("F", k + 1, k), ("B", k - 1, k - 1)):
                if not 0 <= there < K:
                    continue
                link, order = plan.link(edge), [a.microbatch for a in takes[kind, there]]
                link_free = 0.0
                for action in [a for a in lists[k] if a.kind == kind]:
                    place = order.index(action.microbatch)
                    posted = 0.0
                    if plan.window is not None and place >= plan.window:
                        posted = taken.get(takes[kind, there][place - plan.window], 0.0)
                    start = max(end[action], link_free, posted)
                    link_free = start + plan.message_bytes[edge, action.microbatch] / link.bandwidth
                    arrival[action] = link_free + link.latency + hop
        if before == (end, arrival):
            return end
    raise AssertionError("the equations have no solution")


@given(random_plans(schedules=ONE_STAGE))
def test_every_action_ends_when_the_equations_of_the_model_say(plan):
    expected = enabling_times(plan)
    for timeline in simulate(plan, memory=False).ranks:
        for row, action in enumerate(timeline.actions):
            assert timeline.end_s[row] == pytest.approx(expected[action], rel=EXACT)


def check_causality(plan: Plan) -> None:
    step = simulate(plan, memory=False)
    end = {action: t.end_s[row] for t in step.ranks for row, action in enumerate(t.actions)}
    tolerance, senders = 1e-9 * step_time_s(step), program_of(plan).senders()
    assert len(end) == sum(len(actions) for actions in rank_actions(plan))
    for timeline in step.ranks:
        assert (timeline.end_s >= timeline.start_s).all()
        assert (timeline.start_s[1:] >= timeline.end_s[:-1] - tolerance).all(), "spans of a rank never overlap"
        for row, action in enumerate(timeline.actions):
            needs = senders.get(action)
            assert np.isnan(timeline.arrived_s[row]) == (needs is None)
            if needs is not None:
                edge = min(action.stage, needs.stage)
                transfer = plan.message_bytes[edge, action.microbatch] / plan.link(edge).bandwidth
                transfer += plan.link(edge).latency
                assert timeline.arrived_s[row] >= end[needs] + transfer - tolerance
                assert timeline.start_s[row] >= timeline.arrived_s[row] - tolerance


@given(random_plans())
def test_no_action_starts_before_its_inputs_and_each_happens_once(plan):
    check_causality(plan)


@given(random_plans(shared=True))
def test_an_action_starts_an_overhead_after_its_rank_turns_to_it(plan):
    for timeline in simulate(plan, memory=False).ranks:
        assert (timeline.start_s == timeline.taken_s + plan.profile.action_overhead_s).all()


@given(random_plans(shared=True))
def test_the_same_holds_where_nics_and_cores_are_shared(plan):
    check_causality(plan)


@given(random_plans(shared=True))
def test_the_step_takes_at_least_each_rank_its_own_work_and_no_longer_than_everything_in_turn(plan):
    step = simulate(plan, memory=False)
    work = rank_work_s(plan)
    assert step_time_s(step) >= work.max() * (1 - EXACT)
    if not plan.shared_nics and not plan.crowded_nodes:
        hop = plan.profile.hop_overhead_s
        way = [
            float((plan.message_bytes[k] / plan.link(k).bandwidth + plan.link(k).latency + hop).sum())
            for k in range(plan.num_stages - 1)
        ]
        overhead = plan.profile.action_overhead_s * sum(map(len, rank_actions(plan)))
        assert step_time_s(step) <= (work.sum() + overhead + plan.update_s.sum() + 2 * sum(way)) * (1 + EXACT)


# --- monotonicity --------------------------------------------------------------------------------------------------


@given(random_plans())
def test_early_recompute_is_never_slower_than_on_demand(plan):
    """Where every receive is posted at once: a recomputation on demand takes the gradient sooner, which posts the next
    receive, so that with a window it may be the faster one."""
    early, late = (time_of(replace(plan, recompute=mode, window=None)) for mode in ("early", "on_demand"))
    assert early <= late * (1 + EXACT)


@given(random_plans(), st.data())
def test_a_faster_stage_or_link_never_makes_a_step_slower_when_nothing_is_shared(plan, data):
    before = time_of(plan)
    stage = data.draw(st.integers(0, plan.num_stages - 1))
    column = data.draw(st.sampled_from(["forward_s", "backward_s", "output_bytes"]))
    faster = {name: values.copy() for name, values in plan.profile.table.items()}
    faster[column][stage] *= data.draw(st.floats(0.1, 1.0))
    profile = replace(plan.profile, table=faster)
    assert time_of(replace(plan, profile=profile)) <= before * (1 + EXACT)


@given(random_plans(), st.floats(1.0, 10.0), st.sampled_from(["bandwidth", "latency"]))
def test_a_faster_network_never_makes_a_step_slower_when_nothing_is_shared(plan, factor, figure):
    link = plan.scenario.cluster.link
    better = {"bandwidth": link.bandwidth * factor} if figure == "bandwidth" else {"latency": link.latency / factor}
    cluster = plan.scenario.cluster.model_copy(update={"link": replace(link, **better)})
    faster = replace(plan, scenario=replace(plan.scenario, cluster=cluster))
    assert time_of(faster) <= time_of(plan) * (1 + EXACT)


@given(random_plans())
def test_a_wider_receive_window_never_makes_a_step_slower(plan):
    """Nor one that finishes one that does not: with several stages on a rank, senders that wait may wait for ever."""

    def time_with(window):
        try:
            return time_of(replace(plan, window=window))
        except DeadlockError:
            return np.inf

    times = [time_with(window) for window in (1, 2, None)]
    assert times[0] >= times[1] * (1 - EXACT)
    assert times[1] >= times[2] * (1 - EXACT)


def test_with_a_shared_nic_a_faster_stage_can_make_the_step_slower():
    cluster = {"nodes": 2, "devices_per_node": 2, "network": {"bandwidth": "1 B/s", "latency": "0 s"}}
    before, after = (
        time_of(
            plan(
                layers([1.0, 1.0, 1.0, 3.0], [6.0, 3.0, 1.0, last], [1.0, 4.0, 1.0, 0.0]),
                3,
                schedule="1f1b",
                placement=[0, 2, 1, 3],
                cluster=cluster,
            )
        )
        for last in (3.0, 2.25)
    )
    assert after > before * 1.01, "an earlier gradient takes bandwidth from a message that mattered more"


def test_with_shared_cores_a_faster_link_can_make_the_step_slower():
    before, after = (
        time_of(
            plan(
                layers([1.0, 3.0, 3.0, 3.0], [2.0, 1.0, 6.0, 3.0], [6.0, 4.0, size, 0.0]),
                3,
                bandwidth="1 B/s",
                placement=[0, 2, 1, 3],
                cluster={"devices_per_node": 4, "cores": 1},
            )
        )
        for size in (2.0, 1.0)
    )
    assert after > before * 1.01, "work that starts earlier takes the core from work that mattered more"


# --- links and windows ---------------------------------------------------------------------------------------------


def test_a_link_carries_messages_one_after_the_other():
    step = simulate(plan(layers([1.0, 1.0], output=[5.0, 0.0]), 3, bandwidth="1 B/s", latency=2.0))
    sent = step.ranks[0]
    assert sent.send_start_s[:3].tolist() == [1.0, 6.0, 11.0]
    assert sent.send_end_s[:3].tolist() == [8.0, 13.0, 18.0]  # the latency delays, it does not occupy


def test_a_message_starts_only_once_its_receive_is_posted():
    wide, narrow = (
        simulate(plan(layers([1.0, 5.0], output=[1.0, 0.0]), 4, bandwidth="1 B/s", window=window)).ranks[0]
        for window in ("all", 1)
    )
    assert wide.send_start_s[:4].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert narrow.send_start_s[:4].tolist() == [1.0, 2.0, 7.0, 12.0]


def test_a_blocking_sender_waits_until_its_message_is_delivered():
    model = layers([1.0, 1.0], [1.0, 1.0], [3.0, 0.0])
    overlapped, blocking = (
        simulate(plan(model, 2, bandwidth="1 B/s", latency=0.5, cluster={"overlap": overlap})).ranks[0]
        for overlap in (True, False)
    )
    assert overlapped.start_s[:2].tolist() == [0.0, 1.0]
    assert blocking.start_s[:2].tolist() == [0.0, 4.5]


def test_an_edge_may_have_a_link_of_its_own():
    model = layers([1.0] * 3, [1.0] * 3, [1.0] * 3)
    slow = {"links": {1: {"bandwidth": "0.1 B/s", "latency": "1 s"}}}
    fast, slowed = (time_of(plan(model, 1, bandwidth="1 B/s", cluster=cluster)) for cluster in ({}, slow))
    assert slowed - fast == pytest.approx(2 * (10 + 1 - 1))


def two_nodes(placement: list[int]) -> Plan:
    model = layers([1.0, 0.0, 1.0, 1.0], [0.0] * 4, [8.0, 0.0, 8.0, 0.0])
    cluster = {"nodes": 2, "devices_per_node": 2, "network": {"bandwidth": "1 B/s", "latency": "0 s"}}
    return plan(model, 2, cluster=cluster, placement=placement)


def test_two_flows_through_one_nic_share_it_fairly():
    step = simulate(two_nodes([0, 2, 1, 3]))
    stage0, stage2 = (next(t for t in step.ranks if t.stages == (k,)) for k in (0, 2))
    # Stage 0 has the NIC alone from 1 s to 10 s: 8 B for its first message, 1 B of its second. Then stage 2's first
    # message joins it at 10 s, and the two take half the bandwidth each for 14 s.
    assert stage0.send_end_s[:2].tolist() == pytest.approx([9.0, 24.0])
    assert stage2.send_start_s[0] == pytest.approx(10.0)
    assert stage2.send_end_s[0] == pytest.approx(25.0)


def test_a_nic_that_only_one_flow_uses_is_not_shared():
    assert not two_nodes([0, 1, 2, 3]).shared_nics
    assert two_nodes([0, 2, 1, 3]).shared_nics


def test_ranks_on_fewer_cores_share_them_fairly():
    # The two stages compute at the same time only in the middle of the forwards, there at half speed each.
    model = layers([1.0, 1.0], [1.0, 1.0])
    alone = time_of(plan(model, 2))
    crowded = time_of(plan(model, 2, cluster={"devices_per_node": 2, "cores": 1}))
    assert alone == pytest.approx(6.0)
    assert crowded == pytest.approx(8.0)


def test_ranks_are_pinned_to_the_cores_in_turns():
    # Ranks 0 and 2 have core 0; rank 1 has core 1 to itself, which is of no use to the others.
    made = plan(layers([1.0] * 3), 3, cluster={"devices_per_node": 3, "cores": 2})
    assert [made.core(position) for position in range(3)] == [0, 1, 0]
    spans = {a: t.end_s[row] - t.start_s[row] for t in simulate(made).ranks for row, a in enumerate(t.actions)}
    taken = {f"{stage}{kind}{m}": seconds for (kind, stage, m), seconds in spans.items()}
    assert [taken[name] for name in ("0F0", "1F0", "1F1")] == pytest.approx([1.0, 1.0, 1.0])
    assert taken["0F2"] == taken["2F0"] == pytest.approx(2.0)
    two_nodes = plan(layers([1.0] * 6), 3, cluster={"nodes": 2, "devices_per_node": 3, "cores": 2, "network": FREE})
    assert [two_nodes.core(position) for position in range(6)] == [0, 1, 0, 0, 1, 0]


FREE = {"bandwidth": "inf GB/s", "latency": "0 s"}


def test_a_free_network_is_not_shared_and_does_not_hang():
    model = layers([1.0] * 4, [1.0] * 4, [8.0] * 4)
    cluster = {"nodes": 2, "devices_per_node": 2, "network": {"bandwidth": "inf GB/s", "latency": "0 s"}}
    assert time_of(plan(model, 2, cluster=cluster, placement=[0, 2, 1, 3])) == pytest.approx(2 * 5)


def test_a_straggler_updates_its_parameters_more_slowly_too():
    made = equal_stages(2, 2, cluster={"devices_per_node": 2, "slowdown": {0: 3.0}})
    slow = replace(made, profile=replace(made.profile, optimizer_s=np.array([1.0, 1.0])))
    updates = [timeline.end_s[-1] - timeline.start_s[-1] for timeline in simulate(slow).ranks]
    assert updates == pytest.approx([3.0, 1.0])


def test_enough_cores_change_nothing():
    model = layers([1.0, 2.0], [1.0, 3.0])
    assert time_of(plan(model, 3, cluster={"devices_per_node": 2, "cores": 2})) == time_of(plan(model, 3))


def test_a_straggler_takes_its_factor_longer():
    step = simulate(equal_stages(3, 4, cluster={"devices_per_node": 3, "slowdown": {1: 1.5}}))
    busy = [timeline.busy_s() for timeline in step.ranks]
    assert busy == pytest.approx([12.0, 18.0, 12.0])


def test_micro_batches_differ_by_one_sample_when_they_do_not_divide_the_batch():
    made = equal_stages(1, 3, batch=8)
    assert made.sizes == (3, 3, 2)
    timeline = simulate(made).ranks[0]
    assert (timeline.end_s - timeline.start_s).tolist() == [3.0, 3.0, 2.0, 4.0, 6.0, 6.0, 0.0]


# --- jitter --------------------------------------------------------------------------------------------------------


def jittery(M: int, K: int = 3, cv: float = 0.2) -> Plan:
    return equal_stages(K, M, cluster={"jitter": {"cv": cv, "samples": 3, "seed": 7}})


def durations(plan: Plan, sample: int) -> dict[Action, float]:
    step = simulate(plan, sample=sample)
    return {a: t.end_s[i] - t.start_s[i] for t in step.ranks for i, a in enumerate(t.actions)}


def test_jitter_is_keyed_by_action_so_that_plans_share_their_luck():
    few, many, fewer_stages = durations(jittery(4), 1), durations(jittery(8), 1), durations(jittery(4, K=2), 1)
    for action in (Action("F", 1, 3), Action("B", 0, 0), Action("B", 1, 2)):
        assert few[action] == pytest.approx(many[action], rel=EXACT)
        assert few[action] == pytest.approx(fewer_stages[action], rel=EXACT)


def test_jitter_differs_between_kinds_stages_and_seeds():
    made = jittery(4)
    found = durations(made, 0)
    forwards = [found[Action("F", stage, 0)] for stage in range(3)]
    assert len(set(forwards)) == 3
    assert found[Action("B", 0, 0)] / 2 != pytest.approx(found[Action("F", 0, 0)])
    other = equal_stages(3, 4, cluster={"jitter": {"cv": 0.2, "samples": 3, "seed": 8}})
    assert durations(other, 0)[Action("F", 0, 0)] != found[Action("F", 0, 0)]


def test_jitter_differs_between_samples_and_repeats_for_the_same_one():
    made = jittery(4)
    assert step_time_s(simulate(made, sample=0)) == step_time_s(simulate(made, sample=0))
    assert step_time_s(simulate(made, sample=0)) != step_time_s(simulate(made, sample=1))


def test_jitter_has_mean_one_and_the_given_coefficient_of_variation():
    made = jittery(2000, K=2, cv=0.3)
    forwards = np.array([d for action, d in durations(made, 0).items() if action.kind == "F"])
    assert forwards.mean() == pytest.approx(1.0, abs=0.03)
    assert forwards.std() == pytest.approx(0.3, abs=0.03)


# --- deadlock ------------------------------------------------------------------------------------------------------


def test_a_schedule_with_other_actions_than_the_plan_is_refused():
    made = equal_stages(2, 2)
    first, second = rank_actions(made)
    with pytest.raises(ValueError, match="other actions than the plan"):
        simulate(made, actions=(first[1:], second))


def test_a_schedule_that_cannot_finish_says_who_waits_for_what():
    made = equal_stages(2, 2)
    first, second = rank_actions(made)
    backwards_first = (first[2], first[3], first[0], first[1], first[4])
    with pytest.raises(DeadlockError) as error:
        simulate(made, actions=(backwards_first, second))
    assert "0B0 comes before 0F0" in str(error.value)


def test_ranks_that_wait_for_each_other_are_told_with_what_they_wait_for():
    """Rank 0 wants the gradient of micro-batch 0 before it runs micro-batch 1, rank 1 the other way around."""
    made = equal_stages(2, 2, backward="fifo")
    (f0, f1, b0, b1, u), (g0, g1, c0, c1, v) = rank_actions(made)
    with pytest.raises(DeadlockError) as error:
        simulate(made, actions=((f0, b0, f1, b1, u), (g1, c1, g0, c0, v)))
    assert "rank 0 waits for the gradient from stage 1 of micro-batch 0" in str(error.value)
    assert "rank 1 waits for the output of stage 0 of micro-batch 1" in str(error.value)


def test_blocking_sends_to_a_rank_that_takes_them_in_another_order_are_a_deadlock_and_not_a_hang():
    made = equal_stages(2, 3, window=1, cluster={"overlap": False})
    first, (f0, f1, f2, *rest) = rank_actions(made)
    with pytest.raises(DeadlockError) as error:
        simulate(made, actions=(first, (f1, f0, f2, *rest)))
    assert "rank 0 is held sending the output of stage 0 of micro-batch 0" in str(error.value)


@pytest.mark.parametrize(("K", "M"), [(4, 8), (16, 2048)])
def test_a_long_simulation_tells_how_far_it_is_until_all_is_done(K, M):
    shares: list[float] = []
    simulate(equal_stages(K, M), memory=False, advance=shares.append)
    assert sum(shares) == pytest.approx(1)
    assert all(share >= 0 for share in shares)
    assert (len(shares) > 1) == (M == 2048)
