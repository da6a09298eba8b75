"""Hosts of network namespaces reach each other and nothing else, and leave nothing behind; knees are found."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

# At the end of the path: among the benchmarks, there is one of the dashboard.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from hosts import Hosts, what_is_missing  # noqa: E402
from network import NUM_MICROBATCHES, Point, find_knee, points, scenario_of  # noqa: E402

from gpipe_sim.explain.predict import predict  # noqa: E402
from gpipe_sim.make.making import make_plan  # noqa: E402
from gpipe_sim.plan.plan import Nic  # noqa: E402
from gpipe_sim.scenario.catalog import Link  # noqa: E402

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "network.py"
needs_hosts = pytest.mark.skipif(bool(what_is_missing()), reason=f"hosts need {', '.join(what_is_missing())}")


# --- hosts -----------------------------------------------------------------------------------------------------------


def namespaces(processes: Iterable[int | str] = ("[0-9]*",)) -> set[str]:
    """Every network namespace but this one that these processes are in, or any process at all."""
    found = set()
    for process in processes:
        for link in Path("/proc").glob(f"{process}/ns/net"):
            with suppress(OSError):  # it has just ended
                found.add(os.readlink(link))
    return found - {os.readlink("/proc/self/ns/net")}


def descendants(pid: int) -> set[int]:
    found, tasks = set(), [pid]
    while tasks:
        for file in Path(f"/proc/{tasks.pop()}/task").glob("*/children"):
            with suppress(OSError):  # it has just ended
                children = set(map(int, file.read_text().split()))
                found |= children
                tasks += children
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def wait_until_gone(pids: set[int]) -> None:
    while any(map(is_running, pids)):
        time.sleep(0.05)


def said_on(hosts: Hosts, index: int, *command: str) -> str:
    done = subprocess.run(hosts.all[index].inside(command), capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@needs_hosts
def test_hosts_reach_each_other_and_nothing_else():
    listen = (
        "import socket; s = socket.create_server(('10.77.0.2', 5000)); print(flush=True); s.accept()[0].send(b'here')"
    )
    ask = "import socket; print(socket.create_connection(('10.77.0.1', 5000)).recv(4))"
    with Hosts(2) as hosts:
        hosts.set_rate(100e6)
        server = subprocess.Popen(
            hosts.all[1].inside([sys.executable, "-c", listen]), stdout=subprocess.PIPE, start_new_session=True
        )
        server.stdout.readline()
        assert "here" in said_on(hosts, 0, sys.executable, "-c", ask.replace("10.77.0.1", "10.77.0.2"))
        assert server.wait() == 0
        server.stdout.close()
        assert "unreachable" in said_on(hosts, 0, "ip", "route", "get", "192.0.2.1")
        assert "10.77." not in subprocess.run(["ip", "address"], capture_output=True, text=True, check=True).stdout
        assert said_on(hosts, 0, "tc", "qdisc", "show", "dev", "eth0").startswith("qdisc tbf")


@needs_hosts
def test_an_exception_leaves_no_host_behind():
    there, inside, made = interfaces(), None, set()
    with pytest.raises(ZeroDivisionError), Hosts(3) as hosts:
        inside = hosts.start(2, ["sleep", "1000"], os.environ, subprocess.DEVNULL)
        made |= namespaces(descendants(os.getpid()))
        assert len(made) == 4  # and the switch
        pids = {host.pid for host in hosts.all}
        1 / 0  # noqa: B018
    assert inside.poll() is not None
    assert not any(map(is_running, pids))
    assert not made & namespaces()
    assert interfaces() == there


@needs_hosts
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_a_benchmark_that_is_ended_leaves_nothing_behind(number, status):
    """Not even by SIGKILL, after which nobody is there to clean up."""
    there = interfaces()
    process = subprocess.Popen(
        [sys.executable, BENCHMARK, "--quick"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert b"hosts are there" in process.stdout.readline()
    while not any(b"gpipe_exec.probe" in command_line(pid) for pid in descendants(process.pid)):
        time.sleep(0.05)  # until torchrun is at work in there
    begun = descendants(process.pid)
    made = namespaces(begun)
    assert made
    process.send_signal(number)
    assert process.wait() == status
    wait_until_gone(begun)
    assert b"Traceback" not in process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    assert not made & namespaces()
    assert interfaces() == there


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_what_is_missing_is_said_and_the_benchmark_is_left_out(tmp_path):
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(BENCHMARK.parents[1])}
    done = subprocess.run([sys.executable, BENCHMARK], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"left out: .*`tc` \(Debian package iproute2\)", done.stdout)


# --- predictions -----------------------------------------------------------------------------------------------------


LINK = Link(name="measured", bandwidth=100e6, latency=100e-6)


def predicted_s(rate: float, *, latency: float = 0.0, **choices) -> float:
    link = Link(name="measured", bandwidth=rate / 8, latency=latency)
    return predict(make_plan(scenario_of(Point(what="knee", rate=rate, **choices), link))).step_time_s


def test_the_knee_is_where_a_message_takes_as_long_as_an_action():
    rates = [0.4e9, 0.5e9, 0.65e9, 0.9e9, 1.2e9, 1.8e9, 3e9]
    assert find_knee(rates, [predicted_s(rate) for rate in rates]) == pytest.approx(8 * 4e6 / 40e-3, rel=1e-6)


def test_the_knee_of_noisy_times_is_found_whatever_their_order():
    rates = np.array([2.5, 0.5, 1.3, 0.6, 1.0, 0.75, 1.8]) * 1e9
    noise = 1 + 0.005 * np.random.default_rng(1).standard_normal(len(rates))
    times = [predicted_s(rate) for rate in rates] * noise
    assert find_knee(rates, times) == pytest.approx(0.8e9, rel=0.03)


def test_a_knee_needs_two_rates_on_either_side():
    with pytest.raises(ValueError, match="expected at least 4"):
        find_knee([1.0, 2.0, 3.0], [1.0, 1.0, 2.0])


def test_ranks_behind_one_nic_share_it():
    (shared, *_) = [point for point in points(quick=False) if point.what == "shared"]
    plan = make_plan(scenario_of(shared, LINK))
    assert plan.shared_nics == {Nic(node, direction) for node in (0, 1) for direction in ("out", "in")}
    two_hosts = make_plan(scenario_of(Point(what="grid", rate=1e9), LINK))
    assert two_hosts.shared_nics == set()


def test_a_blocking_sender_waits_for_every_message():
    c, f, m = 8 * 4e6 / 1e9, 40e-3, NUM_MICROBATCHES
    assert predicted_s(1e9, overlap=False) == pytest.approx(2 * (m * (f + c) + f), rel=1e-6)
