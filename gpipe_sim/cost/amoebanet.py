"""AmoebaNet-D, the convolutional network of GPipe's Table 1: its cells, and what each of its layers holds and computes.

AmoebaNet-D (L, D) (Real et al., arXiv 1802.01548, figure 6; Huang et al., arXiv 1811.06965, section 3) is a chain of
L + 6 layers:

    stem   reduction reduction   L/3 normal   reduction   L/3 normal   reduction   L/3 normal   classifier
    D/4    D/2       D           D            2D          2D           4D          4D           channels of each branch

A cell makes five states, each the sum of two operations on states that are there: its input (0), the input of the cell
before it (1), or an earlier one of the five (2 to 6). Some states, side by side, are its output; beside it, it hands on
its input, which the next cell takes, too. Which ones of a normal cell is told by the counts of parameters that GPipe
printed: with 0, 3, 4 and 6, as in the authors' own program, all five are met, with those of the paper's figure none.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

Operation = str
"""``none``, a pool, or convolutions: those of ``1x1`` channel by channel, and where a larger one follows, on a quarter
of the channels."""


class Branch(NamedTuple):
    """One operation of a cell."""

    state: int
    """That it takes."""
    operation: Operation


def _pairs(*branches: tuple[int, Operation]) -> tuple[tuple[Branch, Branch], ...]:
    made = [Branch(*branch) for branch in branches]
    return tuple(zip(made[::2], made[1::2], strict=True))


NORMAL = _pairs(
    *((1, "conv 1x1"), (1, "max pool 3x3")),
    *((1, "none"), (0, "conv 1x7 7x1")),
    *((0, "conv 1x1"), (0, "conv 1x7 7x1")),
    *((2, "max pool 3x3"), (2, "none")),
    *((1, "average pool 3x3"), (5, "conv 1x1")),
)
REDUCTION = _pairs(
    *((0, "max pool 2x2"), (0, "max pool 3x3")),
    *((2, "none"), (1, "conv 3x3")),
    *((2, "conv 1x7 7x1"), (2, "max pool 3x3")),
    *((3, "none"), (1, "max pool 2x2")),
    *((2, "average pool 3x3"), (3, "conv 1x1")),
)
WINDOWS = {"conv 3x3": [(3, 3)], "conv 1x7 7x1": [(1, 7), (7, 1)]}
"""Height and width of the convolutions in the middle; only the single one is met with a stride."""
NORMAL_OUTPUT, REDUCTION_OUTPUT = (0, 3, 4, 6), (4, 5, 6)
"""The states that are put side by side."""


class Cell(NamedTuple):
    """One layer between stem and classifier."""

    name: str
    before: int
    """Channels of the input of the cell before it."""
    entering: int
    """Channels of its input."""
    channels: int
    """Of its states."""
    reduces: bool
    """Whether it halves height and width."""
    after_reduction: bool
    """Whether the cell before it did, so that the two that it takes differ."""

    @property
    def pairs(self) -> tuple[tuple[Branch, Branch], ...]:
        """What its five states are sums of."""
        return REDUCTION if self.reduces else NORMAL

    @property
    def output(self) -> tuple[int, ...]:
        """The states that are its output."""
        return REDUCTION_OUTPUT if self.reduces else NORMAL_OUTPUT

    @property
    def leaving(self) -> int:
        """Channels of its output."""
        return self.channels * len(self.output)

    def stride(self, state: int) -> int:
        """Of operations that take this state."""
        return 2 if self.reduces and state < 2 else 1


def cells(L: int, D: int) -> list[Cell]:
    """All of them in order."""
    if L % 3 or L < 3 or D % 16 or D < 16:
        raise ValueError(f"AmoebaNet-D ({L}, {D}), expected a multiple of 3 and one of 16")
    found: list[Cell] = []
    before = entering = channels = D // 4
    after_reduction = False
    for row, (reduces, number) in enumerate([(True, 2), *[(False, L // 3), (True, 1)] * 2, (False, L // 3)]):
        for index in range(number):
            channels *= 2 if reduces else 1
            kind = "reduction" if reduces else "normal"
            found.append(Cell(f"{kind}{row}.{index}", before, entering, channels, reduces, after_reduction))
            before, entering, after_reduction = entering, found[-1].leaving, reduces
    return found


# --- what layers cost ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Tensor:
    channels: int
    side: int
    is_kept: bool = False

    @property
    def elements(self) -> int:
        return self.channels * self.side**2


@dataclass
class Shape:
    """One layer, for one sample."""

    name: str
    parameters: int = 0
    flops: float = 0.0
    """Of a forward: two for each multiplication of its convolutions."""
    saved: int = 0
    """Elements that remain for the backward, the output among them: inputs of convolutions, norms and pools, and what
    ReLUs put out, each once. The indices of a maximum count twice, having eight bytes."""
    output: int = 0
    """Elements that the next layer takes."""
    handed_on: int = 0
    """Of these, the input."""

    def keep(self, tensor: _Tensor) -> None:
        """For the backward."""
        self.saved += 0 if tensor.is_kept else tensor.elements
        tensor.is_kept = True

    def conv(self, x: _Tensor, channels: int, window: tuple[int, int] = (1, 1), stride: int = 1) -> _Tensor:
        """A convolution without biases."""
        self.keep(x)
        made = _Tensor(channels, x.side // stride)
        self.parameters += channels * x.channels * window[0] * window[1]
        self.flops += 2.0 * made.elements * x.channels * window[0] * window[1]
        return made

    def norm(self, x: _Tensor) -> _Tensor:
        """A batch norm: a gain and a bias for each channel."""
        self.keep(x)
        self.parameters += 2 * x.channels
        return replace(x, is_kept=False)

    def relu(self, x: _Tensor) -> _Tensor:
        """Keeps what it puts out."""
        made = replace(x, is_kept=False)
        self.keep(made)
        return made

    def relu_conv_norm(self, x: _Tensor, channels: int, *, stride: int = 1) -> _Tensor:
        """Of one by one."""
        return self.norm(self.conv(self.relu(x), channels, stride=stride))

    def halved(self, x: _Tensor, channels: int) -> _Tensor:
        """Two convolutions of half the channels, of every other pixel, the second one pixel further."""
        x = self.relu(x)
        first = self.conv(x, channels // 2, stride=2)
        moved = _Tensor(x.channels, x.side)
        self.conv(moved, channels // 2, stride=2)
        return self.norm(_Tensor(channels, first.side))

    def operation(self, kind: Operation, x: _Tensor, stride: int) -> _Tensor:
        """One of a cell's; those that follow a state of the cell itself have a stride of 1."""
        c = x.channels
        if kind == "none":
            return x
        if "pool" in kind:
            self.keep(x)
            made = _Tensor(c, x.side // stride)
            self.saved += 2 * made.elements if kind.startswith("max") else 0
            return made
        if kind == "conv 1x1":
            return self.relu_conv_norm(x, c, stride=stride)
        narrow = self.relu_conv_norm(x, c // 4)
        for window in WINDOWS[kind]:
            narrow = self.norm(self.conv(self.relu(narrow), c // 4, window, stride))
        return self.relu_conv_norm(narrow, c)


def shapes(L: int, D: int, *, side: int = 224, classes: int = 1000) -> list[Shape]:
    """What each layer of AmoebaNet-D (L, D) costs for a square image, of a side that can be halved five times."""
    if side % 32:
        raise ValueError(f"an image of {side} pixels, expected a multiple of 32")
    return list(_shapes(L, D, side, classes))


def _shapes(L: int, D: int, side: int, classes: int) -> Iterator[Shape]:
    stem = Shape("stem")
    image = stem.relu(_Tensor(3, side))
    entering = stem.norm(stem.conv(image, D // 4, (3, 3), stride=2))
    stem.keep(entering)
    stem.output = entering.elements
    yield stem
    before = entering
    for cell in cells(L, D):
        found = Shape(cell.name)
        x, other = _Tensor(entering.channels, entering.side, True), _Tensor(before.channels, before.side, True)
        if before is entering:
            other = x
        first = found.relu_conv_norm(x, cell.channels)
        second = other
        if cell.after_reduction:
            second = found.halved(other, cell.channels)
        elif cell.before != cell.channels:
            second = found.relu_conv_norm(other, cell.channels)
        states = [first, second]
        for pair in cell.pairs:
            made = [found.operation(kind, states[state], cell.stride(state)) for state, kind in pair]
            states.append(_Tensor(cell.channels, made[0].side))
        before, entering = entering, _Tensor(cell.leaving, states[-1].side)
        found.keep(entering)
        found.output, found.handed_on = entering.elements + x.elements, x.elements
        yield found
        entering.is_kept = False
    last = Shape("classifier")
    last.saved = entering.channels + classes  # the mean of each channel, and the logits
    last.parameters = (entering.channels + 1) * classes
    last.flops = 2.0 * entering.channels * classes
    yield last
