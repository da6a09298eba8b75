"""Why is it slow: the waterfall that sums to the step, and the critical path through it."""

from collections.abc import Mapping
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gpipe_sim.plan import Plan
from gpipe_sim.schedule import Action, sender_of
from gpipe_sim.simulate import Effects
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


_NO_LINKS = Effects(overhead=False, communication=False, sharing=False)
_NO_COMMUNICATION = Effects(communication=False, sharing=False)
_ALONE = Effects(sharing=False)


def counterfactuals(plan: Plan) -> tuple[Effects, ...]:
    """The effects under which `breakdown_s` needs the plan's pipeline time, beside that with all of them."""
    has_overhead = plan.profile.action_overhead_s or plan.profile.hop_overhead_s
    shares = plan.shared_nics or plan.crowded_nodes
    return _NO_LINKS, *([_NO_COMMUNICATION] if has_overhead else []), *([_ALONE] if shares else [])


def breakdown_s(
    plan: Plan, without_s: Mapping[Effects, float], nominal_s: float, mean_pipeline_s: float, mean_step_s: float
) -> dict[str, float]:
    """The waterfall: seconds that each cause adds, in this order; they sum to the step time exactly.

        compute         F and B of the whole batch in one call, spread over the ranks by their speed, so that all end
                        together
        small_batches   + what M small calls take more than one large one
        recompute       + forwards that are run again
        imbalance       + the slowest rank's busy time, less the time if work were spread like that
        fill_drain      + the schedule's dependencies, with links and overheads switched off
        overhead        + the engine's own time per action and hop
        communication   + links, receive windows and blocking sends, each link to itself
        contention      + NICs and cores shared (may be negative: a fair share can help the critical path)
        jitter          + mean over samples less the step without jitter (either sign)
        update          + what the optimizer adds after the last backward

    Each part is the difference between two times that differ only in that cause: sums of compute times up to the
    imbalance, simulated steps from there on. `without_s` are the pipeline times under the `counterfactuals`,
    `nominal_s` the one without jitter.
    """
    profile = plan.profile
    whole = profile.at(plan.scenario.batch)
    one_call = float((whole.forward_s + whole.backward_s).sum())
    many_calls = sum(float((profile.at(n).forward_s + profile.at(n).backward_s).sum()) for n in plan.sizes)
    slowdowns = np.array([plan.slowdown(stage) for stage in range(plan.num_stages)])
    capacity = float((1.0 / slowdowns).sum())
    recompute = float((plan.recompute_s.sum(axis=1) / slowdowns).sum())
    slowest = float(plan.busy_s.max())

    no_links_s = without_s[_NO_LINKS]
    levels = [no_links_s, without_s.get(_NO_COMMUNICATION, no_links_s), without_s.get(_ALONE, nominal_s)]
    levels += [nominal_s, mean_pipeline_s, mean_step_s]
    spread = [work / capacity for work in (one_call, many_calls, many_calls + recompute)]
    totals = [0.0, *spread, slowest, *levels]
    return {part: after - before for part, (before, after) in zip(PARTS, pairwise(totals), strict=True)}


# --- critical path -------------------------------------------------------------------------------------------------


def critical_path(plan: Plan, step: Step) -> list[Span]:
    """The chain of work and messages that sets the step time, first to last, without gaps but for engine overhead.

    Walk back from the action that ends last. What let it start when it did: the rank's previous action, or its
    message? What let the message start: its sender, the message before it on the link, or the receive that was
    posted when the receiver took an earlier message?
    """
    return _Walk(plan, step).back()


Indices = npt.NDArray[np.int_]
_Place = tuple[RankTimeline, int]
"""An action: its rank's timeline and its row there."""


class _Walk:
    """Looks things up in the timelines themselves: a large step has millions of actions, its path a few thousand."""

    def __init__(self, plan: Plan, step: Step) -> None:
        self.plan = plan
        self.last = max(step.ranks, key=lambda timeline: float(timeline.end_s[-1]))
        self.timelines = {timeline.stage: timeline for timeline in step.ranks}
        self.rows = cache(lambda stage: self.timelines[stage].rows(plan.num_microbatches))
        self.takes = cache(self._takes)

    def place(self, action: Action) -> _Place:
        """Where the action is."""
        return self.timelines[action.stage], int(self.rows(action.stage)[action.kind][action.microbatch])

    def previous_send(self, timeline: RankTimeline, row: int) -> int | None:
        """The row of the message before this one on the same link."""
        kind = timeline.actions.kinds[row : row + 1]
        earlier = timeline.actions.kinds.rfind(kind, 0, row)
        return earlier if earlier >= 0 else None

    def poster(self, sender: Action) -> _Place | None:
        """The action that posted the receive of this one's message, by taking an earlier message."""
        window = self.plan.window
        stage = sender.stage + 1 if sender.kind == "F" else sender.stage - 1
        if window is None or stage not in self.timelines:
            return None
        rows, turn = self.takes(stage, sender.kind == "F")
        position = int(turn[sender.microbatch]) - window
        return (self.timelines[stage], int(rows[position])) if position >= 0 else None

    def _takes(self, stage: int, forward: bool) -> tuple[Indices, Indices]:
        """The rows that take messages of one direction, in order; and the turn of each micro-batch among them."""
        timeline = self.timelines[stage]
        takes = (timeline.actions.are("F") == forward) & (timeline.arrived_s >= 0)
        rows = np.flatnonzero(takes)
        turn = np.full(self.plan.num_microbatches, -1)
        turn[timeline.actions.microbatches[rows]] = np.arange(len(rows))
        return rows, turn

    def back(self) -> list[Span]:
        """From the last action to the first: each turn of the loop adds one action or one message."""
        path: list[Span] = []
        current: _Place | None = (self.last, len(self.last.actions) - 1)
        message: tuple[Action, float] | None = None
        """The message to follow, by its sender, and until when it is on the path; else `current` is the next action."""
        while current is not None:
            timeline, row = current
            if message is None:
                start, end = float(timeline.start_s[row]), float(timeline.end_s[row])
                path.append(Span(timeline.rank, "compute", timeline.actions[row], start, end))
                current, message = self._before(timeline, row)
            else:
                action, end = message
                start = float(timeline.send_start_s[row])
                path.append(Span(timeline.rank, "send", action, start, end))
                current, message = self._before_message(timeline, row, start)
        return path[::-1]

    def _before(self, timeline: RankTimeline, row: int) -> tuple[_Place | None, tuple[Action, float] | None]:
        """What let this action start: the message that it took, or the rank's previous action (or that one's message,
        if the rank stood still until its delivery)."""
        free = float(timeline.end_s[row - 1]) if row > 0 else 0.0
        held = row > 0 and timeline.blocking and timeline.send_end_s[row - 1] > free
        if held:
            free = float(timeline.send_end_s[row - 1])
        arrived = float(timeline.arrived_s[row])
        if arrived > free:
            sender = sender_of(timeline.actions[row])
            return self.place(sender), (sender, arrived)
        if held:
            return (timeline, row - 1), (timeline.actions[row - 1], free)
        return ((timeline, row - 1) if row > 0 else None), None

    def _before_message(
        self, timeline: RankTimeline, row: int, start: float
    ) -> tuple[_Place | None, tuple[Action, float] | None]:
        """What let this message start: its sender's end, the message before it on the link, or its receive."""
        action = timeline.actions[row]
        if start <= timeline.end_s[row]:
            return (timeline, row), None
        earlier, poster = self.previous_send(timeline, row), self.poster(action)
        if earlier is not None:
            edge = action.stage if action.kind == "F" else action.stage - 1
            latency = self.plan.link(edge).latency + self.plan.profile.hop_overhead_s
            free = float(timeline.send_end_s[earlier]) - latency
            if poster is None or abs(free - start) <= 1e-9 * start:
                return (timeline, earlier), (timeline.actions[earlier], start)
        assert poster is not None, "a message waits for its sender, its link or its receive"
        return self._before(*poster)
