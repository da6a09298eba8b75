"""Links as messages see them: what probing tells, and senders that wait until their message has arrived."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import layers, plan
from test_runs import refused, scenario_file

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from gpipe_exec.alternatives.rehearsal import what_is_left_out  # noqa: E402
from gpipe_exec.engine.delivery import Acknowledged, SentAside  # noqa: E402
from gpipe_exec.probe import SMALLEST_BYTES, fit_link, probe_sizes  # noqa: E402
from gpipe_exec.run.launch import Settings, execute  # noqa: E402
from gpipe_sim.explain.predict import predict  # noqa: E402
from gpipe_sim.runs.directory import load_run  # noqa: E402

# --- probing ---------------------------------------------------------------------------------------------------------


@given(st.floats(1e6, 1e11), st.floats(1e-7, 1e-2), st.floats(1e5, 1e9))
def test_a_link_is_found_from_the_times_of_its_messages(bandwidth, latency, largest):
    sizes = np.array(probe_sizes(largest))
    link = fit_link(sizes, latency + sizes / bandwidth)
    assert link.latency + sizes / link.bandwidth == pytest.approx(latency + sizes / bandwidth, rel=1e-6)


def test_what_passes_for_free_through_a_buffer_hides_neither_the_bandwidth_nor_makes_latency_negative():
    sizes = np.array(probe_sizes(4e6))
    link = fit_link(sizes, np.maximum(1e-4, (sizes - 3e4) / 100e6))
    assert link.bandwidth == pytest.approx(100e6, rel=0.01)
    assert 0 <= link.latency <= 1e-4


def test_messages_that_take_no_longer_when_larger_have_a_bandwidth_that_a_file_can_hold():
    link = fit_link([1e3, 1e6, 2e6], [1e-3, 1e-3, 1e-3])
    assert np.isfinite(link.bandwidth)
    assert link.latency == pytest.approx(1e-3, rel=1e-3)


@given(st.floats(0, 1e10))
def test_the_sizes_probed_reach_up_to_the_largest_message(largest):
    sizes = probe_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == SMALLEST_BYTES
    assert sizes[-1] == max(int(largest), 64 * SMALLEST_BYTES)


# --- delivery --------------------------------------------------------------------------------------------------------


class Cable:
    """Two ends; what is sent counts as sent at once, as with gloo, and arrives when it is let through."""

    def __init__(self):
        self.open = threading.Event()
        self.arrived = {}
        self.lock = threading.Lock()

    def slot(self, key):
        with self.lock:
            return self.arrived.setdefault(key, threading.Event())


class End:
    def __init__(self, cable, here, *, slow):
        self.cable, self.here, self.slow = cable, here, slow

    def isend(self, tensor, number):
        arrival = self.cable.slot((1 - self.here, number))

        def carry():
            if self.slow:
                self.cable.open.wait()
            arrival.set()

        threading.Thread(target=carry, daemon=True).start()
        sent = threading.Event()
        sent.set()
        return sent

    def irecv(self, tensor, number):
        return self.cable.slot((self.here, number))


def test_a_blocking_sender_goes_on_only_when_its_message_has_arrived():
    cable = Cable()
    sender, receiver = Acknowledged(End(cable, 0, slow=True)), Acknowledged(End(cable, 1, slow=False))
    received = receiver.irecv(torch.zeros(1), 0)
    sent = sender.isend(torch.ones(1), 0)
    done = threading.Event()
    waiting = threading.Thread(target=lambda: (sent.wait(), done.set()), daemon=True)
    waiting.start()
    assert not done.wait(0.1)  # the kernel has it, the receiver has not
    cable.open.set()
    received.wait()
    waiting.join(timeout=600)
    assert done.is_set()
    receiver.close()
    sender.close()


def test_a_receive_that_fails_is_told_to_the_rank_that_waits_for_it():
    class Broken(End):
        def irecv(self, tensor, number):
            class Lost:
                def wait(self):
                    raise RuntimeError("connection closed by peer")

            return Lost()

    receiver = Acknowledged(Broken(Cable(), 1, slow=False))
    with pytest.raises(RuntimeError, match="closed by peer"):
        receiver.irecv(torch.zeros(1), 0).wait()
    receiver.close()


def test_what_is_sent_aside_is_sent_by_whoever_waits_for_it():
    senders = []

    class Noting(End):
        def isend(self, tensor, number):
            senders.append(threading.current_thread().name)
            return super().isend(tensor, number)

    pending = SentAside(Noting(Cable(), 0, slow=False)).isend(torch.ones(1), 0)
    assert senders == []
    waiting = threading.Thread(target=pending.wait, name="aside")
    waiting.start()
    waiting.join()
    assert senders == ["aside"]


# --- rehearsals over real links --------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "blocking"])
def test_a_rehearsal_over_real_links_sends_whole_messages(tmp_path, overlap):
    planned = plan(
        layers([5e-3] * 2, [5e-3] * 2, [1e6] * 2), 2, bandwidth="3 GB/s", latency=1e-4, cluster={"overlap": overlap}
    )
    measured = execute(planned, tmp_path / "run", Settings(device="rehearse", steps=1, warmup=0, links="real"))
    again, loaded = load_run(tmp_path / "run")
    assert measured.links == loaded.links == "real"
    assert "pass the real links" in loaded.how
    assert again.profile.action_overhead_s > 0
    assert loaded.peak_memory_bytes == pytest.approx(predict(again).peak_memory_bytes, rel=0.02)


def test_real_links_are_for_rehearsals_and_do_not_stretch(capsys, tmp_path):
    scenario = scenario_file(tmp_path, "fine")
    assert "--links: is for rehearsals only" in refused(capsys, "run", scenario, "--device", "cpu", "--links", "real")
    stretched = ("--device", "rehearse", "--links", "real", "--stretch", 2)
    assert "expected 1: real links do not stretch" in refused(capsys, "run", scenario, *stretched)
    machines = ("--device", "rehearse", "--nodes", 2, "--rdzv-endpoint", "node0:29500")
    assert "expected a single machine or --links real" in refused(capsys, "run", scenario, *machines)


def test_a_shared_card_is_rehearsed_where_links_are_real():
    cluster = {"nodes": 2, "devices_per_node": 2, "network": {"bandwidth": "1 GB/s", "latency": "0 s"}}
    shared = plan(layers([1.0] * 4, output=[8.0] * 4), 2, cluster=cluster, placement=[0, 2, 1, 3])
    assert [text.split(":")[0] for text in what_is_left_out(shared)] == ["shared network cards"]
    assert what_is_left_out(shared, "real") == []
