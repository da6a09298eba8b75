"""Many predictions at once: a sweep that shows itself in a notebook, and becomes a table elsewhere."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from gpipe_sim.base import html
from gpipe_sim.base.units import format_bytes, format_seconds
from gpipe_sim.explain.predict import Prediction, fastest, pareto, predict_all, varying
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.actions import KINDS
from gpipe_sim.scenario.reading import Source, load_scenario

_MOST_BARS = 40
"""Plans of which a chart is still read."""
_FITS, _FITS_NOT = KINDS["F"].colour, "#BBBBBB"


@dataclass(frozen=True, eq=False)
class Predictions(Sequence[Prediction]):
    """The predictions of a scenario's plans, in the order of its lists."""

    name: str
    found: tuple[Prediction, ...]

    def __len__(self) -> int:
        return len(self.found)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prediction]: ...
    def __getitem__(self, index: int | slice) -> Prediction | Sequence[Prediction]:
        return self.found[index]

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.found)

    def __repr__(self) -> str:
        fitting = sum(prediction.fits for prediction in self)
        return f"Predictions({self.name!r}, {len(self)} plan{'s' * (len(self) > 1)}, {fitting} fit)"

    @property
    def fastest(self) -> Prediction:
        """The fastest that fits or, where none does, the fastest."""
        return fastest(self)

    @property
    def pareto(self) -> list[Prediction]:
        """Those for which no other is both faster and smaller, fastest first."""
        return pareto(self)

    def to_records(self) -> list[dict[str, Any]]:
        """A flat row for each plan: the swept fields by their names, then the keys of ``--json`` that are one value.

        Of lists that have an entry for each rank, the largest stands under the same name, as the fullest rank's memory.
        """
        return [_record(prediction) for prediction in self]

    def to_pandas(self) -> Any:
        """`to_records` as a `pandas.DataFrame`."""
        try:
            import pandas  # which nothing else here needs
        except ImportError as error:
            raise ImportError("a table of pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame(self.to_records())

    def _repr_html_(self) -> str:
        fields, best = varying(self), self.fastest
        head = [*fields, "step", "samples/s", "bubble", "peak memory", "fits"]
        rows = [
            [
                *(prediction.plan.scenario.swept[field] for field in fields),
                format_seconds(prediction.step_time_s) + (" (fastest)" if prediction is best else ""),
                f"{prediction.throughput_samples_s:.4g}",
                f"{prediction.bubble_fraction:.1%}",
                format_bytes(max(prediction.peak_memory_bytes)),
                "yes" if prediction.fits else "no",
            ]
            for prediction in self
        ]
        which = "" if len(self) <= _MOST_BARS else f", of the {_MOST_BARS} fastest"
        shown = sorted(self, key=lambda prediction: prediction.step_time_s)[:_MOST_BARS]
        bars = [(_short(one, fields), [_bar(one)], format_seconds(one.step_time_s)) for one in self if one in shown]
        fitting = sum(prediction.fits for prediction in self)
        told = f"{self.name}: {fitting} of {len(self)} plans fit. Step times{which}; grey does not fit."
        return html.paragraph(told) + html.chart("step times", bars) + html.table(head, rows)


def _short(prediction: Prediction, fields: Sequence[str]) -> str:
    """``stages 4, microbatches 8``, cut to what a label has room for."""
    words = ", ".join(f"{field.rpartition('.')[2]} {prediction.plan.scenario.swept[field]}" for field in fields)
    return words if len(words) <= 24 else ", ".join(str(prediction.plan.scenario.swept[field]) for field in fields)[:24]


def _bar(prediction: Prediction) -> html.Bar:
    return html.Bar(0, prediction.step_time_s, _FITS if prediction.fits else _FITS_NOT, prediction.settings)


def _record(prediction: Prediction) -> dict[str, Any]:
    found: dict[str, Any] = {path: str(value) for path, value in prediction.plan.scenario.swept.items()}
    for key, value in prediction.to_dict().items():
        if key == "breakdown_s":
            found |= {f"{part}_s": seconds for part, seconds in value.items()}
        elif key in ("peak_memory_bytes", "activation_bytes", "parameter_bytes"):
            found[key] = max(value)
        elif not isinstance(value, list | dict):
            found[key] = value
    return found


def sweep(source: Source, *overrides: str) -> Predictions:
    """Predict every plan of a scenario: a file, a name or a dict, with lists to sweep over.

    >>> sweep("bubble", "plan.microbatches=[4, 8, 16]").fastest.plan.num_microbatches
    16
    """
    points = load_scenario(source, *overrides)
    return Predictions(points.name, tuple(predict_all([make_plan(point) for point in points])))
