"""Headlines: what each benchmark has to say in the one table that `make bench` ends with.

A benchmark started with `--rows FILE` leaves its headlines there; `benchmarks/table.py` prints those of all of them.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One row: the same work done by us and by another, in one run."""

    what: str
    """What was run."""
    peer: str
    """Against what or whom."""
    ours: str
    theirs: str
    """Both figures with their unit."""
    ratio: float | None
    """Theirs over ours in time: how many times faster we are. None where they could not run."""
    held: bool | None = None
    """Whether it reached its goal, if it has one."""
    note: str = ""
    """What is not the same on both sides, or why they could not run."""
    repeat: str
    """The command to see it again."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run beside its prediction."""

    predicted_s: float
    measured_s: float
    spread: float
    """Standard deviation over mean of the measured steps."""

    @property
    def error(self) -> float:
        """Of the prediction; above 0 it was too long."""
        return (self.predicted_s - self.measured_s) / self.measured_s


def of_errors(what: str, errors: Sequence[float], *, beside: str, goal: float, repeat: str) -> Headline:
    """Predictions beside what was measured; errors are (predicted - measured) / measured."""
    mean = sum(map(abs, errors)) / len(errors)
    return Headline(
        what=what,
        peer="the same, measured",
        ours=f"{mean:.1%} off on average",
        theirs=beside,
        ratio=median(1 / (1 + error) for error in errors),
        held=mean <= goal,
        repeat=repeat,
    )


def add_option(parser: argparse.ArgumentParser) -> None:
    """The option that every benchmark has."""
    parser.add_argument("--rows", type=Path, metavar="FILE", help="also write the headlines for benchmarks/table.py")


def save(path: Path | None, headlines: Iterable[Headline]) -> None:
    """Write them where `--rows` says."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(headline) for headline in headlines], indent=2) + "\n")


def load(path: Path) -> list[Headline]:
    """What `save` has written."""
    return [Headline(**entry) for entry in json.loads(path.read_text())]
