"""Does the recommendation hold? Profile once, plan, then run every candidate of a small grid for real.

*Regret* is how much longer the recommended plan took, measured, than the one that turned out to be the fastest. Each
candidate runs in several rounds, in turns, and its median counts: cores drift.

Run with nothing else running: .venv/bin/python benchmarks/regret.py
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from gpipe_exec.launch import Settings, execute
from gpipe_exec.profiler import measure_profile, sizes_for
from gpipe_sim.advise import advise, describe
from gpipe_sim.metrics import step_time_s
from gpipe_sim.search import Candidate, space_of
from gpipe_sim.sweep import load_scenario

GOAL = 0.03

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
    parser.add_argument("--rounds", type=int, default=4, help="turns of each candidate")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scenario = Path(folder, "regret.yaml")
        scenario.write_text(SCENARIO)
        points = list(load_scenario(scenario))
        measure_profile(points[0], sizes_for(points), 2, "cpu", Path(folder, "work")).save(Path(folder, "profile.json"))
        advice = advise(space_of(points))
        candidates = best_of_each_frame(advice.candidates)
        measured: list[list[float]] = [[] for _ in candidates]
        for turn in range(arguments.rounds):
            for index, candidate in enumerate(candidates):
                run = Path(folder, f"run{turn}-{index}")
                run.mkdir()
                settings = Settings(device="cpu", steps=arguments.steps, warmup=2, timeout=120)
                measured[index] += [step_time_s(step) for step in execute(candidate.plan, run, settings).steps]
    times = np.array([np.median(steps) for steps in measured])
    for candidate, seconds in zip(candidates, times, strict=True):
        mark = ">" if candidate is candidates[0] else " "
        told = f"predicted {candidate.step_time_s * 1e3:7.1f}  measured {seconds * 1e3:7.1f} ms"
        print(f"{mark} {describe(candidate.plan):45} {told}")
    regret = times[0] / times.min() - 1
    held = regret <= GOAL
    print(f"regret {regret:.1%}, goal {GOAL:.0%}: {'held' if held else 'MISSED'}")
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
