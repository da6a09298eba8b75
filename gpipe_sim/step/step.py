"""Step: one training step as it happened or as it is predicted to happen; the one type for both.

A rank's record has one row per action of its list:

    rank 1   |--wait--|==1F0==|        |==1F1==|
                      ^start_s^end_s
             arrived_s, its input      its message: sent at the action's end, on the link from send_start_s,
                                       delivered at send_end_s

and one row per collective of its lane, beside them:

    lane 1                       |==1S====|
                                 ^lane_start_s, once all replicas have their gradients
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from gpipe_sim.base.arrays import Array, Flags
from gpipe_sim.base.units import format_bytes, format_seconds
from gpipe_sim.plan.actions import KINDS, Action
from gpipe_sim.plan.lanes import Lane as Collectives
from gpipe_sim.plan.order import ActionList
from gpipe_sim.plan.program import Program

Lane = Literal["compute", "send", "receive", "collective"]


class Span(NamedTuple):
    """One stretch of time on one of a rank's lanes; in the receive lane it is the time spent waiting for a message."""

    rank: int
    lane: Lane
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RankTimeline:
    """What one rank did: parallel columns, one entry per action; NaN where an action receives or sends nothing."""

    rank: int
    actions: ActionList
    start_s: Array
    end_s: Array
    arrived_s: Array
    """When the message that the action needs was delivered."""
    send_start_s: Array
    """When the action's own message began to occupy its link."""
    send_end_s: Array
    """When the action's own message was delivered."""
    blocking: bool = False
    """Whether the rank stood still until each of its messages was delivered."""
    lane: Collectives = ()
    """What it did together with the same rank of other replicas."""
    lane_start_s: Array = field(default_factory=lambda: np.empty(0))
    """By collective, as the next."""
    lane_end_s: Array = field(default_factory=lambda: np.empty(0))

    def __repr__(self) -> str:
        held, end = stages_text(self.stages), format_seconds(float(self.end_s.max()))
        return f"RankTimeline(rank {self.rank}, {held}: {len(self.actions)} actions, {end})"

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that the rank holds."""
        return self.actions.holds

    @property
    def is_compute(self) -> Flags:
        """Which actions count as busy time: all but updates."""
        found: Flags = np.any([self.actions.are(letter) for letter, kind in KINDS.items() if kind.computes], axis=0)
        return found

    @property
    def collected_s(self) -> Array:
        """When the collectives that each action waits for had ended; NaN where there is none."""
        collected = np.full(len(self.end_s), np.nan)
        before = [collective.before for collective in self.lane]
        waited = np.array(before, dtype=int) >= 0
        np.fmax.at(collected, np.array(before, dtype=int)[waited], self.lane_end_s[waited])
        return collected

    @property
    def taken_s(self) -> Array:
        """When the rank turned to each action: it was free, and what the action needs was there."""
        held = np.fmax(self.end_s, self.send_end_s) if self.blocking else self.end_s
        taken: Array = np.fmax(np.append(0.0, held[:-1]), self.arrived_s)
        return np.fmax(taken, self.collected_s) if self.lane else taken

    @property
    def first_start_s(self) -> float:
        """When the first action, or collective, started."""
        return float(np.min([self.start_s[0], *self.lane_start_s]))

    @property
    def last_end_s(self) -> float:
        """When the update, or a collective after it, ended."""
        return float(np.max([self.end_s[-1], *self.lane_end_s]))

    def busy_s(self) -> float:
        """Seconds of compute: in everything but updates."""
        return float((self.end_s - self.start_s)[self.is_compute].sum())

    @property
    def last_backward_s(self) -> float:
        """When the rank's last backward, or W, ended."""
        ends = self.actions.are("B") | self.actions.are("W")
        return float(self.end_s[ends].max())

    def spans(self) -> Iterator[Span]:
        """The lanes, span by span."""
        for collective, start_s, end_s in zip(self.lane, self.lane_start_s, self.lane_end_s, strict=True):
            yield Span(self.rank, "collective", collective.action, float(start_s), float(end_s))
        free = 0.0
        for i, action in enumerate(self.actions):
            start, end = float(self.start_s[i]), float(self.end_s[i])
            if self.arrived_s[i] > free:
                yield Span(self.rank, "receive", action, free, float(self.arrived_s[i]))
            yield Span(self.rank, "compute", action, start, end)
            free = end
            if not np.isnan(self.send_end_s[i]):
                yield Span(self.rank, "send", action, float(self.send_start_s[i]), float(self.send_end_s[i]))
                if self.blocking:
                    free = float(self.send_end_s[i])


def stages_text(stages: Sequence[int]) -> str:
    """``stage 2``, or ``stages 2 and 6``."""
    *most, last = map(str, stages)
    return f"stages {', '.join(most)} and {last}" if most else f"stage {last}"


MEMORY_PARTS = ("parameters", "optimizer", "gradients", "inputs", "activations", "workspace", "buffers")
MODEL_PARTS = ("parameters", "optimizer", "gradients")
"""Those that do not depend on the data; the rest is activation memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryCurve:
    """One rank's bytes over time: from `times[i]` on, part p holds `parts[p][i]` bytes."""

    times: Array
    parts: Mapping[str, Array]

    def __repr__(self) -> str:
        return f"MemoryCurve({len(self.times)} points, peak {format_bytes(self.peak_bytes)})"

    @property
    def total(self) -> Array:
        """Bytes of all parts."""
        total: Array = np.sum(list(self.parts.values()), axis=0)
        return total

    @property
    def peak_index(self) -> int:
        """Where the total is largest, for the first time."""
        return int(np.argmax(self.total))

    @property
    def peak_bytes(self) -> int:
        """The largest total."""
        return int(np.ceil(self.total[self.peak_index]))

    @property
    def activation_bytes(self) -> int:
        """The peak less parameters, gradients and optimizer state."""
        return int(
            np.ceil(sum(values[self.peak_index] for part, values in self.parts.items() if part not in MODEL_PARTS))
        )

    def at_peak(self) -> dict[str, float]:
        """What the peak is made of."""
        return {part: float(values[self.peak_index]) for part, values in self.parts.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A timeline and the memory that goes with it, rank by rank in the order of `Plan.ranks`."""

    program: Program
    """What was run."""
    ranks: tuple[RankTimeline, ...]
    memory: tuple[MemoryCurve, ...] = ()
    """One curve per rank; empty where only times were asked for."""
    replicas: tuple["Step", ...] = ()
    """Where replicas differ, all of them; `ranks` and `memory` are then those of the one whose backwards end last."""

    def __repr__(self) -> str:
        end_s = max(float(timeline.end_s.max()) for timeline in self.ranks)
        return f"Step({len(self.ranks)} ranks, {self.program.num_actions} actions, {format_seconds(end_s)})"

    def spans(self) -> Iterator[Span]:
        """Every span of every rank."""
        for timeline in self.ranks:
            yield from timeline.spans()


def joined_replicas(steps: Sequence[Step]) -> Step:
    """One step of those of its replicas, or of the only one."""
    if len(steps) == 1:
        return steps[0]
    slowest = max(steps, key=lambda step: max(timeline.last_backward_s for timeline in step.ranks))
    return replace(slowest, replicas=tuple(steps))
