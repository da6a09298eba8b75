"""A backend with NCCL's rules, on gloo: what stands in for it where there is no GPU.

* A communicator's first use stops the host until those that take part join: two of them for a message, all of them for
  a collective.
* Its operations run on each rank in the order in which they are begun, one after the other; there are no tags.
* A send ends when its receive has begun: the receiver says so, and how many bytes it expects. A collective ends when
  all have begun it.

Messages in host memory are none of its business, as with NCCL: the engine makes groups of gloo for them.
"""

import threading
import time
from queue import SimpleQueue
from typing import ClassVar

import torch
import torch.distributed as dist

NAME = "nccl_rules"


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

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout=None) -> bool:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return True


class Communicator(dist.ProcessGroup):
    """One rank's end: a stream of operations."""

    every: ClassVar = []
    """Those of this process."""

    def __init__(self, store, rank, size, timeout) -> None:
        super().__init__(rank, size)
        self._store, self._gloo = store, dist.ProcessGroupGloo(store, rank, size, timeout)
        self._joined, self._stream = set(), SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()
        Communicator.every.append(self)

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _set_group_name(self, name) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def shutdown(self) -> None:
        Communicator.every.remove(self)
        self._stream.put(None)

    def _work(self) -> None:
        while (operation := self._stream.get()) is not None:
            operation.run()
            del operation

    def _begin(self, run, peer=None) -> Operation:
        pair = "all" if peer is None else f"{min(peer, self.rank())} {max(peer, self.rank())}"
        if pair not in self._joined:  # on the host, which waits
            self._joined.add(pair)
            self._store.add(pair, 1)
            while self._store.add(pair, 0) < (self.size() if peer is None else 2):
                time.sleep(0.001)
        operation = Operation(run)
        self._stream.put(operation)
        return operation

    def synchronize(self) -> None:
        """Wait on the host until everything that was begun has ended, as synchronizing a device does."""
        last = Operation(lambda: None)
        self._stream.put(last)
        last.wait()

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensors, peer, tag=0) -> Operation:
        (tensor,) = tensors

        def run() -> None:
            expected = torch.zeros(1, dtype=torch.int64)
            self._gloo.recv([expected], peer, 1).wait()
            found = f"a message of {tensor.nbytes} bytes meets a receive of {int(expected)}"
            assert int(expected) == tensor.nbytes, found
            self._gloo.send([tensor], peer, 2).wait()

        return self._begin(run, peer)

    def recv(self, tensors, peer, tag=0) -> Operation:
        (tensor,) = tensors

        def run() -> None:
            self._gloo.send([torch.tensor([tensor.nbytes])], peer, 1).wait()
            self._gloo.recv([tensor], peer, 2).wait()

        return self._begin(run, peer)

    # --- collectives -------------------------------------------------------------------------------------------------

    def broadcast(self, tensors, opts) -> Operation:
        return self._begin(lambda: self._gloo.broadcast(tensors, opts).wait())

    def allreduce(self, tensors, opts) -> Operation:
        return self._begin(lambda: self._gloo.allreduce(tensors, opts).wait())

    def allgather(self, outputs, inputs, opts=None) -> Operation:
        return self._begin(lambda: self._gloo.allgather(outputs, inputs).wait())

    def gather(self, outputs, inputs, opts) -> Operation:
        return self._begin(lambda: self._gloo.gather(outputs, inputs, opts).wait())

    def barrier(self, opts=None) -> Operation:
        return self._begin(lambda: self._gloo.barrier().wait())


dist.Backend.register_backend(NAME, Communicator, devices=["cpu"])


class RulesOfStreams:
    """A device beside the host, as far as it waits: marks are the host's time, and synchronizing it waits for all of
    its streams, those of communicators too."""

    def mark(self) -> float:
        return time.perf_counter()

    def start_clock(self) -> None:
        self.synchronize()

    def seconds(self, mark) -> float:
        return mark

    def synchronize(self) -> None:
        for communicator in Communicator.every:
            communicator.synchronize()
