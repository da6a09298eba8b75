"""Making a plan: a scenario's profile built or read, its layers cut, its stages placed and ordered.

scenario --build_profile--> profile --partition--> balance
                '--schedule--> placement, and the order: named, from a file, or made for these very times
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from gpipe_sim.base.arrays import Array
from gpipe_sim.base.files import InputError, read_text
from gpipe_sim.base.units import format_bytes
from gpipe_sim.cost.analytic import build_profile
from gpipe_sim.cost.profile import Profile
from gpipe_sim.cost.recompute import recomputed_in_backward
from gpipe_sim.make.automatic_order import with_automatic_order
from gpipe_sim.plan.order import ActionList, Order
from gpipe_sim.plan.order_file import OrderFile, read_order
from gpipe_sim.plan.orders import SCHEDULES, position_of
from gpipe_sim.plan.partition import partition
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.stages import microbatch_sizes, recomputed
from gpipe_sim.scenario.schema import (
    AUTO,
    MEASURED,
    BackwardOrder,
    Checkpoint,
    Cluster,
    RecomputeUnit,
    Scenario,
    is_order_file,
)


def order_of_backwards(schedule: str, asked: BackwardOrder) -> BackwardOrder:
    """The order that is run: breadth-first schedules have the choice, every other one is first in first out."""
    return asked if schedule in ("gpipe", "interleaved_gpipe") else "fifo"


def make_plan(scenario: Scenario) -> Plan:
    """The plan that a scenario describes, its profile built or read, its layers cut, its order made."""
    spec, cluster = scenario.plan, scenario.cluster
    S, M = spec.num_stages, spec.num_microbatches
    file = _order_file(scenario) if is_order_file(spec.schedule) else None
    if file is not None:
        S, M = S or len(file.positions), M or file.num_microbatches
    if S is None or M is None:
        missing = [
            scenario.error("plan.stages", "is missing, expected a number of stages such as 4") if S is None else None,
            scenario.error("plan.microbatches", "is missing, expected a number such as 16") if M is None else None,
        ]
        raise InputError(problem for error in missing if error for problem in error.problems)
    sizes = microbatch_sizes(spec.share(scenario.batch), M)
    profile = build_profile(scenario, sizes)
    if profile.num_layers < S:
        raise scenario.error("plan.stages", f"found {S}, expected at most the profile's {profile.num_layers} layers")
    if spec.balance and sum(spec.balance) != profile.num_layers:
        found = sum(spec.balance)
        raise scenario.error("plan.balance", f"adds up to {found}, expected the profile's {profile.num_layers} layers")
    for field, message in missing_in(profile, cluster, sizes):
        raise scenario.error(field, message)
    placement = file_placement(scenario, file, S, M) if file else named_placement(scenario, S, M)
    order = by_position(file, placement) if file else None
    if spec.recompute_unit == "attention" and "attention_bytes" not in profile.table:
        message = "found attention, expected stage or layer: the profile does not say what attention is of its layers"
        raise scenario.error("plan.recompute_unit", message)
    if spec.recompute_unit != "stage" and (splits(spec.schedule, order) or spec.schedule == AUTO):
        message = f"found {spec.recompute_unit}, expected stage with {spec.schedule}, whose backwards are split"
        raise scenario.error("plan.recompute_unit", message)
    if splits(spec.schedule, order) and not profile.splits:
        raise scenario.error("plan.schedule", cannot_split(scenario, spec.schedule))
    checkpoint = spec.checkpoint if isinstance(spec.checkpoint, tuple) else (spec.checkpoint,) * S
    mesh, T = spec.mesh(max(placement) + 1), spec.tensor
    firsts = {rank: [mesh.number(rank, replica) for replica in range(mesh.replicas)] for rank in set(placement)}
    slowest = {rank: max(cluster.slowest(range(n, n + T)) for n in numbers) for rank, numbers in firsts.items()}
    slowdowns = [slowest[rank] for rank in placement]
    plan = Plan(
        scenario=scenario,
        profile=profile,
        balance=spec.balance or partition(stage_costs(profile, sizes, checkpoint, slowdowns, spec.recompute_unit)),
        placement=placement,
        num_microbatches=M,
        checkpoint=checkpoint,
        schedule=spec.schedule,
        recompute=spec.recompute,
        recompute_unit=spec.recompute_unit,
        replicas=spec.replicas,
        tensor=T,
        dimensions=spec.order,
        shard=spec.shard,
        backward=order_of_backwards(spec.schedule, spec.backward),
        window=spec.window,
        order=order,
    )
    return with_automatic_order(plan) if spec.schedule == AUTO else plan


# --- placement and order -------------------------------------------------------------------------------------------


def named_placement(scenario: Scenario, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """The rank of each stage, as the scenario or else the schedule has it; refused where the schedule cannot be."""
    spec, S, M = scenario.plan, num_stages, num_microbatches
    v = spec.stages_per_rank or (SCHEDULES[spec.schedule].stages_per_rank if spec.schedule in SCHEDULES else None)
    if spec.placement:
        v = v or max(Counter(spec.placement).values())
    v = v or 1
    if S % v:
        raise scenario.error("plan.stages", f"found {S}, expected a multiple of the {v} stages on each rank")
    if spec.schedule == AUTO:
        return spec.placement or tuple(position_of("looped", stage, S // v) for stage in range(S))
    if problem := refusal(spec.schedule, S, v, M, spec.placement):
        raise scenario.error(*problem)
    pattern = SCHEDULES[spec.schedule].pattern
    return spec.placement or tuple(position_of(pattern, stage, S // v) for stage in range(S))


def refusal(
    schedule: str, num_stages: int, stages_per_rank: int, num_microbatches: int, placement: tuple[int, ...] | None
) -> tuple[str, str] | None:
    """Why a named schedule cannot be run like this: the field that is wrong, and what would be right."""
    known, v = SCHEDULES[schedule], stages_per_rank
    K = num_stages // v
    if known.stages_per_rank is not None and known.stages_per_rank != v:
        field = "plan.placement" if placement else "plan.stages_per_rank"
        expected = known.stages_per_rank
        return field, f"puts {v} stages on a rank, expected {expected} for {schedule}"
    if message := known.refuses(K, v, num_microbatches):
        return "plan.schedule", message
    positions = tuple(position_of(known.pattern, stage, K) for stage in range(num_stages))
    if placement:
        ranks = list(dict.fromkeys(placement))
        if tuple(ranks.index(rank) for rank in placement) != positions:
            example = [ranks[position % len(ranks)] for position in positions]
            return "plan.placement", f"found {list(placement)}, expected stages placed as {schedule} does: {example}"
    return None


def _order_file(scenario: Scenario) -> OrderFile:
    """Read the file that the schedule names."""
    path = scenario.beside(scenario.plan.schedule)
    if not path.is_file():
        raise scenario.error("plan.schedule", f"there is no file {path}")
    return read_order(read_text(path), str(path))


def order_notes(scenario: Scenario) -> tuple[str, ...]:
    """What the file of a scenario's order says that its plan does otherwise, or leaves out."""
    return _order_file(scenario).notes if is_order_file(scenario.plan.schedule) else ()


def file_placement(scenario: Scenario, file: OrderFile, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """The rank of each stage, as the rows of the file have it."""
    spec = scenario.plan
    for field, given, found in (
        ("plan.stages", num_stages, len(file.positions)),
        ("plan.microbatches", num_microbatches, file.num_microbatches),
    ):
        if given != found:
            raise scenario.error(field, f"found {given}, expected the {found} of {spec.schedule}")
    placement = spec.placement or file.positions
    if len(set(zip(placement, file.positions, strict=True))) != len(set(file.positions)):
        message = f"found {list(placement)}, expected stages together that {spec.schedule} has in one row"
        raise scenario.error("plan.placement", f"{message}, such as {list(file.positions)}")
    devices = scenario.cluster.num_devices
    if devices and max(placement) >= devices // spec.copies:
        most = devices // spec.copies
        raise scenario.error("plan.schedule", f"has {len(file.orders)} ranks, expected at most {most}")
    return placement


def by_position(file: OrderFile, placement: tuple[int, ...]) -> Order:
    """The rows of a file in the order of the pipeline: of the first stage that each holds."""
    row_of = dict(zip(reversed(placement), reversed(file.positions), strict=True))
    return tuple(ActionList.of(file.orders[row_of[rank]]) for rank in dict.fromkeys(placement))


def splits(schedule: str, order: Order | None) -> bool:
    """Whether backwards are split, in I and W."""
    if order is not None:
        return any(actions.are("I").any() for actions in order)
    return schedule in SCHEDULES and SCHEDULES[schedule].splits


def cannot_split(scenario: Scenario, schedule: str) -> str:
    """What to do about a profile that does not know the two halves of a backward."""
    what = "backward_weights is given for every layer" if scenario.profile is None else "it is measured again"
    return f"{schedule} splits backwards, which this profile does not: it can once {what}"


# --- costs ---------------------------------------------------------------------------------------------------------


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
    profile: Profile,
    sizes: tuple[int, ...],
    checkpoint: tuple[Checkpoint, ...],
    slowdowns: list[float],
    unit: RecomputeUnit = "stage",
) -> Array:
    """Seconds per step that each layer would take on each stage: forward, backward and what is recomputed."""
    forward = {size: profile.at(size).forward_s for size in set(sizes)}
    backward = {size: profile.at(size).backward_s for size in set(sizes)}
    own = recomputed_in_backward(profile, unit)
    longer = {size: own.at(size).backward_s - backward[size] for size in set(sizes)}
    more = forward if unit == "stage" else longer
    both = sum(forward[size] + backward[size] for size in sizes)
    again = {
        mode: sum(more[size] for size, again in zip(sizes, recomputed(mode, len(sizes)), strict=True) if again)
        for mode in set(checkpoint)
    }
    return np.array([(both + again[mode]) * slow for mode, slow in zip(checkpoint, slowdowns, strict=True)])
