"""Plans to test with: a stage per layer, costs as given, nothing looked up."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gpipe_sim.files import Document
from gpipe_sim.plan import Plan, make_plan
from gpipe_sim.scenario import Scenario
from gpipe_sim.schedule import SCHEDULES
from gpipe_sim.sweep import parse_scenario

GiB = 2**30


def scenario(data: dict[str, Any]) -> Scenario:
    """The only point of a scenario given as data."""
    (point,) = parse_scenario(Document("test.yaml", data))
    return point


def layers(
    forward: Sequence[float],
    backward: Sequence[float] | None = None,
    output: Sequence[float] | None = None,
    saved: Sequence[float] | None = None,
    parameters: float = 0,
    overhead: float = 0,
) -> dict[str, Any]:
    """A model with a layer for each entry of `forward`, seconds and bytes per sample."""
    entries: list[dict[str, Any]] = []
    for index, seconds in enumerate(forward):
        entry = {"name": f"layer{index}", "forward": f"{seconds!r} s", "parameters": f"{parameters!r} B"}
        entry |= {"overhead": f"{overhead!r} s"}
        if backward is not None:
            entry["backward"] = f"{backward[index]!r} s"
        if output is not None:
            entry["output"] = f"{output[index]!r} B"
        if saved is not None:
            entry["saved"] = f"{saved[index]!r} B"
        entries.append(entry)
    return {"kind": "layers", "layers": entries}


def plan(
    model: dict[str, Any],
    microbatches: int,
    *,
    batch: int | None = None,
    bandwidth: str = "inf GB/s",
    latency: float = 0.0,
    cluster: dict[str, Any] | None = None,
    **choices: Any,
) -> Plan:
    """A plan with a stage per layer unless `choices` say otherwise, and a sample per micro-batch."""
    num_layers = sum(layer.get("repeat", 1) for layer in model["layers"])
    data = {
        "name": "test",
        "model": model,
        "batch": batch or microbatches,
        "dtype": "fp32",
        "cluster": {"device": {"memory": "16 GiB"}, "link": {"bandwidth": bandwidth, "latency": f"{latency!r} s"}}
        | (cluster or {}),
        "plan": {"stages": num_layers, "microbatches": microbatches, "checkpoint": "never", "window": "all"} | choices,
    }
    return make_plan(scenario(data))


def equal_stages(K: int, M: int, *, f: float = 1.0, b: float = 2.0, **settings: Any) -> Plan:
    """K equal stages, free links unless the settings say otherwise."""
    return plan(layers([f] * K, [b] * K, [1.0] * K, [4.0] * K), M, **settings)


seconds = st.floats(0.01, 10.0)


@st.composite
def random_plans(draw: st.DrawFn, *, max_stages: int = 5, max_microbatches: int = 8, shared: bool = False) -> Plan:
    """Uneven stages, links, micro-batches, every schedule, checkpoint and recompute mode, window and overlap."""
    K = draw(st.integers(1, max_stages))
    schedule = draw(st.sampled_from(list(SCHEDULES)))
    M = 1 if schedule == "naive" else draw(st.integers(1, max_microbatches))
    each = {name: draw(st.lists(seconds, min_size=K, max_size=K)) for name in ("forward", "backward")}
    output = draw(st.lists(st.floats(0.0, 5.0), min_size=K, max_size=K))
    saved = draw(st.lists(st.floats(0.0, 50.0), min_size=K, max_size=K))
    modes = draw(st.lists(st.sampled_from(["never", "always", "except_last"]), min_size=K, max_size=K))
    cluster: dict[str, Any] = {"overlap": draw(st.booleans())}
    if K > 1 and draw(st.booleans()):
        cluster["links"] = {draw(st.integers(0, K - 2)): {"bandwidth": "0.5 B/s", "latency": "0.3 s"}}
    if shared:
        nodes = draw(st.integers(1, 3))
        cluster |= {"nodes": nodes, "devices_per_node": -(-K // nodes), "cores": draw(st.integers(1, 4))}
        cluster |= {"network": {"bandwidth": "1 B/s", "latency": "0.1 s"}}
    if draw(st.booleans()):
        cluster["slowdown"] = {draw(st.integers(0, K - 1)): draw(st.floats(0.5, 3.0))}
    made = plan(
        layers(each["forward"], each["backward"], output, saved, parameters=8),
        M,
        batch=M * draw(st.integers(1, 3)) + draw(st.integers(0, M - 1)),
        bandwidth="1 B/s",
        latency=draw(st.floats(0.0, 1.0)),
        cluster=cluster,
        schedule=schedule,
        checkpoint={"per_stage": modes},
        recompute=draw(st.sampled_from(["early", "on_demand"])),
        backward=draw(st.sampled_from(["reverse", "fifo"])),
        window=draw(st.sampled_from([1, 2, 3, "all"])),
        placement=draw(st.permutations(range(K))),
    )
    overheads = {name: draw(st.sampled_from([0.0, 0.2])) for name in ("action_overhead_s", "hop_overhead_s")}
    optimizer_s = np.array(draw(st.lists(st.floats(0.0, 3.0), min_size=K, max_size=K)))
    table = made.profile.table | {
        f"workspace_{name}_bytes": made.profile.table["saved_bytes"] * draw(st.sampled_from([0.0, 0.3, 2.0]))
        for name in ("no_grad", "forward", "backward")
    }
    return replace(made, profile=replace(made.profile, **overheads, optimizer_s=optimizer_s, table=table))
