"""Losses: what a loss function may return, and what of it makes losses and gradients those of the whole batch.

    mean            one number, the mean over the samples. Micro-batches are weighted by their samples, which is exact
                    for a plain mean only: one that divides by the samples, or by as many elements of each.
    (sum, count)    what is summed over, and how many (tokens, or the sum of class weights): exact whatever the padding.

Where counts differ, nobody knows the whole count before the last micro-batch has passed, and by then a 1F1B schedule
has run most of its backwards. So the gradients of the sum flow back, and each rank divides its own once, at the end:

    F0 F1 B0 F2 B1 F3 B2 B3 | gradients / count | U         the count comes with the loss, which is told anyway

That costs no message and one pass over the gradients; to exchange counts first would need the loss before its forward.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpipe_exec.engine.messages import Value, flatten, unflatten

LossResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]
Loss = Callable[[Any, Any], LossResult]
"""(output, targets) -> the plain mean loss over the samples, or (sum, count)."""


def mean_of(result: LossResult) -> torch.Tensor:
    """The mean loss of one piece, whatever the loss function returns."""
    if isinstance(result, tuple):
        total, count = result
        return total / count
    return result


def power_of_two_near_mean(targets: Value, batch: int) -> float:
    """A factor for sums of losses that keeps their gradients as small as those of a mean, for half precision.

    A power of two rounds nothing; it follows from shapes alone, so that nobody waits for a device to tell it.
    """
    tensors = [] if targets is None else flatten(targets)[0]
    elements = max([batch, *(tensor.numel() for tensor in tensors)])
    return 2.0 ** -math.ceil(math.log2(elements))


class PlainMeanCheck:
    """Whether a mean is a plain one: of any two micro-batches together it is the mean of theirs by samples.

    Where that holds of all neighbours it holds of the whole batch. One output more than usual is held for it.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._before: tuple[Value, Any] | None = None
        self._told: list[float] = []
        """The losses of two pieces, of both together, and what that should have been."""

    def note(self, output: Value, targets: Any) -> None:
        """The last stage's output for a micro-batch; raise ValueError if the loss is no plain mean."""
        output = _each(output, lambda tensor: tensor.detach())
        if self._before is not None:
            self._compare([self._before, (output, targets)])
        self._before = (output, targets)

    def _compare(self, pieces: list[tuple[Value, Any]]) -> None:
        sizes = [_num_samples(targets if flatten(targets)[0] else output) for output, targets in pieces]
        for output, _ in pieces:
            for tensor in flatten(output)[0]:
                if tensor.dim() == 0 or len(tensor) not in sizes:
                    raise ValueError(
                        f"the model's output has a tensor of shape {tuple(tensor.shape)}, in which samples are not the "
                        "first dimension, so that nobody can check whether the loss is a plain mean: "
                        f"{_WHAT_TO_DO}"
                    )
        if self._agrees(pieces, sizes):
            return
        try:  # what differs may be nothing but rounding
            if self._agrees([(_double(output), _double(targets)) for output, targets in pieces], sizes):
                return
        except (RuntimeError, TypeError):  # this loss cannot be computed in float64
            pass
        raise ValueError(
            f"the loss is not a plain mean over samples: of {sizes[0]} and {sizes[1]} samples it is "
            f"{self._told[0]:.7g} and {self._told[1]:.7g}, and of all of them {self._told[2]:.7g} instead of "
            f"{self._told[3]:.7g}. "
            f"Padding (ignore_index), class weights or a sum do that, and gradients would be wrong: {_WHAT_TO_DO}"
        )

    def _agrees(self, pieces: list[tuple[Value, Any]], sizes: list[int]) -> bool:
        with torch.no_grad():
            first, second = (mean_of(self._loss(output, targets)) for output, targets in pieces)
            outputs, targets = zip(*pieces, strict=True)
            whole = mean_of(self._loss(joined(outputs), joined(targets)))
        if whole.is_meta:  # a rehearsal of shapes, which has no values to compare
            return True
        expected = (first.double() * sizes[0] + second.double() * sizes[1]) / sum(sizes)
        tolerance = _TOLERANCE.get(whole.dtype, 2e-2) * max(abs(float(one)) for one in (first, second, whole))
        self._told = [float(one) for one in (first, second, whole, expected)]
        return abs(float(whole) - float(expected)) <= tolerance or bool(expected.isnan() and whole.isnan())


_WHAT_TO_DO = "let the loss return (sum, count), or switch the check off with checks=False"
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
"""Of the larger loss: what the order of a sum may change."""


def _each(value: Value, function: Callable[[torch.Tensor], torch.Tensor]) -> Value:
    tensors, nesting = flatten(value)
    return unflatten(nesting, [function(tensor) for tensor in tensors])


def _double(value: Value) -> Value:
    return _each(value, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def joined(values: Sequence[Value]) -> Value:
    """Micro-batches as one, along the first dimension of each tensor."""
    pieces = [flatten(value) for value in values]
    columns = zip(*(tensors for tensors, _ in pieces), strict=True)
    return unflatten(pieces[0][1], [torch.cat(column) for column in columns])


def _num_samples(value: Value) -> int:
    return len(flatten(value)[0][0])
