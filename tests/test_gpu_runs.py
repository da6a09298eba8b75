"""Published runs on GPUs: how near predictions are, on rows that no parameter was fitted to."""

import numpy as np
import pytest

from gpipe_sim.evidence.gpu_runs import (
    A100,
    B200,
    korthikanti_runs,
    published_runs,
    result,
    sailor_runs,
    simumax_runs,
    vtrain_runs,
)


def test_iteration_times_of_models_up_to_a_trillion_follow_from_two_smaller_ones():
    found = result(list(korthikanti_runs()))
    assert (len(found.fitted), len(found.judged)) == (4, 4)
    assert max(map(abs, found.fitted)) < 0.05
    assert max(map(abs, found.judged)) < 0.04


def test_many_nodes_are_predicted_better_than_by_those_who_measured_them():
    judged = [run for run in vtrain_runs() if not run.is_fitted]
    found = result(judged[::4])
    assert len(judged) == 83
    assert found.own_error == 0.147
    assert found.mean_error < 0.10
    assert found.median_error < 0.075


def test_steps_on_b200_are_predicted_better_than_by_those_who_measured_them():
    found = result([run for run in simumax_runs() if not run.is_memory])
    assert (len(found.fitted), len(found.judged)) == (4, 20)
    assert found.mean_error < 0.045 < found.own_error


def test_memory_on_b200_is_within_two_percent_without_any_fit():
    found = result([run for run in simumax_runs() if run.is_memory])
    assert not found.fitted
    assert len(found.judged) == 8
    assert max(map(abs, found.judged)) < 0.02
    assert found.mean_error < 0.01


def test_steps_on_gh200_follow_from_published_times_of_layers():
    found = result(list(sailor_runs()))
    assert len(found.judged) == 15
    assert found.median_error < 0.07
    assert found.mean_error < 0.11  # its own tool: 0.089


@pytest.mark.parametrize(
    ("at", "runs", "fitted"),
    [
        (B200, lambda at: [run for run in simumax_runs(at) if run.is_fitted], ("efficiency", "link_gb_s")),
        (
            A100,
            lambda at: [one for one in (*korthikanti_runs(at), *vtrain_runs(at)) if one.is_fitted],
            ("efficiency", "memory_efficiency", "launch_us", "link_gb_s", "network_gb_s"),
        ),
    ],
    ids=["b200", "a100"],
)
def test_no_other_value_of_a_fitted_parameter_comes_nearer(at, runs, fitted):
    def cost(changed):
        errors = np.log([one.predicted() / one.measured for one in runs(changed)])
        return np.sqrt(1 + (errors / 0.1) ** 2).sum()

    here = cost(at)
    for name in fitted:
        for factor in (0.9, 1.1):
            assert cost(at._replace(**{name: min(factor * getattr(at, name), 1e3)})) > here


def test_every_set_says_where_it_is_from():
    for table in published_runs().values():
        assert table["source"]
        assert table["settings"]
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
