"""Named models as sequences of torch layers, and the user's own: what a scenario describes, to compute with.

The layers are those of `gpipe_sim.model`, one for one: embedding, blocks, final norm, head. A user's model is named in
the scenario as ``package.module:function``; the function takes nothing and returns a `Workload` or the same three
things as a tuple.
"""

import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from gpipe_exec.messages import flatten, unflatten
from gpipe_exec.stage import Loss
from gpipe_sim.catalog import DType
from gpipe_sim.scenario import PythonModel, Scenario, Transformer

DTYPES: dict[DType, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Workload(NamedTuple):
    """Everything that is needed to train a model on made-up data."""

    layers: nn.Sequential
    sample: Callable[[int], tuple[Any, Any]]
    """n -> inputs and targets of n samples; the same n gives the same samples."""
    loss: Loss
    """(output, targets) -> mean loss over the samples."""


class WorkloadError(ValueError):
    """The model that a scenario names cannot be built; the message says why."""


def build_workload(scenario: Scenario, seed: int = 0) -> Workload:
    """The scenario's model with reproducible weights, in its dtype."""
    torch.manual_seed(seed)
    if isinstance(scenario.model, Transformer):
        workload = transformer(scenario.model)
    elif isinstance(scenario.model, PythonModel):
        workload = load_workload(scenario.model.function, Path(scenario.document.file).parent)
    else:
        raise WorkloadError(
            f"a model of kind {scenario.model.kind} has costs but no arithmetic, so it can only be rehearsed"
        )
    dtype = DTYPES[scenario.dtype]

    def sample(n: int) -> tuple[Any, Any]:
        inputs, targets = workload.sample(n)
        return _cast(inputs, dtype), _cast(targets, dtype)

    return workload._replace(layers=workload.layers.to(dtype), sample=sample)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    tensors, nesting = flatten(value)
    return unflatten(nesting, [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors])


def load_workload(name: str, folder: Path) -> Workload:
    """Call the user's ``package.module:function``, found on the path or beside the scenario file."""
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, str(folder.resolve()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        made = Workload(*function())
    except ModuleNotFoundError as error:
        raise WorkloadError(f"{name}: there is no module {error.name}") from error
    except (AttributeError, TypeError) as error:
        message = f"{name}: {error}, expected a function that returns (nn.Sequential, sample, loss)"
        raise WorkloadError(message) from error
    except Exception as error:  # whatever the user's code raises
        raise WorkloadError(f"{name}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(folder.resolve()))
    if not isinstance(made.layers, nn.Sequential) or not callable(made.sample) or not callable(made.loss):
        raise WorkloadError(f"{name}: expected (nn.Sequential, sample, loss), the last two callable")
    return made


# --- transformer ---------------------------------------------------------------------------------------------------


class Embedding(nn.Module):
    """Token vectors plus sinusoidal positions, which are not learned."""

    positions: torch.Tensor

    def __init__(self, vocab: int, hidden: int, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        place = torch.arange(sequence)[:, None]
        rate = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10000.0) / hidden))
        table = torch.zeros(sequence, hidden)
        table[:, 0::2] = torch.sin(place * rate)
        table[:, 1::2] = torch.cos(place * rate)[:, : hidden // 2]
        self.register_buffer("positions", table, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(n, s) token numbers -> (n, s, h)."""
        vectors: torch.Tensor = self.tokens(tokens) + self.positions
        return vectors


@dataclass(eq=False)
class _Shape:
    hidden: int
    heads: int
    ffn: int
    attention: str


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm and around a residual."""

    def __init__(self, shape: _Shape) -> None:
        super().__init__()
        self.shape = shape
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.project = nn.Linear(shape.hidden, shape.hidden)
        self.up, self.down = nn.Linear(shape.hidden, shape.ffn), nn.Linear(shape.ffn, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, s, h) -> (n, s, h)."""
        n, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, s, 3, self.shape.heads, -1).permute(2, 0, 3, 1, 4)
        if self.shape.attention == "flash":
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
            mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        x = x + self.project(mixed.transpose(1, 2).reshape(n, s, h))
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


def _next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def transformer(model: Transformer) -> Workload:
    """The decoder-only transformer of a scenario, trained to predict the next token of a made-up language."""
    shape = _Shape(model.hidden, model.heads, model.ffn_width, model.attention)
    layers = nn.Sequential(
        Embedding(model.vocab, model.hidden, model.sequence),
        *(Block(shape) for _ in range(model.layers)),
        nn.LayerNorm(model.hidden),
        nn.Linear(model.hidden, model.vocab, bias=False),
    )

    def sample(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(n)
        start = torch.randint(model.vocab, (n, 1), generator=generator)
        pace = torch.randint(1, 4, (n, 1), generator=generator)
        text = (start + pace * torch.arange(model.sequence + 1)) % model.vocab
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return Workload(layers, sample, _next_token_loss)


# --- others, to name in a scenario as gpipe_exec.layers:mlp and gpipe_exec.layers:convnet ---------------------------


def mlp() -> Workload:
    """Eight equal layers of width 512."""
    width = 512
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)))

    def sample(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(n)
        return torch.randn(n, width, generator=generator), torch.randn(n, width, generator=generator)

    return Workload(layers, sample, functional.mse_loss)


def convnet() -> Workload:
    """A small image classifier with BatchNorm: uneven layers, large activations early and large parameters late."""

    def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())

    widths = (16, 16, 32, 32, 64, 64)
    blocks = [block(a, b, 2 if b > a else 1) for a, b in zip((3, *widths), widths, strict=False)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    layers = nn.Sequential(*blocks, head)

    def sample(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(n)
        images = torch.randn(n, 3, 32, 32, generator=generator)
        return images, torch.randint(10, (n,), generator=generator)

    return Workload(layers, sample, functional.cross_entropy)
