"""The side of the page: knobs, downloads, and the commands for what is on screen."""

from collections.abc import Sequence
from typing import Any, get_args

import dash_mantine_components as dmc
from dash import html

from dashboard.page import ids
from dashboard.page.cards import explained
from dashboard.page.knobs import LABELS, MEANINGS
from dashboard.page.state import Library
from gpipe_sim.scenario.catalog import device_names
from gpipe_sim.scenario.schema import AUTO, Checkpoint, Recompute, ScheduleName, Shard


def knobs(library: Library) -> dmc.Stack:
    """Everything that can be turned."""
    return dmc.Stack(
        [
            dmc.Select(
                id=ids.SCENARIO,
                label="scenario",
                data=[*sorted(library.files), {"label": "your own", "value": ""}],
                searchable=True,
                allowDeselect=False,
            ),
            _number(ids.RANKS),
            _number(ids.STAGES_PER_RANK),
            _number(ids.MICROBATCHES),
            _number(ids.BATCH),
            _explained(
                ids.SCHEDULE,
                dmc.Select(
                    id=ids.SCHEDULE,
                    label=LABELS[ids.SCHEDULE],
                    data=[*get_args(ScheduleName), AUTO],
                    allowDeselect=False,
                    error=None,
                ),
            ),
            _choice(ids.CHECKPOINT, get_args(Checkpoint)),
            _choice(ids.RECOMPUTE, get_args(Recompute)),
            _number(ids.REPLICAS),
            _choice(ids.SHARD, get_args(Shard)),
            _number(ids.TENSOR),
            _slider(ids.BANDWIDTH, 7, 12, 0.05, {8: "100 MB/s", 10: "10 GB/s"}),
            _slider(ids.LATENCY, -7, -1, 0.05, {-6: "1 us", -4: "100 us", -2: "10 ms"}),
            _explained(
                ids.DEVICE,
                dmc.Select(
                    id=ids.DEVICE,
                    label=LABELS[ids.DEVICE],
                    data=list(device_names()),
                    placeholder="as the scenario describes it",
                    searchable=True,
                    clearable=True,
                ),
            ),
            _explained(ids.OVERLAP, dmc.Switch(id=ids.OVERLAP, label=LABELS[ids.OVERLAP], checked=True)),
            _slider(ids.JITTER, 0, 30, 1, {}),
            downloads(),
        ],
        gap="sm",
        pr="md",
    )


def _explained(name: str, control: Any) -> html.Div:
    """With what it turns, and the curve of its range."""
    return explained([control, html.Div(id=ids.spark_of(name), className="spark")], MEANINGS[name])


def _number(name: str) -> html.Div:
    control = dmc.NumberInput(
        id=name, label=LABELS[name], min=1, allowDecimal=False, clampBehavior="none", debounce=250, error=None
    )
    return _explained(name, control)


def _choice(name: str, values: Sequence[str]) -> html.Div:
    label = LABELS[name]
    control = dmc.SegmentedControl(id=name, data=list(values), size="xs", fullWidth=True, **{"aria-label": label})
    error = html.Div(id=f"{name}-error", className="field-error", role="alert")
    return _explained(name, html.Div([dmc.Text(label, size="sm", fw=500), control, error]))


def _slider(name: str, low: int, high: int, step: float, marks: dict[int, str]) -> html.Div:
    """With marks it is logarithmic: its value is the power of ten."""
    label = LABELS[name]
    slider = dmc.Slider(
        id=name,
        min=low,
        max=high,
        step=step,
        marks=[{"value": value, "label": text} for value, text in marks.items()],
        label=None,
        updatemode="mouseup",  # meanwhile, knobs.js asks what the value under the pointer would come to
        className="knob-slider",
        mb="lg" if marks else "xs",
        thumbLabel=f"{label}, logarithmic" if marks else label,
    )
    head = dmc.Text([label, ": ", html.Span(id=f"{name}-shown")], size="sm", fw=500)
    return _explained(name, html.Div([head, slider]))


def downloads() -> dmc.Stack:
    """What can be taken away."""
    buttons = [
        (ids.GET_PLAN, "plan"),
        (ids.GET_SCENARIO, "scenario"),
        (ids.GET_TRACE, "Perfetto trace"),
        (ids.GET_CSV, "table (CSV)"),
        (ids.GET_REPORT, "report (HTML)"),
    ]
    return dmc.Stack(
        [
            dmc.Text("download", size="sm", fw=500),
            dmc.Group(
                [
                    dmc.Button(
                        label, id=name, size="compact-xs", variant="default", **{"aria-label": f"download {label}"}
                    )
                    for name, label in buttons
                ],
                gap=6,
            ),
            dmc.Group(
                [
                    dmc.Text("on the command line", size="sm", fw=500),
                    dmc.CopyButton(
                        "copy",
                        id=ids.COPY,
                        value="",
                        copiedChildren="copied",
                        size="compact-xs",
                        variant="default",
                        **{"aria-label": "copy the commands"},
                    ),
                ],
                justify="space-between",
            ),
            dmc.Code(id=ids.COMMANDS, block=True, style={"whiteSpace": "pre-wrap", "overflowWrap": "anywhere"}),
        ],
        gap=6,
    )
