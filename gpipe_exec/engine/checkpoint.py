"""Checkpoints: model, optimizer, random states and position, whole or not there, read under any other plan.

    FOLDER/00000100/        torch's distributed checkpoint of step 100: every rank has written its own part
    FOLDER/00000200/        a later one
    FOLDER/writing-00000300/    being written, or left by a run that was killed: never read

Tensors have the names that the whole model has for them (`model.3.weight`), whichever rank holds them, so that ranks of
any plan find their own part, and one process finds all. A checkpoint gets its name when everything has been written.
What is not a tensor is JSON in one.
"""

import json
import random
import shutil
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from gpipe_exec.devices import accelerator

_WRITING = "writing-"
Tensors = dict[str, torch.Tensor]


class CheckpointError(ValueError):
    """A checkpoint is not there, or not of this model; the message says which."""


class Checkpoints:
    """One rank's part in writing and reading the checkpoints of a folder, which every rank must see."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        """Every rank makes it at the same time."""
        self._rank, self._num_ranks = rank, num_ranks
        # Of its own, since a checkpoint is written by a thread while the rank goes on with others of its collectives.
        self._group = dist.new_group(backend="gloo") if num_ranks > 1 else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, folder: Path, tensors: Tensors, step: int, *, keep: int, wait: bool) -> None:
        """Write these tensors of this rank; without `wait`, copies of them, while the rank goes on."""
        self.finish()
        if wait:
            self._write(folder, tensors, step, keep)
            return
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._thread = threading.Thread(target=self._write_aside, args=(folder, copies, step, keep), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Return when what is being written has been; raise what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def latest(self, folder: Path) -> Path | None:
        """The last whole checkpoint there, as rank 0 sees it; what was left half written is removed."""
        self.finish()
        names = [path.name for path in whole_checkpoints(folder)]
        if self._rank == 0:
            for left in folder.glob(f"{_WRITING}*"):
                shutil.rmtree(left, ignore_errors=True)
        agreed: list[str | None] = [names[-1] if names else None]
        if self._num_ranks > 1:
            dist.broadcast_object_list(agreed, src=0, group=self._group)
        return folder / agreed[0] if agreed[0] else None

    def read(self, path: Path, into: Tensors) -> None:
        """Fill these tensors from a checkpoint; every rank takes part."""
        _load(path, into)

    def _write_aside(self, folder: Path, tensors: Tensors, step: int, keep: int) -> None:
        try:
            self._write(folder, tensors, step, keep)
        except BaseException as error:  # told at the next `finish`
            self._error = error

    def _write(self, folder: Path, tensors: Tensors, step: int, keep: int) -> None:
        partial, whole = folder / f"{_WRITING}{step:08}", folder / f"{step:08}"
        if self._rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._together()
        writer = FileSystemWriter(partial)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process it may be
            save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._num_ranks == 1)
        if self._rank == 0:
            shutil.rmtree(whole, ignore_errors=True)
            partial.replace(whole)
            for old in whole_checkpoints(folder)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
        self._together()

    def _together(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)


def _load(path: Path, into: Tensors) -> None:
    """Every rank by itself: none has to wait for another, and each needs other names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # here it need not be known
        load(dict(into), storage_reader=FileSystemReader(path), no_dist=True)


def whole_checkpoints(folder: Path) -> list[Path]:
    """Those that can be read, the latest last."""
    return sorted(path for path in folder.glob("[0-9]" * 8) if (path / ".metadata").is_file())


def forms(path: Path) -> Tensors:
    """Every tensor of a checkpoint by its name, empty on the meta device."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_model(folder: Path | str) -> Tensors:
    """The whole model's state from the latest checkpoint of a folder, or from one itself: for ``load_state_dict``.

    >>> module.load_state_dict(read_model("checkpoints"))
    """
    path = Path(folder)
    if not (path / ".metadata").is_file():
        found = whole_checkpoints(path)
        if not found:
            raise CheckpointError(
                f"{folder}: there is no checkpoint, expected a folder such as 00000100 with .metadata"
            )
        path = found[-1]
    wanted = {name: torch.empty_like(t, device="cpu") for name, t in forms(path).items() if name.startswith("model.")}
    _load(path, wanted)
    return {name.removeprefix("model."): tensor for name, tensor in wanted.items()}


# --- what is not a tensor --------------------------------------------------------------------------------------------


def as_tensor(value: Any) -> torch.Tensor:
    """JSON, as bytes."""
    return torch.from_numpy(np.frombuffer(json.dumps(value).encode(), dtype=np.uint8).copy())


def from_tensor(tensor: torch.Tensor) -> Any:
    """The reverse."""
    return json.loads(bytes(tensor.cpu().numpy()))


def random_states(device: torch.device) -> Tensors:
    """Of torch, of its device, of Python and of numpy."""
    version, numbers, gauss = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    of_numpy["state"] = {name: np.asarray(value).tolist() for name, value in of_numpy["state"].items()}
    found = {"torch": torch.get_rng_state(), "python": as_tensor([version, numbers, gauss])}
    found["numpy"] = as_tensor(of_numpy)
    on_device = accelerator.random_state(device)
    return found if on_device is None else found | {"device": on_device}


def set_random_states(states: Tensors, device: torch.device) -> None:
    """The reverse."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = from_tensor(states["python"])
    random.setstate((version, tuple(numbers), gauss))
    of_numpy = from_tensor(states["numpy"])
    of_numpy["state"]["key"] = np.array(of_numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state(of_numpy)
    accelerator.set_random_state(device, states.get("device"))


# --- the optimizer, by the names of parameters -----------------------------------------------------------------------


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> Tensors:
    """What the optimizer knows of each parameter, and the options of its group."""
    found: Tensors = {}
    for group in optimizer.param_groups:
        options = {key: _plain(value) for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            name = names[parameter]
            found[f"optimizer.{name}/options"] = as_tensor(options)
            for key, value in optimizer.state.get(parameter, {}).items():
                is_tensor = isinstance(value, torch.Tensor)
                found[f"optimizer.{name}/{key}"] = value if is_tensor else as_tensor(value)
    return found


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], tensors: Tensors
) -> dict[str, Any]:
    """What ``optimizer.load_state_dict`` takes, from tensors by name."""
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in optimizer.state_dict()["param_groups"]:
        held = optimizer.param_groups[len(groups)]["params"]
        groups.append(dict(group))
        for parameter in held:
            prefix = f"optimizer.{names[parameter]}/"
            mine = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            options = mine.pop("options", None)
            if options is not None:
                read = from_tensor(options)
                groups[-1] |= {
                    key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in read.items()
                }
            if mine:
                state[number] = mine
            number += 1
    return {"state": state, "param_groups": groups}
