"""A sender that knows when its message has been delivered, for plans with `overlap: false`.

gloo calls a message sent when the kernel has taken it: up to some megabytes may still be on their way, which on a slow
link are a good part of a second. Classic GPipe waits until its message is there, so the receiver says when it is:

    sender      isend |######|..................| goes on
    link              |##bytes/bandwidth##|     |
    receiver    irecv (posted ahead)      | ack |        sent by a thread, whatever the rank is computing
"""

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import torch

from gpipe_exec.messages import PeerToPeer, Pending, Transport, carries_form


def _byte() -> torch.Tensor:
    """Not of torch's allocator, where only what the plan holds is counted."""
    return torch.from_numpy(np.zeros(1, dtype=np.uint8))


@dataclass(frozen=True)
class Acknowledged(Transport):
    """torch.distributed between two ranks; a send is complete once its message has arrived."""

    direct: PeerToPeer
    _arriving: "SimpleQueue[tuple[Pending, int, _Arrival] | None]" = field(default_factory=SimpleQueue, init=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False)
    """The one that acknowledges, where something is received."""

    def isend(self, tensor: torch.Tensor, number: int) -> Pending:
        """Begin to send."""
        sent = self.direct.isend(tensor, number)
        return sent if carries_form(number) else _AcknowledgedSend(sent, self.direct.irecv(_byte(), number))

    def irecv(self, tensor: torch.Tensor, number: int) -> Pending:
        """Post a receive."""
        received = self.direct.irecv(tensor, number)
        if carries_form(number):
            return received
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
