"""Process groups: the one that a run starts with, and those that a plan needs beside it.

All of them have the world's timeout, which a new group does not inherit. With NCCL a communicator's first use stops the
host until the others join, so whoever makes a group uses it once before the first step.
"""

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from gpipe_exec.devices.accelerator import backend_for, backends_of, runs_in_order
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

    Every process takes part.
    """
    if not runs_in_order(device):
        return [None] * count
    backend = backends_of(dist.get_backend_config())[device.type]
    return [make_group(None, device, backend) for _ in range(count)]


def host_group(device: torch.device) -> dist.ProcessGroup | None:
    """Whose messages are in host memory: the world, unless it was started with nothing but the device's backend."""
    return make_group(None, device, "gloo") if dist.is_initialized() and not _has_host_messages() else None


class Group(NamedTuple):
    """Some processes, and how they meet."""

    device: dist.ProcessGroup
    """In the memory of their devices."""
    host: dist.ProcessGroup
    """In host memory: the same group, if it can."""


def make_groups(groups: Iterable[Sequence[int]], device: torch.device) -> list[Group | None]:
    """Of these processes each; None where this one is not among them. Every process takes part in making all."""
    found: list[Group | None] = []
    for processes in groups:
        made = make_group(processes, device)
        host = made if _has_host_messages() else make_group(processes, device, "gloo")
        found.append(None if made is None or host is None else Group(made, host))
    return found


def make_group(
    processes: Sequence[int] | None, device: torch.device, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Of these processes, or of all, by the world's backend unless another is named; None where this one is not among
    them. Where the world is bound to its device, the group is split from its communicator."""
    world = dist.group.WORLD
    is_bound = backend != "gloo" and getattr(world, "bound_device_id", None) is not None
    ranks = None if processes is None else list(processes)
    made: dist.ProcessGroup = dist.new_group(
        ranks, _patience(device), backend=backend, device_id=device if is_bound else None
    )
    return made if ranks is None or dist.get_rank() in ranks else None


def _has_host_messages() -> bool:
    """Whether the world's groups take messages in host memory, whose host waits for nothing but their arrival."""
    return backends_of(dist.get_backend_config()).get("cpu") in ("gloo", "mpi")


def _patience(device: torch.device) -> timedelta | None:
    """The world's own timeout, if it tells."""
    world = dist.group.WORLD
    try:
        options = getattr(world._get_backend(device), "options", None) if world is not None else None
    except RuntimeError:  # a group of another make
        options = None
    found: timedelta | None = getattr(options, "_timeout", None)
    return found
