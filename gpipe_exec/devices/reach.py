"""Who cannot be reached, where processes on several machines do not come together.

    rank 0 ---its host, address and port---> store <---the same--- rank 1
       '----------------- can a connection be made? -----------------^

Gloo says that a connection was not made, but not to whom; and whoever waits to be connected to waits without end. Only
when it has failed are the others tried here, one by one.
"""

import os
import platform
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import NamedTuple

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

_TRY_S = 2.0
"""So long one attempt to connect may take."""
_MOMENT_S = 0.05


class UnreachableError(RuntimeError):
    """Processes do not come together; the message says which cannot be reached."""


class Place(NamedTuple):
    """Where a rank is."""

    host: str
    address: str
    port: int
    """Where it listens until all have come together."""


def come_together(connect: Callable[[], None], within: timedelta) -> None:
    """Call what connects this rank with all others, which torchrun has started; an `UnreachableError` if it fails, or
    takes too long."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    until, tried = time.monotonic() + within.total_seconds(), f"(tried for {within.total_seconds():g} s)"
    with socket.socket() as listener:
        listener.bind((address_of_gloo(), 0))
        listener.listen(world)
        here = Place(platform.node(), *listener.getsockname()[:2])
        try:
            places = _places(rank, here, world, until)
        except DistError as error:
            reason = str(error).partition("\n")[0]
            raise UnreachableError(f"rank {rank} on {here.host} cannot reach the first machine: {reason}") from None
        if missing := [other for other in range(world) if places[other] is None]:
            raise UnreachableError(f"rank {rank} on {here.host} waits for {_names(missing)}, not there {tried}")
        done: Future[None] = Future()
        Thread(target=_call, args=(connect, done), daemon=True).start()
        try:
            done.result(max(_TRY_S, until - time.monotonic()))
        except (RuntimeError, TimeoutError) as error:
            said = str(error).strip().rpartition("\n")[2] or "they wait for each other"
            raise UnreachableError(f"{_diagnosis(rank, [*filter(None, places)], said)} {tried}") from None


def _call(connect: Callable[[], None], done: "Future[None]") -> None:
    try:
        connect()
        done.set_result(None)
    except BaseException as error:  # told to whoever waits
        done.set_exception(error)


def _places(rank: int, here: Place, world: int, until: float) -> list[Place | None]:
    """Of all ranks, told through torchrun's store; None for those that have not come by then."""
    left = timedelta(seconds=max(_TRY_S, until - time.monotonic()))
    where, attempt = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), os.environ.get(_RESTARTS, "0")
    store = TCPStore(*where, is_master=False, timeout=left)
    keys = [f"gpipe/{attempt}/rank{other}" for other in range(world)]
    store.set(keys[rank], f"{here.host} {here.address} {here.port}")
    while not store.check(keys) and time.monotonic() < until:
        time.sleep(_MOMENT_S)
    found: list[Place | None] = []
    for key in keys:
        host, address, port = store.get(key).decode().split(" ") if store.check([key]) else ("", "", "0")
        found.append(Place(host, address, int(port)) if host else None)
    return found


_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


def address_of_gloo() -> str:
    """Of this machine, as gloo finds it: that of the card that is named, or what the machine's name stands for."""
    card = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    try:
        if card and sys.platform == "linux":
            import fcntl

            with socket.socket() as probe:
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", card.encode()[:15]))  # SIOCGIFADDR
            return socket.inet_ntoa(found[20:24])
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _diagnosis(rank: int, places: Sequence[Place], said: str) -> str:
    """Who cannot be reached from here; if all can be, what gloo has said."""
    wrong = []
    for other, place in enumerate(places):
        try:
            if other != rank:
                socket.create_connection((place.address, place.port), timeout=_TRY_S).close()
        except OSError as error:
            wrong.append(f"rank {other} on {place.host} at {place.address} ({error.strerror or error})")
    here = f"rank {rank} on {places[rank].host} at {places[rank].address}"
    if wrong:
        card = "GLOO_SOCKET_IFNAME says which network card to use, on each machine"
        return f"{here} cannot reach {', '.join(wrong)}: {card}"
    others = ", ".join(f"rank {n} on {p.host} at {p.address}" for n, p in enumerate(places) if n != rank)
    return f"{here} is not reached by {others}: {said}"


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
