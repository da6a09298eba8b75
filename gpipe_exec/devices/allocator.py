"""Bytes as the allocator itself counts them: over time, and the highest point that some work reaches.

Counting slows the work, so it happens in a step of its own that is never timed.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from gpipe_exec.devices.accelerator import bytes_of_device, forget_highest

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
    the byte. On an accelerator the allocator's own statistics give the peak, which is all that is kept there: of active
    blocks, among which are those that a transfer still reads after they were let go.
    """
    began = time.perf_counter()
    if device.type != "cpu":
        before = bytes_of_device(device)
        forget_highest(device)
        with _older_garbage_left():
            result = work()
        after = bytes_of_device(device)
        held = [after.highest - before.active, after.active - before.active]
        return Trace([began, time.perf_counter()], held), result
    clocks_apart_s = time.time() - time.perf_counter()  # the profiler's clock is the wall's
    # Not torch.profiler.profile, which describes the process groups in its trace and never lets go of them again.
    with _older_garbage_left(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        result = work()
    assert profile.kineto_results is not None, "the profiler has run"
    changes = _changes(profile.kineto_results.experimental_event_tree())
    held = np.cumsum([num_bytes for _, num_bytes in changes], dtype=int).tolist()
    return Trace([began, *(time_ns / 1e9 - clocks_apart_s for time_ns, _ in changes)], [0, *held]), result


def _changes(events: Sequence[Any]) -> list[tuple[int, int]]:
    """When the profiler saw bytes taken, or let go of (negative), in their order.

    A thread of gloo's may be the last to hold what a collective was given, and nothing sees it let go. That the memory
    is taken again tells it.
    """
    found: list[tuple[int, int, int]] = []
    stack = list(events)
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == _ALLOCATION and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr))
    found.sort(key=lambda one: one[0])
    changes, live = [], dict[int, int]()
    for time_ns, num_bytes, place in found:
        if num_bytes > 0 and place in live:
            changes.append((time_ns, -live[place]))
        if num_bytes > 0:
            live[place] = num_bytes
        else:
            live.pop(place, None)
        changes.append((time_ns, num_bytes))
    return changes


_ALLOCATION = torch._C._profiler._EventType.Allocation


@contextmanager
def _older_garbage_left() -> Iterator[None]:
    """Meanwhile Python's collector looks only at what is made from now on.

    Tensors in cycles that nobody holds any more may be freed at any later moment: in the middle of a trace their bytes
    would be taken off work that never held them.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def peak_bytes(device: torch.device, work: Callable[[], T]) -> tuple[int, T]:
    """The highest point during the work, in bytes above its start, and its result."""
    trace, result = trace_bytes(device, work)
    return trace.peak_bytes, result


class Part(NamedTuple):
    """Bytes of one part of some work, above those at the start of all of it."""

    before: int
    highest: int
    after: int


def bytes_of_parts(device: torch.device, parts: Sequence[Callable[[], object]]) -> list[Part]:
    """What is held during work that is done in several parts.

    A part may free what an earlier one has made: on the CPU only a trace of all of them sees that.
    """
    if device.type != "cpu":
        found, held = [], 0
        for part in parts:
            trace, _ = trace_bytes(device, part)
            found.append(Part(held, held + trace.peak_bytes, held := held + trace.held_bytes[-1]))
        return found

    def all_of_them() -> None:
        for part in parts:
            part()
            torch.empty(_MARK_BYTES, dtype=torch.uint8)  # made and freed at once: two events, where this part ends

    trace, _ = trace_bytes(device, all_of_them)
    changes = np.diff(trace.held_bytes)
    marks = np.flatnonzero((changes[:-1] == _MARK_BYTES) & (changes[1:] == -_MARK_BYTES)).tolist()
    assert len(marks) == len(parts), "each part has its mark"
    begins = [0, *(mark + 2 for mark in marks[:-1])]
    levels = trace.held_bytes
    return [Part(levels[a], max(levels[a : b + 1]), levels[b]) for a, b in zip(begins, marks, strict=True)]


_MARK_BYTES = 15_485_863
"""A prime number of bytes, which no tensor of a model has. The profiler's clock and ours may be milliseconds apart, so
that times do not tell where one part ends and the next begins."""


def peak_of_second(device: torch.device, first: Callable[[], T], second: Callable[[T], object]) -> tuple[int, T]:
    """The highest point while the second work is done with the first's result, in bytes above where it began."""
    made: list[T] = []
    _, part = bytes_of_parts(device, [lambda: made.append(first()), lambda: second(made[0])])
    return part.highest - part.before, made[0]


def storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Of distinct storages, each counted once."""
    storages = [storage_of(tensor) for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Where its numbers are; those of a DTensor that this process holds."""
    return local_part(tensor).untyped_storage()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor, without a graph."""
    with torch.no_grad():
        found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return found.wait() if isinstance(found, AsyncCollectiveTensor) else found  # what a collective is still making
