"""The first screen: what is planned, whether it fits, how long a step takes, and what to change next."""

from collections.abc import Iterator
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from dashboard.page import ids
from dashboard.page.cards import explained, progress
from dashboard.page.knobs import link_of
from dashboard.page.moves import Next, outcome
from gpipe_sim.base.units import format_bandwidth, format_bytes, format_money, format_seconds
from gpipe_sim.explain.predict import Prediction
from gpipe_sim.explain.waterfall import LABELS
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.catalog import device_names
from gpipe_sim.scenario.schema import Transformer
from gpipe_sim.show import palette

WORDS = {
    "fits": "Whether every rank's memory at its fullest moment stays below what its device has.",
    "step time": "One step: forward and backward of the whole batch, and the optimizer's update.",
    "throughput": "Samples that are trained on in a second.",
    "bubble": "The share of the pipeline's time in which ranks wait instead of computing.",
    "compute": "What the batch would take if nothing but its computation cost time.",
    "tensor": "Devices that hold a layer together exchange what each has of it, and compute nothing meanwhile.",
    "small_batches": "What many small calls take longer than one large one.",
    "recompute": "Forwards that are run again, since their results were not kept.",
    "imbalance": "The slowest rank has more to do than the average.",
    "fill_drain": "Ranks wait at the beginning until work reaches them, and at the end after theirs is done.",
    "overhead": "The engine's own time for each action.",
    "communication": "Waiting for messages that computing does not hide.",
    "contention": "Messages or ranks that share a network card or cores.",
    "jitter": "Slow moments of one rank, for which others wait.",
    "update": "The optimizer's step after the last backward.",
    "collectives": "What copies of the pipeline sum and gather together, as far as no rank computes meanwhile.",
}
"""What a newcomer may not know."""


_TRAY: Any = {"aria-label": "pinned plans"}


def first_screen() -> dmc.Paper:
    """Without its contents; callbacks fill it."""
    buttons = dmc.Group(
        [
            dmc.Button("Find the best plan", id=ids.RECOMMEND),
            dmc.Button("Undo", id=ids.UNDO, variant="default", disabled=True),
            dmc.Button("Pin", id=ids.PIN, variant="default"),
        ],
        gap="xs",
    )
    return dmc.Paper(
        [
            dmc.Group(
                [dmc.Text(id=ids.ABOUT, fw=500, flex=1, miw=220), buttons],
                justify="space-between",
                gap="sm",
            ),
            dmc.SimpleGrid(id=ids.NUMBERS, children=[], cols={"base": 2, "lg": 4}, spacing="lg", mt="sm", mih=92),
            dmc.Text(id=ids.VERDICT, mt="sm", **{"aria-live": "polite"}),
            html.Div(id=ids.TRAY, className="tray", role="group", **_TRAY),
            html.Div(id=ids.ADVICE, role="status"),
            html.Div(id=ids.MOVES, role="status"),
        ],
        withBorder=True,
        p="md",
        mb="md",
        radius="md",
    )


# --- what is planned -----------------------------------------------------------------------------------------------


def about(prediction: Prediction) -> str:
    """``demo: a transformer of 8.0 billion parameters on 8 h100-80gb over nvlink4 (450 GB/s), 64 sequences a step``."""
    plan = prediction.plan
    scenario, devices = plan.scenario, plan.world
    unit = "samples"
    if isinstance(scenario.model, Transformer):
        parameters = _count(prediction.worth().parameters)
        model, unit = f"a transformer of {parameters} parameters", "sequences"
    else:
        model = f"a model of {plan.profile.num_layers} layers"
    bandwidth = link_of(plan).bandwidth
    written = scenario.document.data.get("cluster", {})
    named = written.get("network" if scenario.cluster.network is not None else "link")
    if bandwidth == float("inf"):
        between = " with free links"
    elif isinstance(named, str):
        between = f" over {named} ({format_bandwidth(bandwidth)})"
    else:
        between = f" with {format_bandwidth(bandwidth)} links"
    between = between if devices > 1 else ""
    name = scenario.cluster.device.name
    device = name if name in device_names() else f"device{'s' * (devices > 1)}"
    copies = f", {plan.replicas} copies of a pipeline of {plan.num_ranks}" if plan.replicas > 1 else ""
    copies += f", {plan.tensor} devices to a stage" if plan.tensor > 1 else ""
    return f"{scenario.name}: {model} on {devices} {device}{copies}{between}, {scenario.batch} {unit} a step"


def choices(plan: Plan) -> str:
    """``K = 4, v = 2, M = 8, D = 2, 1f1b``: what was chosen, in the letters of the knobs."""
    several = f", v = {plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""
    copies = f", D = {plan.replicas}" if plan.replicas > 1 else ""
    copies += f", T = {plan.tensor}" if plan.tensor > 1 else ""
    shard = f", {plan.shard} divided" if plan.replicas > 1 and plan.shard != "none" else ""
    return f"K = {plan.num_ranks}{several}, M = {plan.num_microbatches}{copies}, {plan.schedule}{shard}"


def _count(number: float) -> str:
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:.0f}"


# --- figures -------------------------------------------------------------------------------------------------------


def tiles(prediction: Prediction, before: Prediction | None) -> list[Any]:
    """Memory, step time with its change, throughput, and where the time goes."""
    plan, peak = prediction.plan, max(prediction.peak_memory_bytes)
    share = peak / plan.memory_limit
    badge = dmc.Badge(
        "FITS" if prediction.fits else "DOES NOT FIT",
        color="teal.9" if prediction.fits else "red.9",
        size="lg",
        radius="sm",
        id="fits",
    )
    bar = dmc.Progress(
        value=min(100 * share, 100),
        color="teal.8" if prediction.fits else "red.8",
        size="lg",
        mt=6,
        **{"aria-label": "memory of the fullest rank"},
    )
    memory = [
        dmc.Group([explained(badge, WORDS["fits"]), dmc.Text(f"{share:.0%}", fw=600)], gap="xs"),
        bar,
        _note(f"{format_bytes(peak)} of {format_bytes(plan.memory_limit)} on the fullest rank", "number-peak-memory"),
    ]
    chosen = choices(plan)
    if plan.scenario.cluster.jitter:
        p50, p95 = map(format_seconds, (prediction.step_time_p50_s, prediction.step_time_p95_s))
        chosen = f"mean; p50 {p50}, p95 {p95}"
    worth = prediction.worth()
    tokens, mfu, price, money = worth.tokens_per_s, worth.mfu, worth.price, worth.money_per_step
    per_second = [f"{tokens:,.0f} tokens/s" if tokens is not None else f"batch {plan.scenario.batch}"]
    per_second += [f"MFU {mfu:.1%}"] if mfu is not None else []
    per_second += [f"{format_money(money)} {price.currency} a step"] if price is not None and money is not None else []
    ideal = f"closed form {prediction.bubble_ideal:.1%}"
    return [
        html.Div(memory),
        _tile("step time", format_seconds(prediction.step_time_s), [_change(prediction, before), _note(chosen)]),
        _tile("throughput", f"{prediction.throughput_samples_s:.4g} samples/s", [_note(", ".join(per_second))]),
        _tile("bubble", f"{prediction.bubble_fraction:.1%}", [_causes(prediction), _note(ideal)]),
    ]


def _tile(name: str, value: str, notes: list[Any]) -> html.Div:
    head = explained(dmc.Text(name, size="sm", className="quiet", span=True), WORDS[name])
    return html.Div([head, dmc.Text(value, size="xl", fw=600, id=f"number-{name.replace(' ', '-')}"), *notes])


def _note(text: str, name: str | None = None) -> dmc.Text:
    return dmc.Text(text, size="sm", className="quiet", **({"id": name} if name else {}))


def _change(prediction: Prediction, before: Prediction | None) -> Any:
    """Against the plan that was on screen before."""
    if before is None or before is prediction:
        return None
    change = prediction.step_time_s / before.step_time_s - 1
    if abs(change) < 5e-4:
        return dmc.Text("as the plan before", size="sm", className="quiet", id="change")
    words = f"{abs(change):.1%} {'longer' if change > 0 else 'shorter'} than the plan before"
    return dmc.Text(words, size="sm", fw=600, className="worse" if change > 0 else "better", id="change")


def _causes(prediction: Prediction) -> html.Div:
    """The step as a bar, a piece for each cause that takes part of it."""
    seconds, total = prediction.breakdown_s, prediction.step_time_s
    pieces, told = [], []
    for part, spent in seconds.items():
        if spent > 1e-3 * total:
            told.append(f"{LABELS[part]} {spent / total:.0%}")
            words = f"{LABELS[part]}: {format_seconds(spent)}, {spent / total:.0%}. {WORDS[part]}"
            look = {"width": f"{100 * spent / total:.2f}%", "background": palette.BREAKDOWN[part]}
            pieces.append(html.Div(title=words, style=look))
    label: Any = {"aria-label": "the step by cause: " + ", ".join(told)}
    return html.Div(pieces, id="causes", className="causes", role="img", **label)


# --- what to change next -------------------------------------------------------------------------------------------


def move_cards(found: Next) -> list[Any]:
    """Up to three moves, each with a link that makes it; or that there is none, and what would help instead."""
    if not found.moves:
        optimum = f"No single change of this plan makes a step faster within its memory ({found.tried} were tried)."
        lines = [optimum, *found.elsewhere] if found.here.fits else ["No single change of this plan makes it fit."]
        return [dmc.Text(line, size="sm", mt="xs") for line in lines]
    head = (
        "What to change next" if found.here.fits else "What would make it fit" if _fit(found) else "What comes nearer"
    )
    return [
        dmc.Text(head, fw=600, size="sm", mt="sm"),
        dmc.Stack(list(_cards(found)), gap=4, mt=4),
    ]


def _fit(found: Next) -> bool:
    return any(move.prediction.fits for move in found.moves)


def _cards(found: Next) -> Iterator[Any]:
    for index, move in enumerate(found.moves):
        text = [dmc.Text(move.words + ": ", span=True, fw=600, size="sm")]
        text.append(dmc.Text(outcome(found.here, move.prediction), span=True, size="sm"))
        apply = dcc.Link("Apply", href=move.state.to_query(), id=f"move-{index}", className="apply")
        yield dmc.Group([apply, html.Div(text)], gap="sm", wrap="nowrap")


def trying(done: float, total: int | None) -> html.Div:
    """While moves are being tried."""
    return progress(f"Trying changes: {done:.0f} of {total}" if total else "Trying changes", None)
