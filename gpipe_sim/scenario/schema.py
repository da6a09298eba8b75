"""Scenario: what a person asks. The sections of a scenario file and their fields, every quantity with its unit.

`reading` reads files; this module says what may stand in them. A `Scenario` is one point of a file: where the file has
a list to sweep over, a scenario has one of its values.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from gpipe_sim.base import units
from gpipe_sim.base.files import Document, InputError, Strict, did_you_mean
from gpipe_sim.base.limits import FACTOR, SAMPLES, shown
from gpipe_sim.scenario.campaign import CampaignSpec
from gpipe_sim.scenario.catalog import LINKS, Device, DType, Link, Price, device_names, find_device
from gpipe_sim.scenario.mesh import MESSAGES_INSIDE, SUMS_INSIDE, Dimensions, Mesh
from gpipe_sim.scenario.presets import PRESETS, find_preset

Optimizer = Literal["sgd", "momentum", "rmsprop", "adam"]
Precision = Literal["mixed", "mixed_fp32_gradients", "pure"]
Checkpoint = Literal["never", "always", "except_last"]
AUTO = "auto"
"""The schedule that is made for a plan's own times, links and memory."""
ScheduleName = Literal[
    "naive",
    "gpipe",
    "1f1b",
    "interleaved_gpipe",
    "interleaved_1f1b",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "dualpipe_v",
]
STAGES_PER_RANK: Mapping[str, int | None] = dict.fromkeys(get_args(ScheduleName), 1) | {
    "interleaved_gpipe": None,
    "interleaved_1f1b": None,
    "zb_v": 2,
    "dualpipe_v": 2,
}
"""How many stages a schedule has on each rank; None where it can have any number."""
Recompute = Literal["early", "on_demand"]
RecomputeUnit = Literal["stage", "layer", "attention"]
BackwardOrder = Literal["reverse", "fifo"]
Shard = Literal["none", "optimizer", "parameters"]

Count = Annotated[int, Field(ge=1, le=10**9)]
"""A whole number of at least 1."""
Bytes = Annotated[float, PlainValidator(units.parse_bytes)]
"""A size with its unit, such as ``80 GiB`` or ``1.5 MB``."""
Seconds = Annotated[float, PlainValidator(units.parse_seconds)]
"""A time with its unit, such as ``5 us`` or ``1.2 ms``."""
Bandwidth = Annotated[float, PlainValidator(units.parse_bandwidth)]
"""A rate of bytes or bits with its unit, such as ``25 GB/s`` or ``100 Gbit/s``."""
Compute = Annotated[float, PlainValidator(units.parse_compute)]
"""A rate of arithmetic with its unit, such as ``312 TFLOP/s``."""


# --- model ---------------------------------------------------------------------------------------------------------


def _to_preset(value: object) -> str:
    if not isinstance(value, str) or not (preset := find_preset(value)):
        raise ValueError(f"found {shown(value)}, {did_you_mean(value, PRESETS)}")
    return preset.name


PresetField = Annotated[str, PlainValidator(_to_preset)]
"""A model that ``gpipe catalog`` lists, such as ``llama-2-13b``."""


class Transformer(Strict):
    """A decoder-only transformer, described by its shape; costs follow analytically (`gpipe_sim.cost.transformer`).

    With a ``preset``, what is not said is the preset's.
    """

    kind: Literal["transformer"]
    preset: PresetField | None = None
    """A published model by its name: all of its shape, of which any field may be replaced."""
    layers: Count
    """Blocks; embedding, final norm and output head are layers of their own beside them."""
    hidden: Count
    """Width of the residual stream."""
    heads: Count
    """Attention heads."""
    kv_heads: Count | None = None
    """Heads of keys and values, each shared by as many heads of queries (grouped-query attention); ``heads`` if left
    out."""
    head_width: Count | None = None
    """Of each head; ``hidden`` / ``heads`` if left out."""
    ffn: Count | None = None
    """Width of the feed-forward layer; four times ``hidden`` if left out."""
    gated: bool = False
    """Whether the feed-forward has a third matrix, whose output gates the first's (SwiGLU)."""
    norm: Literal["layer", "rms"] = "layer"
    """``layer`` has gains and biases, ``rms`` has gains only."""
    bias: Literal["all", "qkv", "none"] | None = None
    """Which products with weights have biases, the head never; if left out, ``all`` with ``norm: layer`` and ``none``
    with ``norm: rms``."""
    dropout: bool | None = None
    """Whether masks of dropout are among what is saved for the backward; if left out, with ``norm: layer`` only. The
    layers that are executed drop nothing."""
    positions: Literal["sinusoidal", "learned", "rotary"] = "sinusoidal"
    """``learned`` has a row of parameters for each position of ``context``."""
    context: Count | None = None
    """Positions that are learned; ``sequence`` if left out."""
    vocab: Count
    """Tokens in the vocabulary: rows of the embedding, and of the head."""
    tied: bool = False
    """Whether the head's weights are the embedding's: counted once, held by the first stage and by the last."""
    fused_loss: bool = False
    """Whether one kernel turns the logits into their gradients where they are (fused cross entropy), so that neither a
    copy of them in fp32 is kept nor gradients beside them."""
    sequence: Count
    """Tokens in a sample."""
    attention: Literal["classic", "flash"] = "flash"
    """Whether the quadratic part is kept for the backward (``classic``) or recomputed inside the kernel."""
    causal: bool = False
    """Whether attention's FLOPs are only those of pairs in which no token sees a later one, about half, as kernels that
    skip the others have; otherwise those of all pairs, as papers count. What is computed is causal either way."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: object) -> object:
        name = data.get("preset") if isinstance(data, dict) else None
        preset = find_preset(name) if isinstance(name, str) else None
        return {**preset.shape, **data} if preset and isinstance(data, dict) else data

    @property
    def num_layers(self) -> int:
        """Embedding, blocks, final norm, output head."""
        return self.layers + 3

    @property
    def ffn_width(self) -> int:
        """``ffn``, or its default."""
        return self.ffn or 4 * self.hidden

    @property
    def num_kv_heads(self) -> int:
        """``kv_heads``, or its default."""
        return self.kv_heads or self.heads

    @property
    def width_of_head(self) -> int:
        """``head_width``, or its default."""
        return self.head_width or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Of the queries of all heads together."""
        return self.heads * self.width_of_head

    @property
    def kv_width(self) -> int:
        """Of the keys of all heads together, and of the values."""
        return self.num_kv_heads * self.width_of_head

    @property
    def biases(self) -> Literal["all", "qkv", "none"]:
        """``bias``, or its default."""
        return self.bias or ("all" if self.norm == "layer" else "none")

    @property
    def drops(self) -> bool:
        """``dropout``, or its default."""
        return self.norm == "layer" if self.dropout is None else self.dropout

    @property
    def num_positions(self) -> int:
        """Rows of the table of positions, none of which is learned unless ``positions`` says so."""
        return (self.context or self.sequence) if self.positions == "learned" else 0


def preset_model(name: str) -> Transformer:
    """A published model as it is."""
    return Transformer.model_validate({"kind": "transformer", "preset": name})


class LayerSpec(Strict):
    """A layer written by hand: seconds and bytes per sample, overhead per call, parameters in total."""

    name: str
    """What reports call it."""
    repeat: Count = 1
    """How many such layers follow each other."""
    forward: Seconds
    """Of one sample."""
    backward: Seconds | None = None
    """Twice ``forward`` if left out."""
    backward_weights: Seconds | None = None
    """The part of ``backward`` that makes the gradients of the weights: seconds per sample. Split schedules need it of
    every layer whose backward takes any time."""
    overhead: Seconds = 0.0
    """Of each call, forward or backward or either half of a backward, whatever the number of samples."""
    output: Bytes = 0.0
    """What crosses to the next stage if the model is cut after this layer."""
    saved: Bytes | None = None
    """What remains after a forward, the output included; ``output`` if left out."""
    kept: Bytes | None = None
    """What remains between the two halves of a split backward; ``saved`` if left out."""
    parameters: Bytes = 0.0
    """Weights in total, not per sample."""

    @property
    def backward_seconds(self) -> float:
        """``backward``, or its default."""
        return 2 * self.forward if self.backward is None else self.backward

    @property
    def saved_bytes(self) -> float:
        """``saved``, or its default."""
        return self.output if self.saved is None else self.saved

    @property
    def weights_seconds(self) -> float | None:
        """``backward_weights``; of a backward that takes no time, none; unknown otherwise."""
        return 0.0 if self.backward_weights is None and self.backward_seconds == 0 else self.backward_weights

    @property
    def kept_bytes(self) -> float:
        """``kept``, or its default."""
        return self.saved_bytes if self.kept is None else self.kept


class Layers(Strict):
    """A list of layers with their costs, for published tables and thought experiments."""

    kind: Literal["layers"]
    layers: Annotated[list[LayerSpec], Field(min_length=1)]
    """From the first to the last."""

    @property
    def num_layers(self) -> int:
        """Counting repeats."""
        return sum(layer.repeat for layer in self.layers)


class ProfileModel(Strict):
    """A model known only by its profile: it can be simulated and rehearsed, not computed."""

    kind: Literal["profile"]
    path: str
    """The profile file, as seen from the scenario's folder."""

    @property
    def num_layers(self) -> None:
        """Known once the profile is read."""


def _object_path(value: str) -> str:
    module, colon, function = value.partition(":")
    if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"found {shown(value)}, expected package.module:function")
    return value


class PythonModel(Strict):
    """The user's own model: ``function`` returns a module, a maker of samples, a loss and, if wanted, cuts.

    The module is an ``nn.Sequential`` of layers, or any other: it is then split at the submodules that the cuts name
    or, if there are none, at the blocks of its lists and sequences of equal blocks.
    """

    kind: Literal["python"]
    function: Annotated[str, AfterValidator(_object_path)]
    """``package.module:function``, looked for beside the scenario file first."""

    @property
    def num_layers(self) -> None:
        """Known once the profile is read."""


class HuggingFaceModel(Strict):
    """A model of Hugging Face's ``transformers``, made from its configuration; its costs are measured."""

    kind: Literal["huggingface"]
    config: dict[str, Any]
    """What stands in its ``config.json``: ``model_type``, and whatever differs from that architecture's defaults."""
    head: Literal["causal_lm", "masked_lm", "seq2seq_lm"] = "causal_lm"
    """What is predicted: the next token (GPT-2, Llama, Mixtral), each (BERT), or the next of another text (T5)."""
    sequence: Count
    """Tokens in a sample."""
    weights: Annotated[str, Field(min_length=1)] | None = None
    """A folder as ``save_pretrained`` writes it, as seen from the scenario's; left out, weights are random."""

    @property
    def num_layers(self) -> None:
        """Known once the profile is read."""


Model = Transformer | Layers | ProfileModel | PythonModel | HuggingFaceModel
MODELS: Mapping[str, type[Model]] = {
    "transformer": Transformer,
    "layers": Layers,
    "profile": ProfileModel,
    "python": PythonModel,
    "huggingface": HuggingFaceModel,
}


# --- cluster -------------------------------------------------------------------------------------------------------


def _to_device_name(value: object) -> str:
    if not isinstance(value, str) or value not in device_names():
        raise ValueError(f"found {shown(value)}, {did_you_mean(value, device_names())}")
    return value


class _DeviceSpec(Strict):
    """A device written out instead of named."""

    like: Annotated[str, PlainValidator(_to_device_name)] | None = None
    """A device of the catalogue, whose figures are taken for those that are left out here."""
    memory: Bytes | None = None
    """Of one device; needed unless ``like`` says it."""
    compute: Compute | None = None
    """Peak dense arithmetic, in whatever dtype the scenario has; only analytic costs need it."""
    bandwidth: Bandwidth | None = None
    """Between the device and its own memory; without limit if left out."""
    efficiency: Annotated[float, Field(ge=1e-6, le=1)] = 0.5
    """The share of peak compute that large layers attain."""
    memory_efficiency: Annotated[float, Field(ge=1e-6, le=1)] | None = None
    """The share of ``bandwidth`` that norms, activations and softmax attain. Given, what they read and write takes time
    of its own beside the products, of which ``efficiency`` is then; left out, a layer takes as long as the longer of
    both."""
    launch: Seconds = 5e-6
    """Time to launch one kernel: what makes small micro-batches cost more per sample."""

    @model_validator(mode="after")
    def _has_memory(self) -> "_DeviceSpec":
        if self.memory is None and self.like is None:
            raise ValueError("memory is missing, expected it, or a device of the catalogue as like")
        return self


class _LinkSpec(Strict):
    """A link written out instead of named; each direction has all of it."""

    bandwidth: Bandwidth
    """``inf GB/s`` is a link that costs latency only."""
    latency: Seconds = 0.0
    """From the last byte sent to its arrival; it delays a message, and does not occupy the link."""


def _to_device(value: object) -> Device:
    if isinstance(value, str):
        return find_device(_to_device_name(value))
    if not isinstance(value, dict):
        raise ValueError(f"found {shown(value)}, expected a name or {{memory: 80 GiB, compute: 312 TFLOP/s, ...}}")
    spec = _DeviceSpec.model_validate(value)
    given = {name: getattr(spec, name) for name in spec.model_fields_set - {"like", "compute"}}
    figures: dict[str, Any] = (
        given if spec.like else {"name": "custom", "compute": {}, "bandwidth": float("inf")} | given
    )
    if spec.compute:
        figures["compute"] = dict.fromkeys(get_args(DType), spec.compute)
    if spec.like is not None:
        return replace(find_device(spec.like), **figures)
    return Device(**figures)


DeviceField = Annotated[Device, PlainValidator(_to_device)]
"""A name that ``gpipe catalog`` lists (``cpu`` is this machine), or a device written out."""

MEASURED = Link(name="measured", bandwidth=float("inf"), latency=0.0, source="the profile")
"""Stands for the link that the profile measured."""


def _to_link(value: object) -> Link:
    if value == MEASURED.name:
        return MEASURED
    if isinstance(value, str):
        if value not in LINKS:
            if value[:1].isdigit() and "/s" in value and len(value) < 30:
                raise ValueError(f"found {value!r}, expected {{bandwidth: {value}, latency: 10 us}}")
            raise ValueError(f"found {shown(value)}, {did_you_mean(value, LINKS)}")
        return LINKS[value]
    if not isinstance(value, dict):
        raise ValueError(f"found {shown(value)}, expected a name or {{bandwidth: 25 GB/s, latency: 10 us}}")
    spec = _LinkSpec.model_validate(value)
    return Link(name="custom", bandwidth=spec.bandwidth, latency=spec.latency)


LinkField = Annotated[Link, PlainValidator(_to_link)]
"""A name that ``gpipe catalog`` lists, ``measured`` for the link that the profile measured, or a link written out."""


def _to_price(value: object) -> Price:
    per_hour, currency = units.parse_price(value)
    return Price(per_hour=per_hour, currency=currency)


PriceField = Annotated[Price, PlainValidator(_to_price)]
"""Of one device for an hour, such as ``2.50 USD/h``; a number alone is in US dollars."""


class Jitter(Strict):
    """Lognormal noise on every compute time."""

    cv: Annotated[float, Field(ge=0, le=10)]
    """Standard deviation over mean."""
    samples: Annotated[int, Field(ge=1, le=SAMPLES)] = 200
    """Steps that are drawn; mean, p50 and p95 over them are reported."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """The same seed draws the same luck for every plan, so that plans can be compared."""


class NodeGroup(Strict):
    """Nodes whose devices are of one kind."""

    nodes: Count = 1
    """Machines."""
    device: DeviceField
    """Of each of their devices."""


class Cluster(Strict):
    """The devices, and what connects them. Rank r sits on node ``r // devices_per_node``."""

    device: DeviceField
    """Of every node; left out beside ``groups``."""
    groups: Annotated[list[NodeGroup], Field(min_length=1)] | None = None
    """Nodes with devices of several kinds, in the order of their ranks: ``[{nodes: 2, device: a100-80gb}, {device:
    h100-80gb}]``; of an analytic transformer only. A rank takes as much longer or shorter than one of the first group
    as its device attains of compute, and no rank may use more memory than the smallest device has."""
    price: PriceField | None = None
    """Of one device for an hour; the catalogue's, with the date on which it was asked, if left out."""
    memory_reserve: Bytes | None = None
    """What the runtime keeps for itself on each device; left out, 1.5 GiB on the catalogue's GPUs, else nothing."""
    nodes: Count = 1
    """Machines."""
    devices_per_node: Count | None = None
    """On one node it may be left out: there are then as many as the plan has stages."""
    link: LinkField
    """Between two devices of a node, each direction."""
    network: LinkField | None = None
    """A node's way out, each direction, shared fairly by its devices; needed if there is more than one node."""
    nics: Count = 1
    """Ways out of a node, each with all of ``network``: its devices take them in turns, and what a device sends passes
    its own."""
    spine: LinkField | None = None
    """What each of these ways has on to nodes behind another switch, where switches have fewer ways up than down; left
    out, all of ``network``."""
    nodes_per_switch: Count | None = None
    """Nodes that are behind a switch together, in the order of their numbers; needed with ``spine``."""
    links: dict[int, LinkField] = Field(default_factory=dict)
    """Edges that differ: key k is the edge from stage k to stage k+1, such as ``{2: {bandwidth: 12 GB/s}}``."""
    overlap: bool = True
    """Transfers run beside compute; otherwise the sender waits until its message is delivered."""
    cores: Count | None = None
    """Cores per node, which its ranks are pinned to in turns and share fairly; left out, every rank has its own."""
    slowdown: dict[int, Annotated[float, Field(gt=0, le=FACTOR)]] = Field(default_factory=dict)
    """Rank to factor on its compute times: ``{3: 1.2}`` makes rank 3 take 1.2 times as long."""
    jitter: Jitter | None = None
    """Noise on compute times; none if left out."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_groups(cls, data: object) -> object:
        groups = data.get("groups") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            return data
        if both := {"device", "nodes"} & data.keys():
            raise ValueError(f"{min(both)} is given beside groups, expected one of them")
        counts = [group.get("nodes", 1) for group in groups]
        known = {"nodes": sum(counts)} if all(type(count) is int for count in counts) else {}
        first = {"device": groups[0]["device"]} if groups and "device" in groups[0] else {}
        return {**data, **known, **first}

    def __hash__(self) -> int:
        """Of the fields that differ most often: plans are told apart by their cluster."""
        return hash((self.device.name, self.nodes, self.devices_per_node, self.link, self.network))

    def device_at(self, rank: int) -> Device:
        """The device of this number."""
        node = self.node_of(rank)
        for group in self.groups or ():
            if node < group.nodes:
                return group.device
            node -= group.nodes
        return self.device

    def crosses(self, nodes: Iterable[int]) -> bool:
        """Whether the spine is between some of these nodes."""
        each = self.nodes_per_switch
        return self.spine is not None and each is not None and len({node // each for node in nodes}) > 1

    def between(self, nodes: Iterable[int]) -> Link | None:
        """What connects these nodes, which are several."""
        return self.spine if self.crosses(nodes) else self.network

    @property
    def num_devices(self) -> int | None:
        """Devices in all; None where one node has as many as are needed."""
        return None if self.devices_per_node is None else self.nodes * self.devices_per_node

    @property
    def device_price(self) -> Price | None:
        """``price``, or the catalogue's, if it has one; of several kinds of devices, the mean of all of them."""
        if self.price or not self.groups:
            return self.price or self.device.price
        prices = [group.device.price for group in self.groups for _ in range(group.nodes)]
        known = [price for price in prices if price]
        if len(known) < len(prices) or len({price.currency for price in known}) > 1:
            return None
        mean = sum(price.per_hour for price in known) / len(known)
        return Price(per_hour=mean, currency=known[0].currency, source="the mean of all devices")

    @property
    def memory_limit(self) -> float:
        """Bytes that a rank may use: the device's memory less what the runtime keeps."""
        return min((group.device.memory for group in self.groups or ()), default=self.device.memory) - self.reserve

    @property
    def reserve(self) -> float:
        """``memory_reserve``, or what the device's runtime takes."""
        return self.device.runtime if self.memory_reserve is None else self.memory_reserve

    def ranks_for(self, copies: int) -> int | None:
        """Ranks that a pipeline may have if each is so many devices, of replicas and tensor groups; None where one node
        has as many as are needed.

        Where copies do not divide a node's devices, nor the other way round, all of them must be in one node.
        """
        each = self.devices_per_node
        if each is None:
            return None
        return (each if each % copies and copies % each else self.nodes * each) // copies

    def slowest(self, ranks: range) -> float:
        """The largest factor on compute times among these ranks."""
        factors = [factor for rank, factor in self.slowdown.items() if rank in ranks]
        return max([*factors, *([1.0] if len(factors) < len(ranks) else [])])

    def node_of(self, rank: int) -> int:
        """The node that holds this rank."""
        return 0 if self.devices_per_node is None else rank // self.devices_per_node


# --- plan ----------------------------------------------------------------------------------------------------------


def _to_checkpoint(value: object) -> Checkpoint | tuple[Checkpoint, ...]:
    modes = get_args(Checkpoint)
    if isinstance(value, dict) and set(value) == {"per_stage"} and isinstance(value["per_stage"], list):
        wrong = [mode for mode in value["per_stage"] if mode not in modes]
        if wrong:
            raise ValueError(f"per_stage: found {shown(wrong[0])}, {did_you_mean(wrong[0], modes)}")
        if value["per_stage"]:
            return tuple(value["per_stage"])
    if isinstance(value, str) and value in modes:
        return value  # type: ignore[return-value]  # `in modes` is the check that mypy cannot follow
    if isinstance(value, dict):
        raise ValueError(f"found {shown(value)}, expected {{per_stage: [...]}} with a mode for each stage")
    raise ValueError(f"found {shown(value)}, {did_you_mean(value, modes)}")


def _to_counts(least: int, example: str) -> PlainValidator:
    def convert(value: object) -> tuple[int, ...] | None:
        if value == "auto":
            return None
        if isinstance(value, list) and value and all(type(v) is int and least <= v < 2**31 for v in value):
            return tuple(value)
        raise ValueError(
            f"found {shown(value)}, expected auto or a list of whole numbers of at least {least}: {example}"
        )

    return PlainValidator(convert)


def to_order(value: object) -> Dimensions:
    """The order of dimensions as it is written."""
    for order in (SUMS_INSIDE, MESSAGES_INSIDE):
        if value == list(order):
            return order
    known = " or ".join(f"[{', '.join(order)}]" for order in (SUMS_INSIDE, MESSAGES_INSIDE))
    raise ValueError(f"found {shown(value)}, expected {known}: tensor groups exchange most, so they come first")


def to_window(value: object) -> int | None:
    """How many receives may be posted ahead, as it is written; None for all."""
    if value == "all":
        return None
    if type(value) is int and 1 <= value < 2**31:
        return value
    raise ValueError(f"found {shown(value)}, expected a whole number of at least 1, or all")


def is_order_file(schedule: str) -> bool:
    """Whether a schedule is given by a file."""
    return schedule.endswith(".csv")


def to_schedule(value: object) -> str:
    """A schedule as it is written: its name, `auto`, or a file."""
    names = (*get_args(ScheduleName), AUTO)
    if isinstance(value, str) and (value in names or (is_order_file(value) and len(value) > len(".csv"))):
        return value
    raise ValueError(f"found {shown(value)}, {did_you_mean(value, names)}, or the name of a .csv file")


ScheduleField = Annotated[str, PlainValidator(to_schedule)]
"""The name of a schedule, ``auto`` for an order made for these very times, or a file in torch's format, ``my.csv``."""
CheckpointField = Annotated[Checkpoint | tuple[Checkpoint, ...], PlainValidator(_to_checkpoint)]
"""``never``, ``always``, ``except_last`` (all micro-batches but the last), or ``{per_stage: [always, never]}``."""
BalanceField = Annotated[tuple[int, ...] | None, _to_counts(1, "[12, 12, 12, 12]")]
"""``auto``, the cut with the smallest bottleneck, or the layers of each stage, ``[12, 12, 12, 12]``."""
PlacementField = Annotated[tuple[int, ...] | None, _to_counts(0, "[0, 1, 2, 3]")]
"""``auto``, as the schedule has it, or the rank of each stage, ``[0, 2, 1, 3]``."""
OrderField = Annotated[Dimensions, PlainValidator(to_order)]
"""``[tensor, data, pipeline]``, or ``[tensor, pipeline, data]``."""
WindowField = Annotated[int | None, PlainValidator(to_window)]
"""A whole number of at least 1, or ``all``."""


class PlanSpec(Strict):
    """The choices. What is left out takes its default in `simulate` and is searched by `plan`."""

    stages: Count | None = None
    """S, how many pieces the layers are cut into; not needed beside an explicit ``balance``."""
    stages_per_rank: Count | None = None
    """v, how many of them each rank holds, so that there are K = S / v ranks; left out, as many as the schedule has on
    each rank, or one."""
    microbatches: Count | None = None
    """M, how many pieces a batch, or each replica's share of it, is cut into; ``naive`` has one."""
    replicas: Count = 1
    """D, copies of the pipeline, each with an equal share of the batch: K D ranks in all, numbered by ``order``."""
    tensor: Count = 1
    """T, devices that hold each stage together, a slice of each of its layers each: K D T devices in all, those of a
    group with numbers that follow each other. A transformer without a profile is sliced as Megatron-LM does; a profile
    must have been measured for that T."""
    sequence_split: bool = True
    """Whether the T devices of a group also divide the sequence where layers are not sliced, in norms and residuals
    (Megatron-LM's sequence parallelism), and so everything that is kept for the backward."""
    order: OrderField = SUMS_INSIDE
    """Which devices have numbers that follow each other, and so share a node, after those of a tensor group: the D
    ranks that hold the same stages (``[tensor, data, pipeline]``: copy d of a pipeline's rank r is rank r D + d, and
    sums stay inside a node), or the K ranks of a pipeline (``[tensor, pipeline, data]``: it is rank d K + r, and
    messages do)."""
    shard: Shard = "none"
    """What the D ranks that hold the same stages divide among themselves: nothing; the ``optimizer`` state (ZeRO-1),
    so that each updates its share of the weights and all gather the rest; or the ``parameters`` with their gradients,
    too (FSDP), which are gathered for a step. With one replica nothing is divided."""
    checkpoint: CheckpointField = "always"
    """Of which micro-batches activations are dropped after the forward and computed again before the backward."""
    schedule: ScheduleField = "gpipe"
    """The order of forwards and backwards."""
    recompute: Recompute = "early"
    """Whether a recomputation starts as soon as its rank is free, or waits for the gradient."""
    recompute_unit: RecomputeUnit = "stage"
    """What is recomputed at once: a whole ``stage``, whose input is kept, as in GPipe; each ``layer`` in its own
    backward, whose input is kept, as most frameworks do; or nothing but the quadratic part of ``attention``, in its
    layer's own backward (selective recomputation), of a transformer with classic attention. With the last two the
    model's last layer is not recomputed, and backwards cannot be split."""
    backward: BackwardOrder = "reverse"
    """The order of backwards of ``gpipe`` and ``interleaved_gpipe``: last micro-batch first, as in the paper, or first
    in first out, as in torch."""
    balance: BalanceField = None
    """Where the layers are cut."""
    placement: PlacementField = None
    """Which rank holds which stage."""
    window: WindowField = 2
    """Receives posted ahead per edge and direction: a message starts only once its receive is posted."""

    @property
    def num_stages(self) -> int | None:
        """``stages``, or the length of an explicit balance."""
        return self.stages or (len(self.balance) if self.balance else None)

    @property
    def num_per_rank(self) -> int:
        """``stages_per_rank``, or what the placement or the schedule makes of it."""
        if self.stages_per_rank is not None:
            return self.stages_per_rank
        if self.placement:
            return max(Counter(self.placement).values())
        return STAGES_PER_RANK.get(self.schedule) or 1

    @property
    def num_microbatches(self) -> int | None:
        """``microbatches``; the naive schedule has one."""
        return self.microbatches or (1 if self.schedule == "naive" else None)

    def share(self, batch: int) -> int:
        """Samples of each replica."""
        return batch // self.replicas

    def mesh(self, num_ranks: int) -> Mesh:
        """How devices are numbered, with ranks below that number."""
        return Mesh(num_ranks, self.replicas, self.tensor, self.order)

    @property
    def copies(self) -> int:
        """D T: devices for each rank of a pipeline."""
        return self.replicas * self.tensor


# --- scenario ------------------------------------------------------------------------------------------------------


class General(Strict):
    """What stands at the top level beside the sections."""

    name: Annotated[str, Field(min_length=1)]
    """What reports and run directories call it."""
    batch: Count
    """N, samples in a step; where M does not divide it, the first micro-batches hold one sample more."""
    dtype: DType = "bf16"
    """What is computed in: of activations, and of weights as they are computed with."""
    precision: Precision | None = None
    """Of ``bf16`` and ``fp16``: ``mixed`` keeps weights and optimizer state in fp32 and computes with copies in
    ``dtype``; ``mixed_fp32_gradients`` also adds up and sums gradients in fp32, as Megatron-LM does; ``pure`` has
    nothing but ``dtype``. Left out, it is ``mixed``."""
    optimizer: Optimizer = "adam"
    """It decides the bytes of state per parameter."""
    profile: Annotated[str, Field(min_length=1)] | None = None
    """A profile file, as seen from the scenario's folder, whose costs replace analytic ones."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One point of a scenario file: no lists left to sweep, every name looked up, every unit converted."""

    name: str
    batch: int
    dtype: DType
    precision: Precision = "mixed"
    """It matters where a dtype has 16 bits."""
    optimizer: Optimizer
    profile: Path | None
    """The profile file to use: a measured one instead of analytic costs, or all there is of a model."""
    model: Model
    cluster: Cluster
    plan: PlanSpec
    campaign: CampaignSpec = field(default_factory=CampaignSpec)
    swept: Mapping[str, Any] = field(default_factory=dict)
    """Field -> value, as written, of each field that the file sweeps."""
    document: Document = field(repr=False, compare=False)
    """The file's data for this point, to embed in a plan and to locate later mistakes."""

    def __repr__(self) -> str:
        swept = "".join(f", {path} {value}" for path, value in self.swept.items())
        return f"Scenario({self.name!r}: {self.model.kind}, batch {self.batch}, {self.cluster.device.name}{swept})"

    @property
    def samples(self) -> int:
        """Of each replica in a step."""
        return self.plan.share(self.batch)

    def can_have(self, num_ranks: int) -> bool:
        """Whether the cluster has so many ranks for each replica, and replicas on that many are alike."""
        cluster, mesh = self.cluster, self.plan.mesh(num_ranks)
        if mesh.messages_inside and cluster.devices_per_node is not None:
            enough = num_ranks * self.plan.copies <= cluster.nodes * cluster.devices_per_node
            return enough and mesh.is_alike(cluster.devices_per_node)
        most = cluster.ranks_for(self.plan.copies)
        return most is None or num_ranks <= most

    def beside(self, name: str) -> Path:
        """A file by its name, as seen from the scenario's folder."""
        return Path(self.document.file).parent / name

    def error(self, field: str, message: str) -> InputError:
        """A mistake in this scenario that shows only later, at the line where it was written."""
        return InputError([self.document.problem(tuple(field.split(".")), message)])
