"""The plan to train with: not the fastest step, but the fewest days or the least money for so many tokens.

A training of weeks loses time to failures and checkpoints (`campaign`), the more the more devices there are, and every
device is paid for: a plan with a slower step can win. It has fewer devices then, so these are looked at, too, with one
stage on each. No training takes less than its steps: plans are tried in the order of what their steps alone would take,
until that is more than the best training found.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from gpipe_sim.base.files import InputError
from gpipe_sim.base.units import format_tokens
from gpipe_sim.campaign.campaign import DAY, Brief, brief_campaign, length_of
from gpipe_sim.plan.plan import Plan
from gpipe_sim.search.advise import Advice, Rival, describe, thinned
from gpipe_sim.search.choices import Space
from gpipe_sim.search.judge import Candidate
from gpipe_sim.search.question import FRONT_SHARE, Question
from gpipe_sim.search.search import best_of_each, explore, front
from gpipe_sim.search.searcher import Searcher

Aim = Literal["days", "money"]
_MOST = 64
"""Trainings that are tried at most, each of some 100 seeds."""
_SMALLER = 6
"""Smaller numbers of stages that are searched at most."""
_RIVALS = 7


def choose_for_training(
    space: Space, advice: Advice, objective: Aim, tokens: float | None, advance: Callable[[], None] = lambda: None
) -> tuple[Advice, Brief]:
    """The advice by another objective, of the plans that were evaluated; and the training of its plan."""
    plan = next(candidate.plan for candidate in advice.candidates if candidate.fits)
    if objective == "money" and plan.scenario.cluster.device_price is None:
        raise plan.scenario.error("cluster.price", "is missing, expected the price of a device hour such as 2.50 USD/h")
    total, _ = length_of(plan, tokens)
    candidates = list(advice.candidates)
    for fewer in _with_fewer_stages(space, plan):
        candidates += _fastest_of(fewer)
        advance()
    if space.is_joint and objective == "days":
        candidates += explore(replace(space, objective="money")).candidates  # with fewer devices, too
    candidates.sort(key=lambda candidate: (candidate.step_time_s, candidate.peak_bytes))
    fitting = [candidate for candidate in candidates if candidate.fits]
    tried: list[tuple[float, Candidate, Brief]] = []
    hopeless: InputError | None = None
    in_order = sorted(best_of_each([advice.recommended, *fitting]), key=lambda one: _least(one, objective, tokens))
    for candidate in in_order[:_MOST]:
        if tried and _least(candidate, objective, tokens) >= min(cost for cost, _, _ in tried):
            break
        try:
            brief = brief_campaign(candidate.plan, candidate.step_time_s, tokens)
        except InputError as error:  # it fails more often than it gets on
            hopeless = error
            continue
        tried.append((_cost(brief, objective), candidate, brief))
    if not tried:
        raise hopeless or plan.scenario.error("plan", "leaves no plan to train with")
    tried.sort(key=lambda one: (one[0], one[1].step_time_s))
    (least, best, brief), *others = tried
    return (
        replace(
            advice,
            recommended=best,
            front=thinned(front(candidates), best),
            candidates=candidates,
            naive=None,
            rivals=[Rival(candidate, cost / least - 1, None) for cost, candidate, _ in others[:_RIVALS]],
            because=_sentence(best, brief, fitting[0], objective, total, tokens),
            is_exact=False,
        ),
        brief,
    )


def _with_fewer_stages(space: Space, plan: Plan) -> Iterator[Space]:
    """The space with each smaller number of stages by itself, or some of them if there are many."""
    if space.balances is not None or space.is_joint:  # which say how many, or has searched them
        return
    smaller = [count for count in space.stages if count < (plan.num_ranks if space.are_ranks else plan.num_stages)]
    spread = {smaller[round(at)] for at in np.linspace(0, len(smaller) - 1, _SMALLER)} if smaller else set()
    for count in sorted(spread):
        yield replace(space, stages=(count,), swept=(), beyond=(), automatic=False)


def _fastest_of(space: Space) -> Iterator[Candidate]:
    """Plans of a space that are fast and fit, looked for with less effort than the recommended one."""
    for framed in space.framed():
        searcher = Searcher(framed)
        Question(searcher, framed.scenario.cluster.memory_limit, FRONT_SHARE).answer()
        yield from searcher.judge.found.values()


def _least(candidate: Candidate, objective: Aim, tokens: float | None) -> float:
    """Days or money if nothing failed and nothing was saved."""
    plan = candidate.plan
    days = length_of(plan, tokens)[1] * candidate.step_time_s / DAY
    price = plan.scenario.cluster.device_price
    return days if objective == "days" or price is None else days * 24 * _devices(plan) * price.per_hour


def _devices(plan: Plan) -> int:
    """That are paid for while it trains, spares too."""
    return plan.world + plan.scenario.campaign.spares * (plan.scenario.cluster.devices_per_node or plan.world)


def _cost(brief: Brief, objective: Aim) -> float:
    return brief.days if objective == "days" or brief.money is None else brief.money


def _sentence(
    best: Candidate, brief: Brief, fastest: Candidate, objective: Aim, total: float, tokens: float | None
) -> str:
    """Why this plan, beside the one with the fastest step."""
    least = "least money" if objective == "money" else "fewest days"
    told = f"{describe(best.plan)}: the {least} for {format_tokens(total)} tokens, {_told(best.plan, brief)}"
    if best.plan is fastest.plan or best.step_time_s <= fastest.step_time_s * (1 + 1e-9):
        return f"{told}; its step is the fastest, too."
    try:
        other = _told(fastest.plan, brief_campaign(fastest.plan, fastest.step_time_s, tokens))
    except InputError:
        other = "more failures than progress"
    slower = best.step_time_s / fastest.step_time_s - 1
    return f"{told}; its step is {slower:.1%} slower than that of {describe(fastest.plan)}, which would take {other}."


def _told(plan: Plan, brief: Brief) -> str:
    price = plan.scenario.cluster.device_price
    money = "" if brief.money is None or price is None else f" and {brief.money:,.0f} {price.currency}"
    devices = f"{_devices(plan):,} device{'s' * (_devices(plan) > 1)}"
    return f"{brief.days:,.4g} days{money} on {devices} with a goodput of {brief.goodput:.1%}"
