"""The device that computes, whichever it is: everything that is not the same on the CPU and on an accelerator.

An accelerator works beside the host, which only tells it what to do: work is done in *streams*, each in the order of
its telling, and an *event* in a stream happens when everything before it is done. Waiting for a transfer makes a stream
wait, not the host. So moments are marked by events, and read when they have happened:

    host       |F0|F1|B1|...                        tells, and goes on
    compute         |====F0====|====F1====|         |====B1====|
    transfers                  |##out##|            ^ waits for its gradient
    side                               x an event: delivered; the compute stream has not waited for it

On the CPU the host is what computes, and a mark is the time. CUDA, ROCm and XPU are one here: torch.accelerator.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist


class Waitable(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Return, or make the current stream go on, when it is complete."""


Mark = float | torch.Event
"""A moment: seconds of the host's clock, or an event of the device."""


class Beside(Protocol):
    """A device that works beside the host."""

    def mark(self) -> Mark:
        """An event that happens when the work told so far is done."""

    def after(self, transfers: Sequence[Waitable]) -> Mark:
        """An event that happens when these are complete; nothing else waits for them."""

    def has_happened(self, mark: Mark) -> bool:
        """Whether it has, by now."""

    def start_clock(self) -> None:
        """Events from now on can be told in seconds of the host's clock."""

    def seconds(self, mark: Mark) -> float:
        """When an event happened that `synchronize` has waited for, by the host's clock."""

    def elapsed_s(self, begin: Mark, end: Mark) -> float:
        """Between two such events."""

    def synchronize(self) -> None:
        """Make the host wait for everything told so far."""


@dataclass
class Accelerator(Beside):
    """A device as torch.accelerator has it."""

    device: torch.device
    _origin: tuple[float, torch.Event] | None = field(default=None, init=False)

    @cached_property
    def _side(self) -> torch.Stream:
        """Where transfers are waited for, so that the compute stream need not.

        torch hands out a few streams in turns. Those of communicators are of ordinary priority: a stream of that kind
        might be one of theirs, which would then wait for another's transfer.
        """
        return torch.Stream(device=self.device, priority=-1)

    def mark(self) -> torch.Event:
        """An event in the compute stream."""
        return _event(torch.accelerator.current_stream(self.device))

    def after(self, transfers: Sequence[Waitable]) -> torch.Event:
        """An event in the side stream, which waits for each of them."""
        compute = torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(self._side)
        try:
            for transfer in transfers:
                transfer.wait()
            return _event(self._side)
        finally:
            torch.accelerator.set_stream(compute)

    def has_happened(self, mark: Mark) -> bool:
        """Ask the device, without waiting."""
        return isinstance(mark, float) or bool(mark.query())

    def start_clock(self) -> None:
        """An event on an idle device happens at once."""
        self.synchronize()
        self._origin = (time.perf_counter(), self.mark())

    def seconds(self, mark: Mark) -> float:
        """By the device's clock, which counts from an event whose time the host knows."""
        if isinstance(mark, float):
            return mark
        assert self._origin is not None, "the clock was started"
        began, event = self._origin
        return began + float(event.elapsed_time(mark)) / 1e3

    def elapsed_s(self, begin: Mark, end: Mark) -> float:
        """By the device's clock: an event's distance from a near one is told more finely than from a far one."""
        if isinstance(begin, float) or isinstance(end, float):
            return self.seconds(end) - self.seconds(begin)
        return float(begin.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Wait for all streams."""
        synchronize(self.device)


def _event(stream: torch.Stream) -> torch.Event:
    event = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return event


def beside(device: torch.device) -> Accelerator | None:
    """The device, if it works beside the host."""
    return Accelerator(device) if device.type not in ("cpu", "meta") else None


def synchronize(device: torch.device) -> None:
    """Wait until everything told to the device is done; on the CPU it is."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor there, copied from pinned memory, so that the host goes on at once."""
    if device.type in ("cpu", "meta") or tensor.device == device:
        return tensor.to(device)
    host = tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()
    return host.to(device, non_blocking=True)


def num_accelerators() -> int:
    """Of this machine."""
    return torch.accelerator.device_count()


def available_kind() -> str:
    """What there is to compute on: an accelerator's kind, otherwise ``cpu``."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None else "cpu"


def local_device(kind: str) -> torch.device:
    """This process's own device of a kind (``cpu``, ``cuda``, ...), made the current one.

    Object collectives, barriers and events use the current device: without it all ranks of a machine would meet on the
    first.
    """
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device)
    return device


def default_device() -> torch.device:
    """The one that the process group's messages are for: an accelerator only if the group has a backend of its kind.

    Without a group it is this process's accelerator if there is one, otherwise the CPU.
    """
    kind = available_kind()
    return local_device(kind if not dist.is_initialized() or goes_in_order(kind, dist.get_backend_config()) else "cpu")


def backends_of(config: str) -> dict[str, str]:
    """Kind of device -> the backend by which messages in its memory go, of what torch says of a group."""
    return dict(part.split(":") for part in config.split(","))


def goes_in_order(kind: str, config: str) -> bool:
    """Whether a group has a backend without tags for messages in the memory of this kind of device.

    Of all backends only gloo and MPI have tags; gloo says that it is for every device, but takes messages from host
    memory only.

    >>> goes_in_order("cuda", "cpu:gloo,cuda:nccl"), goes_in_order("cuda", "cpu:gloo,cuda:gloo")
    (True, False)
    """
    return backends_of(config).get(kind, "gloo") not in ("gloo", "mpi")


def backend_for(device: torch.device) -> str:
    """What to start a process group with: messages in the device's memory, and in the host's for everything small."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def runs_in_order(device: torch.device) -> bool:
    """Whether messages in this device's memory have no tags, and a communicator's operations run in the order in which
    they are begun."""
    return dist.is_initialized() and goes_in_order(device.type, dist.get_backend_config())


# --- memory ----------------------------------------------------------------------------------------------------------


class DeviceBytes(NamedTuple):
    """What the device's allocator counts."""

    active: int
    """In use now; also what a stream may still be reading, which its owner has let go of."""
    highest: int
    """The most that was, since `forget_highest`."""
    reserved: int
    """The most that was taken from the device, in use or not, since `forget_highest`."""


def bytes_of_device(device: torch.device) -> DeviceBytes:
    """Of this process, when everything told to the device is done."""
    synchronize(device)
    found: dict[str, Any] = torch.get_device_module(device).memory_stats(device)
    names = ("active_bytes.all.current", "active_bytes.all.peak", "reserved_bytes.all.peak")
    return DeviceBytes(*(int(found.get(name, 0)) for name in names))


def memory_of_device(device: torch.device) -> int | None:
    """All of it, as the device tells; None on the CPU, whose memory is shared."""
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def forget_highest(device: torch.device) -> None:
    """The highest point is from now on counted again."""
    torch.get_device_module(device).reset_peak_memory_stats(device)


# --- random states ---------------------------------------------------------------------------------------------------


def random_state(device: torch.device) -> torch.Tensor | None:
    """Of an accelerator's generator; the CPU's is torch's own."""
    if device.type == "cpu":
        return None
    found: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return found


def set_random_state(device: torch.device, state: torch.Tensor | None) -> None:
    """As `random_state` found it; nothing if that was on another kind of device."""
    if state is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state, device)
