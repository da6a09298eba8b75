"""Under torchrun: three training steps of the pipeline equal three of one process on the whole batch, in float64.

Every rank runs the one-process reference itself and compares its own part; what differs is raised, and the run fails.
"""

import itertools
import os

import torch
import torch.distributed as dist
from plans import layers as layer_costs
from plans import plan as make
from torch import nn

from gpipe_exec import Pipeline, leave

BATCH, WIDTH, NUM_LAYERS, STEPS = 11, 6, 5, 3
ON_GPU = os.environ.get("GPIPE_TEST_DEVICE") == "cuda"
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")


class Residual(nn.Module):
    """Passes a nested value on: the running sum, the skipped input, and integers that have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        if isinstance(value, torch.Tensor):
            value = (value, {"skip": value, "marks": torch.arange(len(value))})
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


def check(model_of, history, **choices) -> None:
    plan = make(layer_costs([1.0] * NUM_LAYERS), **choices)
    pipe = Pipeline(model_of(), plan, nn.functional.mse_loss, device=DEVICE)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9) if pipe.parameters() else None
    for step, (loss, gradients, parameters) in enumerate(history):
        inputs, targets = batch(step)
        pipe.module.zero_grad()
        found = pipe.step(inputs, targets)
        close(found, loss, f"loss of step {step}")
        for name, parameter in pipe.module.named_parameters():
            close(parameter.grad, gradients[name], f"gradient of {name} in step {step}")
        if optimizer:
            optimizer.step()
        for name, parameter in pipe.module.named_parameters():
            close(parameter, parameters[name], f"{name} after step {step}")
    whole = model_of()
    whole.load_state_dict(pipe.state_dict())
    inputs, targets = batch(99)
    close(pipe.evaluate(inputs, targets), nn.functional.mse_loss(whole(inputs), targets), "evaluation")
    pipe.close()


def main() -> None:
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("nccl" if ON_GPU else "gloo")
    torch.set_num_threads(1)
    K = int(os.environ["WORLD_SIZE"])
    num_checked = 0
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
            num_checked += 1
        for extra in (
            {"schedule": "naive", "microbatches": 1},
            {"microbatches": 4, "backward": "fifo"},
            {"microbatches": 4, "cluster": {"overlap": False}},
            {"microbatches": 4, "placement": list(range(K))[::-1]},
            {"microbatches": 4, "checkpoint": {"per_stage": (["always", "never", "except_last", "never"])[:K]}},
        ):
            check(model_of, history, stages=K, batch=BATCH, **extra)
            num_checked += 1
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print(f"{num_checked} plans are exact")
    leave()


if __name__ == "__main__":
    main()
