"""Other simulators and planners that can be installed, beside ours, in one run.

* *torch's schedule simulator*, `_simulate_comms_compute` of torch.distributed.pipelining: private, used by torch's own
  tests. It takes the same schedule (checked action by action) with sends and receives added by torch itself, and lays
  it out in steps of equal length: no seconds, no links, no memory.
* *llm-analysis*, formulas for time and memory of a transformer's training step. It takes a pipeline's size, replicas,
  what they divide, and tensor groups, but knows neither a bubble, a schedule nor a cut. Asked for one plan after the
  other, as a planner would: plans of one shape, and every mixture of two nodes' sixteen devices.
* *Calculon* (Isaev et al., SC 2023), formulas too, with its own list of mixtures for as many devices. It is in no
  package index, where the name is another project's: give a clone of github.com/calculon-ai/calculon as the
  environment variable CALCULON. It has not run on the machine of docs/evidence.md.

Looked for and not among the packages that can be installed: ASTRA-sim, SimAI, PP-Schedule-Visualization, the simulators
of PipeDream, DAPPLE, Varuna and Zero Bubble. Vidur can be, and simulates inference; Alpa can be, and needs jax 0.3.22,
which no Python from 3.11 on can have.

CPU seconds, best of `--repeat` after a warm-up, taking turns.
Run with: make peers; .venv/bin/python benchmarks/rivals.py
"""

import argparse
import importlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import planner
from rich.console import Console
from rich.table import Table
from rows import Headline, add_option, save
from simulator import plan_of

from gpipe_sim.base.files import parse_yaml
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import rank_actions
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.scenario.schema import Transformer
from gpipe_sim.search.choices import space_of
from gpipe_sim.search.joint import Choice, JointSearch
from gpipe_sim.step.evaluate import evaluate
from gpipe_sim.step.simulate import simulate

SIZES = (
    ("gpipe", 1, 8, 32),
    ("gpipe", 1, 32, 256),
    ("interleaved_1f1b", 2, 8, 32),
    ("zb_h1", 1, 8, 32),
    ("zb_v", 2, 8, 32),
)
"""Schedule, stages on each rank, K and M."""
NUM_PLANS = 1000
REPEAT = "make peers; .venv/bin/python benchmarks/rivals.py"


def torch_schedule(plan: Plan) -> tuple[dict[int, list[object]], Callable[[], object]]:
    """The plan's schedule in torch's words, and a function that simulates it there."""
    from torch.distributed.pipelining.schedules import (
        _Action,
        _add_send_recv,
        _ComputationType,
        _simulate_comms_compute,
    )

    kinds = {kind.value: kind for kind in _ComputationType if kind.value in ("F", "B", "I", "W")}
    compute = {
        rank: [_Action(a.stage, kinds[a.kind], a.microbatch) for a in actions if a.kind in kinds]
        for rank, actions in enumerate(rank_actions(plan))
    }
    where = plan.positions.__getitem__
    lowered = _add_send_recv({rank: list(actions) for rank, actions in compute.items()}, where, plan.num_stages)
    return compute, lambda: _simulate_comms_compute(lowered, where, plan.num_stages)


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
    for schedule, v, K, M in SIZES:
        plan = plan_of(K, M, schedule, v)
        compute, theirs = torch_schedule(plan)
        laid_out = theirs()
        for rank, actions in compute.items():
            assert [a for a in laid_out[rank] if a in set(actions)] == actions, "torch simulates another schedule"
        seconds = best_of(
            {"torch": theirs, "simpy": lambda plan=plan: simulate(plan), "fast": lambda plan=plan: evaluate([plan])},
            repeat,
        )
        actions = sum(len(found) for found in compute.values())
        per_action = {name: 1e6 * value / actions for name, value in seconds.items()}
        table.add_row(f"{schedule} K={K} M={M}", *(f"{per_action[name]:.2f}" for name in ("torch", "simpy", "fast")))
        for ours, what in (("simpy", "simulate"), ("fast", "evaluate")):
            found.append(
                Headline(
                    what=f"{what} {schedule} K={K} M={M}, {actions} actions",
                    peer="torch _simulate_comms_compute",
                    ours=f"{per_action[ours]:.2f} us/action",
                    theirs=f"{per_action['torch']:.2f} us/action",
                    ratio=seconds["torch"] / seconds[ours],
                    note="torch's lays the same schedule out in equal steps; ours knows seconds, links and memory",
                    repeat=REPEAT,
                )
            )
    return found


def formula_headline(repeat: int, table: Table) -> Headline:
    """Plans per second, of the transformer and the size of pipeline that `planner.py` searches."""
    K, M = planner.SIZES[0]
    plan = planner.plan_of(K, M)
    what = f"judge {NUM_PLANS} plans, K={K} M={M}, one model"
    try:
        theirs = llm_analysis_of(plan)
    except ImportError as error:
        return Headline(
            what=what, peer="llm-analysis", ours="-", theirs="-", ratio=None, note=f"not there: {error}", repeat=REPEAT
        )
    plans = planner.variants(plan, NUM_PLANS)
    seconds = best_of(
        {"llm-analysis": lambda: [theirs() for _ in range(NUM_PLANS)], "ours": lambda: evaluate(plans)}, repeat
    )
    rates = {name: NUM_PLANS / value for name, value in seconds.items()}
    table.add_row(what, *(f"{rate:.0f}" for rate in rates.values()))
    return Headline(
        what=what,
        peer="llm-analysis",
        ours=f"{rates['ours']:.0f} plans/s",
        theirs=f"{rates['llm-analysis']:.0f} plans/s",
        ratio=rates["ours"] / rates["llm-analysis"],
        note="llm-analysis has formulas without bubble, schedule or cut; ours gives each plan's step and peaks",
        repeat=REPEAT,
    )


def llm_analysis_of(plan: Plan) -> Callable[[], object]:
    """A function that has llm-analysis judge a plan of that model, device, K, D, T and M; what it refuses it raises."""
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import GPUConfig, ModelConfig, ParallelismConfig
    from llm_analysis.logger import logger

    logger.setLevel(logging.ERROR)
    model, cluster, device = plan.scenario.model, plan.scenario.cluster, plan.scenario.cluster.device
    assert isinstance(model, Transformer)
    shape = ModelConfig(
        name="benchmark",
        num_layers=model.layers,
        n_head=model.heads,
        hidden_dim=model.hidden,
        vocab_size=model.vocab,
        max_seq_len=model.sequence,
        num_key_value_heads=model.num_kv_heads,
        ffn_embed_dim=model.ffn_width,
    )
    gpu = GPUConfig(
        name=device.name,
        mem_per_GPU_in_GB=device.memory / 1e9,
        hbm_bandwidth_in_GB_per_sec=device.bandwidth / 1e9,
        intra_node_bandwidth_in_GB_per_sec=cluster.link.bandwidth / 1e9,
        intra_node_min_message_latency=cluster.link.latency,
        inter_node_bandwidth_in_GB_per_sec=(cluster.network or cluster.link).bandwidth / 1e9,
        peak_fp16_TFLOPS=device.compute["fp16"] / 1e12,
    )
    mesh = ParallelismConfig(pp_size=plan.num_ranks, dp_size=plan.replicas, tp_size=plan.tensor)
    zero = {"none": DSZeRO.NONE, "optimizer": DSZeRO.STAGE_1, "parameters": DSZeRO.STAGE_3}[plan.shard]
    recompute = ActivationRecomputation.FULL if plan.recomputes else ActivationRecomputation.NONE

    def judge() -> object:
        analysis = LLMAnalysis(shape, gpu, parallelism_config=mesh, flops_efficiency=device.efficiency)
        return analysis.training(
            batch_size_per_gpu=plan.sizes[0],
            gradient_accumulation_steps=plan.num_microbatches,
            seq_len=model.sequence,
            total_num_tokens=plan.scenario.batch * model.sequence,
            ds_zero=zero,
            activation_recomputation=recompute,
            mlp_gated_linear_units=model.gated,
        )

    return judge


# --- replicas and tensor groups --------------------------------------------------------------------------------------

MIXTURES = """
model: {kind: transformer, layers: 40, hidden: 5120, heads: 40, vocab: 51200, sequence: 2048}
batch: 64
cluster:
  {device: a100-80gb, memory_reserve: 4 GiB, nodes: 2, devices_per_node: 8, link: nvlink3, network: 200gbit, nics: 8}
plan: {schedule: 1f1b}
"""


def mixture_headlines(repeat: int, table: Table) -> list[Headline]:
    """Plans per second of every mixture of stages, replicas and tensor groups on sixteen devices."""
    space = space_of(list(parse_scenario(parse_yaml(MIXTURES, "benchmark"))))
    search = JointSearch(space)
    choices = list(search.choices())
    found = []
    for name, theirs in (("llm-analysis", llm_analysis_on), ("Calculon", calculon_on)):
        what = "judge every mixture of 16 devices"
        try:
            judge, own, count = theirs(search, choices)
        except (ImportError, OSError, KeyError) as error:
            note = f"{name} is left out: {error}"
            found.append(Headline(what=what, peer=name, ours="-", theirs="-", ratio=None, note=note, repeat=REPEAT))
            continue
        ways = {
            "estimate": lambda own=own: [search.estimate(choice) for choice in own],
            "evaluate": lambda own=own: evaluate([search.plan(choice) for choice in own]),
        }
        seconds = best_of({name: judge, **ways}, repeat)
        theirs_per_s = count / seconds[name]
        rates = {way: len(own) / seconds[way] for way in ways}
        table.add_row(f"{what}: {name}", f"{theirs_per_s:.0f}", *(f"{rate:.0f}" for rate in rates.values()))
        for way, rate in rates.items():
            found.append(
                Headline(
                    what=f"{way} {len(own)} mixtures of K, D, T and M on 16 devices",
                    peer=name,
                    ours=f"{rate:.0f} plans/s",
                    theirs=f"{theirs_per_s:.0f} plans/s",
                    ratio=rate / theirs_per_s,
                    note=f"{name} has formulas, as our estimate, with which a search begins; evaluated is every action",
                    repeat=f"CALCULON=... {REPEAT}" if name == "Calculon" else REPEAT,
                )
            )
    return found


def llm_analysis_on(search: JointSearch, choices: list[Choice]) -> tuple[Callable[[], object], list[Choice], int]:
    """A function that judges all mixtures that llm-analysis takes, which they are, and how many."""
    judges, taken = [], []
    for choice in choices:
        judge = llm_analysis_of(search.plan(choice))
        try:
            judge()
        except (AssertionError, ValueError):  # such as layers that the stages do not divide
            continue
        judges.append(judge)
        taken.append(choice)
    return lambda: [judge() for judge in judges], taken, len(judges)


def calculon_on(search: JointSearch, choices: list[Choice]) -> tuple[Callable[[], object], list[Choice], int]:
    """The same of Calculon, which has its own list of what it can mix."""
    if not os.environ.get("CALCULON"):
        raise ImportError("it is in no package index, expected a clone in the environment variable CALCULON")
    clone = Path(os.environ["CALCULON"])
    sys.path.insert(0, str(clone))
    llm = importlib.import_module("calculon.llm")
    system = json.loads((clone / "systems" / "a100_80g.json").read_text())
    model, devices = search.scenario.model, search.scenario.cluster.num_devices
    assert isinstance(model, Transformer)
    shape = {
        "name": "benchmark",
        "seq_size": model.sequence,
        "hidden": model.hidden,
        "feedforward": model.ffn_width,
        "attn_heads": model.heads,
        "attn_size": model.hidden // model.heads,
        "num_blocks": model.layers,
    }
    application, hardware = llm.Llm.Application(shape), importlib.import_module("calculon").System(system)
    everything = llm.AllExecutions.all_executions(
        application, hardware, devices, search.scenario.batch, "float16", [True]
    )
    executions = random.Random(0).sample(list(everything), NUM_PLANS)
    return lambda: llm.AllExecutions.search(application, hardware, executions), choices, NUM_PLANS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each, the best counts (3)")
    add_option(parser)
    arguments = parser.parse_args()
    console = Console()
    table = Table("us per action", "torch", "ours, simpy", "ours, fast")
    headlines = torch_headlines(arguments.repeat, table)
    console.print(table)
    table = Table("plans per second", "llm-analysis", "ours, fast")
    headlines.append(formula_headline(arguments.repeat, table))
    console.print(table if table.row_count else headlines[-1].note)
    table = Table("plans per second", "theirs", "ours, estimated", "ours, evaluated")
    headlines += (mixtures := mixture_headlines(arguments.repeat, table))
    console.print(table)
    for note in (row.note for row in mixtures if row.ratio is None):
        console.print(note, highlight=False)
    save(arguments.rows, headlines)


if __name__ == "__main__":
    main()
