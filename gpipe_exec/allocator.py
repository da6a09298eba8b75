"""Bytes as the allocator itself counts them: the highest point that some work reaches above where it began."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def peak_bytes(device: torch.device, work: Callable[[], T]) -> tuple[int, T]:
    """The peak during the work, in bytes above its start, and its result. It slows the work: never time it too.

    On a GPU the allocator keeps the figure. On the CPU the profiler's memory events carry every allocation and every
    free; the maximum of their running sum is the peak, to the byte.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before, result
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = work()
    assert profile.profiler is not None, "the profiler has run"
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest, result
