"""Runs that the page starts: each a `gpipe run` of its own, watched through its run directory, and really stopped.

The page holds no process: it names a run, and what is known of it lies on disk, beside the run's directory:

    .NAME.plan.yaml     the plan file that it was started with, never anything else from the browser
    .NAME.log           what it says
    .NAME.pid           its process

So a page that is started after another was killed finds the run that this one has left, and can stop it.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from time import sleep
from typing import Literal

from gpipe_sim.base.files import InputError, Problem, write_text
from gpipe_sim.base.units import format_seconds
from gpipe_sim.make.planfile import plan_text
from gpipe_sim.plan.plan import Plan
from gpipe_sim.runs.directory import new_run_directory
from gpipe_sim.scenario.schema import HuggingFaceModel, PythonModel

Device = Literal["cpu", "cuda", "rehearse"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
STEPS, WARMUP = 5, 2
_ENDING_S = 15.0
"""How long a run may take to end when it is asked to, before it is killed."""

RunState = Literal["running", "finished", "failed", "stopped", "unknown"]


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    done: int
    total: int
    log: str
    state: RunState
    seconds_left: float | None = None
    """Until the last step, at the pace of those that were seen."""

    @property
    def phase(self) -> str:
        """What it is doing, in words."""
        if self.state != "running":
            return self.state
        if self.done >= self.total:
            return "comparing with the prediction"
        left = "" if self.seconds_left is None else f", about {format_seconds(self.seconds_left)} left"
        if self.done >= WARMUP:
            return f"measuring step {self.done - WARMUP + 1} of {self.total - WARMUP}{left}"
        if self.done:
            return f"warming up, step {self.done + 1} of {WARMUP}{left}"
        return "starting its processes"


@dataclass
class Jobs:
    """The runs of this server, in one folder."""

    folder: Path
    allowed: bool
    _processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _stopped: set[str] = field(default_factory=set)
    _seen: dict[str, tuple[int, float, int, float]] = field(default_factory=dict)
    """Run -> steps done and when that was seen, for the first time and the last."""
    _lock: Lock = field(default_factory=Lock)

    def start(self, plan: Plan, device: Device, *, profile: bool = False) -> str:
        """Execute a plan; returns the run's name. With `profile`, layers that compute are timed in turns with steps."""
        if not self.allowed:
            raise InputError([Problem("gpipe dashboard", "", "was started without --allow-run, which running needs")])
        if isinstance(plan.scenario.model, PythonModel | HuggingFaceModel):
            message = f"{plan.scenario.model.kind} code is not run from this page: use `gpipe run`"
            raise InputError([Problem("model", "kind", message)])
        with self._lock:
            if self._running():
                raise InputError([Problem("run", "", "another run is under way, expected it to end or be stopped")])
            directory = new_run_directory(self.folder, plan.scenario.name)
            chosen = _beside(directory, "plan.yaml")
            write_text(chosen, plan_text(plan))
            command = [sys.executable, "-m", "gpipe_sim.cli", "run", str(chosen), "--device", device]
            command += ["--out", str(directory), "--steps", str(STEPS), "--warmup", str(WARMUP)]
            command += ["--reprofile"] if profile and device != "rehearse" else []
            with open(_beside(directory, "log"), "wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            _await_command_line(process)
            write_text(_beside(directory, "pid"), str(process.pid))
            self._processes[directory.name] = process
        return directory.name

    def running(self) -> str | None:
        """The run that is under way, whichever page has started it."""
        with self._lock:
            return self._running()

    def _running(self) -> str | None:
        left = [path.name[1 : -len(".pid")] for path in sorted(self.folder.glob(".*.pid"))]
        return next((name for name in dict.fromkeys([*self._processes, *left]) if self._process(name)), None)

    def _process(self, name: str) -> int | None:
        """The process of a run that is under way: our own, or one that has our plan file in its command line.

        Another process may have got the number of one that has ended; on a system that does not tell the command lines
        of processes, only our own are known.
        """
        if own := self._processes.get(name):
            return own.pid if own.poll() is None else None
        directory = run_directory(self.folder, name)
        try:
            number = int(_beside(directory, "pid").read_text())
            words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        plan = _beside(directory, "plan.yaml").name
        return number if any(Path(os.fsdecode(word)).name == plan for word in words) else None

    def stop(self, name: str) -> None:
        """End a run as Ctrl-C would, which may be ignored here, with every process that it has started.

        A page that may not run anything ends nothing either: the run is another's.
        """
        if not self.allowed:
            return
        for asked in (signal.SIGTERM, signal.SIGKILL):
            process = self._process(name)
            if process is None:
                return
            self._stopped.add(name)
            with suppress(ProcessLookupError):
                os.kill(process, asked)
            until = time.monotonic() + _ENDING_S
            while self._process(name) and time.monotonic() < until:
                time.sleep(0.05)

    def stop_all(self) -> None:
        """When the server ends: what it has started itself."""
        for name in list(self._processes):
            self.stop(name)

    def progress(self, name: str) -> Progress:
        """Of a run that was started here, or by another page on the same folder."""
        directory = run_directory(self.folder, name)
        log = _beside(directory, "log")
        text = log.read_text(errors="replace")[-4000:] if log.is_file() else ""
        done = [int(path.read_text() or 0) for path in directory.glob("ranks/rank*.done")]
        steps, total = min(done, default=0), STEPS + WARMUP
        return Progress(steps, total, text, self._state(name, directory), self._seconds_left(name, steps, total))

    def _seconds_left(self, name: str, steps: int, total: int) -> float | None:
        now = time.monotonic()
        first, first_s, last, last_s = self._seen.get(name, (steps, now, steps, now))
        if steps > last:
            first, first_s = (first, first_s) if first else (steps, now)  # the first step comes after a long start
            last, last_s = steps, now
        self._seen[name] = (first, first_s, last, last_s)
        if last <= first:
            return None
        return max(0.0, (total - last) * (last_s - first_s) / (last - first) - (now - last_s))

    def _state(self, name: str, directory: Path) -> RunState:
        if self._process(name):
            return "running"
        if name in self._processes:
            done = self._processes[name].returncode == 0
        elif _beside(directory, "pid").is_file():  # nobody has seen with which status it ended
            ranks = list(directory.glob("ranks/rank*.json"))
            done = bool(ranks) and all(path.with_suffix(".finished").is_file() for path in ranks)
            done &= (directory / "measured.json").is_file()
        else:
            return "unknown"
        return "finished" if done else "stopped" if name in self._stopped else "failed"


def _beside(directory: Path, what: str) -> Path:
    """A file of the page about a run; hidden, since it is no run."""
    return directory.with_name(f".{directory.name}.{what}")


def run_directory(folder: Path, name: str) -> Path:
    """The directory of a run; a name that would lead elsewhere is refused."""
    path = folder / name
    if not NAME.fullmatch(name) or path.resolve().parent != folder.resolve():
        raise InputError([Problem("run", name, "is no name of a run")])
    return path


def _await_command_line(process: "subprocess.Popen[bytes]") -> None:
    """By it other pages know the process; for a moment after the start the system tells none."""
    line = Path(f"/proc/{process.pid}/cmdline")
    while process.poll() is None and line.exists() and not line.read_bytes():
        sleep(0.001)
