"""The form: fields of a scenario to fill in, each a setting of the state, as `--set` would put it.

The form knows no rules. It shows what stands in the scenario's data and writes what is typed there; whether that is
right is found by reading the scenario, and what is wrong is told beside its field in the words of the command line.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import dash_mantine_components as dmc
from dash import html

from dashboard.page import ids
from dashboard.page.state import State
from gpipe_sim.base.files import Problem, yaml_text
from gpipe_sim.base.units import format_bandwidth, format_seconds
from gpipe_sim.scenario.catalog import LINKS, DType, device_names
from gpipe_sim.scenario.mesh import MESSAGES_INSIDE, SUMS_INSIDE
from gpipe_sim.scenario.schema import BackwardOrder, Optimizer, Precision, RecomputeUnit, Transformer


@dataclass(frozen=True)
class Field:
    """One field: where it stands in a scenario, and how it is asked for."""

    path: str
    label: str
    kind: Literal["count", "text", "choice", "device", "switch"]
    hint: str = ""
    choices: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Of its control."""
        return "form-" + self.path.replace(".", "-").replace("_", "-")

    @property
    def property(self) -> str:
        """In which the control holds its value."""
        return "checked" if self.kind == "switch" else "value"


_ORDERS = tuple(f"[{', '.join(order)}]" for order in (SUMS_INSIDE, MESSAGES_INSIDE))
MODEL = (
    Field("model.layers", "layers", "count"),
    Field("model.hidden", "hidden", "count"),
    Field("model.heads", "heads", "count"),
    Field("model.ffn", "ffn", "count", "4 x hidden"),
    Field("model.vocab", "vocabulary", "count"),
    Field("model.sequence", "sequence", "count"),
    Field(
        "model.attention", "attention", "choice", "flash", get_args(Transformer.model_fields["attention"].annotation)
    ),
)
CLUSTER = (
    Field("cluster.device", "device", "device", "a100-80gb, {memory: 16 GiB}"),
    Field("cluster.memory_reserve", "memory reserve", "text", "0 GiB"),
    Field("cluster.nodes", "nodes", "count", "1"),
    Field("cluster.devices_per_node", "devices per node", "count", "as many as stages"),
    Field("cluster.link.bandwidth", "link bandwidth", "text", "25 GB/s"),
    Field("cluster.link.latency", "link latency", "text", "10 us"),
    Field("cluster.network.bandwidth", "network bandwidth", "text", "none"),
    Field("cluster.network.latency", "network latency", "text", "none"),
    Field("cluster.overlap", "transfers run beside compute", "switch"),
)
TRAINING = (
    Field("batch", "batch", "count"),
    Field("dtype", "dtype", "choice", "bf16", get_args(DType)),
    Field("precision", "precision", "choice", "mixed", get_args(Precision)),
    Field("optimizer", "optimizer", "choice", "adam", get_args(Optimizer)),
)
PLAN = (
    Field("plan.balance", "layers of each stage", "text", "auto, or [8, 8, 8, 8]"),
    Field("plan.placement", "rank of each stage", "text", "auto, or [0, 1, 2, 3]"),
    Field("plan.window", "receives posted ahead", "text", "2, or all"),
    Field("plan.recompute_unit", "recomputed at once", "choice", "stage", get_args(RecomputeUnit)),
    Field("plan.sequence_split", "tensor groups divide the sequence", "switch"),
    Field("plan.order", "devices numbered first", "choice", _ORDERS[0], _ORDERS),
    Field("plan.backward", "order of backwards", "choice", "reverse", get_args(BackwardOrder)),
)
"""What no knob turns."""
FIELDS = {field.id: field for field in (*MODEL, *CLUSTER, *TRAINING, *PLAN)}


# --- between data and controls -------------------------------------------------------------------------------------


def shown(data: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each control for a scenario's data, right or wrong."""
    return {name: _shown(field, _at(data, field.path)) for name, field in FIELDS.items()}


def _at(data: Any, path: str) -> Any:
    """What stands at a path, None if nothing does; the figures of a link that is named are the catalogue's."""
    for part in path.split("."):
        if isinstance(data, str) and data in LINKS:
            link = LINKS[data]
            return format_bandwidth(link.bandwidth) if part == "bandwidth" else format_seconds(link.latency)
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _shown(field: Field, value: Any) -> Any:
    if field.kind == "switch":
        return value is not False
    if value is None:
        return None if field.kind == "choice" else ""
    if field.kind == "count" and isinstance(value, int | float):
        return value
    return value if isinstance(value, str) else _on_one_line(value)


def _on_one_line(value: Any) -> str:
    """Lists and mappings as YAML writes them within a line: ``{memory: 16 GiB}``."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_on_one_line(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_on_one_line, value)) + "]"
    return yaml_text(value).removesuffix("...\n").strip()


def filled(state: State, name: str, value: Any) -> State:
    """The state after a field was filled in, or emptied."""
    field = FIELDS[name]
    if field.kind == "switch":
        text = "true" if value else "false"
    elif value is None or str(value).strip() == "":
        text = "auto" if field.path in ("plan.balance", "plan.placement") else "null"
        if field.path == "cluster.network.bandwidth":  # without it there is no network
            return state.with_settings(cluster__network="null")
    else:
        text = str(value).strip()
    return state.with_settings(**{field.path.replace(".", "__"): text})


def told(problems: Iterable[Problem]) -> dict[str, str]:
    """What is wrong with each control: of its field, of a part of it, or of the whole that it is a part of."""
    found: dict[str, str] = {}
    for problem in problems:
        own = [name for name, field in FIELDS.items() if _concerns(problem.field, field.path)]
        for name in own[:1]:
            found.setdefault(name, problem.message)
    return found


def _concerns(wrong: str, path: str) -> bool:
    part_of_field = f"{wrong}.".startswith(f"{path}.")
    whole_of_field = "." in wrong and path.startswith(f"{wrong}.")
    return part_of_field or whole_of_field


# --- layout --------------------------------------------------------------------------------------------------------


def form_panel() -> dmc.Stack:
    """The fields by section."""
    return dmc.Stack(
        [
            html.Div(
                [_section("Model: a transformer", MODEL)],
                id=ids.FORM_MODEL,
            ),
            dmc.Text(id=ids.FORM_OTHER_MODEL, size="sm", c="dimmed"),
            _section("Cluster", CLUSTER),
            _section("Training", TRAINING),
            _section("Plan, beyond the knobs", PLAN),
        ],
        gap="sm",
    )


def _section(title: str, fields: Iterable[Field]) -> dmc.Fieldset:
    controls = dmc.SimpleGrid([_control(field) for field in fields], cols={"base": 2, "sm": 3, "lg": 2, "xl": 3})
    return dmc.Fieldset(controls, legend=title)


def _control(field: Field) -> Any:
    shared = {"id": field.id, "label": field.label}
    if field.kind == "switch":
        return dmc.Switch(**shared, checked=True, mt="xl")
    if field.kind == "choice":
        return dmc.Select(**shared, data=list(field.choices), placeholder=field.hint, allowDeselect=False)
    if field.kind == "device":
        return dmc.Autocomplete(**shared, data=list(device_names()), placeholder=field.hint, debounce=True)
    if field.kind == "count":
        return dmc.NumberInput(**shared, placeholder=field.hint, clampBehavior="none", debounce=400)
    return dmc.TextInput(**shared, placeholder=field.hint, debounce=True)
