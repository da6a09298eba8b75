"""A backward in two halves: I, the gradients of a stage's inputs, and W, those of its weights, any time later.

    forward      start ---> linear ---> gelu ---> linear ---> output
                              ^ weight              ^ weight

    I            start <--- linear <--- gelu <--- linear <--- gradients of the output
                              | noted               | noted            the gradients that arrive there

    W                       linear ---> weight    linear ---> weight   each from what was noted; no chain again

The operations where the ways to the inputs and to the weights part are the *owners* of those weights. I runs the chain
and notes what arrives at each owner; W runs each owner again, for its weights only. Autograd computes of each operation
only the gradients that it is asked for, so nothing is computed twice.

What happens in I although it belongs to weights, because it would be wrong or a waste in W:

    two owners      The way from one to a weight may lead through the other, so that W would count it twice.
    one dimension   Gains and biases of norms take little time; waiting for W would keep what they saved.
    python          An `autograd.Function` computes all of its gradients whenever it runs, so it runs once.

A module whose inputs want no gradients has nothing to do in I: all of its backward is W. So it is with the first layer
of a model. A stage splits each of its layers by itself: the engine of autograd looks at all that an operation leads to
whenever it runs, so that many small graphs are faster than a large one.

What is held between the two: of the owners, the tensors that they saved and the gradients noted. What every other
operation saved is let go while I runs, as soon as the next owner is reached. So that it can be, saved tensors are held
in slots that can be emptied, and the graph begins at an operation, not at a leaf, which would hold the input.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from gpipe_exec.engine.messages import wants_gradient

_Gradients = tuple[torch.Tensor | None, ...]

_recording: ContextVar["Halves | None"] = ContextVar("recording", default=None)


def recording() -> "Halves | None":
    """The forward that is under way and whose backward will be split, if there is one."""
    return _recording.get()


class Halves:
    """One forward whose backward is split.

    >>> halves = Halves([x], first=False)
    >>> with halves.recording():
    ...     output = module(*halves.inputs)
    >>> halves.end([output])
    >>> halves.backward_inputs([gradient])  # the gradient of x
    >>> halves.backward_weights()  # adds to the parameters' gradients
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, first: bool) -> None:
        """Begin a graph with these tensors; the model's own inputs (`first`) want no gradients, nor do integers."""
        self._like = [(t.shape, t.dtype, t.device) for t in tensors if wants_gradient(t) and not first]
        self._start: Node | None = None
        self._unpacked: list[_Slot] = []
        """What has been taken out of its slot since the last owner."""
        self._ends: list[GradientEdge | None] = []
        self._roots: list[_Root] = []
        self._rooted: list[torch.Tensor] | None = None
        self._owners: list[_Owner] = []
        tensors = [tensor.detach() for tensor in tensors]
        self.inputs = tensors if first else self.start(tensors)
        """What stands for the tensors in the forward. The graph itself does not hold them."""

    def start(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Begin the chain here: what stands for these tensors from now on."""
        chosen = [tensor for tensor in tensors if wants_gradient(tensor)]
        if not chosen:
            return list(tensors)
        started = _Start.apply(torch.empty(0, requires_grad=True), *chosen)  # type: ignore[no-untyped-call]
        self._start = started[0].grad_fn
        rest = iter(started)
        return [next(rest) if wants_gradient(tensor) else tensor for tensor in tensors]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the forward: what it saves can be let go piece by piece."""
        token = _recording.set(self)
        try:
            with saved_tensors_hooks(_Slot, partial(_unpack, self._unpacked)):
                yield
        finally:
            _recording.reset(token)
            self.inputs = []

    def end(self, outputs: Sequence[torch.Tensor]) -> None:
        """What the forward has made. The outputs themselves are not held."""
        wanting = [tensor for tensor in outputs if wants_gradient(tensor)]
        self._ends = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in wanting]

    def backward_inputs(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """I: the gradients of those inputs that want one, given those of the outputs that want one."""
        ends = zip(self._ends, gradients, strict=True)
        roots = [_Root(edge, gradient) for edge, gradient in ends if edge is not None]
        self._ends = []
        if self._start is None:
            self._roots = roots
            return []
        parts = _divide([root.edge.node for root in roots], self._start)
        self._roots = [root for root in roots if root.edge.node in parts.waiting]
        self._rooted = parts.rooted
        arrived: list[_Gradients] = []
        self._start.register_prehook(arrived.append)
        for owner in parts.owners:
            owner.node.register_prehook(partial(_note, owner.arrived, self._unpacked))
            owner.node.register_hook(partial(_keep, self._unpacked))
        if parts.now:
            _run([root for root in roots if root.edge.node not in parts.waiting], parts.now, keep=True)
        _let_go(self._unpacked)
        self._owners = [owner for owner in parts.owners if owner.arrived]
        self._start = None
        found = arrived.pop() if arrived else (None,) * len(self._like)
        return [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(found, self._like, strict=False)  # more if a layer has started
        ]

    def backward_weights(self) -> None:
        """W: add to the gradients of the weights, those of the last operations first, each let go when it is done."""
        if self._roots:
            _run(self._roots, self._rooted)
        self._roots, self._rooted = [], []
        self._owners.reverse()
        while self._owners:
            owner = self._owners.pop()
            (gradients,) = owner.arrived
            given = [(nr, gradient) for nr, gradient in enumerate(gradients) if gradient is not None]
            _run([_Root(GradientEdge(owner.node, nr), gradient) for nr, gradient in given], owner.leaves)
        self._unpacked.clear()


class _Root(NamedTuple):
    """Where a gradient enters the graph."""

    edge: GradientEdge
    gradient: torch.Tensor


def _run(roots: Sequence[_Root], leaves: Sequence[torch.Tensor] | None, *, keep: bool = False) -> None:
    """Add to the gradients of these leaves, or of all."""
    edges, gradients = [root.edge for root in roots], [root.gradient for root in roots]
    torch.autograd.backward(edges, gradients, retain_graph=keep, inputs=leaves)


class _Start(torch.autograd.Function):
    """Where a chain begins: passes tensors on, and holds none of them."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        return (None,) * (1 + len(gradients))


# --- saved tensors, and the gradients that arrive --------------------------------------------------------------------

# The functions below are hooks. A graph holds its hooks, so they hold lists, and nothing that holds the graph.


class _Slot:
    """Holds a saved tensor until it is let go."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = tensor._version


def _unpack(unpacked: list[_Slot], slot: _Slot) -> torch.Tensor:
    if slot.tensor is None:
        raise RuntimeError("the backward of an operation ran a second time, after what it saved was let go")
    if slot.tensor._version != slot.version:
        raise RuntimeError("a tensor that the backward needs has been modified by an inplace operation")
    unpacked.append(slot)
    return slot.tensor


def _let_go(unpacked: list[_Slot]) -> None:
    for slot in unpacked:
        slot.tensor = None
    unpacked.clear()


def _note(arrived: list[_Gradients], unpacked: list[_Slot], gradients: _Gradients) -> _Gradients | None:
    """Before an owner runs: what others have unpacked is no longer needed.

    In W the gradients are those of I: hooks on the operation's outputs have changed them once, and do so again.
    """
    if arrived:
        return arrived[0]
    _let_go(unpacked)
    arrived.append(gradients)
    return None


def _keep(unpacked: list[_Slot], of_inputs: _Gradients, of_outputs: _Gradients) -> None:
    """After an owner has run: what it has unpacked in I it will need again."""
    unpacked.clear()


# --- which weights wait for W ----------------------------------------------------------------------------------------


class _Owner(NamedTuple):
    """An operation to run again in W, for these leaves."""

    node: Node
    leaves: list[torch.Tensor]
    arrived: list[_Gradients]


class _Parts(NamedTuple):
    """The leaves of a graph, by when their gradients are made."""

    now: list[torch.Tensor]
    """In I; the anchor of the start, which makes I run up to it, is among them."""
    owners: list[_Owner]
    """In W, from owners, those nearest to the outputs first."""
    rooted: list[torch.Tensor]
    """In W, straight from the outputs, which have them in common with nothing in I."""
    waiting: set[Node]
    """The outputs that belong to these."""


def _divide(roots: Sequence[Node], start: Node) -> _Parts:
    """Find the owners of all leaves.

    root ---> a ---> b ---> start        the chain: everything that leads to the start
              |      |
              p      q---.               beside it: all that is connected there is a family, which
              |      |   |               is owned by those of the chain that lead into it
            leaf   leaf leaf
    """
    children = _walk(roots)
    if any(isinstance(node, type(start)) and node is not start for node in children):
        raise RuntimeError("a layer uses a value of an earlier one that is not among its inputs: it cannot be split")
    chain: set[Node] = set()
    family: dict[Node, Node] = {}
    for node, below in children.items():
        if node is start or not chain.isdisjoint(below):
            chain.add(node)
            continue
        family[node] = node
        for child in below:
            family[_head(family, child)] = node
    owners: dict[Node, set[Node | None]] = {}
    for node in chain:
        for child in children[node]:
            if child not in chain:
                owners.setdefault(_head(family, child), set()).add(node)
    for node in roots:
        if node not in chain:
            owners.setdefault(_head(family, node), set()).add(None)
    now: list[torch.Tensor] = []
    rooted: list[torch.Tensor] = []
    owned: dict[Node, list[torch.Tensor]] = {}
    for node in family:
        if children[node] or not hasattr(node, "variable"):
            continue
        (owner, *others) = owners[_head(family, node)]
        if others or isinstance(owner, BackwardCFunction):
            now.append(node.variable)
        elif owner is None:
            rooted.append(node.variable)
        else:
            owned.setdefault(owner, []).append(node.variable)
    found = []
    for node in reversed(children):
        leaves = owned.get(node, [])
        if any(leaf.dim() > 1 for leaf in leaves):
            found.append(_Owner(node, leaves, []))
        else:
            now += leaves
    waiting = {node for node in roots if node not in chain and owners[_head(family, node)] == {None}}
    return _Parts(now, found, rooted, waiting)


def _walk(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """All nodes that the roots lead to, each after those that it leads to, with these."""
    found: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    stack: list[tuple[Node, list[Node] | None]] = [(node, None) for node in roots]
    while stack:
        node, below = stack.pop()
        if below is not None:
            found[node] = below
        elif node not in seen:
            seen.add(node)
            below = [child for child, _ in node.next_functions if child is not None]
            stack.append((node, below))
            stack += [(child, None) for child in below if child not in seen]
    return found


def _head(family: dict[Node, Node], node: Node) -> Node:
    while family[node] is not node:
        node = family[node]
    return node
