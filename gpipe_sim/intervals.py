"""What a stage costs, for every interval of layers that it may consist of and several numbers of micro-batches at once.

Tables have three axes: M, the stage's length less one, counted in cuts, and the cut where it begins:

    cuts      0     1     2     3            [m, 0, 1] is the stage of the layers between cuts 1 and 2,
              |-----|-----|-----|            [m, 1, 1] the one up to cut 3; beyond the last cut all is infinite

What a stage costs a step are its bottleneck's seconds

    max(F, C) + max(B + R, C)        F, B, R: forwards, backwards, recomputations of all micro-batches; C: the link's

and, where sends block, the sum of them all. Memory counts here what a stage holds at least, in its first backward and
in its second, by which it has gradients and, where no forward comes between them, one micro-batch less:

    parameters, optimizer             + inputs of h micro-batches, and what they save        + last layer's backward
    parameters, optimizer, gradients  + the same of h, but of M-1 at most                    + last layer's backward

and posted receives. A stage that recomputes holds what one micro-batch saves, or two if the last is kept till the end.
Where the batch does not divide evenly, the first micro-batches are larger than the others. What is left out is small;
the evaluator has the last word.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_sim.catalog import Link
from gpipe_sim.memory import backward_needs
from gpipe_sim.model import bytes_per_parameter
from gpipe_sim.plan import recomputed
from gpipe_sim.profile import Array, LayerCosts, Profile
from gpipe_sim.scenario import Checkpoint, Optimizer

Counts = npt.NDArray[np.int_]

MODES: tuple[Checkpoint, ...] = ("never", "except_last", "always")
"""From the fastest to the smallest."""


class Place(NamedTuple):
    """Where a stage stands, as far as its costs depend on it."""

    slowdown: float
    ahead: Link | None
    """To the next stage."""
    behind: Link | None
    """To the previous stage, where sends block."""
    window: int
    """Receives posted ahead."""
    in_flight: int
    """Micro-batches that it holds at a time."""
    last_first: bool
    """Whether the last micro-batch's backward is the first."""
    mode: Checkpoint | None
    """None leaves it the choice."""


class StageTable(NamedTuple):
    """A stage in one place as every interval."""

    seconds: Array
    """Per step, of the fastest mode that fits; infinite where none does."""
    modes: npt.NDArray[np.int8]
    """Which of the modes that is."""


class Intervals:
    """What the layers between two cuts cost, for stages up to a longest one."""

    def __init__(
        self,
        profile: Profile,
        optimizer: Optimizer,
        cuts: Sequence[int],
        sizes: Sequence[tuple[int, ...]],
        longest: int,
    ) -> None:
        self.cuts, self.longest = np.array(cuts), longest
        self.counts = np.array([len(one) for one in sizes])
        self._seconds = cache(self._make_seconds)
        per = bytes_per_parameter(optimizer, profile.dtype)
        largest, smallest = ([profile.at(one[which]) for one in sizes] for which in (0, -1))
        self._num_largest = np.array([one.count(one[0]) for one in sizes])[:, None, None]
        shares = [_least_share(few, many) for few, many in zip(smallest, largest, strict=True)]
        self._share = np.array(shares)[:, None, None]
        """Of a largest micro-batch's bytes, what a smallest one has at least."""

        def total(column: str, chosen: Sequence[tuple[int, ...]]) -> Array:
            """Of each layer, over the micro-batches of a step."""
            columns = {n: getattr(profile.at(n), column) for one in chosen for n in set(one)}
            nothing = np.zeros(profile.num_layers)
            return np.array([sum((one.count(n) * columns[n] for n in set(one)), nothing) for one in chosen])

        forward, backward = (self._up_to_cuts(total(name, sizes)) for name in ("forward_s", "backward_s"))
        model = self._up_to_cuts(profile.parameter_bytes[None] * (1 + per.optimizer / per.weight))
        saved = self._up_to_cuts(np.array([costs.saved_bytes for costs in largest]))
        again = {mode: total("forward_s", [_recomputed(mode, one) for one in sizes]) for mode in MODES}
        self._forward_s, self._backward_s = self._between(forward), self._between(backward)
        self._recompute_s = {mode: self._between(self._up_to_cuts(layers)) for mode, layers in again.items()}
        gradients = profile.parameter_bytes * per.gradient / per.weight
        self._model_bytes, self._saved_bytes = self._between(model, None), self._between(saved, None)
        self._gradient_bytes = self._between(self._up_to_cuts(gradients[None]), None)
        making, adding = zip(*(backward_needs(costs, gradients) for costs in largest), strict=True)
        self._making_bytes, self._adding_bytes = (self._at_borders(np.array(need))[1] for need in (making, adding))
        """Of the last layer's backward, the first and every other one."""
        self._input_bytes, self._output_bytes = self._at_borders(np.array([costs.output_bytes for costs in largest]))
        """Of one micro-batch."""
        self._received_bytes, self._sent_bytes = self._at_borders(total("output_bytes", sizes))
        """Of a step, in one direction."""
        self._longer_s, self._longer_bytes = (
            sums[:, longest + 1 :] - sums[:, : -longest - 1] for sums in (forward + backward, model + saved)
        )

    def _up_to_cuts(self, layers: Array) -> Array:
        """Sums of the layers before each cut."""
        sums: Array = np.concatenate([np.zeros((len(layers), 1)), np.cumsum(layers, axis=1)], axis=1)[:, self.cuts]
        return sums

    def _between(self, sums: Array, beyond: float | None = np.inf) -> Array:
        between: Array = self.at_ends(self.padded(sums, beyond)) - sums[:, None, :-1]
        return between

    def _at_borders(self, outputs: Array) -> tuple[Array, Array]:
        """Of what each layer puts out, what an interval takes in where it begins and puts out where it ends."""
        at_cuts = np.concatenate([np.zeros((len(outputs), 1)), outputs[:, self.cuts[1:] - 1]], axis=1)
        return at_cuts[:, None, :-1], self.at_ends(self.padded(at_cuts, 0.0))

    def padded(self, at_cuts: Array, beyond: float | None) -> Array:
        """Values at the cuts, and so many more that every interval ends at one; None repeats the last."""
        more = np.repeat(at_cuts[:, -1:], self.longest - 1, axis=1)
        if beyond is not None:
            more[:] = beyond
        return np.concatenate([at_cuts, more], axis=1)

    def at_ends(self, padded: Array) -> Array:
        """Values at cuts as values at the ends of intervals: a view, with the axes of all tables."""
        (rows, columns), (row, column) = padded.shape, padded.strides
        shape = rows, self.longest, columns - self.longest
        ends: Array = np.lib.stride_tricks.as_strided(padded[:, 1:], shape, (row, column, column), writeable=False)
        return ends

    def longer_s(self, limit: float) -> Array:
        """For each M, the least seconds of a stage that is longer than the longest, and may fit."""
        least: Array = np.where(self._longer_bytes <= limit, self._longer_s, np.inf).min(axis=1, initial=np.inf)
        return least

    def stage(self, place: Place, limit: float) -> StageTable:
        """A stage in this place that takes no more than the limit."""
        by_mode = self._seconds(place.slowdown, place.ahead, place.behind)
        seconds, modes = np.full_like(by_mode[MODES[0]], np.inf), np.zeros(by_mode[MODES[0]].shape, np.int8)
        for index, mode in reversed(list(enumerate(MODES))):  # the fastest has the last word
            if place.mode in (None, mode):
                fits = self._least_bytes(place, mode) <= limit
                np.copyto(seconds, by_mode[mode], where=fits)
                np.copyto(modes, index, where=fits)
        return StageTable(seconds, modes)

    def _least_bytes(self, place: Place, mode: Checkpoint) -> Array:
        M, largest = self.counts[:, None, None], self._num_largest
        saved = place.in_flight if mode == "never" else 1
        first = self._held_bytes(place, M, largest, saved) + self._making_bytes
        second = self._held_bytes(place, M - 1, largest - 1, saved) + self._adding_bytes * (M > 1)
        least = np.maximum(first, second + self._gradient_bytes)
        if mode == "except_last" and not place.last_first:  # beside the last one, which is kept, another is recomputed
            both = self._held_bytes(place, np.minimum(M, 2), largest - (M - 2), min(2, place.in_flight))
            least = np.maximum(least, both + self._gradient_bytes * (M > 2))
        least += self._model_bytes
        return least

    def _held_bytes(self, place: Place, num_left: Counts, num_largest: Counts, saved: int) -> Array:
        """When so many backwards are left, so many of them of the largest micro-batches: inputs of those in flight, so
        many of them saved, and posted receives."""

        def weigh(most: int) -> Array:
            some = np.minimum(most, num_left)
            weight: Array = np.clip(num_largest, 0, some) * (1 - self._share) + some * self._share
            return weight

        held: Array = self._input_bytes * weigh(place.in_flight) + self._saved_bytes * weigh(saved)
        if place.ahead is not None:
            held += self._output_bytes * weigh(place.window)
        return held

    def _make_seconds(self, slowdown: float, ahead: Link | None, behind: Link | None) -> Mapping[Checkpoint, Array]:
        out = self._sent_bytes / ahead.bandwidth if ahead else 0.0
        found: dict[Checkpoint, Array] = {}
        for mode in MODES:
            forward, backward = self._forward_s * slowdown, (self._backward_s + self._recompute_s[mode]) * slowdown
            if behind is None:
                found[mode] = np.maximum(forward, out) + np.maximum(backward, out)
            else:
                found[mode] = forward + backward + out + self._received_bytes / behind.bandwidth
        return found


def _recomputed(mode: Checkpoint, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n, again in zip(sizes, recomputed(mode, len(sizes)), strict=True) if again)


def _least_share(few: LayerCosts, many: LayerCosts) -> float:
    columns = [(few.saved_bytes, many.saved_bytes), (few.output_bytes, many.output_bytes)]
    return min([1.0, *(float((a[b > 0] / b[b > 0]).min(initial=1.0)) for a, b in columns)])
