"""Data to a Scenario: every section by itself, then all together, and every mistake reported at its line."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gpipe_sim.files import Document, FieldPath, InputError, Problem, Strict, did_you_mean, dotted, problems_of
from gpipe_sim.limits import CELLS, LAYERS, PROBLEMS, shortened, shown
from gpipe_sim.scenario import (
    MODELS,
    Cluster,
    General,
    Model,
    PlanSpec,
    ProfileModel,
    PythonModel,
    Scenario,
    Transformer,
)
from gpipe_sim.units import format_bytes


def validate(document: Document, swept: Mapping[str, Any]) -> Scenario:
    """Validate one point; each section may fail alone, so that one reading finds the mistakes of all of them."""
    data = {"name": Path(document.file).stem} | document.data
    if data.get("plan") is None:  # left out, or with everything under it commented out
        data["plan"] = {}
    problems: list[Problem] = []
    known = [*General.model_fields, "model", "cluster", "plan"]
    for key in [key for key in data if key not in known][: PROBLEMS + 1]:
        problems.append(document.problem((key,), f"unknown key, {did_you_mean(key, known)}"))

    general = _section(General, {k: data[k] for k in data if k in General.model_fields}, (), document, problems)
    kind = shortened(data["model"].get("kind") or "") if isinstance(data.get("model"), dict) else ""
    model: Model | None = None
    if kind in MODELS:
        model = _section(MODELS[kind], data["model"], ("model",), document, problems)
    elif kind:
        problems.append(document.problem(("model", "kind"), f"found {shown(kind)}, {did_you_mean(kind, MODELS)}"))
    elif isinstance(data.get("model"), dict):
        problems.append(document.problem(("model", "kind"), f"is missing, expected {' | '.join(MODELS)}"))
    else:
        found = f"found {shown(data['model'])}" if "model" in data else "is missing"
        problems.append(document.problem(("model",), f"{found}, expected a mapping with kind: {' | '.join(MODELS)}"))
    cluster = _section(Cluster, data.get("cluster"), ("cluster",), document, problems)
    plan = _section(PlanSpec, data["plan"], ("plan",), document, problems)

    reported = {problem.field for problem in problems}
    sound_cluster = None if any(field.startswith("cluster.") for field in reported) else cluster
    own = list(_cluster_contradictions(cluster)) if cluster else []
    for path, text in [*own, *contradictions(general, model, sound_cluster, plan)]:
        if dotted(path) not in reported:
            problems.append(document.problem(path, text))
    if problems or general is None or model is None or cluster is None or plan is None:
        raise InputError(problems)
    profile = model.path if isinstance(model, ProfileModel) else general.profile
    return Scenario(
        name=general.name,
        batch=general.batch,
        dtype=general.dtype,
        optimizer=general.optimizer,
        profile=Path(document.file).parent / profile if profile else None,
        model=model,
        cluster=cluster,
        plan=plan,
        swept=swept,
        document=document,
    )


_S = TypeVar("_S", bound=Strict)


def _section(cls: type[_S], data: Any, path: FieldPath, document: Document, problems: list[Problem]) -> _S | None:
    """The section or, after reporting its wrong fields, what is left of it, so that the rest can still be checked."""
    if data is None:
        problems.append(document.problem(path, "is missing"))
        return None
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        problems += problems_of(error, document, path)
        wrong = {detail["loc"][0] for detail in error.errors(include_url=False) if detail["loc"]}
    try:
        return cls.model_validate({key: value for key, value in data.items() if key not in wrong})
    except (ValidationError, AttributeError):
        return None


def contradictions(
    general: General | None, model: Model | None, cluster: Cluster | None, plan: PlanSpec | None
) -> Iterator[tuple[FieldPath, str]]:
    """What is right field by field but cannot be together. A section that is None has been reported already."""
    if isinstance(model, Transformer) and model.hidden % model.heads:
        yield ("model", "heads"), f"found {model.heads}, expected a divisor of hidden {model.hidden}"
    if isinstance(model, PythonModel) and general and general.profile is None:
        yield ("profile",), "is missing: a python model has no analytic costs, so it needs a measured profile"
    if isinstance(model, ProfileModel) and general and general.profile is not None:
        yield ("profile",), "is given beside model.path, expected one profile"
    if general and cluster and isinstance(model, Transformer) and general.profile is None:
        device = cluster.device
        if not device.compute:
            yield (
                ("cluster", "device", "compute"),
                "is missing: a transformer without a profile needs a peak compute rate",
            )
        elif general.dtype not in device.compute:
            has = did_you_mean("", device.compute)
            yield ("dtype",), f"found {general.dtype}, for which {device.name} has no figure, {has}"
    num_layers = model.num_layers if model else None
    if num_layers and num_layers > LAYERS:
        yield ("model", "layers"), f"found {num_layers} layers in all, expected at most {LAYERS}"
    elif plan:
        yield from plan_contradictions(plan, model, cluster, general.batch if general else None)


def _cluster_contradictions(cluster: Cluster) -> Iterator[tuple[FieldPath, str]]:
    if cluster.nodes > 1 and cluster.devices_per_node is None:
        yield ("cluster", "devices_per_node"), f"is missing: with {cluster.nodes} nodes it says which rank sits where"
    if cluster.nodes > 1 and cluster.network is None:
        yield ("cluster", "network"), f"is missing: {cluster.nodes} nodes need a way out of each node"
    if cluster.memory_reserve >= cluster.device.memory:
        memory = format_bytes(cluster.device.memory)
        yield ("cluster", "memory_reserve"), f"leaves nothing of the device's {memory}"
    devices = cluster.num_devices
    for name, keys, limit in (
        ("slowdown", cluster.slowdown, devices),
        ("links", cluster.links, devices and devices - 1),
    ):
        for key in keys:
            if key < 0 or (limit is not None and key >= limit):
                yield (
                    ("cluster", name, key),
                    f"found {key}, expected 0 to {limit - 1 if limit else 'the number of stages'}",
                )


def plan_contradictions(
    plan: PlanSpec, model: Model | None, cluster: Cluster | None, batch: int | None
) -> Iterator[tuple[FieldPath, str]]:
    """What a plan cannot be, given what it is for."""
    K, M = plan.num_stages, plan.num_microbatches
    num_layers = model.num_layers if model else None
    if plan.schedule == "naive" and M and M > 1:
        yield ("plan", "microbatches"), f"found {M}, expected 1: the naive schedule sends the whole batch at once"
    if M and batch is not None and M > batch:
        yield (
            ("plan", "microbatches"),
            f"found {M}, expected at most the batch of {batch}: each micro-batch needs a sample",
        )
    if plan.placement and len(set(plan.placement)) < len(plan.placement):
        yield ("plan", "placement"), f"found {list(plan.placement)}, expected a different rank for each stage"
    if (K or 1) * (M or 1) > CELLS:
        message = f"found {M or 1} on {K or 1} stages, expected at most {CELLS} micro-batches on stages in all"
        yield ("plan", "microbatches"), message
    if K is None:
        return
    if num_layers and num_layers < K:
        yield ("plan", "stages"), f"found {K}, expected at most {num_layers}: the model has {num_layers} layers"
    devices = cluster.num_devices if cluster else None
    if cluster and cluster.nodes == 1 and devices is None:  # as many devices as stages
        for name, keys, limit in (("slowdown", cluster.slowdown, K), ("links", cluster.links, K - 1)):
            for key in [key for key in keys if key >= limit]:
                expected = f"0 to {limit - 1}" if limit else "none"
                yield ("cluster", name, key), f"found {key}, expected {expected} with {K} stages, or devices_per_node"
    if devices and devices < K:
        yield ("plan", "stages"), f"found {K}, expected at most {devices}: one device for each stage"
    if plan.balance:
        if len(plan.balance) != K:
            yield ("plan", "balance"), f"has {len(plan.balance)} entries, expected one for each of {K} stages"
        if num_layers and sum(plan.balance) != num_layers:
            yield ("plan", "balance"), f"adds up to {sum(plan.balance)}, expected the model's {num_layers} layers"
    if isinstance(plan.checkpoint, tuple) and len(plan.checkpoint) != K:
        yield (
            ("plan", "checkpoint"),
            f"per_stage has {len(plan.checkpoint)} entries, expected one for each of {K} stages",
        )
    if plan.placement:
        if len(plan.placement) != K:
            yield ("plan", "placement"), f"found {list(plan.placement)}, expected {K} ranks, one for each stage"
        if devices and max(plan.placement) >= devices:
            yield ("plan", "placement"), f"found rank {max(plan.placement)}, expected at most {devices - 1}"
