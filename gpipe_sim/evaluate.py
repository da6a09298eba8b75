"""The simulator's answer without events, for thousands of plans or jitter samples at a time.

Where nothing is shared, every time in a step is a maximum of sums of earlier ones (`dependencies`). Plans of one shape
are solved together, a column of an array each:

    plans --by shape--> seconds, bytes / bandwidth, latency --Graph.times--> times --peaks--> peaks
                                                                               '--> step, pipeline and busy time

NICs and cores that are shared need events: for them there is `simulate`, and `obstacle` says so.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import TypeVar

import numpy as np

from gpipe_sim.dependencies import Graph, Shape, graph_of, shape_of
from gpipe_sim.jitter import jitter_factors
from gpipe_sim.memory import Flags, StepBytes, step_bytes
from gpipe_sim.metrics import StepMetrics
from gpipe_sim.peaks import RankEvents, peaks
from gpipe_sim.plan import Plan, recomputed_by, sum_by_stage
from gpipe_sim.profile import Array
from gpipe_sim.schedule import gradient_taker
from gpipe_sim.simulate import ALL_EFFECTS, Effects, simulate

_MAX_COLUMNS, _MAX_TIMES = 512, 2**21
"""Plans are solved together until their times no longer fit a cache."""
_LARGE_BYTES = 31 * 2**20
"""About the largest piece whose release makes glibc keep what is released after it, instead of handing it back."""


def obstacle(plan: Plan, *, effects: Effects = ALL_EFFECTS) -> str | None:
    """Why the plan needs the event simulation, if it does."""
    if effects.sharing and plan.crowded_nodes:
        return f"ranks share the cores of node {_list(plan.crowded_nodes)}"
    if effects.sharing and effects.communication and plan.shared_nics:
        return f"messages share the NIC of node {_list({nic.node for nic in plan.shared_nics})}"
    return None


def _list(nodes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(nodes)))


def evaluate(plans: Sequence[Plan], *, effects: Effects = ALL_EFFECTS, memory: bool = True) -> list[StepMetrics]:
    """What `simulate` would say of each plan; without `memory`, of its times only."""
    _keep_memory()
    found: dict[int, StepMetrics] = {}
    shapes: dict[Shape, list[int]] = {}
    for i, plan in enumerate(plans):
        shapes.setdefault(shape_of(plan, communication=effects.communication), []).append(i)
    for shape, members in shapes.items():
        graph = _graph(shape, plans[members[0]])
        members.sort(key=lambda i: _kin(plans[i]))
        for some in _chunks(members, graph):
            groups = [list(group) for _, group in groupby((plans[i] for i in some), _kin)]
            figures = _joined([_figures(group, effects) for group in groups])
            held = _joined([step_bytes(group) for group in groups]) if memory else None
            results = _metrics(graph, shape, [plans[i] for i in some], figures, held, effects)
            found |= zip(some, results, strict=True)
    return [found[i] for i in range(len(plans))]


def evaluate_samples(
    plan: Plan, samples: Sequence[int], *, effects: Effects = ALL_EFFECTS, memory: bool = True
) -> list[StepMetrics]:
    """What `simulate` would say of the plan in each of these samples of its jitter."""
    _keep_memory()
    shape = shape_of(plan, communication=effects.communication)
    graph, nominal = _graph(shape, plan), _figures([plan], effects)
    held = step_bytes([plan]) if memory else None
    found: list[StepMetrics] = []
    for some in _chunks(samples, graph):
        found += _metrics(graph, shape, [plan] * len(some), _jittered(plan, nominal, some), held, effects)
    return found


def _keep_memory() -> None:
    """Large arrays come and go; fetching their pages from the system each time would take longer than filling them."""
    np.empty(_LARGE_BYTES, dtype=np.uint8)


def _graph(shape: Shape, plan: Plan) -> Graph:
    graph = graph_of(shape)
    if graph is None:
        simulate(plan, memory=False)  # which says who waits for what
        raise AssertionError("a schedule that cannot finish is a deadlock in the simulation too")
    return graph


def _chunks(items: Sequence[int], graph: Graph) -> Iterator[Sequence[int]]:
    size = min(_MAX_COLUMNS, max(1, _MAX_TIMES // graph.num_times))
    return (items[first : first + size] for first in range(0, len(items), size))


def _kin(plan: Plan) -> tuple[object, ...]:
    """Plans of one shape that are equal in this differ in nothing but balance and checkpoint."""
    scenario = plan.scenario
    return id(plan.profile), id(scenario.cluster), scenario.batch, scenario.optimizer, plan.placement


# --- figures -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Figures:
    """What the equations need: axes are stage (or edge), micro-batch and plan."""

    forward_s: Array
    recompute_s: Array
    backward_s: Array
    update_s: Array
    """Without micro-batches."""
    recomputed: Flags
    overhead_s: Array
    """By plan."""
    occupancy_s: Array
    """Seconds that each edge carries each message."""
    latency_s: Array
    """By edge and plan."""


def _figures(plans: Sequence[Plan], effects: Effects) -> _Figures:
    """The figures of plans of one kin."""
    plan = plans[0]
    if problem := obstacle(plan, effects=effects):
        raise ValueError(f"{problem}, which needs the event simulation")
    profile, edges = plan.profile, range(plan.num_stages - 1)
    balances = np.array([plan.balance for plan in plans])
    slowdowns = np.array([[plan.slowdown(stage)] for stage in range(plan.num_stages)])
    sizes = sorted(set(plan.sizes), reverse=True)
    costs, repeats = [profile.at(size) for size in sizes], [plan.sizes.count(size) for size in sizes]

    def each(per_size: Sequence[Array]) -> Array:
        return np.repeat(np.stack(per_size, axis=1), repeats, axis=1)

    def seconds(layers_s: Array) -> Array:
        total: Array = sum_by_stage(layers_s, balances).T * slowdowns
        return total

    forward_s = each([seconds(cost.forward_s) for cost in costs])
    recomputed = recomputed_by(plans)
    links = [plan.link(edge) for edge in edges]
    ends = np.cumsum(balances, axis=1)[:, :-1].T - 1
    messages = each([cost.output_bytes[ends] for cost in costs])
    bandwidths = np.array([link.bandwidth for link in links]).reshape(-1, 1, 1)
    hop = profile.hop_overhead_s if effects.overhead else 0.0
    latency = np.array([hop + link.latency if effects.communication else hop for link in links])
    return _Figures(
        forward_s=forward_s,
        recompute_s=forward_s * recomputed,
        backward_s=each([seconds(cost.backward_s) for cost in costs]),
        update_s=seconds(profile.optimizer_s),
        recomputed=recomputed,
        overhead_s=np.full(len(plans), profile.action_overhead_s if effects.overhead else 0.0),
        occupancy_s=messages / bandwidths if effects.communication else np.zeros_like(messages),
        latency_s=np.repeat(latency[:, None], len(plans), axis=1),
    )


def _jittered(plan: Plan, nominal: _Figures, samples: Sequence[int]) -> _Figures:
    """A column for each sample instead of each plan."""
    factors = jitter_factors(plan, samples)
    return replace(
        nominal,
        forward_s=nominal.forward_s * factors["F"],
        recompute_s=nominal.recompute_s * factors["R"],
        backward_s=nominal.backward_s * factors["B"],
        update_s=nominal.update_s * factors["U"][:, 0],
    )


_Part = TypeVar("_Part", _Figures, StepBytes)


def _joined(parts: Sequence[_Part]) -> _Part:
    """Side by side: the last axis is the plan."""
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in fields(parts[0])]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in names}
    return type(parts[0])(**arrays)


# --- solutions -----------------------------------------------------------------------------------------------------


def _metrics(
    graph: Graph, shape: Shape, plans: Sequence[Plan], figures: _Figures, held: StepBytes | None, effects: Effects
) -> Iterator[StepMetrics]:
    """Solve the equations, a column per plan, and read off what `metrics` defines."""
    K, num_columns = plans[0].num_stages, len(plans)
    recompute_s = np.where(figures.recomputed, figures.overhead_s + figures.recompute_s, 0.0)
    actions_s = [
        figures.overhead_s + figures.forward_s,
        recompute_s,
        figures.overhead_s + figures.backward_s,
        figures.overhead_s + figures.update_s,
    ]
    seconds = np.concatenate([part.reshape(-1, num_columns) for part in actions_s])
    occupancy = figures.occupancy_s.reshape(-1, figures.occupancy_s.shape[-1])
    times = graph.times(seconds, occupancy, figures.latency_s, posted=not effects.communication)
    begin = times[graph.taken[:, 0]].min(axis=0) + figures.overhead_s
    last_backward = graph.end[np.arange(K), graph.place["B"].max(axis=1)]
    step_time = times[graph.end[:, -1]].max(axis=0) - begin
    pipeline_time = times[last_backward].max(axis=0) - begin
    busy = (figures.forward_s + figures.recompute_s + figures.backward_s).sum(axis=1)
    by_stage = [busy]
    if held is not None:
        by_stage += peaks(held, _events(graph, shape, times, figures), shape.window)
    stage_of = np.argsort([plan.placement for plan in plans], axis=1)
    busy, *memory = (np.take_along_axis(values.T, stage_of, axis=1) for values in by_stage)
    highest, activations = (values.astype(np.int64) for values in memory or np.empty((2, num_columns, 0)))
    for i in range(num_columns):
        yield StepMetrics(
            step_time_s=float(step_time[i]),
            pipeline_time_s=float(pipeline_time[i]),
            busy_s=busy[i],
            peak_memory_bytes=highest[i],
            activation_bytes=activations[i],
        )


def _events(graph: Graph, shape: Shape, times: Array, figures: _Figures) -> RankEvents:
    """The ranks' own events in order. Where there is no overhead, to turn to an action is to start it:

    without  0  start end  start end ...          with  0  taken start end  taken start end ...
    """
    K, length = graph.taken.shape
    has_overhead = bool(figures.overhead_s.any())
    columns = [graph.taken, graph.taken, graph.end] if has_overhead else [graph.taken, graph.end]
    per_action = len(columns)
    index = np.zeros((2 + per_action * length, K), dtype=int)
    for i, rows in enumerate(columns):
        index[1 + i : -1 : per_action] = rows.T
    event_times = times.take(index, axis=0)
    event_times[-1] = np.inf
    first = {kind: 1 + per_action * place for kind, place in graph.place.items()}
    start = 1 if has_overhead else 0
    if has_overhead:
        event_times[2:-1:3] += figures.overhead_s
        if shape.recomputes:  # what is not recomputed has no overhead either
            stages = np.arange(K)[:, None]
            overhead = np.where(figures.recomputed, figures.overhead_s, 0.0)
            event_times[first["R"] + 1, stages] = event_times[first["R"], stages] + overhead
    moments = {f"{kind} start": row + start for kind, row in first.items()}
    moments |= {f"{kind} end": row + per_action - 1 for kind, row in first.items()}
    taker = gradient_taker(shape.recompute, shape.recomputes)
    moments |= {"F taken": first["F"], "gradient taken": first[taker]}
    delivered = {f"{kind} delivered": times.take(rows, axis=0) for kind, rows in graph.delivered.items()}
    return RankEvents(event_times, moments, delivered)
