"""Plans to test with: a stage per layer, costs as given, nothing looked up."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gpipe_sim.base.files import Document
from gpipe_sim.make.making import make_plan
from gpipe_sim.plan.actions import Letter
from gpipe_sim.plan.order import ActionList, Order
from gpipe_sim.plan.orders import SCHEDULES, position_of
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.scenario.schema import Scenario

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
    weights: Sequence[float] | None = None,
) -> dict[str, Any]:
    """A model with a layer for each entry of `forward`, seconds and bytes per sample."""
    entries: list[dict[str, Any]] = []
    for index, seconds in enumerate(forward):
        entry = {"name": f"layer{index}", "forward": f"{seconds!r} s", "parameters": f"{parameters!r} B"}
        entry |= {"overhead": f"{overhead!r} s"}
        if backward is not None:
            entry["backward"] = f"{backward[index]!r} s"
        if weights is not None:
            entry["backward_weights"] = f"{weights[index]!r} s"
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


def equal_stages(K: int, M: int, *, f: float = 1.0, b: float = 2.0, w: float | None = None, **settings: Any) -> Plan:
    """K equal stages, free links unless the settings say otherwise; half of a backward is the weights'."""
    weights = [b / 2 if w is None else w] * K
    return plan(layers([f] * K, [b] * K, [1.0] * K, [4.0] * K, weights=weights), M, **settings)


ONE_STAGE = ("naive", "gpipe", "1f1b")
"""Schedules with whole backwards and one stage on each rank."""

seconds = st.floats(0.01, 10.0)


@st.composite
def random_plans(
    draw: st.DrawFn,
    *,
    max_stages: int = 5,
    max_microbatches: int = 8,
    shared: bool = False,
    schedules: Sequence[str] = tuple(SCHEDULES),
) -> Plan:
    """Uneven stages, links, micro-batches, every schedule, checkpoint and recompute mode, window and overlap."""
    schedule = SCHEDULES[draw(st.sampled_from(list(schedules)))]
    v = schedule.stages_per_rank or draw(st.integers(1, 3))
    K = draw(st.integers(1, max(1, max_stages // v)))
    S = K * v
    M = 1 if schedule.name == "naive" else draw(st.integers(1, max_microbatches))
    each = {name: draw(st.lists(seconds, min_size=S, max_size=S)) for name in ("forward", "backward")}
    share = draw(st.lists(st.floats(0.0, 1.0), min_size=S, max_size=S))
    output = draw(st.lists(st.floats(0.0, 5.0), min_size=S, max_size=S))
    saved = draw(st.lists(st.floats(0.0, 50.0), min_size=S, max_size=S))
    modes = draw(st.lists(st.sampled_from(["never", "always", "except_last"]), min_size=S, max_size=S))
    cluster: dict[str, Any] = {"overlap": draw(st.booleans())}
    if S > 1 and draw(st.booleans()):
        cluster["links"] = {draw(st.integers(0, S - 2)): {"bandwidth": "0.5 B/s", "latency": "0.3 s"}}
    if shared:
        nodes = draw(st.integers(1, 3))
        cluster |= {"nodes": nodes, "devices_per_node": -(-K // nodes), "cores": draw(st.integers(1, 4))}
        cluster |= {"network": {"bandwidth": "1 B/s", "latency": "0.1 s"}}
    if draw(st.booleans()):
        cluster["slowdown"] = {draw(st.integers(0, K - 1)): draw(st.floats(0.5, 3.0))}
    ranks = draw(st.permutations(range(K)))
    made = plan(
        layers(
            each["forward"],
            each["backward"],
            output,
            saved,
            parameters=8,
            weights=[part * whole for part, whole in zip(share, each["backward"], strict=True)],
        ),
        M,
        batch=M * draw(st.integers(1, 3)) + draw(st.integers(0, M - 1)),
        bandwidth="1 B/s",
        latency=draw(st.floats(0.0, 1.0)),
        cluster=cluster,
        schedule=schedule.name,
        stages_per_rank=v,
        checkpoint={"per_stage": modes},
        recompute=draw(st.sampled_from(["early", "on_demand"])),
        backward=draw(st.sampled_from(["reverse", "fifo"])),
        # Senders that wait can wait for each other where ranks hold several stages and few receives are posted.
        window=draw(st.sampled_from([1, 2, 3, "all"])) if v == 1 or cluster["overlap"] else "all",
        placement=[ranks[position_of(schedule.pattern, stage, K)] for stage in range(S)],
    )
    overheads = {name: draw(st.sampled_from([0.0, 0.2])) for name in ("action_overhead_s", "hop_overhead_s")}
    optimizer_s = np.array(draw(st.lists(st.floats(0.0, 3.0), min_size=S, max_size=S)))
    saved_bytes = made.profile.table["saved_bytes"]
    table = made.profile.table | {
        f"workspace_{name}_bytes": saved_bytes * draw(st.sampled_from([0.0, 0.3, 2.0]))
        for name in ("no_grad", "forward", "backward", "inputs", "weights")
    }
    table["kept_bytes"] = saved_bytes * draw(st.sampled_from([0.5, 1.0, 1.5]))
    return replace(made, profile=replace(made.profile, **overheads, optimizer_s=optimizer_s, table=table))


@st.composite
def handing_on(draw: st.DrawFn, made: Plan) -> Plan:
    """The same plan, some of whose layers' outputs are tensors that go on to later layers than the next."""
    profile, L = made.profile, made.profile.num_layers
    left, skips = profile.table["output_bytes"].copy(), []
    for first in range(L - 2):
        if draw(st.booleans()):
            last = draw(st.integers(first + 2, L - 1))
            amounts = left[first:last].min(axis=0) * draw(st.sampled_from([0.0, 0.3, 1.0]))
            left[first:last] -= amounts
            skips.append((first, last, tuple(amounts.tolist())))
    freed = profile.table["output_bytes"] * draw(st.sampled_from([0.0, 0.5]))
    return replace(made, profile=replace(profile, skips=tuple(skips), table=profile.table | {"freed_bytes": freed}))


def random_order(positions: Sequence[int], num_microbatches: int, random: Random) -> Order:
    """An order that can finish, drawn at random: actions as they become possible, backwards whole or split."""
    S, M = len(positions), num_microbatches
    split = {(stage, m): random.random() < 0.5 for stage in range(S) for m in range(M)}
    done: set[tuple[Letter, int, int]] = set()
    waiting: list[tuple[Letter, int, int]] = []
    for stage, m in split:
        waiting += [("F", stage, m), *([("I", stage, m), ("W", stage, m)] if split[stage, m] else [("B", stage, m)])]

    def possible(action: tuple[Letter, int, int]) -> bool:
        kind, stage, m = action
        if kind == "F":
            return stage == 0 or ("F", stage - 1, m) in done
        if kind == "W":
            return ("I", stage, m) in done
        after = ("I" if split.get((stage + 1, m)) else "B", stage + 1, m)
        return ("F", stage, m) in done and (stage == S - 1 or after in done)

    rows: list[list[tuple[Letter, int, int]]] = [[] for _ in range(max(positions) + 1)]
    while waiting:
        action = random.choice([action for action in waiting if possible(action)])
        waiting.remove(action)
        done.add(action)
        rows[positions[action[1]]].append(action)
    return tuple(ActionList.of(row) for row in rows)
