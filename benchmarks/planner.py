"""How fast can plans be judged? The fast evaluator beside the SimPy model, in one run, on the same plans:

* *one plan*: cold, with its dependencies to be sorted out first, and warm, when a plan of its shape came before;
* *many plans* of one shape, as a search compares them: other cuts and other stages recomputed, memory included;
* *many samples* of one plan's jitter, memory included;
* *an order* made for the plan's own times, `schedule: auto`;
* *searches* over K = 1..16, M = 1..128 and the checkpoint mode of every stage, for 48 blocks: with the three plain
  schedules, with all of them, and with replicas and tensor groups, too.

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

from gpipe_sim.base.files import parse_yaml
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.search.choices import Space, space_of
from gpipe_sim.search.search import search
from gpipe_sim.step.evaluate import evaluate, evaluate_samples
from gpipe_sim.step.metrics import StepMetrics, step_metrics
from gpipe_sim.step.simulate import simulate
from gpipe_sim.step.waves import graph_of

SIZES = ((8, 32), (32, 256), (64, 1024))
NUM_PLANS = 2000
SIMULATED = 10
"""Of the many, those that are simulated too."""
GOALS = {"gpipe": 10_000, "1f1b": 10_000, "interleaved_1f1b": 5_000, "zb_v": 5_000}
"""Plans per second; the last two have two stages on each rank, and the last splits backwards."""
AUTO_GOAL_S = 2.0
SEARCHES: dict[str, tuple[str, float]] = {
    "plain schedules": ("plan: {replicas: 1, tensor: 1, schedule: [naive, gpipe, 1f1b]}", 5.0),
    "every schedule": ("plan: {replicas: 1, tensor: 1}", 10.0),
    "replicas and tensor groups": ("", 10.0),
}
"""What is left to choose from: what the scenario fixes, and the seconds that a search may take."""
STAGES_PER_RANK = {"interleaved_1f1b": 2, "zb_v": 2}
REPEAT = ".venv/bin/python benchmarks/planner.py"


def plan_of(K: int, M: int, schedule: str = "gpipe") -> Plan:
    """A transformer of at least two layers per stage on GPUs that jitter a little."""
    v = STAGES_PER_RANK.get(schedule, 1)
    text = f"""
    model: {{kind: transformer, layers: {max(48, 2 * K * v)}, hidden: 2048, heads: 16, vocab: 32000, sequence: 1024}}
    batch: {4 * M}
    cluster:
      device: a100-80gb
      link: {{bandwidth: 25 GB/s, latency: 10 us}}
      jitter: {{cv: 0.05, samples: 100}}
    plan: {{stages: {K * v}, stages_per_rank: {v}, microbatches: {M}, checkpoint: always, schedule: {schedule}}}
    """
    return make_plan(parse_scenario(parse_yaml(text, "benchmark"))[0])


def search_space(fixed: str) -> Space:
    """A transformer of 48 blocks, everything else left to choose."""
    text = f"""
    model: {{kind: transformer, layers: 48, hidden: 2048, heads: 32, vocab: 32000, sequence: 1024}}
    batch: 128
    cluster: {{device: a100-80gb, devices_per_node: 16, link: {{bandwidth: 300 GB/s, latency: 5 us}}}}
    {fixed}
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


def auto_seconds(repeat: int) -> float:
    """CPU seconds to make a plan whose order is made for its own times; the best."""
    best = float("inf")
    for _ in range(repeat):
        graph_of.cache_clear()
        before = time.process_time()
        plan_of(*SIZES[0], "auto")
        best = min(best, time.process_time() - before)
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
    held = True
    for schedule, goal in GOALS.items():
        plan = plan_of(*SIZES[0], schedule)
        many = variants(plan, NUM_PLANS)
        slow, fast = cpu_seconds(
            [lambda many=many: simulated(many[:SIMULATED]), lambda many=many: evaluate(many)], repeat
        )
        rate = NUM_PLANS / fast
        held &= rate >= goal
        headlines.append(
            Headline(
                what=f"judge {NUM_PLANS} plans, K={SIZES[0][0]} M={SIZES[0][1]}, {schedule}",
                peer="our SimPy model",
                ours=f"{rate:.0f} plans/s",
                theirs=f"{SIMULATED / slow:.0f} plans/s",
                ratio=rate * slow / SIMULATED,
                held=rate >= goal,
                repeat=REPEAT,
            )
        )
        table.add_row(f"plans, {schedule}", f"{SIMULATED / slow:.0f}", f"{rate:.0f}", f"{rate * slow / SIMULATED:.0f}")
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
    wanted = ", ".join(f"{goal} ({schedule})" for schedule, goal in GOALS.items())
    console.print(f"goal: at least so many plans per second, memory included: {wanted}: {'held' if held else 'missed'}")

    seconds = auto_seconds(repeat)
    console.print(f"auto: an order for K={SIZES[0][0]} M={SIZES[0][1]} in {seconds:.2f} s")
    console.print(f"goal: under {AUTO_GOAL_S:.0f} s: {'held' if seconds < AUTO_GOAL_S else 'missed'}")
    held &= seconds < AUTO_GOAL_S
    headlines.append(
        Headline(
            what=f"make an order, schedule auto, K={SIZES[0][0]} M={SIZES[0][1]}",
            peer=f"the goal of {AUTO_GOAL_S:.0f} s",
            ours=f"{seconds:.2f} s",
            theirs=f"{AUTO_GOAL_S:.0f} s",
            ratio=AUTO_GOAL_S / seconds,
            held=seconds < AUTO_GOAL_S,
            repeat=REPEAT,
        )
    )

    for name, (fixed, goal) in SEARCHES.items():
        space, best = search_space(fixed), float("inf")
        for _ in range(repeat):
            graph_of.cache_clear()
            before = time.process_time()
            candidates = search(space)
            best = min(best, time.process_time() - before)
        held &= best < goal
        verdict = "held" if best < goal else "missed"
        console.print(
            f"search, {name}: {len(candidates)} plans evaluated, in {best:.2f} s (goal {goal:.0f} s: {verdict})"
        )
        headlines.append(
            Headline(
                what=f"search 48 blocks on 16 devices, {name}",
                peer=f"the goal of {goal:.0f} s",
                ours=f"{best:.2f} s",
                theirs=f"{goal:.0f} s",
                ratio=goal / best,
                held=best < goal,
                repeat=REPEAT,
            )
        )
    save(arguments.rows, headlines)
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
