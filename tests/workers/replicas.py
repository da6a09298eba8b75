"""Under torchrun: steps of D replicas of a pipeline equal those of one process on the whole batch, in float64.

Every process runs the reference itself and compares its own part.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from exactness import DEVICE, SEVERAL, WIDTH, all_close, close, nested_model, plain_model, plan_of
from nccl_rules import NAME
from torch import nn

from gpipe_exec import Pipeline, leave
from gpipe_exec.devices.groups import start_processes

MODES, SHARDS = ("always", "never", "except_last"), ("none", "optimizer", "parameters")
WHOLE = 12
"""Samples of all replicas: an equal number for each of 1, 2, 3 and 4 of them."""


def batch(step: int, samples: int = WHOLE) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return tuple(torch.randn((samples, WIDTH), generator=generator, dtype=torch.float64) for _ in range(2))


def share(tensor: torch.Tensor, sizes: list[int], replica: int) -> torch.Tensor:
    return torch.split(tensor, sizes)[replica]


def summed(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Counts only where a target is positive."""
    counted = targets > 0
    return ((output - targets).square() * counted).sum(), int(counted.sum())


def mean(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    total, count = summed(output, targets)
    return total / count


def whole_step(model: nn.Module, loss, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    value = loss(model(inputs), targets)
    value.backward()
    return value.detach()


def gradients_of(pipe: Pipeline) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Of each parameter by its name, put together from what the replicas have of them."""
    for (name, parameter), (_, piece) in zip(pipe.module.named_parameters(), pipe.named_parameters(), strict=True):
        is_divided = pipe.plan.shard != "none" and piece.grad is not None
        yield name, pipe._shards.of_whole(parameter, piece.grad) if is_divided else piece.grad


def check(model_of, loss, reference_loss, sizes: list[int], **choices) -> None:
    """Two steps whose gradients add up, an update, and an evaluation."""
    D = len(sizes)
    plan = plan_of(batch=D * max(sizes), replicas=D, **choices)
    whole = model_of()
    pipe = Pipeline(model_of(), plan, loss)
    groups = [[{"params": list(model.parameters())}] for model in (whole, pipe)]  # which may have none
    optimizers = [torch.optim.SGD(group, lr=0.1, momentum=0.9) for group in groups]
    for steps in range(2):
        for step in range(2):
            inputs, targets = batch(2 * steps + step, sum(sizes))
            expected = whole_step(whole, reference_loss, inputs, targets)
            mine = [share(part, sizes, pipe.replica) for part in (inputs, targets)]
            with pipe.no_sync() if step == steps else nullcontext():  # the first of the first two, the second of others
                close(pipe.step(*mine), expected, "loss")
        if steps == 1:  # what was not summed is summed by the next step that is
            inputs, targets = batch(50, sum(sizes))
            expected = whole_step(whole, reference_loss, inputs, targets)
            close(pipe.step(*(share(part, sizes, pipe.replica) for part in (inputs, targets))), expected, "loss")
        named = whole.named_parameters(remove_duplicate=False)
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        own = dict(gradients_of(pipe))
        assert {name for name in own if own[name] is None} == set(own) - set(gradients)
        all_close({name: grad for name, grad in own.items() if grad is not None}, gradients, "gradients")
        close(pipe.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(whole.parameters(), 0.5).double(), "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = whole.state_dict()
    with pipe.lowered():
        all_close(dict(pipe.module.state_dict()), state, "after the updates")
    found = pipe.state_dict()
    if pipe.rank == pipe.replica == 0:
        all_close(found, state, "the whole state")
    inputs, targets = batch(99, sum(sizes))
    with torch.no_grad():
        expected = reference_loss(whole.eval()(inputs), targets)
    close(pipe.evaluate(*(share(part, sizes, pipe.replica) for part in (inputs, targets))), expected, "evaluation")
    pipe.close()


def tied_model() -> nn.Sequential:
    """The first layer and the last have one weight."""
    model = plain_model()
    model[-1][0].weight = model[0][0].weight
    return model


def half_empty_model() -> nn.Sequential:
    """The second half has no parameters."""
    return nn.Sequential(*plain_model()[:4], *(nn.Tanh() for _ in range(4)))


def with_batchnorm() -> nn.Sequential:
    """Normalised by micro-batch, so that one for each replica is compared with the mean over the whole batch only."""
    torch.manual_seed(6)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(7)), nn.BatchNorm1d(WIDTH)).double()


def check_running_averages(K: int, D: int) -> None:
    pipe = Pipeline(
        with_batchnorm(), plan_of(batch=WHOLE, replicas=D, stages=K, microbatches=1), nn.functional.mse_loss
    )
    inputs, targets = batch(0)
    whole = with_batchnorm()
    whole(inputs)
    pipe.step(*(share(part, [WHOLE // D] * D, pipe.replica) for part in (inputs, targets)))
    own = {name: tensor for name, tensor in pipe.module.state_dict().items() if "running" in name}
    all_close(own, whole.state_dict(), "running averages")
    pipe.close()


def check_mixed_precision(K: int, D: int) -> None:
    """Two steps whose gradients add up, summed at once or later: those of fp32, as closely as bf16 has them. As many
    bytes are summed as the plan counts for gradients."""
    plan = plan_of(batch=WHOLE, replicas=D, stages=K, microbatches=3)
    plan = replace(plan, profile=replace(plan.profile, dtype="bf16"))
    for later, precision in product((False, True), ("mixed", "mixed_fp32_gradients")):
        whole, pipe = (plain_model().float() for _ in range(2))
        pipe = Pipeline(pipe, plan, nn.functional.mse_loss, precision=precision)
        count, begin_sum = sum(p.numel() for p in pipe.parameters()), pipe._replicas.begin_sum
        summed: list[torch.Tensor] = []

        def noted(parameters, begin_sum=begin_sum, summed=summed):
            transfers = begin_sum(parameters)
            summed += [tensor for _, tensor in transfers if tensor.is_floating_point()]
            return transfers

        pipe._replicas.begin_sum = noted
        for step in range(2):
            inputs, targets = (part.float() for part in batch(step))
            whole_step(whole, nn.functional.mse_loss, inputs, targets)
            with pipe.no_sync() if later and step == 0 else nullcontext():
                pipe.step(*(share(part, [WHOLE // D] * D, pipe.replica) for part in (inputs, targets)))
        expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
        for name, parameter in pipe.module.named_parameters():
            assert parameter.grad.dtype == torch.float32
            error = (parameter.grad.cpu() - expected[name]).norm() / expected[name].norm()
            assert error < 0.05, (
                f"{precision}: gradient of {name}, summed {'later' if later else 'at once'}: off by {error:.1%}"
            )
        word = 2 if precision == "mixed" else 4
        assert sum(tensor.nbytes for tensor in summed) == (1 if later else 2) * count * word
        pipe.close()


def check_checkpoint(K: int, D: int, folder: Path) -> None:
    """What one way of dividing has saved, another reads, and goes on as the first would have."""

    def made(seed: int, shard: str) -> tuple[Pipeline, torch.optim.Optimizer]:
        torch.manual_seed(seed)  # other weights in each replica, which the first one's replace
        plan = plan_of(batch=WHOLE, replicas=D, stages=K, microbatches=2, shard=shard)
        pipe = Pipeline(plain_model(), plan, nn.functional.mse_loss)
        return pipe, torch.optim.Adam(pipe.parameters(), lr=0.1)

    def go_on(pipe: Pipeline, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        mine = [share(part, [WHOLE // D] * D, pipe.replica) for part in batch(step)]
        if step == 2:  # an update after its step is the same as one in it
            loss = pipe.step(*mine)
            update()
            return loss
        return pipe.step(*mine, update)

    for number, shard in enumerate(SHARDS):
        pipe, optimizer = made(int(os.environ["RANK"]), shard)
        go_on(pipe, optimizer, 0)
        pipe.save(folder / shard, optimizer, 1)
        expected = [go_on(pipe, optimizer, step) for step in (1, 2, 3)]
        pipe.close()
        pipe, optimizer = made(77, SHARDS[number - 1])
        assert pipe.load(folder / shard, optimizer) == {"step": 1}
        assert [go_on(pipe, optimizer, step) for step in (1, 2, 3)] == expected
        pipe.close()


def main() -> None:
    if os.environ.get("GPIPE_TEST_BACKEND") == NAME:
        dist.init_process_group(NAME)
    else:
        start_processes(DEVICE, timedelta(minutes=5))
    torch.set_num_threads(1)
    K, folder = int(sys.argv[1]), Path(sys.argv[2])
    D = int(os.environ["WORLD_SIZE"]) // K
    equal, checked = [WHOLE // D] * D, 0
    unequal = [WHOLE // D] * (D - 1) + [1]
    mse = nn.functional.mse_loss
    plain = [("gpipe", 1), ("1f1b", 1), *SEVERAL]
    kinds = [(plain_model, mse, mse, equal), (nested_model, mse, mse, unequal), (plain_model, summed, mean, unequal)]
    for turn, (schedule, v) in enumerate(plain if K > 1 else plain[:1] * 3):  # each with each way of dividing
        choices = {"schedule": schedule, "stages": v * K, "stages_per_rank": v, "microbatches": 3}
        for number, kind in enumerate(kinds):
            mode, shard = MODES[(turn + 2 * number) % 3], SHARDS[(turn + number) % 3]
            check(*kind, checkpoint=mode, shard=shard, **choices)
            checked += 1
    mse_of_tied = (tied_model, mse, mse, equal)
    for shard in SHARDS:  # both on one rank, whose stages sum it once; and, with several ranks, on two of them
        choices = {"stages": 2 * K, "stages_per_rank": 2, "microbatches": 3, "shard": shard}
        check(*mse_of_tied, schedule="zb_v" if K > 1 else "interleaved_gpipe", **choices)
        if K > 1:
            check(*mse_of_tied, schedule="1f1b", stages=K, microbatches=3, shard=shard)
            check(half_empty_model, mse, mse, equal, schedule="1f1b", stages=K, microbatches=3, shard=shard)
    check_running_averages(K, D)
    check_mixed_precision(K, D)
    check_checkpoint(K, D, folder)
    dist.barrier()
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print(f"{checked} plans of {D} replicas are exact")
    leave()


if __name__ == "__main__":
    main()
