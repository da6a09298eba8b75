"""The engines that `benchmarks/execution.py` compares, and the process in which a rank of one of them lives.

Every contender gets the same `Task` (layers with the same weights, the same data, the same cut, as many micro-batches)
and returns a function that does one step: the forward and backward of every micro-batch, after which `.grad` of the
layers holds the gradient of the mean loss over the batch. There is no optimizer, so that every step is the first one
again.

A rank takes its orders over a pipe and waits there between its turns, without using the processor:

    <- ("first", loss, gradients)          when it is ready
    -> 3                                   three steps, after one that is not timed
    <- ("times", [(start, end), ...], processor seconds)
    <- ("failed", why)                     instead of any answer
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputing

from gpipe_exec import Pipeline, pin_to_cores
from gpipe_exec.devices.process import die_with_parent
from gpipe_exec.engine.losses import Loss
from gpipe_exec.layers import build_workload
from gpipe_sim.base.files import Document
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.reading import parse_scenario

Checkpoint = Literal["never", "except_last"]
SCENARIO = {
    "name": "benchmark",
    "model": {"kind": "transformer", "layers": 8, "hidden": 256, "heads": 4, "vocab": 1024, "sequence": 64},
    "batch": 32,
    "dtype": "fp32",
    "cluster": {
        # Only for the prediction, which nobody asks for here: a plan holds a whole scenario.
        "device": {"memory": "4 GiB", "compute": "50 GFLOP/s", "bandwidth": "10 GB/s"},
        "link": {"bandwidth": "3 GB/s", "latency": "100 us"},
    },
    # Embedding and four blocks; four blocks, norm and head.
    "plan": {"stages": 2, "microbatches": 8, "balance": [5, 6], "recompute": "early", "backward": "reverse"},
}
TIMEOUT = timedelta(seconds=60)

Step = Callable[[], torch.Tensor | None]
"""One step; the mean loss on a rank that has it."""


def plan_of(checkpoint: Checkpoint, schedule: str = "gpipe", stages_per_rank: int = 1, replicas: int = 1) -> Plan:
    """The plan that all follow, as far as they can. With two stages on each rank, every stage has two blocks."""
    overrides = [f"plan.checkpoint={checkpoint}", f"plan.schedule={schedule}", f"plan.replicas={replicas}"]
    if stages_per_rank == 2:
        overrides += ["plan.stages=4", "plan.stages_per_rank=2", "plan.balance=[3, 2, 2, 4]"]
    (scenario,) = parse_scenario(Document("benchmark", SCENARIO), *overrides)
    return make_plan(scenario)


class Task(NamedTuple):
    """What a contender has to do. Every process builds the whole model and computes with its part of it."""

    rank: int
    checkpoint: Checkpoint
    plan: Plan
    layers: nn.Sequential
    loss: Loss
    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def stage(self) -> nn.Sequential:
        """This rank's layers."""
        return self.layers[self.plan.stages[self.rank]]

    @property
    def microbatches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets, cut."""
        sizes = list(self.plan.sizes)
        return list(zip(self.inputs.split(sizes), self.targets.split(sizes), strict=True))

    def share_of_loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """What a micro-batch adds to the mean loss over the batch; all have the same size."""
        return self.loss(output, target) / self.plan.num_microbatches

    def boundary(self, layers: slice | None = None) -> torch.Tensor:
        """What one micro-batch looks like after some layers, or else between the stages."""
        with torch.no_grad():
            activations: torch.Tensor = self.layers[layers or self.plan.stages[0]](self.microbatches[0][0])
        return activations.requires_grad_()


# --- the contenders ------------------------------------------------------------------------------------------------


def ours(task: Task, schedule: str, stages_per_rank: int = 1, replicas: int = 1) -> Step:
    """This project's engine, as `examples/train.py` uses it."""
    pipe = Pipeline(task.layers, plan_of(task.checkpoint, schedule, stages_per_rank, replicas), task.loss)
    inputs, targets = (values.chunk(replicas)[task.rank % replicas] for values in (task.inputs, task.targets))
    return lambda: pipe.step(inputs, targets)


def by_hand(task: Task) -> Step:
    """The same, for this model, two processes and nothing else: what the generality of an engine may cost.

        rank 0   F0 F1 ... F7 [R7] B7 [R6] B6 ... B0      outputs go up as they are made, tags 0 to M-1
        rank 1      F0 ... F7  B7 [R6] B6 ... B0          gradients come down, tags M to 2M-1

    All receives of a step are posted when it begins, into buffers that stay; sends are waited for when it ends. A
    recomputation does not wait for the gradient.
    """
    M, peer, stage = task.plan.num_microbatches, 1 - task.rank, task.stage
    buffers = [torch.empty_like(task.boundary(), requires_grad=False) for _ in range(M)]
    recomputed = task.plan.recomputed(task.rank)

    def first() -> None:
        arriving = {m: dist.irecv(buffers[m], peer, tag=M + m) for m in reversed(range(M))}
        outputs: dict[int, torch.Tensor] = {}
        sending = []
        for m, (inputs, _) in enumerate(task.microbatches):
            with torch.set_grad_enabled(not recomputed[m]):
                outputs[m] = stage(inputs)
            sending.append(dist.isend(outputs[m].detach(), peer, tag=m))
        for m, (inputs, _) in reversed(list(enumerate(task.microbatches))):
            output = stage(inputs) if recomputed[m] else outputs[m]
            arriving[m].wait()
            output.backward(buffers[m])
            del outputs[m], output
        for work in sending:
            work.wait()

    def last() -> torch.Tensor:
        arriving = [dist.irecv(buffers[m], peer, tag=m) for m in range(M)]
        inputs = [buffer.detach().requires_grad_() for buffer in buffers]
        losses: dict[int, torch.Tensor] = {}
        sending = []
        total = torch.zeros(())
        for m, (_, target) in enumerate(task.microbatches):
            arriving[m].wait()
            with torch.set_grad_enabled(not recomputed[m]):
                losses[m] = task.share_of_loss(stage(inputs[m]), target)
            total += losses[m].detach()
        for m, (_, target) in reversed(list(enumerate(task.microbatches))):
            loss = task.share_of_loss(stage(inputs[m]), target) if recomputed[m] else losses[m]
            loss.backward()
            del losses[m], loss
            gradient = inputs[m].grad
            assert gradient is not None, "the backward has just made it"
            sending.append(dist.isend(gradient, peer, tag=M + m))
        for work in sending:
            work.wait()
        return total

    return first if task.rank == 0 else last


class Recomputed(nn.Module):
    """A stage that keeps only its input and runs again in the backward, for every micro-batch."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, value: torch.Tensor) -> Any:
        return recomputing(self.stage, value, use_reentrant=False)


def of_torch(task: Task, schedule: str, stages_per_rank: int = 1) -> Step:
    """torch.distributed.pipelining's own class. It knows of no checkpointing: a stage recomputes always or never."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    plan = plan_of(task.checkpoint, schedule, stages_per_rank)
    own, stages = plan.stages_of(task.rank), []
    for index in own:
        span = plan.stages[index]
        inputs = task.boundary(slice(0, span.start)) if index else task.microbatches[0][0]
        layers = task.layers[span]
        stage = PipelineStage(
            layers if task.checkpoint == "never" else Recomputed(layers),
            index,
            plan.num_stages,
            torch.device("cpu"),
            # Without these, it runs the stage on uninitialised memory to find out.
            input_args=(inputs,),
            output_args=(layers(inputs).detach().requires_grad_(),),
        )
        stages.append(stage)
    kind = get_schedule_class(TORCHS[schedule])
    held = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    made = kind(held, plan.num_microbatches, loss_fn=task.share_of_loss, scale_grads=False)

    def step() -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        given = (task.inputs,) if 0 in own else ()
        target = task.targets if plan.num_stages - 1 in own else None
        made.step(*given, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach() if losses else None

    return step


TORCHS = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "zb_h1": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
}
"""Our schedules by the names of torch's; its GPipe runs backwards first in first out."""


def of_deepspeed(task: Task, replicas: int = 1) -> Step:
    """DeepSpeed's PipelineEngine. It knows one schedule, 1F1B, and its step ends with an optimizer's, which here keeps
    the gradients and does nothing else; they are put back where DeepSpeed removed them. It numbers processes as we do:
    replicas innermost, each with its share of every batch."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Otherwise it asks MPI who it is.
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    deepspeed = importlib.import_module("deepspeed")
    module = importlib.import_module("deepspeed.pipe").PipelineModule
    kept: dict[nn.Parameter, torch.Tensor | None] = {}
    stage, replica = divmod(task.rank, replicas)

    class Keep(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            kept.update((parameter, parameter.grad) for parameter in self.param_groups[0]["params"])

    class Cut(module):  # type: ignore[misc]
        def _partition_layers(self, method: str) -> None:
            """As the plan says, which none of DeepSpeed's own methods would."""
            self.parts = [task.plan.stages[0].start, *(layers.stop for layers in task.plan.stages)]
            self._set_bounds(*self.parts[stage : stage + 2])

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    pipe = Cut(
        layers=list(task.layers),
        num_stages=task.plan.num_stages,
        loss_fn=task.loss,
        activation_checkpoint_interval=0 if task.checkpoint == "never" else len(task.layers),
        activation_checkpoint_func=partial(recomputing, use_reentrant=False),
    )
    samples, M = task.plan.scenario.batch, task.plan.num_microbatches
    config = {
        "train_batch_size": samples,
        "train_micro_batch_size_per_gpu": samples // (M * replicas),
        "gradient_accumulation_steps": M,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=pipe, optimizer=Keep(pipe.parameters(), {"lr": 0.0}), config=config)
    own = [values.chunk(replicas)[replica].chunk(M) for values in (task.inputs, task.targets)]
    microbatches = list(zip(*own, strict=True))

    def step() -> torch.Tensor | None:
        loss: torch.Tensor = engine.train_batch(iter(microbatches))
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        return loss.detach()

    return step


def of_threads(task: Task, module: str, name: str) -> Step:
    """torchgpipe and its descendant in fairscale: one process, a thread for each device, and here there is one."""
    engine = getattr(importlib.import_module(module), name)
    M, balance = task.plan.num_microbatches, list(task.plan.balance)
    pipe = engine(task.layers, balance, devices=["cpu"] * len(balance), chunks=M, checkpoint=task.checkpoint)

    def step() -> torch.Tensor:
        loss = task.loss(pipe(task.inputs), task.targets)
        loss.backward()
        return loss.detach()

    return step


def alone(task: Task) -> Step:
    """One process: a micro-batch after the other, gradients accumulated. It holds one at a time and recomputes none."""

    def step() -> torch.Tensor:
        total = torch.zeros(())
        for inputs, target in task.microbatches:
            loss = task.share_of_loss(task.layers(inputs), target)
            loss.backward()
            total += loss.detach()
        return total

    return step


class Contender(NamedTuple):
    """How to build it and what it runs on."""

    build: Callable[[Task], Step]
    processes: int
    cores: int
    """That each process may use."""
    threads: int = 1
    """In which each process computes."""
    all_or_nothing: bool = False
    """Whether it cannot spare the last micro-batch the recomputation."""
    checkpoints: tuple[Checkpoint, ...] = get_args(Checkpoint)
    """With which it takes part."""

    def does(self, checkpoint: Checkpoint) -> str:
        """How it checkpoints when it is asked to do it this way."""
        return "always" if self.all_or_nothing and checkpoint == "except_last" else checkpoint


HAND, OURS, OURS_1F1B, ALONE = "hand-written loop", "ours, gpipe", "ours, 1f1b", "one process, one thread"
TORCH, TORCHGPIPE = "torch ScheduleGPipe", "torchgpipe"
OURS_INTERLEAVED, TORCH_INTERLEAVED = "ours, interleaved_1f1b, v=2", "torch ScheduleInterleaved1F1B"
OURS_ZB_H1, TORCH_ZB_H1 = "ours, zb_h1", "torch ScheduleInterleavedZeroBubble"
OURS_ZB_V, TORCH_ZB_V = "ours, zb_v, v=2", "torch ScheduleZBVZeroBubble"
OURS_REPLICAS, DEEPSPEED_REPLICAS = "ours, 1f1b, D=2", "DeepSpeed 1F1B, D=2"
RIVALS = {
    TORCH_INTERLEAVED: OURS_INTERLEAVED,
    TORCH_ZB_H1: OURS_ZB_H1,
    TORCH_ZB_V: OURS_ZB_V,
    DEEPSPEED_REPLICAS: OURS_REPLICAS,
}
"""Theirs -> ours with the same schedule and as many replicas; all others are compared with our gpipe."""
CONTENDERS = {
    HAND: Contender(by_hand, 2, 1),
    OURS: Contender(partial(ours, schedule="gpipe"), 2, 1),
    OURS_1F1B: Contender(partial(ours, schedule="1f1b"), 2, 1),
    TORCH: Contender(partial(of_torch, schedule="gpipe"), 2, 1, all_or_nothing=True),
    "torch Schedule1F1B": Contender(partial(of_torch, schedule="1f1b"), 2, 1, all_or_nothing=True),
    "DeepSpeed 1F1B": Contender(of_deepspeed, 2, 1, all_or_nothing=True),
    TORCHGPIPE: Contender(partial(of_threads, module="torchgpipe", name="GPipe"), 1, 2),
    "fairscale Pipe": Contender(partial(of_threads, module="fairscale.nn", name="Pipe"), 1, 2),
    ALONE: Contender(alone, 1, 1),
    "one process, two threads": Contender(alone, 1, 2, threads=2),
    **{
        name: Contender(partial(build, schedule=schedule, stages_per_rank=v), 2, 1, checkpoints=("never",))
        for name, build, schedule, v in (
            (OURS_INTERLEAVED, ours, "interleaved_1f1b", 2),
            (TORCH_INTERLEAVED, of_torch, "interleaved_1f1b", 2),
            (OURS_ZB_H1, ours, "zb_h1", 1),
            (TORCH_ZB_H1, of_torch, "zb_h1", 1),
            (OURS_ZB_V, ours, "zb_v", 2),
            (TORCH_ZB_V, of_torch, "zb_v", 2),
        )
    },
    # Four processes: both stages of a replica share a core.
    OURS_REPLICAS: Contender(partial(ours, schedule="1f1b", replicas=2), 4, 1, checkpoints=("never",)),
    DEEPSPEED_REPLICAS: Contender(partial(of_deepspeed, replicas=2), 4, 1, checkpoints=("never",)),
}


# --- a rank of one -------------------------------------------------------------------------------------------------


def main() -> None:
    """Build the contender and serve until the other end of the pipe closes."""
    name, checkpoint, store, pipe = sys.argv[1:]
    die_with_parent()
    with Connection(int(pipe)) as orders:
        try:
            if orders.poll():  # nothing is sent so early: the other end was gone before we could follow it
                orders.recv()
            serve(CONTENDERS[name], "never" if checkpoint == "never" else "except_last", store, orders)
        except EOFError:
            return
        except Exception as error:
            orders.send(("failed", f"{type(error).__name__}: {error}"))
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def serve(contender: Contender, checkpoint: Checkpoint, store: str, orders: Connection) -> None:
    """The first step for all to see, then as many as are asked for."""
    rank = int(os.environ["RANK"])
    pin_to_cores()
    torch.set_num_threads(contender.threads)
    if contender.processes > 1:
        where = f"file://{store}"
        dist.init_process_group("gloo", where, rank=rank, world_size=contender.processes, timeout=TIMEOUT)
    plan = plan_of(checkpoint)
    workload = build_workload(plan.scenario)
    inputs, targets = workload.sample(plan.scenario.batch)
    step = contender.build(Task(rank, checkpoint, plan, workload.layers, workload.loss, inputs, targets))
    loss = step()
    parameters = workload.layers.named_parameters()
    gradients = {name: parameter.grad.numpy() for name, parameter in parameters if parameter.grad is not None}
    orders.send(("first", None if loss is None else float(loss), gradients))
    del gradients
    while True:
        steps = orders.recv()
        processor = time.process_time()
        times = []
        for _ in range(1 + steps):
            if contender.processes > 1:
                dist.barrier()
            start = time.perf_counter()
            workload.layers.zero_grad(set_to_none=True)
            step()
            times.append((start, time.perf_counter()))
        orders.send(("times", times[1:], time.process_time() - processor))


if __name__ == "__main__":
    main()
