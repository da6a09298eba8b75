"""What a link gives to messages: latency and bandwidth between neighbouring ranks, by ping-pong over several sizes.

torchrun --nnodes 2 ... -m gpipe_exec.probe          on several machines: what to write as `cluster.network`

seconds   |                      x
          |               x                  a message of n bytes takes latency + n / bandwidth,
          |       x                          fitted to all sizes at once
          | x  x
          +-------------------------- bytes
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from gpipe_exec.devices.accelerator import local_device, runs_in_order, synchronize
from gpipe_exec.devices.groups import start_processes
from gpipe_exec.devices.process import die_with_parent, leave
from gpipe_sim.base.files import write_text
from gpipe_sim.base.units import format_bandwidth, format_seconds, parse_bytes
from gpipe_sim.scenario.catalog import Link

LARGEST_BYTES = 2**24
SMALLEST_BYTES = 2**10
_EXCHANGES = range(3, 10)
"""As few as that of messages that take long, as many of quick ones."""
_PATIENCE_S = 1.0
_LEAST_PER_BYTE = 1e-15
"""Where no size takes longer than another: a petabyte a second, which every file format can say."""


def measure_link(device: torch.device, largest_bytes: float = LARGEST_BYTES) -> Link | None:
    """Between neighbouring ranks, one pair after the other: of each size the median over all pairs. Told to all.

    `largest_bytes` is that of the messages which the figures are for: caches, and buffers along the way, make larger
    ones slower and smaller ones faster than one straight line can say.
    """
    world = dist.get_world_size()
    if world < 2:
        return None
    sizes, seconds = probe_sizes(largest_bytes), [0.0]
    for size in sizes:
        exchanges = int(np.clip(_PATIENCE_S / max(8 * seconds[-1], 1e-9), _EXCHANGES.start, _EXCHANGES.stop - 1))
        pairs = [_ping_pong(size, first, exchanges, device) for first in range(world - 1)]
        seconds.append(statistics.median(pairs))

    return fit_link(sizes, seconds[1:])


def probe_sizes(largest_bytes: float) -> list[int]:
    """From small ones, which tell the latency, to the largest and half of it, which tell the bandwidth."""
    largest = max(int(largest_bytes), 64 * SMALLEST_BYTES)
    steps = [SMALLEST_BYTES * 4**n for n in range(16)]
    return [*(size for size in steps if size < largest // 2), largest // 2, largest]


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """latency + bytes / bandwidth by least squares: of absolute errors, which large messages dominate, for the
    bandwidth, then of relative ones, which small messages dominate, for the latency. Neither can be negative: what a
    buffer along the way lets pass for free is not seen."""
    taken, sent = np.array(seconds), np.array(sizes, dtype=float)
    per_byte = max(float(np.polyfit(sent, taken, 1)[0]), _LEAST_PER_BYTE)
    latency = float(((taken - per_byte * sent) / taken**2).sum() / (1 / taken**2).sum())
    return Link(name="measured", bandwidth=1 / per_byte, latency=max(0.0, latency))


def exchange(*, is_first: bool, in_order: bool) -> tuple[str, ...]:
    """What one of two neighbours does to send a message there and back.

    A receive that is begun before the send makes the message go straight to its place. Where a communicator's
    operations run in order (`wires`) it would keep the send waiting, on both sides.
    """
    if not is_first:
        return "begin to receive", "receive", "send"
    return ("send", "begin to receive", "receive") if in_order else ("begin to receive", "send", "receive")


def _ping_pong(size: int, first: int, exchanges: int, device: torch.device) -> float:
    """Seconds one way between two neighbours, the median of several exchanges; told to all."""
    rank, seconds = dist.get_rank(), [0.0]
    out, back = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    dist.barrier()
    if rank in (first, first + 1):
        peer = first + 1 if rank == first else first
        seconds = []
        for _ in range(exchanges):
            begin, receive = time.perf_counter(), None
            for part in exchange(is_first=rank == first, in_order=runs_in_order(device)):
                if part == "begin to receive":
                    receive = dist.irecv(back, peer)
                elif part == "send":
                    dist.send(out, peer)
                else:
                    assert receive is not None, "both ranks belong to the group"
                    receive.wait()
            synchronize(device)
            seconds.append((time.perf_counter() - begin) / 2)
    told = torch.tensor([statistics.median(seconds)], dtype=torch.double)
    dist.broadcast(told, src=first)
    return float(told)


def main() -> None:
    """Probe the network between the machines that torchrun was started on, one rank on each."""
    parser = argparse.ArgumentParser(prog="gpipe_exec.probe", description=main.__doc__)
    parser.add_argument(
        "--device", choices=["cpu", "cuda", "xpu"], default="cpu", help="whose memory the messages are in"
    )
    parser.add_argument("--largest", default="16 MiB", help="size of the largest message that matters (%(default)s)")
    parser.add_argument("--out", type=Path, help="write bandwidth (bytes/s) and latency (s) to this file as JSON")
    arguments = parser.parse_args()
    try:
        largest = parse_bytes(arguments.largest)
    except ValueError as error:
        parser.error(f"--largest: {error}")
    die_with_parent()
    device = local_device(arguments.device)
    start_processes(device, timedelta(seconds=120))
    try:
        link = measure_link(device, largest)
        if link is None:
            parser.error("found a single rank, expected one on each of several machines")
        if dist.get_rank() == 0:
            shown = f"{{bandwidth: {format_bandwidth(link.bandwidth)}, latency: {format_seconds(link.latency)}}}"
            print(shown, flush=True)
            if arguments.out:
                write_text(arguments.out, json.dumps({"bandwidth": link.bandwidth, "latency": link.latency}))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
