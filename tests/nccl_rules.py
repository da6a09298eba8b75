"""A transport with NCCL's rules, on gloo: what stands in for it where there is no GPU.

* A communicator's first use stops the host until the peer joins.
* Its operations run on each rank in the order in which they are begun, one after the other; there are no tags.
* A send ends when its receive has begun: the receiver says so, and how many bytes it expects.
"""

import threading
from queue import SimpleQueue

import torch
import torch.distributed as dist

FIRST_TAG = 10**9
"""Beyond all tags of the engine's own."""


class Operation:
    """A transfer under way."""

    def __init__(self, run) -> None:
        self._run, self._done, self._error = run, threading.Event(), None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class Communicator:
    """One rank's end: a stream of operations."""

    def __init__(self, number: int) -> None:
        self.number, self._joined, self._stream = number, set(), SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._stream.get().run()

    def begin(self, peer: int, run) -> Operation:
        if peer not in self._joined:  # on the host, which waits
            assert not self._joined, "a rank has one wire on a communicator"
            self._joined.add(peer)
            joins = dist.isend(torch.ones(1), peer, tag=self._tag(0))
            dist.recv(torch.empty(1), peer, tag=self._tag(0))
            joins.wait()
        operation = Operation(run)
        self._stream.put(operation)
        return operation

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        expected = torch.zeros(1, dtype=torch.int64)
        dist.recv(expected, peer, tag=self._tag(1))
        assert int(expected) == tensor.nbytes, f"a message of {tensor.nbytes} bytes meets a receive of {int(expected)}"
        dist.send(tensor, peer, tag=self._tag(2))

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        dist.send(torch.tensor([tensor.nbytes]), peer, tag=self._tag(1))
        dist.recv(tensor, peer, tag=self._tag(2))

    def _tag(self, what: int) -> int:
        return FIRST_TAG + 3 * self.number + what


class Nccl:
    """The communicators of one pipeline on this rank: give `carry` to it."""

    made = 0

    def __init__(self) -> None:
        self._first, self._communicators = Nccl.made, {}
        Nccl.made += 100  # those of another pipeline are others

    def carry(self, direct, edge: int) -> "Way":
        number = self._first + direct.communicator
        return Way(self._communicators.setdefault(number, Communicator(number)), direct.peer)


class Way:
    """Between two ranks; numbers are not looked at."""

    def __init__(self, communicator: Communicator, peer: int) -> None:
        self._communicator, self._peer = communicator, peer

    def isend(self, tensor: torch.Tensor, number: int) -> Operation:
        return self._communicator.begin(self._peer, lambda: self._communicator.send(tensor, self._peer))

    def irecv(self, tensor: torch.Tensor, number: int) -> Operation:
        return self._communicator.begin(self._peer, lambda: self._communicator.receive(tensor, self._peer))
