"""Plan to ordered actions: what each rank does, in which order. The simulator and the engine run these very lists.

An action is written as torch writes it: ``2F0`` is stage 2's forward of micro-batch 0.

    F  forward                 needs the previous stage's output of that micro-batch
    R  recompute the forward   needs nothing (recompute: early) or the gradient (on_demand)
    B  backward                needs the next stage's gradient of that micro-batch; at the last stage, the loss
    U  update                  after the stage's last backward

Communication is implied by what an action needs. A schedule is a pure function from stage, K and M to the order of F
and B; recomputation and update are added in one place, `stage_order`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from gpipe_sim.plan import Plan
from gpipe_sim.scenario import BackwardOrder, Recompute, ScheduleName

Kind = Literal["F", "R", "B", "U"]


class Action(NamedTuple):
    """One piece of work of one stage."""

    kind: Kind
    stage: int
    microbatch: int
    """-1 for the update, which belongs to no micro-batch."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}" + (str(self.microbatch) if self.microbatch >= 0 else "")


_KINDS: dict[int, Kind] = {ord("F"): "F", ord("R"): "R", ord("B"): "B", ord("U"): "U"}


class ActionList(Sequence[Action]):
    """One rank's actions, in order. A large plan has millions, so they are made when asked for.

    They are held as two arrays, five bytes an action: the letters of their kinds, and their micro-batches.
    """

    __slots__ = ("kinds", "microbatches", "stage")

    def __init__(self, stage: int, kinds: bytes, microbatches: npt.NDArray[np.int32]) -> None:
        self.stage, self.kinds, self.microbatches = stage, kinds, microbatches

    @classmethod
    def of(cls, actions: Sequence[Action]) -> "ActionList":
        """The same actions, all of one stage."""
        if isinstance(actions, cls):
            return actions
        kinds, _, microbatches = zip(*actions, strict=True)
        return cls(actions[0].stage, "".join(kinds).encode(), np.array(microbatches, dtype=np.int32))

    def are(self, kind: Kind) -> npt.NDArray[np.bool_]:
        """Which of the actions are of this kind."""
        found: npt.NDArray[np.bool_] = np.frombuffer(self.kinds, dtype=np.uint8) == ord(kind)
        return found

    def __len__(self) -> int:
        return len(self.kinds)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Action, ...]: ...
    def __getitem__(self, index: int | slice) -> Action | tuple[Action, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return Action(_KINDS[self.kinds[index]], self.stage, int(self.microbatches[index]))

    def __iter__(self) -> Iterator[Action]:
        stage = self.stage
        for kind, microbatch in zip(self.kinds, self.microbatches.tolist(), strict=True):
            yield Action(_KINDS[kind], stage, microbatch)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ActionList):
            same = (self.stage, self.kinds) == (other.stage, other.kinds)
            return same and np.array_equal(self.microbatches, other.microbatches)
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash((self.stage, self.kinds))


Order = Iterator[tuple[Literal["F", "B"], int]]


def naive(stage: int, num_stages: int, num_microbatches: int, backward: BackwardOrder) -> Order:
    """The whole batch through all stages at once: one device works, the others wait.

    stage 0  F0          B0
    stage 1     F0    B0
    stage 2       F0B0          bubble (K-1)/K
    """
    yield "F", 0
    yield "B", 0


def gpipe(stage: int, num_stages: int, num_microbatches: int, backward: BackwardOrder) -> Order:
    """All forwards, then all backwards, in reverse order of micro-batches as in the paper, or first in first out.

    stage 0  F0 F1 F2                B2 B1 B0
    stage 1     F0 F1 F2          B2 B1 B0
    stage 2        F0 F1 F2    B2 B1 B0        bubble (K-1)/(M+K-1)
    """
    for microbatch in range(num_microbatches):
        yield "F", microbatch
    order = range(num_microbatches)
    for microbatch in reversed(order) if backward == "reverse" else order:
        yield "B", microbatch


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int, backward: BackwardOrder) -> Order:
    """After K-1-k warm-up forwards, one forward and one backward in turn: at most K-k micro-batches are held.

    stage 0  F0 F1 F2       B0 F3 B1    B2    B3
    stage 1     F0 F1    B0 F2 B1 F3 B2    B3
    stage 2        F0 B0 F1 B1 F2 B2 F3 B3           bubble (K-1)/(M+K-1), first in first out
    """
    ahead = min(num_stages - 1 - stage, num_microbatches)
    for microbatch in range(ahead):
        yield "F", microbatch
    for microbatch in range(num_microbatches):
        if microbatch + ahead < num_microbatches:
            yield "F", microbatch + ahead
        yield "B", microbatch


SCHEDULES: dict[ScheduleName, Callable[[int, int, int, BackwardOrder], Order]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}


def in_flight(schedule: ScheduleName, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Micro-batches of which a stage has run the forward and not yet the backward, at most at a time."""
    return min(num_stages - stage, num_microbatches) if schedule == "1f1b" else num_microbatches


def stage_order(
    schedule: ScheduleName,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    backward: BackwardOrder,
    recomputed: Sequence[bool],
) -> Iterator[tuple[Kind, int]]:
    """One stage's kinds and micro-batches. R(m) stands directly before B(m), so at most one rematerialised is held:

    F0 F1 F2   R2 B2   R1 B1   R0 B0   U
    """
    for kind, microbatch in SCHEDULES[schedule](stage, num_stages, num_microbatches, backward):
        if kind == "B" and recomputed[microbatch]:
            yield "R", microbatch
        yield kind, microbatch
    yield "U", -1


def stage_actions(plan: Plan, stage: int) -> ActionList:
    """One stage's list."""
    K, M = plan.num_stages, plan.num_microbatches
    order = stage_order(plan.schedule, stage, K, M, plan.backward, plan.recomputed(stage))
    kinds, microbatches = zip(*order, strict=True)
    return ActionList(stage, "".join(kinds).encode(), np.array(microbatches, dtype=np.int32))


@lru_cache(maxsize=4)
def rank_actions(plan: Plan) -> tuple[ActionList, ...]:
    """Every rank's list, in the order of `Plan.ranks`."""
    stage_of = {rank: stage for stage, rank in enumerate(plan.placement)}
    return tuple(stage_actions(plan, stage_of[rank]) for rank in plan.ranks)


def sender_of(action: Action) -> Action:
    """The action whose message this one takes, if it takes any: the forward before it, or the backward after it."""
    kind, stage, microbatch = action
    return Action("F", stage - 1, microbatch) if kind == "F" else Action("B", stage + 1, microbatch)


def gradient_taker(recompute: Recompute, recomputed: bool) -> Kind:
    """Which action of a micro-batch waits for the next stage's gradient.

    The backward does, unless the micro-batch is recomputed on demand: then its R waits, and its B finds it there.
    """
    return "R" if recomputed and recompute == "on_demand" else "B"


def gradient_takers(plan: Plan, stage: int) -> tuple[Kind, ...]:
    """For each micro-batch of the stage, which action waits for the next stage's gradient."""
    return tuple([gradient_taker(plan.recompute, again) for again in plan.recomputed(stage)])


def takes_message(plan: Plan, action: Action) -> bool:
    """Whether the action waits for a message from another stage, that of `sender_of`."""
    kind, stage, microbatch = action
    if kind == "F":
        return stage > 0
    return kind != "U" and stage < plan.num_stages - 1 and gradient_takers(plan, stage)[microbatch] == kind
