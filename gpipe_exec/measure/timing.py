"""The times of layers, each by itself, in the setting in which a stage runs them.

Every rank runs its own layers at the same time as the others, because cores share caches and memory: a few
micro-batches forward, then backward in reverse, as a stage does.

    forward     |0|1|2|  |0|1|2|  |0|1|2|        a clock around each layer of each micro-batch
    backward                               |2|1|0|  |2|1|0|  |2|1|0|
    or split                               |2|1|0| |2|1|0|  |2|1|0| |2|1|0|  |2|1|0| |2|1|0|
                                              I       W        I       W        I       W

Ranks that share a core take turns on it. What a layer costs is then the core's time that it takes, its caches shared
with the others; how long it takes by the clock on the wall depends on who else is computing, which is for the
simulator to say. So the clock is the thread's own.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from gpipe_exec.devices.accelerator import Beside, Mark, beside
from gpipe_exec.engine.losses import mean_of
from gpipe_exec.engine.messages import Value, flatten, unflatten, wants_gradient
from gpipe_exec.engine.selective import watched_attention
from gpipe_exec.engine.split import Halves
from gpipe_exec.layers import Workload

T = TypeVar("T")
Seconds = dict[int, tuple[float, float]]
"""Layer -> seconds of two things."""
Span = tuple[Mark, Mark]

IN_A_ROW = 4
"""Micro-batches that go forward before the first goes backward, if there are as many."""


class LayerClock:
    """Tells what layers cost here. A device beside the host is told to note moments, and asked for them later, all at
    once: small layers are not waited for one by one."""

    def __init__(self, device: torch.device | Beside, *, shares_core: bool = False) -> None:
        self._device = beside(device) if isinstance(device, torch.device) else device
        self._now = time.thread_time if shares_core else time.perf_counter

    def now(self) -> Mark:
        """This moment."""
        return self._now() if self._device is None else self._device.mark()

    def seconds(self, spans: Sequence[tuple[Mark, Mark]]) -> list[float]:
        """From one moment to the other, of each pair; the device is waited for, once."""
        if self._device is not None:
            self._device.synchronize()
            return [self._device.elapsed_s(begin, end) for begin, end in spans]
        return [end - begin for begin, end in spans if isinstance(begin, float) and isinstance(end, float)]


class LayerTimer:
    """Times one rank's layers at one micro-batch size, as often as it is asked to; all ranks together.

    They come in shares: neighbouring layers, through which micro-batches go as through a stage.
    """

    def __init__(
        self,
        workload: Workload,
        shares: Sequence[range],
        size: int,
        num_microbatches: int,
        device: torch.device,
        clock: LayerClock,
        lowered: torch.dtype | None = None,
        boundaries: Sequence[Value] | None = None,
    ) -> None:
        """What shares take, if it is not given, has the form that the layers before them make; in mixed precision their
        weights are `lowered`."""
        self._workload, self._clock = workload, clock
        self.in_a_row = max(1, min(IN_A_ROW, num_microbatches))
        inputs, targets = workload.sample(size)
        if boundaries is None:
            boundaries = boundaries_of(workload.layers, shares, inputs, lowered, 1)
        boundaries = [on_device(value, device) for value in boundaries]
        self._shares = list(zip(shares, boundaries, strict=True))
        self._targets = on_device(targets, device)
        self.passes: list[Seconds] = []
        """Of each micro-batch timed, layer -> seconds of its forward and backward."""
        self.halves: list[Seconds] = []
        """The same of the halves of a split backward."""
        self.attention: list[Seconds] = []
        """Layers that say what attention is -> seconds of it in a forward, twice."""
        self._splits_next = True

    def clear(self) -> None:
        """Forget what was timed so far."""
        self.passes, self.halves, self.attention, self._splits_next = [], [], [], True

    def measure(self) -> None:
        """`in_a_row` micro-batches forward, then backward. Gradients are left on the layers.

        Every other time as many again with split backwards: the halves are timed in turns with the whole, half as
        often.
        """
        given = self._targets, self.in_a_row, self._clock
        dist.barrier()
        for share, boundary in self._shares:
            passes, attention = _timed_passes(self._workload, share, boundary, *given)
            self.passes, self.attention = self.passes + passes, self.attention + attention
        if self._splits_next:
            dist.barrier()
            for share, boundary in self._shares:
                self.halves += _timed_halves(self._workload, share, boundary, *given)
        self._splits_next = not self._splits_next

    def columns(self) -> dict[str, list[float]]:
        """By layer, over all ranks: medians over what was timed, layers that are built alike taken together."""
        names = alike(list(self._workload.layers))
        apart = ["the first", *names[1:]]  # it has no gradient of its input to make
        return columns_of(self.passes, self.halves, self.attention, names, apart)


def columns_of(
    passes: list[Seconds],
    halves: list[Seconds],
    attention: list[Seconds],
    names: Sequence[str],
    names_of_halves: Sequence[str],
) -> dict[str, list[float]]:
    """By layer, over all ranks: medians over what was timed, layers of one name taken together; of attention only where
    a layer has some."""
    whole, split, again = _pooled(passes, names), _pooled(halves, names_of_halves), _pooled(attention, names)
    medians = {
        "forward_s": [pair[0] for pair in _medians(whole, names)],
        "backward_s": [pair[1] for pair in _medians(whole, names)],
        "backward_inputs_s": [pair[0] for pair in _medians(split, names_of_halves)],
        "backward_weights_s": [pair[1] for pair in _medians(split, names_of_halves)],
    }
    if any(again.values()):
        without = {name: [(0.0, 0.0)] for name in names}
        medians["attention_s"] = [pair[0] for pair in _medians(without | again, names)]
    return medians | {"spread": [_relative_spread([sum(pair) for pair in whole[name]]) for name in names]}


def _pooled(mine: list[Seconds], names: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    pooled: dict[str, list[tuple[float, float]]] = {}
    for one in (one for rank in from_all_ranks(mine) for one in rank):
        for index, pair in one.items():
            pooled.setdefault(names[index], []).append(pair)
    return pooled


def _medians(pooled: dict[str, list[tuple[float, float]]], names: Sequence[str]) -> list[tuple[float, float]]:
    found = {name: zip(*pairs, strict=True) for name, pairs in pooled.items()}
    medians = {name: (statistics.median(a), statistics.median(b)) for name, (a, b) in found.items()}
    return [medians[name] for name in names]


def alike(layers: Sequence[nn.Module]) -> list[str]:
    """What tells layers apart that cost differently: how they are built."""
    return [repr(layer) + str([tuple(p.shape) for p in layer.parameters()]) for layer in layers]


def _timed_passes(
    workload: Workload, share: range, boundary: Value, targets: Any, count: int, clock: LayerClock
) -> tuple[list[Seconds], list[Seconds]]:
    """Of each micro-batch, layer -> seconds of its forward and backward, the loss counted with the last layer; and of
    attention in the forward, for layers that say what it is of them."""
    last = len(workload.layers) - 1
    forward: list[dict[int, Span]] = []
    inside: list[dict[int, list[Span]]] = []
    graphs: list[list[tuple[int, Value, Value]]] = []
    for _ in range(count):
        value = boundary
        forward.append({})
        inside.append({})
        graphs.append([])
        for index in share:
            leaves = leaves_of(value, first=index == 0)
            begin = clock.now()
            with watched_attention(recomputes=False, now=clock.now) as watched:
                output = workload.layers[index](leaves)
            if watched.spans:
                inside[-1][index] = watched.spans
            if index == last:
                output = mean_of(workload.loss(output, targets))
            forward[-1][index] = begin, clock.now()
            graphs[-1].append((index, leaves, output))
            value = output
    found: list[dict[int, tuple[Span, Span]]] = []
    for spans, graph in zip(reversed(forward), reversed(graphs), strict=True):
        found.append({})
        gradients = [torch.ones_like(t) for t in flatten(graph[-1][2])[0] if wants_gradient(t)]
        while graph:
            index, leaves, output = graph.pop()
            outputs = [t for t in flatten(output)[0] if wants_gradient(t)]
            pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
            begin = clock.now()
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            found[-1][index] = spans[index], (begin, clock.now())
            gradients = [
                t.grad if t.grad is not None else torch.zeros_like(t) for t in flatten(leaves)[0] if wants_gradient(t)
            ]
            del output, outputs, pairs
    attention = [{index: sum(clock.seconds(spans)) for index, spans in one.items()} for one in inside]
    return _read(found, clock), [{index: (seconds, seconds) for index, seconds in one.items()} for one in attention]


def _read(found: list[dict[int, tuple[Span, Span]]], clock: LayerClock) -> list[Seconds]:
    """The seconds of all spans, asked for at once."""
    seconds = iter(clock.seconds([span for one in found for pair in one.values() for span in pair]))
    return [{index: (next(seconds), next(seconds)) for index in one} for one in found]


def _timed_halves(
    workload: Workload, share: range, boundary: Value, targets: Any, count: int, clock: LayerClock
) -> list[Seconds]:
    """Of each micro-batch, layer -> seconds of the two halves of its backward."""
    last = len(workload.layers) - 1
    graphs: list[list[tuple[int, Halves]]] = []
    for _ in range(count):
        value = boundary
        graphs.append([])
        for index in share:
            halves, given = _start_halves(value, first=index == 0)
            with halves.recording():
                output = workload.layers[index](given)
                if index == last:
                    output = mean_of(workload.loss(output, targets))
            halves.end(flatten(output)[0])
            graphs[-1].append((index, halves))
            value = output
    found: list[dict[int, tuple[Span, Span]]] = []
    for graph in reversed(graphs):
        gradients = [torch.ones_like(t) for t in flatten(value)[0] if wants_gradient(t)]
        inputs: dict[int, Span] = {}
        for index, halves in reversed(graph):
            begin = clock.now()
            gradients = halves.backward_inputs(gradients)
            inputs[index] = begin, clock.now()
        found.append({})
        while graph:
            index, halves = graph.pop()
            begin = clock.now()
            halves.backward_weights()
            found[-1][index] = inputs[index], (begin, clock.now())
    return _read(found, clock)


def _start_halves(value: Value, *, first: bool) -> tuple[Halves, Value]:
    """The value as the start of a graph whose backward is split."""
    tensors, nesting = flatten(value)
    halves = Halves(tensors, first=first)
    return halves, unflatten(nesting, halves.inputs)


def leaves_of(value: Value, *, first: bool) -> Value:
    """The value as the start of a graph: detached, and wanting gradients unless it is the model's own input."""
    tensors, nesting = flatten(value)
    return unflatten(nesting, [t.detach().requires_grad_(wants_gradient(t) and not first) for t in tensors])


def forms_before(layers: nn.Sequential, inputs: Value, lowered: torch.dtype | None = None) -> list[Value]:
    """What each layer takes: the inputs, and then values on the meta device, which have a form only.

    Nothing but shapes passes the layers, which need not be there; where a model cannot tell its shapes without values,
    values do. In mixed precision weights are `lowered`.
    """
    return [inputs, *_passing(layers, inputs, lowered)[1:]]


def _passing(layers: nn.Sequential, inputs: Value, lowered: torch.dtype | None) -> list[Value]:
    """The same, with inputs of the same kind: what layers hand on is the same tensor in all of them."""
    found = [on_device(inputs, torch.device("meta"))]
    try:
        for layer in list(layers)[:-1]:
            found.append(form_after(layer, found[-1], lowered))
    except (RuntimeError, NotImplementedError, TypeError):
        found = [inputs]
        for layer in list(layers)[:-1]:
            found.append(_where_it_is(layer, found[-1]))
    return found


def skips_of(layers: nn.Sequential, inputs: Value, lowered: torch.dtype | None = None) -> list[tuple[int, int, int]]:
    """What layers hand on to later ones: made, used and bytes, as `Skip` has them."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    sizes: dict[int, int] = {}
    values = _passing(layers, inputs, lowered)
    for layer, taken in enumerate(values):
        for tensor in flatten(taken)[0]:
            storage = tensor.untyped_storage()
            # What has no values has no address but the storage's own, which lives as long as `values` do.
            key = storage._cdata
            sizes[key] = storage.nbytes()
            first.setdefault(key, layer - 1)
            last[key] = layer
    return sorted((made, last[key], sizes[key]) for key, made in first.items() if last[key] > made + 1)


def form_after(layer: nn.Module, value: Value, lowered: torch.dtype | None = None) -> Value:
    """What a layer makes of a value on the meta device, there."""
    state = {
        name: tensor.to("meta", lowered if tensor.is_floating_point() else None)
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]
    }
    with torch.no_grad():
        output: Value = torch.func.functional_call(layer, state, (value,))
    flatten(output)  # which can be sent
    return output


def _where_it_is(layer: nn.Module, value: Value) -> Value:
    where = next((parameter.device for parameter in layer.parameters()), None)
    with torch.no_grad():
        return layer(on_device(value, where) if where else value)


def boundaries_of(
    layers: nn.Sequential, shares: Sequence[range], inputs: Value, lowered: torch.dtype | None, parts: int
) -> list[Value]:
    """What shares of layers take; of a tensor group's members each its part of the sequence. The layers are whole."""
    forms = forms_before(layers, inputs, lowered)
    found = []
    for share in shares:
        tensors, nesting = flatten(forms[share.start])
        own = [tensor.chunk(parts, 1)[0] for tensor in tensors] if parts > 1 else tensors
        found.append(forms[0] if share.start == 0 else filled(unflatten(nesting, own)))
    return found


def filled(value: Value) -> Value:
    """The same form with values in host memory, if it has none: random numbers, and zeros where they are whole."""
    tensors, nesting = flatten(value)
    generator = torch.Generator().manual_seed(0)
    made = [
        tensor
        if not tensor.is_meta
        else torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        if wants_gradient(tensor)
        else torch.zeros(tensor.shape, dtype=tensor.dtype)
        for tensor in tensors
    ]
    return unflatten(nesting, made)


def on_device(value: Value, device: torch.device) -> Value:
    """The same tensors there."""
    tensors, nesting = flatten(value)
    return unflatten(nesting, [tensor.to(device) for tensor in tensors])


def from_all_ranks(mine: T) -> list[T]:
    """Every rank's."""
    gathered: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return [one for one in gathered if one is not None]


def _relative_spread(seconds: list[float]) -> float:
    lower, middle, upper = np.percentile(seconds, [25, 50, 75])
    return float((upper - lower) / middle) if middle > 0 else 0.0
