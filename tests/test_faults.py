"""Faults in execution, with real processes: whatever happens to a rank, the disk or the network, the run ends with the
right message and status 1, no process is left behind, and nothing that was finished is lost."""

import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from plans import layers, plan
from test_runs import workers_of

from gpipe_sim.cli import main
from gpipe_sim.runs.directory import load_run
from gpipe_sim.scenario.reading import load_scenario

pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

import torch
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import schedules

from gpipe_exec.alternatives import rehearsal
from gpipe_exec.devices import accelerator, autopsy
from gpipe_exec.devices.autopsy import failure, standing, write_down
from gpipe_exec.devices.environment import MODELS, SAFE, worker_environment
from gpipe_exec.devices.supervision import LOG
from gpipe_exec.engine import messages, pipeline
from gpipe_exec.run import launch

ROOT, WORKERS = Path(__file__).parents[1], Path(__file__).parent / "workers"
GPIPE = [sys.executable, "-m", "gpipe_sim.cli"]
needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounts and network namespaces need root on Linux"
)


TINY = "{kind: transformer, layers: 2, hidden: 8, heads: 2, ffn: 16, vocab: 10, sequence: 4}"


def scenario_file(folder: Path) -> Path:
    """Two ranks of two layers, four micro-batches, and the model of `workers/faults.py`."""
    plan(layers([1e-4] * 4, [2e-4] * 4, [64.0] * 4, [128.0] * 4, parameters=1088), 4).profile.save(
        folder / "profile.json"
    )
    shutil.copy(WORKERS / "faults.py", folder)
    path = folder / "scenario.yaml"
    path.write_text(
        "model: {kind: python, function: faults:model}\nprofile: profile.json\nbatch: 8\ndtype: fp32\n"
        "cluster: {device: cpu, devices_per_node: 2, link: {bandwidth: 1 GB/s, latency: 100 us}}\n"
        "plan: {stages: 2, microbatches: 4, checkpoint: never}\n"
    )
    return path


def environment(fault: str = "none:0:F:0") -> dict[str, str]:
    return os.environ | {"GPIPE_FAULT": fault, "PYTHONPATH": str(ROOT)}


def gpipe(*arguments: object, fault: str = "none:0:F:0") -> subprocess.CompletedProcess[str]:
    """The command, in this process, which has torch already; its ranks are processes of their own."""
    said, status = [io.StringIO(), io.StringIO()], 0
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(fault).items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdout", said[0])
        patch.setattr(sys, "stderr", said[1])
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = int(ended.code or 0)
    return subprocess.CompletedProcess([], status, said[0].getvalue(), said[1].getvalue())


HANG_S = 6
"""The patience with a rank that hangs. With all others it is without end: a busy machine makes ranks wait, too."""


def run_with(fault: str, folder: Path, run: Path, *options: object) -> subprocess.CompletedProcess[str]:
    command = ["run", scenario_file(folder), "--device", "cpu", "--warmup", 0, "--steps", 6, "--out", run]
    patience = HANG_S if fault.split(":")[0] in ("stop", "sleep") else 600
    return gpipe(*command, "--timeout", patience, *options, fault=fault)


def assert_failed_cleanly(done: subprocess.CompletedProcess[str], run: Path) -> None:
    """A message, status 1, nobody left behind, no half of a file; our own code shows no traceback."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr.split("failed:")[0]
    assert not workers_of(run)
    for path in run.rglob("*.json"):
        json.loads(path.read_text())
    assert not list(run.rglob("*.part"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill:0:B:3", "rank 0 was killed by SIGKILL"),
        ("kill:1:F:0", "rank 1 was killed by SIGKILL"),
        ("stop:1:B:1", f"no step finished for {HANG_S} s: rank 1 is stopped (SIGSTOP)"),
        ("sleep:0:F:2", f"no step finished for {HANG_S} s: rank 0 stands in faults.py:"),
        ("term:1:F:1", "rank 1 was killed by SIGTERM"),
        ("leave:0:B:0", "rank 0 left with status 0 before its work was done"),
    ],
)
def test_a_rank_that_is_lost_at_any_action_is_named_and_two_finished_steps_are_kept(fault, message, tmp_path):
    run = tmp_path / "run"
    done = run_with(fault, tmp_path, run)
    assert_failed_cleanly(done, run)
    assert message in done.stderr
    assert "2 steps had finished" in done.stderr
    assert len(load_run(run)[1].steps) == 2


def test_the_traceback_of_a_failure_is_written_down_whatever_its_text(tmp_path):
    (tmp_path / "ranks").mkdir()
    try:
        raise ValueError("half of a \ud800 pair")
    except ValueError:
        write_down(tmp_path, 0)
    assert failure(tmp_path, [False], ended={0: 1}).endswith("ValueError: half of a \\ud800 pair\n")


@pytest.mark.parametrize(
    ("error", "stays"),
    [(RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer"), True), (ValueError("mine"), False)],
)
def test_a_rank_that_has_lost_another_stays_until_the_other_was_seen_to_end(error, stays, tmp_path, monkeypatch):
    happened: list[str] = []
    monkeypatch.setattr(autopsy.time, "sleep", lambda seconds: happened.append("stayed"))
    monkeypatch.setattr(autopsy, "leave", lambda status: happened.append(f"left with {status}"))
    (tmp_path / "ranks").mkdir()
    try:
        raise error
    except Exception:
        autopsy.fail(tmp_path, 0)
    assert happened == ["stayed"] * stays + ["left with 1"]
    assert str(error) in (tmp_path / "ranks" / "rank0.error").read_text()


LOST = "Traceback ...\nRuntimeError: [../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1\n"


@pytest.mark.parametrize(
    ("errors", "ended", "log", "told"),
    [
        ({0: LOST}, {1: 0, 0: 1}, "", "rank 1 left with status 0"),
        ({0: LOST, 2: LOST}, {1: 3, 0: 1, 2: 1}, "", "rank 1 left with status 3"),
        ({0: LOST}, {1: -15, 0: 1}, "", "rank 1 was killed by SIGTERM"),
        ({0: "ValueError\n"}, {0: 1}, "", "rank 0 failed:\nValueError"),
        ({1: "ValueError\n"}, {0: -6, 1: 1}, "", "rank 1 failed:\nValueError"),
        ({}, {1: -9, 0: -6}, "", "rank 1 was killed by SIGKILL"),
        ({}, {1: 3, 0: -6}, "", "rank 1 left with status 3"),
        ({}, {1: -6, 0: -6}, "", "rank 0 was killed by SIGABRT, rank 1 was killed by SIGABRT"),
        ({0: LOST}, {1: -6, 0: 1}, "", "rank 1 was killed by SIGABRT"),
        ({0: LOST}, {0: 1, 1: -6}, "", "rank 1 was killed by SIGABRT"),
        ({0: LOST, 1: "SystemExit: 0\n"}, {0: 1, 1: 0}, "", "rank 1 failed:\nSystemExit: 0"),
        ({0: LOST, 1: "AssertionError\n"}, {0: 1, 1: 1}, "", "rank 1 failed:\nAssertionError"),
        ({0: LOST}, {0: 1}, "", "rank 0 failed:\n" + LOST.strip()),
        ({}, {0: 0, 1: 0, 2: 0, 3: 0}, "", "rank 0 left with status 0 before its work was done"),
        ({}, {}, "", "rank 0 left before its work was done"),
        ({}, {1: 0, 0: -10}, "", "rank 1 left with status 0"),
        (
            {},
            {},
            "Traceback ...\nOSError: port 1 is taken\n",
            "the launcher failed before its ranks began: OSError: port",
        ),
    ],
)
def test_the_cause_is_told_and_not_a_neighbour_that_lost_its_connection(errors, ended, log, told, tmp_path):
    for folder in ("ranks", "logs"):
        (tmp_path / folder).mkdir()
    for rank, text in errors.items():  # the neighbour is the first to write
        (tmp_path / "ranks" / f"rank{rank}.error").write_text(text)
    (tmp_path / "logs" / LOG).write_text(log)
    assert failure(tmp_path, [False] * 4, ended=ended).startswith(told)
    if len(ended) > 1:  # the same if a neighbour was too slow to notice
        assert failure(tmp_path, [False] * 4, ended=ended, hung="no step finished for 3 s").startswith(told)


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([(messages, 271, "take"), (pipeline, 140, "step")], None),
        ([(threading, 360, "wait"), (messages, 204, "finish"), (pipeline, 170, "step")], None),
        ([(rehearsal, 99, "wait"), (messages, 220, "take"), (pipeline, 140, "step")], None),
        ([(distributed_c10d, 4, "barrier"), (launch, 110, "step")], None),
        ([(torch.accelerator, 9, "synchronize"), (accelerator, 9, "synchronize"), (pipeline, 170, "step")], None),
        ([("/models/model.py", 7, "forward"), (schedules, 9, "step")], "stands in model.py:7, forward"),
        ([(threading, 360, "wait"), ("/models/model.py", 7, "load")], "stands in model.py:7, load"),
        ([], None),
    ],
)
def test_a_rank_waits_for_another_where_its_innermost_frame_communicates(frames, told):
    """And the code of a model stands in its own way, also under torch's engine."""
    lines = [f'  File "{getattr(file, "__file__", file)}", line {line} in {name}\n' for file, line, name in frames]
    assert standing("Stack (most recent call first):\n" + "".join(lines)) == told


def test_a_rank_that_is_only_slow_is_waited_for(tmp_path):
    """Stopped for two seconds in the middle of a step, less than the patience."""
    done = run_with("pause:1:F:1", tmp_path, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    steps = load_run(tmp_path / "run")[1].steps
    assert len(steps) == 6
    assert max(timeline.end_s[-1] for timeline in steps[2].ranks) > 2.0


def test_a_process_that_is_started_by_one_that_died_meanwhile_does_not_begin():
    line = f"from gpipe_exec.devices.process import die_with_parent; die_with_parent({os.getpid()}); print('begun')"
    both = [f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', {line!r}])", line]
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {line!r}])"
    for program, said in ((both[0], "begun\n"), (inner, "")):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment()
        )
        assert done.stdout == said


HOSTILE = "import pathlib; pathlib.Path(__file__ + '.ran').touch(); raise RuntimeError('imported')"


def test_nothing_that_lies_beside_a_scenario_is_executed_but_what_it_names(tmp_path):
    """Neither in its folder nor where the command is started; a model's own modules come last on the path."""
    for name in ("sitecustomize", "queue", "numpy", "random"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    path = scenario_file(tmp_path)
    own = worker_environment(load_scenario(path)[0])
    assert own[MODELS] == str(tmp_path)
    assert str(tmp_path) not in own.get("PYTHONPATH", "")
    path.write_text(path.read_text().replace("{kind: python, function: faults:model}", TINY))
    assert MODELS not in worker_environment(load_scenario(path, "profile=analytic")[0])
    asked = "import sys, queue, numpy; from gpipe_exec.devices.environment import find_own_models; find_own_models()"
    done = subprocess.run(
        [sys.executable, "-c", f"{asked}; import faults; print(sys.path[-1])"],
        capture_output=True,
        text=True,
        check=False,
        env=environment() | SAFE | {MODELS: str(tmp_path)},
        cwd=tmp_path,
    )
    assert done.stdout == f"{tmp_path}\n", done.stderr
    assert not list(tmp_path.glob("*.ran"))


def test_commands_for_other_machines_are_printed_without_importing_the_model(tmp_path):
    path = scenario_file(tmp_path)
    (tmp_path / "faults.py").write_text(HOSTILE)
    command = [*GPIPE, "run", str(path), "--device", "cpu", "--out", str(tmp_path / "run"), "--nodes", "2"]
    command += ["--rdzv-endpoint", "node0:29555"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("*.ran"))


@pytest.mark.parametrize("ranks", ["1", "*"])
def test_a_profile_of_which_one_rank_or_all_hang_is_given_up_and_leaves_nothing_behind(ranks, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    out = tmp_path / "measured.json"
    fault = f"sleep:{ranks}:F:0"
    done = gpipe("profile", scenario_file(tmp_path), "--device", "cpu", "--out", out, "--timeout", HANG_S, fault=fault)
    assert done.returncode == 1, done.stderr
    assert f"nothing was measured for {HANG_S} s: rank " in done.stderr
    assert "rank 1 stands in faults.py:" in done.stderr or ranks == "*"
    assert not workers_of(tmp_path)
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]  # torch's own


def wait_until_gone(folder: Path, seconds: float = 120.0) -> None:
    """The kernel ends processes one after the other, and may take its time; what was left behind would stay."""
    until = time.monotonic() + seconds
    while left := workers_of(folder):
        assert time.monotonic() < until, f"left behind: {left}"
        time.sleep(0.1)


LAUNCHER = """
import sys, time
from pathlib import Path
from gpipe_exec.devices.supervision import ranks_of_this_machine
worker, found = [sys.argv[1] + "/forever.py"], {"PYTHONPATH": sys.argv[2]}
with ranks_of_this_machine(2, worker, Path(sys.argv[1]), found, fork=sys.argv[3] == "fork") as watched:
    while not watched.ranks() and not watched.wait(0.01):
        pass
    print("begun" if watched.ranks() else "ended", flush=True)
    time.sleep(1000)
"""


def test_no_rank_outlives_a_launcher_that_is_killed_while_they_start(tmp_path):
    """In the first moments of a rank, forked or afresh, that would not end by itself; runs and profiles start alike."""
    asked = {signal.SIGHUP: "fork", signal.SIGQUIT: "afresh", signal.SIGKILL: "fork"}
    launchers = []
    for number, how in asked.items():
        folder = tmp_path / number.name
        folder.mkdir()
        (folder / "forever.py").write_text("import time; time.sleep(100_000)")
        line = [sys.executable, "-c", LAUNCHER, str(folder), str(ROOT), how]
        launchers.append(subprocess.Popen(line, stdout=subprocess.PIPE, env=environment()))
    for number, launcher in zip(asked, launchers, strict=True):
        with launcher:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == b"begun\n"
            launcher.send_signal(number)
    wait_until_gone(tmp_path)


def listeners(processes: Iterable[int]) -> set[str]:
    """Where these processes listen, as Linux writes addresses: 0100007F is 127.0.0.1."""
    sockets = set()
    for pid in processes:
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(handle))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


def test_no_rank_outlives_the_command_that_started_it(tmp_path):
    run = tmp_path / "run"
    command = [*GPIPE, "run", str(scenario_file(tmp_path)), "--device", "cpu", "--out", str(run), "--timeout", "600"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment("sleep:1:F:0")) as process:
        while not list(run.glob("ranks/rank*.json")):
            assert process.poll() is None
            time.sleep(0.1)
        assert listeners(workers_of(run)) == {"0100007F"}, "and meanwhile they listen to nobody on other machines"
        process.send_signal(signal.SIGKILL)  # so that it cannot clean up
        process.wait()
    wait_until_gone(run)


# --- the disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path) -> Iterator[Path]:
    """A file system with a few hundred kilobytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@needs_root
def test_a_full_disk_ends_a_run_and_what_was_written_before_can_be_compared_later(tiny_disk, tmp_path):
    run = tiny_disk / "run"
    done = run_with("none:0:F:0", tmp_path, run, "--steps", 400)
    assert_failed_cleanly(done, run)
    assert "No space left on device" in done.stderr
    roomy = tmp_path / "roomy"
    shutil.copytree(run, roomy)
    (roomy / "measured.json").unlink(missing_ok=True)
    again = gpipe("compare", roomy, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["steps"] > 10


# --- the network ---------------------------------------------------------------------------------------------------

Host = subprocess.Popen[str]


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them; gone afterwards, whatever happened."""
    names = [f"gpipe-fault-{os.getpid()}-{end}" for end in "ab"]
    with ExitStack() as at_exit:
        try:
            for name in names:
                ip("netns", "add", name)
                at_exit.callback(ip, "netns", "delete", name)
            ip("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "v0", "netns", names[1])
            for number, name in enumerate(names, start=1):
                ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "v0")
                for device in ("lo", "v0"):
                    ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot make network namespaces: {error}")
        yield names[0], names[1]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def started_on(two_hosts: tuple[str, str], cards: tuple[str, str], folder: Path, *options: object) -> Iterator[Host]:
    """The commands that are printed for two machines, each on its own."""
    command = ["run", scenario_file(folder), "--device", "cpu", "--out", folder / "run", "--nodes", 2, "--warmup", 0]
    printed = gpipe(*command, "--rdzv-endpoint", "10.77.0.1:29555", *options).stdout
    commands = [line for line in printed.splitlines() if not line.startswith("#")]
    ours = environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    ours |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for name, card, line in zip(two_hosts, cards, commands, strict=True):
        yield subprocess.Popen(
            ["ip", "netns", "exec", name, "sh", "-c", f"exec env {line}"],
            stderr=subprocess.PIPE,
            text=True,
            env=ours | {"GLOO_SOCKET_IFNAME": card},
            cwd=folder,
            start_new_session=True,
        )


@needs_root
def test_a_rank_that_cannot_be_reached_is_told_by_its_name_on_both_machines(two_hosts, tmp_path):
    """The second names a card that leads nowhere: the first tries to connect to it, and the second waits for that."""
    for command in (
        "link add v1 type veth peer v2",
        "addr add 10.76.0.2/24 dev v1",
        "link set v1 up",
        "link set v2 up",
    ):
        ip("-n", two_hosts[1], *command.split())
    with ExitStack() as at_exit:
        hosts = list(started_on(two_hosts, ("v0", "v1"), tmp_path, "--timeout", 1))
        for host in hosts:
            at_exit.callback(host.kill)
        told = [host.communicate(timeout=600)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [1, 1]
    name = platform.node()
    for text, here, there in ((told[0], "0", f"1 on {name} at 10.76.0.2"), (told[1], "1", f"0 on {name} at 10.77.0.1")):
        assert re.search(rf"UnreachableError: rank {here} on {name} at \S+ cannot reach rank {there} \(", text), text
    wait_until_gone(tmp_path)


@needs_root
def test_a_cable_that_is_cut_ends_both_hosts_and_keeps_what_they_measured(two_hosts, tmp_path):
    run = tmp_path / "run"
    with ExitStack() as at_exit:
        hosts = list(started_on(two_hosts, ("v0", "v0"), tmp_path, "--timeout", HANG_S, "--steps", 1_000_000))
        for host in hosts:
            at_exit.callback(host.kill)
        while not all((run / "ranks" / f"rank{rank}.json").is_file() for rank in (0, 1)):
            assert all(host.poll() is None for host in hosts)
            time.sleep(0.1)
        ip("-n", two_hosts[0], "link", "set", "v0", "down")
        for host in hosts:
            host.communicate(timeout=600)
            assert host.returncode not in (0, None)
    wait_until_gone(run)
    told = [path.read_text() for path in run.glob("ranks/*.error")]
    assert len(told) == 2
    assert any(f"no step finished for {HANG_S} s: another rank, or the link to it, is gone" in text for text in told)
    again = gpipe("compare", run, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["steps"] >= 1
