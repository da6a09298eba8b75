"""Knobs to settings and back: what each control shows of a plan, and what turning it sets."""

import math
from collections.abc import Mapping
from typing import Any

from dashboard import ids
from dashboard.state import State
from gpipe_sim.plan import Plan
from gpipe_sim.units import format_bandwidth, format_seconds

FIELDS: Mapping[str, str] = {
    ids.STAGES: "plan.stages",
    ids.MICROBATCHES: "plan.microbatches",
    ids.BATCH: "batch",
    ids.CHECKPOINT: "plan.checkpoint",
    ids.RECOMPUTE: "plan.recompute",
    ids.SCHEDULE: "plan.schedule",
    ids.OVERLAP: "cluster.overlap",
    ids.JITTER: "cluster.jitter",
    ids.DEVICE: "cluster.device",
}
"""Control -> field of the scenario."""

_SLOWEST, _FASTEST = 7.0, 12.0
_SAMPLES = 20


def shown(plan: Plan) -> dict[str, Any]:
    """The value of each control for this plan."""
    cluster = plan.scenario.cluster
    link = _link(plan)
    modes = set(plan.checkpoint)
    return {
        ids.STAGES: plan.num_stages,
        ids.MICROBATCHES: plan.num_microbatches,
        ids.BATCH: plan.scenario.batch,
        ids.CHECKPOINT: modes.pop() if len(modes) == 1 else None,
        ids.RECOMPUTE: plan.recompute,
        ids.SCHEDULE: plan.schedule,
        ids.BANDWIDTH: min(max(math.log10(link.bandwidth), _SLOWEST), _FASTEST)
        if link.bandwidth < math.inf
        else _FASTEST,
        ids.LATENCY: min(max(math.log10(max(link.latency, 1e-9)), -7.0), -1.0),
        ids.OVERLAP: cluster.overlap,
        ids.JITTER: round(100 * cluster.jitter.cv) if cluster.jitter else 0,
        ids.DEVICE: cluster.device.name,
    }


def readings(plan: Plan) -> tuple[str, str, str]:
    """What stands beside the sliders: bandwidth, latency, jitter."""
    link, jitter = _link(plan), plan.scenario.cluster.jitter
    bandwidth = "no limit" if link.bandwidth == math.inf else format_bandwidth(link.bandwidth)
    where = " between nodes" if plan.scenario.cluster.network is not None else ""
    return bandwidth + where, format_seconds(link.latency), f"{100 * jitter.cv:.0f}" if jitter else "0"


def _link(plan: Plan) -> Any:
    """The link that the sliders turn: the network where there is one, otherwise that inside a node."""
    cluster = plan.scenario.cluster
    return cluster.network or (plan.link(0) if plan.num_stages > 1 else cluster.link)


def turned(state: State, plan: Plan | None, knob: str, value: Any) -> State:
    """The state after a knob was turned to a value."""
    if value is None or value == "":
        field = FIELDS.get(knob)
        return state.with_settings(**{field.replace(".", "__"): None}) if field else state
    if knob in (ids.BANDWIDTH, ids.LATENCY):
        return _with_link(state, plan, knob, float(value))
    text = str(value)
    if knob == ids.OVERLAP:
        text = "true" if value else "false"
    elif knob == ids.JITTER:
        text = f"{{cv: {value / 100:g}, samples: {_SAMPLES}}}" if value else "null"
    changes: dict[str, str | None] = {FIELDS[knob].replace(".", "__"): text}
    if knob == ids.STAGES:  # what was made for another number of stages goes with it
        changes |= {"plan__balance": None, "plan__placement": None}
        if state.settings.get("plan.checkpoint", "").startswith("{"):
            changes["plan__checkpoint"] = None
    if knob == ids.SCHEDULE and value == "naive":
        changes["plan__microbatches"] = "1"
    return state.with_settings(**changes)


def _with_link(state: State, plan: Plan | None, knob: str, power: float) -> State:
    bandwidth, latency = 1e9, 1e-5
    if plan is not None:
        link = _link(plan)
        bandwidth, latency = link.bandwidth, link.latency
    if knob == ids.BANDWIDTH:
        bandwidth = 10**power
    else:
        latency = 10**power
    field = "cluster__network" if plan is not None and plan.scenario.cluster.network is not None else "cluster__link"
    text = f"{{bandwidth: {link_text(bandwidth)}, latency: {latency * 1e6:.4g} us}}"
    return state.with_settings(**{field: text})


def link_text(bandwidth: float) -> str:
    """A bandwidth as a scenario writes it."""
    return "inf GB/s" if bandwidth == math.inf else f"{bandwidth / 1e9:.4g} GB/s"
