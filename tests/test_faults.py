"""Faults in execution, with real processes: whatever happens to a rank, the disk or the network, the run ends with the
right message and status 1, no process is left behind, and nothing that was finished is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from plans import layers, plan
from test_runs import workers_of

from gpipe_sim.runs import load_run

pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

ROOT, WORKERS = Path(__file__).parents[1], Path(__file__).parent / "workers"
GPIPE = [sys.executable, "-m", "gpipe_sim.cli"]
needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounts and network namespaces need root on Linux"
)


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


def run_with(fault: str, folder: Path, run: Path, *options: object) -> subprocess.CompletedProcess[str]:
    command = [*GPIPE, "run", scenario_file(folder), "--device", "cpu", "--warmup", 0, "--steps", 6, "--out", run]
    command += ["--timeout", 3, *options]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=120, check=False, env=environment(fault)
    )


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
        ("stop:1:B:1", "no step finished for 3 s: rank 1 is stopped (SIGSTOP)"),
        ("sleep:0:F:2", "no step finished for 3 s: rank 0 stands in faults.py:"),
    ],
)
def test_a_rank_that_is_lost_at_any_action_is_named_and_two_finished_steps_are_kept(fault, message, tmp_path):
    run = tmp_path / "run"
    done = run_with(fault, tmp_path, run)
    assert_failed_cleanly(done, run)
    assert message in done.stderr
    assert "2 steps had finished" in done.stderr
    assert len(load_run(run)[1].steps) == 2


def test_a_rank_that_is_only_slow_is_waited_for(tmp_path):
    """Stopped for two seconds in the middle of a step, less than the patience."""
    done = run_with("pause:1:F:1", tmp_path, tmp_path / "run", "--timeout", 10)
    assert done.returncode == 0, done.stderr
    steps = load_run(tmp_path / "run")[1].steps
    times = [max(timeline.end_s[-1] for timeline in step.ranks) for step in steps]
    assert len(steps) == 6
    assert max(range(6), key=times.__getitem__) == 2
    assert times[2] > 1.5


def test_no_rank_outlives_the_command_that_started_it(tmp_path):
    run = tmp_path / "run"
    command = [*GPIPE, "run", str(scenario_file(tmp_path)), "--device", "cpu", "--out", str(run), "--timeout", "60"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment("sleep:1:F:0")) as process:
        while not list(run.glob("ranks/rank*.json")):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)  # so that it cannot clean up
        process.wait(timeout=60)
    for _ in range(100):  # the kernel ends them one after the other
        if not workers_of(run):
            return
        time.sleep(0.1)
    raise AssertionError(f"left behind: {workers_of(run)}")


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
    again = subprocess.run(
        [*GPIPE, "compare", str(roomy), "--json"], capture_output=True, text=True, check=False, env=environment()
    )
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["steps"] > 10


# --- the network ---------------------------------------------------------------------------------------------------


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


@needs_root
def test_a_cable_that_is_cut_ends_both_hosts_and_keeps_what_they_measured(two_hosts, tmp_path):
    run = tmp_path / "run"
    command = [*GPIPE, "run", str(scenario_file(tmp_path)), "--device", "cpu", "--out", str(run), "--nodes", "2"]
    command += ["--rdzv-endpoint", "10.77.0.1:29555", "--timeout", "3", "--steps", "1000000"]
    command += ["--warmup", "0"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment()).stdout
    commands = [line for line in printed.splitlines() if not line.startswith("#")]
    ours = environment() | {"GLOO_SOCKET_IFNAME": "v0", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    ours |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with ExitStack() as at_exit:
        hosts = []
        for name, line in zip(two_hosts, commands, strict=True):
            host = subprocess.Popen(
                ["ip", "netns", "exec", name, "sh", "-c", f"exec env {line}"],
                stderr=subprocess.PIPE,
                text=True,
                env=ours,
                cwd=tmp_path,
                start_new_session=True,
            )
            at_exit.callback(host.kill)
            hosts.append(host)
        while not all((run / "ranks" / f"rank{rank}.json").is_file() for rank in (0, 1)):
            assert all(host.poll() is None for host in hosts)
            time.sleep(0.1)
        ip("-n", two_hosts[0], "link", "set", "v0", "down")
        for host in hosts:
            host.communicate(timeout=110)
            assert host.returncode not in (0, None)
    assert not workers_of(run)
    told = [path.read_text() for path in run.glob("ranks/*.error")]
    assert len(told) == 2
    assert any("no step finished for 3 s: another rank, or the link to it, is gone" in text for text in told)
    again = subprocess.run(
        [*GPIPE, "compare", str(run), "--json"], capture_output=True, text=True, check=False, env=environment()
    )
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["steps"] >= 1
