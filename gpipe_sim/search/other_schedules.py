"""A plan under every other schedule."""

from collections.abc import Iterator
from dataclasses import replace

from gpipe_sim.make.making import order_of_backwards, stage_costs
from gpipe_sim.plan.orders import SCHEDULES, position_of
from gpipe_sim.plan.partition import partition
from gpipe_sim.plan.plan import Plan

_INTERLEAVED = 2
"""Stages on each rank that an interleaved schedule is tried with."""


def with_other_schedules(plan: Plan) -> Iterator[Plan]:
    """The plan's ranks and micro-batches under every other schedule that its profile allows, cut again where a rank
    holds another number of stages."""
    K, M, L = plan.num_ranks, plan.num_microbatches, plan.profile.num_layers
    mode = plan.checkpoint[0]
    for name, schedule in SCHEDULES.items():
        v = schedule.stages_per_rank or _INTERLEAVED
        if name == plan.schedule or name == "naive" or v * K > L or schedule.refuses(K, v, M):
            continue
        cannot_split = not plan.profile.splits or plan.recompute_unit != "stage"
        if (schedule.splits and cannot_split) or (v > 1 and not plan.scenario.cluster.overlap):
            continue  # where senders wait, ranks with several stages can wait for each other
        stages, modes, balance = v * K, plan.checkpoint, plan.balance
        placement = tuple(plan.pipeline[position_of(schedule.pattern, stage, K)] for stage in range(stages))
        if stages != plan.num_stages:
            modes = (mode,) * stages
            slowdowns = [plan.rank_slowdown(rank) for rank in placement]
            balance = partition(stage_costs(plan.profile, plan.sizes, modes, slowdowns, plan.recompute_unit))
        yield replace(
            plan,
            schedule=name,
            backward=order_of_backwards(name, plan.scenario.plan.backward),
            placement=placement,
            balance=balance,
            checkpoint=modes,
            order=None,
        )
