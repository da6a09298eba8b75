"""Hugging Face's models as sequences of layers: what comes before the blocks, each block, and what comes after them.

    embeddings, masks, rotary tables | block | block | ... | norm | head
    the model's own forward, stopped   with the arguments    modules that are called
    where it calls its last block      that it gives each    one after the other

Before the first block everything is the model's own code, run in a copy of the model in which blocks only note what
they are given. Tensors beside the hidden state (masks, tables of positions) travel with it, each once; a mask that is
left out, since nothing is padded, is left out here too. That the layers compute what the model computes is made sure
of, with and without padding: a model that does something between its blocks is refused. There is no cache.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from gpipe_exec.modules.splitting import Split, SplitError, evaluating, keep_unused, repeated_blocks
from gpipe_sim.base.files import did_you_mean
from gpipe_sim.scenario.schema import HuggingFaceModel

Inputs = Mapping[str, torch.Tensor]


def split_huggingface(model: nn.Module, inputs: Inputs) -> Split:
    """The layers of a model of `transformers`, for inputs like these: ``input_ids`` and, if wanted, ``attention_mask``.

    They take a dict of the same keys, and return logits.
    """
    path = _path_of_blocks(model)
    blocks = list(model.get_submodule(path).children())
    with _without_cache(model), evaluating(model):
        calls = _watched(model, path, _padded(inputs))
    groups, templates = _groups(calls.given)
    before = _Before(model, path, [name for name, _ in calls.after], groups, templates, calls.is_tuple)
    needs_gradient = _needing_gradients(before, _padded(inputs))
    layers: list[nn.Module] = [before]
    for number, block in enumerate(blocks):
        is_last = number == len(blocks) - 1
        name, spec = f"{path}.{number}", calls.specs[number]
        layers.append(_named(_Block, name, block, templates[number], spec, needs_gradient, is_last))
    layers += [_named(_After, name, module) for name, module in calls.after]
    split = Split(*layers)
    keep_unused(model, split)
    _refuse_difference(model, split, inputs)
    return split


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the cross entropies of all tokens, and their number; a target of -100 is no token."""
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    total = functional.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def build(described: HuggingFaceModel, folder: Path) -> nn.Module:
    """The model of a scenario, with the weights of a folder if it names one; otherwise they are random."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        message = f"needs the package {error.name}, expected an installation with gpipe-planner[huggingface]"
        raise SplitError(message) from error
    fields = dict(described.config)
    try:
        config = transformers.AutoConfig.for_model(fields.pop("model_type", None), **fields)
    except (ValueError, TypeError, KeyError) as error:
        raise SplitError(f"model.config: {error}") from error
    known = {*type(config)().to_dict(), *type(config).attribute_map}
    if unknown := [key for key in fields if key not in known]:
        raise SplitError(f"model.config.{unknown[0]}: unknown key, {did_you_mean(unknown[0], known)}")
    auto = {"causal_lm": transformers.AutoModelForCausalLM, "masked_lm": transformers.AutoModelForMaskedLM}
    made: nn.Module
    if described.weights is None:
        made = auto[described.head].from_config(config)
    else:
        made = auto[described.head].from_pretrained(folder / described.weights, config=config, local_files_only=True)
    return made.train()


def samples(described: HuggingFaceModel, vocab: int) -> Callable[[int], tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Made-up text, of which the next token is asked, or each."""

    def sample(n: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(n)
        start = torch.randint(vocab, (n, 1), generator=generator)
        pace = torch.randint(1, 4, (n, 1), generator=generator)
        text = (start + pace * torch.arange(described.sequence + 1)) % vocab
        asked = text[:, 1:] if described.head == "causal_lm" else text[:, :-1]
        return {"input_ids": text[:, :-1].contiguous()}, asked.contiguous()

    return sample


# --- what a model's forward does -----------------------------------------------------------------------------------


class _Calls(NamedTuple):
    given: list[list[Any]]
    """Of each block, what it is given beside the hidden state, in a row."""
    specs: list[Any]
    is_tuple: int
    """How many things a block returns; 0 where that is a tensor alone."""
    after: list[tuple[str, nn.Module]]
    """What is called behind the last block, by its name."""


def _path_of_blocks(model: nn.Module) -> str:
    _, ends = repeated_blocks(model)
    parents = [end.rpartition(".")[0] for end in ends]
    lists = [name for name in parents if isinstance(model.get_submodule(name), nn.ModuleList)]
    if len(lists) != 1:
        found = ", ".join(lists) or "none"
        raise SplitError(f"{type(model).__name__} has blocks in {found}, expected one nn.ModuleList of equal blocks")
    return lists[0]


def _row(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """What a block is given beside the hidden state, which comes first."""
    if not args or not isinstance(args[0], torch.Tensor):
        raise SplitError("blocks are not given the hidden state as their first argument, expected it there")
    return pytree.tree_flatten((args[1:], dict(kwargs)))


def _watched(model: nn.Module, path: str, inputs: Inputs) -> _Calls:
    """Run it once and note what its blocks are given, and what is called after them."""
    blocks = list(model.get_submodule(path).children())
    given: list[list[Any]] = []
    specs: list[Any] = []
    sizes: set[int] = set()
    after: list[tuple[str, nn.Module]] = []
    spine = ["", *(path[:end] for end, letter in enumerate(path) if letter == "."), path]
    hooks = []

    def enter(number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if number != len(given):
            raise SplitError(f"{type(model).__name__} does not call its blocks one after the other, each once")
        row, spec = _row(args, kwargs)
        given.append(row)
        specs.append(spec)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        sizes.add(len(output) if isinstance(output, tuple) else 0)

    for number, block in enumerate(blocks):
        hooks.append(block.register_forward_pre_hook(_bound(enter, number), with_kwargs=True))
        hooks.append(block.register_forward_hook(leave))
    for name, module in model.named_modules():
        if name not in spine and name.rpartition(".")[0] in spine[:-1]:

            def note(module: nn.Module, args: Any, name: str = name) -> None:
                if len(given) == len(blocks):
                    after.append((name, module))

            hooks.append(module.register_forward_pre_hook(note))
    try:
        model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if len(given) != len(blocks) or len(sizes) != 1:
        raise SplitError(f"{type(model).__name__} does not call its blocks one after the other, each once")
    return _Calls(given, specs, sizes.pop(), after)


def _bound(enter: Callable[..., None], number: int) -> Callable[..., None]:
    return lambda *given: enter(number, *given)


@dataclass(frozen=True)
class _Template:
    """What a block is given: tensors by the number of their group, anything else as it is."""

    row: list[Any]
    group_of: Mapping[int, int]
    """Place in the row -> group."""


def _groups(given: Sequence[Sequence[Any]]) -> tuple[list[tuple[int, int]], list[_Template]]:
    """Tensors that several blocks are given are one group: each group by the block and place where it is first met."""
    found: dict[int, int] = {}
    first: list[tuple[int, int]] = []
    templates = []
    for block, row in enumerate(given):
        group_of = {}
        for place, leaf in enumerate(row):
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in found:
                    found[id(leaf)] = len(first)
                    first.append((block, place))
                group_of[place] = found[id(leaf)]
        templates.append(_Template([None if place in group_of else leaf for place, leaf in enumerate(row)], group_of))
    return first, templates


# --- layers --------------------------------------------------------------------------------------------------------


class _Reached(Exception):  # noqa: N818  # it ends a forward, which is no error
    """The last block is called: nothing behind it is computed here."""


class _Noting(nn.Module):
    """Stands for a block: notes what it is given, and returns the hidden state as it came."""

    def __init__(self, block: nn.Module, noted: list[list[Any]], num_blocks: int, is_tuple: int) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(block).items() if isinstance(value, str | int | float | bool)}
        vars(self).update({name: value for name, value in plain.items() if name not in vars(self)})
        self._noted, self._num_blocks, self._is_tuple = noted, num_blocks, is_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the block would get."""
        self._noted.append([args[0], *_row(args, kwargs)[0]])
        if len(self._noted) == self._num_blocks:
            raise _Reached
        return (args[0], *[None] * (self._is_tuple - 1)) if self._is_tuple else args[0]


class _Before(nn.Module):
    """The model's own forward up to its last block, with nothing in the place of blocks and of what follows them."""

    def __init__(
        self,
        model: nn.Module,
        path: str,
        after: Sequence[str],
        groups: Sequence[tuple[int, int]],
        templates: Sequence["_Template"],
        is_tuple: int,
    ) -> None:
        super().__init__()
        self._noted: list[list[Any]] = []
        self._groups, self._templates = groups, templates
        skeleton = _copied(model)
        parts, owner = path.split("."), skeleton
        for part in parts[:-1]:
            owner._modules[part] = _copied(owner.get_submodule(part))
            owner = owner.get_submodule(part)
        blocks = list(model.get_submodule(path).children())
        owner._modules[parts[-1]] = nn.ModuleList(_Noting(b, self._noted, len(blocks), is_tuple) for b in blocks)
        for name in after:
            parent, _, leaf = name.rpartition(".")
            skeleton.get_submodule(parent)._modules[leaf] = nn.Identity()
        # Not as a part: its parts are ours, so that they have the names that they have in the model.
        vars(self)["_skeleton"] = skeleton
        self._modules, self._parameters, self._buffers = skeleton._modules, skeleton._parameters, skeleton._buffers
        self.training = model.training

    def forward(self, inputs: Inputs) -> dict[str, Any]:
        """The hidden state, and what blocks are given beside it."""
        skeleton: nn.Module = vars(self)["_skeleton"]
        skeleton.training = self.training
        self._noted.clear()
        with suppress(_Reached):
            skeleton(**inputs)
        rows = [row[1:] for row in self._noted]
        hidden = self._noted[0][0]
        self._noted.clear()
        for row, template in zip(rows, self._templates, strict=True):
            for place, leaf in enumerate(row):
                is_new = isinstance(leaf, torch.Tensor) and place not in template.group_of
                if is_new or (leaf is not None and place not in template.group_of and leaf != template.row[place]):
                    raise ValueError("blocks are given something that they were not when the model was split")
        return {"hidden": hidden, "given": [rows[block][place] for block, place in self._groups]}


def _copied(module: nn.Module) -> nn.Module:
    """Another module of the same parts, of which some can be replaced."""
    new = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        vars(new)[name] = dict(vars(module)[name])
    if hasattr(module, "config"):
        config: Any = copy.deepcopy(module.config)
        config.use_cache = False
        vars(new)["config"] = config
    return new


class _Held(nn.Module):
    """A layer that holds one part of the model, under its name there."""

    def __init__(self, name: str, part: nn.Module) -> None:
        super().__init__()
        *path, leaf = name.split(".")
        owner: nn.Module = self
        for step in path:
            owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        owner.add_module(leaf, part)
        self._name = name

    @property
    def part(self) -> nn.Module:
        """Of the model."""
        return self.get_submodule(self._name)


class _Block(_Held):
    def __init__(
        self,
        name: str,
        part: nn.Module,
        template: "_Template",
        spec: Any,
        needs_gradient: Sequence[bool],
        is_last: bool,
    ) -> None:
        super().__init__(name, part)
        self._template, self._spec, self._needs_gradient, self._is_last = template, spec, needs_gradient, is_last

    def forward(self, value: dict[str, Any]) -> Any:
        """The hidden state, and what other blocks need beside it."""
        given = [
            one if needed or one is None else one.detach()
            for one, needed in zip(value["given"], self._needs_gradient, strict=True)
        ]
        row = list(self._template.row)
        for place, group in self._template.group_of.items():
            row[place] = given[group]
        args, kwargs = pytree.tree_unflatten(row, self._spec)
        output = self.part(value["hidden"], *args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        return hidden if self._is_last else {"hidden": hidden, "given": value["given"]}


class _After(_Held):
    def forward(self, hidden: torch.Tensor) -> Any:
        """Norm, head and the like."""
        return self.part(hidden)


def _named(kind: type[_Held], name: str, part: nn.Module, *more: Any) -> nn.Module:
    """A layer that is called in profiles what it holds."""
    layer: nn.Module = type(type(part).__name__, (kind,), {})(name, part, *more)
    return layer


# --- making sure ---------------------------------------------------------------------------------------------------


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Keys and values of earlier calls are for generating text."""
    config: Any = model.config
    before = getattr(config, "use_cache", False)
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = before


def _padded(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The same with something padded, where there is a mask: Hugging Face leaves out masks that mask nothing."""
    found = dict(inputs)
    if "attention_mask" in found:
        found["attention_mask"] = found["attention_mask"].clone()
        found["attention_mask"][0, -1] = 0
    return found


def _needing_gradients(before: _Before, inputs: Inputs) -> list[bool]:
    """Of what blocks are given beside the hidden state."""
    with torch.enable_grad():
        given = before(inputs)["given"]
    return [one is not None and one.requires_grad for one in given]


def _refuse_difference(model: nn.Module, layers: Split, inputs: Inputs) -> None:
    number = len(next(iter(inputs.values())))
    for some in (dict(inputs), _padded(inputs), {key: tensor[: max(1, number - 1)] for key, tensor in inputs.items()}):
        with _without_cache(model), evaluating(model), evaluating(layers):
            expected, found = model(**some).logits, layers(some)
        # To the last bit: what a model does to its logits at the end may be little as long as they are small.
        if not isinstance(found, torch.Tensor) or not torch.equal(found, expected):
            raise SplitError(
                f"{type(model).__name__} does not compute the same in layers, expected a model whose blocks are given "
                "the hidden state of the one before, and behind which only modules are called, one after the other"
            )
