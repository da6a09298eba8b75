"""`gpipe run` with real processes: what it leaves behind, how right the attribution is, and how it fails."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from plans import layers, plan

from gpipe_sim.base.files import InputError
from gpipe_sim.cli import main
from gpipe_sim.commands.common import importing
from gpipe_sim.cost.profile import load_profile
from gpipe_sim.explain.predict import predict
from gpipe_sim.make.planfile import load_plan, save_plan
from gpipe_sim.plan.program import rank_actions
from gpipe_sim.runs.accuracy import RECORD, recorded
from gpipe_sim.runs.compare import compare_run
from gpipe_sim.runs.directory import load_run, new_run_directory, summaries

pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

BIN = Path(sys.executable).parent
WORKERS = Path(__file__).parent / "workers"
MEASURED_COLUMNS = ("start_s", "end_s", "arrived_s", "send_start_s", "send_end_s")


def scenario_file(folder: Path, function: str, *, checkpoint: str = "always") -> Path:
    """A scenario of one of the test models, with a profile of four equal layers."""
    plan(layers([1e-4] * 4, [2e-4] * 4, [64.0] * 4, [128.0] * 4, parameters=1088), 4).profile.save(
        folder / "profile.json"
    )
    (folder / "own_models.py").write_text((WORKERS / "own_models.py").read_text())
    path = folder / "scenario.yaml"
    path.write_text(
        f"model: {{kind: python, function: own_models:{function}}}\nprofile: profile.json\nbatch: 8\ndtype: fp32\n"
        "cluster: {device: cpu, devices_per_node: 2, link: {bandwidth: 1 GB/s, latency: 100 us}}\n"
        f"plan: {{stages: 2, microbatches: 4, checkpoint: {checkpoint}}}\n"
    )
    return path


def gpipe(*arguments: object, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    command = [BIN / "gpipe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def workers_of(run: Path) -> list[int]:
    """Processes that still work for this run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(run).encode() in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run that went well."""
    folder = tmp_path_factory.mktemp("run")
    done = gpipe(
        "run", scenario_file(folder, "fine"), "--device", "cpu", "--steps", 5, "--out", folder / "run", "--json"
    )
    assert done.returncode == 0, done.stderr
    (folder / "run" / "stdout.json").write_text(done.stdout)
    return folder / "run"


def test_a_run_leaves_everything_about_itself(finished):
    names = {str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file()}
    for name in ("plan.yaml", "predicted.json", "measured.json", "environment.json", "compare.json", "report.html"):
        assert name in names
    assert {"traces/rank0_trace.json", "traces/rank1_trace.json"} <= names
    assert not [name for name in names if name.endswith(".part")]
    assert json.loads((finished / "environment.json").read_text())["torch"]


def test_a_run_is_added_to_the_record_of_all_runs_beside_it(finished):
    (run,) = recorded(finished.parent)
    time = json.loads((finished / "compare.json").read_text())["step_time"]
    assert (run.name, run.device, run.error) == (finished.name, "cpu", time["error"])
    assert len((finished.parent / RECORD).read_text().splitlines()) == 1


def test_json_of_a_run_has_the_keys_of_the_contract(finished):
    comparison = json.loads((finished / "stdout.json").read_text())
    assert set(comparison) == {
        "step_time",
        "bubble_fraction",
        "peak_memory_bytes",
        "device_memory_bytes",
        "busy_s",
        "attribution_s",
        "measured_cv",
        "steps",
    }
    assert set(comparison["step_time"]) == {"predicted_s", "measured_s", "error"}
    assert set(comparison["attribution_s"]) == {"compute", "communication", "collectives", "overhead", "unexplained"}
    assert comparison["steps"] == 5
    assert len(comparison["peak_memory_bytes"]["measured"]) == 2
    time = comparison["step_time"]
    assert time["error"] == pytest.approx((time["predicted_s"] - time["measured_s"]) / time["measured_s"])


def test_attribution_sums_exactly_to_predicted_less_measured(finished):
    comparison = compare_run(*load_run(finished))
    expected = comparison.prediction.step_time_s - comparison.step_time_s
    assert sum(comparison.attribution_s.values()) == pytest.approx(expected, abs=1e-12)


def test_no_measured_action_starts_before_its_message_and_none_overlap(finished):
    plan_, measured = load_run(finished)
    senders = measured.steps[0].program.senders()
    for step in measured.steps:
        end = {action: t.end_s[row] for t in step.ranks for row, action in enumerate(t.actions)}
        for timeline in step.ranks:
            assert (timeline.start_s[1:] >= timeline.end_s[:-1]).all()
            for row, action in enumerate(timeline.actions):
                if not np.isnan(timeline.arrived_s[row]):
                    assert timeline.start_s[row] >= end[senders[action]]
    assert [t.actions for t in measured.steps[0].ranks] == list(rank_actions(plan_))


def test_a_run_can_be_compared_again_and_elsewhere(finished, tmp_path):
    for name in ("plan.yaml", "measured.json"):
        (tmp_path / name).write_text((finished / name).read_text())
    done = gpipe("compare", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step time" in done.stdout
    assert "The prediction is" in done.stdout


def test_a_message_where_none_was_sent_is_refused(finished, tmp_path):
    measured = json.loads((finished / "measured.json").read_text())
    measured["steps"][1][0]["arrived_s"][0] = 0.0
    (tmp_path / "plan.yaml").write_text((finished / "plan.yaml").read_text())
    (tmp_path / "measured.json").write_text(json.dumps(measured))
    with pytest.raises(InputError, match=r"steps\.1\.0: has a message that arrived for 0F0, which takes none"):
        load_run(tmp_path)


def test_a_replay_of_a_measured_step_explains_nearly_all_of_it(finished):
    """With its own compute, transfers and gaps, the simulator must reproduce a step: it runs the same lists."""
    comparison = compare_run(*load_run(finished))
    assert abs(comparison.attribution_s["unexplained"]) < 0.01 * comparison.step_time_s


def test_layers_timed_between_the_steps_replace_the_times_of_the_profile(tmp_path):
    """Micro-batches of two sizes, three samples and two, are timed at both; bytes stay as they were."""
    scenario = scenario_file(tmp_path, "fine")
    scenario.write_text(scenario.read_text().replace("microbatches: 4", "microbatches: 3"))
    before = load_profile(tmp_path / "profile.json")
    done = gpipe("run", scenario, "--device", "cpu", "--steps", 3, "--out", tmp_path / "run", "--reprofile")
    assert done.returncode == 0, done.stderr
    after = load_profile(tmp_path / "run" / "profile.json")
    assert after.sizes == (2, 3)
    assert (after.table["forward_s"] != before.at(2).forward_s[:, None]).all()
    assert (after.table["forward_s"] > 0).all()
    assert (after.at(3).saved_bytes == before.at(3).saved_bytes).all()
    predicted = json.loads((tmp_path / "run" / "predicted.json").read_text())
    assert predicted["step_time_s"] == predict(load_plan(tmp_path / "run" / "plan.yaml")).step_time_s


def test_layers_that_do_not_compute_are_not_timed(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["run", str(scenario_file(tmp_path, "fine")), "--device", "rehearse", "--reprofile"])
    assert ended.value.code == 2
    assert "--reprofile: needs layers that compute" in capsys.readouterr().err


def test_a_folder_of_runs_is_summed_up_in_a_line_each(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "20260102T030405Z-second")
    shutil.copytree(finished, tmp_path / "first")
    (tmp_path / "first" / "environment.json").unlink()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "compare.json").write_text("[]")
    second, first = summaries(tmp_path)
    compared = json.loads((finished / "compare.json").read_text())
    assert (second.name, second.utc) == ("20260102T030405Z-second", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert (first.name, first.utc) == ("first", None)
    for run in (first, second):
        assert (run.device, run.schedule, run.checkpoint) == ("cpu", "gpipe", "always")
        assert (run.num_stages, run.num_microbatches) == (2, 4)
        assert run.predicted_s == compared["step_time"]["predicted_s"]
        assert run.error == pytest.approx((run.predicted_s - run.measured_s) / run.measured_s)
        assert run.bubble_error == compared["bubble_fraction"]["error"]
        assert run.memory_errors == tuple(compared["peak_memory_bytes"]["error"])


# --- failures ------------------------------------------------------------------------------------------------------


def test_a_worker_that_raises_ends_the_run_with_its_traceback(tmp_path):
    run = tmp_path / "run"
    done = gpipe("run", scenario_file(tmp_path, "raises"), "--device", "cpu", "--out", run, "--timeout", 20)
    assert done.returncode == 1
    assert "rank 1 failed" in done.stderr
    assert "ZeroDivisionError: the loss has no bottom" in done.stderr
    assert "ZeroDivisionError" in (run / "ranks" / "rank1.error").read_text()
    assert not workers_of(run)


def test_a_worker_that_runs_out_of_memory_ends_the_run_with_what_it_asked_for(tmp_path):
    run = tmp_path / "run"
    done = gpipe("run", scenario_file(tmp_path, "starves"), "--device", "cpu", "--out", run, "--timeout", 20)
    assert done.returncode == 1
    assert "rank 1 failed" in done.stderr
    assert "memory" in done.stderr
    assert not workers_of(run)


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_every_process(tmp_path, asked):
    run = tmp_path / "run"
    scenario = scenario_file(tmp_path, "hangs")
    command = [BIN / "gpipe", "run", scenario, "--device", "cpu", "--out", run, "--timeout", "60"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not list(run.glob("ranks/rank*.json")):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(asked)
        _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "interrupted" in said
    assert f"gpipe compare {run}" in said
    assert not workers_of(run)


def refused(capsys, *arguments: object) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_what_cannot_run_is_refused_before_anything_starts(capsys, tmp_path):
    assert "has 3 layers, but the plan was made for 4" in refused(capsys, "run", scenario_file(tmp_path, "too_short"))
    assert "there is no module" in refused(capsys, "run", _changed(tmp_path, "own_models:fine", "nowhere:fine"))
    assert "no attribute 'absent'" in refused(capsys, "run", _changed(tmp_path, "own_models:fine", "own_models:absent"))
    assert "2 plans, expected a single one" in refused(
        capsys, "run", _changed(tmp_path, "microbatches: 4", "microbatches: [2, 4]")
    )
    only_costs = tmp_path / "costs.yaml"
    only_costs.write_text(
        "model: {kind: layers, layers: [{name: a, forward: 1 ms}]}\nbatch: 1\n"
        "cluster: {device: cpu, link: pcie3}\nplan: {stages: 1, microbatches: 1}\n"
    )
    assert "has costs but no arithmetic" in refused(capsys, "run", only_costs)


def _changed(folder: Path, old: str, new: str) -> Path:
    path = scenario_file(folder, "fine")
    path.write_text(path.read_text().replace(old, new))
    return path


def test_a_directory_without_a_run_is_told_so(capsys, tmp_path):
    assert "plan.yaml: is missing, expected the directory of a finished run" in refused(capsys, "compare", tmp_path)


@pytest.mark.parametrize("name", ["environment.json", "ranks/rank0.json"])
@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "[" * 100_000])
def test_ranks_that_cannot_be_put_together_are_told(finished, capsys, tmp_path, name, text):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "measured.json").unlink()
    (run / name).write_text(text)
    told = refused(capsys, "compare", run)
    assert f"{name}:1: not JSON" in told or "ranks: do not go together with environment.json" in told
    assert not (run / "measured.json").exists()


@pytest.mark.parametrize("name", ["plan.yaml", "compare.json", "environment.json", "measured.json"])
def test_nobody_waits_at_a_pipe_in_a_run_directory(finished, capsys, tmp_path, name):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / name).unlink()
    os.mkfifo(run / name)
    assert len(summaries(tmp_path)) == (name in ("environment.json", "measured.json"))
    if name != "environment.json":
        assert f"{run}" in refused(capsys, "compare", run)


def test_a_report_of_a_run_without_what_draws_it_is_told(finished, capsys, monkeypatch, tmp_path):
    for module in [module for module in sys.modules if module.split(".")[0] in ("plotly", "dashboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "plotly", None)
    run = shutil.copytree(finished, tmp_path / "run")
    assert "--html: needs the package plotly" in refused(capsys, "compare", run, "--html", tmp_path / "report.html")


def test_a_package_that_is_missing_is_told_by_its_own_name():
    with (
        pytest.raises(InputError, match=r"^--html: needs the package plotly, .* gpipe-planner\[report\]"),
        importing("--html", "report"),
    ):
        raise ModuleNotFoundError(name="plotly.graph_objects")


def test_a_run_does_not_write_into_a_folder_that_has_files(capsys, tmp_path):
    scenario = scenario_file(tmp_path, "fine")
    assert "expected a new or empty folder" in refused(capsys, "run", scenario, "--out", tmp_path)


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_plan_file_gives_the_same_predictions_again(tmp_path):
    made = plan(layers([1.0, 2.0, 3.0], [2.0, 2.0, 2.0], [1.0] * 3, [4.0] * 3), 4, stages=2, schedule="1f1b", window=3)
    save_plan(made, tmp_path / "plan.yaml")
    loaded = load_plan(tmp_path / "plan.yaml")
    assert loaded.balance == made.balance
    assert loaded.window == 3
    assert (loaded.forward_s == made.forward_s).all()
    assert rank_actions(loaded) == rank_actions(made)
    written = (tmp_path / "plan.yaml").read_text()
    (tmp_path / "plan.yaml").write_text(written.replace("backward: fifo", "backward: reverse"))
    assert load_plan(tmp_path / "plan.yaml").backward == "fifo", "the order that is run"


def test_run_directories_of_one_moment_differ_and_stay_in_their_folder(tmp_path):
    first, second = (new_run_directory(tmp_path, "../evil name") for _ in range(2))
    assert first != second
    assert first.parent == second.parent == tmp_path


# --- profiles ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured_profile(tmp_path_factory):
    """A small transformer, measured on this machine by two ranks."""
    folder = tmp_path_factory.mktemp("profile")
    scenario = folder / "scenario.yaml"
    scenario.write_text(
        "model: {kind: transformer, layers: 3, hidden: 32, heads: 2, vocab: 64, sequence: 16}\nbatch: 8\ndtype: fp32\n"
        "cluster: {device: cpu, devices_per_node: 2, link: measured}\n"
        "profile: profile.json\nplan: {stages: 2, microbatches: [2, 4], checkpoint: never}\n"
    )
    done = gpipe("profile", scenario, "--device", "cpu", "--out", folder / "profile.json")
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("*.work")), "nothing is left but the profile"
    return scenario, load_profile(folder / "profile.json")


def test_a_profile_has_every_layer_at_every_size_that_the_scenario_needs(measured_profile):
    _, profile = measured_profile
    assert profile.source == "measured"
    assert profile.num_layers == 6
    assert profile.sizes == (1, 2, 4)
    for column in ("forward_s", "backward_s", "saved_bytes"):
        assert (profile.table[column] > 0).all(), column
    assert profile.splits
    for column in ("backward_inputs_s", "backward_weights_s"):
        assert (profile.table[column][1:4] > 0).all(), column
    assert profile.link is not None
    assert profile.link.bandwidth > 1e6
    assert (profile.optimizer_s > 0).all()


def test_measured_bytes_of_a_layer_are_what_its_shapes_say(measured_profile):
    _, profile = measured_profile
    costs, n, s, h, V = profile.at(4), 4, 16, 32, 64
    assert profile.parameter_bytes.tolist() == [4 * p for p in (V * h, *[12 * h * h + 13 * h] * 3, 2 * h, V * h)]
    assert costs.output_bytes.tolist() == [n * s * h * 4] * 5 + [0]
    assert profile.input_bytes == 8 * s
    # A norm keeps its output and a mean and a deviation for each row; its input is the layer before's.
    assert costs.saved_bytes[4] == n * s * h * 4 + 2 * n * s * 4
    # Between the halves of a split backward a block keeps what its shapes say, a norm nothing, the head its input and
    # the gradient of its logits.
    assert costs.kept_bytes[1:].tolist() == [16 * n * s * h * 4] * 3 + [0, n * s * (h + V) * 4]


def test_layers_that_are_built_alike_share_their_median(measured_profile):
    _, profile = measured_profile
    assert len(set(profile.at(2).forward_s[1:4])) == 1


def test_a_measured_profile_is_simulated_with_its_own_link(measured_profile, capsys):
    scenario, _ = measured_profile
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", str(scenario), "--json"])
    assert exit_.value.code == 0
    for result in json.loads(capsys.readouterr().out)["results"]:
        assert result["breakdown_s"]["communication"] > 0
        assert result["breakdown_s"]["compute"] > 0


def test_measuring_what_has_no_arithmetic_is_refused(capsys, tmp_path):
    path = tmp_path / "costs.yaml"
    path.write_text(
        "model: {kind: layers, layers: [{name: a, forward: 1 ms}]}\nbatch: 1\n"
        "cluster: {device: cpu, link: pcie3}\nplan: {stages: 1, microbatches: 1}\n"
    )
    assert "has costs but no arithmetic" in refused(capsys, "profile", path, "--out", tmp_path / "p.json")
    assert "one of the two" in refused(capsys, "profile")
