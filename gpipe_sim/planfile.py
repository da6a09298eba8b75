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

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationError
from ruamel.yaml.scalarstring import LiteralScalarString

from gpipe_sim.files import Document, InputError, Problem, Strict, problems_of, read_yaml, write_text, yaml_text
from gpipe_sim.plan import Plan, make_plan
from gpipe_sim.profile import parse_profile
from gpipe_sim.scenario import BackwardOrder, Checkpoint, Recompute, ScheduleName, to_window
from gpipe_sim.sweep import parse_scenario

FORMAT = "gpipe-plan-1"


class _StageEntry(Strict):
    layers: Annotated[int, Field(ge=1)]
    rank: Annotated[int, Field(ge=0)]
    checkpoint: Checkpoint


class _PlanFile(Strict):
    format: Literal["gpipe-plan-1"]
    name: str
    stages: Annotated[list[_StageEntry], Field(min_length=1)]
    microbatches: Annotated[int, Field(ge=1)]
    schedule: ScheduleName
    recompute: Recompute
    backward: BackwardOrder
    window: Annotated[int | None, PlainValidator(to_window)]
    scenario: dict[str, Any]
    profile: str


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
    (scenario,) = parse_scenario(Document(document.file, content.scenario, inner))
    try:
        profile_data = json.loads(content.profile)
    except json.JSONDecodeError as error:
        raise InputError([document.problem(("profile",), f"not JSON: {error.msg}")]) from error
    profile = parse_profile(Document(document.file, profile_data, {(): document.where(("profile",))}))
    layers = sum(stage.layers for stage in content.stages)
    if layers != profile.num_layers:
        message = f"have {layers} layers in all, expected the profile's {profile.num_layers}"
        raise InputError([document.problem(("stages",), message)])
    if len({stage.rank for stage in content.stages}) < len(content.stages):
        raise InputError([document.problem(("stages",), "expected a different rank for each stage")])
    if content.microbatches > scenario.batch:
        message = f"found {content.microbatches}, expected at most the batch of {scenario.batch}"
        raise InputError([document.problem(("microbatches",), message)])
    return Plan(
        scenario=scenario,
        profile=profile,
        balance=tuple(stage.layers for stage in content.stages),
        placement=tuple(stage.rank for stage in content.stages),
        num_microbatches=content.microbatches,
        checkpoint=tuple(stage.checkpoint for stage in content.stages),
        schedule=content.schedule,
        recompute=content.recompute,
        backward=content.backward,
        window=content.window,
    )
