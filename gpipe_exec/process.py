"""How a rank's process lives and ends."""

import ctypes
import os
import signal
import sys
from typing import NoReturn


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, whatever kills that: no rank is left behind by torchrun, and
    no torchrun by whoever started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def leave() -> NoReturn:
    """End this process, whose work is done and written down, without taking the interpreter apart.

    torch may keep a process group alive after it was destroyed (the first step of an optimizer is enough). Its threads
    let go of the last message a moment after it was delivered, and one that does so in an interpreter that is being
    taken apart aborts the process: a run that ended well would end as failed, now and then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
