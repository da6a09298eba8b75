"""Simulator and evaluator beside a second model, `oracle`, that was written from the rules alone; and laws of a step.

Where equality is exact, all seconds are multiples of 1/64 and all bytes whole: no sum is ever rounded, so that what
happens at the same time does so for everyone.
"""

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import reference_model as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import equal_stages, layers, plan, random_order, random_plans

from gpipe_sim.plan.figures import Effects
from gpipe_sim.plan.order import ActionList
from gpipe_sim.plan.program import DeadlockError, compile_program, completed
from gpipe_sim.step.evaluate import evaluate
from gpipe_sim.step.metrics import step_metrics
from gpipe_sim.step.simulate import simulate
from gpipe_sim.step.waves import make_graph

MODES = ("never", "always", "except_last")
MAY_FREE_FIRST = (
    "workspace_backward_bytes",
    "workspace_accumulate_bytes",
    "workspace_weights_bytes",
    "workspace_weights_accumulate_bytes",
)


def rounded(values, unit=1 / 64):
    return np.round(np.asarray(values, dtype=float) / unit) * unit


def with_cluster(plan, **changes):
    cluster = plan.scenario.cluster.model_copy(update=changes)
    return replace(plan, scenario=replace(plan.scenario, cluster=cluster))


def exact(plan, random: Random):
    """The plan with figures that add up without rounding; workspaces of either sign, inputs that have a size."""
    profile, cluster = plan.profile, plan.scenario.cluster
    sizes = tuple(sorted(set(plan.sizes)))
    table = {}
    for name in profile.table:
        known = np.array([getattr(profile.at(size), name) for size in sizes]).T
        table[name] = rounded(known) if name.endswith("_s") else np.round(known)
        if name in MAY_FREE_FIRST and random.random() < 0.5:
            table[name] += np.array([[float(random.randint(-60, 40)) for _ in sizes] for _ in profile.names])
    profile = replace(
        profile,
        sizes=sizes,
        table=table,
        action_overhead_s=float(rounded(profile.action_overhead_s)),
        hop_overhead_s=float(rounded(profile.hop_overhead_s)),
        optimizer_s=rounded(profile.optimizer_s),
        input_bytes=float(random.choice((0, 3))),
    )

    def whole(link):
        return replace(link, latency=float(rounded(link.latency)))

    return with_cluster(
        replace(plan, profile=profile),
        link=whole(cluster.link),
        links={edge: whole(link) for edge, link in cluster.links.items()},
        slowdown={rank: float(rounded(factor, 1 / 8)) for rank, factor in cluster.slowdown.items()},
    )


@st.composite
def named_plans(draw):
    """Of all schedules."""
    return exact(draw(random_plans()), Random(draw(st.integers(0, 10**6))))


@st.composite
def any_plans(draw, max_stages=5, max_microbatches=4):
    """Stages of one or more layers on any ranks, in any order that can finish if receives are posted in time."""
    base = draw(random_plans(schedules=["gpipe"], max_stages=max_stages, max_microbatches=max_microbatches))
    random = Random(draw(st.integers(0, 10**6)))
    L = len(base.balance)
    S = random.choice((L, random.randint(1, L)))
    ends = [0, *sorted(random.sample(range(1, L), S - 1)), L]
    ranks = random.sample(range(S), random.randint(1, S))
    anywhere = replace(
        exact(base, random),
        balance=tuple(there - here for here, there in pairwise(ends)),
        placement=tuple(random.choice(ranks) for _ in range(S)),
        checkpoint=base.checkpoint[:S],
        schedule="any.csv",
    )
    return replace(anywhere, order=random_order(anywhere.positions, anywhere.num_microbatches, random))


def solved(plan):
    """The oracle's rules and times; none if it says that the plan cannot finish, and the product says so too."""
    rules = oracle.rules_of(plan)
    try:
        return rules, oracle.times(rules)
    except oracle.CannotFinishError:
        with pytest.raises(DeadlockError):
            simulate(plan)
        with pytest.raises(DeadlockError):
            evaluate([plan])
        return None


def same_times(plan, rules, at, step, close):
    for position, timeline in zip(oracle.in_order_of_ranks(plan), step.ranks, strict=True):
        row = rules.rows[position]
        assert [str(key) for key in row[:-1]] == [str(tuple(action)) for action in timeline.actions[:-1]]
        assert timeline.actions[-1].kind == "U"
        for i, key in enumerate(row):
            taken = [message for message, action in at.taker.items() if action == key]
            sent = [message for message, action in at.sender.items() if action == key]
            nothing = [np.nan]
            expected = [
                at.start[key],
                at.end[key],
                at.taken[key],
                max([at.arrival[message] for message in taken] or nothing),
                min([at.leaves[message] for message in sent] or nothing),
                max([at.arrival[message] for message in sent] or nothing),
            ]
            found = [timeline.start_s[i], timeline.end_s[i], timeline.taken_s[i]]
            found += [timeline.arrived_s[i], timeline.send_start_s[i], timeline.send_end_s[i]]
            assert found == close(expected), key


def to_the_last_bit(values):
    return pytest.approx(values, rel=0, abs=0, nan_ok=True)


def nearly(values):
    return pytest.approx(values, rel=1e-9, abs=1e-9, nan_ok=True)


def same_figures(expected, metrics, close):
    assert metrics.step_time_s == close(expected.step_time)
    assert metrics.pipeline_time_s == close(expected.pipeline_time)
    assert metrics.longest_rank_span_s == close(expected.longest_rank_span)
    assert metrics.busy_s.tolist() == close(expected.busy)


def value_at(curve, now):
    return [parts for moment, parts in curve if moment <= now][-1]


def same_memory(curves, step):
    for expected, found in zip(curves, step.memory, strict=True):
        times = found.times.tolist()
        assert times == sorted(set(times))
        for now in sorted({moment for moment, _ in expected} | set(times)):
            i = max(j for j, moment in enumerate(times) if moment <= now)
            assert {part: float(values[i]) for part, values in found.parts.items()} == value_at(expected, now), now


def same_peaks(curves, metrics):
    assert metrics.peak_memory_bytes.tolist() == [oracle.peak(curve) for curve in curves]
    for curve, activation_bytes in zip(curves, metrics.activation_bytes.tolist(), strict=True):
        highest = next(parts for _, parts in curve if sum(parts.values()) == oracle.peak(curve))
        model = ("parameters", "optimizer", "gradients")
        assert activation_bytes == sum(value for part, value in highest.items() if part not in model)


def check(plan):
    """All of a plan, to the last bit."""
    found = solved(plan)
    if found is None:
        return
    rules, at = found
    step = simulate(plan)
    same_times(plan, rules, at, step, to_the_last_bit)
    curves = oracle.memory(plan, rules.rows, at)
    same_memory(curves, step)
    figures = oracle.figures(plan, rules.rows, at.start, at.end)
    for metrics in (step_metrics(step), *evaluate([plan])):
        same_figures(figures, metrics, to_the_last_bit)
        same_peaks(curves, metrics)


# --- the oracle ------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(named_plans())
def test_every_schedule_is_as_the_rules_say(plan):
    check(plan)


@settings(max_examples=80)
@given(any_plans())
def test_any_placement_in_any_order_is_as_the_rules_say(plan):
    check(plan)


@settings(max_examples=30)
@given(random_plans())
def test_times_that_are_rounded_are_nearly_what_the_rules_say(plan):
    found = solved(plan)
    if found is None:
        return
    rules, at = found
    step = simulate(plan, memory=False)
    same_times(plan, rules, at, step, nearly)
    figures = oracle.figures(plan, rules.rows, at.start, at.end)
    for metrics in (step_metrics(step), *evaluate([plan], memory=False)):
        same_figures(figures, metrics, nearly)


@settings(max_examples=20)
@given(st.one_of(named_plans(), any_plans()), st.randoms(use_true_random=False))
def test_plans_evaluated_together_are_each_as_the_rules_say(plan, random):
    """An R that only some of them need takes no time of the others."""
    plans = [plan, *(replace(plan, checkpoint=tuple(random.choice(MODES) for _ in plan.checkpoint)) for _ in range(3))]
    if None in [solved(one) for one in plans]:
        return
    for one, metrics in zip(plans, evaluate(plans), strict=True):
        rules, at = solved(one)
        same_figures(oracle.figures(one, rules.rows, at.start, at.end), metrics, to_the_last_bit)
        same_peaks(oracle.memory(one, rules.rows, at), metrics)


@settings(max_examples=20)
@given(st.one_of(named_plans(), any_plans()), st.booleans(), st.booleans())
def test_effects_that_are_switched_off_cost_nothing(plan, overhead, communication):
    if solved(plan) is None:
        return
    rules = oracle.rules_of(plan)
    hop = plan.profile.hop_overhead_s
    rules.latency = {
        message: (hop if overhead else 0.0) + (latency - hop if communication else 0.0)
        for message, latency in rules.latency.items()
    }
    if not overhead:
        rules.overhead = 0.0
    if not communication:
        rules.occupancy = dict.fromkeys(rules.occupancy, 0.0)
        rules.window, rules.blocking = None, False
    effects = Effects(overhead=overhead, communication=communication)
    at = oracle.times(rules)
    step = simulate(plan, effects=effects, memory=False)
    figures = oracle.figures(plan, rules.rows, at.start, at.end)
    for metrics in (step_metrics(step), *evaluate([plan], effects=effects, memory=False)):
        same_figures(figures, metrics, to_the_last_bit)


# --- messages that skip stages ---------------------------------------------------------------------------------------


def as_rules(order, positions, recomputed, routes, window, random: Random):
    """Rules with such routes and figures drawn at random, and the program and figures that stand for them."""
    S, M = recomputed.shape
    rows = []
    for position, actions in enumerate(order):
        row = []
        for kind, stage, m in actions:
            row += [("R", stage, m)] * int(kind in "BI" and recomputed[stage, m]) + [(kind, stage, m)]
        rows.append([*row, ("U", position, -1)])
    occupancy = {(edge, m): random.randint(0, 48) / 8 for edge in range(S - 1) for m in range(M)}
    latency = {edge: random.randint(0, 16) / 8 for edge in range(S - 1)}
    both = [
        message
        for here, there in routes
        for m in range(M)
        for message in (("output", here, there, m), ("gradient", there, here, m))
    ]
    rules = oracle.Rules(
        rows=rows,
        position=positions,
        seconds={key: random.randint(0, 64) / 8 for row in rows for key in row},
        overhead=0.0,
        occupancy={message: occupancy[min(message[1:3]), message[3]] for message in both},
        latency={message: latency[min(message[1:3])] for message in both},
        routes=routes,
        window=window,
        blocking=random.random() < 0.5 and window is None,
        on_demand=random.random() < 0.5,
    )
    program = compile_program(completed(order, recomputed), positions, on_demand=rules.on_demand, routes=routes)
    return rules, program, occupancy, latency


@st.composite
def skipping(draw):
    """Messages from any stage to any later one."""
    random = Random(draw(st.integers(0, 10**6)))
    S, M = random.randint(2, 5), random.randint(1, 4)
    ranks = [random.randrange(random.randint(1, S)) for _ in range(S)]
    positions = [list(dict.fromkeys(ranks)).index(rank) for rank in ranks]
    recomputed = np.array([[random.random() < 0.4 for _ in range(M)] for _ in range(S)])
    pairs = [(here, there) for here in range(S) for there in range(here + 1, S)]
    routes = [(here, there) for here, there in pairs if random.random() < (0.8 if there == here + 1 else 0.4)]
    window = random.choice((1, 2, None))
    return as_rules(random_order(positions, M, random), positions, recomputed, routes, window, random)


def check_skipping(case):
    rules, program, occupancy, latency = case
    graph = make_graph(program, rules.window, blocking=rules.blocking)
    try:
        at = oracle.times(rules)
    except oracle.CannotFinishError:
        assert graph is None
        return
    assert graph is not None, "it can finish"
    S, M = len(rules.position), program.num_microbatches
    of_kinds = [(kind, stage, m) for kind in graph.letters if kind != "U" for stage in range(S) for m in range(M)]
    seconds = [rules.seconds.get(key, 0.0) for key in of_kinds]
    seconds += [rules.seconds["U", position, -1] for position in range(len(rules.rows))]
    figures = seconds, list(occupancy.values()), list(latency.values())
    times = graph.times(*(np.array(column, dtype=float)[:, None] for column in figures))[:, 0]
    for number, key in enumerate(key for row in rules.rows for key in row):
        assert times[graph.taken[number]] == at.taken[key], key
        assert times[graph.end[number]] == at.end[key], key
        for message, taker in at.taker.items():
            assert taker != key or times[graph.taken[number]] >= at.arrival[message]


@settings(max_examples=80)
@given(skipping())
def test_messages_that_skip_stages_are_waited_for(case):
    check_skipping(case)


# --- laws ------------------------------------------------------------------------------------------------------------


def simulated(plan, **settings):
    """The step, or None where there is none."""
    try:
        return simulate(plan, **settings)
    except DeadlockError:
        return None


@settings(max_examples=30)
@given(st.one_of(named_plans(), any_plans()))
def test_every_action_runs_once_after_what_it_needs_and_alone(plan):
    step = simulated(plan, memory=False)
    if step is None:
        return
    S, M = plan.num_stages, plan.num_microbatches
    start, end, where = {}, {}, {}
    for timeline in step.ranks:
        for action, began, ended in zip(timeline.actions, timeline.start_s, timeline.end_s, strict=True):
            key = tuple(action) if action.kind != "U" else ("U", timeline.rank, -1)
            assert key not in start, "once"
            start[key], end[key], where[key] = began, ended, timeline.rank
        assert (timeline.start_s[1:] >= timeline.end_s[:-1]).all(), "one at a time"
        assert (timeline.end_s >= timeline.start_s).all()
        assert timeline.actions[-1].kind == "U", "after everything else"
        for i, action in enumerate(timeline.actions):
            if action.kind == "R":
                following = timeline.actions[i + 1]
                assert following.kind in "BI" and following[1:] == action[1:]
    expected = {("U", rank, -1) for rank in plan.ranks}
    for stage in range(S):
        for m in range(M):
            split = ("I", stage, m) in start
            backward = ("I" if split else "B", stage, m)
            expected |= {("F", stage, m), backward}
            assert all(where[key] == plan.placement[stage] for key in (("F", stage, m), backward))
            assert start[backward] >= end["F", stage, m]
            if split:
                expected.add(("W", stage, m))
                assert start["W", stage, m] >= end[backward], "I before W"
            if oracle.is_recomputed(plan, stage, m):
                expected.add(("R", stage, m))
                assert end["F", stage, m] <= start["R", stage, m]
            if stage:
                before = backward_before(start, stage - 1, m)
                link, apart = plan.link(stage - 1), plan.placement[stage] != plan.placement[stage - 1]
                way = plan.message_bytes[stage - 1, m] / link.bandwidth + link.latency if apart else 0.0
                assert start["F", stage, m] >= end["F", stage - 1, m] + way
                assert start[before] >= end[backward] + way
    assert set(start) == expected


def backward_before(actions, stage, m):
    return ("I" if ("I", stage, m) in actions else "B", stage, m)


@settings(max_examples=20)
@given(st.one_of(named_plans(), any_plans()))
def test_memory_ends_where_it_began(plan):
    step = simulated(plan)
    if step is None:
        return
    for rank, curve in zip(plan.ranks, step.memory, strict=True):
        weights = sum(plan.profile.parameter_bytes[plan.stages[stage]].sum() for stage in plan.stages_of(rank))
        batch = plan.profile.input_bytes * plan.scenario.batch if 0 in plan.stages_of(rank) else 0.0
        left = {part: float(values[-1]) for part, values in curve.parts.items()}
        assert left == dict.fromkeys(oracle.PARTS, 0.0) | {
            "parameters": weights,
            "optimizer": 2 * weights,
            "inputs": batch,
        }
        assert all((values >= 0).all() for values in curve.parts.values())


@settings(max_examples=20)
@given(any_plans())
def test_links_between_stages_of_one_rank_do_not_matter(plan):
    """However slow they are said to be."""
    inside = [edge for edge, (here, there) in enumerate(pairwise(plan.placement)) if here == there]
    cluster = plan.scenario.cluster
    snail = replace(cluster.link, bandwidth=2.0**-10, latency=1024.0)
    slow = with_cluster(plan, links=dict(cluster.links) | dict.fromkeys(inside, snail))
    one, other = simulated(plan), simulated(slow)
    if one is None:
        assert other is None
        return
    for here, there in zip(one.ranks, other.ranks, strict=True):
        assert here.end_s.tolist() == there.end_s.tolist()
    for here, there in zip(one.memory, other.memory, strict=True):
        assert here.total.tolist() == there.total.tolist()
    assert evaluate([plan])[0].step_time_s == evaluate([slow])[0].step_time_s


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_with_all_stages_takes_the_sum_of_its_work(overlap):
    base = equal_stages(4, 3, bandwidth="1 B/s", latency=8.0, cluster={"overlap": overlap}, window=1)
    alone = replace(base, placement=(0,) * 4, schedule="any.csv")
    alone = replace(alone, order=random_order(alone.positions, 3, Random(1)))
    assert evaluate([alone])[0].step_time_s == step_metrics(simulate(alone)).step_time_s == 4 * 3 * (1.0 + 2.0)


def faster(plan, random: Random):
    """The plan with one thing or another made faster, and nothing slower; its order is the same."""
    profile, cluster = plan.profile, plan.scenario.cluster
    what = random.choice(("seconds", "update", "overhead", "link", "window", "overlap", "slowdown"))
    if what == "seconds":
        names = [name for name in profile.table if name.endswith("_s")]
        name = random.choice(names)
        less = rounded(
            profile.table[name] * np.array([[random.random() for _ in profile.sizes] for _ in profile.names])
        )
        return replace(plan, profile=replace(profile, table=profile.table | {name: less}))
    if what == "update":
        return replace(plan, profile=replace(profile, optimizer_s=rounded(profile.optimizer_s * random.random())))
    if what == "overhead":
        name = random.choice(("action_overhead_s", "hop_overhead_s"))
        return replace(plan, profile=replace(profile, **{name: 0.0}))
    if what == "link":
        link = plan.scenario.cluster.link
        fast = replace(link, bandwidth=2 * link.bandwidth, latency=random.choice((0.0, link.latency)))
        links = {edge: other for edge, other in cluster.links.items() if other.bandwidth > fast.bandwidth}
        return with_cluster(plan, link=fast, links=links) if no_slower(cluster, fast) else plan
    if what == "window":
        return replace(plan, window=random.choice((None, (plan.window or 8) + 1)) if plan.window else None)
    if what == "overlap":
        return with_cluster(plan, overlap=True)
    return with_cluster(plan, slowdown={rank: min(factor, 1.0) for rank, factor in cluster.slowdown.items()})


def no_slower(cluster, link):
    return all(other.latency >= link.latency for other in cluster.links.values())


@settings(max_examples=40)
@given(st.one_of(named_plans(), any_plans()), st.integers(0, 10**6))
def test_what_is_faster_never_makes_a_step_slower(plan, seed):
    before = simulated(plan, memory=False)
    if before is None:
        return
    quick = faster(plan, Random(seed))
    after = simulate(quick, memory=False)
    for slow, fast in zip(before.ranks, after.ranks, strict=True):
        assert (fast.end_s <= slow.end_s).all()
    assert step_metrics(after).step_time_s <= step_metrics(before).step_time_s
    assert evaluate([quick])[0].step_time_s <= evaluate([plan])[0].step_time_s


# --- what is easily got wrong ---------------------------------------------------------------------------------------


def stands_aside(window):
    """Rank 0 sends 0F0 0F1 0F2 2F0 on one wire; rank 1 takes 2F0's before it posts the receive of 0F2's."""
    base = replace(equal_stages(4, 3, bandwidth="1 B/s", window=window), placement=(0, 1, 0, 1), schedule="any.csv")
    there = [("F", 0, 0), ("F", 0, 1), ("F", 0, 2), ("F", 2, 0), ("F", 2, 1), ("F", 2, 2)]
    back = [("F", 1, 0), ("F", 3, 0), ("F", 1, 1), ("F", 1, 2), ("F", 3, 1), ("F", 3, 2)]
    rows = [
        forwards + [("B", stage, m) for stage in stages for m in range(3)]
        for forwards, stages in ((there, (2, 0)), (back, (3, 1)))
    ]
    return replace(base, order=tuple(ActionList.of(row) for row in rows))


def test_a_message_whose_receive_is_late_stands_aside_in_the_simulator():
    plan = stands_aside(1)
    rules, at = solved(plan)
    same_times(plan, rules, at, simulate(plan), to_the_last_bit)


def test_a_message_whose_receive_is_late_stands_aside_in_the_evaluator():
    check(stands_aside(1))


def test_a_message_that_skips_a_stage_stands_aside_if_its_receive_is_late():
    """Stage 2 takes 0F0's and 1F0's before it posts the receive of 0F1's, which was sent before 1F0's."""
    forwards = [("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("F", 1, 1)]
    rows = [[*forwards, ("B", 1, 0), ("B", 1, 1), ("B", 0, 0), ("B", 0, 1)]]
    rows.append([("F", 2, 0), ("F", 2, 1), ("B", 2, 0), ("B", 2, 1)])
    order = tuple(ActionList.of(row) for row in rows)
    check_skipping(as_rules(order, [0, 0, 1], np.zeros((3, 2), bool), [(0, 1), (0, 2), (1, 2)], 1, Random(0)))


def test_a_plan_that_only_its_window_stops_can_be_evaluated_without_communication():
    base = replace(equal_stages(2, 2, window=1), schedule="any.csv")
    rows = [("F", 0, 0), ("F", 0, 1), ("B", 0, 1), ("B", 0, 0)], [("F", 1, 1), ("B", 1, 1), ("F", 1, 0), ("B", 1, 0)]
    stopped = replace(base, order=tuple(ActionList.of(row) for row in rows))
    assert solved(stopped) is None
    effects = Effects(communication=False)
    alone = step_metrics(simulate(stopped, effects=effects, memory=False))
    assert evaluate([stopped], effects=effects, memory=False)[0].step_time_s == alone.step_time_s


def test_the_gradient_that_enters_the_last_stage_is_there_when_its_backward_for_the_inputs_begins():
    made = plan(layers([1.0], [2.0], [4.0], [8.0], weights=[1.0]), 1, schedule="zb_h1")
    table = made.profile.table | {"workspace_inputs_bytes": np.full((1, len(made.profile.sizes)), -16.0)}
    check(replace(made, profile=replace(made.profile, table=table)))
