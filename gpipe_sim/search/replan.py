"""A plan for another number of devices than it was made for: what is left after a failure, or more than before.

    1  micro-batches and what the scenario says under plan: stay      K=3, M=8, 1f1b   ->   K=2, M=8, 1f1b
    2  the size of micro-batches stays, the rest is searched          K=2, M=8, recompute all stages
    3  everything is searched, if the scenario leaves M open          K=2, M=16

The first of these in which something fits is taken, and of it the fastest. What is computed is the same in all of them,
to rounding; that of a BatchNorm, which normalises by micro-batch, in the first two.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpipe_sim.base.files import Document, InputError
from gpipe_sim.base.units import format_bytes, format_seconds
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.plan import Plan, only_single_members, only_what_runs
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.scenario.schema import Scenario, is_order_file
from gpipe_sim.search.advise import advise, describe, remedies
from gpipe_sim.search.choices import Space, space_of
from gpipe_sim.search.judge import Candidate, Judge


class NoPlanError(ValueError):
    """There is no plan for that many devices; the message says why, and what would fit."""


@dataclass(frozen=True)
class _Attempt:
    """What may be chosen in one go, and the best of it."""

    best: Candidate
    space: Space | None
    """None where nothing but the cut was left to choose."""


def plan_for_devices(plan: Plan, num_devices: int) -> Plan:
    """The fastest plan that fits for so many devices, all of them in use, from the scenario of another plan.

    A plan of one replica stays one; of several, their number is chosen again.
    """
    if num_devices == plan.world:
        return plan
    only_what_runs(plan, "planning again")
    only_single_members(plan, "planning again")
    if plan.scenario.cluster.groups:
        raise NoPlanError(
            f"{_change(plan, num_devices)}: which of cluster.groups are left is not known, "
            "expected a plan for the devices that are there (gpipe plan)"
        )
    replicas = list(_possible_replicas(plan, num_devices))
    if not replicas:
        raise NoPlanError(f"{_change(plan, num_devices)}: {_impossible(plan, num_devices)}")
    with ExitStack() as at_exit:
        profile = None
        if plan.scenario.profile is not None:  # the plan has its own, and the file may not be here
            profile = Path(at_exit.enter_context(TemporaryDirectory())) / "profile.json"
            plan.profile.save(profile)
        attempts: list[_Attempt] = []
        refused: list[InputError] = []
        for keeps_choices, keeps_size in ((True, True), (False, True), (False, False)):
            if not keeps_size and "microbatches" in _given(plan):
                break
            for D in replicas:
                try:
                    attempts.append(_attempt(plan, num_devices, D, profile, choices=keeps_choices, size=keeps_size))
                except InputError as error:  # such as a schedule with more stages than there are layers
                    refused.append(error)
            fitting = [attempt.best for attempt in attempts if attempt.best.fits]
            if fitting:
                found = min(fitting, key=lambda c: (c.step_time_s, c.peak_bytes)).plan
                return replace(found, scenario=replace(found.scenario, profile=plan.scenario.profile))
        if not attempts:
            raise NoPlanError(f"{_change(plan, num_devices)}: {refused[0]}")
        nearest = min(attempts, key=lambda attempt: attempt.best.peak_bytes)
        raise NoPlanError(f"{_change(plan, num_devices)}: {_nothing_fits(nearest)}")


def told_again(old: Plan, new: Plan) -> str:
    """Both in a sentence, with the step time that is predicted of each."""
    before, after = (f"{describe(one)}: {format_seconds(_step_time_s(one))} a step" for one in (old, new))
    return f"{_change(old, new.world)}, planned again: {after} predicted, instead of {before}"


def _step_time_s(plan: Plan) -> float:
    return Judge().judge([plan])[0].step_time_s


def _change(plan: Plan, num_devices: int) -> str:
    return f"{num_devices} process{'es' * (num_devices > 1)} for a plan of {plan.world} rank{'s' * (plan.world > 1)}"


def _given(plan: Plan) -> Mapping[str, Any]:
    """What the scenario says under plan:"""
    return plan.scenario.document.data.get("plan") or {}


def _possible_replicas(plan: Plan, num_devices: int) -> Iterator[int]:
    for D in range(1, num_devices + 1) if plan.replicas > 1 else (1,):
        if num_devices % D == 0 and plan.scenario.batch % D == 0 and num_devices // D <= plan.profile.num_layers:
            yield D


def _impossible(plan: Plan, num_devices: int) -> str:
    layers = plan.profile.num_layers
    if plan.replicas == 1:
        return f"the model has {layers} layers, expected at most {layers} processes"
    return (
        f"replicas of at most {layers} ranks, one for each layer, that divide the batch of {plan.scenario.batch} "
        f"and the {num_devices} processes are not there, expected another number of processes"
    )


def _attempt(
    plan: Plan, num_devices: int, replicas: int, profile: Path | None, *, choices: bool, size: bool
) -> _Attempt:
    """The best with this many replicas; the plan's `choices` and the `size` of its micro-batches stay, or not."""
    K, data = num_devices // replicas, deepcopy(plan.scenario.document.data)
    data["cluster"] = _cluster(data["cluster"], num_devices)
    data["plan"] = chosen = {"replicas": replicas, "tensor": 1, "shard": plan.shard if replicas > 1 else "none"}
    if size:
        total = plan.num_microbatches * plan.replicas
        chosen["microbatches"] = max(min(-(-total // replicas), plan.scenario.batch // replicas), 1)
    if choices:
        chosen |= _choices(plan)
    is_searched = plan.recompute_unit == "stage" and not (replicas > 1 and plan.scenario.cluster.slowdown)
    if is_searched:
        scenario = _scenario(plan, data, profile)
        space = replace(space_of([scenario]), stages=(K,))
        return _Attempt(advise(space).recommended, space)
    v = plan.stages_per_rank
    modes = {"checkpoint": "always", "schedule": "1f1b"} | (_choices(plan) if choices else {})
    chosen |= modes | {"stages": K * v if choices else K, "recompute_unit": plan.recompute_unit}
    made = make_plan(_scenario(plan, data, profile))
    return _Attempt(Judge().judge([made])[0], None)


def _scenario(plan: Plan, data: dict[str, Any], profile: Path | None) -> Scenario:
    (scenario,) = parse_scenario(Document(plan.scenario.document.file, data, {(): plan.scenario.document.file}))
    return replace(scenario, profile=profile)


def _choices(plan: Plan) -> dict[str, Any]:
    """What the scenario says, as the plan has it, of all that does not depend on the number of ranks."""
    own: dict[str, Any] = {
        "recompute": plan.recompute,
        "backward": plan.backward,
        "window": "all" if plan.window is None else plan.window,
    }
    if not is_order_file(plan.schedule):
        own |= {"schedule": plan.schedule, "stages_per_rank": plan.stages_per_rank}
    if len(set(plan.checkpoint)) == 1:
        own["checkpoint"] = plan.checkpoint[0]
    return {key: value for key, value in own.items() if key in _given(plan)}


def _cluster(data: Mapping[str, Any], num_devices: int) -> dict[str, Any]:
    """The cluster with so many devices, in nodes as full as before; what is said of single ranks and edges stays where
    there still are such."""
    per_node = data.get("devices_per_node")
    changed = dict(data)
    if per_node is None or num_devices <= per_node or "network" not in data:
        changed |= {"nodes": 1, "devices_per_node": num_devices}
    else:
        changed["nodes"] = -(-num_devices // per_node)
    for key, most in (("slowdown", num_devices), ("links", num_devices - 1)):
        if data.get(key):
            changed[key] = {number: value for number, value in data[key].items() if number < most}
    return changed


def _nothing_fits(nearest: _Attempt) -> str:
    best = nearest.best
    found = f"nothing fits in {format_bytes(best.plan.memory_limit)}, expected at least {format_bytes(best.peak_bytes)}"
    if nearest.space is None:
        return f"{found} for {describe(best.plan)}"
    return "; ".join([f"{found} for {describe(best.plan)}", *remedies(nearest.space, best)])
