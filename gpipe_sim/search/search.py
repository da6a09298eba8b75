"""Search: which plan is fastest and fits, over K, M, schedule, ranks, the stages' modes and the cut, jointly.

One question asks for the fastest plan there is, one for the fastest within the devices' memory, unless it is the same.
The front of time against memory is found by asking again with less and less memory.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from gpipe_sim.make.automatic_order import with_automatic_order
from gpipe_sim.scenario.mesh import SUMS_INSIDE
from gpipe_sim.scenario.schema import AUTO
from gpipe_sim.search.beyond import look_beyond
from gpipe_sim.search.choices import Space
from gpipe_sim.search.joint import JointSearch, frame_of
from gpipe_sim.search.judge import Candidate, key_of
from gpipe_sim.search.nearest import come_near, look_within
from gpipe_sim.search.question import FRONT_SHARE, Question
from gpipe_sim.search.searcher import Searcher
from gpipe_sim.search.setups import Setup

_LESS_MEMORY, _HARDLY_LESS = 0.7, 0.95
"""Each question for the front allows this share of the memory that the last answer took; where that is too little, a
larger one, up to this."""


_ORDERED = 3
"""For so many of the best setups an order is made where `auto` is asked for: a second or so each."""


@dataclass(frozen=True, eq=False)
class Findings:
    """What a search has found."""

    candidates: list[Candidate]
    """Every plan that was evaluated, fastest first."""
    is_exact: bool
    """Whether it is proven that no plan that fits is faster than the fastest found, or that none fits."""


def search(space: Space, advance: Callable[[], None] = lambda: None) -> list[Candidate]:
    """Every plan that was evaluated on the way to the front, fastest first; `advance` is called for each question."""
    return explore(space, advance).candidates


def explore(space: Space, advance: Callable[[], None] = lambda: None) -> Findings:
    """Search the space, and say how sure the answer is."""
    if space.is_joint:
        joint = JointSearch(space)
        found = joint.run()
        advance()
        best_s = min((candidate.step_time_s for candidate in found if candidate.fits), default=np.inf)
        alone = _one_pipeline(space)
        if alone is not None and joint.least_s(max(alone.stages)) < best_s:
            found += _explore(alone, advance, best_s).candidates
        different = {(frame_of(one.plan), key_of(one.plan)): one for one in found}
        return Findings(sorted(different.values(), key=_by_time), is_exact=False)
    parts = [_explore(framed, advance) for framed in space.framed()]
    ordered = sorted((candidate for part in parts for candidate in part.candidates), key=_by_time)
    return Findings(ordered, is_exact=all(part.is_exact for part in parts))


def _by_time(candidate: Candidate) -> tuple[float, int]:
    return candidate.step_time_s, candidate.peak_bytes


def _one_pipeline(space: Space) -> Space | None:
    """What a joint space has without replicas and tensor groups, of which much more is known; if it has any of it."""
    alone = (
        1 in (space.replicas_open or (1,)) and 1 in (space.tensors or (1,)) and "stage" in (space.units or ("stage",))
    )
    if not alone or not space.are_ranks or space.objective != "time":
        return None
    plan = space.scenario.plan.model_copy(update={"tensor": 1, "recompute_unit": "stage"})
    swept = [point for point in space.swept if point.plan.tensor == 1 and point.plan.recompute_unit == "stage"]
    alike = replace(space, scenario=replace(space.scenario, plan=plan), swept=tuple(swept))
    return next(replace(alike, is_joint=False, frames=((1, "none", SUMS_INSIDE),)).framed(), None)


def _explore(space: Space, advance: Callable[[], None], known_s: float = np.inf) -> Findings:
    """The same for one number of replicas. Plans that fit are looked for that are faster than one that is known from
    elsewhere, if there is one."""
    searcher = Searcher(space, known_s)
    if not searcher.subspaces and not space.beyond:
        return Findings([], is_exact=True)
    limit = space.scenario.cluster.memory_limit

    def ask(most: float, share: int = 1) -> Question:
        question = Question(searcher, most, share)
        question.answer(limit if most == np.inf else np.inf)
        advance()
        return question

    question = ask(np.inf)
    if question.best is None or question.best.peak_bytes > limit:
        question = ask(limit)
    is_exact = question.is_exact
    if space.beyond:
        is_exact &= look_beyond(searcher, limit)
        advance()
    if space.automatic:
        _make_orders(searcher, limit)
        is_exact = False
        advance()
    found = _fastest(searcher, limit)
    if found is None and known_s == np.inf:
        is_exact |= come_near(searcher, limit) and not space.beyond  # whose memory has no bound here
        fitting = [candidate for candidate in searcher.judge.found.values() if candidate.fits]
        found = min(fitting, key=lambda candidate: candidate.step_time_s, default=None)
        is_exact &= found is None
        advance()
    less = _LESS_MEMORY
    while found is not None and found.peak_bytes > 0 and less < _HARDLY_LESS:  # layers without bytes take nothing
        smaller = ask(found.peak_bytes * less, FRONT_SHARE).best
        found, less = (found, float(np.sqrt(less))) if smaller is None else (smaller, less)
    return Findings(sorted(searcher.judge.found.values(), key=_by_time), is_exact)


def _make_orders(searcher: Searcher, limit: float) -> None:
    """Orders of their own for the best plans that fit."""
    within = [candidate for candidate in searcher.judge.found.values() if candidate.peak_bytes <= limit]
    for candidate in best_of_each(within)[:_ORDERED]:
        searcher.judge.judge([with_automatic_order(replace(candidate.plan, schedule=AUTO, order=None))])


def _fastest(searcher: Searcher, limit: float) -> Candidate | None:
    within = [candidate for candidate in searcher.judge.found.values() if candidate.peak_bytes <= limit]
    return min(within, key=lambda candidate: candidate.step_time_s, default=None)


def something_fits(space: Space) -> bool:
    """Whether a plan of the space is found that stays within the devices' memory."""
    if space.is_joint:
        return any(candidate.fits for candidate in JointSearch(space).run())
    return any(_something_fits(framed) for framed in space.framed())


def _something_fits(space: Space) -> bool:
    searcher = Searcher(space)
    limit = space.scenario.cluster.memory_limit
    if Question(searcher, limit, FRONT_SHARE).answer() is not None:
        return True
    look_within(searcher, limit)
    return any(candidate.fits for candidate in searcher.judge.found.values())


def best_of_each(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The fastest of the setups that differ in more than how messages travel, fastest first."""
    best: dict[tuple[Setup, object], Candidate] = {}
    for candidate in sorted(candidates, key=_by_time):
        plan = candidate.plan
        alike = Setup.of(plan)._replace(window=None, backward="fifo")
        best.setdefault((alike, frame_of(plan)), candidate)
    return list(best.values())


def front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those for which no other is both faster and smaller, fastest first."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=_by_time):
        if not found or candidate.peak_bytes < found[-1].peak_bytes:
            found.append(candidate)
    return found
