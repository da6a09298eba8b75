"""Where to cut: for every frame at once the cut with the smallest bottleneck among those that fit.

Without queues on links a GPipe step takes

    T = sum f + sum b + 2 sum c + (M-1) (max f + max b)                     over stages, c over the links at the cuts

and what of it depends on the cut is its *bottleneck*: the largest, over stages, of the seconds per step

    max(F, C) + max(B + R, C)        F, B, R: forwards, backwards, recomputations of all micro-batches; C: the link's

A stage of layers i..j-1 with d stages to go has its seconds whatever else is cut, and its checkpoint mode too: the
fastest that its memory allows, since recomputing less never makes a step slower (a step is a maximum of sums, monotone
in each). So dynamic programming from the last stage is exact:

    bottleneck[d, i] = min over j of max(stage[d, i, j], bottleneck[d-1, j])

Arrays have an axis for M, and one chain of tables serves every K. Memory counts here what a stage holds at least:
parameters and optimizer state, the inputs of the micro-batches in flight (M; with 1f1b at most d), what they save, and
posted receives. What is left out is small; the evaluator has the last word.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_sim.catalog import Link
from gpipe_sim.model import bytes_per_parameter
from gpipe_sim.plan import Plan, recomputed
from gpipe_sim.profile import Array, Profile
from gpipe_sim.scenario import Checkpoint, Optimizer, Recompute, ScheduleName

MODES: tuple[Checkpoint, ...] = ("never", "except_last", "always")
"""From the fastest to the smallest."""

Modes = tuple[Checkpoint, ...] | Checkpoint | None
"""One for each stage, one for all, or each stage's own choice."""


class Frame(NamedTuple):
    """What is fixed while the cut is sought."""

    num_stages: int
    num_microbatches: int
    schedule: ScheduleName
    recompute: Recompute


MakePlan = Callable[[Frame, tuple[int, ...], tuple[Checkpoint, ...]], Plan]


class Promise(NamedTuple):
    """About how long a frame's best cut takes, and the plan itself when it is asked for."""

    step_time_s: float
    plan: Callable[[], Plan]


class _Stage(NamedTuple):
    """One stage as every interval of layers: axes are M, the cut where it begins and the cut where it ends."""

    seconds: Array
    """Per step, of the fastest mode that fits; infinite where none does."""
    by_mode: Mapping[Checkpoint, Array]


class Intervals:
    """What the layers between any two cuts cost, for several numbers of micro-batches."""

    def __init__(
        self, profile: Profile, optimizer: Optimizer, cuts: npt.NDArray[np.int_], sizes: Sequence[tuple[int, ...]]
    ) -> None:
        self.cuts, self.counts = cuts, np.array([len(one) for one in sizes])
        per = bytes_per_parameter(optimizer, profile.dtype)
        self.model_bytes = self._between(profile.parameter_bytes[None] * (1 + per.optimizer / per.weight))

        def total(column: str, chosen: Sequence[tuple[int, ...]]) -> Array:
            """Of each layer, over the micro-batches of a step."""
            columns = {n: getattr(profile.at(n), column) for one in chosen for n in set(one)}
            nothing = np.zeros(profile.num_layers)
            return np.array([sum((one.count(n) * columns[n] for n in set(one)), nothing) for one in chosen])

        self.forward_s, self.backward_s = (self._between(total(name, sizes)) for name in ("forward_s", "backward_s"))
        again = {mode: [_recomputed(mode, one) for one in sizes] for mode in MODES}
        self.recompute_s = {mode: self._between(total("forward_s", chosen)) for mode, chosen in again.items()}
        largest, smallest = ([profile.at(one[which]) for one in sizes] for which in (0, -1))
        self.saved_bytes = self._between(np.array([costs.saved_bytes for costs in largest]))
        outputs = np.array([costs.output_bytes for costs in largest])
        self.boundary_bytes = np.concatenate([np.zeros((len(sizes), 1)), outputs[:, cuts[1:] - 1]], axis=1)
        """Of one micro-batch, at each cut."""
        crossing = total("output_bytes", sizes)
        self.crossing_bytes = np.concatenate([np.zeros((len(sizes), 1)), crossing[:, cuts[1:] - 1]], axis=1)
        """Of a step, at each cut."""
        self.once_s = np.array([float((costs.forward_s + costs.backward_s).sum()) for costs in smallest])
        """One micro-batch through the whole model and back."""

    def _between(self, layers: Array) -> Array:
        sums = np.concatenate([np.zeros((len(layers), 1)), np.cumsum(layers, axis=1)], axis=1)[:, self.cuts]
        between: Array = sums[:, None, :] - sums[:, :, None]
        return between

    def stage(
        self, slowdown: float, ahead: Link | None, behind: Link | None, window: int, in_flight: int, limit: float
    ) -> dict[Checkpoint, Array]:
        """Seconds by mode of a stage on a device so much slower, between these links, that holds so many micro-batches
        at a time; infinite where it takes more than the limit. `behind` is given where sends block."""
        held = np.minimum(in_flight, self.counts)[:, None, None]
        posted = np.minimum(window, self.counts)[:, None] * self.boundary_bytes * (ahead is not None)
        fixed_bytes = self.model_bytes + self.boundary_bytes[:, :, None] * held + posted[:, None, :]
        seconds = self._seconds(slowdown, ahead, behind)
        fits_once = fixed_bytes + self.saved_bytes <= limit
        fits = dict.fromkeys(MODES, fits_once) | {"never": fixed_bytes + self.saved_bytes * held <= limit}
        return {mode: np.where(fits[mode], seconds[mode], np.inf) for mode in MODES}

    @lru_cache  # noqa: B019  # lives as long as one search
    def _seconds(self, slowdown: float, ahead: Link | None, behind: Link | None) -> dict[Checkpoint, Array]:
        """Infinite where a stage would have no layer."""
        out = self.crossing_bytes[:, None, :] / ahead.bandwidth if ahead else 0.0
        none = np.tri(len(self.cuts), dtype=bool)
        found: dict[Checkpoint, Array] = {}
        for mode in MODES:
            forward, backward = self.forward_s * slowdown, (self.backward_s + self.recompute_s[mode]) * slowdown
            if behind is None:
                seconds = np.maximum(forward, out) + np.maximum(backward, out)
            else:
                seconds = forward + backward + out + self.crossing_bytes[:, :, None] / behind.bandwidth
            found[mode] = np.where(none, np.inf, seconds)
        return found


def _recomputed(mode: Checkpoint, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n, again in zip(sizes, recomputed(mode, len(sizes)), strict=True) if again)


def promises(
    intervals: Intervals, frames: Sequence[Frame], make_plan: MakePlan, modes: Modes, limit: float
) -> Iterator[Promise]:
    """For each frame that has a cut within the limit, the one with the smallest bottleneck.

    The frames have one schedule. A stage is made once for all frames in which it has the same neighbours, and so is a
    chain of stages up to the last: where devices and links are alike, one chain serves every K.
    """
    rows = {int(M): row for row, M in enumerate(intervals.counts)}
    made: dict[tuple[object, ...], _Stage] = {}
    chains: dict[tuple[int, ...], Array] = {}
    for K in sorted({frame.num_stages for frame in frames}):
        mine = [frame for frame in frames if frame.num_stages == K]
        if isinstance(modes, tuple) and len(modes) != K:
            continue
        stages = _stages(intervals, make_plan(mine[0], (1,) * K, (MODES[0],) * K), modes, limit, made)
        bottleneck = np.full((len(rows), len(intervals.cuts)), np.inf)
        bottleneck[:, -1] = 0.0
        for first in reversed(range(K)):
            key = tuple(map(id, stages[first:]))
            if key not in chains:
                chains[key] = np.maximum(stages[first].seconds, bottleneck[:, None, :]).min(axis=2)
            bottleneck = chains[key]
        for frame in mine:
            row, M = rows[frame.num_microbatches], frame.num_microbatches
            smallest = float(bottleneck[row, 0])
            if smallest < np.inf:
                about = float(intervals.once_s[row]) + smallest * (M - 1) / M
                yield Promise(about, partial(_cut, intervals, frame, make_plan, row, smallest, stages))


def _stages(
    intervals: Intervals, plan: Plan, modes: Modes, limit: float, made: dict[tuple[object, ...], _Stage]
) -> list[_Stage]:
    K, cluster = plan.num_stages, plan.scenario.cluster
    links = [None, *(plan.link(k) for k in range(K - 1)), None]
    most = int(intervals.counts.max())
    stages = []
    for k in range(K):
        mode = modes[k] if isinstance(modes, tuple) else modes
        in_flight = K - k if plan.schedule == "1f1b" else most
        key = (plan.slowdown(k), links[k + 1], None if cluster.overlap else links[k], plan.window or most, in_flight)
        if (*key, mode) not in made:
            by_mode = {
                one: seconds for one, seconds in intervals.stage(*key, limit).items() if mode is None or mode == one
            }
            # Modes that recompute have the same least bytes, so that of them only the fastest is of interest here.
            fastest = list(by_mode.values())[:2]
            made[*key, mode] = _Stage(np.minimum.reduce(fastest), by_mode)
        stages.append(made[*key, mode])
    return stages


def _cut(
    intervals: Intervals,
    frame: Frame,
    make_plan: MakePlan,
    row: int,
    bottleneck: float,
    stages: Sequence[_Stage],
) -> Plan:
    """Of all cuts within the bottleneck the most even one: fill, drain and queues prefer it."""
    bound = bottleneck * (1 + 1e-12)
    least = np.full(len(intervals.cuts), np.inf)
    least[-1] = 0.0
    ends = []
    for stage in reversed(stages):
        seconds = stage.seconds[row]
        table = np.where(seconds <= bound, seconds, np.inf) ** 2 + least
        ends.append(table.argmin(axis=1))
        least = table.min(axis=1)
    places, modes = [0], []
    for end, stage in zip(reversed(ends), stages, strict=True):
        begin, place = places[-1], int(end[places[-1]])
        modes.append(min(stage.by_mode, key=lambda mode: stage.by_mode[mode][row, begin, place]))
        places.append(place)
    return make_plan(frame, tuple(np.diff(intervals.cuts[places]).tolist()), tuple(modes))
