"""`gpipe demo`: the whole loop on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpipe_sim.commands.common import need_torch, write_report
from gpipe_sim.commands.profile import measure
from gpipe_sim.commands.run import execute_plan, show_comparison
from gpipe_sim.commands.simulate import load_questions, predict_plans

if TYPE_CHECKING:
    from gpipe_sim.explain.predict import Prediction


def demo(
    out: Annotated[Path, typer.Option(help="Folder for what it makes.")] = Path("runs/demo"),
) -> None:
    """The whole loop on this machine: sweep a large model; profile, plan, run, rehearse and compare a small one."""
    need_torch("gpipe demo")
    from gpipe_exec.alternatives.rehearsal import default_stretch
    from gpipe_exec.run.launch import Settings
    from gpipe_sim.explain.predict import fastest
    from gpipe_sim.make.making import make_plan
    from gpipe_sim.scenario.reading import load_scenario, shipped_scenarios
    from gpipe_sim.show.terminal import make_console, plan_details, results_table

    console = make_console()

    def best_of(*scenario: object) -> "tuple[Prediction, list[Prediction]]":
        path, *overrides = map(str, scenario)
        ((_, found),), interrupted = predict_plans(load_questions([Path(path)], overrides))
        if interrupted:
            raise KeyboardInterrupt
        return fastest(found), found

    console.print("1. Which plan for an 8-billion-parameter transformer on one node of H100s?", style="bold")
    best, found = best_of(shipped_scenarios() / "demo.yaml")
    console.print(results_table("the fastest that fits", [best], console.width))
    console.print(plan_details(best, console.width))
    write_report(out / "report.html", found, "demo")

    console.print("\n2. How right is that on this machine? A small transformer, profiled here", style="bold")
    small, profile_file = shipped_scenarios() / "demo_cpu.yaml", (out / "profile.json").resolve()
    measure(small, "cpu", profile_file)
    best, found = best_of(small, f"profile={profile_file}", "cluster.link=measured")
    console.print(results_table("predicted from the profile", found, console.width))

    console.print(f"\n3. The fastest of them ({best.settings}), run by two processes", style="bold")
    run_directory = execute_plan(best.plan, Settings(device="cpu", steps=6, warmup=2, timeout=60), None)
    show_comparison(run_directory, run_directory / "report.html", as_json=False, first=True)

    console.print(
        "\n4. The same model on four stages, more than this machine may have cores: a rehearsal", style="bold"
    )
    choices = ("plan.stages=4", "plan.microbatches=8", "plan.checkpoint=except_last", "cluster.devices_per_node=4")
    (four,) = load_scenario(small, f"profile={profile_file}", "cluster.link=measured", *choices)
    plan = make_plan(four)
    settings = Settings(device="rehearse", steps=3, warmup=1, timeout=60, stretch=default_stretch(plan))
    rehearsal = execute_plan(plan, settings, None)
    show_comparison(rehearsal, rehearsal / "report.html", as_json=False, first=True)
    reports = (out / "report.html", run_directory / "report.html", rehearsal / "report.html")
    typer.echo(f"\nopen {', '.join(map(str, reports))}")
