"""Bytes per rank over time: a step function over the same timeline that the times came from.

    part          from                         to                      bytes
    ----------------------------------------------------------------------------------------------------------
    parameters    always                       always                  weights; where replicas divide them, of a step:
                                                                       between steps there is this rank's shard only
    optimizer     always                       always                  state, by optimizer, dtype and precision;
                                                                       divided by D where replicas divide it
    gradients     first B (or W) ends          U ends                  one per weight; set to None between steps
    inputs        arrival of the activations   its B (or I) ends       boundary input; stage 0: the whole mini-batch
    activations   F starts (R, if recomputed)  its B (or I) ends       what remains after a forward with gradients
                  its I ends                   its W ends              what the weights' gradients need, inputs included
    workspace     an action starts             it ends                 its transient peak, beyond the other parts
    buffers       receive posted               arrival, or its B ends  posted receives; received gradients, whose
                                                                       receives are posted after their outputs
                  F or B ends                  its message delivered   outputs and gradients not yet delivered

Between two stages of one rank nothing is sent. The output that one hands to the other is among its activations or, if
those are dropped, an input of the other; the gradient that comes back is a buffer until the backward that takes it has
ended.

Gradients are whole until the update, also where each rank updates a shard: they are added up before they are scattered.
(With several stages on a rank, a stage's may be scattered earlier than that: what is said is then the most.)

So, with micro-batches of n samples, GPipe without checkpointing holds M n L/K layers' worth at the end of the
forwards; with it, M boundary inputs and one rematerialised micro-batch: O(N + (L/K)(N/M)), GPipe section 2.3.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gpipe_sim.base.arrays import Array, Flags, Indices
from gpipe_sim.cost.profile import LayerCosts, Profile
from gpipe_sim.cost.recompute import recomputed_in_backward
from gpipe_sim.cost.transformer import bytes_per_parameter
from gpipe_sim.plan.actions import Letter
from gpipe_sim.plan.plan import Plan, dropped_by, recomputed_by
from gpipe_sim.plan.program import Program
from gpipe_sim.plan.stages import distinct, per_microbatch, sum_by_stage
from gpipe_sim.step.step import MEMORY_PARTS, MemoryCurve, RankTimeline


@dataclass(frozen=True, kw_only=True, eq=False)
class StageBytes:
    """What one micro-batch of one size costs each stage: the last axis of each array is the stage."""

    input: Array
    """Boundary input that arrives from the previous stage; 0 at the first."""
    output: Array
    """What is sent to the next stage; 0 at the last."""
    handed_on: Array
    """Of `output`, that which is among `input`, and held there already: skips from an earlier stage to a later one."""
    saved: Array
    forward_workspace: Array
    """Transient of a forward with gradients, or of a recomputation, beyond `saved`."""
    no_grad_workspace: Array
    """Transient of a forward whose activations are dropped."""
    first_backward_workspace: Array
    """Transient of a backward whose gradients become `.grad`, with those gradients."""
    backward_workspace: Array
    """Transient of a backward that adds to existing `.grad`."""
    kept: Array
    """What is held between I and W; 0, as all that follow, where the profile does not split backwards."""
    inputs_workspace: Array
    """Transient of an I, beyond `saved`."""
    first_weights_workspace: Array
    """Transient of a W whose gradients become `.grad`, with those gradients, beyond `kept`."""
    weights_workspace: Array
    """Transient of a W that adds to existing `.grad`, beyond `kept`."""


def stage_bytes(plan: Plan, size: int) -> StageBytes:
    """What a micro-batch of this size costs each stage of a plan."""
    return StageBytes(**{name: values[0] for name, values in vars(_stage_bytes([plan], size, plan.profile)).items()})


def _stage_bytes(plans: Sequence[Plan], size: int, profile: Profile) -> StageBytes:
    """Walk each stage's layers as a forward and a backward do, and note the highest points.

        forward with gradients   saved_0 + ... + saved_i + workspace_i          the pile grows
        forward without          output_{i-1} + workspace_i + output_i          only the neighbours are alive
        backward                 saved_0 + ... + saved_i + gradient in + its need  (+ .grad so far)  it shrinks
                                 its need: gradient out + new .grad + workspace_i, which is negative if it frees
                                 first; where .grad exists, new ones are there only until they are added
        for the inputs           saved_0 + ... + saved_i + kept of later layers + gradient in + gradient out
                                 + workspace_i: the pile turns from what was saved to what W needs, from the top
        for the weights          kept_0 + ... + kept_i + new .grad + workspace_i  (+ .grad so far)  it shrinks

    What layers hand on as they get it (`Skip`) is there once, and so is its gradient: received, if a later stage uses
    it last, and otherwise made by the layer that does. A whole backward copies it once if all of the stage hands it on.

    The plans cut the layers of one profile in different places; arrays below have a row per plan.
    """
    costs = profile.at(size)
    balances = np.array([plan.balance for plan in plans])
    lasts = np.cumsum(balances, axis=1) - 1
    firsts = lasts - balances + 1
    which = np.arange(len(plans))[:, None]
    all_layers = (len(plans), profile.num_layers)

    def each_layer(values: Array) -> Array:
        return np.repeat(values.ravel(), balances.ravel()).reshape(all_layers)

    def highest(values: Array) -> Array:
        layers = (values if values.shape == all_layers else np.broadcast_to(values, all_layers)).ravel()
        top: Array = np.maximum.reduceat(layers, (which * profile.num_layers + firsts).ravel())
        return top.reshape(balances.shape)

    output, total = costs.output_bytes, np.cumsum(costs.saved_bytes)
    before, after = np.tile(output * 0, (2, len(plans), 1))
    """Of each output, what came to the stage with its input, and what goes to a later one."""
    through = np.zeros(balances.shape)
    for made, used, amount in costs.skips:
        there = amount * ((made <= np.arange(profile.num_layers)) & (np.arange(profile.num_layers) < used))
        before += there * (made < each_layer(firsts))
        after += there * (used > each_layer(lasts))
        through += amount * ((made < firsts) & (used > lasts))
    pile = total - each_layer((total - costs.saved_bytes)[firsts])
    saved = pile[which, lasts]
    inputs = np.append(0.0, output[:-1])
    gradient_in = output - after
    gradient_in[which, lasts[:, :-1]] = 0.0  # received ones are counted as buffers
    inside = np.append(np.zeros((len(plans), 1)), (output - before)[:, :-1], axis=1)
    inside[which, firsts] = 0.0  # boundary inputs are counted as inputs
    new_gradients = profile.parameter_bytes * _gradients_per_weight(plans[0])
    # The first backward makes the gradients, from the stage's last layer to its first, while the pile shrinks.
    gradients = np.cumsum(new_gradients)
    gradients_before = each_layer(gradients[lasts]) - gradients
    is_last = np.arange(profile.num_layers) == each_layer(lasts)
    backwards = zip(backward_needs(costs, new_gradients), backward_needs(costs, new_gradients, freed=0.0), strict=True)
    needs = (np.where(is_last, whole, inside_of) for inside_of, whole in backwards)
    making, adding = (pile + gradient_in + each_layer(through) + need for need in needs)

    split = dict.fromkeys(("kept", "inputs_workspace", "first_weights_workspace", "weights_workspace"), 0.0 * saved)
    if profile.splits:
        assert costs.kept_bytes is not None, "a profile has all columns of a split backward or none"
        assert costs.workspace_inputs_bytes is not None
        assert costs.workspace_weights_bytes is not None
        assert costs.workspace_weights_accumulate_bytes is not None
        kept = np.cumsum(costs.kept_bytes)
        kept_pile = kept - each_layer((kept - costs.kept_bytes)[firsts])
        kept_above = each_layer(kept[lasts]) - kept
        split["kept"] = kept_pile[which, lasts]
        passing = pile + kept_above + gradient_in + np.maximum(inputs + costs.workspace_inputs_bytes, 0.0)
        split["inputs_workspace"] = np.maximum(highest(passing) - saved, 0.0)
        first, other = costs.workspace_weights_bytes, costs.workspace_weights_accumulate_bytes
        making_weights = kept_pile + gradients_before + np.maximum(new_gradients + first, 0.0)
        adding_weights = kept_pile + np.maximum(new_gradients + other, 0.0)
        split["first_weights_workspace"] = np.maximum(highest(making_weights) - split["kept"], 0.0)
        split["weights_workspace"] = np.maximum(highest(adding_weights) - split["kept"], 0.0)

    return StageBytes(
        input=inputs[firsts],
        output=np.append(output[lasts[:, :-1]], np.zeros((len(plans), 1)), axis=1),
        handed_on=through,
        saved=saved,
        forward_workspace=np.maximum(highest(pile + costs.workspace_forward_bytes) - saved, 0.0),
        no_grad_workspace=highest(inside + costs.workspace_no_grad_bytes + output - costs.handed_on_bytes),
        first_backward_workspace=np.maximum(highest(making + gradients_before) - saved, 0.0),
        backward_workspace=np.maximum(highest(adding) - saved, 0.0),
        **split,
    )


def backward_needs(costs: LayerCosts, new_gradients: Array, freed: float = 1.0) -> tuple[Array, Array]:
    """Of each layer's backward, beyond the pile and the gradient in: the first time, and when `.grad` exists.

    With `freed`, of a layer that others of its stage follow.
    """
    gone = 0.0 if costs.freed_bytes is None else freed * costs.freed_bytes
    new = np.append(0.0, costs.output_bytes[:-1] - costs.handed_on_bytes[1:]) + new_gradients - gone
    transients = costs.workspace_backward_bytes, costs.workspace_accumulate_bytes
    making, adding = (np.maximum(new + transient, 0.0) for transient in transients)
    return making, adding


def _gradients_per_weight(plan: Plan) -> float:
    per = bytes_per_parameter(plan.scenario.optimizer, plan.dtype, plan.scenario.precision)
    return per.gradient / per.weight


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBytes(StageBytes):
    """What every micro-batch costs every stage of one plan, or of many of one shape, and what the model does.

    The axes are stage, micro-batch and plan. Bytes are whole, so that their sums are exact in any order.
    """

    recomputed: Flags
    parameters: Array
    """Stage and plan, as the next two."""
    optimizer: Array
    gradients: Array
    batch: Array
    """The mini-batch as it enters the first stage, by plan."""

    def constant(self, positions: Sequence[int]) -> dict[str, Array]:
        """What is held all the time, by part, position and plan."""
        inputs = np.zeros_like(self.parameters)
        inputs[0] = self.batch
        return {
            part: sum_by_position(amount, positions)
            for part, amount in (("parameters", self.parameters), ("optimizer", self.optimizer), ("inputs", inputs))
        }


def sum_by_position(by_stage: Array, positions: Sequence[int]) -> Array:
    """Of the stages that each position holds."""
    total = np.zeros((max(positions) + 1, *by_stage.shape[1:]))
    np.add.at(total, list(positions), by_stage)
    return total


def step_bytes(plans: Sequence[Plan]) -> StepBytes:
    """The bytes of plans that have profile, batch, optimizer and shape in common."""
    plan = plans[0]
    each = _each_microbatch(plans, plan.profile)
    if plan.recompute_unit != "stage":
        own = recomputed_in_backward(plan.profile, plan.recompute_unit)
        dropped, less = dropped_by(plans), _each_microbatch(plans, own)
        each = {name: np.where(dropped, less[name], values) for name, values in each.items()}
    balances = np.array([plan.balance for plan in plans])
    weights = sum_by_stage(plan.profile.parameter_bytes, balances).T
    per = bytes_per_parameter(plan.scenario.optimizer, plan.dtype, plan.scenario.precision)
    D = plan.replicas
    state = weights * per.optimizer / per.weight
    return StepBytes(
        **each,
        recomputed=recomputed_by(plans),
        parameters=np.round(weights),
        optimizer=np.round(state) if D == 1 or plan.shard == "none" else np.ceil(state / D),
        gradients=np.round(weights * _gradients_per_weight(plan)),
        batch=np.full(len(plans), round(plan.profile.input_bytes * plan.samples), dtype=float),
    )


def _each_microbatch(plans: Sequence[Plan], profile: Profile) -> dict[str, Array]:
    """`StageBytes` by stage, micro-batch and plan, of layers that cost what the profile says."""
    sizes = plans[0].sizes
    per_size = [_stage_bytes(plans, size, profile) for size in distinct(sizes)]
    return {
        field.name: per_microbatch([np.round(getattr(costs, field.name).T) for costs in per_size], sizes)
        for field in fields(StageBytes)
    }


class Holding(NamedTuple):
    """From one moment to another, a stage's rank holds so much more for each micro-batch.

    A moment is an event of the micro-batch on that stage:

        F start, F end, R start, R end, W start, W end      of these actions
        back start, back end                                of its B, or of its I
        done                                                its B ends, or its W
        F posted, F arrived, gradient posted                of the messages that it takes
        F delivered, back delivered                         of the messages that it sends
        handed over, gradient used                          the forward ends, or the backward, of the stage before it,
                                                            on the same rank
        U end                                               of its rank
    """

    part: str
    begin: str
    end: str
    amount: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Roles:
    """What the program says of each stage and micro-batch, as far as its memory depends on it."""

    is_split: Flags
    """Stage, micro-batch -> whether its backward is split."""
    is_first: Flags
    """Stage, micro-batch -> whether its backward, or W, is the stage's first."""
    from_rank: Flags
    """Stage -> whether its inputs come from its own rank."""
    to_rank: Flags
    """Stage -> whether its outputs stay on its own rank."""


def roles(program: Program, positions: Sequence[int]) -> Roles:
    """The roles of all stages."""
    at, stays = np.array(positions), np.equal(*np.array([positions[:-1], positions[1:]]))
    ends = program.backward_ends
    return Roles(
        is_split=program.at["I"] >= 0,
        is_first=ends == ends.min(axis=1, keepdims=True),
        from_rank=np.append(np.zeros(1, dtype=bool), stays)[: len(at)],
        to_rank=np.append(stays, np.zeros(1, dtype=bool))[: len(at)],
    )


def holdings(held: StepBytes, role: Roles) -> Iterator[Holding]:
    """The table at the top of this file."""
    again, split, first = held.recomputed, role.is_split[:, :, None], role.is_first[:, :, None]
    yield Holding("activations", "F start", "back end", np.where(again, 0.0, held.saved))
    if again.any():
        yield Holding("activations", "R start", "back end", np.where(again, held.saved, 0.0))
        yield Holding("workspace", "R start", "R end", np.where(again, held.forward_workspace, 0.0))
    yield Holding("workspace", "F start", "F end", np.where(again, held.no_grad_workspace, held.forward_workspace))
    backward = np.where(first, held.first_backward_workspace, held.backward_workspace)
    yield Holding("workspace", "back start", "back end", np.where(split, held.inputs_workspace, backward))
    if split.any():
        yield Holding("activations", "back end", "done", np.where(split, held.kept, 0.0))
        weights = np.where(first, held.first_weights_workspace, held.weights_workspace)
        yield Holding("workspace", "W start", "W end", np.where(split, weights, 0.0))
    yield Holding("gradients", "done", "U end", np.where(first, held.gradients[:, None], 0.0))
    # Inputs and outputs are 0 where there is no neighbour.
    arrives, leaves = ~role.from_rank[:, None, None], ~role.to_rank[:, None, None]
    received, sent = np.where(arrives, held.input, 0.0), np.where(leaves, held.output, 0.0)
    yield Holding("buffers", "F posted", "F arrived", received)
    yield Holding("inputs", "F arrived", "back end", received)
    yield Holding("buffers", "back end", "back delivered", received)
    yield Holding("buffers", "gradient posted", "back end", sent)
    # Without recompute the output is among the activations.
    yield Holding("buffers", "F end", "F delivered", np.where(again, sent - np.where(leaves, held.handed_on, 0.0), 0.0))
    if role.from_rank.any():
        dropped_before = np.concatenate([np.zeros_like(again[:1]), again[:-1]])
        new = held.input - np.concatenate([np.zeros_like(again[:1]), held.handed_on[:-1]])
        yield Holding("inputs", "handed over", "back end", np.where(~arrives & dropped_before, new, 0.0))
        yield Holding("buffers", "back end", "gradient used", np.where(arrives, 0.0, held.input))


# --- over time -----------------------------------------------------------------------------------------------------


class _Ledger:
    """Changes of each part over time on some ranks, gathered as arrays and summed up at the end."""

    def __init__(self, num_ranks: int, owner: Indices) -> None:
        """`owner` is the rank of each stage, whose changes come in rows."""
        self._num_ranks, self._owner = num_ranks, owner
        self._changes: list[tuple[str, Array, Array]] = []

    def hold(self, part: str, begin: Array, end: Array, amount: Array) -> None:
        """From begin to end, the rank of each stage (a row) holds so much more."""
        self._changes += [(part, begin, amount), (part, end, -amount)]

    def curves(self, constant: Mapping[str, Array]) -> Iterator[MemoryCurve]:
        """Sum up. A part that does not change is held as a single number."""
        ranks = np.arange(self._num_ranks)
        times = np.concatenate([np.zeros(self._num_ranks), *(times.ravel() for _, times, _ in self._changes)])
        owner = np.concatenate([ranks, *(np.repeat(self._owner, times.shape[1]) for _, times, _ in self._changes)])
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
        level = dict.fromkeys(MEMORY_PARTS, np.zeros(self._num_ranks)) | {
            part: np.ascontiguousarray(values) for part, values in constant.items()
        }
        for rank, (a, b) in enumerate(pairwise(bounds)):
            yield MemoryCurve(
                times=times[a:b],
                parts={
                    part: parts[part][a:b] if part in parts else _constant(level[part][rank : rank + 1], b - a)
                    for part in MEMORY_PARTS
                },
            )


def _constant(value: Array, length: int) -> Array:
    """As many times the same value, which is held once: `np.broadcast_to` without what it checks."""
    return np.ndarray(length, float, value, strides=(0,))


_SINGLE: tuple[Letter, ...] = ("F", "R", "W")
"""Kinds that have moments of their own; B and I are either the one or the other."""
_TOGETHER = 2**15
"""Micro-batches of stages whose curves are made at once: enough to be fast, few enough to stay in a cache."""


def memory_curves(plan: Plan, program: Program, timelines: Sequence[RankTimeline]) -> tuple[MemoryCurve, ...]:
    """Every rank's curve."""
    held, role = step_bytes([plan]), roles(program, plan.positions)
    at_once = max(1, _TOGETHER // (plan.num_microbatches * plan.stages_per_rank))
    groups = (timelines[first : first + at_once] for first in range(0, len(timelines), at_once))
    return tuple([curve for some in groups for curve in _curves(plan, program, some, held, role)])


def _curves(
    plan: Plan, program: Program, timelines: Sequence[RankTimeline], of_all: StepBytes, all_roles: Roles
) -> Iterator[MemoryCurve]:
    """The curves of some ranks. Arrays below have a row per stage of theirs and a column per micro-batch."""
    stages = np.array([stage for timeline in timelines for stage in timeline.stages])
    owner = np.repeat(np.arange(len(timelines)), [len(timeline.stages) for timeline in timelines])
    held, role = of_all, all_roles
    if len(stages) < plan.num_stages or (np.diff(stages) != 1).any():
        each = {f.name: getattr(of_all, f.name)[stages] for f in fields(StepBytes) if f.name != "batch"}
        held, role = (
            replace(of_all, **each),
            Roles(**{f.name: getattr(all_roles, f.name)[stages] for f in fields(Roles)}),
        )
    positions = [plan.pipeline.index(timeline.rank) for timeline in timelines]
    shift = np.cumsum([0, *(len(timeline.actions) for timeline in timelines)])[:-1] - program.first[positions]
    columns = {
        name: np.concatenate([getattr(timeline, name) for timeline in timelines])
        for name in ("start_s", "end_s", "arrived_s", "send_end_s", "taken_s")
    }

    def column(name: str, actions: Indices) -> Array:
        """That column of the actions of every stage and micro-batch; of some other action where there is none."""
        found: Array = columns[name][np.maximum(actions[stages] + shift[owner][:, None], 0)]
        return found

    posters = program.posters_of_takers(plan.window)

    def posted(takers: Indices) -> Array:
        """When the receives of what these actions take are posted: at once, or as an earlier message is taken."""
        poster = posters[takers]
        return np.where(poster[stages] >= 0, column("taken_s", poster), 0.0)

    at, back, done = program.at, program.gradients_start, program.backward_ends
    moments = {f"{kind} start": column("start_s", at[kind]) for kind in _SINGLE}
    moments |= {f"{kind} end": column("end_s", at[kind]) for kind in _SINGLE}
    moments |= {"back start": column("start_s", back), "back end": column("end_s", back), "done": column("end_s", done)}
    for moment, actions, end in (("F delivered", at["F"], "F end"), ("back delivered", back, "back end")):
        delivered = column("send_end_s", actions)
        moments[moment] = np.where(np.isnan(delivered), moments[end], delivered)
    moments |= {
        "F arrived": np.nan_to_num(column("arrived_s", at["F"])),
        "F posted": posted(at["F"]),
        "gradient posted": np.maximum(posted(program.gradient_taker), moments["F end"]),
        "U end": np.repeat([[timelines[rank].end_s[-1]] for rank in owner.tolist()], plan.num_microbatches, axis=1),
    }
    if role.from_rank.any():
        row_of = np.zeros(plan.num_stages, dtype=int)
        row_of[stages] = np.arange(len(stages))
        row_before = row_of[np.maximum(stages - 1, 0)]
        moments |= {"handed over": moments["F end"][row_before], "gradient used": moments["back end"][row_before]}
    ledger = _Ledger(len(timelines), owner)
    for part, begin, end, amount in holdings(held, role):
        if amount.any():
            ledger.hold(part, moments[begin], moments[end], amount[:, :, 0])
    constant = of_all.constant(plan.positions)
    return ledger.curves({part: amount[positions, 0] for part, amount in constant.items()})
