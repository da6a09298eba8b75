"""Plan: everything that was chosen, ready to be simulated or run. The one artefact that both interpret."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_sim.catalog import DType, Link
from gpipe_sim.costs import build_profile
from gpipe_sim.files import InputError
from gpipe_sim.partition import partition
from gpipe_sim.profile import Array, Profile
from gpipe_sim.scenario import MEASURED, BackwardOrder, Checkpoint, Cluster, Recompute, Scenario, ScheduleName
from gpipe_sim.units import format_bytes


class Nic(NamedTuple):
    """One direction of a node's way out."""

    node: int
    direction: Literal["out", "in"]


def backward_route(route: tuple[Nic, ...]) -> tuple[Nic, ...]:
    """The way back: the same NICs, each in its other direction."""
    return tuple(Nic(node, "in" if direction == "out" else "out") for node, direction in reversed(route))


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """K stages of contiguous layers on K ranks, M micro-batches, and how they are scheduled.

    It holds the scenario that it came from and the profile that it is predicted with, so that it stands alone.
    """

    scenario: Scenario
    profile: Profile
    balance: tuple[int, ...]
    """Layers of each stage."""
    placement: tuple[int, ...]
    """Rank of each stage."""
    num_microbatches: int
    checkpoint: tuple[Checkpoint, ...]
    """Mode of each stage."""
    schedule: ScheduleName
    recompute: Recompute
    backward: BackwardOrder
    """The order that is run: `order_of_backwards`."""
    window: int | None
    """Receives posted ahead per edge and direction; None is no limit."""

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.balance)

    @property
    def dtype(self) -> DType:
        """The dtype of the parameters: the profile's, which need not be the scenario's where it was imported."""
        return self.profile.dtype

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in use, ascending: the order of every list "per rank"."""
        return tuple(sorted(self.placement))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each micro-batch."""
        return microbatch_sizes(self.scenario.batch, self.num_microbatches)

    @cached_property
    def stages(self) -> tuple[slice, ...]:
        """The layers of each stage."""
        ends = np.cumsum(self.balance).tolist()
        return tuple(slice(end - size, end) for end, size in zip(ends, self.balance, strict=True))

    @property
    def memory_limit(self) -> float:
        """Bytes that a rank may use: the device's memory less what the runtime keeps."""
        return self.scenario.cluster.device.memory - self.scenario.cluster.memory_reserve

    def slowdown(self, stage: int) -> float:
        """Factor on the compute times of the rank that holds this stage."""
        return self.scenario.cluster.slowdown.get(self.placement[stage], 1.0)

    def recomputed(self, stage: int) -> tuple[bool, ...]:
        """For each micro-batch, whether this stage runs its forward again before its backward."""
        return recomputed(self.checkpoint[stage], self.num_microbatches)

    @cached_property
    def forward_s(self) -> Array:
        """Seconds of each forward, and recomputation, by stage and micro-batch, slowdown included."""
        return self._per_stage("forward_s")

    @cached_property
    def backward_s(self) -> Array:
        """Seconds of each backward by stage and micro-batch, slowdown included."""
        return self._per_stage("backward_s")

    def _per_stage(self, column: str) -> Array:
        by_size = {size: self._stage_s(getattr(self.profile.at(size), column)) for size in set(self.sizes)}
        return np.array([by_size[size] for size in self.sizes]).T

    def _stage_s(self, layers_s: Array) -> Array:
        slowdowns = np.array([self.slowdown(stage) for stage in range(self.num_stages)])
        seconds: Array = sum_by_stage(layers_s, np.array([self.balance]))[0] * slowdowns
        return seconds

    @cached_property
    def recompute_s(self) -> Array:
        """Seconds of each recomputation by stage and micro-batch, 0 where there is none, slowdown included."""
        recomputed = np.array([self.recomputed(stage) for stage in range(self.num_stages)])
        again: Array = self.forward_s * recomputed
        return again

    @cached_property
    def busy_s(self) -> Array:
        """Seconds that each stage computes in a step: forwards, recomputations and backwards."""
        busy: Array = (self.forward_s + self.recompute_s + self.backward_s).sum(axis=1)
        return busy

    @cached_property
    def update_s(self) -> Array:
        """Seconds of each stage's optimizer step, slowdown included."""
        return self._stage_s(self.profile.optimizer_s)

    @cached_property
    def message_bytes(self) -> Array:
        """Bytes that cross each edge (row k: between stages k and k+1) per micro-batch, the same in both directions."""
        last_layers = [stage.stop - 1 for stage in self.stages[:-1]]
        by_size = {size: self.profile.at(size).output_bytes[last_layers] for size in set(self.sizes)}
        return np.array([by_size[size] for size in self.sizes]).T.reshape(self.num_stages - 1, self.num_microbatches)

    def link(self, stage: int) -> Link:
        """What connects this stage to the next: an edge's own link, the network between nodes, or the node's link."""
        cluster = self.scenario.cluster
        between_nodes = cluster.network if self._nodes(stage)[0] != self._nodes(stage)[1] else None
        link = cluster.links.get(stage) or between_nodes or cluster.link
        return self.profile.link if link is MEASURED and self.profile.link else link

    def nic_route(self, stage: int) -> tuple[Nic, ...]:
        """The NICs that a message to the next stage passes, out of one node and into another.

        None inside a node, nor on an edge with a link of its own.
        """
        here, there = self._nodes(stage)
        if here == there or stage in self.scenario.cluster.links:
            return ()
        return Nic(here, "out"), Nic(there, "in")

    def _nodes(self, stage: int) -> tuple[int, int]:
        node_of = self.scenario.cluster.node_of
        return node_of(self.placement[stage]), node_of(self.placement[stage + 1])

    @cached_property
    def shared_nics(self) -> frozenset[Nic]:
        """NIC directions that more than one edge and direction of traffic passes."""
        network = self.scenario.cluster.network
        if network is None or network.bandwidth == float("inf"):
            return frozenset()
        routes = [self.nic_route(stage) for stage in range(self.num_stages - 1)]
        passes = Counter(nic for route in routes for nic in (*route, *backward_route(route)))
        return frozenset(nic for nic, count in passes.items() if count > 1)

    def core(self, position: int) -> int:
        """The core of its node that a rank, by its place in `ranks`, is pinned to: ranks take the cores in turns."""
        nodes = [self.scenario.cluster.node_of(rank) for rank in self.ranks[: position + 1]]
        return (nodes.count(nodes[-1]) - 1) % (self.scenario.cluster.cores or len(nodes))

    @cached_property
    def crowded_nodes(self) -> frozenset[int]:
        """Nodes whose ranks outnumber their cores."""
        cluster = self.scenario.cluster
        nodes = Counter(cluster.node_of(rank) for rank in self.placement)
        return frozenset(n for n, count in nodes.items() if cluster.cores is not None and count > cluster.cores)


def sum_by_stage(layers: Array, balances: npt.NDArray[np.int_]) -> Array:
    """Sums of a figure of each layer over each stage, for several balances (rows) of the same layers."""
    firsts = np.cumsum(balances, axis=1) - balances + len(layers) * np.arange(len(balances))[:, None]
    sums: Array = np.add.reduceat(np.tile(layers, len(balances)), firsts.ravel()).reshape(balances.shape)
    return sums


def microbatch_sizes(batch: int, num_microbatches: int) -> tuple[int, ...]:
    """N samples in M micro-batches; where M does not divide N the first N mod M hold one sample more."""
    size, larger = divmod(batch, num_microbatches)
    return (size + 1,) * larger + (size,) * (num_microbatches - larger)


def recomputed(mode: Checkpoint, num_microbatches: int) -> tuple[bool, ...]:
    """The checkpoint rule. ``except_last`` spares the last micro-batch: GPipe needs it again at once.

    never        F0 F1 F2          B2      B1      B0
    except_last  F0 F1 F2          B2   R1 B1   R0 B0
    always       F0 F1 F2       R2 B2   R1 B1   R0 B0
    """
    return (mode != "never",) * (num_microbatches - 1) + (mode == "always",)


_MODES: tuple[Checkpoint, ...] = ("never", "always", "except_last")


def recomputed_by(plans: Sequence[Plan]) -> npt.NDArray[np.bool_]:
    """`Plan.recomputed` of plans with the same K and M: by stage, micro-batch and plan."""
    modes = np.array([[_MODES.index(mode) for mode in plan.checkpoint] for plan in plans]).T
    patterns = np.array([recomputed(mode, plans[0].num_microbatches) for mode in _MODES])
    return patterns.T[:, modes].transpose(1, 0, 2)


def order_of_backwards(schedule: ScheduleName, asked: BackwardOrder) -> BackwardOrder:
    """The order that is run: `gpipe` has the choice, every other schedule is first in first out."""
    return asked if schedule == "gpipe" else "fifo"


def make_plan(scenario: Scenario) -> Plan:
    """The plan that a scenario describes, its profile built or read, its layers cut."""
    spec, cluster = scenario.plan, scenario.cluster
    K, M = spec.num_stages, spec.num_microbatches
    if K is None or M is None:
        missing = [
            scenario.error("plan.stages", "is missing, expected a number of stages such as 4") if K is None else None,
            scenario.error("plan.microbatches", "is missing, expected a number such as 16") if M is None else None,
        ]
        raise InputError(problem for error in missing if error for problem in error.problems)
    sizes = microbatch_sizes(scenario.batch, M)
    profile = build_profile(scenario, sizes)
    if profile.num_layers < K:
        raise scenario.error("plan.stages", f"found {K}, expected at most the profile's {profile.num_layers} layers")
    if spec.balance and sum(spec.balance) != profile.num_layers:
        found = sum(spec.balance)
        raise scenario.error("plan.balance", f"adds up to {found}, expected the profile's {profile.num_layers} layers")
    for field, message in missing_in(profile, cluster, sizes):
        raise scenario.error(field, message)
    placement = spec.placement or tuple(range(K))
    checkpoint = spec.checkpoint if isinstance(spec.checkpoint, tuple) else (spec.checkpoint,) * K
    slowdowns = [cluster.slowdown.get(rank, 1.0) for rank in placement]
    return Plan(
        scenario=scenario,
        profile=profile,
        balance=spec.balance or partition(stage_costs(profile, sizes, checkpoint, slowdowns)),
        placement=placement,
        num_microbatches=M,
        checkpoint=checkpoint,
        schedule=spec.schedule,
        recompute=spec.recompute,
        backward=order_of_backwards(spec.schedule, spec.backward),
        window=spec.window,
    )


_MOST_BYTES = 2.0**60
_MOST_PER_WEIGHT = 10
"""Times its own bytes: gradient and optimizer state."""


def missing_in(profile: Profile, cluster: Cluster, sizes: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """What a plan needs of its profile and does not find there: field and message."""
    costs = profile.at(sizes[0])
    if not (costs.forward_s + costs.backward_s).any():
        yield "model", "takes no time at all, expected a layer with a forward or backward above zero"
    held = costs.saved_bytes + costs.output_bytes + abs(costs.workspace_backward_bytes) + costs.workspace_no_grad_bytes
    if float(held.sum() * len(sizes) + profile.parameter_bytes.sum() * _MOST_PER_WEIGHT) > _MOST_BYTES:
        yield "model", f"would hold more than {format_bytes(_MOST_BYTES)} in all, expected less"
    if cluster.link is MEASURED and profile.link is None:
        yield "cluster.link", "found measured, but the profile has no measured link"


def stage_costs(
    profile: Profile, sizes: tuple[int, ...], checkpoint: tuple[Checkpoint, ...], slowdowns: list[float]
) -> Array:
    """Seconds per step that each layer would take on each stage: forward, backward and what is recomputed."""
    forward = {size: profile.at(size).forward_s for size in set(sizes)}
    backward = {size: profile.at(size).backward_s for size in set(sizes)}
    both = sum(forward[size] + backward[size] for size in sizes)
    again = {
        mode: sum(forward[size] for size, again in zip(sizes, recomputed(mode, len(sizes)), strict=True) if again)
        for mode in set(checkpoint)
    }
    return np.array([(both + again[mode]) * slow for mode, slow in zip(checkpoint, slowdowns, strict=True)])
