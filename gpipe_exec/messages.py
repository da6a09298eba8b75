"""Tensors between stages: nested values, forms exchanged once, receives posted ahead, sends that never block.

    stage k                              stage k+1
    send(m, value) --isend--> ......... --irecv (posted up to `window` ahead)--> take(m) -> value
                     `- a thread waits for delivery, after which the buffers go

What a value looks like (nesting, shapes, dtypes, which tensors want a gradient) is its `Form`. The sender tells it
once for each micro-batch size, before the first such message; nobody runs a module on garbage to find out. Gradients
need no telling: they look like the outputs that they belong to.
"""

import pickle
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

Value = Any
"""A tensor, or tensors nested in tuples, lists and dicts."""


@dataclass(frozen=True)
class Form:
    """What a value looks like without its data."""

    nesting: Any
    """The value with each tensor replaced by its number."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    wants_gradient: tuple[bool, ...]

    def buffers(self, device: torch.device) -> list[torch.Tensor]:
        """Empty tensors to receive such a value."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in pairs]

    def gradients(self) -> "Form":
        """The form of this value's gradients: a list of one for each tensor that wants one."""
        chosen = [i for i, wanted in enumerate(self.wants_gradient) if wanted]
        return Form(
            list(range(len(chosen))),
            tuple(self.shapes[i] for i in chosen),
            tuple(self.dtypes[i] for i in chosen),
            (False,) * len(chosen),
        )


def flatten(value: Value) -> tuple[list[torch.Tensor], Any]:
    """The tensors of a nested value in order, and its nesting with numbers in their place."""
    tensors: list[torch.Tensor] = []
    return tensors, _collect(value, tensors)


def _collect(node: Value, tensors: list[torch.Tensor]) -> Any:
    """Not a function inside `flatten`: one that calls itself is a cycle, which would keep the tensors alive."""
    if isinstance(node, torch.Tensor):
        tensors.append(node)
        return len(tensors) - 1
    if isinstance(node, dict):
        return {key: _collect(child, tensors) for key, child in node.items()}
    if isinstance(node, tuple | list):
        return _rebuilt(node, [_collect(child, tensors) for child in node])
    raise TypeError(f"found a {type(node).__name__}, expected tensors nested in tuples, lists and dicts")


def unflatten(nesting: Any, tensors: Sequence[torch.Tensor]) -> Value:
    """The reverse of `flatten`."""
    if isinstance(nesting, int):
        return tensors[nesting]
    if isinstance(nesting, dict):
        return {key: unflatten(child, tensors) for key, child in nesting.items()}
    return _rebuilt(nesting, [unflatten(child, tensors) for child in nesting])


def _rebuilt(like: Any, children: list[Any]) -> Any:
    """A sequence of the same type; a named tuple takes its fields one by one."""
    return type(like)(*children) if hasattr(like, "_fields") else type(like)(children)


def form_of(value: Value) -> Form:
    """The value's form."""
    tensors, nesting = flatten(value)
    return Form(
        nesting,
        tuple(tuple(tensor.shape) for tensor in tensors),
        tuple(tensor.dtype for tensor in tensors),
        tuple(map(wants_gradient, tensors)),
    )


def wants_gradient(tensor: torch.Tensor) -> bool:
    """Whether a gradient of it is sent back: of everything continuous, since the sender of a tensor that was made
    without a graph, to be recomputed later, cannot know what will depend on it."""
    return tensor.is_floating_point() or tensor.is_complex()


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Return when it is complete."""


class Transport(Protocol):
    """How tensors of one edge and direction travel."""

    def isend(self, tensor: torch.Tensor, number: int) -> Pending:
        """Begin to send; `number` tells messages apart."""

    def irecv(self, tensor: torch.Tensor, number: int) -> Pending:
        """Begin to receive into the tensor."""


@dataclass(frozen=True)
class PeerToPeer:
    """torch.distributed between two ranks: by tags with gloo, by a group of its own with NCCL, which has no tags."""

    peer: int
    group: dist.ProcessGroup | None
    first_tag: int

    def isend(self, tensor: torch.Tensor, number: int) -> dist.Work:
        """Begin to send."""
        work = dist.isend(tensor, self.peer, group=self.group, tag=self.first_tag + number)
        assert work is not None, "this rank belongs to the group"
        return work

    def irecv(self, tensor: torch.Tensor, number: int) -> dist.Work:
        """Begin to receive."""
        work = dist.irecv(tensor, self.peer, group=self.group, tag=self.first_tag + number)
        assert work is not None, "this rank belongs to the group"
        return work


MAX_TENSORS = 64
"""In one message; numbers below it tell a message's tensors apart, the two after it carry a form."""


def _number(microbatch: int, part: int) -> int:
    return microbatch * (MAX_TENSORS + 2) + part


def carries_form(number: int) -> bool:
    """Whether this message tells a form, and is not one of the tensors themselves."""
    return number % (MAX_TENSORS + 2) >= MAX_TENSORS


class Sender:
    """The sending end. Buffers are held until delivery, for which a thread of its own waits."""

    def __init__(self, transport: Transport, sizes: Sequence[int], *, tells_form: bool, blocking: bool) -> None:
        self._transport = transport
        self._sizes = sizes
        self._untold = set(sizes) if tells_form else set()
        self._blocking = blocking
        self._waiting: SimpleQueue[tuple[int, list[tuple[Pending, torch.Tensor]]] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._in_flight = 0
        self._delivered: deque[list[tuple[Pending, torch.Tensor]]] = deque()
        self.error: BaseException | None = None
        self.delivered_s: dict[int, float] = {}
        """Micro-batch -> when its message of the current step was delivered."""
        self._thread = threading.Thread(target=self._wait_for_delivery, daemon=True, name="sender")
        self._thread.start()

    def send(self, microbatch: int, value: Value) -> None:
        """Send a value and return at once or, if blocking, when it has been delivered."""
        tensors, _ = flatten(value)
        if len(tensors) > MAX_TENSORS:
            raise ValueError(f"a message of {len(tensors)} tensors, expected at most {MAX_TENSORS}")
        parts = [(part, tensor.detach().contiguous()) for part, tensor in enumerate(tensors)]
        size = self._sizes[microbatch]
        if size in self._untold:
            self._untold.remove(size)
            text = torch.frombuffer(bytearray(pickle.dumps(form_of(value))), dtype=torch.uint8)
            device = tensors[0].device if tensors else torch.device("cpu")
            length = torch.tensor([text.numel()], device=device)
            parts = [(MAX_TENSORS, length), (MAX_TENSORS + 1, text.to(device)), *parts]
        with self._lock:
            self._in_flight += 1
            self._idle.clear()
        works = [(self._transport.isend(tensor, _number(microbatch, part)), tensor) for part, tensor in parts]
        self._waiting.put((microbatch, works))
        if self._blocking:
            self.finish()

    def reap(self) -> None:
        """Let go of the buffers of delivered messages. The rank's own thread does it, where memory is accounted for."""
        self._delivered.clear()

    def finish(self) -> None:
        """Return when everything sent has been delivered."""
        self._idle.wait()
        self.reap()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread."""
        self._waiting.put(None)
        self._thread.join(timeout=5)

    def _wait_for_delivery(self) -> None:
        while (entry := self._waiting.get()) is not None:
            microbatch, held = entry
            del entry
            try:
                for pair in held:
                    pair[0].wait()
            except BaseException as error:  # told to the rank at its next finish()
                self.error = error
            self.delivered_s[microbatch] = time.perf_counter()
            self._delivered.append(held)
            del held, pair  # this thread holds on to nothing
            with self._lock:
                self._in_flight -= 1
                if self._in_flight == 0:
                    self._idle.set()


@dataclass
class _Posted:
    microbatch: int
    form: Form
    buffers: list[torch.Tensor]
    works: list[Pending]


class Receiver:
    """The receiving end: keeps `window` receives posted, in the order in which the rank will take them."""

    def __init__(self, transport: Transport, sizes: Sequence[int], device: torch.device, window: int | None) -> None:
        self._transport = transport
        self._sizes = sizes
        self._device = device
        self._window = window or len(sizes)
        self._forms: dict[int, Form] = {}
        self._order: deque[int] = deque()
        self._posted: deque[_Posted] = deque()

    def expect(self, microbatches: Sequence[int]) -> None:
        """Begin a step: post what may be posted."""
        self._order.extend(microbatches)
        self.post()

    def knows(self, size: int, form: Form) -> None:
        """Messages for micro-batches of this size look like this."""
        if size not in self._forms:
            self._forms[size] = form

    def take(self, microbatch: int) -> Value:
        """The message for this micro-batch, when it has arrived."""
        if not self._posted:  # the first message of its size: its form comes before it
            assert self._order[0] == microbatch, "messages are taken in the order in which they are expected"
            self._learn(microbatch)
            self.post()
        posted = self._posted.popleft()
        assert posted.microbatch == microbatch, "messages are taken in the order in which they are expected"
        for work in posted.works:
            work.wait()
        self.post()
        return unflatten(posted.form.nesting, posted.buffers)

    def form(self, microbatch: int) -> Form:
        """What a message taken for this micro-batch looked like."""
        return self._forms[self._sizes[microbatch]]

    def _learn(self, microbatch: int) -> None:
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._transport.irecv(length, _number(microbatch, MAX_TENSORS)).wait()
        text = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        self._transport.irecv(text, _number(microbatch, MAX_TENSORS + 1)).wait()
        self._forms[self._sizes[microbatch]] = pickle.loads(bytes(text.cpu().numpy()))

    def post(self) -> None:
        """Post what the window allows and whose form is known."""
        while self._order and len(self._posted) < self._window and self._sizes[self._order[0]] in self._forms:
            microbatch = self._order.popleft()
            form = self._forms[self._sizes[microbatch]]
            buffers = form.buffers(self._device)
            works = [self._transport.irecv(buffer, _number(microbatch, part)) for part, buffer in enumerate(buffers)]
            self._posted.append(_Posted(microbatch, form, buffers, works))
