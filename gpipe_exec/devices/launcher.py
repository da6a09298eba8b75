"""Starts the ranks of one machine, as torchrun does for several: `python -m gpipe_exec.devices.launcher '{...}'`.

    launcher --- imports torch and what the ranks run, once --- forks a process for each rank
        |                                                              |
        |<------------- waits for each of them to end ----------------'
        '--- tells whoever started it, through a pipe: who began, who has ended and how, in that order

Importing torch takes seconds of a core, which ranks that are forked after it do not spend again. A process that is to
use a GPU starts afresh instead: what a driver knows of a process does not survive a fork.

The store through which ranks find each other listens where it is told to and nowhere else, such as 127.0.0.1;
torchrun's listens on every network of a machine, and whoever reaches it can write to it.
"""

import json
import os
import runpy
import signal
import socket
import sys
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from gpipe_exec.devices.process import die_with_parent, leave

_STORE_S = 60
"""How long a rank may wait for the store, in seconds."""
_GRACE_S = 5.0
"""So long ranks may take to end when they are asked to, in seconds; then they are killed."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to start."""

    num_ranks: int
    worker: tuple[str, ...]
    """A module, or a path that ends in .py, and its arguments."""
    logs: str
    """The folder for what ranks print."""
    events: int
    """The pipe through which is told what happens: lines of JSON, `[rank, "began", process]` and
    `[rank, "ended", status]`, the status negative for a signal."""
    endpoint: str = "127.0.0.1:0"
    """host:port where they meet; any free port if it is 0."""
    fork: bool = True
    """Whether ranks begin with what this process has imported."""

    def command(self) -> list[str]:
        """The command line of a launcher that carries it out."""
        return [sys.executable, "-m", "gpipe_exec.devices.launcher", json.dumps(asdict(self))]


def main() -> NoReturn:
    """Start the ranks and wait for all of them to end; when one fails, end the others."""
    order = Order(**json.loads(sys.argv[1]))
    listener = _listen(order.endpoint)
    if order.fork:
        _import_what_ranks_need(order.worker[0])
    # The store and its threads come after the forks, which would copy threads' locks but not the threads.
    ranks = {_start(rank, order, listener): rank for rank in range(order.num_ranks)}
    store = _store(listener)
    failed = _wait_for(ranks, order)
    del store
    leave(1 if failed else 0)


def _listen(endpoint: str) -> socket.socket:
    """On this address only."""
    host, _, port = endpoint.rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen()
    return listener


def _store(listener: socket.socket) -> object:
    """Takes the socket over; it serves as long as there is a reference to it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = listener.getsockname()[:2]
    patience = timedelta(seconds=_STORE_S)
    return TCPStore(host, port, 1, True, patience, master_listen_fd=listener.detach(), multi_tenant=False)


def _import_what_ranks_need(worker: str) -> None:
    import_module("torch._dynamo")  # which the first step of any of torch's optimizers imports, in two seconds
    import_module("gpipe_exec.engine.pipeline" if worker.endswith(".py") else worker)


def _start(rank: int, order: Order, listener: socket.socket) -> int:
    """The process of a rank, which ends with this one, whatever ends that."""
    launcher = os.getpid()
    pid = os.fork()
    if not pid:
        _be(rank, order, listener, launcher)
    _tell(order.events, rank, "began", pid)
    return pid


def _be(rank: int, order: Order, listener: socket.socket, launcher: int) -> NoReturn:
    """In the process of a rank, of which nothing may unwind into the launcher's own frames."""
    try:
        die_with_parent(launcher)
        host, port = listener.getsockname()[:2]
        os.environ.update(_environment(rank, order.num_ranks, host, port))
        os.close(order.events)
        listener.close()
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(Path(order.logs) / f"rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        _run(order)
    except SystemExit as asked:
        leave(asked.code if isinstance(asked.code, int) else int(asked.code is not None))
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave()


def _run(order: Order) -> None:
    """The rank's own program; afresh, or with all that was imported."""
    name, *arguments = order.worker
    is_script = name.endswith(".py")
    if not order.fork:
        os.execv(sys.executable, [sys.executable, *([] if is_script else ["-m"]), name, *arguments])
    sys.argv = [name, *arguments]
    if is_script:
        sys.path.insert(0, str(Path(name).parent))  # as Python does
        runpy.run_path(name, run_name="__main__")
    else:
        import_module(name).main()


def _environment(rank: int, num_ranks: int, host: str, port: int) -> dict[str, str]:
    """What torch's process groups and people's programs find under torchrun, too."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here: rank 0 does not make one
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _tell(events: int, rank: int, what: str, number: int) -> None:
    os.write(events, f"{json.dumps([rank, what, number])}\n".encode())


def _wait_for(ranks: dict[int, int], order: Order) -> bool:
    """Until all have ended; whether one of them failed. Those that are ended here because of it are not told of."""
    alive, failed = dict(ranks), False

    def send(number: int) -> None:
        for pid in alive:
            os.kill(pid, number)

    signal.signal(signal.SIGALRM, lambda *_: send(signal.SIGKILL))
    while alive:
        pid, raw = os.wait()
        status = os.waitstatus_to_exitcode(raw)
        rank = alive.pop(pid)
        if not failed or status not in (-signal.SIGTERM, -signal.SIGKILL):
            _tell(order.events, rank, "ended", status)
        if status != 0 and not failed:
            failed = True
            send(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, _GRACE_S)
    return failed


if __name__ == "__main__":
    main()
