"""Plan: everything that was chosen, ready to be simulated or run. The one artefact that both interpret."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from gpipe_sim.base import html
from gpipe_sim.base.arrays import Array, Flags
from gpipe_sim.base.units import format_seconds
from gpipe_sim.cost.profile import Profile
from gpipe_sim.plan.actions import KINDS
from gpipe_sim.plan.order import Order
from gpipe_sim.plan.stages import boundary_bytes, microbatch_sizes, recomputed, stage_seconds, sum_by_stage
from gpipe_sim.scenario.catalog import DType, Link
from gpipe_sim.scenario.mesh import SUMS_INSIDE, Dimensions, Mesh
from gpipe_sim.scenario.schema import (
    MEASURED,
    BackwardOrder,
    Checkpoint,
    Recompute,
    RecomputeUnit,
    Scenario,
    Shard,
    Transformer,
)

_MOST_ROWS = 64
"""Stages that a notebook's chart shows."""


class Nic(NamedTuple):
    """One direction of one of a node's ways out."""

    node: int
    direction: Literal["out", "in"]
    number: int = 0
    """Which of them: a node's devices take them in turns."""
    is_spine: bool = False
    """Its part of the way to nodes behind other switches."""


def backward_route(route: tuple[Nic, ...]) -> tuple[Nic, ...]:
    """The way back: the same NICs, each in its other direction."""
    return tuple(nic._replace(direction="in" if nic.direction == "out" else "out") for nic in reversed(route))


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """S stages of contiguous layers on K ranks, M micro-batches, how they are scheduled, and D replicas of it all.

    It holds the scenario that it came from and the profile that it is predicted with, so that it stands alone.

    A rank is known by its number in the cluster, and by its *position* in the pipeline: ranks are counted in the order
    of the first stage that each holds.

        placement   2 0 1 2 0 1        S = 6 stages, looped over K = 3 ranks
        pipeline    2 0 1              rank of each position
        positions   0 1 2 0 1 2        position of each stage

    That is one replica, and so is everything else here unless it says otherwise. A `Mesh` says which numbers in the
    cluster those of D replicas have: by default the replica is innermost, as Megatron has it, so that ranks which hold
    the same stages, and sum their gradients, are near each other.

                    replica 0   1
        rank 0              0   1      D = 2, K = 3: a world of 6
        rank 1              2   3
        rank 2              4   5

    A rank may be a *tensor group* of T devices, which hold slices of the same layers and do the same at the same time;
    its profile says what one of them does, their collectives included. Their numbers follow each other, so that they
    are in one node if it has as many.
    """

    scenario: Scenario
    profile: Profile
    balance: tuple[int, ...]
    """Layers of each stage."""
    placement: tuple[int, ...]
    """Rank of each stage; a rank may hold several."""
    num_microbatches: int
    checkpoint: tuple[Checkpoint, ...]
    """Mode of each stage."""
    schedule: str
    """The name of a schedule, of the file that its order came from, or `auto`."""
    recompute: Recompute
    backward: BackwardOrder
    """The order that is run: `order_of_backwards`."""
    window: int | None
    """Receives posted ahead per edge and direction; None is no limit."""
    recompute_unit: RecomputeUnit = "stage"
    replicas: int = 1
    """D."""
    tensor: int = 1
    """T: devices that hold each of a rank's stages together."""
    dimensions: Dimensions = SUMS_INSIDE
    """The order in which devices are numbered."""
    shard: Shard = "none"
    """What the ranks that hold the same stages divide among themselves."""
    order: Order | None = None
    """What each rank does, by position, where that is not a named schedule's."""

    def __repr__(self) -> str:
        ranks = f" on {self.num_ranks} ranks" if self.num_ranks < self.num_stages else ""
        modes = "/".join(dict.fromkeys(self.checkpoint))
        return (
            f"Plan({self.scenario.name!r}: {self.num_stages} stages{ranks}, {self.num_microbatches} micro-batches, "
            f"{self.schedule}, checkpoint {modes})"
        )

    def _repr_html_(self) -> str:
        forward, backward = (seconds.sum(axis=-1) for seconds in (self.forward_s, self.backward_s))
        head = ("stage", "rank", "layers", "checkpoint", "forward", "backward")
        rows = [
            (stage, rank, layers, mode, format_seconds(float(there)), format_seconds(float(back)))
            for stage, (rank, layers, mode, there, back) in enumerate(
                zip(self.placement, self.balance, self.checkpoint, forward, backward, strict=True)
            )
        ]
        blue, orange = KINDS["F"].colour, KINDS["B"].colour
        bars = [
            (f"stage {stage}", [html.Bar(0, there, blue), html.Bar(there, there + back, orange)], "")
            for stage, (there, back) in enumerate(zip(forward.tolist(), backward.tolist(), strict=True))
        ]
        told = html.paragraph(f"{self!r}. Seconds of a step for each stage: forward blue, backward orange.")
        return told + html.chart("seconds of each stage", bars[:_MOST_ROWS]) + html.table(head, rows)

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.balance)

    @property
    def num_ranks(self) -> int:
        """K."""
        return len(self.pipeline)

    @property
    def world(self) -> int:
        """K D T: devices of all replicas."""
        return self.num_ranks * self.replicas * self.tensor

    def global_rank(self, rank: int, replica: int = 0) -> int:
        """The number in the cluster of a replica's rank; of a tensor group, of its first device."""
        return self.mesh.number(rank, replica)

    @cached_property
    def mesh(self) -> Mesh:
        """How the devices of all replicas are numbered in the cluster."""
        return Mesh(self.ranks[-1] + 1, self.replicas, self.tensor, self.dimensions)

    @property
    def _processes(self) -> Mesh:
        """How processes are numbered: as devices are, without gaps."""
        return Mesh(self.num_ranks, self.replicas, self.tensor, self.dimensions)

    def process(self, position: int, replica: int = 0, member: int = 0) -> int:
        """The number of the process, of K D T, that is this replica's rank at that position of the pipeline, or a
        member of its tensor group."""
        return self._processes.number(self.ranks.index(self.pipeline[position]), replica) + member

    def place_of(self, process: int) -> tuple[int, int]:
        """The position and the replica of a process."""
        index, replica = self._processes.place(process)
        return self.pipeline.index(self.ranks[index]), replica

    def member_of(self, process: int) -> int:
        """Which of its tensor group a process is."""
        return process % self.tensor

    @property
    def stages_per_rank(self) -> int:
        """v: of the rank that holds most."""
        return max(Counter(self.placement).values())

    @property
    def dtype(self) -> DType:
        """The dtype of the parameters: the profile's, which need not be the scenario's where it was imported."""
        return self.profile.dtype

    @cached_property
    def pipeline(self) -> tuple[int, ...]:
        """The rank at each position."""
        return _pipeline(self.placement)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The position that holds each stage."""
        return _positions(self.placement)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in use, ascending: the order of every list "per rank", and of processes."""
        return tuple(sorted(self.pipeline))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each micro-batch of one replica."""
        return microbatch_sizes(self.samples, self.num_microbatches)

    @property
    def samples(self) -> int:
        """Of one replica in a step: its equal share of the batch."""
        return self.scenario.batch // self.replicas

    @cached_property
    def stages(self) -> tuple[slice, ...]:
        """The layers of each stage."""
        ends = np.cumsum(self.balance).tolist()
        return tuple(slice(end - size, end) for end, size in zip(ends, self.balance, strict=True))

    @property
    def memory_limit(self) -> float:
        """Bytes that a rank may use."""
        return self.scenario.cluster.memory_limit

    def slowdown(self, stage: int, replica: int = 0) -> float:
        """Factor on the compute times of the rank that holds this stage."""
        return self.rank_slowdown(self.placement[stage], replica)

    def rank_slowdown(self, rank: int, replica: int = 0) -> float:
        """Factor on the compute times of a rank: of the slowest of its devices, which all others wait for."""
        first = self.global_rank(rank, replica)
        return self.scenario.cluster.slowest(range(first, first + self.tensor))

    @cached_property
    def simulated_replicas(self) -> int:
        """How many must be looked at: one where all are alike; all D where jitter, a straggler in some of them, cores
        that they share, NICs that they share unevenly, or a spine between some of them make them differ."""
        cluster, D = self.scenario.cluster, self.replicas
        if D == 1:
            return 1
        factors: dict[int, list[float]] = {}
        for rank, replica in {self.mesh.place(number) for number in cluster.slowdown}:
            factors.setdefault(rank, []).append(self.rank_slowdown(rank, replica))
        alike = all(len({*found, *([1.0] if len(found) < D else [])}) == 1 for found in factors.values())
        alike &= cluster.spine is None or all(
            len({cluster.crosses(self._nodes(stage, replica)) for replica in range(D)}) == 1
            for stage in range(self.num_stages - 1)
        )
        alike &= self._shares_nics_evenly
        return 1 if alike and cluster.jitter is None and not self.crowded_nodes else D

    @property
    def _shares_nics_evenly(self) -> bool:
        """Whether as many devices of each block, of replicas or of ranks, pass each of the NICs that it passes."""
        cluster = self.scenario.cluster
        if cluster.nodes == 1:
            return True
        block = min(self.mesh.block, cluster.devices_per_node or self.mesh.block)
        return block % cluster.nics == 0 or cluster.nics % block == 0

    @cached_property
    def group(self) -> tuple[int, int]:
        """How many of the D ranks that hold the same stages are in each node, and in how many nodes they are."""
        in_one = self.tensors_per_node == self.tensor and all(
            self.node_of(rank) == self.node_of(rank, self.replicas - 1) for rank in self.ranks
        )
        return (self.replicas, 1) if in_one else self.mesh.group(self.scenario.cluster.devices_per_node)

    @property
    def tensors_per_node(self) -> int:
        """Devices of a tensor group in each node where it has any."""
        return min(self.tensor, self.scenario.cluster.devices_per_node or self.tensor)

    @property
    def sharers(self) -> int:
        """Devices that send the same messages through a NIC at the same time, where one stands for all: those of a
        tensor group always do, and replicas that are alike."""
        alike = min(self.group[0], self.replicas) if self.simulated_replicas == 1 else 1
        return -(-alike * self.tensors_per_node // self.scenario.cluster.nics)

    @property
    def collective_sharers(self) -> int:
        """Devices of a node that sum or gather through the same NIC at the same time."""
        return -(-min(self.group[0], self.replicas) * self.tensors_per_node // self.scenario.cluster.nics)

    def recomputed(self, stage: int) -> tuple[bool, ...]:
        """For each micro-batch, whether this stage runs its forward again in an action of its own."""
        return self.dropped(stage) if self.recompute_unit == "stage" else (False,) * self.num_microbatches

    def dropped(self, stage: int) -> tuple[bool, ...]:
        """For each micro-batch, whether this stage drops its activations, however they are recomputed."""
        return recomputed(self.checkpoint[stage], self.num_microbatches)

    @property
    def recomputes(self) -> bool:
        """Whether anything is recomputed at all."""
        return any(any(recomputed(mode, self.num_microbatches)) for mode in set(self.checkpoint))

    @cached_property
    def forward_s(self) -> Array:
        """Seconds of each forward, and recomputation, by stage and micro-batch, slowdown included."""
        return self.seconds("forward_s")

    @cached_property
    def backward_s(self) -> Array:
        """Seconds of each whole backward by stage and micro-batch, slowdown included."""
        return self.seconds("backward_s")

    def seconds(self, column: str) -> Array:
        """A column of the profile by stage and micro-batch, slowdown included."""
        by_stage = stage_seconds(self.profile, column, np.array([self.balance]), self.sizes)[:, :, 0]
        slowed: Array = by_stage * self.slowdowns[:, None]
        return slowed

    @cached_property
    def slowdowns(self) -> Array:
        """Factor on the compute times of each stage."""
        return self.slowdowns_of(0)

    def slowdowns_of(self, replica: int) -> Array:
        """The same of one of the replicas."""
        return np.array([self.slowdown(stage, replica) for stage in range(self.num_stages)])

    @cached_property
    def recompute_s(self) -> Array:
        """Seconds of each recomputation by stage and micro-batch, 0 where there is none, slowdown included."""
        recomputed = np.array([self.recomputed(stage) for stage in range(self.num_stages)])
        again: Array = self.forward_s * recomputed
        return again

    @cached_property
    def update_s(self) -> Array:
        """Seconds of each stage's optimizer step, slowdown included."""
        seconds: Array = sum_by_stage(self.profile.optimizer_s, np.array([self.balance]))[0] * self.slowdowns
        return seconds

    @cached_property
    def message_bytes(self) -> Array:
        """Bytes that cross each edge (row k: between stages k and k+1) per micro-batch, the same in both directions."""
        return boundary_bytes(self.profile, np.array([self.balance]), self.sizes)[:, :, 0] / self.message_slices

    @property
    def message_slices(self) -> int:
        """Of a tensor group whose devices all have the whole output, each sends its slice, which the receivers gather
        inside their node (Narayanan et al., arXiv 2104.04473, section 4.1; that gather is neglected)."""
        return 1 if self.scenario.plan.sequence_split else self.tensor

    def link(self, stage: int) -> Link:
        """What connects this stage to the next: an edge's own link, the network between nodes, or the node's link."""
        cluster = self.scenario.cluster
        nodes = self._nodes(stage)
        between_nodes = cluster.between(nodes) if nodes[0] != nodes[1] else None
        link = cluster.links.get(stage) or between_nodes
        return self.profile.link if link is MEASURED and self.profile.link else link or self.inside_link

    @property
    def inside_link(self) -> Link:
        """What connects two ranks of a node."""
        link = self.scenario.cluster.link
        return self.profile.link if link is MEASURED and self.profile.link else link

    def nic_route(self, stage: int, replica: int = 0) -> tuple[Nic, ...]:
        """The NICs that a message to the next stage passes, out of one node and into another.

        None inside a node, nor on an edge with a link of its own.
        """
        here, there = self._nodes(stage, replica)
        if here == there or stage in self.scenario.cluster.links:
            return ()
        ranks = self.placement[stage], self.placement[stage + 1]
        numbers = [self._nic_number(rank, replica) for rank in ranks]
        return self._way(here, numbers[0], there, numbers[1])

    def _way(self, here: int, number: int, there: int, other: int) -> tuple[Nic, ...]:
        """From a NIC of one node to one of another, or of the same that stands for it."""
        out, into = Nic(here, "out", number), Nic(there, "in", other)
        if not self.scenario.cluster.crosses((here, there)):
            return out, into
        return out, out._replace(is_spine=True), into._replace(is_spine=True), into

    def group_network(self, rank: int) -> Link | None:
        """What connects the nodes of the ranks that hold the same stages: the slowest of it."""
        return self.scenario.cluster.between({self.node_of(rank, replica) for replica in range(self.replicas)})

    def nic_capacity(self, nic: Nic) -> float:
        """Bytes per second of those that one replica stands for."""
        cluster = self.scenario.cluster
        link = cluster.spine if nic.is_spine else cluster.network
        assert link is not None, "what passes a NIC has a network"
        return link.bandwidth / self.sharers

    def _nic_number(self, rank: int, replica: int) -> int:
        """Which of its node's NICs a replica's rank uses; where one rank stands for others, the first of theirs."""
        cluster = self.scenario.cluster
        return self.global_rank(rank, replica) % (cluster.devices_per_node or self.world) % cluster.nics

    def _nodes(self, stage: int, replica: int = 0) -> tuple[int, int]:
        return self.node_of(self.placement[stage], replica), self.node_of(self.placement[stage + 1], replica)

    def node_of(self, rank: int, replica: int = 0) -> int:
        """The node that holds a replica's rank."""
        return self.scenario.cluster.node_of(self.global_rank(rank, replica))

    @cached_property
    def shared_nics(self) -> frozenset[Nic]:
        """NIC directions that the traffic of more than one pair of ranks, or of a pair and a collective, passes; each
        direction of a pair by itself. Where one replica stands for all, the same traffic of others does not count: it
        takes its part of the NIC at the same time (`sharers`)."""
        network, spine = self.scenario.cluster.network, self.scenario.cluster.spine
        if network is None or (network.bandwidth == float("inf") and spine is None):
            return frozenset()
        passing: set[tuple[Nic, int, int]] = set()
        for replica in range(self.simulated_replicas):
            for stage, (here, there) in enumerate(pairwise(self.placement)):
                route, ends = self.nic_route(stage, replica), (here * self.replicas, there * self.replicas)
                passing |= {(nic, ends[0] + replica, ends[1] + replica) for nic in route}
                passing |= {(nic, ends[1] + replica, ends[0] + replica) for nic in backward_route(route)}
        passes = Counter(nic for nic, _, _ in passing)
        passes += Counter(nic for rank in self.ranks for nic in self.ring_nics(rank))
        return frozenset(nic for nic, count in passes.items() if count > 1 and self.nic_capacity(nic) < float("inf"))

    def ring_nics(self, rank: int) -> set[Nic]:
        """NICs that a collective of the ranks that hold the same stages passes."""
        members = range(1 if self.simulated_replicas == 1 else min(self.group[0], self.scenario.cluster.nics))
        return {nic for member in members for route in self.ring(rank, member) for nic in route}

    def ring(self, rank: int, member: int = 0) -> tuple[tuple[Nic, ...], ...]:
        """The ways between nodes of a collective of the ranks that hold the same stages: from each node to the next, of
        one of those in each.

        Where one replica stands for all, its node sends to one that is just the same, which is as if to itself.
        """
        per_node, nodes = self.group
        if nodes == 1:
            return ()
        if self.simulated_replicas == 1:
            node, number = self.node_of(rank), self._nic_number(rank, 0)
            way = self._way(node, number, node, number)
            spine = self.group_network(rank) is self.scenario.cluster.spine
            return ((*way, *(nic._replace(is_spine=True) for nic in way if spine)),)
        members = [number * per_node + member for number in range(nodes)]
        at = [(self.node_of(rank, replica), self._nic_number(rank, replica)) for replica in members]
        ways = zip(at, [*at[1:], at[0]], strict=True)
        return tuple(self._way(*here, *there) for here, there in ways)

    def core(self, rank: int, replica: int = 0) -> int:
        """The core of its node that a rank is pinned to: the ranks of all replicas take the cores in turns."""
        node_of, own = self.scenario.cluster.node_of, self.global_rank(rank, replica)
        before = [other for other in self._world_ranks() if other < own and node_of(other) == node_of(own)]
        return len(before) % (self.scenario.cluster.cores or self.world)

    def _world_ranks(self) -> Iterator[int]:
        return (self.global_rank(rank, replica) for rank in self.ranks for replica in range(self.replicas))

    @cached_property
    def crowded_nodes(self) -> frozenset[int]:
        """Nodes whose ranks, of all replicas, outnumber their cores."""
        cluster = self.scenario.cluster
        if cluster.cores is None:
            return frozenset()
        nodes = Counter(map(cluster.node_of, self._world_ranks()))
        return frozenset(node for node, count in nodes.items() if count > cluster.cores)


def only_one_pipeline(plan: Plan, who: str) -> None:
    """Refuse a plan with several replicas where nothing but one pipeline is known."""
    if plan.replicas > 1:
        message = f"found {plan.replicas}, expected 1: {who} does not know replicas yet"
        raise plan.scenario.error("plan.replicas", message)


def only_single_members(plan: Plan, who: str) -> None:
    """Refuse a plan with tensor groups where they are not known."""
    if plan.tensor > 1:
        message = f"found {plan.tensor}, expected 1: {who} does not know tensor groups yet"
        raise plan.scenario.error("plan.tensor", message)


def only_what_runs(plan: Plan, who: str) -> None:
    """Refuse what is predicted but neither executed nor exported yet."""
    if isinstance(plan.scenario.model, Transformer) and plan.scenario.model.fused_loss:
        message = f"found true, expected false: {who} does not know it, and keeps logits and their gradients"
        raise plan.scenario.error("model.fused_loss", message)


@lru_cache(maxsize=1024)  # thousands of plans of a search have the same few placements
def _pipeline(placement: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(placement))


@lru_cache(maxsize=1024)
def _positions(placement: tuple[int, ...]) -> tuple[int, ...]:
    at = {rank: position for position, rank in enumerate(_pipeline(placement))}
    return tuple(at[rank] for rank in placement)


_MODES: dict[Checkpoint, int] = {"never": 0, "always": 1, "except_last": 2}


def recomputed_by(plans: Sequence[Plan]) -> Flags:
    """`Plan.recomputed` of plans with the same K, M and unit: by stage, micro-batch and plan."""
    dropped = dropped_by(plans)
    return dropped if plans[0].recompute_unit == "stage" else np.zeros_like(dropped)


def dropped_by(plans: Sequence[Plan]) -> Flags:
    """`Plan.dropped` of plans with the same K and M: by stage, micro-batch and plan."""
    modes = np.array([list(map(_MODES.__getitem__, plan.checkpoint)) for plan in plans]).T
    patterns = np.array([recomputed(mode, plans[0].num_microbatches) for mode in _MODES])
    return patterns.T[:, modes].transpose(1, 0, 2)
