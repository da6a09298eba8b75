"""What a training of weeks meets, in seconds and counts: all that both ways of computing it need to know.

    running         compute t | save p | compute t | save p | ...            t interval_s, p pause_s
    asynchronous    what was saved counts once it is written, write_s after its pause; training goes on meanwhile
    a failure       what was computed since the last save that counts is lost
    then            wait for a node, where one is needed | detection_s | restart_s | running again
    fewer replicas  without a spare, training goes on with as many replicas as the healthy nodes hold, if it may; once
                    another fits again, it stops at its next save, waits until that is written, and restarts

A node with a failed device, or that failed itself, returns after repair_s. Nodes that do not train do not fail, and a
failure during a restart begins it anew.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from gpipe_sim.base.arrays import Array

KINDS = ("device", "node", "network", "software", "job")
"""What fails."""
TAKES_A_NODE = (True, True, False, False, False)
"""Whether a node must be repaired after a failure of each kind."""
LOSSES = ("useful", "checkpoints", "lost work", "detection", "restart", "waiting", "fewer replicas")
"""What the time goes to; it adds up to all of it. *Useful* is what the training would take without anything else."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """A training, and what it meets."""

    work_s: float
    """What it takes with all replicas if nothing fails and nothing is saved."""
    devices_per_replica: int
    devices_per_node: int
    interval_s: float
    """Computing between two saves; at least `write_s`, so that one save is written before the next."""
    pause_s: float
    """For how long a save stops training."""
    detection_s: float
    restart_s: float
    """With reading the checkpoint."""
    replicas: int = 1
    write_s: float = 0.0
    """From the end of an asynchronous save's pause until it counts; 0 if saves are blocking."""
    device_rate: float = 0.0
    """Failures per second of one device; the others likewise."""
    node_rate: float = 0.0
    network_rate: float = 0.0
    software_rate: float = 0.0
    job_rate: float = 0.0
    spares: int = 0
    """Nodes that stand by."""
    repair_s: float = 86400.0
    shrink: bool = True
    """Whether training goes on with fewer replicas."""

    def nodes(self, replicas: int) -> int:
        """That so many replicas occupy."""
        return -(-replicas * self.devices_per_replica // self.devices_per_node)

    @property
    def num_nodes(self) -> int:
        """That are paid for: of all replicas, and the spares."""
        return self.nodes(self.replicas) + self.spares

    def fitting(self, healthy_nodes: int) -> int:
        """Replicas that so many nodes can hold and may; 0 where training must wait."""
        fitting = min(self.replicas, healthy_nodes * self.devices_per_node // self.devices_per_replica)
        return fitting if self.shrink or fitting == self.replicas else 0

    def rates(self, replicas: int) -> Array:
        """Failures per second of each kind while so many replicas train."""
        nodes, devices = self.nodes(replicas), replicas * self.devices_per_replica
        per_node = (nodes * rate for rate in (self.node_rate, self.network_rate, self.software_rate))
        return np.array([devices * self.device_rate, *per_node, self.job_rate])

    @property
    def between_failures_s(self) -> float:
        """The mean time between failures of any kind with all replicas at work."""
        rate = float(self.rates(self.replicas).sum())
        return 1 / rate if rate else math.inf

    def num_saves(self, remaining_s: float, speed: float) -> int:
        """Saves that are still to be made, the one at the end included, at a share of the full speed.

        A remainder of less than a billionth of an interval is no interval of its own.
        """
        return max(1, math.ceil(remaining_s / (speed * self.interval_s) - 1e-9))


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcomes:
    """How a training went, with one kind of luck after the other: the first axis of every array."""

    conditions: Conditions
    parts_s: Array
    """What the time went to, in the order of `LOSSES`."""
    lost_by_kind_s: Array
    """Lost work by what failed, in the order of `KINDS`."""
    failures: Array
    """How often, by kind."""

    @property
    def wall_s(self) -> Array:
        """From the start to the end."""
        total: Array = self.parts_s.sum(axis=1)
        return total

    @property
    def goodput(self) -> Array:
        """Useful time over all time."""
        share: Array = self.conditions.work_s / self.wall_s
        return share


@dataclass
class Luck:
    """When failures come and of which kind, by seed: the same for every way of computing, and for every plan.

    A failure comes when the rate, summed over time, has reached an exponential number of mean 1: so luck does not
    depend on rates, which change with the number of nodes at work.
    """

    seed: int
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def block(self) -> tuple[Array, Array]:
        """The next exponential numbers, and the uniform ones that choose among kinds."""
        return self._rng.standard_exponential(BLOCK), self._rng.random(BLOCK)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        while True:
            yield from zip(*(numbers.tolist() for numbers in self.block()), strict=True)


BLOCK = 256
"""Failures that are drawn at a time."""
