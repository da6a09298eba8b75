"""How fast can plans be judged? The fast evaluator beside the SimPy model, in one run, on the same plans:

* *one plan*: cold, with its dependencies to be sorted out first, and warm, when a plan of its shape came before;
* *many plans* of one shape, as a search compares them: other cuts and other stages recomputed, memory included;
* *many samples* of one plan's jitter, memory included;
* *a search* over K = 1..16, M = 1..128, three schedules and the checkpoint mode of every stage, for 48 blocks.

Both must agree on step time and peak memory. CPU seconds, best of `--repeat`, taking turns; what counts are the ratios,
for the speed of a machine drifts. How good the cuts are is in `cuts.py`, how good the recommendation in `regret.py`.
Run with: .venv/bin/python benchmarks/planner.py
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from rich.console import Console
from rich.table import Table
from rows import Headline, add_option, save

from gpipe_sim.dependencies import graph_of
from gpipe_sim.evaluate import evaluate, evaluate_samples
from gpipe_sim.files import parse_yaml
from gpipe_sim.metrics import StepMetrics, step_metrics
from gpipe_sim.plan import Plan, make_plan
from gpipe_sim.search import search
from gpipe_sim.simulate import simulate
from gpipe_sim.space import Space, space_of
from gpipe_sim.sweep import parse_scenario

SIZES = ((8, 32), (32, 256), (64, 1024))
NUM_PLANS = 2000
SIMULATED = 10
"""Of the many, those that are simulated too."""
GOAL = 10_000
"""Plans per second."""
SEARCH_GOAL_S = 5.0
REPEAT = ".venv/bin/python benchmarks/planner.py"


def plan_of(K: int, M: int, schedule: str = "gpipe") -> Plan:
    """A transformer of at least two layers per stage on GPUs that jitter a little."""
    text = f"""
    model: {{kind: transformer, layers: {max(48, 2 * K)}, hidden: 2048, heads: 16, vocab: 32000, sequence: 1024}}
    batch: {4 * M}
    cluster:
      device: a100-80gb
      link: {{bandwidth: 25 GB/s, latency: 10 us}}
      jitter: {{cv: 0.05, samples: 100}}
    plan: {{stages: {K}, microbatches: {M}, checkpoint: always, schedule: {schedule}}}
    """
    return make_plan(parse_scenario(parse_yaml(text, "benchmark"))[0])


def search_space() -> Space:
    """A transformer of 48 blocks, everything left to choose."""
    text = """
    model: {kind: transformer, layers: 48, hidden: 2048, heads: 32, vocab: 32000, sequence: 1024}
    batch: 128
    cluster: {device: a100-80gb, devices_per_node: 16, link: {bandwidth: 300 GB/s, latency: 5 us}}
    """
    return space_of(list(parse_scenario(parse_yaml(text, "benchmark"))))


def variants(plan: Plan, count: int) -> list[Plan]:
    """Each cut moved by up to a layer, each stage recomputed or not."""
    luck, found = random.Random(0), []
    cuts = list(accumulate(plan.balance))[:-1]
    for _ in range(count):
        moved = sorted({cut + luck.choice((-1, 0, 1)) for cut in cuts})
        if len(moved) < len(cuts):
            moved = cuts
        balance = tuple(b - a for a, b in pairwise([0, *moved, plan.profile.num_layers]))
        modes = tuple(luck.choice(("never", "always", "except_last")) for _ in balance)
        found.append(replace(plan, balance=balance, checkpoint=modes))
    return found


def simulated(plans: Sequence[Plan]) -> list[StepMetrics]:
    return [step_metrics(simulate(plan)) for plan in plans]


def cold(plans: Sequence[Plan]) -> list[StepMetrics]:
    graph_of.cache_clear()
    return evaluate(plans)


def cpu_seconds(functions: Sequence[Callable[[], list[StepMetrics]]], repeat: int) -> list[float]:
    """The best time of each, after checking that they agree as far as each goes."""
    best = [float("inf")] * len(functions)
    for _ in range(repeat):
        answers = []
        for i, function in enumerate(functions):
            before = time.process_time()
            answers.append(function())
            best[i] = min(best[i], time.process_time() - before)
        for one, *others in zip(*answers, strict=False):
            for other in others:
                assert abs(one.step_time_s - other.step_time_s) < 1e-9 * one.step_time_s, "they disagree"
                assert (one.peak_memory_bytes == other.peak_memory_bytes).all(), "they disagree"
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each, the best counts (3)")
    add_option(parser)
    arguments = parser.parse_args()
    repeat, headlines = arguments.repeat, list[Headline]()
    console = Console()

    table = Table("one plan", "simpy s", "cold s", "warm s", "simpy / cold", "simpy / warm")
    for K, M in SIZES:
        one = [plan_of(K, M)]
        slow, first, fast = cpu_seconds(
            [lambda one=one: simulated(one), lambda one=one: cold(one), lambda one=one: evaluate(one)], repeat
        )
        seconds = [f"{value:.4f}" for value in (slow, first, fast)]
        table.add_row(f"K={K} M={M}", *seconds, f"{slow / first:.1f}", f"{slow / fast:.1f}")
    console.print(table)

    table = Table(f"many, K={SIZES[0][0]} M={SIZES[0][1]}", "simpy / s", "fast / s", "fast / simpy")
    rates = []
    for schedule in ("gpipe", "1f1b"):
        plan = plan_of(*SIZES[0], schedule)
        many = variants(plan, NUM_PLANS)
        slow, fast = cpu_seconds(
            [lambda many=many: simulated(many[:SIMULATED]), lambda many=many: evaluate(many)], repeat
        )
        rates.append(NUM_PLANS / fast)
        headlines.append(
            Headline(
                what=f"judge {NUM_PLANS} plans, K={SIZES[0][0]} M={SIZES[0][1]}, {schedule}",
                peer="our SimPy model",
                ours=f"{rates[-1]:.0f} plans/s",
                theirs=f"{SIMULATED / slow:.0f} plans/s",
                ratio=rates[-1] * slow / SIMULATED,
                held=rates[-1] >= GOAL,
                repeat=REPEAT,
            )
        )
        table.add_row(
            f"plans, {schedule}", f"{SIMULATED / slow:.0f}", f"{rates[-1]:.0f}", f"{rates[-1] * slow / SIMULATED:.0f}"
        )
        slow, fast = cpu_seconds(
            [
                lambda plan=plan: [step_metrics(simulate(plan, sample=sample)) for sample in range(SIMULATED)],
                lambda plan=plan: evaluate_samples(plan, range(NUM_PLANS)),
            ],
            repeat,
        )
        rate = NUM_PLANS / fast
        table.add_row(
            f"samples, {schedule}", f"{SIMULATED / slow:.0f}", f"{rate:.0f}", f"{rate * slow / SIMULATED:.0f}"
        )
    console.print(table)
    held = min(rates) >= GOAL
    console.print(f"goal: at least {GOAL} plans per second, memory included: {'held' if held else 'missed'}")

    space, best = search_space(), float("inf")
    for _ in range(repeat):
        graph_of.cache_clear()
        before = time.process_time()
        candidates = search(space)
        best = min(best, time.process_time() - before)
    frames = len(space.stages) * len(space.microbatches) * len(space.schedules)
    console.print(f"search: {frames} frames, {len(candidates)} plans evaluated, in {best:.2f} s")
    quick = best < SEARCH_GOAL_S
    console.print(f"goal: under {SEARCH_GOAL_S:.0f} s: {'held' if quick else 'missed'}")
    headlines.append(
        Headline(
            what=f"search {frames} frames of 48 blocks, every cut and checkpoint",
            peer=f"the goal of {SEARCH_GOAL_S:.0f} s",
            ours=f"{best:.2f} s",
            theirs=f"{SEARCH_GOAL_S:.0f} s",
            ratio=SEARCH_GOAL_S / best,
            held=quick,
            repeat=REPEAT,
        )
    )
    save(arguments.rows, headlines)
    raise SystemExit(0 if held and quick else 1)


if __name__ == "__main__":
    main()
