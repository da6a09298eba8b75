"""Draw the pictures of the README again: `make figures`."""

from pathlib import Path

from dashboard.figures import gantt
from gpipe_sim import load_scenario, make_plan, simulate
from gpipe_sim.sweep import shipped_scenarios

HERE = Path(__file__).parent


def main() -> None:
    """Four stages, eight micro-batches, everything recomputed early."""
    overrides = ("plan.checkpoint=always", "plan.recompute=early", "plan.microbatches=8")
    (scenario,) = load_scenario(shipped_scenarios() / "checkpoint.yaml", *overrides)
    figure = gantt(simulate(make_plan(scenario)))
    figure.update_layout(paper_bgcolor="white", font_color="#444444")
    figure.write_image(HERE / "gantt.png", width=1200, height=340, scale=1.5)


if __name__ == "__main__":
    main()
