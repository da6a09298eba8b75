"""Spans on this rank: when each action waited, computed and had its message delivered, step by step.

A mark on the CPU is the time; on an accelerator it is an event, read when the step is over, so that recording never
makes the host wait for the device. Times are those of this rank's own clock (see `clocks`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gpipe_exec.devices.accelerator import Beside, Mark, beside


@dataclass
class StepRecord:
    """One step of one rank: a row for each of its actions, in seconds of its own clock."""

    waited_from: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    delivered: list[float] = field(default_factory=list)
    """When the action's message was delivered; NaN where it sent none."""
    lane_start: list[float] = field(default_factory=list)
    """When this rank was ready for each collective of its lane."""
    lane_end: list[float] = field(default_factory=list)
    """When that had ended here."""


class Recorder:
    """Collects the steps that it is told to; off, it costs nothing but a comparison."""

    def __init__(self, device: torch.device | Beside | None = None, *, enabled: bool = False) -> None:
        self.enabled = enabled
        self.steps: list[StepRecord] = []
        self._device: Beside | None = beside(device) if isinstance(device, torch.device) else device
        self.latest_s = 0.0
        """When the latest mark was made, by the host's clock."""
        self._marks: list[tuple[Mark, Mark, Mark]] = []

    def begin_step(self) -> None:
        """The step's actions follow."""
        self._marks = []
        if self.enabled and self._device is not None:
            self._device.start_clock()

    def mark(self) -> Mark:
        """This moment, on the device that computes."""
        self.latest_s = time.perf_counter()
        if self.enabled and self._device is not None:
            return self._device.mark()
        return self.latest_s

    def action(self, waited_from: Mark, start: Mark, end: Mark) -> None:
        """One action: from when the rank was ready for it, and its compute."""
        if self.enabled:
            self._marks.append((waited_from, start, end))

    def end_step(self, delivered: Sequence[Mark], lane: Sequence[tuple[Mark, Mark]] = ()) -> None:
        """The step is over; `delivered` has a row for each action, `lane` start and end of each collective."""
        if not self.enabled:
            return
        if self._device is not None:
            self._device.synchronize()
        columns = [self._seconds(column) for column in (*zip(*self._marks, strict=True), delivered)]
        columns += [self._seconds(column) for column in (zip(*lane, strict=True) if lane else ((), ()))]
        self.steps.append(StepRecord(*columns))

    def _seconds(self, marks: Sequence[Mark]) -> list[float]:
        if self._device is None:
            return [mark for mark in marks if isinstance(mark, float)]
        return [self._device.seconds(mark) for mark in marks]
