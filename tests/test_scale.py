"""What lets large plans be simulated changes no answer: compact lists, curves by groups, shares by component."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import equal_stages, random_plans
from simpy import Environment

from gpipe_sim.explain.waterfall import critical_path
from gpipe_sim.plan.actions import Action
from gpipe_sim.plan.order import ActionList
from gpipe_sim.plan.program import rank_actions
from gpipe_sim.step import memory
from gpipe_sim.step.fairshare import FairShare
from gpipe_sim.step.metrics import step_time_s
from gpipe_sim.step.simulate import simulate


@given(random_plans())
def test_a_compact_list_is_the_sequence_of_its_actions(plan):
    for actions in rank_actions(plan):
        written_out = tuple(actions)
        assert all(isinstance(action, Action) for action in written_out)
        assert ActionList.of(written_out) == actions == written_out
        assert hash(ActionList.of(written_out)) == hash(actions)
        assert [actions[i] for i in range(len(actions))] == list(written_out)
        assert actions[-1] == written_out[-1]
        assert actions[1:3] == written_out[1:3]
        assert actions != written_out[1:]


def test_a_long_list_takes_nine_bytes_an_action():
    (actions,) = rank_actions(equal_stages(1, 10_000))
    held = sys.getsizeof(actions.kinds) + actions.stages.nbytes + actions.microbatches.nbytes
    assert held / len(actions) < 9.1


@given(random_plans(), st.integers(1, 20))
def test_curves_are_the_same_however_many_ranks_are_taken_together(plan, together):
    expected = simulate(plan).memory
    usual, memory._TOGETHER = memory._TOGETHER, together
    try:
        found = simulate(plan).memory
    finally:
        memory._TOGETHER = usual
    for ours, theirs in zip(found, expected, strict=True):
        times = np.union1d(ours.times, theirs.times)
        assert ours.parts.keys() == theirs.parts.keys()
        for part in theirs.parts:
            assert np.array_equal(*(curve.parts[part][_rows(curve, times)] for curve in (ours, theirs)))


def _rows(curve, times):
    """A curve may have points at which nothing changes; what it holds from each time on is what counts."""
    return np.searchsorted(curve.times, times, side="right") - 1


def test_the_critical_path_of_a_large_step_is_as_long_as_the_step():
    made = equal_stages(32, 256, checkpoint="always", bandwidth="10 B/s", window=2)
    step = simulate(made, memory=False)
    path = critical_path(made, step)
    assert path[-1].end_s - path[0].start_s == pytest.approx(step_time_s(step))


# --- fair shares -----------------------------------------------------------------------------------------------------

Job = tuple[float, float, float, tuple[int, ...]]
"""When it comes, its work, its limit, and the resources that it uses."""
amounts = st.floats(0.1, 5.0)
jobs = st.lists(
    st.tuples(amounts, amounts, amounts, st.sets(st.integers(0, 4), min_size=1, max_size=2).map(tuple)), max_size=8
)


def small_steps(capacity: list[float], jobs: list[Job]) -> list[float]:
    """When each job ends, from the definition: every job's rate is found again at every arrival and every end."""
    remaining, ends = [job[1] for job in jobs], [0.0] * len(jobs)
    now, active = 0.0, set()
    coming = sorted(range(len(jobs)), key=lambda i: jobs[i][0])
    while active or coming:
        rates = max_min(capacity, {i: jobs[i] for i in active})
        leaves = min((now + remaining[i] / rates[i] for i in active), default=float("inf"))
        arrives = jobs[coming[0]][0] if coming else float("inf")
        then = min(leaves, arrives)
        for i in active:
            remaining[i] -= rates[i] * (then - now)
        now = then
        for i in [i for i in active if remaining[i] <= 1e-9]:
            active.remove(i)
            ends[i] = now
        if arrives <= leaves:
            active.add(coming.pop(0))
    return ends


def max_min(capacity: list[float], active: dict[int, Job]) -> dict[int, float]:
    """Raise all rates together; whoever meets a limit or a full resource stays there."""
    rates: dict[int, float] = {}
    while len(rates) < len(active):
        rising = [i for i in active if i not in rates]
        left = {r: c - sum(rates[i] for i in rates if r in active[i][3]) for r, c in enumerate(capacity)}
        users = {r: sum(r in active[i][3] for i in rising) for r in left}
        level = min([left[r] / n for r, n in users.items() if n] + [active[i][2] for i in rising])
        for i in rising:
            full = any(left[r] / users[r] <= level * (1 + 1e-12) for r in active[i][3])
            if full or active[i][2] <= level:
                rates[i] = level
    return rates


@given(st.lists(amounts, min_size=5, max_size=5), jobs)
def test_shares_are_max_min_fair_whatever_comes_and_goes(capacity, jobs):
    env = Environment()
    shares = FairShare(env, dict(enumerate(capacity)))
    ends = [0.0] * len(jobs)

    def job(i: int):
        arrival, work, limit, uses = jobs[i]
        yield env.timeout(arrival)
        yield shares.run(work, limit, uses)
        ends[i] = env.now

    for i in range(len(jobs)):
        env.process(job(i))
    env.run()
    assert ends == pytest.approx(small_steps(capacity, jobs), rel=1e-6)


def test_nics_that_share_nothing_are_not_looked_at_again():
    """A task that comes alone changes no other's rate, so the others keep the wake-up that they had."""
    env = Environment()
    shares = FairShare(env, dict.fromkeys(range(100), 1.0))
    for nic in range(100):
        shares.run(1.0 + nic, 1.0, (nic,))
    assert len(shares._ends) == 100, "one entry for each: none was rated twice"
    env.run()
    assert env.now == 100.0
