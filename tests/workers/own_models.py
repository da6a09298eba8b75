"""Models for `kind: python` in tests: one that works, and ones that go wrong on the second stage after two steps."""

import time

import torch
from torch import nn

WIDTH = 16


def sample(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator)


def fine():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    return layers, sample, nn.functional.mse_loss


class Trouble(nn.Module):
    """Does something terrible when it has computed a few times."""

    def __init__(self, what) -> None:
        super().__init__()
        self.what, self.calls = what, 0
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 8:
            self.what()
        return self.linear(x)


def _with_trouble(what):
    layers, *rest = fine()
    return nn.Sequential(*layers[:3], Trouble(what)), *rest


def raises():
    def what() -> None:
        raise ZeroDivisionError("the loss has no bottom")

    return _with_trouble(what)


def starves():
    return _with_trouble(lambda: torch.empty(2**60, dtype=torch.uint8))


def hangs():
    return _with_trouble(lambda: time.sleep(1000))


def too_short():
    layers, *rest = fine()
    return layers[:3], *rest
