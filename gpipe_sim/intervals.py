"""What a stage costs, for every interval of layers that it may consist of and several numbers of micro-batches at once.

Tables have three axes: M, the stage's length less one, counted in cuts, and the cut where it begins:

    cuts      0     1     2     3            [m, 0, 1] is the stage of the layers between cuts 1 and 2,
              |-----|-----|-----|            [m, 1, 1] the one up to cut 3; beyond the last cut all is infinite

What a stage costs a step are its bottleneck's seconds

    max(F, C) + max(B + R, C)        F, B, R: forwards, backwards, recomputations of all micro-batches; C: the link's

and, where sends block, the sum of them all. Memory counts here what a stage holds at least: parameters and optimizer
state, the inputs of the micro-batches in flight, what they save, and posted receives. What is left out is small; the
evaluator has the last word.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_sim.catalog import Link
from gpipe_sim.model import bytes_per_parameter
from gpipe_sim.plan import recomputed
from gpipe_sim.profile import Array, Profile
from gpipe_sim.scenario import Checkpoint, Optimizer

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
    mode: Checkpoint | None
    """None leaves it the choice."""


class StageTable(NamedTuple):
    """A stage in one place as every interval.

    Of the modes that recompute, which all have the same least bytes, only the fastest is of interest here.
    """

    seconds: Array
    """Per step, of the fastest mode that fits; infinite where none does."""
    saves: npt.NDArray[np.bool_]
    """Where that mode may be the first one, which recomputes nothing."""
    mode: Checkpoint | None
    """The only one, if there is no choice."""

    def mode_at(self, *index: int) -> Checkpoint:
        """Of one interval that fits."""
        return self.mode or MODES[0 if self.saves[index] else 1]


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
        largest = [profile.at(one[0]) for one in sizes]

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
        self._model_bytes, self._saved_bytes = self._between(model), self._between(saved)
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

    def _between(self, sums: Array) -> Array:
        between: Array = self.at_ends(self.padded(sums, np.inf)) - sums[:, None, :-1]
        return between

    def _at_borders(self, outputs: Array) -> tuple[Array, Array]:
        """Of what each layer puts out, what an interval takes in where it begins and puts out where it ends."""
        at_cuts = np.concatenate([np.zeros((len(outputs), 1)), outputs[:, self.cuts[1:] - 1]], axis=1)
        return at_cuts[:, None, :-1], self.at_ends(self.padded(at_cuts, 0.0))

    def padded(self, at_cuts: Array, beyond: float) -> Array:
        """Values at the cuts, and so many more that every interval ends at one."""
        return np.pad(at_cuts, ((0, 0), (0, self.longest - 1)), constant_values=beyond)

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
        held = np.minimum(place.in_flight, self.counts)[:, None, None]
        fixed_bytes = self._model_bytes + self._input_bytes * held
        if place.ahead is not None:
            fixed_bytes += self._output_bytes * np.minimum(place.window, self.counts)[:, None, None]
        seconds = self._seconds(place.slowdown, place.ahead, place.behind)
        saves = fixed_bytes + self._saved_bytes * held <= limit
        fits_once = fixed_bytes + self._saved_bytes <= limit
        if place.mode is None:
            again = np.where(fits_once, seconds[MODES[1]], np.inf)
            return StageTable(np.where(saves, seconds[MODES[0]], again), saves, None)
        fits = saves if place.mode == MODES[0] else fits_once
        return StageTable(np.where(fits, seconds[place.mode], np.inf), saves, place.mode)

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
