"""BatchNorm in a pipeline: normalise by micro-batch, average over the mini-batch, never count a recomputation.

GPipe (section 2.1) normalises each micro-batch by its own statistics and keeps the running averages, used for
evaluation, over the whole mini-batch. So the statistics of all micro-batches are combined and the running averages
are updated once per step, as if the mini-batch had passed in one piece:

    mean = sum n_m mean_m / N        var = sum n_m (var_m + (mean_m - mean)^2) / N     (Chan et al., 1983)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Statistics(NamedTuple):
    """Of samples that a layer has seen in this step: how many, their mean, their sum of squared deviations from it."""

    samples: int
    mean: torch.Tensor
    deviations: torch.Tensor

    def joined(self, other: "Statistics") -> "Statistics":
        """Of the samples of both."""
        delta, total = other.mean - self.mean, self.samples + other.samples
        mean = self.mean + delta * (other.samples / total)
        deviations = self.deviations + other.deviations + delta.square() * (self.samples * other.samples / total)
        return Statistics(total, mean, deviations)

    def packed(self) -> torch.Tensor:
        """As one tensor."""
        count = torch.tensor([self.samples], dtype=torch.double, device=self.mean.device)
        return torch.cat([count, self.mean.double(), self.deviations.double()])

    @staticmethod
    def unpacked(packed: torch.Tensor) -> "Statistics":
        """From `packed`."""
        mean, deviations = packed[1:].chunk(2)
        return Statistics(int(packed[0]), mean, deviations)


class DeferredRunningAverages:
    """The BatchNorm layers of a stage, whose running averages are updated once per mini-batch."""

    def __init__(self, module: nn.Module) -> None:
        layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self._layers = [layer for layer in layers if layer.track_running_stats]
        self._sums: dict[_BatchNorm, Statistics] = {}
        self._counts = False
        for layer in self._layers:
            layer.register_forward_pre_hook(self._note)

    @contextmanager
    def forward(self, *, counts: bool) -> Iterator[None]:
        """Around a forward in training: hands no running averages to torch; notes statistics if it `counts`."""
        self._counts = counts
        tracking = [layer for layer in self._layers if layer.training]
        for layer in tracking:
            layer.track_running_stats = False
        try:
            yield
        finally:
            for layer in tracking:
                layer.track_running_stats = True
            self._counts = False

    def _note(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if not (self._counts and layer.training and isinstance(layer, _BatchNorm)):
            return
        with torch.no_grad():
            (x,) = inputs
            dims = [dim for dim in range(x.dim()) if dim != 1]
            count, mean = x.numel() // x.shape[1], x.mean(dims)
            shape = [1, -1] + [1] * (x.dim() - 2)
            deviations = (x - mean.view(shape)).square().sum(dims)
            found = Statistics(count, mean, deviations)
            self._sums[layer] = self._sums[layer].joined(found) if layer in self._sums else found

    def commit(self, gather: Callable[[torch.Tensor], list[torch.Tensor]] | None = None) -> None:
        """Update the running averages with the mini-batch that has passed, as torch would with all of it at once.

        `gather`, where there are replicas, gives a tensor of each of them.
        """
        with torch.no_grad():
            for layer, own in self._sums.items():
                parts = [own] if gather is None else [Statistics.unpacked(part) for part in gather(own.packed())]
                count, mean, deviations = reduce(Statistics.joined, parts)
                assert layer.running_mean is not None, "only layers that track running averages are noted"
                assert layer.running_var is not None, "only layers that track running averages are noted"
                assert layer.num_batches_tracked is not None, "only layers that track running averages are noted"
                layer.num_batches_tracked += 1
                weight = layer.momentum if layer.momentum is not None else 1.0 / float(layer.num_batches_tracked)
                variance = deviations / max(count - 1, 1)
                layer.running_mean += weight * (mean.to(layer.running_mean.dtype) - layer.running_mean)
                layer.running_var += weight * (variance.to(layer.running_var.dtype) - layer.running_var)
        self._sums.clear()
