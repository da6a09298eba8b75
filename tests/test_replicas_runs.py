"""Runs of replicas: what is recorded of each of them, written down, compared and attributed."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plan
from test_compare import scaled
from test_rehearsal import made
from test_replicas import WEIGHTS, replicated_plans
from test_runs import gpipe, scenario_file

from gpipe_sim.base.files import InputError, parse_json
from gpipe_sim.plan.plan import Plan
from gpipe_sim.runs.compare import attribute, compare_run
from gpipe_sim.runs.directory import Measured, load_run, parse_measured, save_measured
from gpipe_sim.step.metrics import step_time_s
from gpipe_sim.step.simulate import simulate
from gpipe_sim.step.step import Step, joined_replicas

pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

import torch
import torch.distributed as dist

from gpipe_exec.alternatives.rehearsal import default_stretch, what_is_left_out
from gpipe_exec.devices.recorder import StepRecord
from gpipe_exec.engine.shards import Shards
from gpipe_exec.run.launch import Settings, check_runnable, execute
from gpipe_exec.run.records import RankRecord, gather


def happened(made: Plan) -> Step:
    """A step of every replica, also where one stands for all."""
    step = simulate(made)
    return step if step.replicas else joined_replicas([step] * made.replicas)


def with_sums(D: int = 2, **settings: object) -> Plan:
    return plan(WEIGHTS, 4, batch=4 * D, bandwidth="100 B/s", replicas=D, **settings)


@settings(max_examples=20)
@given(replicated_plans, st.floats(0.5, 2.0))
def test_the_shares_of_replicas_sum_to_the_error_and_their_own_figures_explain_the_step(made, factor):
    step = happened(scaled(scaled(made, "forward_s", factor), "output_bytes", 1 / factor))
    predicted = step_time_s(simulate(made))
    found = attribute(made, step, predicted)
    assert sum(found.values()) == pytest.approx(predicted - step_time_s(step), abs=1e-9)
    assert found["unexplained"] == pytest.approx(0, abs=1e-6 * step_time_s(step))


def test_slower_sums_are_blamed_on_collectives():
    made = with_sums()
    heavier = replace(made, profile=replace(made.profile, parameter_bytes=3 * made.profile.parameter_bytes))
    step = happened(heavier)
    predicted = step_time_s(simulate(made))
    found = attribute(made, step, predicted)
    assert found["collectives"] == pytest.approx(predicted - step_time_s(step)) == pytest.approx(-2.0)
    assert found["compute"] == pytest.approx(0)


def test_a_replica_that_was_slower_than_the_others_is_blamed_on_compute():
    made = with_sums()
    step = happened(with_sums(cluster={"slowdown": {3: 2.0}}))
    found = attribute(made, step, step_time_s(simulate(made)))
    assert found["compute"] == pytest.approx(step_time_s(simulate(made)) - step_time_s(step))


def test_every_replica_is_written_down_and_read_again(tmp_path):
    made = with_sums(3, cluster={"slowdown": {4: 2.0}})
    step = simulate(made)
    save_measured(Measured(device="cpu", engine="gpipe", steps=(step,)), tmp_path / "measured.json")
    text = (tmp_path / "measured.json").read_text()
    (again,) = parse_measured(parse_json(text, "measured.json"), made).steps
    assert len(again.replicas) == 3
    for one, other in zip(step.replicas, again.replicas, strict=True):
        for mine, read in zip(one.ranks, other.ranks, strict=True):
            assert (mine.end_s == read.end_s).all()
            assert (mine.lane_end_s == read.lane_end_s).all()
            assert mine.lane == read.lane
    assert step_time_s(again) == step_time_s(step)
    wrong = json.loads(text)
    wrong["steps"][0][5]["lane_end_s"] = [-1.0]
    with pytest.raises(InputError, match=r"steps\[?.*collective 0 ends at -1, before its start"):
        parse_measured(parse_json(json.dumps(wrong), "measured.json"), made)
    wrong["steps"][0][5]["lane_end_s"] = []
    with pytest.raises(InputError, match="other actions than the plan"):
        parse_measured(parse_json(json.dumps(wrong), "measured.json"), made)


def test_a_collective_starts_when_the_last_replica_is_ready(tmp_path):
    """Records as two processes of one stage leave them: the second is ready a second later."""
    made = plan(WEIGHTS, 2, batch=4, bandwidth="100 B/s", replicas=2, stages=1)
    actions = len(simulate(made).ranks[0].actions)
    for process, late in enumerate((0.0, 1.0)):
        starts = [*(100.0 + late + row for row in range(actions - 1)), 120.0]
        ready, noted, nothing = starts[-2] + 1, 120.0 + 0.001 * process, [float("nan")] * actions
        step = StepRecord(starts, starts, [start + 1 for start in starts], nothing, [ready], [noted])
        RankRecord(rank=process, clock=[(0.0, 0.0)], steps=[step], done=1).save(tmp_path)
    measured = gather(made, tmp_path, device="cpu", engine="gpipe", stretch=2.0)
    assert measured is not None
    first, second = (one.ranks[0] for one in measured.steps[0].replicas)
    assert first.start_s[0] == 0.0 < second.start_s[0] == 0.5
    assert first.lane_start_s == second.lane_start_s == second.last_backward_s
    assert first.lane_end_s == second.lane_end_s == first.start_s[-1] == 10.0
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {"rank0_trace.json", "rank1_trace.json"}


# --- with real processes --------------------------------------------------------------------------------------------


SLOWDOWN = 3.0
"""So much that nothing else which runs on this machine makes every action of a rank as slow."""


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Two replicas of two stages that divide their parameters; a rank of the second is slower."""
    cluster = {"devices_per_node": 4, "slowdown": {3: SLOWDOWN}}
    one = made(stages=2, batch=12, replicas=2, shard="parameters", cluster=cluster)
    folder = tmp_path_factory.mktemp("rehearsal")
    execute(one, folder, Settings(device="rehearse", steps=2, warmup=1, stretch=default_stretch(one)))
    return load_run(folder)


def test_a_rehearsal_gathers_before_the_first_forward_and_sums_when_the_last_replica_is_ready(rehearsed):
    _, measured = rehearsed
    for step in measured.steps:
        for alike in zip(*(one.ranks for one in step.replicas), strict=True):
            ready = max(timeline.last_backward_s for timeline in alike)
            for timeline in alike:
                gather, total = timeline.lane
                assert (gather.kind, total.kind) == ("G", "S")
                assert timeline.lane_end_s[0] <= timeline.start_s[0]
                assert ready <= timeline.lane_start_s[1] <= timeline.lane_end_s[1] <= timeline.start_s[-1]


def test_a_rehearsal_of_replicas_holds_what_was_predicted_and_its_own_figures_explain_it(rehearsed):
    made, measured = rehearsed
    comparison = compare_run(made, measured)
    assert comparison.to_dict()["peak_memory_bytes"]["error"] == pytest.approx([0.0, 0.0], abs=0.02)
    assert abs(comparison.attribution_s["unexplained"]) < 0.01 * comparison.step_time_s
    ranks = [[step.replicas[replica].ranks[1] for step in measured.steps] for replica in range(2)]
    fast, slow = (min((one.end_s - one.start_s)[one.actions.are("F")].min() for one in steps) for steps in ranks)
    nominal = made.forward_s[1].min()
    assert (
        nominal * (1 - 1e-6) <= fast < SLOWDOWN * nominal * (1 - 1e-6) <= slow
    )  # what else runs makes them only longer


def test_replicas_that_divide_the_optimizers_state_run_and_are_compared(tmp_path):
    scenario = scenario_file(tmp_path, "fine")
    text = scenario.read_text().replace("stages: 2", "stages: 1, replicas: 2, shard: optimizer")
    scenario.write_text(text + "optimizer: adam\n")
    done = gpipe("run", scenario, "--device", "cpu", "--steps", 2, "--warmup", 1, "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["attribution_s"]) >= {"compute", "communication", "collectives"}
    _, measured = load_run(tmp_path / "run")
    first, second = (one.ranks[0] for one in measured.steps[0].replicas)
    assert [collective.kind for collective in first.lane] == ["S", "G"]
    assert first.lane_start_s[0] == second.lane_start_s[0]
    assert first.lane_end_s[0] <= first.start_s[-1] <= first.end_s[-1] <= first.lane_start_s[1] < first.lane_end_s[1]
    # What is held all the time: 4 x 1088 bytes of weights, and half of Adam's two numbers for each, of 10 each step.
    records = [json.loads((tmp_path / "run" / "ranks" / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [record["memory"]["static_bytes"] // 1088 for record in records] == [8, 8]


def test_what_cannot_run_with_replicas_is_refused_before_it_starts():
    one = with_sums()
    with pytest.raises(InputError, match=r"plan.replicas: found 2, expected 1: --engine torch"):
        check_runnable(one, Settings(device="cpu", engine="torch"))
    mixed = replace(one, shard="optimizer", profile=replace(one.profile, dtype="bf16"))
    with pytest.raises(InputError, match=r"plan.shard: found optimizer, expected none, or precision: pure"):
        check_runnable(mixed, Settings(device="cpu"))


def test_a_rehearsal_says_that_replicas_share_a_card_which_it_leaves_out():
    nodes = {"nodes": 2, "devices_per_node": 2, "network": {"bandwidth": "20 B/s"}}
    (said,) = what_is_left_out(with_sums(cluster=nodes))
    assert said.startswith("shared network cards")


class Tuned(torch.optim.SGD):
    """Who knows what it does."""


@pytest.mark.parametrize(
    ("optimizer", "taken"), [(torch.optim.Adam, True), (torch.optim.Adafactor, False), (Tuned, False)]
)
def test_an_optimizer_that_looks_at_parameters_as_a_whole_is_not_given_pieces_of_them(optimizer, taken, tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        whole = torch.nn.Parameter(torch.ones(3, 4))
        shards = Shards([[whole]], dist.group.WORLD, 0, stays_whole=True)
    finally:
        dist.destroy_process_group()
    (piece,) = shards.pieces.values()
    piece.grad = torch.ones_like(piece)
    made = optimizer([piece], lr=0.1)
    if taken:
        made.step()
        return
    with pytest.raises(ValueError, match=f"found the optimizer {optimizer.__name__}, which is given pieces"):
        made.step()
    nothing_divided = torch.nn.Parameter(torch.ones(3, 4))
    nothing_divided.grad = torch.ones(3, 4)
    optimizer([nothing_divided], lr=0.1).step()
