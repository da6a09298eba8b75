"""`schedule: auto`: an order made for a plan's own times, links and memory, and judged as every plan is.

    plan --> workload --make_order--> an order         the named schedules of the same placement
                  ^                        |                        |
                  '--- less memory --- does not fit            evaluated, or simulated where something is shared
                                           |                        |
                                           '---> the fastest that fits, or else the smallest <---'

`plan.automatic` makes orders quickly by a simpler model: micro-batches alike, a message as a delay. What it makes is
judged by the full one, beside every named schedule that can be run on the same placement, so that the order that is
taken is never worse than those.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from gpipe_sim.plan.automatic import Orders, Workload, make_order
from gpipe_sim.plan.figures import figures_of
from gpipe_sim.plan.order import ActionList, Order
from gpipe_sim.plan.orders import SCHEDULES, position_of
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import DeadlockError, order_of, shape_of
from gpipe_sim.scenario.schema import BackwardOrder
from gpipe_sim.step.evaluate import evaluate, obstacle
from gpipe_sim.step.memory import StepBytes, step_bytes, sum_by_position
from gpipe_sim.step.metrics import StepMetrics, step_metrics
from gpipe_sim.step.simulate import simulate

_ATTEMPTS = 3
"""An order that turns out to take too much memory is made again with less, so often."""


def with_automatic_order(plan: Plan) -> Plan:
    """The plan with the best order that was found for it."""
    named = list(named_orders(plan))
    candidates = [replace(plan, order=order) for order in dict.fromkeys(named)]
    judged = [(candidate, metrics) for candidate in candidates if (metrics := _metrics(candidate)) is not None]
    work, starts = workload(plan), [(f"named {i}", _rows(order)) for i, order in enumerate(named)]
    for _ in range(_ATTEMPTS):
        made = replace(plan, order=_order(make_order(work, starts=starts).orders))
        metrics = _metrics(made)
        if metrics is None:
            break
        judged.append((made, metrics))
        over = _peaks(made, metrics) / plan.memory_limit
        if (over <= 1).all():
            break
        limits = np.array(work.limit_bytes) * np.where(over > 1, 0.95 / over, 1.0)
        least = [work.least_bytes(rank) for rank in range(work.num_ranks)]
        work = replace(work, limit_bytes=tuple(np.maximum(limits, least).tolist()))
    if not judged:
        raise DeadlockError("the schedule cannot finish: no order of these stages can, with senders that wait")
    return min(judged, key=lambda pair: _cost(plan, pair[1]))[0]


def _cost(plan: Plan, metrics: StepMetrics) -> tuple[float, float, float]:
    """Seconds of those that fit, then bytes; those that do not fit come after them, the smallest first."""
    peak = float(metrics.peak_memory_bytes.max())
    return (0.0 if peak <= plan.memory_limit else peak, metrics.step_time_s, peak)


def _metrics(plan: Plan) -> StepMetrics | None:
    """What the plan takes; None if it cannot finish."""
    try:
        return evaluate([plan])[0] if obstacle(plan) is None else step_metrics(simulate(plan))
    except DeadlockError:
        return None


def _peaks(plan: Plan, metrics: StepMetrics) -> np.ndarray:
    """By position."""
    return np.array([metrics.peak_memory_bytes[plan.ranks.index(rank)] for rank in plan.pipeline], dtype=float)


def named_orders(plan: Plan) -> Iterator[Order]:
    """The orders of the named schedules that can be run with the plan's placement and profile."""
    K, S, M = plan.num_ranks, plan.num_stages, plan.num_microbatches
    for schedule in SCHEDULES.values():
        v = S // K
        positions = tuple(position_of(schedule.pattern, stage, K) for stage in range(S)) if S == v * K else ()
        if positions != plan.positions or schedule.refuses(K, v, M) or (schedule.splits and not plan.profile.splits):
            continue
        orders: Sequence[BackwardOrder] = ("reverse", "fifo") if schedule.name.endswith("gpipe") else ("fifo",)
        for backward in orders:
            yield order_of(shape_of(replace(plan, schedule=schedule.name, backward=backward, order=None)))


def _rows(order: Order) -> Orders:
    return tuple(tuple(actions) for actions in order)


def _order(orders: Orders) -> Order:
    return tuple(ActionList.of(actions) for actions in orders)


# --- the simpler model ---------------------------------------------------------------------------------------------


def workload(plan: Plan) -> Workload:
    """The plan as `plan.automatic` sees it: means over micro-batches, messages as delays, memory beside the model's."""
    figures, held = figures_of([plan]), step_bytes([plan])
    again = np.where(figures.recomputed, figures.seconds["R"], 0.0)
    overhead = float(figures.overhead_s[0])

    def mean(values: np.ndarray) -> np.ndarray:
        found: np.ndarray = values[:, :, 0].mean(axis=1)
        return found

    forward, whole = mean(figures.seconds["F"]) + overhead, mean(figures.seconds["B"] + again) + overhead
    splits = plan.profile.splits
    inputs = mean(figures.seconds["I"] + again) + overhead if splits else whole
    weights = mean(figures.seconds["W"]) + overhead if splits else 0 * whole
    crosses = np.not_equal(plan.positions[:-1], plan.positions[1:])
    delays = tuple((crosses * (mean(figures.occupancy_s) + figures.latency_s[:, 0])).tolist())
    dropped = mean(held.recomputed.astype(float))
    per_microbatch = mean(held.input) + (1 - dropped) * mean(held.saved)
    return Workload(
        positions=plan.positions,
        num_microbatches=plan.num_microbatches,
        forward_s=tuple(forward.tolist()),
        inputs_s=tuple(inputs.tolist()),
        weights_s=tuple(weights.tolist()),
        may_split=splits,
        forward_delay_s=delays,
        backward_delay_s=delays,
        held_bytes=tuple(per_microbatch.tolist()),
        weights_bytes=tuple(mean(held.kept).tolist()),
        limit_bytes=tuple(_left_for_microbatches(plan, held, per_microbatch).tolist()),
        whole_s=tuple(whole.tolist()),
    )


def _left_for_microbatches(plan: Plan, held: StepBytes, per_microbatch: np.ndarray) -> np.ndarray:
    """Of each position's memory, what the model, its gradients and one action's own needs leave; enough for one of each
    stage's micro-batches in any case, since an order there must be."""
    model = (held.parameters + held.optimizer + held.gradients)[:, 0]
    model[0] += held.batch[0]
    action = np.maximum(held.backward_workspace, held.forward_workspace) + np.where(held.recomputed, held.saved, 0.0)
    most = np.zeros(plan.num_ranks)
    np.maximum.at(most, list(plan.positions), action[:, :, 0].max(axis=1) + 2 * held.output[:, :, 0].max(axis=1))
    left = plan.memory_limit - sum_by_position(model, plan.positions) - most
    return np.maximum(left, sum_by_position(per_microbatch, plan.positions))
