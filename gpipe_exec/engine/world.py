"""A plan for as many processes as there are, whatever it was made for."""

from collections.abc import Callable

import torch.distributed as dist

from gpipe_sim.plan.plan import Plan
from gpipe_sim.search.replan import plan_for_devices, told_again


def plan_for_world(plan: Plan, tell: Callable[[str], object] = print) -> Plan:
    """The plan, if there are as many processes as it has ranks; otherwise one for those that there are.

    A run that goes on with fewer devices, or more, plans again: rank 0 searches for the fastest plan that fits, from
    the plan's own scenario, all others get it, and rank 0 tells it in a sentence. The size of micro-batches stays where
    it can. Where nothing fits, every rank raises a `ValueError` that says what would. `Pipeline.load` reads the
    checkpoint of the other plan.

    >>> plan = plan_for_world(read_plan(Path("plan.yaml")))
    >>> pipe = Pipeline(layers, plan, loss)
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == plan.world:
        return plan
    found: list[Plan | str | None] = [None]
    if world == 1 or dist.get_rank() == 0:
        try:
            found[0] = new = plan_for_devices(plan, world)
            tell(told_again(plan, new))
        except ValueError as error:
            found[0] = str(error)
    if world > 1:
        dist.broadcast_object_list(found, src=0)
    if not isinstance(found[0], Plan):
        raise ValueError(found[0])
    return found[0]
