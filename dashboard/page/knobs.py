"""Knobs to settings and back: what each control shows of a plan, and what turning it sets."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dashboard.page import ids
from dashboard.page.state import State
from gpipe_sim.base.units import format_bandwidth, format_seconds
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.catalog import device_names
from gpipe_sim.scenario.schema import STAGES_PER_RANK

FIELDS: Mapping[str, str] = {
    ids.RANKS: "plan.stages",
    ids.STAGES_PER_RANK: "plan.stages_per_rank",
    ids.MICROBATCHES: "plan.microbatches",
    ids.BATCH: "batch",
    ids.CHECKPOINT: "plan.checkpoint",
    ids.RECOMPUTE: "plan.recompute",
    ids.SCHEDULE: "plan.schedule",
    ids.REPLICAS: "plan.replicas",
    ids.SHARD: "plan.shard",
    ids.TENSOR: "plan.tensor",
    ids.OVERLAP: "cluster.overlap",
    ids.JITTER: "cluster.jitter",
    ids.DEVICE: "cluster.device",
}
"""Control -> field of the scenario."""

LABELS: Mapping[str, str] = {
    ids.RANKS: "ranks K",
    ids.STAGES_PER_RANK: "stages per rank v",
    ids.MICROBATCHES: "micro-batches M",
    ids.BATCH: "batch N",
    ids.CHECKPOINT: "checkpoint",
    ids.RECOMPUTE: "recompute",
    ids.SCHEDULE: "schedule",
    ids.REPLICAS: "replicas D",
    ids.SHARD: "replicas divide",
    ids.TENSOR: "devices per stage T",
    ids.BANDWIDTH: "link bandwidth",
    ids.LATENCY: "link latency",
    ids.DEVICE: "device",
    ids.OVERLAP: "transfers beside compute",
    ids.JITTER: "jitter, % of each compute time",
}
"""What each control is called on the page."""

MEANINGS: Mapping[str, str] = {
    ids.RANKS: "Processes, each with a device of its own, that the layers are spread over.",
    ids.STAGES_PER_RANK: "Pieces of the model that each rank holds. Several fill the pipeline sooner, and send more.",
    ids.MICROBATCHES: "Pieces that the batch is cut into. More of them keep ranks busier, each is a smaller call.",
    ids.BATCH: "Samples of one step.",
    ids.CHECKPOINT: "For which micro-batches a stage keeps only its input, and computes the rest again when needed.",
    ids.RECOMPUTE: "Whether a recomputation waits for its gradient, or is done early, while the rank would be idle.",
    ids.SCHEDULE: "The order in which each rank does its forwards and backwards.",
    ids.REPLICAS: "Copies of the pipeline, each with its share of the batch, whose gradients are summed.",
    ids.SHARD: "What replicas divide among themselves, to save memory: nothing, the optimizer's state, or all weights.",
    ids.TENSOR: "Devices that hold each stage together, a slice of each of its layers each.",
    ids.BANDWIDTH: "Bytes per second between neighbours, in each direction.",
    ids.LATENCY: "Seconds from the end of sending to arrival.",
    ids.DEVICE: "What each rank computes on.",
    ids.OVERLAP: "Whether a rank goes on computing while its message travels.",
    ids.JITTER: "How much compute times vary: their standard deviation.",
}
"""What each control turns, for those who do not know."""

_SLOWEST, _FASTEST = 7.0, 12.0
_SAMPLES = 20


def shown(plan: Plan) -> dict[str, Any]:
    """The value of each control for this plan."""
    cluster = plan.scenario.cluster
    link = link_of(plan)
    modes = set(plan.checkpoint)
    return {
        ids.RANKS: plan.num_ranks,
        ids.STAGES_PER_RANK: plan.stages_per_rank,
        ids.MICROBATCHES: plan.num_microbatches,
        ids.BATCH: plan.scenario.batch,
        ids.CHECKPOINT: modes.pop() if len(modes) == 1 else None,
        ids.RECOMPUTE: plan.recompute,
        ids.SCHEDULE: plan.schedule,
        ids.REPLICAS: plan.replicas,
        ids.SHARD: plan.shard,
        ids.TENSOR: plan.tensor,
        ids.BANDWIDTH: min(max(math.log10(link.bandwidth), _SLOWEST), _FASTEST)
        if link.bandwidth < math.inf
        else _FASTEST,
        ids.LATENCY: min(max(math.log10(max(link.latency, 1e-9)), -7.0), -1.0),
        ids.OVERLAP: cluster.overlap,
        ids.JITTER: round(100 * cluster.jitter.cv) if cluster.jitter else 0,
        ids.DEVICE: cluster.device.name if cluster.device.name in device_names() else None,
    }


def readings(plan: Plan) -> tuple[str, str, str]:
    """What stands beside the sliders: bandwidth, latency, jitter."""
    link, jitter = link_of(plan), plan.scenario.cluster.jitter
    bandwidth = "no limit" if link.bandwidth == math.inf else format_bandwidth(link.bandwidth)
    where = " between nodes" if plan.scenario.cluster.network is not None else ""
    return bandwidth + where, format_seconds(link.latency), f"{100 * jitter.cv:.0f}" if jitter else "0"


def link_of(plan: Plan) -> Any:
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
    if knob == ids.SCHEDULE and value == "naive":
        changes["plan__microbatches"] = "1"
        if plan is not None and plan.schedule != "naive":
            state = replace(state, before_naive=str(plan.num_microbatches))
    elif knob == ids.SCHEDULE and state.before_naive:
        changes["plan__microbatches"] = state.before_naive
        state = replace(state, before_naive="")
    if knob in (ids.RANKS, ids.STAGES_PER_RANK, ids.SCHEDULE):
        changes |= _stages(state, plan, knob, value)
    return state.with_settings(**changes)


def _stages(state: State, plan: Plan | None, knob: str, value: Any) -> dict[str, str | None]:
    """Settings that keep S = K v: the stages follow when ranks, stages per rank or the schedule are chosen anew.

    A schedule that has its own number of stages on each rank sets it, one that needs several sets two; K stays.
    """
    K, v = (plan.num_ranks, plan.stages_per_rank) if plan is not None else (None, 1)
    if knob == ids.SCHEDULE:
        own = STAGES_PER_RANK.get(value)
        if value in STAGES_PER_RANK and own is None and plan is not None and v == 1 and _has_layers(plan, 2):
            own = 2  # with one stage on each rank it would be the schedule that it interleaves
        if own is None or own == v:
            return {"plan__placement": _forgotten(plan and plan.scenario.plan.placement)} if v > 1 else {}
        changes: dict[str, str | None] = {"plan__stages_per_rank": str(own)}
        if K is not None:
            changes["plan__stages"] = str(K * own)
    elif knob == ids.RANKS:
        changes = {"plan__stages": str(value * v)}
    else:
        changes = {"plan__stages": str(K * value)} if K is not None else {}
    # What was made for another number of stages goes with it.
    changes["plan__balance"] = _forgotten(plan and plan.scenario.plan.balance)
    changes["plan__placement"] = _forgotten(plan and plan.scenario.plan.placement)
    if state.settings.get("plan.checkpoint", "").startswith("{"):
        changes["plan__checkpoint"] = None
    return changes


def _has_layers(plan: Plan, each: int) -> bool:
    """Whether there is a layer for every stage, with so many stages on each rank."""
    return plan.num_ranks * each <= plan.profile.num_layers


def _forgotten(given: object) -> str | None:
    """A setting that overrules what a file gives; none is needed where it gives nothing."""
    return "auto" if given else None


def _with_link(state: State, plan: Plan | None, knob: str, power: float) -> State:
    bandwidth, latency = 1e9, 1e-5
    if plan is not None:
        link = link_of(plan)
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
