"""Every shipped scenario opens with its question, and its answer is the one that its text claims."""

import pytest

from gpipe_sim.explain.predict import Prediction, predict
from gpipe_sim.make.making import make_plan
from gpipe_sim.scenario.reading import load_scenario, shipped_scenarios

FILES = sorted(shipped_scenarios().glob("*.yaml"))


def answers(name: str, *overrides: str) -> list[Prediction]:
    return [
        predict(make_plan(scenario)) for scenario in load_scenario(shipped_scenarios() / f"{name}.yaml", *overrides)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_opens_with_the_question_that_it_answers(path):
    first_line = path.read_text().splitlines()[0]
    assert first_line.startswith("# ")
    assert first_line.endswith("?")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_is_named_as_its_file_and_can_be_planned(path):
    sweep = load_scenario(path)
    assert sweep.name == path.stem
    assert all(make_plan(scenario).num_stages for scenario in sweep)


def test_bubble_shrinks_from_three_quarters_to_4_5_percent():
    bubbles = [prediction.bubble_fraction for prediction in answers("bubble")]
    assert bubbles == pytest.approx([3 / (M + 3) for M in (1, 2, 4, 8, 16, 32, 64)], abs=1e-9)


def test_checkpointing_fits_where_never_does_not_and_early_recompute_is_faster():
    found = {(p.plan.checkpoint[0], p.plan.recompute): p for p in answers("checkpoint")}
    assert not found["never", "early"].fits
    assert found["always", "early"].fits
    assert found["never", "early"].step_time_s < found["except_last", "early"].step_time_s
    assert found["except_last", "early"].step_time_s < found["always", "early"].step_time_s
    assert found["always", "early"].step_time_s < found["always", "on_demand"].step_time_s


def test_transformer48_does_not_scale_with_one_micro_batch_and_does_with_32():
    time = {(p.plan.num_stages, p.plan.num_microbatches): p.step_time_s for p in answers("gpipe_transformer48")}
    assert time[2, 1] / time[8, 1] < 1.3
    assert time[2, 32] / time[8, 32] > 3


def test_the_84_billion_parameter_model_fits_on_128_cores():
    (prediction,) = answers("gpipe_83b9")
    assert prediction.fits
    assert sum(prediction.parameter_bytes) / 2 == pytest.approx(83.9e9, rel=0.003)
    curve = prediction.step.memory[1]
    model = sum(curve.parts[part].max() for part in ("parameters", "optimizer", "gradients"))
    assert model / 2**30 == pytest.approx(7.3, abs=0.1)


def test_the_bandwidth_wall_stands_at_10_gbit():
    time = {p.plan.scenario.swept["cluster.network.bandwidth"]: p.step_time_s for p in answers("bandwidth_wall")}
    assert time["25 Gbit/s"] < 1.05 * time["400 Gbit/s"]
    assert time["10 Gbit/s"] > 1.25 * time["400 Gbit/s"]
    assert time["5 Gbit/s"] > 1.6 * time["10 Gbit/s"]


def test_two_flows_really_share_a_nic():
    in_order, in_turns = answers("shared_nic")
    assert not in_order.plan.shared_nics
    assert in_turns.plan.shared_nics
    assert in_order.breakdown_s["contention"] == 0
    assert in_turns.breakdown_s["contention"] > 0.1 * in_turns.step_time_s


def test_the_automatic_cut_relieves_the_straggler():
    equal, auto = answers("straggler", "cluster.jitter.samples=10")
    assert auto.plan.balance[3] < 8
    assert auto.step_time_s < 0.95 * equal.step_time_s
    assert auto.breakdown_s["jitter"] > 0


def test_a_large_vocabulary_makes_equal_counts_uneven():
    equal, auto = answers("uneven")
    assert equal.breakdown_s["imbalance"] > 0.25 * equal.step_time_s
    assert auto.plan.balance[-1] < 8
    assert auto.step_time_s < 0.8 * equal.step_time_s


def test_two_stages_on_a_rank_halve_the_bubble_and_four_need_a_fast_link():
    one, two, four = (answers("interleaved", f"plan.stages={4 * v}", f"plan.stages_per_rank={v}") for v in (1, 2, 4))
    assert {found.plan.num_ranks for found in (*one, *two, *four)} == {4}
    assert two[0].bubble_fraction < 0.6 * one[0].bubble_fraction
    assert max(two[0].peak_memory_bytes) > 1.1 * max(one[0].peak_memory_bytes)
    assert two[0].step.program.num_messages == (8 - 1) / (4 - 1) * one[0].step.program.num_messages
    fast, slow = 0, -1
    assert four[fast].step_time_s < two[fast].step_time_s < one[fast].step_time_s
    assert two[slow].step_time_s < one[slow].step_time_s < four[slow].step_time_s


def test_split_backwards_leave_the_bubble_that_their_authors_computed():
    """Qi et al., Table 5: 1.5B, m = 24; a rate is of the longest time of a rank from its first action to its last."""
    work_s = 24 * (18.522 + 18.086 + 9.337) * 1e-3
    rates = {p.plan.schedule: round(1 - work_s / p.longest_rank_span_s, 4) for p in answers("zero_bubble")}
    assert rates == {"1f1b": 0.2431, "zb_h1": 0.1585, "zb_h2": 0.1083}
    peaks = [max(p.peak_memory_bytes) / 2**30 for p in answers("zero_bubble")]
    assert peaks == pytest.approx([8, 8, 15], abs=0.01)


def test_zero_bubbles_published_rate_is_reproduced():
    (prediction,) = answers("zero_bubble_1f1b")
    assert round(prediction.bubble_fraction, 4) == 0.2431


def test_llama_2_13b_fits_on_four_devices_recomputed_and_tokens_cost_more_on_more():
    found = {(p.plan.num_ranks, p.plan.checkpoint[0]): p for p in answers("llama2_13b")}
    assert [key for key, p in found.items() if not p.fits] == [(4, "never")]
    assert found[8, "never"].step_time_s < found[8, "always"].step_time_s
    assert min(found.values(), key=lambda p: p.step_time_s) is found[16, "never"]
    costs = [found[K, "always"].worth().money_per_token for K in (4, 8, 16)]
    assert costs == sorted(costs)
    assert found[4, "always"].worth().parameters == 13_015_864_320


def test_llama_3_70b_as_a_pipeline_alone_leaves_most_flops_unused():
    sixteen, half, all_of_them = answers("llama3_70b")
    assert [p.fits for p in (sixteen, half, all_of_them)] == [False, True, True]
    assert 0.2 < half.worth().mfu < 0.3
    assert all_of_them.worth().mfu < 0.8 * half.worth().mfu
    assert {1, 2} <= set(all_of_them.plan.balance)
    assert all_of_them.bubble_fraction > 1.5 * half.bubble_fraction


def test_copies_of_the_whole_model_are_fastest_but_fit_only_if_they_divide_what_they_hold():
    both = answers("replicas")
    copies = answers("replicas", "plan.stages=1", "plan.replicas=16", "plan.microbatches=8")
    assert {p.worth().devices for p in (*both, *copies)} == {16}
    assert [p.fits for p in both] == [True, True, True]
    assert [p.fits for p in copies] == [False, True, True]
    assert max(p.step_time_s for p in copies) < min(p.step_time_s for p in both)
    (alone,) = answers("replicas", "plan.stages=16", "plan.replicas=1", "plan.microbatches=128", "plan.shard=none")
    assert alone.step_time_s > 1.2 * both[0].step_time_s
    assert max(alone.peak_memory_bytes) < min(max(p.peak_memory_bytes) for p in both)
    assert both[0].breakdown_s["collectives"] > 0 == alone.breakdown_s["collectives"]


def test_gpt_3_takes_as_long_as_megatron_measured_and_fits_only_recomputed():
    whole, attention = answers("megatron_175b")
    assert whole.step_time_s == pytest.approx(18.13, rel=0.02)
    assert attention.step_time_s == pytest.approx(13.75, rel=0.02)
    assert whole.fits
    assert attention.fits
    kept = answers("megatron_175b", "plan.checkpoint=never", "plan.recompute_unit=stage")[0]
    assert kept.step_time_s < attention.step_time_s
    assert not kept.fits


def test_a_mixture_is_faster_than_a_pipeline_alone_and_divided_state_halves_its_memory():
    whole, divided = answers("llama3_70b_mixed")
    alone = answers("llama3_70b", "plan.stages=64")[0]
    assert whole.worth().devices == alone.worth().devices == 64
    assert alone.step_time_s > 1.5 * divided.step_time_s
    assert max(divided.peak_memory_bytes) < 0.5 * max(whole.peak_memory_bytes)


def test_llama_2_13b_on_two_nodes_is_two_stages_in_eight_replicas():
    (both,) = answers("llama2_13b_two_nodes")
    (groups,) = answers("llama2_13b_two_nodes", "plan.stages=1", "plan.replicas=2", "plan.tensor=8")
    sixteen = "plan.stages=1", "plan.replicas=16", "plan.microbatches=4"
    (copies,) = answers("llama2_13b_two_nodes", *sixteen)
    (again,) = answers("llama2_13b_two_nodes", *sixteen, "plan.checkpoint=always", "plan.recompute_unit=layer")
    assert {p.worth().devices for p in (both, groups, copies, again)} == {16}
    assert [p.fits for p in (both, groups, copies, again)] == [True, True, False, True]
    assert both.step_time_s < groups.step_time_s < 1.1 * both.step_time_s < again.step_time_s
    assert max(groups.peak_memory_bytes) < 0.5 * max(both.peak_memory_bytes)


def test_of_copies_a_tensor_group_and_a_pipeline_copies_are_fastest_and_largest():
    (copies,) = answers("one_dimension")
    (group,) = answers("one_dimension", "plan.replicas=1", "plan.tensor=8")
    (pipeline,) = answers("one_dimension", "plan.replicas=1", "plan.stages=8", "plan.microbatches=32")
    assert copies.step_time_s < pipeline.step_time_s < group.step_time_s
    assert max(group.peak_memory_bytes) < max(copies.peak_memory_bytes) / 3
    assert max(pipeline.peak_memory_bytes) < max(copies.peak_memory_bytes) / 3


def test_faster_devices_of_a_mixed_cluster_get_more_layers():
    (cut,) = answers("mixed_cluster")
    assert max(cut.plan.balance[1:16]) == 1
    assert set(cut.plan.balance[16:23]) == {4}
    (equal,) = answers("mixed_cluster", f"plan.balance={[2] * 23 + [5]}")
    assert equal.step_time_s == pytest.approx(1.4 * cut.step_time_s, rel=0.02)
