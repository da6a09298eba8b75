"""What to change next: single changes of the plan on screen, each predicted, and those that help.

Nothing is advised that was not tried: a move comes with the step time and the memory that predicting it gave. Where no
move helps, the page says so, and what would have to change outside the plan.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dashboard.jobs.tasks import Task
from dashboard.page import ids, knobs
from dashboard.page.state import Library, State, current, figures_of, points, settled
from gpipe_sim.base.files import InputError
from gpipe_sim.base.units import format_bandwidth, format_bytes, format_seconds
from gpipe_sim.explain.predict import Prediction, predict_all
from gpipe_sim.explain.waterfall import LABELS, PARTS
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.orders import SCHEDULES
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import DeadlockError

WORTH = 0.01
"""Of the step time: a move that gains less is not shown."""
MOST = 3
"""Moves that are shown."""
_LARGE = 2**15
"""Stages times micro-batches from which on a prediction takes noticeably long: such plans are not tried."""
_FASTER_LINK = 10
"""Times the bandwidth, to tell whether a link matters."""

_MODES = {
    "never": "Recompute nothing",
    "except_last": "Recompute all but the last micro-batch",
    "always": "Recompute every micro-batch",
}


@dataclass(frozen=True)
class Move:
    """One change, and what it leads to."""

    words: str
    kind: str
    """The knob that it turns: of each, the best is shown."""
    state: State
    prediction: Prediction


@dataclass(frozen=True)
class Next:
    """What there is to say."""

    here: Prediction
    moves: Sequence[Move]
    """Those that help most, best first."""
    tried: int
    elsewhere: Sequence[str]
    """Where no move helps: what would, outside the plan."""


def what_next(state: State, library: Library, task: Task) -> Next:
    """Try every single change of the plan on screen; the task is told how far it is, and may end it."""
    here = current(state, library)
    exact = settled(state, library)
    tries = list(_tries(exact, here.plan))
    task.total = len(tries)
    found = []
    for words, kind, changed in tries:
        task.advance()
        if (prediction := _predicted(changed, library)) is not None:
            found.append(Move(words, kind, changed, prediction))
    moves = _helpful(here, found)
    return Next(figures_of(here), moves, len(found), [] if moves else list(_elsewhere(here, exact, library, found)))


def _predicted(state: State, library: Library) -> Prediction | None:
    """None where the change makes no plan."""
    try:
        (point,) = points(state, library)
        if (point.plan.num_stages or 1) * (point.plan.num_microbatches or 1) > _LARGE:
            return None
        return next(predict_all([make_plan(point)]))
    except (InputError, DeadlockError):
        return None


def _tries(state: State, plan: Plan) -> Iterator[tuple[str, str, State]]:
    """Each change in words, the knob that it turns, and the state that it leads to."""
    K, M, N, v = plan.num_ranks, plan.num_microbatches, plan.scenario.batch, plan.stages_per_rank
    for mode, words in _MODES.items():
        if set(plan.checkpoint) != {mode}:
            yield words, ids.CHECKPOINT, knobs.turned(state, plan, ids.CHECKPOINT, mode)
    if plan.recompute == "on_demand" and set(plan.checkpoint) != {"never"}:
        yield "Recompute early, while waiting", ids.RECOMPUTE, knobs.turned(state, plan, ids.RECOMPUTE, "early")
    own_order = plan.order is not None
    if plan.schedule != "naive" and not own_order:
        for other in sorted({_near(N, M * factor) for factor in (0.25, 0.5, 2, 4)} - {M}):
            words = f"{other} micro-batches instead of {M}"
            yield words, ids.MICROBATCHES, knobs.turned(state, plan, ids.MICROBATCHES, other)
    for name, schedule in SCHEDULES.items():
        if name in (plan.schedule, "naive") or (schedule.splits and not plan.profile.splits):
            continue
        changed = knobs.turned(state, plan, ids.SCHEDULE, name)
        each = schedule.stages_per_rank or max(2, v)
        if schedule.stages_per_rank is None and v == 1:
            changed = changed.with_settings(plan__stages=str(K * each), plan__stages_per_rank=str(each))
        if plan.schedule == "naive" and N > 1:
            changed = changed.with_settings(plan__microbatches=str(state.before_naive or _near(N, 4 * K)))
        several = f" with {each} stages on each rank" if each > 1 and each != v else ""
        yield f"{name}{several} instead of {plan.schedule}", ids.SCHEDULE, changed
    if own_order:
        return
    most = plan.scenario.cluster.num_devices
    for other in sorted({K // 2, K - 1, K + 1, 2 * K} - {0, K}):
        if other * v <= plan.profile.num_layers and (most is None or other <= most):
            yield f"{other} ranks instead of {K}", ids.RANKS, knobs.turned(state, plan, ids.RANKS, other)
    if plan.scenario.plan.balance:
        yield "Cut the layers evenly by time", "balance", state.with_settings(plan__balance="auto")


def _near(batch: int, wanted: float) -> int:
    """The divisor of the batch that is nearest to a number, by their ratio."""
    divisors = {d for small in range(1, math.isqrt(batch) + 1) if batch % small == 0 for d in (small, batch // small)}
    return min(divisors, key=lambda d: abs(math.log(d / max(wanted, 0.5))))


def _helpful(here: Prediction, found: Sequence[Move]) -> list[Move]:
    """The best of each kind that fit and are faster; where this plan does not fit, that fit, or else are smaller."""
    fitting = [move for move in found if move.prediction.fits]
    if here.fits:
        better = [move for move in fitting if move.prediction.step_time_s < (1 - WORTH) * here.step_time_s]
    elif fitting:
        better = fitting
    else:
        better = sorted((move for move in found if _peak(move.prediction) < _peak(here)), key=_by_memory)[:1]
    best: dict[str, Move] = {}
    for move in sorted(better, key=lambda move: move.prediction.step_time_s):
        best.setdefault(move.kind, move)
    return list(best.values())[:MOST]


def _by_memory(move: Move) -> int:
    return _peak(move.prediction)


def _peak(prediction: Prediction) -> int:
    return max(prediction.peak_memory_bytes)


def _elsewhere(here: Prediction, state: State, library: Library, found: Sequence[Move]) -> Iterator[str]:
    """What would make a step faster, if no change of the plan does."""
    too_large = [
        m for m in found if not m.prediction.fits and m.prediction.step_time_s < (1 - WORTH) * here.step_time_s
    ]
    if here.fits and too_large:
        least = min(too_large, key=_by_memory)
        yield (
            f"With {format_bytes(_peak(least.prediction))} of memory for each rank instead of "
            f"{format_bytes(here.plan.memory_limit)}, a step could take {format_seconds(least.prediction.step_time_s)} "
            f"({least.words[0].lower()}{least.words[1:]})."
        )
    bandwidth = knobs.link_of(here.plan).bandwidth * _FASTER_LINK
    if bandwidth < math.inf and here.plan.num_ranks > 1:
        faster = _predicted(knobs.turned(state, here.plan, ids.BANDWIDTH, math.log10(bandwidth)), library)
        if faster is not None and faster.step_time_s < (1 - WORTH) * here.step_time_s:
            then = format_seconds(faster.step_time_s)
            yield f"With links of {format_bandwidth(bandwidth)}, a step would take {then}."
    useful = here.breakdown_s["compute"] / here.step_time_s
    yield f"{useful:.0%} of the step is useful compute, which only faster or more devices shorten."


# --- in words ------------------------------------------------------------------------------------------------------


def outcome(here: Prediction, there: Prediction) -> str:
    """``11.3 s to 8.7 s, 51 GiB to 78 GiB, still fits``."""
    now, then = format_seconds(here.step_time_s), format_seconds(there.step_time_s)
    change = there.step_time_s / here.step_time_s - 1
    memory = f"{format_bytes(_peak(here))} \u2192 {format_bytes(_peak(there))}"
    fits = {
        (True, True): "still fits",
        (False, True): "fits then",
        (True, False): "no longer fits",
        (False, False): "still does not fit",
    }[here.fits, there.fits]
    more = there.plan.num_ranks - here.plan.num_ranks
    devices = f", {abs(more)} {'more' if more > 0 else 'fewer'} device{'s' * (abs(more) > 1)}" if more else ""
    return f"step {now} \u2192 {then} ({change:+.1%}), memory {memory}, {fits}{devices}"


def limit_sentence(prediction: Prediction) -> str:
    """What limits the plan: memory, if it does not fit; else what takes most of the step beside useful compute."""
    plan = prediction.plan
    if not prediction.fits:
        peaks = prediction.peak_memory_bytes
        fullest = max(range(len(peaks)), key=lambda index: peaks[index])
        parts = prediction.step.memory[fullest].at_peak()
        part = max(parts, key=lambda name: parts[name])
        return (
            f"Rank {plan.ranks[fullest]} needs {format_bytes(peaks[fullest])}, and there are "
            f"{format_bytes(plan.memory_limit)}. The largest part is {part}: {format_bytes(parts[part])}."
        )
    seconds, total = prediction.breakdown_s, sum(prediction.breakdown_s.values())
    useful = f"{seconds['compute'] / total:.0%} of the step is useful compute"
    part = max((part for part in PARTS if part != "compute"), key=lambda name: seconds[name])
    share = seconds[part] / total
    return f"{useful}; no other cause takes 5 %." if share < 0.05 else f"{useful}; {LABELS[part]} takes {share:.0%}."
