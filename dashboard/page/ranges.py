"""What a step takes over the range of each knob: the curve that is drawn beneath it.

knob          the values that it may take, each with the step time of the plan on screen turned to it
^
|  x          a value that makes no plan is left out, one that does not fit is told apart
|    o
|      o o o
+-----------> its range
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from dashboard.jobs.tasks import Task
from dashboard.page import ids, knobs
from dashboard.page.state import Library, State, current, points, settled
from gpipe_sim.base.files import InputError
from gpipe_sim.base.units import format_bandwidth, format_seconds
from gpipe_sim.explain.predict import Prediction, predict_all
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.orders import SCHEDULES
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import DeadlockError
from gpipe_sim.scenario.catalog import device_names
from gpipe_sim.scenario.schema import Checkpoint, Recompute, ScheduleName, Shard

SLIDERS: Mapping[str, tuple[float, float]] = {ids.BANDWIDTH: (7, 12), ids.LATENCY: (-7, -1), ids.JITTER: (0, 30)}
"""Knobs with ends; those of links are powers of ten."""
_LARGE = 2**13
"""Stages times micro-batches, and times samples of jitter, from which on a value is not tried."""


@dataclass(frozen=True)
class Point:
    """One value of a knob."""

    value: Any
    step_time_s: float
    fits: bool


def ranges(state: State, library: Library, task: Task) -> Iterator[tuple[str, list[Point]]]:
    """The curve of one knob after the other; the task may end it."""
    here = current(state, library)
    exact = settled(state, library)
    for knob, values in _values(here.plan):
        yield knob, _curve(exact, here, library, knob, values, task)


def _values(plan: Plan) -> Iterator[tuple[str, Sequence[Any]]]:
    K, M, N, v, D, T = (
        plan.num_ranks,
        plan.num_microbatches,
        plan.scenario.batch,
        plan.stages_per_rank,
        plan.replicas,
        plan.tensor,
    )
    num_layers, num_devices = plan.profile.num_layers, plan.scenario.cluster.num_devices
    fixed = plan.order is not None  # an order of its own is made for its K, v and M
    if not fixed:
        yield ids.RANKS, _powers(min((num_devices or 16 * D * T) // (D * T), num_layers // v), K)
        yield ids.MICROBATCHES, [1] if plan.schedule == "naive" else _powers(min(N // D, 1024), M)
        schedule = SCHEDULES.get(plan.schedule)
        if schedule is not None and schedule.stages_per_rank is None:
            yield ids.STAGES_PER_RANK, _powers(min(8, num_layers // K), v)
    yield ids.BATCH, sorted({max(1, round(N * factor)) for factor in (0.25, 0.5, 1, 2, 4)})
    yield ids.SCHEDULE, get_args(ScheduleName)
    yield ids.CHECKPOINT, get_args(Checkpoint)
    yield ids.RECOMPUTE, get_args(Recompute)
    yield ids.REPLICAS, _powers(max(1, (num_devices or 8 * K) // (K * T)), D)
    yield ids.SHARD, get_args(Shard)
    yield ids.TENSOR, _powers(max(1, (num_devices or 8 * K) // (K * D)), T)
    yield ids.BANDWIDTH, [7 + n / 2 for n in range(11)]
    yield ids.LATENCY, [-7 + n / 2 for n in range(13)]
    yield ids.DEVICE, list(device_names())
    yield ids.OVERLAP, [True, False]
    yield ids.JITTER, [0, 10, 20, 30]


def _powers(most: int, also: int) -> list[int]:
    return sorted({*(2**n for n in range(max(most, 1).bit_length())), also})


def _curve(
    state: State, here: Prediction, library: Library, knob: str, values: Sequence[Any], task: Task
) -> list[Point]:
    own = knobs.shown(here.plan)[knob]
    plans: dict[Any, Plan] = {}
    for value in values:
        task.advance(0)
        if value != own and (plan := _plan(knobs.turned(state, here.plan, knob, value), library)) is not None:
            plans[value] = plan
    found = dict(zip(plans, _predicted(list(plans.values()), task), strict=True))
    if own is not None:
        found[own] = here
    in_order = [value for value in values if value in found]
    order = sorted(found) if all(isinstance(value, int | float) for value in found) else in_order
    return [Point(value, one.step_time_s, one.fits) for value in order if (one := found[value]) is not None]


def _plan(state: State, library: Library) -> Plan | None:
    """None where the value makes no plan, or one that takes noticeably long."""
    try:
        (point,) = points(state, library)
        cells = (point.plan.num_stages or 1) * (point.plan.num_microbatches or 1)
        jitter = point.cluster.jitter
        return None if cells * (jitter.samples if jitter else 1) > _LARGE else make_plan(point)
    except (InputError, DeadlockError):
        return None


def _predicted(plans: Sequence[Plan], task: Task) -> list[Prediction | None]:
    try:
        return list(predict_all(plans, advance=lambda _: task.advance(0)))
    except DeadlockError:  # of one of them: then each by itself
        return [_alone(plan) for plan in plans]


def _alone(plan: Plan) -> Prediction | None:
    try:
        return next(predict_all([plan]))
    except DeadlockError:
        return None


def drawing(knob: str, curve: Sequence[Point], now: Any) -> dict[str, Any]:
    """A curve as `knobs.js` draws it, with what a screen reader says of it."""
    told = ", ".join(
        f"{_said(knob, point.value)}: {format_seconds(point.step_time_s)}{'' if point.fits else ', does not fit'}"
        for point in curve
    )
    return {
        "label": f"step time over {knobs.LABELS[knob]}: {told}",
        "range": SLIDERS.get(knob),
        "now": now,
        "values": [point.value for point in curve],
        "said": [_said(knob, point.value) for point in curve],
        "seconds": [point.step_time_s for point in curve],
        "times": [format_seconds(point.step_time_s) for point in curve],
        "fits": [point.fits for point in curve],
    }


def _said(knob: str, value: Any) -> str:
    if knob == ids.BANDWIDTH:
        return format_bandwidth(10**value)
    if knob == ids.LATENCY:
        return format_seconds(10**value)
    if knob == ids.OVERLAP:
        return "yes" if value else "no"
    return f"{value} %" if knob == ids.JITTER else str(value)
