"""Draw the pictures of the documentation again: `make figures`."""

from pathlib import Path
from typing import Any

from dashboard.figures import gantt
from dashboard.literature import predicted_against_published
from gpipe_sim import load_scenario, make_plan, simulate
from gpipe_sim.evidence import all_figures
from gpipe_sim.sweep import shipped_scenarios

HERE = Path(__file__).parent


def main() -> None:
    """The Gantt chart of the README (four stages, eight micro-batches, everything recomputed early); the evidence."""
    overrides = ("plan.checkpoint=always", "plan.recompute=early", "plan.microbatches=8")
    (scenario,) = load_scenario(shipped_scenarios() / "checkpoint.yaml", *overrides)
    write(gantt(simulate(make_plan(scenario))), "gantt.png", 340)
    write(predicted_against_published(all_figures()), "evidence.png", 460)


def write(figure: Any, name: str, height: int) -> None:
    """On white paper."""
    figure.update_layout(paper_bgcolor="white", font_color="#444444")
    figure.write_image(HERE / name, width=1200, height=height, scale=1.5)


if __name__ == "__main__":
    main()
