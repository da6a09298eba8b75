"""AmoebaNet-D, the convolutional network of GPipe's Table 1, as layers: stem, cells and classifier.

Between cells go the latest output and the input that it was made of, which the next cell takes, too:

    stem --x0--> cell --(x1, x0)--> cell --(x2, x1)--> cell --(x3, x2)--> ... --> classifier

What a cell is made of is told by `gpipe_sim.cost.amoebanet`, and so is what it costs. To name in a scenario:
``gpipe_exec.amoebanet:amoebanet_d``, which is AmoebaNet-D (18, 208) for images of 224 x 224, and ``:small``.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from gpipe_exec.layers import Workload
from gpipe_sim.cost.amoebanet import WINDOWS, Cell, Operation, cells

Values = tuple[torch.Tensor, torch.Tensor]


def _relu_conv_norm(entering: int, leaving: int, window: tuple[int, int] = (1, 1), stride: int = 1) -> list[nn.Module]:
    padding = (window[0] // 2, window[1] // 2)
    return [nn.ReLU(), nn.Conv2d(entering, leaving, window, stride, padding, bias=False), nn.BatchNorm2d(leaving)]


class Halved(nn.Module):
    """Half the height and width: two convolutions of every other pixel, the second one pixel further."""

    def __init__(self, entering: int, leaving: int) -> None:
        super().__init__()
        self.here = nn.Conv2d(entering, leaving // 2, 1, 2, bias=False)
        self.further = nn.Conv2d(entering, leaving // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(leaving)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, c, s, s) -> (n, C, s/2, s/2)."""
        x = torch.relu(x)
        further = functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        normed: torch.Tensor = self.norm(torch.cat([self.here(x), self.further(further)], dim=1))
        return normed


def _operation(kind: Operation, c: int, stride: int) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    if kind == "average pool 3x3":
        return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
    if kind.startswith("max pool"):
        return nn.MaxPool2d(3, stride, padding=1) if kind.endswith("3x3") else nn.MaxPool2d(2, stride)
    if kind == "conv 1x1":
        return nn.Sequential(*_relu_conv_norm(c, c, stride=stride))
    middle = [layer for window in WINDOWS[kind] for layer in _relu_conv_norm(c // 4, c // 4, window, stride)]
    return nn.Sequential(*_relu_conv_norm(c, c // 4), *middle, *_relu_conv_norm(c // 4, c))


class AmoebaCell(nn.Module):
    """Five states, each the sum of two operations; the output is some of them side by side."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        self.enter = nn.Sequential(*_relu_conv_norm(cell.entering, cell.channels))
        self.enter_before: nn.Module = nn.Identity()
        if cell.after_reduction:
            self.enter_before = Halved(cell.before, cell.channels)
        elif cell.before != cell.channels:
            self.enter_before = nn.Sequential(*_relu_conv_norm(cell.before, cell.channels))
        self.operations = nn.ModuleList(
            nn.ModuleList(_operation(kind, cell.channels, cell.stride(state)) for state, kind in pair)
            for pair in cell.pairs
        )

    def forward(self, value: torch.Tensor | Values) -> Values:
        """The latest output and its input, of the cell before; the first cell has one tensor for both."""
        x, before = value if isinstance(value, tuple) else (value, value)
        states = [self.enter(x), self.enter_before(before)]
        for pair, operations in zip(self.cell.pairs, self.operations, strict=True):
            assert isinstance(operations, nn.ModuleList), "two operations, as they were made"
            first, second = (one(states[branch.state]) for one, branch in zip(operations, pair, strict=True))
            states.append(first + second)
        return torch.cat([states[number] for number in self.cell.output], dim=1), x


class Classifier(nn.Module):
    """The mean of each channel, and a linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(channels, classes)

    def forward(self, value: Values) -> torch.Tensor:
        """Of the latest output."""
        logits: torch.Tensor = self.head(value[0].mean((2, 3)))
        return logits


def amoebanet(L: int, D: int, classes: int = 1000) -> nn.Sequential:
    """The layers of AmoebaNet-D (L, D), for images whose side can be halved five times."""
    stem = nn.Sequential(*_relu_conv_norm(3, D // 4, (3, 3), 2))
    made = cells(L, D)
    return nn.Sequential(stem, *map(AmoebaCell, made), Classifier(made[-1].leaving, classes))


def _images(n: int, *, side: int, classes: int) -> Values:
    generator = torch.Generator().manual_seed(n)
    images = torch.randn(n, 3, side, side, generator=generator)
    return images, torch.randint(classes, (n,), generator=generator)


def amoebanet_d() -> Workload:
    """AmoebaNet-D (18, 208), the largest that GPipe's authors could train on one accelerator without it."""
    return Workload(amoebanet(18, 208), partial(_images, side=224, classes=1000), functional.cross_entropy)


def small() -> Workload:
    """AmoebaNet-D (3, 32) for images of 64 x 64 and ten classes: 9 layers, to try on a CPU."""
    return Workload(amoebanet(3, 32, 10), partial(_images, side=64, classes=10), functional.cross_entropy)
