"""A model of one's own, to plan and to train: name it in a scenario beside this file, and it is built from there.

model: {kind: python, function: own_model:model}
profile: own_model.json

torchrun --standalone --nproc-per-node 2 examples/train.py --plan plan.yaml
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def model() -> tuple[nn.Sequential, Callable[..., Any], Callable[..., Any]]:
    """The layers, n -> inputs and targets of n samples, and (output, targets) -> mean loss over the samples."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    layers = nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 4))

    def sample(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        points = torch.randn(n, 16, generator=torch.Generator().manual_seed(n))
        return points, points[:, :4].argmax(dim=1)

    return layers, sample, functional.cross_entropy
