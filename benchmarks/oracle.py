"""Does the search find the best plan? Families of cases, each with an oracle that knows a plan to be as good as:

* *latency*: transformers behind slow links; the best of what `gpipe simulate` would sweep, which the search may choose;
* *mixtures*: the same over stages, replicas and tensor groups at once, on all devices or fewer of them;
* *choices*: the search itself with fewer values to choose from;
* *placement*: ranks that are slow; every placement with the cut that makes the slowest stage fastest;
* *shared NIC*: two nodes; every plan there is, simulated;
* *tight memory, small*: slow links, little memory; every plan there is;
* *profiles*: measured networks behind 10 Gbit/s or PCIe; plain cuts, one by dynamic programming with transfers;
* *tight memory, large*: a random local search in the same setup, with as many plans as it can judge in some seconds.

Worse is a step that takes longer than the oracle's, or no plan where the oracle has one. The goal is to be never worse.
Run with: .venv/bin/python benchmarks/oracle.py
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rows import Headline, add_option, save

from gpipe_sim.base.files import Document, InputError
from gpipe_sim.cost.pipedream import import_pipedream
from gpipe_sim.make.making import make_plan, order_of_backwards, stage_costs
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.scenario.schema import Scenario
from gpipe_sim.search.choices import space_of
from gpipe_sim.search.search import search
from gpipe_sim.step.evaluate import evaluate, obstacle
from gpipe_sim.step.metrics import StepMetrics, step_metrics
from gpipe_sim.step.simulate import simulate

Data = dict[str, Any]
PIPEDREAM = os.environ.get("GPIPE_PIPEDREAM_PROFILES")
GRAPHS = Path(PIPEDREAM) if PIPEDREAM else Path(__file__).parents[1] / "tests" / "data" / "graphs"
"""PipeDream's own profiles where there are any, or small ones of our own."""
GRAPH_NAMES = ("vgg16", "gnmt") if PIPEDREAM else ("convolutions", "recurrent")
SECONDS_GOAL = 10.0
"""CPU seconds that a search may take."""
SAME = 1 + 1e-9
MODES = ("never", "except_last", "always")


@dataclass(frozen=True)
class Case:
    """One scenario, and what its oracle knows."""

    name: str
    data: Data
    oracle: Callable[[], float]
    """Seconds of a step that can be reached; infinite where nothing is known to fit."""


def points_of(data: Data) -> list[Scenario]:
    """The scenario's points, one for each value of its lists."""
    return list(parse_scenario(Document("oracle.yaml", data)))


def found_by_search(data: Data) -> float:
    """Seconds of the fastest plan that fits."""
    return min(
        (found.step_time_s for found in search(replace(space_of(points_of(data)), beyond=())) if found.fits),
        default=np.inf,
    )


def metrics_of(plans: Sequence[Plan]) -> list[StepMetrics]:
    """Of plans that are all evaluated, or all simulated."""
    if plans and obstacle(plans[0]) is not None:
        return [step_metrics(simulate(plan)) for plan in plans]
    return evaluate(plans) if plans else []


def best_that_fits(plans: Iterable[Plan]) -> float:
    """Seconds of the fastest of these plans that fits."""
    best, chosen = np.inf, iter(plans)
    while some := list(itertools.islice(chosen, 5000)):
        shared = [obstacle(plan) is not None for plan in some]
        for slow in (False, True):
            part = [plan for plan, one in zip(some, shared, strict=True) if one == slow]
            for plan, metrics in zip(part, metrics_of(part), strict=True):
                if metrics.peak_memory_bytes.max() <= plan.memory_limit:
                    best = min(best, metrics.step_time_s)
    return best


def swept(data: Data) -> float:
    """What `gpipe simulate` would find best."""
    return best_that_fits(map(make_plan, points_of(data)))


def every_cut(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield tuple(np.diff([0, *inner, num_layers]).tolist())


def every_plan(data: Data, modes: Sequence[str] = MODES) -> Iterator[Plan]:
    """Every cut with every choice of modes, for each of the scenario's points."""
    for point in points_of(data):
        plan = make_plan(point)
        for cut in every_cut(plan.profile.num_layers, plan.num_stages):
            for chosen in itertools.product(modes, repeat=plan.num_stages):
                yield replace(plan, balance=cut, checkpoint=chosen)


# --- families ------------------------------------------------------------------------------------------------------


def latency_cases(small: bool) -> Iterator[Case]:
    luck = np.random.default_rng(1)
    fixed = [(24, 2048, 8, 64, latency) for latency in (5e-3, 20e-3, 200e-3)]
    drawn = [
        (
            int(luck.integers(6, 30)),
            int(luck.choice([512, 1024, 2048])),
            int(luck.integers(2, 9)),
            int(luck.choice([8, 24, 32, 48])),
            float(10 ** luck.uniform(-5, -1.5)),
        )
        for _ in range(2 if small else 16)
    ]
    for blocks, hidden, devices, batch, latency in (fixed[:1] if small else fixed) + drawn:
        data: Data = {
            "name": "latency",
            "model": {"kind": "transformer", "layers": blocks, "hidden": hidden, "heads": 16, "vocab": 32000}
            | {"sequence": 1024},
            "batch": batch,
            "cluster": {"device": "a100-80gb", "devices_per_node": devices}
            | {"link": {"bandwidth": "25 GB/s", "latency": f"{latency!r} s"}},
        }
        counts = [M for M in (1, 2, 4, 8, 16, 32, 64) if M <= batch]
        lists = {"stages": [*range(1, devices + 1)], "microbatches": counts, "schedule": ["gpipe", "1f1b"]}
        lists |= {"checkpoint": ["never", "always"]}
        name = f"{blocks} blocks, {devices} devices, {latency * 1e3:.2g} ms"
        yield Case(name, data, lambda data=data, lists=lists: swept(data | {"plan": lists}))


def mixture_cases(small: bool) -> Iterator[Case]:
    luck = np.random.default_rng(8)
    fixed = [(12, 512, 5, 32, 31e-3, 10, 60), (23, 512, 7, 24, 7e-6, 300, 60), (24, 2048, 7, 6, 3e-3, 300, 0)]
    drawn = [
        (
            int(luck.integers(4, 26)),
            int(luck.choice([512, 1024, 2048, 4096])),
            int(luck.integers(2, 9)),
            int(luck.choice([6, 8, 16, 24, 32, 48])),
            float(10 ** luck.uniform(-6, -1.5)),
            int(luck.choice([2, 10, 50, 300])),
            int(luck.choice([0, 60, 70, 75])),
        )
        for _ in range(0 if small else 13)
    ]
    for blocks, hidden, devices, batch, latency, bandwidth, reserve in fixed[:2] if small else fixed + drawn:
        data: Data = {
            "name": "mixture",
            "model": {"kind": "transformer", "layers": blocks, "hidden": hidden, "heads": 16, "vocab": 32000}
            | {"sequence": 1024},
            "batch": batch,
            "cluster": {"device": "a100-80gb", "devices_per_node": devices, "memory_reserve": f"{reserve} GiB"}
            | {"link": {"bandwidth": f"{bandwidth} GB/s", "latency": f"{latency!r} s"}},
        }
        oracle = lambda data=data, devices=devices, few=small: best_that_fits(mixtures(data, devices, few=few))  # noqa: E731
        yield Case(f"{blocks} blocks, {devices} devices, {latency * 1e3:.2g} ms", data, oracle)


def mixtures(data: Data, devices: int, *, few: bool) -> Iterator[Plan]:
    """Pipelines, replicas of them and tensor groups on any number of devices, with the smallest bottleneck."""
    schedules, groups = (("1f1b",), (1,)) if few else (("gpipe", "1f1b", "interleaved_1f1b"), (1, 2, 4, 8))
    for T, D, schedule in itertools.product(groups, range(1, devices + 1), schedules):
        v = 2 if schedule == "interleaved_1f1b" else 1
        for K in range(1, devices // (T * D) + 1):
            spec: Data = {"stages": v * K, "stages_per_rank": v, "replicas": D, "tensor": T, "schedule": schedule}
            spec |= {"microbatches": [M for M in (1, 2, 4, 8, 16, 32, 64) if M <= data["batch"] // D]}
            spec |= {"checkpoint": ["never", "always"], "recompute_unit": ["stage", "layer"]}
            spec |= {"shard": ["none", "optimizer", "parameters"] if D > 1 else "none"}
            with suppress(InputError):  # which layers, batch or devices do not divide into
                yield from map(make_plan, points_of(data | {"plan": spec}))


def choices_cases(small: bool) -> Iterator[Case]:
    luck = np.random.default_rng(2)
    for number in range(3 if small else 12):
        devices = int(luck.integers(3, 9))
        data: Data = {
            "name": "choices",
            "model": {"kind": "transformer", "layers": int(luck.integers(8, 30)), "hidden": 1024, "heads": 16}
            | {"vocab": 32000, "sequence": 1024},
            "batch": int(luck.choice([12, 16, 30, 32])),
            "cluster": {"device": "a100-80gb", "devices_per_node": devices}
            | {"memory_reserve": f"{float(luck.choice([0, 70, 75, 77])):.1f} GiB"}
            | {"link": {"bandwidth": "5 GB/s", "latency": f"{float(10 ** luck.uniform(-5, -2))!r} s"}},
        }
        fewer = {"stages": [devices - 1, devices], "window": 2, "backward": "reverse"}
        more = {"stages": [devices - 1, devices], "window": [1, 2, 4, "all"], "backward": ["reverse", "fifo"]}
        oracle = lambda data=data, fewer=fewer: found_by_search(data | {"plan": fewer})  # noqa: E731
        yield Case(f"choices {number}", data | {"plan": more}, oracle)


def placement_cases(small: bool) -> Iterator[Case]:
    luck = np.random.default_rng(3)
    for number in range(2 if small else 6):
        devices, nodes = (4, 1) if number % 2 == 0 else (2, 2)
        total = devices * nodes
        slow = {int(rank): float(luck.choice([3, 10])) for rank in luck.choice(total - 1, 1 + number % 2, False)}
        data: Data = {
            "name": "placement",
            "model": {"kind": "transformer", "layers": 10, "hidden": 1024, "heads": 16, "vocab": 32000}
            | {"sequence": 1024},
            "batch": 16,
            "cluster": {"device": "a100-80gb", "devices_per_node": devices, "nodes": nodes, "slowdown": slow}
            | {"link": {"bandwidth": "100 GB/s", "latency": "5 us"}}
            | {"network": {"bandwidth": "2 GB/s", "latency": "30 us"}},
        }

        def oracle(data: Data = data, total: int = total) -> float:
            plans = []
            for K in range(1, total + 1):
                for ranks in itertools.permutations(range(total), K):
                    plan = {"stages": K, "microbatches": 8, "schedule": "1f1b", "checkpoint": "never"}
                    point = points_of(data | {"plan": plan | {"placement": list(ranks)}})[0]
                    plans.append(make_plan(point))
            return best_that_fits(plan for plan in plans if obstacle(plan) is None)

        yield Case(f"slow ranks {slow} of {nodes} x {devices}", data, oracle)


def nic_cases(small: bool) -> Iterator[Case]:
    luck = np.random.default_rng(4)
    for number in range(2 if small else 8):
        data: Data = {
            "name": "nic",
            "model": {"kind": "layers", "layers": random_layers(luck, 6, saved=(4, 12))},
            "batch": 4,
            "dtype": "fp32",
            "cluster": {
                "device": {"memory": "400 MB", "compute": "1 TFLOP/s", "bandwidth": "100 GB/s"},
                "nodes": 2,
                "devices_per_node": 2,
                "link": {"bandwidth": "10 GB/s", "latency": "10 us"},
                "network": {"bandwidth": f"{float(luck.choice([0.5, 1, 2]))!r} GB/s", "latency": "30 us"},
            },
            "plan": {"stages": 4, "microbatches": [2, 4], "schedule": ["gpipe", "1f1b"]}
            | {"placement": [0, 2, 1, 3], "window": 2, "backward": "reverse"}
            | ({"checkpoint": ["never", "always"]} if small else {}),
        }

        def oracle(data: Data = data) -> float:
            if "checkpoint" not in data["plan"]:
                return best_that_fits(every_plan(data, ("never", "always")))
            plans = (replace(plan, balance=cut) for plan in map(make_plan, points_of(data)) for cut in every_cut(6, 4))
            return best_that_fits(plans)

        yield Case(f"NIC {number}", data, oracle)


def small_memory_cases(small: bool) -> Iterator[Case]:
    luck = np.random.default_rng(5)
    for number in range(3 if small else 16):
        num_layers, devices = (6, 3) if small else (int(luck.integers(8, 10)), int(luck.integers(3, 5)))
        data: Data = {
            "name": "tight",
            "model": {"kind": "layers", "layers": random_layers(luck, num_layers, saved=(4, 12))},
            "batch": 8,
            "dtype": "fp32",
            "cluster": {
                "device": {"memory": f"{float(luck.uniform(90, 260)):.0f} MB", "compute": "1 TFLOP/s"},
                "devices_per_node": devices,
                "link": {"bandwidth": f"{float(luck.choice([0.3, 1, 10]))!r} GB/s", "latency": "100 us"},
                "overlap": bool(luck.random() < 0.8),
            },
            "plan": {"stages": [devices - 1, devices], "microbatches": [4, 8], "schedule": ["gpipe", "1f1b"]}
            | {"window": 2, "backward": ["reverse", "fifo"]},
        }
        yield Case(f"{num_layers} layers, {devices} devices, {number}", data, lambda data=data: every_once(data))


def every_once(data: Data) -> float:
    """Every plan, an order of backwards that changes nothing tried once."""
    plans = every_plan(data)
    return best_that_fits(p for p in plans if p.backward == order_of_backwards(p.schedule, p.scenario.plan.backward))


def random_layers(luck: np.random.Generator, count: int, saved: tuple[float, float]) -> list[Data]:
    return [
        {
            "name": f"l{i}",
            "forward": f"{luck.uniform(0.5, 3)!r} ms",
            "backward": f"{luck.uniform(0.5, 6)!r} ms",
            "output": f"{luck.uniform(0.1, 4)!r} MB",
            "saved": f"{luck.uniform(*saved)!r} MB",
            "parameters": f"{luck.uniform(0, 10)!r} MB",
        }
        for i in range(count)
    ]


def profile_cases(small: bool) -> Iterator[Case]:
    names = GRAPH_NAMES[:1] if small else GRAPH_NAMES
    for name, link, devices in itertools.product(names, ("10gbit", "pcie3"), (4,) if small else (2, 4, 8)):
        folder = Path(tempfile.mkdtemp())
        import_pipedream(GRAPHS / f"{name}.graph.txt", 64).save(folder / "profile.json")
        data: Data = {
            "name": name,
            "model": {"kind": "profile", "path": str(folder / "profile.json")},
            "batch": 256,
            "cluster": {"device": "v100-16gb", "devices_per_node": devices, "link": link},
        }
        counts = (4, 16) if small else (4, 8, 16, 32, 64)
        oracle = lambda data=data, devices=devices, counts=counts: plain_cuts(data, devices, counts)  # noqa: E731
        yield Case(f"{name}, {devices} devices, {link}", data, oracle)


def plain_cuts(data: Data, devices: int, counts: Sequence[int]) -> float:
    """Equal layers, the smallest bottleneck, and the smallest bottleneck with transfers, in many setups."""
    plans = []
    for K, M, schedule, mode in itertools.product(range(1, devices + 1), counts, ("gpipe", "1f1b"), MODES):
        spec = {"stages": K, "microbatches": M, "schedule": schedule, "checkpoint": mode, "window": 2}
        plan = make_plan(points_of(data | {"plan": spec})[0])
        L = plan.profile.num_layers
        cuts = {plan.balance, tuple(L // K + (stage < L % K) for stage in range(K)), with_transfers(plan)}
        plans += [replace(plan, balance=cut) for cut in cuts]
    return best_that_fits(plans)


def with_transfers(plan: Plan) -> tuple[int, ...]:
    """Dynamic programming as PipeDream does it: the slower of a stage and its transfers, both ways, at its slowest."""
    K, L = plan.num_stages, plan.profile.num_layers
    sums = np.append(0.0, np.cumsum(stage_costs(plan.profile, plan.sizes, plan.checkpoint, [1.0] * K)[0]))
    link = plan.link(0) if K > 1 else None
    sent = sum(plan.profile.at(size).output_bytes for size in plan.sizes)
    crossing = np.append(0.0, 2 * sent / link.bandwidth) if link else np.zeros(L + 1)
    best = np.full((K + 1, L + 1), np.inf)
    best[0, 0], came = 0.0, np.zeros((K + 1, L + 1), dtype=int)
    for k, end in itertools.product(range(1, K + 1), range(1, L + 1)):
        edge = crossing[end] if k < K else 0.0
        cost = np.maximum(np.maximum(best[k - 1, :end], sums[end] - sums[:end]), edge)
        came[k, end] = int(cost.argmin())
        best[k, end] = cost.min()
    borders = [L]
    for k in range(K, 0, -1):
        borders.append(int(came[k, borders[-1]]))
    return tuple(np.diff(borders[::-1]).tolist())


def large_memory_cases(small: bool) -> Iterator[Case]:
    luck = np.random.default_rng(7)
    for _ in range(1 if small else 12):
        num_layers, devices = int(luck.integers(18, 40)), int(luck.integers(4, 9))
        data: Data = {
            "name": "tight",
            "model": {"kind": "layers", "layers": random_layers(luck, num_layers, saved=(4, 12))},
            "batch": 16,
            "dtype": "fp32",
            "cluster": {
                "device": {"memory": f"{float(luck.uniform(1.2, 3.5)) * 1000 / devices:.0f} MB"},
                "devices_per_node": devices,
                "link": {"bandwidth": f"{float(luck.choice([0.5, 2, 10]))!r} GB/s", "latency": "50 us"},
            },
            "plan": {"stages": devices, "microbatches": 16, "schedule": str(luck.choice(["gpipe", "1f1b"]))}
            | {"window": 2, "backward": "fifo"},
        }
        tries = 1500 if small else 12_000
        yield Case(f"{num_layers} layers, {devices} devices", data, lambda data=data, n=tries: local_search(data, n))


def local_search(data: Data, tries: int) -> float:
    """Random borders moved and random modes changed, many together, from several starts: simulated annealing."""
    luck, plan = np.random.default_rng(0), make_plan(points_of(data)[0])
    K, best = plan.num_stages, np.inf

    def cost(metrics: StepMetrics) -> float:
        over = metrics.peak_memory_bytes.max() / plan.memory_limit - 1
        return metrics.step_time_s * (1 + 5 * max(0.0, over) + (0.2 if over > 0 else 0.0))

    def changed(one: Plan) -> Plan:
        borders, modes = np.cumsum(one.balance)[:-1], list(one.checkpoint)
        for _ in range(luck.integers(1, 4)):
            if luck.random() < 0.6:
                borders[luck.integers(K - 1)] += luck.choice([-2, -1, 1, 2])
            else:
                modes[luck.integers(K)] = luck.choice(MODES)
        balance = tuple(np.diff([0, *borders.tolist(), one.profile.num_layers]).tolist())
        return replace(one, balance=balance if min(balance) > 0 else one.balance, checkpoint=tuple(map(str, modes)))

    starts = [replace(plan, checkpoint=(mode,) * K) for mode in MODES]
    each, together = tries // len(starts), 50
    for start in starts:
        here, its = start, cost(evaluate([start])[0])
        for turn in range(each // together):
            around = [changed(here) for _ in range(together)]
            found = evaluate(around)
            fits = [one.step_time_s for one in found if one.peak_memory_bytes.max() <= plan.memory_limit]
            best = min([best, *fits])
            costs = [cost(one) for one in found]
            first = int(np.argmin(costs))
            if costs[first] < its * (1 + 0.02 * luck.random() * (1 - turn * together / each)):
                here, its = around[first], costs[first]
    return best


FAMILIES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "latency": latency_cases,
    "mixtures": mixture_cases,
    "choices": choices_cases,
    "placement": placement_cases,
    "shared NIC": nic_cases,
    "tight memory, small": small_memory_cases,
    "profiles": profile_cases,
    "tight memory, large": large_memory_cases,
}


# --- report --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A case, judged."""

    case: Case
    ours: float
    oracle: float
    seconds: float

    @property
    def excess(self) -> float:
        """How much longer our step takes than the oracle's; negative where ours is faster."""
        return 0.0 if self.ours == self.oracle else self.ours / self.oracle - 1

    @property
    def is_worse(self) -> bool:
        """Beyond rounding."""
        return self.ours > self.oracle * SAME


def judged(case: Case) -> Outcome:
    """Search, and ask the oracle."""
    before = time.process_time()
    ours = found_by_search(case.data)
    seconds = time.process_time() - before
    return Outcome(case, ours, case.oracle(), seconds)


def headline(family: str, outcomes: Sequence[Outcome]) -> Headline:
    worse = [one for one in outcomes if one.is_worse]
    slowest = max(one.seconds for one in outcomes)
    return Headline(
        what=f"search {len(outcomes)} cases, {family}",
        peer="its oracle",
        ours=f"worse in {len(worse)}, {slowest:.1f} CPU s at most",
        theirs="a plan that is known",
        ratio=float(np.mean([one.oracle / one.ours if one.oracle < np.inf else 1.0 for one in outcomes])),
        held=not worse and slowest <= SECONDS_GOAL,
        repeat=".venv/bin/python benchmarks/oracle.py",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(FAMILIES), action="append", help="of the families, only this one")
    parser.add_argument("--cases", action="store_true", help="print every case")
    add_option(parser)
    arguments = parser.parse_args()
    console, headlines = Console(width=None if sys.stdout.isatty() else 120), list[Headline]()
    table = Table("family", "cases", "worse", "mean excess", "most", "mean CPU s", "most CPU s", "goal")
    for family in arguments.only or FAMILIES:
        outcomes = []
        for case in FAMILIES[family](False):
            outcomes.append(judged(case))
            one = outcomes[-1]
            if arguments.cases or one.is_worse:
                console.print(
                    f"{family}: {case.name}: {one.ours:.6g} s, oracle {one.oracle:.6g} s, {one.excess:+.2%}, "
                    f"in {one.seconds:.1f} s",
                    highlight=False,
                )
        headlines.append(headline(family, outcomes))
        excess, seconds = [max(0.0, one.excess) for one in outcomes], [one.seconds for one in outcomes]
        figures = f"{np.mean(excess):.2%}", f"{max(excess):.2%}", f"{np.mean(seconds):.1f}", f"{max(seconds):.1f}"
        worse = sum(one.is_worse for one in outcomes)
        table.add_row(family, str(len(outcomes)), str(worse), *figures, "held" if headlines[-1].held else "MISSED")
    console.print(table)
    save(arguments.rows, headlines)
    sys.exit(0 if all(one.held for one in headlines) else 1)


if __name__ == "__main__":
    main()
