"""Plans for another number of devices than they were made for: what stays, what is chosen again, what is refused."""

import pytest
from plans import GiB, layers, plan, scenario

from gpipe_sim.base.files import parse_yaml
from gpipe_sim.make.making import make_plan
from gpipe_sim.make.planfile import parse_plan, plan_text
from gpipe_sim.search.judge import Judge
from gpipe_sim.search.replan import NoPlanError, plan_for_devices, told_again

EQUAL = layers([1.0] * 8, [2.0] * 8, weights=[1.0] * 8)


def judged(one):
    return Judge().judge([one])[0]


def test_a_plan_for_as_many_devices_as_it_has_ranks_is_itself():
    own = plan(EQUAL, 4, stages=3)
    assert plan_for_devices(own, 3) is own


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_what_the_scenario_says_of_a_plan_stays_and_the_cut_is_made_again(num_devices):
    own = plan(EQUAL, 4, batch=10, stages=3, schedule="1f1b", checkpoint="always")
    found = plan_for_devices(own, num_devices)
    assert (found.num_ranks, found.schedule, found.num_microbatches) == (num_devices, "1f1b", 4)
    assert found.balance == (8 // num_devices,) * num_devices
    assert set(found.checkpoint) == {"always"}


def test_the_same_is_planned_every_time_and_a_plan_file_holds_it():
    own = plan(EQUAL, 4, batch=10, stages=3)
    first, again = plan_for_devices(own, 2), plan_for_devices(own, 2)
    assert plan_text(first) == plan_text(again)
    read = parse_plan(parse_yaml(plan_text(first), "plan.yaml"))
    assert judged(read).step_time_s == judged(first).step_time_s


def test_where_the_plans_own_choices_do_not_fit_others_are_taken_but_micro_batches_stay():
    costs = layers([1.0] * 8, [2.0] * 8, output=[GiB / 8] * 8, saved=[GiB] * 8)
    own = plan(costs, 4, stages=4, checkpoint="never", schedule="gpipe", cluster={"device": {"memory": "10 GiB"}})
    found = plan_for_devices(own, 2)
    assert judged(own).fits
    assert judged(found).fits
    assert found.num_microbatches == 4
    assert (found.schedule, set(found.checkpoint)) != ("gpipe", {"never"})


def test_a_schedule_that_needs_more_stages_than_there_are_layers_is_replaced():
    own = plan(EQUAL, 4, stages=4, schedule="dualpipe_v", stages_per_rank=2)
    assert plan_for_devices(own, 4).schedule == "dualpipe_v"
    found = plan_for_devices(own, 5)  # with two stages on each rank, ten of eight layers
    assert (found.num_ranks, found.stages_per_rank, found.num_microbatches) == (5, 1, 4)


def test_micro_batches_keep_their_size_when_there_are_other_replicas():
    own = plan(EQUAL, 4, batch=16, stages=2, replicas=2)
    for num_devices in (1, 2, 3, 8):
        found = plan_for_devices(own, num_devices)
        assert found.world == num_devices
        assert set(found.sizes) == set(own.sizes)


def test_one_pipeline_stays_one():
    assert plan_for_devices(plan(EQUAL, 4, stages=2), 4).replicas == 1


@pytest.mark.parametrize("unit", ["layer"])
def test_what_is_not_searched_is_cut_again(unit):
    own = plan(EQUAL, 4, stages=4, checkpoint="always", recompute_unit=unit)
    found = plan_for_devices(own, 2)
    assert (found.num_ranks, found.recompute_unit, found.balance) == (2, unit, (4, 4))


def test_what_is_said_of_ranks_that_are_gone_is_left_out():
    own = plan(EQUAL, 4, stages=4, cluster={"slowdown": {0: 2.0, 3: 3.0}, "links": {2: {"bandwidth": "1 GB/s"}}})
    found = plan_for_devices(own, 2).scenario.cluster
    assert (found.slowdown, found.links) == ({0: 2.0}, {})


def test_nodes_are_left_as_full_as_they_were():
    nodes = {"nodes": 3, "devices_per_node": 2, "network": {"bandwidth": "1 GB/s"}}
    own = plan(EQUAL, 4, stages=6, schedule="1f1b", cluster=nodes)
    assert plan_for_devices(own, 4).scenario.cluster.nodes == 2
    assert plan_for_devices(own, 2).scenario.cluster.nodes == 1


def test_the_sentence_has_both_plans_and_their_predicted_times():
    own = plan(EQUAL, 4, stages=4, schedule="1f1b")
    assert told_again(own, plan_for_devices(own, 2)) == (
        "2 processes for a plan of 4 ranks, planned again: K=2, M=4, 1f1b, recompute nothing: 60.0 s a step predicted, "
        "instead of K=4, M=4, 1f1b, recompute nothing: 42.0 s a step"
    )


def test_where_nothing_fits_it_says_what_would():
    own = plan(layers([1.0] * 8, parameters=GiB), 4, stages=3, cluster={"device": {"memory": "14 GiB"}})
    with pytest.raises(NoPlanError, match=r"2 processes for a plan of 3 ranks: nothing fits in 14.0 GiB.*3 stages"):
        plan_for_devices(own, 2)


def test_a_schedule_of_two_stages_on_each_rank_that_fits_nowhere_is_told_as_any_other():
    own = plan(
        layers([1.0] * 8, [2.0] * 8, weights=[1.0] * 8, parameters=GiB),
        4,
        stages=8,
        schedule="zb_v",
        stages_per_rank=2,
        cluster={"device": {"memory": "10 GiB"}},
    )
    with pytest.raises(NoPlanError, match=r"2 processes for a plan of 4 ranks: nothing fits in 10.0 GiB"):
        plan_for_devices(own, 2)


def test_more_processes_than_layers_are_refused():
    with pytest.raises(NoPlanError, match=r"the model has 8 layers, expected at most 8 processes"):
        plan_for_devices(plan(EQUAL, 4, stages=2), 9)


def test_which_kinds_of_devices_are_left_is_not_guessed():
    model = {"kind": "transformer", "layers": 4, "hidden": 64, "heads": 4, "vocab": 97, "sequence": 32}
    cluster = {"groups": [{"device": "a100-80gb"}, {"device": "h100-80gb"}], "devices_per_node": 1, "link": "nvlink3"}
    data = {"name": "mixed", "model": model, "batch": 8, "cluster": cluster | {"network": "200gbit"}}
    own = make_plan(scenario(data | {"plan": {"stages": 2, "microbatches": 4}}))
    with pytest.raises(NoPlanError, match=r"which of cluster.groups are left is not known"):
        plan_for_devices(own, 1)
