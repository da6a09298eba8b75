"""Where to cut: for each frame the cut with the smallest bottleneck among those that fit, the best frames first.

Without queues on links a GPipe step takes

    T = sum f + sum b + 2 sum c + (M-1) (max f + max b)                     over stages, c over the links at the cuts

and what of it depends on the cut is its *bottleneck*, the largest stage (its seconds are in `intervals`). A stage that
begins at cut i and ends l cuts further, with d stages to go, has its seconds whatever else is cut, and its checkpoint
mode too: the fastest that its memory allows, since recomputing less never makes a step slower (a step is a maximum of
sums, monotone in each). So dynamic programming from the last stage is exact:

    bottleneck[d, i] = min over l of max(stage[d, i, l], bottleneck[d-1, i+l])

Three things keep it short:

* One chain of tables serves a *batch* of frames: several M, and every K between two powers of two.
* Stages much longer than the average are of no use, so l goes up to a longest stage only. If one beyond it could matter
  after all (it may fit, and is within the bottleneck that was found), all is done again with a longer one.
* A batch is cut only when no other promises less than it would with perfectly even stages.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache, lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import accumulate, count
from typing import NamedTuple, TypeVar

import numpy as np

from gpipe_sim.intervals import MODES, Intervals, Place, StageTable
from gpipe_sim.plan import Plan, microbatch_sizes
from gpipe_sim.profile import Array, Profile
from gpipe_sim.scenario import BackwardOrder, Checkpoint, Recompute, Scenario, ScheduleName
from gpipe_sim.schedule import in_flight

_Key = TypeVar("_Key", bound=Hashable)

Modes = tuple[Checkpoint, ...] | Checkpoint | None
"""One for each stage, one for all, or each stage's own choice."""

_GROUPS, _GROUPS_PER_STAGE = 160, 16
"""A model of more layers is cut between groups of layers: at least so many, and so many for each stage."""
_LONGER = 2
"""Than the average, by this factor, a stage may be at first."""
_SAME = 1e-12
"""Relative difference below which two sums of the same layers in another order count as equal."""
_NUMBERS = 65_536
"""In a table, if it is not one M alone that has more: large enough for numpy, small enough for a cache."""
_KEPT = 16
"""Tables of costs that are kept for the next question."""


class Frame(NamedTuple):
    """What is fixed while the cut is sought."""

    num_stages: int
    num_microbatches: int
    schedule: ScheduleName
    recompute: Recompute
    backward: BackwardOrder
    placement: tuple[int, ...] | None
    """None is in order."""
    window: int | None

    @classmethod
    def of(cls, plan: Plan) -> "Frame":
        """All of a plan but its cut and modes."""
        kind = plan.schedule, plan.recompute, plan.backward, plan.placement, plan.window
        return cls(plan.num_stages, plan.num_microbatches, *kind)

    @property
    def kind(self) -> tuple[object, ...]:
        """All but how many stages and micro-batches."""
        return self[2:]

    def plan(
        self, scenario: Scenario, profile: Profile, balance: tuple[int, ...], checkpoint: tuple[Checkpoint, ...]
    ) -> Plan:
        """The plan with this cut and these modes."""
        return Plan(
            scenario=scenario,
            profile=profile,
            balance=balance,
            placement=self.placement or tuple(range(self.num_stages)),
            num_microbatches=self.num_microbatches,
            checkpoint=checkpoint,
            schedule=self.schedule,
            recompute=self.recompute,
            backward=self.backward,
            window=self.window,
        )


class Promise(NamedTuple):
    """About how long a frame's best cut takes, and the plan itself when it is asked for."""

    step_time_s: float
    plan: Callable[[], Plan]


class _Batch(NamedTuple):
    """Frames of one kind that are cut together."""

    cuts: tuple[int, ...]
    """Where a stage may begin or end."""
    frames: Sequence[Frame]
    modes: Modes
    step_time_s: float
    """None of them promises less."""
    least_bytes: float
    """Some stage of each takes at least as many."""


def group_size(num_layers: int, num_stages: int) -> int:
    """Layers between two cuts; the same for all numbers of stages between two powers of two."""
    return -(-num_layers // max(_GROUPS, _GROUPS_PER_STAGE << num_stages.bit_length() - 1))


class Cutter:
    """Finds the cuts of many frames of one scenario, and the stages' checkpoint modes where they are left open."""

    def __init__(
        self,
        scenario: Scenario,
        profile: Profile,
        frames: Sequence[Frame],
        modes: Sequence[Modes],
        balances: Sequence[tuple[int, ...]] | None,
    ) -> None:
        self._scenario, self._profile = scenario, profile
        self._sizes = {M: microbatch_sizes(scenario.batch, M) for M in {frame.num_microbatches for frame in frames}}
        self._known_places: dict[Place, Place] = {}
        self._pass_s = cache(self._make_pass_s)
        self._places = cache(self._make_places)
        self._intervals = lru_cache(_KEPT)(self._make_intervals)
        """The same for every question and schedule."""
        self._too_little: dict[int, float] = {}
        """Limits within which none of a batch's frames fits."""
        self._batches = [
            batch
            for cuts, some in self._with_cuts(frames, balances)
            for chosen in modes
            for alike in _groups(some, lambda frame: frame.kind).values()
            for batch in self._batched(cuts, alike, chosen)
        ]

    def promises(self, limit: float) -> Iterator[Promise]:
        """For each frame that has a cut within so many bytes, the one with the smallest bottleneck, in the order of
        about how long its step takes."""
        order = count()
        waiting: list[tuple[float, int, _Batch | Promise]] = [
            (batch.step_time_s, next(order), batch)
            for batch in self._batches
            if batch.least_bytes <= limit and self._too_little.get(id(batch), -1.0) < limit
        ]
        heapify(waiting)
        while waiting:
            first = heappop(waiting)[-1]
            if isinstance(first, Promise):
                yield first
                continue
            found = self._promises_of(first, limit)
            if not found:
                self._too_little[id(first)] = limit
            for promise in found:
                heappush(waiting, (promise.step_time_s, next(order), promise))

    # --- batches ---------------------------------------------------------------------------------------------------

    def _with_cuts(
        self, frames: Sequence[Frame], balances: Sequence[tuple[int, ...]] | None
    ) -> Iterator[tuple[tuple[int, ...], list[Frame]]]:
        """Frames with the cuts that they may have: those of a given balance, or all."""
        for balance in balances or ():
            yield (0, *accumulate(balance)), [frame for frame in frames if frame.num_stages == len(balance)]
        if balances is None:
            num_layers = self._profile.num_layers
            for some in _groups(frames, lambda frame: frame.num_stages.bit_length()).values():
                yield (*range(0, num_layers, group_size(num_layers, some[0].num_stages)), num_layers), some

    def _batched(self, cuts: tuple[int, ...], frames: Sequence[Frame], modes: Modes) -> Iterator[_Batch]:
        """Frames of one kind by M, so that a batch's tables are not large, and what might be best is together."""
        able = [f for f in frames if not isinstance(modes, tuple) or len(modes) == f.num_stages]
        if not able:
            return
        slowdown = self._scenario.cluster.slowdown
        fewest, most = (choose(frame.num_stages for frame in able) for choose in (min, max))
        speed = sum(1 / slowdown.get(rank, 1.0) for rank in able[0].placement or range(most))
        by_count = _groups(able, lambda frame: frame.num_microbatches)
        bounds = {M: self._about_s(some[0], self._all_s(M) / speed) for M, some in by_count.items()}
        counts = sorted(bounds, key=lambda M: bounds[M])
        together = max(1, _NUMBERS // (len(cuts) * _longest(cuts, fewest)))
        for first in range(0, len(counts), together):
            some = counts[first : first + together]
            mine = [frame for M in some for frame in by_count[M]]
            yield _Batch(cuts, mine, modes, bounds[some[0]], self._profile.parameter_bytes.sum() / most)

    def _all_s(self, num_microbatches: int) -> float:
        """Seconds of all micro-batches through the whole model and back."""
        sizes = self._sizes[num_microbatches]
        return sum(sizes.count(n) * (self._pass_s(n, "forward_s") + self._pass_s(n, "backward_s")) for n in set(sizes))

    def _about_s(self, frame: Frame, bottleneck: float) -> float:
        """The formula at the top: the first micro-batch fills the pipeline, the one whose backward is last drains it,
        and the bottleneck works on the others. The first are the largest."""
        M, sizes = frame.num_microbatches, self._sizes[frame.num_microbatches]
        last = sizes[0 if frame.backward == "reverse" else -1]
        once_s = self._pass_s(sizes[0], "forward_s") + self._pass_s(last, "backward_s")
        return once_s + bottleneck * (M - 1) / M

    def _make_pass_s(self, size: int, column: str) -> float:
        """Seconds of a micro-batch through the whole model."""
        return float(getattr(self._profile.at(size), column).sum())

    # --- cuts ------------------------------------------------------------------------------------------------------

    def _promises_of(self, batch: _Batch, limit: float) -> list[Promise]:
        counts = tuple(sorted({frame.num_microbatches for frame in batch.frames}))
        longest = _longest(batch.cuts, min(frame.num_stages for frame in batch.frames))
        while True:
            longest = min(longest, len(batch.cuts) - 1)
            found = self._promises_up_to(batch, self._intervals(batch.cuts, counts, longest), limit)
            if found is not None:
                return found
            longest *= 2

    def _promises_up_to(self, batch: _Batch, intervals: Intervals, limit: float) -> list[Promise] | None:
        """Those with no stage beyond the longest; None if one might do better."""
        chains, longer_s, found = _Chains(intervals, limit), intervals.longer_s(limit), list[Promise]()
        rows = {int(M): row for row, M in enumerate(intervals.counts)}
        for frames in _groups(batch.frames, lambda frame: frame.num_stages).values():
            places = self._places(frames[0]._replace(num_microbatches=max(self._sizes)), batch.modes)
            stages, bottleneck = chains.of(places)
            least_s = longer_s * min(place.slowdown for place in places)
            if np.any((least_s < np.inf) & (least_s <= bottleneck * (1 + _SAME))):
                return None
            for frame in frames:
                row = rows[frame.num_microbatches]
                smallest = float(bottleneck[row])
                if smallest < np.inf:
                    make_plan = partial(self._plan, frame, intervals, row, smallest, stages)
                    found.append(Promise(self._about_s(frame, smallest), make_plan))
        return found

    def _plan(
        self, frame: Frame, intervals: Intervals, row: int, bottleneck: float, from_last: Sequence[StageTable]
    ) -> Plan:
        """Of all cuts within the bottleneck the most even one: fill, drain and queues prefer it."""
        bound = bottleneck * (1 + _SAME)
        least = np.full((1, len(intervals.cuts)), np.inf)
        least[:, -1] = 0.0
        lengths = []
        for stage in from_last:
            seconds = stage.seconds[row]
            after = intervals.at_ends(intervals.padded(least, np.inf))[0]
            table = np.where(seconds <= bound, seconds, np.inf) ** 2 + after
            lengths.append(table.argmin(axis=0))
            least[0, :-1], least[0, -1] = table.min(axis=0), np.inf
        borders, modes = [0], []
        for stage, length in zip(reversed(from_last), reversed(lengths), strict=True):
            begin = borders[-1]
            modes.append(MODES[stage.modes[row, length[begin], begin]])
            borders.append(begin + int(length[begin]) + 1)
        balance = tuple(np.diff(intervals.cuts[borders]).tolist())
        return frame.plan(self._scenario, self._profile, balance, tuple(modes))

    def _make_intervals(self, cuts: tuple[int, ...], counts: tuple[int, ...], longest: int) -> Intervals:
        return Intervals(self._profile, self._scenario.optimizer, cuts, [self._sizes[M] for M in counts], longest)

    def _make_places(self, frame: Frame, modes: Modes) -> list[Place]:
        """Equal places are the same object."""
        K, M, overlap = frame.num_stages, frame.num_microbatches, self._scenario.cluster.overlap
        plan = frame.plan(self._scenario, self._profile, (1,) * K, (MODES[0],) * K)
        links = [None, *(plan.link(k) for k in range(K - 1)), None]
        places = [
            Place(
                slowdown=plan.slowdown(k),
                ahead=links[k + 1],
                behind=None if overlap else links[k],
                window=frame.window or M,
                in_flight=in_flight(frame.schedule, k, K, M),
                last_first=frame.backward == "reverse",
                mode=modes[k] if isinstance(modes, tuple) else modes,
            )
            for k in range(K)
        ]
        return [self._known_places.setdefault(place, place) for place in places]


class _Chains:
    """Bottlenecks of the stages from some to the last.

    A stage is made once for all plans in which it stands in the same place, and a chain of stages once for all that end
    in it: where devices and links are alike, one chain serves every K.
    """

    def __init__(self, intervals: Intervals, limit: float) -> None:
        self.intervals, self.limit, self.most = intervals, limit, int(intervals.counts.max())
        no_stage = np.full((len(intervals.counts), len(intervals.cuts)), np.inf)
        no_stage[:, -1] = 0.0
        self.no_stage = intervals.padded(no_stage, np.inf)
        self.made: dict[Place, StageTable] = {}
        self.made_for: dict[int, StageTable] = {}
        self.chains: dict[tuple[int, int], Array] = {}

    def of(self, places: Sequence[Place]) -> tuple[list[StageTable], Array]:
        """The stages, from the last to the first, and for each M the bottleneck of them all."""
        stages, bottleneck = list[StageTable](), self.no_stage
        for place in reversed(places):
            stages.append(self.stage(place))
            bottleneck = self.before(bottleneck, stages[-1])
        return stages, bottleneck[:, 0]

    def stage(self, place: Place) -> StageTable:
        """In this place; more micro-batches in flight than there are make no difference."""
        if id(place) not in self.made_for:
            known = place._replace(in_flight=min(place.in_flight, self.most))
            if known not in self.made:
                self.made[known] = self.intervals.stage(known, self.limit)
            self.made_for[id(place)] = self.made[known]
        return self.made_for[id(place)]

    def before(self, bottleneck: Array, stage: StageTable) -> Array:
        """The bottleneck of this stage and those after it, for every cut where it may begin."""
        key = id(bottleneck), id(stage)
        if key not in self.chains:
            table = np.maximum(stage.seconds, self.intervals.at_ends(bottleneck))
            self.chains[key] = np.full_like(self.no_stage, np.inf)
            table.min(axis=1, out=self.chains[key][:, : -self.intervals.longest])
        return self.chains[key]


def _longest(cuts: Sequence[int], num_stages: int) -> int:
    """How long a stage may be at first, counted in cuts."""
    return min(len(cuts) - 1, -(-_LONGER * (len(cuts) - 1) // num_stages))


def _groups(frames: Iterable[Frame], key: Callable[[Frame], _Key]) -> dict[_Key, list[Frame]]:
    groups: dict[_Key, list[Frame]] = {}
    for frame in frames:
        groups.setdefault(key(frame), []).append(frame)
    return groups
