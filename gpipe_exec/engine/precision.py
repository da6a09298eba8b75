"""Mixed precision: weights and optimizer in fp32, compute in the plan's dtype, of 16 bits.

    between steps    weights 4, Adam's state 8                                     12 bytes per parameter
    in a step        + copies to compute with 2, + their gradients 2               16
    in the update    the copies and their gradients become fp32 gradients, 4       16

    fp32 gradients   each gradient is added to one in fp32 as soon as it is made   18 in a step: 2 + 4 + 12

The copies stand in the layers for the weights as long as a step or an evaluation is under way: whatever layers do with
their weights, they do with the copies, also in a recomputation and in a split backward. To an optimizer, a checkpoint
and everyone else who asks between steps, weights and gradients are fp32. Micro-batches add their gradients in 16 bits,
unless the plan's precision is `mixed_fp32_gradients`: then in fp32. Replicas sum them as they have been added.
Layers that gather running statistics (BatchNorm) compute with fp32 weights, as torch wants them.

fp16 has no exponents for small gradients, so the loss's gradient is a *scale* instead of 1, and what comes out is
divided by it, in fp32. Where a gradient overflows on any rank, the step's gradients are dropped on all of them, and
the scale is halved; after 2000 steps without an overflow it is doubled (Micikevicius et al., arXiv 1710.03740,
section 3.2).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.catalog import DType
from gpipe_sim.scenario.schema import Precision

DTYPES: dict[DType, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_FIRST_SCALE, _PATIENCE = 2.0**16, 2000
"""As torch.amp.GradScaler has them."""


def computes_with_copies(dtype: DType, precision: Precision) -> bool:
    """Whether weights are kept in fp32 and computed with in another dtype."""
    return precision != "pure" and DTYPES[dtype].itemsize == 2


def adds_in_fp32(dtype: DType, precision: Precision) -> bool:
    """Whether gradients of copies are added up in fp32."""
    return precision == "mixed_fp32_gradients" and computes_with_copies(dtype, precision)


def lower(module: nn.Module, dtype: torch.dtype, *, in_fp32: bool = False) -> None:
    """Make the layers what mixed precision computes with; there are no fp32 weights any more.

    With `in_fp32` gradients are added up in fp32 beside them, until `forget_gradients`.
    """
    for layer in module.modules():
        if not isinstance(layer, _BatchNorm):
            for parameter in layer.parameters(recurse=False):
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
                    if in_fp32 and parameter.requires_grad and not hasattr(parameter, _SUM):
                        like = torch.zeros((), device=parameter.device).expand(parameter.shape)  # of four bytes
                        setattr(parameter, _SUM, nn.Parameter(like))
                        _add_gradients_to(parameter, getattr(parameter, _SUM))
            _lower_buffers(layer, dtype)


_SUM = "_sum_of_gradients"


def forget_gradients(module: nn.Module) -> None:
    """Of parameters, and what is beside them."""
    for parameter in module.parameters():
        parameter.grad = None
        if hasattr(parameter, _SUM):
            getattr(parameter, _SUM).grad = None


def gradient_bytes(module: nn.Module) -> int:
    """Of all parameters, once each has one."""
    return sum(4 * p.numel() if hasattr(p, _SUM) else p.nbytes for p in module.parameters())


def _add_gradients_to(copy: nn.Parameter, weight: nn.Parameter) -> None:
    """As soon as a gradient of the copy is made, it is added to the weight's, and gone."""

    def add(copy: torch.Tensor) -> None:
        assert copy.grad is not None, "it was made just now"
        if weight.grad is None:
            weight.grad = copy.grad.to(weight.dtype)
        else:
            weight.grad.add_(copy.grad)
        copy.grad = None

    copy.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]


def _lower_buffers(layer: nn.Module, dtype: torch.dtype) -> None:
    for name, buffer in layer.named_buffers(recurse=False):
        if buffer.is_floating_point():
            layer._buffers[name] = buffer.to(dtype)


class Mixed:
    """The weights of a rank's layers in fp32, and the copies that stand in for them."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, *, in_fp32: bool = False) -> None:
        """Weights of 16 bits become fp32; tables that layers hold beside their weights become `dtype`. With `in_fp32`
        gradients are added up so."""
        self._dtype, self._in_fp32 = dtype, in_fp32
        self._scales = dtype == torch.float16
        self.scale = _FIRST_SCALE if self._scales else 1.0
        """The gradient of the loss."""
        self.overflowed = False
        """Whether the gradients of the latest step were dropped."""
        self._since = 0
        """Steps since the scale has changed."""
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        for layer in module.modules():
            for name, parameter in layer.named_parameters(recurse=False):
                if parameter.dtype == torch.float64:
                    found = f"{name} of a {type(layer).__name__} is float64"
                    raise ValueError(f"{found}, but the plan's precision is mixed: expected float32 weights")
                if parameter.is_floating_point():
                    parameter.data = parameter.data.float()
                    if not isinstance(layer, _BatchNorm):
                        self._places.append((layer, name, parameter))
            _lower_buffers(layer, torch.float32 if isinstance(layer, _BatchNorm) else dtype)
        self.weights = list(module.parameters())
        """Of all layers, as everyone but the layers in a step sees them."""
        self._without_copy = [p for p in self.weights if p not in {place[2] for place in self._places}]

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input as it is computed with."""
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def with_gradients(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """What has the gradients of these weights in a step: they themselves, or their copies."""
        return list(parameters) if self._in_fp32 else [self._copies.get(one, one) for one in parameters]

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """Around a step or an evaluation: the layers have copies for weights."""
        for layer, name, parameter in self._places:
            if parameter not in self._copies:
                lower = parameter.detach().to(self._dtype)
                self._copies[parameter] = copy = nn.Parameter(lower, requires_grad=parameter.requires_grad)
                if self._in_fp32 and copy.requires_grad:
                    _add_gradients_to(copy, parameter)
            setattr(layer, name, self._copies[parameter])  # which layers that note their weights elsewhere see
        try:
            yield
        finally:
            self._put_back()
            self._copies.clear()

    def _put_back(self) -> None:
        for layer, name, parameter in self._places:
            setattr(layer, name, parameter)

    def raise_gradients(self) -> None:
        """The layers have their weights again, with the step's gradients in fp32, or none if one has overflowed.

        Every rank calls it, when nothing is in `.grad` but the gradients of this step. A copy is let go before its
        gradient is raised, so that no more is held than before.
        """
        self._put_back()
        self.overflowed = self._scales and self._overflows()
        if self._in_fp32:
            self._copies.clear()
        while self._copies:
            parameter, copy = self._copies.popitem()
            gradient = copy.grad
            del copy
            parameter.grad = None if gradient is None or self.overflowed else gradient.float()
            del gradient
        if self.overflowed:
            for parameter in self.weights if self._in_fp32 else self._without_copy:
                parameter.grad = None
        elif self._scales:
            for parameter in self.weights:
                if parameter.grad is not None:
                    parameter.grad.div_(self.scale)
        self._next_scale()

    def _overflows(self) -> bool:
        """Whether a gradient is infinite or not a number, on any rank."""
        places = self.weights if self._in_fp32 else (*self._copies.values(), *self._without_copy)
        gradients = [parameter.grad for parameter in places]
        sums = [gradient.sum(dtype=torch.float32) for gradient in gradients if gradient is not None]
        device = next((parameter.device for parameter in self.weights), torch.device("cpu"))
        found = torch.stack(sums).sum() if sums else torch.zeros((), device=device)
        told = (~found.isfinite()).to(torch.float32)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(told, dist.ReduceOp.MAX)
        return bool(told)

    def _next_scale(self) -> None:
        if not self._scales:
            return
        self._since = 0 if self.overflowed else self._since + 1
        if self.overflowed:
            self.scale /= 2
        elif self._since == _PATIENCE:
            self.scale, self._since = self.scale * 2, 0


def mixed_of(plan: Plan, module: nn.Module, precision: Precision | None = None) -> Mixed | None:
    """What the plan's precision asks for, unless another is told."""
    wanted = precision or plan.scenario.precision
    if not computes_with_copies(plan.dtype, wanted):
        return None
    return Mixed(module, DTYPES[plan.dtype], in_fp32=adds_in_fp32(plan.dtype, wanted))
