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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_sim.model import bytes_per_parameter
from gpipe_sim.plan import Plan, recomputed_by, sum_by_stage
from gpipe_sim.profile import Array, LayerCosts
from gpipe_sim.step import MEMORY_PARTS, MemoryCurve, RankTimeline

Indices = npt.NDArray[np.int_]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageBytes:
    """What one micro-batch of one size costs each stage: the last axis of each array is the stage."""

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
    """Transient of a backward that adds to existing `.grad`."""


def stage_bytes(plan: Plan, size: int) -> StageBytes:
    """What a micro-batch of this size costs each stage of a plan."""
    return StageBytes(**{name: values[0] for name, values in vars(_stage_bytes([plan], size)).items()})


def _stage_bytes(plans: Sequence[Plan], size: int) -> StageBytes:
    """Walk each stage's layers as a forward and a backward do, and note the highest points.

        forward with gradients   saved_0 + ... + saved_i + workspace_i          the pile grows
        forward without          output_{i-1} + workspace_i + output_i          only the neighbours are alive
        backward                 saved_0 + ... + saved_i + gradient in + its need  (+ .grad so far)  it shrinks
                                 its need: gradient out + new .grad + workspace_i, which is negative if it frees
                                 first; where .grad exists, new ones are there only until they are added

    The plans cut the layers of one profile in different places; arrays below have a row per plan.
    """
    profile, costs = plans[0].profile, plans[0].profile.at(size)
    balances = np.array([plan.balance for plan in plans])
    lasts = np.cumsum(balances, axis=1) - 1
    firsts = lasts - balances + 1
    which = np.arange(len(plans))[:, None]
    all_layers = (len(plans), profile.num_layers)

    def each_layer(values: Array) -> Array:
        return np.repeat(values.ravel(), balances.ravel()).reshape(all_layers)

    def highest(values: Array) -> Array:
        layers = np.broadcast_to(values, all_layers).ravel()
        top: Array = np.maximum.reduceat(layers, (which * profile.num_layers + firsts).ravel())
        return top.reshape(balances.shape)

    output, total = costs.output_bytes, np.cumsum(costs.saved_bytes)
    pile = total - each_layer((total - costs.saved_bytes)[firsts])
    saved = pile[which, lasts]
    inputs = np.append(0.0, output[:-1])
    gradient_in = np.tile(output, (len(plans), 1))
    gradient_in[which, lasts[:, :-1]] = 0.0  # received ones are counted as buffers
    inside = np.tile(inputs, (len(plans), 1))
    inside[which, firsts] = 0.0  # boundary inputs are counted as inputs
    new_gradients = profile.parameter_bytes * _gradients_per_weight(plans[0])
    # The first backward makes the gradients, from the stage's last layer to its first, while the pile shrinks.
    gradients = np.cumsum(new_gradients)
    gradients_before = each_layer(gradients[lasts]) - gradients
    making, adding = (pile + gradient_in + need for need in backward_needs(costs, new_gradients))

    return StageBytes(
        input=inputs[firsts],
        output=np.append(output[lasts[:, :-1]], np.zeros((len(plans), 1)), axis=1),
        saved=saved,
        forward_workspace=np.maximum(highest(pile + costs.workspace_forward_bytes) - saved, 0.0),
        no_grad_workspace=highest(inside + costs.workspace_no_grad_bytes + output),
        first_backward_workspace=np.maximum(highest(making + gradients_before) - saved, 0.0),
        backward_workspace=np.maximum(highest(adding) - saved, 0.0),
    )


def backward_needs(costs: LayerCosts, new_gradients: Array) -> tuple[Array, Array]:
    """Of each layer's backward, beyond the pile and the gradient in: the first time, and when `.grad` exists."""
    new = np.append(0.0, costs.output_bytes[:-1]) + new_gradients
    transients = costs.workspace_backward_bytes, costs.workspace_accumulate_bytes
    making, adding = (np.maximum(new + transient, 0.0) for transient in transients)
    return making, adding


def _gradients_per_weight(plan: Plan) -> float:
    per = bytes_per_parameter(plan.scenario.optimizer, plan.dtype)
    return per.gradient / per.weight


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBytes(StageBytes):
    """What every micro-batch costs every stage of one plan, or of many with the same K and M, and what the model does.

    The axes are stage, micro-batch and plan. Bytes are whole, so that their sums are exact in any order.
    """

    recomputed: Flags
    parameters: Array
    """Stage and plan, as the next two."""
    optimizer: Array
    gradients: Array
    batch: Array
    """The mini-batch as it enters the first stage, by plan."""

    def constant(self) -> dict[str, Array]:
        """What is held all the time, by part, stage and plan."""
        inputs = np.zeros_like(self.parameters)
        inputs[0] = self.batch
        return {"parameters": self.parameters, "optimizer": self.optimizer, "inputs": inputs}


def step_bytes(plans: Sequence[Plan]) -> StepBytes:
    """The bytes of plans that have profile, batch, optimizer, K and M in common."""
    plan = plans[0]
    sizes = sorted(set(plan.sizes), reverse=True)
    per_size = [_stage_bytes(plans, size) for size in sizes]
    repeats = [plan.sizes.count(size) for size in sizes]
    each = {
        field.name: np.repeat(np.stack([np.round(getattr(costs, field.name).T) for costs in per_size], 1), repeats, 1)
        for field in fields(StageBytes)
    }
    balances = np.array([plan.balance for plan in plans])
    weights = sum_by_stage(plan.profile.parameter_bytes, balances).T
    per = bytes_per_parameter(plan.scenario.optimizer, plan.dtype)
    return StepBytes(
        **each,
        recomputed=recomputed_by(plans),
        parameters=np.round(weights),
        optimizer=np.round(weights * per.optimizer / per.weight),
        gradients=np.round(weights * _gradients_per_weight(plan)),
        batch=np.full(len(plans), round(plan.profile.input_bytes * plan.scenario.batch), dtype=float),
    )


class Holding(NamedTuple):
    """From one moment to another, a stage holds so much more for each micro-batch.

    A moment is an event of the micro-batch on that stage: ``F start``, ``B end``; ``F arrived`` of its input, ``F
    posted`` and ``gradient posted`` of the receives, ``F delivered`` and ``B delivered`` of what was sent.
    """

    part: str
    begin: str
    end: str
    amount: Array


def holdings(held: StepBytes, first_backward: Flags) -> Iterator[Holding]:
    """The table at the top of this file. `first_backward` marks each stage's first backward, by micro-batch."""
    again = held.recomputed
    yield Holding("activations", "F start", "B end", np.where(again, 0.0, held.saved))
    yield Holding("activations", "R start", "B end", np.where(again, held.saved, 0.0))
    transient = np.where(again, held.no_grad_workspace, held.forward_workspace)
    yield Holding("workspace", "F start", "F end", transient)
    yield Holding("workspace", "R start", "R end", np.where(again, held.forward_workspace, 0.0))
    first = first_backward[:, :, None]
    transient = np.where(first, held.first_backward_workspace, held.backward_workspace)
    yield Holding("workspace", "B start", "B end", transient)
    yield Holding("gradients", "B end", "U end", np.where(first, held.gradients[:, None], 0.0))
    # Inputs and outputs are 0 where there is no neighbour.
    yield Holding("buffers", "F posted", "F arrived", held.input)
    yield Holding("inputs", "F arrived", "B end", held.input)
    yield Holding("buffers", "B end", "B delivered", held.input)
    yield Holding("buffers", "gradient posted", "B end", held.output)
    # Without recompute the output is among the activations.
    yield Holding("buffers", "F end", "F delivered", np.where(again, held.output, 0.0))


# --- over time -----------------------------------------------------------------------------------------------------


class _Ledger:
    """Changes of each part over time on every rank, gathered as arrays and summed up at the end."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._changes: list[tuple[str, Array, Array]] = []

    def hold(self, part: str, begin: Array, end: Array, amount: Array) -> None:
        """From begin to end, rank r (a row) holds so much more."""
        self._changes += [(part, begin, amount), (part, end, -amount)]

    def curves(self, constant: Mapping[str, Array]) -> Iterator[MemoryCurve]:
        """Sum up. A part that does not change is held as a single number."""
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
        parts, offset = {part: np.zeros(len(times)) for part, _, _ in self._changes}, self._num_ranks
        for part, at, amount in self._changes:
            parts[part] += np.bincount(moment[offset : offset + at.size], amount.ravel(), len(times))
            offset += at.size
        for part, values in parts.items():
            if part in constant:
                values[bounds[:-1]] += constant[part]
            # What one rank ends with is not what the next begins with.
            values[bounds[1:-1]] -= np.add.reduceat(values, bounds[:-1])[:-1]
            np.cumsum(values, out=values)
        level = dict.fromkeys(MEMORY_PARTS, np.zeros(self._num_ranks)) | dict(constant)
        for rank, (a, b) in enumerate(pairwise(bounds)):
            yield MemoryCurve(
                times=times[a:b],
                parts={
                    part: parts[part][a:b] if part in parts else np.broadcast_to(level[part][rank], b - a)
                    for part in MEMORY_PARTS
                },
            )


_TOGETHER = 2**15
"""Micro-batches of ranks whose curves are made at once: enough to be fast, few enough to stay in a cache."""


def memory_curves(plan: Plan, timelines: Sequence[RankTimeline]) -> tuple[MemoryCurve, ...]:
    """Every rank's curve."""
    held = step_bytes([plan])
    at_once = max(1, _TOGETHER // plan.num_microbatches)
    groups = (timelines[first : first + at_once] for first in range(0, len(timelines), at_once))
    return tuple([curve for some in groups for curve in _curves(plan, some, held)])


def _curves(plan: Plan, timelines: Sequence[RankTimeline], of_all: StepBytes) -> Iterator[MemoryCurve]:
    """The curves of some ranks. Arrays below have a row per rank and a column per micro-batch."""
    stage_of = np.array([timeline.stage for timeline in timelines])
    by_stage = {
        field.name: getattr(of_all, field.name)[stage_of] for field in fields(StepBytes) if field.name != "batch"
    }
    held = replace(of_all, **by_stage)
    by_rank = [timeline.rows(plan.num_microbatches) for timeline in timelines]
    rows = {kind: np.stack([found[kind] for found in by_rank]) for kind in ("F", "R", "B")}

    def column(name: str, which: Indices) -> Array:
        """That column of every timeline, by micro-batch."""
        return np.stack([getattr(timeline, name)[row] for timeline, row in zip(timelines, which, strict=True)])

    takers = rows["B"]
    if plan.recompute == "on_demand":
        takers = np.where(rows["R"] >= 0, rows["R"], rows["B"])
    moments = {f"{kind} start": column("start_s", which) for kind, which in rows.items()}
    moments |= {f"{kind} end": column("end_s", which) for kind, which in rows.items()}
    for kind in ("F", "B"):
        delivered = column("send_end_s", rows[kind])
        moments[f"{kind} delivered"] = np.where(np.isnan(delivered), moments[f"{kind} end"], delivered)
    moments |= {
        "F arrived": np.nan_to_num(column("arrived_s", rows["F"])),
        "F posted": _posted(plan.window, column("taken_s", rows["F"])),
        "gradient posted": _posted(plan.window, column("taken_s", takers)),
        "U end": np.repeat([[timeline.end_s[-1]] for timeline in timelines], plan.num_microbatches, axis=1),
    }
    first_backward = rows["B"] == rows["B"].min(axis=1, keepdims=True)
    ledger = _Ledger(len(timelines))
    for part, begin, end, amount in holdings(held, first_backward):
        if amount.any():
            ledger.hold(part, moments[begin], moments[end], amount[:, :, 0])
    return ledger.curves({part: amount[stage_of, 0] for part, amount in of_all.constant().items()})


def _posted(window: int | None, taken: Array) -> Array:
    """When each receive is posted: the first `window` at once, each later one as an earlier message is taken."""
    posted = np.zeros_like(taken)
    if window is not None and window < taken.shape[1]:
        order = np.argsort(taken, axis=1, kind="stable")
        earlier = np.take_along_axis(taken, order[:, :-window], axis=1)
        np.put_along_axis(posted, order[:, window:], earlier, axis=1)
    return posted
