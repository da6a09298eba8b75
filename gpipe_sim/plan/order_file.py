"""Any schedule from a file: torch's CSV, one row of actions for each rank.

    0F0,0F1,0F2,      ,0B0,0F3,0B1,...          row 1, the first rank; empty cells are left out
    1F0,1I0,1F1,1I1,1W0,1W1,...                 row 2

``2F0`` is stage 2's forward of micro-batch 0, and likewise B for a whole backward, I and W for its halves. What torch
writes beside these is read as follows:

    (0F1;1B0)OVERLAP_F_B                        the actions in turn
    SEND_F, RECV_F, SEND_B, RECV_B              left out: messages follow from what the actions need
    UNSHARD, RESHARD, REDUCE_GRAD               left out: they follow from where parameters are kept

Both are told as notes. A mistake is told at ``file:row:cell``, and all of them at once. That an order cannot finish is
told for every rank that gets stuck, when nothing else is wrong.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from gpipe_sim.base import limits
from gpipe_sim.base.files import InputError, Problem
from gpipe_sim.base.limits import shown
from gpipe_sim.plan.actions import Action, Letter

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})", re.ASCII)
_LEFT_OUT = re.compile(r"[0-9]{1,9}(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,9}", re.ASCII)
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_EXPECTED = "expected a stage, one of F, B, I and W, and a micro-batch, such as 2F0"


@dataclass(frozen=True, kw_only=True)
class OrderFile:
    """An order that was read: every action once, and able to finish."""

    orders: tuple[tuple[Action, ...], ...]
    """What each rank does, in the order of the rows."""
    notes: tuple[str, ...] = ()
    """What was in the file and is not in the orders."""

    @property
    def positions(self) -> tuple[int, ...]:
        """For each stage, the rank that holds it."""
        rank_of = {action.stage: rank for rank, order in enumerate(self.orders) for action in order}
        return tuple(rank_of[stage] for stage in sorted(rank_of))

    @property
    def num_microbatches(self) -> int:
        """M."""
        return 1 + max(action.microbatch for action in self.orders[0])

    @property
    def splits(self) -> bool:
        """Whether backwards are split, some of them or all."""
        return any(action.kind == "I" for order in self.orders for action in order)


def order_text(orders: Iterable[Sequence[Action]]) -> str:
    """The file of these orders, which torch's runtime loads as ``compute_only``."""
    return "".join(",".join(map(str, order)) + "\n" for order in orders)


class _Cell(NamedTuple):
    """Where an action stands; both count from one."""

    row: int
    column: int

    def __str__(self) -> str:
        return f"{self.row}:{self.column}"


class _Reader:
    """Collects what is wrong while the file is read and checked."""

    def __init__(self, file_name: str) -> None:
        self.file_name = file_name
        self.problems: list[Problem] = []
        self.lines: list[int] = []
        """For each rank, the line of the file."""
        self.orders: list[list[Action]] = []
        self.cells: list[list[_Cell]] = []
        """The cell of each action of each rank."""
        self.num_overlapped = 0
        self.left_out: Counter[str] = Counter()

    def complain(self, where: _Cell | int, field: object, message: str) -> None:
        """Note a mistake at a cell or a line; one that has too many ends the reading."""
        self.problems.append(Problem(f"{self.file_name}:{where}", str(field), message))
        if len(self.problems) > limits.PROBLEMS:
            raise InputError(self.problems)

    def stop_if_wrong(self) -> None:
        """Raise what was found, before a check that relies on it."""
        if self.problems:
            raise InputError(self.problems)


def read_order(text: str, file_name: str) -> OrderFile:
    """The orders of a file; an `InputError` with everything that is wrong with it."""
    reader = _Reader(file_name)
    _read_cells(text, reader)
    reader.stop_if_wrong()
    at = _check_repeated(reader)
    _check_complete(reader, at)
    _check_own_order(reader, at)
    reader.stop_if_wrong()
    _check_finishes(reader, at)
    reader.stop_if_wrong()
    notes = []
    if reader.num_overlapped:
        notes.append(f"{reader.num_overlapped} OVERLAP_F_B pairs are run in turn, the forward and the backward")
    if reader.left_out:
        found = ", ".join(f"{count} {name}" for name, count in sorted(reader.left_out.items()))
        notes.append(f"left out, since they follow from the other actions: {found}")
    return OrderFile(orders=tuple(map(tuple, reader.orders)), notes=tuple(notes))


def _rows(text: str, reader: _Reader) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of each rank; empty lines at the end are no ranks."""
    lines = csv.reader(io.StringIO(text.rstrip(), newline=""))
    try:
        for cells in lines:
            yield lines.line_num, cells
    except csv.Error as error:
        reader.complain(lines.line_num, "", f"not CSV: {error}")


def _read_cells(text: str, reader: _Reader) -> None:
    num_actions = 0
    for line, cells in _rows(text, reader):
        order: list[Action] = []
        places: list[_Cell] = []
        for column, written in enumerate(cells, 1):
            cell = _Cell(line, column)
            for action in _actions_in(written.strip(), cell, reader):
                order.append(action)
                places.append(cell)
        num_actions += len(order)
        if num_actions > 3 * limits.CELLS:
            reader.complain(line, "", f"more than {3 * limits.CELLS} actions up to here, expected fewer")
            break
        if not order:
            reader.complain(line, "", f"has no action, expected those of rank {len(reader.orders)}")
        reader.lines.append(line)
        reader.orders.append(order)
        reader.cells.append(places)
    if not reader.orders and not reader.problems:
        reader.complain(1, "", "has no actions, expected a row of them for each rank")


def _actions_in(written: str, cell: _Cell, reader: _Reader) -> Iterator[Action]:
    """The actions of one cell: one, none, or those of an overlapped pair."""
    if found := _ACTION.fullmatch(written):
        stage, kind, microbatch = found.groups()
        yield Action(cast(Letter, kind), int(stage), int(microbatch))
    elif found := _OVERLAPPED.fullmatch(written):
        reader.num_overlapped += 1
        for part in found[1].split(";"):
            if _OVERLAPPED.fullmatch(part.strip()) or not _ACTION.fullmatch(part.strip()):
                reader.complain(cell, "", f"found {shown(part.strip())} in an overlapped pair, {_EXPECTED}")
            else:
                yield from _actions_in(part.strip(), cell, reader)
    elif found := _LEFT_OUT.fullmatch(written):
        reader.left_out[found[1]] += 1
    elif written:
        reader.complain(cell, "", f"found {shown(written)}, {_EXPECTED}")


def _check_repeated(reader: _Reader) -> dict[Action, _Cell]:
    """Where each action stands; a repeated one, and a stage that sits on two ranks, are mistakes."""
    at: dict[Action, _Cell] = {}
    home: dict[int, tuple[int, _Cell]] = {}
    astray: set[tuple[int, int]] = set()
    for rank, (order, cells) in enumerate(zip(reader.orders, reader.cells, strict=True)):
        for action, cell in zip(order, cells, strict=True):
            at_home, first = home.setdefault(action.stage, (rank, cell))
            if at_home != rank:
                if (action.stage, rank) not in astray:
                    message = f"stage {action.stage} is on rank {rank} here and on rank {at_home} in cell {first}"
                    reader.complain(cell, action, f"{message}, expected on one rank")
                astray.add((action.stage, rank))
            if (before := at.setdefault(action, cell)) is not cell:
                reader.complain(cell, action, f"is repeated, it is in cell {before} already, expected once")
    return at


def _gap(numbers: Sequence[int]) -> int | None:
    """The smallest number from 0 on that is not there; `numbers` are sorted."""
    return next((index for index, number in enumerate(numbers) if index != number), None)


def _check_complete(reader: _Reader, at: Mapping[Action, _Cell]) -> None:
    """Every stage has one F of every micro-batch, and one B or an I and a W."""
    rank_of = {action.stage: rank for rank, order in enumerate(reader.orders) for action in order}
    stages, microbatches = sorted(rank_of), sorted({action.microbatch for action in at})
    for name, numbers in (("stage", stages), ("micro-batch", microbatches)):
        if (gap := _gap(numbers)) is not None:
            reader.complain(1, "", f"{name} {gap} has no action, expected some of each from 0 to {numbers[-1]}")
    if len(stages) * len(microbatches) > limits.CELLS:
        found = f"{len(stages)} stages with {len(microbatches)} micro-batches"
        reader.complain(1, "", f"found {found}, expected a product of at most {limits.CELLS}")
        reader.stop_if_wrong()
    for stage in stages:
        line, rank = reader.lines[rank_of[stage]], rank_of[stage]
        for microbatch in microbatches:
            forward, whole, inputs, weights = (Action(kind, stage, microbatch) for kind in _KINDS)
            halves = f"{inputs} and {weights}"
            if forward not in at:
                later = next((action for action in (whole, inputs, weights) if action in at), None)
                before = f" before {later} in cell {at[later]}" if later else ""
                reader.complain(line, forward, f"is missing, expected on rank {rank}{before}")
            if whole in at:
                for half in (inputs, weights):
                    if half in at:
                        message = f"{whole} in cell {at[whole]} is the whole backward already"
                        reader.complain(at[half], half, f"{message}, expected that or {halves}")
            elif inputs not in at and weights not in at:
                after = f" after {forward} in cell {at[forward]}" if forward in at else ""
                reader.complain(line, whole, f"is missing, expected it or {halves} on rank {rank}{after}")
            elif inputs not in at:
                message = f"is missing, expected on rank {rank} before {weights} in cell {at[weights]}"
                reader.complain(line, inputs, message)
            elif weights not in at:
                message = f"is missing, expected on rank {rank} after {inputs} in cell {at[inputs]}"
                reader.complain(line, weights, message)


_KINDS: tuple[Letter, ...] = ("F", "B", "I", "W")


def _own_need(action: Action) -> Iterator[Action]:
    """What the action needs of its own stage."""
    kind, stage, microbatch = action
    if kind in ("B", "I"):
        yield Action("F", stage, microbatch)
    elif kind == "W":
        yield Action("I", stage, microbatch)


def _check_own_order(reader: _Reader, at: Mapping[Action, _Cell]) -> None:
    """F before B or I, and I before W, of the same stage and micro-batch."""
    for order, cells in zip(reader.orders, reader.cells, strict=True):
        seen: set[Action] = set()
        for action, cell in zip(order, cells, strict=True):
            seen.add(action)
            for need in _own_need(action):
                if need in at and need not in seen and at[need].row == cell.row:
                    reader.complain(cell, action, f"comes before {need} in cell {at[need]}, expected after it")


def _check_finishes(reader: _Reader, at: Mapping[Action, _Cell]) -> None:
    """Run the ranks against each other; those that get stuck wait in a circle.

    rank 0    0F0 0B0 0F1 ...         stuck at 0B0: waits for 1B0, which rank 1 has after 1F1
    rank 1    1F0 1F1 1B0 ...         stuck at 1F1: waits for 0F1, which rank 0 has after 0B0
    """
    orders = reader.orders
    last = max(action.stage for action in at)
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    done: set[Action] = set()
    index = [0] * len(orders)
    waiting: dict[Action, int] = {}
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while index[rank] < len(order):
            action = order[index[rank]]
            need = _message_need(action, last, at)
            if need is not None and need not in done:
                waiting[need] = rank
                break
            done.add(action)
            index[rank] += 1
            if (woken := waiting.pop(action, None)) is not None:
                ready.append(woken)
    for need, rank in sorted(waiting.items(), key=lambda item: item[1]):
        action, cell = orders[rank][index[rank]], reader.cells[rank][index[rank]]
        sender = rank_of[need.stage]
        ahead = orders[sender][index[sender]]
        behind = "itself" if ahead == action else f"{ahead} in cell {at[ahead]}"
        message = f"rank {rank} waits here for {need} in cell {at[need]}, which rank {sender} has behind {behind}"
        reader.complain(cell, action, f"the order cannot finish: {message}")


def _message_need(action: Action, last: int, at: Mapping[Action, _Cell]) -> Action | None:
    """What the action needs of another stage: the forward before it, or the backward after it."""
    kind, stage, microbatch = action
    if kind == "F" and stage > 0:
        return Action("F", stage - 1, microbatch)
    if kind in ("B", "I") and stage < last:
        whole = Action("B", stage + 1, microbatch)
        return whole if whole in at else Action("I", stage + 1, microbatch)
    return None
