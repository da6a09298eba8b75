"""Shards: what replicas divide among themselves. Each updates a piece of every bucket, and they gather the rest.

    bucket of rank k        |== piece of replica 0 ==|== piece of replica 1 ==|     D = 2: cut where it lies in memory
    its gradients           |........................|==== summed ============|     whole until they are summed
    the optimizer's state                             |========================|     of the piece alone

    shard: optimizer    parameters stay whole, and the piece is a part of them; gathered after the update
    shard: parameters   between steps there is nothing but the piece; gathered before a step, in which the piece is a
                        part of the parameters again, so that nothing is held twice

What the optimizer is given (`Pipeline.parameters`) is the piece of each parameter, flat, perhaps empty: it must do the
same to each number, as Adam and SGD do. One that looks at a parameter as a whole (LAMB, Muon, Adafactor) would look at
a piece, and is refused at its first step.

The collectives are torch.distributed's. Its `fully_shard` is not used: it holds a shard beside the gathered parameters
and copies both through a buffer as large as a layer's, more than a plan counts; and its hooks are made for backwards
that are not split.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpipe_exec.engine.buckets import Bucket, buckets_of, together
from gpipe_exec.engine.precision import computes_with_copies
from gpipe_exec.engine.slices import IS_PIECE
from gpipe_exec.engine.transport import Transfers
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import Precision


def refuse_shards(plan: Plan, precision: Precision | None = None) -> None:
    """Refuse to divide what is held in two precisions: the plan's, unless another is told."""
    if (
        plan.replicas > 1
        and plan.shard != "none"
        and computes_with_copies(plan.dtype, precision or plan.scenario.precision)
    ):
        message = f"found {plan.shard}, expected none, or precision: pure: the engine divides no mixed precision yet"
        raise plan.scenario.error("plan.shard", message)


EACH_NUMBER: set[type[optim.Optimizer]] = {
    *(optim.SGD, optim.ASGD, optim.Rprop, optim.RMSprop, optim.Adagrad, optim.Adadelta),
    *(optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
}
"""Optimizers that do the same to each number of a parameter, whatever its shape; others of that kind may be added."""


def _refuse_whole(optimizer: optim.Optimizer, *_: object) -> None:
    """Before any optimizer's step: one that looks at parameters as a whole is given no pieces of them."""
    if type(optimizer) in EACH_NUMBER:
        return
    if any(getattr(parameter, IS_PIECE, False) for group in optimizer.param_groups for parameter in group["params"]):
        message = f"plan.shard, plan.tensor: found the optimizer {type(optimizer).__name__}, which is given pieces of "
        message += "parameters, expected one that does the same to each number, such as Adam or SGD; if it does, add "
        message += "it to gpipe_exec.engine.shards.EACH_NUMBER, or divide nothing (plan.shard: none, plan.tensor: 1)"
        raise ValueError(message)


register_optimizer_step_pre_hook(_refuse_whole)


class Shards:
    """The pieces of one rank's parameters that this replica updates."""

    def __init__(
        self,
        stages: Iterable[Sequence[nn.Parameter]],
        group: dist.ProcessGroup,
        replica: int,
        *,
        stays_whole: bool,
    ) -> None:
        """The parameters of each stage are the same in all replicas by now."""
        self._group, self._replica, self._num = group, replica, group.size()
        self._stays_whole = stays_whole
        self._is_whole = True
        """Whether every parameter has the latest values of all its pieces."""
        self._buckets = [bucket for parameters in stages for bucket in buckets_of(parameters)]
        self._flat: dict[Bucket, torch.Tensor] = {}
        """What is held of each bucket: all of it, or this replica's piece."""
        self._places: dict[nn.Parameter, tuple[Bucket, int]] = {}
        """Parameter -> its bucket, and its number there."""
        self.pieces: dict[nn.Parameter, nn.Parameter] = {}
        """Parameter -> what this replica updates of it."""
        for bucket in self._buckets:
            for number, parameter in enumerate(bucket.parameters):
                self._places[parameter] = bucket, number
                piece = parameter.data.new_empty(0)
                self.pieces[parameter] = nn.Parameter(piece, requires_grad=parameter.requires_grad)
                setattr(self.pieces[parameter], IS_PIECE, True)
            self._hold_whole(bucket, together([parameter.data for parameter in bucket.parameters]))
        self.release()

    def begin_gather(self, parameters: Sequence[nn.Parameter]) -> Transfers:
        """Of every replica's pieces; nobody may touch the parameters until it ends. All begin in the same order."""
        transfers = []
        for bucket in dict.fromkeys(self._places[parameter][0] for parameter in parameters):
            if not self._stays_whole:
                flat, (begin, end) = self._flat[bucket].new_empty(bucket.size), self._cuts(bucket)[self._replica]
                flat[begin:end] = self._flat[bucket]
                self._hold_whole(bucket, flat)
            for replica, (begin, end) in enumerate(self._cuts(bucket)):
                if begin < end:
                    part = self._flat[bucket][begin:end]
                    work = dist.broadcast(part, group=self._group, group_src=replica, async_op=True)
                    assert work is not None, "this process is among those that hold the same stages"
                    transfers.append((work, part))
        return transfers

    def _hold_whole(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """From now on the parameters of a bucket, and their pieces, are parts of this tensor."""
        self._flat[bucket] = flat
        for parameter, part in zip(bucket.parameters, bucket.views(flat), strict=True):
            parameter.data = part
            self.pieces[parameter].data = self._own(parameter, part)

    def gather(self) -> None:
        """Every parameter is whole."""
        if not self._is_whole:
            for work, _ in self.begin_gather(list(self.pieces)):
                work.wait()
            self._is_whole = True

    def end_step(self, *, gathered: bool) -> None:
        """Pieces have been updated and gathered again; or may be updated, which leaves the rest out of date."""
        self._is_whole = gathered
        self.release()

    def release(self) -> None:
        """Let go of what other replicas update, unless parameters stay whole."""
        if self._stays_whole:
            return
        for bucket in self._buckets:
            begin, end = self._cuts(bucket)[self._replica]
            own = self._flat[bucket] = self._flat[bucket][begin:end].clone()
            taken = 0
            for parameter in bucket.parameters:
                piece = self.pieces[parameter]
                piece.data = own[taken : taken + piece.numel()]
                taken += piece.numel()
                parameter.data = own.new_empty(0)
        self._is_whole = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Meanwhile every parameter is whole, also for whoever changes it; all replicas enter and leave together."""
        self.gather()
        try:
            yield
        finally:
            self.release()

    def take_gradients(self) -> None:
        """Add the summed gradients to those of the pieces; the parameters themselves have none from now on."""
        for parameter, piece in self.pieces.items():
            if parameter.grad is not None:
                own = self._own(parameter, parameter.grad)
                piece.grad = own if piece.grad is None else piece.grad.add_(own)
                parameter.grad = None

    # --- what is known of each number of a piece, such as an optimizer's state, and of each of the parameter ----------

    def of_whole(self, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """From the values for a parameter's pieces, those for all of it; every replica takes part."""
        bucket, number = self._places[parameter]
        whole = value.new_empty(bucket.shapes[number])
        for replica in range(self._num):
            begin, end = self._span(parameter, replica)
            if begin < end:
                part = whole.view(-1)[begin:end]
                if replica == self._replica:
                    part.copy_(value)
                dist.broadcast(part, group=self._group, group_src=replica)
        return whole

    def whole_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> torch.Tensor:
        """What an optimizer would know if nothing were divided."""
        is_for_piece = _is_for_each(key, value) and value.shape == self.pieces[parameter].shape
        return self.of_whole(parameter, value) if is_for_piece else value

    def own_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> torch.Tensor:
        """The reverse."""
        bucket, number = self._places[parameter]
        is_for_all = _is_for_each(key, value) and value.shape == bucket.shapes[number]
        return self._own(parameter, value).clone() if is_for_all else value

    def _own(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """What this replica has of something as large as a parameter."""
        begin, end = self._span(parameter, self._replica)
        return whole.reshape(-1)[begin:end]

    def _span(self, parameter: nn.Parameter, replica: int) -> tuple[int, int]:
        """Where a replica's piece of a parameter begins and ends, in its numbers."""
        bucket, number = self._places[parameter]
        (first, last), (begin, end) = bucket.spans[number], self._cuts(bucket)[replica]
        begin, end = max(begin, first) - first, min(end, last) - first
        return (begin, end) if begin < end else (0, 0)

    def _cuts(self, bucket: Bucket) -> list[tuple[int, int]]:
        """Where the piece of each replica begins and ends in a bucket: equal ones, but for the last."""
        size = -(-bucket.size // self._num)
        return [(min(d * size, bucket.size), min((d + 1) * size, bucket.size)) for d in range(self._num)]


def _is_for_each(key: str, value: torch.Tensor) -> bool:
    """Whether an optimizer's tensor may have a value for each number of a parameter: options are bytes."""
    return key != "step" and value.is_floating_point()
