"""Tensor groups: T processes that hold the same stages together, a slice of each layer each (``plan.tensor``).

    process            T = 2: 0   1        replica 0 of rank 0
                              2   3        replica 1
    first product      |==0==|==1==|       by columns: heads, or the width of the feed-forward
    second product     |==0==|==1==|       by rows; what comes out is summed over the group
    between them       |==0==|==1==|       by the sequence, where that is split: norms, residuals, messages

Layers are divided with torch's parallel styles (`parallelize_module`), and what they exchange are DTensor's
collectives, in the order of the layers, which is the same on all members. What is held of a parameter is a tensor of
its own, this member's slice, which an optimizer, replicas and shards treat like any other; a layer sees a view of it as
a DTensor. Between steps every member's copy of what is not sliced is the same: its gradient is the same on all, or
comes in parts (norms, where the sequence is split), which are summed once in a step.

A layer says how it is divided by a method `divide`, as those of `kind: transformer` do.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import parametrize

from gpipe_exec.engine.losses import Loss, LossResult
from gpipe_exec.engine.messages import Value, flatten, unflatten
from gpipe_exec.engine.precision import adds_in_fp32
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import Scenario, Transformer

IS_PIECE = "_is_piece"
"""Marks a parameter that is a part of another."""


@dataclass(frozen=True)
class Division:
    """How a layer is divided."""

    styles: ParallelStyle | Mapping[str, ParallelStyle]
    """Of the layer, or of its submodules by name."""
    sections: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Submodule -> rows of its weights of which each member holds its part: queries, keys and values, for example."""
    in_parts: Sequence[str] = ()
    """Parameters that no style has, and of whose gradients each member makes a part."""


@runtime_checkable
class Divisible(Protocol):
    """A layer that says how it is divided."""

    def divide(self, mesh: DeviceMesh, *, sequence: bool) -> Division:
        """From now on it is one of a group's; `sequence` says whether its input and output are parts of sequences."""


class _Slice(NamedTuple):
    """What a member holds of a parameter."""

    dim: int | None
    """The one that is divided; None: it holds all of it."""
    sections: Sequence[int] = ()
    in_parts: bool = False
    """Whether its gradients are to be summed over the group."""


class _AsDTensor(nn.Module):
    """What a layer sees of a member's slice."""

    def __init__(self, mesh: DeviceMesh, placement: Placement, of_gradient: Placement) -> None:
        super().__init__()
        self._mesh, self._placement, self._of_gradient = mesh, placement, of_gradient

    def forward(self, own: torch.Tensor) -> torch.Tensor:
        """The DTensor that it is a part of."""
        return DTensor.from_local(own, self._mesh, [self._placement], grad_placements=[self._of_gradient])


def refuse_tensor(plan: Plan) -> None:
    """Refuse what a tensor group cannot hold or exchange yet, by its field."""
    if plan.tensor > 1:
        refuse_tensor_of(plan.scenario)


def refuse_tensor_of(scenario: Scenario) -> None:
    """The same of a scenario, whose plan is not made yet."""
    model, T = scenario.model, scenario.plan.tensor
    if T == 1:
        return
    if not isinstance(model, Transformer):
        message = f"found {T}, expected 1: the engine divides the layers of kind: transformer, not of {model.kind}"
        raise scenario.error("plan.tensor", message)
    if adds_in_fp32(scenario.dtype, scenario.precision):
        message = (
            f"found {scenario.precision}, expected mixed or pure with plan.tensor {T}: the engine adds up slices' "
        )
        raise scenario.error("precision", f"{message}gradients as they are")
    for name, number in (("kv_heads", model.num_kv_heads), ("vocab", model.vocab)):
        if number % T:
            message = f"found {number}, expected a multiple of plan.tensor, {T}: the engine divides them equally"
            raise scenario.error(f"model.{name}", message)


class Slices:
    """One member's part of the layers that it holds with others."""

    def __init__(self, mesh: DeviceMesh, *, sequence: bool) -> None:
        """All members make it at the same time; it uses their communicator, which stops the host until all joined."""
        self._mesh, self._sequence = mesh, sequence
        self.group: dist.ProcessGroup = mesh.get_group()
        self.num, self.member = mesh.size(), mesh.get_local_rank()
        self._slices: dict[nn.Parameter, _Slice] = {}
        self._now: dict[nn.Parameter, nn.Parameter] = {}
        """A parameter as it was -> what this member holds of it."""
        dist.all_reduce(torch.zeros(1, device=mesh.device_type), group=self.group)

    def divide(self, layer: nn.Module, name: str, *, is_last: bool) -> None:
        """Keep this member's slice of a layer, with the values that the first member has."""
        division = self._division_of(layer, name, is_last=is_last)
        before = dict(layer.named_parameters())
        for submodule, sections in division.sections.items():
            for parameter in layer.get_submodule(submodule).parameters():
                self._slices[parameter] = _Slice(0, sections)
        for parameter in before.values():
            if parameter not in self._now:
                dist.broadcast(parameter.data, group=self.group, group_src=0)
                rows = self._slices.pop(parameter, _Slice(0)).sections
                if rows:
                    parameter.data = torch.cat([_own(parameter.data, 0, rows, t, self.num) for t in range(self.num)])
        styles = division.styles if isinstance(division.styles, ParallelStyle) else dict(division.styles)
        parallelize_module(layer, self._mesh, styles, src_data_rank=None)
        for path, parameter in list(layer.named_parameters()):
            place, _, own_name = path.rpartition(".")
            style = styles if isinstance(styles, ParallelStyle) else styles.get(place)
            in_parts = path in division.in_parts or isinstance(style, SequenceParallel)
            if not isinstance(parameter, DTensor):
                self._slices[parameter] = _Slice(None, (), in_parts)
                self._now[parameter] = parameter
                continue
            self._hold(
                layer.get_submodule(place),
                own_name,
                before[path],
                parameter,
                division.sections.get(place, ()),
                in_parts=in_parts,
            )

    def _hold(
        self,
        module: nn.Module,
        name: str,
        before: nn.Parameter,
        divided: DTensor,
        sections: Sequence[int],
        *,
        in_parts: bool,
    ) -> None:
        """In place of the DTensor a parameter of its own, with its view."""
        (placement,) = divided.placements
        dim = placement.dim if isinstance(placement, Shard) else None
        if before not in self._now:
            with torch.no_grad():
                own = nn.Parameter(divided.to_local().clone(), requires_grad=before.requires_grad)
            self._now[before] = own
            self._slices[own] = _Slice(dim, sections, in_parts)
            setattr(own, IS_PIECE, dim is not None)
        module.register_parameter(name, self._now[before])
        of_gradient = Partial() if in_parts else placement
        parametrize.register_parametrization(module, name, _AsDTensor(self._mesh, placement, of_gradient), unsafe=True)

    def _division_of(self, layer: nn.Module, name: str, *, is_last: bool) -> Division:
        boundary: Placement = Shard(1) if self._sequence else Replicate()
        if isinstance(layer, Divisible):
            return layer.divide(self._mesh, sequence=self._sequence)
        if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            return Division(SequenceParallel(use_local_output=True) if self._sequence else {})
        if isinstance(layer, nn.Linear) and is_last and layer.bias is None:
            return Division(ColwiseParallel(input_layouts=boundary, use_local_output=False))
        found = f"layer {name} ({type(layer).__name__}) does not say how a tensor group divides it"
        raise ValueError(f"plan.tensor: found {self.num}, expected 1: {found}")

    def now(self, parameter: nn.Parameter) -> nn.Parameter:
        """What this member holds of a parameter as it was before it was divided."""
        return self._now.get(parameter, parameter)

    def is_counted(self, parameter: nn.Parameter) -> bool:
        """Whether this member's is among those that add up to the whole: a slice, or the first member's copy."""
        return self._slices[parameter].dim is not None or self.member == 0

    def sum_parts(self, parameters: Sequence[nn.Parameter], places: Sequence[nn.Parameter]) -> None:
        """Gradients of which each member has made a part become whole, all at once; all members take part. Those of
        each parameter are at its place: it itself, or its copy of 16 bits."""
        pairs = zip(parameters, places, strict=True)
        found = [place.grad for p, place in pairs if self._slices[p].in_parts and place.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in found):
            parts = [gradient for gradient in found if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in parts])
            dist.all_reduce(flat, group=self.group)
            for gradient, whole in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
                gradient.copy_(whole.view(gradient.shape))

    # --- messages ----------------------------------------------------------------------------------------------------

    @property
    def sends_slices(self) -> bool:
        """Whether members, who have the same to send, send a slice each."""
        return not self._sequence

    def cut(self, value: Value) -> Value:
        """What this member sends of what all of them have."""
        tensors, nesting = flatten(value)
        return unflatten(nesting, [tensor.chunk(self.num, -1)[self.member].contiguous() for tensor in tensors])

    def gathered(self, value: Value) -> Value:
        """What all of them have, from what each was sent."""
        tensors, nesting = flatten(value)
        parts = [[torch.empty_like(tensor) for _ in range(self.num)] for tensor in tensors]
        for part, tensor in zip(parts, tensors, strict=True):
            dist.all_gather(part, tensor, group=self.group)
        return unflatten(nesting, [torch.cat(part, -1) for part in parts])

    # --- what is known of each number of a slice, and of each of the parameter ---------------------------------------

    def whole(self, parameter: nn.Parameter, own: torch.Tensor) -> torch.Tensor:
        """From what members know of each number of their slices, what there is of all of it; all take part."""
        dim, sections, _ = self._slices[parameter]
        if dim is None or own.dim() != parameter.dim():
            return own
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.num)]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        if not sections:
            return torch.cat(parts, dim)
        pieces = [torch.split(part, [rows // self.num for rows in sections], dim) for part in parts]
        return torch.cat([torch.cat(one, dim) for one in zip(*pieces, strict=True)], dim)

    def own(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """The reverse."""
        dim, sections, _ = self._slices[parameter]
        if dim is None or whole.dim() != parameter.dim():
            return whole
        return _own(whole, dim, sections, self.member, self.num)

    def whole_shape(self, parameter: nn.Parameter) -> torch.Size:
        """Of the parameter, before it was divided."""
        dim = self._slices[parameter].dim
        return torch.Size(size * self.num if axis == dim else size for axis, size in enumerate(parameter.shape))


def _own(whole: torch.Tensor, dim: int, sections: Sequence[int], member: int, num: int) -> torch.Tensor:
    """A member's part of each section."""
    parts = [part.chunk(num, dim)[member] for part in torch.split(whole, list(sections) or whole.shape[dim], dim)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def plain_name(name: str) -> str:
    """A parameter's name without what its view adds."""
    return name.replace("parametrizations.", "").removesuffix(".original") if "parametrizations." in name else name


# --- values that members hold in parts -------------------------------------------------------------------------------


def put_together(value: Value) -> Value:
    """The same value in whole tensors; all members take part."""
    tensors, nesting = flatten(value)
    return unflatten(nesting, [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors])


def whole_loss(loss: Loss) -> Loss:
    """The same loss in whole tensors, whatever the logits are."""

    def found(output: Any, targets: Any) -> LossResult:
        result = loss(output, targets)
        if isinstance(result, tuple):
            total, count = result
            return put_together(total), put_together(count) if isinstance(count, torch.Tensor) else count
        whole: torch.Tensor = put_together(result)
        return whole

    return found


def divided_loss(tensor: int) -> AbstractContextManager[None]:
    """Around forwards and backwards of a loss whose logits are divided by the vocabulary, among so many."""
    found: AbstractContextManager[None] = loss_parallel() if tensor > 1 else nullcontext()
    return found
