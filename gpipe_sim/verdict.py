"""What to change next: one sentence that names what limits a plan."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gpipe_sim.explain import LABELS, PARTS
from gpipe_sim.metrics import bubble_ideal, step_time_s
from gpipe_sim.plan import Plan
from gpipe_sim.scenario import Checkpoint
from gpipe_sim.simulate import simulate
from gpipe_sim.step import Step
from gpipe_sim.units import format_bandwidth, format_bytes, format_seconds


def verdict(plan: Plan, step: Step, breakdown: Mapping[str, float]) -> str:
    """What limits the plan, how much of the step that is, and what to change next, in one sentence."""
    if over := _overflow(plan, step):
        return over
    total = sum(breakdown.values())
    part = max((part for part in PARTS if part != "compute"), key=lambda part: breakdown[part])
    share = breakdown[part] / total
    if share < 0.05:
        useful = breakdown["compute"] / total
        return f"What limits this plan is useful compute, {useful:.0%} of the step: no other cause takes 5 %."
    return f"What limits this plan is {LABELS[part]}, {share:.0%} of the step: {_advice(part, plan)}."


def _overflow(plan: Plan, step: Step) -> str | None:
    limit = plan.memory_limit
    curve, timeline = max(zip(step.memory, step.ranks, strict=True), key=lambda pair: pair[0].peak_bytes)
    if curve.peak_bytes <= limit:
        return None
    stage, at_peak = timeline.stage, curve.at_peak()
    largest = max(at_peak, key=lambda part: at_peak[part])
    if largest in ("parameters", "optimizer", "gradients"):
        advice = "more stages would leave fewer parameters on each"
    elif plan.checkpoint[stage] == "never":
        advice = "checkpointing this stage would hold one micro-batch's activations instead of all"
    elif plan.num_microbatches < plan.scenario.batch:
        advice = "more, smaller micro-batches would shrink what is held at a time"
    else:
        advice = "more stages would leave fewer layers on each"
    return (
        f"Does not fit: stage {stage} needs {format_bytes(curve.peak_bytes)} of {format_bytes(limit)}, "
        f"most of it {largest} ({format_bytes(at_peak[largest])}); {advice}."
    )


def _advice(part: str, plan: Plan) -> str:
    K, M, N = plan.num_stages, plan.num_microbatches, plan.scenario.batch
    if part == "fill_drain":
        more = min(N, max(4 * K, 2 * M))
        if plan.schedule == "naive":
            return f"gpipe with {min(N, 4 * K)} micro-batches would overlap the stages"
        if more <= M:
            return (
                f"every micro-batch already has a single sample, so a larger batch than {N} or fewer stages would help"
            )
        now, then = (bubble_ideal(plan.schedule, K, count) for count in (M, more))
        return f"{more} micro-batches would bring the ideal bubble from {now:.1%} to {then:.1%}"
    if part == "recompute":
        return _recompute_advice(plan)
    if part == "imbalance":
        busy = plan.forward_s().sum(axis=1) + plan.backward_s().sum(axis=1)
        slowest = int(np.argmax(busy))
        if plan.slowdown(slowest) > 1:
            return (
                f"rank {plan.placement[slowest]} is a straggler, {plan.slowdown(slowest):g} times slower than its peers"
            )
        names = plan.profile.names[plan.stages[slowest]]
        layers = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        cut = "another number of stages" if plan.scenario.plan.balance is None else "balance: auto"
        return f"stage {slowest} ({layers}) is the slowest, and {cut} may even it out"
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


def _recompute_advice(plan: Plan) -> str:
    """Price the plan without recomputation rather than guess whether it would fit."""
    never: Checkpoint = "never"
    without = replace(plan, checkpoint=(never,) * plan.num_stages)
    step = simulate(without)
    peak = max(curve.peak_bytes for curve in step.memory)
    fits = "fits in" if peak <= plan.memory_limit else "does not fit in"
    return (
        f"without it the step would take {format_seconds(step_time_s(step))} and need {format_bytes(peak)}, "
        f"which {fits} {format_bytes(plan.memory_limit)}"
    )


def _communication_advice(plan: Plan) -> str:
    """The edge whose messages take longest, and the bandwidth at which they would hide behind the slowest stage."""
    sizes = plan.message_bytes()[:, 0]
    seconds = [size / plan.link(stage).bandwidth for stage, size in enumerate(sizes)]
    stage = int(np.argmax(seconds))
    slowest = float(plan.forward_s()[:, 0].max())
    if not plan.scenario.cluster.overlap:
        return "senders wait for delivery, and overlapped transfers would hide most of it"
    if seconds[stage] <= slowest and plan.schedule == "1f1b":
        return "1f1b waits for messages there and back in its steady state, and gpipe or faster links would wait less"
    if seconds[stage] <= slowest:
        return "messages hide behind compute once the pipeline is full, and what remains is the way through its stages"
    needed = format_bandwidth(sizes[stage] / slowest)
    return (
        f"a message from stage {stage} to {stage + 1} takes {format_seconds(seconds[stage])}, longer than the slowest "
        f"forward ({format_seconds(slowest)}), and {needed} would hide it"
    )
