"""Runs on GPUs that others have measured and published, beside what this project predicts of them.

    set           fitted                                                      judged
    ----------------------------------------------------------------------------------------------------------------
    korthikanti   22B and 175B, with vTrain's 3.6B: `A100`, five parameters    530B and 1T
    vtrain        3.6B, as above                                               18.4B, 39.1B and 175B
    simumax       70B, four micro-batches: `B200`, two parameters              70B, 8 and 32; 405B; memory of all
    sailor        nothing: its layers were timed by those who published it     everything

A parameter is what a device or link attains of its peak; the rest follows from shapes. They were fitted once to the
rows named, by least squares of the logarithms with little weight for outliers, and rounded; a test sees that no other
value of any of them comes nearer to these rows.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpipe_sim.base.arrays import Array
from gpipe_sim.base.files import Document
from gpipe_sim.cost.profile import COLUMNS, Profile
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.catalog import LINKS, find_device
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.step.evaluate import evaluate, obstacle
from gpipe_sim.step.metrics import step_time_s
from gpipe_sim.step.simulate import simulate

DATA = Path(__file__).with_name("gpu_runs.json")
GiB = 2**30


class Attained(NamedTuple):
    """What a device and its links attain."""

    device: str
    efficiency: float
    memory_efficiency: float
    launch_us: float
    link_gb_s: float
    network_gb_s: float
    """Of each NIC."""

    def cluster(self, nodes: int, nics: int, *, free_network: bool = False) -> dict[str, Any]:
        """Nodes of eight such devices."""
        device = {
            "like": self.device,
            "efficiency": self.efficiency,
            "memory_efficiency": self.memory_efficiency,
            "launch": f"{self.launch_us} us",
        }
        bandwidth = "inf GB/s" if free_network else f"{self.network_gb_s} GB/s"
        network = {"network": {"bandwidth": bandwidth, "latency": "10 us"}} if nodes > 1 else {}
        link = {"bandwidth": f"{self.link_gb_s} GB/s", "latency": "5 us"}
        own = {
            "device": device,
            "nodes": nodes,
            "devices_per_node": 8,
            "nics": nics,
            "link": link,
            "memory_reserve": "0 B",
        }
        return own | network


def _attained(name: str, link: str, network: str) -> Attained:
    """What the catalogue says of a device and its links."""
    device = find_device(f"{name}-attained")
    assert device.memory_efficiency is not None, "what is attained was fitted"
    bandwidths = (LINKS[one].bandwidth / 1e9 for one in (link, network))
    return Attained(name, device.efficiency, device.memory_efficiency, device.launch * 1e6, *bandwidths)


A100 = _attained("a100-80gb", "nvlink3-attained", "200gbit-attained")
B200 = _attained("b200", "nvlink5-attained", "200gbit-attained")
"""Efficiency and link are fitted; the share of the memory's bandwidth and the time of a launch are the A100's."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured figure: seconds of a step, or bytes of the fullest rank."""

    set_name: str
    name: str
    measured: float
    is_fitted: bool
    plan: Callable[[], Plan]
    own: float | None = None
    """What the tool that published it predicted."""
    is_memory: bool = False

    def predicted(self) -> float:
        """What this project says."""
        plan = self.plan()
        if self.is_memory:
            return float(max(curve.peak_bytes for curve in simulate(plan).memory))
        if obstacle(plan) is None:
            return evaluate([plan], memory=False)[0].step_time_s
        return step_time_s(simulate(plan, memory=False))


@cache
def published_runs() -> Mapping[str, Mapping[str, Any]]:
    """The sets, by name, as they are in the file beside this one."""
    data: dict[str, dict[str, Any]] = json.loads(DATA.read_text())
    return data


def _rows(name: str) -> list[dict[str, Any]]:
    table = published_runs()[name]
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def _plan(model: dict[str, Any], batch: int, cluster: dict[str, Any], plan: dict[str, Any]) -> Plan:
    data = {
        "name": "published",
        "model": model,
        "batch": batch,
        "cluster": cluster,
        "plan": {"schedule": "1f1b"} | plan,
    }
    data |= {"precision": "mixed_fp32_gradients"} if model["kind"] == "transformer" else {}
    (scenario,) = parse_scenario(Document("published", data))
    return make_plan(scenario)


def _megatron(row: Mapping[str, Any]) -> dict[str, Any]:
    """A GPT as Megatron-LM has it."""
    shape = {name: row[name] for name in ("heads", "hidden", "layers")}
    fixed = {"sequence": 2048, "vocab": 51200, "attention": "classic", "positions": "learned", "tied": True}
    return {"kind": "transformer"} | shape | fixed


def _equal_blocks(layers: int, stages: int) -> list[int]:
    """Blocks dealt out equally, the embedding with the first of them, norm and head with the last."""
    balance = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    balance[0] += 1
    balance[-1] += 2
    return balance


def korthikanti_runs(at: Attained = A100) -> Iterator[Run]:
    """Iterations in which every layer is recomputed, and in which attention alone is and the sequence is split."""

    def plan(row: Mapping[str, Any], unit: str) -> Plan:
        K, T, v = row["pipeline"], row["tensor"], row["stages_per_rank"]
        chosen = {
            "stages": K * v,
            "stages_per_rank": v,
            "schedule": "1f1b" if v == 1 else "interleaved_1f1b",
            "microbatches": row["batch"] // row["microbatch"],
            "tensor": T,
            "sequence_split": unit == "attention",
            "checkpoint": "always",
            "recompute_unit": unit,
            "balance": _equal_blocks(row["layers"], K * v),
        }
        return _plan(_megatron(row), row["batch"], at.cluster(max(T * K // 8, 1), 8, free_network=True), chosen)

    for row in _rows("korthikanti"):
        for unit, column in (("layer", "full_s"), ("attention", "selective_s")):
            yield Run(
                set_name="korthikanti",
                name=f"{row['model']}, {'all' if unit == 'layer' else 'attention'} recomputed",
                measured=row[column],
                is_fitted=row["model"] in ("22B", "175B"),
                plan=partial(plan, row, unit),
            )


def vtrain_runs(at: Attained = A100) -> Iterator[Run]:
    """Iterations on 64 to 512 devices."""

    def plan(row: Mapping[str, Any]) -> Plan:
        chosen = {
            "stages": row["pipeline"],
            "microbatches": row["batch"] // row["replicas"] // row["microbatch"],
            "tensor": row["tensor"],
            "replicas": row["replicas"],
            "sequence_split": False,
            "checkpoint": "always",
            "recompute_unit": "layer",
            "balance": _equal_blocks(row["layers"], row["pipeline"]),
        }
        return _plan(_megatron(row), row["batch"], at.cluster(row["gpus"] // 8, 4), chosen)

    for row in _rows("vtrain"):
        T, D, K = row["tensor"], row["replicas"], row["pipeline"]
        yield Run(
            set_name="vtrain",
            name=f"{row['params_B']}B, T={T} D={D} K={K}, micro-batches of {row['microbatch']}",
            measured=row["iteration_ms"] / 1e3,
            is_fitted=row["params_B"] == 3.6,
            plan=partial(plan, row),
        )


def simumax_runs(at: Attained = B200) -> Iterator[Run]:
    """Steps and the memory of the fullest rank, on one node."""

    def plan(row: Mapping[str, Any]) -> Plan:
        chosen = {
            "stages": row["pipeline"],
            "microbatches": row["microbatches"],
            "tensor": row["tensor"],
            "replicas": row["replicas"],
            "shard": "optimizer",
            "checkpoint": "never",
            "balance": _equal_blocks(row["layers"], row["pipeline"]),
        }
        shape = {"preset": row["model"], "layers": row["layers"], "sequence": 4096}
        model = {"kind": "transformer", "causal": True, "fused_loss": True} | shape
        return _plan(model, row["replicas"] * row["microbatches"], at.cluster(1, 1), chosen)

    for row in _rows("simumax"):
        mesh = f"T={row['tensor']} D={row['replicas']} K={row['pipeline']}"
        name = f"{row['model']}, {mesh}, {row['microbatches']} micro-batches"
        made, few, ms = partial(plan, row), row["microbatches"] == 4, 1e-3
        yield Run(
            set_name="simumax",
            name=name,
            measured=row["real_ms"] * ms,
            own=row["own_ms"] * ms,
            is_fitted=few and row["model"] == "llama-3-70b",
            plan=made,
        )
        if few:  # memory is the same for any number of micro-batches, and was published once
            yield Run(
                set_name="simumax memory",
                name=name,
                measured=row["real_GiB"] * GiB,
                own=row["own_GiB"] * GiB,
                is_fitted=False,
                plan=made,
                is_memory=True,
            )


def sailor_runs() -> Iterator[Run]:
    """Steps predicted from times of single layers that were published with them; links at their peaks."""

    def plan(row: Mapping[str, Any]) -> Plan:
        K, D = len(row["balance"]), row["replicas"]
        network = {"bandwidth": "25 GB/s", "latency": "10 us"}
        cluster = {"device": "h100-80gb", "link": "nvlink4", "nodes": K * D, "devices_per_node": 4, "nics": 4}
        choices = {
            "stages": K,
            "microbatches": row["batch"] // D // row["microbatch"],
            "tensor": row["tensor"],
            "replicas": D,
            "checkpoint": "never",
        }
        made = _plan(_OPT_350M, row["batch"], cluster | {"network": network}, choices)
        return replace(made, profile=_sailor_profile(made.profile), balance=tuple(row["balance"]))

    for row in _rows("sailor"):
        K, D = len(row["balance"]), row["replicas"]
        yield Run(
            set_name="sailor",
            name=f"T=4 D={D} K={K}, {row['batch']} in micro-batches of {row['microbatch']}",
            measured=row["real_s"],
            is_fitted=False,
            plan=partial(plan, row),
        )


_OPT_350M = {
    "kind": "transformer",
    "layers": 24,
    "hidden": 1024,
    "heads": 16,
    "vocab": 50272,
    "sequence": 2048,
}


def _sailor_profile(analytic: Profile) -> Profile:
    """The published times of embedding, blocks and head; bytes, which weigh in messages only, from the shape.

    A call with fewer samples cannot take longer than one with more: where it was timed so, as with one sample, the
    machine was busy with something else, and the shorter time is taken.
    """
    times: dict[str, dict[str, list[float]]] = published_runs()["sailor"]["profile_s"]
    names, sizes = ["first", "second", *["block"] * 22, "before_last", "last"], [int(size) for size in times]

    def column(number: int) -> Array:
        measured = np.array([[times[str(size)][name][number] for size in sizes] for name in names])
        shortest: Array = np.minimum.accumulate(measured[:, ::-1], axis=1)[:, ::-1]
        return shortest

    layers = [*range(25), 26]  # the norm is timed with the head
    shaped = {name: np.array([getattr(analytic.at(size), name)[layers] for size in sizes]).T for name in COLUMNS}
    return replace(
        analytic,
        source="imported",
        names=tuple(names),
        sizes=tuple(sizes),
        table=shaped | {"forward_s": column(0), "backward_s": column(1)},
        parameter_bytes=analytic.parameter_bytes[layers],
        optimizer_s=column(2)[:, 0],
    )


# --- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """How far predictions are from the runs of one set, as shares of what was measured."""

    name: str
    source: str
    fitted: tuple[float, ...]
    judged: tuple[float, ...]
    own_error: float | None
    """The mean error of the tool that published it, of the same rows where it published them; None if it is none."""

    @property
    def mean_error(self) -> float:
        """Of those that were judged, if any were."""
        return float(np.mean(np.abs(self.judged)))

    @property
    def median_error(self) -> float:
        """Of those that were judged, if any were."""
        return float(np.median(np.abs(self.judged)))

    def to_dict(self) -> dict[str, Any]:
        """The keys of ``gpipe validate --gpu --json``."""
        return {
            "set": self.name,
            "fitted": len(self.fitted),
            "judged": len(self.judged),
            "mean_error": self.mean_error if self.judged else None,
            "median_error": self.median_error if self.judged else None,
            "worst_error": max(self.judged, key=abs, default=None),
            "fitted_mean_error": float(np.mean(np.abs(self.fitted))) if self.fitted else None,
            "own_mean_error": self.own_error,
            "source": self.source,
        }


def result(runs: Sequence[Run]) -> SetResult:
    """Of the runs of one set."""
    errors = [run.predicted() / run.measured - 1 for run in runs]
    table = published_runs()[runs[0].set_name.split()[0]]
    own = [abs(run.own / run.measured - 1) for run in runs if run.own is not None and not run.is_fitted]
    return SetResult(
        name=runs[0].set_name,
        source=table["source"],
        fitted=tuple(error for error, run in zip(errors, runs, strict=True) if run.is_fitted),
        judged=tuple(error for error, run in zip(errors, runs, strict=True) if not run.is_fitted),
        own_error=float(np.mean(own)) if own else table.get("own_error"),
    )


def gpu_results(advance: Callable[[], None] = lambda: None) -> list[SetResult]:
    """All sets; `advance` is called after each of `NUM_SETS`."""
    simumax = list(simumax_runs())
    sets = [
        list(korthikanti_runs()),
        list(vtrain_runs()),
        [run for run in simumax if not run.is_memory],
        [run for run in simumax if run.is_memory],
        list(sailor_runs()),
    ]
    found = []
    for runs in sets:
        found.append(result(runs))
        advance()
    return found


NUM_SETS = 5
