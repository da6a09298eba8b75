"""Train a small transformer as a pipeline, a process for each stage, on a language that it makes up.

    torchrun --standalone --nproc-per-node 2 examples/train.py --checkpoint checkpoints
    torchrun --standalone --nproc-per-node 4 examples/train.py --plan plan.yaml --steps 500

A run with --checkpoint goes on where the last one ended, also under another plan; `gpipe_exec.read_model` reads the
whole model from the folder for one process. Ctrl-C ends a run after the current step, and saves it. A rank that is
killed costs the steps since the last checkpoint, if torchrun may start all of them again. Without the variable, torch
2.13 shows new processes the addresses of those that are gone:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --max-restarts 3 --nproc-per-node 2 examples/train.py ...

With another number of processes than the plan has ranks, it plans again for those that there are, and goes on.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gpipe_exec import Pipeline, leave, pin_to_cores, plan_for_world
from gpipe_exec.devices.accelerator import default_device
from gpipe_exec.devices.groups import start_processes
from gpipe_exec.layers import Workload, build_workload
from gpipe_sim import Plan, make_plan
from gpipe_sim.base.files import Document
from gpipe_sim.make.planfile import read_plan
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.scenario.schema import Transformer

SCENARIO = {
    "name": "train",
    "model": {"kind": "transformer", "layers": 4, "hidden": 64, "heads": 4, "vocab": 97, "sequence": 32},
    "batch": 32,
    "dtype": "fp32",
    "cluster": {
        # Written out and not looked up, so that every process cuts the model alike.
        "device": {"memory": "4 GiB", "compute": "50 GFLOP/s", "bandwidth": "10 GB/s"},
        "link": {"bandwidth": "3 GB/s", "latency": "100 us"},
    },
    "plan": {"microbatches": 4, "checkpoint": "except_last", "schedule": "1f1b"},
}
REPORT_EVERY = 10
UNSEEN = -1  # the number of a batch that is never trained on

Batch = tuple[Any, Any]


def main() -> None:
    """Set up, train, and leave nothing behind."""
    arguments = parse_arguments()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    device = default_device()
    if device.type == "cpu":
        pin_to_cores()
    with contextlib.ExitStack() as at_exit:
        start_processes(device, timedelta(minutes=10))
        at_exit.callback(dist.destroy_process_group)
        try:
            plan = plan_for_world(read_plan(arguments.plan)) if arguments.plan else plan_for(dist.get_world_size())
            workload = build_workload(plan.scenario)
            pipe = Pipeline(workload.layers, plan, workload.loss)
            at_exit.callback(pipe.close)
            optimizer = torch.optim.Adam([{"params": pipe.parameters()}], lr=arguments.lr)  # a stage may have none
            resumed = pipe.load(arguments.checkpoint, optimizer) if arguments.checkpoint else None
        except ValueError as error:
            fail(error)
        train(arguments, pipe, optimizer, batches(plan, workload), resumed, stop)
    leave()


def parse_arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--plan",
        type=Path,
        help="plan file, or a scenario with one plan; without it, one stage for each process is planned here",
    )
    parser.add_argument("--steps", type=above_zero(int), default=200, help="steps in all, resumed ones included (200)")
    parser.add_argument("--lr", type=above_zero(float), default=3e-3, help="Adam's learning rate (0.003)")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="save here, and resume from here; every process must see it"
    )
    parser.add_argument("--save-every", type=above_zero(int), default=100, help="steps between checkpoints (100)")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node 2 examples/train.py")
    if arguments.checkpoint and not arguments.checkpoint.parent.is_dir():
        parser.error(f"--checkpoint: there is no folder {arguments.checkpoint.parent}")
    return arguments


def above_zero(kind: type[int] | type[float]) -> Callable[[str], float]:
    """A reader of numbers for an option."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < kind(text) < float("inf"):
                return kind(text)
        raise argparse.ArgumentTypeError(f"found {text}, expected {'a whole' if kind is int else 'a'} number above 0")

    return read


def fail(problem: object) -> NoReturn:
    """End with the message; one process of a machine speaks for all, which have read the same files."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        sys.exit(0)  # a failure would make torchrun end the one that speaks
    print(f"train.py: error: {problem}", file=sys.stderr, flush=True)
    sys.exit(2)


def plan_for(num_stages: int) -> Plan:
    """The plan of the scenario above."""
    (scenario,) = parse_scenario(Document("train.py", SCENARIO), f"plan.stages={num_stages}")
    return make_plan(scenario)


def batches(plan: Plan, workload: Workload) -> Callable[[int], Batch]:
    """step -> inputs and targets, the same whenever they are asked for. Your own data go here."""
    model, batch = plan.scenario.model, plan.scenario.batch
    if not isinstance(model, Transformer):
        return lambda _: workload.sample(batch)  # the one batch that the model brings along

    def text(step: int) -> Batch:
        """Each sentence counts up from any token by one, two or three; the model learns to go on."""
        generator = torch.Generator().manual_seed(step)
        first = torch.randint(model.vocab, (batch, 1), generator=generator)
        pace = torch.randint(1, 4, (batch, 1), generator=generator)
        tokens = (first + pace * torch.arange(model.sequence + 1)) % model.vocab
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return text


def train(
    arguments: argparse.Namespace,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], Batch],
    resumed: dict[str, Any] | None,
    stop: threading.Event,
) -> None:
    """Train to the last step, or until told to stop."""
    done = resumed["step"] if resumed else 0
    loss_before = resumed["loss_before"] if resumed else float(pipe.evaluate(*batch(UNSEEN)))
    position = {"loss_before": loss_before}
    if resumed:
        say(f"resumed after step {done}")
    while done < arguments.steps and not on_any_rank(stop.is_set(), pipe.device):
        torch.manual_seed(done * dist.get_world_size() + pipe.rank)  # dropout too repeats itself in a resumed run
        loss = pipe.step(*batch(done))
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done % REPORT_EVERY == 0 or done == arguments.steps:
            say(f"step {done:5}/{arguments.steps} {done / arguments.steps:5.0%}   loss {float(loss):.4f}")
        if arguments.checkpoint and done % arguments.save_every == 0:
            pipe.save(arguments.checkpoint, optimizer, done, position, wait=False)  # written while training goes on
    if arguments.checkpoint:
        pipe.save(arguments.checkpoint, optimizer, done, position)
        say(f"saved {arguments.checkpoint} after step {done}")
    if done < arguments.steps:
        say(f"stopped after step {done}" + (", start again to go on" if arguments.checkpoint else ", nothing is saved"))
        return
    loss_after = float(pipe.evaluate(*batch(UNSEEN)))
    say(f"loss {'fell' if loss_after < loss_before else 'rose'} from {loss_before:.6f} to {loss_after:.6f}")


def say(text: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def on_any_rank(flag: bool, device: torch.device) -> bool:
    """Whether it is so on any rank: a signal reaches them in different steps, but they must stop after the same."""
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


if __name__ == "__main__":
    main()
