"""Several machines meet before a run: whoever is missing, or cannot be reached, is told."""

import platform
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from gpipe_exec.run.machine import MissingError, meet


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_machines_meet_in_whatever_order_they_come(port):
    with ThreadPoolExecutor(3) as pool:
        stores = [store.result() for store in [pool.submit(meet, "127.0.0.1", port, n, 3, 600) for n in (2, 0, 1)]]
        assert all(store.get(f"gpipe/machine{n}").decode() == platform.node() for store in stores for n in range(3))


def test_a_machine_that_does_not_come_is_told_to_those_that_have_come(port):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, "127.0.0.1", port, 1, 3, 600)
        here = platform.node()
        told = rf"only machine 0 \({here}\), machine 1 \({here}\) came, and machine 2 did not, at 127.0.0.1:{port}"
        with pytest.raises(MissingError, match=told):
            meet("127.0.0.1", port, 0, 3, 5)
        with pytest.raises(MissingError, match=f"machine 0 at 127.0.0.1:{port} has left, and tells why"):
            waiting.result(timeout=600)


def test_a_first_machine_that_cannot_be_reached_is_told_by_its_name(port):
    with pytest.raises(MissingError, match=f"machine 1 cannot reach machine 0 at 127.0.0.1:{port} within 0.5 s: "):
        meet("127.0.0.1", port, 1, 2, 0.5)
    with pytest.raises(MissingError, match=r"machine 1 cannot reach machine 0 at nowhere.invalid:5 within 0.5 s: "):
        meet("nowhere.invalid", 5, 1, 2, 0.5)
