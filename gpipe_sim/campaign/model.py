"""The SimPy model of a training of weeks: a job, the failures that strike it, and nodes under repair.

    failures --interrupt--> job --sends--> repairs --return--> healthy nodes
        ^                    |
        `---- rate ----------'      as many nodes as are at work can fail

It follows one training event by event and notes what its time went to. `evaluate` computes the same for many trainings.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import simpy

from gpipe_sim.campaign.conditions import KINDS, LOSSES, TAKES_A_NODE, Conditions, Luck, Outcomes

Events = Generator[simpy.Event, Any, Any]
_COMPUTING = "computing"


class Stretch(NamedTuple):
    """A time of one training that went to one thing."""

    start_s: float
    end_s: float
    part: str
    """Of `LOSSES`; of computing it shows only later whether it is useful or lost."""
    speed: float = 1.0
    """Of useful computing: the share of the replicas that took part."""


class Failure(NamedTuple):
    """One failure."""

    time_s: float
    kind: str
    lost_s: float
    """Computing that was lost with it."""


@dataclass
class Training:
    """One training. `run` it once."""

    conditions: Conditions
    seed: int
    stretches: list[Stretch] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def run(self) -> Outcomes:
        """Follow it to its end."""
        self._env = simpy.Environment()
        self._healthy = self.conditions.num_nodes
        self._returned = self._env.event()
        self._rate, self._replicas = 0.0, 0
        self._saved_s = 0.0  # of the work, what counts
        self._parts = dict.fromkeys(LOSSES, 0.0)
        self._lost = dict.fromkeys(KINDS, 0.0)
        self._job = self._env.process(self._train())
        self._clock = self._env.process(self._fail())
        self._env.run(self._job)
        return Outcomes(
            conditions=self.conditions,
            parts_s=np.array([[self._parts[part] for part in LOSSES]]),
            lost_by_kind_s=np.array([[self._lost[kind] for kind in KINDS]]),
            failures=np.array([[float(sum(f.kind == kind for f in self.failures)) for kind in KINDS]]),
        )

    def _train(self) -> Events:
        """The job: it waits for nodes, is down, runs until a failure or until more replicas fit, and so on."""
        failed, planned = False, False
        while True:
            replicas = yield from self._wait_for_nodes()
            self._at_work(replicas)
            self._computed_s = self._counted_s = 0.0  # since this run's start, of the wall's time
            self._first_of_run = len(self.stretches)
            try:
                if failed:
                    yield from self._spend("detection", self.conditions.detection_s)
                if failed or planned:
                    yield from self._spend("restart", self.conditions.restart_s)
                finished = yield from self._run(replicas)
                self._keep()
                if finished:
                    return
                failed, planned = False, True
            except simpy.Interrupt as failure:
                lost, kind = self._keep(), str(failure.cause)
                self._lost[kind] += lost
                self._parts["lost work"] += lost
                self.failures.append(Failure(self._env.now, kind, lost))
                failed, planned = True, False

    def _run(self, replicas: int) -> Events:
        """Compute and save; whether that was the end, or only the moment to continue with more replicas."""
        c = self.conditions
        speed = replicas / c.replicas
        remaining_s = c.work_s - self._saved_s
        saves = c.num_saves(remaining_s, speed)
        for save in range(1, saves + 1):
            last = save == saves
            seconds = remaining_s / speed - (saves - 1) * c.interval_s if last else c.interval_s
            yield from self._compute(seconds)
            yield from self._spend("checkpoints", c.pause_s)
            counted = self._computed_s
            if last or c.fitting(self._healthy) > replicas:
                yield from self._spend("checkpoints", c.write_s)
                self._counted_s = counted
                return last
            if c.write_s:
                self._env.process(self._write(counted, len(self.failures)))
            else:
                self._counted_s = counted
        raise AssertionError("the last save ends the training")

    def _write(self, counted_s: float, failures_before: int) -> Events:
        """An asynchronous save: it counts once it is written, unless the job has died before."""
        yield self._env.timeout(self.conditions.write_s)
        if len(self.failures) == failures_before:
            self._counted_s = max(self._counted_s, counted_s)

    def _keep(self) -> float:
        """Add what counts to what is saved; returns the computing that is lost."""
        share = self._replicas / self.conditions.replicas
        self._saved_s += self._counted_s * share
        self._parts["useful"] += self._counted_s * share
        self._parts["fewer replicas"] += self._counted_s * (1 - share)
        computed = 0.0
        for index in range(self._first_of_run, len(self.stretches)):
            start, end, part, _ = self.stretches[index]
            if part == _COMPUTING:
                computed += end - start
                counts = computed <= self._counted_s * (1 + 1e-12)  # whole intervals count, so none is cut in two
                self.stretches[index] = Stretch(start, end, "useful" if counts else "lost work", share)
        return self._computed_s - self._counted_s

    def _compute(self, seconds: float) -> Events:
        begun, before = self._env.now, self._computed_s
        try:
            yield self._env.timeout(seconds)
        finally:
            self._computed_s = before + self._env.now - begun
            self.stretches.append(Stretch(begun, self._env.now, _COMPUTING))

    def _spend(self, part: str, seconds: float) -> Events:
        begun = self._env.now
        try:
            yield self._env.timeout(seconds)
        finally:
            self._parts[part] += self._env.now - begun
            self.stretches.append(Stretch(begun, self._env.now, part))

    def _wait_for_nodes(self) -> Events:
        begun = self._env.now
        while not (replicas := self.conditions.fitting(self._healthy)):
            self._at_work(0)
            yield self._returned
        if self._env.now > begun:
            self._parts["waiting"] += self._env.now - begun
            self.stretches.append(Stretch(begun, self._env.now, "waiting"))
        return replicas

    def _at_work(self, replicas: int) -> None:
        """So many replicas, and so many nodes that can fail, from now on."""
        self._replicas = replicas
        rate = float(self.conditions.rates(replicas).sum()) if replicas else 0.0
        if rate != self._rate:
            self._rate = rate
            if self._clock.is_alive and self._clock.target is not None:
                self._clock.interrupt()

    def _fail(self) -> Events:
        """Failures: each comes when the rate summed over time has reached its luck."""
        for due, choice in Luck(self.seed):
            while True:
                begun, rate = self._env.now, self._rate
                try:
                    yield self._env.timeout(due / rate) if rate else self._env.event()
                    break
                except simpy.Interrupt:  # the rate has changed
                    due -= rate * (self._env.now - begun)
            shares = np.cumsum(self.conditions.rates(self._replicas))
            kind = int(np.searchsorted(shares, choice * shares[-1], side="right"))
            if TAKES_A_NODE[kind]:
                self._healthy -= 1
                self._env.process(self._repair())
            self._job.interrupt(KINDS[kind])

    def _repair(self) -> Events:
        yield self._env.timeout(self.conditions.repair_s)
        self._healthy += 1
        self._returned.succeed()
        self._returned = self._env.event()
