"""Train a small transformer as a pipeline, a process for each stage, on a language that it makes up.

    torchrun --standalone --nproc-per-node 2 examples/train.py --checkpoint model.pt
    torchrun --standalone --nproc-per-node 4 examples/train.py --plan plan.yaml --steps 500

A run with --checkpoint goes on where the last one ended, also under another plan: the file holds the whole model, as a
one-process ``nn.Sequential`` can load it. Ctrl-C ends a run after the current step, and saves it.
"""

import argparse
import contextlib
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gpipe_exec import Pipeline, leave, pin_to_cores
from gpipe_exec.layers import Workload, build_workload
from gpipe_sim import Plan, make_plan
from gpipe_sim.files import Document
from gpipe_sim.planfile import read_plan
from gpipe_sim.scenario import Transformer
from gpipe_sim.sweep import parse_scenario

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
REPORT_EVERY, SAVE_EVERY = 10, 100
UNSEEN = -1  # the number of a batch that is never trained on

Batch = tuple[Any, Any]


def main() -> None:
    """Set up, train, and leave nothing behind."""
    arguments = parse_arguments()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        pin_to_cores()
    with contextlib.ExitStack() as at_exit:
        dist.init_process_group("nccl" if cuda else "gloo")
        at_exit.callback(dist.destroy_process_group)
        try:
            plan = read_plan(arguments.plan) if arguments.plan else plan_for(dist.get_world_size())
            workload = build_workload(plan.scenario)
            pipe = Pipeline(workload.layers, plan, workload.loss)
            at_exit.callback(pipe.close)
            optimizer = torch.optim.Adam([{"params": pipe.parameters()}], lr=arguments.lr)  # a stage may have none
            resumed = load(arguments.checkpoint, pipe, optimizer)
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
        "--checkpoint", type=Path, metavar="FILE", help="save here, and resume from here; every process must see it"
    )
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
    resumed: tuple[int, float] | None,
    stop: threading.Event,
) -> None:
    """Train to the last step, or until told to stop."""
    done, loss_before = resumed or (0, float(pipe.evaluate(*batch(UNSEEN))))
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
        if arguments.checkpoint and done % SAVE_EVERY == 0:
            save(arguments.checkpoint, pipe, optimizer, done, loss_before)
    if arguments.checkpoint:
        save(arguments.checkpoint, pipe, optimizer, done, loss_before)
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


# --- checkpoints ---------------------------------------------------------------------------------------------------


def save(path: Path, pipe: Pipeline, optimizer: torch.optim.Optimizer, done: int, loss_before: float) -> None:
    """Write the whole model and the optimizer's state of each of its parameters by name, whole or not at all."""
    names = [name for name, _ in pipe.module.named_parameters()]
    states = optimizer.state_dict()["state"].items()
    mine = {names[index]: {key: value.cpu() for key, value in state.items()} for index, state in states}
    parts: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    model = pipe.state_dict()
    if pipe.rank == 0:
        optimizer_state = {name: state for part in parts for name, state in part.items()}
        content = {"model": model, "optimizer": optimizer_state, "step": done, "loss_before": loss_before}
        partial = path.with_name(path.name + ".partial")
        torch.save(content, partial)
        partial.replace(path)
    dist.barrier()


def load(path: Path | None, pipe: Pipeline, optimizer: torch.optim.Optimizer) -> tuple[int, float] | None:
    """Take this rank's part of a checkpoint; return how many steps it has seen, and the loss before the first."""
    if path is None or not path.exists():
        return None
    names = [name for name, _ in pipe.module.named_parameters()]
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        pipe.load_state_dict(content["model"])
        states = {index: content["optimizer"][name] for index, name in enumerate(names) if name in content["optimizer"]}
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
        return content["step"], content["loss_before"]
    except Exception as error:  # a file that is something else can raise anything
        raise ValueError(f"{path}: not a checkpoint of this model: {textwrap.shorten(str(error), 200)}") from error


if __name__ == "__main__":
    main()
