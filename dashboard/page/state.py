"""What is on screen, as a value: a scenario and the settings that knobs have put on top of it.

The address of the page holds it, so that a link reproduces the view and two browsers never share anything:

    ?scenario=demo&set=plan.stages=4&set=plan.microbatches=16          a scenario that the server offers
    ?text=eJx...&set=plan.stages=4                                     one that was uploaded or edited, compressed

A scenario that came from the browser may not name files of the server: no profile, no order and no python function.
"""

import base64
import binascii
import ctypes
import json
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any
from urllib.parse import parse_qsl, urlencode
from weakref import ref

from dashboard.jobs.tasks import SupersededError
from gpipe_sim.base.files import Document, InputError, Problem, parse_yaml, read_text, yaml_text
from gpipe_sim.explain.predict import Prediction, fastest, predict, predict_all
from gpipe_sim.make.making import make_plan
from gpipe_sim.make.planfile import is_plan
from gpipe_sim.plan.orders import SCHEDULES, position_of
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import DeadlockError, program_of, program_of_shape
from gpipe_sim.scenario.reading import parse_scenario, with_overrides
from gpipe_sim.scenario.schema import PlanSpec, Scenario, is_order_file
from gpipe_sim.search.choices import Space, space_of
from gpipe_sim.step.waves import graph_of

MAX_TEXT = 200_000
"""Characters of a scenario that comes from a browser."""
MAX_PLANS = 2000
"""Of a sweep that comes from a browser."""
MAX_CELLS = 2**20
"""Stages times micro-batches of a plan on the page: what it shows in half a minute and half a gigabyte, 256 by 4096."""
KEPT_CELLS, KEPT = 2**19, 64
"""Of all plans that are kept to be shown again, and how many those may be: about 150 MB; the last is always kept."""
LARGE_CELLS = 2**17
"""Of a plan, or of a sweep, of which only one is predicted at a time, whoever asks: it takes some hundred megabytes."""
BUDGET_S = 120.0
"""Seconds after which a prediction is given up."""
PINS = ("a", "b", "c", "d")


@dataclass(frozen=True)
class Library:
    """The scenarios that the server offers, by name."""

    files: Mapping[str, Path]

    @classmethod
    def of(cls, *folders: Path) -> "Library":
        """Every scenario file in these folders; of two with one name the later folder's."""
        return cls({path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))})

    def __hash__(self) -> int:
        return hash(tuple(self.files.items()))


@dataclass(frozen=True)
class State:
    """A scenario, by name or by its text, and ``path -> value`` settings, as YAML, in the order they were made."""

    scenario: str = ""
    text: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    pins: Mapping[str, str] = field(default_factory=dict)
    """Pinned plans, each as the query of its own state."""
    critical: bool = False
    """Whether the critical path is outlined."""
    before_naive: str = ""
    """The number of micro-batches that `naive`, which has one, took the place of."""

    def __hash__(self) -> int:
        return hash((self.scenario, self.text, tuple(self.settings.items())))

    @property
    def question(self) -> "State":
        """What is asked of the simulator: the state without what is only looked at."""
        return replace(self, pins={}, critical=False, before_naive="")

    def to_query(self, *, with_pins: bool = True) -> str:
        """The address's query, with its question mark."""
        named = [("scenario", self.scenario)] if self.scenario else [("text", _packed(self.text))]
        settings = [("set", f"{path}={value}") for path, value in self.settings.items()]
        critical = [("critical", "1")] if self.critical else []
        pins = list(self.pins.items()) if with_pins else []
        before = [("before_naive", self.before_naive)] if self.before_naive else []
        return "?" + urlencode([*named, *settings, *critical, *before, *pins])

    @classmethod
    def from_query(cls, query: str | None, default: str) -> "State":
        """The state of an address; the default scenario where it says nothing."""
        pairs = parse_qsl((query or "").lstrip("?"), keep_blank_values=True)
        last = dict(pairs)
        settings = dict(value.partition("=")[::2] for key, value in pairs if key == "set")
        pins = {pin: last[pin] for pin in PINS if pin in last}
        shown = cls(
            settings=settings,
            pins=pins,
            critical=last.get("critical") == "1",
            before_naive=last.get("before_naive", ""),
        )
        if "text" in last:
            return replace(shown, text=_unpacked(last["text"]))
        return replace(shown, scenario=last.get("scenario", default))

    def with_settings(self, **changes: str | None) -> "State":
        """With these fields set, and what was set below them gone; None takes a setting back.

        Dots in names are written as double underscores.
        """
        settings = dict(self.settings)
        for name, value in changes.items():
            path = name.replace("__", ".")
            settings = {old: kept for old, kept in settings.items() if old != path and not old.startswith(f"{path}.")}
            if value is not None:
                settings[path] = value
        return replace(self, settings=settings)

    @property
    def overrides(self) -> list[str]:
        """The settings as `--set` takes them."""
        return [f"{path}={value}" for path, value in self.settings.items()]


def _packed(text: str) -> str:
    return base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode().rstrip("=")


def _unpacked(packed: str) -> str:
    """Never more than a scenario may have, whatever it claims to hold; nothing where it holds no text."""
    try:
        data = base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4))
        return zlib.decompressobj().decompress(data, MAX_TEXT).decode()
    except (binascii.Error, zlib.error, ValueError):
        return ""


# --- from a state to plans -----------------------------------------------------------------------------------------


def document_of(state: State, library: Library) -> Document:
    """The scenario as it was written, without settings."""
    if state.text:
        return _from_browser(state.text)
    if not state.scenario:
        raise InputError([Problem("address", "text", "is not a scenario, expected a link made by this page")])
    if state.scenario not in library.files:
        raise InputError([Problem("address", "scenario", f"there is none called {state.scenario!r}")])
    path = library.files[state.scenario]
    return _parsed(read_text(path), str(path))


@lru_cache(maxsize=8)  # a text from a browser may hold some megabytes
def _parsed(text: str, file: str) -> Document:
    """Knobs leave the text as it is: it is read once, and every setting is put into a copy."""
    return parse_yaml(text, file)


def _from_browser(text: str) -> Document:
    if len(text) > MAX_TEXT:
        raise InputError([Problem("scenario.yaml", "", f"has more than {MAX_TEXT} characters")])
    document = _parsed(text, "scenario.yaml")
    data = document.data if isinstance(document.data, dict) else {}
    model = data.get("model")
    problems = []
    if is_plan(document):
        problems.append(document.problem((), "is a plan, expected a scenario; `gpipe simulate` reads plans"))
    if "profile" in data:
        problems.append(document.problem(("profile",), "files of the server are not read for an uploaded scenario"))
    if isinstance(model, dict) and model.get("kind") in ("python", "profile", "huggingface"):
        message = f"kind {model['kind']} names files of the server, which are not read for an uploaded scenario"
        problems.append(document.problem(("model", "kind"), message))
    if _order_files(data):
        message = "files of the server are not read for an uploaded scenario, expected the name of a schedule"
        problems.append(document.problem(("plan", "schedule"), message))
    if problems:
        raise InputError(problems)
    return document


def on_screen(state: State, library: Library) -> Document:
    """The scenario with the state's settings put in; none of them may name a file of the server or code."""
    document = document_of(state, library)
    if not isinstance(document.data, dict):
        parse_scenario(document)  # which says what is wrong with it
    changed = with_overrides(document, *state.overrides)
    before, after = _names_of_files(document.data), _names_of_files(changed.data)
    if before != after:
        raise InputError([Problem("address", "set", "profile and kind of a model are set in its text only")])
    if not _order_files(changed.data) <= _order_files(document.data):
        raise InputError([Problem("address", "set", "the file of an order is set in its text only")])
    return changed


def text_of(state: State, library: Library) -> str:
    """The scenario on screen as a file: as it was written or, where knobs or the form have set something, with that."""
    if state.settings:
        return yaml_text(on_screen(state, library).data)
    return state.text or read_text(Path(document_of(state, library).file))


def _names_of_files(data: Mapping[str, Any]) -> list[Any]:
    model = data.get("model")
    fields = [model.get(name) for name in ("kind", "path", "function")] if isinstance(model, dict) else [model]
    return [data.get("profile"), *fields]


def _order_files(data: Mapping[str, Any]) -> set[str]:
    """The files that the plan's schedule names, or one of several in a sweep."""
    plan = data.get("plan")
    schedule = plan.get("schedule") if isinstance(plan, dict) else None
    named = schedule if isinstance(schedule, list) else [schedule]
    return {name for name in named if isinstance(name, str) and is_order_file(name)}


def points(state: State, library: Library, *more: str) -> Sequence[Scenario]:
    """The scenario's points under the state's settings and more."""
    document = on_screen(state, library)
    found = parse_scenario(document, *more)
    if len(found) > MAX_PLANS:
        raise InputError([Problem(document.file, "", f"has {len(found)} plans, expected at most {MAX_PLANS} here")])
    _refuse_large(found)
    return found


def _refuse_large(scenarios: Iterable[Scenario]) -> None:
    """A plan that would take the page's memory, and minutes."""
    for scenario in scenarios:
        if (cells := cells_of(scenario)) > MAX_CELLS:
            message = f"found {cells} stages times micro-batches, expected at most {MAX_CELLS} here: use gpipe simulate"
            raise scenario.error("plan", message)


def cells_of(scenario: Scenario) -> int:
    """Stages times micro-batches."""
    return (scenario.plan.num_stages or 1) * (scenario.plan.num_microbatches or 1)


def current(state: State, library: Library, page: str | None = None) -> Prediction:
    """The plan on screen: the only point of the state, or the fastest of its sweep.

    It may take a while. A page that asks with its token gives up, by asking for another state, what it asked before.
    """
    answer = _answer(state.question, library)
    if page is not None:
        with _wanted_lock:
            _wanted.pop(page, None)
            _wanted[page] = ref(answer)
            while len(_wanted) > _MOST_PAGES:
                _wanted.pop(next(iter(_wanted)))
    return answer.value()


_wanted: dict[str, "ref[_Answer]"] = {}
"""Page -> what it asked for last, which is not kept for that."""
_wanted_lock = Lock()
_MOST_PAGES = 256


_kept: "OrderedDict[tuple[State, Library], _Answer]" = OrderedDict()
_kept_lock = Lock()


def _answer(state: State, library: Library) -> "_Answer":
    """What was asked last is kept, as long as there is room."""
    with _kept_lock:
        answer = _kept.setdefault((state, library), _Answer(state, library))
        _kept.move_to_end((state, library))
        cells = sum(kept.cells for kept in _kept.values())
        while len(_kept) > 1 and (len(_kept) > KEPT or cells > KEPT_CELLS):
            cells -= _kept.popitem(last=False)[1].cells
        return answer


_one_large = Lock()


@contextmanager
def alone_if_large(cells: Sequence[int]) -> Iterator[None]:
    """Around the prediction of plans with so many stages times micro-batches: one large piece of work at a time."""
    if max(cells) <= LARGE_CELLS and sum(cells) <= MAX_CELLS:
        yield
        return
    with _one_large:
        try:
            yield
        finally:
            _forget_programs()


def _forget_programs() -> None:
    """After work that was large: let go of what was kept for more of the kind, and give the system its memory back."""
    for kept in (program_of, program_of_shape, graph_of):
        kept.cache_clear()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


@dataclass(eq=False)
class _Answer:
    """A prediction, or why there is none; made by whoever asks first, while others who ask the same wait for it."""

    state: State
    library: Library
    found: Prediction | InputError | None = None
    lock: Lock = field(default_factory=Lock)

    @property
    def cells(self) -> int:
        """What it holds, in stages times micro-batches."""
        return cells_of(self.found.plan.scenario) if isinstance(self.found, Prediction) else 0

    def value(self) -> Prediction:
        with self.lock:
            if self.found is None:
                try:
                    self.found = self._make()
                except InputError as error:
                    self.found = error
                except DeadlockError as error:
                    self.found = InputError([Problem("scenario", "plan.schedule", str(error))])
        if isinstance(self.found, InputError):
            raise self.found.with_traceback(None)
        return self.found

    def _make(self) -> Prediction:
        scenarios = points(self.state, self.library)
        with alone_if_large([*map(cells_of, scenarios)]):
            return self._predict(scenarios)

    def _predict(self, scenarios: Sequence[Scenario]) -> Prediction:
        watched = _is_wanted(self)
        deadline = monotonic() + BUDGET_S

        def advance(_: float = 0) -> None:
            if watched and not _is_wanted(self):
                raise SupersededError
            if monotonic() > deadline:
                message = (
                    f"takes more than {BUDGET_S:.0f} s to predict, expected a smaller one here: use gpipe simulate"
                )
                raise InputError([Problem("plan", "plan.microbatches", message)])

        plans = []
        for scenario in scenarios:
            advance()
            plans.append(make_plan(scenario))
        return fastest(predict_all(plans, keep_steps=len(plans) == 1, advance=advance))


def _is_wanted(answer: _Answer) -> bool:
    """By any page."""
    with _wanted_lock:
        return any(wanted() is answer for wanted in _wanted.values())


def figures_of(prediction: Prediction) -> Prediction:
    """The same without its timeline, which is made again where it is asked for: to be kept with many others."""
    return replace(prediction, kept_step=None)


def is_same(one: Prediction, other: Prediction) -> bool:
    """Whether both are of one plan, in whatever order its knobs were turned."""
    scenarios = [replace(prediction.plan.scenario, swept={}) for prediction in (one, other)]
    return scenarios[0] == scenarios[1]


def settled(state: State, library: Library) -> State:
    """The state whose only point is the plan on screen: what was swept is set to the fastest's values."""
    best = current(state, library)
    swept = {path: _as_yaml(value) for path, value in best.plan.scenario.swept.items()}
    return replace(state, settings={**state.settings, **swept})


def _as_yaml(value: Any) -> str:
    if isinstance(value, str | int | float | bool):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return json.dumps(value)  # which YAML reads, on one line


def explore(
    state: State,
    library: Library,
    grid: Mapping[str, Sequence[object]],
    advance: Callable[[float], None] = lambda _: None,
) -> list[Prediction]:
    """The state with every combination of these values; those that make no plan, or a large one, are left out.

    `advance` is called for each plan that is made, and for each that is predicted.
    """
    plans = []
    for plan in _plans(settled(state, library), library, grid):
        plans.append(plan)
        advance(1)
    try:
        return list(predict_all(plans, advance=advance))
    except DeadlockError:  # of one of them: then each by itself
        return [found for plan in plans if (found := _predicted(plan)) is not None]


def _predicted(plan: Plan) -> Prediction | None:
    try:
        return predict(plan)
    except DeadlockError:
        return None


def _plans(state: State, library: Library, grid: Mapping[str, Iterable[object]]) -> Iterator[Plan]:
    document = on_screen(state, library)
    for values in product(*grid.values()):
        chosen = [f"{path}={value}" for path, value in zip(grid, values, strict=True)]
        try:
            (point,) = parse_scenario(document, *chosen)
            if cells_of(point) > LARGE_CELLS:
                continue
            plan = make_plan(point)
        except (InputError, DeadlockError):
            continue
        swept = dict(zip(grid, values, strict=True))
        yield replace(plan, scenario=replace(point, swept=swept))


def cluster_of(state: State) -> State:
    """The state without what knobs have chosen of the plan: all that a search depends on."""
    others = {path: value for path, value in state.settings.items() if not path.startswith("plan.")}
    return replace(state.question, settings=others)


def open_space(state: State, library: Library) -> Space:
    """What the search may choose for the scenario on screen: everything under ``plan:`` but how messages travel."""
    document = on_screen(cluster_of(state), library)
    kept = {key: value for key, value in (document.data.get("plan") or {}).items() if key in ("window", "backward")}
    document.data = document.data | {"plan": kept}
    return space_of(list(parse_scenario(document)))


def with_plan(state: State, plan: Plan, library: Library) -> State:
    """The state whose settings are this plan's choices."""
    others = cluster_of(state)
    same = len(set(plan.checkpoint)) == 1
    pattern = SCHEDULES[plan.schedule].pattern if plan.schedule in SCHEDULES else "looped"
    own = tuple(position_of(pattern, stage, plan.num_ranks) for stage in range(plan.num_stages))
    seldom = {
        "backward": plan.backward,
        "placement": "auto" if plan.placement == own else list(plan.placement),
        "window": plan.window or "all",
        "stages_per_rank": plan.stages_per_rank,
        "replicas": plan.replicas,
        "tensor": plan.tensor,
        "order": list(plan.dimensions),
        "shard": plan.shard,
        "recompute_unit": plan.recompute_unit,
    }
    named = {*(on_screen(others, library).data.get("plan") or {})}
    # What is as a scenario that says nothing of it would have it, need not be said.
    unsaid = {"stages_per_rank": 1, "replicas": 1, "tensor": 1, "shard": "none", "recompute_unit": "stage"}
    named |= {key for key, value in unsaid.items() if seldom[key] != value}
    named |= {"order"} if plan.mesh.messages_inside else set()
    named |= {"placement"} if plan.placement != own else set()
    usual = PlanSpec()
    named |= {f for f in ("replicas", "tensor", "shard", "recompute_unit") if getattr(plan, f) != getattr(usual, f)}
    chosen = {
        "plan.stages": plan.num_stages,
        "plan.microbatches": plan.num_microbatches,
        "plan.schedule": plan.schedule,
        "plan.recompute": plan.recompute,
        "plan.balance": list(plan.balance),
        "plan.checkpoint": plan.checkpoint[0] if same else {"per_stage": list(plan.checkpoint)},
    } | {f"plan.{key}": value for key, value in seldom.items() if key in named}
    return replace(state, settings={**others.settings} | {path: _as_yaml(value) for path, value in chosen.items()})


def command(state: State, library: Library, verb: str, *options: str) -> str:
    """What to type for what is on screen."""
    name = _relative(library.files[state.scenario]) if state.scenario in library.files else "scenario.yaml"
    settings = [f"--set {_quoted(override)}" for override in state.overrides]
    return " ".join(["gpipe", verb, _quoted(name), *settings, *options])


def _relative(path: Path) -> str:
    """As it would be typed where the server was started."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _quoted(word: str) -> str:
    return word if all(c.isalnum() or c in "._-=/+:" for c in word) else "'" + word.replace("'", "'\\''") + "'"
