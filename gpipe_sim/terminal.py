"""Predictions in the terminal: a table and, for a single plan, the Gantt chart, memory, waterfall and verdict.

Everything is also readable without colour, because output is piped and pasted.
"""

import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gpipe_sim.explain import LABELS
from gpipe_sim.palette import BREAKDOWN, CRITICAL, KIND_NAMES, KINDS, MEMORY
from gpipe_sim.plan import Plan
from gpipe_sim.predict import Prediction
from gpipe_sim.scenario import PlanSpec
from gpipe_sim.step import RankTimeline, Step
from gpipe_sim.units import format_bytes, format_seconds

if TYPE_CHECKING:  # only a run needs it, and `simulate` starts quicker without
    from gpipe_sim.compare import Comparison

_PLAN_FIELDS = ("stages", "microbatches", "checkpoint", "schedule", "recompute", "backward", "window", "balance")
_SHORT = {"stages": "K", "microbatches": "M"}
_MOST_LINES = 32
"""Of a chart with a line per rank; more ranks than that are thinned out evenly."""


def results_table(name: str, predictions: Sequence[Prediction], width: int, *, mark: int | None = None) -> Table:
    """A row per plan: what differs between them, then times, bubble beside its closed form, and memory.

    The row with the number `mark` is pointed at.

    Where it would be too wide, whole columns go, the least needed first; a number is never cut.
    """
    columns = _columns(predictions, chosen=mark is not None)
    if mark is not None:
        columns.insert(0, _Column("", 0, [">" if row == mark else "" for row in range(len(predictions))]))
    while len(columns) > 1 and sum(column.width + 3 for column in columns) + 1 > width:
        columns.remove(max(columns, key=lambda column: column.rank))
    table = Table(title=Text(name, "italic"), title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column.header, justify="right", no_wrap=True)
    for row, prediction in enumerate(predictions):
        table.add_row(*(column.cells[row] for column in columns), style="" if prediction.fits else CRITICAL)
    return table


class _Column(NamedTuple):
    header: str
    rank: int
    """The higher, the sooner it may go."""
    cells: list[str]

    @property
    def width(self) -> int:
        return max(map(len, [self.header, *self.cells]))


def _columns(predictions: Sequence[Prediction], *, chosen: bool) -> list[_Column]:
    """What was `chosen` by a search tells its plans apart, as what was swept does."""
    rows = [prediction.to_dict() for prediction in predictions]
    fields = [f for f in _PLAN_FIELDS if f in _SHORT or len({str(row[f]) for row in rows}) > 1]
    if any(row["placement"] != sorted(row["placement"]) for row in rows):
        fields.append("placement")
    swept = [path for path in rows[0]["set"] if path.removeprefix("plan.") not in fields]
    columns = [
        _Column(path.removeprefix("plan.").removeprefix("cluster."), 1, [_cell(row["set"][path]) for row in rows])
        for path in swept
    ]
    for field in fields:
        tells_apart = f"plan.{field}" in rows[0]["set"] or (chosen and field not in ("balance", "backward"))
        rank = 0 if field in _SHORT else 1 if tells_apart else 6
        columns.append(_Column(_SHORT.get(field, field), rank, [_plan_cell(field, row[field]) for row in rows]))
    columns.append(_Column("step", 0, [format_seconds(row["step_time_s"]) for row in rows]))
    if "step_time_p95_s" in rows[0]:
        columns.append(_Column("p50", 5, [format_seconds(row["step_time_p50_s"]) for row in rows]))
        columns.append(_Column("p95", 2, [format_seconds(row["step_time_p95_s"]) for row in rows]))
    columns += [
        _Column("samples/s", 4, [f"{row['throughput_samples_s']:.4g}" for row in rows]),
        _Column("bubble", 2, [f"{row['bubble_fraction']:.2%}" for row in rows]),
        _Column("(K-1)/(M+K-1)", 3, [f"{row['bubble_ideal']:.2%}" for row in rows]),
        _Column("peak memory", 1, [format_bytes(max(row["peak_memory_bytes"])) for row in rows]),
        _Column("fits", 0, ["yes" if row["fits"] else "no" for row in rows]),
    ]
    return columns


def _plan_cell(field: str, value: Any) -> str:
    """Checkpoint modes by stage are counted in runs: ``5 always, 3 never``."""
    if field == "checkpoint" and isinstance(value, list):
        runs = [(mode, len(list(run))) for mode, run in itertools.groupby(value)]
        return runs[0][0] if len(runs) == 1 else ", ".join(f"{count} {mode}" for mode, count in runs)
    return _cell(value)


def _cell(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def plan_details(prediction: Prediction, width: int) -> RenderableType:
    """Everything about one plan."""
    return Group(
        Text(describe(prediction.plan)),
        Text(),
        gantt(prediction.step, width),
        Text(),
        memory_bars(prediction, width),
        Text(),
        waterfall(prediction.breakdown_s, width),
        Text(),
        Text(prediction.verdict, "bold"),
    )


def describe(plan: Plan) -> str:
    """What was planned: ``4 stages of 13 12 13 13 layers, ...``"""
    larger, smaller = plan.sizes[0], plan.sizes[-1]
    samples = f"{smaller}" if larger == smaller else f"{larger} or {smaller}"
    modes = plan.checkpoint if len(set(plan.checkpoint)) > 1 else plan.checkpoint[:1]
    recompute = "" if set(plan.checkpoint) == {"never"} else f" ({plan.recompute})"
    backward = f", backward {plan.backward}" if plan.schedule == "gpipe" else ""
    balance = _cell(list(plan.balance)) if len(plan.balance) <= _MOST_LINES else f"{min(plan.balance)} or more"
    layers = f"{plan.num_stages} stage{'s' * (plan.num_stages > 1)} of {balance} layers"
    placement = "" if plan.placement == plan.ranks else f" on ranks {_cell(list(plan.placement))}"
    window = "" if plan.window == PlanSpec().window else f"; window {plan.window or 'all'}"
    return (
        f"{layers}{placement}; batch {plan.scenario.batch} in {plan.num_microbatches} micro-batches of {samples}; "
        f"{plan.schedule}{backward}; checkpoint {_cell(list(modes))}{recompute}{window}"
    )


def gantt(step: Step, width: int) -> Text:
    """A line per rank, a cell per slice of time; an action shows its kind and micro-batch where there is room.

    rank 0 |F0==F1==F2==········B2======B1======|
    rank 1 |····F0==F1==F2==B2======B1==========|
    """
    end = max(float(timeline.end_s[-1]) for timeline in step.ranks)
    label = len(f"rank {step.ranks[-1].rank} ")
    cells = max(20, width - label - 2)
    chart = Text()
    for timeline in _some(step.ranks):
        chart.append(f"rank {timeline.rank}".ljust(label) + "|")
        for row, group in itertools.groupby(_cells(timeline, end / cells, cells)):
            room = len(list(group))
            if row is None:
                chart.append("·" * room)
                continue
            kind, _, microbatch = timeline.actions[row]
            name = f"{kind}{microbatch}" if microbatch >= 0 else kind
            text = (name if len(name) <= room else kind).ljust(room, "=")
            chart.append(text, Style(color="black", bgcolor=KINDS[kind]))
        chart.append("|\n")
    legend = "  ".join(f"{kind} {KIND_NAMES[kind]}" for kind in _kinds(step))
    shown = f"   {len(_some(step.ranks))} of {len(step.ranks)} ranks" if len(step.ranks) > _MOST_LINES else ""
    chart.append(" " * label + f"0 to {format_seconds(end)}   {legend}  · waiting{shown}")
    return chart


def _cells(timeline: RankTimeline, slice_s: float, cells: int) -> list[int | None]:
    """For each slice of time, the row of the action that fills most of it; None where it is mostly idle."""
    most, busy, who = [0.0] * cells, [0.0] * cells, [0] * cells
    for row, (start, end) in enumerate(zip(timeline.start_s / slice_s, timeline.end_s / slice_s, strict=True)):
        for cell in range(int(start), min(int(end) + 1, cells)):
            overlap = min(end, cell + 1) - max(start, cell)
            busy[cell] += overlap
            if overlap > most[cell]:
                most[cell], who[cell] = overlap, row
    return [row if share >= 0.5 else None for row, share in zip(who, busy, strict=True)]


_T = TypeVar("_T")


def _some(ranks: Sequence[_T]) -> Sequence[_T]:
    """All of them or, where they are too many to look at, every second, third, ..."""
    return ranks[:: -(-len(ranks) // _MOST_LINES)]


def _kinds(step: Step) -> list[str]:
    present = {chr(kind) for timeline in step.ranks for kind in set(timeline.actions.kinds)}
    return [kind for kind in KINDS if kind in present]


def memory_bars(prediction: Prediction, width: int) -> Text:
    """Peak memory of each rank by part, against the limit."""
    limit = prediction.plan.memory_limit
    scale = max(limit, *prediction.peak_memory_bytes)
    cells = max(20, min(60, width - 50))
    chart = Text()
    ranks = zip(prediction.step.ranks, prediction.step.memory, prediction.peak_memory_bytes, strict=True)
    for timeline, curve, peak in _some(list(ranks)):
        chart.append(f"stage {timeline.stage}".ljust(10))
        used = 0.0
        drawn = 0
        for part, amount in curve.at_peak().items():
            used += amount
            upto = round(used / scale * cells)
            chart.append(part[0] * (upto - drawn), Style(color="black", bgcolor=MEMORY[part]))
            drawn = max(drawn, upto)
        rest = ["·"] * (cells - drawn)
        edge = min(round(limit / scale * cells), cells) - drawn - 1
        if 0 <= edge < len(rest):
            rest[edge] = "|"
        over = peak > limit
        chart.append("".join(rest))
        text = f" {format_bytes(peak)} of {format_bytes(limit)}" + (" does not fit" if over else "")
        chart.append(text + "\n", CRITICAL if over else "")
    present = {part for curve in prediction.step.memory for part, amount in curve.at_peak().items() if amount}
    chart.append(" " * 10 + "  ".join(f"{part[0]} {part}" for part in MEMORY if part in present))
    return chart


def waterfall(breakdown_s: dict[str, float], width: int) -> Text:
    """Where the step time goes: each bar begins where the one above it ended."""
    total = sum(breakdown_s.values())
    cells = max(20, min(60, width - 50))
    chart, before = Text(), 0.0
    for part, seconds in breakdown_s.items():
        if abs(seconds) < 1e-9 * total:
            continue
        first, last = sorted(round(value / total * cells) for value in (before, before + seconds))
        chart.append(f"{LABELS[part]:<20}" + " " * first)
        chart.append("=" * max(last - first, 1), Style(color="black", bgcolor=BREAKDOWN[part]))
        chart.append(" " * (cells - max(last, first + 1)) + f" {format_seconds(seconds):>9} {seconds / total:6.1%}\n")
        before += seconds
    chart.append(f"{'step':<20}" + " " * cells + f" {format_seconds(total):>9}")
    return chart


def comparison_table(comparison: "Comparison") -> RenderableType:
    """Predicted beside measured, the attribution of the error, and the sentence that sums it up."""
    data = comparison.to_dict()
    table = Table("", "predicted", "measured", "error", header_style="bold")
    time, bubble = data["step_time"], data["bubble_fraction"]
    seconds = (format_seconds(time[name]) for name in ("predicted_s", "measured_s"))
    table.add_row("step time", *seconds, f"{time['error']:+.1%}")
    table.add_row(
        "bubble", f"{bubble['predicted']:.1%}", f"{bubble['measured']:.1%}", f"{100 * bubble['error']:+.1f} points"
    )
    memory = data["peak_memory_bytes"]
    for rank, predicted in enumerate(memory["predicted"] if memory["measured"] else []):
        measured, error = memory["measured"][rank], memory["error"][rank]
        table.add_row(f"peak memory, rank {rank}", format_bytes(predicted), format_bytes(measured), f"{error:+.1%}")
    for rank, (predicted, measured) in enumerate(
        zip(data["busy_s"]["predicted"], data["busy_s"]["measured"], strict=True)
    ):
        error = f"{predicted / measured - 1:+.1%}"
        table.add_row(f"busy, rank {rank}", format_seconds(predicted), format_seconds(measured), error)
    shares = ", ".join(f"{part} {format_seconds(seconds)}" for part, seconds in comparison.attribution_s.items())
    spread = f"{data['steps']} steps, which vary by {comparison.measured_cv:.1%}"
    about = [Text(f"{spread}; predicted - measured: {shares}")]
    if comparison.measured.device == "rehearse":
        about += [Text(), Text(comparison.measured.how)]
    return Group(table, *about, Text(), Text(comparison.sentence, "bold"))


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the command line decide what it means that nobody reads on."""
        raise BrokenPipeError


def make_console(*, stderr: bool = False) -> Console:
    """A console that does not cut tables short when its output goes to a file or a pipe."""
    console = _Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 140
    return console
