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

from gpipe_sim.files import (
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
from gpipe_sim.limits import CELLS
from gpipe_sim.plan import Plan, make_plan, microbatch_sizes, missing_in, order_of_backwards
from gpipe_sim.profile import Profile, parse_profile
from gpipe_sim.scenario import BackwardOrder, Checkpoint, PlanSpec, Recompute, Scenario, ScheduleName, WindowField
from gpipe_sim.sweep import parse_scenario
from gpipe_sim.validate import plan_contradictions

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
    """M."""
    schedule: ScheduleName
    """The order of forwards and backwards."""
    recompute: Recompute
    """Whether a recomputation starts as soon as its rank is free, or waits for the gradient."""
    backward: BackwardOrder
    """The order that is run; only ``gpipe`` knows ``reverse``."""
    window: WindowField
    """Receives posted ahead per edge and direction."""
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
        "schedule": plan.schedule,
        "recompute": plan.recompute,
        "backward": plan.backward,
        "window": "all" if plan.window is None else plan.window,
        "scenario": plan.scenario.document.data | {"name": plan.scenario.name},
        "profile": LiteralScalarString(plan.profile.to_json()),
    }
    return yaml_text(data)


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan file."""
    write_text(path, plan_text(plan))


def is_plan(document: Document) -> bool:
    """Whether a document read from a file is a plan, and not a scenario."""
    return isinstance(document.data, dict) and document.data.get("format") == FORMAT


def load_plan(path: Path) -> Plan:
    """Read a plan file; every mistake is reported with its line."""
    return parse_plan(read_yaml(path))


def read_plan(path: Path) -> Plan:
    """The plan of a plan file, or of a scenario file that has only one."""
    document = read_yaml(path)
    if is_plan(document):
        return parse_plan(document)
    sweep = parse_scenario(document)
    if len(sweep) != 1:
        raise InputError([Problem(str(path), "", f"has {len(sweep)} plans, expected a single one to run")])
    return make_plan(sweep[0])


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
    problems = [document.problem(path, message) for path, message in _contradictions(content, scenario, profile)]
    if problems:
        raise InputError(problems)
    return Plan(
        scenario=scenario,
        profile=profile,
        balance=tuple(stage.layers for stage in content.stages),
        placement=tuple(stage.rank for stage in content.stages),
        num_microbatches=content.microbatches,
        checkpoint=tuple(stage.checkpoint for stage in content.stages),
        schedule=content.schedule,
        recompute=content.recompute,
        backward=order_of_backwards(content.schedule, content.backward),
        window=content.window,
    )


def _contradictions(content: _PlanFile, scenario: Scenario, profile: Profile) -> Iterator[tuple[FieldPath, str]]:
    """What is right field by field but cannot be together: as in a scenario, where a plan file says it."""
    layers = sum(stage.layers for stage in content.stages)
    if layers != profile.num_layers:
        yield ("stages",), f"have {layers} layers in all, expected the profile's {profile.num_layers}"
    chosen = PlanSpec(
        stages=len(content.stages),
        microbatches=content.microbatches,
        schedule=content.schedule,
        placement=[stage.rank for stage in content.stages],  # type: ignore[arg-type]  # as a file has it
    )
    for (section, *rest), message in plan_contradictions(chosen, None, scenario.cluster, scenario.batch):
        field = rest[0] if section == "plan" and rest[0] == "microbatches" else "stages"
        yield ("scenario", section, *rest) if section == "cluster" else (field,), message
    if content.microbatches > scenario.batch:
        return
    for field, message in missing_in(profile, scenario.cluster, microbatch_sizes(scenario.batch, content.microbatches)):
        yield ("scenario", *field.split(".")), message
