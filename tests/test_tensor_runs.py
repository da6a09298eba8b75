"""Tensor groups, executed: exact in float64, refused where they would not be."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from plans import scenario
from processes import run_ranks

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from torch import nn  # noqa: E402

from gpipe_exec import Pipeline  # noqa: E402
from gpipe_exec.alternatives.rehearsal import default_stretch, refuse_rehearsal  # noqa: E402
from gpipe_exec.devices.allocator import trace_bytes  # noqa: E402
from gpipe_exec.devices.recorder import StepRecord  # noqa: E402
from gpipe_exec.engine.slices import plain_name, refuse_tensor  # noqa: E402
from gpipe_exec.layers import build_workload  # noqa: E402
from gpipe_exec.run.launch import Settings, execute  # noqa: E402
from gpipe_exec.run.records import groups_as_one  # noqa: E402
from gpipe_sim.base.files import InputError, yaml_text  # noqa: E402
from gpipe_sim.commands.profile import measure  # noqa: E402
from gpipe_sim.cost.analytic import build_profile  # noqa: E402
from gpipe_sim.cost.profile import load_profile  # noqa: E402
from gpipe_sim.make.making import make_plan  # noqa: E402
from gpipe_sim.make.planfile import read_plan  # noqa: E402
from gpipe_sim.runs.compare import compare_run  # noqa: E402
from gpipe_sim.runs.directory import load_run  # noqa: E402

SHAPE = {"kind": "transformer", "layers": 2, "hidden": 16, "heads": 4, "vocab": 26, "sequence": 8}
DEVICE = {"memory": "16 GiB", "compute": "1 TFLOP/s", "bandwidth": "1 GB/s"}


def plan_of(model=SHAPE, **choices):
    data = {"name": "test", "model": model, "batch": 4, "dtype": "fp32"}
    data |= {"cluster": {"device": DEVICE, "link": "nvlink3"}}
    return make_plan(scenario(data | {"plan": {"stages": 1, "tensor": 2, "microbatches": 2} | choices}))


def scenario_with(made, *, profile, **choices):
    """A plan's scenario with other choices."""
    spec = made.scenario.plan.model_copy(update=choices)
    return replace(made.scenario, plan=spec, profile=None if profile is None else Path(profile))


@pytest.mark.parametrize(("K", "D"), [(1, 1), (2, 1), (1, 2)])
def test_training_is_that_of_one_process(K, D):
    """Every schedule and shard, with and without a split sequence: losses, gradients, norms, updates, checkpoints."""
    assert "plans are exact" in run_ranks(2 * K * D, "tensor.py", K, D)


@pytest.mark.parametrize(
    ("shape", "T", "message"),
    [
        ({"kv_heads": 2}, 4, "model.kv_heads: found 2, expected a multiple of plan.tensor, 4"),
        ({"vocab": 27}, 2, "model.vocab: found 27, expected a multiple of plan.tensor, 2"),
    ],
)
def test_what_cannot_be_divided_equally_is_refused_at_its_field(shape, T, message):
    with pytest.raises(InputError, match=message):
        refuse_tensor(plan_of(SHAPE | shape, tensor=T))


def test_layers_must_be_as_many_processes_as_the_plan_says():
    plan = plan_of()
    workload = build_workload(plan.scenario)
    with pytest.raises(ValueError, match="1 process for a plan of 1 ranks, each of 2 members, expected one for each"):
        Pipeline(workload.layers, plan, workload.loss)


@pytest.fixture(scope="module")
def run_of_a_group(tmp_path_factory):
    """A measured profile of a group of two, and a run of two groups' worth of steps that is predicted from it."""
    folder = tmp_path_factory.mktemp("group")
    model = SHAPE | {"hidden": 64, "sequence": 32, "vocab": 200, "attention": "classic"}
    data = {"name": "grouped", "model": model, "batch": 4, "dtype": "fp32", "optimizer": "adam"}
    data |= {"cluster": {"device": "cpu", "link": "measured", "devices_per_node": 4}}
    data |= {"plan": {"stages": 1, "tensor": 2, "microbatches": 2, "checkpoint": "never", "schedule": "1f1b"}}
    file = folder / "group.yaml"
    file.write_text(yaml_text(data))
    measure(file, "cpu", folder / "profile.json")
    file.write_text(yaml_text(data | {"profile": "profile.json"}))
    (folder / "run").mkdir()
    execute(read_plan(file), folder / "run", Settings(device="cpu", steps=2, warmup=1, reprofile=True))
    return folder / "run"


def test_a_profile_is_measured_in_groups(run_of_a_group):
    made, _ = load_run(run_of_a_group)
    profile = load_profile(run_of_a_group.parent / "profile.json")
    assert (profile.source, profile.tensor, profile.sequence_split) == ("measured", 2, True)
    assert profile.names == ("0:Embedding", "1:Block", "2:Block", "3:LayerNorm", "4:Linear")
    one, other = (build_profile(scenario_with(made, tensor=T, profile=None), (2,)) for T in (1, 2))
    assert profile.parameter_bytes.tolist() == other.parameter_bytes.tolist() != one.parameter_bytes.tolist()
    assert (profile.table["tensor_s"][:3] > 0).all()
    assert (profile.table["tensor_s"] <= 0).tolist() == [[layer == 3] * 2 for layer in range(5)]
    assert profile.at(2).output_bytes.tolist() == [2 * 4 * 32 * 64 / 2] * 4 + [0]


def test_a_profile_with_another_way_to_split_the_sequence_is_refused(run_of_a_group):
    made, _ = load_run(run_of_a_group)
    path = str(run_of_a_group.parent / "profile.json")
    with pytest.raises(InputError, match=r"plan.sequence_split: found false, expected true, with which .* measured"):
        build_profile(scenario_with(made, sequence_split=False, profile=path), (2,))


def test_a_run_of_a_group_has_a_timeline_for_it_and_the_bytes_of_one_member(run_of_a_group):
    made, measured = load_run(run_of_a_group)
    assert (made.tensor, made.world, made.num_ranks) == (2, 2, 1)
    assert all(len(step.ranks) == 1 for step in measured.steps)
    assert len(list((run_of_a_group / "ranks").glob("rank*.json"))) == 2
    comparison = compare_run(made, measured)
    assert sum(comparison.attribution_s.values()) == pytest.approx(
        comparison.prediction.step_time_s - comparison.step_time_s
    )
    # What collectives were given may be seen let go of only when it is taken again: at most some boundaries more.
    (error,) = comparison.to_dict()["peak_memory_bytes"]["error"]
    assert -0.1 < error < 0.02


def test_a_rehearsal_of_groups_holds_and_takes_what_was_predicted_of_a_member(tmp_path):
    """With exact bytes: nothing is exchanged, so that nothing is let go of elsewhere."""
    one = plan_of(SHAPE | {"hidden": 1024, "sequence": 256, "layers": 4}, stages=2, checkpoint="never")
    execute(one, tmp_path, Settings(device="rehearse", steps=1, warmup=1, stretch=default_stretch(one)))
    made, measured = load_run(tmp_path)
    comparison = compare_run(made, measured)
    assert (made.world, len(measured.steps[0].ranks)) == (4, 2)
    assert comparison.to_dict()["peak_memory_bytes"]["error"] == pytest.approx([0.0, 0.0], abs=0.02)
    for timeline in measured.steps[0].ranks:
        nominal = {"F": made.forward_s, "B": made.backward_s}
        for action, taken in zip(timeline.actions, timeline.end_s - timeline.start_s, strict=True):
            if action.kind in nominal:
                assert taken > 0.95 * nominal[action.kind][action.stage, action.microbatch]


def test_a_rehearsal_cannot_send_slices_of_what_members_have_in_common():
    with pytest.raises(InputError, match=r"plan.sequence_split: found false, expected true in a rehearsal"):
        refuse_rehearsal(plan_of(stages=2, sequence_split=False))


def test_a_group_begins_and_ends_with_the_last_of_its_members():
    columns = {"waited_from": [0.0, 2.0], "delivered": [float("nan")] * 2}
    members = [
        StepRecord(start=[1.0, 2.5], end=[2.0, 3.0], **columns),
        StepRecord(start=[1.1, 2.4], end=[1.9, 3.2], **columns),
    ]
    (one,) = groups_as_one(members, plan_of())
    assert (one.start, one.end) == ([1.1, 2.5], [2.0, 3.2])


def test_what_an_unseen_thread_lets_go_of_is_noticed_when_it_is_taken_again():
    """A thread that nobody profiles is the last to hold a block, as gloo's may be; the system gives the place again."""
    block, held = 2**26, []

    def work() -> list[torch.Tensor]:
        held.append(torch.empty(block, dtype=torch.uint8))
        place = held[0].data_ptr()
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        found = []
        while not found or (found[-1].data_ptr() != place and len(found) < 50):
            found.append(torch.empty(block, dtype=torch.uint8))
        assert found[-1].data_ptr() == place
        return found

    trace, kept = trace_bytes(torch.device("cpu"), work)
    assert trace.held_bytes[-1] == block * len(kept)


def test_names_are_those_of_the_whole_model():
    names = ["1.qkv.parametrizations.weight.original", "3.parametrizations.weight.original", "0.positions.weight"]
    assert list(map(plain_name, names)) == ["1.qkv.weight", "3.weight", "0.positions.weight"]


def test_a_loss_in_float64_is_computed_in_float64():
    plan = plan_of(tensor=1)
    workload = build_workload(plan.scenario)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert torch.equal(workload.loss(logits, targets), expected)
