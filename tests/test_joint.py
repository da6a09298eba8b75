"""The joint search: stages, replicas, tensor groups and all that goes with them, at once."""

import json
import random
from contextlib import suppress
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from commands import run
from plans import scenario

from gpipe_sim.base.files import Document, InputError
from gpipe_sim.explain.predict import predict_all
from gpipe_sim.make.making import make_plan
from gpipe_sim.scenario.mesh import MESSAGES_INSIDE, SUMS_INSIDE
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


def random_case(luck):
    """A cluster, a model, a batch, and lists of what is left; memory may be scarce, devices may differ."""
    nodes, each = luck.choice([(1, 4), (2, 2), (2, 4), (3, 2), (4, 2)])
    heads = luck.choice([8, 16])
    model = {"kind": "transformer", "layers": luck.choice([4, 8, 13]), "hidden": heads * 64, "heads": heads}
    model |= {"sequence": luck.choice([512, 1024]), "vocab": luck.choice([8000, 64000])}
    cluster = {"nodes": nodes, "devices_per_node": each, "link": luck.choice(["nvlink3", "pcie4"])}
    cluster |= {"nics": luck.choice([1, 2]), "memory_reserve": f"{80 - luck.choice([1, 2, 4, 40])} GiB"}
    cluster |= {"network": luck.choice(["10gbit", "100gbit", "400gbit"])} if nodes > 1 else {}
    kinds = luck.choice(["alike", "alike", "straggler", "mixed"])
    if kinds == "mixed" and nodes > 1:
        first = luck.randint(1, nodes - 1)
        del cluster["nodes"]
        devices = ((first, "a100-80gb"), (nodes - first, "h100-80gb"))
        cluster["groups"] = [{"nodes": count, "device": device} for count, device in devices]
    else:
        cluster["device"] = "a100-80gb"
        cluster |= {"slowdown": {luck.randrange(nodes * each): 1.5}} if kinds == "straggler" else {}
    plan = {"schedule": luck.choice([["1f1b"], ["gpipe", "1f1b"], ["1f1b", "interleaved_1f1b"], ["zb_h1"]])}
    plan |= {"microbatches": sorted(luck.sample([1, 2, 4, 6, 8], 2)), "checkpoint": ["never", "always"]}
    plan |= {"recompute_unit": "stage" if plan["schedule"] == ["zb_h1"] else luck.choice(["stage", "layer"])}
    return {"name": "random", "model": model, "batch": luck.choice([8, 16, 24]), "cluster": cluster, "plan": plan}


def everything(case):
    """Every plan of all its devices, written out: dimensions, their order, what is divided, stages on a rank."""
    plan, cluster = case["plan"], case["cluster"]
    nodes = cluster.get("nodes") or sum(group["nodes"] for group in cluster["groups"])
    world = nodes * cluster["devices_per_node"]
    for T, D, schedule in product(range(1, world + 1), range(1, world + 1), plan["schedule"]):
        K, rest = divmod(world, T * D)
        for v in (2, 3, 4) if schedule.startswith("interleaved") else (1,):
            counts = [M for M in plan["microbatches"] if M <= case["batch"] // D]
            if rest or K == 0 or (v > 1 and K == 1):
                continue
            fixed = {"tensor": T, "replicas": D, "stages": K * v, "stages_per_rank": v, "schedule": schedule}
            lists = {"shard": ["none", "optimizer", "parameters"] if D > 1 else "none"}
            lists |= {"order": [list(SUMS_INSIDE), list(MESSAGES_INSIDE)]} if 1 < D < world else {}
            for M, order in product(counts, lists.pop("order", [list(SUMS_INSIDE)])):
                chosen = plan | fixed | lists | {"microbatches": M, "order": order}
                with suppress(InputError):  # what cannot be
                    yield from map(make_plan, parse_scenario(Document("test.yaml", case | {"plan": chosen})))


@pytest.mark.parametrize("seed", (0, 1, 2, 4, 7, 8, 9))
def test_it_is_never_worse_than_everything_written_out(seed):
    case = random_case(random.Random(seed))
    asked = space_of(list(parse_scenario(Document("test.yaml", case))))
    assert asked.is_joint
    best = advise(asked).recommended
    fitting = [found.step_time_s for found in predict_all(list(everything(case))) if found.fits]
    assert best.fits or not fitting
    assert best.step_time_s <= min(fitting, default=np.inf) * (1 + 1e-9)


def test_copies_of_the_whole_model_may_have_any_schedule_that_is_asked_for():
    for asked in ("zb_h1", "interleaved_1f1b"):
        node = SMALL["cluster"] | {"nodes": 1}
        best = advise(space(cluster=node, plan={"schedule": asked, "microbatches": 1})).recommended.plan
        assert (best.schedule, best.num_ranks) == (asked, 1), "a pipeline would wait for its only micro-batch"


def test_the_order_of_dimensions_is_chosen_too():
    """A large batch in few weights over a slow network: messages had better stay inside a node. With two replicas of
    two ranks given, either order may be asked for, too."""
    slow = SMALL["cluster"] | {"network": "10gbit", "nics": 1, "devices_per_node": 2}
    slow |= {"memory_reserve": f"{80 * 2**30 - 1_180_000_000} B"}  # two devices alone would not hold it
    fixed = {"replicas": [2], "tensor": [1], "microbatches": 8, "schedule": "1f1b", "checkpoint": "never"}
    fixed |= {"shard": "none"}
    model = SMALL["model"] | {"layers": 4, "vocab": 1000, "hidden": 1024}
    found = {}
    for order in (None, ["tensor", "data", "pipeline"], ["tensor", "pipeline", "data"]):
        asked = {"plan": fixed | ({"order": order} if order else {}), "cluster": slow, "model": model}
        points = [point.plan for point in parse_scenario(Document("test.yaml", SMALL | asked))]
        assert [list(point.order) for point in points] == [order or ["tensor", "data", "pipeline"]]
        del asked["plan"]["tensor"]  # open: the search is joint
        found[str(order)] = advise(space(**asked)).recommended
    free, sums, messages = found.values()
    assert free.step_time_s <= min(sums.step_time_s, messages.step_time_s)
    assert messages.step_time_s < sums.step_time_s
    assert messages.plan.mesh.messages_inside


def test_a_tensor_group_may_span_nodes_where_the_network_is_as_fast_as_links():
    cluster = SMALL["cluster"] | {"nodes": 4, "devices_per_node": 2, "link": "pcie4", "network": "400gbit", "nics": 2}
    model = SMALL["model"] | {"layers": 4, "hidden": 4096, "heads": 32, "sequence": 512, "attention": "classic"}
    lists = {"microbatches": 1, "schedule": "1f1b", "checkpoint": "never"}
    best = advise(space(cluster=cluster, model=model, batch=8, plan=lists)).recommended.plan
    assert (best.tensor, best.tensors_per_node) == (4, 2)


def test_the_order_matters_in_one_node_with_a_straggler():
    """Beside another copy of its rank, the straggler slows one stage, which the cut makes smaller; as one rank of
    each of two, it does not."""
    cluster = {"device": "a100-80gb", "devices_per_node": 4, "link": "nvlink3", "slowdown": {1: 1.5}}
    lists = {"replicas": 2, "microbatches": 16, "schedule": "1f1b", "checkpoint": "always", "recompute_unit": "stage"}
    found = advise(space(cluster=cluster, plan=lists))
    assert {c.plan.dimensions for c in found.candidates if c.plan.num_ranks == 2} == {SUMS_INSIDE, MESSAGES_INSIDE}


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


def test_mixed_devices_are_searched_with_all_dimensions():
    """Three nodes, one of which is faster: no worse than any plan that lists find, and cut for the speeds."""
    groups = [{"nodes": 1, "device": "h100-80gb"}, {"nodes": 2, "device": "a100-80gb"}]
    cluster = {"groups": groups, "devices_per_node": 2, "link": "nvlink3", "network": "100gbit", "nics": 2}
    lists = {
        "microbatches": [2, 4, 8],
        "schedule": "1f1b",
        "checkpoint": ["never", "always"],
        "recompute_unit": "layer",
    }
    found = advise(space_of(list(parse_scenario(Document("test.yaml", uneven(cluster, lists))))))
    swept = []
    for T, D in ((1, 1), (1, 2), (1, 3), (1, 6), (2, 1), (2, 3), (6, 1)):
        for order in (["tensor", "data", "pipeline"], ["tensor", "pipeline", "data"]):
            fixed = {"stages": 6 // T // D, "tensor": T, "replicas": D, "order": order}
            fixed["microbatches"] = [M for M in lists["microbatches"] if M <= 12 // D]
            try:
                points = parse_scenario(Document("test.yaml", uneven(cluster, lists | fixed)))
            except InputError:  # replicas that would not be alike
                continue
            swept += predict_all([make_plan(point) for point in points])
    assert {one.plan.replicas for one in swept} == {1, 2, 3, 6}
    assert found.recommended.step_time_s <= min(one.step_time_s for one in swept if one.fits) * (1 + 1e-9)
    pipeline = next(c.plan for c in found.candidates if c.plan.num_ranks == 6 and c.plan.checkpoint[0] == "never")
    assert min(pipeline.balance[:2]) > max(pipeline.balance[2:5])


def uneven(cluster, plan):
    model = {"kind": "transformer", "layers": 22, "hidden": 1024, "heads": 16, "sequence": 1024, "vocab": 1000}
    return {"name": "uneven", "model": model, "batch": 12, "cluster": cluster, "plan": plan}


def test_a_straggler_may_be_left_out():
    slow = {"device": "a100-80gb", "devices_per_node": 4, "link": "nvlink3", "slowdown": {3: 20.0}}
    best = advise(space(cluster=slow, plan={"microbatches": 8, "schedule": "1f1b"})).recommended.plan
    assert best.num_ranks == best.world == 3
    assert 3 not in best.placement


def test_replicas_may_be_listed_beside_a_straggler():
    cluster = SMALL["cluster"] | {"slowdown": {0: 1.2}}
    lists = {"stages": 4, "replicas": [1, 2], "microbatches": 8, "schedule": "1f1b", "checkpoint": "never"}
    found = advise(space(cluster=cluster, plan=lists))
    assert {c.plan.replicas for c in found.candidates} == {1, 2}
    assert found.recommended.plan.replicas == 2


def test_with_jitter_the_best_are_weighed_with_the_same_luck():
    found = advise(space(cluster=SMALL["cluster"] | {"jitter": {"cv": 0.05, "samples": 10}}, batch=16))
    assert found.recommended.plan.world == 8
    assert found.recommended.plan.scenario.cluster.jitter is not None
    assert found.rivals
    assert all(rival.beaten is not None for rival in found.rivals)


def test_a_measured_cluster_is_searched_as_before():
    assert space().is_joint
    assert not space(cluster=SMALL["cluster"] | {"links": {0: "10gbit"}}).is_joint
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


def test_a_plan_is_described_with_its_group_and_its_order():
    fixed = {"stages": 2, "replicas": 2, "tensor": 2, "microbatches": 4, "schedule": "1f1b", "checkpoint": "never"}
    orders = ["tensor", "data", "pipeline"], ["tensor", "pipeline", "data"]
    words = [describe(advise(space(plan=fixed | {"order": list(order)})).recommended.plan) for order in orders]
    assert all(" D=2, T=2," in one for one in words)
    assert ["ranks of a replica together" in one for one in words] == [False, True]
