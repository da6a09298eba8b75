"""The engine: one rank interprets its action list, the very list that the simulator runs.

    for action in actions:
        F   take the activations (or the data), run forward, send the output on
        R   run forward again; on demand, first take the gradient
        B   take the gradient (at the last stage, the loss's), run backward, send the input's gradient back

Receives are posted ahead, sends do not wait (unless the plan says `overlap: false`), and what is no longer needed is
let go at once. Losses are weighted by samples, so that gradients and loss are those of the whole batch on one device.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpipe_exec.delivery import Acknowledged
from gpipe_exec.messages import (
    MAX_TENSORS,
    PeerToPeer,
    Receiver,
    Sender,
    Transport,
    Value,
    flatten,
    form_of,
    unflatten,
)
from gpipe_exec.recorder import Recorder
from gpipe_exec.stage import Loss, Stage
from gpipe_sim.plan import Plan
from gpipe_sim.schedule import gradient_takers, stage_actions


class Pipeline:
    """A model cut into stages, of which this process holds one.

    Every rank builds it with the same layers and plan, under torchrun with as many processes as the plan has stages.

    >>> pipe = Pipeline(layers, plan, loss)
    >>> optimizer = torch.optim.Adam(pipe.parameters())
    >>> for inputs, targets in data:
    ...     loss = pipe.step(inputs, targets)  # accumulates exact gradients
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        layers: nn.Sequential | Sequence[nn.Module],
        plan: Plan,
        loss: Loss,
        *,
        device: torch.device | str | None = None,
        recorder: Recorder | None = None,
        carry: Callable[[PeerToPeer, int], Transport] | None = None,
    ) -> None:
        """`carry`, given the direct way between two ranks and its edge, may return another way for messages."""
        if len(layers) != plan.profile.num_layers:
            raise ValueError(f"the model has {len(layers)} layers, but the plan was made for {plan.profile.num_layers}")
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != plan.num_stages:
            found = f"{world} process{'es' * (world > 1)}"
            raise ValueError(f"{found} for a plan of {plan.num_stages} stages, expected one for each stage")
        self.plan = plan
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.stage_index = plan.placement.index(plan.ranks[self.rank])
        self.device = torch.device(device) if device is not None else default_device()
        self.recorder = recorder or Recorder(self.device)
        self.actions = stage_actions(plan, self.stage_index)
        self._takers = gradient_takers(plan, self.stage_index)
        names = [name for name, _ in layers.named_children()] if isinstance(layers, nn.Sequential) else None
        self._names = names or [str(index) for index in range(len(layers))]
        _refuse_tied_weights(layers, plan)
        self._refuse_different_plans()
        mine = range(len(layers))[plan.stages[self.stage_index]]
        self._loss = loss
        self._weights = [size / plan.scenario.batch for size in plan.sizes]
        self._layers = {self._names[index]: layers[index].to(self.device) for index in mine}
        self.module = nn.Sequential()
        for name, layer in self._layers.items():  # under the names they have in the whole model
            self.module.add_module(name, layer)
        self._stage = Stage(
            module=self.module,
            device=self.device,
            is_first=self.is_first,
            loss=loss if self.is_last else None,
            recomputed=plan.recomputed(self.stage_index),
        )
        self._carry = carry or self._direct
        self._transports: list[Transport] = []
        self._connect()

    @property
    def is_first(self) -> bool:
        """Whether this rank takes the inputs."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stage_index == self.plan.num_stages - 1

    def parameters(self) -> list[nn.Parameter]:
        """Of this rank's stage, for its optimizer."""
        return list(self.module.parameters())

    # --- one step --------------------------------------------------------------------------------------------------

    def step(self, inputs: Value, targets: Any, update: Callable[[], object] | None = None) -> torch.Tensor:
        """Forward and backward of one mini-batch; every rank gets its mean loss.

        The inputs matter on the first rank and the targets on the last; both are split along their first dimension
        into the plan's micro-batches. Gradients are added to those that are there. `update`, if given, is called as
        soon as this rank's gradients are complete, while other ranks may still be computing theirs.
        """
        plan, stage, record = self.plan, self._stage, self.recorder
        data = self._split(inputs) if self.is_first else [None] * plan.num_microbatches
        answers = self._split(targets) if self.is_last else [None] * plan.num_microbatches
        gradients: dict[int, list[torch.Tensor]] = {}
        losses: list[torch.Tensor] = []
        self._expect()
        record.begin_step()
        for kind, _, m in self.actions:
            waited_from = time.perf_counter()
            value = self._receive(kind, m, gradients)
            self._reap()
            started = record.mark()
            if kind == "F":
                output = stage.forward(m, data[m] if self.is_first else value, answers[m], self._weights[m])
                data[m] = None
                ended = record.mark()
                if self.is_last:
                    losses.append(output.detach())
                else:
                    self._send_output(m, output)
                del output
            elif kind == "R":
                stage.recompute(m)
                ended = record.mark()
            elif kind == "U":
                if update is not None:
                    update()
                ended = record.mark()
            else:
                result = stage.backward(m, gradients.pop(m, []))
                ended = record.mark()
                if self._gradients_out:
                    self._gradients_out.send(m, result)
                del result
            del value
            record.action(waited_from, started, ended)
            self._reap()
        for sender in self._senders:
            sender.finish()
        stage.averages.commit()
        record.end_step([self._delivered(kind, m) for kind, _, m in self.actions])
        return self._share_loss(losses)

    def evaluate(self, inputs: Value, targets: Any) -> torch.Tensor:
        """The mean loss of a mini-batch in evaluation mode, without gradients; on every rank."""
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            return self._evaluate(inputs, targets)
        finally:
            for module, was_training in modes.items():
                module.training = was_training

    def _evaluate(self, inputs: Value, targets: Any) -> torch.Tensor:
        data = self._split(inputs) if self.is_first else [None] * self.plan.num_microbatches
        answers = self._split(targets) if self.is_last else [None] * self.plan.num_microbatches
        losses: list[torch.Tensor] = []
        order = range(self.plan.num_microbatches)
        if self._inputs_in:
            self._inputs_in.expect(order)
        with torch.no_grad():
            for m in order:
                output = self.module(self._inputs_in.take(m) if self._inputs_in else data[m])
                if self._outputs_out:
                    self._outputs_out.send(m, output)
                else:
                    losses.append(self._loss(output, answers[m]) * self._weights[m])
        for sender in self._senders:
            sender.finish()
        return self._share_loss(losses)

    def _receive(self, kind: str, m: int, gradients: dict[int, list[torch.Tensor]]) -> Value:
        """Wait for what the action needs: activations are returned, a gradient is kept for the backward."""
        if kind == "F" and self._inputs_in:
            return self._inputs_in.take(m)
        if self._gradients_in and kind != "U" and self._takers[m] == kind:
            gradients[m] = self._gradients_in.take(m)
        return None

    def _reap(self) -> None:
        """Let go of what has been delivered by now."""
        for sender in self._senders:
            sender.reap()

    def _send_output(self, m: int, output: Value) -> None:
        assert self._outputs_out is not None, "every stage but the last sends its output on"
        assert self._gradients_in is not None, "every stage but the last receives gradients"
        self._gradients_in.knows(self.plan.sizes[m], form_of(output).gradients())
        self._outputs_out.send(m, output)
        self._gradients_in.post()

    def _expect(self) -> None:
        """Post the step's first receives, in the order in which the actions will take them."""
        if self._inputs_in:
            self._inputs_in.expect([m for kind, _, m in self.actions if kind == "F"])
        if self._gradients_in:
            self._gradients_in.expect([m for kind, _, m in self.actions if kind != "U" and self._takers[m] == kind])

    def _share_loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        total = (
            torch.stack(losses).sum().double() if losses else torch.zeros((), dtype=torch.double, device=self.device)
        )
        if self.plan.num_stages > 1:
            dist.broadcast(total, src=self._process_of(self.plan.num_stages - 1))
        return total

    def _delivered(self, kind: str, m: int) -> float:
        sender = {"F": self._outputs_out, "B": self._gradients_out}.get(kind)
        return sender.delivered_s[m] if sender else float("nan")

    def _split(self, value: Value) -> list[Value]:
        """The mini-batch as micro-batches, each tensor along its first dimension."""
        tensors, nesting = flatten(value)
        lengths = {len(tensor) for tensor in tensors}
        if lengths != {self.plan.scenario.batch}:
            found = ", ".join(map(str, sorted(lengths)))
            raise ValueError(f"a mini-batch of {found} samples, but the plan was made for {self.plan.scenario.batch}")
        pieces = [torch.split(tensor.to(self.device), list(self.plan.sizes)) for tensor in tensors]
        return [unflatten(nesting, [piece[m] for piece in pieces]) for m in range(self.plan.num_microbatches)]

    def _refuse_different_plans(self) -> None:
        """Ranks that cut the model differently would wait for each other forever."""
        if self.plan.num_stages > 1:
            mine = (self.plan.balance, self.plan.placement, self.plan.num_microbatches, self.plan.schedule)
            all_plans: list[Any] = [None] * self.plan.num_stages
            dist.all_gather_object(all_plans, mine)
            if any(other != mine for other in all_plans):
                raise ValueError(f"the ranks have different plans, expected one plan file for all: {all_plans}")

    # --- connections -----------------------------------------------------------------------------------------------

    def _process_of(self, stage: int) -> int:
        """The process that holds a stage: processes are numbered in the order of `Plan.ranks`."""
        return self.plan.ranks.index(self.plan.placement[stage])

    def _connect(self) -> None:
        """A sender or a receiver for each edge and direction of this stage."""
        plan, k = self.plan, self.stage_index
        edges = [(k, towards) for k in range(plan.num_stages - 1) for towards in ("next", "previous")]
        groups: dict[tuple[int, str], dist.ProcessGroup | None] = dict.fromkeys(edges)
        if self.device.type == "cuda":
            # NCCL runs the operations of one communicator in order, so that the two directions of an edge would wait
            # for each other. Every rank takes part in making every group.
            for edge in edges:
                groups[edge] = dist.new_group([self._process_of(edge[0]), self._process_of(edge[0] + 1)])
        numbers = plan.num_microbatches * (MAX_TENSORS + 2)

        def transport(edge: int, towards: str) -> Transport:
            peer = edge + 1 if k == edge else edge
            first_tag = edges.index((edge, towards)) * numbers
            direct = PeerToPeer(self._process_of(peer), groups[edge, towards], first_tag)
            self._transports.append(self._carry(direct, edge))
            return self._transports[-1]

        def sender(edge: int, towards: str, *, tells_form: bool) -> Sender:
            blocking = not plan.scenario.cluster.overlap
            return Sender(transport(edge, towards), plan.sizes, tells_form=tells_form, blocking=blocking)

        def receiver(edge: int, towards: str) -> Receiver:
            return Receiver(transport(edge, towards), plan.sizes, self.device, plan.window)

        self._inputs_in = None if self.is_first else receiver(k - 1, "next")
        self._gradients_out = None if self.is_first else sender(k - 1, "previous", tells_form=False)
        self._outputs_out = None if self.is_last else sender(k, "next", tells_form=True)
        self._gradients_in = None if self.is_last else receiver(k, "previous")
        self._senders = [end for end in (self._outputs_out, self._gradients_out) if end is not None]

    def _direct(self, direct: PeerToPeer, edge: int) -> Transport:
        """Only gloo calls a message sent that has not arrived, which matters to senders that wait."""
        overlap = self.plan.scenario.cluster.overlap
        return direct if overlap or self.device.type == "cuda" else Acknowledged(direct)

    def close(self) -> None:
        """End the threads that wait for deliveries."""
        for sender in self._senders:
            sender.close()
        for transport in self._transports:
            if isinstance(transport, Acknowledged):
                transport.close()

    # --- state -----------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> None:
        """Training mode, or evaluation mode, of this stage's layers."""
        self.module.train(mode)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state on every rank, as the one-process ``nn.Sequential`` of all layers has it."""
        mine = {name: tensor.cpu() for name, tensor in self.module.state_dict().items()}
        if self.plan.num_stages == 1:
            return mine
        parts: list[dict[str, torch.Tensor] | None] = [None] * self.plan.num_stages
        dist.all_gather_object(parts, mine)
        merged = {name: tensor for part in parts if part for name, tensor in part.items()}
        order = {name: place for place, name in enumerate(self._names)}
        return {name: merged[name] for name in sorted(merged, key=lambda name: order[name.split(".")[0]])}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this stage's part of the whole model's state, as an ``nn.Sequential`` of all layers saves it."""
        unknown = sorted({name.split(".")[0] for name in state} - set(self._names))
        if unknown:
            raise ValueError(f"the state has layers {', '.join(unknown)}, which the model has not")
        own = {name: tensor for name, tensor in state.items() if name.split(".")[0] in self._layers}
        self.module.load_state_dict(own)


def _refuse_tied_weights(layers: nn.Sequential | Sequence[nn.Module], plan: Plan) -> None:
    """A parameter on two stages would get half of its gradient on each."""
    owner: dict[nn.Parameter, int] = {}
    for stage, span in enumerate(plan.stages):
        for layer in list(layers)[span]:
            for parameter in layer.parameters():
                if owner.setdefault(parameter, stage) != stage:
                    raise ValueError(
                        f"stages {owner[parameter]} and {stage} share a parameter, expected each on one stage"
                    )


def default_device() -> torch.device:
    """This process's GPU if there is one, otherwise the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def pin_to_cores() -> bool:
    """Give each rank of this machine cores of its own, as many as there are for each, and as many threads.

    A rank that wanders between cores, or shares one while another is free, cannot be predicted. Where ranks outnumber
    cores they take them in turns; returns whether that is so.
    """
    if not hasattr(os, "sched_setaffinity"):  # only Linux lets a process choose its cores
        return False
    local_rank, local_world = (int(os.environ.get(name, default)) for name, default in _LOCAL)
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // local_world)
    first = local_rank * each % len(cores)
    os.sched_setaffinity(0, cores[first : first + each])
    torch.set_num_threads(each)
    return local_world > len(cores)


_LOCAL = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
