"""How tensors travel between two ranks, and how their sender knows that they have been delivered."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist

from gpipe_exec.devices.accelerator import Beside, Mark, Waitable


class Pending(Waitable, Protocol):
    """A transfer under way."""


class Transport(Protocol):
    """How tensors of one edge and direction travel."""

    def isend(self, tensor: torch.Tensor, number: int) -> Pending:
        """Begin to send; `number` tells messages apart."""

    def irecv(self, tensor: torch.Tensor, number: int) -> Pending:
        """Begin to receive into the tensor."""


@dataclass(frozen=True)
class PeerToPeer:
    """torch.distributed between two ranks: by tags with gloo, in order on a communicator with NCCL."""

    peer: int
    group: dist.ProcessGroup | None
    first_tag: int
    communicator: int = 0
    """Its number, of those that a plan needs (`wires`)."""

    def isend(self, tensor: torch.Tensor, number: int) -> dist.Work:
        """Begin to send."""
        work = dist.isend(tensor, self.peer, group=self.group, tag=self.first_tag + number)
        assert work is not None, "this rank belongs to the group"
        return work

    def irecv(self, tensor: torch.Tensor, number: int) -> dist.Work:
        """Begin to receive."""
        work = dist.irecv(tensor, self.peer, group=self.group, tag=self.first_tag + number)
        assert work is not None, "this rank belongs to the group"
        return work


Transfers = Sequence[tuple[Pending, torch.Tensor]]
"""Those of one message, with what they send: it is held until they are complete."""


class Deliveries(Protocol):
    """What was sent and, perhaps, not yet delivered."""

    at: dict[int, Mark]
    """Micro-batch -> when its message of the current step was delivered."""

    def put(self, microbatch: int, transfers: Transfers) -> None:
        """Hold what they send until they are complete."""

    def wait(self) -> None:
        """Let this rank's compute go on when everything has been delivered."""

    def reap(self) -> None:
        """Let go of what has been delivered. The rank's own thread does it, where memory is accounted for."""

    def finish(self) -> None:
        """The step is over."""

    def close(self) -> None:
        """Let go of threads."""


class ByThread(Deliveries):
    """A thread waits for each delivery: where the host itself computes, and waiting is done by a thread."""

    def __init__(self) -> None:
        self.at: dict[int, Mark] = {}
        self._waiting: SimpleQueue[tuple[int, Transfers] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._in_flight = 0
        self._delivered: deque[Transfers] = deque()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._wait_for_delivery, daemon=True, name="sender")
        self._thread.start()

    def put(self, microbatch: int, transfers: Transfers) -> None:
        """Hand them to the thread."""
        with self._lock:
            self._in_flight += 1
            self._idle.clear()
        self._waiting.put((microbatch, transfers))

    def wait(self) -> None:
        """Return when everything sent has been delivered."""
        self._idle.wait()
        self.reap()
        if self._error is not None:
            raise self._error

    def reap(self) -> None:
        """Let go of the buffers of delivered messages."""
        self._delivered.clear()

    def finish(self) -> None:
        """Return when everything sent has been delivered."""
        self.wait()

    def close(self) -> None:
        """End the thread."""
        self._waiting.put(None)
        self._thread.join(timeout=5)

    def _wait_for_delivery(self) -> None:
        while (entry := self._waiting.get()) is not None:
            microbatch, held = entry
            del entry
            try:
                _wait_for_all(held)
            except BaseException as error:  # told to the rank at its next wait()
                self._error = error
            self.at[microbatch] = time.perf_counter()
            self._delivered.append(held)
            del held  # this thread holds on to nothing
            with self._lock:
                self._in_flight -= 1
                if self._in_flight == 0:
                    self._idle.set()


def _wait_for_all(transfers: Transfers) -> None:
    for pending, _ in transfers:
        pending.wait()


class ByEvents(Deliveries):
    """The device tells: an event for each message, beside its compute. Nothing waits, unless the plan's senders do."""

    def __init__(self, device: Beside) -> None:
        self.at: dict[int, Mark] = {}
        self._device = device
        self._held: deque[tuple[Mark, Transfers]] = deque()

    def put(self, microbatch: int, transfers: Transfers) -> None:
        """Note when they will be complete."""
        delivered = self._device.after([pending for pending, _ in transfers])
        self.at[microbatch] = delivered
        self._held.append((delivered, transfers))

    def wait(self) -> None:
        """The compute stream goes on when everything has been delivered; the host goes on at once."""
        for _, transfers in self._held:
            _wait_for_all(transfers)

    def reap(self) -> None:
        """Let go of what the device is done with."""
        while self._held and self._device.has_happened(self._held[0][0]):
            self._held.popleft()

    def finish(self) -> None:
        """The host need not wait: what is still on its way is let go of later."""
        self.reap()

    def close(self) -> None:
        """Nothing is left over."""
