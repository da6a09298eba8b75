"""A plan of three ranks, trained by as many processes as there are, one of which may kill itself before a step."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from training import batch, model, over_tokens, plan_of

from gpipe_exec import Pipeline, leave, plan_for_world

STEPS, SAVE_EVERY = 8, 2


def main() -> None:
    folder, killed_at = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    plan = plan_for_world(plan_of(stages=3, schedule="1f1b", checkpoint="always"))
    pipe = Pipeline(model(), plan, over_tokens)
    optimizer = torch.optim.Adam([{"params": pipe.parameters()}], lr=0.05)
    position = pipe.load(folder / "checkpoints", optimizer)
    for step in range(position["step"] if position else 0, STEPS):
        if step == killed_at and pipe.is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = pipe.step(*batch(step), optimizer.step)
        optimizer.zero_grad()
        if pipe.is_first:
            with (folder / "losses").open("a") as told:
                print(pipe.plan.num_ranks, step, float(loss).hex(), file=told)
        if (step + 1) % SAVE_EVERY == 0:
            pipe.save(folder / "checkpoints", optimizer, step + 1)
    pipe.close()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
