"""Measure a profile on this machine: what each layer costs at each micro-batch size, with every rank's core busy.

Every rank, pinned to its core, runs the *whole* model layer by layer, as a stage would run its part: forward through
all layers, then backward in reverse, each timed by itself, all ranks at the same time, because cores share caches and
memory. A layer's cost is the median over repetitions, ranks, and layers that are built alike. Between neighbouring
ranks the link is timed by ping-pong over several sizes.

    python -m torch.distributed.run ... -m gpipe_exec.profiler WORK_DIR      started by `measure_profile`
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from gpipe_exec.allocator import peak_bytes
from gpipe_exec.launch import worker_environment
from gpipe_exec.layers import Workload, build_workload
from gpipe_exec.messages import Value, flatten, unflatten, wants_gradient
from gpipe_exec.pipeline import default_device, pin_to_cores
from gpipe_exec.worker import OPTIMIZERS, die_with_parent
from gpipe_sim.catalog import Link
from gpipe_sim.files import InputError, Problem, parse_yaml, write_text
from gpipe_sim.plan import microbatch_sizes
from gpipe_sim.profile import COLUMNS, Profile
from gpipe_sim.scenario import Scenario
from gpipe_sim.sweep import parse_scenario

REPEATS, WARMUP = 9, 2


def sizes_for(scenarios: Iterable[Scenario]) -> tuple[int, ...]:
    """The micro-batch sizes that the scenarios need, and the powers of two below the largest."""
    needed = {
        size for scenario in scenarios for size in microbatch_sizes(scenario.batch, scenario.plan.num_microbatches or 1)
    }
    return tuple(sorted({*needed, *(2**n for n in range(max(needed).bit_length()))}))


def measure_profile(
    scenario: Scenario,
    sizes: Sequence[int],
    num_ranks: int,
    device: str,
    work: Path,
    advance: Callable[[], None] = lambda: None,
) -> Profile:
    """Measure on this machine with `num_ranks` processes; `advance` is called for each finished size.

    Each finished size is kept in `work`, so that an interrupted measurement goes on where it stopped.
    """
    work.mkdir(parents=True, exist_ok=True)
    request = {
        "scenario": scenario.document.data,
        "file": scenario.document.file,
        "sizes": list(sizes),
        "device": device,
    }
    text = json.dumps(request | {"ranks": num_ranks}, indent=1)
    request_file = work / "request.json"
    if not request_file.is_file() or request_file.read_text() != text:  # another model, device or set of sizes
        for old in work.glob("size*.json"):
            old.unlink()
        write_text(request_file, text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    log = work / "profiler.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*command, "-m", "gpipe_exec.profiler", str(work)],
            stdout=output,
            stderr=output,
            env=worker_environment(scenario),
        )
        done = 0
        try:
            while process.poll() is None:
                time.sleep(0.1)
                for _ in range(len(list(work.glob("size*.json"))) - done):
                    advance()
                    done += 1
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        told = [line for line in log.read_text().splitlines() if "Error" in line]
        raise InputError([Problem("gpipe profile", "", f"a worker failed: {told[-1] if told else ''}; see {log}")])
    profile = _assemble(scenario, sizes, work, device)
    shutil.rmtree(work)  # the next measurement is a new one
    return profile


def _assemble(scenario: Scenario, sizes: Sequence[int], work: Path, device: str) -> Profile:
    by_size = [json.loads((work / f"size{size}.json").read_text()) for size in sizes]
    extras = json.loads((work / "extras.json").read_text())
    link = extras["link"] and Link(
        name="measured", bandwidth=extras["link"]["bandwidth"], latency=extras["link"]["latency"]
    )
    return Profile(
        source="measured",
        device=device,
        dtype=scenario.dtype,
        names=tuple(extras["names"]),
        sizes=tuple(sizes),
        table={column: np.array([entry[column] for entry in by_size], dtype=float).T for column in COLUMNS},
        parameter_bytes=np.array(extras["parameter_bytes"], dtype=float),
        optimizer_s=np.array(extras["optimizer_s"], dtype=float),
        input_bytes=extras["input_bytes"],
        link=link,
        environment={name: str(value) for name, value in extras["environment"].items()},
    )


# --- in the workers ------------------------------------------------------------------------------------------------


def main() -> None:
    """One rank's part of the measurement."""
    die_with_parent()
    work = Path(sys.argv[1])
    request = json.loads((work / "request.json").read_text())
    device = torch.device("cpu") if request["device"] == "cpu" else default_device()
    if device.type == "cpu":
        pin_to_cores()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=timedelta(seconds=300))
    try:
        document = parse_yaml("{}", request["file"])
        document.data = request["scenario"]
        (scenario,) = parse_scenario(document)
        workload = build_workload(scenario)
        workload.layers.to(device)
        is_first = dist.get_rank() == 0
        for size in request["sizes"]:
            path = work / f"size{size}.json"
            if _agree(path.is_file()):
                continue
            columns = _measure_size(workload, size, device)
            if is_first:
                write_text(path, json.dumps(columns))
        extras = _measure_extras(workload, scenario, device)
        if is_first:
            write_text(work / "extras.json", json.dumps(extras))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _agree(flag: bool) -> bool:
    """Rank 0's answer, everywhere."""
    told = torch.tensor([int(flag)])
    dist.broadcast(told, src=0)
    return bool(told)


def _alike(layers: Sequence[nn.Module]) -> list[str]:
    """What tells layers apart that cost differently: how they are built."""
    return [repr(layer) + str([tuple(p.shape) for p in layer.parameters()]) for layer in layers]


def _measure_size(workload: Workload, size: int, device: torch.device) -> dict[str, list[float]]:
    layers = list(workload.layers)
    inputs, targets = (_to(value, device) for value in workload.sample(size))
    times: dict[str, list[list[float]]] = {"forward_s": [], "backward_s": []}
    for repeat in range(WARMUP + REPEATS):
        dist.barrier()
        forward, backward = _timed_pass(layers, inputs, targets, workload, device)
        if repeat >= WARMUP:
            times["forward_s"].append(forward)
            times["backward_s"].append(backward)
    columns = {name: _median_of_alike(layers, _from_all_ranks(passes)) for name, passes in times.items()}
    columns |= _memory_of_layers(layers, inputs, targets, workload, device)
    workload.layers.zero_grad(set_to_none=True)
    return columns


def _timed_pass(
    layers: Sequence[nn.Module], inputs: Value, targets: Any, workload: Workload, device: torch.device
) -> tuple[list[float], list[float]]:
    """Seconds of each layer's forward and backward, the loss counted with the last layer."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    value, graphs, forward = inputs, [], []
    for index, layer in enumerate(layers):
        leaves = _leaves(value, first=index == 0)
        begin = now()
        output = layer(leaves)
        if index == len(layers) - 1:
            output = workload.loss(output, targets)
        forward.append(now() - begin)
        graphs.append((leaves, output))
        value = output
    backward = []
    gradients: list[torch.Tensor] = [torch.ones_like(value)]
    for leaves, output in reversed(graphs):
        outputs = [t for t in flatten(output)[0] if wants_gradient(t)]
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        begin = now()
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        backward.append(now() - begin)
        gradients = [
            t.grad if t.grad is not None else torch.zeros_like(t) for t in flatten(leaves)[0] if wants_gradient(t)
        ]
    return forward, backward[::-1]


def _leaves(value: Value, *, first: bool) -> Value:
    tensors, nesting = flatten(value)
    return unflatten(nesting, [t.detach().requires_grad_(wants_gradient(t) and not first) for t in tensors])


def _to(value: Value, device: torch.device) -> Value:
    tensors, nesting = flatten(value)
    return unflatten(nesting, [tensor.to(device) for tensor in tensors])


def _from_all_ranks(passes: list[list[float]]) -> list[list[float]]:
    """Every rank's passes."""
    gathered: list[list[list[float]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, passes)
    return [one for rank in gathered if rank for one in rank]


def _median_of_alike(layers: Sequence[nn.Module], passes: list[list[float]]) -> list[float]:
    names = _alike(layers)
    pooled: dict[str, list[float]] = {}
    for one in passes:
        for name, seconds in zip(names, one, strict=True):
            pooled.setdefault(name, []).append(seconds)
    return [statistics.median(pooled[name]) for name in names]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of distinct storages."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _memory_of_layers(
    layers: Sequence[nn.Module], inputs: Value, targets: Any, workload: Workload, device: torch.device
) -> dict[str, list[float]]:
    """What remains after each forward, what crosses a cut behind it, and the transient peaks of each pass."""
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS if name.endswith("bytes")}
    value = inputs
    for index, layer in enumerate(layers):
        is_last = index == len(layers) - 1

        def run(layer: nn.Module = layer, is_last: bool = is_last, given: Value = None) -> Value:
            output = layer(given)
            return workload.loss(output, targets) if is_last else output

        leaves = _leaves(value, first=index == 0)
        given = flatten(leaves)[0]
        with torch.no_grad():
            no_grad, output = peak_bytes(device, lambda run=run, leaves=leaves: run(given=leaves))  # type: ignore[misc]
        crossing = _bytes(flatten(output)[0])
        del output
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            forward, output = peak_bytes(device, lambda run=run, leaves=leaves: run(given=leaves))  # type: ignore[misc]
        known = {t.untyped_storage().data_ptr() for t in [*given, *layer.parameters(), *layer.buffers()]}
        remaining = [t for t in [*saved, *flatten(output)[0]] if t.untyped_storage().data_ptr() not in known]
        remains = _bytes(remaining)
        saved.clear()
        del remaining
        outputs = [t for t in flatten(output)[0] if t.requires_grad]
        gradients = [torch.ones_like(t) for t in outputs]
        parameters = sum(p.numel() * p.element_size() for p in layer.parameters())
        leaving = _bytes(t for t in given if t.requires_grad)
        backward = 0
        if outputs:
            # The graph is consumed as the pass proceeds: frees show as room, so that what counts is the peak beyond.
            backward, _ = peak_bytes(device, lambda o=outputs, g=gradients: torch.autograd.backward(o, g))  # type: ignore[misc]
        columns["saved_bytes"].append(remains)
        columns["output_bytes"].append(0 if is_last else crossing)
        columns["workspace_no_grad_bytes"].append(max(0, no_grad - crossing))
        columns["workspace_forward_bytes"].append(max(0, forward - remains))
        columns["workspace_backward_bytes"].append(max(0, backward - leaving - parameters))
        value = output
    return columns


def _measure_extras(workload: Workload, scenario: Scenario, device: torch.device) -> dict[str, Any]:
    layers = list(workload.layers)
    inputs, _ = workload.sample(1)
    return {
        "names": [f"{index}:{type(layer).__name__}" for index, layer in enumerate(layers)],
        "parameter_bytes": [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers],
        "optimizer_s": _optimizer_seconds(layers, scenario),
        "input_bytes": float(sum(tensor.numel() * tensor.element_size() for tensor in flatten(inputs)[0])),
        "link": _measure_link(device),
        "environment": {"torch": torch.__version__, "threads": torch.get_num_threads(), "ranks": dist.get_world_size()},
    }


def _optimizer_seconds(layers: Sequence[nn.Module], scenario: Scenario) -> list[float]:
    """Each layer's share, by its parameters, of one update of the whole model."""
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    if not parameters:
        return [0.0] * len(layers)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = OPTIMIZERS[scenario.optimizer](parameters)
    seconds = []
    for repeat in range(WARMUP + REPEATS):  # the first makes the optimizer's state
        dist.barrier()
        begin = time.perf_counter()
        optimizer.step()
        if repeat >= WARMUP:
            seconds.append([time.perf_counter() - begin])
    whole = statistics.median(one[0] for one in _from_all_ranks(seconds))
    return [whole * count / sum(counts) for count in counts]


def _measure_link(device: torch.device) -> dict[str, float] | None:
    """Latency and bandwidth between ranks 0 and 1, by ping-pong over several sizes and a line through the medians."""
    if dist.get_world_size() < 2:
        return None
    rank = dist.get_rank()
    sizes, halves = [2**n for n in range(10, 25, 2)], []
    for size in sizes:
        out, back = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        seconds = []
        for _ in range(9 if rank < 2 else 0):
            begin = time.perf_counter()
            if rank == 0:
                receive = dist.irecv(back, 1)
                dist.send(out, 1)
            else:
                receive = dist.irecv(back, 0)
            assert receive is not None, "ranks 0 and 1 belong to the group"
            receive.wait()
            if rank == 1:
                dist.send(out, 0)
            seconds.append((time.perf_counter() - begin) / 2)
        halves.append(statistics.median(seconds) if seconds else 0.0)
        dist.barrier()
    latency = halves[0]
    largest = max(halves[-1] - latency, 1e-9)
    told = torch.tensor([sizes[-1] / largest, latency], dtype=torch.double)
    dist.broadcast(told, src=0)
    return {"bandwidth": float(told[0]), "latency": float(told[1])}


if __name__ == "__main__":
    main()
