"""The run directory: everything about one execution of a plan, readable on any machine.

    runs/<utc>-<name>/
      plan.yaml          the plan, with its scenario and profile
      predicted.json     what was expected: the keys of `simulate --json`
      measured.json      what happened: every recorded step, rank by rank
      environment.json   where: host, versions, device
      traces/rank<r>_trace.json
      logs/              what each rank printed
      compare.json, report.html       written by `gpipe compare`

Files are written whole: a crash never leaves half a file under its final name.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from gpipe_sim.files import Document, InputError, Problem, Strict, problems_of, read_json, write_text
from gpipe_sim.plan import Plan
from gpipe_sim.planfile import load_plan
from gpipe_sim.schedule import rank_actions
from gpipe_sim.step import RankTimeline, Step


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What was measured in a run."""

    device: str
    engine: str
    steps: tuple[Step, ...]
    """After warm-up, times relative to each step's first action."""
    peak_memory_bytes: tuple[int, ...] | None = None
    """Per rank, from the allocator in a step of its own; None where that step did not finish."""


class _RankEntry(Strict):
    start_s: list[float]
    end_s: list[float]
    arrived_s: list[float | None]
    send_start_s: list[float | None]
    send_end_s: list[float | None]


class _MeasuredFile(Strict):
    format: Literal["gpipe-measured-1"]
    device: str
    engine: str
    steps: Annotated[list[list[_RankEntry]], Field(min_length=1)]
    peak_memory_bytes: list[int] | None = None


_COLUMNS = tuple(_RankEntry.model_fields)


def new_run_directory(runs: Path, name: str) -> Path:
    """``<utc>-<name>`` under `runs`, with a number if that moment is taken; the name cannot leave the folder."""
    stem = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', name).strip('.') or 'run'}"
    for attempt in range(1000):
        path = runs / (stem if attempt == 0 else f"{stem}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise InputError([Problem(str(runs), "", "has a thousand runs of this moment, expected fewer")])


def save_measured(measured: Measured, path: Path) -> None:
    """Write measured.json."""

    def column(values: Sequence[float]) -> list[float | None]:
        return [None if math.isnan(value) else value for value in values]

    data = {
        "format": "gpipe-measured-1",
        "device": measured.device,
        "engine": measured.engine,
        "steps": [
            [{name: column(getattr(timeline, name).tolist()) for name in _COLUMNS} for timeline in step.ranks]
            for step in measured.steps
        ],
        "peak_memory_bytes": list(measured.peak_memory_bytes) if measured.peak_memory_bytes else None,
    }
    write_text(path, json.dumps(data))


def load_run(directory: Path) -> tuple[Plan, Measured]:
    """The plan of a run directory and what was measured of it."""
    for name in ("plan.yaml", "measured.json"):
        if not (directory / name).is_file():
            raise InputError([Problem(str(directory), name, "is missing, expected the directory of a finished run")])
    plan = load_plan(directory / "plan.yaml")
    return plan, parse_measured(read_json(directory / "measured.json"), plan)


def parse_measured(document: Document, plan: Plan) -> Measured:
    """What a document says was measured of a plan; its rows must be the plan's actions."""
    try:
        content = _MeasuredFile.model_validate(document.data)
    except ValidationError as error:
        raise InputError(problems_of(error, document, ())) from error
    actions = rank_actions(plan)
    for index, step in enumerate(content.steps):
        if [len(entry.start_s) for entry in step] != [len(found) for found in actions]:
            message = "has other actions than the plan, expected a row for each of its own"
            raise InputError([document.problem(("steps", index), message)])
    blocking = not plan.scenario.cluster.overlap
    steps = [
        Step(
            ranks=tuple(
                RankTimeline(
                    rank=plan.ranks[position],
                    stage=actions[position][0].stage,
                    actions=actions[position],
                    blocking=blocking,
                    **{name: _array(getattr(entry, name)) for name in _COLUMNS},
                )
                for position, entry in enumerate(step)
            )
        )
        for step in content.steps
    ]
    peaks = tuple(content.peak_memory_bytes) if content.peak_memory_bytes else None
    return Measured(device=content.device, engine=content.engine, steps=tuple(steps), peak_memory_bytes=peaks)


def _array(values: Sequence[float | None]) -> Any:
    return np.array([math.nan if value is None else value for value in values])
