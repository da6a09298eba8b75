"""A training step on a device that is not there: its tensors have forms and a place, but no values, and one that meets
another of another device is refused.

Fake tensors may say that they are a GPU's, but torch without CUDA ends the process as soon as one of them requires
gradients: its graph asks for CUDA's device guard. A device of a name of our own may have a guard written in Python.
"""

import itertools
from dataclasses import replace

import torch
from plans import layers, plan
from torch import nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from gpipe_exec import Pipeline, leave
from gpipe_exec.devices.accelerator import available_kind, default_device

NAME = "card"
SCHEDULES = (
    ("naive", 1),
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_gpipe", 2),
    ("interleaved_1f1b", 2),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zb_v", 2),
    ("dualpipe_v", 2),
)
pinned: list[tuple[torch.Size, torch.dtype]] = []


class Random(_DummyBackendModule):
    """The device's generator, as far as a recomputation asks for its state."""

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.empty(8, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        assert state.shape == (8,)


def pin(mode: FakeTensorMode, function: object, tensor: torch.Tensor, *_: object) -> torch.Tensor:
    """What torch has no fake of."""
    assert tensor.device.type == "cpu"
    pinned.append((tensor.shape, tensor.dtype))
    return tensor


class Block(nn.Sequential):
    """Made where it stays: fake weights of such a device cannot be moved."""

    def __init__(self, *more: nn.Module) -> None:
        with torch.device("meta"):
            linear = nn.Linear(6, 6)
        for name, parameter in [*linear.named_parameters()]:
            setattr(linear, name, nn.Parameter(torch.empty(parameter.shape, device=NAME)))
        super().__init__(linear, nn.Dropout(0.1), *more)

    def to(self, *_: object) -> "Block":
        return self


class Elsewhere(nn.Module):
    """Forgets where its input is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(6)


def pipeline(*more: nn.Module, dtype: str = "fp32", **choices: object) -> Pipeline:
    costs = layers([1.0] * 4, [2.0] * 4, weights=[1.0] * 4)
    planned = plan(costs, **{"microbatches": 3, "batch": 7} | choices)
    planned = replace(planned, profile=replace(planned.profile, dtype=dtype))
    blocks = [Block(nn.GELU()) for _ in range(3)]
    # What a first step compares are values.
    return Pipeline(nn.Sequential(*blocks, Block(*more)), planned, nn.functional.mse_loss, device=NAME, checks=False)


def check(**choices: object) -> None:
    pipe = pipeline(nn.LayerNorm(6, elementwise_affine=False), **choices)
    pinned.clear()
    loss = pipe.step(torch.zeros(7, 6), torch.zeros(7, 6))
    assert len(pinned) == 2, "inputs and targets go to the device from pinned memory, once"
    assert loss.device.type == NAME
    for parameter in pipe.parameters():
        assert parameter.grad is not None
        assert parameter.grad.device.type == NAME
    assert pipe.evaluate(torch.zeros(7, 6), torch.zeros(7, 6)).device.type == NAME
    assert pipe.predict(torch.zeros(7, 6)).device.type == NAME


def main() -> None:
    _setup_privateuseone_for_python_backend(NAME, Random())
    fake_impls.op_implementations_dict[torch.ops.aten._pin_memory.default] = pin
    assert available_kind() == NAME
    assert default_device() == torch.device(NAME, 0)
    checked = 0
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        mode.cache_enabled = False  # what is cached is not counted
        modes = itertools.cycle(("never", "always", "except_last", "never"))
        for (schedule, v), mode in zip(SCHEDULES, modes, strict=False):
            many = {} if schedule != "naive" else {"microbatches": 1}
            check(schedule=schedule, stages=v, stages_per_rank=v, checkpoint=mode, **many)
            checked += 1
        check(schedule="1f1b", stages=1, checkpoint="always", dtype="bf16")  # in mixed precision
        checked += 1
        try:
            pipeline(Elsewhere(), stages=1, schedule="gpipe").step(torch.zeros(7, 6), torch.zeros(7, 6))
        except RuntimeError as error:
            assert "device" in str(error), error
        else:
            raise AssertionError("a tensor of another device was taken")
    print(f"{checked} steps stay on their device")
    leave()


if __name__ == "__main__":
    main()
