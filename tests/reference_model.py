"""A second model of a step, written from the rules alone: slow, plain, and sharing no code with the first.

Actions are keyed by (kind, stage, micro-batch), the update of a rank by ("U", position, -1), messages by (what, from
stage, to stage, micro-batch) where what is "output" or "gradient". Every time is looked up in a dictionary; whatever
can be computed is, again and again, until nothing can.
"""

from collections import defaultdict
from dataclasses import dataclass

from gpipe_sim.plan.orders import SCHEDULES

PARTS = ("parameters", "optimizer", "gradients", "inputs", "activations", "workspace", "buffers")
STATES = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adam": 2}
WORD = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


class CannotFinishError(Exception):
    """Something waits for ever."""


@dataclass
class Rules:
    """All that the times of a step depend on."""

    rows: list
    """Position -> keys of its actions in their order, R and U included."""
    position: list
    """Of each stage."""
    seconds: dict
    """Of each action."""
    overhead: float
    """Before each action."""
    occupancy: dict
    """Of each message."""
    latency: dict
    """Of each message."""
    routes: list
    """Pairs of stages between which something travels."""
    window: int | None
    blocking: bool
    on_demand: bool


@dataclass
class Times:
    """When everything happens."""

    taken: dict
    start: dict
    end: dict
    posted: dict
    leaves: dict
    """When a message starts to occupy its link."""
    arrival: dict
    sender: dict
    """Message -> action."""
    taker: dict
    """Message -> action."""


def messages(rules):
    """Who sends and who takes each message between two ranks."""
    actions = {key for row in rules.rows for key in row}
    microbatches = sorted({m for kind, _, m in actions if kind == "F"})
    sender, taker = {}, {}
    for here, there in rules.routes:
        if rules.position[here] == rules.position[there]:
            continue
        for m in microbatches:
            sender["output", here, there, m] = ("F", here, m)
            taker["output", here, there, m] = ("F", there, m)
            sender["gradient", there, here, m] = backward_of(actions, there, m)
            waits = backward_of(actions, here, m)
            if rules.on_demand and ("R", here, m) in actions:
                waits = ("R", here, m)
            taker["gradient", there, here, m] = waits
    return sender, taker


def backward_of(actions, stage, m):
    """The action that makes the gradients of a stage's inputs."""
    return ("B", stage, m) if ("B", stage, m) in actions else ("I", stage, m)


def channel_of(message):
    return message[:3]


def times(rules):
    """Start and end of every action, arrival of every message."""
    sender, taker = messages(rules)
    place = {key: (p, i) for p, row in enumerate(rules.rows) for i, key in enumerate(row)}
    sent_by, taken_by, wires, channels = (defaultdict(list) for _ in range(4))
    for message in sender:
        sent_by[sender[message]].append(message)
        taken_by[taker[message]].append(message)
        channels[channel_of(message)].append(message)
        wires[place[sender[message]][0], place[taker[message]][0]].append(message)

    before_on_channel, before_on_wire, posts = {}, {}, {}
    for carried in channels.values():
        in_order_of_sending = sorted(carried, key=lambda message: place[sender[message]])
        before_on_channel.update(zip(in_order_of_sending[1:], in_order_of_sending, strict=False))
        in_order_of_taking = sorted(carried, key=lambda message: place[taker[message]])
        for turn, message in enumerate(in_order_of_taking):
            if rules.window is not None and turn >= rules.window:
                posts[message] = taker[in_order_of_taking[turn - rules.window]]
    for carried in wires.values():
        if len({channel_of(message) for message in carried}) > 1:
            in_turn = sorted(carried, key=lambda message: (place[sender[message]], message[2]))
            before_on_wire.update(zip(in_turn[1:], in_turn, strict=False))

    taken, start, end, wire, posted, leaves, free, arrival = ({} for _ in range(8))

    def try_action(key):
        p, i = place[key]
        if any(message not in arrival for message in taken_by[key]):
            return False
        rank_free = 0.0
        if i > 0:
            before = rules.rows[p][i - 1]
            if before not in end:
                return False
            rank_free = end[before]
            if rules.blocking:
                if any(message not in arrival for message in sent_by[before]):
                    return False
                rank_free = max([rank_free, *(arrival[message] for message in sent_by[before])])
        taken[key] = max([rank_free, *(arrival[message] for message in taken_by[key])])
        start[key] = taken[key] + rules.overhead
        end[key] = start[key] + rules.seconds[key]
        return True

    def try_turn(message):
        if sender[message] not in end:
            return False
        turn = end[sender[message]]
        if message in before_on_wire:
            if before_on_wire[message] not in wire:
                return False
            turn = max(turn, wire[before_on_wire[message]])
        wire[message] = turn + rules.occupancy[message]
        return True

    def try_message(message):
        if message not in wire:
            return False
        begin = end[sender[message]]
        if message in before_on_wire:
            begin = max(begin, wire[before_on_wire[message]])
        if message in before_on_channel:
            if before_on_channel[message] not in free:
                return False
            begin = max(begin, free[before_on_channel[message]])
        posted[message] = 0.0
        if message in posts:
            if posts[message] not in taken:
                return False
            posted[message] = taken[posts[message]]
        leaves[message] = max(begin, posted[message])
        free[message] = leaves[message] + rules.occupancy[message]
        arrival[message] = free[message] + rules.latency[message]
        return True

    progress = True
    while progress:
        progress = False
        for key in place:
            progress |= key not in end and try_action(key)
        for message in sender:
            progress |= message not in wire and try_turn(message)
            progress |= message not in arrival and try_message(message)
    if len(end) < len(place) or len(arrival) < len(sender):
        waiting = sorted(set(place) - set(end))
        raise CannotFinishError(f"{waiting} wait for ever")
    return Times(taken, start, end, posted, leaves, arrival, sender, taker)


# --- a plan's figures ------------------------------------------------------------------------------------------------


def is_recomputed(plan, stage, m):
    mode = plan.checkpoint[stage]
    return mode == "always" or (mode == "except_last" and m < plan.num_microbatches - 1)


def rows_of(plan):
    """What each position does: the order, an R directly before the B or I that needs it, an update at the end."""
    M, positions = plan.num_microbatches, plan.positions
    K = max(positions) + 1
    order = plan.order
    if order is None:
        v = len(positions) // K
        order = [SCHEDULES[plan.schedule].order(p, K, v, M, plan.backward) for p in range(K)]
    rows = []
    for position, actions in enumerate(order):
        row = []
        for kind, stage, m in actions:
            if kind in "BI" and is_recomputed(plan, stage, m):
                row.append(("R", stage, m))
            row.append((kind, stage, m))
        rows.append([*row, ("U", position, -1)])
    return rows


def samples_of(plan):
    """The first N mod M micro-batches hold one sample more."""
    N, M = plan.scenario.batch, plan.num_microbatches
    return [N // M + (1 if m < N % M else 0) for m in range(M)]


def layers_of(plan, stage):
    first = sum(plan.balance[:stage])
    return range(first, first + plan.balance[stage])


def costs_of(plan, column, stage, m):
    """Of each layer of a stage."""
    by_layer = getattr(plan.profile.at(samples_of(plan)[m]), column)
    return [float(by_layer[layer]) for layer in layers_of(plan, stage)]


def rules_of(plan):
    seconds = {}
    columns = {"F": "forward_s", "R": "forward_s", "B": "backward_s", "I": "backward_inputs_s"}
    columns["W"] = "backward_weights_s"
    rows = rows_of(plan)
    cluster = plan.scenario.cluster

    def slowdown(stage):
        return cluster.slowdown.get(plan.placement[stage], 1.0)

    for row in rows:
        for kind, stage, m in row:
            if kind == "U":
                held = [s for s, position in enumerate(plan.positions) if position == stage]
                seconds[kind, stage, m] = sum(
                    sum(float(plan.profile.optimizer_s[layer]) for layer in layers_of(plan, s)) * slowdown(s)
                    for s in held
                )
            else:
                seconds[kind, stage, m] = sum(costs_of(plan, columns[kind], stage, m)) * slowdown(stage)
    occupancy, latency = {}, {}
    for edge in range(len(plan.balance) - 1):
        link = cluster.links.get(edge) or cluster.link
        for m in range(plan.num_microbatches):
            for message in (("output", edge, edge + 1, m), ("gradient", edge + 1, edge, m)):
                occupancy[message] = costs_of(plan, "output_bytes", edge, m)[-1] / link.bandwidth
                latency[message] = plan.profile.hop_overhead_s + link.latency
    return Rules(
        rows=rows,
        position=list(plan.positions),
        seconds=seconds,
        overhead=plan.profile.action_overhead_s,
        occupancy=occupancy,
        latency=latency,
        routes=[(edge, edge + 1) for edge in range(len(plan.balance) - 1)],
        window=plan.window,
        blocking=not cluster.overlap,
        on_demand=plan.recompute == "on_demand",
    )


# --- figures of a step -----------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """As `StepMetrics` has them; lists are in ascending order of ranks."""

    step_time: float
    pipeline_time: float
    longest_rank_span: float
    busy: list


def figures(plan, rows, start, end):
    first = {p: start[row[0]] for p, row in enumerate(rows)}
    last_backward = {p: max(end[key] for key in row if key[0] in "BW") for p, row in enumerate(rows)}
    return Figures(
        step_time=max(end[row[-1]] for row in rows) - min(first.values()),
        pipeline_time=max(last_backward.values()) - min(first.values()),
        longest_rank_span=max(last_backward[p] - first[p] for p in first),
        busy=[sum(end[key] - start[key] for key in rows[p] if key[0] != "U") for p in in_order_of_ranks(plan)],
    )


def in_order_of_ranks(plan):
    """Positions, by the number of the rank there."""
    rank = dict(zip(plan.positions, plan.placement, strict=True))
    return sorted(rank, key=lambda position: rank[position])


# --- memory ----------------------------------------------------------------------------------------------------------


def workspaces(plan, stage, m, first_gradient):
    """Kind -> the highest point inside that action, beyond what the other parts hold meanwhile."""

    def cost(column):
        return costs_of(plan, column, stage, m)

    num_stages = len(plan.balance)
    saved, output = cost("saved_bytes"), cost("output_bytes")
    parameters = [float(plan.profile.parameter_bytes[layer]) for layer in layers_of(plan, stage)]
    gradient = parameters  # one of the same size for each weight
    n = len(saved)
    entering = costs_of(plan, "output_bytes", stage - 1, m)[-1] if stage > 0 else 0.0
    out_of = [entering, *output[:-1]]  # the gradient that leaves each layer
    into = list(output)  # the gradient that enters each layer
    if stage < num_stages - 1:
        into[-1] = 0.0  # among the buffers until the backward has ended
    found = {}
    found["F"] = max(sum(saved[: i + 1]) + cost("workspace_forward_bytes")[i] for i in range(n)) - sum(saved)
    found["R"] = found["F"]
    no_grad = cost("workspace_no_grad_bytes")
    found["F without gradients"] = max((output[i - 1] if i else 0.0) + no_grad[i] + output[i] for i in range(n))
    name = "workspace_backward_bytes" if first_gradient else "workspace_accumulate_bytes"
    extra = cost(name)
    found["B"] = (
        max(
            sum(saved[: i + 1])
            + into[i]
            + max(out_of[i] + gradient[i] + extra[i], 0.0)  # before it needs the most, what entered is there
            + (sum(gradient[i + 1 :]) if first_gradient else 0.0)
            for i in range(n)
        )
        - sum(saved)
    )
    if plan.profile.splits:
        kept, extra = cost("kept_bytes"), cost("workspace_inputs_bytes")
        found["I"] = max(
            sum(saved) + sum(kept[i + 1 :]) - sum(saved[i + 1 :]) + into[i] + max(out_of[i] + extra[i], 0.0)
            for i in range(n)
        ) - sum(saved)
        name = "workspace_weights_bytes" if first_gradient else "workspace_weights_accumulate_bytes"
        extra = cost(name)
        found["W"] = max(
            sum(kept[: i + 1]) + max(gradient[i] + extra[i], 0.0) + (sum(gradient[i + 1 :]) if first_gradient else 0.0)
            for i in range(n)
        ) - sum(kept)
    return {kind: max(value, 0.0) for kind, value in found.items()}


def holdings(plan, rows, at):
    """(position, part, from, to, bytes) of everything that is held for a part of the step."""
    S, M = len(plan.balance), plan.num_microbatches
    position = plan.positions
    start, end = at.start, at.end
    held = []
    for row_position, row in enumerate(rows):
        update = row[-1]
        for stage in range(S):
            if position[stage] != row_position:
                continue
            makers = [key for key in row if key[0] in "BW" and key[1] == stage]
            gradients = sum(float(plan.profile.parameter_bytes[layer]) for layer in layers_of(plan, stage))
            held.append((row_position, "gradients", end[makers[0]], end[update], gradients))
            for key in row:
                if key[1] != stage or key[0] == "U":
                    continue
                kind, _, m = key
                dropped = kind == "F" and is_recomputed(plan, stage, m)
                amounts = workspaces(plan, stage, m, first_gradient=key == makers[0])
                amount = amounts["F without gradients" if dropped else kind]
                held.append((row_position, "workspace", start[key], end[key], amount))
    for stage in range(S):
        p = position[stage]
        for m in range(M):
            split = ("I", stage, m) in end
            backward, last = (("I", stage, m), ("W", stage, m)) if split else (("B", stage, m),) * 2
            made = ("R" if is_recomputed(plan, stage, m) else "F", stage, m)
            saved = sum(costs_of(plan, "saved_bytes", stage, m))
            held.append((p, "activations", start[made], end[backward], saved))
            if split:
                kept = sum(costs_of(plan, "kept_bytes", stage, m))
                held.append((p, "activations", end[backward], end[last], kept))
            if stage > 0:
                entering = costs_of(plan, "output_bytes", stage - 1, m)[-1]
                message, back = ("output", stage - 1, stage, m), ("gradient", stage, stage - 1, m)
                if message in at.arrival:
                    held.append((p, "buffers", at.posted[message], at.arrival[message], entering))
                    held.append((p, "inputs", at.arrival[message], end[backward], entering))
                    held.append((p, "buffers", end[backward], at.arrival[back], entering))
                else:
                    if is_recomputed(plan, stage - 1, m):
                        held.append((p, "inputs", end["F", stage - 1, m], end[backward], entering))
                    before = ("I" if ("I", stage - 1, m) in end else "B", stage - 1, m)
                    held.append((p, "buffers", end[backward], end[before], entering))
            if stage < S - 1:
                leaving = costs_of(plan, "output_bytes", stage, m)[-1]
                message, back = ("output", stage, stage + 1, m), ("gradient", stage + 1, stage, m)
                if message in at.arrival:
                    if is_recomputed(plan, stage, m):  # else it is among the activations
                        held.append((p, "buffers", end["F", stage, m], at.arrival[message], leaving))
                    known = max(at.posted[back], end["F", stage, m])  # what the gradient looks like
                    held.append((p, "buffers", known, end[backward], leaving))
    return held


def always_held(plan, position):
    """Part -> bytes, throughout the step."""
    word, states = WORD[plan.profile.dtype], STATES[plan.scenario.optimizer]
    is_plain = word >= 4 or plan.scenario.precision == "pure"
    per_parameter = word * states if is_plain else 4 + 4 * states
    constant = dict.fromkeys(PARTS, 0.0)
    for stage, where in enumerate(plan.positions):
        if where == position:
            weights = sum(float(plan.profile.parameter_bytes[layer]) for layer in layers_of(plan, stage))
            constant["parameters"] += weights
            constant["optimizer"] += weights / word * per_parameter
            if stage == 0:
                constant["inputs"] += plan.profile.input_bytes * plan.scenario.batch
    return constant


def memory(plan, rows, at):
    """For each rank, ascending: [(time, {part: bytes})] wherever something changes, and at 0."""
    held = holdings(plan, rows, at)
    curves = []
    for position in in_order_of_ranks(plan):
        mine = [holding for holding in held if holding[0] == position]
        moments = sorted({0.0, *(moment for holding in mine for moment in holding[2:4])})
        curve = []
        for now in moments:
            parts = always_held(plan, position)
            for _, part, begin, until, amount in mine:
                if begin <= now < until:
                    parts[part] += amount
            curve.append((now, parts))
        curves.append(curve)
    return curves


def peak(curve):
    return max(sum(parts.values()) for _, parts in curve)
