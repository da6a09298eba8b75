"""The optimizers that a scenario may name, as torch has them."""

from collections.abc import Sequence

import torch
from torch import nn

from gpipe_sim.scenario.schema import Optimizer


def make_optimizer(name: Optimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Beside the host, torch's Adam and SGD in one kernel (fused): by default they make a copy of all parameters in an
    update, for which no memory is planned. On the CPU they go parameter by parameter."""
    fused = True if parameters and parameters[0].device.type not in ("cpu", "meta") else None
    if name == "adam":
        return torch.optim.Adam(parameters, lr=1e-4, fused=fused)
    if name == "rmsprop":  # torch has no fused one; parameter by parameter it makes no copy of all
        return torch.optim.RMSprop(parameters, lr=1e-4, foreach=False)
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9 if name == "momentum" else 0.0, fused=fused)
