"""Under torchrun: torch's engine, driven by our plans, computes the gradients of one process on the whole batch."""

import itertools
from collections import Counter
from dataclasses import replace
from random import Random

import torch
import torch.distributed as dist
from exactness import close
from plans import layers as layer_costs
from plans import plan as make
from plans import random_order
from torch import nn

from gpipe_exec import leave
from gpipe_exec.alternatives.torch_engine import TorchPipeline, what_torch_cannot
from gpipe_exec.devices.recorder import Recorder
from gpipe_exec.layers import Workload
from gpipe_sim import Plan

BATCH, WIDTH, NUM_LAYERS = 12, 6, 6
SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_gpipe", 2),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zb_v", 2),
    ("dualpipe_v", 2),
)
COSTS = layer_costs([1.0] * NUM_LAYERS, [2.0] * NUM_LAYERS, weights=[1.0] * NUM_LAYERS)


def sample(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return tuple(torch.randn((n, WIDTH), generator=generator, dtype=torch.float64) for _ in range(2))


def workload() -> Workload:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS))).double()
    return Workload(model, sample, nn.functional.mse_loss)


def some_plans(K: int) -> list[Plan]:
    """Every schedule, with and without recomputation, for numbers that torch's classes take and some that they do not;
    other placements; an order made for these times; and orders drawn at random."""
    named = [
        make(
            COSTS,
            M,
            batch=BATCH,
            stages=K * v,
            stages_per_rank=v,
            schedule=schedule,
            checkpoint=mode,
            recompute="on_demand",
            backward=backward,
        )
        for (schedule, v), M, mode, backward in itertools.product(
            SCHEDULES, (1, 3, 4, 6), ("never", "always"), ("fifo", "reverse")
        )
        if K * v <= NUM_LAYERS and (backward == "fifo" or "gpipe" in schedule)
    ]
    settings = {"batch": BATCH, "backward": "fifo", "recompute": "on_demand"}
    ranks = list(range(K))[::-1]
    others = [
        make(COSTS, 4, stages=K, placement=ranks, **settings),
        make(COSTS, 4, stages=2 * K, schedule="zb_v", placement=[*ranks, *ranks[::-1]], **settings),
        make(COSTS, 4, stages=2 * K, stages_per_rank=2, schedule="auto", **settings),
        make(COSTS, 4, stages=K, checkpoint={"per_stage": ["always", "never", "always"][:K]}, **settings),
    ]
    return [*named, *others, *(anywhere(K, seed) for seed in range(60))]


def anywhere(K: int, seed: int) -> Plan:
    """Stages on any ranks, and an order drawn from all that can finish, with whole and split backwards."""
    random = Random(seed)
    placement = [*range(K), *(random.randrange(K) for _ in range(NUM_LAYERS - K))]
    random.shuffle(placement)
    M = random.choice((1, 2, 3))
    plan = make(COSTS, M, batch=BATCH, stages=NUM_LAYERS, checkpoint="never")
    plan = replace(plan, placement=tuple(placement), schedule="any.csv")
    return replace(plan, order=random_order(plan.positions, M, random))


def check(plan: Plan, loss: torch.Tensor, expected: dict[str, torch.Tensor]) -> str:
    """Two steps, whose gradients add up, and whose spans follow each other; the name of the class that ran them."""
    inputs, targets = sample(BATCH)
    recorder = Recorder(enabled=True)
    pipe = TorchPipeline(workload(), plan, device=torch.device("cpu"), recorder=recorder)
    for _ in range(2):
        close(pipe.step(inputs, targets), loss, "loss")
    for name, parameter in pipe.module.named_parameters():
        close(parameter.grad, 2 * expected[name], f"gradient of {name}")
    for step in recorder.steps:
        assert all(a <= b for a, b in zip(step.start, step.end, strict=True))
        assert all(a <= b for a, b in zip(step.end, step.start[1:], strict=False)), "actions in our order"
    pipe.close()
    return type(pipe.schedule).__name__


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    K, rank = dist.get_world_size(), dist.get_rank()
    inputs, targets = sample(BATCH)
    model, _, loss_function = workload()
    loss = loss_function(model(inputs), targets)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    used: Counter[str] = Counter()
    for plan in some_plans(K):
        if not list(what_torch_cannot(plan, "cpu")):
            used[check(plan, loss.detach(), expected)] += 1
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(f"{used.total()} plans are exact: {', '.join(f'{used[name]} {name}' for name in sorted(used))}")
    leave()


if __name__ == "__main__":
    main()
