"""How good are the cuts? The planner's against three rules for the same K and M, over many random models:

* *equal layers*: the same number of layers on every stage;
* *least spread*: the smallest difference between the largest and the smallest stage, which is what torchgpipe's
  balancing by block partition aims at; here by trying every cut, so at least as well as it does;
* *smallest maximum*: our default cut, `gpipe_sim.plan.partition`.

What counts is the step. Run with: .venv/bin/python benchmarks/cuts.py
"""

import argparse
import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rows import Headline, add_option, save

from gpipe_sim.base.files import parse_yaml
from gpipe_sim.make.making import make_plan, stage_costs
from gpipe_sim.plan.partition import partition
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.search.choices import space_of
from gpipe_sim.search.search import search
from gpipe_sim.step.evaluate import evaluate

RULES = ("equal layers", "least spread", "smallest maximum")


@dataclass(frozen=True)
class Case:
    """Step times of one random model, by rule, over the planner's."""

    ratios: dict[str, float]


def random_plan(luck: np.random.Generator) -> Plan:
    """Uneven layers on two to four stages, links that matter in half of the cases."""
    K, L, M = luck.integers(2, 5), luck.integers(8, 13), luck.integers(2, 9)
    layers = ", ".join(
        f"{{name: l{i}, forward: {luck.lognormal(0, 0.8):.4f} ms, backward: {2 * luck.lognormal(0, 0.8):.4f} ms, "
        f"output: {luck.uniform(0.1, 4):.3f} MB}}"
        for i in range(L)
    )
    bandwidth = luck.choice([0.5, 1000])
    text = f"""
    model: {{kind: layers, layers: [{layers}]}}
    batch: {M}
    cluster: {{device: a100-80gb, devices_per_node: {K}, link: {{bandwidth: {bandwidth} GB/s, latency: 10 us}}}}
    plan: {{stages: {K}, microbatches: {M}, checkpoint: never, schedule: gpipe}}
    """
    return make_plan(parse_scenario(parse_yaml(text, "benchmark"))[0])


def least_spread(seconds: np.ndarray, K: int) -> tuple[int, ...]:
    """Of all cuts the one with the smallest difference between its largest and smallest stage."""
    L, sums = len(seconds), np.append(0.0, np.cumsum(seconds))
    borders = np.array([[0, *chosen, L] for chosen in itertools.combinations(range(1, L), K - 1)])
    stages = np.diff(sums[borders], axis=1)
    best = int(np.lexsort((stages.max(axis=1), np.ptp(stages, axis=1)))[0])
    return tuple(np.diff(borders[best]).tolist())


def judge(plan: Plan) -> Case:
    K, L = plan.num_stages, plan.profile.num_layers
    costs = stage_costs(plan.profile, plan.sizes, plan.checkpoint, [1.0] * K)
    cuts = {
        "equal layers": tuple(L // K + (stage < L % K) for stage in range(K)),
        "least spread": least_spread(costs[0], K),
        "smallest maximum": partition(costs),
    }
    ours = min(candidate.step_time_s for candidate in search(space_of([plan.scenario])))
    found = evaluate([replace(plan, balance=cut) for cut in cuts.values()], memory=False)
    return Case({rule: one.step_time_s / ours for rule, one in zip(cuts, found, strict=True)})


def report(num_cases: int, rows: Path | None) -> bool:
    """Print how the rules compare; whether the planner was never worse."""
    luck = np.random.default_rng(0)
    cases = [judge(random_plan(luck)) for _ in range(num_cases)]
    never_worse, headlines = True, list[Headline]()
    print(f"cuts, {num_cases} random models: step time over that of the planner's cut")
    for rule in RULES:
        ratios = np.array([case.ratios[rule] for case in cases])
        never_worse &= bool((ratios >= 1 - 1e-9).all())
        headlines.append(
            Headline(
                what=f"cut {num_cases} random models, step time as simulated",
                peer=f"rule: {rule}",
                ours="1",
                theirs=f"{ratios.mean():.3f} on average",
                ratio=float(ratios.mean()),
                held=bool((ratios >= 1 - 1e-9).all()),
                repeat=".venv/bin/python benchmarks/cuts.py",
            )
        )
        slower = float((ratios > 1 + 1e-9).mean())
        more = f"by {ratios.mean() - 1:6.1%} on average, {ratios.max() - 1:6.1%} at worst"
        print(f"  {rule:18} slower in {slower:4.0%} of cases, {more}")
    print(f"  the planner was {'never worse' if never_worse else 'WORSE in some case'}")
    save(rows, headlines)
    return never_worse


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    add_option(parser)
    arguments = parser.parse_args()
    sys.exit(0 if report(arguments.cases, arguments.rows) else 1)
