"""How quick the page is, in a real browser: a knob's release to the repainted timeline, and the first load.

    .venv/bin/python benchmarks/dashboard.py [--turns 40]

The server runs in a process of its own, as `gpipe dashboard` starts it. A turn begins when a slider's key or a choice's
button goes up, and ends with the frame after the one in which the new timeline was drawn. Every turn is to a
plan that has not been seen before, so that nothing comes from a cache. Prints a table, and ends with status 1 if a
goal is missed.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from playwright.sync_api import Browser, Page, Request, sync_playwright
from rows import Headline, add_option, save

CHROMIUM = Path("/usr/bin/chromium")
CALLBACKS = {"url": "knob to timeline", "about": "verdict", "moves": "moves", "memory": "other charts"}
"""First output of a callback -> what it does."""
GOALS_S = {(8, 32): 0.1, (32, 128): 0.3}
"""(K, M) -> what 95 % of the turns must not exceed."""
FIRST_LOAD_GOAL_S = 1.5

SCENARIO = """\
name: bench
model: {kind: transformer, layers: 64, hidden: 4096, heads: 32, vocab: 50304, sequence: 2048}
batch: 128
cluster: {device: a100-80gb, link: {bandwidth: 25 GB/s, latency: 10 us}}
plan: {stages: 8, microbatches: 32, checkpoint: always, schedule: gpipe}
"""

WATCH = """() => {
    const plot = name => document.querySelector(`#${name} .js-plotly-plot`), chart = document.getElementById('gantt');
    window.begin = () => { released = repainted = null; old = [chart.timeline.data, plot('utilization').data]; };
    window.released = window.repainted = null;
    let old;
    chart.addEventListener('drawn', () => {
        if (repainted === null && released !== null && chart.timeline.data !== old[0])
            requestAnimationFrame(() => setTimeout(() => repainted ??= performance.now()));
    });
    window.settled = () => repainted !== null && plot('utilization').data !== old[1];
    addEventListener('keyup', () => released = performance.now(), true);
}"""


WATCH_LOADING = """
    const look = () => document.getElementById('gantt')?.timeline?.drawnIn
        ? requestAnimationFrame(() => window.loaded = performance.now()) : requestAnimationFrame(look);
    look();
"""
"""By the page's own clock, which starts when it is asked for: the frame after the one that has the timeline's bars."""


@dataclass(frozen=True)
class Turns:
    """Seconds from release to repaint, of many turns."""

    name: str
    seconds: list[float]
    goal_s: float | None = None

    @property
    def p95_s(self) -> float:
        return float(np.quantile(self.seconds, 0.95))

    @property
    def missed(self) -> bool:
        return self.goal_s is not None and self.p95_s > self.goal_s

    def headline(self, goal_s: float) -> Headline:
        return Headline(
            what=f"dashboard: {self.name}, p95",
            peer="its goal",
            ours=f"{1e3 * self.p95_s:.0f} ms",
            theirs=f"{1e3 * goal_s:.0f} ms",
            ratio=goal_s / self.p95_s,
            held=not self.missed,
            repeat=".venv/bin/python benchmarks/dashboard.py",
        )

    def line(self) -> str:
        median = float(np.median(self.seconds))
        goal = "" if self.goal_s is None else f"< {1e3 * self.goal_s:.0f}" + (" MISSED" if self.missed else "")
        return f"{self.name:<44} {len(self.seconds):>5} {1e3 * median:>9.0f} {1e3 * self.p95_s:>9.0f}   {goal}"


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bench.yaml").write_text(SCENARIO)
        command = [sys.executable, "-m", "gpipe_sim.cli", "dashboard", "--port", "0"]
        command += ["--scenarios", folder, "--runs", f"{folder}/runs"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            address = next(found for line in server.stderr if (found := re.search(r"http://\S+", line)))
            yield address[0]
        finally:
            server.terminate()
            server.wait()


def first_loads(browser: Browser, address: str, times: int) -> Turns:
    """From asking for the page to the drawn timeline, nothing of it being in the browser's cache."""
    seconds = []
    for _ in range(times):
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        page = context.new_page()
        page.add_init_script(WATCH_LOADING)
        page.goto(address)
        page.wait_for_function("window.loaded")
        seconds.append(page.evaluate("loaded / 1e3"))
        context.close()
    return Turns("first load, to the timeline", seconds, FIRST_LOAD_GOAL_S)


def opened(browser: Browser, address: str, K: int, M: int) -> Page:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(60_000)
    page.goto(f"{address}?scenario=bench&set=plan.stages={K}&set=plan.microbatches={M}")
    page.wait_for_selector("#utilization .js-plotly-plot .bars .point")
    page.evaluate(WATCH)
    return page


def turn(page: Page, release: str) -> float:
    """Seconds from a key's release to the frame after the repaint that it causes."""
    page.evaluate("begin()")
    page.keyboard.press(release)
    page.wait_for_function("settled")
    page.wait_for_load_state("networkidle")
    return float(page.evaluate("(repainted - released) / 1e3"))


def knob_turns(browser: Browser, address: str, K: int, M: int, times: int) -> Turns:
    """The bandwidth slider, one notch at a time: every turn is another simulation."""
    page = opened(browser, address, K, M)
    page.focus("#bandwidth [role=slider]")
    turn(page, "ArrowLeft")  # the browser compiles what it runs for the first time
    seconds = [turn(page, "ArrowLeft") for _ in range(times)]
    page.close()
    return Turns(f"bandwidth slider at K={K}, M={M}", seconds, GOALS_S[K, M])


def callbacks(browser: Browser, address: str, K: int, M: int, times: int) -> list[Turns]:
    """Server time of each callback while a knob is turned: from the request's last byte to the answer's first."""
    page = opened(browser, address, K, M)
    spent: dict[str, list[float]] = {}

    def note(request: Request) -> None:
        if "_dash-update-component" in request.url:
            first = request.post_data_json["output"].strip(".").split(".")[0]
            timing = request.timing
            spent.setdefault(CALLBACKS.get(first, first), []).append(
                (timing["responseStart"] - timing["requestStart"]) / 1e3
            )

    page.on("requestfinished", note)
    page.focus("#latency [role=slider]")
    for _ in range(times):
        turn(page, "ArrowLeft")
    page.close()
    return [Turns(f"  server, {name}, K={K}, M={M}", seconds) for name, seconds in spent.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=40, help="of each knob")
    add_option(parser)
    arguments = parser.parse_args()
    if not CHROMIUM.exists():
        sys.exit(f"{CHROMIUM} is not installed (on Debian: apt-get install chromium)")
    with serving() as address, sync_playwright() as playwright:
        urllib.request.urlopen(address).read()
        options = ["--no-sandbox", "--disable-gpu", "--enable-unsafe-swiftshader", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        print(f"{'':<44} {'times':>5} {'median ms':>9} {'p95 ms':>9}   goal of p95")
        found = [first_loads(browser, address, 10)]
        print(found[-1].line(), flush=True)
        for K, M in GOALS_S:
            found.append(knob_turns(browser, address, K, M, arguments.turns))
            print(found[-1].line(), flush=True)
            for one in callbacks(browser, address, K, M, 10):
                print(one.line(), flush=True)
        browser.close()
    save(arguments.rows, [one.headline(one.goal_s) for one in found if one.goal_s is not None])
    sys.exit(any(one.missed for one in found))


if __name__ == "__main__":
    main()
