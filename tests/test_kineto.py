"""Traces of torch's profiler become measured steps: of steps that are known, and of torch's own schedules."""

import gzip
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from commands import run
from plans import layers, plan
from processes import run_ranks

from gpipe_sim.base.files import InputError
from gpipe_sim.make.planfile import save_plan
from gpipe_sim.plan.program import program_of
from gpipe_sim.runs.directory import load_run
from gpipe_sim.runs.kineto import measure_traces
from gpipe_sim.step.simulate import simulate

BASE_NS = 1_790_857_026_000_000_000
COLUMNS = ("start_s", "end_s", "arrived_s", "send_end_s")
COSTS = layers([1.0] * 4, [2.0] * 4, weights=[0.75] * 4, output=[3.0] * 4)


TRACE = '{"distributedInfo": {"rank": 1}, "traceEvents": [%s]}'

GAP_S = 0.01
CORRELATIONS = itertools.count(10_000)


def made(schedule: str, stages_per_rank: int = 1, M: int = 4, **choices):
    """Two ranks of equal stages, over links whose messages take a while."""
    choices = {"schedule": schedule, "stages_per_rank": stages_per_rank, "backward": "fifo"} | choices
    asked = plan(COSTS, M, bandwidth="10 B/s", stages=2 * stages_per_rank, **choices)
    return replace(asked, profile=replace(asked.profile, action_overhead_s=GAP_S))


def event(category, name, start_s, end_s, **arguments):
    """What the profiler writes of one event, in microseconds."""
    start, length = start_s * 1e6, (end_s - start_s) * 1e6
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": 7, "ts": start, "dur": length, "args": arguments}


def traced(asked, step, position, *, style="runtime", device="cpu", late_s=0.0):
    """A rank's events of a step whose times are known, in torch's words: between two actions it waits for GAP_S."""
    timeline, takers = step.ranks[position], set(program_of(asked).senders())
    events, free, host = [], 0.0, 0.0

    def note(category, name, start, end, **arguments):
        events.append(event(category, name, start + late_s, end + late_s, **arguments))

    def work(category, names, launched, start, end, stream):
        """An operator or, on a device, a kernel that was launched before; it is told when the host was through."""
        if device == "cpu":
            note(category, names[0], start, end)
            return end
        number = next(CORRELATIONS)
        note("cuda_runtime", "cudaLaunchKernel", launched, launched, correlation=number)
        note("kernel", names[1], start, end, correlation=number, stream=stream)
        return launched

    for row, action in enumerate(timeline.actions):
        start, end, came = (float(getattr(timeline, name)[row]) for name in COLUMNS[:3])
        at = free if device == "cpu" else host  # of the host, which runs ahead of a device
        if action in takers:
            names = ("gloo:recv", "ncclDevKernel_SendRecv")
            work("user_annotation", names, at + 0.2 * GAP_S, free + 0.2 * GAP_S, max(came, free + 0.2 * GAP_S), 20)
            if style == "runtime":
                kind = "F" if action.kind == "F" else "B"
                note("user_annotation", f"PP:{action.stage}RECV_{kind}{action.microbatch}", at, at + 0.4 * GAP_S)
        way = "forward" if action.kind == "F" else "backward"
        category, label, ahead = {
            "runtime": ("user_annotation", f"PP:{action}", 0.5 * GAP_S),
            "single": ("user_annotation", f"{way.title()} {action.microbatch}", 0.1 * GAP_S),
            "stack": ("python_function", f"torch/distributed/pipelining/stage.py(857): {way}_one_chunk", 0.5 * GAP_S),
        }[style]
        if action.kind == "U":
            category, label = "user_annotation", "Optimizer.step#SGD.step"
        done = work("cpu_op", ("aten::addmm", "gemm"), at + 0.6 * GAP_S, start, end, 7)
        note(category, label, at + ahead, done + 0.05 * GAP_S)
        free, host = end, at + GAP_S
    return events


def write(folder, asked, steps=1, hosts=("one", "one"), late_s=(0.0, 0.0), **how):
    """The traces of a run that went exactly as it is predicted; and the prediction."""
    folder.mkdir(exist_ok=True)
    step = simulate(asked)
    length = 2.0 * max(float(timeline.end_s[-1]) for timeline in step.ranks)
    for position, _ in enumerate(step.ranks):
        events = [
            found
            for number in range(steps)
            for found in traced(asked, step, position, late_s=late_s[position] + number * length, **how)
        ]
        content = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "gloo", "rank": position, "world_size": 2},
            "host_name": hosts[position],
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": events,
        }
        (folder / f"rank{position}_trace.json").write_text(json.dumps(content))
    return step


def same(measured, expected, but_for=1e-6):
    """Whether two steps have the same times; a message that came while its taker was busy came when that was free."""
    origin = min(timeline.start_s[0] for timeline in expected.ranks)
    for one, other in zip(measured.ranks, expected.ranks, strict=True):
        assert list(one.actions) == list(other.actions)
        np.testing.assert_allclose(one.start_s, other.start_s - origin, atol=but_for)
        np.testing.assert_allclose(one.end_s, other.end_s - origin, atol=but_for)
        free = np.append(0.0, other.end_s[:-1]) + 0.2 * GAP_S
        arrived = np.where(np.isnan(other.arrived_s), math.nan, np.fmax(other.arrived_s, free))
        np.testing.assert_allclose(one.arrived_s, arrived - origin, atol=but_for)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("schedule", "v", "style"),
    [
        ("gpipe", 1, "single"),
        ("gpipe", 1, "runtime"),
        ("1f1b", 1, "stack"),
        ("interleaved_1f1b", 2, "runtime"),
        ("zb_v", 2, "runtime"),
    ],
)
def test_a_trace_of_a_step_that_is_known_gives_that_step(tmp_path, schedule, v, style, device):
    asked = made(schedule, v)
    step = write(tmp_path / "traces", asked, steps=2, style=style, device=device)
    measured = measure_traces(asked, tmp_path / "traces")
    assert (measured.device, measured.engine, len(measured.steps)) == (device, "torch", 2)
    for found in measured.steps:
        same(found, step)


def test_a_trace_may_be_compressed(tmp_path):
    asked = made("gpipe")
    step = write(tmp_path, asked)
    for file in list(tmp_path.iterdir()):
        (tmp_path / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    same(measure_traces(asked, tmp_path).steps[0], step)


@pytest.mark.parametrize("content", [b"", b"no gzip", gzip.compress(b"{}")[:-4], b"\xff{}"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, content):
    for name in ("rank0.json.gz", "rank1.json"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=r"rank0.json.gz(:1)?: (is not JSON|cannot be read)"):
        measure_traces(made("gpipe"), tmp_path)
    (tmp_path / "rank0.json.gz").unlink()
    (tmp_path / "rank0.json").write_bytes(content)
    with pytest.raises(InputError, match=r"rank0.json:1: is not JSON"):
        measure_traces(made("gpipe"), tmp_path)


@pytest.mark.parametrize("piece", [1, 7, 100, 5000])
def test_however_a_file_is_read_in_pieces_it_says_the_same(tmp_path, monkeypatch, piece):
    asked = made("interleaved_1f1b", 2)
    step = write(tmp_path, asked, device="cuda")
    file = tmp_path / "rank0_trace.json"
    content = json.loads(file.read_text()) | {"deviceProperties": [{"name": "größe", "x": -1.5e-3}, 12345, None, True]}
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    monkeypatch.setattr("gpipe_sim.base.events._PIECE", piece)
    same(measure_traces(asked, tmp_path).steps[0], step)


def test_a_trace_that_is_too_large_is_refused_before_it_is_read(tmp_path, monkeypatch):
    asked = made("gpipe")
    write(tmp_path, asked)
    monkeypatch.setattr("gpipe_sim.base.limits.TRACE_BYTES", 1000)
    with pytest.raises(InputError, match=r"rank0_trace.json: is larger than 0 MiB, expected less: profile fewer steps"):
        measure_traces(asked, tmp_path)


@pytest.mark.parametrize("late_s", [-40.0, 3600.0])
def test_clocks_of_two_hosts_are_aligned_by_their_messages_there_and_back(tmp_path, late_s):
    asked = made("1f1b", M=6)
    step = write(tmp_path, asked, hosts=("one", "two"), late_s=(0.0, late_s))
    (found,) = measure_traces(asked, tmp_path).steps
    slowest = max(float(np.nanmax(timeline.send_end_s - timeline.end_s)) for timeline in step.ranks)
    same(found, step, but_for=slowest)
    for one, other in zip(found.ranks, step.ranks, strict=True):
        np.testing.assert_allclose(one.end_s - one.start_s, other.end_s - other.start_s, atol=1e-5)


def test_clocks_of_one_host_that_disagree_are_refused(tmp_path):
    asked = made("1f1b")
    write(tmp_path, asked, late_s=(0.0, -40.0))
    with pytest.raises(
        InputError, match=r"rank1_trace.json: traceEvents: takes a message \S+ s before rank0_trace.json"
    ):
        measure_traces(asked, tmp_path)


def test_work_on_a_side_stream_is_no_compute(tmp_path):
    asked = made("gpipe")
    step = write(tmp_path, asked, device="cuda")
    file = tmp_path / "rank1_trace.json"
    content = json.loads(file.read_text())
    launched = next(found for found in content["traceEvents"] if found["name"] == "cudaLaunchKernel")
    launched = event("cuda_runtime", "cudaLaunchKernel", launched["ts"] * 1e-6, launched["ts"] * 1e-6, correlation=999)
    content["traceEvents"] += [launched, event("kernel", "copy_in", 0.0, 0.25, correlation=999, stream=22)]
    file.write_text(json.dumps(content))
    same(measure_traces(asked, tmp_path).steps[0], step)


def test_an_order_that_is_not_the_plans_is_refused_at_its_first_difference(tmp_path):
    write(tmp_path, made("gpipe"))
    with pytest.raises(InputError, match="action 4 of step 0 is 0B0, expected 0B3, as in the plan"):
        measure_traces(made("gpipe", backward="reverse"), tmp_path)


def test_half_a_step_is_refused(tmp_path):
    asked = made("gpipe")
    write(tmp_path, asked)
    file = tmp_path / "rank0_trace.json"
    content = json.loads(file.read_text())
    content["traceEvents"] = [found for found in content["traceEvents"] if found["name"] != "PP:0B3"]
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"rank0_trace.json: traceEvents: has 7 actions, expected a multiple of 8"):
        measure_traces(asked, tmp_path)


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"checkpoint": "always"}, "has recomputations of their own"),
        ({"replicas": 2, "batch": 8}, "has 2 replicas"),
    ],
)
def test_what_a_trace_does_not_tell_is_refused(tmp_path, choices, reason):
    batch = choices.pop("batch", None)
    asked = plan(COSTS, 4, batch=batch, stages=2, backward="fifo", **choices)
    with pytest.raises(InputError, match=reason):
        measure_traces(asked, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"rank1.json:1: is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "traceEvents: is missing"),
        ('{"traceEvents": []}', "distributedInfo.rank: is missing"),
        ('{"distributedInfo": {"rank": 0}, "traceEvents": []}', "is of rank 0, as rank0_trace.json is"),
        ('{"distributedInfo": {"rank": 1}, "traceEvents": []}', "names no stages, expected torch's PP:2F0"),
        (TRACE % '{"ph": "X", "cat": "cpu_op", "name": "a", "ts": "x"}', "ts or dur is no number"),
        (TRACE % '{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": true}', "ts or dur is no number"),
        (TRACE % '{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": -1}', "ts or dur is no number"),
        (TRACE % '{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1e999}', "ts or dur is no number"),
        (TRACE % '{"ph": "X", "cat": "cpu_op", "name": "a", "ts": NaN}', "ts or dur is no number"),
        (TRACE % f'{{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1{"0" * 400}}}', "ts or dur is no number"),
        (TRACE % f'{{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "args": {"[" * 90_000}', "is not JSON"),
        (TRACE % '1, [], "a", null, {"ph": "X"}, {"cat": []}', "names no stages"),
        (TRACE % "1 2", "rank1.json:1: is not JSON"),
        (TRACE % "" + "{}", "rank1.json:1: is not JSON"),
        (TRACE % "" * 2, "is not JSON"),
        ((TRACE % "")[:-2], "is not JSON"),
        ("\n\n{1: 2}", "rank1.json:3: is not JSON"),
        ('{"traceEvents": 7, "distributedInfo": {"rank": 1}}', "traceEvents that are no list"),
        ('{"traceEvents": [], "distributedInfo": {"rank": true}}', "distributedInfo.rank: is missing"),
        ('{"traceEvents": [], "distributedInfo": [1]}', "distributedInfo.rank: is missing"),
        (f'{{"traceEvents": [], "distributedInfo": {{"rank": 1}}, "baseTimeNanoseconds": 1{"0" * 400}}}', "since 1970"),
        (f'{{"name": "{"a" * 5_000_000}"}}', "has an entry of more than 4194304 characters, or is not JSON"),
        (f'{{"name": "{"a" * 5_000_000}', "is not JSON"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, text, message):
    asked = made("gpipe")
    write(tmp_path, asked)
    (tmp_path / "rank1_trace.json").unlink()
    (tmp_path / "rank1.json").write_text(text)
    with pytest.raises(InputError, match=message):
        measure_traces(asked, tmp_path)


def test_the_command_makes_a_run_of_traces_and_compares_it(tmp_path, capsys):
    asked = made("1f1b")
    save_plan(asked, tmp_path / "plan.yaml")
    write(tmp_path / "traces", asked, steps=3)
    directory = tmp_path / "runs" / "theirs"
    command = ["compare", tmp_path / "plan.yaml", "--traces"]
    status, printed, _ = run(capsys, *command, tmp_path / "traces", "--out", directory, "--json")
    compared = json.loads(printed)
    assert (status, compared["steps"]) == (0, 3)
    assert compared["step_time"]["error"] == pytest.approx(0, abs=1e-5)
    assert len(load_run(directory)[1].steps) == 3
    assert run(capsys, "compare", directory, "--json")[:2] == (0, printed)
    status, _, said = run(capsys, *command, tmp_path / "nowhere")
    assert (status, "is no folder, expected one with a trace of each rank" in said) == (2, True)


# --- torch's own ------------------------------------------------------------------------------------------------------

SCHEDULES = {
    "GPipe": ("gpipe", 1, "fifo"),
    "1F1B": ("1f1b", 1, "fifo"),
    "LoopedBFS": ("interleaved_gpipe", 2, "reverse"),
    "Interleaved1F1B": ("interleaved_1f1b", 2, "fifo"),
    "InterleavedZeroBubble": ("zb_h1", 1, "fifo"),
    "ZBVZeroBubble": ("zb_v", 2, "fifo"),
    "DualPipeV": ("dualpipe_v", 2, "fifo"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder with traces of all of torch's schedules, and when each action really was."""
    pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")
    folder = tmp_path_factory.mktemp("torch")
    run_ranks(2, "torch_traces.py", folder)
    return folder


@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_own_schedules_are_read_as_they_were(recorded, name):
    """Every action lies within the call that computed it, which was noted beside the profiler; what the loss adds to
    the last stage's forward comes after that call."""
    schedule, v, backward = SCHEDULES[name]
    asked = made(schedule, v, backward=backward)
    measured = measure_traces(asked, recorded / name)
    assert (measured.device, len(measured.steps)) == ("cpu", 2)
    noted = [json.loads((recorded / f"{name}.rank{rank}.noted").read_text()) for rank in range(2)]
    for number, step in enumerate(measured.steps):
        earliest, latest = -math.inf, math.inf  # when the step may have begun, by what was noted of its actions
        for position, timeline in enumerate(step.ranks):
            calls = noted[position][number * (len(timeline.actions) - 1) :]
            for row, (action, (called, begun, ended)) in enumerate(zip(timeline.actions, calls, strict=False)):
                if action.kind == "U":
                    break
                assert str(action) == called
                start, end = float(timeline.start_s[row]), float(timeline.end_s[row])
                if end > start:  # not a first stage's I, which is W's to do
                    earliest = max(earliest, begun - start)
                    is_loss = action.kind == "F" and action.stage == asked.num_stages - 1
                    latest = latest if is_loss else min(latest, ended - end)
        assert earliest <= latest + 1e-3, "the clock of the notes and that of the traces agree to a millisecond"
        for timeline in step.ranks:
            assert (np.diff(timeline.start_s) >= 0).all()
            assert timeline.end_s[-1] > timeline.start_s[-1], "the update took some time"


def test_1f1b_without_stacks_is_refused_with_what_to_do(recorded, tmp_path):
    for file in (recorded / "1F1B").iterdir():
        content = json.loads(file.read_text())
        content["traceEvents"] = [found for found in content["traceEvents"] if found.get("cat") != "python_function"]
        (tmp_path / file.name).write_text(json.dumps(content))
    with pytest.raises(InputError, match="Schedule1F1B names nothing: record it with_stack=True"):
        measure_traces(made("1f1b"), tmp_path)
