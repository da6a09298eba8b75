"""Attention that is recomputed by itself inside its layer's backward (``plan.recompute_unit: attention``).

    forward      queries, keys, values ---> scores ---> softmax ---> weighted sum ---> projection
                        kept                |______ let go of ______|    kept with what follows
    backward                                |_ run again, just before its own backward _|

A layer marks the part by calling it through `attention`; a stage says with `watched_attention` whether it is recomputed
in the forward under way, and a profile how long it takes. The random state in which it ran is kept and restored for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch.utils.checkpoint import checkpoint

from gpipe_exec.devices.accelerator import Mark


@dataclass
class Watched:
    """The attention of a forward."""

    recomputes: bool
    now: Callable[[], Mark] | None = None
    """Tells the moment, where its time is asked for."""
    calls: int = 0
    spans: list[tuple[Mark, Mark]] = field(default_factory=list)
    """When each call began and ended, where that is asked for."""


_watched: ContextVar[Watched | None] = ContextVar("watched", default=None)


@contextmanager
def watched_attention(*, recomputes: bool, now: Callable[[], Mark] | None = None) -> Iterator[Watched]:
    """Around a forward: whether its attention keeps queries, keys and values only."""
    found = Watched(recomputes, now)
    token = _watched.set(found)
    try:
        yield found
    finally:
        _watched.reset(token)


def recomputes_attention() -> bool:
    """Whether the attention of the forward under way is recomputed; who asks says that it has some."""
    found = _watched.get()
    if found is None:
        return False
    found.calls += 1
    return found.recomputes and torch.is_grad_enabled()


def attention(core: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
    """The core's result: from it on everything is kept, of the core itself nothing where it is recomputed.

    A model of one's own calls the quadratic part of its attention through this.
    """
    watched = _watched.get()
    began = watched.now() if watched is not None and watched.now is not None else None
    if recomputes_attention():
        result: torch.Tensor = checkpoint(core, *given, use_reentrant=False, preserve_rng_state=True)
    else:
        result = core(*given)
    if watched is not None and watched.now is not None and began is not None:
        watched.spans.append((began, watched.now()))
    return result
