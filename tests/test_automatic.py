"""Orders that are made for given times: they keep the rules and the limit, and are never slower than the named ones."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_walk import walk
from test_orders import ZERO_BUBBLE

from gpipe_sim.plan.automatic import MadeOrder, Workload, make_order
from gpipe_sim.plan.order_file import order_text, read_order
from gpipe_sim.plan.orders import SCHEDULES, Pattern, position_of


def equal_stages(pattern: Pattern, K: int, v: int, M: int, seconds=(1.0, 1.0, 1.0), delay_s=0.0, **others) -> Workload:
    """Equal stages that hold one byte each from F to W."""
    S = K * v
    positions = tuple(position_of(pattern, stage, K) for stage in range(S))
    delays = tuple(delay_s if here != there else 0.0 for here, there in pairwise(positions))
    forward_s, inputs_s, weights_s = ((value,) * S for value in seconds)
    given = {
        "positions": positions,
        "num_microbatches": M,
        "forward_s": forward_s,
        "inputs_s": inputs_s,
        "weights_s": weights_s,
        "may_split": True,
        "forward_delay_s": delays,
        "backward_delay_s": delays,
        "held_bytes": (1.0,) * S,
        "weights_bytes": (1.0,) * S,
        "limit_bytes": (inf,) * K,
    }
    return Workload(**given | others)


@st.composite
def workloads(draw) -> Workload:
    """Any placement, or one that has named orders; uneven times, and a limit from the least that is needed on."""
    K, M = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    pattern, v = draw(st.sampled_from([("in_order", 1), ("looped", 2), ("looped", 3), ("v", 2), (None, 1)]))
    if pattern is None:
        others = draw(st.lists(st.integers(0, K - 1), max_size=4))
        positions = tuple(draw(st.permutations([*range(K), *others])))
    else:
        positions = tuple(position_of(pattern, stage, K) for stage in range(K * v))
    S = len(positions)

    def values(of, size):
        return tuple(draw(st.lists(of, min_size=size, max_size=size)))

    seconds, sizes = st.sampled_from([0.0, 0.5, 1.0, 1.3, 2.0]), st.sampled_from([0.0, 1.0, 2.0, 5.0])
    delays = [values(seconds, S - 1) for _ in range(2)]
    local = [here == there for here, there in pairwise(positions)]
    work = Workload(
        positions=positions,
        num_microbatches=M,
        forward_s=values(seconds, S),
        inputs_s=values(seconds, S),
        weights_s=values(seconds, S),
        may_split=draw(st.booleans()),
        forward_delay_s=tuple(0.0 if same else delay for same, delay in zip(local, delays[0], strict=True)),
        backward_delay_s=tuple(0.0 if same else delay for same, delay in zip(local, delays[1], strict=True)),
        held_bytes=values(sizes, S),
        weights_bytes=values(sizes, S),
        limit_bytes=(inf,) * K,
        whole_s=values(seconds, S) if draw(st.booleans()) else (),
    )
    room = values(st.sampled_from([0.0, 1.0, 4.0, 10.0, inf]), K)
    return replace(work, limit_bytes=tuple(work.least_bytes(rank) + room[rank] for rank in range(K)))


def peak_bytes(work: Workload, order) -> float:
    """F holds from its beginning; at the end of I what W needs takes the place of it."""
    held = most = 0.0
    for kind, stage, _ in order:
        before, after = work.held_bytes[stage], work.weights_bytes[stage]
        held += {"F": before, "I": max(after - before, 0), "W": 0, "B": 0}[kind]
        most = max(most, held)
        held -= {"F": 0, "I": max(before - after, 0), "W": after, "B": before}[kind]
    assert held == 0
    return most


def walked(work: Workload, orders):
    seconds = {"F": work.forward_s, "I": work.inputs_s, "W": work.weights_s}
    seconds["B"] = work.whole_s or tuple(map(sum, zip(work.inputs_s, work.weights_s, strict=True)))

    def latency(sender: int, taker: int) -> float:
        return work.forward_delay_s[sender] if sender < taker else work.backward_delay_s[taker]

    return walk(orders, lambda kind, stage: seconds[kind][stage], latency)


def check(work: Workload, made: MadeOrder) -> None:
    cells = {(stage, m) for stage in range(work.num_stages) for m in range(work.num_microbatches)}
    actions = [action for order in made.orders for action in order]
    of_kind = {kind: [(s, m) for k, s, m in actions if k == kind] for kind in "FBIW"}
    assert all(work.positions[stage] == rank for rank, order in enumerate(made.orders) for _, stage, _ in order)
    assert sorted(of_kind["F"]) == sorted(of_kind["B"] + of_kind["I"]) == sorted(cells)
    assert sorted(of_kind["W"]) == sorted(of_kind["I"])
    assert work.may_split or not of_kind["I"]
    step = walked(work, made.orders)
    assert step.end == pytest.approx(made.end_s, abs=1e-9)
    assert max(step.spans) == pytest.approx(made.longest_span_s, abs=1e-9)
    assert [peak_bytes(work, order) for order in made.orders] == list(made.peak_bytes)
    assert all(peak <= limit for peak, limit in zip(made.peak_bytes, work.limit_bytes, strict=True))


@given(workloads(), st.sampled_from(["end", "longest_span"]))
@settings(max_examples=150)
def test_a_made_order_can_be_run_and_keeps_the_limit(work, goal):
    check(work, make_order(work, goal=goal, num_evaluations=60))


@given(workloads())
@settings(max_examples=100)
def test_no_named_order_that_keeps_the_limit_is_faster(work):
    made = make_order(work, num_evaluations=60)
    v, rest = divmod(work.num_stages, work.num_ranks)
    for schedule in SCHEDULES.values():
        if rest or schedule.refuses(work.num_ranks, v, work.num_microbatches) or (schedule.splits > work.may_split):
            continue
        if any(position_of(schedule.pattern, s, work.num_ranks) != p for s, p in enumerate(work.positions)):
            continue
        for backward in ("reverse", "fifo"):
            orders = schedule.orders(work.num_ranks, v, work.num_microbatches, backward)
            if all(peak_bytes(work, order) <= limit for order, limit in zip(orders, work.limit_bytes, strict=True)):
                assert made.end_s <= walked(work, orders).end + 1e-9, schedule.name


def test_an_order_that_is_given_is_a_start():
    work = equal_stages("in_order", 3, 1, 4, limit_bytes=(4.0,) * 3)
    unusual = SCHEDULES["zb_h2"].orders(3, 1, 4)
    made = make_order(work, starts=[("mine", unusual)], num_evaluations=0)
    assert made.end_s <= walked(work, unusual).end


def test_a_made_order_is_written_to_a_file_and_read_again():
    made = make_order(equal_stages("v", 3, 2, 5, seconds=(1.0, 1.3, 0.6), limit_bytes=(4.0,) * 3))
    assert read_order(order_text(made.orders), "auto.csv").orders == made.orders


def test_the_same_order_is_made_again():
    work = equal_stages("v", 3, 2, 6, seconds=(1.0, 1.3, 0.6), delay_s=0.2, limit_bytes=(5.0,) * 3)
    assert make_order(work) == make_order(work)


def test_more_memory_is_not_slower_and_a_split_is_not_either():
    ends = [make_order(equal_stages("v", 4, 2, 8, limit_bytes=(limit,) * 4)).end_s for limit in (3.0, 5.0, 8.0, inf)]
    assert ends == sorted(ends, reverse=True)
    whole = make_order(equal_stages("v", 4, 2, 8, may_split=False, limit_bytes=(8.0,) * 4))
    assert ends[2] < whole.end_s


def test_without_a_limit_the_last_rank_to_begin_never_waits():
    """No order ends before (K-1) forwards and the work of one rank."""
    for pattern, v in (("in_order", 1), ("looped", 2), ("v", 2)):
        made = make_order(equal_stages(pattern, 4, v, 12))
        assert made.end_s == pytest.approx(3 * v * 12 + 3)


def test_a_rank_that_cannot_hold_one_micro_batch_is_named():
    with pytest.raises(ValueError, match="rank 1 holds 2 bytes of one micro-batch, its limit is 1"):
        make_order(equal_stages("looped", 2, 2, 4, limit_bytes=(2.0, 1.0)))


# --- published figures -----------------------------------------------------------------------------------------------

AUTOMATIC = {
    # model, M: bubble rates of ZB-1p and ZB-2p
    ("1.5B", 24): (0.1585, 0.0433),
    ("1.5B", 32): (0.1242, 0.0039),
    ("1.5B", 64): (0.0674, 0.0026),
    ("6.2B", 24): (0.1323, 0.0029),
    ("6.2B", 32): (0.1045, 0.0022),
    ("6.2B", 64): (0.0554, 0.0010),
}
"""Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, Table 5: what its own search found with the memory of
p and of 2p micro-batches."""

HELD_FOR_WEIGHTS = {"1.5B": 32 / (34 + 5 * 24 * 1024 / 2304), "6.2B": 32 / (34 + 5 * 32 * 1024 / 4096)}
"""Of what is held from F to I, the share that is held from I to W: 32 of 34 + 5 a s / h, with a heads, s tokens and
width h (the same, Table 1)."""


@pytest.mark.parametrize(("model", "M"), AUTOMATIC)
@pytest.mark.parametrize("times", [1, 2])
def test_the_search_of_zero_bubble_finds_nothing_better(model, M, times):
    (forward, inputs, weights, communication), _ = ZERO_BUBBLE[model, M]
    work = equal_stages(
        "in_order",
        8,
        1,
        M,
        seconds=(forward, inputs, weights),
        delay_s=communication,
        weights_bytes=(HELD_FOR_WEIGHTS[model],) * 8,
        limit_bytes=(8.0 * times,) * 8,
    )
    made = make_order(work, goal="longest_span")
    assert max(walked(work, made.orders).spans) == pytest.approx(made.longest_span_s)
    assert round(1 - M * (forward + inputs + weights) / made.longest_span_s, 4) <= AUTOMATIC[model, M][times - 1]
