"""Figures: the seconds of each action and the bytes of each message of a program, for many plans at once.

How long an action lasts, how long a message occupies its link and how late it arrives is said here, for the simulator,
the evaluator and everyone else. Switching an effect off is the counterfactual that prices it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpipe_sim.base.arrays import Array, Flags, Indices
from gpipe_sim.base.limits import CELLS
from gpipe_sim.cost.collectives import CollectiveKind, spanning_s
from gpipe_sim.cost.recompute import recomputed_in_backward
from gpipe_sim.cost.transformer import bytes_per_parameter
from gpipe_sim.plan.actions import Letter
from gpipe_sim.plan.plan import Plan, dropped_by, recomputed_by
from gpipe_sim.plan.program import program_of
from gpipe_sim.plan.stages import boundary_bytes, stage_seconds, sum_by_stage


@dataclass(frozen=True, kw_only=True)
class Effects:
    """Which costs of the real world are modelled. Switching one off is the counterfactual that prices it."""

    overhead: bool = True
    """The engine's own time per action and per hop."""
    communication: bool = True
    """Links, receive windows and blocking sends."""
    sharing: bool = True
    """NICs and cores shared by several users."""
    collectives: bool = True
    """What replicas sum and gather."""


ALL_EFFECTS = Effects()

COLUMNS: Mapping[Letter, str] = {
    "F": "forward_s",
    "R": "forward_s",
    "B": "backward_s",
    "I": "backward_inputs_s",
    "W": "backward_weights_s",
}
"""Kind -> the profile's column with its seconds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Figures:
    """What the equations of a step need: axes are stage (or edge), micro-batch and plan."""

    seconds: Mapping[Letter, Array]
    """Kind -> seconds of compute by stage, micro-batch and plan; of an R also where a plan does not recompute. U has
    no micro-batches, and positions in the place of stages. I and W only where the profile knows them."""
    recomputed: Flags
    overhead_s: Array
    """The engine's own time before each action, by plan."""
    occupancy_s: Array
    """Seconds that each edge carries each message."""
    latency_s: Array
    """From a message's last byte to its arrival, by edge and plan."""
    collective_s: Mapping[Letter, Array]
    """S and G -> seconds by stage and plan; empty where there is one replica."""


def figures_of(plans: Sequence[Plan], effects: Effects = ALL_EFFECTS, replica: int = 0) -> Figures:
    """The figures of plans of one shape that differ in nothing but balance and checkpoint (`similar`), and of one of
    their replicas."""
    plan = plans[0]
    if plan.simulated_replicas * plan.num_stages * plan.num_microbatches > CELLS:
        message = (
            f"found {plan.replicas} that differ, with {plan.num_microbatches} micro-batches on each stage, expected"
        )
        raise plan.scenario.error("plan.replicas", f"{message} at most {CELLS} micro-batches on stages in all")
    profile, num_plans = plan.profile, len(plans)
    balances = np.array([plan.balance for plan in plans])
    by_stage = plan.slowdowns_of(replica)
    slowdowns = by_stage[:, None, None]
    columns = {letter: column for letter, column in COLUMNS.items() if letter in "FRB" or profile.splits}
    by_column = {
        column: stage_seconds(profile, column, balances, plan.sizes) * slowdowns for column in set(columns.values())
    }
    if plan.recompute_unit != "stage":
        own = recomputed_in_backward(profile, plan.recompute_unit)
        longer = stage_seconds(own, "backward_s", balances, plan.sizes) * slowdowns
        by_column["backward_s"] = np.where(dropped_by(plans), longer, by_column["backward_s"])
    update = sum_by_stage(profile.optimizer_s, balances).T * by_stage[:, None]
    if plan.shard != "none":
        update = update / plan.replicas  # each rank updates its share
    by_rank = np.zeros((plan.num_ranks, num_plans))
    np.add.at(by_rank, list(plan.positions), update)
    links = [plan.link(edge) for edge in range(plan.num_stages - 1)]
    hop = profile.hop_overhead_s if effects.overhead else 0.0
    latency = np.array([hop + link.latency if effects.communication else hop for link in links])
    messages = boundary_bytes(profile, balances, plan.sizes) / plan.message_slices
    bandwidths = np.array([link.bandwidth for link in links]).reshape(-1, 1, 1)
    if effects.sharing and plan.sharers > 1:
        through_nics = np.array([bool(plan.nic_route(edge)) for edge in range(len(links))]).reshape(-1, 1, 1)
        bandwidths = np.where(through_nics, bandwidths / plan.sharers, bandwidths)
    return Figures(
        seconds={letter: by_column[column] for letter, column in columns.items()} | {"U": by_rank},
        recomputed=recomputed_by(plans),
        overhead_s=np.full(num_plans, profile.action_overhead_s if effects.overhead else 0.0),
        occupancy_s=messages / bandwidths if effects.communication else np.zeros_like(messages),
        latency_s=np.repeat(latency[:, None], num_plans, axis=1),
        collective_s=_collective_s(plan, balances, effects),
    )


def collective_kinds(plan: Plan) -> dict[Letter, tuple[CollectiveKind, float]]:
    """S and G -> what they are, and how many bytes for each byte of weights."""
    per = bytes_per_parameter(plan.scenario.optimizer, plan.dtype, plan.scenario.precision)
    summing: CollectiveKind = "sum" if plan.shard == "none" else "scatter"
    return {"S": (summing, per.gradient / per.weight), "G": ("gather", 1.0)}


def _collective_s(plan: Plan, balances: Indices, effects: Effects) -> dict[Letter, Array]:
    if plan.replicas == 1:
        return {}
    weights = sum_by_stage(plan.profile.parameter_bytes, balances).T
    link = plan.inside_link
    networks = {rank: plan.group_network(rank) or link for rank in plan.ranks}
    of_stage = [networks[rank] for rank in plan.placement]
    seconds = {}
    for letter, (kind, ratio) in collective_kinds(plan).items():
        sizes = weights * ratio
        each = [
            spanning_s(kind, size, *plan.group, link, network, plan.collective_sharers)
            for size, network in zip(sizes, of_stage, strict=True)
        ]
        seconds[letter] = np.stack(each)
    return seconds if effects.collectives else {letter: 0.0 * values for letter, values in seconds.items()}


def similar(plan: Plan) -> tuple[object, ...]:
    """Plans of one shape that are equal in this differ in nothing but balance and checkpoint. A profile is equal to
    itself only: its tables are large."""
    scenario = plan.scenario
    of_scenario = scenario.cluster, scenario.batch, scenario.optimizer, scenario.precision
    return (
        plan.profile,
        *of_scenario,
        plan.placement,
        plan.recompute_unit,
        plan.replicas,
        plan.tensor,
        plan.dimensions,
        plan.shard,
    )


def work_s(plan: Plan) -> dict[Letter, Array]:
    """Kind but U -> the seconds that each stage computes in a step; what a backward recomputes counts as R."""
    at, seconds = program_of(plan).at, figures_of([plan]).seconds
    work: dict[Letter, Array] = {
        letter: np.where(at[letter] >= 0, values[:, :, 0], 0.0).sum(axis=1)
        for letter, values in seconds.items()
        if letter != "U"
    }
    if plan.recompute_unit != "stage":
        again = np.maximum(seconds["B"][:, :, 0] - plan.backward_s, 0.0).sum(axis=1)
        work |= {"R": again, "B": work["B"] - again}
    return work


def rank_work_s(plan: Plan) -> Array:
    """The seconds that each position computes in a step: of the slowest replica, where they differ."""
    work = sum(work_s(plan).values()) / plan.slowdowns
    replicas = range(plan.simulated_replicas)
    busy: Array = np.max([np.bincount(plan.positions, work * plan.slowdowns_of(d)) for d in replicas], axis=0)
    return busy
