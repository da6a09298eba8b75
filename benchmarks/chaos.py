"""`make chaos`: faults at random moments of runs and profiles, with real processes, for some minutes.

Every fault is tried in turn until the time is over; rank, action and moment are drawn by `--seed`. The table at the end
has, of each fault: how often it was tried, how often the right rank and reason were told with the right status, the
seconds from the fault to the end of the command (median and worst), processes that were left behind, and finished steps
that were lost, or files that were left half-written. The status is 1 unless everything was told right and nothing lost.
"""

import argparse
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpipe_sim.runs.directory import load_run

GPIPE = [sys.executable, "-m", "gpipe_sim.cli"]
MODEL = Path(__file__).parents[1] / "tests" / "workers" / "faults.py"
TIMEOUT_S = 3
"""The patience that runs are given, and profiles three times as much."""
GRACE_S = 2.0
"""How long the kernel may take to end what has lost its parent."""
SCENARIO = """\
model: {kind: python, function: faults:model}
profile: profile.json
batch: 8
dtype: fp32
cluster: {device: cpu, devices_per_node: 2, link: {bandwidth: 1 GB/s, latency: 100 us}}
plan: {stages: 2, microbatches: 4, checkpoint: never}
"""


@dataclass(frozen=True)
class Fault:
    """What happens, to a rank of a run or profile or to the command itself."""

    told: str | None
    """A pattern of what must be said, with {rank}; None where nobody is left to say anything."""
    kind: str = "none"
    """Of `workers/faults.py`."""
    command: str = "run"
    sent: signal.Signals | None = None
    """To the command itself, within its first moments."""
    removes: bool = False
    """Whether the run's directory disappears."""
    everywhere: bool = False
    """Whether all ranks have it."""


_HANGS = {"run": f"no step finished for {TIMEOUT_S} s", "profile": f"nothing was measured for {3 * TIMEOUT_S} s"}
_RANKS = {
    "SIGKILL": Fault("rank {rank} was killed by SIGKILL", "kill"),
    "SIGTERM": Fault("rank {rank} was killed by SIGTERM", "term"),
    "exit(0)": Fault("rank {rank} left with status 0 before its work was done", "leave"),
    "exit(3)": Fault("rank {rank} left with status 3 before its work was done", "status"),
    "sys.exit": Fault(r"rank {rank} failed:(.|\n)*SystemExit: 0", "exit"),
    "raises": Fault(r"rank {rank} failed:(.|\n)*ZeroDivisionError: the loss has no bottom", "raise"),
    "raises no text": Fault(r"rank {rank} failed:(.|\n)*ValueError: half of a", "surrogate"),
    "out of memory": Fault(r"rank {rank} failed:(.|\n)*memory", "starve"),
    "SIGSTOP": Fault(r"{hang}: rank {rank} is stopped", "stop"),
    "hangs": Fault(r"{hang}: rank {rank} stands in faults.py:", "sleep"),
}
_ENDED = (signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT)
FAULTS: Mapping[str, Fault] = {
    **{f"rank of a run: {name}": fault for name, fault in _RANKS.items()},
    "all ranks of a run hang": replace(_RANKS["hangs"], told="{hang}: rank [01] stands in", everywhere=True),
    "directory of a run removed": Fault("is gone, or another folder is in its place", "sleep", removes=True),
    **{f"gpipe run: {sent.name} at its start": Fault(None, sent=sent) for sent in _ENDED},
    "gpipe run: SIGTERM at its start": Fault("interrupted", sent=signal.SIGTERM),
    **{
        f"rank of a profile: {name}": replace(_RANKS[name], command="profile")
        for name in ("SIGKILL", "exit(0)", "raises", "hangs")
    },
    "all ranks of a profile hang": Fault("{hang}: rank [01] stands in", "sleep", "profile", everywhere=True),
    **{f"gpipe profile: {sent.name} at its start": Fault(None, command="profile", sent=sent) for sent in _ENDED},
}


@dataclass(frozen=True)
class Try:
    """What came of a fault."""

    right: bool | None
    seconds: float | None
    orphans: int
    lost: int
    said: str


def attempt(fault: Fault, profile: Path, folder: Path, luck: random.Random) -> Try:
    """Let it happen once."""
    shutil.copy(MODEL, folder)
    shutil.copy(profile, folder / "profile.json")
    (folder / "scenario.yaml").write_text(SCENARIO)
    rank, action, microbatch = luck.randrange(2), luck.choice("FB"), luck.randrange(4)
    note = folder / "note"
    what = f"{fault.kind}:{'*' if fault.everywhere else rank}:{action}:{microbatch}"
    number = 6 if fault.sent is None else 100_000  # which is not done before the signal comes
    steps = ["--warmup", "0", "--steps", str(number)] if fault.command == "run" else []
    out = folder / ("run" if fault.command == "run" else "measured.json")
    seconds = TIMEOUT_S if fault.command == "run" else 3 * TIMEOUT_S
    command = [*GPIPE, fault.command, str(folder / "scenario.yaml"), "--device", "cpu", "--out", str(out), *steps]
    command += ["--timeout", str(seconds)]
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = os.environ | {"GPIPE_FAULT": what, "GPIPE_FAULT_NOTE": str(note), "TMPDIR": str(temporary)}
    with open(folder / "said", "w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        if fault.sent is not None:
            wait_until(lambda: len(workers_of(folder)) > 2, process)  # the command, its launcher, and a rank
            time.sleep(luck.uniform(0.0, 1.5))
            note.write_text(repr(time.time()))
            process.send_signal(fault.sent)
        if fault.removes:
            wait_until(note.is_file, process)
            note.write_text(repr(time.time()))
            out.rename(folder / "elsewhere")
            out = folder / "elsewhere"
        process.wait(timeout=300)
        took = time.time() - float(note.read_text()) if note.is_file() else None
        said.seek(0)
        words = said.read()
    wait_until(lambda: not workers_of(folder), seconds=GRACE_S)
    orphans = workers_of(folder)
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    right = None
    if fault.told is not None:
        expected = 130 if fault.sent is not None else 1
        pattern = fault.told.format(rank=rank, hang=_HANGS[fault.command])
        right = process.returncode == expected and re.search(pattern, words) is not None
    return Try(right, took, len(orphans), lost(out, temporary), words)


def lost(out: Path, temporary: Path) -> int:
    """Finished steps that cannot be read any more, half-written files, and what is left in a temporary folder."""
    left = [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]  # torch's own, for all
    broken = len(list(out.rglob("*.part"))) + len(left)
    for path in out.rglob("*.json") if out.is_dir() else ():
        try:
            json.loads(path.read_text())
        except ValueError:
            broken += 1
    done = [int(path.read_text()) for path in out.glob("ranks/rank*.done")]
    if len(done) == 2 and min(done) and (out / "measured.json").is_file():
        broken += max(0, min(done) - len(load_run(out)[1].steps))
    elif len(done) == 2:  # nobody was left to put them together
        lines = [path.read_text().count("\n") for path in out.glob("ranks/rank*.steps")]
        broken += max(0, min(done) - min(lines))
    return broken


def workers_of(folder: Path) -> list[int]:
    """Processes that work on what is in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def wait_until(
    done: Callable[[], bool], process: "subprocess.Popen[bytes] | None" = None, seconds: float = 60.0
) -> None:
    """Or until a process has ended, or so many seconds have passed."""
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until and (process is None or process.poll() is None):
        time.sleep(0.02)


def table(tries: Mapping[str, list[Try]]) -> str:
    """A line for each fault, and one for all."""
    lines = ["| fault | tries | told right | seconds until told | orphans | lost |", "|---|---|---|---|---|---|"]
    for name, found in [*tries.items(), ("all", [one for some in tries.values() for one in some])]:
        told = [one.right for one in found if one.right is not None]
        seconds = [one.seconds for one in found if one.seconds is not None and one.right is not None]
        lasted = f"{statistics.median(seconds):.1f}, at most {max(seconds):.1f}" if seconds else ""
        right = f"{sum(told)} of {len(told)}" if told else "nobody is left to tell"
        orphans, gone = sum(one.orphans for one in found), sum(one.lost for one in found)
        lines.append(f"| {name} | {len(found)} | {right} | {lasted} | {orphans} | {gone} |")
    return "\n".join(lines)


def main() -> None:
    """As long as there is time; every fault at least once unless there is none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300, help="how long to go on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults with this in their name")
    arguments = parser.parse_args()
    until, luck = time.monotonic() + arguments.seconds, random.Random(arguments.seed)
    tries: dict[str, list[Try]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="chaos-") as root:
        base = Path(root)
        shutil.copy(MODEL, base)
        (base / "scenario.yaml").write_text(SCENARIO)
        profile = base / "profile.json"
        command = [*GPIPE, "profile", str(base / "scenario.yaml"), "--device", "cpu", "--out", str(profile)]
        subprocess.run(command, check=True, capture_output=True)
        names = [name for name in FAULTS if arguments.only in name]
        while time.monotonic() < until:
            for name in names:
                if time.monotonic() > until:
                    break
                folder = Path(tempfile.mkdtemp(dir=root))
                found = attempt(FAULTS[name], profile, folder, luck)
                tries[name].append(found)
                shutil.rmtree(folder)
                is_well = found.right is not False and not found.orphans and not found.lost
                print(f"{name}: {'well' if is_well else f'NOT WELL: {found}'}", file=sys.stderr, flush=True)
    print(f"{os.cpu_count()} cores of {platform.machine()}, {time.strftime('%d %B %Y')}")
    print(table(tries))
    everything = [one for some in tries.values() for one in some]
    sys.exit(any(one.right is False or one.orphans or one.lost for one in everything))


if __name__ == "__main__":
    main()
