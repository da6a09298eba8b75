"""Lanes: the collectives of D replicas, which run beside a rank's actions, one at a time and in order.

    rank    F0 F1 F2 ...   B1 B0 |         U |                after: the action that must have ended
    lane                         |==S======| |==G==|          before: the action that must wait

The D ranks that hold the same stages do a collective together, so each of them has the same lane.

    S(stage)   sum of the gradients, after the stage's last B or W and before U, while other stages still drain:
               a sum, or a scatter where the weights are updated in shares
    G(stage)   gather of the parameters
               shard: parameters   from the step's beginning on, in the order of first use, before the stage's first F
               shard: optimizer    after U, and the step ends after it
"""

from collections.abc import Sequence
from typing import NamedTuple

from gpipe_sim.base.arrays import Indices
from gpipe_sim.plan.actions import Action, Letter
from gpipe_sim.scenario.schema import Shard


class Collective(NamedTuple):
    """One collective of the ranks that hold a stage."""

    kind: Letter
    """S or G."""
    stage: int
    after: int
    """The row, in the rank's list, of the action that must have ended; -1 for none."""
    before: int
    """The row of the action that must wait for it; -1 for none: then the step does."""

    @property
    def action(self) -> Action:
        """Its name."""
        return Action(self.kind, self.stage, -1)


Lane = tuple[Collective, ...]
"""A rank's collectives, in their order."""


def lane_of(stages: Sequence[int], first: int, update: int, forwards: Indices, ends: Indices, shard: Shard) -> Lane:
    """The lane of a rank that holds these stages and whose first action and update have these numbers.

    `forwards` and `ends` have the numbers of each stage's forwards, and of the actions that end its backwards.
    """
    first_use = {stage: int(forwards[stage].min()) - first for stage in stages}
    gathered = sorted(stages, key=lambda stage: first_use[stage])
    last_use = {stage: int(ends[stage].max()) - first for stage in stages}
    summed = sorted(stages, key=lambda stage: last_use[stage])
    sums = tuple(Collective("S", stage, last_use[stage], update - first) for stage in summed)
    if shard == "parameters":
        return (*(Collective("G", stage, -1, first_use[stage]) for stage in gathered), *sums)
    if shard == "optimizer":
        return (*sums, *(Collective("G", stage, update - first, -1) for stage in gathered))
    return sums
