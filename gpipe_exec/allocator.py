"""Bytes as the allocator itself counts them: over time, and the highest point that some work reaches.

Counting slows the work, so it happens in a step of its own that is never timed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Trace:
    """Bytes held above those at the start: from `times_s[i]` on, `held_bytes[i]`."""

    times_s: list[float]
    """On the clock of `time.perf_counter`."""
    held_bytes: list[int]

    @property
    def peak_bytes(self) -> int:
        """The highest point."""
        return max(self.held_bytes, default=0)

    def thinned(self, num_points: int = 2000) -> "Trace":
        """At most about so many points: where there are more, the highest of each stretch of time, and the last."""
        if len(self.times_s) <= num_points:
            return self
        times, held = np.array(self.times_s), np.array(self.held_bytes)
        edges = np.searchsorted(times, np.linspace(times[0], times[-1], num_points // 2))
        firsts = np.unique(np.append(0, edges[edges < len(times)]))
        stretches = zip(firsts, np.append(firsts[1:], len(times)), strict=True)
        kept = sorted({index for a, b in stretches for index in (a + int(held[a:b].argmax()), b - 1)})
        return Trace(times[kept].tolist(), held[kept].tolist())


def trace_bytes(device: torch.device, work: Callable[[], T]) -> tuple[Trace, T]:
    """The bytes held while the work is done, and its result.

    On the CPU the profiler's memory events carry every allocation and every free, and their running sum is exact to
    the byte. On a GPU the allocator's own statistics give the peak, which is all that is kept there.
    """
    began = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = work()
        torch.cuda.synchronize(device)
        peak, after = (f(device) - before for f in (torch.cuda.max_memory_allocated, torch.cuda.memory_allocated))
        return Trace([began, time.perf_counter()], [peak, after]), result
    clocks_apart_s = time.time() - time.perf_counter()  # the profiler's clock is the wall's
    # Not torch.profiler.profile, which describes the process groups in its trace and never lets go of them again.
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        result = work()
    assert profile.kineto_results is not None, "the profiler has run"
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = np.cumsum([event.nbytes() for event in events], dtype=int).tolist()
    return Trace([began, *(event.start_ns() / 1e9 - clocks_apart_s for event in events)], [0, *held]), result


def peak_bytes(device: torch.device, work: Callable[[], T]) -> tuple[int, T]:
    """The highest point during the work, in bytes above its start, and its result."""
    trace, result = trace_bytes(device, work)
    return trace.peak_bytes, result


def peak_of_second(device: torch.device, first: Callable[[], T], second: Callable[[T], object]) -> tuple[int, T]:
    """The highest point while the second work is done with the first's result, in bytes above where it began.

    The second may free what the first has made: on the CPU only a trace of both sees that.
    """
    if device.type == "cuda":
        made = first()
        peak, _ = peak_bytes(device, lambda: second(made))
        return peak, made
    began = 0.0

    def both() -> T:
        nonlocal began
        made = first()
        time.sleep(1e-3)  # so that no event is taken for one of the other part
        began = time.perf_counter()
        time.sleep(1e-3)
        second(made)
        return made

    trace, made = trace_bytes(device, both)
    place = int(np.searchsorted(trace.times_s, began))
    return max(trace.held_bytes[place - 1 :]) - trace.held_bytes[place - 1], made


def storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Of distinct storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
