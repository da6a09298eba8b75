"""Orders from files: what torch writes is read, what we write torch reads, and every mistake is told at its cell."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_sim.base import limits
from gpipe_sim.base.files import InputError
from gpipe_sim.plan.actions import Action
from gpipe_sim.plan.order_file import order_text, read_order
from gpipe_sim.plan.orders import SCHEDULES


def problems(text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        read_order(text, "order.csv")
    return [str(problem) for problem in caught.value.problems]


@st.composite
def valid_orders(draw):
    """Any placement, any mix of whole and split backwards, in the order in which a random walk ran them."""
    num_ranks, M = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    others = draw(st.lists(st.integers(0, num_ranks - 1), max_size=4))
    positions = draw(st.permutations([*range(num_ranks), *others]))
    last = len(positions) - 1
    whole = draw(st.sets(st.tuples(st.integers(0, last), st.integers(0, M - 1))))
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    ready = [Action("F", 0, m) for m in range(M)]
    while ready:
        kind, stage, m = ready.pop(draw(st.integers(0, len(ready) - 1)))
        orders[positions[stage]].append(Action(kind, stage, m))

        def backward(stage, m=m):
            return Action("B" if (stage, m) in whole else "I", stage, m)

        if kind == "F":
            ready.append(Action("F", stage + 1, m) if stage < last else backward(stage))
        elif kind in "BI":
            ready += [backward(stage - 1)] if stage else []
            ready += [Action("W", stage, m)] if kind == "I" else []
    return orders


@given(valid_orders())
def test_what_is_written_is_read_again(orders):
    assert [list(order) for order in read_order(order_text(orders), "order.csv").orders] == orders


def test_every_named_order_is_written_and_read_again():
    for schedule in SCHEDULES.values():
        orders = schedule.orders(3, schedule.stages_per_rank or 2, schedule.most_microbatches or 7)
        read = read_order(order_text(orders), "order.csv")
        assert read.orders == orders
        assert read.splits == schedule.splits
        assert read.num_microbatches == (schedule.most_microbatches or 7)


def test_a_file_says_which_rank_holds_which_stage():
    read = read_order(order_text(SCHEDULES["zb_v"].orders(3, 2, 4)), "order.csv")
    assert read.positions == (0, 1, 2, 2, 1, 0)


def test_empty_cells_and_spaces_and_empty_lines_at_the_end_do_not_matter():
    assert read_order(" 0F0,, 0B0 ,\n\n\n", "order.csv").orders == ((Action("F", 0, 0), Action("B", 0, 0)),)


def test_overlapped_pairs_are_run_in_turn_and_communication_is_left_out_and_both_are_told():
    text = "0UNSHARD,0F0,0SEND_F0,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1F1,1B1\n"
    read = read_order(text, "order.csv")
    assert order_text(read.orders) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert read.notes == (
        "1 OVERLAP_F_B pairs are run in turn, the forward and the backward",
        "left out, since they follow from the other actions: 1 RECV_F, 1 REDUCE_GRAD, 1 SEND_F, 1 UNSHARD",
    )


# --- mistakes --------------------------------------------------------------------------------------------------------

EXPECTED = "expected a stage, one of F, B, I and W, and a micro-batch, such as 2F0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0,0X0,0B0", [f"order.csv:1:2: found '0X0', {EXPECTED}"]),
        ("0F0,0B0x", [f"order.csv:1:2: found '0B0x', {EXPECTED}"]),
        ("0F0,(0B0;0SEND_B0)OVERLAP_F_B", [f"order.csv:1:2: found '0SEND_B0' in an overlapped pair, {EXPECTED}"]),
        ("", ["order.csv:1: has no actions, expected a row of them for each rank"]),
        ("0F0,0B0\n\n1F0,1B0", ["order.csv:2: has no action, expected those of rank 1"]),
        ("0F0,0F0,0B0", ["order.csv:1:2: 0F0: is repeated, it is in cell 1:1 already, expected once"]),
        ("0F0", ["order.csv:1: 0B0: is missing, expected it or 0I0 and 0W0 on rank 0 after 0F0 in cell 1:1"]),
        ("0B0", ["order.csv:1: 0F0: is missing, expected on rank 0 before 0B0 in cell 1:1"]),
        ("0F0,0I0", ["order.csv:1: 0W0: is missing, expected on rank 0 after 0I0 in cell 1:2"]),
        ("0F0,0W0", ["order.csv:1: 0I0: is missing, expected on rank 0 before 0W0 in cell 1:2"]),
        ("0F0,0W0,0I0", ["order.csv:1:2: 0W0: comes before 0I0 in cell 1:3, expected after it"]),
        ("0B0,0F0", ["order.csv:1:1: 0B0: comes before 0F0 in cell 1:2, expected after it"]),
        (
            "0F0,0B0,0I0,0W0",
            [
                "order.csv:1:3: 0I0: 0B0 in cell 1:2 is the whole backward already, expected that or 0I0 and 0W0",
                "order.csv:1:4: 0W0: 0B0 in cell 1:2 is the whole backward already, expected that or 0I0 and 0W0",
            ],
        ),
        ("0F0,0B0,2F0,2B0", ["order.csv:1: stage 1 has no action, expected some of each from 0 to 2"]),
        ("0F0,0B0,0F2,0B2", ["order.csv:1: micro-batch 1 has no action, expected some of each from 0 to 2"]),
        (
            "0F0,0B0\n1F0,0F1,1B0,0B1,1F1,1B1",
            ["order.csv:2:2: 0F1: stage 0 is on rank 1 here and on rank 0 in cell 1:1, expected on one rank"],
        ),
    ],
)
def test_a_mistake_is_told_at_its_cell(text, expected):
    assert problems(text) == expected


def test_all_mistakes_are_told_at_once():
    assert len(problems("0F0,0F0,0W0\n1F0,1B0,1B0,1F1")) == 6


def test_who_waits_for_whom_is_told_for_every_rank_that_is_stuck():
    assert problems("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1") == [
        "order.csv:1:2: 0B0: the order cannot finish: rank 0 waits here for 1B0 in cell 2:3, which rank 1 has behind "
        "1F1 in cell 2:2",
        "order.csv:2:2: 1F1: the order cannot finish: rank 1 waits here for 0F1 in cell 1:3, which rank 0 has behind "
        "0B0 in cell 1:2",
    ]


def test_a_rank_that_waits_for_itself_is_told():
    (problem,) = problems("1F0,0F0,1B0,0B0")
    assert problem.endswith("rank 0 waits here for 0F0 in cell 1:2, which rank 0 has behind itself")


def test_numbers_without_bounds_are_refused_at_once():
    assert "stage 1 has no action" in problems("0F0,0B0,999999999F999999999")[0]
    assert "expected a stage" in problems("0F0," + "9" * 100 + "F0")[0]
    rows = "\n".join(f"{stage}F{stage}" for stage in range(3000))
    assert f"expected a product of at most {limits.CELLS}" in problems(rows)[0]


@given(st.text(alphabet='0123FBIW,;()\n"OVERLAP_x ', max_size=60))
def test_any_text_is_read_or_refused(text):
    try:
        assert read_order(text, "order.csv").orders
    except InputError as error:
        assert error.problems


# --- torch -----------------------------------------------------------------------------------------------------------


def loaded_by_torch(text: str, num_ranks: int, num_stages: int, M: int, path) -> list[list[str]]:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    path.write_text(text)
    stage = SimpleNamespace(group_size=num_ranks, group_rank=0, num_stages=num_stages, is_last=False)
    runtime = schedules._PipelineScheduleRuntime([stage], M)
    runtime._load_csv(str(path), format="compute_only")
    return [[str(action) for action in runtime.pipeline_order[rank]] for rank in range(num_ranks)]


def test_torch_loads_what_we_write(tmp_path):
    for name in ("zb_v", "dualpipe_v", "interleaved_1f1b"):
        orders = SCHEDULES[name].orders(4, 2, 9)
        found = loaded_by_torch(order_text(orders), 4, 8, 9, tmp_path / "order.csv")
        assert found == [[str(action) for action in order] for order in orders]


@given(valid_orders())
def test_torch_loads_any_order_that_we_read(tmp_path_factory, orders):
    read = read_order(order_text(orders), "order.csv")
    path = tmp_path_factory.getbasetemp() / "order.csv"
    found = loaded_by_torch(order_text(orders), len(orders), len(read.positions), read.num_microbatches, path)
    assert found == [[str(action) for action in order] for order in orders]


def test_we_read_what_torch_writes(tmp_path):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    numbers = {"group_size": 4, "group_rank": 0, "num_stages": 8, "is_last": False, "submod": None}
    made = schedules.ScheduleDualPipeV([SimpleNamespace(**numbers), SimpleNamespace(**numbers)], 10)
    for format in ("compute_only", "compute_comms"):
        made._dump_csv(str(tmp_path / "torch.csv"), format=format)
        read = read_order((tmp_path / "torch.csv").read_text(), "torch.csv")
        assert read.orders == SCHEDULES["dualpipe_v"].orders(4, 2, 10)
        assert "OVERLAP_F_B pairs are run in turn" in read.notes[0]
