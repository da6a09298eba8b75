"""Under torchrun: values between stages whose form changes from message to message arrive as they were sent."""

import os

import torch
import torch.distributed as dist
from plans import layers as layer_costs
from plans import plan as make
from torch import nn
from torch.nn.functional import mse_loss

from gpipe_exec import Pipeline, leave

BATCH, WIDTH = 6, 4
close = torch.testing.assert_close


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def plan_of(num_layers: int, **choices):
    K = int(os.environ["WORLD_SIZE"])
    return make(layer_costs([1.0] * num_layers), 3, batch=BATCH, stages=K, schedule="1f1b", window=2, **choices)


def data(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(BATCH, length, WIDTH, generator=generator) for _ in range(2))


def check_lengths() -> None:
    """Steps and evaluations of 10, 6 and 10 again; every one as of the whole model."""
    whole, pipe = model(), Pipeline(model(), plan_of(4), mse_loss)
    for seed, length in enumerate((10, 6, 6, 10, 3)):
        inputs, targets = data(length, seed)
        close(pipe.evaluate(inputs, targets), mse_loss(whole(inputs), targets).detach().double(), rtol=1e-5, atol=1e-6)
        whole.zero_grad()
        pipe.module.zero_grad()
        loss = mse_loss(whole(inputs), targets)
        loss.backward()
        close(pipe.step(inputs, targets), loss.detach().double(), rtol=1e-5, atol=1e-6)
        gradients = dict(whole.named_parameters())
        for name, parameter in pipe.module.named_parameters():
            close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-6)
    pipe.close()


def check_autocast() -> None:
    """Switched on after the first step: messages become bfloat16."""
    pipe = Pipeline(model(), plan_of(4), mse_loss)
    inputs, targets = data(5, 1)
    exact = pipe.step(inputs, targets)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            close(pipe.step(inputs, targets), exact, rtol=0.05, atol=0.01)
    close(pipe.step(inputs, targets), exact)
    pipe.close()


class Trims(nn.Module):
    """What it passes on depends on the data: as many columns as the first sample says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : 1 + int(x[0, 0].abs() * 10) % x.shape[1]]


class Sums(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True)


def check_data_dependent() -> None:
    pipe = Pipeline(nn.Sequential(Trims(), nn.Identity(), Sums(), nn.Linear(1, 1)), plan_of(4), mse_loss)
    whole = nn.Sequential(Trims(), Sums())
    head = next((layer for layer in pipe.module if isinstance(layer, nn.Linear)), None)
    for seed in range(4):
        inputs = torch.randn(BATCH, 9, generator=torch.Generator().manual_seed(seed))
        targets = torch.zeros(BATCH, 1)
        found = pipe.step(inputs, targets)
        if head is not None:
            pieces = [whole(piece) for piece in inputs.split(2)]
            close(found, mse_loss(head(torch.cat(pieces)), targets).detach().double(), rtol=1e-5, atol=1e-6)
    pipe.close()


def check_integers_only() -> None:
    """An edge that carries token numbers only: there is no gradient to send back."""
    torch.manual_seed(4)
    layers = [nn.Identity(), nn.Identity(), nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH)]
    pipe = Pipeline(layers, plan_of(4, balance=[2, 2]), mse_loss)
    for step in range(2):
        pipe.step(torch.arange(BATCH) % 7, torch.zeros(BATCH, WIDTH))
        assert all(parameter.grad is not None for parameter in pipe.parameters()), step
    pipe.close()


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    check_lengths()
    check_autocast()
    check_data_dependent()
    check_integers_only()
    dist.barrier()
    if dist.get_rank() == 0:
        print("every form arrives")
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
