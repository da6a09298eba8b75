"""Does the recommendation hold? Profile once, plan, then run every candidate of a small grid for real.

*Regret* is how much longer the recommended plan took, measured, than the one that turned out to be the fastest. Cores
drift, so candidates take turns, in an order that reverses every round, and are compared within a round: what counts is
the median over rounds of a candidate's time over the recommended one's. After two rounds only those go on that are
still within 10 % of the fastest.

Run with nothing else running: .venv/bin/python benchmarks/regret.py
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from rows import Headline, add_option, save

from gpipe_exec.measure.profiler import measure_profile, sizes_for
from gpipe_exec.run.launch import Settings, execute
from gpipe_sim.scenario.reading import load_scenario
from gpipe_sim.search.advise import advise, describe
from gpipe_sim.search.choices import space_of
from gpipe_sim.search.search import Candidate
from gpipe_sim.step.metrics import step_time_s

GOAL = 0.03
ALL_RUN, STILL_NEAR = 2, 0.10
"""Rounds of all candidates, and how near the fastest those are that go on."""

SCENARIO = """
name: regret
model: {kind: transformer, layers: 8, hidden: 256, heads: 4, vocab: 1024, sequence: 64}
batch: 16
dtype: fp32
optimizer: adam
cluster: {device: cpu, devices_per_node: 2, link: measured}
profile: profile.json
plan: {stages: 2, microbatches: [1, 2, 4, 8, 16], checkpoint: [never, except_last], schedule: gpipe}
"""


def best_of_each_frame(candidates: list[Candidate]) -> list[Candidate]:
    """For each M and checkpoint mode the cut that is predicted to be the fastest."""
    best: dict[object, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.step_time_s):
        best.setdefault((candidate.plan.num_microbatches, candidate.plan.checkpoint), candidate)
    return list(best.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="turns of those near the fastest")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each run")
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scenario = Path(folder, "regret.yaml")
        scenario.write_text(SCENARIO)
        points = list(load_scenario(scenario))
        measure_profile(points[0], sizes_for(points), 2, "cpu", Path(folder, "work")).save(Path(folder, "profile.json"))
        advice = advise(space_of(points))
        candidates = best_of_each_frame(advice.candidates)
        ratios: list[list[float]] = [[] for _ in candidates]
        seconds: list[list[float]] = [[] for _ in candidates]
        running = list(range(len(candidates)))  # the recommended one is the first
        for turn in range(arguments.rounds):
            times = {}
            for index in running if turn % 2 == 0 else reversed(running):
                run = Path(folder, f"run{turn}-{index}")
                run.mkdir()
                settings = Settings(device="cpu", steps=arguments.steps, warmup=2, timeout=120)
                steps = execute(candidates[index].plan, run, settings).steps
                times[index] = float(np.median([step_time_s(step) for step in steps]))
            for index, time in times.items():
                seconds[index].append(time)
                ratios[index].append(time / times[0])
            if turn + 1 == ALL_RUN:
                middle = [float(np.median(found)) for found in ratios]
                running = [i for i in running if i == 0 or middle[i] <= min(middle) * (1 + STILL_NEAR)]
    against = np.array([np.median(found) for found in ratios])
    for index, candidate in enumerate(candidates):
        told = f"predicted {candidate.step_time_s * 1e3:7.1f}  measured {np.median(seconds[index]) * 1e3:7.1f} ms"
        turns = f"{against[index]:.3f} of the recommended in {len(ratios[index])} turns"
        print(f"{'>' if index == 0 else ' '} {describe(candidate.plan):45} {told}  {turns}")
    regret = 1 / against.min() - 1
    held = regret <= GOAL
    print(f"regret {regret:.1%}, goal {GOAL:.0%}: {'held' if held else 'MISSED'}")
    headline = Headline(
        what=f"run the plan that is recommended, of {len(candidates)}",
        peer="the fastest, known afterwards",
        ours=f"{np.median(seconds[0]) * 1e3:.1f} ms",
        theirs=f"{np.median(seconds[int(against.argmin())]) * 1e3:.1f} ms",
        ratio=float(against.min()),
        held=bool(held),
        repeat=".venv/bin/python benchmarks/regret.py",
    )
    save(arguments.rows, [headline])
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
