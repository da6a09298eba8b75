"""Names of everything on the page that callbacks refer to."""

URL = "url"
TOKEN = "token"
SHOWN = "shown"
DRAWN = "drawn"
MAIN = "main"
SKIP = "skip"
TABS = "tabs"
THEME = "theme"
PROVIDER = "provider"
VERDICT = "verdict"
NUMBERS = "numbers"
PROBLEMS = "problems"
ASSUMPTIONS = "assumptions"

SCENARIO = "scenario"
UPLOAD = "upload"
EDITOR = "editor"
EDITED = "edited"
EDIT_APPLY = "edit-apply"
EDITOR_PROBLEMS = "editor-problems"
FORM_MODEL = "form-model"
FORM_OTHER_MODEL = "form-other-model"

STAGES = "stages"
MICROBATCHES = "microbatches"
CHECKPOINT = "checkpoint"
RECOMPUTE = "recompute"
SCHEDULE = "schedule"
BANDWIDTH = "bandwidth"
LATENCY = "latency"
OVERLAP = "overlap"
JITTER = "jitter"
BATCH = "batch"
DEVICE = "device"
KNOBS = (STAGES, MICROBATCHES, CHECKPOINT, RECOMPUTE, SCHEDULE, BANDWIDTH, LATENCY, OVERLAP, JITTER, BATCH, DEVICE)

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
SPACE_PROGRESS = "space-progress"
SPACE_TICK = "space-tick"
RECOMMEND = "recommend"
ADVICE = "advice"
SEARCH_TICK = "search-tick"

PIN_A, PIN_B, UNPIN = "pin-a", "pin-b", "unpin"
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

TOUR_STEP = "tour-step"
TOUR_KNOB = "tour-knob"
TOUR_KNOB_LABEL = "tour-knob-label"
TOUR_TEXT = "tour-text"
TOUR_CHART = "tour-chart"
TOUR_NUMBERS = "tour-numbers"

RUN_DEVICE = "run-device"
RUN_START = "run-start"
RUN_STOP = "run-stop"
RUN_PROGRESS = "run-progress"
RUN_LOG = "run-log"
RUN_NAME = "run-name"
RUN_TICK = "run-tick"
RUNS = "runs"
RUNS_REFRESH = "runs-refresh"
RUNS_UPLOAD = "runs-upload"
RUNS_MESSAGE = "runs-message"
RUN_COMPARISON = "run-comparison"
ACCURACY = "accuracy"

TICKS = (SPACE_TICK, SEARCH_TICK, RUN_TICK)
"""Clocks that tick while something is under way."""

PLAN_TAB, SPACE_TAB, PINNED_TAB, RUNS_TAB, TOUR_TAB, SCENARIO_TAB = TABS_ALL = (
    "plan",
    "space",
    "pinned",
    "runs",
    "tour",
    "scenario",
)


def query_of(tab: str) -> str:
    """The store that holds the address's query while this tab is looked at, and the last one seen there otherwise."""
    return f"query-{tab}"
