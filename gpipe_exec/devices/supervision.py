"""The ranks of one machine, watched from outside: who ended first, and nobody left behind.

    gpipe run ---starts--> launcher ---starts--> a process for each rank        all of them carry the same mark

Whatever ends one of them ends those to the right of it, which Linux sees to; and whoever ends well, or by Ctrl-C, ends
everything with its mark.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpipe_exec.devices.environment import SAFE, WITHIN
from gpipe_exec.devices.launcher import Order
from gpipe_exec.devices.process import MARK, die_with_parent

STARTING_S = 300.0
"""So long ranks may compute before they give their first sign of life: importing and building, on a slow machine."""
FIRST_S = 30.0
"""Seconds beyond the usual patience until that sign: the launcher begins before its ranks, which do nothing yet."""
GONE_S = 10.0
"""So long we wait for killed processes to be gone: Linux frees their memory first, and a dead disk may hold them."""
LOG = "launcher.log"
"""What the launcher itself says, in the folder of the logs."""


@dataclass
class Watched:
    """A launcher and its ranks."""

    process: "subprocess.Popen[bytes]"
    events: int
    """The pipe through which the launcher tells what happens."""
    ended: dict[int, int] = field(default_factory=dict)
    """Rank -> its exit status, negative for a signal, in the order in which they ended; without those that were ended
    because another had failed."""
    _began: dict[int, int] = field(default_factory=dict)
    _unread: bytes = b""

    def ranks(self) -> dict[int, int]:
        """Rank -> process, of those that live."""
        self._read()
        return {rank: pid for rank, pid in self._began.items() if (stat := _stat(pid)) and stat[0] not in "ZX"}

    def cpu_s(self) -> float:
        """Seconds that launcher and ranks have computed so far: where nothing else tells, a sign of life."""
        stats = filter(None, map(_stat, (self.process.pid, *self._began.values())))
        return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")

    def wait(self, seconds: float) -> bool:
        """For some time, or until all have ended; whether they have."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self._read()
        return self.process.returncode is not None

    def _read(self) -> None:
        """What the launcher has told so far."""
        while select.select([self.events], [], [], 0)[0] and (piece := os.read(self.events, 2**16)):
            self._unread += piece
        *lines, self._unread = self._unread.split(b"\n")
        for rank, what, number in map(json.loads, lines):
            (self._began if what == "began" else self.ended)[rank] = number


@contextmanager
def ranks_of_this_machine(
    num_ranks: int,
    worker: Sequence[str],
    logs: Path,
    environment: Mapping[str, str],
    *,
    fork: bool,
    endpoint: str | None = None,
) -> Iterator[Watched]:
    """Start ranks on this machine that run a module with its arguments; at the end there is none of them.

    What they say is in `logs`. They meet at the endpoint, host:port, and talk to each other within this machine. With
    `fork` they begin at once, with torch imported; those that are to use a GPU cannot.
    """
    mark, parent = uuid.uuid4().hex, os.getpid()
    reading, writing = os.pipe()
    order = Order(
        num_ranks=num_ranks,
        worker=tuple(worker),
        logs=str(logs.absolute()),
        events=writing,
        fork=fork and sys.platform == "linux",
        **({"endpoint": endpoint} if endpoint else {}),
    )
    try:
        with open(logs / LOG, "w") as output:
            process = subprocess.Popen(
                order.command(),
                stdout=output,
                stderr=output,
                env={**WITHIN, **environment, **SAFE, MARK: mark},
                pass_fds=[writing],
                start_new_session=True,  # Ctrl-C is for us, who end them
                preexec_fn=lambda: die_with_parent(parent),
            )
        os.close(writing)
        try:
            yield Watched(process, reading)
        finally:
            _end(process, mark)
    finally:
        os.close(reading)


def _end(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Leave no process behind: end the launcher, then kill whatever carries the mark until nothing does."""
    process.kill()
    process.wait()
    until = time.monotonic() + GONE_S
    while (left := marked(mark)) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def marked(mark: str) -> list[int]:
    """Processes with this mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def is_stopped(pid: int) -> bool:
    """Whether a process stands still until someone lets it go on."""
    stat = _stat(pid)
    return stat is not None and stat[0] in "Tt"


def _stat(pid: int) -> list[str] | None:
    """What Linux tells of a process, from its state on: state, parent, and so on, until its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
