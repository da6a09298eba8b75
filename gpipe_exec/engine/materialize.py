"""Layers that are built on torch's meta device, where they have shapes but no memory, and given memory where they are.

    with torch.device("meta"):                every rank builds the whole model, at no cost
        layers = nn.Sequential(...)
    Pipeline(layers, plan, loss)              and materialises the layers of its own stages

Each module is initialised by its own `reset_parameters`, as torch's are, with a seed that follows from its name in the
whole model: weights depend neither on the cut nor on the kind of device, since they are made in host memory. A weight
that modules share is initialised by the first of them, wherever that is.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

Layers = nn.Sequential | Sequence[nn.Module]


def materialize(
    layers: Layers, names: Sequence[str], own: Collection[int], device: torch.device, seed: int = 0
) -> bool:
    """Give memory and initial values to these layers, as far as they have none; whether any had none.

    Other layers stay as they are, but for a weight that they share with these.
    """
    modules = list(_modules(layers, names))
    wanted = {t for index in own for t in (*layers[index].parameters(), *layers[index].buffers()) if t.is_meta}
    if not wanted:
        return False
    shared = _shared(modules)
    made: dict[torch.Tensor, torch.Tensor] = {}
    for name, module in reversed(modules):  # so that of a weight that is shared, the first has the last word
        there = _tensors(module)
        if not wanted & {*there.values()}:
            continue
        for tensor in there.values():
            if tensor.is_meta and tensor not in made:
                made[tensor] = _anew(tensor, torch.device("cpu"))
        _put(module, {key: made.get(tensor, tensor) for key, tensor in there.items()})
        _initialise(module, name, seed)
        _put(module, there)
        for tensor in there.values():
            if tensor in made and tensor not in wanted:
                del made[tensor]
            elif tensor in made and tensor not in shared:
                made[tensor].data = made[tensor].data.to(device)
    for tensor in shared & {*made}:
        made[tensor].data = made[tensor].data.to(device)
    for _, module in modules:
        there = _tensors(module)
        _put(module, {key: made[tensor] for key, tensor in there.items() if tensor in made})
    return True


def dematerialize(layers: Layers, own: Collection[int]) -> None:
    """Let go of the memory of these layers again, gradients included."""
    gone: dict[torch.Tensor, torch.Tensor] = {}
    for index in own:
        for tensor in (*layers[index].parameters(), *layers[index].buffers()):
            gone[tensor] = _anew(tensor, torch.device("meta"))
    for layer in layers:
        for module in layer.modules():
            _put(module, {key: gone[tensor] for key, tensor in _tensors(module).items() if tensor in gone})


def _modules(layers: Layers, names: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """All modules of the model by their names, each once."""
    seen: set[nn.Module] = set()
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules(prefix=names[index]):
            if module not in seen:
                seen.add(module)
                yield name, module


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters and buffers, without those of its submodules."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _put(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        setattr(module, name, tensor)


def _shared(modules: Sequence[tuple[str, nn.Module]]) -> set[torch.Tensor]:
    seen: set[torch.Tensor] = set()
    twice: set[torch.Tensor] = set()
    for _, module in modules:
        for tensor in _tensors(module).values():
            (twice if tensor in seen else seen).add(tensor)
    return twice


def _anew(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _initialise(module: nn.Module, name: str, seed: int) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise ValueError(
            f"{name} ({type(module).__name__}) was built on the meta device and has no reset_parameters() to give its "
            f"{', '.join(_tensors(module))} values: expected one, or a model that is built with values"
        )
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        reset()
