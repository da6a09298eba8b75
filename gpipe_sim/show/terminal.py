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

from gpipe_sim.base.arrays import Array
from gpipe_sim.base.units import format_bytes, format_seconds
from gpipe_sim.explain.predict import Prediction
from gpipe_sim.explain.waterfall import LABELS
from gpipe_sim.plan.actions import Action
from gpipe_sim.plan.order import ActionList
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import AUTO, PlanSpec
from gpipe_sim.show.palette import BREAKDOWN, CRITICAL, KIND_NAMES, KINDS, MEMORY, shade
from gpipe_sim.step.step import Step, stages_text

if TYPE_CHECKING:  # only a run needs it, and `simulate` starts quicker without
    from gpipe_sim.runs.compare import Comparison

_PLAN_FIELDS = (
    "microbatches",
    "replicas",
    "tensor",
    "order",
    "shard",
    "checkpoint",
    "schedule",
    "recompute",
    "recompute_unit",
    "backward",
    "window",
    "balance",
)
_SHORT = {"ranks": "K", "stages_per_rank": "v", "microbatches": "M", "replicas": "D", "tensor": "T"}
_MOST_LINES = 32
"""Of a chart with a line per rank; more ranks than that are thinned out evenly."""


def results_table(
    name: str, predictions: Sequence[Prediction], width: int, *, mark: int | None = None, tokens: float | None = None
) -> Table:
    """A row per plan: what differs between them, then times, bubble beside its closed form, and memory.

    The row with the number `mark` is pointed at. With a number of `tokens`, a row says how many days they take, and how
    much money.

    Where it would be too wide, whole columns go, the least needed first; a number is never cut.
    """
    columns = _columns(predictions, tokens, chosen=mark is not None)
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


def _columns(predictions: Sequence[Prediction], tokens: float | None, *, chosen: bool) -> list[_Column]:
    """What was `chosen` by a search tells its plans apart, as what was swept does."""
    rows = [prediction.to_dict(tokens) for prediction in predictions]
    fields = ["ranks", *(["stages_per_rank"] if any(row["stages_per_rank"] > 1 for row in rows) else [])]
    always = {"microbatches", *(copies for copies in ("replicas", "tensor") if any(row[copies] > 1 for row in rows))}
    fields += [f for f in _PLAN_FIELDS if f in always or len({str(row[f]) for row in rows}) > 1]
    if any(list(prediction.plan.pipeline) != sorted(prediction.plan.pipeline) for prediction in predictions):
        fields.append("placement")
    told = {*fields, "stages", "stages_per_rank"}  # stages are K v
    swept = [path for path in rows[0]["set"] if path.removeprefix("plan.") not in told]
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
        _Column(_ideal_header(rows), 3, [f"{row['bubble_ideal']:.2%}" for row in rows]),
        *_worth_columns(rows),
        _Column("peak memory", 1, [format_bytes(max(row["peak_memory_bytes"])) for row in rows]),
        _Column("fits", 0, ["yes" if row["fits"] else "no" for row in rows]),
    ]
    return columns


def _worth_columns(rows: Sequence[dict[str, Any]]) -> list[_Column]:
    """What so many tokens take, if that was asked, as far as it is known of all plans."""
    columns = []
    if all("tokens" in row and row["mfu"] is not None for row in rows):
        columns.append(_Column("MFU", 7, [f"{row['mfu']:.1%}" for row in rows]))
    if all(row.get("days") is not None for row in rows):
        columns.append(_Column("days", 1, [f"{row['days']:,.4g}" for row in rows]))
    if all(row.get("money") is not None for row in rows):
        columns.append(_Column(rows[0]["currency"], 2, [f"{row['money']:,.0f}" for row in rows]))
    return columns


def _ideal_header(rows: Sequence[dict[str, Any]]) -> str:
    """GPipe's closed form, where it is that of all plans."""
    plain = ((row["ranks"] - 1) / (row["microbatches"] + row["ranks"] - 1) for row in rows)
    is_plain = all(abs(row["bubble_ideal"] - bubble) < 1e-9 for row, bubble in zip(rows, plain, strict=True))
    return "(K-1)/(M+K-1)" if is_plain else "ideal bubble"


def _plan_cell(field: str, value: Any) -> str:
    """Checkpoint modes by stage are counted in runs: ``5 always, 3 never``."""
    if field == "checkpoint" and isinstance(value, list):
        runs = [(mode, len(list(run))) for mode, run in itertools.groupby(value)]
        return runs[0][0] if len(runs) == 1 else ", ".join(f"{count} {mode}" for mode, count in runs)
    return _cell(value)


def _cell(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def plan_details(prediction: Prediction, width: int, tokens: float | None = None) -> RenderableType:
    """Everything about one plan."""
    worth = prediction.worth(tokens).sentence()
    return Group(
        Text(describe(prediction.plan)),
        *([Text(worth)] if worth else []),
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
    """What was planned: ``4 stages of 13 12 13 13 layers; ...``"""
    larger, smaller = plan.sizes[0], plan.sizes[-1]
    samples = f"{smaller}" if larger == smaller else f"{larger} or {smaller}"
    modes = plan.checkpoint if len(set(plan.checkpoint)) > 1 else plan.checkpoint[:1]
    how = plan.recompute if plan.recompute_unit == "stage" else f"each {plan.recompute_unit} in its own backward"
    recompute = "" if set(plan.checkpoint) == {"never"} else f" ({how})"
    backward = f", backward {plan.backward}" if plan.schedule in ("gpipe", "interleaved_gpipe") else ""
    balance = _cell(list(plan.balance)) if len(plan.balance) <= _MOST_LINES else f"{min(plan.balance)} or more"
    layers = f"{plan.num_stages} stage{'s' * (plan.num_stages > 1)} of {balance} layers"
    placement = "" if plan.placement == plan.ranks else f" on ranks {_cell(list(plan.placement))}"
    if plan.stages_per_rank > 1:
        most = "" if plan.num_stages == plan.num_ranks * plan.stages_per_rank else "up to "
        where = f" ({_cell(list(plan.placement))})" if plan.num_stages <= _MOST_LINES else ""
        placement = f" on {plan.num_ranks} ranks, {most}{plan.stages_per_rank} on each{where}"
    window = "" if plan.window == PlanSpec().window else f"; window {plan.window or 'all'}"
    if plan.replicas > 1:
        divided = "" if plan.shard == "none" else f" that divide the {plan.shard}"
        together = ", the ranks of each together" if plan.mesh.messages_inside else ""
        placement += f"; {plan.replicas} replicas{together}{divided}"
    if plan.tensor > 1:
        split = ", which split the sequence" if plan.scenario.plan.sequence_split else ""
        placement += f"; tensor groups of {plan.tensor}{split}"
    share = f"{plan.samples} of batch" if plan.replicas > 1 else "batch"
    return (
        f"{layers}{placement}; {share} {plan.scenario.batch} in {plan.num_microbatches} micro-batches of {samples}; "
        f"{_order_text(plan)}{backward}; checkpoint {_cell(list(modes))}{recompute}{window}"
    )


def _order_text(plan: Plan) -> str:
    """The schedule, and where its order came from unless that is its name."""
    if plan.order is None:
        return plan.schedule
    return "auto, an order made for these times" if plan.schedule == AUTO else f"the order of {plan.schedule}"


def gantt(step: Step, width: int) -> Text:
    """A line per rank, a cell per slice of time; an action shows its kind and micro-batch where there is room.

    rank 0 |F0==F1==F2==········B2======B1======|
    rank 1 |····F0==F1==F2==B2======B1==========|

    Where a rank has several stages, the stage is named too; where there is no room for that, the kind of a rank's first
    stage is in upper case and those of its later stages, also lighter in colour, in lower case:

    rank 0 |0F0=0F1=3F0=3F1=Ff3B0=====b0B|

    What a rank does together with the same rank of other replicas is on a line of its own:

    rank 0 |F0==F1==F2==B2====B1====B0====······U|
      lane |······························S=====·|
    """
    end = max(timeline.last_end_s for timeline in step.ranks)
    label = len(f"rank {step.ranks[-1].rank} ")
    cells = max(20, width - label - 2)
    chart = Text()
    several = any(len(timeline.stages) > 1 for timeline in step.ranks)
    for timeline in _some(step.ranks):
        lines = [(f"rank {timeline.rank}", timeline.actions, timeline.start_s, timeline.end_s)]
        if timeline.lane:
            together = ActionList.of(collective.action for collective in timeline.lane)
            lines.append((f"{'lane':>{label - 1}}", together, timeline.lane_start_s, timeline.lane_end_s))
        for name, actions, starts, ends in lines:
            chart.append(name.ljust(label) + "|")
            for row, group in itertools.groupby(_cells(starts, ends, end / cells, cells)):
                room = len(list(group))
                if row is None:
                    chart.append("·" * room)
                    continue
                action = actions[row]
                text = _name(action, timeline.stages, room, with_stage=several).ljust(room, "=")
                colour = shade(KINDS[action.kind], action.stage, timeline.stages)
                chart.append(text, Style(color="black", bgcolor=colour))
            chart.append("|\n")
    legend = "  ".join(f"{kind} {KIND_NAMES[kind]}" for kind in _kinds(step))
    if several:
        legend += "  2F0 on stage 2"
    shown = f"   {len(_some(step.ranks))} of {len(step.ranks)} ranks" if len(step.ranks) > _MOST_LINES else ""
    chart.append(" " * label + f"0 to {format_seconds(end)}   {legend}  · waiting{shown}")
    return chart


def _name(action: Action, held: Sequence[int], room: int, *, with_stage: bool) -> str:
    """As much of an action's name as there is room for."""
    kind, stage, microbatch = action
    if microbatch < 0:
        return kind
    if not with_stage:
        return f"{kind}{microbatch}" if len(f"{kind}{microbatch}") <= room else kind
    if len(str(action)) < room:  # with a cell to spare, or its last digit would seem to belong to the next name
        return str(action)
    return f"{stage}{kind}" if len(f"{stage}{kind}") <= room else kind.lower() if stage > held[0] else kind


def _cells(starts: Array, ends: Array, slice_s: float, cells: int) -> list[int | None]:
    """For each slice of time, the row of the action that fills most of it; None where it is mostly idle."""
    most, busy, who = [0.0] * cells, [0.0] * cells, [0] * cells
    for row, (start, end) in enumerate(zip(starts / slice_s, ends / slice_s, strict=True)):
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
    present |= {collective.kind for timeline in step.ranks for collective in timeline.lane}
    return [kind for kind in KINDS if kind in present]


def memory_bars(prediction: Prediction, width: int) -> Text:
    """Peak memory of each rank by part, against the limit; where each has one stage, by stage."""
    limit = prediction.plan.memory_limit
    scale = max(limit, *prediction.peak_memory_bytes)
    cells = max(20, min(60, width - 50))
    chart = Text()
    ranks = zip(prediction.step.ranks, prediction.step.memory, prediction.peak_memory_bytes, strict=True)
    several = prediction.plan.stages_per_rank > 1
    for timeline, curve, peak in _some(list(ranks)):
        chart.append((f"rank {timeline.rank}" if several else stages_text(timeline.stages)).ljust(10))
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
    reserved = data["device_memory_bytes"]
    for rank, (taken, total) in enumerate(zip(reserved["reserved"] or (), reserved["total"] or (), strict=True)):
        table.add_row(f"reserved, rank {rank}", "", format_bytes(taken), f"of {format_bytes(total)}")
    for rank, (predicted, measured) in enumerate(
        zip(data["busy_s"]["predicted"], data["busy_s"]["measured"], strict=True)
    ):
        error = f"{predicted / measured - 1:+.1%}"
        table.add_row(f"busy, rank {rank}", format_seconds(predicted), format_seconds(measured), error)
    without = ("collectives",) if comparison.prediction.plan.replicas == 1 else ()
    parts = [(part, seconds) for part, seconds in comparison.attribution_s.items() if part not in without]
    shares = ", ".join(f"{part} {format_seconds(seconds)}" for part, seconds in parts)
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
