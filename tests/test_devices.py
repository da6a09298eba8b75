"""Devices that work beside the host, without one: spans and deliveries by events, and tensors where they belong."""

import gc

import pytest

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from processes import run_ranks  # noqa: E402

from gpipe_exec.devices import accelerator  # noqa: E402
from gpipe_exec.devices.accelerator import available_kind, backend_for, default_device  # noqa: E402
from gpipe_exec.devices.allocator import trace_bytes  # noqa: E402
from gpipe_exec.devices.recorder import Recorder  # noqa: E402
from gpipe_exec.engine.transport import ByEvents  # noqa: E402


class Moment:
    """An event: it happens when the device comes to it."""

    def __init__(self) -> None:
        self.at = None


class Transfer:
    """Ends at a time of the device's own."""

    def __init__(self, end_s: float) -> None:
        self.end_s, self.waited_by = end_s, None


class MadeUp:
    """A device whose work ends later than it is told: each stream has a clock, which the host never waits for."""

    def __init__(self) -> None:
        self.compute_s, self.told = 0.0, []
        self.is_done = False

    def work(self, seconds: float) -> None:
        self.compute_s += seconds

    def mark(self) -> Moment:
        self.told.append(moment := Moment())
        moment.at = self.compute_s
        return moment

    def after(self, transfers) -> Moment:
        self.told.append(moment := Moment())
        moment.at = max((transfer.end_s for transfer in transfers), default=self.compute_s)
        return moment

    def has_happened(self, mark) -> bool:
        return self.is_done

    def start_clock(self) -> None:
        self.compute_s = 100.0

    def seconds(self, mark) -> float:
        assert self.is_done, "an event is read when it has happened"
        return mark if isinstance(mark, float) else mark.at

    def elapsed_s(self, begin, end) -> float:
        return self.seconds(end) - self.seconds(begin)

    def synchronize(self) -> None:
        self.is_done = True


def test_spans_and_deliveries_are_those_of_the_device_and_not_of_the_host_that_tells_it():
    device = MadeUp()
    recorder, deliveries = Recorder(device, enabled=True), ByEvents(device)
    recorder.begin_step()
    for microbatch in range(2):
        waited_from = recorder.mark()
        device.work(2.0)  # the compute stream waits for a message
        started = recorder.mark()
        device.work(5.0)
        ended = recorder.mark()
        deliveries.put(microbatch, [(Transfer(device.compute_s + 3.0), torch.zeros(1))])
        recorder.action(waited_from, started, ended)
    recorder.end_step([deliveries.at[0], deliveries.at[1]])
    (step,) = recorder.steps
    assert step.waited_from == [100.0, 107.0]
    assert step.start == [102.0, 109.0]
    assert step.end == [107.0, 114.0]  # the second is not late by the first's delivery
    assert step.delivered == [110.0, 117.0]


def test_what_was_sent_is_held_until_the_device_has_delivered_it():
    device = MadeUp()
    deliveries = ByEvents(device)
    deliveries.put(0, [(Transfer(1.0), torch.zeros(1))])
    deliveries.reap()
    assert len(deliveries._held) == 1
    device.synchronize()
    deliveries.finish()
    assert len(deliveries._held) == 0


def test_off_a_recorder_asks_nothing_of_the_device():
    device = MadeUp()
    recorder = Recorder(device)
    recorder.begin_step()
    assert isinstance(recorder.mark(), float)
    recorder.end_step([])
    assert device.told == []
    assert recorder.steps == []


def test_no_tensor_of_a_step_is_on_another_device():
    """Of every schedule, with every checkpoint mode, and of mixed precision, on a device whose tensors meet no others;
    inputs come to it from pinned memory."""
    assert "10 steps stay on their device" in run_ranks(1, "fake_tensors.py")


@pytest.mark.parametrize(
    ("config", "kind", "in_order"),
    [
        ("cpu:gloo,cuda:gloo", "cuda", False),  # it cannot send what is in a GPU's memory: the device is the CPU
        ("cpu:gloo,cuda:nccl", "cuda", True),
        ("cuda:nccl", "cuda", True),
        ("cpu:gloo,xpu:xccl", "xpu", True),
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("cuda:nccl", "cpu", False),
    ],
)
def test_the_device_follows_the_backend_of_the_processes(config, kind, in_order):
    assert accelerator.goes_in_order(kind, config) is in_order


def test_a_group_on_a_device_has_a_backend_for_host_memory_too():
    if available_kind() == "cpu":
        assert default_device() == torch.device("cpu")
    assert backend_for(torch.device("cpu")) == "gloo"
    assert backend_for(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


def test_garbage_from_before_a_trace_is_not_taken_off_the_work_that_is_traced():
    """Tensors in a cycle are freed whenever Python collects it, which may be in the middle of a trace."""
    cpu = torch.device("cpu")

    def forgotten() -> None:
        cycle = [torch.empty(66_688, dtype=torch.uint8)]
        cycle.append(cycle)

    trace_bytes(cpu, forgotten)  # a block whose size the profiler knows

    def work() -> torch.Tensor:
        gc.collect()
        return torch.empty(1_000, dtype=torch.uint8)

    trace, kept = trace_bytes(cpu, work)
    assert min(trace.held_bytes) >= 0
    assert trace.held_bytes[-1] >= kept.nbytes
