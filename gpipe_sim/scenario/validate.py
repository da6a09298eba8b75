"""Data to a Scenario: every section by itself, then all together, and every mistake reported at its line."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gpipe_sim.base.files import Document, FieldPath, InputError, Problem, Strict, did_you_mean, dotted, problems_of
from gpipe_sim.base.limits import CELLS, LAYERS, PROBLEMS, shortened, shown
from gpipe_sim.base.units import format_bytes, format_seconds
from gpipe_sim.scenario.campaign import CampaignSpec
from gpipe_sim.scenario.catalog import DType
from gpipe_sim.scenario.schema import (
    MODELS,
    Cluster,
    General,
    HuggingFaceModel,
    Layers,
    Model,
    PlanSpec,
    ProfileModel,
    PythonModel,
    Scenario,
    Transformer,
)


def validate(document: Document, swept: Mapping[str, Any]) -> Scenario:
    """Validate one point; each section may fail alone, so that one reading finds the mistakes of all of them."""
    data = {"name": Path(document.file).stem} | document.data
    for section in ("plan", "campaign"):
        if data.get(section) is None:  # left out, or with everything under it commented out
            data[section] = {}
    problems: list[Problem] = []
    known = [*General.model_fields, "model", "cluster", "plan", "campaign"]
    for key in [key for key in data if key not in known][: PROBLEMS + 1]:
        problems.append(document.problem((key,), f"unknown key, {did_you_mean(key, known)}"))

    general = _section(General, {k: data[k] for k in data if k in General.model_fields}, (), document, problems)
    kind = shortened(data["model"].get("kind") or "") if isinstance(data.get("model"), dict) else ""
    model: Model | None = None
    if kind in MODELS:
        model = _section(MODELS[kind], data["model"], ("model",), document, problems)
        if any(problem.field == "model.preset" for problem in problems):  # what it would have said is not missing
            problems = [problem for problem in problems if problem.message != "is missing"]
    elif kind:
        problems.append(document.problem(("model", "kind"), f"found {shown(kind)}, {did_you_mean(kind, MODELS)}"))
    elif isinstance(data.get("model"), dict):
        problems.append(document.problem(("model", "kind"), f"is missing, expected {' | '.join(MODELS)}"))
    else:
        found = f"found {shown(data['model'])}" if "model" in data else "is missing"
        problems.append(document.problem(("model",), f"{found}, expected a mapping with kind: {' | '.join(MODELS)}"))
    cluster = _section(Cluster, data.get("cluster"), ("cluster",), document, problems)
    plan = _section(PlanSpec, data["plan"], ("plan",), document, problems)
    campaign = _section(CampaignSpec, data["campaign"], ("campaign",), document, problems)

    reported = {problem.field for problem in problems}
    sound_cluster = None if any(field.startswith("cluster.") for field in reported) else cluster
    own = list(_cluster_contradictions(cluster)) if cluster else []
    for path, text in [*own, *contradictions(general, model, sound_cluster, plan)]:
        if dotted(path) not in reported:
            problems.append(document.problem(path, text))
    if problems or general is None or model is None or cluster is None or plan is None or campaign is None:
        raise InputError(problems)
    profile = model.path if isinstance(model, ProfileModel) else general.profile
    return Scenario(
        name=general.name,
        batch=general.batch,
        dtype=general.dtype,
        precision=general.precision or "mixed",
        optimizer=general.optimizer,
        profile=Path(document.file).parent / profile if profile else None,
        model=model,
        cluster=_with_speeds(cluster, general.dtype),
        plan=plan,
        campaign=campaign,
        swept=swept,
        document=document,
    )


def _with_speeds(cluster: Cluster, dtype: DType) -> Cluster:
    """Groups of other devices than the first as ranks that take longer, or shorter."""
    if not cluster.groups:
        return cluster
    first = cluster.device.compute[dtype] * cluster.device.efficiency
    factors = {}
    for rank in range(cluster.num_devices or 0):
        device = cluster.device_at(rank)
        factors[rank] = cluster.slowdown.get(rank, 1.0) * first / (device.compute[dtype] * device.efficiency)
    return cluster.model_copy(update={"slowdown": {rank: factor for rank, factor in factors.items() if factor != 1.0}})


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
    if isinstance(model, Transformer):
        yield from _transformer_contradictions(model)
    for index, layer in enumerate(model.layers if isinstance(model, Layers) else ()):
        if layer.backward_weights is not None and layer.backward_weights > layer.backward_seconds:
            found, most = format_seconds(layer.backward_weights), format_seconds(layer.backward_seconds)
            yield ("model", "layers", index, "backward_weights"), f"found {found}, expected at most backward, {most}"
    if general and general.precision not in (None, "pure") and general.dtype in ("fp32", "fp64"):
        yield ("precision",), f"found {general.precision} with dtype {general.dtype}, expected it with bf16 or fp16"
    if isinstance(model, PythonModel | HuggingFaceModel) and general and general.profile is None:
        yield ("profile",), f"is missing: a {model.kind} model has no analytic costs, so it needs a measured profile"
    if isinstance(model, ProfileModel) and general and general.profile is not None:
        yield ("profile",), "is given beside model.path, expected one profile"
    if general and cluster and isinstance(model, Transformer) and general.profile is None:
        for device in [group.device for group in cluster.groups or ()] or [cluster.device]:
            if not device.compute:
                yield (
                    ("cluster", "device", "compute"),
                    "is missing: a transformer without a profile needs a peak compute rate",
                )
            elif general.dtype not in device.compute:
                has = did_you_mean("", device.compute)
                yield ("dtype",), f"found {general.dtype}, for which {device.name} has no figure, {has}"
    elif cluster and cluster.groups:
        message = "is of analytic transformers only: costs of other models are those of one device, expected device"
        yield ("cluster", "groups"), f"{message}, with cluster.slowdown if some are slower"
    num_layers = model.num_layers if model else None
    if num_layers and num_layers > LAYERS:
        yield ("model", "layers"), f"found {num_layers} layers in all, expected at most {LAYERS}"
    elif plan:
        yield from plan_contradictions(plan, model, cluster, general.batch if general else None)


def _transformer_contradictions(model: Transformer) -> Iterator[tuple[FieldPath, str]]:
    if model.head_width is None and model.hidden % model.heads:
        yield ("model", "heads"), f"found {model.heads}, expected a divisor of hidden {model.hidden}, or head_width"
    if model.heads % model.num_kv_heads:
        yield ("model", "kv_heads"), f"found {model.kv_heads}, expected a divisor of the {model.heads} heads"
    if model.positions == "rotary" and model.width_of_head % 2:
        where = "head_width" if model.head_width else "heads"
        message = f"makes heads of width {model.width_of_head}, expected an even width, whose pairs are rotated"
        yield ("model", where), message
    if model.positions == "learned" and model.num_positions < model.sequence:
        message = f"found {model.sequence}, expected at most the {model.num_positions} positions of context"
        yield ("model", "sequence"), message


def _cluster_contradictions(cluster: Cluster) -> Iterator[tuple[FieldPath, str]]:
    if cluster.groups and cluster.devices_per_node is None:
        yield ("cluster", "devices_per_node"), "is missing: with groups it says which rank has which device"
    elif cluster.nodes > 1 and cluster.devices_per_node is None:
        yield ("cluster", "devices_per_node"), f"is missing: with {cluster.nodes} nodes it says which rank sits where"
    if cluster.nodes > 1 and cluster.network is None:
        yield ("cluster", "network"), f"is missing: {cluster.nodes} nodes need a way out of each node"
    if (cluster.spine is None) != (cluster.nodes_per_switch is None):
        missing = "spine" if cluster.spine is None else "nodes_per_switch"
        yield ("cluster", missing), "is missing: spine is between groups of nodes_per_switch nodes"
    elif cluster.spine and (cluster.network is None or cluster.spine.bandwidth > cluster.network.bandwidth):
        yield ("cluster", "spine"), "has more bandwidth than network, expected at most what leaves a node"
    if cluster.memory_limit <= 0:
        memory = format_bytes(cluster.memory_limit + cluster.reserve)
        yield ("cluster", "memory_reserve"), f"leaves nothing of the device's {memory}"
    devices = cluster.num_devices
    for name, keys, limit in (
        ("slowdown", cluster.slowdown, devices),
        ("links", [key for key in cluster.links if key < 0], devices and devices - 1),
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
    K, M, D = plan.num_stages, plan.num_microbatches, plan.replicas
    T, G = plan.tensor, plan.copies
    num_layers = model.num_layers if model else None
    if plan.schedule == "naive" and M and M > 1:
        yield ("plan", "microbatches"), f"found {M}, expected 1: the naive schedule sends the whole batch at once"
    if batch is not None and batch % D:
        message = f"found {D}, expected a divisor of the batch of {batch}: each replica gets an equal share"
        yield ("plan", "replicas"), message
    elif M and batch is not None and M > plan.share(batch):
        share = f"the batch of {batch}" if D == 1 else f"a replica's share of the batch, {plan.share(batch)}"
        yield ("plan", "microbatches"), f"found {M}, expected at most {share}: each micro-batch needs a sample"
    yield from _tensor_contradictions(plan, model, cluster)
    if (K or 1) * (M or 1) > CELLS:
        message = f"found {M or 1} on {K or 1} stages, expected at most {CELLS} micro-batches on stages in all"
        yield ("plan", "microbatches"), message
    if K is None:
        return
    v = plan.num_per_rank
    num_ranks = len(set(plan.placement)) if plan.placement else -(-K // v)
    if K % v and not plan.placement:
        yield ("plan", "stages"), f"found {K}, expected a multiple of the {v} stages on each rank"
    elif plan.placement and plan.stages_per_rank and set(Counter(plan.placement).values()) != {v}:
        yield ("plan", "placement"), f"found {list(plan.placement)}, expected each rank {v} times"
    if num_layers and num_layers < K:
        yield ("plan", "stages"), f"found {K}, expected at most {num_layers}: the model has {num_layers} layers"
    devices = cluster.num_devices if cluster else None
    if cluster and cluster.nodes == 1 and devices is None:  # as many devices as stages
        for name, keys, limit in (("slowdown", cluster.slowdown, num_ranks * G), ("links", cluster.links, K - 1)):
            for key in [key for key in keys if key >= limit]:
                expected = f"0 to {limit - 1}" if limit else "none"
                ranks = f"{K} stages" if G == 1 else f"{K} stages and {G} devices for each rank"
                yield ("cluster", name, key), f"found {key}, expected {expected} with {ranks}, or devices_per_node"
    if devices and devices < num_ranks:
        each = "one device for each stage" if v == 1 else f"one device for each {v} stages"
        yield ("plan", "stages"), f"found {K}, expected at most {v * devices}: {each}"
    elif devices and devices < num_ranks * T:
        most = devices // num_ranks
        yield ("plan", "tensor"), f"found {T}, expected at most {most}: each of {num_ranks} ranks is so many devices"
    elif devices and devices < num_ranks * G:
        most = devices // (num_ranks * T)
        yield (
            ("plan", "replicas"),
            f"found {D}, expected at most {most}: each replica needs {num_ranks * T} of {devices} devices",
        )
    elif cluster and (g := cluster.devices_per_node):
        mesh = plan.mesh(max(plan.placement) + 1 if plan.placement else num_ranks)
        if not mesh.is_alike(g) and mesh.messages_inside:
            found = f"found {D} of {mesh.block} devices each"
            message = (
                f"{found}, expected as many in each node of {g}, or each in whole nodes, so that replicas are alike"
            )
            yield ("plan", "replicas"), message
        elif not mesh.is_alike(g):
            found = f"found {D}" if T == 1 else f"found {D} of {T} devices each"
            message = (
                f"{found}, expected a divisor or a multiple of the {g} devices of a node, so that replicas are alike"
            )
            yield ("plan", "replicas"), message
    if cluster and devices:
        limit = max(K, devices) - 1
        for key in [key for key in cluster.links if key >= limit]:
            yield ("cluster", "links", key), f"found {key}, expected 0 to {limit - 1}"
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
        if devices and max(plan.placement) >= devices // G:
            yield ("plan", "placement"), f"found rank {max(plan.placement)}, expected at most {devices // G - 1}"


def _tensor_contradictions(
    plan: PlanSpec, model: Model | None, cluster: Cluster | None
) -> Iterator[tuple[FieldPath, str]]:
    """What cannot be sliced, or not so often, and what attention cannot be recomputed by itself."""
    T, found = plan.tensor, f"found {plan.tensor}"
    if plan.recompute_unit == "attention" and isinstance(model, Transformer) and model.attention == "flash":
        message = "found attention, expected stage or layer: flash attention keeps nothing that could be dropped"
        yield ("plan", "recompute_unit"), message
    if plan.recompute_unit == "attention" and isinstance(model, Layers):
        message = (
            "found attention, expected stage or layer: layers written by hand do not say what attention is of them"
        )
        yield ("plan", "recompute_unit"), message
    if T == 1:
        return
    if isinstance(model, Layers):
        yield ("plan", "tensor"), f"{found}, expected 1: layers written by hand do not say what a slice of them costs"
    if isinstance(model, Transformer):
        widths = {"heads": model.heads, "width of the feed-forward": model.ffn_width}
        widths |= {"sequence": model.sequence} if plan.sequence_split else {}
        for name, width in widths.items():
            if width % T:
                yield ("plan", "tensor"), f"{found}, expected a divisor of the {name}, {width}"
                return
        kv = model.num_kv_heads
        if kv % T and T % kv:
            yield ("plan", "tensor"), f"{found}, expected a divisor or a multiple of the {kv} kv_heads"
    if cluster and cluster.cores is not None:
        yield ("plan", "tensor"), f"{found}, expected 1 with cluster.cores: how a group shares cores is not known"
    if cluster and (g := cluster.devices_per_node) and g % T and T % g:
        yield ("plan", "tensor"), f"{found}, expected a divisor or a multiple of the {g} devices of a node"
