"""How do the time and the memory of the simulator itself grow with the plan?

Plans from 16 stages with 128 micro-batches to 512 with 4,096, everything recomputed, links that cost a tenth of a
forward; and GPipe's 83.9-billion-parameter model on 128 partitions. Each in a process of its own, whose peak of memory
is the system's count (ru_maxrss). CPU seconds of every part of `gpipe simulate`:

    plan       read the scenario, cut the layers
    simulate   the event simulation with full timelines and memory curves
    predict    the rest of the prediction: the counterfactual steps of the waterfall, metrics
    path       the critical path
    draw       table, Gantt chart, memory bars, waterfall and verdict in the terminal

The exponents are the slopes of straight lines through logarithms, from 90,000 actions on: 1 is linear.
Run with: .venv/bin/python benchmarks/scale.py [--plot docs/scale.png]
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rows import Headline, add_option, save

from gpipe_sim.base.files import parse_yaml
from gpipe_sim.explain.predict import predict
from gpipe_sim.explain.waterfall import critical_path
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.reading import load_scenario, parse_scenario, shipped_scenarios
from gpipe_sim.show.terminal import make_console, plan_details, results_table
from gpipe_sim.step.simulate import simulate

SIZES = ((16, 128), (32, 256), (64, 512), (128, 1024), (256, 2048), (512, 4096))
LARGE = 90_000
"""Actions from which on growth is judged: below, what every run costs weighs."""
MAX_EXPONENT = 1.1
MAX_MEMORY = 8 * 2**30
PARTS = ("plan", "simulate", "predict", "path", "draw")
GiB = 2**30


def plan_of(name: str) -> Plan:
    """``512x4096``, or the name of a scenario that comes with the tool."""
    K, by, M = name.partition("x")
    if not by or not K.isdecimal():
        (scenario,) = load_scenario(shipped_scenarios() / f"{name}.yaml")
        return make_plan(scenario)
    text = f"""
    model: {{kind: layers, layers: [{{name: layer, repeat: {K}, forward: 1 ms, output: 1 MB, saved: 4 MB}}]}}
    batch: {M}
    cluster: {{device: a100-80gb, link: {{bandwidth: 10 GB/s, latency: 10 us}}}}
    plan: {{stages: {K}, microbatches: {M}, checkpoint: always, schedule: gpipe}}
    """
    return make_plan(parse_scenario(parse_yaml(text, "benchmark"))[0])


def measure(name: str) -> dict[str, Any]:
    """In this process, once."""
    seconds: dict[str, float] = {}

    def note(part: str, since: float) -> float:
        now = time.process_time()
        seconds[part] = now - since
        return now

    idle = peak_bytes()
    clock = time.process_time()
    plan = plan_of(name)
    clock = note("plan", clock)
    step = simulate(plan)
    actions = sum(len(timeline.actions) for timeline in step.ranks)
    simulated = peak_bytes()
    del step
    clock = note("simulate", clock)
    prediction = predict(plan, keep_step=True)
    clock = note("predict", clock)
    seconds["predict"] -= seconds["simulate"]
    critical_path(plan, prediction.step)
    clock = note("path", clock)
    console = make_console()
    console.file = open("/dev/null", "w")  # noqa: SIM115
    console.print(results_table(name, [prediction], 100))
    console.print(plan_details(prediction, 100))
    note("draw", clock)
    return {
        "plan": name,
        "actions": actions,
        "seconds": seconds,
        "idle_bytes": idle,
        "simulate_bytes": simulated,
        "peak_bytes": peak_bytes(),
        "step_time_s": prediction.step_time_s,
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def exponent(found: list[dict[str, Any]], figure: str) -> float:
    """The slope of log(figure) over log(actions)."""
    values = {
        "time": [sum(one["seconds"].values()) for one in found],
        "simulate": [one["seconds"]["simulate"] for one in found],
        "memory": [one["peak_bytes"] - one["idle_bytes"] for one in found],
    }[figure]
    return float(np.polyfit(np.log([one["actions"] for one in found]), np.log(values), 1)[0])


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Seconds and bytes over actions, both axes logarithmic, with lines of slope 1 through the largest plan."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    from gpipe_sim.show.palette import BREAKDOWN, CRITICAL

    chart = make_subplots(1, 2, subplot_titles=("CPU time, s", "peak memory, GiB"))
    actions = [one["actions"] for one in found]
    largest = found[-1]
    colors = list(BREAKDOWN.values())
    for part, color in zip(PARTS, colors, strict=False):
        line = go.Scatter(x=actions, y=[one["seconds"][part] for one in found], name=part, line_color=color)
        chart.add_trace(line, 1, 1)
    total, memory = ([sum(one["seconds"].values()) for one in found], [one["peak_bytes"] / GiB for one in found])
    chart.add_trace(go.Scatter(x=actions, y=total, name="all of it", line={"color": "#444444", "width": 3}), 1, 1)
    chart.add_trace(go.Scatter(x=actions, y=memory, name="memory", line={"color": "#444444", "width": 3}), 1, 2)
    for column, top in ((1, total[-1]), (2, memory[-1])):
        line = [top * count / largest["actions"] for count in actions]
        dash = {"color": "#BBBBBB", "dash": "dot"}
        name = "linear"
        chart.add_trace(
            go.Scatter(x=actions, y=line, name=name, line=dash, showlegend=column == 1, mode="lines"), 1, column
        )
    limit = go.Scatter(x=actions, y=[MAX_MEMORY / GiB] * len(found), name="8 GiB", line_color=CRITICAL, mode="lines")
    chart.add_trace(limit, 1, 2)
    chart.update_xaxes(type="log", title="actions")
    chart.update_yaxes(type="log", exponentformat="power")
    chart.update_layout(template="plotly_white", legend={"orientation": "h", "y": -0.2})
    chart.write_image(path, width=1200, height=460, scale=1.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", metavar="PLAN", help="measure a single plan, such as 64x512, and print JSON")
    parser.add_argument("--most", type=int, default=512, help="the most stages to go to (512)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the growth as a PNG")
    add_option(parser)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    names = [*(f"{K}x{M}" for K, M in SIZES if options.most >= K), "gpipe_83b9"]
    found = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("simulating", total=len(names))
        for name in names:
            command = [sys.executable, __file__, "--one", name]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(done.stdout))
            progress.advance(bar)
    table = Table("plan", "actions", *(f"{part} s" for part in PARTS), "us / action", "peak", "bytes / action")
    for one in found:
        seconds, own = one["seconds"], one["peak_bytes"] - one["idle_bytes"]
        table.add_row(
            one["plan"],
            f"{one['actions']:,}",
            *(f"{seconds[part]:.2f}" for part in PARTS),
            f"{seconds['simulate'] / one['actions'] * 1e6:.2f}",
            f"{one['peak_bytes'] / GiB:.2f} GiB",
            f"{own / one['actions']:.0f}",
        )
    console = make_console()
    console.print(table)
    grown = [one for one in found if "x" in one["plan"] and one["actions"] >= LARGE]
    peak = max(one["peak_bytes"] for one in found)
    held = peak <= MAX_MEMORY
    console.print(f"goal: at most {MAX_MEMORY / GiB:.0f} GiB: {peak / GiB:.2f} GiB, {'held' if held else 'missed'}")
    if len(grown) > 1:
        slopes = {figure: exponent(grown, figure) for figure in ("time", "simulate", "memory")}
        linear = max(slopes.values()) <= MAX_EXPONENT
        held &= linear
        told = ", ".join(f"{figure} {slope:.3f}" for figure, slope in slopes.items())
        console.print(f"goal: exponents of at most {MAX_EXPONENT}: {told}, {'held' if linear else 'missed'}")
    largest = max(found, key=lambda one: one["actions"])
    headline = Headline(
        what=f"simulate {largest['plan']}, {largest['actions']:,} actions: peak memory",
        peer="its goal",
        ours=f"{peak / GiB:.2f} GiB",
        theirs=f"{MAX_MEMORY / GiB:.0f} GiB",
        ratio=MAX_MEMORY / peak,
        held=held,
        note=f"{largest['seconds']['simulate']:.1f} s; exponents of time and memory are printed above",
        repeat=".venv/bin/python benchmarks/scale.py",
    )
    save(options.rows, [headline])
    if options.plot:
        plot([one for one in found if "x" in one["plan"]], options.plot)
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
