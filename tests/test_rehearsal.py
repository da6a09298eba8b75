"""Rehearsals with real processes: layers take their time and hold their bytes, messages take the plan's links' time."""

import json
import socket
import subprocess
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import layers, plan
from test_runs import BIN, gpipe, refused, scenario_file

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from gpipe_exec.alternatives.rehearsal import (  # noqa: E402
    SHORTEST_ACTION_S,
    default_stretch,
    rehearsed_workload,
    what_is_left_out,
)
from gpipe_exec.devices.allocator import Trace, bytes_of_parts  # noqa: E402
from gpipe_exec.devices.recorder import StepRecord  # noqa: E402
from gpipe_exec.engine.stage import Stage  # noqa: E402
from gpipe_exec.run.launch import Settings, execute  # noqa: E402
from gpipe_exec.run.records import RankRecord, gather  # noqa: E402
from gpipe_sim.explain.predict import predict  # noqa: E402
from gpipe_sim.make.planfile import read_plan, save_plan  # noqa: E402
from gpipe_sim.plan.program import program_of, rank_actions  # noqa: E402
from gpipe_sim.runs.compare import compare_run  # noqa: E402
from gpipe_sim.runs.directory import load_run  # noqa: E402
from gpipe_sim.scenario.reading import load_scenario  # noqa: E402
from gpipe_sim.step.simulate import simulate  # noqa: E402

MB = 1e6


def made(**choices):
    """Six uneven layers with large messages over slow links, on three stages."""
    model = layers(
        [0.4e-3, 0.2e-3, 0.3e-3, 0.2e-3, 0.1e-3, 0.2e-3],
        [0.5e-3, 0.3e-3, 0.5e-3, 0.3e-3, 0.2e-3, 0.4e-3],
        [2 * MB] * 6,
        [5 * MB] * 6,
        parameters=3e6,
    )
    usual = {"stages": 3, "batch": 6, "bandwidth": "5 GB/s", "latency": 1e-4, "checkpoint": "except_last"}
    return plan(model, 4, **usual | choices)


@pytest.fixture(scope="module", params=[True, False], ids=["overlapped", "blocking"])
def rehearsed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    one = made(cluster={"overlap": request.param})
    execute(one, folder / "run", Settings(device="rehearse", steps=2, warmup=1, stretch=default_stretch(one)))
    return load_run(folder / "run")


def test_a_rehearsal_takes_at_least_the_profiled_time_of_every_action(rehearsed):
    planned, measured = rehearsed
    nominal = {
        action: end - start
        for timeline in simulate(planned).ranks
        for action, start, end in zip(timeline.actions, timeline.start_s, timeline.end_s, strict=True)
    }
    for step in measured.steps:
        for timeline in step.ranks:
            for action, taken in zip(timeline.actions, timeline.end_s - timeline.start_s, strict=True):
                assert taken >= nominal[action] * (1 - 1e-6)


def test_a_message_arrives_no_sooner_than_its_link_could_carry_it(rehearsed):
    planned, measured = rehearsed
    senders = program_of(planned).senders()
    for step in measured.steps:
        end = {a: t.end_s[row] for t in step.ranks for row, a in enumerate(t.actions)}
        for timeline in step.ranks:
            for row, action in enumerate(timeline.actions):
                sender = senders.get(action)
                if sender is not None:
                    edge = min(sender.stage, action.stage)
                    link = planned.link(edge)
                    least = link.latency + planned.message_bytes[edge, action.microbatch] / link.bandwidth
                    assert timeline.start_s[row] >= end[sender] + least * (1 - 1e-6)


def test_a_blocking_sender_stands_still_until_delivery(rehearsed):
    _, measured = rehearsed
    for timeline in measured.steps[0].ranks:
        for row in range(len(timeline.actions) - 1):
            if timeline.blocking and not np.isnan(timeline.send_end_s[row]):
                assert timeline.start_s[row + 1] >= timeline.send_end_s[row]


def test_a_rehearsal_holds_what_the_memory_model_says(rehearsed):
    planned, measured = rehearsed
    assert measured.peak_memory_bytes == pytest.approx(predict(planned).peak_memory_bytes, rel=0.01)
    assert [curve.peak_bytes for curve in measured.memory] == pytest.approx(list(measured.peak_memory_bytes), rel=1e-6)


def test_the_prediction_of_a_rehearsal_knows_the_engines_own_overhead(rehearsed):
    planned, measured = rehearsed
    assert 0 < planned.profile.action_overhead_s < planned.forward_s.min()
    assert measured.stretch == pytest.approx(default_stretch(made()))
    comparison = compare_run(planned, measured)
    assert abs(comparison.attribution_s["unexplained"]) < 1e-2 * comparison.step_time_s


@pytest.mark.parametrize("stage_index", [0, 1, 2])
def test_the_halves_of_a_rehearsed_backward_take_their_times_and_hold_their_bytes(stage_index):
    model = layers([2e-3] * 6, [6e-3] * 6, [2 * MB] * 6, [5 * MB] * 6, parameters=3e6)
    for i, layer in enumerate(model["layers"]):
        layer |= {"backward_weights": f"{1 + i % 3} ms", "kept": f"{3 + i} MB"}
    one = plan(model, 4, stages=3, batch=8, checkpoint="never")
    workload, _ = rehearsed_workload(one, [stage_index], 1.0)
    span, n = one.stages[stage_index], 2
    is_first, is_last = stage_index == 0, stage_index == 2
    stage = Stage(
        workload.layers[span], torch.device("cpu"), is_first, workload.loss if is_last else None, [False], split=[True]
    )
    rows = torch.empty((n, int(MB)), dtype=torch.float16)
    times, received = [], []

    def forward():
        output = stage.forward(0, workload.sample(n)[0] if is_first else rows, None, 1.0)
        received.extend([] if is_last else [torch.empty_like(output)])

    def timed(work):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)

    _, inputs, weights = bytes_of_parts(
        torch.device("cpu"),
        [
            forward,
            lambda: timed(lambda: stage.backward_inputs(0, [received.pop()] if received else [])),
            lambda: timed(lambda: stage.backward_weights(0)),
        ],
    )
    costs = one.profile.at(n)
    assert times[0] >= costs.backward_inputs_s[span].sum()
    assert times[1] >= costs.backward_weights_s[span].sum()
    assert inputs.after == pytest.approx(costs.kept_bytes[span].sum(), rel=1e-3)
    assert weights.after == pytest.approx(one.profile.parameter_bytes[span].sum(), rel=1e-3)


def test_the_shortest_action_is_stretched_to_twenty_milliseconds():
    one = made()
    shortest = min(one.forward_s.min(), one.backward_s.min())
    assert default_stretch(one) * shortest == pytest.approx(SHORTEST_ACTION_S)
    assert default_stretch(plan(layers([1.0, 2.0]), 2)) == 1.0


def test_what_a_rehearsal_cannot_show_is_said():
    assert what_is_left_out(made()) == []
    crowded = made(cluster={"cores": 1, "jitter": {"cv": 0.1, "samples": 2}})
    assert [text.split(":")[0] for text in what_is_left_out(crowded)] == ["shared cores", "jitter"]


def test_the_command_rehearses_any_scenario_and_says_so(tmp_path):
    save_plan(made(stages=2), tmp_path / "plan.yaml")
    out = tmp_path / "run"
    done = gpipe(
        *("run", tmp_path / "plan.yaml", "--device", "rehearse", "--stretch", 10, "--steps", 1, "--warmup", 0),
        *("--out", out),
    )
    assert done.returncode == 0, done.stderr
    assert "a rehearsal, 10 times slower" in done.stderr
    assert "It ran 10 times slower" in " ".join(done.stdout.split())
    page = (out / "report.html").read_text()
    assert "messages carry at most 64 KiB" in page
    assert 'data-figure="memory"' in page
    names = {path.name for path in out.iterdir()}
    assert {"scenario.yaml", "profile.json", "plan.yaml", "predicted.json", "measured.json"} <= names
    assert len(load_scenario(out / "scenario.yaml")) == 1
    assert read_plan(out / "plan.yaml").num_stages == 2


# --- several machines ------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_printed_commands_run_the_plan_on_two_machines(tmp_path):
    """Two launchers that know nothing of each other but the endpoint, as on two hosts."""
    out = tmp_path / "run"
    done = gpipe(
        *("run", scenario_file(tmp_path, "fine"), "--device", "cpu", "--nodes", 2, "--steps", 2, "--warmup", 0),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--out", out),
    )
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(commands) == 2
    environment = {"PATH": f"{BIN}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    started = [
        subprocess.Popen(["bash", "-c", command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    assert [process.wait(timeout=600) for process in started] == [0, 0]
    assert len(load_run(out)[1].steps) == 2
    assert gpipe("compare", out).returncode == 0


def test_a_port_in_use_and_an_endpoint_that_is_none_are_refused(capsys, tmp_path):
    scenario = scenario_file(tmp_path, "fine")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(capsys, "run", scenario, "--device", "cpu", "--rdzv-endpoint", f"127.0.0.1:{port}")
        assert f"--rdzv-endpoint: port {port} of 127.0.0.1 is in use, expected a free one" in said
    assert "expected host:port" in refused(capsys, "run", scenario, "--device", "cpu", "--rdzv-endpoint", "here")
    assert "is missing: with several machines" in refused(capsys, "run", scenario, "--device", "cpu", "--nodes", 2)
    many = ("--nodes", 3, "--rdzv-endpoint", "node0:29500", "--out", tmp_path / "out")
    assert "expected a number that divides" in refused(capsys, "run", scenario, "--device", "cpu", *many)


def test_a_profile_of_another_device_or_model_is_refused(capsys, tmp_path):
    scenario, profile_file = scenario_file(tmp_path, "fine"), tmp_path / "profile.json"
    profile = json.loads(profile_file.read_text()) | {"source": "measured", "device": "cuda"}
    profile_file.write_text(json.dumps(profile))
    assert "was measured on cuda, but the run is on cpu" in refused(capsys, "run", scenario, "--device", "cpu")
    profile["device"] = "cpu"
    profile["layers"][2]["parameter_bytes"] = 12.0
    profile_file.write_text(json.dumps(profile))
    said = refused(capsys, "run", scenario, "--device", "cpu")
    assert "was made for another model: layer 2 has 1088 bytes of parameters, but the profile's has 12" in said


def test_more_ranks_than_gpus_are_refused(capsys, tmp_path):
    if torch.cuda.device_count() >= 2:
        pytest.skip("there are enough GPUs here")
    assert "GPUs for a plan of 2 ranks" in refused(capsys, "run", scenario_file(tmp_path, "fine"), "--device", "cuda")


def test_stretch_is_for_rehearsals_only(capsys, tmp_path):
    scenario = scenario_file(tmp_path, "fine")
    assert "expected --device rehearse" in refused(capsys, "run", scenario, "--device", "cpu", "--stretch", 2)


# --- records ---------------------------------------------------------------------------------------------------------


def test_records_of_machines_with_different_clocks_make_one_step(tmp_path):
    """Whatever a rank's clock shows, and however it drifts, the gathered step is the one that happened."""
    planned = plan(layers([1.0, 1.0], [2.0, 2.0], [0.0, 0.0]), 3)
    happened = simulate(planned)
    for rank, timeline in enumerate(happened.ranks):
        offset, drift = 1000.0 * rank, 1e-3 * rank

        def shown(times, offset=offset, drift=drift):
            """What the rank's clock shows at these moments of rank 0's."""
            return ((np.asarray(times) - offset) / (1 + drift)).tolist()

        record = StepRecord(
            *(shown(t) for t in (timeline.start_s, timeline.start_s, timeline.end_s, timeline.send_end_s))
        )
        ends = shown([-5.0, 30.0])
        clock = [(ends[0], -5.0 - ends[0]), (ends[1], 30.0 - ends[1])]
        RankRecord(rank=rank, done=1, clock=clock, steps=[record]).save(tmp_path)
    measured = gather(planned, tmp_path, device="cpu", engine="gpipe", stretch=1.0)
    for found, expected in zip(measured.steps[0].ranks, happened.ranks, strict=True):
        assert found.actions == expected.actions
        np.testing.assert_allclose(found.start_s, expected.start_s, atol=1e-9)
        np.testing.assert_allclose(found.send_end_s, expected.send_end_s, atol=1e-9)
    assert len(rank_actions(planned)) == 2


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300), st.integers(4, 50))
def test_a_thinned_trace_keeps_its_peak_and_its_order(held, num_points):
    trace = Trace([0.1 * index for index in range(len(held))], held)
    thin = trace.thinned(num_points)
    assert thin.peak_bytes == trace.peak_bytes
    assert thin.times_s == sorted(thin.times_s)
    assert thin.held_bytes[-1] == held[-1]
    assert len(thin.times_s) <= max(num_points + 2, 4)
    assert set(zip(thin.times_s, thin.held_bytes, strict=True)) <= set(zip(trace.times_s, held, strict=True))


def test_settings_can_be_written_down():
    assert asdict(replace(Settings(), stretch=2.0))["stretch"] == 2.0
