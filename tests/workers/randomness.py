"""Under torchrun: dropout is recomputed identically, and BatchNorm's running averages are those of the mini-batch."""

import os

import torch
import torch.distributed as dist
from plans import layers as layer_costs
from plans import plan as make
from torch import nn

from gpipe_exec import Pipeline, leave

BATCH, WIDTH = 10, 6


def plan_of(num_layers: int, M: int, **choices):
    K = int(os.environ["WORLD_SIZE"])
    return make(layer_costs([1.0] * num_layers), M, batch=BATCH, stages=K, **choices)


def data(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def with_dropout() -> nn.Sequential:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks).double()


def dropout_gradients(**choices) -> dict[str, torch.Tensor]:
    pipe = Pipeline(with_dropout(), plan_of(4, 4, **choices), nn.functional.mse_loss)
    torch.manual_seed(77)
    for step in range(2):
        pipe.step(data(step, WIDTH), data(step + 50, WIDTH))
    pipe.close()
    return {name: parameter.grad for name, parameter in pipe.module.named_parameters()}


def check_dropout() -> None:
    for schedule in ("gpipe", "1f1b"):
        expected = dropout_gradients(schedule=schedule, checkpoint="never")
        for mode in ("always", "except_last"):
            for recompute in ("early", "on_demand"):
                found = dropout_gradients(schedule=schedule, checkpoint=mode, recompute=recompute)
                for name, gradient in found.items():
                    assert torch.equal(gradient, expected[name]), f"{name} differs under {schedule} {mode} {recompute}"


def with_batchnorm(momentum: float | None) -> nn.Sequential:
    torch.manual_seed(2)
    first = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3, momentum=momentum), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.Flatten())
    third = nn.Sequential(nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH, momentum=momentum))
    return nn.Sequential(first, second, third, nn.Linear(WIDTH, WIDTH)).double()


def reference_batchnorm(momentum: float | None, sizes: tuple[int, ...], steps: int) -> nn.Sequential:
    """One process: each micro-batch normalised by itself; running averages from all inputs of the mini-batch joined."""
    model = with_batchnorm(momentum)
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)]
    seen: dict[nn.Module, list[torch.Tensor]] = {norm: [] for norm in norms}
    for norm in norms:
        norm.register_forward_pre_hook(lambda layer, inputs: seen[layer].append(inputs[0].detach()))
        norm.track_running_stats = False
    for step in range(steps):
        pieces = zip(data(step, 2, 4, 4).split(sizes), data(step + 50, WIDTH).split(sizes), strict=True)
        for inputs, targets in pieces:
            loss = nn.functional.mse_loss(model(inputs), targets) * len(inputs) / BATCH
            loss.backward()
        for norm in norms:
            joined = torch.cat(seen[norm])
            dims = [dim for dim in range(joined.dim()) if dim != 1]
            norm.num_batches_tracked += 1
            weight = momentum if momentum is not None else 1 / float(norm.num_batches_tracked)
            norm.running_mean += weight * (joined.mean(dims) - norm.running_mean)
            norm.running_var += weight * (joined.var(dims) - norm.running_var)
            seen[norm].clear()
    for norm in norms:
        norm.track_running_stats = True
    return model


def check_batchnorm() -> None:
    for momentum in (0.1, None):
        for M in (1, 2, 3):
            for schedule, mode in (
                ("gpipe", "never"),
                ("gpipe", "always"),
                ("1f1b", "except_last"),
                ("1f1b", "always"),
            ):
                plan = plan_of(4, M, schedule=schedule, checkpoint=mode)
                expected = reference_batchnorm(momentum, plan.sizes, steps=3)
                pipe = Pipeline(with_batchnorm(momentum), plan, nn.functional.mse_loss)
                for step in range(3):
                    pipe.step(data(step, 2, 4, 4), data(step + 50, WIDTH))
                state = expected.state_dict()
                for name, tensor in pipe.module.state_dict().items():
                    what = f"{name}, M={M}, {schedule}, {mode}, momentum {momentum}"
                    torch.testing.assert_close(
                        tensor, state[name], rtol=1e-9, atol=1e-12, msg=lambda t, w=what: f"{w}: {t}"
                    )
                gradients = dict(expected.named_parameters())
                for name, parameter in pipe.module.named_parameters():
                    torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-8, atol=1e-11)
                expected.eval()
                evaluated = nn.functional.mse_loss(expected(data(9, 2, 4, 4)), data(10, WIDTH))
                torch.testing.assert_close(pipe.evaluate(data(9, 2, 4, 4), data(10, WIDTH)), evaluated.detach())
                pipe.close()


def main() -> None:
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    check_dropout()
    check_batchnorm()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print("dropout and batchnorm are exact")
    leave()


if __name__ == "__main__":
    main()
