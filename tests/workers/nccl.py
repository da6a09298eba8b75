"""Under torchrun: every schedule under NCCL's rules ends, and is exact; without the engine's care it hangs."""

import os
import threading

import torch
import torch.distributed as dist
from exactness import BATCH, anywhere, batch, check_plan, nested_model, plain_model, plan_of, reference
from nccl_rules import NAME, RulesOfStreams
from torch.nn.functional import mse_loss

from gpipe_exec import Pipeline, leave
from gpipe_exec.devices.recorder import Recorder

EVERY = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_gpipe", 2),
    ("interleaved_1f1b", 2),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zb_v", 2),
    ("dualpipe_v", 2),
)


def plans(K: int):
    for schedule, v in EVERY:
        for M, mode in ((1, "never"), (3, "always"), (4, "never")):
            if M == 1 and v == 1:
                continue
            settings = {"schedule": schedule, "stages": v * K, "stages_per_rank": v, "microbatches": M}
            yield plan_of(**settings, batch=BATCH, checkpoint=mode, recompute="on_demand", window=1 if M == 3 else 2)
    yield plan_of(schedule="naive", microbatches=1, batch=BATCH, stages=K)
    yield plan_of(schedule="1f1b", microbatches=4, batch=BATCH, stages=K, cluster={"overlap": False})
    for seed in range(6):
        yield anywhere(K, seed)


def check_all(K: int) -> None:
    checked = 0
    for model_of in (plain_model, nested_model):
        history = reference(model_of())
        for plan in plans(K):
            if model_of is nested_model and plan.num_microbatches != 3:
                continue
            check_plan(model_of, history, plan, recorder=Recorder(RulesOfStreams(), enabled=True))
            checked += 1
    if dist.get_rank() == 0:
        print(f"{checked} plans are exact")


class Late(Recorder):
    """Waits for its device not as the step begins, but as its first action does."""

    begun = True

    def begin_step(self) -> None:
        self.begun = False

    def mark(self) -> float:
        if not self.begun:
            self.begun = True
            super().begin_step()
        return super().mark()


def hang(way: str, K: int) -> None:
    """A step with something of the engine's care taken away; whoever waits too long says so and leaves."""

    def give_up() -> None:
        if dist.get_rank() == 0:
            print("hangs", flush=True)
        os._exit(0)

    if way == "cold":
        # First in, first out: the receive of the first gradient is begun before the forward that the peer needs for it.
        plan = plan_of(schedule="gpipe", stages=K, microbatches=2, backward="fifo", batch=BATCH)
    else:  # what is taken first is not what is sent first; or, of one micro-batch, the first receive is begun at once
        M = 4 if way == "unordered" else 1
        plan = plan_of(schedule="interleaved_1f1b", stages=2 * K, stages_per_rank=2, microbatches=M, batch=BATCH)
    if way != "late":
        Pipeline._warm_up = lambda pipe, numbers: None
    recorder = Late(RulesOfStreams(), enabled=True) if way == "late" else None
    pipe = Pipeline(plain_model(), plan, mse_loss, recorder=recorder, in_order=None if way != "unordered" else False)
    dist.barrier()
    timer = threading.Timer(10, give_up)
    timer.start()
    for step in range(2):  # from the second on forms are known, and receives begun ahead
        pipe.step(*batch(step))
    dist.barrier()
    timer.cancel()
    if dist.get_rank() == 0:
        print("ends")


def main() -> None:
    dist.init_process_group(NAME)
    torch.set_num_threads(1)
    K = dist.get_world_size()
    if "NCCL_WITHOUT" in os.environ:
        hang(os.environ["NCCL_WITHOUT"], K)
    else:
        check_all(K)
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
