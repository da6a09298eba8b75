"""Scenario: what a person asks. The sections of a scenario file and their fields, every quantity with its unit.

`gpipe_sim.sweep` reads files; this module says what may stand in them. A `Scenario` is one point of a file: where the
file has a list to sweep over, a scenario has one of its values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PlainValidator

from gpipe_sim import units
from gpipe_sim.catalog import LINKS, Device, DType, Link, device_names, find_device
from gpipe_sim.files import Document, InputError, Strict, did_you_mean
from gpipe_sim.limits import FACTOR, SAMPLES, shown

Optimizer = Literal["sgd", "momentum", "rmsprop", "adam"]
Checkpoint = Literal["never", "always", "except_last"]
ScheduleName = Literal["naive", "gpipe", "1f1b"]
Recompute = Literal["early", "on_demand"]
BackwardOrder = Literal["reverse", "fifo"]

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


class Transformer(Strict):
    """A decoder-only transformer, described by its shape; costs follow analytically (`gpipe_sim.model`)."""

    kind: Literal["transformer"]
    layers: Count
    """Blocks; embedding, final norm and output head are layers of their own beside them."""
    hidden: Count
    """Width of the residual stream."""
    heads: Count
    """Attention heads."""
    ffn: Count | None = None
    """Width of the feed-forward layer; four times ``hidden`` if left out."""
    vocab: Count
    """Tokens in the vocabulary: rows of the embedding, and of the head, whose weights are its own."""
    sequence: Count
    """Tokens in a sample."""
    attention: Literal["classic", "flash"] = "flash"
    """Whether the quadratic part is kept for the backward (``classic``) or recomputed inside the kernel."""

    @property
    def num_layers(self) -> int:
        """Embedding, blocks, final norm, output head."""
        return self.layers + 3

    @property
    def ffn_width(self) -> int:
        """``ffn``, or its default."""
        return self.ffn or 4 * self.hidden


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
    overhead: Seconds = 0.0
    """Of each call, forward or backward, whatever the number of samples."""
    output: Bytes = 0.0
    """What crosses to the next stage if the model is cut after this layer."""
    saved: Bytes | None = None
    """What remains after a forward, the output included; ``output`` if left out."""
    parameters: Bytes = 0.0
    """Weights in total, not per sample."""


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
    """The user's own model; ``function`` returns an ``nn.Sequential``, a maker of samples and a loss."""

    kind: Literal["python"]
    function: Annotated[str, AfterValidator(_object_path)]
    """``package.module:function``, looked for beside the scenario file first."""

    @property
    def num_layers(self) -> None:
        """Known once the profile is read."""


Model = Transformer | Layers | ProfileModel | PythonModel
MODELS: Mapping[str, type[Model]] = {
    "transformer": Transformer,
    "layers": Layers,
    "profile": ProfileModel,
    "python": PythonModel,
}


# --- cluster -------------------------------------------------------------------------------------------------------


class _DeviceSpec(Strict):
    """A device written out instead of named."""

    memory: Bytes
    """Of one device."""
    compute: Compute | None = None
    """Peak dense arithmetic, in whatever dtype the scenario has; only analytic costs need it."""
    bandwidth: Bandwidth | None = None
    """Between the device and its own memory; without limit if left out."""
    efficiency: Annotated[float, Field(ge=1e-6, le=1)] = 0.5
    """The share of peak compute that large layers attain."""
    launch: Seconds = 5e-6
    """Time to launch one kernel: what makes small micro-batches cost more per sample."""


class _LinkSpec(Strict):
    """A link written out instead of named; each direction has all of it."""

    bandwidth: Bandwidth
    """``inf GB/s`` is a link that costs latency only."""
    latency: Seconds = 0.0
    """From the last byte sent to its arrival; it delays a message, and does not occupy the link."""


def _to_device(value: object) -> Device:
    if isinstance(value, str):
        if value not in device_names():
            raise ValueError(f"found {shown(value)}, {did_you_mean(value, device_names())}")
        return find_device(value)
    if not isinstance(value, dict):
        raise ValueError(f"found {shown(value)}, expected a name or {{memory: 80 GiB, compute: 312 TFLOP/s, ...}}")
    spec = _DeviceSpec.model_validate(value)
    compute = dict.fromkeys(get_args(DType), spec.compute) if spec.compute else {}
    return Device(
        name="custom",
        memory=spec.memory,
        compute=compute,
        bandwidth=spec.bandwidth or float("inf"),
        efficiency=spec.efficiency,
        launch=spec.launch,
    )


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


class Jitter(Strict):
    """Lognormal noise on every compute time."""

    cv: Annotated[float, Field(ge=0, le=10)]
    """Standard deviation over mean."""
    samples: Annotated[int, Field(ge=1, le=SAMPLES)] = 200
    """Steps that are drawn; mean, p50 and p95 over them are reported."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """The same seed draws the same luck for every plan, so that plans can be compared."""


class Cluster(Strict):
    """The devices, and what connects them. Rank r sits on node ``r // devices_per_node``."""

    device: DeviceField
    """All devices are of one kind."""
    memory_reserve: Bytes = 0.0
    """What the runtime keeps for itself on each device."""
    nodes: Count = 1
    """Machines."""
    devices_per_node: Count | None = None
    """On one node it may be left out: there are then as many as the plan has stages."""
    link: LinkField
    """Between two devices of a node, each direction."""
    network: LinkField | None = None
    """A node's way out, each direction, shared fairly by its devices; needed if there is more than one node."""
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

    @property
    def num_devices(self) -> int | None:
        """Devices in all; None where one node has as many as are needed."""
        return None if self.devices_per_node is None else self.nodes * self.devices_per_node

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


def to_window(value: object) -> int | None:
    """How many receives may be posted ahead, as it is written; None for all."""
    if value == "all":
        return None
    if type(value) is int and 1 <= value < 2**31:
        return value
    raise ValueError(f"found {shown(value)}, expected a whole number of at least 1, or all")


CheckpointField = Annotated[Checkpoint | tuple[Checkpoint, ...], PlainValidator(_to_checkpoint)]
"""``never``, ``always``, ``except_last`` (all micro-batches but the last), or ``{per_stage: [always, never]}``."""
BalanceField = Annotated[tuple[int, ...] | None, _to_counts(1, "[12, 12, 12, 12]")]
"""``auto``, the cut with the smallest bottleneck, or the layers of each stage, ``[12, 12, 12, 12]``."""
PlacementField = Annotated[tuple[int, ...] | None, _to_counts(0, "[0, 1, 2, 3]")]
"""``auto``, in order, or the rank of each stage, ``[0, 2, 1, 3]``."""
WindowField = Annotated[int | None, PlainValidator(to_window)]
"""A whole number of at least 1, or ``all``."""


class PlanSpec(Strict):
    """The choices. What is left out takes its default in `simulate` and is searched by `plan`."""

    stages: Count | None = None
    """K, how many devices the layers are cut over; not needed beside an explicit ``balance``."""
    microbatches: Count | None = None
    """M, how many pieces a batch is cut into; ``naive`` has one."""
    checkpoint: CheckpointField = "always"
    """Of which micro-batches activations are dropped after the forward and computed again before the backward."""
    schedule: ScheduleName = "gpipe"
    """The order of forwards and backwards."""
    recompute: Recompute = "early"
    """Whether a recomputation starts as soon as its rank is free, or waits for the gradient."""
    backward: BackwardOrder = "reverse"
    """GPipe's order of backwards: last micro-batch first, as in the paper, or first in first out, as in torch."""
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
    def num_microbatches(self) -> int | None:
        """``microbatches``; the naive schedule has one."""
        return self.microbatches or (1 if self.schedule == "naive" else None)


# --- scenario ------------------------------------------------------------------------------------------------------


class General(Strict):
    """What stands at the top level beside the sections."""

    name: Annotated[str, Field(min_length=1)]
    """What reports and run directories call it."""
    batch: Count
    """N, samples in a step; where M does not divide it, the first micro-batches hold one sample more."""
    dtype: DType = "bf16"
    """Of weights and activations."""
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
    optimizer: Optimizer
    profile: Path | None
    """The profile file to use: a measured one instead of analytic costs, or all there is of a model."""
    model: Model
    cluster: Cluster
    plan: PlanSpec
    swept: Mapping[str, Any] = field(default_factory=dict)
    """Field -> value, as written, of each field that the file sweeps."""
    document: Document = field(repr=False, compare=False)
    """The file's data for this point, to embed in a plan and to locate later mistakes."""

    def error(self, field: str, message: str) -> InputError:
        """A mistake in this scenario that shows only later, at the line where it was written."""
        return InputError([self.document.problem(tuple(field.split(".")), message)])
