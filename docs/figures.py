"""Draw the pictures of the documentation again: `make figures`."""

import tempfile
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from werkzeug.serving import make_server

from dashboard.app import make_app
from dashboard.figures import gantt
from dashboard.literature import predicted_against_published
from gpipe_sim import load_scenario, make_plan, simulate
from gpipe_sim.evidence import all_figures
from gpipe_sim.sweep import shipped_scenarios

HERE = Path(__file__).parent
SHOWN = "?scenario=checkpoint&set=plan.checkpoint=always&set=plan.microbatches=8"


def main() -> None:
    """Timelines, the evidence, and the page."""
    draw_gantt()
    write(predicted_against_published(all_figures()), "evidence.png", 460)
    photograph_page()


def draw_gantt() -> None:
    """Four stages, eight micro-batches, everything recomputed early."""
    overrides = ("plan.checkpoint=always", "plan.recompute=early", "plan.microbatches=8")
    (scenario,) = load_scenario(shipped_scenarios() / "checkpoint.yaml", *overrides)
    write(gantt(simulate(make_plan(scenario))), "gantt.png", 340)


def write(figure: Any, name: str, height: int) -> None:
    """On white paper."""
    figure.update_layout(paper_bgcolor="white", font_color="#444444")
    figure.write_image(HERE / name, width=1200, height=height, scale=1.5)


def photograph_page() -> None:
    """The dashboard with a plan on screen."""
    with tempfile.TemporaryDirectory() as runs, sync_playwright() as playwright:
        server = make_server("127.0.0.1", 0, make_app(runs=Path(runs)).server, threaded=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"http://127.0.0.1:{server.server_port}/{SHOWN}")
        page.wait_for_selector("#utilization .js-plotly-plot .bars .point")
        page.wait_for_load_state("networkidle")
        page.screenshot(path=HERE / "dashboard.png")
        browser.close()
        server.shutdown()


if __name__ == "__main__":
    main()
