"""One rank of a run, started by torchrun: builds its stage, runs the steps, leaves its records for the launcher.

    python -m torch.distributed.run ... -m gpipe_exec.worker RUN_DIR --steps 10 --warmup 3

Everything it leaves lies in RUN_DIR/ranks, a file per rank, written whole; a failure leaves its traceback there.
"""

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gpipe_exec.allocator import peak_bytes
from gpipe_exec.layers import build_workload
from gpipe_exec.messages import Value, flatten
from gpipe_exec.pipeline import Pipeline, default_device, pin_to_cores
from gpipe_exec.recorder import Recorder
from gpipe_sim.files import write_text
from gpipe_sim.plan import Plan
from gpipe_sim.planfile import load_plan
from gpipe_sim.scenario import Optimizer

OPTIMIZERS: dict[Optimizer, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
}


def main() -> None:
    """Parse the arguments and run; a failure is written down before it is raised."""
    parser = argparse.ArgumentParser(description="one rank of a run")
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--timeout", type=float, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    rank = int(os.environ["RANK"])
    ranks = arguments.run / "ranks"
    try:
        _run(arguments, load_plan(arguments.run / "plan.yaml"), ranks)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            write_text(ranks / f"rank{rank}.error", traceback.format_exc())
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def die_with_parent() -> None:
    """Ask Linux to kill this process when torchrun dies, whatever kills it: no rank is left behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _run(arguments: argparse.Namespace, plan: Plan, ranks: Path) -> None:
    device = torch.device("cpu") if arguments.device == "cpu" else default_device()
    if device.type == "cpu":
        pin_to_cores()
    else:
        torch.cuda.set_device(device)
    # The launcher notices a hang first; this is for the case that the launcher is gone.
    patience = timedelta(seconds=arguments.timeout + 30)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=patience)
    workload = build_workload(plan.scenario)
    recorder = Recorder(device)
    pipe = Pipeline(workload.layers, plan, workload.loss, device=device, recorder=recorder)
    optimizer = OPTIMIZERS[plan.scenario.optimizer](pipe.parameters()) if pipe.parameters() else None
    inputs, targets = workload.sample(plan.scenario.batch)

    def update() -> None:
        if optimizer:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    for step in range(arguments.warmup + arguments.steps):
        recorder.enabled = step >= arguments.warmup
        dist.barrier()
        pipe.step(inputs, targets, update)
        _leave(ranks, pipe.rank, recorder, done=step + 1)
    recorder.enabled = False
    dist.barrier()
    transient, _ = peak_bytes(device, lambda: pipe.step(inputs, targets, update))
    peak = _static_bytes(pipe, optimizer, inputs) + transient
    _leave(ranks, pipe.rank, recorder, done=arguments.warmup + arguments.steps, peak=peak)
    pipe.close()


def _static_bytes(pipe: Pipeline, optimizer: torch.optim.Optimizer | None, inputs: Value) -> int:
    """What is there before a step begins: parameters, optimizer state and, on the first rank, the mini-batch."""
    tensors = [*pipe.module.parameters(), *pipe.module.buffers()]
    for state in optimizer.state.values() if optimizer else ():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    if pipe.is_first:
        tensors += flatten(inputs)[0]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _leave(ranks: Path, rank: int, recorder: Recorder, *, done: int, peak: int | None = None) -> None:
    """Write down what is recorded so far, so that a run that fails later keeps it."""
    steps = [asdict(record) for record in recorder.steps]
    record = {"host": socket.gethostname(), "done": done, "steps": steps, "peak_memory_bytes": peak}
    write_text(ranks / f"rank{rank}.json", json.dumps(record))


if __name__ == "__main__":
    main()
