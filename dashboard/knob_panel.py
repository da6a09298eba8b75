"""The side of the page: knobs, downloads, and the commands for what is on screen."""

from collections.abc import Sequence
from typing import get_args

import dash_mantine_components as dmc
from dash import html

from dashboard import ids
from dashboard.state import Library
from gpipe_sim.catalog import device_names
from gpipe_sim.scenario import Checkpoint, Recompute, ScheduleName


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
            _number(ids.STAGES, "stages K", 1),
            _number(ids.MICROBATCHES, "micro-batches M", 1),
            _number(ids.BATCH, "batch N", 1),
            _choice(ids.SCHEDULE, "schedule", get_args(ScheduleName)),
            _choice(ids.CHECKPOINT, "checkpoint", get_args(Checkpoint)),
            _choice(ids.RECOMPUTE, "recompute", get_args(Recompute)),
            _slider(ids.BANDWIDTH, "link bandwidth", 7, 12, 0.05, {8: "100 MB/s", 10: "10 GB/s"}),
            _slider(ids.LATENCY, "link latency", -7, -1, 0.05, {-6: "1 us", -4: "100 us", -2: "10 ms"}),
            dmc.Select(id=ids.DEVICE, label="device", data=list(device_names()), searchable=True, clearable=True),
            dmc.Switch(id=ids.OVERLAP, label="transfers beside compute", checked=True),
            _slider(ids.JITTER, "jitter, % of each compute time", 0, 30, 1, {}),
            downloads(),
        ],
        gap="sm",
        pr="md",
    )


def _number(name: str, label: str, least: int) -> dmc.NumberInput:
    return dmc.NumberInput(
        id=name, label=label, min=least, allowDecimal=False, clampBehavior="none", debounce=250, error=None
    )


def _choice(name: str, label: str, values: Sequence[str]) -> html.Div:
    control = dmc.SegmentedControl(id=name, data=list(values), size="xs", fullWidth=True, **{"aria-label": label})
    return html.Div(
        [
            dmc.Text(label, size="sm", fw=500),
            control,
            html.Div(id=f"{name}-error", className="field-error", role="alert"),
        ]
    )


def _slider(name: str, label: str, low: int, high: int, step: float, marks: dict[int, str]) -> html.Div:
    """With marks it is logarithmic: its value is the power of ten."""
    slider = dmc.Slider(
        id=name,
        min=low,
        max=high,
        step=step,
        marks=[{"value": value, "label": text} for value, text in marks.items()],
        label=None,
        updatemode="mouseup",
        mb="lg" if marks else "xs",
        thumbLabel=f"{label}, logarithmic" if marks else label,
    )
    return html.Div([dmc.Text([label, ": ", html.Span(id=f"{name}-shown")], size="sm", fw=500), slider])


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
