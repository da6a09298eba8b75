"""What a stage costs, for every interval of layers that it may consist of: seconds and, at least, bytes.

Tables have two axes, the interval's length less one, counted in borders, and the border where it begins:

    borders   0     1     2     3            [0, 1] is the interval between borders 1 and 2,
              |-----|-----|-----|            [1, 1] the one up to border 3; beyond the last border all is infinite

Bytes are what a stage holds for certain, in its first backward, its second, and the recomputations before them:

    first     parameters, optimizer             + inputs posted by then + what n - 1 others keep + a backward's peak
    second    parameters, optimizer, gradients  + the same, a micro-batch further

n being the forwards before it that are still needed. What is not counted are messages on their way out, so that the
evaluator never finds less than this.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gpipe_sim.base.arrays import Array
from gpipe_sim.cost.profile import COLUMNS, LayerCosts, Profile
from gpipe_sim.cost.transformer import bytes_per_parameter
from gpipe_sim.plan.stages import recomputed
from gpipe_sim.scenario.catalog import Link
from gpipe_sim.scenario.schema import Checkpoint, Scenario
from gpipe_sim.search.order import StageOrder
from gpipe_sim.search.setups import FASTEST_FIRST
from gpipe_sim.step.memory import backward_needs


class Position(NamedTuple):
    """Where a stage stands, as far as its costs depend on it."""

    slowdown: float
    after: Link | None
    """To the next stage."""
    before: Link | None
    """To the previous stage."""
    is_first: bool
    blocking: bool
    """Whether a sender waits until its message is delivered."""
    on_demand: bool
    """Whether recomputations wait for the gradient."""
    receives_ahead: int
    order: StageOrder
    forwards_first: int
    """Forwards of the last stage before its first backward."""


class StageSeconds(NamedTuple):
    """One mode of a stage as every interval. The first four are what `cuts` combines; see there."""

    chain: Array
    """A micro-batch forward and back, with the messages after it."""
    slack: Array
    """About what all other micro-batches add if this is the slowest stage."""
    extra: Array
    """What all other micro-batches add at least."""
    busy: Array
    """What the rank is busy with."""


class IntervalTables:
    """What the layers between two borders cost for one number of micro-batches."""

    def __init__(
        self,
        profile: Profile,
        scenario: Scenario,
        borders: Sequence[int],
        sizes: Sequence[int],
        longest: int,
        num_microbatches: int | None = None,
    ) -> None:
        """`sizes` are those of the micro-batches, or those of which each may be, if their number is given apart."""
        self.profile, self.sizes, self.num_microbatches = profile, sizes, num_microbatches or len(sizes)
        self.borders, self.longest = np.array(borders), longest
        begin, length = np.arange(len(borders) - 1)[None, :], np.arange(1, longest + 1)[:, None]
        self.begin, self.valid = begin, begin + length < len(borders)
        self.end = np.minimum(begin + length, len(borders) - 1)
        self.costs = {size: profile.at(size) for size in sorted(set(sizes))}
        self._per = bytes_per_parameter(scenario.optimizer, profile.dtype, scenario.precision)
        self._replicas, self._shard = scenario.plan.replicas, scenario.plan.shard
        self._known_bytes: dict[tuple[object, ...], Array] = {}
        self._known_seconds: dict[tuple[Position, Checkpoint], StageSeconds] = {}
        most = [
            max(same, key=lambda skip: skip.bytes) for same in zip(*(c.skips for c in self.costs.values()), strict=True)
        ]
        least = {name: self._over_sizes(name, np.minimum.reduce) for name in COLUMNS}
        self.least = LayerCosts(**least, skips=tuple(most))
        """Of each layer, what the cheapest micro-batch costs it, and what the dearest hands on, which is held once."""

    def _over_sizes(self, column: str, reduce: Callable[[list[Array]], Array]) -> Array:
        return reduce([getattr(costs, column) for costs in self.costs.values()])

    def total(self, column: str, chosen: Sequence[bool] | None = None) -> Array:
        """Of each layer, over the micro-batches of a step, or some of them."""
        counts = dict.fromkeys(self.costs, 0)
        for size, counted in zip(self.sizes, chosen or [True] * len(self.sizes), strict=True):
            counts[size] += counted
        total: Array = sum(
            (counts[size] * getattr(costs, column) for size, costs in self.costs.items()),
            np.zeros(self.profile.num_layers),
        )
        return total

    # --- sums, borders and maxima of intervals -----------------------------------------------------------------------

    def between(self, layers: Array) -> Array:
        """Sums over each interval, up to the last border where it would end beyond."""
        sums = np.append(0.0, np.cumsum(layers))[self.borders]
        found: Array = sums[self.end] - sums[self.begin]
        return found

    def at_begin(self, outputs: Array) -> Array:
        """What an interval takes in, of what each layer puts out: a row."""
        return np.append(0.0, outputs[self.borders[1:] - 1])[self.begin]

    def at_end(self, outputs: Array) -> Array:
        """What an interval puts out to the next stage; 0 at the last layer."""
        at_borders = np.append(0.0, outputs[self.borders[1:] - 1])
        at_borders[-1] = 0.0
        found: Array = at_borders[self.end]
        return found

    def highest(self, layers: Array, last_layers: Array) -> Array:
        """The highest of each interval's layers, the last of which has another value."""
        firsts, lasts = self.borders[:-1], self.borders[1:] - 1
        groups = np.maximum.reduceat(layers, firsts)
        changed = layers.copy()
        changed[lasts] = last_layers[lasts]
        with_last = np.maximum.reduceat(changed, firsts)
        inner = np.maximum.accumulate(groups[self.end - 1], axis=0)
        found: Array = with_last[self.end - 1]
        found[1:] = np.maximum(found[1:], inner[:-1])
        return found

    # --- seconds -----------------------------------------------------------------------------------------------------

    @cached_property
    def _forward_s(self) -> Array:
        return self.between(self.total("forward_s"))

    @cached_property
    def _backward_s(self) -> Array:
        return self.between(self.total("backward_s"))

    @cached_property
    def _recompute_s(self) -> dict[Checkpoint, Array]:
        M = self.num_microbatches
        return {mode: self.between(self.total("forward_s", recomputed(mode, M))) for mode in FASTEST_FIRST}

    @cached_property
    def _one_forward_s(self) -> Array:
        return self.between(self.least.forward_s)

    @cached_property
    def _one_backward_s(self) -> Array:
        return self.between(self.least.backward_s)

    @cached_property
    def _longest_forward_s(self) -> Array:
        return self.between(self._over_sizes("forward_s", np.maximum.reduce))

    @cached_property
    def uneven_s(self) -> float:
        """What the longest micro-batch takes more than the shortest, through all layers and back."""
        longest = [self._over_sizes(name, np.maximum.reduce).sum() for name in ("forward_s", "backward_s")]
        return float(sum(longest) - self.least.forward_s.sum() - self.least.backward_s.sum())

    @cached_property
    def _update_s(self) -> Array:
        return self.between(self.profile.optimizer_s) / (1 if self._shard == "none" else self._replicas)

    @cached_property
    def _sent_bytes(self) -> Array:
        return self.at_end(self.least.output_bytes)

    def seconds(self, at: Position, mode: Checkpoint) -> StageSeconds:
        """A stage in this position and mode; the terms are explained in `cuts`."""
        key = at, mode
        if key not in self._known_seconds:
            self._known_seconds[key] = self._make_seconds(at, mode)
        return self._known_seconds[key]

    def _make_seconds(self, at: Position, mode: Checkpoint) -> StageSeconds:
        M, overhead, hop = self.num_microbatches, self.profile.action_overhead_s, self.profile.hop_overhead_s
        times_recomputed = sum(recomputed(mode, M))
        forwards = self._forward_s * at.slowdown + M * overhead
        backwards = self._backward_s * at.slowdown + M * overhead
        again = self._recompute_s[mode] * at.slowdown + times_recomputed * overhead
        one_forward = self._one_forward_s * at.slowdown + overhead
        one_backward = self._one_backward_s * at.slowdown + overhead
        carried = self._sent_bytes / at.after.bandwidth if at.after else np.zeros_like(forwards)
        delay = at.after.latency + hop if at.after else 0.0
        if at.blocking:
            forwards = forwards + (M - 1) * (carried + delay) if at.after else forwards
            if at.before is not None:
                came = self.at_begin(self.least.output_bytes) / at.before.bandwidth
                backwards = backwards + (M - 1) * (came + at.before.latency + hop)

        def queue(count: int) -> Array:
            """What so many messages take after the first: one after the other, and no more ahead than are posted."""
            if at.after is None or count < 2:
                return np.zeros_like(forwards)
            return np.maximum((count - 1) * carried, (count - 1) // at.receives_ahead * (carried + delay))

        H = at.forwards_first
        phase = forwards - one_forward if H == M else (H - 1) * one_forward
        hidden = 0.0 if at.after is None or at.on_demand or not times_recomputed else 1.0
        after_first = again - hidden * (self._longest_forward_s * at.slowdown + overhead)
        rest = backwards + after_first + (M - at.order.before_first) * one_forward - one_backward
        messages = queue(M)
        chain = one_forward + one_backward + 2 * (carried + (delay if at.after else 0.0))
        if at.on_demand and mode == "always":  # every micro-batch waits for its recomputation, the first one too
            chain, rest = chain + one_forward, rest - one_forward
        update = self._update_s * at.slowdown + overhead if at.is_first else 0.0
        computing = forwards + backwards + again - one_forward - one_backward
        if H == M > 1:
            slack = np.maximum(forwards - one_forward, messages)
            slack += np.maximum(backwards + again - one_backward, messages)
        else:
            slack = np.maximum(computing, messages)
        return StageSeconds(
            chain=np.where(self.valid, chain, np.inf),
            slack=np.where(self.valid, slack, np.inf),
            extra=np.where(self.valid, np.maximum(phase, queue(H)) + np.maximum(rest, messages) + update, np.inf),
            busy=np.where(self.valid, forwards + backwards + again + update - overhead, np.inf),
        )

    # --- bytes -------------------------------------------------------------------------------------------------------

    def least_bytes(self, at: Position, mode: Checkpoint) -> Array:
        """What a stage holds at its fullest, at least."""
        key = at.is_first, at.receives_ahead, at.order, mode
        if key not in self._known_bytes:
            self._known_bytes[key] = self._make_least_bytes(at, mode)
        return self._known_bytes[key]

    @property
    def per_weight(self) -> float:
        """Bytes of weights and optimizer state per byte of weights, on each of the ranks that divide them."""
        state = self._per.optimizer / self._per.weight
        return 1 + (state if self._shard == "none" else state / self._replicas)

    @cached_property
    def _model_bytes(self) -> Array:
        return self.between(self.profile.parameter_bytes * self.per_weight)

    @cached_property
    def _gradient_bytes(self) -> Array:
        return self.between(self._new_gradients)

    @property
    def _new_gradients(self) -> Array:
        gradients: Array = self.profile.parameter_bytes * (self._per.gradient / self._per.weight)
        return gradients

    @cached_property
    def _kept_bytes(self) -> Array:
        """Of one micro-batch that is not recomputed."""
        return self.between(self.least.saved_bytes)

    @cached_property
    def _peaks(self) -> tuple[Array, Array, Array]:
        """One micro-batch's own bytes at their highest: in the first backward, in another one, in a forward."""
        costs, saved = self.least, np.cumsum(self.least.saved_bytes)
        gradient_in = costs.output_bytes.copy()
        for skip in costs.skips:  # whose gradient may be a received one
            gradient_in[max(skip.made, 0) : skip.used] -= skip.bytes
        gradient_in = np.maximum(gradient_in, 0.0)
        at_the_end = np.zeros_like(gradient_in)
        at_the_end[-1] = gradient_in[-1]  # received ones are counted apart
        making, adding = backward_needs(costs, self._new_gradients)
        gradients = np.cumsum(self._new_gradients)
        below = np.append(0.0, saved)[self.borders][self.begin]
        up_to = np.append(0.0, gradients)[self.borders][self.end]
        making = making - gradients
        first = self.highest(saved + making + gradient_in, saved + making + at_the_end) + up_to - below
        other = self.highest(saved + adding + gradient_in, saved + adding + at_the_end) - below
        forward = saved + costs.workspace_forward_bytes
        kept = self._kept_bytes
        return (
            np.maximum(first, kept),
            np.maximum(other, kept),
            np.maximum(self.highest(forward, forward) - below, kept),
        )

    def _make_least_bytes(self, at: Position, mode: Checkpoint) -> Array:
        M, order, ahead = self.num_microbatches, at.order, at.receives_ahead
        first_peak, other_peak, forward_peak = self._peaks
        inputs, outputs = self.at_begin(self.least.output_bytes), self._sent_bytes
        again = recomputed(mode, M)

        def others(held: int, counted: int) -> int:
            """Of so many other micro-batches in flight, those that keep their activations: all, or the last."""
            last_is_held = not again[-1] and not order.last_first and order.before_first == M > counted
            return held if mode == "never" else int(last_is_held)

        n, m = order.before_first, order.before_second
        constant = self._model_bytes + (round(self.profile.input_bytes * sum(self.sizes)) if at.is_first else 0.0)
        first = others(n - 1, 1) * self._kept_bytes + inputs * min(M, n + ahead)
        backward = first + first_peak + outputs * min(n, 1 + ahead)  # gradients of outputs that were sent
        rebuilt = first + forward_peak * again[0 if not order.last_first else -1] + outputs * min(n, ahead)
        least = np.maximum(backward, rebuilt)
        if M > 1:
            second = others(m - 2, 2) * self._kept_bytes + inputs * (min(M, m + ahead) - 1) + self._gradient_bytes
            backward = second + other_peak + outputs * (min(m, 2 + ahead) - 1)
            rebuilt = second + forward_peak * again[0] + outputs * (min(m, 1 + ahead) - 1)
            least = np.maximum(least, np.maximum(backward, rebuilt))
        # What takes no time leaves no trace, and bytes of each message and micro-batch are rounded.
        timed = (self._one_backward_s > 0) & (self._one_forward_s > 0)
        least = np.where(timed, least, 0.0) + constant - 2 * M - 8
        return np.where(self.valid, least, np.inf)
