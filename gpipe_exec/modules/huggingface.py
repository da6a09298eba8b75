"""Hugging Face's models as sequences of layers: what comes before the blocks, each block, and what comes after them.

    embeddings, masks, rotary tables | block | block | ... | norm | head
    the model's own forward, stopped   with the arguments    modules that are called
    where it calls its last block      that it gives each    one after the other

Before the first block everything is the model's own code, run in a copy of the model in which blocks only note what
they are given. Tensors beside the hidden state (masks, tables of positions) travel with it, each once; a mask that is
left out, since nothing is padded, is left out here too. What a block returns for later ones (T5's position biases)
travels on from there.

An encoder and a decoder are two rows of blocks. Between them and behind the last, where a model does more than call
modules, its own forward is run again, with what a row has computed in the place of the module that holds the row:

    embeddings | encoder's blocks | norm | decoder's embeddings, masks | decoder's blocks | norm | head

That the layers compute what the model computes is made sure of, with and without padding: a model that does something
else between its blocks is refused. There is no cache.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from gpipe_exec.modules.splitting import Split, SplitError, evaluating, keep_unused, repeated_blocks
from gpipe_sim.base.files import did_you_mean
from gpipe_sim.scenario.schema import HuggingFaceModel

Inputs = Mapping[str, torch.Tensor]


def split_huggingface(model: nn.Module, inputs: Inputs) -> Split:
    """The layers of a model of `transformers`, for inputs like these: ``input_ids`` and, if wanted, ``attention_mask``;
    of an encoder and a decoder, ``decoder_input_ids`` too.

    They take a dict of the same keys, and return logits.
    """
    paths = _paths_of_blocks(model)
    with _without_cache(model), evaluating(model):
        rows = _watched(model, paths, _padded(inputs))
    refused: SplitError | None = None
    for by_modules in [True, False] if len(rows) == 1 else [False]:
        try:
            split = Split(*_layers(model, rows, _padded(inputs), by_modules=by_modules))
            keep_unused(model, split)
            _refuse_difference(model, split, inputs)
        except SplitError as error:
            refused = refused or error
        except Exception as error:  # whatever a model does with parts of it that are not there
            refused = refused or SplitError(
                f"{type(model).__name__} cannot be split, since its parts cannot be run by themselves: {error}"
            )
        else:
            return split
    assert refused is not None, "one of the ways was tried"
    raise refused


def _layers(model: nn.Module, rows: Sequence["_Row"], inputs: Inputs, *, by_modules: bool) -> Iterator[nn.Module]:
    """`by_modules`: behind the last block, modules called one after the other are all there is."""
    value: Any = inputs
    for number, row in enumerate(rows):
        is_last_row = number == len(rows) - 1
        entering = _Before(model, rows, number, carries=() if len(rows) == 1 else _still_needed(inputs))
        with torch.enable_grad():
            value = _run_through(entering, value)
            needs_gradient = [one is not None and one.requires_grad for one in value["given"]]
        needs_gradient = [
            needed or group in row.made for group, needed in enumerate(needs_gradient)
        ]  # what blocks make may depend on their weights
        yield entering
        blocks = list(model.get_submodule(row.path).children())
        layers: list[nn.Module] = []
        for index, block in enumerate(blocks):
            is_last = index == len(blocks) - 1
            name = f"{row.path}.{index}"
            layers.append(_named(_Block, name, block, row, index, needs_gradient, is_last))
        behind = row.after if is_last_row and by_modules else row.inside
        layers += [_named(_After, name, model.get_submodule(name)) for name in behind]
        for layer in layers:
            value = _run_through(layer, value)
        yield from layers
    if not by_modules:
        yield _Rest(model, rows)


def _run_through(layer: nn.Module, value: Any) -> Any:
    with evaluating(layer), torch.enable_grad():
        return layer(value)


def _still_needed(inputs: Inputs) -> tuple[str, ...]:
    """Of the inputs, what is needed behind the first row of blocks."""
    return tuple(name for name in inputs if name != "input_ids")


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
    auto = {
        "causal_lm": transformers.AutoModelForCausalLM,
        "masked_lm": transformers.AutoModelForMaskedLM,
        "seq2seq_lm": transformers.AutoModelForSeq2SeqLM,
    }
    made: nn.Module
    if described.weights is None:
        made = auto[described.head].from_config(config)
    else:
        made = auto[described.head].from_pretrained(folder / described.weights, config=config, local_files_only=True)
    return made.train()


def samples(described: HuggingFaceModel, vocab: int) -> Callable[[int], tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Made-up text, of which the next token is asked, or each; an encoder is given all of it before."""

    def sample(n: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(n)
        start = torch.randint(vocab, (n, 1), generator=generator)
        pace = torch.randint(1, 4, (n, 1), generator=generator)
        text = (start + pace * torch.arange(described.sequence + 1)) % vocab
        asked = text[:, :-1] if described.head == "masked_lm" else text[:, 1:]
        inputs = {"input_ids": text[:, :-1].contiguous()}
        if described.head == "seq2seq_lm":
            inputs["decoder_input_ids"] = text[:, :-1].contiguous()
        return inputs, asked.contiguous()

    return sample


# --- what a model's forward does -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """A row of blocks: what it is given, and what is called around it."""

    path: str
    templates: "list[_Template]"
    """Of each block, what it is given beside the hidden state, in a row."""
    specs: list[Any]
    groups: "list[tuple[int, int]]"
    """Tensors that are given to blocks: each by the block and place where it is first met."""
    made: Mapping[int, tuple[int, int]]
    """Group -> the block that makes it, and its place in what that returns."""
    is_tuple: int
    """How many things a block returns; 0 where that is a tensor alone."""
    before: frozenset[str]
    """The modules called before its last block, and since the row before it, by name."""
    after: list[str]
    """Those called behind it, in order, up to the next row's."""
    output: Any
    """What the module that holds the row returned."""

    @property
    def owner(self) -> str:
        """The module that holds the row."""
        return self.path.rpartition(".")[0]

    @property
    def inside(self) -> list[str]:
        """Of those behind it, the ones that its owner calls."""
        return [name for name in self.after if name.rpartition(".")[0] == self.owner]


def _paths_of_blocks(model: nn.Module) -> list[str]:
    """Of a row of blocks, or of an encoder's and a decoder's."""
    _, ends = repeated_blocks(model)
    parents = [end.rpartition(".")[0] for end in ends]
    lists = [name for name in parents if isinstance(model.get_submodule(name), nn.ModuleList)]
    if len(lists) == 1 or (len(lists) == 2 and bool(getattr(model.config, "is_encoder_decoder", False))):
        return lists
    found = ", ".join(lists) or "none"
    raise SplitError(
        f"{type(model).__name__} has blocks in {found}, expected one nn.ModuleList of equal blocks, "
        "or an encoder's and a decoder's"
    )


def _row(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """What a block is given beside the hidden state, which comes first."""
    if not args or not isinstance(args[0], torch.Tensor):
        raise SplitError("blocks are not given the hidden state as their first argument, expected it there")
    return pytree.tree_flatten((args[1:], dict(kwargs)))


def _spine(paths: Sequence[str]) -> list[str]:
    """The modules that lead to the rows, the model itself among them."""
    return list(
        dict.fromkeys(["", *(path[:end] for path in paths for end, letter in enumerate(path) if letter == ".")])
    )


def _watched(model: nn.Module, paths: Sequence[str], inputs: Inputs) -> list[_Row]:
    """Run it once and note what its blocks are given and return, and what is called around them."""
    blocks = [(path, index) for path in paths for index in range(len(list(model.get_submodule(path).children())))]
    entered: list[tuple[list[Any], Any]] = []
    returned: list[Any] = []
    called: list[tuple[int, str]] = []
    running: list[str] = []
    outputs: dict[str, Any] = {}
    hooks = []
    wrong = SplitError(f"{type(model).__name__} does not call its blocks one after the other, each once")

    def enter(number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if number != len(entered):
            raise wrong
        entered.append(_row(args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        returned.append(output)

    for number, (path, index) in enumerate(blocks):
        block = model.get_submodule(f"{path}.{index}")
        hooks.append(block.register_forward_pre_hook(_bound(enter, number), with_kwargs=True))
        hooks.append(block.register_forward_hook(leave))
    spine = _spine(paths)
    for name, module in model.named_modules(remove_duplicate=False):
        parent = name.rpartition(".")[0]
        if name and parent in spine and name not in spine and name not in paths:

            def note(module: nn.Module, args: Any, name: str = name, parent: str = parent) -> None:
                if running and running[-1] == parent:  # by this name: a module may have several
                    called.append((len(entered), name))

            hooks.append(module.register_forward_pre_hook(note))
    for name in spine:

        def begins(module: nn.Module, args: Any, name: str = name) -> None:
            running.append(name)

        def ends(module: nn.Module, args: Any, output: Any) -> None:
            running.pop()

        hooks.append(model.get_submodule(name).register_forward_pre_hook(begins))
        hooks.append(model.get_submodule(name).register_forward_hook(ends))
    for path in paths:

        def keep(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
            outputs[path] = output

        hooks.append(model.get_submodule(path.rpartition(".")[0]).register_forward_hook(keep))
    try:
        model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if len(entered) != len(blocks) or len(returned) != len(blocks):
        raise wrong
    found, begin = [], 0
    for path in paths:
        end = begin + sum(other == path for other, _ in blocks)
        sizes = {len(output) if isinstance(output, tuple) else 0 for output in returned[begin:end]}
        if len(sizes) != 1:
            raise wrong
        groups, templates, made = _groups([row for row, _ in entered[begin:end]], returned[begin:end])
        before = frozenset(name for moment, name in called if begin <= moment < end)
        after = list(dict.fromkeys(name for moment, name in called if moment == end))
        specs = [spec for _, spec in entered[begin:end]]
        row = _Row(path, templates, specs, groups, made, sizes.pop(), before, after, outputs[path])
        found.append(row)
        begin = end
    return found


def _bound(enter: Callable[..., None], number: int) -> Callable[..., None]:
    return lambda *given: enter(number, *given)


@dataclass(frozen=True)
class _Template:
    """What a block is given: tensors by the number of their group, anything else as it is."""

    row: list[Any]
    group_of: Mapping[int, int]
    """Place in the row -> group."""


def _groups(
    given: Sequence[Sequence[Any]], returned: Sequence[Any]
) -> tuple[list[tuple[int, int]], list[_Template], dict[int, tuple[int, int]]]:
    """Tensors that several blocks are given are one group; so are those that a block returns and later ones take."""
    found: dict[int, int] = {}
    first: list[tuple[int, int]] = []
    makers: dict[int, tuple[int, int]] = {}
    made: dict[int, tuple[int, int]] = {}
    templates = []
    for block, row in enumerate(given):
        group_of = {}
        for place, leaf in enumerate(row):
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in found:
                    found[id(leaf)] = len(first)
                    if id(leaf) in makers:
                        made[len(first)] = makers[id(leaf)]
                    first.append((block, place))
                group_of[place] = found[id(leaf)]
        templates.append(_Template([None if place in group_of else leaf for place, leaf in enumerate(row)], group_of))
        output = returned[block]
        for place, one in enumerate(output if isinstance(output, tuple) else ()):
            if place and isinstance(one, torch.Tensor):
                makers.setdefault(id(one), (block, place))
    return first, templates, made


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


class _Computed(nn.Module):
    """Stands for the module that holds a row of blocks: returns what they have computed."""

    def __init__(self, row: _Row) -> None:
        super().__init__()
        self._like: Any = row.output
        self.hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module does."""
        if isinstance(self._like, torch.Tensor):
            return self.hidden
        if isinstance(self._like, Mapping):
            kind: Any = type(self._like)
            return kind(last_hidden_state=self.hidden)
        return (self.hidden,)


class _Own(nn.Module):
    """A part of the model's own forward, in a copy of the model without what is computed elsewhere."""

    def __init__(self, model: nn.Module, rows: Sequence[_Row], done: int, called: Sequence[str]) -> None:
        """`done` rows are computed; of what leads to rows, only modules that are `called` are there."""
        super().__init__()
        skeleton = _copied(model)
        spine = _spine([row.path for row in rows])
        known = {name for row in rows for name in (*row.before, *row.after)}
        for name in spine[1:]:
            parent, _, leaf = name.rpartition(".")
            owner = skeleton.get_submodule(parent)
            owner._modules[leaf] = _copied(owner.get_submodule(leaf))
        for name in spine:
            part = skeleton.get_submodule(name)
            for leaf in list(part._modules):
                path = f"{name}.{leaf}" if name else leaf
                # What is called nowhere, but may be used, stays in the first part.
                goes = path not in called and (path in known or done > 0)
                if goes and path not in spine and all(row.path != path for row in rows):
                    part._modules[leaf] = nn.Identity()
        computed = []
        for row in rows[:done]:
            parent, _, leaf = row.owner.rpartition(".")
            computed.append(_Computed(row))
            skeleton.get_submodule(parent)._modules[leaf] = computed[-1]
        for row in rows[done + 1 :]:
            skeleton.get_submodule(row.owner)._modules[row.path.rpartition(".")[2]] = nn.Identity()
        # Not as parts: their parts are ours, so that they have the names that they have in the model.
        vars(self)["_computed"], vars(self)["_skeleton"] = computed, skeleton
        self._modules, self._parameters, self._buffers = skeleton._modules, skeleton._parameters, skeleton._buffers
        self.training = model.training

    def run(self, hidden: torch.Tensor | None, inputs: Inputs) -> Any:
        """The model's forward, where rows that are computed have given this hidden state."""
        skeleton: nn.Module = vars(self)["_skeleton"]
        skeleton.training = self.training
        for one in vars(self)["_computed"]:
            one.hidden = hidden
        try:
            return skeleton(**inputs)
        finally:
            for one in vars(self)["_computed"]:
                one.hidden = None


class _Before(_Own):
    """Up to the last block of a row, with nothing in the place of blocks and of what follows them."""

    def __init__(self, model: nn.Module, rows: Sequence[_Row], number: int, carries: Sequence[str]) -> None:
        row = rows[number]
        super().__init__(model, rows, number, sorted(row.before))
        self._noted: list[list[Any]] = []
        self._row, self._carries = row, carries
        self._is_first = number == 0
        skeleton: nn.Module = vars(self)["_skeleton"]
        blocks = list(model.get_submodule(row.path).children())
        noting = nn.ModuleList(_Noting(block, self._noted, len(blocks), row.is_tuple) for block in blocks)
        skeleton.get_submodule(row.owner)._modules[row.path.rpartition(".")[2]] = noting

    def forward(self, value: Any) -> dict[str, Any]:
        """The hidden state, and what blocks are given beside it; and inputs that are needed behind them."""
        inputs = value if self._is_first else value["inputs"]
        self._noted.clear()
        with suppress(_Reached):
            self.run(None if self._is_first else value["hidden"], inputs)
        rows = [row[1:] for row in self._noted]
        hidden = self._noted[0][0]
        self._noted.clear()
        for row, template in zip(rows, self._row.templates, strict=True):
            for place, leaf in enumerate(row):
                is_new = isinstance(leaf, torch.Tensor) and place not in template.group_of
                if is_new or (leaf is not None and place not in template.group_of and leaf != template.row[place]):
                    raise ValueError("blocks are given something that they were not when the model was split")
        given = [rows[block][place] for block, place in self._row.groups]
        carried = {"inputs": {name: inputs[name] for name in self._carries}} if self._carries else {}
        return {"hidden": hidden, "given": given} | carried


class _Rest(_Own):
    """What the model does behind its last row of blocks."""

    def __init__(self, model: nn.Module, rows: Sequence[_Row]) -> None:
        outside = [name for name in rows[-1].after if name not in rows[-1].inside]
        super().__init__(model, rows, len(rows), outside)

    def forward(self, value: Any) -> Any:
        """Logits."""
        hidden, inputs = (value["hidden"], value["inputs"]) if isinstance(value, dict) else (value, {})
        return self.run(hidden, inputs).logits


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
        row: _Row,
        index: int,
        needs_gradient: Sequence[bool],
        is_last: bool,
    ) -> None:
        super().__init__(name, part)
        self._template, self._spec, self._needs_gradient, self._is_last = (
            row.templates[index],
            row.specs[index],
            needs_gradient,
            is_last,
        )
        self._makes = {group: place for group, (maker, place) in row.made.items() if maker == index}

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
        carried = {"inputs": value["inputs"]} if "inputs" in value else {}
        if self._is_last:
            return {"hidden": hidden} | carried if carried else hidden
        passed = list(value["given"])
        for group, place in self._makes.items():
            passed[group] = output[place]
        return {"hidden": hidden, "given": passed} | carried


class _After(_Held):
    def forward(self, value: Any) -> Any:
        """Norm, head and the like."""
        if isinstance(value, dict):
            return value | {"hidden": self.part(value["hidden"])}
        return self.part(value)


def _named(kind: type[_Held], name: str, part: nn.Module, *more: Any) -> nn.Module:
    """A layer that is called in profiles what it holds."""
    layer: nn.Module = type(type(part).__name__, (kind,), {})(name, part, *more)
    return layer


# --- making sure ---------------------------------------------------------------------------------------------------


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Keys and values of earlier calls are for generating text."""
    found: list[Any] = [part.config for part in model.modules() if hasattr(part, "config")]
    configs = {id(config): (config, getattr(config, "use_cache", False)) for config in found}
    for config, _ in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config, before in configs.values():
            config.use_cache = before


def _padded(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The same with something padded, where there is a mask: Hugging Face leaves out masks that mask nothing."""
    found = dict(inputs)
    for name in found:
        if name.endswith("attention_mask"):
            found[name] = found[name].clone()
            found[name][0, -1] = 0
    return found


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
