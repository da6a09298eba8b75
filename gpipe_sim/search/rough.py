"""A bound for every setup of a space without cutting each: what the largest stage takes at least, for all M at once.

It takes microseconds a setup, so that of ten thousand only those are cut that might hold the best plan. The terms are
those of `cuts`; here a stage has the speed of the fastest rank, a link the width of the widest, and memory does not
matter.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from gpipe_sim.base.arrays import Array
from gpipe_sim.cost.profile import Profile
from gpipe_sim.plan.stages import microbatch_sizes, recomputed
from gpipe_sim.scenario.schema import Checkpoint, Scenario, ScheduleName
from gpipe_sim.search.cuts import Modes
from gpipe_sim.search.order import stage_order
from gpipe_sim.search.setups import FASTEST_FIRST, Setup

_ALL = 2**31
"""Stands for at least as many forwards as there are micro-batches."""


class _Layers(NamedTuple):
    """Seconds of each layer, for one M."""

    forwards: Array
    """Of all micro-batches."""
    backwards: Array
    one_forward: Array
    """Of the shortest micro-batch."""
    one_backward: Array
    smallest_message: float
    """Bytes at the narrowest border."""
    uneven_s: float
    """What the longest micro-batch takes more than the shortest, through all layers and back."""


class _Ranks(NamedTuple):
    """Of one placement."""

    speed: float
    """Of all ranks together."""
    fastest: float
    """The smallest slowdown."""
    latency_s: float
    """From the first stage to the last."""
    least_latency_s: float
    """Of one link."""
    seconds_per_byte: float
    """Of the widest link."""


class Rough(NamedTuple):
    """What is said of a setup."""

    bound_s: float
    """No plan is faster."""
    estimate_s: float
    """About what its best plan takes: which setups to look at first."""


class _Parts(NamedTuple):
    """Of a setup, what does not depend on its window. The first four are named as in `tables`."""

    chain: float
    extra: float
    slack: float
    busy: float
    trips: int
    """Round trips that follow each other."""
    waits: float
    """About the same, less the first."""
    message_s: float
    forwards_first: int
    uneven_s: float


class RoughBounds:
    """Of the setups of one scenario."""

    def __init__(self, scenario: Scenario, profile: Profile, counts: Sequence[int]) -> None:
        self.scenario, self.profile = scenario, profile
        self.counts = {M: row for row, M in enumerate(sorted(counts))}
        self._layers, self._sums = cache(self._make_layers), cache(self._make_sums)
        self._ranks, self._parts = cache(self._make_ranks), cache(self._make_parts)
        self._up_to, self._largest = cache(self._make_up_to), cache(self._make_largest)

    def of(self, setup: Setup, modes: Modes) -> Rough:
        """The bound and the estimate of a setup with these modes."""
        M, K = setup.num_microbatches, setup.num_stages
        mode = FASTEST_FIRST[0]
        if modes is not None:
            mode = min(set(modes) if isinstance(modes, tuple) else {modes}, key=FASTEST_FIRST.index)
        parts = self._parts(K, M, setup.schedule, setup.placement, mode)
        overhead = self.profile.action_overhead_s
        phases = [(n - 1) // setup.receives_ahead * parts.message_s for n in (parts.forwards_first, M)]
        messages = sum(phases) if K > 1 else 0.0
        bound = max(parts.busy, parts.chain + max(parts.extra, messages), parts.trips * parts.chain)
        estimate = parts.chain + parts.uneven_s + max(parts.slack, messages, parts.waits * parts.chain)
        return Rough(bound - overhead, estimate - overhead)

    def _make_parts(
        self,
        K: int,
        M: int,
        schedule: ScheduleName,
        placement: tuple[int, ...],
        mode: Checkpoint,
    ) -> _Parts:
        layers, ranks = self._sums(M), self._ranks(placement)
        first, last = stage_order(schedule, 0, K, M, "fifo"), stage_order(schedule, K - 1, K, M, "fifo")
        is_phase, held = last.before_first == M, first.before_first
        transfer = layers.smallest_message * ranks.seconds_per_byte
        once = float(layers.one_forward + layers.one_backward)
        chain = once * ranks.fastest + 2 * (ranks.latency_s + (K - 1) * transfer)
        slack = self._stage_s(K, M, mode, ranks, 0, is_after_first=True)
        # Rounded up, so that there are few kinds to make: a bound may be lower.
        held = _ALL if held >= M else 1 << (held - 1).bit_length()
        return _Parts(
            chain=chain,
            extra=slack if is_phase else self._stage_s(K, M, mode, ranks, held, is_after_first=True),
            slack=slack,
            busy=self._stage_s(K, M, mode, ranks, 0, is_after_first=False),
            trips=-(-M // first.in_flight),
            waits=M / first.in_flight - 1,
            message_s=ranks.least_latency_s + transfer,
            forwards_first=last.before_first,
            uneven_s=layers.uneven_s * ranks.fastest * (1 - 1 / K),
        )

    def _stage_s(self, K: int, M: int, mode: Checkpoint, ranks: _Ranks, held: int, *, is_after_first: bool) -> float:
        """Of the largest stage: the smallest that it can be, or an equal share of all."""
        row = self.counts[M]
        largest = float(self._largest(K, mode, held, is_after_first)[row])
        return max(largest * ranks.fastest, float(self._up_to(mode, held, is_after_first)[row, -1]) / ranks.speed)

    def _make_up_to(self, mode: Checkpoint, held: int, is_after_first: bool) -> Array:
        """For each M, seconds of the layers up to each border."""
        rows = np.array([self._weights(M, mode, held, is_after_first) for M in self.counts])
        sums: Array = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)
        return sums

    def _make_largest(self, K: int, mode: Checkpoint, held: int, is_after_first: bool) -> Array:
        """For each M, seconds that some stage takes at least: it has a K-th of the layers, rounded up, and one stage
        has the largest layer."""
        sums = self._up_to(mode, held, is_after_first)
        some = -(-self.profile.num_layers // K)
        least = (sums[:, some:] - sums[:, :-some]).min(axis=1)
        found: Array = np.maximum(least, np.diff(sums, axis=1).max(axis=1))
        return found

    def _weights(self, M: int, mode: Checkpoint, held: int, is_after_first: bool) -> Array:
        """Seconds of each layer that count for a stage: those of its forwards too that do not come before its first
        backward, which are all but `held`; none are where all forwards come before any backward, and all count."""
        layers = self._layers(M)
        again = sum(recomputed(mode, M)) * layers.one_forward
        if not is_after_first:
            return layers.forwards + layers.backwards + again
        forwards = layers.forwards - layers.one_forward if held == 0 else max(0, M - held) * layers.one_forward
        found: Array = forwards + layers.backwards - layers.one_backward
        return found

    def _make_ranks(self, placement: tuple[int, ...]) -> _Ranks:
        K, cluster = len(placement), self.scenario.cluster
        slowdowns = [cluster.slowdown.get(rank, 1.0) for rank in placement]
        any_plan = Setup(K, 1, "naive", "early", "fifo", None, placement).plan(
            self.scenario, self.profile, (1,) * K, (FASTEST_FIRST[0],) * K
        )
        links = [any_plan.link(k) for k in range(K - 1)]
        latencies = [link.latency + self.profile.hop_overhead_s for link in links]
        return _Ranks(
            speed=sum(1 / slowdown for slowdown in slowdowns),
            fastest=min(slowdowns),
            latency_s=sum(latencies),
            least_latency_s=min(latencies, default=0.0),
            seconds_per_byte=min((1 / link.bandwidth for link in links), default=0.0),
        )

    def _make_layers(self, num_microbatches: int) -> _Layers:
        sizes = microbatch_sizes(self.scenario.samples, num_microbatches)
        costs = {size: self.profile.at(size) for size in set(sizes)}
        nothing = np.zeros(self.profile.num_layers)
        outputs = [float(one.output_bytes[:-1].min(initial=np.inf)) for one in costs.values()]
        return _Layers(
            forwards=sum((sizes.count(size) * one.forward_s for size, one in costs.items()), nothing),
            backwards=sum((sizes.count(size) * one.backward_s for size, one in costs.items()), nothing),
            one_forward=np.minimum.reduce([one.forward_s for one in costs.values()]),
            one_backward=np.minimum.reduce([one.backward_s for one in costs.values()]),
            smallest_message=min(outputs) if self.profile.num_layers > 1 else 0.0,
            uneven_s=float(np.ptp([(one.forward_s + one.backward_s).sum() for one in costs.values()])),
        )

    def _make_sums(self, num_microbatches: int) -> _Layers:
        """The same, of all layers together."""
        layers = self._layers(num_microbatches)
        forwards, backwards, one_forward, one_backward = (part.sum() for part in layers[:4])
        return _Layers(forwards, backwards, one_forward, one_backward, *layers[4:])
