"""Plan files: a plan with the scenario that it came from and the profile it is predicted with, to take anywhere.

format: gpipe-plan-1
name: small
stages:
  - {layers: 6, rank: 0, checkpoint: always}
  - {layers: 5, rank: 1, checkpoint: never}
microbatches: 8
schedule: gpipe
recompute: early
backward: reverse
window: 2
scenario: {...}         # one point, as it was written
profile: |              # the profile file's JSON, as text: quick to read however many layers it has
  {...}
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from ruamel.yaml.scalarstring import LiteralScalarString

from gpipe_sim.base.files import (
    Document,
    FieldPath,
    InputError,
    Problem,
    Strict,
    parse_json,
    problems_of,
    read_yaml,
    write_text,
    yaml_text,
)
from gpipe_sim.base.limits import CELLS
from gpipe_sim.cost.profile import Profile, parse_profile
from gpipe_sim.make.making import by_position, cannot_split, make_plan, missing_in, order_of_backwards, refusal, splits
from gpipe_sim.plan.order import Order
from gpipe_sim.plan.order_file import order_text, read_order
from gpipe_sim.plan.orders import SCHEDULES
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import order_of, shape_of
from gpipe_sim.plan.stages import microbatch_sizes
from gpipe_sim.scenario.mesh import SUMS_INSIDE
from gpipe_sim.scenario.reading import Source, parse_scenario, read_document
from gpipe_sim.scenario.schema import (
    AUTO,
    BackwardOrder,
    Checkpoint,
    OrderField,
    PlanSpec,
    Recompute,
    RecomputeUnit,
    Scenario,
    ScheduleField,
    Shard,
    WindowField,
    is_order_file,
)
from gpipe_sim.scenario.validate import plan_contradictions

FORMAT = "gpipe-plan-1"


class _StageEntry(Strict):
    """One stage: contiguous layers on one rank."""

    layers: Annotated[int, Field(ge=1, lt=2**31)]
    """How many, counted on from the stage before."""
    rank: Annotated[int, Field(ge=0, lt=2**31)]
    """The process that holds it."""
    checkpoint: Checkpoint
    """Of which micro-batches this stage recomputes activations."""


class _PlanFile(Strict):
    """Everything that was chosen. Nothing has a default: a plan leaves nothing open."""

    format: Literal["gpipe-plan-1"]
    """The version of this format."""
    name: Annotated[str, Field(min_length=1)]
    """The scenario's."""
    stages: Annotated[list[_StageEntry], Field(min_length=1)]
    """From the first to the last."""
    microbatches: Annotated[int, Field(ge=1, le=CELLS)]
    """M, of each replica."""
    replicas: Annotated[int, Field(ge=1, le=10**9)] = 1
    """D."""
    tensor: Annotated[int, Field(ge=1, le=10**9)] = 1
    """T; the profile is that of one device of so many that hold a layer together."""
    dimensions: OrderField = SUMS_INSIDE
    """The order in which devices are numbered, a scenario's ``plan.order``."""
    shard: Shard = "none"
    """What the D ranks that hold the same stages divide among themselves."""
    schedule: ScheduleField
    """The order of forwards and backwards: a name, or that of the file that it came from."""
    recompute: Recompute
    """Whether a recomputation starts as soon as its rank is free, or waits for the gradient."""
    recompute_unit: RecomputeUnit = "stage"
    """What is recomputed at once."""
    backward: BackwardOrder
    """The order that is run; only ``gpipe`` knows ``reverse``."""
    window: WindowField
    """Receives posted ahead per edge and direction."""
    order: str | None = None
    """What each rank does, as a file of torch's has it, where the schedule is no named one."""
    scenario: dict[str, Any]
    """The one point of a scenario file that the plan answers, as it was written."""
    profile: str
    """The profile file that the plan is predicted with, as text."""


def plan_text(plan: Plan) -> str:
    """The plan file's text."""
    stages = [
        {"layers": layers, "rank": rank, "checkpoint": mode}
        for layers, rank, mode in zip(plan.balance, plan.placement, plan.checkpoint, strict=True)
    ]
    data = {
        "format": FORMAT,
        "name": plan.scenario.name,
        "stages": stages,
        "microbatches": plan.num_microbatches,
        **({"replicas": plan.replicas} if plan.replicas > 1 else {}),
        **({"tensor": plan.tensor} if plan.tensor > 1 else {}),
        **({"dimensions": list(plan.dimensions)} if plan.mesh.messages_inside else {}),
        **({"shard": plan.shard} if plan.shard != "none" else {}),
        "schedule": plan.schedule,
        "recompute": plan.recompute,
        **({"recompute_unit": plan.recompute_unit} if plan.recompute_unit != "stage" else {}),
        "backward": plan.backward,
        "window": "all" if plan.window is None else plan.window,
        **({"order": LiteralScalarString(order_of_plan(plan))} if plan.order is not None else {}),
        "scenario": plan.scenario.document.data | {"name": plan.scenario.name},
        "profile": LiteralScalarString(plan.profile.to_json()),
    }
    return yaml_text(data)


def order_of_plan(plan: Plan) -> str:
    """What each rank does as a file of torch's has it: a row for each rank, ascending."""
    order = order_of(shape_of(plan))
    return order_text([order[plan.pipeline.index(rank)] for rank in plan.ranks])


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan file."""
    write_text(path, plan_text(plan))


def is_plan(document: Document) -> bool:
    """Whether a document read from a file is a plan, and not a scenario."""
    return isinstance(document.data, dict) and document.data.get("format") == FORMAT


def load_plan(path: Path) -> Plan:
    """Read a plan file; every mistake is reported with its line."""
    return parse_plan(read_yaml(path))


def read_plan(source: Source) -> Plan:
    """The plan of a plan file, or of a scenario that has only one."""
    document = read_document(source)
    if is_plan(document):
        return parse_plan(document)
    sweep = parse_scenario(document)
    if len(sweep) != 1:
        raise InputError([Problem(document.file, "", f"has {len(sweep)} plans, expected a single one")])
    return make_plan(sweep[0])


def plan_of(asked: Plan | Scenario | Source) -> Plan:
    """The one plan of whatever describes it."""
    if isinstance(asked, Plan):
        return asked
    return make_plan(asked) if isinstance(asked, Scenario) else read_plan(asked)


def parse_plan(document: Document) -> Plan:
    """The plan of an already read document."""
    if not is_plan(document):
        raise InputError([document.problem(("format",), f"is missing, expected a plan file with format: {FORMAT}")])
    try:
        content = _PlanFile.model_validate(document.data)
    except ValidationError as error:
        raise InputError(problems_of(error, document, ())) from error
    inner = {path[1:]: place for path, place in document.places.items() if path[:1] == ("scenario",)}
    sweep = parse_scenario(Document(document.file, content.scenario, inner))
    if len(sweep) != 1:
        raise InputError([document.problem(("scenario",), f"has {len(sweep)} plans, expected the one of this file")])
    scenario, where = sweep[0], document.where(("profile",))
    try:
        profile_data = parse_json(content.profile, document.file).data
    except InputError as error:
        raise InputError([Problem(where, "profile", problem.message) for problem in error.problems]) from error
    profile = parse_profile(Document(document.file, profile_data, {(): where}))
    placement = tuple(stage.rank for stage in content.stages)
    problems = [document.problem(path, message) for path, message in _contradictions(content, scenario, profile)]
    order = None if problems else _order(content, document, placement)
    if not problems and splits(content.schedule, order) and not profile.splits:
        problems.append(document.problem(("schedule",), cannot_split(scenario, content.schedule)))
    if not problems and splits(content.schedule, order) and content.recompute_unit != "stage":
        message = f"found {content.recompute_unit}, expected stage with {content.schedule}, whose backwards are split"
        problems.append(document.problem(("recompute_unit",), message))
    if problems:
        raise InputError(problems)
    return Plan(
        scenario=scenario,
        profile=profile,
        balance=tuple(stage.layers for stage in content.stages),
        placement=placement,
        num_microbatches=content.microbatches,
        checkpoint=tuple(stage.checkpoint for stage in content.stages),
        schedule=content.schedule,
        recompute=content.recompute,
        recompute_unit=content.recompute_unit,
        replicas=content.replicas,
        tensor=content.tensor,
        dimensions=content.dimensions,
        shard=content.shard,
        backward=order_of_backwards(content.schedule, content.backward),
        window=content.window,
        order=order,
    )


def _order(content: _PlanFile, document: Document, placement: tuple[int, ...]) -> Order | None:
    """The order that the file holds, if it is no named schedule's."""
    is_named = content.schedule != AUTO and not is_order_file(content.schedule)
    if is_named or content.order is None:
        if is_named and content.order is None:
            return None
        message = f"is given beside schedule {content.schedule}" if is_named else f"is missing for {content.schedule}"
        raise InputError([document.problem(("order",), f"{message}, expected the order of a schedule without a name")])
    where = document.where(("order",))
    try:
        file = read_order(content.order, "order")
    except InputError as error:
        raise InputError([Problem(where, problem.where, problem.message) for problem in error.problems]) from error
    rows = {rank: row for row, rank in enumerate(sorted(set(placement)))}
    if file.positions != tuple(rows[rank] for rank in placement) or file.num_microbatches != content.microbatches:
        message = "has other stages on its ranks, or other micro-batches, than the plan, expected the plan's own"
        raise InputError([document.problem(("order",), message)])
    return by_position(file, placement)


def _contradictions(content: _PlanFile, scenario: Scenario, profile: Profile) -> Iterator[tuple[FieldPath, str]]:
    """What is right field by field but cannot be together: as in a scenario, where a plan file says it."""
    layers = sum(stage.layers for stage in content.stages)
    if layers != profile.num_layers:
        yield ("stages",), f"have {layers} layers in all, expected the profile's {profile.num_layers}"
    if content.tensor != profile.tensor:
        yield ("tensor",), f"found {content.tensor}, expected the {profile.tensor} that the profile is of"
    if content.recompute_unit == "attention" and "attention_bytes" not in profile.table:
        yield ("recompute_unit",), "found attention, of which the profile says nothing, expected stage or layer"
    chosen = PlanSpec(
        stages=len(content.stages),
        microbatches=content.microbatches,
        replicas=content.replicas,
        tensor=content.tensor,
        order=list(content.dimensions),  # type: ignore[arg-type]  # as a file has it
        sequence_split=scenario.plan.sequence_split,
        schedule=content.schedule,
        placement=[stage.rank for stage in content.stages],  # type: ignore[arg-type]  # as a file has it
    )
    if content.schedule in SCHEDULES:
        v = chosen.num_per_rank
        if len(content.stages) % v == 0 and (
            wrong := refusal(content.schedule, len(content.stages), v, content.microbatches, chosen.placement)
        ):
            yield ("schedule",) if wrong[0] == "plan.schedule" else ("stages",), wrong[1]
    for (section, *rest), message in plan_contradictions(chosen, None, scenario.cluster, scenario.batch):
        field = rest[0] if section == "plan" and rest[0] in ("microbatches", "replicas", "tensor") else "stages"
        yield ("scenario", section, *rest) if section == "cluster" else (field,), message
    if content.microbatches > chosen.share(scenario.batch):
        return
    sizes = microbatch_sizes(chosen.share(scenario.batch), content.microbatches)
    for field, message in missing_in(profile, scenario.cluster, sizes):
        yield ("scenario", *field.split(".")), message
