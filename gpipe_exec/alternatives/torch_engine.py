"""The same plan on torch's own engine, torch.distributed.pipelining, as a cross-check of ours.

A plan whose order is that of one of torch's schedules is run by that class (`torch_name` has the table); every other
order is loaded from a file by torch's runtime, on any placement. What torch cannot do is said before anything starts.

The spans are those of the program's own actions. Two things differ from our engine: a first stage's I does nothing and
leaves the whole backward to its W, since nobody waits for the gradient of its inputs; and everything that a stage needs
for its loss and gradients is kept until the step ends.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from gpipe_exec.devices.accelerator import Mark
from gpipe_exec.devices.recorder import Recorder
from gpipe_exec.engine.materialize import materialize
from gpipe_exec.engine.messages import Value, wants_gradient
from gpipe_exec.engine.precision import DTYPES, computes_with_copies, mixed_of
from gpipe_exec.engine.tied import shared_parameters
from gpipe_exec.layers import Workload
from gpipe_sim.export.torch_names import torch_name
from gpipe_sim.make.planfile import order_of_plan
from gpipe_sim.plan.actions import Action, Letter
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import program_of


def what_torch_cannot(plan: Plan, device: str) -> Iterator[str]:
    """What torch's engine cannot do of this plan, a sentence each."""
    again = [set(plan.recomputed(stage)) for stage in range(plan.num_stages)]
    program = program_of(plan)
    if device == "rehearse":
        yield "computes, expected --device cpu or cuda"
    if any(len(of_stage) > 1 for of_stage in again):
        yield "checkpoints all micro-batches of a stage or none, expected plan.checkpoint: always or never"
    if any(True in of_stage for of_stage in again):
        if plan.recompute == "early":
            yield "recomputes when the gradient has arrived, expected plan.recompute: on_demand"
        if (program.at["I"] >= 0).any():
            yield "recomputes twice where a backward is split, expected plan.checkpoint: never"
    if computes_with_copies(plan.dtype, plan.scenario.precision) and plan.scenario.precision != "mixed":
        yield "adds up gradients in the dtype that it computes in, expected precision: mixed, or pure"
    if plan.dtype == "fp16" and plan.scenario.precision != "pure":
        yield "does not scale losses, expected dtype: bf16, or precision: pure"
    if plan.recompute_unit != "stage" and plan.checkpoint != ("never",) * plan.num_stages:
        yield "recomputes whole stages, expected plan.recompute_unit: stage"
    if len(set(plan.sizes)) > 1:
        batch, M = plan.scenario.batch, plan.num_microbatches
        yield f"needs micro-batches of one size, found a batch of {batch} in {M}"
    if not plan.scenario.cluster.overlap:
        yield "does not wait for its sends, expected cluster.overlap: true"
    if (np.diff(program.at["F"][-1]) < 0).any():
        yield "numbers losses as they are computed, expected the last stage's forwards in the order of micro-batches"


class TorchPipeline:
    """One rank of torch's engine, with the spans of the plan's own actions."""

    def __init__(self, workload: Workload, plan: Plan, *, device: torch.device, recorder: Recorder) -> None:
        if any(isinstance(layer, _BatchNorm) for layer in workload.layers.modules()):
            raise ValueError("torch's engine averages BatchNorm per micro-batch, expected --engine gpipe")
        names = [name for name, _ in workload.layers.named_children()]
        own = plan.stages_of(plan.ranks[dist.get_rank()])
        mine = [layer for index in own for layer in range(len(workload.layers))[plan.stages[index]]]
        materialize(workload.layers, names, mine, device)
        for called in shared_parameters(workload.layers, names, plan).values():
            raise ValueError(
                f"torch's engine does not sum the gradients of {', '.join(called)}, expected --engine gpipe"
            )
        self.plan, self.rank, self.recorder = plan, dist.get_rank(), recorder
        self.is_first, self.is_last = 0 in own, plan.num_stages - 1 in own
        self.actions = program_of(plan).order[plan.pipeline.index(plan.ranks[self.rank])]
        self._loss, self._device = workload.loss, device
        self._marks: dict[Action, tuple[Mark, Mark]] = {}
        self._latest = self.actions[0]
        self.module = nn.Sequential()
        copies = computes_with_copies(plan.dtype, plan.scenario.precision)
        boundaries = _boundaries(workload, plan, DTYPES[plan.dtype] if copies else None)
        stages = []
        for index in own:
            layers = workload.layers[plan.stages[index]].to(device)
            for name, layer in layers.named_children():
                self.module.add_module(name, layer)
            stages.append(_RecordingStage(self, layers, index, *boundaries[index : index + 2]))
        self._mixed = mixed_of(plan, self.module)
        self.schedule = _schedule_of(plan, stages, self._share_of_loss)

    def parameters(self) -> list[nn.Parameter]:
        """For this rank's optimizer."""
        return list(self.module.parameters())

    def step(self, inputs: Value, targets: Any, update: Callable[[], object] | None = None) -> torch.Tensor:
        """One mini-batch; every rank gets its mean loss."""
        with self.lowered():
            return self._step(inputs, targets, update)

    def lowered(self) -> AbstractContextManager[None]:
        """Meanwhile the layers have the weights that they compute with."""
        return self._mixed.lowered() if self._mixed is not None else nullcontext()

    def _step(self, inputs: Value, targets: Any, update: Callable[[], object] | None) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        self._marks.clear()
        self.recorder.begin_step()
        given = (inputs.to(self._device),) if self.is_first else ()
        answers = targets.to(self._device) if self.is_last else None
        self.schedule.step(*given, target=answers, losses=losses, return_outputs=False)
        began = self.recorder.mark()
        if self._mixed is not None:
            self._mixed.raise_gradients()
        if update is not None:
            update()
        self._marks[self.actions[-1]] = (began, self.recorder.mark())
        for action in self.actions:
            start, end = self._marks[action]
            self.recorder.action(time.perf_counter(), start, end)
        self.recorder.end_step([float("nan")] * len(self.actions))
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)
        total = total.detach().double()
        dist.broadcast(total, src=self.plan.ranks.index(self.plan.placement[-1]))
        return total

    def close(self) -> None:
        """Nothing is left over."""

    def note(self, action: Action, start: Mark) -> Mark:
        """An action that began at this mark has ended, now."""
        now = self.recorder.mark()
        self._latest, self._marks[action] = action, (start, now)
        return now

    def _share_of_loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """What a micro-batch adds to the mean loss; it is computed right after the forward, and part of it.

        `scale_grads` would do the same to gradients, and also to what had accumulated before.
        """
        result = self._loss(output, target)
        if isinstance(result, tuple):
            raise ValueError("torch's engine takes means, and this loss returns (sum, count): expected --engine gpipe")
        loss = result / self.plan.num_microbatches
        self.note(self._latest, self._marks[self._latest][0])
        return loss


def _schedule_of(plan: Plan, stages: "list[_RecordingStage]", loss: Callable[..., torch.Tensor]) -> Any:
    """torch's own class where one has the plan's order, otherwise its runtime with the order from a file."""
    M = plan.num_microbatches
    name = torch_name(plan) if plan.pipeline == plan.ranks else None  # process k is the pipeline's k-th
    if name is not None:
        kind = get_schedule_class(name)
        held = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        return kind(held, M, loss_fn=loss, scale_grads=False)
    kind = _PipelineScheduleRuntime
    runtime = kind(stages, M, loss_fn=loss, scale_grads=False)  # type: ignore[no-untyped-call]  # torch has no type
    with TemporaryDirectory() as folder:
        file = Path(folder, "order.csv")
        file.write_text(order_of_plan(plan))
        runtime._load_csv(str(file), format="compute_only")
    return runtime


def _boundaries(workload: Workload, plan: Plan, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """What enters each stage and leaves the last, on the meta device: torch would run the modules on garbage.

    Weights are lowered to the dtype, if there is one.
    """
    at: list[Any] = [workload.sample(plan.sizes[0])[0].to("meta")]
    for layers in plan.stages:
        at.append(_meta_forward(workload.layers[layers], at[-1], dtype))
        if not isinstance(at[-1], torch.Tensor):
            raise ValueError("torch's engine is used with one tensor between stages, expected --engine gpipe")
    return at


def _meta_forward(layers: nn.Module, value: Any, dtype: torch.dtype | None) -> Any:
    state = {
        name: tensor.to("meta", dtype if tensor.is_floating_point() else None)
        for name, tensor in [*layers.named_parameters(), *layers.named_buffers()]
    }
    with torch.no_grad():
        output = torch.func.functional_call(layers, state, (value,))
    return output.requires_grad_(wants_gradient(output)) if isinstance(output, torch.Tensor) else output


class _Checkpointed(nn.Module):
    """A stage that keeps its input only, and runs again when its backward begins."""

    def __init__(self, body: nn.Module, note: Callable[[Action, Mark], Mark]) -> None:
        super().__init__()
        self._body, self._note = body, note
        self.backward: tuple[Action, Mark] | None = None
        """The R of the backward under way, and when that began or, once it has run again, went on."""

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x: torch.Tensor) -> Any:
        try:
            return self._body(x)
        finally:  # torch leaves by an exception as soon as it has recomputed what it needs
            if self.backward is not None:
                action, start = self.backward
                self.backward = (action, self._note(action, start))


class _RecordingStage(PipelineStage):
    """Marks the compute of each micro-batch; receives are waited for outside of it."""

    def __init__(
        self, owner: TorchPipeline, layers: nn.Module, index: int, inputs: torch.Tensor, outputs: torch.Tensor
    ) -> None:
        plan = owner.plan
        body = _Checkpointed(layers, owner.note) if plan.recomputed(index)[0] else layers
        super().__init__(body, index, plan.num_stages, owner._device, input_args=inputs, output_args=outputs)
        self._owner, self._body = owner, body

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        start = self._owner.recorder.mark()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._note("F", fwd_chunk_id, start)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        start = self._owner.recorder.mark()
        if isinstance(self._body, _Checkpointed):
            self._body.backward = (Action("R", self.stage_index, bwd_chunk_id), start)
        result = super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if isinstance(self._body, _Checkpointed) and self._body.backward is not None:
            _, start = self._body.backward
            self._body.backward = None
        self._note("B" if full_backward else "I", bwd_chunk_id, start)
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        start = self._owner.recorder.mark()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._note("W", bwd_chunk_id, start)

    def _note(self, kind: Letter, microbatch: int, start: Mark) -> None:
        self._owner.note(Action(kind, self.stage_index, microbatch), start)
