"""Buckets: parameters that lie one after the other in one piece of memory, so that they are sent together.

A collective of a few numbers takes nearly as long as one of a hundred thousand, and a layer has many small tensors.

    stage    |weight------------|bias|norm|norm|weight------------------------------|bias|
    buckets  |==================|==============|====================================|====|
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

BUCKET_BYTES = 4 * 2**20
"""Parameters share a bucket up to so many bytes: enough to keep a link busy. Gradients take as much once more while
they are put together, which is little beside a stage's."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters of one dtype, next to each other."""

    parameters: tuple[nn.Parameter, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each parameter begins and ends, in numbers."""
        return list(pairwise(accumulate((shape.numel() for shape in self.shapes), initial=0)))

    @property
    def size(self) -> int:
        """Numbers in all."""
        return sum(shape.numel() for shape in self.shapes)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What each parameter has of the bucket's memory."""
        pairs = zip(self.spans, self.shapes, strict=True)
        return [flat[begin:end].view(shape) for (begin, end), shape in pairs]


def buckets_of(parameters: Iterable[nn.Parameter]) -> list[Bucket]:
    """All of them, in their order."""
    groups: list[list[nn.Parameter]] = []
    held = 0
    for parameter in parameters:
        held += parameter.nbytes
        if not groups or held > BUCKET_BYTES or groups[-1][-1].dtype != parameter.dtype:
            groups.append([])
            held = parameter.nbytes
        groups[-1].append(parameter)
    return [Bucket(tuple(group), tuple(parameter.shape for parameter in group)) for group in groups]


def together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after the other, flat; a single one stays where it is, if it can."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
