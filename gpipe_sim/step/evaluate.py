"""The simulator's answer without events, for thousands of plans or jitter samples at a time.

Where nothing is shared, every time in a step is a maximum of sums of earlier ones (`waves`). Plans of one shape are
solved together, a column of an array each:

    plans --by shape--> figures --Graph.times--> times --peaks--> peaks
                                                   '--> step, pipeline and busy time

NICs and cores that are shared need events: for them there is `simulate`, and `obstacle` says so.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from gpipe_sim.base.arrays import Array, Indices
from gpipe_sim.plan.actions import Letter
from gpipe_sim.plan.figures import ALL_EFFECTS, Effects, Figures, figures_of, similar
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import Program, Shape, shape_of
from gpipe_sim.step.jitter import jitter_factors
from gpipe_sim.step.memory import StepBytes, roles, step_bytes, sum_by_position
from gpipe_sim.step.metrics import StepMetrics
from gpipe_sim.step.peaks import RankEvents, peaks
from gpipe_sim.step.simulate import simulate
from gpipe_sim.step.waves import Graph, graph_of

_MAX_COLUMNS, _MAX_TIMES = 512, 2**20
"""Plans are solved together until their times, 8 MiB of them, no longer fit a cache."""
_LARGE_BYTES = 31 * 2**20
"""About the largest piece whose release makes glibc keep what is released after it, instead of handing it back."""


def obstacle(plan: Plan, *, effects: Effects = ALL_EFFECTS) -> str | None:
    """Why the plan needs the event simulation, if it does."""
    if effects.sharing and plan.crowded_nodes:
        return f"ranks share the cores of node {_list(plan.crowded_nodes)}"
    if effects.sharing and effects.communication and plan.shared_nics:
        who = "messages" if plan.replicas == 1 else "messages and collectives"
        return f"{who} share the NIC of node {_list({nic.node for nic in plan.shared_nics})}"
    return None


def _list(nodes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(nodes)))


def evaluate(plans: Sequence[Plan], *, effects: Effects = ALL_EFFECTS, memory: bool = True) -> list[StepMetrics]:
    """What `simulate` would say of each plan; without `memory`, of its times only."""
    _keep_memory()
    found: dict[int, StepMetrics] = {}
    shapes: dict[Shape, list[int]] = {}
    for i, plan in enumerate(plans):
        if plan.simulated_replicas > 1:
            found |= zip([i], _of_replicas(plan, None, effects, memory=memory), strict=True)
            continue
        shapes.setdefault(shape_of(plan, communication=effects.communication), []).append(i)
    for shape, members in shapes.items():
        graph = _graph(shape, plans[members[0]], effects)
        # In the order in which they were given, not by where objects are in memory: sums are rounded the same way.
        kind_of, number = dict[int, int](), dict[object, int]()
        for i in members:
            kind_of[i] = number.setdefault(similar(plans[i]), len(number))
        members.sort(key=kind_of.__getitem__)
        for some in _chunks(members, graph):
            groups = [[plans[i] for i in group] for _, group in groupby(some, kind_of.__getitem__)]
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
    if plan.simulated_replicas > 1:
        return _of_replicas(plan, samples, effects, memory=memory)
    shape = shape_of(plan, communication=effects.communication)
    graph, nominal = _graph(shape, plan, effects), _figures([plan], effects)
    held = step_bytes([plan]) if memory else None
    found: list[StepMetrics] = []
    for some in _chunks(samples, graph):
        found += _metrics(graph, shape, [plan] * len(some), _jittered(plan, nominal, some), held, effects)
    return found


def _of_replicas(plan: Plan, samples: Sequence[int] | None, effects: Effects, *, memory: bool) -> list[StepMetrics]:
    """The same of a plan whose replicas differ: a column for each of them, of each sample, or of the one step."""
    shape, D = shape_of(plan, communication=effects.communication), plan.replicas
    graph = _graph(shape, plan, effects)
    held = step_bytes([plan]) if memory else None
    each = [_figures([plan], effects, replica) for replica in range(D)]
    found: list[StepMetrics] = []
    for some in _chunks(range(1) if samples is None else samples, graph, columns=D):
        seconds = dict[Letter, Array]()
        factors = [jitter_factors(plan, some, replica) for replica in range(D)] if samples is not None else None
        for letter in each[0].seconds:
            of_all = [one.seconds[letter] for one in each]
            if factors is not None:
                of_all = [values * factor[letter] for values, factor in zip(of_all, factors, strict=True)]
            by_replica = np.stack(of_all, axis=-1)
            seconds[letter] = by_replica.reshape(*by_replica.shape[:-2], -1)
        figures = replace(each[0], seconds=seconds)
        found += _metrics(graph, shape, [plan] * len(some) * D, figures, held, effects, together=D)
    return found


def ideal_bubble(shape: Shape) -> float:
    """The bubble that an order has with equal stages and free links, F, I and W equally long and a B twice as long."""
    graph = graph_of(shape._replace(recomputes=False, window=None, blocking=False, shard=None))
    assert graph is not None, "an order that cannot finish is no plan's"
    program = graph.program
    letters = [letter for letter in graph.letters if letter != "U"]
    units = {letter: 2.0 if letter == "B" else 1.0 for letter in letters}
    seconds = np.concatenate(
        [*(np.full(program.at[letter].size, units[letter]) for letter in letters), np.zeros(program.num_ranks)]
    )
    num_edges = len(shape.positions) - 1
    free = np.zeros((num_edges * program.num_microbatches, 1)), np.zeros((num_edges, 1))
    times = graph.times(seconds[:, None], *free)
    busy = sum(units[letter] * int((program.at[letter] >= 0).sum()) for letter in letters)
    return 1.0 - busy / (program.num_ranks * float(times[graph.end].max()))


def _keep_memory() -> None:
    """Large arrays come and go; fetching their pages from the system each time would take longer than filling them."""
    np.empty(_LARGE_BYTES, dtype=np.uint8)


def _graph(shape: Shape, plan: Plan, effects: Effects) -> Graph:
    graph = graph_of(shape)
    if graph is None and not effects.communication:  # which only the windows prevent
        graph = graph_of(shape._replace(window=None))
    if graph is None:
        simulate(plan, memory=False)  # which says who waits for what
        raise AssertionError("a schedule that cannot finish is a deadlock in the simulation too")
    return graph


def _chunks(items: Sequence[int], graph: Graph, columns: int = 1) -> Iterator[Sequence[int]]:
    """Some items at a time, each of which has so many columns."""
    size = max(1, min(_MAX_COLUMNS, max(1, _MAX_TIMES // graph.num_times)) // columns)
    return (items[first : first + size] for first in range(0, len(items), size))


# --- figures -------------------------------------------------------------------------------------------------------


def _figures(plans: Sequence[Plan], effects: Effects, replica: int = 0) -> Figures:
    """The figures of similar plans, and of one of their replicas."""
    if problem := obstacle(plans[0], effects=effects):
        raise ValueError(f"{problem}, which needs the event simulation")
    return figures_of(plans, effects, replica)


def _jittered(plan: Plan, nominal: Figures, samples: Sequence[int]) -> Figures:
    """A column for each sample instead of each plan."""
    factors = jitter_factors(plan, samples)
    return replace(nominal, seconds={letter: values * factors[letter] for letter, values in nominal.seconds.items()})


_Part = TypeVar("_Part", Figures, StepBytes)


def _joined(parts: Sequence[_Part]) -> _Part:
    """Side by side: the last axis is the plan."""
    if len(parts) == 1:
        return parts[0]

    def side_by_side(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: side_by_side([value[key] for value in values]) for key in values[0]}
        return np.concatenate(values, axis=-1)

    names = [field.name for field in fields(parts[0])]
    return type(parts[0])(**{name: side_by_side([getattr(part, name) for part in parts]) for name in names})


# --- solutions -----------------------------------------------------------------------------------------------------


def _metrics(
    graph: Graph,
    shape: Shape,
    plans: Sequence[Plan],
    figures: Figures,
    held: StepBytes | None,
    effects: Effects,
    together: int = 1,
) -> Iterator[StepMetrics]:
    """Solve the equations, a column per plan, and read off what `metrics` defines.

    Of so many columns `together`, each is a replica: they meet in their collectives, and are one result.
    """
    program, num_columns = graph.program, len(plans)
    table, busy = [], np.zeros((len(shape.positions), num_columns))
    for letter in graph.letters:
        compute = figures.seconds[letter]
        there = program.at[letter][:, :, None] >= 0
        if letter == "R":
            there = figures.recomputed
        seconds = figures.overhead_s + compute
        if not there.all():
            seconds, compute = np.where(there, seconds, 0.0), np.where(there, compute, 0.0)
        table.append(np.broadcast_to(seconds, (*seconds.shape[:2], num_columns)).reshape(-1, num_columns))
        busy += compute.sum(axis=1)
    table.append(np.broadcast_to(figures.overhead_s + figures.seconds["U"], (program.num_ranks, num_columns)))
    occupancy = figures.occupancy_s.reshape(-1, figures.occupancy_s.shape[-1])
    posted, gates = not effects.communication, None
    if graph.num_gates:
        gates = _gather_ends(program, figures)
    times = graph.times(np.concatenate(table), occupancy, figures.latency_s, posted=posted, gates=gates)
    begins = times[graph.taken[program.first[:-1]]] + figures.overhead_s
    begin = begins.min(axis=0) if gates is None else np.zeros(num_columns)
    last_backward = times[graph.end[_last_backwards(graph, shape)]]
    step_end = times[graph.end[program.first[1:] - 1]].max(axis=0)
    if shape.shard is not None:
        step_end = _collect(graph, times, figures, table[-1], together)
    step_time = step_end - begin
    pipeline_time = last_backward.max(axis=0) - begin
    longest_span = (last_backward - begins).max(axis=0)
    by_position = [sum_by_position(busy, shape.positions)]
    if held is not None:
        role = roles(program, shape.positions)
        by_position += peaks(held, role, shape.positions, _events(graph, shape, times, figures))
    rank_order = np.argsort([plan.pipeline for plan in plans], axis=1)
    busy, *memory = (np.take_along_axis(values.T, rank_order, axis=1) for values in by_position)
    highest, activations = (values.astype(np.int64) for values in memory or np.empty((2, num_columns, 0)))
    if together > 1:
        step_time, pipeline_time, longest_span = (
            times.reshape(-1, together).max(axis=1) for times in (step_time, pipeline_time, longest_span)
        )
        busy = busy.reshape(-1, together, busy.shape[1]).mean(axis=1)
        by_replica = [values.reshape(len(step_time), together, values.shape[1]) for values in (highest, activations)]
        fullest = by_replica[0].argmax(axis=1)[:, None]
        highest, activations = (np.take_along_axis(values, fullest, axis=1)[:, 0] for values in by_replica)
    for i in range(len(step_time)):
        yield StepMetrics(
            step_time_s=float(step_time[i]),
            pipeline_time_s=float(pipeline_time[i]),
            longest_rank_span_s=float(longest_span[i]),
            busy_s=busy[i],
            peak_memory_bytes=highest[i],
            activation_bytes=activations[i],
        )


def _gather_ends(program: Program, figures: Figures) -> Array:
    """When the parameters of each stage are gathered, where that is what a lane begins with: by stage and plan."""
    seconds = figures.collective_s["G"]
    ends = np.zeros_like(seconds)
    for lane in program.lanes:
        gathered = [collective.stage for collective in lane if collective.kind == "G"]
        ends[gathered] = np.cumsum(seconds[gathered], axis=0)
    return ends


def _collect(graph: Graph, times: Array, figures: Figures, updates: Array, together: int) -> Array:
    """The lanes, and the updates that wait for them, whose times are put right; when everything has ended, by plan.

    A collective starts once its lane is free and what it comes after has ended, in all replicas:

        start = max(lane free, max over replicas of the end of its action)
        end   = start + seconds
        U     = max(rank free, end of the sums) + overhead + seconds
    """
    program = graph.program
    last = np.zeros(times.shape[1])
    for position, lane in enumerate(program.lanes):
        first, update = int(program.first[position]), int(program.first[position + 1]) - 1
        taken, end = times[graph.taken[update]], times[graph.end[update]]
        free = np.zeros(times.shape[1])
        for collective in lane:
            if collective.after >= 0:
                ready = times[graph.end[first + collective.after]]
                if together > 1:
                    ready = np.repeat(ready.reshape(-1, together).max(axis=1), together)
                free = np.maximum(free, ready)
            free = free + figures.collective_s[collective.kind][collective.stage]
            if first + collective.before == update:
                np.maximum(taken, free, out=taken)
                np.add(taken, updates[position], out=end)
        last = np.maximum(last, np.maximum(free, end))
    return last


def _last_backwards(graph: Graph, shape: Shape) -> Indices:
    """The last backward, or W, of each position; a rank's actions end in their order."""
    last = np.zeros(graph.program.num_ranks, dtype=int)
    np.maximum.at(last, list(shape.positions), graph.program.backward_ends.max(axis=1))
    return last


def _events(graph: Graph, shape: Shape, times: Array, figures: Figures) -> RankEvents:
    """The ranks' own events in order. Where there is no overhead, to turn to an action is to start it:

    without  0  start end  start end ...          with  0  taken start end  taken start end ...
    """
    program = graph.program
    has_overhead = bool(figures.overhead_s.any())
    columns = [graph.taken, graph.taken, graph.end] if has_overhead else [graph.taken, graph.end]
    per_action = len(columns)
    first = per_action * program.first + 2 * np.arange(program.num_ranks + 1)
    at_position = np.repeat(np.arange(program.num_ranks), np.diff(program.first))
    turned = per_action * np.arange(program.num_actions) + 2 * at_position + 1  # to each action: its first event
    index = np.zeros(first[-1], dtype=int)
    for i, times_of in enumerate(columns):
        index[turned + i] = times_of
    event_times = times.take(index, axis=0)
    event_times[first[1:] - 1] = np.inf
    start = 1 if has_overhead else 0
    if has_overhead:
        event_times[turned + 1] += figures.overhead_s
        if shape.recomputes:  # what is not recomputed has no overhead either
            again = program.at["R"]
            event_times[turned[again] + 1] -= np.where(figures.recomputed, 0.0, figures.overhead_s)

    def events_of(actions: Indices, ahead: int) -> Indices:
        return np.where(actions >= 0, turned[actions] + ahead, -1)

    ended, at, rows = per_action - 1, program.at, dict[str, Indices]()
    back, done = program.gradients_start, program.backward_ends
    for name, actions in (("F", at["F"]), ("R", at["R"]), ("W", at["W"]), ("back", back)):
        rows |= {f"{name} start": events_of(actions, start), f"{name} end": events_of(actions, ended)}
    rows["done"] = events_of(done, ended)
    posters = program.posters_of_takers(shape.window)
    begin = first[:-1][list(shape.positions)][:, None]
    for moment, takers in (("F posted", at["F"]), ("gradient posted", program.gradient_taker)):
        rows[moment] = np.where(posters[takers] >= 0, turned[posters[takers]], begin)
    rows["gradient posted"] = np.maximum(rows["gradient posted"], rows["F end"])  # when its form is known
    if len(shape.positions) > program.num_ranks:
        for moment, of_stage in (("handed over", "F end"), ("gradient used", "back end")):
            rows[moment] = np.concatenate([rows[of_stage][:1], rows[of_stage][:-1]])
    delivered = {
        moment: (rows[sent], times.take(graph.delivered[actions], axis=0))
        for moment, sent, actions in (("F delivered", "F end", at["F"]), ("back delivered", "back end", back))
    }
    return RankEvents(event_times, first, rows, delivered)
