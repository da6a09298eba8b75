"""Names of everything on the page that callbacks refer to."""

URL = "url"
TOKEN = "token"
SHOWN = "shown"
DRAWN, OTHERS = "drawn", "others"
MAIN = "main"
SHELL = "shell"
MENU = "menu"
SKIP = "skip"
TABS = "tabs"
THEME = "theme"
PROVIDER = "provider"
VERDICT = "verdict"
NUMBERS = "numbers"
PROBLEMS = "problems"
ABOUT = "about"
MOVES = "moves"
MOVES_TICK = "moves-tick"
HISTORY = "history"
WRONG = "wrong"
FORM_SHOWN = "form-shown"
PINS_SHOWN = "pins-shown"
SEARCHED = "searched"
UNDO = "undo"
ASSUMPTIONS = "assumptions"

SCENARIO = "scenario"
UPLOAD = "upload"
EDITOR = "editor"
EDITED = "edited"
EDIT_APPLY = "edit-apply"
EDITOR_PROBLEMS = "editor-problems"
FORM_MODEL = "form-model"
FORM_OTHER_MODEL = "form-other-model"

RANKS = "ranks"
STAGES_PER_RANK = "stages-per-rank"
MICROBATCHES = "microbatches"
CHECKPOINT = "checkpoint"
RECOMPUTE = "recompute"
SCHEDULE = "schedule"
REPLICAS = "replicas"
SHARD = "shard"
TENSOR = "tensor"
BANDWIDTH = "bandwidth"
LATENCY = "latency"
OVERLAP = "overlap"
JITTER = "jitter"
BATCH = "batch"
DEVICE = "device"
KNOBS = (
    RANKS,
    STAGES_PER_RANK,
    MICROBATCHES,
    CHECKPOINT,
    RECOMPUTE,
    SCHEDULE,
    REPLICAS,
    SHARD,
    TENSOR,
    BANDWIDTH,
    LATENCY,
    OVERLAP,
    JITTER,
    BATCH,
    DEVICE,
)

DRAGGED = "dragged"
PREVIEW = "preview"
RANGES, RANGES_TICK = "ranges", "ranges-tick"

CRITICAL = "critical"
GANTT = "gantt"
MEMORY = "memory"
MEMORY_PARTS = "memory-parts"
WATERFALL = "waterfall"
UTILIZATION = "utilization"

METRIC = "metric"
HEATMAP = "heatmap"
FRONT = "front"
BY_BANDWIDTH = "by-bandwidth"
BUBBLE_BY_M = "bubble-by-m"
MEMORY_BY_M = "memory-by-m"
TABLE = "table"
BRUSHED = "brushed"
SPACE_PROGRESS = "space-progress"
SPACE_TICK = "space-tick"
RECOMMEND = "recommend"
ADVICE = "advice"
SEARCH_TICK = "search-tick"

PIN = "pin"
TRAY = "tray"
PINNED = "pinned"

DOWNLOAD = "download"
GET_PLAN, GET_SCENARIO, GET_TRACE, GET_CSV, GET_REPORT = (
    "get-plan",
    "get-scenario",
    "get-trace",
    "get-csv",
    "get-report",
)
COMMANDS = "commands"
COPY = "copy"

GALLERY_CARDS = "gallery-cards"
GALLERY = "gallery"
"""Of each button that opens a scenario, beside the scenario's name."""

TOUR_STEP = "tour-step"
TOUR_KNOB = "tour-knob"
TOUR_KNOB_LABEL = "tour-knob-label"
TOUR_TEXT = "tour-text"
TOUR_CHART = "tour-chart"
TOUR_NUMBERS = "tour-numbers"
TOUR_BEFORE = "tour-before"
TOUR_BACK, TOUR_NEXT = "tour-back", "tour-next"

RUN_DEVICE = "run-device"
RUN_START = "run-start"
RUN_STOP = "run-stop"
RUN_PROGRESS = "run-progress"
RUN_LOG = "run-log"
RUN_NAME = "run-name"
RUN_OPENED = "run-opened"
RUN_PROFILE = "run-profile"
RUN_PHASE = "run-phase"
RUN_TICK = "run-tick"
RUNS = "runs"
RUNS_REFRESH = "runs-refresh"
RUNS_UPLOAD = "runs-upload"
RUNS_MESSAGE = "runs-message"
RUN_COMPARISON = "run-comparison"
ACCURACY = "accuracy"

WEEKS_TICK, WEEKS_TOKENS, WEEKS_TOLD = "weeks-tick", "weeks-tokens", "weeks-told"
WEEKS_WORTHS = "weeks-worths"
WEEKS_LOSSES, WEEKS_INTERVALS, WEEKS_DAYS = "weeks-losses", "weeks-intervals", "weeks-days"

TICKS = (SPACE_TICK, SEARCH_TICK, RUN_TICK, MOVES_TICK, WEEKS_TICK, RANGES_TICK)
"""Clocks of work that takes long: each ticks once for every answer that says that there is more to wait for."""

PLAN_TAB, SPACE_TAB, PINNED_TAB, RUNS_TAB = "plan", "space", "pinned", "runs"
WEEKS_TAB, TOUR_TAB, GALLERY_TAB, SCENARIO_TAB = "weeks", "tour", "gallery", "scenario"
STORES = (DRAWN, OTHERS, EDITED, HISTORY, DRAGGED, PREVIEW, WRONG, FORM_SHOWN, PINS_SHOWN, SEARCHED)
"""What the page remembers, empty at first."""

QUERY_TABS = (SPACE_TAB, PINNED_TAB, WEEKS_TAB, SCENARIO_TAB)
"""Those that follow the address, each only while it is looked at."""


def query_of(tab: str) -> str:
    """The store that holds the address's query while this tab is looked at, and the last one seen there otherwise."""
    return f"query-{tab}"


def spark_of(knob: str) -> str:
    """The curve beneath a knob: what a step takes over its range."""
    return f"spark-{knob}"
