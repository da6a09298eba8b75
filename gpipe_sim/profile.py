"""Profile: what each layer costs as a function of micro-batch size; analytic, measured or imported.

Costs are held at a few micro-batch sizes and interpolated between them. Time per sample is *not* constant: a launch
overhead and weights that are read once per call make small micro-batches cost more per sample, which is why more
micro-batches can be slower.

    seconds                    .-'   roofline: launch + max(FLOPs / compute, bytes / bandwidth)
       |                  .-'
       |             .-'
       |       ___.-'        <- flat while the weights' own traffic dominates
       |______/
       +--------------------- samples in the micro-batch
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from gpipe_sim.catalog import DType, Link
from gpipe_sim.files import (
    Document,
    FieldPath,
    InputError,
    Strict,
    parse_yaml,
    problems_of,
    read_json,
    read_text,
    write_text,
)
from gpipe_sim.model import bytes_per_parameter, transformer_layers
from gpipe_sim.scenario import Layers, ProfileModel, Scenario, Transformer

Array = npt.NDArray[np.float64]
Source = Literal["analytic", "measured", "imported"]

COLUMNS = (
    "forward_s",
    "backward_s",
    "saved_bytes",
    "output_bytes",
    "workspace_no_grad_bytes",
    "workspace_forward_bytes",
    "workspace_backward_bytes",
    "workspace_accumulate_bytes",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCosts:
    """The costs of every layer at one micro-batch size, one array entry per layer."""

    forward_s: Array
    """Also what a recomputation takes."""
    backward_s: Array
    saved_bytes: Array
    """What remains after a forward with gradients until the backward: saved tensors and the output, each storage
    once, the input not counted."""
    output_bytes: Array
    """What crosses to the next stage if the model is cut after this layer."""
    workspace_no_grad_bytes: Array
    """Transient bytes inside a forward without gradients, beyond its input and output."""
    workspace_forward_bytes: Array
    """Transient bytes inside a forward with gradients, beyond what remains."""
    workspace_backward_bytes: Array
    """Transient bytes inside a backward, beyond what was saved and the gradients that enter and leave it, its weights'
    included. Negative where it has let go of so much of what was saved before it needs the most."""
    workspace_accumulate_bytes: Array
    """The same of a backward that adds to gradients of the weights that are there already. Negative where each new one
    is added as soon as it is made, so that they are never all there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """The costs of a model's layers on a device. Each of `table`'s columns has a row per layer, a column per size."""

    source: Source
    device: str
    dtype: DType
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Micro-batch sizes at which costs are known, ascending."""
    table: dict[str, Array]
    parameter_bytes: Array
    optimizer_s: Array
    """Seconds to update each layer's parameters."""
    input_bytes: float = 0.0
    """Bytes of one sample as it enters the first layer."""
    action_overhead_s: float = 0.0
    """What the engine itself takes before each action."""
    hop_overhead_s: float = 0.0
    """What the engine adds to each message's way."""
    link: Link | None = None
    """The link between neighbouring ranks, if it was measured."""
    spread: Array | None = None
    """Interquartile range over median of each layer's measured forward and backward, a column per size."""
    environment: dict[str, str] = field(default_factory=dict)
    """Thread count, torch version and the like, as measured."""
    _known: dict[int, LayerCosts] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.names)

    def at(self, size: int) -> LayerCosts:
        """Every layer's costs for a micro-batch of this many samples."""
        if size not in self._known:
            columns = {name: _interpolate(self.sizes, values, size) for name, values in self.table.items()}
            self._known[size] = LayerCosts(**columns)
        return self._known[size]

    def to_json(self) -> str:
        """The profile file's text."""
        layers = [
            {"name": name, "parameter_bytes": self.parameter_bytes[i], "optimizer_s": self.optimizer_s[i]}
            | {column: self.table[column][i].tolist() for column in COLUMNS}
            | ({"spread": self.spread[i].tolist()} if self.spread is not None else {})
            for i, name in enumerate(self.names)
        ]
        link = {"bandwidth_bytes_s": self.link.bandwidth, "latency_s": self.link.latency} if self.link else None
        document = {
            "format": "gpipe-profile-1",
            "source": self.source,
            "device": self.device,
            "dtype": self.dtype,
            "environment": self.environment,
            "sizes": self.sizes,
            "input_bytes": self.input_bytes,
            "action_overhead_s": self.action_overhead_s,
            "hop_overhead_s": self.hop_overhead_s,
            "link": link,
            "layers": layers,
        }
        return json.dumps(document, indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Write the profile file."""
        write_text(path, self.to_json())


def _interpolate(sizes: Sequence[int], values: Array, size: int) -> Array:
    """Linear between known sizes and beyond them; proportional to the size where only one is known."""
    if len(sizes) == 1:
        scaled: Array = values[:, 0] * (size / sizes[0])
        return scaled
    if size < sizes[0]:  # the line through the first two sizes, but at least in proportion: nothing is free
        slope = (values[:, 1] - values[:, 0]) / (sizes[1] - sizes[0])
        below: Array = np.maximum(values[:, 0] - slope * (sizes[0] - size), values[:, 0] * (size / sizes[0]))
        return below
    right = min(max(int(np.searchsorted(sizes, size)), 1), len(sizes) - 1)
    if sizes[right] == size:
        return values[:, right]
    weight = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    line = values[:, right - 1] * (1 - weight) + values[:, right] * weight
    between: Array = np.maximum(line, np.minimum(values.min(axis=1), 0.0))  # beyond them, never below what was seen
    return between


# --- from a description --------------------------------------------------------------------------------------------


def build_profile(scenario: Scenario, sizes: Iterable[int]) -> Profile:
    """The scenario's profile: read if it names one, otherwise analytic and exact at the given micro-batch sizes."""
    known_sizes = tuple(sorted({*sizes, scenario.batch}))
    if scenario.profile:
        return _read_for(scenario, scenario.profile)
    if isinstance(scenario.model, Transformer):
        return _transformer_profile(scenario, scenario.model, known_sizes)
    if isinstance(scenario.model, Layers):
        return _layers_profile(scenario, scenario.model, known_sizes)
    raise scenario.error("profile", "is missing: a python model needs a measured profile")


def _read_for(scenario: Scenario, path: Path) -> Profile:
    """Read the profile that the scenario names, and check that it belongs to the model that it describes."""
    is_all = isinstance(scenario.model, ProfileModel)
    name = "model.path" if is_all else "profile"
    if not path.is_file():
        raise scenario.error(name, f"there is no file {path}")
    profile = load_profile(path)
    expected = scenario.model.num_layers
    if expected is not None and expected != profile.num_layers:
        raise scenario.error(name, f"{path} has {profile.num_layers} layers, but the model has {expected}")
    if profile.dtype != scenario.dtype and (not is_all or "dtype" in scenario.document.data):
        raise scenario.error(name, f"{path} was made with {profile.dtype}, but the scenario says {scenario.dtype}")
    return profile


def _transformer_profile(scenario: Scenario, model: Transformer, sizes: tuple[int, ...]) -> Profile:
    """Roofline times: launches + max(FLOPs / attained compute, bytes / bandwidth); a backward is twice a forward.

    Traffic is the weights once per call (a lookup reads only the rows it needs, but its gradient is dense) and, per
    sample, every tensor that remains written once and read once. The optimizer reads and writes weights and state and
    reads gradients, at the memory's bandwidth.
    """
    device, layers = scenario.cluster.device, transformer_layers(model, scenario.dtype)
    n = np.array(sizes, dtype=float)
    per_parameter = bytes_per_parameter(scenario.optimizer, scenario.dtype)
    parameters = np.array([layer.parameters for layer in layers], dtype=float)
    attained = device.compute[scenario.dtype] * device.efficiency
    launch = np.array([[layer.kernels * device.launch] for layer in layers])
    work = np.array([[layer.flops] for layer in layers]) * n / attained
    saved = np.array([[layer.saved_bytes] for layer in layers]) * n
    weights = parameters[:, None] * per_parameter.weight
    read = weights * np.array([[layer.reads_all_weights] for layer in layers])
    forward = launch + np.maximum(work, (read + 2 * saved) / device.bandwidth)
    backward = 2 * launch + 2 * np.maximum(work, (weights + 2 * saved) / device.bandwidth)
    workspace = np.array([[layer.workspace_bytes] for layer in layers]) * n
    update_bytes = 2 * per_parameter.weight + per_parameter.gradient + 2 * per_parameter.optimizer
    return Profile(
        source="analytic",
        device=device.name,
        dtype=scenario.dtype,
        names=tuple(layer.name for layer in layers),
        sizes=sizes,
        table={
            "forward_s": forward,
            "backward_s": backward,
            "saved_bytes": saved,
            "output_bytes": np.array([[layer.output_bytes] for layer in layers]) * n,
            "workspace_no_grad_bytes": workspace,
            "workspace_forward_bytes": np.zeros_like(workspace),
            "workspace_backward_bytes": workspace,
            "workspace_accumulate_bytes": workspace,
        },
        parameter_bytes=parameters * per_parameter.weight,
        optimizer_s=parameters * update_bytes / device.bandwidth,
        input_bytes=8.0 * model.sequence,  # token numbers as int64
    )


def _layers_profile(scenario: Scenario, model: Layers, sizes: tuple[int, ...]) -> Profile:
    """The costs as they were written: overhead per call plus seconds per sample; no update time."""
    layers = [(spec, index) for spec in model.layers for index in range(spec.repeat)]
    n = np.array(sizes, dtype=float)

    def rows(values: Iterable[float]) -> Array:
        return np.array(list(values), dtype=float)[:, None]

    overhead = rows(spec.overhead for spec, _ in layers)
    backward = rows(2 * spec.forward if spec.backward is None else spec.backward for spec, _ in layers)
    nothing = np.zeros((len(layers), len(sizes)))
    return Profile(
        source="analytic",
        device=scenario.cluster.device.name,
        dtype=scenario.dtype,
        names=tuple(f"{spec.name}.{index}" if spec.repeat > 1 else spec.name for spec, index in layers),
        sizes=sizes,
        table={
            "forward_s": overhead + rows(spec.forward for spec, _ in layers) * n,
            "backward_s": overhead + backward * n,
            "saved_bytes": rows(spec.output if spec.saved is None else spec.saved for spec, _ in layers) * n,
            "output_bytes": rows(spec.output for spec, _ in layers) * n,
            "workspace_no_grad_bytes": nothing,
            "workspace_forward_bytes": nothing,
            "workspace_backward_bytes": nothing,
            "workspace_accumulate_bytes": nothing,
        },
        parameter_bytes=np.array([spec.parameters for spec, _ in layers]),
        optimizer_s=np.zeros(len(layers)),
    )


# --- from a file ---------------------------------------------------------------------------------------------------

_Amount = Annotated[float, Field(ge=0)]


class _LayerEntry(Strict):
    name: str
    parameter_bytes: _Amount
    optimizer_s: _Amount = 0.0
    forward_s: list[_Amount]
    backward_s: list[_Amount]
    saved_bytes: list[_Amount]
    output_bytes: list[_Amount]
    workspace_no_grad_bytes: list[_Amount]
    workspace_forward_bytes: list[_Amount]
    workspace_backward_bytes: list[float]
    workspace_accumulate_bytes: list[float] | None = None
    """Left out: as `workspace_backward_bytes`, with all of a layer's new gradients beside the old ones."""
    spread: list[_Amount] | None = None


class _LinkEntry(Strict):
    bandwidth_bytes_s: Annotated[float, Field(gt=0)]
    latency_s: _Amount


class _ProfileFile(Strict):
    format: Literal["gpipe-profile-1"]
    source: Source
    device: str
    dtype: DType
    environment: dict[str, str] = Field(default_factory=dict)
    sizes: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    input_bytes: _Amount = 0.0
    action_overhead_s: _Amount = 0.0
    hop_overhead_s: _Amount = 0.0
    link: _LinkEntry | None = None
    layers: Annotated[list[_LayerEntry], Field(min_length=1)]


def load_profile(path: Path) -> Profile:
    """Read a profile file; every mistake in it is reported with its line."""
    stat = path.stat() if path.exists() else None
    return _load(path, (stat.st_mtime_ns, stat.st_size) if stat else None)


@lru_cache(maxsize=8)
def _load(path: Path, version: object) -> Profile:
    """Every point of a sweep reads the same file; `version` tells whether it has changed."""
    document = read_json(path)
    try:
        return parse_profile(document)
    except InputError:
        return parse_profile(Document(document.file, document.data, _places(path)))


def parse_profile(document: Document) -> Profile:
    """The profile of an already read document."""
    try:
        content = _ProfileFile.model_validate(document.data)
    except ValidationError as error:
        raise InputError(problems_of(error, document, ())) from error
    problems = [document.problem(field, message) for field, message in _uneven(content)]
    if problems:
        raise InputError(problems)
    return _from_file(content)


def _places(path: Path) -> dict[FieldPath, str]:
    """Where each field is, by reading the file as YAML, of which JSON is a part: slow, done only after a mistake."""
    try:
        return parse_yaml(read_text(path), str(path)).places
    except InputError:  # what YAML refuses although JSON allows it
        return {}


def _uneven(content: _ProfileFile) -> Iterable[tuple[FieldPath, str]]:
    if len({layer.spread is None for layer in content.layers}) > 1:
        yield ("layers",), "some layers have a spread and some have none, expected all or none"
    if content.sizes != sorted(set(content.sizes)):
        yield ("sizes",), f"found {content.sizes}, expected ascending sizes"
    for index, layer in enumerate(content.layers):
        for column in (*COLUMNS, "spread"):
            values = getattr(layer, column)
            if values is not None and len(values) != len(content.sizes):
                yield ("layers", index, column), f"expected {len(content.sizes)} values, one for each of sizes"


def _column(layer: _LayerEntry, name: str) -> list[float]:
    values: list[float] | None = getattr(layer, name)
    return layer.workspace_backward_bytes if values is None else values


def _from_file(content: _ProfileFile) -> Profile:
    link = None
    if content.link:
        link = Link(name="measured", bandwidth=content.link.bandwidth_bytes_s, latency=content.link.latency_s)
    return Profile(
        source=content.source,
        device=content.device,
        dtype=content.dtype,
        names=tuple(layer.name for layer in content.layers),
        sizes=tuple(content.sizes),
        table={column: np.array([_column(layer, column) for layer in content.layers], float) for column in COLUMNS},
        parameter_bytes=np.array([layer.parameter_bytes for layer in content.layers], float),
        optimizer_s=np.array([layer.optimizer_s for layer in content.layers], float),
        input_bytes=content.input_bytes,
        action_overhead_s=content.action_overhead_s,
        hop_overhead_s=content.hop_overhead_s,
        link=link,
        spread=np.array([layer.spread for layer in content.layers], float) if content.layers[0].spread else None,
        environment=content.environment,
    )
