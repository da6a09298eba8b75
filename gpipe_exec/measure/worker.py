"""One rank's part in measuring a profile, started by torchrun.

    python -m torch.distributed.run ... -m gpipe_exec.measure.worker WORK_DIR      started by `profiler.measure_profile`

Every rank, pinned to its core, runs its share of the layers as a stage would run its part (`timing`), and the allocator
tells what each layer holds. Between neighbouring ranks the link is probed (`probe`), and a pipeline that does nothing
but keep its cores busy tells what the engine itself costs.

Or layers are measured one by one: of a model that is larger than its device one layer at a time is there.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpipe_exec.devices.accelerator import local_device
from gpipe_exec.devices.allocator import Part, bytes_of_parts, peak_bytes, peak_of_second, storage_bytes, storage_of
from gpipe_exec.devices.autopsy import answer_where, beat, fail
from gpipe_exec.devices.environment import find_own_models
from gpipe_exec.devices.groups import start_processes
from gpipe_exec.devices.process import die_with_parent, leave
from gpipe_exec.engine.losses import mean_of
from gpipe_exec.engine.materialize import dematerialize, materialize
from gpipe_exec.engine.messages import Value, flatten, form_of, unflatten, wants_gradient
from gpipe_exec.engine.optimizers import make_optimizer
from gpipe_exec.engine.pipeline import pin_to_cores
from gpipe_exec.engine.precision import (
    DTYPES,
    adds_in_fp32,
    computes_with_copies,
    forget_gradients,
    gradient_bytes,
    lower,
)
from gpipe_exec.engine.selective import watched_attention
from gpipe_exec.engine.slices import Slices, divided_loss, whole_loss
from gpipe_exec.engine.split import Halves
from gpipe_exec.layers import Workload, build_workload, parameter_bytes
from gpipe_exec.measure.calibrate import Overheads, calibrate
from gpipe_exec.measure.timing import (
    LayerClock,
    LayerTimer,
    Seconds,
    Span,
    alike,
    boundaries_of,
    columns_of,
    filled,
    forms_before,
    from_all_ranks,
    leaves_of,
    on_device,
    skips_of,
)
from gpipe_exec.probe import measure_link
from gpipe_sim.base.files import parse_yaml, write_text
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.scenario.schema import Scenario

REPEATS, WARMUP = 9, 2
_HIDDEN = Overheads(0.0, 0.0)
"""On a GPU: the host runs ahead of the device, which hides what the engine does."""
WARMUP_S, MEASURED_S = 0.8, 1.0
"""At least so long for each size: a core that was idle, and memory that was never touched, are slow at first."""


def main() -> None:
    """One rank's part of the measurement; a failure is written down before it is raised."""
    die_with_parent()
    find_own_models()
    work, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    answer_where(work, rank)
    try:
        _measure(work, alive=partial(beat, work, rank))
    except BaseException:
        fail(work, rank)
    dist.destroy_process_group()
    leave()


def _measure(work: Path, alive: Callable[[], None]) -> None:
    """What is measured of each size is written by rank 0; `alive` is called every now and then."""
    request = json.loads((work / "request.json").read_text())
    device = local_device(request["device"])
    shares_core = device.type == "cpu" and pin_to_cores()
    clock = LayerClock(device, shares_core=shares_core)
    start_processes(device, timedelta(seconds=300))
    document = parse_yaml("{}", request["file"])
    document.data = request["scenario"]
    (scenario,) = parse_scenario(document)
    one_by_one = bool(request["one_by_one"])
    workload = build_workload(scenario, on_meta=one_by_one)
    mixed = computes_with_copies(scenario.dtype, scenario.precision)
    lowered = DTYPES[scenario.dtype] if mixed else None
    in_fp32 = adds_in_fp32(scenario.dtype, scenario.precision)
    if not one_by_one:
        workload.layers.to(device)
        if lowered is not None:
            lower(workload.layers, lowered, in_fp32=in_fp32)
    T = scenario.plan.tensor
    whole = build_workload(scenario, on_meta=True).layers if T > 1 else workload.layers
    if T > 1:
        workload = divided(workload, T, device, sequence=scenario.plan.sequence_split)
    parts = T if scenario.plan.sequence_split else 1
    is_first = dist.get_rank() == 0
    largest_bytes = 0.0
    for size in request["sizes"]:
        path = work / f"size{size}.json"
        if _agree(path.is_file()):
            columns = json.loads(path.read_text())
        else:
            given = size, scenario.batch // size, device, clock, lowered, alive
            with divided_loss(T):
                if one_by_one:
                    columns = _measure_one_by_one(workload, *given, in_fp32=in_fp32)
                else:
                    columns = _measure_size(workload, *given, whole, T, parts)
            if is_first:
                skips = skips_of(whole, workload.sample(size)[0], lowered)
                write_text(path, json.dumps(columns | {"skips": skips}))
        largest_bytes = max(largest_bytes, *columns["output_bytes"])
    # Ranks that share a core and keep it busy would wait for each other: that is not the engine's time.
    link = measure_link(device, largest_bytes)
    alive()
    overheads = calibrate(link, asleep=shares_core) if device.type == "cpu" else _HIDDEN
    alive()
    extras = _measure_extras(workload, scenario, device, clock) | {
        "names": [f"{index}:{type(layer).__name__}" for index, layer in enumerate(whole)],
        "link": link and {"bandwidth": link.bandwidth, "latency": link.latency},
        "overheads": list(overheads),
    }
    extras["environment"]["clock"] = (
        "of the device" if device.type != "cpu" else "of the core, which ranks share" if shares_core else "on the wall"
    )
    extras["environment"]["layers"] = "one by one" if one_by_one else "all of them, shared by the ranks"
    if is_first:
        write_text(work / "extras.json", json.dumps(extras))
    dist.barrier()


def _agree(flag: bool) -> bool:
    """Rank 0's answer, everywhere."""
    told = torch.tensor([int(flag)])
    dist.broadcast(told, src=0)
    return bool(told)


def _measure_size(
    workload: Workload,
    size: int,
    num_microbatches: int,
    device: torch.device,
    clock: LayerClock,
    lowered: torch.dtype | None,
    alive: Callable[[], None],
    whole: nn.Sequential,
    num_members: int,
    parts: int,
) -> dict[str, list[float]]:
    """All layers are on the device; each rank, or tensor group of so many members, times its share of them, as a stage
    runs its part. Of a group's, `whole` are the layers before they were divided, and each takes one of so many `parts`
    of a sequence."""
    share = [_share(len(workload.layers), num_members)]
    boundaries = boundaries_of(whole, share, workload.sample(size)[0], lowered, parts)
    timer = LayerTimer(workload, share, size, num_microbatches, device, clock, lowered, boundaries)
    _time(timer, alive)
    columns = timer.columns()
    if num_members == 1:
        columns |= memory_of_layers(workload, size, device, alive)
    else:
        columns |= _least([memory_of_layers(workload, size, device, alive) for _ in range(2)])
    if num_members > 1 and device.type == "cpu":
        columns["tensor_s"] = _seconds_of_collectives(workload, size, device)
    forget_gradients(workload.layers)
    return columns


def _measure_one_by_one(
    workload: Workload,
    size: int,
    num_microbatches: int,
    device: torch.device,
    clock: LayerClock,
    lowered: torch.dtype | None,
    alive: Callable[[], None],
    *,
    in_fp32: bool = False,
) -> dict[str, list[float]]:
    """The same of a model that may be larger than the device: one layer at a time is there.

    Of layers that are equal in structure, shapes and what they take, one is measured for all. Every rank measures all
    of these. A layer that is alone finds its weights in a cache that is larger than it, so that small ones come out
    faster than in a stage: up to a quarter for blocks of a small transformer on a CPU. Bytes are the same.
    """
    inputs, targets = workload.sample(size)
    targets = on_device(targets, device)
    forms = forms_before(workload.layers, inputs, lowered)
    kinds = kinds_of_layers(workload.layers, forms)
    passes: list[Seconds] = []
    halves: list[Seconds] = []
    attention: list[Seconds] = []
    memory: dict[str, dict[str, float]] = {}
    for index in (kinds.index(kind) for kind in dict.fromkeys(kinds)):
        with on_device_alone(workload.layers, index, device, lowered, in_fp32=in_fp32):
            boundary = on_device(inputs if index == 0 else filled(forms[index]), device)
            timer = LayerTimer(
                workload, [range(index, index + 1)], size, num_microbatches, device, clock, boundaries=[boundary]
            )
            _time(timer, alive)
            passes, halves, attention = passes + timer.passes, halves + timer.halves, attention + timer.attention
            memory[kinds[index]], _ = memory_of_layer(workload, index, boundary, targets, device)
            del timer, boundary
    columns = columns_of(passes, halves, attention, kinds, kinds)
    return columns | {name: [memory[kind][name] for kind in kinds] for name in memory[kinds[0]]}


def kinds_of_layers(layers: nn.Sequential, forms: Sequence[Value]) -> list[str]:
    """Equal where layers cost the same: built alike, and given alike. The first makes no gradient of its input, and the
    last the loss."""
    last = len(layers) - 1
    ends = [("the first " if index == 0 else "") + ("the last " if index == last else "") for index in range(last + 1)]
    return [end + built + str(form_of(form)) for end, built, form in zip(ends, alike(list(layers)), forms, strict=True)]


@contextmanager
def on_device_alone(
    layers: nn.Sequential, index: int, device: torch.device, lowered: torch.dtype | None, *, in_fp32: bool = False
) -> Iterator[None]:
    """Meanwhile the layer is on the device; before and after, it is where it was built."""
    is_new = materialize(layers, [str(number) for number in range(len(layers))], [index], device)
    before = next((p.device for p in layers[index].parameters()), device)
    held = {name: (tensor, tensor.data) for name, tensor in layers[index].named_parameters()}
    layers[index].to(device)
    if lowered is not None:
        lower(layers[index], lowered, in_fp32=in_fp32)
    try:
        yield
    finally:
        forget_gradients(layers[index])
        for tensor, data in held.values():
            tensor.data = data
        if is_new:
            dematerialize(layers, [index])
        else:
            layers[index].to(before)


def _time(timer: LayerTimer, alive: Callable[[], None]) -> None:
    for seconds, repeats in ((WARMUP_S, 2), (MEASURED_S, -(-REPEATS // timer.in_a_row))):
        timer.clear()  # what was measured while warming up
        began = time.perf_counter()
        while len(timer.passes) < repeats * timer.in_a_row or _agree(time.perf_counter() - began < seconds):
            timer.measure()
            alive()


def _least(mine: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Of what all members have found, several times, the least: what a collective was given may be let go of a little
    after it has ended. Of what attention keeps, which is the difference of two, the middle."""
    found = [one for of_rank in from_all_ranks(mine) for one in of_rank]
    choose = {"attention_bytes": statistics.median_low}
    return {
        name: [choose.get(name, min)(values) for values in zip(*(one[name] for one in found), strict=True)]
        for name in found[0]
    }


def divided(workload: Workload, num_members: int, device: torch.device, *, sequence: bool) -> Workload:
    """Of whole layers, the slices of one member of a tensor group of so many processes."""
    groups = torch.arange(dist.get_world_size()).view(-1, num_members)
    slices = Slices(DeviceMesh(device.type, groups, mesh_dim_names=("groups", "tp"))["tp"], sequence=sequence)
    last = len(workload.layers) - 1
    for index, layer in enumerate(workload.layers):
        slices.divide(layer, str(index), is_last=index == last)
    return workload._replace(loss=whole_loss(workload.loss))


def _seconds_of_collectives(workload: Workload, size: int, device: torch.device) -> list[float]:
    """Of each layer's forward, those in which the members of its tensor group exchange what they have; on a CPU, where
    the host waits for it, and not known elsewhere."""
    found: list[list[float]] = []
    inputs, targets = (on_device(given, device) for given in workload.sample(size))
    last = len(workload.layers) - 1
    for _ in range(REPEATS):
        value = inputs
        found.append([])
        for index, layer in enumerate(workload.layers):
            leaves = leaves_of(value, first=index == 0)
            dist.barrier()
            with torch.autograd.profiler.profile() as profile:
                value = layer(leaves)
                value = mean_of(workload.loss(value, targets)) if index == last else value
            assert profile.kineto_results is not None, "the profiler has run"
            events = [e for e in profile.kineto_results.events() if e.name().startswith("_c10d_functional::")]
            found[-1].append(sum(event.duration_ns() for event in events) / 1e9)
    of_all = [one for of_rank in from_all_ranks(found) for one in of_rank]
    return [statistics.median(times) for times in zip(*of_all, strict=True)]


def _share(num_layers: int, num_members: int = 1) -> range:
    """The layers of this rank, or of its tensor group; all of them where there are fewer than ranks."""
    rank, world = dist.get_rank() // num_members, dist.get_world_size() // num_members
    if world > num_layers:
        return range(num_layers)
    return range(num_layers * rank // world, num_layers * (rank + 1) // world)


def memory_of_layers(
    workload: Workload, size: int, device: torch.device, alive: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """`memory_of_layer` of all of them, one after the other."""
    columns: dict[str, list[float]] = {}
    value, targets = (on_device(given, device) for given in workload.sample(size))
    for index in range(len(workload.layers)):
        alive()
        found, value = memory_of_layer(workload, index, value, targets, device)
        for name, amount in found.items():
            columns.setdefault(name, []).append(amount)
    return columns


def memory_of_layer(
    workload: Workload, index: int, value: Value, targets: Any, device: torch.device
) -> tuple[dict[str, float], Value]:
    """What remains after its forward, what crosses a cut behind it and the transient peaks of each pass; its output."""
    layer, found = workload.layers[index], dict[str, float]()
    is_last = index == len(workload.layers) - 1

    def run(given: Value) -> Value:
        output = layer(given)
        return mean_of(workload.loss(output, targets)) if is_last else output

    leaves = leaves_of(value, first=index == 0)
    given = flatten(leaves)[0]
    with torch.no_grad():
        no_grad, output = peak_bytes(device, lambda: run(leaves))
    crossing = storage_bytes(flatten(output)[0])
    handed_on = storage_bytes(_among(flatten(output)[0], given))
    del output
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward, output = peak_bytes(device, lambda: run(leaves))
    remaining = [*saved, *flatten(output)[0]]
    remains = storage_bytes(remaining) - storage_bytes(
        _among(remaining, [*given, *layer.parameters(), *layer.buffers()])
    )
    saved.clear()
    del remaining, output
    forget_gradients(layer)
    again = partial(run, leaves)
    backward, output = peak_of_second(device, again, _backward)
    for tensor in given:
        tensor.grad = None
    adding, output = peak_of_second(device, again, _backward)
    freed = 0 if is_last else _freed(layer, again, given, device) - handed_on
    _, inputs, weights_adding = _split_backward(run, value, device, first=index == 0)
    forget_gradients(layer)
    _, _, weights_making = _split_backward(run, value, device, first=index == 0)
    outputs = [t for t in flatten(output)[0] if t.requires_grad]
    entering, leaving = storage_bytes(outputs), storage_bytes([t for t in given if t.requires_grad])
    parameters = gradient_bytes(layer)
    found["freed_bytes"] = max(0, freed)
    found["saved_bytes"] = remains
    found["output_bytes"] = 0 if is_last else crossing
    found["workspace_no_grad_bytes"] = max(0, no_grad - (crossing - handed_on))
    found["workspace_forward_bytes"] = max(0, forward - remains)
    found["workspace_backward_bytes"] = backward - entering - leaving - parameters if outputs else 0
    found["workspace_accumulate_bytes"] = adding - entering - leaving - parameters if outputs else 0
    transient = inputs.highest - inputs.before - entering - leaving
    making, adding = (half.highest - half.before - parameters for half in (weights_making, weights_adding))
    found["kept_bytes"] = inputs.after
    found["workspace_inputs_bytes"] = transient if outputs else 0
    found["workspace_weights_bytes"] = making if outputs else 0
    found["workspace_weights_accumulate_bytes"] = adding if outputs else 0
    layer.zero_grad(set_to_none=True)
    beside = entering + leaving + parameters
    found |= _with_attention_recomputed(again, given, found, device, beside)
    layer.zero_grad(set_to_none=True)
    return found, output


def _with_attention_recomputed(
    run: Callable[[], Value],
    given: Sequence[torch.Tensor],
    whole: dict[str, float],
    device: torch.device,
    beside: float,
) -> dict[str, float]:
    """What a layer keeps less where its attention is recomputed, and what each pass needs then; nothing, and what it
    needs anyway, where it has no attention. `beside` are the bytes of gradients, which are no workspace."""
    found = {f"attention_{name}": whole[name] for name in _SELECTIVE} | {"attention_bytes": 0.0}
    held: list[Value] = []
    with watched_attention(recomputes=False) as watched:
        (kept,) = bytes_of_parts(device, [lambda: held.append(run())])
        held.clear()
    if not watched.calls:
        return found
    with watched_attention(recomputes=True):
        (less,) = bytes_of_parts(device, [lambda: held.append(run())])
        held.clear()
        found["attention_bytes"] = max(0, kept.after - less.after)
        found["attention_workspace_forward_bytes"] = max(0, less.highest - less.after)
        for name in ("attention_workspace_backward_bytes", "attention_workspace_accumulate_bytes"):
            for tensor in given:
                tensor.grad = None
            peak, _ = peak_of_second(device, run, _backward)
            found[name] = peak - beside
    return found


_SELECTIVE = ("workspace_forward_bytes", "workspace_backward_bytes", "workspace_accumulate_bytes")


def _among(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that have the storage of another."""
    known = {storage_of(other).data_ptr() for other in others}
    return [tensor for tensor in tensors if storage_of(tensor).data_ptr() in known]


def _backward(output: Value) -> None:
    outputs = [t for t in flatten(output)[0] if t.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def _freed(layer: nn.Module, forward: Callable[[], Value], given: Sequence[torch.Tensor], device: torch.device) -> int:
    """How much lower a backward's highest point is where nobody holds the output, or the gradient of it; the lesser of
    two backwards, of which the first makes gradients of weights and the second adds to them."""
    highest: dict[bool, list[int]] = {True: [], False: []}
    for is_held, found in highest.items():
        layer.zero_grad(set_to_none=True)
        for _ in range(2):
            state: list[Value] = []
            for tensor in given:
                tensor.grad = None

            def begin(is_held: bool = is_held, state: list[Value] = state) -> None:
                output = forward()
                entered = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]
                state.append(output if is_held or not entered else _Entered.apply(*entered))  # type: ignore[no-untyped-call]

            _, part = bytes_of_parts(device, [begin, lambda state=state: _backward(state[0])])  # type: ignore[misc]
            found.append(part.highest)
    return min(held - let_go for held, let_go in zip(highest[True], highest[False], strict=True))


class _Entered(torch.autograd.Function):
    """Stands for what follows a layer: holds nothing of its outputs, and makes gradients of them that nobody holds."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.like = [(output.shape, output.dtype, output.device) for output in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def _split_backward(run: Callable[..., Value], value: Value, device: torch.device, *, first: bool) -> list[Part]:
    """The bytes of a forward and of the halves of its backward.

    The input is made with the forward, so that it is among what is kept if it is; but not the model's own.
    """
    state: list[tuple[Halves, list[torch.Tensor]]] = []

    def forward() -> None:
        tensors, nesting = flatten(value)
        halves = Halves(tensors if first else [t.detach().clone() for t in tensors], first=first)
        with halves.recording():
            output = run(unflatten(nesting, halves.inputs))
        halves.end(flatten(output)[0])
        state.append((halves, [t for t in flatten(output)[0] if wants_gradient(t)]))

    def inputs() -> None:
        halves, outputs = state.pop()
        gradients = [torch.ones_like(outputs.pop(0)) for _ in range(len(outputs))]
        halves.backward_inputs(gradients)
        state.append((halves, []))

    def weights() -> None:
        halves, _ = state.pop()
        halves.backward_weights()

    return bytes_of_parts(device, [forward, inputs, weights])


def _measure_extras(workload: Workload, scenario: Scenario, device: torch.device, clock: LayerClock) -> dict[str, Any]:
    layers = list(workload.layers)
    inputs, _ = workload.sample(1)
    return {
        "parameter_bytes": [parameter_bytes(layer, scenario) for layer in layers],
        "optimizer_s": _optimizer_seconds(layers, scenario, device, clock),
        "input_bytes": float(sum(tensor.numel() * tensor.element_size() for tensor in flatten(inputs)[0])),
        "environment": {"torch": torch.__version__, "threads": torch.get_num_threads(), "ranks": dist.get_world_size()},
    }


def _optimizer_seconds(
    layers: Sequence[nn.Module], scenario: Scenario, device: torch.device, clock: LayerClock
) -> list[float]:
    """Each layer's share, by its parameters, of one update of the whole model.

    Where layers are measured one by one, of as much as the largest of them has: an update is as long as its tensors.
    """
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    largest = layers[counts.index(max(counts))]
    there = [p for layer in layers for p in layer.parameters() if p.device == device]
    parameters = there or [
        nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device)) for p in largest.parameters()
    ]
    if not parameters:
        return [0.0] * len(layers)
    mixed = computes_with_copies(scenario.dtype, scenario.precision)
    dtype = DTYPES[scenario.dtype]
    raised = mixed and not adds_in_fp32(scenario.dtype, scenario.precision)
    gradients = [
        torch.zeros_like(parameter, dtype=dtype if raised else torch.float32 if mixed else None)
        for parameter in parameters
    ]
    weights = [nn.Parameter(parameter.detach().float()) for parameter in parameters] if mixed else parameters
    optimizer = make_optimizer(scenario.optimizer, weights)
    spans: list[Span] = []
    for repeat in range(WARMUP + REPEATS):  # the first makes the optimizer's state
        dist.barrier()
        begin = clock.now()
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.to(weight.dtype)  # raised, if it is not in fp32
        optimizer.step()
        copies = [weight.detach().to(dtype) for weight in weights] if mixed else []  # for the next step
        if repeat >= WARMUP:
            spans.append((begin, clock.now()))
        del copies
    whole = statistics.median(one for rank in from_all_ranks(clock.seconds(spans)) for one in rank)
    return [whole * count / sum(p.numel() for p in parameters) for count in counts]


if __name__ == "__main__":
    main()
