"""Profile: what each layer costs as a function of micro-batch size; analytic, measured or imported.

Costs are held at a few micro-batch sizes and interpolated between them. Time per sample is *not* constant: a launch
overhead and weights that are read once per call make small micro-batches cost more per sample, which is why more
micro-batches can be slower.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, ValidationError

from gpipe_sim.base.files import (
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
from gpipe_sim.base.limits import AMOUNT, LAYERS, NOTES, shown
from gpipe_sim.scenario.catalog import DType, Link
from gpipe_sim.scenario.schema import Precision

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
SPLIT_COLUMNS = (
    "backward_inputs_s",
    "backward_weights_s",
    "kept_bytes",
    "workspace_inputs_bytes",
    "workspace_weights_bytes",
    "workspace_weights_accumulate_bytes",
)
"""Of a backward in two halves: I, the gradients of a layer's inputs, and W, those of its weights. A profile has all of
them or none."""

ATTENTION_COLUMNS = (
    "attention_s",
    "attention_bytes",
    "attention_workspace_forward_bytes",
    "attention_workspace_backward_bytes",
    "attention_workspace_accumulate_bytes",
)
EXTRA_COLUMNS = ("tensor_s", *ATTENTION_COLUMNS, "freed_bytes")
"""Parts of other columns, or others in their place, that a profile may know, each by itself."""
_ALL_COLUMNS = (*COLUMNS, *SPLIT_COLUMNS, *EXTRA_COLUMNS)


class Skip(NamedTuple):
    """A tensor that layers hand on to a later one: it is there once, however many of them do.

    layer        a ----> a+1 ----> a+2 ----> b        made = a, used = b
                 `=======(====)====(====)===='        it is among the outputs of a, a+1 and a+2
    """

    made: int
    """The layer whose output it is first among; -1 for the model's own input."""
    used: int
    """The last layer that takes it, at least two later."""
    bytes: float
    """At one micro-batch size."""


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
    backward_inputs_s: Array | None = None
    """Of I. The two halves need not add up to a whole backward."""
    backward_weights_s: Array | None = None
    """Of W."""
    kept_bytes: Array | None = None
    """What remains from I until W: of each operation whose weights W is for, what it saved, the layer's own input
    included if such an operation saved it, and the gradient of its output; each storage once."""
    workspace_inputs_bytes: Array | None = None
    """Transient bytes inside I, beyond what was saved and the gradients that enter and leave it. What will be kept
    piles up in it while what was saved is let go. Negative where more of that has gone before it needs the most."""
    workspace_weights_bytes: Array | None = None
    """Transient bytes inside W, beyond what was kept and the new gradients of the weights. Negative where what was kept
    has gone before it needs the most."""
    workspace_weights_accumulate_bytes: Array | None = None
    """The same of a W that adds to gradients of the weights that are there already."""
    tensor_s: Array | None = None
    """Of a forward, and as much of a backward: the collectives of the tensor group that holds the layer."""
    attention_s: Array | None = None
    """Of a forward: the part of attention that grows with the square of the sequence."""
    attention_bytes: Array | None = None
    """Of `saved_bytes`: what that part keeps, and can be made again."""
    attention_workspace_forward_bytes: Array | None = None
    """`workspace_forward_bytes` where that part is recomputed, as the next two; where nothing was measured, as much
    more as is made again."""
    attention_workspace_backward_bytes: Array | None = None
    attention_workspace_accumulate_bytes: Array | None = None
    freed_bytes: Array | None = None
    """Of a whole backward's highest point, what is not there where a layer is not the last of its stage: nobody holds
    its output then, nor the gradient of it longer than needed."""
    skips: tuple[Skip, ...] = ()

    @property
    def handed_on_bytes(self) -> Array:
        """Of what each layer takes and puts out, that which is the same: skips of earlier layers for later ones."""
        layer, found = np.arange(len(self.output_bytes)), np.zeros(len(self.output_bytes))
        for skip in self.skips:
            found += skip.bytes * ((skip.made < layer) & (layer < skip.used))
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """The costs of a model's layers on a device. Each of `table`'s columns has a row per layer, a column per size.

    The table has all of `COLUMNS`, and all of `SPLIT_COLUMNS` or none of them.
    """

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
    precision: Precision | None = None
    """That of the measured updates, where the dtype has 16 bits and it is known."""
    tensor: int = 1
    """T: the costs are those of one of so many ranks that hold each layer together."""
    skips: tuple[tuple[int, int, tuple[float, ...]], ...] = ()
    """What layers hand on to later ones, as `Skip` has it, with bytes for each size."""
    sequence_split: bool | None = None
    """Whether these also divided the sequence, where that is known."""
    _known: dict[int, LayerCosts] = field(default_factory=dict, init=False, repr=False)

    def __repr__(self) -> str:
        sizes = f"{self.sizes[0]} to {self.sizes[-1]}" if len(self.sizes) > 1 else f"{self.sizes[0]}"
        return (
            f"Profile({self.source}: {self.num_layers} layers on {self.device}, {self.dtype}, micro-batches of {sizes})"
        )

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.names)

    @property
    def splits(self) -> bool:
        """Whether it knows what the two halves of a backward cost."""
        return SPLIT_COLUMNS[0] in self.table

    def stretched(self, sizes: Iterable[int]) -> str | None:
        """What to say where costs of these sizes are a guess: a profile of one size knows nothing of others."""
        if len(self.sizes) > 1 or set(sizes) <= set(self.sizes):
            return None
        (known,) = self.sizes
        return (
            f"the profile knows micro-batches of {known} only: other sizes are taken in proportion, which flatters "
            "small ones, since what each call costs is not known"
        )

    def at(self, size: int) -> LayerCosts:
        """Every layer's costs for a micro-batch of this many samples."""
        if size not in self._known:
            columns = {name: _interpolate(self.sizes, values, size) for name, values in self.table.items()}
            skips = tuple(Skip(made, used, self._skip_bytes(each, size)) for made, used, each in self.skips)
            self._known[size] = LayerCosts(**columns, skips=skips)
        return self._known[size]

    def _skip_bytes(self, each: Sequence[float], size: int) -> float:
        return float(_interpolate(self.sizes, np.array([each], dtype=float), size)[0])

    def retimed(self, times: Mapping[int, Mapping[str, Sequence[float]]]) -> "Profile":
        """With other times, by size, and known at those sizes only: size -> a column each, and `spread`.

        Times that this profile has no column for are left out.
        """
        costs = [self.at(size) for size in times]

        def column(name: str) -> Array:
            return np.array([columns[name] for columns in times.values()], dtype=float).T

        table = {name: np.array([getattr(cost, name) for cost in costs]).T for name in self.table}
        timed = [name for name in self.table if all(name in columns for columns in times.values())]
        table |= {name: column(name) for name in timed}
        skips = tuple(
            (made, used, tuple(self._skip_bytes(each, size) for size in times)) for made, used, each in self.skips
        )
        return replace(self, sizes=tuple(times), table=table, skips=skips, spread=column("spread"))

    def to_json(self) -> str:
        """The profile file's text."""
        layers = [
            {"name": name, "parameter_bytes": self.parameter_bytes[i], "optimizer_s": self.optimizer_s[i]}
            | {column: self.table[column][i].tolist() for column in _ALL_COLUMNS if column in self.table}
            | ({"spread": self.spread[i].tolist()} if self.spread is not None else {})
            for i, name in enumerate(self.names)
        ]
        link = {"bandwidth_bytes_s": self.link.bandwidth, "latency_s": self.link.latency} if self.link else None
        document = {
            "format": "gpipe-profile-1",
            "source": self.source,
            "device": self.device,
            "dtype": self.dtype,
            **({"precision": self.precision} if self.precision else {}),
            **({"tensor": self.tensor} if self.tensor > 1 else {}),
            **({"sequence_split": self.sequence_split} if self.sequence_split is not None else {}),
            "environment": self.environment,
            "sizes": self.sizes,
            "input_bytes": self.input_bytes,
            "action_overhead_s": self.action_overhead_s,
            "hop_overhead_s": self.hop_overhead_s,
            "link": link,
            **({"skips": [dict(zip(Skip._fields, skip, strict=True)) for skip in self.skips]} if self.skips else {}),
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


def column(values: Iterable[float]) -> Array:
    """A row per layer, to be multiplied by a size per column."""
    return np.array(list(values), dtype=float)[:, None]


# --- from a file ---------------------------------------------------------------------------------------------------

_Amount = Annotated[float, Field(ge=0, le=AMOUNT)]
_Signed = Annotated[float, Field(ge=-AMOUNT, le=AMOUNT)]
_Amounts = Annotated[list[_Amount], Field(fail_fast=True)]
_Signeds = Annotated[list[_Signed], Field(fail_fast=True)]


def _few(notes: object) -> object:
    """Before any of them is looked at, since each may be wrong."""
    if isinstance(notes, dict) and len(notes) > NOTES:
        raise ValueError(f"found {len(notes)} entries, expected at most {NOTES}")
    return notes


class _LayerEntry(Strict):
    """One layer. Lists have a value for each of the file's `sizes`, of one micro-batch of that many samples."""

    name: str
    """What reports call it."""
    parameter_bytes: _Amount
    """Of its weights."""
    optimizer_s: _Amount = 0.0
    """To update them, once a step."""
    forward_s: _Amounts
    """Also what a recomputation takes."""
    backward_s: _Amounts
    """Gradients of inputs and weights together."""
    saved_bytes: _Amounts
    """What remains after a forward with gradients until the backward: saved tensors and the output, each storage once,
    the input not counted."""
    output_bytes: _Amounts
    """What crosses to the next stage if the model is cut after this layer."""
    workspace_no_grad_bytes: _Amounts
    """Transient inside a forward without gradients, beyond its input and output."""
    workspace_forward_bytes: _Amounts
    """Transient inside a forward with gradients, beyond what remains."""
    workspace_backward_bytes: _Signeds
    """Transient inside a backward, beyond what was saved and the gradients that enter and leave it, its weights'
    included; negative where it lets go of more before it needs the most."""
    workspace_accumulate_bytes: _Signeds | None = None
    """The same of a backward that adds to gradients that are there. Left out: as `workspace_backward_bytes`, with all
    of a layer's new gradients beside the old ones."""
    backward_inputs_s: _Amounts | None = None
    """Of I, the half of a backward that makes the gradients of the inputs. This and the next five columns are in all
    layers or in none; split schedules need them."""
    backward_weights_s: _Amounts | None = None
    """Of W, the half that makes the gradients of the weights. The halves need not add up to ``backward_s``."""
    kept_bytes: _Amounts | None = None
    """What remains from I until W: of each operation whose weights W is for, what it saved, the layer's own input
    included if such an operation saved it, and the gradient of its output; each storage once."""
    workspace_inputs_bytes: _Signeds | None = None
    """Transient inside I, beyond what was saved and the gradients that enter and leave it; what will be kept is a part
    of it as far as it is there before what was saved is let go."""
    workspace_weights_bytes: _Signeds | None = None
    """Transient inside W, beyond what was kept and the new gradients of the weights."""
    workspace_weights_accumulate_bytes: _Signeds | None = None
    """The same of a W that adds to gradients that are there."""
    tensor_s: _Amounts | None = None
    """The part of a forward, and as much of a backward, in which the ranks of a tensor group exchange what they have.
    This and the next five columns are each in all layers or in none."""
    attention_s: _Amounts | None = None
    """The part of a forward that ``recompute_unit: attention`` runs again."""
    attention_bytes: _Amounts | None = None
    """The part of ``saved_bytes`` that is dropped then."""
    attention_workspace_forward_bytes: _Signeds | None = None
    """In place of ``workspace_forward_bytes`` then, as the next two of theirs. Left out: as much more as is dropped."""
    attention_workspace_backward_bytes: _Signeds | None = None
    """In place of ``workspace_backward_bytes``."""
    attention_workspace_accumulate_bytes: _Signeds | None = None
    """In place of ``workspace_accumulate_bytes``."""
    freed_bytes: _Amounts | None = None
    """The part of a whole backward's highest point that is not there where other layers of its stage follow: its
    output, and the gradient of it, if they go before. In all layers or in none."""
    spread: _Amounts | None = None
    """Interquartile range over median of its measured times; in all layers or in none."""


class _SkipEntry(Strict):
    """A tensor that layers hand on from one to a later one, as they get it: it is held once."""

    made: Annotated[int, Field(ge=-1)]
    """The number of the layer whose output it is first among; -1 for the model's own input."""
    used: Annotated[int, Field(ge=1)]
    """The last layer that takes it, at least two later."""
    bytes: _Amounts
    """A value for each of the file's ``sizes``, among ``output_bytes`` of all layers from ``made`` to the last before
    ``used``."""


class _LinkEntry(Strict):
    """The link between neighbouring ranks, as measured."""

    bandwidth_bytes_s: Annotated[float, Field(ge=1e-6)]
    """In each direction."""
    latency_s: _Amount
    """Of a small message."""


class _ProfileFile(Strict):
    """What each layer of a model costs on a device."""

    format: Literal["gpipe-profile-1"]
    """The version of this format."""
    source: Source
    """How the figures came about."""
    device: str
    """What they are figures of: ``cpu``, ``cuda``, or a name."""
    dtype: DType
    """Of activations, and of the weights that are computed with."""
    precision: Precision | None = None
    """Of a measured update, where ``dtype`` has 16 bits; left out, of either."""
    tensor: Annotated[int, Field(ge=1, le=10**9)] = 1
    """How many ranks hold each layer together; the figures are those of one of them."""
    sequence_split: bool | None = None
    """Whether these also divide the sequence, in norms, residuals and what is kept; left out, it is not known."""
    environment: Annotated[dict[str, str], BeforeValidator(_few)] = Field(default_factory=dict)
    """Thread count, versions and the like; for people to read."""
    sizes: Annotated[list[Annotated[int, Field(ge=1, le=10**9)]], Field(min_length=1, fail_fast=True)]
    """Samples in a micro-batch, ascending, at which costs are known; between them they are interpolated."""
    input_bytes: _Amount = 0.0
    """Of one sample as it enters the first layer."""
    action_overhead_s: _Amount = 0.0
    """What the engine itself takes before each action."""
    hop_overhead_s: _Amount = 0.0
    """What the engine adds to each message's way."""
    link: _LinkEntry | None = None
    """What ``cluster.link: measured`` stands for."""
    skips: Annotated[list[_SkipEntry], Field(max_length=LAYERS, fail_fast=True)] = Field(default_factory=list)
    """What layers hand on to later ones than the next."""
    layers: Annotated[list[_LayerEntry], Field(min_length=1, max_length=LAYERS, fail_fast=True)]
    """From the first to the last."""


def is_file(path: Path) -> bool:
    """Whether it is one; a name that no file can have is not."""
    try:
        return path.is_file()
    except OSError:
        return False


def load_profile(path: Path) -> Profile:
    """Read a profile file; every mistake in it is reported with its line."""
    stat = path.stat() if is_file(path) else None
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
    uneven = InputError(document.problem(field, message) for field, message in _uneven(content))
    if uneven.problems:
        raise uneven
    return _from_file(content)


def _places(path: Path) -> dict[FieldPath, str]:
    """Where each field is, by reading the file as YAML, of which JSON is a part: slow, done only after a mistake."""
    try:
        return parse_yaml(read_text(path), str(path)).places
    except InputError:  # what YAML refuses although JSON allows it, such as a file that it would read for minutes
        return {}


def _uneven(content: _ProfileFile) -> Iterable[tuple[FieldPath, str]]:
    if len({layer.spread is None for layer in content.layers}) > 1:
        yield ("layers",), "some layers have a spread and some have none, expected all or none"
    halves = {name: [getattr(layer, name) is not None for layer in content.layers] for name in SPLIT_COLUMNS}
    if any(any(there) for there in halves.values()):
        for name in [name for name, there in halves.items() if not all(there)]:
            message = f"is missing, expected all of {', '.join(SPLIT_COLUMNS)} in all layers, or none"
            yield ("layers", halves[name].index(False), name), message
    for name in EXTRA_COLUMNS:
        there = [getattr(layer, name) is not None for layer in content.layers]
        if any(there) and not all(there):
            yield ("layers", there.index(False), name), "is missing, expected it in all layers, or in none"
    if content.sizes != sorted(set(content.sizes)):
        yield ("sizes",), f"found {shown(content.sizes)}, expected ascending sizes"
    for index, layer in enumerate(content.layers):
        for column in (*_ALL_COLUMNS, "spread"):
            values = getattr(layer, column)
            if values is not None and len(values) != len(content.sizes):
                yield ("layers", index, column), f"expected {len(content.sizes)} values, one for each of sizes"
    yield from _wrong_skips(content)


def _wrong_skips(content: _ProfileFile) -> Iterable[tuple[FieldPath, str]]:
    num_sizes, last = len(content.sizes), len(content.layers) - 1
    handed = [[0.0] * num_sizes for _ in content.layers]
    for index, skip in enumerate(content.skips):
        if not skip.made + 2 <= skip.used <= last:
            yield ("skips", index, "used"), f"found {skip.used}, expected a layer from {skip.made + 2} to {last}"
        elif len(skip.bytes) != num_sizes:
            yield ("skips", index, "bytes"), f"expected {num_sizes} values, one for each of sizes"
        else:
            for layer in range(max(skip.made, 0), skip.used):
                handed[layer] = [before + one for before, one in zip(handed[layer], skip.bytes, strict=True)]
    for index, (layer_entry, amounts) in enumerate(zip(content.layers, handed, strict=True)):
        if any(amount > put * (1 + _ROUNDING) for amount, put in zip(amounts, layer_entry.output_bytes, strict=False)):
            message = f"found less than the {shown(max(amounts))} bytes of skips that are among it"
            yield ("layers", index, "output_bytes"), message


_ROUNDING = 1e-9


def _column(layer: _LayerEntry, name: str) -> list[float]:
    values: list[float] | None = getattr(layer, name)
    return layer.workspace_backward_bytes if values is None else values


def _from_file(content: _ProfileFile) -> Profile:
    link = None
    if content.link:
        link = Link(name="measured", bandwidth=content.link.bandwidth_bytes_s, latency=content.link.latency_s)
    first = content.layers[0]
    columns = COLUMNS if first.kept_bytes is None else (*COLUMNS, *SPLIT_COLUMNS)
    columns = (*columns, *(name for name in EXTRA_COLUMNS if getattr(first, name) is not None))
    return Profile(
        source=content.source,
        device=content.device,
        dtype=content.dtype,
        names=tuple(layer.name for layer in content.layers),
        sizes=tuple(content.sizes),
        table={column: np.array([_column(layer, column) for layer in content.layers], float) for column in columns},
        parameter_bytes=np.array([layer.parameter_bytes for layer in content.layers], float),
        optimizer_s=np.array([layer.optimizer_s for layer in content.layers], float),
        input_bytes=content.input_bytes,
        action_overhead_s=content.action_overhead_s,
        hop_overhead_s=content.hop_overhead_s,
        link=link,
        spread=np.array([layer.spread for layer in content.layers], float) if content.layers[0].spread else None,
        environment=content.environment,
        precision=content.precision,
        tensor=content.tensor,
        skips=tuple((skip.made, skip.used, tuple(skip.bytes)) for skip in content.skips),
        sequence_split=content.sequence_split,
    )
