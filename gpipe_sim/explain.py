"""Why is it slow: the waterfall that sums to the step, and the critical path through it."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from gpipe_sim.metrics import pipeline_time_s
from gpipe_sim.plan import Plan
from gpipe_sim.schedule import Action
from gpipe_sim.simulate import Effects, simulate
from gpipe_sim.step import RankTimeline, Span, Step

PARTS = (
    "compute",
    "small_batches",
    "recompute",
    "imbalance",
    "fill_drain",
    "overhead",
    "communication",
    "contention",
    "jitter",
    "update",
)

LABELS: Mapping[str, str] = {
    "compute": "useful compute",
    "small_batches": "small micro-batches",
    "recompute": "recomputation",
    "imbalance": "imbalance",
    "fill_drain": "fill and drain",
    "overhead": "engine overhead",
    "communication": "communication",
    "contention": "contention",
    "jitter": "jitter",
    "update": "update",
}


def breakdown_s(plan: Plan, nominal: Step, mean_pipeline_s: float, mean_step_s: float) -> dict[str, float]:
    """The waterfall: seconds that each cause adds, in this order; they sum to the step time exactly.

        compute         F and B of the whole batch in one call, spread evenly over the ranks
        small_batches   + what M small calls take more than one large one
        recompute       + forwards that are run again
        imbalance       + the slowest rank's busy time, stragglers included, less the mean
        fill_drain      + the schedule's dependencies, with links and overheads switched off
        overhead        + the engine's own time per action and hop
        communication   + links, receive windows and blocking sends, each link to itself
        contention      + NICs and cores shared (may be negative: a fair share can help the critical path)
        jitter          + mean over samples less the step without jitter (either sign)
        update          + what the optimizer adds after the last backward

    Each part is the difference between two steps that differ only in that cause. Without jitter `nominal` is the
    step itself; the means are then its own times.
    """
    R, profile = plan.num_stages, plan.profile
    whole = profile.at(plan.scenario.batch)
    one_call = float((whole.forward_s + whole.backward_s).sum())
    many_calls = sum(float((profile.at(n).forward_s + profile.at(n).backward_s).sum()) for n in plan.sizes)
    forward_s, backward_s = plan.forward_s(), plan.backward_s()
    again_s = forward_s * np.array([plan.recomputed(stage) for stage in range(R)])
    slowdowns = np.array([plan.slowdown(stage) for stage in range(R)])
    recompute = float((again_s.sum(axis=1) / slowdowns).sum())
    slowest = float((forward_s + backward_s + again_s).sum(axis=1).max())

    no_links = Effects(overhead=False, communication=False, sharing=False)
    levels = [pipeline_time_s(simulate(plan, effects=no_links, memory=False))]
    has_overhead = profile.action_overhead_s or profile.hop_overhead_s
    with_overhead = Effects(communication=False, sharing=False)
    levels.append(pipeline_time_s(simulate(plan, effects=with_overhead, memory=False)) if has_overhead else levels[0])
    full = pipeline_time_s(nominal)
    alone = Effects(sharing=False)
    shares = plan.shared_nics or plan.crowded_nodes
    levels.append(pipeline_time_s(simulate(plan, effects=alone, memory=False)) if shares else full)
    levels += [full, mean_pipeline_s, mean_step_s]

    totals = [0.0, one_call / R, many_calls / R, (many_calls + recompute) / R, slowest, *levels]
    return {part: after - before for part, (before, after) in zip(PARTS, pairwise(totals), strict=True)}


# --- critical path -------------------------------------------------------------------------------------------------


def critical_path(plan: Plan, step: Step) -> list[Span]:
    """The chain of work and messages that sets the step time, first to last, without gaps but for engine overhead.

    Walk back from the action that ends last. What let it start when it did: the rank's previous action, or its
    message? What let the message start: its sender, the message before it on the link, or the receive that was
    posted when the receiver took an earlier message?
    """
    return _Walk(plan, step).back()


_Place = tuple[RankTimeline, int]
"""An action: its rank's timeline and its row there."""


class _Walk:
    def __init__(self, plan: Plan, step: Step) -> None:
        self.plan = plan
        self.place: dict[Action, _Place] = {
            action: (timeline, row) for timeline in step.ranks for row, action in enumerate(timeline.actions)
        }
        self.last = max(step.ranks, key=lambda timeline: float(timeline.end_s[-1]))
        self.path: list[Span] = []

    def back(self) -> list[Span]:
        current: _Place | None = (self.last, len(self.last.actions) - 1)
        while current is not None:
            timeline, row = current
            span = Span(timeline.rank, "compute", timeline.actions[row], timeline.start_s[row], timeline.end_s[row])
            self.path.append(span)
            current = self._before(timeline, row)
        return self.path[::-1]

    def _before(self, timeline: RankTimeline, row: int) -> _Place | None:
        """The action whose end, directly or through messages, let this one start."""
        free = timeline.end_s[row - 1] if row > 0 else 0.0
        held = row > 0 and timeline.blocking and timeline.send_end_s[row - 1] > free
        if held:
            free = timeline.send_end_s[row - 1]
        if timeline.arrived_s[row] > free:
            kind, stage, microbatch = timeline.actions[row]
            sender = Action("F", stage - 1, microbatch) if kind == "F" else Action("B", stage + 1, microbatch)
            return self._through(self.place[sender], timeline.arrived_s[row])
        if held:
            return self._through((timeline, row - 1), free)
        return (timeline, row - 1) if row > 0 else None

    def _through(self, sender: _Place, end: float) -> _Place | None:
        """Add the message that this action sent, up to `end`, then find what let it start."""
        timeline, row = sender
        action, start = timeline.actions[row], float(timeline.send_start_s[row])
        self.path.append(Span(timeline.rank, "send", action, start, end))
        if start <= timeline.end_s[row]:
            return sender
        receiver_stage = action.stage + (1 if action.kind == "F" else -1)
        latency = self.plan.link(min(action.stage, receiver_stage)).latency + self.plan.profile.hop_overhead_s
        earlier = [r for r in range(row) if timeline.actions[r].kind == action.kind]
        if earlier and abs(timeline.send_end_s[earlier[-1]] - latency - start) <= 1e-9 * start:
            return self._through((timeline, earlier[-1]), start)
        receiver = next(t for t, _ in self.place.values() if t.stage == receiver_stage)
        taking = int(np.argmin(np.abs(receiver.start_s - self.plan.profile.action_overhead_s - start)))
        return self._before(receiver, taking)
