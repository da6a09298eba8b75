"""The joint search: stages, replicas, tensor groups and all that goes with them, at once."""

import json
from dataclasses import replace

import pytest
from commands import run
from plans import scenario

from gpipe_sim.base.files import Document
from gpipe_sim.explain.predict import predict_all
from gpipe_sim.make.making import make_plan
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.search.advise import advise, describe, remedies, why_not_copies, why_not_one_group
from gpipe_sim.search.choices import space_of

SMALL = {
    "name": "small",
    "model": {"kind": "transformer", "layers": 12, "hidden": 2048, "heads": 16, "sequence": 2048, "vocab": 32000},
    "batch": 32,
    "cluster": {
        "device": "a100-80gb",
        "nodes": 2,
        "devices_per_node": 4,
        "link": "nvlink3",
        "network": "100gbit",
        "nics": 4,
    },
}


def space(**changes):
    return space_of(list(parse_scenario(Document("test.yaml", SMALL | changes))))


@pytest.fixture(scope="module")
def advice():
    return advise(space())


def test_all_devices_are_used_and_every_dimension_is_open(advice):
    assert advice.recommended.plan.world == 8
    plans = [candidate.plan for candidate in advice.candidates if candidate.plan.world == 8]
    for field in ("num_ranks", "replicas", "tensor", "shard", "stages_per_rank", "num_microbatches"):
        assert len({getattr(plan, field) for plan in plans}) > 1, field
    assert advice.fits
    assert make_again(advice.recommended.plan) == pytest.approx(advice.recommended.step_time_s)


def make_again(plan):
    (found,) = predict_all([plan])
    return found.step_time_s


def test_it_is_no_worse_than_an_explicit_sweep():
    tight = SMALL["cluster"] | {"memory_reserve": "74 GiB"}
    lists = {
        "microbatches": [4, 8, 16],
        "schedule": "1f1b",
        "checkpoint": ["never", "always"],
        "recompute_unit": "layer",
    }
    best = advise(space(cluster=tight, plan=lists)).recommended
    swept = []
    for T, D in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)):
        fixed = {"stages": 8 // T // D, "tensor": T, "replicas": D, "shard": ["none", "optimizer", "parameters"]}
        lists_of_it = lists | fixed | {"microbatches": [M for M in lists["microbatches"] if M <= 32 // D]}
        points = parse_scenario(Document("test.yaml", SMALL | {"cluster": tight, "plan": lists_of_it}))
        swept += predict_all([make_plan(point) for point in points])
    fitting = [found.step_time_s for found in swept if found.fits]
    assert fitting
    assert best.fits
    assert best.step_time_s <= min(fitting) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("devices", "batch", "latency", "world"),
    [(5, 32, "31 ms", 2), (7, 24, "7 us", 6)],
    ids=["slow links cost more than devices bring", "seven do not divide the batch"],
)
def test_fewer_devices_are_used_where_that_is_faster(devices, batch, latency, world):
    model = SMALL["model"] | {"hidden": 512}
    cluster = {"device": "a100-80gb", "devices_per_node": devices} | {"link": {"bandwidth": "300 GB/s"}}
    cluster["link"] |= {"latency": latency}
    found = advise(space(model=model, batch=batch, cluster=cluster))
    assert found.recommended.plan.world == world
    assert found.recommended.step_time_s < min(c.step_time_s for c in found.candidates if c.plan.world == devices)


def test_what_is_given_stays():
    plan = advise(
        space(plan={"tensor": 2, "microbatches": 4, "schedule": "1f1b", "shard": "optimizer"})
    ).recommended.plan
    assert (plan.tensor, plan.num_microbatches, plan.schedule) == (2, 4, "1f1b")
    assert plan.shard == "optimizer" or plan.replicas == 1
    assert not space(plan={"stages": 4}).is_joint, "a number of stages is a pipeline"
    listed = advise(space(plan={"stages": 2, "tensor": [2, 4], "microbatches": 8, "checkpoint": "never"}))
    assert {c.plan.tensor for c in listed.candidates} == {2, 4}, "lists beside a number of stages are what there is"


def test_it_says_why_not_the_neighbours():
    large = {"layers": 24, "hidden": 8192, "heads": 64, "sequence": 2048, "vocab": 32000}
    found = advise(space(model={"kind": "transformer"} | large, cluster=SMALL["cluster"] | {"nodes": 4}))
    assert "16 copies of the whole model would not fit" in why_not_copies(found)
    assert "One tensor group of all 16 devices would take" in why_not_one_group(found)
    assert "collectives over the network" in why_not_one_group(found)


def test_money_and_memory_are_objectives_too(advice):
    cheap = advise(replace(space(), objective="money")).recommended
    assert cheap.step_time_s * cheap.plan.world <= advice.recommended.step_time_s * advice.recommended.plan.world
    assert cheap.plan.world < 8, "fewer devices exchange less"
    assert advise(replace(space(), objective="memory")).recommended.peak_bytes < advice.recommended.peak_bytes


def test_nothing_fits_is_told_with_what_would():
    tight = SMALL["cluster"] | {"memory_reserve": "77.5 GiB", "nodes": 1}
    asked = space(cluster=tight)
    found = advise(asked)
    assert not found.fits
    told = list(remedies(asked, found.recommended))
    assert any("nodes instead of 1 would fit" in one for one in told)


def test_a_measured_or_uneven_cluster_is_searched_as_before():
    slow = SMALL["cluster"] | {"slowdown": {0: 1.2}}
    assert not space(cluster=slow).is_joint
    assert space().is_joint
    (alone,) = (scenario(SMALL | {"cluster": {"device": "a100-80gb", "devices_per_node": 1, "link": "nvlink3"}}),)
    assert not space_of([alone]).is_joint


def test_the_command_takes_an_objective(tmp_path, capsys):
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps(SMALL | {"plan": {"microbatches": 4, "schedule": "1f1b", "checkpoint": "never"}}))
    status, out, _ = run(capsys, "plan", path, "--objective", "memory", "--json")
    found = json.loads(out)
    least = min(max(one["peak_memory_bytes"]) for one in found["results"])
    assert status == 0
    assert max(found["results"][found["recommended"]]["peak_memory_bytes"]) == least
    status, _, error = run(capsys, "plan", path, "--objective", "tim")
    assert status == 2
    assert "--objective: objective: found 'tim', did you mean 'time'?" in error


def test_a_plan_is_described_with_its_group():
    lists = {"stages": 1, "replicas": 2, "tensor": 4, "microbatches": 4}
    (grouped,) = map(make_plan, parse_scenario(Document("test.yaml", SMALL | {"plan": lists})))
    assert " D=2, T=4," in describe(grouped)
