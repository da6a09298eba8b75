"""Step: one training step as it happened or as it is predicted to happen; the one type for both.

A rank's record has one row per action of its list:

    rank 1   |--wait--|==1F0==|        |==1F1==|
                      ^start_s^end_s
             arrived_s, its input      its message: sent at the action's end, on the link from send_start_s,
                                       delivered at send_end_s
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_sim.profile import Array
from gpipe_sim.schedule import Action, ActionList, Kind

_COMPUTING: tuple[Kind, ...] = ("F", "R", "B")
Lane = Literal["compute", "send", "receive"]


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
    stage: int
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

    def rows(self, num_microbatches: int) -> dict[str, npt.NDArray[np.int_]]:
        """Kind (F, R, B) -> micro-batch -> the row of that action; -1 where there is none."""
        found: dict[str, npt.NDArray[np.int_]] = {}
        for kind in _COMPUTING:
            rows = np.flatnonzero(self.actions.are(kind))
            found[kind] = np.full(num_microbatches, -1)
            found[kind][self.actions.microbatches[rows]] = rows
        return found

    @property
    def taken_s(self) -> Array:
        """When the rank turned to each action: it was free, and the message that the action needs was there."""
        held = np.fmax(self.end_s, self.send_end_s) if self.blocking else self.end_s
        taken: Array = np.fmax(np.append(0.0, held[:-1]), self.arrived_s)
        return taken

    def busy_s(self) -> float:
        """Seconds in F, R and B."""
        is_compute = ~self.actions.are("U")
        return float((self.end_s - self.start_s)[is_compute].sum())

    def spans(self) -> Iterator[Span]:
        """The three lanes, span by span."""
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


MEMORY_PARTS = ("parameters", "optimizer", "gradients", "inputs", "activations", "workspace", "buffers")
MODEL_PARTS = ("parameters", "optimizer", "gradients")
"""Those that do not depend on the data; the rest is activation memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryCurve:
    """One rank's bytes over time: from `times[i]` on, part p holds `parts[p][i]` bytes."""

    times: Array
    parts: Mapping[str, Array]

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

    ranks: tuple[RankTimeline, ...]
    memory: tuple[MemoryCurve, ...] = ()
    """One curve per rank; empty where only times were asked for."""

    def spans(self) -> Iterator[Span]:
        """Every span of every rank."""
        for timeline in self.ranks:
            yield from timeline.spans()
