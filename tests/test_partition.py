"""The default cut: exact, never empty, most even among equals."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpipe_sim.plan.partition import partition


def cuts(num_layers: int, num_stages: int):
    for ends in itertools.combinations(range(1, num_layers), num_stages - 1):
        bounds = (0, *ends, num_layers)
        yield tuple(b - a for a, b in itertools.pairwise(bounds))


def stage_sums(costs: np.ndarray, balance: tuple[int, ...]) -> list[float]:
    ends = np.cumsum(balance)
    return [costs[k, end - size : end].sum() for k, (end, size) in enumerate(zip(ends, balance, strict=True))]


@st.composite
def cases(draw):
    num_layers = draw(st.integers(1, 9))
    num_stages = draw(st.integers(1, num_layers))
    cost = st.one_of(st.integers(0, 4).map(float), st.floats(0, 10))
    row = np.array(draw(st.lists(cost, min_size=num_layers, max_size=num_layers)))
    speeds = draw(st.lists(st.sampled_from([1.0, 1.0, 1.25, 2.0, 5.0]), min_size=num_stages, max_size=num_stages))
    return np.outer(speeds, row)


# A dear layer must be left to a later, faster stage, although an earlier one could end before it.
@example(np.outer([1.0, 2.0, 1.5], [0.0, 4.0, 5.0, 0.0]))
@settings(max_examples=500)
@given(cases())
def test_largest_stage_is_the_smallest_possible_and_ties_go_to_the_most_even(costs):
    num_stages, num_layers = costs.shape
    found = stage_sums(costs, partition(costs))
    every = [stage_sums(costs, balance) for balance in cuts(num_layers, num_stages)]
    best = min(max(sums) for sums in every)
    assert max(found) == pytest.approx(best, rel=1e-9)
    evenest = min(sum(s * s for s in sums) for sums in every if max(sums) <= best * (1 + 1e-9))
    assert sum(s * s for s in found) == pytest.approx(evenest, rel=1e-9)


@given(cases())
def test_no_stage_is_empty_and_every_layer_has_a_stage(costs):
    balance = partition(costs)
    assert len(balance) == costs.shape[0]
    assert sum(balance) == costs.shape[1]
    assert min(balance) >= 1


def test_equal_layers_are_spread_evenly_with_the_smaller_stages_first():
    assert partition(np.ones((4, 10))) == (2, 2, 3, 3)


def test_a_slow_device_gets_fewer_layers():
    costs = np.ones((2, 12))
    costs[1] *= 2
    assert partition(costs) == (8, 4)


def test_the_largest_published_model_is_cut_into_128_stages():
    costs = np.ones((128, 1666))
    costs[:, 0], costs[:, -1] = 0.1, 2.5
    balance = partition(costs)
    assert sum(balance) == 1666
    assert max(stage_sums(costs, balance)) == 14.0


def test_more_stages_than_layers_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="3 stages need at least as many layers, found 2"):
        partition(np.ones((3, 2)))


def test_a_stage_may_be_far_cheaper_than_what_the_same_device_would_take_for_the_rest():
    """The difference of two running sums is off by a little of the sums, which is much of a small difference."""
    assert partition(np.array([[1e-6, 1e-10], [1.0, 1e-4]])) == (1, 1)
