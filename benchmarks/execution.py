"""How fast is the engine? Two stages, eight micro-batches, a transformer of eight blocks, two cores: side by side, in
one run, with everything else that can do the same step.

* *hand-written loop*: two processes, this model and nothing else, receives posted ahead; what an engine may cost.
* *torch ScheduleGPipe* and *Schedule1F1B* of torch.distributed.pipelining. They cannot checkpoint all but the last
  micro-batch, so that beside `except_last` they checkpoint `always`, one micro-batch more.
* *torch ScheduleInterleaved1F1B* and *ScheduleZBVZeroBubble*, with two stages on each rank, and
  *ScheduleInterleavedZeroBubble* with one, beside our engine with the same order; without checkpointing, since a
  recomputation and a split backward do not go together there.
* *DeepSpeed 1F1B*: its PipelineEngine, the only schedule it has, on gloo. It checkpoints as torch does. With *D=2*
  there are two replicas, whose gradients are summed; both stages of a replica share a core, as with our engine.
* *torchgpipe* and *fairscale Pipe*: one process. They have a thread for each device; stages on the CPU share one.
* *one process* with one and with two threads: a micro-batch after the other, nothing recomputed.

A step sets the gradients to none and runs the forward and backward of every micro-batch; there is no optimizer. Each
process computes in one thread, and ranks have a core of their own; only the last contender has two threads. All must
get the same loss and gradients in the first step. They take turns, in an order that reverses every round; a turn is one
step that does not count and `--steps` that do. A ratio is taken within each round, where the machine's drift cancels,
and its median over the rounds is told. Where a process happens to have its memory makes it a per cent faster or slower
for all its life, so that all are started anew `--starts` times. Rounds begin when the machine is idle, and a turn that
other processes disturb is repeated; patience for both is limited, and it is told when it was not enough.

Run with: make peers; .venv/bin/python benchmarks/execution.py
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NoReturn, get_args

import numpy as np
import torch
from contenders import (
    ALONE,
    CONTENDERS,
    HAND,
    OURS,
    OURS_1F1B,
    RIVALS,
    TORCH,
    TORCHGPIPE,
    Checkpoint,
    plan_of,
)
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rows import Headline, add_option, save

from gpipe_exec.devices.environment import worker_environment

CORES = 2
BUSY = 0.05
"""Share of the cores' time up to which a machine counts as idle."""
PATIENCE_S = 30.0
"""How long to wait for that at a time."""
DISTURBED = 0.1
"""Share of the cores' time from which on other processes disturb a turn, which is then repeated."""
ATTEMPTS = 3
ANSWER_S = 180.0
"""How long to wait for a contender."""
TOLERANCE = 1e-4
"""Of the largest gradient of a parameter: float32, summed in different orders."""

Gradients = dict[str, Any]
"""Parameter -> array."""


class ContenderError(RuntimeError):
    """It cannot take part, or not any longer; the message says why."""


@dataclass
class Row:
    """One contender's line in the table."""

    name: str
    checkpoint: Checkpoint
    rounds: list[list[float]] = field(default_factory=list)
    """Seconds of each step."""
    gradient_error: float | None = None
    failure: str | None = None

    @property
    def label(self) -> str:
        """Its name, and what it does instead of what it is asked for."""
        does = CONTENDERS[self.name].does(self.checkpoint)
        return self.name if does == self.checkpoint else f"{self.name}, {does}"


def ratio(row: Row, base: Row) -> float | None:
    """How long a step takes in units of another's: the median over rounds."""
    if row.failure or base.failure:
        return None
    return median(median(mine) / median(theirs) for mine, theirs in zip(row.rounds, base.rounds, strict=True))


# --- the machine ---------------------------------------------------------------------------------------------------


def processor_s() -> tuple[float, float]:
    """Seconds that all cores together were busy, and in total, since the machine started."""
    user, nice, system, idle, iowait, *others = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    busy = user + nice + system + sum(others)
    ticks = os.sysconf("SC_CLK_TCK")
    return busy / ticks, (busy + idle + iowait) / ticks


@dataclass
class Machine:
    """How quiet it is: it is waited for, within limits, and what could not be helped is told."""

    patience_s: float = 300.0
    """How long to wait for it in the whole run."""
    idle: list[bool] = field(default_factory=list)
    """Before each round."""
    others: list[float] = field(default_factory=list)
    """Share of the cores' time that other processes took during each turn."""

    def wait_until_idle(self) -> bool:
        """Whether it is idle now, for which it is given some time."""
        began = time.monotonic()
        allowed = min(self.patience_s, PATIENCE_S)
        while True:
            busy, total = processor_s()
            time.sleep(0.5)
            busy_now, total_now = processor_s()
            idle = busy_now - busy <= BUSY * (total_now - total)
            waited = time.monotonic() - began
            if idle or waited > allowed:
                self.patience_s -= min(self.patience_s, waited - 0.5)
                return idle

    def __str__(self) -> str:
        disturbed = sum(share > DISTURBED for share in self.others)
        return (
            f"The machine was idle before {sum(self.idle)} of {len(self.idle)} rounds. "
            f"Other processes took more than {DISTURBED:.0%} of the cores' time during {disturbed} of "
            f"{len(self.others)} turns" + (", which say little: run it again on a quiet machine." if disturbed else ".")
        )


# --- the contenders' processes -------------------------------------------------------------------------------------


class Running:
    """The processes of one contender. They wait for their turns on a pipe, and would end if it closed."""

    def __init__(self, row: Row, folder: Path) -> None:
        self.row = row
        self._contender = CONTENDERS[row.name]
        self._log = folder / f"{row.name} {row.checkpoint}.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        store = folder / f"{row.name} {row.checkpoint}".replace(" ", "_")
        script = Path(__file__).with_name("contenders.py")
        # Each process gets its share of the cores by pretending that they are all shared by equals.
        shares = str(CORES // self._contender.cores)
        for rank in range(self._contender.processes):
            here, there = Pipe()
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": shares}
            with there, open(self._log, "ab") as log:
                process = subprocess.Popen(
                    [sys.executable, str(script), row.name, row.checkpoint, str(store), str(there.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=worker_environment(plan_of(row.checkpoint).scenario) | ranks,
                    pass_fds=[there.fileno()],
                    start_new_session=True,  # Ctrl-C is for us, who end them
                )
            self._processes.append(process)
            self._pipes.append(here)

    def first_step(self) -> tuple[float, Gradients]:
        """The loss and the gradients by parameter, from all ranks."""
        answers = self._answers()
        losses = [loss for loss, _ in answers if loss is not None]
        return losses[0], {name: array for _, gradients in answers for name, array in gradients.items()}

    def turn(self, steps: int) -> tuple[list[float], float]:
        """Seconds of each step, from when the first rank begins to when the last one ends, and processor seconds."""
        try:
            for pipe in self._pipes:
                pipe.send(steps)
        except OSError as error:
            raise ContenderError("a process is gone") from error
        answers = self._answers()
        by_step = zip(*(times for times, _ in answers), strict=True)
        seconds = [max(end for _, end in spans) - min(start for start, _ in spans) for spans in by_step]
        return seconds, sum(used for _, used in answers)

    def stop(self) -> None:
        """End all processes; they have nothing to save."""
        for process in self._processes:
            process.kill()
            process.wait()
        for pipe in self._pipes:
            pipe.close()

    def _answers(self) -> list[list[Any]]:
        """One from each rank; the first failure counts, since the other rank only waits for the one that failed."""
        found: dict[Connection, list[Any]] = {}
        deadline = time.monotonic() + ANSWER_S
        while waiting := [pipe for pipe in self._pipes if pipe not in found]:
            ready = wait(waiting, deadline - time.monotonic())
            if not ready:
                raise ContenderError(f"no answer for {ANSWER_S:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    kind, *found[pipe] = pipe.recv()
                except (EOFError, OSError) as error:
                    last = self._log.read_text(errors="replace").strip().split("\n")[-1]
                    raise ContenderError(f"a process died: {last}") from error
                if kind == "failed":
                    raise ContenderError(found[pipe][0])
        return [found[pipe] for pipe in self._pipes]


@contextlib.contextmanager
def told(running: Running) -> Iterator[None]:
    """A failure becomes the contender's line in the table, and the others go on."""
    try:
        yield
    except ContenderError as error:
        running.row.failure = str(error).split("\n")[0]
        running.stop()


# --- measuring -----------------------------------------------------------------------------------------------------


def verify(running: Running, expected: tuple[float, Gradients]) -> None:
    """Let only those take part who get the loss and the gradients of one process."""
    (loss, gradients), (right_loss, right) = running.first_step(), expected
    if gradients.keys() != right.keys():
        raise ContenderError(f"it has gradients of {len(gradients)} parameters, expected {len(right)}")
    error = max(float(np.abs(gradients[name] - array).max() / np.abs(array).max()) for name, array in right.items())
    running.row.gradient_error = error
    if not (abs(loss - right_loss) <= TOLERANCE * right_loss and error <= TOLERANCE):
        raise ContenderError(f"it finds a loss of {loss:.6f}, expected {right_loss:.6f}; gradients off by {error:.0e}")


def take_turn(running: Running, steps: int, machine: Machine) -> None:
    """Measure, again if others disturb it and then leave; the least disturbed attempt counts, not the fastest."""
    attempts = []
    for _ in range(ATTEMPTS):
        busy, total = processor_s()
        seconds, used = running.turn(steps)
        busy_now, total_now = processor_s()
        others = max(0.0, busy_now - busy - used) / (total_now - total)
        attempts.append((others, seconds))
        if others <= DISTURBED or not machine.wait_until_idle():
            break
    others, seconds = min(attempts)
    machine.others.append(others)
    running.row.rounds.append(seconds)


def measure(rows: list[Row], rounds: int, steps: int, machine: Machine, advance: Callable[[], None]) -> None:
    """All contenders in turns. They start one after the other and wait for each other; none is left behind."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as at_exit:

        def start(row: Row) -> Running:
            running = Running(row, Path(folder))
            at_exit.callback(running.stop)
            return running

        reference = start(Row(ALONE, rows[0].checkpoint))
        expected = reference.first_step()
        reference.stop()
        contenders = []
        for row in rows:
            if row.failure:
                continue
            contenders.append(start(row))
            with told(contenders[-1]):
                verify(contenders[-1], expected)
            advance()
        for number in range(rounds):
            machine.idle.append(machine.wait_until_idle())
            for running in contenders if number % 2 == 0 else reversed(contenders):
                if not running.row.failure:
                    with told(running):
                        take_turn(running, steps, machine)
                advance()


# --- telling -------------------------------------------------------------------------------------------------------


def tell(rows: list[Row], console: Console) -> None:
    """The table, and who is in it."""
    console.print(table_of(rows))
    worst = max(row.gradient_error or 0.0 for row in rows if not row.failure)
    console.print(
        f"Loss and gradients are those of one process, to {worst:.0e} of a parameter's largest gradient.",
        highlight=False,
    )
    for row in rows:
        if row.failure:
            console.print(f"{row.label} is left out: {row.failure}", highlight=False, markup=False)


def table_of(rows: list[Row]) -> Table:
    """A line for each contender; the speed-up is over one process with one thread."""
    by_name = {row.name: row for row in rows}
    table = Table(title=f"checkpoint {rows[0].checkpoint}", title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in ("step ms", "quartiles", "/ by hand", "speed-up"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.failure:
            table.add_row(row.label, "-", "-", "-", "-")
            continue
        times = [1e3 * seconds for turn in row.rounds for seconds in turn]
        low, middle, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        by_hand, base = ratio(row, by_name[HAND]), ratio(by_name[ALONE], row)
        table.add_row(
            row.label,
            f"{middle:.0f}",
            f"{low:.0f}-{high:.0f}",
            f"{by_hand:.3f}" if by_hand else "-",
            f"{base:.2f}x" if base else "-",
        )
    return table


@dataclass(frozen=True)
class Goal:
    """What the engine should reach, and whether it did; None if the other did not run."""

    text: str
    peer: str
    found: float | None
    held: bool | None

    def __str__(self) -> str:
        verdict = {True: "held", False: "missed", None: "not judged"}[self.held]
        return f"{self.text}: {verdict}" + (f" ({self.found:.3f})" if self.found else "")


def goals_of(rows: list[Row]) -> list[Goal]:
    """For one way to checkpoint. ScheduleGPipe is judged where it does the same work."""
    by_name, checkpoint = {row.name: row for row in rows}, rows[0].checkpoint

    def goal(text: str, peer: str, held: Callable[[float], bool], *, over: bool = False) -> Goal:
        ours = by_name[RIVALS.get(peer, OURS)]
        pair = (by_name[peer], ours) if over else (ours, by_name[peer])
        found = ratio(*pair)
        return Goal(f"{text} ({checkpoint})", peer, found, None if found is None else held(found))

    found = [goal("at most 1.03 of the hand-written loop", HAND, lambda r: r <= 1.03)]
    if checkpoint == "never":
        found.append(goal("below 1.0 of ScheduleGPipe", TORCH, lambda r: r < 1))
        found += [goal(f"{ours}: at most 1.03 of {peer}", peer, lambda r: r <= 1.03) for peer, ours in RIVALS.items()]
    found.append(goal("1.6x torchgpipe or more", TORCHGPIPE, lambda r: r >= 1.6, over=True))
    return found


def headlines_of(rows: list[Row]) -> list[Headline]:
    """Every contender against our engine with GPipe's schedule, or with its own, for each way to checkpoint."""
    found = []
    for checkpoint in dict.fromkeys(row.checkpoint for row in rows):
        of_one = [row for row in rows if row.checkpoint == checkpoint]
        by_name = {row.name: row for row in of_one}
        verdicts = {goal.peer: goal.held for goal in goals_of(of_one)}
        for row in of_one:
            ours = by_name[RIVALS.get(row.name, OURS)]
            if row is not ours:
                several = f", {ours.name}" if row.name in RIVALS else ""
                found.append(
                    Headline(
                        what=f"run a step, K=2 M=8, checkpoint {checkpoint}{several}",
                        peer=row.label,
                        ours=_milliseconds(ours),
                        theirs=_milliseconds(row),
                        ratio=ratio(row, ours),
                        held=verdicts.get(row.name),
                        note=f"{row.label} is left out: {row.failure}" if row.failure else "",
                        repeat="make peers; .venv/bin/python benchmarks/execution.py",
                    )
                )
    return found


def _milliseconds(row: Row) -> str:
    times = [seconds for turn in row.rounds for seconds in turn]
    return f"{1e3 * median(times):.0f} ms" if times and not row.failure else "-"


def document_of(arguments: argparse.Namespace, rows: list[Row], goals: list[Goal], machine: Machine) -> dict[str, Any]:
    """Everything, for other programs."""
    return {
        "scenario": plan_of("never").scenario.document.data,
        "starts": arguments.starts,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "environment": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "machine": {"idle_before_round": machine.idle, "others_share_by_turn": machine.others},
        "contenders": [
            {
                "name": row.label,
                "checkpoint": row.checkpoint,
                "step_s_by_round": row.rounds,
                "gradient_error": row.gradient_error,
                "failure": row.failure,
            }
            for row in rows
        ],
        "goals": [{"goal": goal.text, "found": goal.found, "held": goal.held} for goal in goals],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=above_zero, default=4, help="how often all contenders are started (4)")
    parser.add_argument("--rounds", type=above_zero, default=3, help="turns of each contender after each start (3)")
    parser.add_argument("--steps", type=above_zero, default=3, help="timed steps in each turn (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every time measured to this file")
    add_option(parser)
    arguments = parser.parse_args()
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {arguments.json.parent}")
    return arguments


def above_zero(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"found {text}, expected a whole number above 0")
    return int(text)


def stop_on_signal(*_: object) -> NoReturn:
    """End as by an exception, so that every process is ended on the way."""
    raise SystemExit(130)


def main() -> None:
    arguments = parse_arguments()
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < CORES:
        sys.exit(f"execution.py: error: expected Linux and {CORES} cores, of which each rank gets its own")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop_on_signal)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    console, machine, goals, rows = Console(), Machine(), list[Goal](), list[Row]()
    checkpoints: tuple[Checkpoint, ...] = get_args(Checkpoint)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        taking_part = sum(len(contender.checkpoints) for contender in CONTENDERS.values())
        total = arguments.starts * (1 + arguments.rounds) * taking_part
        bar = progress.add_task("taking turns", total=total)
        for checkpoint in checkpoints:
            found = [Row(name, checkpoint) for name, one in CONTENDERS.items() if checkpoint in one.checkpoints]
            try:
                for _ in range(arguments.starts):
                    measure(found, arguments.rounds, arguments.steps, machine, lambda: progress.advance(bar))
            except ContenderError as error:
                sys.exit(f"execution.py: error: {ALONE}, to which the others are compared: {error}")
            rows += found
            goals += goals_of(found)
            tell(found, console)
    console.print(f"{machine}", highlight=False)
    for goal in goals:
        console.print(f"goal: {goal}", highlight=False)
    if arguments.json:
        arguments.json.write_text(json.dumps(document_of(arguments, rows, goals, machine), indent=2) + "\n")
    save(arguments.rows, headlines_of(rows))
    broken = [row for row in rows if row.failure and row.name in (HAND, OURS, OURS_1F1B, ALONE, *RIVALS.values())]
    raise SystemExit(1 if broken or any(goal.held is False for goal in goals) else 0)


if __name__ == "__main__":
    main()
