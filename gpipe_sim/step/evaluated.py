"""The timeline of a large step without events: what `simulate` says, read off the evaluator's times."""

import numpy as np

from gpipe_sim.base.arrays import Array
from gpipe_sim.plan.figures import figures_of
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import shape_of
from gpipe_sim.step.evaluate import obstacle
from gpipe_sim.step.memory import memory_curves
from gpipe_sim.step.step import RankTimeline, Step
from gpipe_sim.step.waves import Graph, graph_of


def evaluated_step(plan: Plan) -> Step | None:
    """One step of the plan without jitter; None where only the event simulation tells all of it.

    That is where something is shared, where replicas have collectives, where an action takes or sends several messages,
    and where some micro-batches are recomputed and others not.
    """
    shape = shape_of(plan)
    if obstacle(plan) or plan.replicas > 1 or set(plan.checkpoint) not in ({"never"}, {"always"}):
        return None
    graph = graph_of(shape)
    if graph is None or graph.is_wired or graph.program.takes.shape[1] > 1 or graph.program.sends.shape[1] > 1:
        return None
    program = graph.program
    times, latency, occupancy = _times(plan, graph)
    overhead = float(figures_of([plan]).overhead_s[0])
    start, end = times[graph.taken] + overhead, times[graph.end]
    delivered = times[graph.delivered]
    takes, sends = program.takes[:, 0], program.sends[:, 0]
    arrived = np.where(takes >= 0, delivered[program.sender[np.maximum(takes, 0)]], np.nan)
    send_end = np.where(sends >= 0, delivered, np.nan)
    edges = np.array([channel.edge for channel in program.channels], dtype=int)
    message = np.maximum(sends, 0)
    edge = edges[message // program.num_microbatches]
    microbatch = program.microbatches[message]
    send_start = send_end - latency[edge] - occupancy[edge, microbatch]
    timelines = []
    for rank in plan.ranks:
        position = plan.pipeline.index(rank)
        of_rank = slice(int(program.first[position]), int(program.first[position + 1]))
        timelines.append(
            RankTimeline(
                rank=rank,
                actions=program.order[position],
                start_s=start[of_rank],
                end_s=end[of_rank],
                arrived_s=arrived[of_rank],
                send_start_s=send_start[of_rank],
                send_end_s=send_end[of_rank],
                blocking=shape.blocking,
            )
        )
    return Step(program=program, ranks=tuple(timelines), memory=memory_curves(plan, program, timelines))


def _times(plan: Plan, graph: Graph) -> tuple[Array, Array, Array]:
    """The times of the graph, and the latency and occupancy of each edge's messages."""
    figures, program = figures_of([plan]), graph.program
    table = []
    for letter in graph.letters:
        there = program.at[letter][:, :, None] >= 0
        table.append(np.where(there, figures.overhead_s + figures.seconds[letter], 0.0).reshape(-1, 1))
    updates = np.broadcast_to(figures.overhead_s + figures.seconds["U"], (program.num_ranks, 1))
    occupancy = figures.occupancy_s[:, :, 0]
    times = graph.times(np.concatenate([*table, updates]), occupancy.reshape(-1, 1), figures.latency_s)[:, 0]
    return times, figures.latency_s[:, 0], occupancy
