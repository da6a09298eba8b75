"""Under torchrun: three training steps of the pipeline equal three of one process on the whole batch, in float64.

Every rank runs the one-process reference itself and compares its own part; what differs is raised, and the run fails.
"""

import itertools
import os
from dataclasses import replace
from datetime import timedelta
from random import Random

import torch
import torch.distributed as dist
from plans import layers as layer_costs
from plans import plan as make
from plans import random_order
from torch import nn

from gpipe_exec import Pipeline, leave
from gpipe_exec.devices.accelerator import local_device
from gpipe_exec.devices.groups import start_processes
from gpipe_sim import Plan

BATCH, WIDTH, NUM_LAYERS, STEPS = 11, 6, 8, 3
DEVICE = local_device(os.environ.get("GPIPE_TEST_DEVICE", "cpu"))


class Residual(nn.Module):
    """Passes a nested value on: the running sum, the skipped input, and integers that have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        if isinstance(value, torch.Tensor):
            value = (value, {"skip": value, "marks": torch.arange(len(value), device=value.device)})
        x, rest = value
        y = torch.tanh(self.linear(x)) + rest["skip"] * 0.5 + rest["marks"][:, None] * 0.0
        return y, {"skip": x, "marks": rest["marks"]}


class Head(nn.Module):
    def forward(self, value):
        return value[0] + value[1]["skip"]


def nested_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(Residual() for _ in range(NUM_LAYERS - 1)), Head()).double()


def plain_model() -> nn.Sequential:
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*blocks).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    shape = (BATCH, WIDTH)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


def reference(model: nn.Sequential):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        history.append((loss.detach(), gradients, {name: p.detach().clone() for name, p in model.named_parameters()}))
    return history


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")


def all_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    """All at once, which is quicker, and one by one where something differs."""
    if found and not torch.allclose(
        *(torch.cat([one[name].cpu().ravel() for name in found]) for one in (found, expected)), rtol=1e-9, atol=1e-12
    ):
        for name, tensor in found.items():
            close(tensor, expected[name], f"{name}, {what}")
        raise AssertionError(f"{what}: something is no number")


def check(model_of, history, **choices) -> None:
    check_plan(model_of, history, plan_of(**choices))


def plan_of(**choices) -> Plan:
    return make(layer_costs([1.0] * NUM_LAYERS, [2.0] * NUM_LAYERS, weights=[1.0] * NUM_LAYERS), **choices)


class Share:
    """A list of plans is divided between numbers of ranks: each plan runs with two of K = 1, 2, 3 and 4."""

    def __init__(self, K: int) -> None:
        self.half, self.seen, self.checked = K // 2 % 2, 0, 0

    def has_next(self) -> bool:
        """Whether the next plan is among those of this K; on a GPU all are."""
        self.seen += 1
        mine = DEVICE.type != "cpu" or self.seen % 2 == self.half
        self.checked += mine
        return mine


def check_plan(model_of, history, plan: Plan, **settings) -> None:
    pipe = Pipeline(model_of(), plan, nn.functional.mse_loss, device=DEVICE, **settings)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9) if pipe.parameters() else None
    for step, (loss, gradients, parameters) in enumerate(history):
        inputs, targets = batch(step)
        pipe.module.zero_grad()
        found = pipe.step(inputs, targets)
        close(found, loss, f"loss of step {step}")
        own = dict(pipe.module.named_parameters())
        all_close({name: parameter.grad for name, parameter in own.items()}, gradients, f"gradient in step {step}")
        if optimizer:
            optimizer.step()
        all_close(own, parameters, f"after step {step}")
    whole, state = model_of(), pipe.state_dict()
    inputs, targets = batch(99)
    found = pipe.evaluate(inputs, targets)
    if pipe.rank == 0:
        whole.load_state_dict(state)
        close(found, nn.functional.mse_loss(whole(inputs), targets), "evaluation")
    pipe.close()


SEVERAL = (
    ("interleaved_gpipe", 2),
    ("interleaved_1f1b", 2),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zb_v", 2),
    ("dualpipe_v", 2),
)


def anywhere(K: int, seed: int) -> Plan:
    """Stages on any ranks, and an order drawn from all that can finish, with whole and split backwards."""
    random = Random(seed)
    placement = [*range(K), *(random.randrange(K) for _ in range(NUM_LAYERS - K))]
    random.shuffle(placement)
    M = random.choice((1, 2, 4))
    settings = {"stages": NUM_LAYERS, "microbatches": M, "batch": BATCH, "schedule": "auto", "placement": placement}
    costs = layer_costs([1.0] * NUM_LAYERS, [2.0] * NUM_LAYERS, weights=[1.0] * NUM_LAYERS)
    named = make(costs, **settings | {"schedule": "gpipe", "placement": list(range(NUM_LAYERS))})
    mode = random.choice(("never", "always", "except_last"))
    plan = replace(named, placement=tuple(placement), checkpoint=(mode,) * NUM_LAYERS, schedule="any.csv")
    return replace(plan, order=random_order(plan.positions, M, random))


def main() -> None:
    if int(os.environ["WORLD_SIZE"]) > 1:
        start_processes(DEVICE, timedelta(minutes=10))
    torch.set_num_threads(1)
    K = int(os.environ["WORLD_SIZE"])
    share = Share(K)
    for model_of in (plain_model, nested_model):
        history = reference(model_of())
        every = itertools.product(
            ("gpipe", "1f1b"), range(1, 9), ("never", "always", "except_last"), ("early", "on_demand"), (1, 2, "all")
        )
        for schedule, M, mode, recompute, window in every:
            if mode == "never" and recompute == "on_demand":
                continue  # the same plan
            if (model_of is nested_model and M not in (1, 3, 8)) or (
                window != 2 and (M not in (3, 8) or mode != "always")
            ):
                continue
            balance = [NUM_LAYERS - K + 1] + [1] * (K - 1)
            if not share.has_next():
                continue
            check(
                model_of,
                history,
                stages=K,
                balance=balance,
                microbatches=M,
                batch=BATCH,
                schedule=schedule,
                checkpoint=mode,
                recompute=recompute,
                window=window,
            )
        for (schedule, v), M, mode, recompute in itertools.product(
            SEVERAL, (1, 3, 8), ("never", "always", "except_last"), ("early", "on_demand")
        ):
            if (mode == "never" and recompute == "on_demand") or (model_of is nested_model and M != 3):
                continue
            if not share.has_next():
                continue
            choices = {"schedule": schedule, "stages": v * K, "stages_per_rank": v, "microbatches": M}
            check(model_of, history, batch=BATCH, checkpoint=mode, recompute=recompute, **choices)
        for seed in range(6):
            if share.has_next():
                check_plan(model_of, history, anywhere(K, seed))
        for extra in (
            {"schedule": "naive", "microbatches": 1},
            {"microbatches": 4, "backward": "fifo"},
            {"microbatches": 4, "cluster": {"overlap": False}},
            {"microbatches": 4, "placement": list(range(K))[::-1]},
            {"microbatches": 4, "checkpoint": {"per_stage": (["always", "never", "except_last", "never"])[:K]}},
        ):
            if share.has_next():
                check(model_of, history, stages=K, batch=BATCH, **extra)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print(f"{share.checked} plans are exact")
    leave()


if __name__ == "__main__":
    main()
