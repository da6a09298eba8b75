"""Any ``nn.Module`` as a sequence of layers: cut where it calls submodules that are named, or that repeat.

The module's forward is traced (`torch.fx`), with every submodule that contains no cut as one call, so that dropout and
BatchNorm are what they were. The calls, in their order, then fall into layers, each of which begins with a cut:

    stem   block 0   block 1   cat, block 2   head          cuts: the blocks; and what follows the last of a row
    |----| |-------|--------|---------------|----|
       \\____________________/                               a skip: it travels in what the layers between hand on

What a layer hands on is everything that later ones need of it and of those before it: one tensor, or a tuple of them.
Each layer holds its parameters and buffers under the names that the module has for them. That the layers compute what
the module computes is made sure of, to the last bit, with inputs of two sizes.
"""

import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from gpipe_exec.engine.messages import flatten, unflatten
from gpipe_sim.base.files import did_you_mean


class SplitError(ValueError):
    """The module cannot be split there; the message says why, and what would help."""


class Split(nn.Sequential):
    """The layers of a module that was one; their states together are the module's, under its own names."""

    own_names = True
    """Whether a layer's parameters have the names of the whole model, rather than names behind the layer's number."""


def split(module: nn.Module, inputs: Any, cuts: Sequence[str] = ()) -> Split:
    """The module as layers, a new one at each call of these submodules; without them, at `repeated_blocks`.

    `inputs` are some samples: a tensor, a tuple of arguments, or a dict of them by name.
    """
    begins, ends = (list(cuts), []) if cuts else repeated_blocks(module)
    kind = type(module).__name__
    if not begins:
        raise SplitError(
            f"{kind} has no nn.ModuleList or nn.Sequential of equal blocks to cut at, "
            "expected names of submodules to cut before: return (module, sample, loss, [names])"
        )
    known = dict(module.named_modules())
    for name in begins:
        if name not in known or not name:
            raise SplitError(f"{kind} has no submodule {name!r} to cut before, {did_you_mean(name, list(known)[1:])}")
    graph = _traced(module, [*begins, *ends], inputs)
    called = {node.target for node in graph.find_nodes(op="call_module")}
    if missed := [name for name in begins if name not in called]:
        raise SplitError(f"the forward of {kind} does not call {missed[0]} itself, expected submodules that it calls")
    layers = Split(*_pieces(module, graph, begins, ends, inputs))
    keep_unused(module, layers)
    _refuse_difference(module, layers, inputs)
    return layers


def repeated_blocks(module: nn.Module) -> tuple[list[str], list[str]]:
    """Blocks of one class that follow each other in a list or a sequence, the outermost such; and the last of each."""
    begins: list[str] = []
    ends: list[str] = []
    for name, part in module.named_modules():
        children = [(f"{name}.{key}" if name else key, child) for key, child in part.named_children()]
        inside = any(name == begin or name.startswith(f"{begin}.") for begin in begins)
        alike = len(children) > 1 and len({type(child) for _, child in children}) == 1
        has_weights = all(next(child.parameters(), None) is not None for _, child in children)
        if isinstance(part, nn.ModuleList | nn.Sequential) and alike and has_weights and not inside:
            begins += [path for path, _ in children]
            ends.append(children[-1][0])
    return begins, ends


def call(module: nn.Module, inputs: Any) -> Any:
    """The module's output: tuples and lists are its arguments, dicts those by name."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients; afterwards each part is as it was."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, was_training in modes.items():
            part.training = was_training


# --- tracing -------------------------------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    def __init__(self, cuts: Sequence[str]) -> None:
        super().__init__()
        self._entered = {name[:end] for name in cuts for end, letter in enumerate(name) if letter == "."}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._entered


def _traced(module: nn.Module, cuts: Sequence[str], inputs: Any) -> fx.Graph:
    """The calls of the module's forward; arguments that are not given have their defaults."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    number = len(inputs) if isinstance(inputs, tuple | list) else 1
    given = set(inputs) if isinstance(inputs, Mapping) else {parameter.name for parameter in parameters[:number]}
    others = {p.name: p.default for p in parameters if p.name not in given and p.default is not p.empty}
    try:
        graph = _Tracer(cuts).trace(module, concrete_args=others)
    except Exception as error:  # whatever a forward does with what stands for its tensors
        raise SplitError(
            f"the forward of {type(module).__name__} cannot be traced: {error}. Expected one that decides nothing by "
            "the values of its tensors outside of the submodules that are cut at"
        ) from error
    for node in graph.find_nodes(op="placeholder"):
        if str(node.target).removesuffix("_1") in others:
            _erase(graph, node)  # and the trace's own check that the default was meant
    return graph


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


# --- cutting -------------------------------------------------------------------------------------------------------

_COMPUTES = ("call_module", "call_function", "call_method")


class _Watched(fx.Interpreter):
    """Runs a graph and notes which values are tensors."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.is_tensor: dict[fx.Node, bool] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.is_tensor[n] = isinstance(value, torch.Tensor)
        return value


@dataclass(frozen=True)
class _Cut:
    """A graph whose nodes belong to layers."""

    module: nn.Module
    graph: fx.Graph
    layer_of: Mapping[fx.Node, int]
    is_tensor: Mapping[fx.Node, bool]
    inputs: Any

    def sources(self, node: fx.Node, layer: int) -> Iterator[fx.Node]:
        """The tensors of earlier layers that a node needs in this layer, where what is no tensor, such as a size, is
        computed again from those that it came from."""
        for one in node.all_input_nodes:
            if one.op != "get_attr" and self.layer_of[one] != layer:
                if self.is_tensor[one]:
                    yield one
                else:
                    yield from self.sources(one, layer)

    def crossing(self) -> list[list[fx.Node]]:
        """After each layer but the last, the tensors that later ones need, in the order in which they were made."""
        needed: list[set[fx.Node]] = [set() for _ in range(max(self.layer_of.values()))]
        for node in self.graph.nodes:
            for source in self.sources(node, self.layer_of[node]):
                for boundary in range(self.layer_of[source], self.layer_of[node]):
                    needed[boundary].add(source)
        return [[node for node in self.graph.nodes if node in nodes] for nodes in needed]

    def layer(self, number: int, entering: Sequence[fx.Node] | None, leaving: Sequence[fx.Node] | None) -> nn.Module:
        """One layer; the first takes the module's inputs, and the last returns its output."""
        new, known = fx.Graph(), {}
        value = new.placeholder("value")

        def part(key: int | str) -> fx.Node:
            return new.call_function(operator.getitem, (value, key))

        if entering is not None:
            known = {node: value if len(entering) == 1 else part(place) for place, node in enumerate(entering)}
        else:
            for place, node in enumerate(self.graph.find_nodes(op="placeholder")):
                if isinstance(self.inputs, Mapping):
                    known[node] = part(str(node.target))
                else:
                    known[node] = part(place) if isinstance(self.inputs, tuple | list) else value

        def here(node: fx.Node) -> fx.Node:
            if node not in known:  # a parameter, or what is no tensor
                assert node.op == "get_attr" or not self.is_tensor[node], f"{node} is neither made here nor handed on"
                known[node] = new.node_copy(node, here)
            return known[node]

        mine = [node for node in self.graph.nodes if self.layer_of[node] == number and node.op in _COMPUTES]
        for node in mine:
            known[node] = new.node_copy(node, here)
        if leaving is None:
            (output,) = self.graph.find_nodes(op="output")
            new.output(fx.map_arg(output.args[0], here))
        else:
            new.output(here(leaving[0]) if len(leaving) == 1 else tuple(map(here, leaving)))
        named = [self.module.get_submodule(str(node.target)) for node in mine if node.op == "call_module"]
        return fx.GraphModule(self.module, new, class_name=type(named[0]).__name__ if named else "Between")


def _pieces(
    module: nn.Module, graph: fx.Graph, begins: Sequence[str], ends: Sequence[str], inputs: Any
) -> list[nn.Module]:
    watched = _Watched(module, graph)
    given = inputs if isinstance(inputs, tuple | list) else [inputs]
    if isinstance(inputs, Mapping):
        given = [inputs[str(node.target)] for node in graph.find_nodes(op="placeholder")]
    with evaluating(module):
        watched.run(*given)
    cut = _Cut(module, graph, _layers_of(graph, begins, ends), watched.is_tensor, inputs)
    crossing = cut.crossing()
    return [cut.layer(n, a, b) for n, (a, b) in enumerate(zip([None, *crossing], [*crossing, None], strict=True))]


def _layers_of(graph: fx.Graph, begins: Sequence[str], ends: Sequence[str]) -> dict[fx.Node, int]:
    """Node -> its layer: a new one begins at a cut, and with whatever follows the last block of a row."""
    found: dict[fx.Node, int] = {}
    number, is_empty, is_over = 0, True, False
    for node in graph.nodes:
        begins_here = node.op == "call_module" and node.target in begins
        if node.op in _COMPUTES:
            if (begins_here or is_over) and not is_empty:
                number += 1
            is_empty, is_over = False, node.op == "call_module" and node.target in ends
        found[node] = number
    return found


# --- making sure ---------------------------------------------------------------------------------------------------


def keep_unused(module: nn.Module, layers: Split) -> None:
    """What the forward does not use is a part of the state all the same: the last layer holds it."""
    held = {name.partition(".")[2] for name in layers.state_dict()}
    for name in module.state_dict():
        if name not in held:
            path, _, leaf = name.rpartition(".")
            owner: nn.Module = layers[-1]
            for part in filter(None, path.split(".")):
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            tensor = getattr(module.get_submodule(path), leaf)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor)


def _refuse_difference(module: nn.Module, layers: Split, inputs: Any) -> None:
    """Layers that compute something else, as where a forward has written down a size of the traced inputs."""
    tensors, nesting = flatten(inputs)
    for size in sorted({len(tensors[0]), 1}, reverse=True):
        some = unflatten(nesting, [tensor[:size] for tensor in tensors])
        with evaluating(module), evaluating(layers):
            (expected, form), (found, other) = flatten(call(module, some)), flatten(layers(some))
        if form != other or not all(map(torch.equal, expected, found)):
            raise SplitError(
                f"{type(module).__name__} does not compute the same in layers for {size} samples, expected a forward "
                "that keeps nothing between calls, and outside of the submodules that are cut at neither asks whether "
                "it is training nor writes down a size of its inputs"
            )
