"""The model's answer for many trainings at once: a step of the loop takes every training to its next failure.

Between two failures nothing is left to chance, so what is computed, saved and lost follows from the time between them
alone, and needs no event for each save:

    y                        seconds of running before the failure
    floor(y / (t + p))       intervals that were finished
    floor((y - w) / (t + p)) saves that count, w after their pause

Each array has an entry for each training: all seeds under the first conditions, then all under the second, and so on.
The same seed has the same luck under all of them, so that a difference between conditions is no luck.
"""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from gpipe_sim.base.arrays import Array, Indices
from gpipe_sim.campaign.conditions import KINDS, LOSSES, TAKES_A_NODE, Conditions, Luck, Outcomes

USEFUL, CHECKPOINTS, LOST, DETECTION, RESTART, WAITING, FEWER = range(len(LOSSES))


def evaluate(
    conditions: Sequence[Conditions], seeds: Sequence[int], advance: Callable[[float], None] | None = None
) -> list[Outcomes]:
    """Every seed under each of the conditions; `advance` is told the share that has been done since it was last."""
    trainings = _Trainings(conditions, seeds)
    told, rounds = 0.0, 0
    while trainings.running.any():
        trainings.to_next_failure()
        rounds += 1
        if advance and rounds % 50 == 0:
            done = trainings.share_done()
            advance(done - told)
            told = done
    if advance:
        advance(1 - told)
    return trainings.outcomes()


class _Trainings:
    """All of them, side by side."""

    def __init__(self, conditions: Sequence[Conditions], seeds: Sequence[int]) -> None:
        self.conditions, self.seeds = conditions, seeds
        count = len(conditions) * len(seeds)
        self.lanes = np.arange(count)
        self.seed = np.tile(np.arange(len(seeds)), len(conditions))

        def each(name: str) -> Array:
            return np.repeat(np.array([float(getattr(c, name)) for c in conditions]), len(seeds))

        self.work, self.interval, self.pause, self.write = map(each, ("work_s", "interval_s", "pause_s", "write_s"))
        self.detection, self.restart, self.repair = map(each, ("detection_s", "restart_s", "repair_s"))
        self.replicas, self.shrink = each("replicas"), each("shrink").astype(bool)
        self.per_replica, self.per_node = each("devices_per_replica"), each("devices_per_node")
        self.rates = np.stack([each(f"{kind}_rate") for kind in KINDS])
        self.healthy = each("num_nodes")

        self.now, self.saved = np.zeros(count), np.zeros(count)
        self.running = np.ones(count, dtype=bool)
        self.failed, self.planned = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        self.parts, self.lost = np.zeros((len(LOSSES), count)), np.zeros((len(KINDS), count))
        self.failures = np.zeros((len(KINDS), count))
        # Nodes under repair, by when they return: each training's own queue, which begins at `first`.
        self.returns = np.full((count, 4), np.inf)
        self.first = np.zeros(count, dtype=int)
        self.in_repair = np.zeros(count, dtype=int)
        # Luck that has been drawn so far, by seed, and how much of it each training has used up.
        self.luck = [Luck(seed) for seed in seeds]
        self.due_drawn, self.choice_drawn = np.zeros((len(seeds), 0)), np.zeros((len(seeds), 0))
        self.drawn = np.zeros(count, dtype=int)
        self._draw()
        self.due = self.due_drawn[self.seed, 0]

    def share_done(self) -> float:
        """Of all work, what has been saved."""
        return float(np.where(self.running, self.saved / self.work, 1.0).mean())

    def outcomes(self) -> list[Outcomes]:
        """By conditions."""
        size = len(self.seeds)
        mine = [slice(index * size, (index + 1) * size) for index in range(len(self.conditions))]
        return [
            Outcomes(
                conditions=c,
                parts_s=self.parts[:, at].T.copy(),
                lost_by_kind_s=self.lost[:, at].T.copy(),
                failures=self.failures[:, at].T.copy(),
            )
            for c, at in zip(self.conditions, mine, strict=True)
        ]

    def to_next_failure(self) -> None:
        """Take every training to its next failure, or to its end, or to where it waits or grows."""
        self._take_back_nodes()
        fitting = np.minimum(self.replicas, self.healthy * self.per_node // self.per_replica)
        replicas = np.where(self.shrink | (fitting == self.replicas), fitting, 0.0)
        waits = self.running & (replicas == 0)
        if waits.any():
            until = self._return_time(0)
            self.parts[WAITING] += np.where(waits, until - self.now, 0.0)
            self.now = np.where(waits, until, self.now)
        runs = self.running & ~waits
        replicas = np.maximum(replicas, 1.0)  # of those that wait nothing below is used

        nodes, devices = self._nodes(replicas), replicas * self.per_replica
        rates = self.rates * np.stack([devices, nodes, nodes, nodes, np.ones_like(nodes)])
        rate = rates.sum(axis=0)
        with np.errstate(divide="ignore"):
            to_failure = self.due / rate
        detection = np.where(self.failed, self.detection, 0.0)
        down = detection + np.where(self.failed | self.planned, self.restart, 0.0)
        speed, cycle = replicas / self.replicas, self.interval + self.pause
        remaining = self.work - self.saved
        saves = np.maximum(1.0, np.ceil(remaining / (speed * self.interval) - 1e-9))

        # Another replica fits once so many nodes are back; training stops at its first save after that.
        missing = (self._nodes(replicas + 1) - self.healthy).astype(int)
        can_grow = (replicas < self.replicas) & (missing <= self.in_repair)
        back = np.where(can_grow, self._return_time(np.where(can_grow, missing - 1, 0)), np.inf)
        stop = np.maximum(1.0, np.ceil((back - self.now - down) / cycle))
        grows = stop < saves
        whole = np.where(grows, stop, saves - 1)  # intervals of full length before the end of this run
        last = np.where(grows, 0.0, remaining / speed - (saves - 1) * self.interval)
        length = whole * cycle + last + np.where(grows, 0.0, self.pause) + self.write

        fails = runs & (to_failure < down + length)
        ends = runs & ~fails
        elapsed = np.where(fails, to_failure, down + length)
        ran = np.maximum(elapsed - down, 0.0)  # seconds of running, of those that fail
        full = np.minimum(np.floor(ran / cycle), whole)
        longest = np.where(full < whole, self.interval, last)
        computed = full * self.interval + np.minimum(ran - full * cycle, longest)
        counts = np.clip(np.floor((ran - self.write) / cycle), 0.0, whole) * self.interval
        computed = np.where(ends, whole * self.interval + last, computed)
        counts = np.where(ends, computed, counts)

        in_detection = np.minimum(elapsed, detection)
        for part, seconds in (
            (USEFUL, counts * speed),
            (FEWER, counts * (1 - speed)),
            (LOST, computed - counts),
            (CHECKPOINTS, ran - computed),
            (DETECTION, in_detection),
            (RESTART, np.minimum(elapsed, down) - in_detection),
        ):
            self.parts[part] += np.where(runs, seconds, 0.0)
        self.saved += np.where(runs, counts * speed, 0.0)
        self.now += np.where(runs, elapsed, 0.0)
        self.due -= np.where(runs & ~fails, elapsed * rate, 0.0)
        self.running &= ~(ends & ~grows)
        self.failed, self.planned = np.where(runs, fails, self.failed), np.where(runs, ends & grows, self.planned)
        self._strike(np.flatnonzero(fails), rates, computed - counts)

    def _nodes(self, replicas: Array) -> Array:
        nodes: Array = -(-(replicas * self.per_replica) // self.per_node)
        return nodes

    def _take_back_nodes(self) -> None:
        while True:
            back = (self.in_repair > 0) & (self._return_time(0) <= self.now)
            if not back.any():
                return
            self.healthy += back
            self.first = (self.first + back) % self.returns.shape[1]
            self.in_repair -= back

    def _return_time(self, ahead: Indices | int) -> Array:
        """When the node returns that is so far back in the queue."""
        times: Array = self.returns[self.lanes, (self.first + ahead) % self.returns.shape[1]]
        return times

    def _strike(self, struck: Indices, rates: Array, lost: Array) -> None:
        """Failures of these trainings, now: what failed, who is repaired, and when the next one is due."""
        if not len(struck):
            return
        shares = np.cumsum(rates[:, struck], axis=0)
        choice = self.choice_drawn[self.seed[struck], self.drawn[struck]] * shares[-1]
        kind = (shares <= choice).sum(axis=0)
        self.failures[kind, struck] += 1
        self.lost[kind, struck] += lost[struck]
        broken = struck[np.array(TAKES_A_NODE)[kind]]
        if len(broken):
            if self.in_repair[broken].max() == self.returns.shape[1]:
                self._lengthen_queues()
            at = (self.first[broken] + self.in_repair[broken]) % self.returns.shape[1]
            self.returns[broken, at] = self.now[broken] + self.repair[broken]
            self.in_repair[broken] += 1
            self.healthy[broken] -= 1
        self.drawn[struck] += 1
        if self.drawn.max() == self.due_drawn.shape[1]:
            self._draw()
        self.due[struck] = self.due_drawn[self.seed[struck], self.drawn[struck]]

    def _lengthen_queues(self) -> None:
        size = self.returns.shape[1]
        order = (self.first[:, None] + np.arange(size)) % size
        in_order = np.take_along_axis(self.returns, order, axis=1)
        self.returns = np.concatenate([in_order, np.full_like(in_order, np.inf)], axis=1)
        self.first[:] = 0

    def _draw(self) -> None:
        blocks = [luck.block() for luck in self.luck]
        due, choice = (np.array(numbers) for numbers in zip(*blocks, strict=True))
        self.due_drawn = cast(Array, np.concatenate([self.due_drawn, due], axis=1))
        self.choice_drawn = cast(Array, np.concatenate([self.choice_drawn, choice], axis=1))
