"""Order: what each rank of a pipeline does, one action after the other, as arrays: a large plan has millions."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from gpipe_sim.base.arrays import Flags, Indices
from gpipe_sim.plan.actions import KINDS, Action, Letter

_LETTERS: dict[int, Letter] = {ord(letter): letter for letter in KINDS}


class ActionList(Sequence[Action]):
    """One rank's actions, in order, made when asked for.

    They are held as three arrays, nine bytes an action: the letters of their kinds, their stages and micro-batches.
    """

    def __init__(self, kinds: bytes, stages: Indices, microbatches: Indices) -> None:
        self.kinds, self.stages, self.microbatches = kinds, stages, microbatches

    @classmethod
    def of(cls, actions: Iterable[tuple[Letter, int, int]]) -> "ActionList":
        """The same actions."""
        if isinstance(actions, cls):
            return actions
        kinds, stages, microbatches = zip(*actions, strict=True)
        return cls("".join(kinds).encode(), np.array(stages, np.int32), np.array(microbatches, np.int32))

    def are(self, kind: Letter) -> Flags:
        """Which of the actions are of this kind."""
        found: Flags = np.frombuffer(self.kinds, dtype=np.uint8) == ord(kind)
        return found

    @cached_property
    def holds(self) -> tuple[int, ...]:
        """The stages that appear, ascending."""
        return tuple(np.unique(self.stages).tolist())

    def __len__(self) -> int:
        return len(self.kinds)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Action, ...]: ...
    def __getitem__(self, index: int | slice) -> Action | tuple[Action, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return Action(_LETTERS[self.kinds[index]], int(self.stages[index]), int(self.microbatches[index]))

    def __iter__(self) -> Iterator[Action]:
        for kind, stage, microbatch in zip(self.kinds, self.stages.tolist(), self.microbatches.tolist(), strict=True):
            yield Action(_LETTERS[kind], stage, microbatch)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ActionList):
            same = self.kinds == other.kinds and np.array_equal(self.stages, other.stages)
            return same and np.array_equal(self.microbatches, other.microbatches)
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.kinds, self.stages.tobytes(), self.microbatches.tobytes()))


Order = tuple[ActionList, ...]
"""By the rank's position in the pipeline."""
