"""Actions: the pieces of work that a step consists of, written as torch writes them.

``2F0`` is stage 2's forward of micro-batch 0. The letters are torch's too, so that programs can be exchanged with it.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Letter = Literal["F", "R", "B", "I", "W", "U", "S", "G"]


class Kind(NamedTuple):
    """What an action does."""

    letter: Letter
    name: str
    colour: str
    """In every chart; safe for colour-blind readers: Okabe and Ito (2008), and a brown."""
    number: int
    """In tables of actions, and in the hash that decides an action's luck: a new kind takes the next one."""
    computes: bool
    """Whether it counts as busy time: the update and collectives do not, since they belong to no micro-batch."""
    backward: bool
    """Whether it belongs to the backward pass."""


_KINDS = (
    Kind("F", "forward", "#0072B2", 0, computes=True, backward=False),
    Kind("R", "recompute", "#56B4E9", 1, computes=True, backward=True),
    Kind("B", "backward", "#E69F00", 2, computes=True, backward=True),
    Kind("U", "update", "#009E73", 3, computes=False, backward=False),
    Kind("I", "backward for the inputs", "#A6611A", 4, computes=True, backward=True),
    Kind("W", "backward for the weights", "#F0E442", 5, computes=True, backward=True),
    Kind("S", "sum of the gradients", "#AA4499", 6, computes=False, backward=False),
    Kind("G", "gather of the parameters", "#332288", 7, computes=False, backward=False),
)

KINDS: Mapping[Letter, Kind] = {kind.letter: kind for kind in _KINDS}
"""In the order of their numbers."""
COLLECTIVES: tuple[Letter, ...] = ("S", "G")
"""Those that ranks of several replicas do together, on a lane of their own (`lanes`): in no rank's list."""


class Action(NamedTuple):
    """One piece of work of one stage."""

    kind: Letter
    stage: int
    microbatch: int
    """-1 for the update and for collectives, which belong to no micro-batch."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}" + (str(self.microbatch) if self.microbatch >= 0 else "")
