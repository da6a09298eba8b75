"""Rehearse a plan: the real engine and real processes, but layers that only take their time and hold their bytes.

A plan for sixteen GPUs can be executed on two cores: the schedule, the engine, the waiting and the allocator's
accounting are real, the arithmetic is not.

    layer      allocates what the profile says that it allocates, touches none of it, and sleeps until its time is over
    message    carries at most 64 KiB, and is delivered when the plan's link would have delivered all of it:

        sender      isend |..............................| delivered
        link              |..queue..|##bytes/bandwidth##|~latency~|
        receiver    posted ^ (told to the sender)                 | taken

    collective of replicas, likewise: carries nothing but when each is ready for it, and ends when the plan's links
    would have ended it for the last of them

All times are stretched by one factor, so that the engine's own overhead stays small beside the shortest action.

Between machines whose links are there, messages can be real instead (`--links real`): whole, at the links' own pace.
Links do not stretch, so nothing is stretched then, and ranks need no common clock.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from gpipe_exec.engine import split
from gpipe_exec.engine.selective import recomputes_attention
from gpipe_exec.engine.transport import PeerToPeer, Pending, Transport
from gpipe_exec.layers import Workload
from gpipe_sim.cost.profile import Array, LayerCosts
from gpipe_sim.cost.recompute import recomputed_in_backward
from gpipe_sim.cost.transformer import bytes_per_parameter
from gpipe_sim.plan.actions import Action
from gpipe_sim.plan.figures import collective_kinds, figures_of
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import program_of
from gpipe_sim.scenario.catalog import Link

SHORTEST_ACTION_S = 20e-3
"""What the shortest action is stretched to, unless told otherwise."""

MAX_MESSAGE_BYTES = 64 * 1024
_SPIN_S = 150e-6
"""`sleep` wakes up late by about this much, so the end of a wait is spent looking at the clock."""


def default_stretch(plan: Plan) -> float:
    """The factor that makes the shortest action last 20 ms; 1 where it already does."""
    at, figures = program_of(plan).at, figures_of([plan])
    seconds = [figures.seconds[letter][there >= 0, 0] for letter, there in at.items() if (there >= 0).any()]
    actions = np.concatenate(seconds)
    return max(1.0, SHORTEST_ACTION_S / float(actions[actions > 0].min()))


def refuse_rehearsal(plan: Plan) -> None:
    """Refuse what no layer that only takes its time can do."""
    if plan.tensor > 1 and plan.num_ranks > 1 and not plan.scenario.plan.sequence_split:
        message = "found false, expected true in a rehearsal: its layers pass whole values on, of which a member of a "
        raise plan.scenario.error("plan.sequence_split", f"{message}group would send a slice")


def what_is_left_out(plan: Plan, links: str = "plan") -> list[str]:
    """What the prediction has and a rehearsal has not, in words."""
    cluster = plan.scenario.cluster
    through_nics = any(plan.nic_route(edge) for edge in range(plan.num_stages - 1))
    shares_nics = bool(plan.shared_nics) or (plan.sharers > 1 and through_nics)
    left_out = {
        "shared network cards: every link has its own": links == "plan" and shares_nics,
        "shared cores: every rank has its own": bool(plan.crowded_nodes),
        "jitter": cluster.jitter is not None,
        "what members of a tensor group exchange, but for its time": plan.tensor > 1,
        "skips: what a layer hands on to a later one is a copy": bool(plan.profile.skips),
    }
    return [what for what, there in left_out.items() if there]


def with_engine_overhead(plan: Plan, action_s: float, hop_s: float, stretch: float) -> Plan:
    """The plan as this machine's engine rehearses it: its overhead takes the place of whatever the profile has.

    It is not stretched, so that of the plan's own seconds it takes fewer.
    """
    table = {name: values for name, values in plan.profile.table.items() if name != "freed_bytes"}
    profile = replace(plan.profile, action_overhead_s=action_s / stretch, hop_overhead_s=hop_s / stretch)
    profile = replace(profile, skips=(), table=table)  # what is rehearsed holds the whole of them
    return replace(plan, profile=profile)


def sleep_until(deadline: float) -> None:
    """Return at the deadline, as exactly as can be without keeping a core busy."""
    while (remaining := deadline - time.perf_counter()) > _SPIN_S:
        time.sleep(remaining - _SPIN_S)
    while time.perf_counter() < deadline:
        pass


# --- layers --------------------------------------------------------------------------------------------------------


class Pace:
    """The time of one stage. Deadlines follow from each other, so that being late once does not add up."""

    def __init__(self, began: Callable[[], float], *, asleep: bool) -> None:
        self._began, self._asleep, self._deadline = began, asleep, 0.0

    def take(self, seconds: float, *, opens: bool, closes: bool) -> None:
        """Work that lasts so long: from when its action began, or from the end of the work before it."""
        self._deadline = (self._began() if opens else self._deadline) + seconds
        if not self._asleep:
            while time.perf_counter() < self._deadline:
                pass
        elif closes:
            sleep_until(self._deadline)
        elif (ahead := self._deadline - time.perf_counter() - _SPIN_S) > 0:
            time.sleep(ahead)


class RehearsedLayer(nn.Module):
    """Takes the time and holds the bytes of a profiled layer.

    A backward that will be split is made of operations that can be:

        x ---> fork ---------------------> inputs ---> output
                 `---token---> product -----^
                                 ^
        anchor ---> weights -----'

    The product, of one number with another, is all that is real of the layer's arithmetic: there the ways to the input
    and to the weights part.
    """

    def __init__(self, plan: Plan, stage: int, index: int, pace: Pace, stretch: float, replica: int = 0) -> None:
        super().__init__()
        self._plan, self._index, self._pace = plan, index, pace
        self._factor = stretch * plan.slowdown(stage, replica)
        layers = range(plan.profile.num_layers)[plan.stages[stage]]
        self._is_first, self._is_last = index == layers[0], index == layers[-1]
        attention = plan.profile.table.get("attention_bytes")
        self._has_attention = attention is not None and bool(attention[index].any())
        weights = float(plan.profile.parameter_bytes[index])
        per = bytes_per_parameter(plan.scenario.optimizer, plan.dtype, plan.scenario.precision)
        self._gradient_bytes = weights * per.gradient / per.weight
        self.gradient: torch.Tensor | None = None
        self.anchor = nn.Parameter(torch.zeros((1, 1)))  # makes a graph where the input needs no gradient
        self.register_buffer("weights", _bytes(weights))
        sharers = 1 if plan.shard == "none" else plan.replicas
        self.register_buffer("optimizer_state", _bytes(weights * per.optimizer / per.weight / sharers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A micro-batch of n rows in, another one out."""
        output: torch.Tensor
        if (halves := split.recording()) and torch.is_grad_enabled():
            if x.requires_grad:
                x, token = _Fork.apply(x)  # type: ignore[no-untyped-call]
            else:
                (token,) = halves.start([torch.zeros((1, 1))])
            kept: list[torch.Tensor] = []
            weights = _RehearsedWeights.apply(self.anchor, self, len(x), kept)  # type: ignore[no-untyped-call]
            output = _RehearsedInputs.apply(x, token @ weights, self, kept)  # type: ignore[no-untyped-call]
            return output
        selective = self._has_attention and recomputes_attention()
        output = _Rehearsed.apply(x, self.anchor, self, torch.is_grad_enabled(), selective)  # type: ignore[no-untyped-call]
        return output

    def run_forward(
        self, num_samples: int, *, keeps: bool, splits: bool = False, selective: bool = False
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output, and what stays for the backward beside it: what that frees first, and the rest. `selective`: its
        attention is recomputed in the backward."""
        costs, i = self._costs(num_samples, selective=selective), self._index
        output = _rows(num_samples, costs.output_bytes[i])
        beside = max(0.0, costs.saved_bytes[i] - costs.output_bytes[i]) if keeps else 0.0
        kept = _parted(beside, self._freed_by_inputs(costs) if splits else self._freed_first(costs))
        workspace = _bytes((costs.workspace_forward_bytes if keeps else costs.workspace_no_grad_bytes)[i])
        self._pace.take(costs.forward_s[i] * self._factor, opens=self._is_first, closes=self._is_last)
        del workspace
        return output, kept

    def run_backward(self, shape: torch.Size, *, wanted: bool, selective: bool = False) -> torch.Tensor | None:
        """The gradient of an input of this shape, if it is wanted; the weights' own is kept if it is the first."""
        costs, i = self._costs(shape[0], selective=selective), self._index
        of_input = torch.empty(shape, dtype=_DTYPE) if wanted else None
        is_first = self.gradient is None
        of_weights = _bytes(self._gradient_bytes if is_first else 0.0)
        adding = self._gradient_bytes + costs.workspace_accumulate_bytes[i]
        workspace = _bytes((costs.workspace_backward_bytes[i] if is_first else adding) + self._freed_first(costs))
        self._pace.take(costs.backward_s[i] * self._factor, opens=self._is_last, closes=self._is_first)
        if is_first:
            self.gradient = of_weights
        del workspace
        return of_input

    def run_inputs(
        self, shape: torch.Size, saved: list[torch.Tensor], kept: list[torch.Tensor], *, wanted: bool
    ) -> torch.Tensor | None:
        """I: the gradient of an input of this shape, if it is wanted; what was saved gives way to what is kept."""
        costs, i = self._costs(shape[0]), self._index
        saved.pop(0)
        of_input = torch.empty(shape, dtype=_DTYPE) if wanted else None
        workspace = _bytes(_known(costs.workspace_inputs_bytes)[i] + self._freed_by_inputs(costs))
        seconds = _known(costs.backward_inputs_s)[i] * self._factor
        self._pace.take(seconds, opens=self._is_last, closes=self._is_first)
        del workspace
        saved.clear()
        kept += _parted(_known(costs.kept_bytes)[i], self._freed_by_weights(costs))
        return of_input

    def run_weights(self, num_samples: int, kept: list[torch.Tensor]) -> None:
        """W: the weights' gradient stays if it is the first, and what was kept goes."""
        costs, i = self._costs(num_samples), self._index
        kept.pop(0)
        is_first = self.gradient is None
        of_weights = _bytes(self._gradient_bytes if is_first else 0.0)
        making, adding = self._weights_workspace(costs)
        workspace = _bytes((making if is_first else self._gradient_bytes + adding) + self._freed_by_weights(costs))
        seconds = _known(costs.backward_weights_s)[i] * self._factor
        self._pace.take(seconds, opens=self._is_last, closes=self._is_first)
        if is_first:
            self.gradient = of_weights
        del workspace
        kept.clear()

    def _weights_workspace(self, costs: LayerCosts) -> tuple[float, float]:
        i = self._index
        both = costs.workspace_weights_bytes, costs.workspace_weights_accumulate_bytes
        making, adding = (float(_known(values)[i]) for values in both)
        return making, adding

    def _freed_by_inputs(self, costs: LayerCosts) -> float:
        """What I lets go of, of what was saved, before it takes what it needs."""
        return max(0.0, -float(_known(costs.workspace_inputs_bytes)[self._index]))

    def _freed_by_weights(self, costs: LayerCosts) -> float:
        """What W lets go of, of what was kept, before it takes what it needs."""
        making, adding = self._weights_workspace(costs)
        return max(0.0, -making, -self._gradient_bytes - adding)

    def _freed_first(self, costs: LayerCosts) -> float:
        """What a backward lets go of, of what was saved, before it takes what it needs."""
        i = self._index
        making, adding = float(costs.workspace_backward_bytes[i]), float(costs.workspace_accumulate_bytes[i])
        return max(0.0, -making, -self._gradient_bytes - adding)

    def _costs(self, num_samples: int, *, selective: bool = False) -> LayerCosts:
        profile = self._plan.profile
        return (recomputed_in_backward(profile, "attention") if selective else profile).at(num_samples)


_DTYPE = torch.float16
"""Continuous, so that it has a gradient, and small, so that almost any number of bytes can be made of it."""


def _bytes(count: float) -> torch.Tensor:
    return torch.empty(int(count), dtype=torch.uint8)


def _parted(count: float, first: float) -> list[torch.Tensor]:
    """So many bytes in two parts, of which the first can be let go by itself."""
    first = min(count, first)
    return [_bytes(first), _bytes(count - first)]


def _known(values: Array | None) -> Array:
    assert values is not None, "a plan with split backwards stands on a profile that knows what they cost"
    return values


def _rows(num_samples: int, count: float) -> torch.Tensor:
    """At least `count` bytes in as many equal rows as there are samples."""
    return torch.empty((num_samples, -int(-count // (2 * num_samples))), dtype=_DTYPE)


class _Rehearsed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, layer: RehearsedLayer, keeps: bool, selective: bool
    ) -> torch.Tensor:
        output, kept = layer.run_forward(len(x), keeps=keeps, selective=selective)
        ctx.layer, ctx.shape, ctx.kept, ctx.selective = layer, x.shape, kept, selective
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        ctx.kept.pop(0)
        of_input = ctx.layer.run_backward(ctx.shape, wanted=ctx.needs_input_grad[0], selective=ctx.selective)
        ctx.kept.clear()
        return of_input, None, None, None, None


class _Fork(torch.autograd.Function):
    """The input, and a number on the way to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.detach(), torch.zeros((1, 1))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class _RehearsedInputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, product: torch.Tensor, layer: RehearsedLayer, kept: list[torch.Tensor]
    ) -> torch.Tensor:
        output, saved = layer.run_forward(len(x), keeps=True, splits=True)
        ctx.layer, ctx.shape, ctx.kept = layer, x.shape, kept
        ctx.saved = [*saved, output.detach()]  # not the output itself, which holds this
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None, None]:
        of_input = ctx.layer.run_inputs(ctx.shape, ctx.saved, ctx.kept, wanted=ctx.needs_input_grad[0])
        return of_input, torch.zeros((1, 1)), None, None


class _RehearsedWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, layer: RehearsedLayer, num_samples: int, kept: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.layer, ctx.num_samples, ctx.kept = layer, num_samples, kept
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.layer.run_weights(ctx.num_samples, ctx.kept)
        return None, None, None, None


class _NoLoss(torch.autograd.Function):
    """A loss of zero, whose gradient is allocated and never written."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.shape = output.shape
        return torch.zeros((), dtype=_DTYPE)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.empty(ctx.shape, dtype=_DTYPE)


def rehearsed_workload(
    plan: Plan,
    stages: Sequence[int],
    stretch: float,
    *,
    began: Callable[[], float] = time.perf_counter,
    asleep: bool = True,
    replica: int = 0,
) -> tuple[Workload, Callable[[], None]]:
    """The plan's model with a rank's stages to rehearse and nothing in place of the others; and the rank's update.

    `began` tells when the action under way began: its time counts from there.
    """
    pace = Pace(began, asleep=asleep)
    layers = {
        i: RehearsedLayer(plan, stage, i, pace, stretch, replica)
        for stage in stages
        for i in range(plan.profile.num_layers)[plan.stages[stage]]
    }
    update_s = figures_of([plan], replica=replica).seconds["U"][plan.positions[stages[0]], 0] if stages else 0.0
    model = nn.Sequential(*(layers.get(i, nn.Identity()) for i in range(plan.profile.num_layers)))

    def update() -> None:
        pace.take(float(update_s) * stretch, opens=True, closes=True)
        for layer in layers.values():
            layer.gradient = None

    def sample(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty((n, int(plan.profile.input_bytes)), dtype=torch.uint8), torch.empty((n, 0))

    return Workload(model, sample, lambda output, targets: _NoLoss.apply(output)), update  # type: ignore[no-untyped-call]


# --- messages ------------------------------------------------------------------------------------------------------


@dataclass
class PacedWire:
    """What the transports from this rank to the same other one share."""

    free_s: float = 0.0
    """When it has carried its last byte so far."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class PacedTransport(Transport):
    """Delivers at the pace of the plan's link; what it carries is small. Ranks are on one machine, with one clock.

    A receive that is posted is told to the sender, with its time. From then on the sender knows when the message
    starts and arrives, and tells the receiver in the message itself.
    """

    direct: PeerToPeer
    link: Link
    stretch: float
    wire: PacedWire = field(default_factory=PacedWire)

    def isend(self, tensor: torch.Tensor, number: int) -> Pending:
        """Begin to send; whoever waits for it carries it over the link."""
        return _PacedSend(self, time.perf_counter(), tensor.nbytes, number)

    def irecv(self, tensor: torch.Tensor, number: int) -> Pending:
        """Post a receive, and tell the sender."""
        return _PacedReceive(self, tensor.nbytes, number)

    def occupy(self, num_bytes: int, ready_s: float) -> float:
        """The link carries so many bytes as soon as it is free and they are ready; returns when they arrive."""
        with self.wire.lock:
            self.wire.free_s = max(ready_s, self.wire.free_s) + num_bytes / self.link.bandwidth * self.stretch
            return self.wire.free_s + self.link.latency * self.stretch


def _payload(num_bytes: int) -> torch.Tensor:
    """What travels; not of torch's allocator, where only what the plan holds is counted."""
    return torch.from_numpy(np.zeros(max(1, min(num_bytes, MAX_MESSAGE_BYTES) // 8)))


class _PacedSend:
    def __init__(self, transport: PacedTransport, sent_s: float, num_bytes: int, number: int) -> None:
        self._transport, self._sent_s, self._num_bytes, self._number = transport, sent_s, num_bytes, number
        self._posted = _payload(8)
        self._told = transport.direct.irecv(self._posted, number)

    def wait(self) -> None:
        """Until it is delivered."""
        self._told.wait()
        payload = _payload(self._num_bytes)
        arrival = self._transport.occupy(self._num_bytes, max(self._sent_s, float(self._posted[0])))
        payload[0] = arrival
        self._transport.direct.isend(payload, self._number).wait()
        time.sleep(max(0.0, arrival - time.perf_counter()))


class _PacedReceive:
    def __init__(self, transport: PacedTransport, num_bytes: int, number: int) -> None:
        self._payload = _payload(num_bytes)
        self._work = transport.direct.irecv(self._payload, number)
        self._posted = _payload(8)
        self._posted[0] = time.perf_counter()
        self._told = transport.direct.isend(self._posted, number)

    def wait(self) -> None:
        """Until it arrives."""
        self._work.wait()
        self._told.wait()
        sleep_until(float(self._payload[0]))


# --- collectives of replicas -----------------------------------------------------------------------------------------


class PacedCollectives:
    """Each takes the time that the plan's links would take, one after the other, from when the last replica is ready.

    Replicas are on one machine, with one clock: they tell each other when they are ready.
    """

    def __init__(self, plan: Plan, stretch: float) -> None:
        self._seconds, self._stretch = figures_of([plan]).collective_s, stretch
        self.free_s = 0.0
        """When the lane has ended its last collective so far."""

    def __call__(self, action: Action, group: dist.ProcessGroup) -> Pending:
        """Begin one."""
        return _PacedCollective(self, float(self._seconds[action.kind][action.stage, 0]) * self._stretch, group)


class _PacedCollective:
    def __init__(self, lane: PacedCollectives, seconds: float, group: dist.ProcessGroup) -> None:
        self._lane, self._seconds, self._lock, self._end_s = lane, seconds, threading.Lock(), 0.0
        self._ready = _payload(8)
        self._ready[0] = time.perf_counter()
        self._told = dist.all_reduce(self._ready, dist.ReduceOp.MAX, group=group, async_op=True)

    def wait(self) -> None:
        """Until it has ended; whoever waits first says when that is."""
        with self._lock:
            if self._told is not None:
                self._told.wait()
                self._told = None
                self._end_s = max(float(self._ready[0]), self._lane.free_s) + self._seconds
                self._lane.free_s = self._end_s
        sleep_until(self._end_s)


class WholeCollectives:
    """As many bytes as the plan's, over the links that are there; what they are does not matter."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._kinds = plan, collective_kinds(plan)

    def __call__(self, action: Action, group: dist.ProcessGroup) -> Pending:
        """Begin one, as the engine does: a sum also where a part of it would do, a gather by a broadcast of each."""
        _, ratio = self._kinds[action.kind]
        weights = self._plan.profile.parameter_bytes[self._plan.stages[action.stage]].sum()
        values = torch.from_numpy(np.zeros(max(1, int(weights * ratio) // 4), dtype=np.float32))
        if action.kind == "S":
            works = [dist.all_reduce(values, group=group, async_op=True)]
        else:
            parts = torch.tensor_split(values, group.size())
            works = [dist.broadcast(p, group=group, group_src=d, async_op=True) for d, p in enumerate(parts) if len(p)]
        return _Works([work for work in works if work is not None])


@dataclass
class _Works:
    works: Sequence[dist.Work]

    def wait(self) -> None:
        """Until all have ended."""
        for work in self.works:
            work.wait()
