"""A plan's training of weeks: how long, how much, what the time goes to, and what would help.

plan --step time--> Conditions --many seeds--> Outcomes --> days, goodput, money from p5 to p95
                        |                                   how often to save
                        `--one thing changed--> Outcomes    what a spare node or a faster restart is worth
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from gpipe_sim.base.arrays import Array, median_index
from gpipe_sim.base.files import InputError
from gpipe_sim.base.units import format_bytes, format_duration, format_tokens
from gpipe_sim.campaign.conditions import KINDS, LOSSES, Conditions, Outcomes
from gpipe_sim.campaign.evaluate import evaluate
from gpipe_sim.campaign.formulas import daly_interval_s, exact_interval_s, exact_stretch, young_interval_s
from gpipe_sim.campaign.model import Failure, Training
from gpipe_sim.cost.transformer import DTYPE_BYTES
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.campaign import CampaignSpec
from gpipe_sim.scenario.catalog import Price
from gpipe_sim.step.memory import step_bytes, sum_by_position

DAY = 86400.0
_QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95}
_TRIED = tuple(2.0 ** (step / 2) for step in range(-4, 5))
"""Intervals that are tried, from a quarter of the formula's to four times as much."""
_SOME_SEEDS = 100
"""Seeds that are enough to tell two settings apart: both have the same luck."""
_MOST_FAILURES = 2e7
"""Failures that are drawn in all, of all seeds: 320 MB of luck, and minutes."""
_MOST_SAVES = 1e5
"""Of one training: its timeline has an entry for each, and where a save is free, more would gain nothing."""
_LONGEST_STRETCH = 100.0
"""A training that would take longer than so many times its work is refused."""


class Interval(NamedTuple):
    """How often to save, and the goodput with that, the mean of some seeds."""

    interval_s: float
    goodput: float


class Worth(NamedTuple):
    """What a change would bring, the mean of some seeds."""

    change: str
    days_saved: float
    money_saved: float | None
    """What the change itself costs is counted for spare nodes only."""


class Bucket(NamedTuple):
    """A part of one training's time, and what it went to, in the order of `LOSSES`."""

    start_s: float
    end_s: float
    parts_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Campaign:
    """All that is said of one plan's training."""

    plan: Plan
    spec: CampaignSpec
    tokens: float
    num_steps: int
    step_time_s: float
    checkpoint_bytes: float
    outcomes: Outcomes
    intervals: tuple[Interval, ...]
    """Tried with the same luck, ascending."""
    worths: tuple[Worth, ...]
    buckets: tuple[Bucket, ...]
    """Of the training whose length is the median."""
    events: tuple[Failure, ...]
    """Its failures."""

    @property
    def conditions(self) -> Conditions:
        """What the training meets."""
        return self.outcomes.conditions

    @property
    def num_devices(self) -> int:
        """That train."""
        return self.conditions.replicas * self.conditions.devices_per_replica

    @property
    def best_interval(self) -> Interval:
        """Of those that were tried."""
        return max(self.intervals, key=lambda tried: tried.goodput)

    @property
    def days(self) -> Array:
        """Of each seed."""
        return self.outcomes.wall_s / DAY

    @property
    def price(self) -> Price | None:
        """Of a device for an hour, as the cluster says it."""
        return self.plan.scenario.cluster.device_price

    @property
    def money(self) -> Array | None:
        """Of each seed, in the price's currency."""
        return _money(self.outcomes, self.price)

    def to_dict(self) -> dict[str, Any]:
        """The keys of ``gpipe campaign --json``, an entry of ``results`` for each plan.

        set                       the swept fields of this plan and their values, as written
        tokens                    that are trained on
        steps                     tokens / (batch x sequence), rounded up
        step_time_s               of the plan, as gpipe simulate predicts it
        devices                   that train: ranks of a pipeline x replicas
        nodes                     that hold them
        spares                    nodes beside them
        ideal_days                steps x step_time_s, if nothing failed and nothing was saved
        days                      p5, p50, mean and p95 over the seeds
        goodput                   useful time over all time: p5, p50, mean and p95
        money                     currency, p5, p50, mean and p95, of devices and spares; null without a price
        between_failures_s        mean time between failures of any kind with all replicas at work
        failures                  kind to how many, the mean
        lost_work_s               kind to the seconds of computing lost with it, the mean
        parts_s                   what the time goes to, the mean: seconds, which sum to all of it
        checkpoint                bytes, interval_s, pause_s, write_s and mode
        best_interval_s           the best of the intervals that were tried
        formulas                  best interval by Young, by Daly and exact, in seconds
        intervals                 interval_s and goodput of every one that was tried
        worth                     change, days_saved and money_saved
        timeline                  of the training of median length: start_s, end_s and parts_s
        events                    its failures: time_s, kind and lost_s
        seeds                     how many trainings were drawn
        """
        c = self.conditions
        save = c.pause_s
        between = c.between_failures_s
        return {
            "set": dict(self.plan.scenario.swept),
            "tokens": self.tokens,
            "steps": self.num_steps,
            "step_time_s": self.step_time_s,
            "devices": self.num_devices,
            "nodes": c.nodes(c.replicas),
            "spares": c.spares,
            "ideal_days": c.work_s / DAY,
            "days": _spread(self.days),
            "goodput": _spread(self.outcomes.goodput),
            "money": None
            if self.money is None or self.price is None
            else {"currency": self.price.currency, **_spread(self.money)},
            "between_failures_s": between if math.isfinite(between) else None,
            "failures": dict(zip(KINDS, self.outcomes.failures.mean(axis=0).tolist(), strict=True)),
            "lost_work_s": dict(zip(KINDS, self.outcomes.lost_by_kind_s.mean(axis=0).tolist(), strict=True)),
            "parts_s": dict(zip(LOSSES, self.outcomes.parts_s.mean(axis=0).tolist(), strict=True)),
            "checkpoint": {
                "bytes": round(self.checkpoint_bytes),
                "interval_s": c.interval_s,
                "pause_s": c.pause_s,
                "write_s": c.write_s,
                "mode": self.spec.checkpoint.mode,
            },
            "best_interval_s": self.best_interval.interval_s,
            "formulas": {
                name: formula(save, between) if math.isfinite(between) else None
                for name, formula in (
                    ("young", young_interval_s),
                    ("daly", daly_interval_s),
                    ("exact", exact_interval_s),
                )
            },
            "intervals": [tried._asdict() for tried in self.intervals],
            "worth": [worth._asdict() for worth in self.worths],
            "timeline": [
                {
                    "start_s": bucket.start_s,
                    "end_s": bucket.end_s,
                    "parts_s": dict(zip(LOSSES, bucket.parts_s, strict=True)),
                }
                for bucket in self.buckets
            ],
            "events": [event._asdict() for event in self.events],
            "seeds": len(self.days),
        }


def run_campaign(
    plan: Plan, step_time_s: float, tokens: float | None = None, advance: Callable[[float], None] | None = None
) -> Campaign:
    """A plan's training, with what its scenario says under ``campaign:``; `advance` is told shares of three."""
    spec = plan.scenario.campaign
    tokens, num_steps = length_of(plan, tokens)
    checkpoint_bytes, conditions = conditions_of(plan, num_steps, step_time_s)
    _check(plan, conditions, step_time_s)

    seeds = range(spec.seed, spec.seed + spec.seeds)
    some = seeds[:_SOME_SEEDS]
    tried = _try_intervals(conditions, step_time_s, some, _TRIED, advance)
    intervals = tuple(Interval(found.conditions.interval_s, float(found.goodput.mean())) for found in tried)
    if spec.checkpoint.every is None:
        best = max(intervals, key=lambda one: one.goodput)
        conditions = replace(conditions, interval_s=best.interval_s)
    (outcomes,) = evaluate([conditions], seeds, advance)
    worths = _worths(spec, plan.scenario.cluster.device_price, outcomes, some, advance)
    training = Training(conditions, seeds[median_index(outcomes.wall_s)])
    training.run()
    return Campaign(
        plan=plan,
        spec=spec,
        tokens=tokens,
        num_steps=num_steps,
        step_time_s=step_time_s,
        checkpoint_bytes=checkpoint_bytes,
        outcomes=outcomes,
        intervals=intervals,
        worths=worths,
        buckets=_buckets(training),
        events=tuple(training.failures),
    )


class Brief(NamedTuple):
    """A training in figures to choose by, means of some seeds."""

    days: float
    goodput: float
    money: float | None
    """None without a price."""


def brief_campaign(plan: Plan, step_time_s: float, tokens: float | None = None) -> Brief:
    """What `run_campaign` would say of a plan, with fewer seeds and intervals; the same luck for every plan."""
    spec = plan.scenario.campaign
    _, num_steps = length_of(plan, tokens)
    _, conditions = conditions_of(plan, num_steps, step_time_s)
    _check(plan, conditions, step_time_s)
    seeds = range(spec.seed, spec.seed + min(spec.seeds, _SOME_SEEDS))
    factors = _TRIED[2:-2:2] if spec.checkpoint.every is None else ()
    outcomes = max(
        _try_intervals(conditions, step_time_s, seeds, factors), key=lambda found: float(found.goodput.mean())
    )
    money = _money(outcomes, plan.scenario.cluster.device_price)
    days = float(outcomes.wall_s.mean()) / DAY
    return Brief(days, float(outcomes.goodput.mean()), None if money is None else float(money.mean()))


def length_of(plan: Plan, tokens: float | None) -> tuple[float, int]:
    """The tokens that are trained on, given or else the scenario's, and the steps that they take."""
    tokens = tokens or plan.scenario.campaign.tokens
    if tokens is None:
        raise plan.scenario.error("campaign.tokens", "is missing, expected --tokens 1T or tokens: 1T under campaign")
    return tokens, math.ceil(tokens / (plan.scenario.batch * _sequence(plan)) - 1e-9)


def _try_intervals(
    conditions: Conditions,
    step_time_s: float,
    seeds: Sequence[int],
    factors: Sequence[float],
    advance: Callable[[float], None] | None = None,
) -> list[Outcomes]:
    """The same training with other intervals, ascending: so many times the formula's, and its own."""
    around, least = _formula_interval(conditions, step_time_s), _least(conditions, step_time_s)
    lengths = sorted({max(around * factor, least) for factor in factors} | {conditions.interval_s})
    return evaluate([replace(conditions, interval_s=length) for length in lengths], seeds, advance)


def conditions_of(plan: Plan, num_steps: int, step_time_s: float) -> tuple[float, Conditions]:
    """The bytes of a checkpoint, and what the plan's training meets.

    A checkpoint holds the weights and the optimizer's state, once, however many replicas there are. Copies that mixed
    precision computes with are not saved: the fp32 weights are, which are counted with the optimizer. Of a tensor
    group every device saves its slices; the norms, which all of them have, are counted for each.
    """
    spec, every = plan.scenario.campaign, plan.scenario.campaign.checkpoint.every
    held = step_bytes([replace(plan, shard="none")])
    weights, state = (sum_by_position(amount[:, 0], plan.positions) for amount in (held.parameters, held.optimizer))
    if DTYPE_BYTES[plan.dtype] < 4 and plan.scenario.precision != "pure":
        weights = np.zeros_like(weights)
    total = plan.tensor * float((weights + state).sum())
    by_rank = {
        "none": weights + state,
        "optimizer": weights + state / plan.replicas,
        "parameters": (weights + state) / plan.replicas,
    }[plan.shard]
    is_async = spec.checkpoint.mode == "async"
    through_storage_s = total / spec.checkpoint.storage
    rates, cluster = spec.failures, plan.scenario.cluster
    replicas, per_replica = plan.replicas, plan.num_ranks * plan.tensor
    conditions = Conditions(
        work_s=num_steps * step_time_s,
        replicas=replicas,
        devices_per_replica=per_replica,
        devices_per_node=cluster.devices_per_node or replicas * per_replica,
        interval_s=math.inf if every is None else every,
        pause_s=float(by_rank.max()) / spec.checkpoint.to_host if is_async else through_storage_s,
        write_s=through_storage_s if is_async else 0.0,
        detection_s=spec.detection,
        restart_s=spec.restart + through_storage_s,
        device_rate=rates.device,
        node_rate=rates.node,
        network_rate=rates.network,
        software_rate=rates.software,
        job_rate=rates.job,
        spares=spec.spares,
        repair_s=spec.repair,
        shrink=spec.shrink,
    )
    if every is None:
        conditions = replace(conditions, interval_s=_formula_interval(conditions, step_time_s))
    return total, conditions


def _formula_interval(conditions: Conditions, step_time_s: float) -> float:
    """The exact best interval for blocking saves, but at least the shortest, and at most the whole training."""
    exact, least = exact_interval_s(conditions.pause_s, conditions.between_failures_s), _least(conditions, step_time_s)
    return max(min(exact, conditions.work_s), least)


def _least(conditions: Conditions, step_time_s: float) -> float:
    """The shortest interval that is tried: a step, the time to write a save, and not too many of them."""
    return max(step_time_s, conditions.write_s, conditions.work_s / _MOST_SAVES)


def _sequence(plan: Plan) -> int:
    """Tokens in a sample: the model's, or what the campaign says of a model that does not know it."""
    known: int | None = getattr(plan.scenario.model, "sequence", None)
    given = plan.scenario.campaign.sequence
    if known is not None and given is not None and known != given:
        message = f"found {given}, expected the model's own {known}, or nothing"
        raise plan.scenario.error("campaign.sequence", message)
    if (known or given) is None:
        message = "is missing: a model of this kind does not say how many tokens a sample has"
        raise plan.scenario.error("campaign.sequence", message)
    return known or given or 1


def _check(plan: Plan, conditions: Conditions, step_time_s: float) -> None:
    """Refuse what would never end, and intervals that cannot be."""
    every = plan.scenario.campaign.checkpoint.every
    most = f"leaves {_MOST_SAVES:.0e} checkpoints of the training"
    for least, what in (
        (step_time_s, "a step takes"),
        (conditions.write_s, "a checkpoint takes to be written"),
        (conditions.work_s / _MOST_SAVES, most),
    ):
        if every is not None and every < least:
            message = f"found {format_duration(every)}, expected at least the {format_duration(least)} that {what}"
            raise plan.scenario.error("campaign.checkpoint.every", message)
    between = conditions.between_failures_s
    down = conditions.detection_s + conditions.restart_s
    stretch = exact_stretch(min(conditions.interval_s, conditions.work_s), conditions.pause_s, down, between)
    if stretch > _LONGEST_STRETCH:
        raise _hopeless(
            plan,
            conditions,
            f"saving every {format_duration(conditions.interval_s)} with restarts of "
            f"{format_duration(down)} would take more than {_LONGEST_STRETCH:.0f} times the work",
        )
    failures = conditions.work_s * stretch / between * plan.scenario.campaign.seeds
    if failures > _MOST_FAILURES:
        message = f"found {plan.scenario.campaign.seeds}, about {failures:.1e} failures in all, expected fewer seeds"
        raise plan.scenario.error("campaign.seeds", message)


def _hopeless(plan: Plan, conditions: Conditions, why: str) -> InputError:
    between = format_duration(conditions.between_failures_s)
    return plan.scenario.error("campaign.failures", f"come every {between} on average, expected fewer: {why}")


def _worths(
    spec: CampaignSpec,
    price: Price | None,
    outcomes: Outcomes,
    seeds: Sequence[int],
    advance: Callable[[float], None] | None,
) -> tuple[Worth, ...]:
    """What single changes bring, with the luck of the first seeds."""
    c = outcomes.conditions
    read_s = c.restart_s - spec.restart
    changes = {
        "one spare node more": replace(c, spares=c.spares + 1),
        "a restart in half the time": replace(c, restart_s=spec.restart / 2 + read_s),
        "detection in half the time": replace(c, detection_s=c.detection_s / 2),
        "storage of twice the bandwidth": replace(
            c,
            restart_s=spec.restart + read_s / 2,
            write_s=c.write_s / 2,
            pause_s=c.pause_s if c.write_s else c.pause_s / 2,
        ),
    }
    base, *changed = evaluate([c, *changes.values()], seeds, advance)
    before = _money(base, price)
    found = []
    for change, after in zip(changes, changed, strict=True):
        paid = _money(after, price)
        saved = None if before is None or paid is None else float((before - paid).mean())
        found.append(Worth(change, float((base.wall_s - after.wall_s).mean()) / DAY, saved))
    return tuple(found)


def _money(outcomes: Outcomes, price: Price | None) -> Array | None:
    """Of each seed: every device that trains or stands by, for the whole time."""
    if price is None:
        return None
    c = outcomes.conditions
    devices = c.replicas * c.devices_per_replica + c.spares * c.devices_per_node
    paid: Array = outcomes.wall_s / 3600 * devices * price.per_hour
    return paid


_MOST_BUCKETS = 30


def _buckets(training: Training) -> tuple[Bucket, ...]:
    """Hours, days, weeks or months, so that there are not too many."""
    end = training.stretches[-1].end_s
    widths = [3600.0 * hours for hours in (1, 6, 24, 168, 720, 8760)]
    width = next((width for width in widths if end <= width * _MOST_BUCKETS), end / _MOST_BUCKETS)
    count = max(1, math.ceil(end / width - 1e-9))
    parts = np.zeros((count, len(LOSSES)))
    useful, fewer = LOSSES.index("useful"), LOSSES.index("fewer replicas")
    for start, stop, part, speed in training.stretches:
        for index in range(int(start / width), min(count, int(stop / width) + 1)):
            seconds = max(0.0, min(stop, (index + 1) * width) - max(start, index * width))
            if part == "useful":
                parts[index, useful] += seconds * speed
                parts[index, fewer] += seconds * (1 - speed)
            else:
                parts[index, LOSSES.index(part)] += seconds
    return tuple(
        Bucket(index * width, min((index + 1) * width, end), tuple(row)) for index, row in enumerate(parts.tolist())
    )


def _spread(values: Array) -> dict[str, float]:
    quantiles = {name: float(np.quantile(values, at)) for name, at in _QUANTILES.items()}
    return {"p5": quantiles["p5"], "p50": quantiles["p50"], "mean": float(values.mean()), "p95": quantiles["p95"]}


def headline(campaign: Campaign) -> str:
    """What is trained, on what, and how often it fails."""
    c, between = campaign.conditions, campaign.conditions.between_failures_s
    nodes = c.nodes(c.replicas)
    steps = f"{campaign.num_steps:,} steps of {format_duration(campaign.step_time_s)}"
    on = f"{campaign.num_devices:,} devices on {nodes:,} node{'s' * (nodes > 1)}"
    spares = f" and {c.spares} spare" if c.spares else ""
    rates = f"a failure every {format_duration(between)} ({campaign.spec.failures.name})"
    fails = rates if math.isfinite(between) else "nothing fails"
    saved = format_bytes(campaign.checkpoint_bytes)
    return f"{format_tokens(campaign.tokens)} tokens: {steps} on {on}{spares}; {fails}; a checkpoint has {saved}"
