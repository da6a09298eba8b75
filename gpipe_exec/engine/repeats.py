"""Whether a recomputation repeats its forward: what each layer computed, the first time and again.

A layer that draws from a generator of its own, counts its calls, or reads what another writes computes something else
the second time, and the gradients are then those of another output. In a first step each layer's output is reduced to a
few sums, which are held until its recomputation and compared:

    sum x,   sum w x  with w from -1 to 1        another dropout mask changes them by about |x|, rounding by eps |x|
"""

from dataclasses import dataclass, field

import torch

from gpipe_exec.devices.allocator import local_part
from gpipe_exec.engine.messages import Value, flatten

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Of |x|, the root of the sum of squares."""
_COARSE = 3e-2
"""The same of half precision."""


@dataclass
class RepeatCheck:
    """Of one stage and one step."""

    _prints: dict[int, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)
    """Micro-batch -> the layers that it passed, in order, each with the sums of its output."""
    _first: list[tuple[str, torch.Tensor]] | None = None
    _again: list[tuple[str, torch.Tensor]] | None = None

    def first(self, microbatch: int) -> None:
        """The forward of a micro-batch that will be recomputed follows."""
        self._first = self._prints[microbatch] = []

    def again(self, microbatch: int) -> None:
        """Its recomputation follows."""
        self._again = self._prints.pop(microbatch)

    def over(self) -> None:
        """It has ended."""
        self._first = self._again = None

    def note(self, layer: str, output: Value) -> None:
        """A layer's output; raise ValueError if it was another one the first time."""
        if self._first is not None:
            self._first.append((layer, _sums(output)))
        elif self._again:
            _, before = self._again.pop(0)
            if not _same(before, _sums(output)):
                raise ValueError(
                    f"{layer} computes something else when it is recomputed, so that gradients would be wrong. It may "
                    "draw from a generator of its own, or keep state between calls: expected checkpoint: never for "
                    "its stage, or a layer that repeats itself; checks=False switches the check off"
                )


def _sums(output: Value) -> torch.Tensor:
    """A row for each tensor: two sums, the norm, and the tolerance."""
    rows = []
    try:
        tensors = flatten(output)[0]
    except TypeError:  # inside a stage layers may pass on anything
        tensors = []
    with torch.no_grad():
        for tensor in tensors:
            own = local_part(tensor)
            real = torch.view_as_real(own) if own.is_complex() else own
            x = real.double().flatten()
            weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device)
            tolerance = _TOLERANCE.get(real.dtype, _COARSE) if real.is_floating_point() else 0.0
            rows.append(torch.stack([x.sum(), weights @ x, x.norm(), torch.full_like(x.sum(), tolerance)]))
    return torch.stack(rows) if rows else torch.empty(0, 4)


def _same(before: torch.Tensor, now: torch.Tensor) -> bool:
    if before.shape != now.shape:
        return False
    allowed = before[:, 2:3] * before[:, 3:4]
    near = (before[:, :2] - now[:, :2]).abs() <= allowed
    return bool((near | ~(before[:, :2] + now[:, :2]).isfinite()).all())
