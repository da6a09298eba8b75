"""All dimensions at once: how many stages, replicas and devices of a tensor group, with everything that goes with them.

    choices    K D T = all devices; what replicas divide; what is recomputed, and by which unit; stages on a rank; M
    estimate   seconds and bytes of each, from sums over its layers: thousands in a second
    evaluate   the most promising ones that seem to fit, in this order, until the next ones seem to be slower than the
               best by more than estimates are off
    fewer      the same with fewer devices, as far as their work, evenly divided, would take less than the best: slow
               links may cost more than a device brings, and 7 devices divide neither a batch of 32 nor many layers
    refine     the best of a few frames under every other schedule, and from there to better cuts and modes

A *frame* is what a search of one pipeline takes as given: replicas, what they divide, the tensor group and the unit of
recomputation. Every frame has a scenario, a profile and a judge of its own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from gpipe_sim.base.arrays import Array
from gpipe_sim.base.limits import CELLS
from gpipe_sim.cost.analytic import build_profile
from gpipe_sim.cost.collectives import spanning_s
from gpipe_sim.cost.profile import Profile
from gpipe_sim.cost.recompute import recomputed_in_backward
from gpipe_sim.cost.transformer import bytes_per_parameter
from gpipe_sim.make.making import make_plan, order_of_backwards, stage_costs
from gpipe_sim.plan.orders import SCHEDULES, position_of
from gpipe_sim.plan.partition import partition
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.stages import microbatch_sizes
from gpipe_sim.scenario.catalog import Link
from gpipe_sim.scenario.mesh import MESSAGES_INSIDE, SUMS_INSIDE, Dimensions
from gpipe_sim.scenario.schema import Checkpoint, RecomputeUnit, Scenario, Shard, Transformer
from gpipe_sim.scenario.validate import plan_contradictions
from gpipe_sim.search.choices import Space
from gpipe_sim.search.improve import Improver
from gpipe_sim.search.judge import Candidate, Judge
from gpipe_sim.search.other_schedules import with_other_schedules

_SEEMS_SLOWER = 1.1
"""Choices that are estimated to take longer than the best by this factor are not evaluated: estimates are less off."""
_SEEMS_LARGER = 1.15
"""The same of memory, over what a device has."""
_TOGETHER = 8
"""So many choices are evaluated before the best is looked at again."""
_WORK, _IMPROVE_WORK, _SIMULATED = 2_500_000, 100_000, 150_000
"""In actions, about a second for a million of them: of all evaluations, of each improvement, and of plans of a batch
that must be simulated."""
_REFINED = 6
"""Of so many frames the best plan is refined."""
_FEW = 400
"""So few choices are all evaluated."""
_SMALLEST = 24
"""Where nothing seems to fit, so many that take the least memory are evaluated."""
_LARGEST = 64
"""Samples of the largest micro-batch that is tried, unless there are few micro-batches."""
_FEWEST = 4
"""Up to so many micro-batches are tried however large they are: what links take does not grow with their samples."""
_WORLDS = 48
"""So many smaller numbers of devices are tried at most: of more, ever fewer the smaller they are."""
_CLEARLY_LESS = 0.99
"""A plain pipeline is run as GPipe where that is estimated to take less than this share of what 1F1B does: it has more
micro-batches on their way over slow links, and needs more memory."""


_NOTHING: tuple[Checkpoint, ...] = ("never",)


class Frame(NamedTuple):
    """What is the same for all pipelines of a search."""

    replicas: int
    shard: Shard
    tensor: int
    unit: RecomputeUnit
    order: Dimensions = SUMS_INSIDE


class Choice(NamedTuple):
    """A plan but for its cut."""

    frame: Frame
    ranks: int
    schedule: str
    stages_per_rank: int
    microbatches: int
    mode: Checkpoint

    @property
    def world(self) -> int:
        """Devices in use."""
        return self.ranks * self.frame.replicas * self.frame.tensor


class Estimate(NamedTuple):
    """What a choice seems to take."""

    seconds: float
    peak_bytes: float
    choice: Choice


class JointSearch:
    """The search of one space."""

    def __init__(self, space: Space) -> None:
        """Nothing is evaluated with jitter: plans near each other are weighed with it at the end (`advise`)."""
        calm = space.scenario.cluster.model_copy(update={"jitter": None})
        self._jittery = space.scenario.cluster
        self.scenario = replace(space.scenario, cluster=calm)
        self.space = replace(space, scenario=self.scenario)
        self.limit = self.scenario.cluster.memory_limit
        self.judges: dict[Frame, Judge] = {}
        self._scenario, self._profile = cache(self._make_scenario), cache(self._make_profile)
        self._balance = lru_cache(maxsize=4096)(self._make_balance)
        self._traffic_of = cache(self._make_traffic)

    @property
    def found(self) -> list[Candidate]:
        """Everything that was evaluated, fastest first."""
        every = (candidate for judge in self.judges.values() for candidate in judge.found.values())
        return sorted(every, key=lambda candidate: (candidate.step_time_s, candidate.peak_bytes))

    @property
    def best_s(self) -> float:
        """Step time of the fastest that fits; where something else than time is made small, nothing is too slow."""
        if self.space.objective != "time":
            return np.inf
        return next((candidate.step_time_s for candidate in self.found if candidate.fits), np.inf)

    @property
    def best(self) -> float:
        """What is made small, of the best that fits."""
        values = (
            self._value(one.step_time_s, one.peak_bytes, one.plan.world)
            for judge in self.judges.values()
            for one in judge.found.values()
            if one.fits
        )
        return min(values, default=np.inf)

    def _value(self, seconds: float, peak_bytes: float, world: int) -> float:
        """What is made small: seconds, bytes, or device seconds, which are money."""
        objective = self.space.objective
        return peak_bytes if objective == "memory" else seconds * world if objective == "money" else seconds

    def _promise(self, one: Estimate) -> float:
        """The same as it is estimated, with a margin for what may not fit."""
        larger = one.peak_bytes > self.limit and self.space.objective != "memory"
        return self._value(one.seconds, one.peak_bytes, one.choice.world) * (_SEEMS_SLOWER if larger else 1)

    @property
    def work(self) -> int:
        """Of all judges."""
        return sum(judge.work for judge in self.judges.values())

    def run(self) -> list[Candidate]:
        """By the steps at the top."""
        estimates = self._estimates(self.choices())
        self._evaluate(estimates, few=len(estimates) <= _FEW)
        for point in self.space.swept:
            plan = make_plan(replace(point, cluster=self.scenario.cluster))
            self._judge(frame_of(plan), [plan], np.inf)
        if self.space.objective == "time":
            self._evaluate(self._estimates(self.choices_of_fewer()), few=False)
        self._evaluate_neighbours(estimates)
        self._refine()
        return [replace(one, plan=self._with_jitter(one.plan)) for one in self.found]

    def _with_jitter(self, plan: Plan) -> Plan:
        if self._jittery.jitter is None:
            return plan
        return replace(plan, scenario=replace(plan.scenario, cluster=self._jittery))

    def _estimates(self, choices: Iterable[Choice]) -> list[Estimate]:
        """Of all choices, without GPipe where it is as good as 1F1B."""
        estimates = sorted(map(self.estimate, choices))
        if "schedule" in (self.scenario.document.data.get("plan") or {}):
            return estimates
        plain = {one.choice: one.seconds for one in estimates if one.choice.schedule == "1f1b"}
        return [
            one
            for one in estimates
            if one.choice.schedule != "gpipe"
            or one.seconds < _CLEARLY_LESS * plain[one.choice._replace(schedule="1f1b")]
        ]

    def _evaluate(self, estimates: list[Estimate], *, few: bool) -> None:
        """The most promising first, while there is work left and they are promising; all of them if they are few."""
        end = self.work + _WORK
        promising = [one for one in estimates if few or one.peak_bytes <= _SEEMS_LARGER * self.limit]
        promising.sort(key=self._promise)
        smallest = sorted(estimates, key=lambda one: one.peak_bytes)[:_SMALLEST]
        estimates = promising or (smallest if self.best == np.inf else [])
        for first in range(0, len(estimates), _TOGETHER):
            some, best_s = estimates[first : first + _TOGETHER], self.best_s
            if not few and (self._promise(some[0]) > _SEEMS_SLOWER * self.best or self.work > end):
                break
            for one in some:
                exactly = few and self.work < _WORK
                self._judge(one.choice.frame, [self.plan(one.choice)], best_s, exactly=exactly)

    def _evaluate_neighbours(self, estimates: list[Estimate]) -> None:
        """What one would try first: copies of the whole model, and one tensor group, the best of each by estimate."""
        world = max((one.choice.world for one in estimates), default=1)
        for name in ("replicas", "tensor"):
            alone = [one for one in estimates if getattr(one.choice.frame, name) == world > 1]
            fitting = [one for one in alone if one.peak_bytes <= self.limit]
            for one in (fitting or sorted(alone, key=lambda one: one.peak_bytes))[:2]:
                self._judge(one.choice.frame, [self.plan(one.choice)], np.inf)

    def _refine(self) -> None:
        """The best of a few frames that fit."""
        if self.space.objective != "time":
            return
        best: dict[Frame, Candidate] = {}
        for candidate in self.found:
            if candidate.fits:
                best.setdefault(frame_of(candidate.plan), candidate)
        for frame, candidate in list(best.items())[:_REFINED]:
            if candidate.step_time_s > _SEEMS_SLOWER * self.best_s:
                break
            space = replace(self.space, scenario=self._scenario(frame))
            if "schedule" not in (self.scenario.document.data.get("plan") or {}):
                others = list(with_other_schedules(candidate.plan))
                self._judge(frame, others, self.best_s)
            fitting = [one for one in self.judges[frame].found.values() if one.fits]
            fastest = min(fitting, key=lambda one: one.step_time_s)
            Improver(space, self.judges[frame], self.limit).improve(fastest, _IMPROVE_WORK)

    def _judge(self, frame: Frame, plans: list[Plan], best_s: float, *, exactly: bool = False) -> None:
        """Evaluate; of plans that must be simulated those that may be the best or, unless `exactly`, seem to be."""
        work = np.inf if exactly or best_s == np.inf else _SIMULATED
        self.judges.setdefault(frame, Judge()).judge(plans, best_s, work)

    # --- choices -----------------------------------------------------------------------------------------------------

    def choices(self) -> Iterator[Choice]:
        """Every way to use all devices, and where the objective is money fewer of them too."""
        if not self.space.are_ranks:
            return
        devices = self.scenario.cluster.num_devices or 1
        worlds = [devices // n for n in range(1, devices + 1) if devices % n == 0]
        some = False
        for world in worlds:
            if some and self.space.objective != "money":
                break
            for choice in self._of_world(world):
                some = True
                yield choice

    def choices_of_fewer(self) -> Iterator[Choice]:
        """Ways to use fewer devices that may be faster than the best."""
        if not self.space.are_ranks:
            return
        devices = self.scenario.cluster.num_devices or 1
        fewer: Sequence[int] = range(1, devices)
        if len(fewer) > _WORLDS:
            fewer = np.unique(np.geomspace(1, devices - 1, _WORLDS).astype(int)).tolist()
        for world in (devices - n for n in fewer):
            if self.least_s(world) < self.best_s:
                yield from self._of_world(world)

    def least_s(self, world: int) -> float:
        """No plan on so many devices takes less: forwards and backwards of the whole batch, evenly divided."""
        return self._device_s / world

    @cached_property
    def _device_s(self) -> float:
        profile = self._profile(1)
        each = [(float((profile.at(n).forward_s + profile.at(n).backward_s).sum()) / n) for n in profile.sizes]
        fastest = min([1.0, *self.scenario.cluster.slowdown.values()])
        return min(each) * self.scenario.batch * fastest

    def _of_world(self, world: int) -> Iterator[Choice]:
        for T in self.space.tensors or _divisors(world):
            for D in self.space.replicas_open or _divisors(world // T if world % T == 0 else 0):
                K, rest = divmod(world, T * D)
                if rest or not K or self.scenario.batch % D:
                    continue
                for order in self._orders(D, K):
                    if not self._cannot(T, D, K, order):
                        yield from self._of_mesh(T, D, K, order)

    def _orders(self, D: int, K: int) -> tuple[Dimensions, ...]:
        """How devices are numbered matters where there are several replicas of several ranks, on several nodes or on
        devices that differ."""
        cluster = self.scenario.cluster
        if D == 1 or K == 1 or (cluster.nodes == 1 and not cluster.slowdown):
            return (SUMS_INSIDE,)
        return self.space.orders or (SUMS_INSIDE, MESSAGES_INSIDE)

    def _cannot(self, T: int, D: int, K: int, order: Dimensions) -> bool:
        """Whether groups or replicas of that size cannot be, or not there."""
        size = {"tensor": T, "replicas": D, "stages": K, "order": order, "microbatches": None}
        chosen = self.scenario.plan.model_copy(update=size)
        found = plan_contradictions(chosen, self.scenario.model, self.scenario.cluster, self.scenario.batch)
        return any(path[0] == "plan" for path, _ in found)

    def _of_mesh(self, T: int, D: int, K: int, order: Dimensions) -> Iterator[Choice]:
        space, samples, layers = self.space, self.scenario.batch // D, self._layers
        model = self.scenario.model
        shards: tuple[Shard, ...] = space.shards or ("none", "optimizer", "parameters")
        quadratic = isinstance(model, Transformer) and model.attention == "classic"
        units: tuple[RecomputeUnit, ...] = space.units or (
            ("stage", "layer", "attention") if quadratic else ("stage", "layer")
        )
        modes = [mode for mode in space.checkpoints or ("never", "always") if isinstance(mode, str)]
        for schedule, v in self._schedules(K):
            counts = space.microbatches if not space.open_counts else _counts(samples)
            for M in counts:
                if M > samples or v * K > layers or v * K * M > CELLS or SCHEDULES[schedule].refuses(K, v, M):
                    continue
                for shard in shards if D > 1 else ("none",):
                    for mode in modes:
                        for unit in units if mode != "never" else units[:1]:
                            if unit == "stage" or not SCHEDULES[schedule].splits:
                                yield Choice(Frame(D, shard, T, unit, order), K, schedule, v, M, mode)

    def _schedules(self, K: int) -> Iterator[tuple[str, int]]:
        """Those that are given; else GPipe, and 1F1B, plain and interleaved, from which the others are tried at the
        end."""
        given = "schedule" in (self.scenario.document.data.get("plan") or {})
        plain = self.space.schedules if given else ("1f1b", "gpipe")
        beyond = [(name, v) for name, v in self.space.beyond if given or name == "interleaved_1f1b"]
        for name in plain:
            yield name, 1
        for name, v in beyond:
            if (K > 1 or given) and (v == 1 or self.scenario.cluster.overlap):
                yield name, v

    @property
    def _layers(self) -> int:
        return self.scenario.model.num_layers or 0

    # --- plans -------------------------------------------------------------------------------------------------------

    def _make_scenario(self, frame: Frame) -> Scenario:
        update = {
            "replicas": frame.replicas,
            "shard": frame.shard,
            "tensor": frame.tensor,
            "recompute_unit": frame.unit,
            "order": frame.order,
        }
        return replace(self.scenario, plan=self.scenario.plan.model_copy(update=update))

    def _make_profile(self, tensor: int) -> Profile:
        """One for all frames with such groups: it does not depend on the rest of them."""
        scenario = self._scenario(Frame(1, "none", tensor, "stage"))
        return build_profile(scenario, _divisors(self.scenario.batch))

    def _make_balance(
        self,
        tensor: int,
        unit: RecomputeUnit,
        mode: Checkpoint,
        slowdowns: tuple[float, ...],
        sizes: tuple[int, ...],
    ) -> tuple[int, ...]:
        modes = (mode,) * len(slowdowns)
        return partition(stage_costs(self._profile(tensor), sizes, modes, list(slowdowns), unit))

    def _slowdowns(self, choice: Choice) -> tuple[float, ...]:
        """Of each stage, in the slowest replica."""
        pattern, by_rank = SCHEDULES[choice.schedule].pattern, self._traffic(choice).slowdowns
        K = choice.ranks
        return tuple(by_rank[position_of(pattern, stage, K)] for stage in range(K * choice.stages_per_rank))

    def plan(self, choice: Choice) -> Plan:
        """Cut so that the slowest stage is the fastest."""
        frame, K, v = choice.frame, choice.ranks, choice.stages_per_rank
        scenario, S = self._scenario(frame), K * v
        return Plan(
            scenario=scenario,
            profile=self._profile(frame.tensor),
            balance=self._cut(choice),
            placement=tuple(position_of(SCHEDULES[choice.schedule].pattern, stage, K) for stage in range(S)),
            num_microbatches=choice.microbatches,
            checkpoint=(choice.mode,) * S,
            schedule=choice.schedule,
            recompute=self.space.recomputes[0],
            recompute_unit=frame.unit,
            replicas=frame.replicas,
            tensor=frame.tensor,
            dimensions=frame.order,
            shard=frame.shard,
            backward=order_of_backwards(choice.schedule, self.space.backwards[0]),
            window=self.space.windows[0],
        )

    def _cut(self, choice: Choice) -> tuple[int, ...]:
        frame = choice.frame
        sizes = microbatch_sizes(self.scenario.batch // frame.replicas, choice.microbatches)
        kinds = (sizes[0],) if len(set(sizes)) == 1 else sizes
        unit = frame.unit if choice.mode != "never" else "stage"
        return self._balance(frame.tensor, unit, choice.mode, self._slowdowns(choice), kinds)

    # --- estimates ---------------------------------------------------------------------------------------------------

    def estimate(self, choice: Choice) -> Estimate:
        """Of the slowest and of the fullest rank: the first, or the last, which has the head.

        seconds   M x the slowest rank's or, if that is more, its messages', + what the schedule's ideal bubble is of
                  the average rank's, + a message's way through all ranks and back; where that is more, M / those in
                  flight x a micro-batch's way there and back; + collectives of the replicas, half of which other
                  stages hide, + update
        bytes     weights, gradients and state as they are divided, + micro-batches in flight x what each keeps
        """
        frame, K, v, M, mode = choice.frame, choice.ranks, choice.stages_per_rank, choice.microbatches, choice.mode
        profile, D = self._profile(frame.tensor), frame.replicas
        unit: RecomputeUnit = frame.unit if mode != "never" else "stage"
        size = -(-(self.scenario.batch // D) // M)
        plain, costs = profile.at(size), recomputed_in_backward(profile, unit).at(size)
        again = plain.forward_s if mode != "never" and unit == "stage" else 0.0
        # Hardly another one for larger micro-batches.
        balance = self._balance(frame.tensor, unit, mode, self._slowdowns(choice), (1,))
        ends = np.cumsum(balance)
        firsts = ends - balance
        position = [position_of(SCHEDULES[choice.schedule].pattern, stage, K) for stage in range(K * v)]

        def by_rank(layers: Array) -> Array:
            sums = np.append(0.0, np.cumsum(layers))
            total: Array = np.bincount(position, sums[ends] - sums[firsts], minlength=K).astype(float)
            return total

        work = by_rank(plain.forward_s + costs.backward_s + again) * self._traffic(choice).slowdowns
        bubble = SCHEDULES[choice.schedule].bubble_ideal(K, v, M)
        weights = by_rank(profile.parameter_bytes)
        traffic, message = self._traffic(choice), float(plain.output_bytes[:-1].max(initial=0.0))
        carried = float(traffic.s_per_byte.max(initial=0.0)) * message * v
        busy = max(float(work.max()), carried) if self.scenario.cluster.overlap else float(work.max()) + 2 * carried
        seconds = M * (busy + float(work.mean()) * bubble / (1 - bubble))
        if K > 1:
            way = 2 * float((traffic.s_per_byte * message + traffic.latency_s).sum())
            at_once = M if choice.schedule in ("gpipe", "interleaved_gpipe") else min(M, K if v == 1 else 2 * K)
            seconds = max(seconds + way, M / at_once * (float(work.sum()) + v * way))
        seconds += float(by_rank(profile.optimizer_s).max()) / (1 if frame.shard == "none" else D)
        seconds += self._collectives_s(choice, float(weights.max())) * (0.5 if K > 1 else 1.0)

        per = bytes_per_parameter(self.scenario.optimizer, profile.dtype, self.scenario.precision)
        state, shard = per.optimizer / per.weight, frame.shard if D > 1 else "none"
        held = 1 + per.gradient / per.weight + (state if shard == "none" else state / D)
        held += 1 / D if shard == "parameters" else 0.0
        in_flight = np.minimum(M, K - np.arange(K)) if v == 1 else np.full(K, min(M * v, (v + 1) * K) / v)
        if choice.schedule in ("gpipe", "interleaved_gpipe"):
            in_flight = np.full(K, M)
        kept, inside = by_rank(costs.saved_bytes), by_rank(plain.saved_bytes)
        entering = v * float(plain.output_bytes[0])
        activations = (
            in_flight * kept if not (mode != "never" and unit == "stage") else in_flight * entering + inside / v
        )
        return Estimate(seconds, float((weights * held + activations).max()), choice)

    def _collectives_s(self, choice: Choice, weights: float) -> float:
        cluster, traffic = self.scenario.cluster, self._traffic(choice)
        if choice.frame.replicas == 1:
            return 0.0
        per = bytes_per_parameter(self.scenario.optimizer, self.scenario.dtype, self.scenario.precision)
        group = *traffic.group, cluster.link, traffic.network or cluster.link, traffic.sharers
        summed = weights * per.gradient / per.weight
        if choice.frame.shard == "none":
            return spanning_s("sum", summed, *group)
        return spanning_s("scatter", summed, *group) + spanning_s("gather", weights, *group)

    def _traffic(self, choice: Choice) -> "_Traffic":
        D, _, T, _, order = choice.frame
        return self._traffic_of(Frame(D, "none", T, "stage", order), choice.ranks)

    def _make_traffic(self, frame: Frame, K: int) -> "_Traffic":
        scenario = self._scenario(frame)
        plan = Plan(
            scenario=scenario,
            profile=self._profile(frame.tensor),
            balance=(1,) * K,
            placement=tuple(range(K)),
            num_microbatches=1,
            checkpoint=_NOTHING * K,
            schedule="1f1b",
            recompute="early",
            replicas=frame.replicas,
            tensor=frame.tensor,
            dimensions=frame.order,
            backward="fifo",
            window=None,
        )
        slowest = [max(plan.rank_slowdown(rank, replica) for replica in range(plan.replicas)) for rank in plan.ranks]
        links = [(plan.link(edge), plan.sharers if plan.nic_route(edge) else 1) for edge in range(K - 1)]
        rings = Counter(nic for rank in plan.ranks for nic in plan.ring_nics(rank))
        return _Traffic(
            s_per_byte=np.array([sharers / link.bandwidth for link, sharers in links]) / plan.message_slices,
            latency_s=np.array([link.latency for link, _ in links]),
            slowdowns=tuple(slowest),
            group=plan.group,
            network=min(map(plan.group_network, plan.ranks), key=lambda one: one.bandwidth if one else 0.0),
            sharers=plan.collective_sharers * max(rings.values(), default=1),
        )


class _Traffic(NamedTuple):
    """What the network costs a mesh, whatever is sent, and how fast its ranks are."""

    s_per_byte: Array
    """From each rank to the next."""
    latency_s: Array
    slowdowns: tuple[float, ...]
    """Of each rank, in the slowest replica."""
    group: tuple[int, int]
    """Of the ranks that hold the same stages: how many in each node, and in how many nodes."""
    network: Link | None
    """Between those nodes, of the rank for which it is slowest."""
    sharers: int
    """Of a NIC, where all ranks of a node sum at once."""


def frame_of(plan: Plan) -> Frame:
    """Of a plan."""
    return Frame(plan.replicas, plan.shard, plan.tensor, plan.recompute_unit, plan.dimensions)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _counts(samples: int) -> Iterable[int]:
    """Numbers of equal micro-batches, none of them too large."""
    return [M for M in reversed(_divisors(samples)) if samples // M <= _LARGEST or M <= _FEWEST]
