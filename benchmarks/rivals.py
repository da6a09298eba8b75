"""Other simulators and planners that can be installed, beside ours, in one run.

* *torch's schedule simulator*, `_simulate_comms_compute` of torch.distributed.pipelining: private, used by torch's own
  tests. It takes the same schedule (checked action by action) with sends and receives added by torch's own pass, and
  lays it out in steps of equal length: no seconds, no links, no memory.

CPU seconds, best of `--repeat` after a warm-up, taking turns. Run with: .venv/bin/python benchmarks/rivals.py
"""

import argparse
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rows import Headline, add_option, save
from simulator import plan_of

from gpipe_sim.evaluate import evaluate
from gpipe_sim.plan import Plan
from gpipe_sim.schedule import rank_actions
from gpipe_sim.simulate import simulate

SIZES = ((8, 32), (32, 256))
REPEAT = ".venv/bin/python benchmarks/rivals.py"


def torch_schedule(plan: Plan) -> tuple[dict[int, list[object]], Callable[[], object]]:
    """The plan's schedule in torch's words, and a function that simulates it there."""
    from torch.distributed.pipelining.schedules import (
        _Action,
        _add_send_recv,
        _ComputationType,
        _simulate_comms_compute,
    )

    kinds = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}
    compute = {
        rank: [_Action(a.stage, kinds[a.kind], a.microbatch) for a in actions if a.kind in kinds]
        for rank, actions in enumerate(rank_actions(plan))
    }
    lowered = _add_send_recv(
        {rank: list(actions) for rank, actions in compute.items()}, lambda stage: stage, len(compute)
    )
    return compute, lambda: _simulate_comms_compute(lowered, lambda stage: stage, len(compute))


def best_of(functions: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """CPU seconds of each, taking turns."""
    best = dict.fromkeys(functions, float("inf"))
    for turn in range(repeat + 1):
        for name, function in functions.items():
            before = time.process_time()
            function()
            if turn > 0:
                best[name] = min(best[name], time.process_time() - before)
    return best


def torch_headlines(repeat: int, table: Table) -> list[Headline]:
    """Time per action of the same schedule."""
    found = []
    for K, M in SIZES:
        plan = plan_of(K, M)
        compute, theirs = torch_schedule(plan)
        laid_out = theirs()
        for rank, actions in compute.items():
            assert [a for a in laid_out[rank] if a in set(actions)] == actions, "torch simulates another schedule"
        seconds = best_of(
            {"torch": theirs, "simpy": lambda plan=plan: simulate(plan), "fast": lambda plan=plan: evaluate([plan])},
            repeat,
        )
        actions = 2 * K * M
        per_action = {name: 1e6 * value / actions for name, value in seconds.items()}
        table.add_row(f"K={K} M={M}", *(f"{per_action[name]:.2f}" for name in ("torch", "simpy", "fast")))
        for ours, what in (("simpy", "simulate"), ("fast", "evaluate")):
            found.append(
                Headline(
                    what=f"{what} K={K} M={M}, {actions} actions",
                    peer="torch _simulate_comms_compute",
                    ours=f"{per_action[ours]:.2f} us/action",
                    theirs=f"{per_action['torch']:.2f} us/action",
                    ratio=seconds["torch"] / seconds[ours],
                    note="torch's lays out the same schedule in equal steps; ours gives seconds, links, memory",
                    repeat=REPEAT,
                )
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each, the best counts (3)")
    add_option(parser)
    arguments = parser.parse_args()
    console = Console()
    table = Table("us per action", "torch", "ours, simpy", "ours, fast")
    headlines = torch_headlines(arguments.repeat, table)
    console.print(table)
    save(arguments.rows, headlines)


if __name__ == "__main__":
    main()
