"""Why is it slow: the waterfall that sums to the step, and the critical path through it."""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gpipe_sim.plan.figures import Effects, figures_of, rank_work_s, work_s
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import program_of
from gpipe_sim.step.step import RankTimeline, Span, Step

PARTS = (
    "compute",
    "tensor",
    "small_batches",
    "recompute",
    "imbalance",
    "fill_drain",
    "overhead",
    "communication",
    "contention",
    "jitter",
    "update",
    "collectives",
)

LABELS: Mapping[str, str] = {
    "compute": "useful compute",
    "tensor": "tensor groups",
    "small_batches": "small micro-batches",
    "recompute": "recomputation",
    "imbalance": "imbalance",
    "fill_drain": "fill and drain",
    "overhead": "engine overhead",
    "communication": "communication",
    "contention": "contention",
    "jitter": "jitter",
    "update": "update",
    "collectives": "collectives",
}


_NO_COLLECTIVES = Effects(collectives=False)
_NO_LINKS = Effects(overhead=False, communication=False, sharing=False, collectives=False)
_NO_COMMUNICATION = Effects(communication=False, sharing=False, collectives=False)
_ALONE = Effects(sharing=False, collectives=False)


def counterfactuals(plan: Plan) -> tuple[Effects, ...]:
    """The effects under which `breakdown_s` needs the plan's times, beside those with all of them."""
    has_overhead = plan.profile.action_overhead_s or plan.profile.hop_overhead_s
    through_nics = any(plan.nic_route(edge) for edge in range(plan.num_stages - 1))
    shares = plan.shared_nics or plan.crowded_nodes or (plan.sharers > 1 and through_nics)
    wanted = {
        _NO_LINKS: True,
        _NO_COMMUNICATION: has_overhead,
        _ALONE: shares,
        _NO_COLLECTIVES: plan.replicas > 1,
    }
    return tuple(effects for effects, is_wanted in wanted.items() if is_wanted)


class Times(NamedTuple):
    """Of one step, in seconds."""

    pipeline: float
    step: float


def breakdown_s(plan: Plan, without: Mapping[Effects, Times], nominal: Times, mean: Times) -> dict[str, float]:
    """The waterfall: seconds that each cause adds, in this order; they sum to the step time exactly.

        compute         F and B of the whole batch in one call, spread over the ranks by their speed, so that all end
                        together
        tensor          + collectives of tensor groups in those F and B
        small_batches   + what M small calls take more than one large one, and split backwards more than whole ones
        recompute       + forwards that are run again
        imbalance       + the slowest rank's busy time, less the time if work were spread like that
        fill_drain      + the schedule's dependencies, with links and overheads switched off
        overhead        + the engine's own time per action and hop
        communication   + links, receive windows and blocking sends, each link to itself
        contention      + NICs and cores shared (may be negative: a fair share can help the critical path)
        jitter          + mean over samples less the step without jitter (either sign)
        update          + what the optimizer adds after the last backward
        collectives     + what replicas sum and gather: the step less that with collectives for nothing

    Each part is the difference between two times that differ only in that cause: sums of compute times up to the
    imbalance, simulated steps from there on. `without` are the times under the `counterfactuals`, all of which have
    collectives for nothing, `nominal` those without jitter, `mean` those over its samples.
    """
    profile = plan.profile
    whole = profile.at(plan.samples)
    one_call = float((whole.forward_s + whole.backward_s).sum())
    work = {letter: float((seconds / plan.slowdowns).sum()) for letter, seconds in work_s(plan).items()}
    recompute = work.pop("R")
    many_calls = sum(work.values())
    replicas = range(plan.simulated_replicas)
    speeds = [1.0 / plan.rank_slowdown(rank, d) for rank in plan.pipeline for d in replicas]
    capacity = sum(speeds) / len(replicas)
    slowest = float(rank_work_s(plan).max())

    free = without.get(_NO_COLLECTIVES, nominal)
    no_links = without[_NO_LINKS]
    levels = [level.pipeline for level in (no_links, without.get(_NO_COMMUNICATION, no_links))]
    levels += [without.get(_ALONE, free).pipeline, free.pipeline]
    levels += [free.pipeline + (mean.pipeline - nominal.pipeline) if plan.replicas > 1 else mean.pipeline]
    levels += [levels[-1] + (free.step - free.pipeline) if plan.replicas > 1 else mean.step, mean.step]
    tensor = 0.0 if whole.tensor_s is None else 2 * float(whole.tensor_s.sum())
    spread = [work / capacity for work in (one_call - tensor, one_call, many_calls, many_calls + recompute)]
    totals = [0.0, *spread, slowest, *levels]
    return {part: after - before for part, (before, after) in zip(PARTS, pairwise(totals), strict=True)}


# --- critical path -------------------------------------------------------------------------------------------------


def critical_path(plan: Plan, step: Step) -> list[Span]:
    """The chain of work, messages and collectives that sets the step time, first to last, without gaps but for engine
    overhead, and for other replicas where they differ.

    Walk back from the action that ends last. What let it start when it did: the rank's previous action, or its
    message? What let the message start: its sender, the message before it on the link, or the receive that was
    posted when the receiver took an earlier message?
    """
    return _Walk(plan, step).back()


_Place = tuple[int, int]
"""An action: the position of its rank, and its row there."""
_Message = tuple[int, float]
"""The number of a message, and until when it is on the path."""


class _Walk:
    """Looks things up in the timelines themselves: a large step has millions of actions, its path a few thousand."""

    def __init__(self, plan: Plan, step: Step) -> None:
        self.plan, self.program = plan, program_of(plan)
        by_rank = {timeline.rank: timeline for timeline in step.ranks}
        self.timelines: list[RankTimeline] = [by_rank[rank] for rank in plan.pipeline]
        self.poster = self.program.poster(plan.window)
        self.figures = figures_of([plan])
        self.latency = [float(self.figures.latency_s[channel.edge, 0]) for channel in self.program.channels]

    def back(self) -> list[Span]:
        """From the last action to the first: each turn of the loop adds one action or one message."""
        path: list[Span] = []
        last = max(range(len(self.timelines)), key=lambda position: self.timelines[position].last_end_s)
        current: _Place | None = (last, len(self.timelines[last].actions) - 1)
        if self.timelines[last].last_end_s > self.timelines[last].end_s[-1]:
            current = self._through_lane(last, len(self.timelines[last].lane) - 1, path)
        message: _Message | None = None
        """The message to follow; else `current` is the next action."""
        while current is not None:
            timeline, row = self.timelines[current[0]], current[1]
            if message is None:
                start, end = float(timeline.start_s[row]), float(timeline.end_s[row])
                path.append(Span(timeline.rank, "compute", timeline.actions[row], start, end))
                current, message = self._before(current, path)
            else:
                number, end = message
                start = float(timeline.send_start_s[row])
                path.append(Span(timeline.rank, "send", timeline.actions[row], start, end))
                current, message = self._before_message(number, current, start, path)
        return path[::-1]

    def _through_lane(self, position: int, number: int, path: list[Span]) -> _Place | None:
        """Follow a lane back from one of its collectives to the action that let the first of them start."""
        timeline = self.timelines[position]
        while True:
            start, end = float(timeline.lane_start_s[number]), float(timeline.lane_end_s[number])
            collective = timeline.lane[number]
            path.append(Span(timeline.rank, "collective", collective.action, start, end))
            if number == 0 or start > timeline.lane_end_s[number - 1]:
                return (position, collective.after) if collective.after >= 0 else None
            number -= 1

    def _place(self, action: int) -> _Place:
        """Where the action of a number is."""
        position = int(np.searchsorted(self.program.first, action, side="right")) - 1
        return position, action - int(self.program.first[position])

    def _number(self, place: _Place) -> int:
        return int(self.program.first[place[0]]) + place[1]

    def _before(self, place: _Place, path: list[Span]) -> tuple[_Place | None, _Message | None]:
        """What let this action start: the message that it took, or the rank's previous action (or that one's message,
        if the rank stood still until its delivery), or a collective, which goes on the path."""
        timeline, row, number = self.timelines[place[0]], place[1], self._number(place)
        free = float(timeline.end_s[row - 1]) if row > 0 else 0.0
        held = row > 0 and timeline.blocking and timeline.send_end_s[row - 1] > free
        if held:
            free = float(timeline.send_end_s[row - 1])
        arrived = float(timeline.arrived_s[row])
        waited = [i for i, collective in enumerate(timeline.lane) if collective.before == row]
        if waited and timeline.lane_end_s[waited[-1]] > np.fmax(free, arrived):
            return self._through_lane(place[0], waited[-1], path), None
        if arrived > free:
            message = int(self.program.takes[number, 0])
            return self._place(int(self.program.sender[message])), (message, arrived)
        previous = (place[0], row - 1)
        if held:
            return previous, (int(self.program.sends[number - 1, 0]), free)
        return (previous if row > 0 else None), None

    def _before_message(
        self, number: int, sender: _Place, start: float, path: list[Span]
    ) -> tuple[_Place | None, _Message | None]:
        """What let this message start: its sender's end, a message before it on the channel or the wire, or its
        receive."""
        timeline, row = self.timelines[sender[0]], sender[1]
        if start <= timeline.end_s[row]:
            return sender, None
        M, poster = self.program.num_microbatches, int(self.poster[number])
        before = [number - 1] if number % M else []
        before += [int(self.program.wired_after[number])] if self.program.wired_after[number] >= 0 else []
        for earlier in before:
            place = self._place(int(self.program.sender[earlier]))
            free = float(self.timelines[place[0]].send_end_s[place[1]]) - self.latency[earlier // M]
            if poster < 0 or abs(free - start) <= 1e-9 * start:
                return place, (earlier, start)
        assert poster >= 0, "a message waits for its sender, its link or its receive"
        place = self._place(poster)
        posted = float(self.timelines[place[0]].start_s[place[1]] - self.figures.overhead_s[0])
        if self.program.wired_after[number] >= 0 and abs(posted - start) > 1e-9 * start:
            return self._through_wire(number, start, path), None
        return self._before(place, path)

    def _through_wire(self, number: int, start: float, path: list[Span]) -> _Place:
        """Follow a wire back from the turn of a message that waited for nothing else, to the action that sent the first
        of those that had their turns before it without a gap.

        A message whose receive is posted late starts after its turn, which is over all the same.
        """
        while True:
            number = int(self.program.wired_after[number])
            channel = self.program.channels[number // self.program.num_microbatches]
            microbatch = int(self.program.microbatches[number])
            begin = start - float(self.figures.occupancy_s[channel.edge, microbatch, 0])
            place = self._place(int(self.program.sender[number]))
            timeline = self.timelines[place[0]]
            path.append(Span(timeline.rank, "send", timeline.actions[place[1]], begin, start))
            if begin <= timeline.end_s[place[1]] + 1e-9 * start or self.program.wired_after[number] < 0:
                return place
            start = begin
