"""Bytes per rank over time: a step function over the same timeline that the times came from.

    part          from                         to                      bytes
    ----------------------------------------------------------------------------------------------------------
    parameters    always                       always                  weights
    optimizer     always                       always                  state, by optimizer and dtype
    gradients     first B ends                 U ends                  one per weight; set to None between steps
    inputs        arrival of the activations   its B ends              boundary input; stage 0: the whole mini-batch
    activations   F starts (R, if recomputed)  its B ends              what remains after a forward with gradients
    workspace     an action starts             it ends                 its transient peak, beyond the other parts
    buffers       receive posted               arrival, or its B ends  posted receives; received gradients
                  F or B ends                  its message delivered   outputs and gradients not yet delivered

So, with micro-batches of n samples, GPipe without checkpointing holds M n L/K layers' worth at the end of the
forwards; with it, M boundary inputs and one rematerialised micro-batch: O(N + (L/K)(N/M)), GPipe section 2.3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gpipe_sim.model import bytes_per_parameter
from gpipe_sim.plan import Plan
from gpipe_sim.profile import Array
from gpipe_sim.step import MEMORY_PARTS, MemoryCurve, RankTimeline


@dataclass(frozen=True, kw_only=True, eq=False)
class StageBytes:
    """What one micro-batch of one size costs each stage, one array entry per stage."""

    input: Array
    """Boundary input that arrives from the previous stage; 0 at the first."""
    output: Array
    """What is sent to the next stage; 0 at the last."""
    saved: Array
    forward_workspace: Array
    """Transient of a forward with gradients, or of a recomputation, beyond `saved`."""
    no_grad_workspace: Array
    """Transient of a forward whose activations are dropped."""
    first_backward_workspace: Array
    """Transient of a backward whose gradients become `.grad`, with those gradients."""
    backward_workspace: Array
    """Transient of a backward that adds to existing `.grad`: one layer's new gradients stand beside the old."""


def stage_bytes(plan: Plan, size: int) -> StageBytes:
    """Walk each stage's layers as a forward and a backward do, and note the highest points.

    forward with gradients   saved_0 + ... + saved_i + workspace_i          the pile grows
    forward without          output_{i-1} + workspace_i + output_i          only the neighbours are alive
    backward                 saved_0 + ... + saved_i + gradients in and out + workspace_i  (+ new .grad)   it shrinks
    """
    costs = plan.profile.at(size)
    firsts = np.array([layers.start for layers in plan.stages])
    lasts = np.array([layers.stop - 1 for layers in plan.stages])
    saved, output = costs.saved_bytes, costs.output_bytes
    pile = np.cumsum(saved)
    pile = pile - np.repeat(pile[firsts] - saved[firsts], plan.balance)
    inputs = np.append(0.0, output[:-1])
    gradient_in = output.copy()
    gradient_in[lasts[:-1]] = 0.0  # received ones are counted as buffers
    backward = pile + gradient_in + inputs + costs.workspace_backward_bytes
    inside = inputs.copy()
    inside[firsts] = 0.0  # boundary inputs are counted as inputs
    no_grad = inside + costs.workspace_no_grad_bytes + output
    new_gradients = plan.profile.parameter_bytes * _gradients_per_weight(plan)
    # The first backward makes the gradients, from the stage's last layer to its first, while the pile shrinks.
    total = np.cumsum(new_gradients)
    gradients_so_far = np.repeat(total[lasts], plan.balance) - total + new_gradients

    def beyond_saved(values: Array) -> Array:
        beyond: Array = np.maximum(np.maximum.reduceat(values, firsts) - pile[lasts], 0.0)
        return beyond

    return StageBytes(
        input=inputs[firsts],
        output=np.append(output[lasts[:-1]], 0.0),
        saved=pile[lasts],
        forward_workspace=beyond_saved(pile + costs.workspace_forward_bytes),
        no_grad_workspace=np.maximum.reduceat(no_grad, firsts),
        first_backward_workspace=beyond_saved(backward + gradients_so_far),
        backward_workspace=beyond_saved(backward + new_gradients),
    )


def _gradients_per_weight(plan: Plan) -> float:
    per = bytes_per_parameter(plan.scenario.optimizer, plan.dtype)
    return per.gradient / per.weight


class _Ledger:
    """Changes of each part over time on every rank, gathered as arrays and summed up at the end."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._changes: list[tuple[str, Array, Array]] = []

    def hold(self, part: str, begin: Array, end: Array, amount: Array) -> None:
        """From begin to end, rank r (a row) holds so much more."""
        self._changes += [(part, begin, amount), (part, end, -amount)]

    def curves(self, constant: Mapping[str, Array]) -> tuple[MemoryCurve, ...]:
        ranks = np.arange(self._num_ranks)
        times = np.concatenate([np.zeros(self._num_ranks), *(times.ravel() for _, times, _ in self._changes)])
        owner = np.concatenate([ranks, *(np.repeat(ranks, times.shape[1]) for _, times, _ in self._changes)])
        order = np.lexsort((times, owner))
        times, owner = times[order], owner[order]
        fresh = np.append(True, (np.diff(times) != 0) | (np.diff(owner) != 0))
        moment = np.empty(len(order), dtype=int)
        moment[order] = np.cumsum(fresh) - 1  # which of the distinct (rank, time) each change belongs to
        times, owner = times[fresh], owner[fresh]
        bounds = np.searchsorted(owner, np.arange(self._num_ranks + 1))
        parts, offset = {part: np.zeros(len(times)) for part in MEMORY_PARTS}, self._num_ranks
        for part, at, amount in self._changes:
            parts[part] += np.bincount(moment[offset : offset + at.size], amount.ravel(), len(times))
            offset += at.size
        for part, values in parts.items():
            if part in constant:
                values[bounds[:-1]] += constant[part]
            # What one rank ends with is not what the next begins with, and sums of floats leave crumbs.
            values[bounds[1:-1]] -= np.add.reduceat(values, bounds[:-1])[:-1]
            np.round(np.cumsum(values, out=values), out=values)
        return tuple(
            MemoryCurve(times=times[a:b], parts={part: values[a:b] for part, values in parts.items()})
            for a, b in pairwise(bounds)
        )


def memory_curves(plan: Plan, timelines: Sequence[RankTimeline]) -> tuple[MemoryCurve, ...]:
    """Every rank's curve. Arrays below have a row per rank and a column per micro-batch."""
    stage_of = np.array([timeline.stage for timeline in timelines])
    per_size = [stage_bytes(plan, size) for size in sorted(set(plan.sizes), reverse=True)]
    repeats = [plan.sizes.count(size) for size in sorted(set(plan.sizes), reverse=True)]

    def each(name: str) -> Array:
        columns = np.stack([getattr(costs, name)[stage_of] for costs in per_size], axis=1)
        return np.repeat(columns, repeats, axis=1)

    by_rank = [timeline.rows(plan.num_microbatches) for timeline in timelines]
    rows = {kind: np.stack([found[kind] for found in by_rank]) for kind in ("F", "R", "B")}

    def column(name: str, which: npt.NDArray[np.int_]) -> Array:
        """That column of every timeline, by micro-batch."""
        return np.stack([getattr(timeline, name)[row] for timeline, row in zip(timelines, which, strict=True)])

    start = {kind: column("start_s", which) for kind, which in rows.items()}
    end = {kind: column("end_s", which) for kind, which in rows.items()}
    recomputed = rows["R"] >= 0
    ledger = _Ledger(len(timelines))

    ledger.hold("activations", np.where(recomputed, start["R"], start["F"]), end["B"], each("saved"))
    transient = np.where(recomputed, each("no_grad_workspace"), each("forward_workspace"))
    ledger.hold("workspace", start["F"], end["F"], transient)
    if recomputed.any():
        ledger.hold("workspace", start["R"], end["R"], np.where(recomputed, each("forward_workspace"), 0.0))
    first = start["B"] == start["B"].min(axis=1, keepdims=True)
    transient = np.where(first, each("first_backward_workspace"), each("backward_workspace"))
    ledger.hold("workspace", start["B"], end["B"], transient)

    overhead = plan.profile.action_overhead_s  # between taking a message and computing with it
    nothing = np.zeros_like(start["F"])
    has_previous, has_next = (stage_of > 0)[:, None], (stage_of < plan.num_stages - 1)[:, None]
    arrived = np.where(has_previous, column("arrived_s", rows["F"]), nothing)
    inputs, outputs = each("input"), each("output")  # 0 where there is no neighbour
    ledger.hold(
        "buffers", np.where(has_previous, _posted(plan.window, start["F"] - overhead), nothing), arrived, inputs
    )
    ledger.hold("inputs", arrived, end["B"], inputs)
    ledger.hold("buffers", end["B"], np.where(has_previous, column("send_end_s", rows["B"]), end["B"]), inputs)
    takes = np.where(recomputed, start["R"], start["B"]) if plan.recompute == "on_demand" else start["B"]
    ledger.hold("buffers", _posted(plan.window, takes - overhead), end["B"], outputs)
    if recomputed.any():  # without recompute the output is among the activations
        delivered = np.where(has_next, column("send_end_s", rows["F"]), end["F"])
        ledger.hold("buffers", end["F"], delivered, np.where(recomputed, outputs, 0.0))

    per = bytes_per_parameter(plan.scenario.optimizer, plan.dtype)
    stage_weights = np.array([plan.profile.parameter_bytes[layers].sum() for layers in plan.stages])
    weights = stage_weights[stage_of]
    step_end = np.array([[timeline.end_s[-1]] for timeline in timelines])
    ledger.hold(
        "gradients", end["B"].min(axis=1, keepdims=True), step_end, weights[:, None] * _gradients_per_weight(plan)
    )
    batch_bytes = plan.profile.input_bytes * plan.scenario.batch
    return ledger.curves(
        {
            "parameters": weights,
            "optimizer": weights * per.optimizer / per.weight,
            "inputs": np.where(stage_of == 0, batch_bytes, 0.0),
        }
    )


def _posted(window: int | None, taken: Array) -> Array:
    """When each receive is posted: the first `window` at once, each later one as an earlier message is taken."""
    posted = np.zeros_like(taken)
    if window is not None and window < taken.shape[1]:
        order = np.argsort(taken, axis=1)
        earlier = np.take_along_axis(taken, order[:, :-window], axis=1)
        np.put_along_axis(posted, order[:, window:], earlier, axis=1)
    return posted
