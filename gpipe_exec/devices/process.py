"""How a rank's process lives and ends."""

import ctypes
import os
import platform
import signal
import sys
from typing import NoReturn

MARK = "GPIPE_RUN_ID"
"""In the environment of every process of a run, so that none can be missed when it ends."""


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when its parent dies, whatever kills that: no rank is left behind by its launcher,
    and no launcher by whoever started it. If the given parent is gone already, end now."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SHORT_NS = 100_000


class _Attributes(ctypes.Structure):
    """Linux's `struct sched_attr`, of which the first version is enough."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def take_turns(*, short: bool) -> None:
    """How long this thread, and those that it starts from now on, may keep a core that others wait for.

    Where ranks share a core, a thread that carries messages would wait for its turn behind computing ones, some
    milliseconds for each piece of a message. With short turns Linux, from 6.12 on, lets it go first; it takes no more
    of the core than before. An older kernel takes no notice.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        wanted = _Attributes(size=ctypes.sizeof(_Attributes), runtime=_SHORT_NS if short else 0)
        wanted.nice = os.getpriority(os.PRIO_PROCESS, 0)
        ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0)


def leave(status: int = 0) -> NoReturn:
    """End this process, whose work is done and written down, without taking the interpreter apart.

    torch may keep a process group alive after it was destroyed (the first step of an optimizer is enough). Its threads
    let go of the last message a moment after it was delivered, and one that does so in an interpreter that is being
    taken apart aborts the process: a run that ended well would end as failed, now and then. After a failure,
    destroying a group waits for transfers that no peer will ever serve: then leave, with a status, instead.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
