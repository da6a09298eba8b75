"""What to change next: one sentence that names what limits a plan.

Advice that could be wrong is tried out first: a change is recommended with the figure that simulating it gave.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import get_args

import numpy as np

from gpipe_sim.base.units import format_bandwidth, format_bytes, format_seconds
from gpipe_sim.explain.waterfall import LABELS, PARTS
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.figures import figures_of, rank_work_s
from gpipe_sim.plan.orders import SCHEDULES
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import Checkpoint, Shard, is_order_file
from gpipe_sim.step.metrics import bubble_ideal, step_time_s
from gpipe_sim.step.simulate import simulate
from gpipe_sim.step.step import RankTimeline, Step, stages_text

_LARGE = 2**15
"""Micro-batches on stages from which on a simulation takes noticeably long."""
_WORTH_A_CHANGE = 0.02
"""Of the step: a schedule that gains less is not recommended."""
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
        f"Does not fit: {_holder(timeline)} needs "
        f"{format_bytes(curve.peak_bytes)} of {format_bytes(limit)}, "
        f"the largest part {largest} ({format_bytes(at_peak[largest])}); {_remedy(plan)}."
    )


def _holder(timeline: RankTimeline) -> str:
    """``stage 2``, or ``rank 2 (stages 2 and 6)``."""
    stages = stages_text(timeline.stages)
    return stages if len(timeline.stages) == 1 else f"rank {timeline.rank} ({stages})"


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
    """More recomputation, then smaller micro-batches, then more ranks, each on top of the one before.

    An order from a file is made for its own numbers of stages and micro-batches: there, more recomputation only.
    """
    always = (_ALWAYS,) * plan.num_stages
    checkpointed = replace(plan, checkpoint=always)
    words = []
    if plan.replicas > 1 and plan.shard == "none":
        yield "shard: optimizer", replace(plan, shard="optimizer")
    if plan.checkpoint != always:
        words.append("checkpoint: always")
        yield words[0], checkpointed
    if is_order_file(plan.schedule):
        return
    batch, v = plan.samples, plan.stages_per_rank
    finer = [M for M in _divisors(batch) if M > plan.num_microbatches] if plan.schedule != "naive" else []
    for M in finer if plan.order is None else finer[:1]:  # it takes a while to make an order
        changed = _changed(plan, num_microbatches=M, checkpoint=_ALWAYS) if plan.order else None
        yield " and ".join([*words, f"{M} micro-batches"]), changed or replace(checkpointed, num_microbatches=M)
    if plan.order is not None:
        return
    if finer:
        words.append(f"{finer[-1]} micro-batches")
    most = (plan.scenario.cluster.num_devices or 4 * plan.world) // (plan.replicas * plan.tensor)
    # Each try of a large plan takes long: then only the double, the triple ...
    step = 1 if plan.num_stages * plan.num_microbatches < _LARGE else plan.num_ranks
    for K in range(plan.num_ranks + step, min(most, plan.profile.num_layers // v, 4 * plan.num_ranks) + 1, step):
        M = max([plan.num_microbatches, *finer])
        changed = _changed(plan, num_ranks=K, num_microbatches=M, checkpoint=_ALWAYS)
        yield " and ".join([*words, f"{K} stages" if v == 1 else f"{K} ranks"]), changed


def _changed(
    plan: Plan,
    *,
    num_ranks: int | None = None,
    stages_per_rank: int | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    checkpoint: Checkpoint,
) -> Plan:
    """The plan with other choices, its layers cut and its stages placed anew."""
    v = stages_per_rank or plan.stages_per_rank
    update = {
        "stages": (num_ranks or plan.num_ranks) * v,
        "stages_per_rank": v,
        "microbatches": num_microbatches or plan.num_microbatches,
        "schedule": schedule or plan.schedule,
        "checkpoint": checkpoint,
        "recompute": plan.recompute,
        "window": plan.window,
        "balance": None,
        "placement": None,
        "replicas": plan.replicas,
        "tensor": plan.tensor,
        "shard": plan.shard,
    }
    return make_plan(replace(plan.scenario, plan=plan.scenario.plan.model_copy(update=update)))


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
    if part == "collectives":
        return _collectives_advice(plan)
    if part == "tensor":
        return _tensor_advice(plan)
    if part == "contention":
        if plan.crowded_nodes:
            return "ranks share cores, so fewer ranks per node or more cores would help"
        return "several stages send through one NIC, and a placement with neighbours on one node would avoid it"
    return {
        "small_batches": f"micro-batches of {plan.sizes[-1]} waste the device, and fewer, larger ones would waste less",
        "overhead": "the engine's own time per action weighs, and fewer, larger micro-batches would spread it",
        "jitter": "slow moments of one rank hold up the others, and more micro-batches or steadier devices would help",
        "update": "the optimizer step is long, and more ranks would divide it",
    }[part]


def _fill_drain_advice(plan: Plan) -> str:
    advice = [_more_microbatches(plan), _better_schedule(plan)]
    return "; ".join(filter(None, advice)) or "another order of the same actions may wait less, as schedule: auto finds"


def _more_microbatches(plan: Plan) -> str | None:
    K, v, M, N = plan.num_ranks, plan.stages_per_rank, plan.num_microbatches, plan.samples
    if is_order_file(plan.schedule):  # which has its own number of them
        return None
    more = next((d for d in _divisors(N) if d >= max(4 * K, 2 * M)), N)
    if more <= M:
        return f"every micro-batch already has a single sample, so a batch larger than {N} or fewer ranks would help"
    if plan.schedule == "naive":
        return f"gpipe with {more} micro-batches would let the stages work at the same time"
    if plan.order is not None:
        return f"{more} micro-batches would fill the pipeline for longer"
    now, then = (bubble_ideal(plan.schedule, K, count, v) for count in (M, more))
    advice = f"{more} micro-batches would bring the ideal bubble from {now:.1%} to {then:.1%}"
    if plan.sizes[0] != plan.sizes[-1]:
        advice += f", and {N} samples would divide evenly (now {plan.sizes[0]} and {plan.sizes[-1]} in a micro-batch)"
    return advice


def _better_schedule(plan: Plan) -> str | None:
    """The fastest of the schedules that have a smaller bubble, if it fits and gains enough on the same ranks.

    With jitter, steps vary by more than such a gain, and nothing is said.
    """
    K, M = plan.num_ranks, plan.num_microbatches
    modes = set(plan.checkpoint)
    if plan.num_stages * M >= _LARGE or plan.schedule == "naive" or plan.scenario.cluster.jitter or len(modes) > 1:
        return None
    checkpoint, now_s = modes.pop(), step_time_s(simulate(plan, memory=False))
    best, best_s = None, (1 - _WORTH_A_CHANGE) * now_s
    for name, v in (("zb_h1", 1), ("interleaved_1f1b", 2), ("zb_v", 2)):
        schedule = SCHEDULES[name]
        cannot_split = not plan.profile.splits or plan.recompute_unit != "stage"
        if K * v > plan.profile.num_layers or (schedule.splits and cannot_split):
            continue
        ideal = bubble_ideal(name, K, M, v)
        if plan.order is None and ideal >= bubble_ideal(plan.schedule, K, M, plan.stages_per_rank):
            continue
        step = simulate(_changed(plan, stages_per_rank=v, schedule=name, checkpoint=checkpoint))
        fits = max(curve.peak_bytes for curve in step.memory) <= plan.memory_limit
        if fits and step_time_s(step) < best_s:
            best, best_s = f"{name} with {v} stages per rank" if v > 1 else name, step_time_s(step)
    return f"{best} would take {format_seconds(best_s)} instead of {format_seconds(now_s)}" if best else None


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
    position = int(np.argmax(rank_work_s(plan)))
    rank = plan.pipeline[position]
    replicas = range(plan.simulated_replicas)
    slow = {
        plan.global_rank(other, replica): plan.rank_slowdown(other, replica)
        for other in plan.pipeline
        for replica in replicas
    }
    own = max((plan.global_rank(rank, replica) for replica in replicas), key=lambda number: slow[number])
    if slow[own] > min(slow.values()):
        times = slow[own] / min(slow.values())
        return f"rank {own} is a straggler, {times:g} times slower than the fastest"
    held = plan.stages_of(rank)
    who = stages_text(held) if len(held) == 1 else f"rank {rank} ({stages_text(held)})"
    names = [name for stage in held for name in plan.profile.names[plan.stages[stage]]]
    if len(names) == 1:
        return f"{who} is the slowest and a single layer ({names[0]}), which no cut can make smaller"
    what = who if len(held) > 1 else f"{who} ({names[0]} to {names[-1]})"
    cut = "another number of stages" if plan.scenario.plan.balance is None else "balance: auto"
    return f"{what} is the slowest, and {cut} may even it out"


def _collectives_advice(plan: Plan) -> str:
    """The longest sum, and the change of shard that would be faster, if there is one."""
    now_s = step_time_s(simulate(plan, memory=False))
    best, best_s = None, (1 - _WORTH_A_CHANGE) * now_s
    for shard in get_args(Shard):
        changed = step_time_s(simulate(replace(plan, shard=shard), memory=False))
        if changed < best_s:
            best, best_s = f"shard: {shard} would take {format_seconds(changed)}", changed
    seconds = figures_of([plan]).collective_s["S"][:, 0]
    stage = int(np.argmax(seconds))
    told = f"{plan.replicas} replicas take {format_seconds(seconds[stage])} to sum the gradients of stage {stage}"
    return f"{told}, and {best or 'fewer replicas, or a larger batch for each step, would spread it'}"


def _tensor_advice(plan: Plan) -> str:
    """Where the groups exchange, and what would let them do it less, or faster."""
    nodes = plan.tensor // plan.tensors_per_node
    if nodes > 1:
        return (
            f"groups of {plan.tensor} devices span {nodes} nodes, and groups within a node would stay off the network"
        )
    link = format_bandwidth(plan.inside_link.bandwidth)
    return (
        f"groups of {plan.tensor} exchange every layer at {link}, and smaller groups with more stages would do it less"
    )


def _communication_advice(plan: Plan) -> str:
    """The edge whose messages take longest, and the bandwidth at which they would hide behind the slowest stage."""
    sizes = plan.message_bytes[:, 0] * np.not_equal(plan.placement[1:], plan.placement[:-1])
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
    if plan.stages_per_rank > 1:
        crossings = int(np.count_nonzero(sizes))
        more = f"with {plan.stages_per_rank} stages per rank a micro-batch crosses {crossings} edges each way"
        return f"{more}, and fewer stages per rank or faster links would wait less"
    if plan.schedule not in ("naive", "gpipe"):
        name = "this order" if plan.order is not None else plan.schedule
        return (
            f"{name} waits for messages there and back in its steady state, and gpipe or faster links would wait less"
        )
    return "messages hide behind compute once the pipeline is full, and what remains is the way through its stages"
