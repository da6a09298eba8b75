"""Courses: what a rank does in a step of so many samples. The last batch of an epoch is smaller; M follows it.

    batch 64, M = 8      F0 F1 F2 F3 F4 F5 F6 F7   B7 B6 B5 B4 B3 B2 B1 B0     8 samples each
    17 samples           F0 F1 F2                  B2 B1 B0                    6 6 5: as few as hold them

Micro-batches are no larger than the plan's, so that memory is no more than planned. The order is the plan's own without
the micro-batches that are not there: each needs nothing of another, so that an order stays one that can finish.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from gpipe_exec.engine.messages import Receiver, Sender
from gpipe_exec.engine.wires import Receive, posts_of
from gpipe_sim.plan.actions import Action
from gpipe_sim.plan.lanes import Lane
from gpipe_sim.plan.order import ActionList
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import Program, order_of, program_of, shape_of


@dataclass(frozen=True, eq=False)
class Course:
    """One rank's part of a step."""

    plan: Plan
    """For this many samples."""
    actions: ActionList
    sources: list[Receiver | None]
    """Action -> where it takes its message from."""
    targets: list[Sender | None]
    """Action -> where it sends its own."""
    posts: list[list[Receive]]
    """Moment -> receives to begin then (`wires`)."""
    evaluation_posts: list[list[Receive]]
    """The same where only forwards run."""
    split: dict[int, list[bool]]
    """Stage -> whether each micro-batch's backward is."""
    lane: Lane
    """The collectives of replicas."""

    @cached_property
    def sums_after(self) -> frozenset[int]:
        """Actions after which the gradients of their stage are summed over the replicas."""
        return frozenset(collective.after for collective in self.lane if collective.kind == "S")

    @cached_property
    def gathers_before(self) -> dict[int, list[Action]]:
        """Action -> the gathers of parameters that it waits for."""
        found: dict[int, list[Action]] = {}
        for collective in self.lane:
            if collective.kind == "G" and collective.before >= 0:
                found.setdefault(collective.before, []).append(collective.action)
        return found

    @property
    def batch(self) -> int:
        """Samples, of one replica."""
        return self.plan.samples


def plan_for_batch(plan: Plan, batch: int) -> Plan:
    """The same plan for a batch that is smaller than the one that it was made for."""
    if batch == plan.samples:
        return plan
    M = min(plan.num_microbatches, -(-batch // plan.sizes[0]))
    order = tuple(_without_later(actions, M) for actions in order_of(shape_of(plan)))
    return replace(plan, scenario=replace(plan.scenario, batch=batch * plan.replicas), num_microbatches=M, order=order)


def _without_later(actions: ActionList, num_microbatches: int) -> ActionList:
    there = actions.microbatches < num_microbatches
    kinds = np.frombuffer(actions.kinds, dtype=np.uint8)[there].tobytes()
    return ActionList(kinds, actions.stages[there], actions.microbatches[there])


def course_of(
    plan: Plan, position: int, senders: dict[int, Sender], receivers: dict[int, Receiver], *, in_order: bool
) -> Course:
    """The part of the rank at this position, with its ends of the program's channels, by their numbers."""
    program: Program = program_of(plan)
    M = plan.num_microbatches
    blocking = not plan.scenario.cluster.overlap
    posts = partial(posts_of, program, position, plan.window, in_order=in_order, blocking=blocking)
    mine = slice(*program.first[position : position + 2])
    return Course(
        plan,
        program.order[position],
        [receivers[message // M] if message >= 0 else None for message in program.takes[mine, 0]],
        [senders[message // M] if message >= 0 else None for message in program.sends[mine, 0]],
        posts(),
        posts(forwards_only=True),
        {stage: (program.at["I"][stage] >= 0).tolist() for stage in range(plan.num_stages)},
        program.lanes[position],
    )
