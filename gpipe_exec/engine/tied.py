"""Tied weights: a parameter that layers of several stages share, as an embedding and a head do.

Every rank that has one of these stages holds the parameter, and gets a part of its gradient. At the end of a step the
parts are summed, so that each holds the whole gradient, and equal updates keep the copies equal:

    rank 0   embedding  gradient a --.
    rank 1   blocks                   >-- a + b, on both
    rank 2   head       gradient b --'
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gpipe_exec.devices.groups import make_group
from gpipe_sim.plan.plan import Plan

Layers = nn.Sequential | Sequence[nn.Module]


class Tied(NamedTuple):
    """One parameter that several ranks hold."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    """In the whole model, the first is the one that counts."""
    processes: tuple[int, ...]
    """That hold it, ascending."""
    group: dist.ProcessGroup | None
    """Of them; None on a process that is not among them."""


def shared_parameters(layers: Layers, names: Sequence[str], plan: Plan) -> dict[nn.Parameter, list[str]]:
    """The parameters that layers on different stages share, each with its names."""
    found: dict[nn.Parameter, list[str]] = {}
    stages: dict[nn.Parameter, set[int]] = {}
    for stage, span in enumerate(plan.stages):
        for layer in range(len(layers))[span]:
            for name, parameter in layers[layer].named_parameters():
                found.setdefault(parameter, []).append(f"{names[layer]}.{name}")
                stages.setdefault(parameter, set()).add(stage)
    return {parameter: called for parameter, called in found.items() if len(stages[parameter]) > 1}


def tie(layers: Layers, names: Sequence[str], plan: Plan, device: torch.device) -> list[Tied]:
    """Connect the ranks that share parameters; every process calls it, with the same layers.

    Their communicators are used at once, in the order in which all make them: a first use stops the host.
    """
    layer_of = {name: index for index, name in enumerate(names)}
    stage_of = [stage for stage, size in enumerate(plan.balance) for _ in range(size)]
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    found = []
    for parameter, called in shared_parameters(layers, names, plan).items():
        holders = {plan.placement[stage_of[layer_of[name.split(".")[0]]]] for name in called}
        if len(holders) == 1:
            continue  # stages of one rank have the parameter itself in common
        for replica, member in product(range(plan.replicas), range(plan.tensor)):
            processes = tuple(sorted(plan.process(plan.pipeline.index(rank), replica, member) for rank in holders))
            if processes not in groups:
                groups[processes] = make_group(processes, device)
                if groups[processes] is not None:
                    dist.all_reduce(torch.zeros(1, device=device), group=groups[processes])
            found.append(Tied(parameter, tuple(called), processes, groups[processes]))
    return found


def sum_gradients(tied: Sequence[Tied]) -> None:
    """The whole gradient on each rank that holds a parameter; in the same order on all of them."""
    for one in tied:
        if one.parameter.requires_grad:
            if one.parameter.grad is None:
                one.parameter.grad = torch.zeros_like(one.parameter)
            dist.all_reduce(one.parameter.grad, group=one.group)
