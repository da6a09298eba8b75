"""The page without its contents: header with the verdict, knobs at the side, tabs with charts."""

from collections.abc import Sequence
from typing import Any, get_args

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import dcc, html

from dashboard import ids
from dashboard.state import Library
from dashboard.style import graph_config
from dashboard.tour import tour_panel
from gpipe_sim.catalog import device_names
from gpipe_sim.scenario import Checkpoint, Recompute, ScheduleName

DEFAULT = "demo"


def page(library: Library, *, allow_run: bool) -> dmc.MantineProvider:
    """Everything there is; callbacks fill it."""
    panels = [
        ("plan", "Plan", plan_panel()),
        ("space", "Space", space_panel()),
        ("pinned", "Side by side", pinned_panel()),
        ("runs", "Runs", runs_panel(allow_run=allow_run)),
        ("tour", "Tour", tour_panel()),
        ("scenario", "Scenario", scenario_panel()),
    ]
    shell = dmc.AppShell(
        [
            dmc.AppShellHeader(header(), px="md"),
            dmc.AppShellNavbar(dmc.ScrollArea(knobs(library), type="auto"), p="md"),
            dmc.AppShellMain(
                [
                    html.Div(id=ids.PROBLEMS, role="alert"),
                    verdict(),
                    dmc.Tabs(
                        [
                            dmc.TabsList([dmc.TabsTab(label, value=value) for value, label, _ in panels]),
                            *(dmc.TabsPanel(content, value=value, pt="md") for value, _, content in panels),
                        ],
                        id=ids.TABS,
                        value="plan",
                        keepMounted=True,
                    ),
                ]
            ),
        ],
        header={"height": 56},
        navbar={"width": 280, "breakpoint": "sm", "collapsed": {"mobile": False}},
        padding="md",
    )
    return dmc.MantineProvider(
        [dcc.Location(id=ids.URL, refresh=False), dcc.Download(id=ids.DOWNLOAD), shell],
        id=ids.PROVIDER,
        defaultColorScheme="auto",
    )


def header() -> dmc.Group:
    """The name, and light or dark."""
    return dmc.Group(
        [
            dmc.Title("GPipe Planner", order=1, size="h3"),
            dmc.SegmentedControl(
                id=ids.THEME,
                data=[{"label": name.capitalize(), "value": name} for name in ("light", "dark", "auto")],
                value="auto",
                size="xs",
                **{"aria-label": "colour scheme"},
            ),
        ],
        justify="space-between",
        h="100%",
    )


def verdict() -> dmc.Paper:
    """One line first: does it fit, how long, how much idle, and what to change next."""
    return dmc.Paper(
        [
            dmc.Group(id=ids.NUMBERS, gap="xl"),
            dmc.Text(id=ids.VERDICT, size="md", mt="xs", **{"aria-live": "polite"}),
        ],
        withBorder=True,
        p="md",
        mb="md",
        radius="md",
    )


# --- knobs ---------------------------------------------------------------------------------------------------------


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
            _log_slider(ids.BANDWIDTH, "link bandwidth", 7, 12, {7: "10 MB/s", 9: "1 GB/s", 11: "100 GB/s"}),
            _log_slider(ids.LATENCY, "link latency", -7, -1, {-6: "1 us", -4: "100 us", -2: "10 ms"}),
            dmc.Select(id=ids.DEVICE, label="device", data=list(device_names()), searchable=True, clearable=True),
            dmc.Switch(id=ids.OVERLAP, label="transfers beside compute", checked=True),
            _slider(ids.JITTER, "jitter, % of each compute time", 0, 30),
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
        [dmc.Text(label, size="sm", fw=500), control, html.Div(id=f"{name}-error", className="field-error")]
    )


def _log_slider(name: str, label: str, low: int, high: int, marks: dict[int, str]) -> html.Div:
    slider = dmc.Slider(
        id=name,
        min=low,
        max=high,
        step=0.05,
        marks=[{"value": value, "label": text} for value, text in marks.items()],
        label=None,
        updatemode="mouseup",
        mb="lg",
        **{"aria-label": f"{label}, logarithmic"},
    )
    return html.Div([dmc.Text([label, ": ", html.Span(id=f"{name}-shown")], size="sm", fw=500), slider])


def _slider(name: str, label: str, low: int, high: int) -> html.Div:
    slider = dmc.Slider(
        id=name, min=low, max=high, step=1, label=None, updatemode="mouseup", **{"aria-label": label}, mb="xs"
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
                [dmc.Button(label, id=name, size="compact-xs", variant="default") for name, label in buttons], gap=6
            ),
            dmc.Text("on the command line", size="sm", fw=500),
            html.Div(
                [
                    dmc.Code(id=ids.COMMANDS, block=True, style={"whiteSpace": "pre-wrap", "overflowWrap": "anywhere"}),
                    dcc.Clipboard(target_id=ids.COMMANDS, title="copy the commands", className="copy"),
                ],
                style={"position": "relative"},
            ),
        ],
        gap=6,
    )


# --- panels --------------------------------------------------------------------------------------------------------


def _graph(name: str) -> dcc.Loading:
    graph = dcc.Graph(id=name, config=graph_config(), responsive=True, style={"minHeight": 220})
    return dcc.Loading(graph, delay_show=250, overlay_style={"visibility": "visible", "opacity": 0.5}, type="dot")


def card(title: str, caption: str, *content: Any) -> dmc.Paper:
    """A chart with its heading."""
    head = [dmc.Title(title, order=2, size="h5"), dmc.Text(caption, size="sm", c="dimmed")]
    return dmc.Paper([*head, *content], withBorder=True, p="md", radius="md")


def _pair(*cards: Any) -> dmc.SimpleGrid:
    return dmc.SimpleGrid(list(cards), cols={"base": 1, "lg": 2}, spacing="md")


def plan_panel() -> dmc.Stack:
    """The plan on screen."""
    return dmc.Stack(
        [
            card(
                "Timeline",
                "A row for each rank: forward, recomputation, backward, update; messages below; waiting in grey.",
                dmc.Switch(id=ids.CRITICAL, label="critical path", checked=False, mt="xs"),
                _graph(ids.GANTT),
            ),
            _pair(
                card("Memory over time", "Of each rank, under the device's limit.", _graph(ids.MEMORY)),
                card("Memory at the peak", "What fills each rank.", _graph(ids.MEMORY_PARTS)),
            ),
            _pair(
                card("Where the time goes", "Each bar begins where the one above it ended.", _graph(ids.WATERFALL)),
                card(
                    "Utilisation", "Share of the pipeline's time in which each rank computes.", _graph(ids.UTILIZATION)
                ),
            ),
            card("Assumptions", "What these numbers rest on.", html.Div(id=ids.ASSUMPTIONS)),
            dmc.Group(
                [
                    dmc.Button("Pin as A", id=ids.PIN_A, variant="default"),
                    dmc.Button("Pin as B", id=ids.PIN_B, variant="default"),
                ]
            ),
        ]
    )


def space_panel() -> dmc.Stack:
    """Everything around the plan on screen; a click on any point makes it the plan on screen."""
    metric = dmc.SegmentedControl(
        id=ids.METRIC,
        data=[
            {"label": "step time", "value": "step_time_s"},
            {"label": "bubble", "value": "bubble_fraction"},
            {"label": "peak memory", "value": "peak_memory_bytes"},
        ],
        value="step_time_s",
        size="xs",
        **{"aria-label": "metric of the heat map"},
    )
    return dmc.Stack(
        [
            dmc.Text("Click on any point to make it the plan on screen.", size="sm"),
            card("Stages and micro-batches", "× and grey: does not fit.", metric, _graph(ids.HEATMAP)),
            _pair(
                card("Time against memory", "Down and to the left is better; rings are the front.", _graph(ids.FRONT)),
                card("Bandwidth", "Step time against the link's; the line marks the knee.", _graph(ids.BY_BANDWIDTH)),
            ),
            _pair(
                card("Bubble", "Against M, with (K-1)/(M+K-1) beside it.", _graph(ids.BUBBLE_BY_M)),
                card("Memory", "Of the fullest rank against M, for each checkpoint mode.", _graph(ids.MEMORY_BY_M)),
            ),
            card(
                "Recommendation",
                "The search of `gpipe plan`, over everything that the scenario leaves open.",
                dmc.Button("Search", id=ids.RECOMMEND, mt="xs"),
                dcc.Loading(html.Div(id=ids.ADVICE), delay_show=250, type="dot"),
            ),
            card("Table", "Every plan of the heat map.", _table(ids.TABLE)),
        ]
    )


def _table(name: str) -> html.Div:
    grid = dag.AgGrid(
        id=name,
        columnDefs=[],
        rowData=[],
        columnSize="responsiveSizeToFit",
        defaultColDef={"sortable": True, "resizable": True, "minWidth": 90},
        dashGridOptions={"rowSelection": {"mode": "singleRow", "enableClickSelection": True, "checkboxes": False}},
        style={"height": 360},
    )
    return html.Div(grid, className="themed-grid")


def pinned_panel() -> dmc.Stack:
    """Two plans on one axis."""
    return dmc.Stack([dmc.Button("Unpin both", id=ids.UNPIN, variant="default", w=140), html.Div(id=ids.PINNED)])


def scenario_panel() -> dmc.Stack:
    """The scenario's own text, to edit or to replace."""
    return dmc.Stack(
        [
            dmc.Text(
                "Edit the scenario and apply it, or drop a file here. Lists are sweeps; units are written out.",
                size="sm",
            ),
            dcc.Upload(
                dmc.Paper("Drop a scenario file, or click to choose one", withBorder=True, p="md", ta="center"),
                id=ids.UPLOAD,
                max_size=200_000,
                accept=".yaml,.yml",
            ),
            html.Div(id=ids.EDITOR_PROBLEMS, role="alert"),
            dcc.Store(id=ids.EDITED),
            dmc.Textarea(
                id=ids.EDITOR,
                autosize=True,
                minRows=16,
                maxRows=40,
                styles={"input": {"fontFamily": "monospace", "fontSize": 13}},
                **{"aria-label": "scenario as YAML"},
            ),
            dmc.Group([dmc.Button("Apply", id=ids.EDIT_APPLY)]),
        ]
    )


def runs_panel(*, allow_run: bool) -> dmc.Stack:
    """Run the plan on screen, and compare every run with its prediction."""
    start = dmc.Group(
        [
            dmc.Select(id=ids.RUN_DEVICE, label="device", data=["rehearse", "cpu", "cuda"], value="rehearse", w=140),
            dmc.Button("Run the plan on screen", id=ids.RUN_START, disabled=not allow_run),
            dmc.Button("Stop", id=ids.RUN_STOP, variant="default", disabled=True),
        ],
        align="end",
    )
    about = "Executes on this machine." if allow_run else "Start the server with --allow-run to execute plans here."
    return dmc.Stack(
        [
            card(
                "Run",
                about,
                start,
                dmc.Progress(id=ids.RUN_PROGRESS, value=0, mt="sm", **{"aria-label": "progress of the run"}),
                dmc.Code("", id=ids.RUN_LOG, block=True, mt="sm", style={"whiteSpace": "pre-wrap", "maxHeight": 220}),
                dcc.Store(id=ids.RUN_NAME),
                dcc.Interval(id=ids.RUN_TICK, interval=500, disabled=True),
            ),
            card(
                "All runs",
                "Predicted and measured; choose one to compare.",
                dmc.Group(
                    [
                        dmc.Button("Refresh", id=ids.RUNS_REFRESH, variant="default", size="compact-sm"),
                        dcc.Upload(
                            dmc.Button("Add a run directory (zip)", variant="default", size="compact-sm"),
                            id=ids.RUNS_UPLOAD,
                            accept=".zip",
                            max_size=16 * 2**20,
                        ),
                    ],
                    mt="xs",
                ),
                html.Div(id=ids.RUNS_MESSAGE, role="status"),
                _table(ids.RUNS),
                html.Div(id=ids.ACCURACY),
            ),
            dcc.Loading(html.Div(id=ids.RUN_COMPARISON), delay_show=250, type="dot"),
        ]
    )
