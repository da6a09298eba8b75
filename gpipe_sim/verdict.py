"""What to change next: one sentence that names what limits a plan.

Advice that could be wrong is tried out first: a change is recommended with the figure that simulating it gave.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from gpipe_sim.explain import LABELS, PARTS
from gpipe_sim.metrics import bubble_ideal, step_time_s
from gpipe_sim.plan import Plan, make_plan
from gpipe_sim.scenario import Checkpoint
from gpipe_sim.simulate import simulate
from gpipe_sim.step import Step
from gpipe_sim.units import format_bandwidth, format_bytes, format_seconds

_LARGE = 2**15
"""Micro-batches on stages from which on a simulation takes noticeably long."""
_NEVER: Checkpoint = "never"
_ALWAYS: Checkpoint = "always"


def verdict(plan: Plan, fullest: Step, breakdown: Mapping[str, float]) -> str:
    """What limits the plan, how much of the step that is, and what to change next, in one sentence.

    Memory, if the plan does not fit; else the largest part of the waterfall beside useful compute, if it takes 5 % of
    the step or more; else useful compute itself.

    `fullest` is the step that takes most memory: the only one or, with jitter, one of the samples.
    """
    if over := _overflow(plan, fullest):
        return over
    total = sum(breakdown.values())
    part = max((part for part in PARTS if part != "compute"), key=lambda part: breakdown[part])
    share = breakdown[part] / total
    if share < 0.05:
        useful = breakdown["compute"] / total
        return f"What limits this plan is useful compute, {useful:.0%} of the step: no other cause takes 5 %."
    return f"What limits this plan is {LABELS[part]}, {share:.0%} of the step: {_advice(part, plan)}."


# --- memory --------------------------------------------------------------------------------------------------------


def _overflow(plan: Plan, step: Step) -> str | None:
    limit = plan.memory_limit
    curve, timeline = max(zip(step.memory, step.ranks, strict=True), key=lambda pair: pair[0].peak_bytes)
    if curve.peak_bytes <= limit:
        return None
    at_peak = curve.at_peak()
    largest = max(at_peak, key=lambda part: at_peak[part])
    return (
        f"Does not fit: stage {timeline.stage} needs {format_bytes(curve.peak_bytes)} of {format_bytes(limit)}, "
        f"the largest part {largest} ({format_bytes(at_peak[largest])}); {_remedy(plan)}."
    )


def _remedy(plan: Plan) -> str:
    """The first change that fits, of those that cost least, or the best of them and how far it is from fitting."""
    best, least = "nothing smaller was found", float("inf")
    for change, changed in _smaller_plans(plan):
        peak = max(curve.peak_bytes for curve in simulate(changed).memory)
        if peak <= plan.memory_limit:
            return f"{change} would need {format_bytes(peak)} and fit"
        if peak < least:
            best, least = f"even {change} would need {format_bytes(peak)}", peak
    return best


def _smaller_plans(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """More recomputation, then smaller micro-batches, then more stages, each on top of the one before."""
    always = (_ALWAYS,) * plan.num_stages
    checkpointed = replace(plan, checkpoint=always)
    words = []
    if plan.checkpoint != always:
        words.append("checkpoint: always")
        yield words[0], checkpointed
    spec, batch = plan.scenario.plan, plan.scenario.batch
    finer = [M for M in _divisors(batch) if M > plan.num_microbatches] if plan.schedule != "naive" else []
    for M in finer:
        yield " and ".join([*words, f"{M} micro-batches"]), replace(checkpointed, num_microbatches=M)
    if finer:
        words.append(f"{finer[-1]} micro-batches")
    most = plan.scenario.cluster.num_devices or 4 * plan.num_stages
    # Each try of a large plan takes long: then only the double, the triple ...
    step = 1 if plan.num_stages * plan.num_microbatches < _LARGE else plan.num_stages
    for K in range(plan.num_stages + step, min(most, plan.profile.num_layers, 4 * plan.num_stages) + 1, step):
        update = {"stages": K, "microbatches": max([plan.num_microbatches, *finer]), "checkpoint": _ALWAYS}
        changed = spec.model_copy(update=update | {"balance": None, "placement": None})
        yield " and ".join([*words, f"{K} stages"]), make_plan(replace(plan.scenario, plan=changed))


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


# --- time ----------------------------------------------------------------------------------------------------------


def _advice(part: str, plan: Plan) -> str:
    if part == "fill_drain":
        return _fill_drain_advice(plan)
    if part == "recompute":
        return _recompute_advice(plan)
    if part == "imbalance":
        return _imbalance_advice(plan)
    if part == "communication":
        return _communication_advice(plan)
    if part == "contention":
        if plan.crowded_nodes:
            return "ranks share cores, so fewer ranks per node or more cores would help"
        return "several stages send through one NIC, and a placement with neighbours on one node would avoid it"
    return {
        "small_batches": f"micro-batches of {plan.sizes[-1]} waste the device, and fewer, larger ones would waste less",
        "overhead": "the engine's own time per action weighs, and fewer, larger micro-batches would spread it",
        "jitter": "slow moments of one rank hold up the others, and more micro-batches or steadier devices would help",
        "update": "the optimizer step is long, and more stages would divide it",
    }[part]


def _fill_drain_advice(plan: Plan) -> str:
    K, M, N = plan.num_stages, plan.num_microbatches, plan.scenario.batch
    more = next((d for d in _divisors(N) if d >= max(4 * K, 2 * M)), N)
    if more <= M:
        return f"every micro-batch already has a single sample, so a batch larger than {N} or fewer stages would help"
    if plan.schedule == "naive":
        return f"gpipe with {more} micro-batches would let the stages work at the same time"
    now, then = (bubble_ideal(plan.schedule, K, count) for count in (M, more))
    advice = f"{more} micro-batches would bring the ideal bubble from {now:.1%} to {then:.1%}"
    if plan.sizes[0] != plan.sizes[-1]:
        advice += f", and {N} samples would divide evenly (now {plan.sizes[0]} and {plan.sizes[-1]} in a micro-batch)"
    return advice


def _recompute_advice(plan: Plan) -> str:
    """Price the plan without recomputation rather than guess whether it would fit."""
    step = simulate(replace(plan, checkpoint=(_NEVER,) * plan.num_stages))
    peak = max(curve.peak_bytes for curve in step.memory)
    fits = "fits in" if peak <= plan.memory_limit else "does not fit in"
    return (
        f"without it the step would take {format_seconds(step_time_s(step))} and need {format_bytes(peak)}, "
        f"which {fits} {format_bytes(plan.memory_limit)}"
    )


def _imbalance_advice(plan: Plan) -> str:
    slowest = int(np.argmax(plan.busy_s))
    slowdowns = [plan.slowdown(stage) for stage in range(plan.num_stages)]
    if slowdowns[slowest] > min(slowdowns):
        times = slowdowns[slowest] / min(slowdowns)
        return f"rank {plan.placement[slowest]} is a straggler, {times:g} times slower than the fastest"
    names = plan.profile.names[plan.stages[slowest]]
    if len(names) == 1:
        return f"stage {slowest} is the slowest and a single layer ({names[0]}), which no cut can make smaller"
    cut = "another number of stages" if plan.scenario.plan.balance is None else "balance: auto"
    return f"stage {slowest} ({names[0]} to {names[-1]}) is the slowest, and {cut} may even it out"


def _communication_advice(plan: Plan) -> str:
    """The edge whose messages take longest, and the bandwidth at which they would hide behind the slowest stage."""
    sizes = plan.message_bytes[:, 0]
    seconds = [size / plan.link(stage).bandwidth for stage, size in enumerate(sizes)]
    stage = int(np.argmax(seconds))
    slowest = float(plan.forward_s[:, 0].max())
    if not plan.scenario.cluster.overlap:
        return "senders wait for delivery, and overlapped transfers would hide most of it"
    if seconds[stage] > slowest > 0:
        needed = format_bandwidth(sizes[stage] / slowest)
        return (
            f"a message from stage {stage} to {stage + 1} takes {format_seconds(seconds[stage])}, longer than the "
            f"slowest forward ({format_seconds(slowest)}), and {needed} would hide it"
        )
    if plan.schedule == "1f1b":
        return "1f1b waits for messages there and back in its steady state, and gpipe or faster links would wait less"
    return "messages hide behind compute once the pipeline is full, and what remains is the way through its stages"
