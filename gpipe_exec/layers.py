"""Named models as sequences of torch layers, and the user's own: what a scenario describes, to compute with.

The layers are those of `gpipe_sim.cost.transformer`, one for one: embedding, blocks, final norm, head. A user's model
is named in the scenario as ``package.module:function``; the function takes nothing and returns a `Workload`, or such a
tuple of any module, which is split (`gpipe_exec.modules.splitting`), and may have a list of submodules to cut at.
"""

import importlib
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.nn import functional

from gpipe_exec.devices.environment import folder_of
from gpipe_exec.engine.losses import Loss
from gpipe_exec.engine.messages import flatten, unflatten
from gpipe_exec.engine.precision import DTYPES, computes_with_copies
from gpipe_exec.engine.selective import attention
from gpipe_exec.engine.slices import Division
from gpipe_exec.modules.splitting import SplitError, split
from gpipe_sim.scenario.schema import HuggingFaceModel, PythonModel, Scenario, Transformer


class Workload(NamedTuple):
    """Everything that is needed to train a model on made-up data."""

    layers: nn.Sequential
    sample: Callable[[int], tuple[Any, Any]]
    """n -> inputs and targets of n samples; the same n gives the same samples."""
    loss: Loss
    """(output, targets) -> mean loss over the samples, or (sum, count)."""


class WorkloadError(ValueError):
    """The model that a scenario names cannot be built; the message says why."""


def build_workload(scenario: Scenario, seed: int = 0, *, on_meta: bool = False) -> Workload:
    """The scenario's model with reproducible weights, in its dtype or, in mixed precision, in fp32.

    With `on_meta` it has shapes but no memory, until a `Pipeline` materialises its own layers; but not a user's own
    model, which has what its function has given it.
    """
    torch.manual_seed(seed)
    if isinstance(scenario.model, Transformer):
        with torch.device("meta") if on_meta else nullcontext():
            workload = transformer(scenario.model)
    elif isinstance(scenario.model, PythonModel):
        workload = load_workload(scenario.model.function, Path(scenario.document.file).parent)
    elif isinstance(scenario.model, HuggingFaceModel):
        workload = _huggingface(scenario.model, folder_of(scenario))
    else:
        raise WorkloadError(
            f"a model of kind {scenario.model.kind} has costs but no arithmetic, so it can only be rehearsed"
        )
    dtype = DTYPES[scenario.dtype]

    def sample(n: int) -> tuple[Any, Any]:
        inputs, targets = workload.sample(n)
        return _cast(inputs, dtype), _cast(targets, dtype)

    held = torch.float32 if computes_with_copies(scenario.dtype, scenario.precision) else dtype
    return workload._replace(layers=workload.layers.to(held), sample=sample)


def parameter_bytes(layer: nn.Module, scenario: Scenario) -> int:
    """Of a layer's weights as they are computed with."""
    mixed = computes_with_copies(scenario.dtype, scenario.precision)
    word = DTYPES[scenario.dtype].itemsize
    return sum(parameter.numel() * (word if mixed else parameter.element_size()) for parameter in layer.parameters())


def _cast(value: Any, dtype: torch.dtype) -> Any:
    tensors, nesting = flatten(value)
    return unflatten(nesting, [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors])


def load_workload(name: str, folder: Path) -> Workload:
    """Call the user's ``package.module:function``, found on the path or beside the scenario file."""
    module_name, _, function_name = name.partition(":")
    path_before = list(sys.path)
    sys.path.append(str(folder.resolve()))  # last: it stands in for nothing that is installed
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        parts = tuple(function())
        made, (cuts,) = Workload(*parts[:3]), parts[3:] or ((),)
    except ModuleNotFoundError as error:
        raise WorkloadError(f"{name}: there is no module {error.name}") from error
    except (AttributeError, TypeError) as error:
        message = f"{name}: {error}, expected a function that returns (nn.Module, sample, loss)"
        raise WorkloadError(message) from error
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise WorkloadError(f"{name}: {type(error).__name__}: {error}") from error
    finally:
        sys.path[:] = path_before  # not removed by name: the folder may have been on the path already, further ahead
    if not isinstance(made.layers, nn.Module) or not callable(made.sample) or not callable(made.loss):
        raise WorkloadError(f"{name}: expected (nn.Module, sample, loss), the last two callable")
    if isinstance(made.layers, nn.Sequential) and not cuts:
        return made
    try:
        return made._replace(layers=split(made.layers, made.sample(3)[0], cuts))
    except SplitError as error:
        raise WorkloadError(f"{name}: {error}") from error


def _huggingface(model: HuggingFaceModel, folder: Path) -> Workload:
    from gpipe_exec.modules.huggingface import build, samples, split_huggingface, token_loss

    try:
        whole = build(model, folder)
        sample = samples(model, whole.config.vocab_size)  # type: ignore[union-attr,arg-type]
        return Workload(split_huggingface(whole, sample(2)[0]), sample, token_loss)
    except (SplitError, OSError) as error:
        raise WorkloadError(str(error)) from error


# --- transformer ---------------------------------------------------------------------------------------------------


class Embedding(nn.Module):
    """Token vectors, plus learned or sinusoidal positions; where positions are rotary, blocks see to them."""

    sinusoids: torch.Tensor

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab, model.hidden)
        self.positions = nn.Embedding(model.num_positions, model.hidden) if model.num_positions else None
        length = model.sequence if model.positions == "sinusoidal" else 0
        self.register_buffer("sinusoids", torch.empty(length, model.hidden), persistent=False)
        self._part, self._parts = 0, 1
        """Which part of the sequence comes out here, of how many."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The table of positions; the layers inside see to themselves."""
        self.sinusoids.copy_(_sinusoids(*self.sinusoids.shape))

    def divide(self, mesh: DeviceMesh, *, sequence: bool) -> Division:
        """By the vocabulary; what comes out is summed."""
        boundary: Placement = Shard(1) if sequence else Replicate()
        if sequence:
            self._part, self._parts = mesh.get_local_rank(), mesh.size()
        tokens = RowwiseParallel(input_layouts=Replicate(), output_layouts=boundary)
        return Division({"tokens": tokens}, in_parts=["positions.weight"] if sequence else [])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(n, s) token numbers -> (n, s, h)."""
        vectors: torch.Tensor = self.tokens(tokens)
        length = tokens.shape[1] // self._parts
        here = slice(self._part * length, (self._part + 1) * length)
        if self.positions is not None:
            vectors = vectors + self.positions.weight[here]
        return vectors + self.sinusoids[here] if self.sinusoids.numel() else vectors


def _sinusoids(length: int, width: int) -> torch.Tensor:
    """Sine and cosine in turns, each pair slower than the one before."""
    angles = _angles(length, width)
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(angles)
    table[:, 1::2] = torch.cos(angles)[:, : width // 2]
    return table


def _angles(length: int, width: int) -> torch.Tensor:
    """Position times rate, a column for each pair of numbers."""
    return torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm and around a residual."""

    cosines: torch.Tensor
    sines: torch.Tensor

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        hidden, queries, keys = model.hidden, model.query_width, model.kv_width
        everywhere = model.biases == "all"
        self.norm1, self.norm2 = _norm(model), _norm(model)
        self.qkv = nn.Linear(hidden, queries + 2 * keys, bias=model.biases != "none")
        self.project = nn.Linear(queries, hidden, bias=everywhere)
        self.gate = nn.Linear(hidden, model.ffn_width, bias=everywhere) if model.gated else None
        self.up = nn.Linear(hidden, model.ffn_width, bias=everywhere)
        self.down = nn.Linear(model.ffn_width, hidden, bias=everywhere)
        length = model.sequence if model.positions == "rotary" else 0
        for name in ("cosines", "sines"):
            self.register_buffer(name, torch.empty(length, (model.width_of_head + 1) // 2), persistent=False)
        self._group: DeviceMesh | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The tables of angles; the layers inside see to themselves."""
        angles = _angles(len(self.cosines), self.model.width_of_head)
        self.cosines.copy_(torch.cos(angles))
        self.sines.copy_(torch.sin(angles))

    def divide(self, mesh: DeviceMesh, *, sequence: bool) -> Division:
        """Attention by heads, the feed-forward by its width."""
        model, self._group = self.model, mesh
        boundary: Placement = Shard(1) if sequence else Replicate()
        styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("qkv", "up")}
        styles |= {"gate": ColwiseParallel()} if self.gate is not None else {}
        styles |= {name: RowwiseParallel(output_layouts=boundary) for name in ("project", "down")}
        styles |= {name: SequenceParallel() for name in ("norm1", "norm2") if sequence}
        return Division(styles, sections={"qkv": (model.query_width, model.kv_width, model.kv_width)})

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """What both halves begin with: of a group's, all of the sequence, gathered once for whoever needs it."""
        if self._group is None:
            return x
        if isinstance(x, DTensor):
            gathered: torch.Tensor = x.redistribute(placements=[Replicate()])
            return gathered
        return DTensor.from_local(x, self._group, [Replicate()], run_check=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, s, h) -> (n, s, h); of a group's, s is that of its part where sequences are split."""
        model, T = self.model, 1 if self._group is None else self._group.size()
        together = self.qkv(self._whole(self.norm1(x)))
        n, s, _ = together.shape
        together = together.view(n, s, -1, model.width_of_head).transpose(1, 2)
        q, k, v = together.split([number // T for number in (model.heads, *[model.num_kv_heads] * 2)], dim=1)
        if model.positions == "rotary":
            q, k = self._rotated(q), self._rotated(k)
        mixed = attention(self._attention, q, k, v)
        x = x + self.project(mixed.transpose(1, 2).reshape(n, s, -1))
        inside, up = self._whole(self.norm2(x)), self.up
        wide = functional.gelu(up(inside)) if self.gate is None else functional.silu(self.gate(inside)) * up(inside)
        result: torch.Tensor = x + self.down(wide)
        return result

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shared = self.model.num_kv_heads < self.model.heads
        if self.model.attention == "flash":
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        if shared:
            k, v = (each.repeat_interleave(self.model.heads // self.model.num_kv_heads, dim=1) for each in (k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(-1) @ v

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Each pair (i, i + half) of a head's numbers turned by its position's angle (Su et al., arXiv 2104.09864)."""
        first, second = x.chunk(2, dim=-1)
        cosines, sines = self.cosines, self.sines
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def _norm(model: Transformer) -> nn.Module:
    return nn.LayerNorm(model.hidden) if model.norm == "layer" else nn.RMSNorm(model.hidden)


def _next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """In fp32, or more where the logits have more."""
    exact = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(exact, targets.flatten())


def transformer(model: Transformer) -> Workload:
    """The decoder-only transformer of a scenario, trained to predict the next token of a made-up language."""
    embedding = Embedding(model)
    blocks = [Block(model) for _ in range(model.layers)]
    head = nn.Linear(model.hidden, model.vocab, bias=False)
    if model.tied:
        head.weight = embedding.tokens.weight
    layers = nn.Sequential(embedding, *blocks, _norm(model), head)

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
