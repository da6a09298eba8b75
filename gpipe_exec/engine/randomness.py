"""Random states of torch, of its device, of Python and of numpy: what a recomputation draws again.

They are asked for in every action that is recomputed. numpy takes a hundred times as long as torch to tell its state,
which few layers change: while the generator's own bytes are the same, so is the state, and it is not asked again.
"""

import ctypes
import random
from typing import Any, NamedTuple

import numpy as np
import torch

from gpipe_exec.devices import accelerator


class RandomState(NamedTuple):
    """All of it at one moment; equal states of numpy are one object."""

    torch: torch.Tensor
    device: torch.Tensor | None
    python: tuple[Any, ...]
    numpy: dict[str, Any]


def random_state(device: torch.device) -> RandomState:
    """Now."""
    return RandomState(torch.get_rng_state(), accelerator.random_state(device), random.getstate(), _state_of_numpy())


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Go back to it."""
    torch.set_rng_state(state.torch)
    accelerator.set_random_state(device, state.device)
    random.setstate(state.python)
    if _state_of_numpy() is not state.numpy:
        np.random.set_state(state.numpy)


_MT19937_BYTES = 624 * 4 + 4
"""Its words and its position among them."""
_latest: tuple[bytes, dict[str, Any]] | None = None
"""The generator's bytes, and numpy's state then; None if that held a number drawn already, which is not in them."""


def _state_of_numpy() -> dict[str, Any]:
    global _latest
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy has no type for it
    if not isinstance(generator, np.random.MT19937):
        return dict(np.random.get_state(legacy=False))
    now = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    if _latest is not None and _latest[0] == now:
        return _latest[1]
    state = dict(np.random.get_state(legacy=False))
    _latest = None if state["has_gauss"] else (now, state)
    return state
