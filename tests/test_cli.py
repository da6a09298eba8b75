"""The command line: its contract of keys and exit statuses, and its manners."""

import inspect
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run

from gpipe_sim.base.files import write_text

BIN = Path(sys.executable).parent
BUBBLE = """
name: small
model: {kind: layers, layers: [{name: layer, repeat: 4, forward: 1 ms, backward: 2 ms, output: 1 MB, saved: 4 MB}]}
batch: 8
cluster: {device: a100-80gb, link: {bandwidth: 10 GB/s, latency: 10 us}}
plan: {stages: 4, microbatches: 4}
"""

# The contract: other tools read these keys.
KEYS = {
    "set",
    "stages",
    "ranks",
    "stages_per_rank",
    "microbatches",
    "replicas",
    "shard",
    "tensor",
    "order",
    "checkpoint",
    "schedule",
    "recompute",
    "recompute_unit",
    "backward",
    "balance",
    "placement",
    "window",
    "step_time_s",
    "pipeline_time_s",
    "longest_rank_span_s",
    "throughput_samples_s",
    "bubble_fraction",
    "bubble_ideal",
    "bubble_over_ideal_time",
    "peak_memory_bytes",
    "activation_bytes",
    "parameter_bytes",
    "fits",
    "breakdown_s",
    "utilization",
    "parameters",
    "devices",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "model_flops",
    "mfu",
    "price_per_hour",
    "price_source",
    "currency",
    "money_per_step",
    "money_per_token",
}


@pytest.fixture
def small(tmp_path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(BUBBLE)
    return path


def test_json_has_exactly_the_keys_of_the_contract(capsys, small):
    status, out, err = run(capsys, "simulate", small, "--json")
    document = json.loads(out)
    assert (status, err) == (0, "")
    assert document["scenario"] == "small"
    (result,) = document["results"]
    assert set(result) == KEYS
    assert (result["stages"], result["ranks"], result["microbatches"]) == (4, 4, 4)
    assert (result["checkpoint"], result["schedule"], result["recompute"]) == ("always", "gpipe", "early")
    assert result["balance"] == [1, 1, 1, 1]
    assert len(result["peak_memory_bytes"]) == len(result["utilization"]) == 4
    assert sum(result["breakdown_s"].values()) == pytest.approx(result["step_time_s"])
    assert result["throughput_samples_s"] == pytest.approx(8 / result["step_time_s"])
    assert 1 - result["bubble_fraction"] == pytest.approx(sum(result["utilization"]) / 4)


def test_a_sweep_names_what_it_sets_and_keeps_the_files_order(capsys, small):
    _, out, err = run(
        capsys, "simulate", small, "--json", "--set", "plan.microbatches=[2, 8]", "--set", "plan.stages=[1, 2]"
    )
    swept = [result["set"] for result in json.loads(out)["results"]]
    assert swept == [
        {"plan.stages": 1, "plan.microbatches": 2},
        {"plan.stages": 1, "plan.microbatches": 8},
        {"plan.stages": 2, "plan.microbatches": 2},
        {"plan.stages": 2, "plan.microbatches": 8},
    ]
    assert err == "gpipe: simulating 4 plans\n"


def test_both_engines_give_the_same_answers(capsys, small):
    override = "plan.microbatches=[2, 4, 8]"
    answers = [
        json.loads(run(capsys, "simulate", small, "--json", "--set", override, *engine)[1])["results"]
        for engine in ((), ("--engine", "simpy"), ("--engine", "fast"))
    ]
    for result, simulated, evaluated in zip(*answers, strict=True):
        for other in (simulated, evaluated):
            assert other["breakdown_s"] == pytest.approx(result["breakdown_s"], abs=1e-12)
            assert other["peak_memory_bytes"] == result["peak_memory_bytes"]


def test_a_single_plan_has_its_charts_with_the_fast_engine_too(capsys, small):
    (_, simulated, _), (status, evaluated, _) = (
        run(capsys, "simulate", small, "--engine", e) for e in ("simpy", "fast")
    )
    assert status == 0
    assert evaluated == simulated


def test_the_fast_engine_refuses_what_is_shared_and_names_the_other(capsys, small):
    cores = "cluster={device: a100-80gb, link: nvlink3, devices_per_node: 4, cores: 2}"
    status, out, err = run(capsys, "simulate", small, "--engine", "fast", "--set", cores)
    assert (status, out) == (2, "")
    assert err == "--engine: found fast, expected simpy: in small, ranks share the cores of node 0\n"
    sweep = (*("--set", cores), *("--set", "plan.stages=[1, 4]"))
    status, _, err = run(capsys, "simulate", small, "--engine", "fast", *sweep)
    assert status == 2
    assert "--engine: found fast, 1 of 2 plans need --engine simpy: in small, ranks share the cores" in err
    assert run(capsys, "simulate", small, *sweep)[0] == 0


def test_checkpoint_is_listed_by_stage_where_stages_differ(capsys, small):
    override = "plan.checkpoint={per_stage: [always, never, never, never]}"
    _, out, _ = run(capsys, "simulate", small, "--json", "--set", override)
    assert json.loads(out)["results"][0]["checkpoint"] == ["always", "never", "never", "never"]


def test_jitter_adds_the_median_and_the_95th_percentile(capsys, small):
    _, out, _ = run(capsys, "simulate", small, "--json", "--set", "cluster.jitter={cv: 0.2, samples: 30}")
    (result,) = json.loads(out)["results"]
    assert set(result) == KEYS | {"step_time_p50_s", "step_time_p95_s"}
    assert result["step_time_p50_s"] < result["step_time_p95_s"]


def test_several_files_give_an_array_of_documents(capsys, small, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(BUBBLE.replace("name: small", ""))
    _, out, _ = run(capsys, "simulate", small, other, "--json")
    assert [document["scenario"] for document in json.loads(out)] == ["small", "other"]


def test_a_single_plan_is_drawn_and_explained(capsys, small):
    status, out, _ = run(capsys, "simulate", small)
    assert status == 0
    for words in (
        "(K-1)/(M+K-1)",
        "42.86%",
        "rank 3 |",
        "F0",
        "stage 3",
        "of 78.5 GiB",
        "recomputation",
        "What limits",
    ):
        assert words in out


def test_a_sweep_is_a_table_with_the_closed_form_beside_the_simulated_bubble(capsys, small):
    _, out, _ = run(capsys, "simulate", small, "--set", "plan.microbatches=[1, 4]", "--set", "plan.checkpoint=never")
    assert "75.00%" in out
    assert "42.86%" in out
    assert "rank 0" not in out


SPLITS = BUBBLE.replace("backward: 2 ms", "backward: 2 ms, backward_weights: 1 ms")


def test_stages_of_a_rank_are_told_apart(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    path = tmp_path / "small.yaml"
    path.write_text(SPLITS.replace("microbatches: 4", "microbatches: 4, schedule: zb_v, checkpoint: never"))
    _, out, _ = run(capsys, "simulate", path)
    assert "│ 2 │ 2 │ 4 │" in out, "K, v and M"
    assert "ideal bubble" in out
    assert "4 stages of 1 1 1 1 layers on 2 ranks, 2 on each (0 1 1 0)" in out
    (first,) = [line for line in out.splitlines() if line.startswith("rank 0 |")]
    assert first.startswith("rank 0 |0F0=")
    assert "3F0=" in first
    assert "3W" in first
    assert "F forward  I backward for the inputs  W backward for the weights  U update" in out
    assert [line[:8] for line in out.splitlines() if " GiB of " in line or " MiB of " in line] == [
        "rank 0  ",
        "rank 1  ",
    ]


def test_the_closed_form_is_named_only_where_it_is_that_of_all(capsys, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SPLITS)
    _, out, _ = run(capsys, "simulate", path, "--set", "plan.schedule=[gpipe, 1f1b]")
    assert "(K-1)/(M+K-1)" in out
    _, out, _ = run(capsys, "simulate", path, "--set", "plan.schedule=[gpipe, zb_h1]")
    assert "ideal bubble" in out
    assert "(K-1)/(M+K-1)" not in out


def test_what_an_order_file_says_otherwise_is_told_once(capsys, small, tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0F1,0SEND_F0,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n")
    path = tmp_path / "mine.yaml"
    path.write_text(BUBBLE.replace("{stages: 4, microbatches: 4}", "{schedule: mine.csv, window: [1, 2]}"))
    status, out, err = run(capsys, "simulate", path)
    assert status == 0
    assert err.count("1 OVERLAP_F_B pairs are run in turn") == 1
    assert err.count("left out, since they follow from the other actions: 1 SEND_F") == 1
    assert "OVERLAP_F_B" not in out
    _, out, _ = run(capsys, "simulate", path, "--set", "plan.window=1")
    assert "the order of mine.csv" in out
    _, out, _ = run(capsys, "simulate", small, "--set", "plan.schedule=auto")
    assert "auto, an order made for these times" in " ".join(out.split())


def test_mistakes_of_all_files_are_reported_at_once_with_exit_status_2(capsys, small, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(BUBBLE.replace("stages: 4", "stagse: 4").replace("batch: 8", "batch: many"))
    missing = tmp_path / "missing.yaml"
    status, out, err = run(capsys, "simulate", small, wrong, missing)
    assert (status, out) == (2, "")
    assert f"{wrong}:4: batch: found 'many', expected a whole number" in err
    assert f"{wrong}:6: plan.stagse: unknown key, did you mean 'stages'?" in err
    assert f"{missing}: cannot be read: No such file or directory" in err
    assert "Traceback" not in err


def test_an_override_is_blamed_where_it_is_wrong(capsys, small):
    status, _, err = run(capsys, "simulate", small, "--set", "plan.microbatches=9")
    assert status == 2
    assert err.startswith("--set plan.microbatches=9: plan.microbatches: found 9, expected at most the batch of 8")


def test_a_plan_that_says_too_little_to_simulate_is_told_what_is_missing(capsys, small):
    small.write_text(BUBBLE.replace("microbatches: 4", ""))
    status, _, err = run(capsys, "simulate", small)
    assert status == 2
    assert f"{small}:6: plan.microbatches: is missing, expected a number such as 16" in err


def test_trace_is_one_that_perfetto_reads(capsys, small, tmp_path):
    trace = tmp_path / "out" / "trace.json"
    status, _, _ = run(capsys, "simulate", small, "--trace", trace)
    assert status == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        f"rank {r}: stage {r}" for r in range(4)
    }
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "send", "receive"} <= threads
    compute = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert len(compute) == 4 * (3 * 4 + 1)
    assert {e["name"] for e in compute} >= {"2F0", "0R3", "3B1", "1U"}
    counters = [e for e in events if e["ph"] == "C"]
    assert counters
    assert all(set(e["args"]) >= {"parameters", "activations"} for e in counters)
    lines: dict[tuple[int, int], float] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        line = (event["pid"], event["tid"])
        assert event["ts"] >= lines.get(line, 0.0) - 1e-6, "events of a thread do not overlap"
        lines[line] = event["ts"] + event["dur"]
    arrows = [e["id"] for e in events if e["ph"] == "s"]
    assert sorted(arrows) == sorted(e["id"] for e in events if e["ph"] == "f")
    assert len(arrows) == 2 * 3 * 4


def test_a_trace_of_several_plans_is_refused(capsys, small, tmp_path):
    status, _, err = run(capsys, "simulate", small, "--set", "plan.stages=[1, 2]", "--trace", tmp_path / "t.json")
    assert status == 2
    assert "--trace: needs a single plan, found 2" in err


def test_a_file_that_cannot_be_written_is_a_message(capsys, small, tmp_path):
    (tmp_path / "file").write_text("")
    for option in ("--trace", "--html"):
        status, _, err = run(capsys, "simulate", small, option, tmp_path / "file" / "below.out")
        assert status == 2
        assert "cannot be written" in err


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_files_are_written_before_anything_is_printed(small, tmp_path, command):
    """So that whoever reads the output may stop whenever they like."""
    file = tmp_path / "file"
    option = "--out" if command == "plan" else "--trace"
    line = "import sys; from gpipe_sim.cli import main; main(sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", line, command, str(small), option, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()  # as `| head -0` does
        assert process.wait(timeout=600) == 0
    assert file.stat().st_size > 100


def test_what_is_written_has_the_permissions_that_the_user_wants_while_others_write_too(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert "umask" not in inspect.getsource(write_text)


def test_a_link_stays_where_a_file_is_written_and_what_is_no_file_is_written_to(capsys, small, tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK), "rb") as pipe:
        for name in ("link", "pipe"):
            run(capsys, "export", small, "--to", "megatron", "--out", tmp_path / name)
        assert pipe.read(10_000) == (tmp_path / "file").read_bytes() != b"old"
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "pipe").is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link", "pipe", small.name}


def test_catalog_lists_names_figures_and_sources(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    status, out, _ = run(capsys, "catalog")
    assert status == 0
    for words in (
        "a100-80gb",
        "tpu-v3-core",
        "312 TFLOP/s",
        "nvlink4",
        "450 GB/s",
        "NVIDIA",
        "cpu",
        "llama-2-13b",
        "13,015,864,320",
    ):
        assert words in out


def test_an_imported_profile_can_be_simulated(capsys, tmp_path):
    graph = Path(__file__).parent / "data" / "graphs" / "recurrent.graph.txt"
    profile, scenario = tmp_path / "recurrent.json", tmp_path / "recurrent.yaml"
    status, out, _ = run(capsys, "profile", "--import", graph, "--batch", 64, "--out", profile)
    assert status == 0
    assert "19 layers, 13.5 ms forward and 25.0 ms backward" in out
    scenario.write_text(
        "model: {kind: profile, path: recurrent.json}\nbatch: 64\n"
        "cluster: {device: v100-16gb, link: pcie3}\nplan: {stages: 4, microbatches: 8, checkpoint: never}\n"
    )
    _, out, _ = run(capsys, "simulate", scenario, "--json")
    (result,) = json.loads(out)["results"]
    assert sum(result["balance"]) == 19
    assert result["breakdown_s"]["compute"] == pytest.approx((0.013455 + 0.024955) / 4)


def test_a_profile_is_not_measured_in_a_rehearsal(capsys):
    status, _, err = run(capsys, "profile", "my_model.yaml", "--device", "rehearse")
    assert status == 2
    assert "rehearse" in err


@pytest.mark.parametrize("command", [[], ["simulate"], ["profile"], ["catalog"], ["demo"]])
def test_every_command_has_help(capsys, command):
    status, out, _ = run(capsys, *command, "--help")
    assert status == 0
    assert "Usage" in out


# --- as processes --------------------------------------------------------------------------------------------------


def test_the_simulate_script_is_gpipe_simulate(small):
    answers = [
        subprocess.run([*command, small, "--json"], capture_output=True, check=True).stdout
        for command in ([BIN / "gpipe", "simulate"], [BIN / "simulate"])
    ]
    assert answers[0] == answers[1]


def test_output_can_be_piped_to_a_reader_that_stops(small):
    command = f"{BIN / 'gpipe'} simulate {small} --set plan.stages=[1,2,4] | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.strip() == "small"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_a_reader_that_stops_is_no_failure_however_much_there_is_to_say(small):
    """More than a pipe holds: typer notices before we do, and would exit with 1."""
    many = str([8] * 300).replace(" ", "")
    command = f"{BIN / 'gpipe'} simulate {small} --json --set plan.microbatches={many} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "gpipe: simulating 300 plans\n")


@pytest.mark.parametrize(
    ("how", "status", "told"),
    [(">/dev/full", 1, "gpipe: No space left on device\n"), (">&-", 0, ""), ("2>&-", 0, ""), (">&- 2>&-", 0, "")],
)
def test_output_that_nobody_takes_is_no_traceback(small, how, status, told):
    command = f"{BIN / 'gpipe'} simulate {small} {how}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, told)


def test_a_terminal_that_knows_only_ascii_is_shown_what_it_can(small):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([BIN / "gpipe", "simulate", small], capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"rank 1 |?" in done.stdout


@pytest.mark.parametrize("command", [["compare"], ["accuracy", "--runs"]])
def test_what_the_system_refuses_is_a_message(capsys, tmp_path, command):
    status, _, err = run(capsys, *command, tmp_path / ("x" * 300))
    assert status == 2
    assert err.startswith(str(tmp_path))
    assert err.endswith(": cannot be used: File name too long\n")


def test_an_interrupted_sweep_keeps_what_is_finished(small):
    """Each is simulated, so that it takes long: the signal comes before the end, however late it is."""
    many = "--set=plan.microbatches=" + str([8] * 20_000).replace(" ", "")
    command = [BIN / "gpipe", "simulate", small, "--json", "--engine", "simpy", many]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "gpipe: simulating 20000 plans\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert len(json.loads(out)["results"]) < 20_000
    assert "of 20000 plans are finished" in err
    assert "Traceback" not in err


def test_nothing_heavy_is_imported_to_simulate(small):
    code = (
        "import sys; from gpipe_sim.cli import main\n"
        f"try: main(['simulate', {str(small)!r}])\n"
        "except SystemExit: pass\n"
        "print(sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    for heavy in ("torch", "dash", "plotly", "dashboard", "gpipe_exec", "pandas", "scipy"):
        assert f"'{heavy}'" not in done.stderr
    assert "'simpy'" in done.stderr
