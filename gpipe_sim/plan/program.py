"""Program: the one table of actions and messages that a plan compiles to. Everything that runs a step reads it.

    program     per action: rank, kind, stage, micro-batch                      in each rank's order
                per message: the action that sends, the action that takes, its channel; none where both are on one rank
                per collective of replicas: the action that it comes after, the action that waits for it (`lanes`)

The simulator interprets it with events, the evaluator in waves, memory and explanation read it, the engine executes it.
Its rules are here and nowhere else:

    F  forward                   takes the previous stage's output of that micro-batch, sends its own on
    R  recompute the forward     takes nothing (recompute: early) or the gradient (on_demand)
    B  whole backward            takes the next stage's gradient, unless an R took it; sends its inputs' gradient back
    I  backward for the inputs   as B
    W  backward for the weights  takes and sends nothing; after its I
    U  update                    of all stages of the rank, after everything else

R(m) stands directly before B(m) or I(m), so that at most one rematerialised micro-batch waits for its backward:

    F0 F1 F2   R2 B2   R1 B1   R0 B0   U

A *channel* carries the messages of one edge in one direction, in the order in which they are sent. The receiver posts
its receives in the order in which it takes them, `window` of them ahead: taking a message posts the next receive.
Channels that lead from one rank to the same other one share a *wire*, which carries what it is given in turn.

What depends on the plan's shape alone is compiled once for all plans of that shape. Ranks are numbered by position.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gpipe_sim.base.arrays import Flags, Indices
from gpipe_sim.base.kept import kept
from gpipe_sim.plan.actions import COLLECTIVES, KINDS, Action, Letter
from gpipe_sim.plan.lanes import Lane, lane_of
from gpipe_sim.plan.order import ActionList, Order
from gpipe_sim.plan.orders import SCHEDULES
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import BackwardOrder, Recompute, Shard

Route = tuple[int, int]
"""From a stage to a later one: outputs go there, gradients come back."""


_ROOM = 2**20
"""Stages times micro-batches of all programs that are kept; each takes about a hundred bytes."""


class Shape(NamedTuple):
    """What plans must have in common to have the same program."""

    positions: tuple[int, ...]
    """Of each stage."""
    num_microbatches: int
    schedule: str
    backward: BackwardOrder
    order: Order | None
    """Where it is not the named schedule's."""
    recompute: Recompute
    recomputes: bool
    """Whether anything is recomputed at all."""
    window: int | None
    """None if every receive is posted at once."""
    blocking: bool
    """Whether a rank stands still until its message is delivered."""
    shard: Shard | None = None
    """What replicas divide; None if there is one only, which has no collectives."""

    @property
    def num_ranks(self) -> int:
        """K."""
        return max(self.positions) + 1

    def num_cells(self) -> int:
        """Stages times micro-batches."""
        return len(self.positions) * self.num_microbatches


def shape_of(plan: Plan, *, communication: bool = True) -> Shape:
    """The plan's shape; without communication nothing blocks."""
    recomputes = plan.recomputes
    return Shape(
        plan.positions,
        plan.num_microbatches,
        plan.schedule,
        plan.backward,
        plan.order,
        plan.recompute if recomputes else "early",
        recomputes,
        plan.window if plan.window is not None and plan.window < plan.num_microbatches else None,
        communication and not plan.scenario.cluster.overlap,
        plan.shard if plan.replicas > 1 else None,
    )


class Channel(NamedTuple):
    """One direction of one edge between stages on different ranks."""

    source: int
    """The stage that sends."""
    target: int
    """The stage that takes."""
    sender: int
    """The position that sends."""
    receiver: int
    """The position that takes."""

    @property
    def is_forward(self) -> bool:
        """Whether it carries outputs, not gradients."""
        return self.source < self.target

    @property
    def edge(self) -> int:
        """The earlier of its two stages, by which links are known."""
        return min(self.source, self.target)

    @property
    def name(self) -> str:
        """What it carries, in words."""
        return f"the output of stage {self.source}" if self.is_forward else f"the gradient from stage {self.source}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """Actions are numbered rank by rank in their order, messages channel by channel in the order of sending, M each.

    The number -1 is that of no action or message at all.
    """

    order: Order
    """By position; with R and U."""
    num_microbatches: int
    first: Indices
    """Position -> its first action; and, at the end, how many actions there are."""
    at: dict[Letter, Indices]
    """Kind of a rank's actions but U -> stage, micro-batch -> action."""
    gradient_taker: Indices
    """Stage, micro-batch -> the action that waits for the next stage's gradient, if that comes from another rank."""
    channels: tuple[Channel, ...]
    sender: Indices
    """Message -> action."""
    taker: Indices
    """Message -> action."""
    turn: Indices
    """Message -> its place in the order in which its receiver takes, and so posts, the messages of the channel."""
    wired_after: Indices
    """Message -> the message of another channel that comes before it on the same wire, or of its own channel there."""
    takes: Indices
    """Action -> messages that it waits for: a column, or more where a stage takes from several."""
    sends: Indices
    """Action -> messages that it sends, likewise."""
    lanes: tuple[Lane, ...]
    """By position: the collectives of its rank; all empty where there is one replica."""

    def __repr__(self) -> str:
        return f"Program({self.num_ranks} ranks, {self.num_actions} actions, {self.num_messages} messages)"

    @property
    def num_ranks(self) -> int:
        """K."""
        return len(self.order)

    @property
    def num_actions(self) -> int:
        """Of all ranks."""
        return int(self.first[-1])

    @property
    def num_messages(self) -> int:
        """Of all channels."""
        return len(self.sender)

    @cached_property
    def microbatches(self) -> Indices:
        """Message -> the micro-batch that it belongs to."""
        of_actions = np.concatenate([actions.microbatches for actions in self.order])
        found: Indices = of_actions[self.sender]
        return found

    def poster(self, window: int | None) -> Indices:
        """Message -> the action that posts its receive, by taking the message `window` turns before it."""
        posters = np.full(self.num_messages, -1, dtype=np.int32)
        M = self.num_microbatches
        if window is not None and window < M:
            by_turn = np.argsort(self.turn.reshape(-1, M), axis=1, kind="stable")
            takers = np.take_along_axis(self.taker.reshape(-1, M), by_turn, axis=1)
            np.put_along_axis(posters.reshape(-1, M), by_turn[:, window:], takers[:, :-window], axis=1)
        return posters

    def posters_of_takers(self, window: int | None) -> Indices:
        """Action -> the action that posts the receive of the message that it takes."""
        found: Indices = np.append(self.poster(window), np.int32(-1))[self.takes[:, 0]]
        return found

    def action(self, number: int) -> tuple[int, Action]:
        """The position and the action of a number."""
        position = int(np.searchsorted(self.first, number, side="right")) - 1
        return position, self.order[position][number - int(self.first[position])]

    def senders(self) -> dict[Action, Action]:
        """Taker -> sender of every message, where each takes one at most."""
        actions = [action for actions in self.order for action in actions]
        pairs = zip(self.taker.tolist(), self.sender.tolist(), strict=True)
        return {actions[taker]: actions[sender] for taker, sender in pairs}

    @property
    def gradients_start(self) -> Indices:
        """Stage, micro-batch -> the backward that makes the gradient of the stage's inputs: B or I."""
        return np.where(self.at["B"] >= 0, self.at["B"], self.at["I"])

    @property
    def backward_ends(self) -> Indices:
        """Stage, micro-batch -> the action that ends its backward: B or W."""
        return np.where(self.at["B"] >= 0, self.at["B"], self.at["W"])


# --- from a plan ---------------------------------------------------------------------------------------------------


def _cells_of_plan(plan: Plan) -> int:
    return plan.num_stages * plan.num_microbatches


@kept(_cells_of_plan, room=_ROOM, most=4)
def program_of(plan: Plan) -> Program:
    """The plan's own program: it recomputes what the plan recomputes."""
    shape = shape_of(plan)
    again = np.array([plan.recomputed(stage) for stage in range(plan.num_stages)])
    order, on_demand = completed(order_of(shape), again), plan.recompute == "on_demand"
    return compile_program(order, shape.positions, on_demand=on_demand, shard=shape.shard)


@kept(Shape.num_cells, room=_ROOM, most=48)
def program_of_shape(shape: Shape) -> Program:
    """The program of every plan of a shape: it has an R wherever a plan might, which takes no time elsewhere."""
    again = np.full((len(shape.positions), shape.num_microbatches), shape.recomputes)
    order = completed(order_of(shape), again)
    return compile_program(order, shape.positions, on_demand=shape.recompute == "on_demand", shard=shape.shard)


def order_of(shape: Shape) -> Order:
    """What each rank does, without recomputation and update: as it was given, or as the schedule has it."""
    if shape.order is not None:
        return shape.order
    schedule, K = SCHEDULES[shape.schedule], shape.num_ranks
    v, M = len(shape.positions) // K, shape.num_microbatches
    return tuple(ActionList.of(schedule.order(position, K, v, M, shape.backward)) for position in range(K))


def completed(order: Order, recomputed: Flags) -> Order:
    """With recomputations, given by stage and micro-batch, and the rank's update."""
    return tuple(_completed(actions, recomputed) for actions in order)


def _completed(actions: ActionList, recomputed: Flags) -> ActionList:
    letters = np.frombuffer(actions.kinds, dtype=np.uint8)
    begins_backward = (letters == ord("B")) | (letters == ord("I"))
    before = np.flatnonzero(begins_backward & recomputed[actions.stages, actions.microbatches])
    end = len(actions)
    where = np.append(before, end)
    return ActionList(
        np.insert(letters, where, [ord("R")] * len(before) + [ord("U")]).tobytes(),
        np.insert(actions.stages, where, [*actions.stages[before], actions.stages.min()]),
        np.insert(actions.microbatches, where, [*actions.microbatches[before], -1]),
    )


def rank_actions(plan: Plan) -> Order:
    """Every rank's list, in the order of `Plan.ranks`."""
    order = program_of(plan).order
    return tuple(order[plan.pipeline.index(rank)] for rank in plan.ranks)


# --- compilation ---------------------------------------------------------------------------------------------------


def compile_program(
    order: Order,
    positions: Sequence[int],
    *,
    on_demand: bool = False,
    routes: Iterable[Route] | None = None,
    shard: Shard | None = None,
) -> Program:
    """Number the actions of a complete order, and connect them by messages.

    `routes` are the pairs of stages between which something travels: without them, each stage and the next. `shard` is
    what replicas divide, if there are several.
    """
    S = len(positions)
    lengths = np.array([len(actions) for actions in order])
    first = np.append(0, np.cumsum(lengths))
    letters = np.frombuffer(b"".join(actions.kinds for actions in order), dtype=np.uint8)
    stages = np.concatenate([actions.stages for actions in order])
    microbatches = np.concatenate([actions.microbatches for actions in order])
    M = int(microbatches.max()) + 1
    at: dict[Letter, Indices] = {}
    for letter in KINDS:
        if letter != "U" and letter not in COLLECTIVES:
            at[letter] = np.full((S, M), -1, dtype=np.int32)
            rows = np.flatnonzero(letters == ord(letter))
            at[letter][stages[rows], microbatches[rows]] = rows
    sends_back = np.where(at["B"] >= 0, at["B"], at["I"])
    takes_gradient = np.where((at["R"] >= 0) & on_demand, at["R"], sends_back)

    _check(order, positions, at, sends_back, takes_gradient)
    ways = list(routes) if routes is not None else [(stage, stage + 1) for stage in range(S - 1)]
    outputs = [(here, there, at["F"][here], at["F"][there]) for here, there in ways]
    gradients = [(there, here, sends_back[there], takes_gradient[here]) for here, there in ways]
    channels: list[Channel] = []
    senders, takers = [], []
    for source, target, sending, taking in (*outputs, *gradients):
        if positions[source] == positions[target]:
            continue  # handed over on the rank itself
        channels.append(Channel(source, target, positions[source], positions[target]))
        by_sending = np.argsort(sending, kind="stable")
        senders.append(sending[by_sending])
        takers.append(taking[by_sending])
    nothing = np.empty((0, M), dtype=np.int32)
    sender, taker = (np.array(found) if found else nothing for found in (senders, takers))
    lanes: tuple[Lane, ...] = ((),) * len(order)
    if shard is not None:
        ends = np.where(at["B"] >= 0, at["B"], at["W"])
        lanes = tuple(
            lane_of(actions.holds, int(first[i]), int(first[i + 1]) - 1, at["F"], ends, shard)
            for i, actions in enumerate(order)
        )
    turn = np.argsort(np.argsort(taker, axis=1, kind="stable"), axis=1, kind="stable")
    return Program(
        order=order,
        num_microbatches=M,
        first=first,
        at=at,
        gradient_taker=takes_gradient,
        channels=tuple(channels),
        sender=sender.ravel(),
        taker=taker.ravel(),
        turn=turn.astype(np.int32).ravel(),
        wired_after=_wired(channels, sender),
        takes=_per_action(taker.ravel(), int(first[-1])),
        sends=_per_action(sender.ravel(), int(first[-1])),
        lanes=lanes,
    )


class DeadlockError(RuntimeError):
    """The schedule cannot finish; the message names who waits for what."""


def _check(order: Order, positions: Sequence[int], at: dict[Letter, Indices], back: Indices, taker: Indices) -> None:
    """Refuse an order in which a rank itself has something before what it needs."""
    inside = np.equal(positions[:-1], positions[1:])
    after = [(at["F"], back), (at["F"], at["R"]), (at["I"], at["W"])]
    after += [(at["F"][:-1][inside], at["F"][1:][inside]), (back[1:][inside], taker[:-1][inside])]
    for earlier, later in after:
        wrong = (later >= 0) & (earlier > later)
        if wrong.any():
            first, second = int(earlier[wrong][0]), int(later[wrong][0])
            raise DeadlockError(
                f"the schedule cannot finish: {_named(order, second)} comes before {_named(order, first)}"
            )


def _wired(channels: Sequence[Channel], sender: Indices) -> Indices:
    """On a wire of several channels, the message sent before each one; -1 where a wire has one channel only."""
    M = sender.shape[1]
    after = np.full(sender.size, -1, dtype=np.int32)
    wires: dict[tuple[int, int], list[int]] = {}
    for number, channel in enumerate(channels):
        wires.setdefault((channel.sender, channel.receiver), []).append(number)
    for sharing in wires.values():
        if len(sharing) > 1:
            messages = (np.array(sharing)[:, None] * M + np.arange(M)).ravel()
            messages = messages[np.argsort(sender.ravel()[messages], kind="stable")]
            after[messages[1:]] = messages[:-1]
    return after


def _named(order: Order, number: int) -> str:
    for actions in order:
        if number < len(actions):
            return str(actions[number])
        number -= len(actions)
    raise AssertionError("actions are numbered rank by rank")


def _per_action(actions: Indices, num_actions: int) -> Indices:
    """Message -> action, turned around: action -> its messages, in as many columns as the busiest action needs."""
    columns = [np.full(num_actions, -1, dtype=np.int32)]
    left = np.arange(len(actions))
    while True:
        _, chosen = np.unique(actions[left], return_index=True)
        columns[-1][actions[left[chosen]]] = left[chosen]
        left = np.delete(left, chosen)
        if not len(left):
            return np.stack(columns, axis=1)
        columns.append(np.full(num_actions, -1, dtype=np.int32))
