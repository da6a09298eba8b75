"""Under torchrun: what ranks hold in a step beside what was predicted, for modules that hand tensors on."""

import os
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from own_modules import ResNet50, UNet, VisionTransformer, squared
from plans import layers as layer_costs
from plans import plan as make
from torch.nn import functional

from gpipe_exec import Pipeline, leave, split
from gpipe_exec.devices.allocator import storage_bytes, trace_bytes
from gpipe_exec.layers import Workload
from gpipe_exec.measure.timing import skips_of
from gpipe_exec.measure.worker import memory_of_layers
from gpipe_sim.cost.profile import Profile
from gpipe_sim.step.simulate import simulate

CPU, BATCH, M = torch.device("cpu"), 16, 4
MODULES = {
    "unet": (lambda: UNet((8, 16, 24)), 48, squared),
    "resnet": (lambda: ResNet50(8), 32, functional.cross_entropy),
    "vit": (lambda: VisionTransformer(64, 6), 8, functional.cross_entropy),
}


def images(samples: int, side: int):
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 3, side, side, generator=generator), torch.randint(5, (samples,), generator=generator)


def workload_of(name: str) -> Workload:
    build, side, loss = MODULES[name]
    torch.manual_seed(1)
    return Workload(split(build(), images(2, side)[0]), lambda n: images(n, side), loss)


def profile_of(workload: Workload, known: Profile) -> Profile:
    """The plan's own times, and bytes as they are measured."""
    size = BATCH // M
    held = {name: np.array(values)[:, None] for name, values in memory_of_layers(workload, size, CPU).items()}
    seconds = {name: getattr(known.at(size), name)[:, None] for name in known.table if name.endswith("_s")}
    skips = skips_of(workload.layers, workload.sample(size)[0])
    return replace(
        known,
        sizes=(size,),
        table=seconds | held,
        skips=tuple((made, used, (float(amount),)) for made, used, amount in skips),
        parameter_bytes=np.array([storage_bytes(list(layer.parameters())) for layer in workload.layers], float),
        input_bytes=float(storage_bytes([workload.sample(1)[0]])),
    )


def check(name: str, **choices) -> tuple[int, int]:
    """Bytes beside the model that are predicted, and held in the best of some steps, of this rank."""
    workload = workload_of(name)
    L = len(workload.layers)
    costs = layer_costs([1.0] * L, [2.0] * L, weights=[1.0] * L)
    plan = make(costs, M, batch=BATCH, **{"stages": dist.get_world_size(), "window": 2} | choices)
    plan = replace(plan, profile=profile_of(workload, plan.profile))
    pipe = Pipeline(workload.layers, plan, workload.loss)
    given = workload.sample(BATCH)
    held = []
    for _ in range(6):  # the first are told what messages look like; a late delivery may only hold more
        dist.barrier()
        held.append(trace_bytes(CPU, lambda: pipe.step(*given))[0].peak_bytes)
        for parameter in pipe.parameters():
            parameter.grad = None
    pipe.close()
    curve = simulate(plan).memory[pipe.rank]
    constant = sum(curve.parts[part] for part in ("parameters", "optimizer"))
    first = plan.profile.input_bytes * BATCH if pipe.is_first else 0.0
    return int((curve.total - constant).max() - first), min(held[1:])


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name, choices in CASES:
        predicted, held = check(name, **choices)
        what = f"{name} {choices} on rank {dist.get_rank()}: {predicted} bytes predicted, {held} held"
        assert abs(predicted / held - 1) <= 0.02, what
    dist.barrier()
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print("memory is as predicted")
    leave()


CASES = [
    ("unet", {"balance": [4, 4], "checkpoint": "always"}),
    ("unet", {"balance": [2, 6], "checkpoint": "never"}),
    ("unet", {"balance": [6, 2], "checkpoint": "never"}),
    ("unet", {"stages": 4, "stages_per_rank": 2, "checkpoint": "always", "schedule": "interleaved_gpipe"}),
    ("resnet", {"checkpoint": "always", "schedule": "1f1b"}),
    ("resnet", {"checkpoint": "never", "schedule": "gpipe"}),
    ("vit", {"checkpoint": "always", "schedule": "gpipe"}),
    ("vit", {"checkpoint": "never", "schedule": "1f1b"}),
]


if __name__ == "__main__":
    main()
