"""One rank's part in measuring a profile, started by torchrun.

    python -m torch.distributed.run ... -m gpipe_exec.measure WORK_DIR      started by `profiler.measure_profile`

Every rank, pinned to its core, runs its share of the layers as a stage would run its part (`timing`), and the allocator
tells what each layer holds. Between neighbouring ranks the link is probed (`probe`), and a pipeline that does nothing
but keep its cores busy tells what the engine itself costs.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpipe_exec.allocator import peak_bytes, peak_of_second, storage_bytes
from gpipe_exec.calibrate import Overheads, calibrate
from gpipe_exec.layers import Workload, build_workload
from gpipe_exec.messages import Value, flatten
from gpipe_exec.pipeline import default_device, pin_to_cores
from gpipe_exec.probe import measure_link
from gpipe_exec.process import die_with_parent, leave
from gpipe_exec.timing import LayerTimer, from_all_ranks, layer_clock, leaves_of, on_device
from gpipe_exec.worker import OPTIMIZERS
from gpipe_sim.files import parse_yaml, write_text
from gpipe_sim.profile import COLUMNS
from gpipe_sim.scenario import Scenario
from gpipe_sim.sweep import parse_scenario

REPEATS, WARMUP = 9, 2
_HIDDEN = Overheads(0.0, 0.0)
"""On a GPU: the host runs ahead of the device, which hides what the engine does."""
WARMUP_S, MEASURED_S = 0.8, 1.0
"""At least so long for each size: a core that was idle, and memory that was never touched, are slow at first."""


def main() -> None:
    """One rank's part of the measurement."""
    die_with_parent()
    work = Path(sys.argv[1])
    request = json.loads((work / "request.json").read_text())
    device = torch.device("cpu") if request["device"] == "cpu" else default_device()
    shares_core = device.type == "cpu" and pin_to_cores()
    now = layer_clock(device, shares_core=shares_core)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=timedelta(seconds=300))
    try:
        document = parse_yaml("{}", request["file"])
        document.data = request["scenario"]
        (scenario,) = parse_scenario(document)
        workload = build_workload(scenario)
        workload.layers.to(device)
        is_first = dist.get_rank() == 0
        largest_bytes = 0.0
        for size in request["sizes"]:
            path = work / f"size{size}.json"
            if _agree(path.is_file()):
                columns = json.loads(path.read_text())
            else:
                columns = _measure_size(workload, size, scenario.batch // size, device, now)
                if is_first:
                    write_text(path, json.dumps(columns))
            largest_bytes = max(largest_bytes, *columns["output_bytes"])
        # Ranks that share a core and keep it busy would wait for each other: that is not the engine's time.
        link = measure_link(device, largest_bytes)
        overheads = calibrate(link, asleep=shares_core) if device.type == "cpu" else _HIDDEN
        extras = _measure_extras(workload, scenario, now) | {
            "link": link and {"bandwidth": link.bandwidth, "latency": link.latency},
            "overheads": list(overheads),
        }
        extras["environment"]["clock"] = "of the core, which ranks share" if shares_core else "on the wall"
        if is_first:
            write_text(work / "extras.json", json.dumps(extras))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    leave()


def _agree(flag: bool) -> bool:
    """Rank 0's answer, everywhere."""
    told = torch.tensor([int(flag)], device=default_device() if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(told, src=0)
    return bool(told)


def _measure_size(
    workload: Workload, size: int, num_microbatches: int, device: torch.device, now: Callable[[], float]
) -> dict[str, list[float]]:
    timer = LayerTimer(workload, _share(len(workload.layers)), size, num_microbatches, device, now)
    for seconds, repeats in ((WARMUP_S, 2), (MEASURED_S, -(-REPEATS // timer.in_a_row))):
        timer.passes.clear()  # what was measured while warming up
        began = time.perf_counter()
        while len(timer.passes) < repeats * timer.in_a_row or _agree(time.perf_counter() - began < seconds):
            timer.measure()
    columns = timer.columns() | _memory_of_layers(workload, size, device)
    workload.layers.zero_grad(set_to_none=True)
    return columns


def _share(num_layers: int) -> range:
    """This rank's layers; all of them where there are fewer than ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world > num_layers:
        return range(num_layers)
    return range(num_layers * rank // world, num_layers * (rank + 1) // world)


def _memory_of_layers(workload: Workload, size: int, device: torch.device) -> dict[str, list[float]]:
    """What remains after each forward, what crosses a cut behind it, and the transient peaks of each pass."""
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS if name.endswith("bytes")}
    layers = list(workload.layers)
    value, targets = (on_device(given, device) for given in workload.sample(size))
    for index, layer in enumerate(layers):
        is_last = index == len(layers) - 1

        def run(layer: nn.Module = layer, is_last: bool = is_last, given: Value = None) -> Value:
            output = layer(given)
            return workload.loss(output, targets) if is_last else output

        leaves = leaves_of(value, first=index == 0)
        given = flatten(leaves)[0]
        with torch.no_grad():
            no_grad, output = peak_bytes(device, lambda run=run, leaves=leaves: run(given=leaves))  # type: ignore[misc]
        crossing = storage_bytes(flatten(output)[0])
        del output
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            forward, output = peak_bytes(device, lambda run=run, leaves=leaves: run(given=leaves))  # type: ignore[misc]
        known = {t.untyped_storage().data_ptr() for t in [*given, *layer.parameters(), *layer.buffers()]}
        remaining = [t for t in [*saved, *flatten(output)[0]] if t.untyped_storage().data_ptr() not in known]
        remains = storage_bytes(remaining)
        saved.clear()
        del remaining, output
        layer.zero_grad(set_to_none=True)
        again = partial(run, given=leaves)
        backward, output = peak_of_second(device, again, _backward)
        for tensor in given:
            tensor.grad = None
        adding, output = peak_of_second(device, again, _backward)
        outputs = [t for t in flatten(output)[0] if t.requires_grad]
        entering, leaving = storage_bytes(outputs), storage_bytes([t for t in given if t.requires_grad])
        parameters = sum(p.numel() * p.element_size() for p in layer.parameters())
        columns["saved_bytes"].append(remains)
        columns["output_bytes"].append(0 if is_last else crossing)
        columns["workspace_no_grad_bytes"].append(max(0, no_grad - crossing))
        columns["workspace_forward_bytes"].append(max(0, forward - remains))
        columns["workspace_backward_bytes"].append(backward - entering - leaving - parameters if outputs else 0)
        columns["workspace_accumulate_bytes"].append(adding - entering - leaving - parameters if outputs else 0)
        value = output
    return columns


def _backward(output: Value) -> None:
    outputs = [t for t in flatten(output)[0] if t.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def _measure_extras(workload: Workload, scenario: Scenario, now: Callable[[], float]) -> dict[str, Any]:
    layers = list(workload.layers)
    inputs, _ = workload.sample(1)
    return {
        "names": [f"{index}:{type(layer).__name__}" for index, layer in enumerate(layers)],
        "parameter_bytes": [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers],
        "optimizer_s": _optimizer_seconds(layers, scenario, now),
        "input_bytes": float(sum(tensor.numel() * tensor.element_size() for tensor in flatten(inputs)[0])),
        "environment": {"torch": torch.__version__, "threads": torch.get_num_threads(), "ranks": dist.get_world_size()},
    }


def _optimizer_seconds(layers: Sequence[nn.Module], scenario: Scenario, now: Callable[[], float]) -> list[float]:
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
        begin = now()
        optimizer.step()
        if repeat >= WARMUP:
            seconds.append(now() - begin)
    whole = statistics.median(one for rank in from_all_ranks(seconds) for one in rank)
    return [whole * count / sum(counts) for count in counts]


if __name__ == "__main__":
    main()
