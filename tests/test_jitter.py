"""Jitter is luck of the right size, and unrelated from one action, sample or seed to the next."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import equal_stages

from gpipe_sim.step.jitter import jitter_factors, lognormal

MANY = np.arange(20_000)


@pytest.mark.parametrize("cv", [0.05, 0.3, 1.0])
def test_factors_have_mean_one_and_the_given_coefficient_of_variation(cv):
    factors = lognormal(cv, 0, MANY)
    assert factors.mean() == pytest.approx(1.0, abs=5 * cv / np.sqrt(len(MANY)))
    assert factors.std() == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize("part", range(5))
def test_the_luck_of_neighbours_is_unrelated_in_every_part_of_the_key(part):
    keys: list[object] = [3, 1, 4, 1, 5]
    keys[part] = MANY
    normal = np.log(lognormal(0.3, *keys))
    for distance in (1, 2, 32):
        assert abs(np.corrcoef(normal[:-distance], normal[distance:])[0, 1]) < 5 / np.sqrt(len(MANY))


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_a_sample_is_the_same_alone_as_among_others(seed, samples):
    made = equal_stages(2, 3, cluster={"jitter": {"cv": 0.2, "samples": 1, "seed": seed}})
    together = jitter_factors(made, samples)
    for column, sample in enumerate(samples):
        for kind, factors in jitter_factors(made, [sample]).items():
            assert (factors[..., 0] == together[kind][..., column]).all()


def test_without_jitter_nothing_changes():
    assert all((factors == 1.0).all() for factors in jitter_factors(equal_stages(2, 3), [0, 1]).values())
