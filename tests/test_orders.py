"""Named orders: every action once, none that waits for ever, and the figures that their papers print."""

from collections import Counter
from types import SimpleNamespace

import pytest
from order_walk import walk

from gpipe_sim.plan.orders import SCHEDULES, Schedule, position_of

BACKWARDS = ("reverse", "fifo")


def numbers(schedule: Schedule, most_ranks: int = 6, most_stages: int = 3, most_microbatches: int = 12):
    """All K, v and M that the schedule takes."""
    for K in range(1, most_ranks + 1):
        for v in range(1, most_stages + 1):
            for M in range(1, most_microbatches + 1):
                if schedule.refuses(K, v, M) is None:
                    yield K, v, M


def held(order) -> Counter:
    """For each stage, the micro-batches of which F has run and B or W has not, at most."""
    now: Counter = Counter()
    most: Counter = Counter()
    for kind, stage, _ in order:
        now[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
        most[stage] = max(most[stage], now[stage])
    return most


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_every_action_is_there_once_at_its_position(name, backward):
    schedule = SCHEDULES[name]
    for K, v, M in numbers(schedule):
        for position, order in enumerate(schedule.orders(K, v, M, backward)):
            stages = [s for s in range(v * K) if position_of(schedule.pattern, s, K) == position]
            cells = {(stage, microbatch) for stage in stages for microbatch in range(M)}
            by_kind = {kind: [(s, m) for k, s, m in order if k == kind] for kind in "FBIW"}
            assert len(stages) == v
            assert sorted(by_kind["F"]) == sorted(by_kind["B"] + by_kind["I"]) == sorted(cells)
            assert sorted(by_kind["W"]) == sorted(by_kind["I"])
            assert bool(by_kind["I"]) <= schedule.splits


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_no_order_waits_for_ever_and_bubbles_are_the_ideal_ones(name, backward):
    """Equal stages, free links, F = I = W; the walk fails where an order cannot finish."""
    schedule = SCHEDULES[name]
    for K, v, M in numbers(schedule):
        bubble = walk(schedule.orders(K, v, M, backward)).bubble(busy=3 * K * v * M)
        assert bubble == pytest.approx(schedule.bubble_ideal(K, v, M), abs=1e-12), (K, v, M)


@pytest.mark.parametrize("name", SCHEDULES)
def test_never_more_micro_batches_are_held_than_promised(name):
    schedule = SCHEDULES[name]
    for K, v, M in numbers(schedule):
        for position, order in enumerate(schedule.orders(K, v, M)):
            for stage, most in held(order).items():
                promised = schedule.in_flight(position, stage, K, v, M)
                exact = name != "interleaved_1f1b" or M % K == 0 or v == 1  # a group that is not full holds fewer
                assert most == promised if exact else most <= promised <= M, (K, v, M, stage)


def test_stages_sit_in_order_in_loops_or_there_and_back():
    assert [position_of("in_order", stage, 3) for stage in range(3)] == [0, 1, 2]
    assert [position_of("looped", stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [position_of("v", stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


def test_what_cannot_be_made_is_refused_with_a_reason():
    assert SCHEDULES["naive"].refuses(4, 1, 2) == "naive sends the whole batch at once, found 2 micro-batches"
    assert SCHEDULES["zb_v"].refuses(4, 1, 8) == "zb_v has 2 on each rank, found 1 stages per rank"
    assert SCHEDULES["interleaved_1f1b"].refuses(4, 0, 8) is not None
    assert SCHEDULES["dualpipe_v"].refuses(4, 2, 1) is None


# --- pictures --------------------------------------------------------------------------------------------------------


def written(name: str, position: int, K: int, M: int) -> str:
    schedule = SCHEDULES[name]
    return " ".join(f"{k}{m}" for k, _, m in schedule.order(position, K, schedule.stages_per_rank or 1, M, "fifo"))


def test_the_pictures_of_zero_bubble_are_what_is_made():
    assert [written("zb_h1", position, 3, 4) for position in range(3)] == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]
    assert written("zb_h2", 0, 3, 8).startswith("F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 F6 I2 W2")
    assert written("zb_h2", 1, 3, 8).startswith("F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1")
    assert written("zb_h2", 2, 3, 8).startswith("F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0")


def test_interleaved_1f1b_takes_groups_of_ranks_through_all_stages():
    order = SCHEDULES["interleaved_1f1b"].orders(2, 2, 4)[1]
    assert " ".join(map(str, order)) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"


def test_with_one_stage_on_each_rank_the_interleaved_ones_are_the_plain_ones():
    for plain, interleaved in (("gpipe", "interleaved_gpipe"), ("1f1b", "interleaved_1f1b")):
        assert SCHEDULES[plain].orders(4, 1, 6) == SCHEDULES[interleaved].orders(4, 1, 6)


# --- published figures -----------------------------------------------------------------------------------------------

ZERO_BUBBLE = {
    # model, M: (F, I, W and communication in ms), {schedule: bubble rate}
    ("1.5B", 24): ((18.522, 18.086, 9.337, 0.601), {"1f1b": 0.2431, "zb_h1": 0.1585, "zb_h2": 0.1083}),
    ("1.5B", 32): ((18.513, 18.086, 9.331, 0.626), {"1f1b": 0.1985, "zb_h1": 0.1242, "zb_h2": 0.0837}),
    ("1.5B", 64): ((18.546, 18.097, 9.321, 0.762), {"1f1b": 0.1240, "zb_h1": 0.0674, "zb_h2": 0.0444}),
    ("6.2B", 24): ((29.718, 29.444, 19.927, 0.527), {"1f1b": 0.2347, "zb_h1": 0.1323, "zb_h2": 0.0698}),
    ("6.2B", 32): ((29.802, 29.428, 19.530, 0.577), {"1f1b": 0.1898, "zb_h1": 0.1045, "zb_h2": 0.0559}),
    ("6.2B", 64): ((29.935, 29.621, 19.388, 0.535), {"1f1b": 0.1091, "zb_h1": 0.0554, "zb_h2": 0.0294}),
}
"""Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241: profiled times on eight stages (Table 9) and bubble
rates (Table 5). The rate is (cost - M (F+I+W)) / cost, the cost the longest time of a rank from its first action to its
last."""


@pytest.mark.parametrize(("model", "M"), ZERO_BUBBLE)
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2"])
def test_zero_bubbles_rates_follow_from_its_times(model, M, name):
    (forward, inputs, weights, communication), rates = ZERO_BUBBLE[model, M]
    seconds = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
    orders = SCHEDULES[name].orders(8, 1, M)
    cost = max(walk(orders, lambda kind, stage: seconds[kind], lambda sender, taker: communication).spans)
    assert round(1 - M * (forward + inputs + weights) / cost, 4) == rates[name]


@pytest.mark.parametrize(
    ("model", "v", "M", "rate"),
    [
        ("1.5B", 3, 24, 0.1055),
        ("1.5B", 3, 32, 0.0818),
        ("1.5B", 3, 64, 0.0443),
        ("6.2B", 4, 24, 0.0808),
        ("6.2B", 4, 32, 0.0628),
        ("6.2B", 4, 64, 0.0320),
    ],
)
def test_interleaved_1f1b_takes_what_zero_bubble_counts_and_one_communication_more_for_each_rank(model, v, M, rate):
    """Their rate of 1F1B-I follows a formula of which Megatron's order needs p more communications."""
    (forward, inputs, weights, communication), _ = ZERO_BUBBLE[model, M]
    p, work = 8, forward + inputs + weights
    counted = M * work + (p - 1) / v * work + (2 * (p * v - 1) - p) * communication
    assert round(1 - M * work / counted, 4) == rate
    seconds = {"F": forward / v, "B": (inputs + weights) / v}
    orders = SCHEDULES["interleaved_1f1b"].orders(p, v, M)
    cost = max(walk(orders, lambda kind, stage: seconds[kind], lambda sender, taker: communication).spans)
    assert cost == pytest.approx(counted + p * communication, rel=1e-12)


def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank():
    """(K-1)/(v M+K-1): Narayanan et al., arXiv 2104.04473, section 2.2."""
    for name in ("interleaved_gpipe", "interleaved_1f1b"):
        for K, v, M in ((4, 2, 8), (4, 3, 8), (3, 2, 7), (8, 4, 16)):
            bubble = walk(SCHEDULES[name].orders(K, v, M)).bubble(busy=3 * K * v * M)
            assert bubble == pytest.approx((K - 1) / (v * M + K - 1))


def overlapped(order, is_last: bool):
    """The pairs that DualPipe overlaps, as blocks: an F and the B directly after it, but for the last rank's first."""
    blocks, index, skip = [], 0, is_last
    while index < len(order):
        size = 2 if order[index][0] == "F" and order[index + 1][0] == "B" else 1
        if size == 2 and skip:
            size, skip = 1, False
        blocks.append(order[index : index + size])
        index += size
    return blocks


def dualpipe_seconds(K: int, M: int, seconds: dict[str, float], pair: float) -> float:
    """Of a step in which overlapped pairs begin when both can, take `pair` and end together."""
    orders = SCHEDULES["dualpipe_v"].orders(K, 2, M)
    blocks = [overlapped(order, position == K - 1) for position, order in enumerate(orders)]
    ends, free, gone_on = (
        {("B", 2 * K, m): 0.0 for m in range(M)} | {("F", -1, m): 0.0 for m in range(M)},
        [0.0] * K,
        True,
    )
    while gone_on:
        gone_on = False
        for rank in range(K):
            while blocks[rank]:
                block = blocks[rank][0]
                needs = [("F", s - 1, m) for k, s, m in block if k == "F"]
                needs += [need for k, s, m in block if k in "BI" for need in (("F", s, m), ("B", s + 1, m))]
                needs += [("B", s, m) for k, s, m in block if k == "W"]
                if any(need not in ends for need in needs):
                    break
                work = pair if len(block) == 2 else seconds[block[0][0]]
                free[rank] = max([free[rank], *(ends[need] for need in needs)]) + work
                ends |= {("B" if k == "I" else k, s, m): free[rank] for k, s, m in block}
                blocks[rank].pop(0)
                gone_on = True
    assert not any(blocks)
    return max(free)


@pytest.mark.parametrize("K", [2, 3, 4, 6])
@pytest.mark.parametrize("more", [0, 3])
def test_dualpipe_v_with_overlapped_pairs_has_the_published_bubble(K, more):
    """(PP/2-1)(F&B + B - 3W) of PP = 2K stages, deepseek-ai/DualPipe's README, where a pair takes as long as its parts
    and an F as long as an I. The total for any times is from formula.py of Victarry/PP-Schedule-Visualization."""
    M = 2 * K + more
    for W in (1.0, 0.5):
        pair = 1 + (1 + W)
        total = dualpipe_seconds(K, M, {"F": 1, "I": 1, "W": W, "B": 1 + W}, pair)
        assert total - 2 * M * pair == pytest.approx((K - 1) * (pair + (1 + W) - 3 * W))
    f, i, w, b, pair = 1.0, 1.2, 0.8, 2.0, 2.7
    total = (K - 1) * f + 2 * K * f + (2 * (M - K) - 1 + K - 1) * pair + (2 * K - 1) * i + w + 2 * b + f
    assert dualpipe_seconds(K, M, {"F": f, "I": i, "W": w, "B": b}, pair) == pytest.approx(total)


# --- the same orders in torch ----------------------------------------------------------------------------------------


def torch_orders(name: str, K: int, v: int, M: int) -> list[list[tuple[str, int, int]]]:
    """What torch's schedule of that name does on each rank. It asks its stages for their numbers only."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    numbers = {
        "group_size": K,
        "group_rank": 0,
        "num_stages": v * K,
        "is_first": True,
        "is_last": False,
        "submod": None,
    }
    made = getattr(schedules, name)([SimpleNamespace(**numbers, stage_index=stage) for stage in range(v)], M)
    return [
        [
            (part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in made.pipeline_order[rank]
            if action is not None
            for part in action.sub_actions or (action,)
        ]
        for rank in range(K)
    ]


@pytest.mark.parametrize(
    ("ours", "torchs", "v", "microbatches"),
    [
        ("gpipe", "ScheduleLoopedBFS", 1, (1, 4, 9)),
        ("interleaved_gpipe", "ScheduleLoopedBFS", 3, (1, 4, 9)),
        ("interleaved_1f1b", "ScheduleInterleaved1F1B", 2, (1, 2, 4, 8, 10, 12)),
        ("interleaved_1f1b", "ScheduleInterleaved1F1B", 3, (3, 5, 8, 10)),
        ("zb_h1", "ScheduleInterleavedZeroBubble", 1, (2, 4, 8, 12)),
        ("zb_v", "ScheduleZBVZeroBubble", 2, (1, 3, 8, 13)),
        ("dualpipe_v", "ScheduleDualPipeV", 2, (8, 9, 13)),
    ],
)
def test_torch_has_the_same_order(ours, torchs, v, microbatches):
    for M in microbatches:
        assert [list(order) for order in SCHEDULES[ours].orders(4, v, M)] == torch_orders(torchs, 4, v, M), M
