"""Under torchrun: modules that were split, each equal to the whole in one process, in float64."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from own_modules import MODULES, images, made
from plans import layers as layer_costs
from plans import plan as make
from torch import nn
from torch.nn import functional

from gpipe_exec import Pipeline, leave, read_model, split
from gpipe_exec.amoebanet import amoebanet

BATCH, M = 6, 3


def plan_for(layers: nn.Sequential, **choices):
    L = len(layers)
    costs = layer_costs([1.0] * L, [2.0] * L, weights=[1.0] * L)
    return make(costs, M, **{"batch": BATCH, "stages": dist.get_world_size()} | choices)


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")


def by_micro_batches(module: nn.Module, loss, inputs, targets):
    """One process, a micro-batch at a time, as BatchNorm is normalised."""
    total = 0.0
    for x, y in zip(inputs.chunk(M), targets.chunk(M), strict=True):
        one = loss(module(x), y) / M
        one.backward()
        total += one.detach()
    return total


def check(name: str, cuts=(), *, saves: bool = False, **choices) -> None:
    loss, (inputs, targets) = MODULES[name][1], images(BATCH)
    whole, module = made(name), made(name)
    expected = by_micro_batches(whole, loss, inputs, targets)
    layers = split(module, inputs[:2], cuts)
    pipe = Pipeline(layers, plan_for(layers, **choices), loss)
    close(pipe.step(inputs, targets), expected, f"loss of {name}")
    gradients = {key: parameter.grad for key, parameter in whole.named_parameters()}
    for key, parameter in pipe.named_parameters():
        if gradients[key] is None:
            assert parameter.grad is None, key
        else:
            close(parameter.grad, gradients[key], f"gradient of {key} of {name}")
    if not saves:
        pipe.close()
        return
    state = pipe.state_dict()
    if pipe.rank == 0:
        assert state.keys() == whole.state_dict().keys()
        made(name).load_state_dict(state)
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    pipe.save(Path(folders[0]), torch.optim.Adam(pipe.parameters()), 1)
    assert read_model(folders[0]).keys() == whole.state_dict().keys()
    pipe.load_state_dict({key: tensor + 1 for key, tensor in module.state_dict().items()})
    assert pipe.load(Path(folders[0]), torch.optim.Adam(pipe.parameters())) == {"step": 1}
    for key, parameter in pipe.named_parameters():
        close(parameter.detach(), dict(whole.named_parameters())[key].detach(), f"{key} of {name}, read again")
    pipe.close()


def check_amoebanet(**choices) -> None:
    """GPipe's own model, whose cells take the outputs of the two before them."""

    def made() -> nn.Sequential:
        torch.manual_seed(2)
        return amoebanet(3, 16, 5).double()

    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(BATCH, 3, 32, 32, generator=generator, dtype=torch.float64)
    targets, whole, layers = torch.arange(BATCH) % 5, made(), made()
    expected = by_micro_batches(whole, functional.cross_entropy, inputs, targets)
    pipe = Pipeline(layers, plan_for(layers, **choices), functional.cross_entropy)
    close(pipe.step(inputs, targets), expected, "loss of AmoebaNet-D")
    gradients = {key: parameter.grad for key, parameter in whole.named_parameters()}
    for key, parameter in pipe.named_parameters():
        close(parameter.grad, gradients[key], f"gradient of {key} of AmoebaNet-D")
    pipe.close()


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if dist.get_world_size() == 2:
        check("resnet", schedule="1f1b", checkpoint="always")
        check("unet", schedule="zb_h1", checkpoint="never")
        check_amoebanet(schedule="zb_v", stages=4, stages_per_rank=2, checkpoint="never")
    else:  # the skips pass a stage
        check("unet", ("middle", "up.1"), schedule="gpipe", checkpoint="except_last")
        check("unet", schedule="1f1b", checkpoint="always")
        check("vit", schedule="gpipe", checkpoint="never", saves=True)
        check_amoebanet(schedule="1f1b", checkpoint="always")
    dist.barrier()
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print("modules are exact")
    leave()


if __name__ == "__main__":
    main()
