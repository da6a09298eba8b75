"""Ways of sending that wait for what matters: for a message's delivery, or for nothing at all (`SentAside`).

For plans with `overlap: false` a sender must know when its message has been delivered (`Acknowledged`). gloo calls a
message sent when the kernel has taken it: up to some megabytes may still be on their way, which on a slow link are a
good part of a second. Classic GPipe waits until its message is there, so the receiver says when it is:

    sender      isend |######|..................| goes on
    link              |##bytes/bandwidth##|     |
    receiver    irecv (posted ahead)      | ack |        sent by a thread, whatever the rank is computing
"""

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import torch

from gpipe_exec.engine.transport import Pending, Transport


def _byte() -> torch.Tensor:
    """Not of torch's allocator, where only what the plan holds is counted."""
    return torch.from_numpy(np.zeros(1, dtype=np.uint8))


@dataclass(frozen=True)
class Acknowledged(Transport):
    """A send is complete once its message has arrived at the other side, which is such a transport too."""

    direct: Transport
    _arriving: "SimpleQueue[tuple[Pending, int, _Arrival] | None]" = field(default_factory=SimpleQueue, init=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False)
    """The one that acknowledges, where something is received."""

    def isend(self, tensor: torch.Tensor, number: int) -> Pending:
        """Begin to send."""
        sent = self.direct.isend(tensor, number)
        return _AcknowledgedSend(sent, self.direct.irecv(_byte(), number))

    def irecv(self, tensor: torch.Tensor, number: int) -> Pending:
        """Post a receive."""
        received = self.direct.irecv(tensor, number)
        if not self._threads:
            self._threads.append(threading.Thread(target=self._acknowledge, daemon=True, name="acknowledger"))
            self._threads[0].start()
        arrival = _Arrival()
        self._arriving.put((received, number, arrival))
        return arrival

    def close(self) -> None:
        """End the thread."""
        self._arriving.put(None)
        for thread in self._threads:
            thread.join(timeout=5)

    def _acknowledge(self) -> None:
        while (entry := self._arriving.get()) is not None:
            received, number, arrival = entry
            try:
                received.wait()
                del entry, received  # with its buffer, which the rank's own thread lets go
                self.direct.isend(_byte(), number).wait()
            except BaseException as error:  # told to the rank that waits for it
                arrival.error = error
            arrival.happened.set()


@dataclass(frozen=True)
class SentAside(Transport):
    """Sends from the thread that waits for the delivery, so that the rank's own goes on at once.

    gloo copies a message to the kernel on the thread that sends it, which takes a core some milliseconds. A device has
    an engine for that beside its compute, and a rehearsed rank stands for a device. A rank that computes on its core
    gains nothing: there is no other core to copy on.
    """

    direct: Transport

    def isend(self, tensor: torch.Tensor, number: int) -> Pending:
        """Whoever waits for it sends it."""
        return _SendAside(self.direct, tensor, number)

    def irecv(self, tensor: torch.Tensor, number: int) -> Pending:
        """Post a receive."""
        return self.direct.irecv(tensor, number)


class _SendAside:
    def __init__(self, direct: Transport, tensor: torch.Tensor, number: int) -> None:
        self._direct, self._tensor, self._number = direct, tensor, number

    def wait(self) -> None:
        """Send it, and return when it is sent."""
        self._direct.isend(self._tensor, self._number).wait()


class _AcknowledgedSend:
    def __init__(self, sent: Pending, acknowledged: Pending) -> None:
        self._sent, self._acknowledged = sent, acknowledged

    def wait(self) -> None:
        """Until it is delivered."""
        self._sent.wait()
        self._acknowledged.wait()


class _Arrival:
    def __init__(self) -> None:
        self.happened = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Until it is here."""
        self.happened.wait()
        if self.error is not None:
            raise self.error
