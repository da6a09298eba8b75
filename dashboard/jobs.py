"""Runs that the page starts: each a `gpipe run` of its own, watched through its run directory, and really stopped.

The page holds no process: it names a run, and what is known of it lies on disk. A job is started with the plan file
that it has written itself, never with anything else from the browser.
"""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Literal

from gpipe_sim.files import InputError, Problem, write_text
from gpipe_sim.plan import Plan
from gpipe_sim.planfile import plan_text
from gpipe_sim.runs import new_run_directory
from gpipe_sim.scenario import PythonModel

Device = Literal["cpu", "cuda", "rehearse"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
STEPS, WARMUP = 5, 2

RunState = Literal["running", "finished", "failed", "stopped", "unknown"]


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    done: int
    total: int
    log: str
    state: RunState


@dataclass
class Jobs:
    """The runs of this server, in one folder."""

    folder: Path
    allowed: bool
    _processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _stopped: set[str] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    def start(self, plan: Plan, device: Device) -> str:
        """Execute a plan; returns the run's name."""
        if not self.allowed:
            raise InputError([Problem("gpipe dashboard", "", "was started without --allow-run, which running needs")])
        if isinstance(plan.scenario.model, PythonModel):
            raise InputError([Problem("model", "kind", "python code is not run from this page: use `gpipe run`")])
        with self._lock:
            if any(process.poll() is None for process in self._processes.values()):
                raise InputError([Problem("run", "", "another run is under way, expected it to end or be stopped")])
            directory = new_run_directory(self.folder, plan.scenario.name)
            chosen = directory.with_name(f".{directory.name}.plan.yaml")
            write_text(chosen, plan_text(plan))
            log = open(directory.with_name(f".{directory.name}.log"), "wb")  # noqa: SIM115  # the process keeps it
            command = [sys.executable, "-m", "gpipe_sim.cli", "run", str(chosen), "--device", device]
            command += ["--out", str(directory), "--steps", str(STEPS), "--warmup", str(WARMUP)]
            self._processes[directory.name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            log.close()
        return directory.name

    def stop(self, name: str) -> None:
        """End a run as Ctrl-C would, which may be ignored here, with every process that it has started."""
        process = self._processes.get(name)
        if process is not None and process.poll() is None:
            self._stopped.add(name)
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def stop_all(self) -> None:
        """When the server ends."""
        for name in list(self._processes):
            self.stop(name)

    def progress(self, name: str) -> Progress:
        """Of a run that was started here."""
        directory = run_directory(self.folder, name)
        process = self._processes.get(name)
        log = directory.with_name(f".{name}.log")
        text = log.read_text(errors="replace")[-4000:] if log.is_file() else ""
        done = [int(path.read_text() or 0) for path in directory.glob("ranks/rank*.done")]
        status = process.poll() if process else None
        state: RunState = "unknown" if process is None else "running"
        if status is not None:
            state = "finished" if status == 0 else "stopped" if name in self._stopped else "failed"
        return Progress(min(done, default=0), STEPS + WARMUP, text, state)


def run_directory(folder: Path, name: str) -> Path:
    """The directory of a run; a name that would lead elsewhere is refused."""
    path = folder / name
    if not NAME.fullmatch(name) or path.resolve().parent != folder.resolve():
        raise InputError([Problem("run", name, "is no name of a run")])
    return path
