"""Process groups: the one that a run starts with, and those that a plan's wires need beside it."""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from gpipe_exec.devices.accelerator import backend_for, runs_in_order
from gpipe_exec.devices.reach import come_together


def start_processes(device: torch.device, timeout: timedelta, meeting: timedelta | None = None) -> None:
    """Meet the other processes that torchrun has started, on the CPU within `meeting`, if given; `timeout` is what any
    of them waits for another afterwards.

    With its device a communicator is made at once; without, at its first use, and the host waits for it then.
    """
    bound = device if device.type != "cpu" else None
    # Every unbatched operation would warn that those of a communicator run in order, which is what `wires` is about.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")

    def connect() -> None:
        dist.init_process_group(backend_for(device), timeout=timeout, device_id=bound)

    if bound is None and meeting is not None:
        come_together(connect, meeting)
    else:
        connect()


def make_communicators(count: int, device: torch.device) -> Sequence[dist.ProcessGroup | None]:
    """So many beside the world's, of all processes, for messages that run in order; with tags the world's is enough.

    Every process takes part. Where the world is bound to its device, they are split from its communicator.
    """
    if not runs_in_order(device) or not dist.is_initialized():
        return [None] * count
    backend = dist.get_default_backend_for_device(device)
    return [dist.new_group(backend=backend, timeout=_patience(device), device_id=device) for _ in range(count)]


def host_group(device: torch.device) -> dist.ProcessGroup | None:
    """Whose messages are in host memory: the world, unless it was started with nothing but the device's backend."""
    world = dist.group.WORLD
    if world is None or torch.device("cpu") in world._device_types:
        return None
    made: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_patience(device))
    return made


def _patience(device: torch.device) -> timedelta | None:
    """The world's own timeout, which other groups do not inherit."""
    world = dist.group.WORLD
    options = getattr(world._get_backend(device), "options", None) if world is not None else None
    found: timedelta | None = getattr(options, "_timeout", None)
    return found
