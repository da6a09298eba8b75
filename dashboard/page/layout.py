"""The page without its contents: header with the verdict, knobs at the side, tabs with charts."""

import secrets
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from dashboard.page import ids
from dashboard.page.cards import PLAN_COLUMNS, RUN_COLUMNS, card, graph, pair, table
from dashboard.page.first_screen import first_screen
from dashboard.page.form import form_panel
from dashboard.page.gallery import gallery_panel
from dashboard.page.knob_panel import knobs
from dashboard.page.state import Library
from dashboard.page.tour import tour_panel
from dashboard.page.weeks import weeks_panel

DEFAULT = "demo"

_TICK_MS = 200
"""How often a page asks how far its work is."""


def page(library: Library, *, allow_run: bool, running: str | None = None) -> dmc.MantineProvider:
    """Everything there is, with a token of its own for each page; callbacks fill it. `running` is a run under way."""
    panels = tab_panels(allow_run=allow_run)
    shell = dmc.AppShell(
        [
            dmc.AppShellHeader(header(), px="md"),
            dmc.AppShellNavbar(
                dmc.ScrollArea(knobs(library), type="auto", **{"aria-label": "knobs"}),
                p="md",
                **{"aria-label": "knobs"},
            ),
            dmc.AppShellMain(
                html.Div(
                    [
                        html.Div(id=ids.PROBLEMS, role="alert"),
                        first_screen(),
                        dmc.Tabs(
                            [
                                dmc.TabsList([dmc.TabsTab(label, value=value) for value, label, _ in panels]),
                                *(dmc.TabsPanel(content, value=value, pt="md") for value, _, content in panels),
                            ],
                            id=ids.TABS,
                            value=ids.PLAN_TAB,
                            keepMounted=True,  # Dash shows a panel that is made anew as it was at first
                        ),
                    ],
                    id=ids.MAIN,
                    tabIndex=-1,
                )
            ),
        ],
        header={"height": 56},
        navbar={"width": 280, "breakpoint": "sm", "collapsed": {"mobile": True}},
        padding="md",
        id=ids.SHELL,
    )
    stores = [dcc.Store(id=ids.TOKEN, data=secrets.token_urlsafe(16)), dcc.Store(id=ids.SHOWN)]
    stores += [dcc.Store(id=name) for name in (*map(ids.query_of, ids.QUERY_TABS), *ids.STORES)]
    stores += [dcc.Store(id=ids.RUN_NAME, data=running), dcc.Store(id=ids.RUN_OPENED)]
    ticks = [dcc.Interval(id=name, interval=_TICK_MS, max_intervals=0) for name in ids.TICKS]
    skip = html.Button("Skip to the plan", id=ids.SKIP, className="skip")
    return dmc.MantineProvider(
        [
            skip,
            dcc.Location(id=ids.URL, refresh=False),
            dcc.Download(id=ids.DOWNLOAD),
            html.Div(id=ids.RANGES, hidden=True),
            *stores,
            *ticks,
            shell,
        ],
        id=ids.PROVIDER,
        theme={"primaryShade": 8},  # on which white letters have a contrast of 5 : 1
        defaultColorScheme="auto",
    )


def tab_panels(*, allow_run: bool) -> list[tuple[str, str, Any]]:
    """Every tab: the name under which the address knows it, its label, and what is on it."""
    return [
        (ids.PLAN_TAB, "Plan", plan_panel()),
        (ids.SPACE_TAB, "Space", space_panel()),
        (ids.PINNED_TAB, "Side by side", pinned_panel()),
        (ids.WEEKS_TAB, "Weeks", weeks_panel()),
        (ids.RUNS_TAB, "Runs", runs_panel(allow_run=allow_run)),
        (ids.TOUR_TAB, "Tour", tour_panel()),
        (ids.GALLERY_TAB, "Gallery", gallery_panel()),
        (ids.SCENARIO_TAB, "Scenario", scenario_panel()),
    ]


def header() -> dmc.Group:
    """The name, light or dark and, where the page is narrow, a button that shows and hides the knobs."""
    menu = dmc.Burger(id=ids.MENU, opened=False, hiddenFrom="sm", size="sm", **{"aria-label": "show or hide the knobs"})
    return dmc.Group(
        [
            dmc.Group([menu, dmc.Title("GPipe Planner", order=1, size="h3")], gap="xs"),
            dmc.SegmentedControl(
                id=ids.THEME,
                data=[{"label": name.capitalize(), "value": name} for name in ("light", "dark", "auto")],
                value="auto",
                size="xs",
                persistence=True,
                persistence_type="local",
                **{"aria-label": "colour scheme"},
            ),
        ],
        justify="space-between",
        h="100%",
        wrap="nowrap",
    )


# --- panels --------------------------------------------------------------------------------------------------------


def plan_panel() -> dmc.Stack:
    """The plan on screen."""
    return dmc.Stack(
        [
            card(
                "Timeline",
                "What each rank does, what it waits for, and below that its memory against its limit. "
                "Wheel: zoom; drag: move; keys W A S D.",
                dmc.Switch(id=ids.CRITICAL, label="critical path", checked=False, mt="xs"),
                html.Div(id=ids.GANTT, className="timeline"),
            ),
            pair(
                card(
                    "Memory over time", "Of each rank, under the device's limit.", graph(ids.MEMORY, "memory by time")
                ),
                card("Memory at the peak", "What fills each rank.", graph(ids.MEMORY_PARTS, "memory by part")),
            ),
            pair(
                card(
                    "Where the time goes",
                    "Each bar begins where the one above it ended.",
                    graph(ids.WATERFALL, "step time by cause"),
                ),
                card(
                    "Utilisation",
                    "Share of the pipeline's time in which each rank computes.",
                    graph(ids.UTILIZATION, "busy share of each rank"),
                ),
            ),
            card("Assumptions", "What these numbers rest on.", html.Div(id=ids.ASSUMPTIONS)),
        ]
    )


_BRUSHED = {
    "isExternalFilterPresent": {"function": "someKept()"},
    "doesExternalFilterPass": {"function": "isKept(params.data)"},
}
"""Only the plans that `brush.js` keeps."""


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
    about = "Click on any point to make it the plan on screen; with the keyboard, choose a row of the table."
    return dmc.Stack(
        [
            dmc.Text(about, size="sm"),
            html.Div(id=ids.SPACE_PROGRESS, role="status"),
            card(
                "Ranks and micro-batches",
                "For each checkpoint mode. × and grey: does not fit. Frame: the plan on screen; star: the best. "
                "Drag over some, here or below, to keep only those.",
                metric,
                graph(ids.HEATMAP, "map of K and M", 560),
            ),
            pair(
                card(
                    "Time against memory",
                    "Down and to the left is better; rings are the front. A double click shows what is far off.",
                    graph(ids.FRONT, "front of time against memory"),
                ),
                card(
                    "Bandwidth",
                    "Step time against the link's; the line marks the knee.",
                    graph(ids.BY_BANDWIDTH, "step time by bandwidth"),
                ),
            ),
            pair(
                card("Bubble", "Against M, with (K-1)/(M+K-1) beside it.", graph(ids.BUBBLE_BY_M, "bubble by M")),
                card(
                    "Memory",
                    "Of the fullest rank against M, for each checkpoint mode.",
                    graph(ids.MEMORY_BY_M, "memory by M"),
                ),
            ),
            card(
                "Table",
                "Every plan of the heat map.",
                html.Div(id=ids.BRUSHED, role="status"),
                table(
                    ids.TABLE,
                    "plans to choose from",
                    PLAN_COLUMNS,
                    dashGridOptions=_BRUSHED,
                ),
            ),
        ]
    )


def pinned_panel() -> dmc.Stack:
    """The pinned plans on one axis."""
    return dmc.Stack([html.Div(id=ids.PINNED)])


def scenario_panel() -> dmc.Stack:
    """The scenario, field by field and as its own text, to edit or to replace."""
    text = dmc.Stack(
        [
            html.Div(id=ids.EDITOR_PROBLEMS, role="alert"),
            dmc.Textarea(
                id=ids.EDITOR,
                label="The same as text",
                description="Lists are sweeps; units are written out.",
                autosize=True,
                minRows=16,
                maxRows=40,
                styles={"input": {"fontFamily": "monospace", "fontSize": 13}},
            ),
            dmc.Group(
                [
                    dmc.Button("Apply the text", id=ids.EDIT_APPLY),
                    upload(ids.UPLOAD, "Upload a scenario", accept=".yaml,.yml", max_size=200_000),
                ]
            ),
        ]
    )
    return dmc.SimpleGrid([form_panel(), text], cols={"base": 1, "lg": 2}, spacing="md")


def upload(name: str, label: str, **options: Any) -> dcc.Upload:
    """A button that asks for a file, which may also be dropped on it."""
    return dcc.Upload(dmc.Button(label, id=f"{name}-button", variant="default"), id=name, **options)


def runs_panel(*, allow_run: bool) -> dmc.Stack:
    """Run the plan on screen, and compare every run with its prediction."""
    start = dmc.Group(
        [
            dmc.Select(id=ids.RUN_DEVICE, label="run on", data=["rehearse", "cpu", "cuda"], value="rehearse", w=140),
            dmc.Switch(id=ids.RUN_PROFILE, label="time the layers too", checked=True, mb=8),
            dmc.Button("Run the plan on screen", id=ids.RUN_START, disabled=not allow_run),
            dmc.Button("Stop", id=ids.RUN_STOP, variant="default", disabled=True),
        ],
        align="end",
    )
    about = (
        "Executes on this machine. A rehearsal takes each layer's time without its arithmetic; on a device that "
        "computes, layers are timed in turns with the steps, so that the prediction is for the machine as it is now."
    )
    about = about if allow_run else "Start the server with --allow-run to execute plans here."
    return dmc.Stack(
        [
            card(
                "Run",
                about,
                start,
                html.Div(dmc.Text("", id=ids.RUN_PHASE, size="sm", mt="sm"), role="status"),
                dmc.Progress(id=ids.RUN_PROGRESS, value=0, mt=4, **{"aria-label": "progress of the run"}),
                dmc.Code("", id=ids.RUN_LOG, block=True, mt="sm", style={"whiteSpace": "pre-wrap", "maxHeight": 220}),
            ),
            card(
                "All runs",
                "Predicted and measured; choose one to compare.",
                dmc.Group(
                    [
                        dmc.Button("Refresh", id=ids.RUNS_REFRESH, variant="default"),
                        upload(ids.RUNS_UPLOAD, "Add a run directory (zip)", accept=".zip", max_size=16 * 2**20),
                    ],
                    mt="xs",
                ),
                html.Div(id=ids.RUNS_MESSAGE, role="status"),
                table(ids.RUNS, "runs to compare", RUN_COLUMNS),
                html.Div(id=ids.ACCURACY),
            ),
            html.Div(id=ids.RUN_COMPARISON),
        ]
    )
