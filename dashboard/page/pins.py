"""Up to four plans side by side: pinned in the address, always in sight, drawn on one axis."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import dash
import dash_mantine_components as dmc
from dash import ALL, Input, Output, ctx, dcc, html, no_update
from dash import State as Given

from dashboard.charts.many_plans import waterfalls
from dashboard.charts.timeline import timeline_data
from dashboard.page import ids
from dashboard.page.callbacks import problem_list, state_of
from dashboard.page.cards import card, still
from dashboard.page.first_screen import choices
from dashboard.page.knobs import link_of
from dashboard.page.moves import limit_sentence
from dashboard.page.state import PINS, Library, State, current, is_same, settled
from gpipe_sim.base.files import InputError
from gpipe_sim.base.units import format_bandwidth, format_bytes, format_seconds
from gpipe_sim.explain.predict import Prediction
from gpipe_sim.step.metrics import step_time_s

_UNPIN: Any = {"type": "unpin", "pin": ALL}


def register(app: dash.Dash, library: Library) -> None:
    """Pinning, the tray, and what is shown of the plans in it."""

    @app.callback(
        Output(ids.URL, "search", allow_duplicate=True),
        Input(ids.PIN, "n_clicks"),
        Input(_UNPIN, "n_clicks"),
        Given(ids.URL, "search"),
        prevent_initial_call=True,
    )
    def pin(_: int, unpins: list[int | None], query: str | None) -> Any:
        state = state_of(query)
        if ctx.triggered_id != ids.PIN:
            if not any(unpins):  # buttons that were only made anew
                return no_update
            return replace(state, pins=without(state.pins, str(ctx.triggered_id["pin"]))).to_query()
        try:
            return pinned(state, library).to_query()
        except InputError:
            return no_update

    @app.callback(
        Output(ids.TRAY, "children"),
        Output(ids.PIN, "disabled"),
        Input(ids.PINS_SHOWN, "data"),
        prevent_initial_call=True,
    )
    def lay_out(query: str) -> tuple[Any, bool]:
        state = state_of(query)
        return tray(state, _known(state, library)), len(state.pins) >= len(PINS)

    @app.callback(
        Output(ids.PINNED, "children"), Input(ids.query_of(ids.PINNED_TAB), "data"), prevent_initial_call=True
    )
    def show(query: str | None) -> Any:
        state = state_of(query)
        if not state.pins:
            return dmc.Text("Pin up to four plans, with the button above, to see them here on one axis.")
        try:
            return side_by_side({name: current(state_of(pin), library) for name, pin in state.pins.items()})
        except InputError as error:
            return problem_list(error.problems)


def pinned(state: State, library: Library) -> State:
    """With the plan on screen among the pins; one that is there already, or a fifth, changes nothing."""
    exact = settled(state, library)
    free = [name for name in PINS if name not in state.pins]
    here = current(state, library)
    if not free or any(is_same(here, pin) for pin in _known(state, library).values()):
        return state
    return replace(exact, pins=dict(sorted({**state.pins, free[0]: exact.question.to_query()}.items())))


def without(pins: Mapping[str, str], name: str) -> dict[str, str]:
    """The pins but for one; the names of the others stay."""
    return {other: pin for other, pin in pins.items() if other != name}


def _known(state: State, library: Library) -> dict[str, Prediction]:
    """The pins that make a plan."""
    found = {}
    for name, pin in state.pins.items():
        try:
            found[name] = current(state_of(pin), library)
        except InputError:
            continue
    return found


def tray(state: State, plans: Mapping[str, Prediction]) -> list[Any]:
    """What is pinned, each to go back to and to let go."""
    found: list[Any] = []
    for name, prediction in plans.items():
        there = replace(state_of(state.pins[name]), pins=state.pins, critical=state.critical)
        words = f"{name.upper()}: {choices(prediction.plan)}, {format_seconds(prediction.step_time_s)}"
        button: Any = {"aria-label": f"unpin {name.upper()}"}
        found.append(
            html.Span(
                [
                    dcc.Link(words, href=there.to_query(), id=f"pin-{name}"),
                    html.Button("\u00d7", id={"type": "unpin", "pin": name}, **button),
                ],
                className="pin",
            )
        )
    return found


# --- side by side --------------------------------------------------------------------------------------------------


def side_by_side(plans: Mapping[str, Prediction]) -> Any:
    """What differs, where the time of each goes, and their timelines, all on one axis."""
    longest = max(step_time_s(prediction.step) for prediction in plans.values())
    parts = []
    for name, prediction in plans.items():
        drawing: Any = {"data-timeline": timeline_data(prediction.plan, prediction.step, axis_s=longest)}
        title = f"{name.upper()}: {prediction.plan.scenario.name}, {choices(prediction.plan)}"
        chart = html.Div(id=f"gantt-{name}", className="timeline linked", **drawing)
        parts.append(card(title, limit_sentence(prediction), chart))
    names = [name.upper() for name in plans]
    rows = differences(plans)
    table = dmc.Table(data={"head": ["figure", *names], "body": rows}, id="pinned-numbers")
    same = "" if len(plans) == 1 else "Only what differs; change against A." if "a" in plans else "Only what differs."
    bars = still(waterfalls(dict(zip(names, plans.values(), strict=True))), "pinned-waterfalls")
    return dmc.Stack(
        [
            card("What differs", same, table),
            card("Where the time goes", "Each step by cause, on one axis.", bars),
            *parts,
        ]
    )


def differences(plans: Mapping[str, Prediction]) -> list[list[str]]:
    """A row for each choice and figure that is not the same in all; of one plan, all of them."""
    columns = [_facts(prediction) for prediction in plans.values()]
    rows = []
    for name in columns[0]:
        values = [column[name] for column in columns]
        if len(plans) == 1 or len(set(values)) > 1:
            rows.append([name, *values])
    first, *others = plans.values()
    if others:
        changes = [f"{other.step_time_s / first.step_time_s - 1:+.1%}" for other in others]
        rows.append([f"step time against {next(iter(plans)).upper()}", "", *changes])
    return rows


def _facts(prediction: Prediction) -> dict[str, str]:
    """Choices and figures, with their units."""
    plan = prediction.plan
    cluster, link = plan.scenario.cluster, link_of(plan)
    worth = prediction.worth()
    return {
        "scenario": plan.scenario.name,
        "ranks K": str(plan.num_ranks),
        "stages per rank v": str(plan.stages_per_rank),
        "micro-batches M": str(plan.num_microbatches),
        "replicas D": str(plan.replicas),
        "replicas divide": plan.shard,
        "devices per stage T": str(plan.tensor),
        "schedule": plan.schedule,
        "checkpoint": ", ".join(dict.fromkeys(plan.checkpoint)),
        "recompute": plan.recompute,
        "recomputed at once": plan.recompute_unit,
        "order of backwards": plan.backward,
        "receives posted ahead": str(plan.window or "all"),
        "rank of each stage": " ".join(map(str, plan.placement)) if plan.num_stages <= 16 else "",
        "tensor groups divide the sequence": "yes" if plan.scenario.plan.sequence_split else "no",
        "devices numbered first": ", ".join(plan.dimensions),
        "layers of each stage": " ".join(map(str, plan.balance)) if plan.num_stages <= 16 else "",
        "batch N": str(plan.scenario.batch),
        "dtype": plan.scenario.dtype,
        "precision": plan.scenario.precision,
        "optimizer": plan.scenario.optimizer,
        "device": cluster.device.name,
        "link bandwidth": "no limit" if link.bandwidth == float("inf") else format_bandwidth(link.bandwidth),
        "link latency": format_seconds(link.latency),
        "transfers beside compute": "yes" if cluster.overlap else "no",
        "jitter": f"{cluster.jitter.cv:.0%}" if cluster.jitter else "none",
        "step time": format_seconds(prediction.step_time_s),
        "throughput": f"{prediction.throughput_samples_s:.4g} samples/s",
        "MFU": "" if worth.mfu is None else f"{worth.mfu:.1%}",
        "bubble": f"{prediction.bubble_fraction:.1%}",
        "peak memory": format_bytes(max(prediction.peak_memory_bytes)),
        "fits": "yes" if prediction.fits else "no",
    }
