"""One stage: forward, recomputation and backward of one micro-batch.

    not recomputed   forward with gradients; its graph is kept ........................ backward
    recomputed       forward without gradients; only the input is kept ... R: forward again ... backward
    by layer         forward without gradients, each layer's input kept ... each layer's forward again in the backward
    attention        forward with gradients, all but attention kept ...... attention again in the backward (`selective`)
    split            the backward is two: I, the gradients of the inputs ... W, those of the weights (`split`)

A recomputation must repeat the forward exactly: the random states in which the forward ran (torch's, Python's and
numpy's) are kept with the input and restored for it, so that dropout drops the same elements; layers get containers of
their own, into which they may write. What changes an input, and in the first step what computes something else the
second time (`repeats`), is refused by the layer's name.
"""

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from gpipe_exec.engine.batchnorm import DeferredRunningAverages
from gpipe_exec.engine.losses import Loss, PlainMeanCheck
from gpipe_exec.engine.messages import Value, flatten, own_containers, tensors_in, unflatten, wants_gradient
from gpipe_exec.engine.randomness import RandomState, random_state, set_random_state
from gpipe_exec.engine.repeats import RepeatCheck
from gpipe_exec.engine.selective import watched_attention
from gpipe_exec.engine.split import Halves


@dataclass
class _Graph:
    """A forward that is ready for its backward."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    pieces: list[Halves]
    """Of a backward that is split, layer by layer; nothing else is held then."""


@dataclass
class _Kept:
    """What a recomputation needs."""

    value: Value
    versions: list[int]
    """Of the value's tensors: what changes one in between is noticed."""
    target: Any
    weight: float
    random_state: RandomState


@dataclass
class Stage:
    """The layers of one stage and what is alive of each micro-batch."""

    module: nn.Module
    device: torch.device
    is_first: bool
    loss: Loss | None
    """At the last stage."""
    recomputed: Sequence[bool]
    """By micro-batch of the step under way, as the next."""
    split: Sequence[bool] = ()
    """Whether its backward is; none of them if empty."""
    by_layer: Sequence[bool] = ()
    """Whether its layers recompute themselves, the model's last excepted; none of them if empty."""
    attention: Sequence[bool] = ()
    """Whether nothing but attention is recomputed, in its layer's backward; of none of them if empty."""
    has_attention: bool = False
    """Whether its layers have some, by the profile."""
    name: str = "this stage"
    """For messages."""
    sum_factor: float = 1.0
    """On a loss that is a sum."""
    loss_gradient: float = 1.0
    """What a backward of the loss begins with."""
    counts: list[torch.Tensor] = field(default_factory=list)
    """Where the loss returns (sum, count), the counts of the step under way."""
    plain_mean: PlainMeanCheck | None = None
    """In a first step, of the last stage."""
    repeats: RepeatCheck | None = None
    """In a first step."""
    averages: DeferredRunningAverages = field(init=False)
    _layers: list[tuple[str, nn.Module]] = field(init=False)
    _graphs: dict[int, _Graph] = field(default_factory=dict, init=False)
    _kept: dict[int, _Kept] = field(default_factory=dict, init=False)
    _pieces: dict[int, list[Halves]] = field(default_factory=dict, init=False)
    """Of micro-batches that are between I and W."""
    _sent: list[tuple["weakref.ref[torch.Tensor]", int]] = field(default_factory=list, init=False)
    """The latest output's tensors and their versions."""

    def __post_init__(self) -> None:
        self.averages = DeferredRunningAverages(self.module)
        sequential = isinstance(self.module, nn.Sequential)
        self._layers = list(self.module.named_children()) if sequential else [("", self.module)]

    def forward(self, microbatch: int, value: Value, target: Any, weight: float) -> Value:
        """The stage's output or, at the last stage, the micro-batch's weighted loss; nothing to do with a graph."""
        if self.recomputed[microbatch]:
            versions = [tensor._version for tensor in flatten(value)[0]]
            self._kept[microbatch] = _Kept(value, versions, target, weight, random_state(self.device))
            if self.repeats is not None:
                self.repeats.first(microbatch)
            with torch.no_grad(), self.averages.forward(counts=True):
                output = self._run(value, target, weight, again=False)
        else:
            with self.averages.forward(counts=True):
                output = self._with_graph(microbatch, value, target, weight, again=False)
        if self.repeats is not None:
            self.repeats.over()
        self._refuse_reused_output(output)
        return output

    def evaluate(self, value: Value) -> Value:
        """The stage's output, without the loss."""
        return self._through(value)

    def recompute(self, microbatch: int) -> None:
        """Run the forward again, now with gradients, in the random state of the first time."""
        kept = self._kept.pop(microbatch)
        if kept.versions != [tensor._version for tensor in flatten(kept.value)[0]]:
            raise ValueError(f"the input of {self.name} was changed in place before its recomputation, which needs it")
        now = random_state(self.device)
        set_random_state(kept.random_state, self.device)
        if self.repeats is not None:
            self.repeats.again(microbatch)
        with self.averages.forward(counts=False):
            self._with_graph(microbatch, kept.value, kept.target, kept.weight, again=True)
        if self.repeats is not None:
            self.repeats.over()
        set_random_state(now, self.device)

    def backward(self, microbatch: int, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Add to the parameters' gradients; return the gradients of the inputs that want one."""
        graph = self._graphs.pop(microbatch)
        assert not graph.pieces, "a backward that is split is run in its halves"
        outputs = [tensor for tensor in graph.outputs if wants_gradient(tensor)]
        given = gradients if self.loss is None else self._loss_gradients(outputs)
        pairs = [pair for pair in zip(outputs, given, strict=True) if pair[0].requires_grad]
        with self.averages.forward(counts=False) if self.by_layer else nullcontext():
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        leaves = [tensor for tensor in graph.inputs if tensor.requires_grad]
        return [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]

    def backward_inputs(self, microbatch: int, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """I: return the gradients of the inputs that want one; keep what the weights' need."""
        graph = self._graphs.pop(microbatch)
        assert graph.pieces, "only a forward that knows that its backward is split can be split"
        self._pieces[microbatch] = graph.pieces
        given = list(gradients) if self.loss is None else self._loss_gradients(graph.outputs)
        for piece in reversed(graph.pieces):
            given = piece.backward_inputs(given)
        return given

    def _loss_gradients(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.full_like(output, self.loss_gradient) for output in outputs]

    def backward_weights(self, microbatch: int) -> None:
        """W: add to the parameters' gradients, those of the last layer first."""
        pieces = self._pieces.pop(microbatch)
        while pieces:
            pieces.pop().backward_weights()

    def _with_graph(self, microbatch: int, value: Value, target: Any, weight: float, *, again: bool) -> Value:
        tensors, nesting = flatten(value)
        if self.split and self.split[microbatch]:
            return self._in_pieces(microbatch, value, target, weight, again=again)
        if not self.is_first:
            tensors = [t.detach().requires_grad_(wants_gradient(t)) for t in tensors]
        alone = bool(self.by_layer and self.by_layer[microbatch])
        selective = bool(self.attention and self.attention[microbatch])
        with watched_attention(recomputes=selective) as watched:
            output = self._run(unflatten(nesting, tensors), target, weight, again=again, alone=alone)
        if selective and self.has_attention and not watched.calls:
            raise ValueError(
                f"plan.recompute_unit: found attention, expected stage or layer: no layer of {self.name} says which "
                "part of it is attention, by calling it through gpipe_exec.attention"
            )
        self._graphs[microbatch] = _Graph(tensors, flatten(output)[0], [])
        return output

    def _in_pieces(self, microbatch: int, value: Value, target: Any, weight: float, *, again: bool) -> Value:
        """A forward whose backward is split, each layer's by itself."""
        pieces: list[Halves] = []
        for index in range(len(self._layers)):
            tensors, nesting = flatten(value)
            pieces.append(Halves(tensors, first=self.is_first and index == 0))
            with pieces[-1].recording():
                value = self._layer(index, unflatten(nesting, pieces[-1].inputs))
                if index == len(self._layers) - 1 and self.loss is not None:
                    value = self._weighted_loss(value, target, weight, again=again)
            pieces[-1].end(flatten(value)[0])
        self._graphs[microbatch] = _Graph([], [] if self.loss is None else [value], pieces)
        return value

    def _run(self, value: Value, target: Any, weight: float, *, again: bool, alone: bool = False) -> Value:
        """`alone`: the layers recompute themselves one by one."""
        output = self._through(value, alone=alone)
        return output if self.loss is None else self._weighted_loss(output, target, weight, again=again)

    def _through(self, value: Value, *, alone: bool = False) -> Value:
        """Of all layers, in containers of their own: what is kept for a recomputation stays as it is."""
        tensors, nesting = flatten(value)
        value = unflatten(nesting, tensors)
        last = len(self._layers) - 1
        for index in range(len(self._layers)):
            if alone and (index < last or self.loss is None):
                value = self._recomputing_itself(index, value)
            else:
                value = self._layer(index, value)
        return value

    def _recomputing_itself(self, index: int, value: Value) -> Value:
        """A layer's output; the backward runs it again, from the same input and with the same random numbers."""
        before = random_state(self.device)
        versions = [tensor._version for tensor in tensors_in(value)]
        name = f"layer {self._layers[index][0]} ({type(self._layers[index][1]).__name__}) of {self.name}"
        check = RepeatCheck() if self.repeats is not None else None
        has_run = False

        def run() -> Value:
            nonlocal has_run
            if not has_run:
                has_run = True
                if check is not None:
                    check.first(0)
                return self._noted(index, value, name, check)
            if versions != [tensor._version for tensor in tensors_in(value)]:
                raise ValueError(f"the input of {name} was changed in place before its recomputation, which needs it")
            now = random_state(self.device)
            set_random_state(before, self.device)
            try:
                if check is not None:
                    check.again(0)
                return self._noted(index, value, name, check)
            finally:
                set_random_state(now, self.device)

        # To the end, where its output is compared.
        with set_checkpoint_early_stop(check is None):
            output: Value = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
        return output

    def _noted(self, index: int, value: Value, name: str, check: RepeatCheck | None) -> Value:
        output = self._layer(index, own_containers(value), alone=True)
        if check is not None:
            check.note(name, output)
            check.over()
        return output

    def _layer(self, index: int, value: Value, *, alone: bool = False) -> Value:
        """A layer's output; the first, or one that recomputes itself, leaves its input as it is."""
        name, layer = self._layers[index]
        given = tensors_in(value) if index == 0 or alone else []
        versions = [tensor._version for tensor in given]
        try:
            output = layer(value)
            if versions != [tensor._version for tensor in given]:
                where = f"the first of {self.name}" if index == 0 else f"of {self.name}, which recomputes itself"
                raise ValueError(
                    f"layer {name} ({type(layer).__name__}), {where}, changes its input in place, "
                    "which others and a recomputation need unchanged: expected inplace=False there, or another cut"
                )
            if index == len(self._layers) - 1 and self.loss is None:
                flatten(output)  # which can be sent
        except Exception as error:
            error.add_note(f"in layer {name} ({type(layer).__name__}) of {self.name}")
            raise
        if self.repeats is not None:
            self.repeats.note(f"layer {name} ({type(layer).__name__}) of {self.name}", output)
        return output

    def _weighted_loss(self, output: Value, target: Any, weight: float, *, again: bool) -> torch.Tensor:
        """What the micro-batch adds to the loss, up to a division at the end where it is a sum."""
        assert self.loss is not None, "only the last stage has a loss"
        result = self.loss(output, target)
        if isinstance(result, tuple):
            total, count = result
            if not again:
                self.counts.append(torch.as_tensor(count, dtype=torch.double, device=self.device).detach())
            loss = total * self.sum_factor
        else:
            loss = result * weight
            if self.plain_mean is not None and not again:
                self.plain_mean.note(output, target)
        if self.repeats is not None:
            self.repeats.note("the loss", loss)
        return loss

    def _refuse_reused_output(self, output: Value) -> None:
        """An output that is written into for the next micro-batch may not have been sent yet."""
        name, layer = self._layers[-1]
        for reference, version in self._sent:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise ValueError(
                    f"layer {name} ({type(layer).__name__}), the last of {self.name}, writes into its output of an "
                    "earlier micro-batch, which is still in use: expected a new tensor each time"
                )
        self._sent = [(weakref.ref(tensor), tensor._version) for tensor in flatten(output)[0]]
