"""Spans on this rank: when each action waited, computed and had its message delivered, step by step.

A mark on the CPU is the time; on a GPU it is a CUDA event, read when the step is over, so that recording never makes
the host wait for the device. Times are those of this rank's own clock (see `clocks`).
"""

import time
from dataclasses import dataclass, field

import torch

Mark = float | torch.cuda.Event


@dataclass
class StepRecord:
    """One step of one rank: a row for each of its actions, in seconds of its own clock."""

    waited_from: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    delivered: list[float] = field(default_factory=list)
    """When the action's message was delivered; NaN where it sent none."""


class Recorder:
    """Collects the steps that it is told to; off, it costs nothing but a comparison."""

    def __init__(self, device: torch.device | None = None, *, enabled: bool = False) -> None:
        self.enabled = enabled
        self.steps: list[StepRecord] = []
        self._cuda = device if device is not None and device.type == "cuda" else None
        self.latest_s = 0.0
        """When the latest mark was made, by the host's clock."""
        self._marks: list[tuple[float, Mark, Mark]] = []
        self._origin: tuple[float, torch.cuda.Event] | None = None

    def begin_step(self) -> None:
        """The step's actions follow."""
        self._marks = []
        if self.enabled and self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
            self._origin = (time.perf_counter(), _event())

    def mark(self) -> Mark:
        """This moment, on the device that computes."""
        self.latest_s = time.perf_counter()
        if self.enabled and self._cuda is not None:
            return _event()
        return self.latest_s

    def action(self, waited_from: float, start: Mark, end: Mark) -> None:
        """One action: from when the rank was ready for it, and its compute."""
        if self.enabled:
            self._marks.append((waited_from, start, end))

    def end_step(self, delivered: list[float]) -> None:
        """The step is over; `delivered` has a row for each action."""
        if not self.enabled:
            return
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        rows = [(waited, self._seconds(start), self._seconds(end)) for waited, start, end in self._marks]
        waited_from, start_s, end_s = (list(column) for column in zip(*rows, strict=True))
        self.steps.append(StepRecord(waited_from, start_s, end_s, delivered))

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert self._origin is not None, "a step begins before its marks"
        began, event = self._origin
        return began + float(event.elapsed_time(mark)) / 1e3


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no type
    event.record()
    return event
