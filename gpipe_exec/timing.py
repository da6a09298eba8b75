"""The times of layers, each by itself, in the setting in which a stage runs them.

Every rank runs its own layers at the same time as the others, because cores share caches and memory: a few
micro-batches forward, then backward in reverse, as a stage does.

    forward     |0|1|2|  |0|1|2|  |0|1|2|        a clock around each layer of each micro-batch
    backward                               |2|1|0|  |2|1|0|  |2|1|0|

Ranks that share a core take turns on it. What a layer costs is then the core's time that it takes, its caches shared
with the others; how long it takes by the clock on the wall depends on who else is computing, which is for the
simulator to say. So the clock is the thread's own.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from gpipe_exec.layers import Workload
from gpipe_exec.messages import Value, flatten, unflatten, wants_gradient

T = TypeVar("T")

IN_A_ROW = 4
"""Micro-batches that go forward before the first goes backward, if there are as many."""


def layer_clock(device: torch.device, *, shares_core: bool) -> Callable[[], float]:
    """The clock that tells what layers cost here."""
    if shares_core:
        return time.thread_time
    if device.type == "cpu":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


class LayerTimer:
    """Times one rank's layers at one micro-batch size, as often as it is asked to; all ranks together."""

    def __init__(
        self,
        workload: Workload,
        share: range,
        size: int,
        num_microbatches: int,
        device: torch.device,
        now: Callable[[], float],
    ) -> None:
        self._workload, self._share, self._now = workload, share, now
        self.in_a_row = max(1, min(IN_A_ROW, num_microbatches))
        value, targets = workload.sample(size)
        with torch.no_grad():
            for layer in list(workload.layers)[: share.start]:  # each where it is: a run moves only its own stage's
                where = next((parameter.device for parameter in layer.parameters()), None)
                value = layer(on_device(value, where) if where else value)
        self._boundary, self._targets = on_device(value, device), on_device(targets, device)
        self.passes: list[dict[int, tuple[float, float]]] = []
        """Of each micro-batch timed, layer -> seconds of its forward and backward."""

    def measure(self) -> None:
        """`in_a_row` micro-batches forward, then backward. Gradients are left on the layers."""
        dist.barrier()
        self.passes += _timed_passes(
            self._workload, self._share, self._boundary, self._targets, self.in_a_row, self._now
        )

    def columns(self) -> dict[str, list[float]]:
        """By layer, over all ranks: medians over what was timed, layers that are built alike taken together."""
        names = _alike(list(self._workload.layers))
        pooled: dict[str, list[tuple[float, float]]] = {}
        for one in (one for rank in from_all_ranks(self.passes) for one in rank):
            for index, pair in one.items():
                pooled.setdefault(names[index], []).append(pair)
        return {
            "forward_s": [statistics.median(forward for forward, _ in pooled[name]) for name in names],
            "backward_s": [statistics.median(backward for _, backward in pooled[name]) for name in names],
            "spread": [_relative_spread([sum(pair) for pair in pooled[name]]) for name in names],
        }


def _alike(layers: Sequence[nn.Module]) -> list[str]:
    """What tells layers apart that cost differently: how they are built."""
    return [repr(layer) + str([tuple(p.shape) for p in layer.parameters()]) for layer in layers]


def _timed_passes(
    workload: Workload, share: range, boundary: Value, targets: Any, count: int, now: Callable[[], float]
) -> list[dict[int, tuple[float, float]]]:
    """Of each micro-batch, layer -> seconds of its forward and backward, the loss counted with the last layer."""

    last = len(workload.layers) - 1
    forward: list[dict[int, float]] = []
    graphs: list[list[tuple[int, Value, Value]]] = []
    for _ in range(count):
        value = boundary
        forward.append({})
        graphs.append([])
        for index in share:
            leaves = leaves_of(value, first=index == 0)
            begin = now()
            output = workload.layers[index](leaves)
            if index == last:
                output = workload.loss(output, targets)
            forward[-1][index] = now() - begin
            graphs[-1].append((index, leaves, output))
            value = output
    found: list[dict[int, tuple[float, float]]] = []
    for seconds, graph in zip(reversed(forward), reversed(graphs), strict=True):
        found.append({})
        gradients = [torch.ones_like(t) for t in flatten(graph[-1][2])[0] if wants_gradient(t)]
        while graph:
            index, leaves, output = graph.pop()
            outputs = [t for t in flatten(output)[0] if wants_gradient(t)]
            pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
            begin = now()
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            found[-1][index] = (seconds[index], now() - begin)
            gradients = [
                t.grad if t.grad is not None else torch.zeros_like(t) for t in flatten(leaves)[0] if wants_gradient(t)
            ]
            del output, outputs, pairs
    return found


def leaves_of(value: Value, *, first: bool) -> Value:
    """The value as the start of a graph: detached, and wanting gradients unless it is the model's own input."""
    tensors, nesting = flatten(value)
    return unflatten(nesting, [t.detach().requires_grad_(wants_gradient(t) and not first) for t in tensors])


def on_device(value: Value, device: torch.device) -> Value:
    """The same tensors there."""
    tensors, nesting = flatten(value)
    return unflatten(nesting, [tensor.to(device) for tensor in tensors])


def from_all_ranks(mine: T) -> list[T]:
    """Every rank's."""
    gathered: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return [one for one in gathered if one is not None]


def _relative_spread(seconds: list[float]) -> float:
    lower, middle, upper = np.percentile(seconds, [25, 50, 75])
    return float((upper - lower) / middle) if middle > 0 else 0.0
