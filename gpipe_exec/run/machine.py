"""One of several machines of a run: meets the others, and then starts its ranks, as torchrun does.

    python -m gpipe_exec.run.machine --nnodes 2 --node-rank 1 ... -m gpipe_exec.run.worker RUN_DIR ...

Arguments are torchrun's. By itself torchrun only counts who is there, and ends in a traceback: here each machine tells
its name, and those that have come are told which one has not.
"""

import platform
import socket
import sys
import time

from torch.distributed import DistError, TCPStore, run  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

_MOMENT_S = 0.1


class MissingError(RuntimeError):
    """Machines have not met; the message says which are missing, and which are there."""


def main() -> None:
    """Meet, then do what torchrun does; status 1 and a message if some machine does not come."""
    arguments = run.parse_args(sys.argv[1:])  # type: ignore[no-untyped-call]
    host, port = parse_rendezvous_endpoint(arguments.rdzv_endpoint, default_port=29400)
    patience_s = float(arguments.rdzv_conf.partition("timeout=")[2].partition(",")[0] or 600)
    try:
        store = meet(host, port, int(arguments.node_rank), int(arguments.nnodes), patience_s)
    except MissingError as error:
        print(f"gpipe: {error}", file=sys.stderr)
        sys.exit(1)
    run.run(arguments)  # type: ignore[no-untyped-call]
    del store  # torchrun uses its server, too


def meet(host: str, port: int, machine: int, num_machines: int, patience_s: float) -> TCPStore:
    """Wait until all machines are there; the store in which each has told its name, which the first serves."""
    place, until = f"{host}:{port}", time.monotonic() + patience_s
    server = _serve(port) if machine == 0 else None
    _reach(host, port, until, f"machine {machine} cannot reach machine 0 at {place} within {patience_s:g} s")
    try:
        store = server or TCPStore(host, port, is_master=False, wait_for_workers=False)
        store.set(_name(machine), platform.node())
        while not store.check([_name(number) for number in range(num_machines)]):
            if time.monotonic() > until:
                raise MissingError(f"{_who_is_missing(store, num_machines)} at {place} within {patience_s:g} s")
            time.sleep(_MOMENT_S)
    except DistError as error:
        raise MissingError(f"machine 0 at {place} has left, and tells why: {_line(error)}") from error
    return store


def _serve(port: int) -> TCPStore:
    try:
        return TCPStore("localhost", port, is_master=True, wait_for_workers=False, multi_tenant=True)
    except DistError as error:
        raise MissingError(f"machine 0 cannot listen on port {port}: {_line(error)}") from error


def _reach(host: str, port: int, until: float, otherwise: str) -> None:
    """Try to connect until that moment."""
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, until - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise MissingError(f"{otherwise}: {error.strerror or error}") from error
            time.sleep(_MOMENT_S)


def _who_is_missing(store: TCPStore, num_machines: int) -> str:
    here = [number for number in range(num_machines) if store.check([_name(number)])]
    names = ", ".join(f"machine {number} ({store.get(_name(number)).decode()})" for number in here)
    missing = ", ".join(f"machine {number}" for number in range(num_machines) if number not in here)
    return f"only {names} came, and {missing} did not,"


def _name(machine: int) -> str:
    """Where a machine tells its own name."""
    return f"gpipe/machine{machine}"


def _line(error: Exception) -> str:
    """What an error says, without where in torch it was raised."""
    return str(error).splitlines()[0]


if __name__ == "__main__":
    main()
