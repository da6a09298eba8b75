"""Schedules as data: where stages sit, whether backwards are split, and what each rank does in which order.

K ranks hold S = v K stages, v each. A rank's place in its pipeline is its position, 0 to K-1:

    pattern    stages of K = 3 positions        position of stage s
    in_order   0 | 1 | 2                        s
    looped     0 3 | 1 4 | 2 5                  s mod K
    v          0 5 | 1 4 | 2 3                  s there, 2K-1-s back

An order is one position's forwards and backwards: F forward, B the whole backward, or its two halves, I for the inputs
and W for the weights (`actions` has the letters). Recomputation and updates are no part of it. What an order may do is
the same for all: F(s, m) needs F(s-1, m), B and I of (s, m) need F(s, m) and the B or I of (s+1, m), W needs its I.

No action needs one of another micro-batch. So an order that can finish still can when all actions of some
micro-batches are crossed out. This is how schedules that are published for some numbers of micro-batches are made for
all of them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gpipe_sim.plan.actions import Action, Letter
from gpipe_sim.scenario.schema import STAGES_PER_RANK, BackwardOrder

Pattern = Literal["in_order", "looped", "v"]
Order = Iterator[tuple[Letter, int, int]]
"""Kind, stage and micro-batch of each action of one position."""


def position_of(pattern: Pattern, stage: int, num_ranks: int) -> int:
    """The position that holds a stage."""
    if pattern == "in_order":
        return stage
    if pattern == "looped":
        return stage % num_ranks
    return stage if stage < num_ranks else 2 * num_ranks - 1 - stage


def naive(position: int, num_ranks: int, stages_per_rank: int, num_microbatches: int, backward: BackwardOrder) -> Order:
    """The whole batch through all stages at once: one device works, the others wait.

    rank 0  F0          B0
    rank 1     F0    B0
    rank 2       F0B0          bubble (K-1)/K
    """
    yield "F", position, 0
    yield "B", position, 0


def gpipe(position: int, num_ranks: int, stages_per_rank: int, num_microbatches: int, backward: BackwardOrder) -> Order:
    """All forwards, then all backwards, in reverse order of micro-batches as in the paper, or first in first out.

    rank 0  F0 F1 F2                B2 B1 B0
    rank 1     F0 F1 F2          B2 B1 B0
    rank 2        F0 F1 F2    B2 B1 B0        bubble (K-1)/(M+K-1)

    Huang et al., GPipe, arXiv 1811.06965.
    """
    return interleaved_gpipe(position, num_ranks, 1, num_microbatches, backward)


def one_forward_one_backward(
    position: int, num_ranks: int, stages_per_rank: int, num_microbatches: int, backward: BackwardOrder
) -> Order:
    """After K-1-p warm-up forwards, one forward and one backward in turn: at most K-p micro-batches are held.

    rank 0  F0 F1 F2       B0 F3 B1    B2    B3
    rank 1     F0 F1    B0 F2 B1 F3 B2    B3
    rank 2        F0 B0 F1 B1 F2 B2 F3 B3           bubble (K-1)/(M+K-1), first in first out

    Narayanan et al., PipeDream-Flush, arXiv 2006.09503.
    """
    ahead = min(num_ranks - 1 - position, num_microbatches)
    for microbatch in range(ahead):
        yield "F", position, microbatch
    for microbatch in range(num_microbatches):
        if microbatch + ahead < num_microbatches:
            yield "F", position, microbatch + ahead
        yield "B", position, microbatch


def interleaved_gpipe(
    position: int, num_ranks: int, stages_per_rank: int, num_microbatches: int, backward: BackwardOrder
) -> Order:
    """Breadth first: all forwards of a rank's first stage, then of its next; backwards from its last stage on.

    rank 0  0F0 0F1 2F0 2F1         2B1 2B0 0B1 0B0
    rank 1      1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0         bubble (K-1)/(v M+K-1), here v = 2 and a B as long as an F

    Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953.
    """
    stages = range(position, stages_per_rank * num_ranks, num_ranks)
    microbatches = range(num_microbatches)
    for stage in stages:
        for microbatch in microbatches:
            yield "F", stage, microbatch
    for stage in reversed(stages):
        for microbatch in reversed(microbatches) if backward == "reverse" else microbatches:
            yield "B", stage, microbatch


def interleaved_1f1b(
    position: int, num_ranks: int, stages_per_rank: int, num_microbatches: int, backward: BackwardOrder
) -> Order:
    """Groups of K micro-batches through all the stages of a rank, one forward and one backward in turn.

    The forwards of a rank with v = 2 stages a and z, and K = 2, are in the order

        aF0 aF1 zF0 zF1   aF2 aF3 zF2 zF3   ...         backwards likewise, with z before a

    and 2(K-1-p) + (v-1)K of them come before the turns begin. The bubble is (K-1)/(v M+K-1) if M is at least K.
    Where M is no multiple of K, the groups are larger, as equal as can be: the order is made for groups of the
    largest size, and the micro-batches that do not exist are crossed out. With one stage on each rank it is 1F1B,
    which has the same bubble and holds fewer micro-batches.

    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473, section 2.2.
    """
    K, v, M = num_ranks, stages_per_rank, num_microbatches
    if v == 1:
        return one_forward_one_backward(position, K, v, M, backward)
    return _interleaved(position, K, v, M)


def group_size(num_ranks: int, num_microbatches: int) -> int:
    """Micro-batches in the largest group of interleaved 1F1B: K if M is a multiple of it."""
    return -(-num_microbatches // max(1, num_microbatches // num_ranks))


def _interleaved(position: int, K: int, v: int, M: int) -> Order:
    size = group_size(K, M)
    num_groups = max(1, M // K)
    smaller, larger = divmod(M, num_groups)  # so many groups have one more than `smaller`
    starts = [group * smaller + min(group, larger) for group in range(num_groups + 1)]
    turns = [(part, member) for part in range(v) for member in range(size)]
    total = num_groups * size * v
    ahead = min(2 * (K - 1 - position) + (v - 1) * size, total)
    for index in range(total + ahead):
        if index < total:
            group, turn = divmod(index, size * v)
            part, member = turns[turn]
            if starts[group] + member < starts[group + 1]:
                yield "F", part * K + position, starts[group] + member
        if index >= ahead:
            group, turn = divmod(index - ahead, size * v)
            part, member = turns[turn]
            if starts[group] + member < starts[group + 1]:
                yield "B", (v - 1 - part) * K + position, starts[group] + member


def _handcrafted(position: int, num_microbatches: int, ahead: int, later: int) -> Order:
    """`ahead` forwards, then F and I in turn, and each W `later` micro-batches after its I."""
    M = num_microbatches
    for microbatch in range(min(ahead, M)):
        yield "F", position, microbatch
    for microbatch in range(M):
        if microbatch + ahead < M:
            yield "F", position, microbatch + ahead
        yield "I", position, microbatch
        if microbatch >= later:
            yield "W", position, microbatch - later
    for microbatch in range(max(M - later, 0), M):
        yield "W", position, microbatch


def zb_h1(position: int, num_ranks: int, stages_per_rank: int, num_microbatches: int, backward: BackwardOrder) -> Order:
    """1F1B with split backwards: rank p runs each W p micro-batches late, when it would wait otherwise.

    rank 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3           at most K micro-batches are held, as in 1F1B

    Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.
    """
    return _handcrafted(position, num_microbatches, num_ranks - 1 - position, position)


def zb_h2(position: int, num_ranks: int, stages_per_rank: int, num_microbatches: int, backward: BackwardOrder) -> Order:
    """ZB-H1 with twice the warm-up forwards: no rank waits between its first and last action, if F, I and W are equal.

    rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 F6 I2 W2 ...
    rank 1     F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 ...
    rank 2        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 ...          at most 2K-1 micro-batches are held

    Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.
    """
    return _handcrafted(position, num_microbatches, 2 * (num_ranks - 1 - position), 2 * position)


def zb_v(position: int, num_ranks: int, stages_per_rank: int, num_microbatches: int, backward: BackwardOrder) -> Order:
    """Two stages on each rank, there (a) and back (z): a rank that holds few of the one holds many of the other.

    rank 0  aF0 aF1 aF2 zF0 zI0 zW0 zF1 zI1 zW1 ...
    rank 1      aF0 zF0 aF1 zF1 zI0 zW0 aF2 aI0 ...             every rank holds what 1F1B holds on its first

    After the warm-up, F, I and W of a and F, I and W of z in turn. At the end the W come last.

    Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362; the order is that of torch's ZBV.
    """
    return _existing(_zb_v(position, num_ranks, max(num_microbatches, 2 * num_ranks - 1)), num_microbatches)


def _existing(order: Order, num_microbatches: int) -> Order:
    """The order without micro-batches that do not exist."""
    return (action for action in order if action[2] < num_microbatches)


def _zb_v(position: int, K: int, M: int) -> Order:
    p, a, z = position, position, 2 * K - 1 - position
    first, between, paired = (
        2 * (K - p) - 1,
        p,
        K - p,
    )  # forwards of a alone, then in turn with z, then of z before its I
    for m in range(first):
        yield "F", a, m
    for m in range(between):
        yield "F", z, m
        yield "F", a, first + m
    for m in range(paired):
        yield "F", z, between + m
        yield "I", z, m
        yield "W", z, m
    for m in range(M - K):
        if first + between + m < M:
            yield "F", a, first + between + m
        yield "I", a, m
        yield "W", a, m
        yield "F", z, K + m
        yield "I", z, paired + m
        yield "W", z, paired + m
    for m in range(p):
        yield "I", a, M - K + m
        yield "I", z, M - p + m
    for m in range(K - p):
        yield "I", a, M - K + p + m
        yield "W", a, M - K + m
    for m in range(M - p, M):
        yield "W", z, m
    for m in range(M - p, M):
        yield "W", a, m


def dualpipe_v(
    position: int, num_ranks: int, stages_per_rank: int, num_microbatches: int, backward: BackwardOrder
) -> Order:
    """DualPipe cut in half: two stages on each rank, there (a) and back (z), with a backward split where it helps.

        aF ... aF    aF zF aF zF    zI zW zF ...    aF zB zF aB   aF zB zF aB ...    zB aB    zI aI    aW aI    zW aW
        warm-up      both ways                      in turn                          drain, the second half split

    The forward and the backward that DualPipe overlaps are run one after the other. The published order needs 2K
    micro-batches; with fewer, the others are crossed out.

    DeepSeek-AI, DeepSeek-V3, arXiv 2412.19437, and its DualPipe; the order is that of torch's DualPipeV.
    """
    return _existing(_dualpipe_v(position, num_ranks, max(num_microbatches, 2 * num_ranks)), num_microbatches)


def _dualpipe_v(position: int, K: int, M: int) -> Order:
    p, a, z = position, position, 2 * K - 1 - position
    behind = K - 1 - p  # ranks after this one, before the way back begins
    for m in range(2 * behind):
        yield "F", a, m
    for m in range(p + 1):
        yield "F", a, 2 * behind + m
        yield "F", z, m
    for m in range(behind):
        yield "I", z, m
        yield "W", z, m
        yield "F", z, p + 1 + m
    in_turn = M - 2 * K + p + 1
    for m in range(in_turn):
        yield "F", a, 2 * K - 1 - p + m
        yield "B", z, behind + m
        yield "F", z, K + m
        yield "B", a, m
    for m in range(behind):
        yield "B", z, behind + in_turn + m
        yield "F", z, K + in_turn + m
        yield "B", a, in_turn + m
    late: deque[tuple[int, int]] = deque()  # the stage and micro-batch of each I whose W is to come
    whole_z, whole_a = p // 2 + 1, (p + 1) // 2  # of the last p + 1 backwards there and back, those that are whole
    for m in range(p + 1):
        for stage, microbatch, is_whole in ((z, M - 1 - p + m, m < whole_z), (a, M - K + m, m < whole_a)):
            yield "B" if is_whole else "I", stage, microbatch
            if not is_whole:
                late.append((stage, microbatch))
    for m in range(behind):
        yield "W", *late.popleft()
        yield "I", a, M - K + p + 1 + m
        late.append((a, M - K + p + 1 + m))
    for stage, microbatch in late:
        yield "W", stage, microbatch


# --- what a schedule promises ----------------------------------------------------------------------------------------


def _interleaved_in_flight(
    position: int, stage: int, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> int:
    """The largest number of forwards of the stage that are ahead of its backwards.

    Both come in turns of one group, v groups apart, and the backwards after the warm-up:

        forwards    ####....####....####....            ahead at most at the end of a turn of forwards
        backwards          ....####....####....####     or at the beginning of a turn of backwards
    """
    K, v, M = num_ranks, stages_per_rank, num_microbatches
    if v == 1:
        return min(K - position, M)
    size, part = group_size(K, M), stage // K
    period, ahead = size * v, 2 * (K - 1 - position) + (v - 1) * size

    def run(turns: int, part: int) -> int:
        """Of the first so many turns, those of the stage that is the rank's `part`-th."""
        periods, rest = divmod(max(turns, 0), period)
        return periods * size + min(max(rest - part * size, 0), size)

    moments = [
        start + end
        for start in range(0, ahead + 2 * period, period)
        for end in ((part + 1) * size, (v - 1 - part) * size + ahead + 1)
    ]
    return min(M, max(run(forwards, part) - run(forwards - ahead - 1, v - 1 - part) for forwards in moments))


def _bubble(num_waits: int, stages_per_rank: int, num_microbatches: int) -> float:
    """The share of waiting of ranks that each work 3 v M units and wait `num_waits` of them."""
    return num_waits / (3 * stages_per_rank * num_microbatches + num_waits)


def _interleaved_bubble(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> float:
    """(K-1)/(v M+K-1); with fewer micro-batches than ranks, each round but the last waits for K-M more."""
    K, v, M = num_ranks, stages_per_rank, num_microbatches
    return _bubble(3 * (K - 1 + (v - 1) * max(K - M, 0)), v, M)


def _dualpipe_v_waits(K: int, M: int) -> int:
    return 5 * K - 3 - 2 * M if M <= K else max(K - 1, 5 * K - 1 - 2 * M)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All that the rest of the program knows about a schedule."""

    name: str
    pattern: Pattern
    """Which position holds which stages."""
    splits: bool
    """Whether backwards are split in I and W, some of them or all."""
    order: Callable[[int, int, int, int, BackwardOrder], Order]
    """Position, K, v, M and the order of backwards -> what that position does. The last matters to both GPipes only."""
    bubble_ideal: Callable[[int, int, int], float]
    """K, v, M -> 1 - busy / (K T), for equal stages, free links, and F, I and W that take equally long (so a B takes
    twice as long). T is from the first action of the pipeline to its last."""
    in_flight: Callable[[int, int, int, int, int], int]
    """Position, stage, K, v, M -> how many micro-batches of that stage are held at most. A micro-batch is held from the
    stage's F to its B or W."""
    most_microbatches: int | None = None
    """M may not be larger."""

    @property
    def stages_per_rank(self) -> int | None:
        """v, or None if it may be any."""
        return STAGES_PER_RANK.get(self.name, 1)

    def refuses(self, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> str | None:
        """Why this schedule cannot be made for these numbers, None if it can."""
        if min(num_ranks, stages_per_rank, num_microbatches) < 1:
            return "ranks, stages of each and micro-batches are counted from one"
        if self.stages_per_rank is not None and stages_per_rank != self.stages_per_rank:
            return f"{self.name} has {self.stages_per_rank} on each rank, found {stages_per_rank} stages per rank"
        if self.most_microbatches is not None and num_microbatches > self.most_microbatches:
            return f"{self.name} sends the whole batch at once, found {num_microbatches} micro-batches"
        return None

    def orders(
        self, num_ranks: int, stages_per_rank: int, num_microbatches: int, backward: BackwardOrder = "reverse"
    ) -> tuple[tuple[Action, ...], ...]:
        """The actions of every position."""
        return tuple(
            tuple(map(Action._make, self.order(position, num_ranks, stages_per_rank, num_microbatches, backward)))
            for position in range(num_ranks)
        )


_ALL = (
    Schedule(
        name="naive",
        pattern="in_order",
        splits=False,
        order=naive,
        bubble_ideal=lambda K, v, M: (K - 1) / K,
        in_flight=lambda position, stage, K, v, M: 1,
        most_microbatches=1,
    ),
    Schedule(
        name="gpipe",
        pattern="in_order",
        splits=False,
        order=gpipe,
        bubble_ideal=_interleaved_bubble,
        in_flight=lambda position, stage, K, v, M: M,
    ),
    Schedule(
        name="1f1b",
        pattern="in_order",
        splits=False,
        order=one_forward_one_backward,
        bubble_ideal=_interleaved_bubble,
        in_flight=lambda position, stage, K, v, M: min(K - position, M),
    ),
    Schedule(
        name="interleaved_gpipe",
        pattern="looped",
        splits=False,
        order=interleaved_gpipe,
        bubble_ideal=_interleaved_bubble,
        in_flight=lambda position, stage, K, v, M: M,
    ),
    Schedule(
        name="interleaved_1f1b",
        pattern="looped",
        splits=False,
        order=interleaved_1f1b,
        bubble_ideal=_interleaved_bubble,
        in_flight=_interleaved_in_flight,
    ),
    Schedule(
        name="zb_h1",
        pattern="in_order",
        splits=True,
        order=zb_h1,
        bubble_ideal=lambda K, v, M: _bubble(K - 1 + max(K - M, 0), v, M),
        in_flight=lambda position, stage, K, v, M: min(K, M),
    ),
    Schedule(
        name="zb_h2",
        pattern="in_order",
        splits=True,
        order=zb_h2,
        bubble_ideal=lambda K, v, M: _bubble(K - 1 + max(K - 1 - M // 2, 0), v, M),
        in_flight=lambda position, stage, K, v, M: min(2 * K - 1, M),
    ),
    Schedule(
        name="zb_v",
        pattern="v",
        splits=True,
        order=zb_v,
        bubble_ideal=lambda K, v, M: _bubble(max(K - 1, 4 * K - 2 - 2 * M), v, M),
        in_flight=lambda position, stage, K, v, M: min(2 * K - stage, M),
    ),
    Schedule(
        name="dualpipe_v",
        pattern="v",
        splits=True,
        order=dualpipe_v,
        bubble_ideal=lambda K, v, M: _bubble(_dualpipe_v_waits(K, M), v, M),
        in_flight=lambda position, stage, K, v, M: min(2 * K - stage, M),
    ),
)

SCHEDULES: Mapping[str, Schedule] = {schedule.name: schedule for schedule in _ALL}
