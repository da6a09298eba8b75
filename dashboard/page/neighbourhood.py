"""What lies around the plan on screen: plans of every K, M and checkpoint mode, and links of every bandwidth."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from threading import Lock
from typing import Any

from dashboard.charts.many_plans import mode_of
from dashboard.jobs.tasks import Task
from dashboard.page import knobs
from dashboard.page.cards import PLAN_COLUMNS
from dashboard.page.state import LARGE_CELLS, Library, State, alone_if_large, cells_of, current, explore, figures_of
from gpipe_sim.explain.predict import Prediction
from gpipe_sim.plan.plan import Plan

BANDWIDTHS = [10 ** (8 + 0.2 * n) for n in range(21)]
"""100 MB/s to 1 TB/s."""


@dataclass(frozen=True)
class Around:
    """The plan on screen and its surroundings."""

    here: Prediction
    plans: list[Prediction]
    """Over K, M and checkpoint mode."""
    links: list[Prediction]
    """The plan on screen over `BANDWIDTHS`; empty where it has none, or is large."""
    here_is_large: bool
    """So that others as large as the plan on screen, and it over other links, are left out."""

    @property
    def like_here(self) -> list[Prediction]:
        """What differs from the plan on screen in K and M only."""
        return [one for one in self.plans if set(one.plan.checkpoint) == {mode_of(self.here)}]


def around(state: State, library: Library, task: Task | None = None) -> Around:
    """Predict all of it, or recall it; the task is told how far it is, and may end it."""
    key = (state.question, library)
    with _lock:
        if key in _known:
            _known.move_to_end(key)
            return _known[key]
    task = task or Task(key)
    here = figures_of(current(state, library))
    grid = _grid(here)
    jitter = here.plan.scenario.cluster.jitter
    num_plans = math.prod(map(len, grid.values())) + len(BANDWIDTHS)
    task.total = num_plans * (1 + (jitter.samples if jitter else 1))
    network = here.plan.scenario.cluster.network is not None
    name = "cluster.network.bandwidth" if network else "cluster.link.bandwidth"
    cells = [int(str(S)) * int(str(M)) for S, M, _ in product(*grid.values())]
    with alone_if_large([min(LARGE_CELLS, number) for number in cells]):
        plans = explore(state.with_settings(plan__balance=None, plan__placement=None), library, grid, task.advance)
        links = explore(state, library, {name: [knobs.link_text(value) for value in BANDWIDTHS]}, task.advance)
    if here_is_large := cells_of(here.plan.scenario) > LARGE_CELLS:
        plans.append(here)
    found = Around(here, plans, links if len(links) == len(BANDWIDTHS) else [], here_is_large)
    with _lock:
        _known[key] = found
        while len(_known) > 16:
            _known.popitem(last=False)
    return found


_known: OrderedDict[tuple[State, Library], Around] = OrderedDict()
_lock = Lock()


def _grid(here: Prediction) -> dict[str, Sequence[object]]:
    plan, cluster, v = here.plan, here.plan.scenario.cluster, here.plan.stages_per_rank
    Ms = [1] if plan.schedule == "naive" else _powers(min(plan.scenario.batch, 512), plan.num_microbatches)
    Ks = _powers(min(cluster.num_devices or 16, plan.profile.num_layers // v), plan.num_ranks)
    if plan.order is not None:  # each takes a while to make, or there is no other
        Ks = [plan.num_ranks]
        Ms = [M for M in Ms if plan.num_microbatches // 2 <= M <= 2 * plan.num_microbatches]
    return {
        "plan.stages": [K * v for K in Ks],
        "plan.microbatches": Ms,
        "plan.checkpoint": ["never", "except_last", "always"],
    }


def _powers(most: int, also: int) -> list[int]:
    return sorted({*(2**n for n in range(most.bit_length()) if 2**n <= most), also})


def with_choice(state: State, plan: Plan, K: object, M: object, mode: str | None = None) -> State:
    """The state with another K and M than the plan on screen has, and checkpoint mode if one is given."""
    stages = int(str(K)) * plan.stages_per_rank
    changes: dict[str, str | None] = {"plan__stages": str(stages), "plan__microbatches": str(M)}
    changes |= {"plan__balance": None, "plan__placement": None}
    if mode is not None:
        changes["plan__checkpoint"] = mode
    return state.with_settings(**changes)


def table_row(prediction: Prediction) -> dict[str, Any]:
    """One plan of the table."""
    plan = prediction.plan
    values = (
        plan.num_ranks,
        plan.num_microbatches,
        plan.checkpoint[0],
        round(1e3 * prediction.step_time_s, 3),
        round(prediction.throughput_samples_s, 3),
        round(100 * prediction.bubble_fraction, 2),
        round(100 * prediction.bubble_ideal, 2),
        round(max(prediction.peak_memory_bytes) / 2**30, 3),
        "yes" if prediction.fits else "no",
    )
    return dict(zip(PLAN_COLUMNS, values, strict=True))
