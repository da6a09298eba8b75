"""Why a run failed: which rank, and what it was doing.

The evidence is what the ranks left behind, in this order: a signal that killed one (torchrun notes it), the first
traceback that was written, and for a run that hangs, where each rank stands. A rank whose neighbour is gone fails too,
a moment later, when its connection breaks: such consequences come last, or are not told at all.
"""

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from gpipe_exec.records import steps_done
from gpipe_sim.files import write_text

MARK = "GPIPE_RUN_ID"
"""In the environment of every process of a run, so that none can be missed when it ends."""

_ASK = getattr(signal, "SIGUSR1", None)
_ANSWER_S = 0.5
_SLICES = 10
"""Of a watchdog's patience."""
_WAITING = re.compile(r"/gpipe_exec/(messages|clocks)\.py|/torch/distributed/")
"""Frames of a rank that waits for another."""


def answer_where(run: Path, rank: int) -> None:
    """From now on this process writes down where it stands when it is asked; even while it waits inside torch."""
    if _ASK is not None:
        path = _stack(run, rank)
        path.parent.mkdir(exist_ok=True)
        faulthandler.register(_ASK, open(path, "w"), all_threads=False)  # noqa: SIM115  # as long as the process


class Watchdog:
    """Ends this process when no step finishes any more; from the first step on, since what comes before may be slow.

    A peer that is gone, or a link that is cut, tells nobody: torch would wait for minutes.
    """

    def __init__(self, run: Path, rank: int, timeout: float) -> None:
        self._run, self._rank, self._timeout = run, rank, timeout
        self._num_finished = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def step_finished(self) -> None:
        """A sign of life."""
        self._num_finished += 1
        if self._num_finished == 1:
            self._thread.start()

    def stop(self) -> None:
        """There are no more steps to wait for."""
        self._stopped.set()

    def _watch(self) -> None:
        before, slices = 0, 0  # in slices, to count only time in which we ran
        while slices < _SLICES:
            before, slices = self._num_finished, slices + 1 if self._num_finished == before else 0
            if self._stopped.wait(self._timeout / _SLICES):
                return
        message = f"no step finished for {self._timeout:g} s: another rank, or the link to it, is gone\n"
        write_text(self._run / "ranks" / f"rank{self._rank}.error", message)
        print(f"rank {self._rank}: {message}", file=sys.stderr, end="", flush=True)
        os._exit(1)


def _stack(run: Path, rank: int) -> Path:
    return run / "ranks" / f"rank{rank}.stack"


def marked(mark: str) -> dict[int, Mapping[str, str]]:
    """Processes with this run's mark in their environment, and that environment."""
    found: dict[int, Mapping[str, str]] = {}
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            content = entry.read_bytes()
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in content:
            pairs = (part.partition("=") for part in content.decode(errors="replace").split("\0"))
            found[int(entry.parent.name)] = {name: value for name, _, value in pairs}
    return found


def where_ranks_stand(run: Path, num_ranks: int, mark: str) -> dict[int, str]:
    """Rank -> what it does, of those that do anything but wait for another; asked while they live."""
    workers = {int(environ["RANK"]): pid for pid, environ in marked(mark).items() if environ.get("RANK", "").isdigit()}
    stopped = {rank for rank, pid in workers.items() if _is_stopped(pid)}
    for rank in workers.keys() - stopped:
        if _ASK is not None and _stack(run, rank).is_file():
            os.kill(workers[rank], _ASK)
    time.sleep(_ANSWER_S)
    found = dict.fromkeys(stopped, "is stopped (SIGSTOP)")
    for rank in range(num_ranks):
        path = _stack(run, rank)
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', path.read_text()) if path.is_file() else []
        if rank not in stopped and frames and not any(_WAITING.search(file) for file, _, _ in frames):
            file, line, function = frames[0]
            found[rank] = f"stands in {Path(file).name}:{line}, {function}"
        elif rank not in workers:
            found[rank] = "is gone"
    return found


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def killed_ranks(log: str) -> dict[int, str]:
    """Rank -> the signal that ended it, as torchrun tells it; without those that torchrun ended itself."""
    blocks = re.findall(r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: -(\d+)", log)
    signals = {int(rank): int(number) for rank, number in blocks}
    return {rank: signal.Signals(number).name for rank, number in signals.items() if number != signal.SIGTERM}


def cannot_write(run: Path) -> str | None:
    """Why nothing can be written to the run's directory, if that is so."""
    probe = run / ".probe.part"
    try:
        probe.write_bytes(b"x" * 2**14)
    except OSError as error:
        return error.strerror
    finally:
        probe.unlink(missing_ok=True)
    return None


def failure(run: Path, num_ranks: int, timeout: float, *, hung: bool, standing: Mapping[int, str]) -> str:
    """Which rank failed and why: for one that raised, in the words of its own traceback."""
    errors = {rank: run / "ranks" / f"rank{rank}.error" for rank in range(num_ranks)}
    written = [rank for rank, path in errors.items() if path.is_file()]
    # A rank whose neighbour died also fails, when its connection breaks: the first to write is the cause.
    first = min(written, key=lambda rank: errors[rank].stat().st_mtime_ns, default=None)
    done = min(steps_done(run, num_ranks))
    ending = f"{done} steps had finished; its logs are in {run / 'logs'}"
    log = run / "logs" / "torchrun.log"
    killed = killed_ranks(log.read_text(errors="replace")) if log.is_file() else {}
    if killed:
        told = ", ".join(f"rank {rank} was killed by {name}" for rank, name in sorted(killed.items()))
        return f"{told}; {ending}"
    if first is not None:
        return f"rank {first} failed:\n{errors[first].read_text()}{ending}"
    if reason := cannot_write(run):
        return f"{run} cannot be written: {reason}; {ending}"
    if hung:
        told = ", ".join(f"rank {rank} {what}" for rank, what in sorted(standing.items()))
        return f"no step finished for {timeout:g} s: {told or 'every rank waits for another'}; {ending}"
    return f"torchrun ended without saying which rank failed; {ending}"
