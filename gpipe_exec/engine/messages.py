"""Messages between stages: nested values, forms told once and whenever they change, receives begun ahead.

    stage k                                   stage k+1
    send(m, value) --isend--> .............. --irecv (begun ahead, see `wires`)--> take(m) -> value
                     `- held until delivered

What a value looks like (nesting, shapes, dtypes, which tensors want a gradient) is its `Form`. A receive that is begun
ahead must know it, so the two sides have an *agreed* form for each kind of message: micro-batches of one size, in
training or evaluation. The first message of a kind tells it; nobody runs a module on garbage to find out. Every message
says, in eight bytes beside it, whether it is as agreed. One that is not travels beside the agreed way, with its form,
while zeros of the agreed form serve the receive that may already have been begun:

    as agreed         notice 0      tensors
    of another form   notice n      zeros      n bytes that tell the form, the tensors from host memory to host memory

From the next step on, the form of the last such message is the agreed one, so that a change costs once. Notices and
forms are in host memory, also where tensors are in a device's: a rank's host waits for the other's, never for a device.

Gradients need no telling: they look like the outputs that they belong to.
"""

import pickle
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpipe_exec.devices.accelerator import Mark
from gpipe_exec.engine.transport import Deliveries, Pending, Transport
from gpipe_exec.engine.wires import Receive

Value = Any
"""A tensor, or tensors and None nested in tuples, lists and dicts."""


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


@dataclass(frozen=True)
class _Dict:
    """A dict of a type of its own in a nesting, such as Hugging Face's outputs, which are dataclasses, too."""

    kind: type
    children: dict[Any, Any]


def flatten(value: Value) -> tuple[list[torch.Tensor], Any]:
    """The tensors of a nested value in order, and its nesting with numbers in their place."""
    tensors: list[torch.Tensor] = []
    return tensors, _collect(value, tensors)


def _collect(node: Value, tensors: list[torch.Tensor]) -> Any:
    """Not a function inside `flatten`: one that calls itself is a cycle, which would keep the tensors alive."""
    if isinstance(node, torch.Tensor):
        tensors.append(node)
        return len(tensors) - 1
    if node is None:
        return None
    if isinstance(node, dict):
        children = {key: _collect(child, tensors) for key, child in node.items()}
        return children if type(node) is dict else _Dict(type(node), children)
    if isinstance(node, tuple | list):
        return _rebuilt(node, [_collect(child, tensors) for child in node])
    raise TypeError(f"found a {type(node).__name__}, expected tensors, or None, in tuples, lists and dicts")


def unflatten(nesting: Any, tensors: Sequence[torch.Tensor]) -> Value:
    """The reverse of `flatten`."""
    if isinstance(nesting, int):
        return tensors[nesting]
    if nesting is None:
        return None
    if isinstance(nesting, _Dict):
        return _remade(nesting.kind, {key: unflatten(child, tensors) for key, child in nesting.children.items()})
    if isinstance(nesting, dict):
        return {key: unflatten(child, tensors) for key, child in nesting.items()}
    return _rebuilt(nesting, [unflatten(child, tensors) for child in nesting])


def _remade(kind: type, children: dict[Any, Any]) -> Any:
    """A dict of a type of its own."""
    return kind(**children) if hasattr(kind, "__dataclass_fields__") else kind(children)


def own_containers(value: Value) -> Value:
    """The same in new tuples, lists and dicts, into which others may write; anything else, which may stand between
    layers of a stage, stays what it is."""
    if isinstance(value, dict):
        children = {key: own_containers(child) for key, child in value.items()}
        return children if type(value) is dict else _remade(type(value), children)
    if isinstance(value, tuple | list):
        return _rebuilt(value, [own_containers(child) for child in value])
    return value


def tensors_in(value: Value) -> list[torch.Tensor]:
    """The tensors of a value, in which there may be other things, too."""
    if isinstance(value, torch.Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for child in children for tensor in tensors_in(child)]


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


MAX_TENSORS = 64
"""In one message. Numbers below it tell a message's tensors apart; beside it, in host memory, come these:"""
_LENGTH, _TEXT, _NOTICE, _OTHER_TEXT, _OTHER = range(MAX_TENSORS, MAX_TENSORS + 5)
"""The agreed form's bytes and text; whether this message is as agreed; if not, its form, and its tensors from here."""
NUMBERS = _OTHER + MAX_TENSORS
"""Of one micro-batch."""

Kind = Hashable
"""What messages of one agreed form have in common."""


def _number(microbatch: int, part: int) -> int:
    return microbatch * NUMBERS + part


def _count(value: int = 0) -> torch.Tensor:
    """A number to send; not of torch's allocator, where only what the plan holds is counted."""
    return torch.from_numpy(np.array([value], dtype=np.int64))


def _text_of(form: Form) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(pickle.dumps(form), dtype=np.uint8).copy())


class Sender:
    """The sending end of a channel. Buffers are held until delivery."""

    def __init__(
        self,
        transport: Transport,
        beside: Transport,
        deliveries: Deliveries,
        device: torch.device,
        *,
        tells_form: bool,
        blocking: bool,
    ) -> None:
        """Tensors go by `transport`, notices and forms `beside` it, in host memory."""
        self._transport, self._beside, self._deliveries, self._device = transport, beside, deliveries, device
        self._tells_form, self._blocking = tells_form, blocking
        self._kinds: Sequence[Kind] = ()
        self._agreed: dict[Kind, Form] = {}
        self._latest: dict[Kind, Form] = {}
        self._told: list[tuple[Pending, torch.Tensor]] = []
        """What went beside in this step."""

    @property
    def delivered(self) -> dict[int, Mark]:
        """Micro-batch -> when its message of the current step was delivered."""
        return self._deliveries.at

    def begin(self, kinds: Sequence[Kind]) -> None:
        """A step begins, with messages of these kinds, by micro-batch."""
        self._kinds = kinds
        self._agreed |= self._latest
        self._latest.clear()
        for pending, _ in self._told:
            pending.wait()
        self._told.clear()

    def send(self, microbatch: int, value: Value) -> None:
        """Send a value and return at once or, if blocking, when it has been delivered."""
        tensors, _ = flatten(value)
        if len(tensors) > MAX_TENSORS:
            raise ValueError(f"a message of {len(tensors)} tensors, expected at most {MAX_TENSORS}")
        parts = [tensor.detach().contiguous() for tensor in tensors]
        if self._tells_form:
            parts = self._tell(microbatch, form_of(value), parts)
        transfers = [
            (self._transport.isend(tensor, _number(microbatch, part)), tensor) for part, tensor in enumerate(parts)
        ]
        self._deliveries.put(microbatch, transfers)
        del parts, tensors, transfers
        if self._blocking:
            self._deliveries.wait()

    def _tell(self, microbatch: int, form: Form, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Say what the message looks like; return what goes the agreed way."""
        kind = self._kinds[microbatch]
        agreed = self._agreed.get(kind)
        if agreed is None:
            agreed = self._agreed[kind] = form
            first, text = self._kinds.index(kind), _text_of(form)  # the first number, whatever is sent first
            self._say(_number(first, _LENGTH), _count(text.numel()))
            self._say(_number(first, _TEXT), text)
        self._latest[kind] = form
        if form == agreed:
            self._say(_number(microbatch, _NOTICE), _count(0))
            return parts
        text = _text_of(form)
        self._say(_number(microbatch, _NOTICE), _count(text.numel()))
        self._say(_number(microbatch, _OTHER_TEXT), text)
        for part, tensor in enumerate(parts):
            self._say(_number(microbatch, _OTHER + part), tensor.cpu())
        return [buffer.zero_() for buffer in agreed.buffers(self._device)]

    def _say(self, number: int, tensor: torch.Tensor) -> None:
        self._told.append((self._beside.isend(tensor, number), tensor))

    def reap(self) -> None:
        """Let go of the buffers of delivered messages."""
        self._deliveries.reap()

    def finish(self) -> None:
        """The step is over."""
        self._deliveries.finish()

    def close(self) -> None:
        """Let go of threads."""
        self._deliveries.close()


@dataclass
class _Begun:
    form: Form
    buffers: list[torch.Tensor]
    transfers: list[Pending]
    notice: tuple[Pending, torch.Tensor] | None


@dataclass
class Receiver:
    """The receiving end of a channel. Receives are begun in the order of its `Lane`."""

    transport: Transport
    beside: Transport
    device: torch.device
    sent_in_order: Sequence[int]
    """Micro-batches in the order in which they are sent."""
    learns_form: bool
    lane: "Lane"
    _kinds: Sequence[Kind] = field(default=(), init=False)
    _agreed: dict[Kind, Form] = field(default_factory=dict, init=False)
    _forms: dict[int, Form] = field(default_factory=dict, init=False)
    """Micro-batch -> what its message of this step looks like."""
    _begun: dict[int, _Begun] = field(default_factory=dict, init=False)

    def begin(self, kinds: Sequence[Kind]) -> None:
        """A step begins, with messages of these kinds, by micro-batch."""
        if self.learns_form:
            self._agreed |= {self._kinds[m]: self._forms[m] for m in self.sent_in_order if m in self._forms}
        self._forms.clear()
        self._kinds = kinds

    def knows(self, microbatch: int, form: Form) -> None:
        """The message for this micro-batch will look like this."""
        self._forms[microbatch] = form
        self.lane.advance()

    def form_of(self, microbatch: int) -> Form | None:
        """What a receive may be begun with."""
        if self.learns_form:
            return self._agreed.get(self._kinds[microbatch])
        return self._forms.get(microbatch)

    def start(self, microbatch: int) -> None:
        """Begin the receive; its form is known, or told now."""
        form = self.form_of(microbatch)
        if form is None:
            assert self.learns_form, "a gradient is received after its output was sent"
            form = self._agreed[self._kinds[microbatch]] = self._learn(microbatch)
        notice = None
        if self.learns_form:
            said = _count()
            notice = (self.beside.irecv(said, _number(microbatch, _NOTICE)), said)
        buffers = form.buffers(self.device)
        works = [self.transport.irecv(buffer, _number(microbatch, part)) for part, buffer in enumerate(buffers)]
        self._begun[microbatch] = _Begun(form, buffers, works, notice)

    def take(self, microbatch: int) -> Value:
        """The message for this micro-batch, when it has arrived."""
        if microbatch not in self._begun:  # the first of its kind: its form comes before it
            self.lane.advance_to(self, microbatch)
        begun = self._begun.pop(microbatch)
        other = 0
        if begun.notice is not None:
            begun.notice[0].wait()
            other = int(begun.notice[1])
        for transfer in begun.transfers:
            transfer.wait()
        if other:
            return self._of_another_form(microbatch, other)
        if self.learns_form:
            self._forms[microbatch] = begun.form
        return unflatten(begun.form.nesting, begun.buffers)

    def _learn(self, microbatch: int) -> Form:
        first, length = self._kinds.index(self._kinds[microbatch]), _count()
        self.beside.irecv(length, _number(first, _LENGTH)).wait()
        return self._told(_number(first, _TEXT), int(length))

    def _told(self, number: int, length: int) -> Form:
        text = torch.from_numpy(np.empty(length, dtype=np.uint8))
        self.beside.irecv(text, number).wait()
        form: Form = pickle.loads(text.numpy().tobytes())
        return form

    def _of_another_form(self, microbatch: int, length: int) -> Value:
        form = self._told(_number(microbatch, _OTHER_TEXT), length)
        self._forms[microbatch] = form
        buffers = form.buffers(torch.device("cpu"))
        for part, buffer in enumerate(buffers):
            self.beside.irecv(buffer, _number(microbatch, _OTHER + part)).wait()
        return unflatten(form.nesting, [buffer.to(self.device) for buffer in buffers])


class Lane:
    """Receives that are begun one after the other: those of a channel, or of all channels of a wire."""

    def __init__(self) -> None:
        self.receivers: dict[int, Receiver] = {}
        """By channel."""
        self._waiting: deque[Receive] = deque()
        """For their form to be known, or for one before them."""

    def post(self, receive: Receive) -> None:
        """Begin it as soon as it is its turn and its form is known."""
        self._waiting.append(receive)
        self.advance()

    def advance(self) -> None:
        """Begin what can be begun."""
        while self._waiting:
            channel, microbatch = self._waiting[0]
            if self.receivers[channel].form_of(microbatch) is None:
                return
            self._waiting.popleft()
            self.receivers[channel].start(microbatch)

    def advance_to(self, receiver: Receiver, microbatch: int) -> None:
        """Begin everything up to this one, waiting to be told what it looks like."""
        while self._waiting:
            channel, m = self._waiting.popleft()
            self.receivers[channel].start(m)
            if self.receivers[channel] is receiver and m == microbatch:
                break
        self.advance()
