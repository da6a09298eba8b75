"""One clock for all ranks: how far each rank's clock is from rank 0's.

`time.perf_counter` is one clock for all processes of a machine. Between machines a rank asks rank 0 for the time:

    rank r     asked |----------------------> answered        offset = rank 0's time - (asked + answered) / 2
    rank 0                  its time ^

The quickest of several exchanges is the most exact: the error is at most half of its round trip. Offsets are taken
before the first step and after the last, and interpolated, since clocks drift apart. Questions and answers are in host
memory: a message in a device's would be told to it and not yet be there.
"""

import platform
import time
from pathlib import Path

import torch
import torch.distributed as dist

_EXCHANGES = 30


def clock_offset() -> tuple[float, float]:
    """(this rank's time now, seconds to add to it to have rank 0's). Every rank takes part."""
    machines: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(machines, _machine())
    offset = 0.0
    for rank in range(1, len(machines)):
        if machines[rank] != machines[0]:
            if dist.get_rank() == rank:
                offset = ask_the_time()
            elif dist.get_rank() == 0:
                answer_the_time(rank)
    return time.perf_counter(), offset


def _machine() -> str:
    """Equal for processes whose clocks are one: those of one boot of one kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.is_file() else platform.node()


def ask_the_time() -> float:
    """Seconds to add to this rank's clock to have rank 0's, which answers with `answer_the_time`."""
    told = torch.zeros(1, dtype=torch.float64)
    found = []
    for _ in range(_EXCHANGES):
        asked = time.perf_counter()
        dist.send(told, 0)
        dist.recv(told, 0)
        theirs = float(told)
        answered = time.perf_counter()
        found.append((answered - asked, theirs - (asked + answered) / 2))
    return min(found)[1]


def answer_the_time(rank: int) -> None:
    """Tell a rank this one's time, as often as it asks."""
    told = torch.zeros(1, dtype=torch.float64)
    for _ in range(_EXCHANGES):
        dist.recv(told, rank)
        told.fill_(time.perf_counter())
        dist.send(told, rank)
