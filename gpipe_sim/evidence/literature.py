"""The literature: published figures as they were printed, and what it means that a prediction agrees with one.

    exact        follows from published inputs: it must agree within a stated tolerance
    calibrated   some parameters are fitted to some cells of a table, and judged on its *other* cells only
    trend        the inputs are not published: only the order or the direction is claimed

A figure is printed with so many digits; half a unit of the last one is what nobody can be better than.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

Claim = Literal["exact", "calibrated", "trend"]
"""What is claimed of a figure: the three above."""
Status = Literal["holds", "misses", "fitted"]
Value = float | tuple[float, ...] | str

CLAIMS: tuple[Claim, ...] = ("exact", "calibrated", "trend")
DATA = Path(__file__).with_name("published.json")
_FACTORS = {"k": 1e3, "M": 1e6, "B": 1e9}


class Printed(NamedTuple):
    """A number as a paper prints it."""

    value: float
    half_unit: float
    """Half a unit of its last digit."""

    @property
    def rounding(self) -> float:
        """The half unit, as a share of the value."""
        return self.half_unit / self.value


def printed(text: str) -> Printed:
    """``"83.9B"`` -> 83.9e9, give or take 0.05e9."""
    factor = _FACTORS.get(text[-1], 1.0)
    digits = text.rstrip("".join(_FACTORS))
    decimals = len(digits.partition(".")[2])
    return Printed(float(digits) * factor, 0.5 * 10.0**-decimals * factor)


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """A table of a paper, in the order of `published.json`."""

    name: str
    title: str
    source: str
    """The full citation."""
    settings: str
    corrections: str
    rows: Sequence[Mapping[str, Any]]
    models: Mapping[str, Mapping[str, Any]]


@cache
def published_tables() -> Mapping[str, PublishedTable]:
    """Every table that is carried with the tool, by name."""
    data = json.loads(DATA.read_text())
    return {
        name: PublishedTable(
            name=name,
            title=table["title"],
            source=data["sources"][table["source"]],
            settings=table["settings"],
            corrections=table.get("corrections", ""),
            rows=table["rows"],
            models=table.get("models", {}),
        )
        for name, table in data["tables"].items()
    }


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One published figure beside what this project says of it."""

    table: str
    """The name of its `PublishedTable`."""
    name: str
    unit: str = ""
    kind: Claim
    published: Value
    """A number, several that are judged together, or a statement."""
    predicted: Value
    basis: str
    """Exact: what it follows from. Calibrated: how many parameters, fitted to which cells. Trend: what is claimed."""
    tolerance: float | None = None
    """The largest error that still agrees; None for a trend, where only the order counts."""
    allowance: str = ""
    """Why the tolerance is what it is."""
    is_fitted: bool = False
    """Whether a parameter was fitted to this very figure, which is then shown and not judged."""
    known: str = ""
    """Why it misses, as far as the published figures tell."""

    @property
    def error(self) -> float | None:
        """(predicted - published) / published, the worst where there are several; None for a trend."""
        if self.kind == "trend" or isinstance(self.published, str) or isinstance(self.predicted, str):
            return None
        pairs = zip(several(self.predicted), several(self.published), strict=True)
        return max(((ours - theirs) / theirs for ours, theirs in pairs), key=abs)

    @property
    def status(self) -> Status:
        """Whether the prediction agrees; a fitted figure is no evidence."""
        if self.is_fitted:
            return "fitted"
        if self.error is not None and self.tolerance is not None:
            return "holds" if abs(self.error) <= self.tolerance else "misses"
        if isinstance(self.published, str) or isinstance(self.predicted, str):
            return "holds" if self.published == self.predicted else "misses"
        return "holds" if _directions(self.published) == _directions(self.predicted) else "misses"

    @property
    def fails(self) -> bool:
        """Whether it misses and no reason is given."""
        return self.status == "misses" and not self.known

    def to_dict(self) -> dict[str, Any]:
        """The keys of `gpipe validate --json`."""
        table = published_tables()[self.table]
        return {
            "table": self.table,
            "title": table.title,
            "figure": self.name,
            "unit": self.unit,
            "kind": self.kind,
            "published": self.published,
            "predicted": self.predicted,
            "error": self.error,
            "tolerance": self.tolerance,
            "allowance": self.allowance or None,
            "status": self.status,
            "reason": (self.known or None) if self.status == "misses" else None,
            "basis": self.basis,
            "source": table.source,
        }


def several(value: float | tuple[float, ...]) -> tuple[float, ...]:
    """One number as well as many."""
    return value if isinstance(value, tuple) else (value,)


def _directions(value: float | tuple[float, ...]) -> list[int]:
    """Up, level or down, from each number to the next."""
    return [(after > before) - (after < before) for before, after in pairwise(several(value))]


def summary(figures: Sequence[Figure]) -> dict[str, dict[str, int]]:
    """Of each kind, how many figures hold, miss for a reason that is given, fail, and were fitted."""
    return {
        kind: {
            "holds": sum(f.status == "holds" for f in figures if f.kind == kind),
            "misses_with_reason": sum(f.status == "misses" and not f.fails for f in figures if f.kind == kind),
            "fails": sum(f.fails for f in figures if f.kind == kind),
            "fitted": sum(f.status == "fitted" for f in figures if f.kind == kind),
        }
        for kind in CLAIMS
    }
