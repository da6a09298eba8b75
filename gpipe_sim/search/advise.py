"""Advice: from everything that was searched to one recommendation, why, how sure it is, and what would change it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from gpipe_sim.base.units import format_bandwidth, format_bytes, format_seconds
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.catalog import Link
from gpipe_sim.scenario.schema import MEASURED, Checkpoint, Scenario
from gpipe_sim.search.choices import Objective, Space, is_plain
from gpipe_sim.search.judge import Candidate, Judge
from gpipe_sim.search.other_schedules import with_other_schedules
from gpipe_sim.search.search import best_of_each, explore, front, something_fits
from gpipe_sim.step.evaluate import evaluate, evaluate_samples, obstacle
from gpipe_sim.step.metrics import step_time_s
from gpipe_sim.step.simulate import simulate
from gpipe_sim.step.step import stages_text

_SHOWN = 12
"""Points of the front that are told."""
_TOLD = 16
"""Entries of a list that a sentence has."""
_RIVALS = 8
"""Candidates that are compared under jitter."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Advice:
    """What to do, and what it was weighed against."""

    recommended: Candidate
    """The fastest that fits or, where nothing fits, the one that takes the least memory."""
    front: list[Candidate]
    """Time against memory, fastest first, the recommended one among them; thinned out where it is dense."""
    naive: Candidate | None
    """Equal layers, every activation recomputed, M = 4 K: what many would take without thinking."""
    rivals: list["Rival"]
    """The best of other setups that fit, nearest first."""
    candidates: list[Candidate]
    """Everything that was evaluated, fastest first."""
    because: str | None = None
    """Why it is recommended, if not for its step time."""
    is_exact: bool
    """Whether it is proven that no plan that fits is faster or, where none was found that fits, that none does."""

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return self.recommended.fits

    @property
    def reason(self) -> str:
        """Why this plan, in one sentence."""
        if self.because is not None:
            return self.because
        best, limit = self.recommended, format_bytes(self.recommended.plan.memory_limit)
        what = describe(best.plan)
        fastest = self.candidates[0]
        if not best.fits:
            nothing = f"nothing fits in {limit}" if self.is_exact else f"no plan was found that fits in {limit}"
            return f"{what}: {nothing}; this comes nearest, with {format_bytes(best.peak_bytes)}."
        if fastest.step_time_s < best.step_time_s * (1 - 1e-9):
            slower = best.step_time_s / fastest.step_time_s - 1
            return (
                f"{what}: {slower:.1%} slower than the fastest, which fits only above "
                f"{format_bytes(fastest.peak_bytes)} ({describe(fastest.plan)})."
            )
        return f"{what}: the fastest of all, and it fits, with {format_bytes(best.peak_bytes)} of {limit}."

    @property
    def naive_sentence(self) -> str | None:
        """What the naive choice would have cost."""
        if self.naive is None:
            return None
        ratio = self.naive.step_time_s / self.recommended.step_time_s
        fits = "" if self.naive.fits else f", and would not fit: it needs {format_bytes(self.naive.peak_bytes)}"
        return f"Equal layers, always recomputed, M=4K would take {ratio:.2f} times as long{fits}."


def why_not_copies(advice: Advice) -> str | None:
    """What copies of the whole model on the same devices would need and take, if that was to choose from."""
    best = advice.recommended
    D = best.plan.world
    copies = [c for c in advice.candidates if c.plan.num_ranks == 1 and c.plan.replicas == D > 1]
    if not copies or best.plan.replicas == D:
        return None
    fitting = [copy for copy in copies if copy.fits]
    if not fitting:
        least = min(copies, key=lambda c: c.peak_bytes)
        return f"{D} copies of the whole model would not fit: they need {format_bytes(least.peak_bytes)} each."
    fastest = min(fitting, key=lambda c: c.step_time_s)
    return f"{D} copies of the whole model would take {fastest.step_time_s / best.step_time_s:.2f} times as long."


def why_not_one_group(advice: Advice) -> str | None:
    """What one tensor group of all devices would take, if that was to choose from."""
    best = advice.recommended
    T = best.plan.world
    groups = [c for c in advice.candidates if c.plan.tensor == T > 1]
    if not groups or best.plan.tensor == T:
        return None
    fastest = min(groups, key=lambda c: (not c.fits, c.step_time_s))
    ratio, what = fastest.step_time_s / best.step_time_s, f"One tensor group of all {T} devices would"
    costs = fastest.plan.profile.at(fastest.plan.sizes[0])
    waiting = 0.0 if costs.tensor_s is None else 2 * float(costs.tensor_s.sum()) * fastest.plan.num_microbatches
    where = "the network" if fastest.plan.tensors_per_node < T else "links"
    share = f", {waiting / fastest.step_time_s:.0%} of which are collectives over {where}"
    fits = "" if fastest.fits else f", and would not fit: it needs {format_bytes(fastest.peak_bytes)}"
    return f"{what} take {ratio:.2f} times as long{share}{fits}."


def schedule_sentence(advice: Advice) -> str | None:
    """How the recommended plan's schedule compares with the best of the others, on as many ranks and micro-batches."""
    best = advice.recommended
    tried = [*advice.candidates, *Judge().judge(list(with_other_schedules(best.plan)))]
    others = [c for c in tried if c.fits and c.plan.schedule != best.plan.schedule]
    if not best.fits or not others:
        return None
    other = min(others, key=lambda c: (c.step_time_s, c.peak_bytes))
    name, own = _named(other.plan), _named(best.plan)
    memory = f"{format_bytes(other.peak_bytes)} of memory instead of {format_bytes(best.peak_bytes)}"
    seconds = f"{format_seconds(other.step_time_s)} instead of {format_seconds(best.step_time_s)}"
    if other.step_time_s < best.step_time_s * (1 - 1e-9):
        gain = 1 - other.step_time_s / best.step_time_s
        return f"With {name} a step would take {seconds} ({gain:.1%} less), with {memory}."
    loss = other.step_time_s / best.step_time_s - 1
    return f"Of the other schedules {name} comes nearest to {own}: {seconds} ({loss:.1%} more), with {memory}."


def _named(plan: Plan) -> str:
    v = plan.stages_per_rank
    return plan.schedule if v == 1 else f"{plan.schedule} with {v} stages on each rank"


class Rival(NamedTuple):
    """Another candidate, and how it compares."""

    candidate: Candidate
    margin: float
    """How much slower it is than the recommended one; with jitter, of the means."""
    beaten: float | None
    """With jitter: the share of samples in which the recommended plan is faster, both having the same luck."""


def advise(space: Space, advance: Callable[[], None] = lambda: None) -> Advice:
    """Search, and choose."""
    findings = explore(space, advance)
    candidates = findings.candidates
    if not candidates:
        raise space.scenario.error(
            "plan", "leaves no plan to choose from, expected stages and micro-batches that can be"
        )
    fitting = [candidate for candidate in candidates if candidate.fits]
    if fitting:
        fitting.sort(key=lambda c: _price_of(c, space.objective))
    recommended = fitting[0] if fitting else min(candidates, key=lambda c: c.peak_bytes)
    rivals: list[Rival] = []
    if fitting and space.objective == "time":
        _, *others = best_of_each(fitting)
        recommended, rivals = _weighed([recommended, *others[: _RIVALS - 1]])
    return Advice(
        recommended=recommended,
        front=thinned(front(candidates), recommended),
        naive=_naive(recommended.plan),
        rivals=rivals,
        candidates=candidates,
        is_exact=findings.is_exact,
    )


def _price_of(candidate: Candidate, objective: Objective) -> tuple[float, float, float]:
    """What is made smallest; device seconds are money, whatever the price."""
    seconds, size = candidate.step_time_s, float(candidate.peak_bytes)
    if objective == "memory":
        return size, seconds, 0.0
    return (seconds * candidate.plan.world, seconds, size) if objective == "money" else (seconds, size, 0.0)


def describe(plan: Plan) -> str:
    """``K=4, M=16, 1f1b, recompute stages 0-2``."""
    chosen = [stage for stage, mode in enumerate(plan.checkpoint) if mode != "never"]
    runs = [list(run) for _, run in groupby(chosen, key=lambda stage: stage - chosen.index(stage))]
    named = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    what = (
        "nothing"
        if not chosen
        else "all stages"
        if len(chosen) == plan.num_stages
        else f"stage{'s' * (len(chosen) > 1)} {named}"
    )
    each = "" if plan.stages_per_rank == 1 else f", {plan.stages_per_rank} stages on each rank"
    replicas = "" if plan.replicas == 1 else f" D={plan.replicas},"
    replicas += "" if plan.tensor == 1 else f" T={plan.tensor},"
    if chosen and plan.recompute_unit != "stage":
        what += f" by {plan.recompute_unit}"
    divided = "" if plan.shard == "none" or plan.replicas == 1 else f", {plan.shard} divided"
    divided += ", ranks of a replica together" if plan.mesh.messages_inside else ""
    return f"K={plan.num_ranks},{replicas} M={plan.num_microbatches}, {plan.schedule}{each}, recompute {what}{divided}"


def _unlike(plan: Plan, other: Plan) -> str:
    """A plan in words that tell it apart from another one."""
    words = describe(plan)
    if words == describe(other):
        sides = [(one.backward, one.placement, one.window or "all", one.balance) for one in (plan, other)]
        names = ("backwards", "on ranks", "window", "cut")
        words += "".join(f", {name} {_listed(one)}" for name, one, its in zip(names, *sides, strict=True) if one != its)
    return words


def _listed(value: object) -> str:
    """Of many, those that are the same are counted: ``10 14 124 times 13 12``."""
    if not isinstance(value, tuple):
        return str(value)
    if len(value) <= _TOLD:
        return " ".join(map(str, value))
    runs = [(len(list(run)), one) for one, run in groupby(value)]
    return " ".join(str(one) if times == 1 else f"{times} times {one}" for times, one in runs)


def _weighed(candidates: Sequence[Candidate]) -> tuple[Candidate, list[Rival]]:
    """The best, and the others as its rivals; with jitter, by means over samples in which all have the same luck."""
    jitter = candidates[0].plan.scenario.cluster.jitter
    times = [np.array([candidate.step_time_s]) for candidate in candidates]
    if jitter is not None:
        times = [_sampled(candidate.plan, range(jitter.samples)) for candidate in candidates]
    order = sorted(range(len(candidates)), key=lambda i: float(times[i].mean()))
    first, others = order[0], order[1:]
    rivals = [
        Rival(
            candidates[i],
            float(times[i].mean() / times[first].mean()) - 1,
            float((times[first] < times[i]).mean()) if jitter is not None else None,
        )
        for i in others
    ]
    return candidates[first], rivals


def _sampled(plan: Plan, samples: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    if obstacle(plan) is None:
        return np.array([one.step_time_s for one in evaluate_samples(plan, samples, memory=False)])
    return np.array([step_time_s(simulate(plan, sample=sample, memory=False)) for sample in samples])


def thinned(points: Sequence[Candidate], keep: Candidate) -> list[Candidate]:
    """The front without points that hardly differ from the one before, until few enough are left."""
    points = sorted({*points, keep}, key=lambda c: c.step_time_s)
    apart = 0.01
    while len(points) > _SHOWN:
        kept = [points[0]]
        for point in points[1:]:
            slower, smaller = point.step_time_s / kept[-1].step_time_s, kept[-1].peak_bytes / point.peak_bytes
            if point is keep or max(slower, smaller) > 1 + apart:
                kept.append(point)
        points, apart = kept, 2 * apart
    return list(points)


def _naive(best: Plan) -> Candidate | None:
    """For the same K: layers dealt out equally, whatever they cost, a stage to each rank."""
    K, L, batch = best.num_ranks, best.profile.num_layers, best.samples
    M = 1 if best.schedule == "naive" else min(4 * K, batch)
    balance = tuple(L // K + (stage < L % K) for stage in range(K))
    always: Checkpoint = "always"
    plan = replace(best, balance=balance, num_microbatches=M, checkpoint=(always,) * K, placement=best.pipeline)
    if not is_plain(best.schedule):
        plan = replace(plan, schedule="gpipe", backward="reverse", order=None)
    if obstacle(plan) is not None:
        return None
    return Candidate(plan, evaluate([plan])[0])


# --- how sure ------------------------------------------------------------------------------------------------------


def certainty(advice: Advice, past_errors: Sequence[float]) -> str:
    """How sure the recommendation is: by jitter, or by how wrong predictions were on this machine so far."""
    if not advice.rivals:
        return "There is no other plan that fits to compare it with."
    rival = advice.rivals[0]
    ahead = f"{rival.margin:.1%} ahead of the runner-up ({_unlike(rival.candidate.plan, advice.recommended.plan)})"
    if rival.beaten is not None:
        closest = min(advice.rivals, key=lambda r: 1.0 if r.beaten is None else r.beaten)
        other = _unlike(closest.candidate.plan, advice.recommended.plan)
        worst = f"; of all rivals, {other} beats it most often" * (closest is not rival)
        return f"It is {ahead} on average, and faster in {rival.beaten:.0%} of steps with the same luck{worst}."
    if not past_errors:
        return f"It is {ahead}; no run has been compared here yet, so how far to trust that is not known."
    usual = float(np.mean(np.abs(past_errors)))
    verdict = "more than" if rival.margin > usual else "less than"
    return f"It is {ahead}: {verdict} the {usual:.1%} by which predictions were off here, over {len(past_errors)} runs."


# --- what if -------------------------------------------------------------------------------------------------------


def sensitivities(advice: Advice) -> Iterator[str]:
    """What a faster stage or link would gain, and where the best plan changes; a sentence each."""
    best = advice.recommended
    plan = best.plan
    if plan.replicas > 1 or plan.tensor > 1:
        yield "Sensitivities are known of a single pipeline only."
        return
    if problem := obstacle(plan):
        yield f"Sensitivities need the fast evaluator, but {problem}."
        return
    cluster = plan.scenario.cluster
    faster = {
        f"{stages_text(plan.stages_of(rank))}": _with(
            plan, slowdown=cluster.slowdown | {rank: cluster.slowdown.get(rank, 1.0) / 1.01}
        )
        for rank in plan.pipeline
    }
    faster |= {
        f"link {edge}-{edge + 1}": _with(plan, links=cluster.links | {edge: _scaled(plan.link(edge), 1.01)})
        for edge in range(plan.num_stages - 1)
    }
    found = evaluate(list(faster.values()), memory=False)
    gains = {name: best.step_time_s - one.step_time_s for name, one in zip(faster, found, strict=True)}
    gains = {name: gain for name, gain in gains.items() if gain > 1e-6 * best.step_time_s}
    most = set(sorted(gains, key=lambda name: -gains[name])[:_TOLD])
    told = [f"{name} {format_seconds(gain)}" for name, gain in gains.items() if name in most]
    if len(gains) > len(told):
        told.append(f"{len(gains) - len(told)} others {format_seconds(min(gains[name] for name in most))} or less each")
    yield f"1 % faster gains: {', '.join(told)}." if told else "Nothing that is 1 % faster gains anything by itself."
    yield from _bandwidth_changes(advice)
    yield from _memory_changes(advice)


def _with(plan: Plan, **changes: object) -> Plan:
    """The plan on a cluster that differs in these fields."""
    cluster = plan.scenario.cluster.model_copy(update=changes)
    return replace(plan, scenario=replace(plan.scenario, cluster=cluster))


def _scaled(link: Link, factor: float) -> Link:
    return replace(link, bandwidth=link.bandwidth * factor)


def _all_links_scaled(plan: Plan, factor: float) -> Plan:
    cluster = plan.scenario.cluster
    link = plan.profile.link if cluster.link is MEASURED and plan.profile.link else cluster.link
    network = _scaled(cluster.network, factor) if cluster.network else None
    links = {edge: _scaled(own, factor) for edge, own in cluster.links.items()}
    spine = _scaled(cluster.spine, factor) if cluster.spine else None
    return _with(plan, link=_scaled(link, factor), network=network, spine=spine, links=links)


def _bandwidth_changes(advice: Advice) -> Iterator[str]:
    """Up and down in bandwidth, the nearest one at which another of the candidates that fit becomes the best."""
    best = advice.recommended
    rivals = [best, *(rival.candidate for rival in advice.rivals)]
    rivals += [c for c in advice.front if c.fits and c is not best]
    if best.plan.num_stages == 1 or best.plan.link(0).bandwidth == float("inf"):
        return

    def winner(factor: float) -> Candidate:
        times = evaluate([_all_links_scaled(c.plan, factor) for c in rivals], memory=False)
        first = min(range(len(rivals)), key=lambda i: (times[i].step_time_s, i))
        return best if times[0].step_time_s <= times[first].step_time_s * (1 + 1e-9) else rivals[first]

    bandwidth = best.plan.link(0).bandwidth
    for sign, name in ((-1, "below"), (1, "above")):
        near, far = 1.0, next((2.0 ** (sign * n) for n in range(1, 11) if winner(2.0 ** (sign * n)) is not best), None)
        if far is None:
            yield f"With links up to 1000 times {'slower' if sign < 0 else 'faster'} it stays the best."
            continue
        for _ in range(8):
            middle = float(np.sqrt(near * far))
            near, far = (middle, far) if winner(middle) is best else (near, middle)
        other = _unlike(winner(far).plan, best.plan)
        yield f"With links {name} {format_bandwidth(bandwidth * far)} the best is {other}."


def _memory_changes(advice: Advice) -> Iterator[str]:
    best = advice.recommended
    less = next((c for c in advice.candidates if c.peak_bytes < best.peak_bytes and c.fits), None)
    if less is not None:
        slower, other = less.step_time_s / best.step_time_s - 1, _unlike(less.plan, best.plan)
        yield f"With less than {format_bytes(best.peak_bytes)} it would be {other}, {slower:.2%} slower."
    more = [c for c in advice.candidates if c.step_time_s < best.step_time_s]
    if more:
        first = min(more, key=lambda c: c.peak_bytes)
        gain = 1 - first.step_time_s / best.step_time_s
        other = _unlike(first.plan, best.plan)
        yield f"From {format_bytes(first.peak_bytes)} on it would be {other}, {gain:.1%} faster."


# --- nothing fits --------------------------------------------------------------------------------------------------


def remedies(space: Space, nearest: Candidate) -> Iterator[str]:
    """The smallest change of each kind that would fit, each found by searching, not guessed."""
    space = replace(space, swept=())
    if space.is_joint:
        yield from _joint_remedies(space, nearest)
        return
    scenario, K = space.scenario, max(space.stages)
    most = nearest.plan.profile.num_layers
    tried: Iterable[int] = sorted({min(most, K * n // 4) for n in range(5, 33)} - {*space.stages})
    for stages in tried:
        if something_fits(replace(space, scenario=_more_devices(scenario, stages), stages=(stages,))):
            yield f"{stages} stages instead of {K} would fit"
            break
    if (batch := scenario.samples) > max(space.microbatches) and something_fits(replace(space, microbatches=(batch,))):
        yield f"{batch} micro-batches of one sample would fit"
    if space.checkpoints is not None and something_fits(replace(space, checkpoints=None)):
        yield "more checkpointing would fit, if plan.checkpoint were left out"
    needed = nearest.peak_bytes + scenario.cluster.reserve
    yield f"devices of {format_bytes(needed)} would fit it as it is"


def _joint_remedies(space: Space, nearest: Candidate) -> Iterator[str]:
    """More nodes or, if there is no network between them, more devices in one; or larger ones."""
    cluster = space.scenario.cluster
    field, what = ("nodes", "nodes") if cluster.network else ("devices_per_node", "devices")
    for factor in (2, 3, 4, 8):
        more = cluster.model_copy(update={field: factor * getattr(cluster, field)})
        if something_fits(replace(space, scenario=replace(space.scenario, cluster=more))):
            yield f"{getattr(more, field)} {what} instead of {getattr(cluster, field)} would fit"
            break
    yield f"devices of {format_bytes(nearest.peak_bytes + cluster.reserve)} would fit it as it is"


def _more_devices(scenario: Scenario, stages: int) -> Scenario:
    per_node = scenario.cluster.devices_per_node
    changes: dict[str, object] = {} if per_node is None else {"nodes": -(-stages // per_node)}
    if changes and scenario.cluster.network is None:
        changes = {"devices_per_node": stages}
    return replace(scenario, cluster=scenario.cluster.model_copy(update=changes))
