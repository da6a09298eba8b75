"""Under torchrun: torch's engine, driven by our plans, computes the gradients of one process on the whole batch."""

import torch
import torch.distributed as dist
from exactness import close
from plans import layers as layer_costs
from plans import plan as make
from torch import nn

from gpipe_exec import leave
from gpipe_exec.layers import Workload
from gpipe_exec.recorder import Recorder
from gpipe_exec.torch_engine import TorchPipeline

BATCH, WIDTH, NUM_LAYERS = 8, 6, 4


def sample(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return tuple(torch.randn((n, WIDTH), generator=generator, dtype=torch.float64) for _ in range(2))


def workload() -> Workload:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS))).double()
    return Workload(model, sample, nn.functional.mse_loss)


def main() -> None:
    dist.init_process_group("gloo")
    K, num_checked = dist.get_world_size(), 0
    inputs, targets = sample(BATCH)
    model, _, loss_function = workload()
    loss = loss_function(model(inputs), targets)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for schedule in ("gpipe", "1f1b"):
        for mode in ("never", "always"):
            for M in (2, 4):
                plan = make(
                    layer_costs([1.0] * NUM_LAYERS),
                    M,
                    batch=BATCH,
                    stages=K,
                    schedule=schedule,
                    checkpoint=mode,
                    recompute="on_demand",
                    backward="fifo",
                )
                recorder = Recorder(enabled=True)
                pipe = TorchPipeline(workload(), plan, device=torch.device("cpu"), recorder=recorder)
                for _ in range(2):  # gradients add up from step to step
                    close(pipe.step(inputs, targets), loss.detach(), "loss")
                for name, parameter in pipe.module.named_parameters():
                    close(parameter.grad, 2 * expected[name], f"gradient of {name}")
                for step in recorder.steps:
                    assert all(a <= b for a, b in zip(step.start, step.end, strict=True))
                    assert all(a <= b for a, b in zip(step.end, step.start[1:], strict=False)), "actions in our order"
                num_checked += 1
    dist.barrier()
    dist.destroy_process_group()
    if pipe.rank == 0:
        print(f"{num_checked} plans are exact")
    leave()


if __name__ == "__main__":
    main()
