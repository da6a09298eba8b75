"""BatchNorm in a pipeline: normalise by micro-batch, average over the mini-batch, never count a recomputation.

GPipe (section 2.1) normalises each micro-batch by its own statistics and keeps the running averages, used for
evaluation, over the whole mini-batch. So the statistics of all micro-batches are combined and the running averages
are updated once per step, as if the mini-batch had passed in one piece:

    mean = sum n_m mean_m / N        var = sum n_m (var_m + (mean_m - mean)^2) / N     (Chan et al., 1983)
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class DeferredRunningAverages:
    """The BatchNorm layers of a stage, whose running averages are updated once per mini-batch."""

    def __init__(self, module: nn.Module) -> None:
        layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self._layers = [layer for layer in layers if layer.track_running_stats]
        self._sums: dict[_BatchNorm, tuple[int, torch.Tensor, torch.Tensor]] = {}
        """Layer -> samples seen in this step, their mean, and their sum of squared deviations from it."""
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
            if layer in self._sums:
                seen, old_mean, old_deviations = self._sums[layer]
                delta, total = mean - old_mean, seen + count
                mean = old_mean + delta * (count / total)
                deviations = old_deviations + deviations + delta.square() * (seen * count / total)
                count = total
            self._sums[layer] = (count, mean, deviations)

    def commit(self) -> None:
        """Update the running averages with the mini-batch that has passed, as torch would with all of it at once."""
        with torch.no_grad():
            for layer, (count, mean, deviations) in self._sums.items():
                assert layer.running_mean is not None, "only layers that track running averages are noted"
                assert layer.running_var is not None, "only layers that track running averages are noted"
                assert layer.num_batches_tracked is not None, "only layers that track running averages are noted"
                layer.num_batches_tracked += 1
                weight = layer.momentum if layer.momentum is not None else 1.0 / float(layer.num_batches_tracked)
                variance = deviations / max(count - 1, 1)
                layer.running_mean += weight * (mean.to(layer.running_mean.dtype) - layer.running_mean)
                layer.running_var += weight * (variance.to(layer.running_var.dtype) - layer.running_var)
        self._sums.clear()
