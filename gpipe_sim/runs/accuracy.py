"""Accuracy over time: how right all runs so far were, kept in a record that outlives their directories.

    runs/accuracy.jsonl      a line for every run, added when it ends

Errors are (predicted - measured) / measured, that of the bubble is predicted - measured; *order* is Spearman's rank
correlation of predicted and measured step times: 1 if the predictions put the runs in the order in which they were
measured.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gpipe_sim.base.arrays import Array
from gpipe_sim.base.files import parse_json
from gpipe_sim.runs.directory import RunSummary, parse_summary, summaries

RECORD = "accuracy.jsonl"

GROUPS: dict[str, Callable[[RunSummary], str]] = {
    "device": lambda run: run.device,
    "schedule": lambda run: run.schedule,
    "checkpoint": lambda run: run.checkpoint,
}
"""What runs are told apart by."""


def record(runs: Path, summary: RunSummary) -> None:
    """Add a run to the folder's record, in one write, so that runs that end together do not mix their lines.

    A line before it that was cut off, with the power, is left to itself.
    """
    utc = summary.utc.isoformat() if summary.utc else None
    line = json.dumps(asdict(summary) | {"utc": utc}) + "\n"
    with open(runs / RECORD, "a+b") as file:
        is_torn = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        file.write(("\n" * is_torn + line).encode())


def recorded(runs: Path) -> list[RunSummary]:
    """Every run of the folder's record and every compared run that lies there, once each, oldest first.

    Runs that were brought from another machine have no line in the record; lines whose run was deleted still count.
    """
    path = runs / RECORD
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    found = {run.name: run for run in [*filter(None, map(_parsed, lines)), *summaries(runs)]}
    return sorted(found.values(), key=lambda run: (run.utc.timestamp() if run.utc else 0.0, run.name))


def _parsed(line: str) -> RunSummary | None:
    """A line of the record; None if it is something else, such as one that was cut off with the power."""
    try:
        return parse_summary(parse_json(line, RECORD).data)
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How right the predictions of some runs were: means and worst cases of absolute errors."""

    runs: int
    """How many."""
    step_time_mean: float
    """Mean of the absolute errors of the step time."""
    step_time_worst: float
    """The largest of them."""
    bubble_mean: float
    """Mean of the absolute errors of the bubble, a fraction; shown in points, a hundred times as many."""
    memory_mean: float | None
    """Mean of the absolute errors of every rank's peak; null where no run has measured it."""
    memory_worst: float | None
    """The largest of them."""
    order: float | None
    """Of the step times; null for fewer than three runs, whose order says little."""


def accuracy_of(runs: Sequence[RunSummary]) -> Accuracy:
    """Of one run or more."""
    errors = np.abs([run.error for run in runs])
    memory = np.abs([error for run in runs for error in run.memory_errors or ()])
    return Accuracy(
        runs=len(runs),
        step_time_mean=float(errors.mean()),
        step_time_worst=float(errors.max()),
        bubble_mean=float(np.abs([run.bubble_error for run in runs]).mean()),
        memory_mean=float(memory.mean()) if len(memory) else None,
        memory_worst=float(memory.max()) if len(memory) else None,
        order=rank_correlation([r.predicted_s for r in runs], [r.measured_s for r in runs]) if len(runs) > 2 else None,
    )


def by_group(runs: Sequence[RunSummary]) -> dict[str, dict[str, Accuracy]]:
    """Group -> value -> how right the runs with that value were."""
    return {
        group: {value: accuracy_of([run for run in runs if of(run) == value]) for value in sorted(set(map(of, runs)))}
        for group, of in GROUPS.items()
    }


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, equal values sharing the mean of theirs; 1 where nothing differs."""
    ranks = [_ranks(values) for values in (a, b)]
    same = [np.ptp(rank) == 0 for rank in ranks]
    if any(same):
        return float(all(same))
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: Sequence[float]) -> Array:
    _, place, count = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(count) - (count - 1) / 2)[place]
    return ranks
