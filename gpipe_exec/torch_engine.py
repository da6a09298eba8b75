"""The same plan on torch's own engine, torch.distributed.pipelining, as a cross-check of ours.

It knows gpipe with backwards first in first out, and 1f1b; checkpointing of every micro-batch or of none, recomputed
when the gradient is there; micro-batches of one size. What it cannot do is said before anything starts.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from gpipe_exec.layers import Workload
from gpipe_exec.messages import Value, wants_gradient
from gpipe_exec.recorder import Mark, Recorder
from gpipe_sim.plan import Plan
from gpipe_sim.schedule import Action, Kind, stage_actions


def what_torch_cannot(plan: Plan, device: str) -> Iterator[str]:
    """What torch's engine cannot do of this plan, a sentence each."""
    again = {again for stage in range(plan.num_stages) for again in plan.recomputed(stage)}
    if device == "rehearse":
        yield "computes, expected --device cpu or cuda"
    if plan.schedule not in ("gpipe", "1f1b"):
        yield f"has no schedule {plan.schedule}, expected gpipe or 1f1b"
    if plan.schedule == "gpipe" and plan.backward == "reverse" and plan.num_microbatches > 1:
        yield "runs gpipe's backwards first in first out, expected plan.backward: fifo"
    if plan.schedule == "1f1b" and plan.num_microbatches < plan.num_stages:
        yield f"needs as many micro-batches as stages for 1f1b, found {plan.num_microbatches} for {plan.num_stages}"
    if len(again) > 1:
        yield "checkpoints all micro-batches of all stages or none, expected plan.checkpoint: always or never"
    if True in again and plan.recompute == "early":
        yield "recomputes when the gradient has arrived, expected plan.recompute: on_demand"
    if len(set(plan.sizes)) > 1:
        batch, M = plan.scenario.batch, plan.num_microbatches
        yield f"needs micro-batches of one size, found a batch of {batch} in {M}"
    if not plan.scenario.cluster.overlap:
        yield "does not wait for its sends, expected cluster.overlap: true"
    if plan.placement != plan.ranks:
        yield "puts stage k on rank k, expected plan.placement: auto"


class TorchPipeline:
    """One rank of torch's engine, with the spans of the plan's own actions."""

    def __init__(self, workload: Workload, plan: Plan, *, device: torch.device, recorder: Recorder) -> None:
        if any(isinstance(layer, _BatchNorm) for layer in workload.layers.modules()):
            raise ValueError("torch's engine averages BatchNorm per micro-batch, expected --engine gpipe")
        self.plan, self.rank, self.recorder = plan, dist.get_rank(), recorder
        self.is_first, self.is_last = self.rank == 0, self.rank == plan.num_stages - 1
        inputs, outputs = _boundaries(workload, plan, self.rank)
        self.module = workload.layers[plan.stages[self.rank]].to(device)
        self._marks: dict[Action, tuple[Mark, Mark]] = {}
        body = _Checkpointed(self.module, self.note) if plan.recomputed(self.rank)[0] else self.module
        stage = _RecordingStage(self, body, self.rank, plan.num_stages, device, inputs, outputs)
        schedule = ScheduleGPipe if plan.schedule == "gpipe" else Schedule1F1B
        # The micro-batches' mean losses are averaged here: `scale_grads` would scale what had accumulated before, too.
        self._schedule = schedule(
            stage,
            plan.num_microbatches,
            loss_fn=lambda output, target: workload.loss(output, target) / plan.num_microbatches,
            scale_grads=False,
        )
        self._device = device

    def step(self, inputs: Value, targets: Any, update: Callable[[], object] | None = None) -> torch.Tensor:
        """One mini-batch; every rank gets its mean loss."""
        losses: list[torch.Tensor] = []
        self._marks.clear()
        self.recorder.begin_step()
        given = (inputs.to(self._device),) if self.is_first else ()
        answers = targets.to(self._device) if self.is_last else None
        self._schedule.step(*given, target=answers, losses=losses, return_outputs=False)
        began = self.recorder.mark()
        if update is not None:
            update()
        self._marks[Action("U", self.rank, -1)] = (began, self.recorder.mark())
        actions = stage_actions(self.plan, self.rank)
        for action in actions:
            start, end = self._marks[action]
            self.recorder.action(time.perf_counter(), start, end)
        self.recorder.end_step([float("nan")] * len(actions))
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)
        total = total.detach().double()
        dist.broadcast(total, src=self.plan.num_stages - 1)
        return total

    def close(self) -> None:
        """Nothing is left over."""

    def note(self, kind: Kind, microbatch: int, start: Mark) -> Mark:
        """An action that began at this mark has ended, now."""
        now = self.recorder.mark()
        self._marks[Action(kind, self.rank, microbatch)] = (start, now)
        return now


def _boundaries(workload: Workload, plan: Plan, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What enters and leaves a stage, on the meta device: torch would otherwise run the modules on garbage."""
    value: torch.Tensor = workload.sample(plan.sizes[0])[0].to("meta")
    at = [value]
    for layers in plan.stages[: stage + 1]:
        at.append(_meta_forward(workload.layers[layers], at[-1]))
    if not all(isinstance(one, torch.Tensor) for one in at):
        raise ValueError("torch's engine is used with one tensor between stages, expected --engine gpipe")
    return at[-2], at[-1]


def _meta_forward(layers: nn.Module, value: Any) -> Any:
    state = {name: tensor.to("meta") for name, tensor in [*layers.named_parameters(), *layers.named_buffers()]}
    with torch.no_grad():
        output = torch.func.functional_call(layers, state, (value,))
    return output.requires_grad_(wants_gradient(output)) if isinstance(output, torch.Tensor) else output


class _Checkpointed(nn.Module):
    """A stage that keeps its input only, and runs again when its backward begins."""

    def __init__(self, body: nn.Module, note: Callable[[Kind, int, Mark], Mark]) -> None:
        super().__init__()
        self._body, self._note = body, note
        self.backward: tuple[int, Mark] | None = None
        """The micro-batch of the backward under way, and when that began or, once it has run again, went on."""

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x: torch.Tensor) -> Any:
        try:
            return self._body(x)
        finally:  # torch leaves by an exception as soon as it has recomputed what it needs
            if self.backward is not None:
                microbatch, start = self.backward
                self.backward = (microbatch, self._note("R", microbatch, start))


class _RecordingStage(PipelineStage):
    """Marks the compute of each micro-batch; receives are waited for outside of it."""

    def __init__(
        self,
        owner: TorchPipeline,
        body: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device,
        inputs: torch.Tensor,
        outputs: torch.Tensor,
    ) -> None:
        super().__init__(body, index, num_stages, device, input_args=inputs, output_args=outputs)
        self._owner, self._body = owner, body

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        start = self._owner.recorder.mark()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._owner.note("F", fwd_chunk_id, start)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        start = self._owner.recorder.mark()
        if isinstance(self._body, _Checkpointed):
            self._body.backward = (bwd_chunk_id, start)
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if isinstance(self._body, _Checkpointed) and self._body.backward is not None:
            _, start = self._body.backward
            self._body.backward = None
        self._owner.note("B", bwd_chunk_id, start)
        return result
