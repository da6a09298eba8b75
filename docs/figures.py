"""Draw the pictures of the README and of the docs again: `make figures`."""

import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from playwright.sync_api import sync_playwright
from werkzeug.serving import make_server

from dashboard.charts.literature import predicted_against_published
from dashboard.charts.many_plans import bubble_by_microbatches, by_bandwidth
from dashboard.charts.one_step import gantt
from dashboard.charts.style import figure, memory_unit, time_unit
from dashboard.page.app import make_app
from gpipe_sim import Plan, load_scenario, make_plan, simulate
from gpipe_sim.evidence.everything import all_figures
from gpipe_sim.explain.predict import predict_all
from gpipe_sim.scenario.reading import shipped_scenarios
from gpipe_sim.show import palette
from gpipe_sim.step.metrics import step_time_s

HERE = Path(__file__).parent
EIGHT = "plan.microbatches=8"
SHOWN = "?scenario=checkpoint&set=plan.checkpoint=always&set=plan.microbatches=8"


def plans(scenario: str, *overrides: str) -> list[Plan]:
    """Those of a shipped scenario."""
    return [make_plan(point) for point in load_scenario(shipped_scenarios() / f"{scenario}.yaml", *overrides)]


def timeline(*overrides: str, scenario: str = "bubble") -> go.Figure:
    """The Gantt chart of the only plan that the overrides leave."""
    (plan,) = plans(scenario, *overrides)
    return gantt(simulate(plan))


def memory_curves() -> go.Figure:
    """What the fullest rank holds over time, for three ways to train the same model with sixteen micro-batches."""
    ways = {
        "gpipe, nothing recomputed": ("plan.schedule=gpipe", "plan.checkpoint=never", palette.KINDS["B"]),
        "1f1b, nothing recomputed": ("plan.schedule=1f1b", "plan.checkpoint=never", palette.KINDS["U"]),
        "gpipe, everything recomputed": ("plan.schedule=gpipe", "plan.checkpoint=always", palette.KINDS["F"]),
    }
    steps = {}
    for name, (*overrides, _) in ways.items():
        (plan,) = plans("checkpoint", "plan.recompute=early", "plan.microbatches=16", *overrides)
        steps[name] = simulate(plan)
    curves = {name: max(step.memory, key=lambda curve: curve.peak_bytes) for name, step in steps.items()}
    scale, unit = time_unit(max(map(step_time_s, steps.values())))
    size, bytes_unit = memory_unit(max(curve.peak_bytes for curve in curves.values()))
    traces = [
        go.Scatter(
            x=np.append(curve.times, step_time_s(steps[name])) / scale,
            y=np.append(curve.total, curve.total[-1]) / size,
            mode="lines",
            line={"shape": "hv", "width": 1.5, "color": ways[name][-1]},
            name=name,
        )
        for name, curve in curves.items()
    ]
    y = {"title": {"text": f"memory of the fullest rank, {bytes_unit}"}, "rangemode": "tozero"}
    return figure(*traces, height=340, x={"title": {"text": f"time, {unit}"}}, y=y)


def bandwidth() -> go.Figure:
    """A step against the network's bandwidth, and the knee."""
    swept = plans("bandwidth_wall")
    bandwidths = [plan.link(0).bandwidth for plan in swept]
    return by_bandwidth(bandwidths, list(predict_all(swept)))


FIGURES: Mapping[str, Callable[[], go.Figure]] = {
    "gantt.png": lambda: timeline("plan.checkpoint=always", "plan.recompute=early", EIGHT, scenario="checkpoint"),
    "evidence.png": lambda: predicted_against_published(all_figures()),
    "background/naive.png": lambda: timeline("plan.schedule=naive", "plan.microbatches=1"),
    "background/microbatches.png": lambda: timeline("plan.microbatches=4"),
    "background/bubble.png": lambda: bubble_by_microbatches(list(predict_all(plans("bubble")))),
    "background/recompute.png": lambda: timeline("plan.microbatches=4", "plan.checkpoint=always"),
    "background/one_forward_one_backward.png": lambda: timeline(EIGHT, "plan.schedule=1f1b"),
    "background/memory.png": memory_curves,
    "background/bandwidth.png": bandwidth,
}
"""By file name, from this folder on."""


SIZES = {"gantt.png": (1200, 340, 1.5), "evidence.png": (1200, 460, 1.5)}
"""Width, height and scale of those that are not small."""


def main() -> None:
    """Draw all of them, on white paper, and take a photograph of the page."""
    for name, draw in FIGURES.items():
        picture = draw()
        picture.update_layout(paper_bgcolor="white", font_color="#444444")
        width, height, scale = SIZES.get(name, (900, min(picture.layout.height, 280), 1))
        picture.write_image(HERE / name, width=width, height=height, scale=scale)
    photograph_page()


def photograph_page() -> None:
    """The dashboard with a plan on screen."""
    with tempfile.TemporaryDirectory() as runs, sync_playwright() as playwright:
        server = make_server("127.0.0.1", 0, make_app(runs=Path(runs)).server, threaded=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"http://127.0.0.1:{server.server_port}/{SHOWN}")
        page.wait_for_selector("#utilization .js-plotly-plot .bars .point")
        page.wait_for_selector("#spark-jitter svg")  # the last of the curves beneath the knobs
        page.wait_for_load_state("networkidle")
        page.screenshot(path=HERE / "dashboard.png")
        browser.close()
        server.shutdown()


if __name__ == "__main__":
    main()
