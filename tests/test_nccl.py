"""NCCL's rules, without a GPU: the engine under a transport that has them, and a model of who waits for whom."""

import itertools
from random import Random

import pytest
from plans import layers, plan, random_order

torch = pytest.importorskip("torch", reason="execution needs torch: gpipe-planner[exec]")

from processes import run_ranks  # noqa: E402

from gpipe_exec.engine.course import plan_for_batch  # noqa: E402
from gpipe_exec.engine.progress import Machine, meet, refuse_deadlock, step_of  # noqa: E402
from gpipe_exec.engine.wires import Receive, communicators, posts_of, wire_of  # noqa: E402
from gpipe_exec.probe import exchange  # noqa: E402
from gpipe_sim.explain.predict import predict  # noqa: E402
from gpipe_sim.plan.program import DeadlockError, compile_program, completed, program_of  # noqa: E402

EVERY = (
    ("naive", 1),
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_gpipe", 2),
    ("interleaved_1f1b", 2),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zb_v", 2),
    ("dualpipe_v", 2),
)


def plan_of(schedule, v, K, M, **choices):
    S = K * v
    costs = layers([1.0] * S, [2.0] * S, weights=[1.0] * S)
    M = 1 if schedule == "naive" else M
    return plan(costs, M, **{"schedule": schedule, "stages": S, "stages_per_rank": v, "window": 2} | choices)


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [2, 3, 4])
def test_every_schedule_ends_under_nccls_rules_and_is_exact(K):
    assert "36 plans are exact" in run_ranks(K, "nccl.py")


@pytest.mark.parametrize("way", ["cold", "unordered", "late"])
def test_it_hangs_under_nccls_rules_without_the_engines_care(way):
    """Communicators made before, their order, and a recorder that waits for the device before a receive is on it."""
    assert "hangs" in run_ranks(2, "nccl.py", NCCL_WITHOUT=way)


@pytest.mark.parametrize(("D", "K"), [(2, 2), (3, 1)])
def test_replicas_shards_and_tied_weights_end_under_nccls_rules_and_are_exact(D, K, tmp_path):
    """In a world that has nothing but the device's backend, beside which numbers go from host to host."""
    assert f"plans of {D} replicas are exact" in run_ranks(
        D * K, "replicas.py", K, tmp_path, GPIPE_TEST_BACKEND="nccl_rules"
    )


# --- the model -------------------------------------------------------------------------------------------------------


def refuse_cycles(schedule, v, num_microbatches):
    """Of K up to 8: the host ahead of its device or computing itself, one or two receives begun ahead, in turns."""
    for K in range(2, 9):
        largest = plan_of(schedule, v, K, 16)
        for M in [M for M in num_microbatches if M <= largest.num_microbatches]:
            program = program_of(plan_for_batch(largest, M))
            assert program.num_microbatches == M
            assert step_of(program, 1 + M % 2, host_computes=(K + M) % 2 == 0).stuck() == []


@pytest.mark.parametrize(("schedule", "v"), EVERY)
def test_no_step_under_nccls_rules_waits_for_itself(schedule, v):
    """Some of the grid; all of it is searched by `make fuzz`, below."""
    refuse_cycles(schedule, v, (1, 2, 3, 5, 8, 16))


@pytest.mark.search
@pytest.mark.parametrize(("schedule", "v"), EVERY)
def test_no_step_of_the_whole_grid_under_nccls_rules_waits_for_itself(schedule, v):
    refuse_cycles(schedule, v, range(1, 17))


def test_no_order_from_a_file_under_nccls_rules_waits_for_itself_wherever_stages_are():
    random = Random(0)
    for _ in range(20):
        K, M = random.randint(2, 6), random.randint(1, 6)
        positions = [*range(K), *(random.randrange(K) for _ in range(random.randint(0, 8)))]
        random.shuffle(positions)
        again = torch.randint(2, (len(positions), M)).bool().numpy()
        on_demand = random.random() < 0.5
        order = completed(random_order(positions, M, random), again)
        program = compile_program(order, positions, on_demand=on_demand)
        for window in (1, 2, None):
            assert step_of(program, window, num_steps=2).stuck() == []
            assert step_of(program, window, host_computes=True).stuck() == []


@pytest.mark.parametrize(("schedule", "K"), [("interleaved_1f1b", 3), ("zb_h2", 4), ("zb_v", 3), ("dualpipe_v", 4)])
def test_a_first_step_under_nccls_rules_waits_for_itself_where_communicators_are_made_at_first_use(schedule, K):
    v = dict(EVERY)[schedule]
    assert step_of(program_of(plan_of(schedule, v, K, K)), 2, warm=False).stuck()


def test_blocking_senders_under_nccls_rules_wait_for_each_other_just_where_the_simulator_says_so():
    found = set()
    for (schedule, v), (K, M), window in itertools.product(EVERY, ((2, 4), (3, 5), (4, 4)), (1, "all")):
        planned = plan_of(schedule, v, K, M, window=window, cluster={"overlap": False})
        try:
            predict(planned)
            refuse_deadlock(program_of(planned), planned.window, blocking=True)
            found.add("ends")
        except DeadlockError:
            found.add("refused")
            with pytest.raises(DeadlockError, match="cannot finish"):
                refuse_deadlock(program_of(planned), planned.window, blocking=True)
    assert found == {"ends", "refused"}


def replicas_of(schedule, v, K, M, D, shard="none"):
    return program_of(plan_of(schedule, v, K, M, replicas=D, shard=shard, batch=D * (1 if schedule == "naive" else M)))


@pytest.mark.parametrize(("schedule", "v"), EVERY)
def test_no_step_of_replicas_and_shards_under_nccls_rules_waits_for_itself(schedule, v):
    """Their sums beside the backwards or after them, their gathers, tied weights, the loss told to all, and a recorder
    that waits for its device."""
    turns = itertools.cycle(itertools.product((True, False), (True, False), ((), (0, -1))))
    for K, M, D, shard in itertools.product((2, 3, 4), (1, 2, 4), (2, 3), ("none", "optimizer", "parameters")):
        host_computes, early_sums, tied = next(turns)
        machine = step_of(
            replicas_of(schedule, v, K, M, D, shard),
            1 + M % 2,
            replicas=D,
            tied=[range(K)[end] for end in tied],
            host_computes=host_computes,
            early_sums=early_sums,
            records=True,
            num_steps=2,
        )
        assert machine.stuck() == []


def test_replicas_that_sum_in_other_orders_wait_for_each_other_under_nccls_rules():
    """Which is why replicas whose shares differ, and so perhaps their orders, sum at the end."""
    machine = Machine()
    for replica, stages in enumerate(((0, 1), (1, 0))):
        for stage in stages:
            machine.add(str(stage), ("alike", replica))
    first, second = machine._streams.values()
    meet(first[0], second[1])
    meet(first[1], second[0])
    assert len(machine.stuck()) == 2


# --- order and communicators -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "v"), EVERY)
def test_a_chain_needs_four_nccl_communicators_and_no_rank_has_two_wires_on_one(schedule, v):
    for K in range(2, 9):
        numbers = communicators(program_of(plan_of(schedule, v, K, 4)))
        ends = [(number, rank) for wire, number in numbers.items() for rank in wire]
        assert len(ends) == len(set(ends))
        is_ring = schedule.startswith("interleaved") and K % 2 == 1 and K > 2
        assert len(set(numbers.values())) <= (6 if is_ring else 4)


@pytest.mark.parametrize(("schedule", "v"), EVERY)
@pytest.mark.parametrize("in_order", [True, False])
def test_every_receive_is_begun_once_before_it_is_taken_and_a_gradients_after_its_output_was_sent(
    schedule, v, in_order
):
    planned = plan_of(schedule, v, 4, 6)
    program, M = program_of(planned), planned.num_microbatches
    for position in range(4):
        moments = {
            receive: moment
            for moment, receives in enumerate(posts_of(program, position, 2, in_order=in_order))
            for receive in receives
        }
        first = int(program.first[position])
        taken = [n for n in range(program.num_messages) if program.channels[n // M].receiver == position]
        assert len(moments) == len(taken)
        for message in taken:
            channel, m = message // M, int(program.microbatches[message])
            moment = moments[Receive(channel, m)]
            assert moment <= 2 * (program.taker[message] - first)
            if not program.channels[channel].is_forward:
                assert moment >= 2 * (program.at["F"][program.channels[channel].target, m] - first) + 2


def test_receives_of_an_nccl_wire_are_begun_in_the_order_of_its_sends():
    """Two channels from rank 0 to rank 1, whose messages are taken in another order than they are sent."""
    program = program_of(plan_of("interleaved_1f1b", 2, 2, 4))
    wire = wire_of(program.channels[0])
    begun = [r for receives in posts_of(program, 1, 2, in_order=True) for r in receives]
    assert len({receive.channel for receive in begun}) > 1
    sent = sorted(
        (int(program.sender[n]), Receive(n // 4, int(program.microbatches[n])))
        for n in range(program.num_messages)
        if wire_of(program.channels[n // 4]) == wire
    )
    assert begun == [receive for _, receive in sent]


# --- the probe -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [True, False])
def test_the_probes_order_ends_under_nccls_rules_and_the_one_for_tags_would_not(in_order):
    """A send and a wait stop the stream, a receive that is begun is in front of everything after it."""
    machine = Machine()
    made = {True: {}, False: {}}
    for is_first in (True, False):
        for part in exchange(is_first=is_first, in_order=in_order):
            if part != "receive":
                told = machine.add(part, ("host", is_first))
                made[is_first][part] = machine.add(part, ("wire", is_first), told)
            else:  # the compute stream waits for it, and what comes after waits for that
                machine.add(part, ("host", is_first), made[is_first]["begin to receive"])
    for is_first in (True, False):
        meet(made[is_first]["send"], made[not is_first]["begin to receive"])
    assert (machine.stuck() == []) is in_order
