"""Under torchrun --max-restarts: a rank kills itself at another point each time it is started, and training goes on.

In the end every loss, of every attempt, is bit for bit that of a run that was never disturbed.
"""

import os
import signal
import sys
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn
from training import BATCH, WIDTH, plan_of

from gpipe_exec import Pipeline, leave
from gpipe_exec.engine import checkpoint

STEPS, SAVE_EVERY = 8, 2
KILLS = (
    (1, "step", 1),
    (0, "forward", 3),
    (1, "update", 3),
    (0, "renaming", 4),
    (1, "writing", 6),
    (0, "saved", 6),
)
"""Rank, place and step of each attempt's end; the last attempt is spared."""
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
RANK = int(os.environ["RANK"])


def perhaps_die(place: str, step: int) -> None:
    if ATTEMPT < len(KILLS) and KILLS[ATTEMPT] == (RANK, place, step):
        os.kill(os.getpid(), signal.SIGKILL)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(8)))


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def train(folder: Path | None, told: TextIO | None = None) -> dict[int, str]:
    """Step -> its loss, of the steps that this attempt does; told as they come, since it may not end."""
    pipe = Pipeline(model(), plan_of(checkpoint="always"), nn.functional.mse_loss)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.05)
    torch.manual_seed(100 + RANK)
    position = pipe.load(folder, optimizer) if folder else None
    losses = {}
    for step in range(position["step"] if position else 0, STEPS):
        if folder:
            perhaps_die("step", step)
            for layer in pipe.module:
                layer.register_forward_pre_hook(lambda *_, step=step: perhaps_die("forward", step))

        def update(step: int = step) -> None:
            if folder:
                perhaps_die("update", step)
            optimizer.step()

        losses[step] = float(pipe.step(*data(step), update)).hex()
        if told:
            print(step, losses[step], file=told, flush=True)
        optimizer.zero_grad()
        if folder and (step + 1) % SAVE_EVERY == 0:
            dies_while_saving(step + 1)
            pipe.save(folder, optimizer, step + 1, wait=step + 1 == 4)
            perhaps_die("saved", step + 1)
    pipe.close()
    return losses


def dies_while_saving(step: int) -> None:
    """In the middle of it: between its files, or when all but its name is there."""
    if ATTEMPT < len(KILLS) and KILLS[ATTEMPT][2] == step and KILLS[ATTEMPT][0] == RANK:
        write, replace = checkpoint.save, Path.replace
        if KILLS[ATTEMPT][1] == "writing":
            checkpoint.save = lambda *given, **named: perhaps_die("writing", step) or write(*given, **named)
        if KILLS[ATTEMPT][1] == "renaming":
            Path.replace = lambda *given: perhaps_die("renaming", step) or replace(*given)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    with (folder / f"losses{RANK}").open("a") as told:
        train(folder / "checkpoints", told)
    undisturbed = train(None)
    for line in (folder / f"losses{RANK}").read_text().splitlines():
        step, loss = line.split()
        assert undisturbed[int(step)] == loss, f"step {step}: {loss}, expected {undisturbed[int(step)]}"
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["00000006", "00000008"], names
    dist.barrier()
    dist.destroy_process_group()
    if RANK == 0:
        print(f"attempt {ATTEMPT} ended as if nothing had happened")
    leave()


if __name__ == "__main__":
    main()
