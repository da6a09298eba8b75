"""Under torchrun: every rank asks rank 0 for the time, as it would from another machine."""

import time

import torch.distributed as dist

from gpipe_exec import leave
from gpipe_exec.devices.clocks import answer_the_time, ask_the_time, clock_offset


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for other in range(1, dist.get_world_size()):
        began = time.perf_counter()
        if rank == other:
            offset = ask_the_time()
            assert abs(offset) <= time.perf_counter() - began, "the error is at most the time that it took"
            assert offset != 0.0, "it was really asked for"
        elif rank == 0:
            answer_the_time(other)
    now, offset = clock_offset()
    assert offset == 0.0, "one machine has one clock"
    assert now <= time.perf_counter()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print("clocks agree")
    leave()


if __name__ == "__main__":
    main()
