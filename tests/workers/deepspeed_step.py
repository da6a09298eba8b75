"""One step of DeepSpeed's pipeline engine on the CPU, as an exported plan describes it, compared with one process.

Started by torchrun with the exported file. Its learning rate is a placeholder: with SGD's set to one, a step moves each
parameter by its gradient.
"""

import runpy
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

WIDTH = 8


def make_layer(index):
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def main(exported):
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    names = runpy.run_path(exported)
    config = names["CONFIG"]
    config["optimizer"]["params"]["lr"] = 1.0
    module = names["make_module"](make_layer, nn.functional.mse_loss)
    num_layers = names["STAGES"][-1][1]
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)

    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    sums = torch.float32 if config.get("data_types") else dtype
    assert getattr(engine.optimizer, "grad_acc_dtype", torch.float32) == sums
    torch.manual_seed(1234)
    batch, size, M = (
        config[name] for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    inputs, targets = (torch.randn(batch, WIDTH).to(dtype) for _ in range(2))
    replica = engine.grid.get_data_parallel_id()
    own = [slice(first, first + size) for first in range(replica * M * size, (replica + 1) * M * size, size)]
    loss = engine.train_batch(iter([(inputs[part], targets[part]) for part in own]))

    whole = nn.Sequential(*(make_layer(index) for index in range(num_layers))).to(dtype)
    expected = nn.functional.mse_loss(whole(inputs), targets)
    expected.backward()
    near = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 2**-8}
    torch.testing.assert_close(loss.detach().float().reshape(()), expected.detach().float(), **near)
    start, stop = names["STAGES"][engine.grid.get_pipe_parallel_rank()]
    moved = [parameter.detach() for parameter in module.parameters()]
    before = [parameter for layer in whole[start:stop] for parameter in layer.parameters()]
    assert len(moved) == len(before)
    for after, parameter in zip(moved, before, strict=True):
        torch.testing.assert_close(parameter.detach() - after, parameter.grad, **near)
    print("loss and gradients agree", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
