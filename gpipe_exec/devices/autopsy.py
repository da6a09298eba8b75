"""Why a run failed: which rank, and what it was doing.

The evidence is what the ranks left behind, in this order: a signal that killed one, the first traceback that was
written, the first to leave before its work was done, and for a run that hangs, where each rank stands. A rank whose
neighbour is gone fails too, a moment later, when its connection breaks: such consequences come last, or are not told at
all.
"""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from gpipe_exec.devices.process import leave
from gpipe_exec.devices.supervision import LOG, is_stopped
from gpipe_sim.base.files import write_text

_ASK = getattr(signal, "SIGUSR1", None)
_ANSWER_S = 5.0
"""How long a rank may take to say where it stands: a machine that is busy lets it wait for its turn."""
BUILD_S = 1800.0
"""So long ranks may compute until all of them are built: a large model is initialised in host memory, by layers."""
_SLICES = 10
"""Of a watchdog's patience."""
_CONSEQUENCE_S = 2.0
"""So long a rank that has lost another stays: whoever watches looks every tenth of a second, and later on a busy
machine, and must see the other end first. Whoever has seen it ends this one at once."""
_ENGINE = Path(__file__).parents[1] / "engine"
_MESSAGES = _ENGINE / "messages.py"
_COMMUNICATION = {_ENGINE, *(Path(str(module.__file__)).parent for module in (dist, torch.accelerator))}
"""Where code stands that waits for another rank, or for its device, whose streams wait for other ranks'; a model's own
code may be called from there, but is not in there."""


def answer_where(run: Path, rank: int) -> None:
    """From now on this process writes down where it stands when it is asked; even while it waits inside torch."""
    if _ASK is not None:
        path = _stack(run, rank)
        path.parent.mkdir(exist_ok=True)
        faulthandler.register(_ASK, open(path, "w"), all_threads=False)  # noqa: SIM115  # as long as the process


def write_down(folder: Path, rank: int) -> None:
    """The traceback of the failure that is being handled; a disk may be full, perhaps the cause, as others find out."""
    with contextlib.suppress(OSError):
        told = traceback.format_exc().encode(errors="backslashreplace").decode()  # a name may be no text in UTF-8
        write_text(folder / "ranks" / f"rank{rank}.error", told)


def fail(folder: Path, rank: int, status: int = 1) -> NoReturn:
    """End this process because of the exception that is being handled, which is written down and printed first.

    Destroying the groups would wait for a device's kernels, which may never end.
    """
    write_down(folder, rank)
    told = traceback.format_exc()
    print(told, file=sys.stderr, end="", flush=True)
    if _is_consequence(told):
        time.sleep(_CONSEQUENCE_S)
    leave(status)


def beat(folder: Path, rank: int) -> None:
    """A sign of life of a rank that has no steps to count."""
    with open(folder / "ranks" / f"rank{rank}.beats", "a") as file:
        file.write(".")


def beats_of(folder: Path) -> int:
    """Signs of life of all ranks so far."""
    return sum(path.stat().st_size for path in (folder / "ranks").glob("rank*.beats"))


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


def where_ranks_stand(run: Path, num_ranks: int, workers: Mapping[int, int]) -> dict[int, str]:
    """Rank -> what it does, of those that do anything but wait for another; asked while they live, as processes."""
    stopped = {rank for rank, pid in workers.items() if is_stopped(pid)}
    asked = {rank for rank in workers.keys() - stopped if _ASK is not None and _stack(run, rank).is_file()}
    for rank in asked:
        os.kill(workers[rank], signal.SIGUSR1)
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline and not all(_is_whole(_stack(run, rank).read_text()) for rank in asked):
        time.sleep(0.05)
    found = dict.fromkeys(stopped, "is stopped (SIGSTOP)")
    for rank in asked:
        if place := standing(_stack(run, rank).read_text()):
            found[rank] = place
    return found | {rank: "is gone" for rank in range(num_ranks) if rank not in workers}


def _is_whole(stack: str) -> bool:
    """Whether an answer was written to its end: the outermost frame, or dots for all that lie around the others."""
    return stack.endswith((" in <module>\n", " in _run_module_as_main\n", "  ...\n"))


def standing(stack: str) -> str | None:
    """Where the innermost frame of a stack stands; None if it waits for another rank there, or is not known."""
    frames = [(Path(file), line, name) for file, line, name in re.findall(r'File "(.*)", line (\d+) in (.*)', stack)]
    inner = next((frame for frame in frames if frame[0] != Path(threading.__file__)), None)
    if inner is None or _MESSAGES in [file for file, _, _ in frames]:
        return None
    file, line, function = inner
    return None if _COMMUNICATION & set(file.parents) else f"stands in {file.name}:{line}, {function}"


def _is_asked(status: int) -> bool:
    """Whether a rank ended of our own question where it stands, as one does that was about to end anyway."""
    return _ASK is not None and status == -_ASK


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


_LOST = re.compile(
    r"^[\w.]*(?:RuntimeError|Dist\w*Error|ConnectionError): .*"
    r"(?:[Cc]onnection|gloo|NCCL|[Ss]ocket|Broken pipe|peer|[Tt]imed out|store)"
)
"""The last line of a traceback of a rank that has lost another."""


def _is_consequence(told: str) -> bool:
    """Whether this traceback is of a rank that has lost another, by its last line."""
    return _LOST.match(told.rstrip().rpartition("\n")[2]) is not None


_RAISED = re.compile(r"^[\w.]*(?:Error|Exception): .*", re.MULTILINE)
"""The last line of a traceback."""


def failure(
    run: Path,
    finished: Sequence[bool],
    *,
    ended: Mapping[int, int],
    hung: str | None = None,
    standing: Mapping[int, str] | None = None,
) -> str:
    """Which rank failed and why: for one that raised, in the words of its own traceback.

    A rank aborts (SIGABRT) also because it has lost another: NCCL's watchdog ends it so. Then it is no cause.

    `finished` tells of each rank whether all its work was done; `ended` are those that were seen to end, the first of
    them first, with their status; `hung` is what is said of a run that made no progress.
    """
    errors = _errors(run, len(finished))
    causes = [rank for rank, text in errors.items() if not _is_consequence(text)]
    killed = {rank: -status for rank, status in ended.items() if status < 0 and not _is_asked(status)}
    aborted = {rank: n for rank, n in killed.items() if n == signal.SIGABRT}
    if len(aborted) < len(killed):
        return _told_killed({rank: n for rank, n in killed.items() if rank not in aborted})
    if causes:
        return f"rank {causes[0]} failed:\n{errors[causes[0]]}"
    if next(iter(ended), None) in aborted:
        return _told_killed(aborted)
    if reason := cannot_write(run):
        return f"{run} cannot be written: {reason}"
    silent = [rank for rank in ended if not finished[rank] and rank not in errors and rank not in aborted]
    if silent:  # also if nobody noticed in time
        return f"rank {silent[0]} left with status {ended[silent[0]]} before its work was done"
    if aborted:
        return _told_killed(aborted)
    if hung:
        told = ", ".join(f"rank {rank} {what}" for rank, what in sorted((standing or {}).items()))
        return f"{hung}: {told or 'every rank waits for another'}"
    if errors:
        rank, text = next(iter(errors.items()))
        return f"rank {rank} failed:\n{text}"
    log = run / "logs" / LOG
    said = log.read_text(errors="replace") if log.is_file() else ""
    if not ended and (own := _RAISED.findall(said)):
        return f"the launcher failed before its ranks began: {own[-1]}"
    left = [rank for rank in range(len(finished)) if not finished[rank]]
    return f"rank {left[0] if left else 0} left before its work was done"


def _told_killed(killed: Mapping[int, int]) -> str:
    return ", ".join(f"rank {rank} was killed by {signal.Signals(n).name}" for rank, n in sorted(killed.items()))


def _errors(run: Path, num_ranks: int) -> dict[int, str]:
    """Rank -> what it wrote down when it failed, the first to write first.

    A rank whose neighbour died also fails, when its connection breaks: such errors come later, but not always much.
    """
    files = {rank: run / "ranks" / f"rank{rank}.error" for rank in range(num_ranks)}
    written = [rank for rank, path in files.items() if path.is_file()]
    written.sort(key=lambda rank: files[rank].stat().st_mtime_ns)
    return {rank: files[rank].read_text(errors="replace") for rank in written}
