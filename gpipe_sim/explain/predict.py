"""Prediction: everything that `simulate` says of one plan, and the keys under which `--json` says it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np

from gpipe_sim.base import html
from gpipe_sim.base.arrays import Array, median_index
from gpipe_sim.base.units import format_bytes, format_seconds
from gpipe_sim.explain.verdict import verdict
from gpipe_sim.explain.waterfall import LABELS, Times, breakdown_s, counterfactuals
from gpipe_sim.explain.worth import Worth, worth_of
from gpipe_sim.make.planfile import plan_of
from gpipe_sim.plan.actions import KINDS
from gpipe_sim.plan.figures import Effects
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import Shape, shape_of
from gpipe_sim.plan.stages import sum_by_stage
from gpipe_sim.scenario.reading import Source
from gpipe_sim.scenario.schema import Scenario
from gpipe_sim.step import metrics
from gpipe_sim.step.evaluate import evaluate, evaluate_samples, ideal_bubble, obstacle
from gpipe_sim.step.evaluated import evaluated_step
from gpipe_sim.step.memory import sum_by_position
from gpipe_sim.step.metrics import StepMetrics, step_metrics
from gpipe_sim.step.simulate import simulate
from gpipe_sim.step.step import Step

_TOGETHER = 1000
"""Plans that are evaluated at once: enough to be fast, few enough to show progress."""
_LARGE = 2**11
"""Micro-batches on stages from which on a step that nothing prevents is evaluated, not simulated, to be looked at."""
_READABLE = 512
"""Micro-batches on stages up to which a timeline is drawn in a notebook."""
_MANY = 256
"""Micro-batches on stages from which on it is faster to evaluate plans of one shape than to simulate them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """A plan and what is expected of it; with jitter, times are means over all samples."""

    plan: Plan
    step_times_s: Array
    """Of each jitter sample; one entry without jitter."""
    pipeline_time_s: float
    longest_rank_span_s: float
    utilization: Array
    """Busy over pipeline time, per rank."""
    peak_memory_bytes: tuple[int, ...]
    """Per rank, the highest over all samples."""
    activation_bytes: tuple[int, ...]
    """Per rank, the peak less parameters, gradients and optimizer state."""
    parameter_bytes: tuple[int, ...]
    """Per rank."""
    fullest_sample: int | None
    """The jitter sample that takes most memory."""
    breakdown_s: dict[str, float]
    """The waterfall, in its order; it sums to `step_time_s`."""
    kept_step: Step | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        figures = f"{format_seconds(self.step_time_s)}, bubble {self.bubble_fraction:.1%}"
        peak = format_bytes(max(self.peak_memory_bytes))
        return f"Prediction({self.settings!r}: {figures}, peak memory {peak}, {fits})"

    def _repr_html_(self) -> str:
        peak, limit = format_bytes(max(self.peak_memory_bytes)), format_bytes(self.plan.memory_limit)
        rows = [
            ("step time", format_seconds(self.step_time_s)),
            ("throughput", f"{self.throughput_samples_s:.4g} samples/s"),
            ("bubble", f"{self.bubble_fraction:.1%}, closed form {self.bubble_ideal:.1%}"),
            ("peak memory", f"{peak} of {limit}, {'fits' if self.fits else 'does not fit'}"),
        ]
        about = html.paragraph(f"{self.plan!r}: {self.settings}")
        timeline = html.chart("what each rank does", _rows(self.step)) if self._is_small else ""
        return (
            about + html.table(("", "predicted"), rows) + timeline + html.chart("where the time goes", self._causes())
        )

    @property
    def _is_small(self) -> bool:
        """Whether the timeline can be read where it is not zoomed."""
        return self.plan.num_stages * self.plan.num_microbatches <= _READABLE

    def _causes(self) -> list[tuple[str, list[html.Bar], str]]:
        found, begin = [], 0.0
        for part, seconds in self.breakdown_s.items():
            if abs(seconds) > 1e-3 * self.step_time_s:
                start, end = min(begin, begin + seconds), max(begin, begin + seconds)
                share = f"{format_seconds(seconds)}, {seconds / self.step_time_s:.0%}"
                found.append((LABELS[part], [html.Bar(start, end, KINDS["F"].colour)], share))
            begin += seconds
        return found

    @cached_property
    def step(self) -> Step:
        """The timeline; with jitter, of the sample whose step time is the median.

        A sweep holds numbers only, and simulates again the few plans that someone looks at.
        """
        if self.kept_step is not None:
            return self.kept_step
        has_jitter = self.plan.scenario.cluster.jitter is not None
        if not has_jitter and self.plan.num_stages * self.plan.num_microbatches >= _LARGE:
            found = evaluated_step(self.plan)
            if found is not None:
                return found
        return simulate(self.plan, sample=median_index(self.step_times_s) if has_jitter else None)

    @property
    def step_time_s(self) -> float:
        """The mean over samples."""
        return float(self.step_times_s.mean())

    @property
    def step_time_p50_s(self) -> float:
        """The median over samples."""
        return float(np.quantile(self.step_times_s, 0.5))

    @property
    def step_time_p95_s(self) -> float:
        """What 95 % of the samples do not exceed."""
        return float(np.quantile(self.step_times_s, 0.95))

    @property
    def throughput_samples_s(self) -> float:
        """Samples per second."""
        return self.plan.scenario.batch / self.step_time_s

    @property
    def bubble_fraction(self) -> float:
        """As `metrics.bubble_fraction`, of the means."""
        return 1.0 - float(self.utilization.mean())

    @property
    def bubble_ideal(self) -> float:
        """The schedule's closed form for the plan's K, v and M; of an order without one, its own bubble likewise."""
        plan = self.plan
        if plan.order is not None:
            return ideal_bubble(shape_of(plan))
        return metrics.bubble_ideal(plan.schedule, plan.num_ranks, plan.num_microbatches, plan.stages_per_rank)

    @property
    def settings(self) -> str:
        """The swept fields and their values: ``stages 4, network.bandwidth 25 GB/s``; else the scenario's name."""
        scenario = self.plan.scenario
        return ", ".join(f"{path.split('.', 1)[1]} {value}" for path, value in scenario.swept.items()) or scenario.name

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its device's memory."""
        return max(self.peak_memory_bytes) <= self.plan.memory_limit

    @cached_property
    def verdict(self) -> str:
        """What limits the plan, and what to change next."""
        fullest = self.step if self.fits else simulate(self.plan, sample=self.fullest_sample)
        return verdict(self.plan, fullest, self.breakdown_s)

    def worth(self, tokens: float | None = None) -> Worth:
        """What the plan yields and costs, for that many tokens if they are given."""
        return worth_of(self.plan, self.step_time_s, tokens)

    def to_dict(self, tokens: float | None = None) -> dict[str, Any]:
        """The keys of ``--json``, for other programs to rely on; lists are per rank, in ascending order of ranks.

        set                       the swept fields of this plan and their values, as written
        stages                    S = K v, pieces that the layers are cut into
        ranks                     K, of one pipeline
        stages_per_rank           v, of the rank that holds most
        microbatches              M, of one replica
        replicas                  D, copies of the pipeline, each with its share of the batch
        tensor                    T, devices that hold each stage together, a slice of each of its layers each
        order                     in which order the dimensions of devices are numbered, what follows each other first
        shard                     what the D ranks that hold the same stages divide: none, optimizer or parameters
        checkpoint                the mode of all stages, or a list with that of each
        schedule                  the order of forwards and backwards: its name, its file, or auto
        recompute                 when recomputations start
        recompute_unit            what is recomputed at once: a stage; or a layer, or its attention, in its own backward
        backward                  the order of backwards that is run
        balance                   layers of each stage
        placement                 the rank of each stage
        window                    receives posted ahead per edge and direction, or all
        step_time_s               from the first action to the end of the last update, or of what replicas do together
                                  after it; with jitter, the mean
        pipeline_time_s           T, from the first action to the end of the last backward; with jitter, the mean
        longest_rank_span_s       from a rank's first action to its last backward, at most; with jitter, the mean
        throughput_samples_s      batch / step_time_s
        bubble_fraction           1 - busy / (K T), busy being all time in F, R, B, I and W; with jitter, of the means
        bubble_ideal              that of equal stages and free links: (K-1) / (M+K-1), or the schedule's own form
        bubble_over_ideal_time    bubble_fraction / (1 - bubble_fraction), idle over busy time
        peak_memory_bytes         the highest point of the memory curve; with jitter, of all samples and replicas
        activation_bytes          the peak less parameters, gradients and optimizer state
        parameter_bytes           of the weights
        fits                      whether every peak is at most the device's memory less memory_reserve
        breakdown_s               the waterfall: part to seconds; they sum to step_time_s
        utilization               busy / T
        parameters                of the whole model, each counted once
        devices                   that the plan uses, K D T
        tokens_per_s              batch x sequence / step_time_s; null, as the next three, unless a transformer says it
        tokens_per_s_per_device   the same by device
        model_flops               of a step: forward and backward without recomputation
        mfu                       model_flops / (step_time_s x devices x peak FLOP/s in the model's dtype)
        price_per_hour            of one device; null, as all that is money, where no price is known
        price_source              where and when it was asked, or scenario
        currency                  of the price
        money_per_step            price_per_hour x devices x step_time_s
        money_per_token           money_per_step / (batch x sequence)
        tokens                    with --tokens only: how many are to be trained on
        days                      with --tokens only: tokens / tokens_per_s
        money                     with --tokens only: tokens x money_per_token
        step_time_p50_s           with jitter only: the median over samples
        step_time_p95_s           with jitter only: what 95 % of the samples do not exceed
        """
        plan = self.plan
        result = {
            "set": dict(plan.scenario.swept),
            "stages": plan.num_stages,
            "ranks": plan.num_ranks,
            "stages_per_rank": plan.stages_per_rank,
            "microbatches": plan.num_microbatches,
            "replicas": plan.replicas,
            "tensor": plan.tensor,
            "order": list(plan.dimensions),
            "shard": plan.shard,
            "checkpoint": plan.checkpoint[0] if len(set(plan.checkpoint)) == 1 else list(plan.checkpoint),
            "schedule": plan.schedule,
            "recompute": plan.recompute,
            "recompute_unit": plan.recompute_unit,
            "backward": plan.backward,
            "balance": list(plan.balance),
            "placement": list(plan.placement),
            "window": plan.window or "all",
            "step_time_s": self.step_time_s,
            "pipeline_time_s": self.pipeline_time_s,
            "longest_rank_span_s": self.longest_rank_span_s,
            "throughput_samples_s": self.throughput_samples_s,
            "bubble_fraction": self.bubble_fraction,
            "bubble_ideal": self.bubble_ideal,
            "bubble_over_ideal_time": metrics.over_ideal_time(float(self.utilization.mean())),
            "peak_memory_bytes": list(self.peak_memory_bytes),
            "activation_bytes": list(self.activation_bytes),
            "parameter_bytes": list(self.parameter_bytes),
            "fits": self.fits,
            "breakdown_s": self.breakdown_s,
            "utilization": self.utilization.tolist(),
        }
        result |= self.worth(tokens).to_dict()
        if plan.scenario.cluster.jitter:
            result |= {"step_time_p50_s": self.step_time_p50_s, "step_time_p95_s": self.step_time_p95_s}
        return result


def _rows(step: Step) -> list[tuple[str, list[html.Bar], str]]:
    """What each rank does, as a chart has it; a rank's collectives in a row of their own."""
    found = []
    for timeline in step.ranks:
        for lane, label in (("compute", f"rank {timeline.rank}"), ("collective", "with replicas")):
            spans = [span for span in timeline.spans() if span.lane == lane]
            bars = [html.Bar(s.start_s, s.end_s, KINDS[s.action.kind].colour, str(s.action)) for s in spans]
            if bars:
                found.append((label, bars, ""))
    return found


def predict(
    asked: Plan | Scenario | Source, *, keep_step: bool = False, advance: Callable[[float], None] = lambda _: None
) -> Prediction:
    """Simulate a plan and its counterfactuals and, with jitter, each sample.

    Whatever has one plan can be asked about: a plan, a scenario, its file, its name, or a dict of its fields.
    `advance` is called with shares of this work, which sum to 1; with jitter they sum to 1 for each sample.
    """
    plan = plan_of(asked)
    others, jitter = counterfactuals(plan), plan.scenario.cluster.jitter

    def part(share: float) -> None:
        if jitter is None:
            advance(share / (1 + len(others)))

    step = simulate(plan, advance=part)
    nominal = step_metrics(step)
    without = {
        effects: _times(step_metrics(simulate(plan, effects=effects, memory=False, advance=part))) for effects in others
    }
    samples = []
    for sample in _samples(plan):
        samples.append(step_metrics(simulate(plan, sample=sample)))
        advance(1)
    return _prediction(plan, nominal, samples, without, step if keep_step else None)


def _times(found: StepMetrics) -> Times:
    return Times(found.pipeline_time_s, found.step_time_s)


def predict_all(
    plans: Sequence[Plan],
    *,
    fast: bool | None = None,
    keep_steps: bool = False,
    advance: Callable[[float], None] = lambda _: None,
) -> Iterator[Prediction]:
    """The predictions of many plans, in their order: those in which nothing is shared are evaluated together.

    `fast` insists that all of them be evaluated, or simulated. `keep_steps` keeps the timelines of
    those that are simulated. `advance` is called with shares that sum to 1 for each plan or jitter sample.
    """
    for first in range(0, len(plans), _TOGETHER):
        some = plans[first : first + _TOGETHER]
        chosen = _worth_evaluating(some) if fast is None else [fast] * len(some)
        evaluated = _evaluate_all(list(compress(some, chosen)), advance)
        for plan, is_fast in zip(some, chosen, strict=True):
            yield next(evaluated) if is_fast else predict(plan, keep_step=keep_steps, advance=advance)


def _worth_evaluating(plans: Sequence[Plan]) -> list[bool]:
    """Which plans share nothing and are so many that sorting out their dependencies pays."""
    shapes = [shape_of(plan) for plan in plans]
    work: dict[Shape, int] = {}
    for plan, shape in zip(plans, shapes, strict=True):
        work[shape] = work.get(shape, 0) + plan.num_stages * plan.num_microbatches * (1 + len(_samples(plan)))
    return [work[shape] >= _MANY and obstacle(plan) is None for plan, shape in zip(plans, shapes, strict=True)]


def _evaluate_all(plans: Sequence[Plan], advance: Callable[[float], None]) -> Iterator[Prediction]:
    nominal = evaluate(plans)
    without: dict[Plan, dict[Effects, Times]] = {plan: {} for plan in plans}
    for effects in {effects for plan in plans for effects in counterfactuals(plan)}:
        concerned = [plan for plan in plans if effects in counterfactuals(plan)]
        for plan, found in zip(concerned, evaluate(concerned, effects=effects, memory=False), strict=True):
            without[plan][effects] = _times(found)
    for plan, found in zip(plans, nominal, strict=True):
        samples = evaluate_samples(plan, _samples(plan))
        advance(len(samples) or 1)
        yield _prediction(plan, found, samples, without[plan], None)


def _samples(plan: Plan) -> range:
    jitter = plan.scenario.cluster.jitter
    return range(jitter.samples if jitter else 0)


def _prediction(
    plan: Plan,
    nominal: StepMetrics,
    samples: Sequence[StepMetrics],
    without: Mapping[Effects, Times],
    nominal_step: Step | None,
) -> Prediction:
    """Put the figures of a plan together: of its step, of its jitter samples if any, and of the counterfactuals."""
    found = samples or [nominal]
    times = np.array([one.step_time_s for one in found])
    pipeline = float(np.mean([one.pipeline_time_s for one in found]))
    peaks = [list(zip(one.peak_memory_bytes.tolist(), one.activation_bytes.tolist(), strict=True)) for one in found]
    highest = [max(sample[rank] for sample in peaks) for rank in range(len(plan.ranks))]
    by_stage = np.round(sum_by_stage(plan.profile.parameter_bytes, np.array([plan.balance]))[0])
    weights = sum_by_position(by_stage, plan.positions)
    return Prediction(
        plan=plan,
        step_times_s=times,
        pipeline_time_s=pipeline,
        longest_rank_span_s=float(np.mean([one.longest_rank_span_s for one in found])),
        utilization=np.mean([one.busy_s for one in found], axis=0) / pipeline,
        peak_memory_bytes=tuple(peak for peak, _ in highest),
        activation_bytes=tuple(activations for _, activations in highest),
        parameter_bytes=tuple(int(weights[plan.pipeline.index(rank)]) for rank in plan.ranks),
        fullest_sample=int(np.argmax([one.peak_memory_bytes.max() for one in samples])) if samples else None,
        breakdown_s=breakdown_s(plan, without, _times(nominal), Times(pipeline, float(times.mean()))),
        kept_step=None if samples else nominal_step,
    )


# --- many predictions ----------------------------------------------------------------------------------------------


def varying(predictions: Iterable[Prediction]) -> list[str]:
    """The swept fields that have more than one value among these predictions."""
    values: dict[str, set[str]] = {}
    for prediction in predictions:
        for path, value in prediction.plan.scenario.swept.items():
            values.setdefault(path, set()).add(str(value))
    return [path for path, found in values.items() if len(found) > 1]


def fastest(predictions: Iterable[Prediction]) -> Prediction:
    """The fastest that fits or, where none does, the fastest."""
    return min(predictions, key=lambda prediction: (not prediction.fits, prediction.step_time_s))


def pareto(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Those for which no other is both faster and smaller, fastest first."""
    front: list[Prediction] = []
    for prediction in sorted(predictions, key=lambda p: (p.step_time_s, max(p.peak_memory_bytes))):
        if not front or max(prediction.peak_memory_bytes) < max(front[-1].peak_memory_bytes):
            front.append(prediction)
    return front
