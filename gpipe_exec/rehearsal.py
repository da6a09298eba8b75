"""Rehearse a plan: the real engine and real processes, but layers that only take their time and hold their bytes.

A plan for sixteen GPUs can be executed on two cores: the schedule, the engine, the waiting and the allocator's
accounting are real, the arithmetic is not.

    layer      allocates what the profile says that it allocates, touches none of it, and sleeps until its time is over
    message    carries at most 64 KiB, and is delivered when the plan's link would have delivered all of it:

        sender      isend |..............................| delivered
        link              |..queue..|##bytes/bandwidth##|~latency~|
        receiver    posted ^ (told to the sender)                 | taken

All times are stretched by one factor, so that the engine's own overhead stays small beside the shortest action.

Between machines whose links are there, messages can be real instead (`--links real`): whole, at the links' own pace.
Links do not stretch, so nothing is stretched then, and ranks need no common clock.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from gpipe_exec.layers import Workload
from gpipe_exec.messages import PeerToPeer, Pending, Transport, carries_form
from gpipe_sim.catalog import Link
from gpipe_sim.model import bytes_per_parameter
from gpipe_sim.plan import Plan
from gpipe_sim.profile import LayerCosts

SHORTEST_ACTION_S = 20e-3
"""What the shortest action is stretched to, unless told otherwise."""

MAX_MESSAGE_BYTES = 64 * 1024
_SPIN_S = 150e-6
"""`sleep` wakes up late by about this much, so the end of a wait is spent looking at the clock."""


def default_stretch(plan: Plan) -> float:
    """The factor that makes the shortest action last 20 ms; 1 where it already does."""
    actions = np.concatenate([plan.forward_s.ravel(), plan.backward_s.ravel()])
    return max(1.0, SHORTEST_ACTION_S / float(actions[actions > 0].min()))


def what_is_left_out(plan: Plan, links: str = "plan") -> list[str]:
    """What the prediction has and a rehearsal has not, in words."""
    cluster = plan.scenario.cluster
    left_out = {
        "shared network cards: every link has its own": bool(plan.shared_nics) and links == "plan",
        "shared cores: every rank has its own": bool(plan.crowded_nodes),
        "jitter": cluster.jitter is not None,
    }
    return [what for what, there in left_out.items() if there]


def with_engine_overhead(plan: Plan, action_s: float, hop_s: float, stretch: float) -> Plan:
    """The plan as this machine's engine rehearses it: its overhead takes the place of whatever the profile has.

    It is not stretched, so that of the plan's own seconds it takes fewer.
    """
    profile = replace(plan.profile, action_overhead_s=action_s / stretch, hop_overhead_s=hop_s / stretch)
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
    """Takes the time and holds the bytes of a profiled layer."""

    def __init__(self, plan: Plan, stage: int, index: int, pace: Pace, stretch: float) -> None:
        super().__init__()
        self._plan, self._index, self._pace = plan, index, pace
        self._factor = stretch * plan.slowdown(stage)
        layers = range(plan.profile.num_layers)[plan.stages[stage]]
        self._is_first, self._is_last = index == layers[0], index == layers[-1]
        weights = float(plan.profile.parameter_bytes[index])
        per = bytes_per_parameter(plan.scenario.optimizer, plan.dtype)
        self._gradient_bytes = weights * per.gradient / per.weight
        self.gradient: torch.Tensor | None = None
        self.anchor = nn.Parameter(torch.zeros(()))  # makes a graph where the input needs no gradient
        self.register_buffer("weights", _bytes(weights))
        self.register_buffer("optimizer_state", _bytes(weights * per.optimizer / per.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A micro-batch of n rows in, another one out."""
        output: torch.Tensor = _Rehearsed.apply(x, self.anchor, self, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return output

    def run_forward(self, num_samples: int, *, keeps: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output, and what stays for the backward beside it: what that frees first, and the rest."""
        costs, i = self._costs(num_samples), self._index
        output = _rows(num_samples, costs.output_bytes[i])
        beside = max(0.0, costs.saved_bytes[i] - costs.output_bytes[i]) if keeps else 0.0
        freed_first = min(beside, self._freed_first(costs))
        kept = [_bytes(freed_first), _bytes(beside - freed_first)]
        workspace = _bytes((costs.workspace_forward_bytes if keeps else costs.workspace_no_grad_bytes)[i])
        self._pace.take(costs.forward_s[i] * self._factor, opens=self._is_first, closes=self._is_last)
        del workspace
        return output, kept

    def run_backward(self, shape: torch.Size, *, wanted: bool) -> torch.Tensor | None:
        """The gradient of an input of this shape, if it is wanted; the weights' own is kept if it is the first."""
        costs, i = self._costs(shape[0]), self._index
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

    def _freed_first(self, costs: LayerCosts) -> float:
        """What a backward lets go of, of what was saved, before it takes what it needs."""
        i = self._index
        making, adding = float(costs.workspace_backward_bytes[i]), float(costs.workspace_accumulate_bytes[i])
        return max(0.0, -making, -self._gradient_bytes - adding)

    def _costs(self, num_samples: int) -> LayerCosts:
        return self._plan.profile.at(num_samples)


_DTYPE = torch.float16
"""Continuous, so that it has a gradient, and small, so that almost any number of bytes can be made of it."""


def _bytes(count: float) -> torch.Tensor:
    return torch.empty(int(count), dtype=torch.uint8)


def _rows(num_samples: int, count: float) -> torch.Tensor:
    """At least `count` bytes in as many equal rows as there are samples."""
    return torch.empty((num_samples, -int(-count // (2 * num_samples))), dtype=_DTYPE)


class _Rehearsed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, layer: RehearsedLayer, keeps: bool) -> torch.Tensor:
        output, kept = layer.run_forward(len(x), keeps=keeps)
        ctx.layer, ctx.shape, ctx.kept = layer, x.shape, kept
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        ctx.kept.pop(0)
        of_input = ctx.layer.run_backward(ctx.shape, wanted=ctx.needs_input_grad[0])
        ctx.kept.clear()
        return of_input, None, None, None


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
    plan: Plan, stage: int, stretch: float, *, began: Callable[[], float] = time.perf_counter, asleep: bool = True
) -> tuple[Workload, Callable[[], None]]:
    """The plan's model with one stage to rehearse and nothing in place of the others; and the stage's update.

    `began` tells when the action under way began: its time counts from there.
    """
    pace = Pace(began, asleep=asleep)
    layers = {i: RehearsedLayer(plan, stage, i, pace, stretch) for i in range(*plan.stages[stage].indices(2**62))}
    model = nn.Sequential(*(layers.get(i, nn.Identity()) for i in range(plan.profile.num_layers)))

    def update() -> None:
        pace.take(float(plan.update_s[stage]) * stretch, opens=True, closes=True)
        for layer in layers.values():
            layer.gradient = None

    def sample(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty((n, int(plan.profile.input_bytes)), dtype=torch.uint8), torch.empty((n, 0))

    return Workload(model, sample, lambda output, targets: _NoLoss.apply(output)), update  # type: ignore[no-untyped-call]


# --- messages ------------------------------------------------------------------------------------------------------


@dataclass
class PacedTransport(Transport):
    """Delivers at the pace of the plan's link; what it carries is small. Ranks are on one machine, with one clock.

    A receive that is posted is told to the sender, with its time. From then on the sender knows when the message
    starts and arrives, and tells the receiver in the message itself.
    """

    direct: PeerToPeer
    link: Link
    stretch: float
    _free_s: float = field(default=0.0, init=False)
    """When the link has carried its last byte so far."""

    def isend(self, tensor: torch.Tensor, number: int) -> Pending:
        """Begin to send; whoever waits for it carries it over the link."""
        if carries_form(number):
            return self.direct.isend(tensor, number)
        return _PacedSend(self, time.perf_counter(), tensor.nbytes, number)

    def irecv(self, tensor: torch.Tensor, number: int) -> Pending:
        """Post a receive, and tell the sender."""
        if carries_form(number):
            return self.direct.irecv(tensor, number)
        return _PacedReceive(self, tensor.nbytes, number)

    def occupy(self, num_bytes: int, ready_s: float) -> float:
        """The link carries so many bytes as soon as it is free and they are ready; returns when they arrive."""
        self._free_s = max(ready_s, self._free_s) + num_bytes / self.link.bandwidth * self.stretch
        return self._free_s + self.link.latency * self.stretch


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
