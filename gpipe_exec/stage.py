"""One stage: forward, recomputation and backward of one micro-batch.

    not recomputed   forward with gradients; its graph is kept ........................ backward
    recomputed       forward without gradients; only the input is kept ... R: forward again ... backward

A recomputation must repeat the forward exactly: the random state in which the forward ran is kept with the input and
restored for it, so that dropout drops the same elements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gpipe_exec.batchnorm import DeferredRunningAverages
from gpipe_exec.messages import Value, flatten, unflatten, wants_gradient

Loss = Callable[[Any, Any], torch.Tensor]
"""(output, targets) -> the mean loss over the samples."""


@dataclass
class _Graph:
    """A forward that is ready for its backward."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


@dataclass
class _Kept:
    """What a recomputation needs."""

    value: Value
    target: Any
    weight: float
    random_state: tuple[torch.Tensor, torch.Tensor | None]


@dataclass
class Stage:
    """The layers of one stage and what is alive of each micro-batch."""

    module: nn.Module
    device: torch.device
    is_first: bool
    loss: Loss | None
    """At the last stage."""
    recomputed: Sequence[bool]
    """By micro-batch."""
    averages: DeferredRunningAverages = field(init=False)
    _graphs: dict[int, _Graph] = field(default_factory=dict, init=False)
    _kept: dict[int, _Kept] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.averages = DeferredRunningAverages(self.module)

    def forward(self, microbatch: int, value: Value, target: Any, weight: float) -> Value:
        """The stage's output or, at the last stage, the micro-batch's weighted loss; nothing to do with a graph."""
        if self.recomputed[microbatch]:
            self._kept[microbatch] = _Kept(value, target, weight, self._random_state())
            with torch.no_grad(), self.averages.forward(counts=True):
                return self._run(value, target, weight)
        with self.averages.forward(counts=True):
            return self._with_graph(microbatch, value, target, weight)

    def recompute(self, microbatch: int) -> None:
        """Run the forward again, now with gradients, in the random state of the first time."""
        kept = self._kept.pop(microbatch)
        now = self._random_state()
        self._set_random_state(kept.random_state)
        with self.averages.forward(counts=False):
            self._with_graph(microbatch, kept.value, kept.target, kept.weight)
        self._set_random_state(now)

    def backward(self, microbatch: int, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Add to the parameters' gradients; return the gradients of the inputs that want one."""
        graph = self._graphs.pop(microbatch)
        outputs = [tensor for tensor in graph.outputs if wants_gradient(tensor)]
        given = gradients if self.loss is None else [torch.ones_like(output) for output in outputs]
        pairs = [pair for pair in zip(outputs, given, strict=True) if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        leaves = [tensor for tensor in graph.inputs if tensor.requires_grad]
        return [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]

    def forget(self) -> None:
        """Let go of everything, as after a step that failed."""
        self._graphs.clear()
        self._kept.clear()

    def _with_graph(self, microbatch: int, value: Value, target: Any, weight: float) -> Value:
        tensors, nesting = flatten(value)
        if not self.is_first:
            tensors = [t.detach().requires_grad_(wants_gradient(t)) for t in tensors]
        output = self._run(unflatten(nesting, tensors), target, weight)
        self._graphs[microbatch] = _Graph(tensors, flatten(output)[0])
        return output

    def _run(self, value: Value, target: Any, weight: float) -> Value:
        given = flatten(value)[0]
        versions = [tensor._version for tensor in given]
        output = self.module(value)
        if versions != [tensor._version for tensor in given]:
            raise ValueError(
                "the first layer of a stage changes its input in place, which a recomputation needs unchanged"
            )
        return output if self.loss is None else self.loss(output, target) * weight

    def _random_state(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        on_device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def _set_random_state(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.device)
