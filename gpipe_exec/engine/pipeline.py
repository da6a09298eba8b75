"""The engine: one rank interprets its actions of the program, the very table that the simulator runs.

    for action in actions:
        F   take the activations (or the data), run forward, send the output on
        R   run forward again; on demand, first take the gradient
        B   take the gradient (at the last stage, the loss's), run backward, send the input's gradient back
        I   as B, but leave the gradients of the weights
        W   add the gradients of the weights

What goes from one stage to another on the same rank is handed over as it is, without a copy or a message. Receives are
posted ahead, sends do not wait (unless the plan says `overlap: false`), and what is no longer needed is let go at once.
Losses are weighted by samples, or by what they count (`losses`), so that gradients and loss are those of the whole
batch on one device. A batch that is smaller than the plan's has fewer micro-batches (`course`).
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpipe_exec.devices.accelerator import beside, runs_in_order, synchronize, to_device
from gpipe_exec.devices.groups import make_communicators
from gpipe_exec.devices.recorder import Recorder
from gpipe_exec.engine.course import Course, course_of, plan_for_batch
from gpipe_exec.engine.delivery import Acknowledged
from gpipe_exec.engine.held import Held
from gpipe_exec.engine.lane import Collect, LaneOfRank
from gpipe_exec.engine.losses import Loss, PlainMeanCheck, joined, power_of_two_near_mean
from gpipe_exec.engine.messages import NUMBERS, Lane, Receiver, Sender, Value, flatten, form_of, unflatten
from gpipe_exec.engine.progress import refuse_deadlock
from gpipe_exec.engine.repeats import RepeatCheck
from gpipe_exec.engine.slices import divided_loss, put_together
from gpipe_exec.engine.tied import sum_gradients
from gpipe_exec.engine.transport import ByEvents, ByThread, PeerToPeer, Transfers, Transport
from gpipe_exec.engine.wires import Receive, communicators, wire_of
from gpipe_sim.plan.actions import Action
from gpipe_sim.plan.plan import Plan
from gpipe_sim.scenario.schema import Precision


class Pipeline(Held):
    """A model cut into stages, of which this process holds one or several.

    Every rank builds it with the same layers and plan, under torchrun with as many processes as the plan has ranks, in
    all its replicas. Each replica gets its own share of the batch, and all get the same loss and gradients: those of
    the whole batch.

    Layers that are built on the meta device cost nothing until a rank materialises its own (`materialize`).

    >>> pipe = Pipeline(layers, plan, loss)
    >>> optimizer = torch.optim.Adam(pipe.parameters())
    >>> for inputs, targets in data:
    ...     loss = pipe.step(inputs, targets)  # accumulates exact gradients
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        layers: nn.Sequential | Sequence[nn.Module],
        plan: Plan,
        loss: Loss,
        *,
        device: torch.device | str | None = None,
        recorder: Recorder | None = None,
        carry: Callable[[PeerToPeer, int], Transport] | None = None,
        collect: Collect | None = None,
        in_order: bool | None = None,
        checks: bool = True,
        precision: Precision | None = None,
    ) -> None:
        """`carry`, given the direct way between two ranks and its edge, may return another way for messages; `in_order`
        says whether that has no tags (`wires`), which otherwise follows from the device. `collect` takes the place of
        the collectives of replicas.

        With `checks`, the first step and the first evaluation make sure that a loss which returns one number is a plain
        mean, and that recomputations repeat what was computed. They take some time and memory, once.

        Where the plan's dtype has 16 bits and its precision is mixed, weights are held in fp32 (module `precision`),
        unless another `precision` is told.
        """
        super().__init__(layers, plan, loss, device=device, precision=precision, divides=collect is None)
        self.recorder = recorder or Recorder(self.device)
        self._check_step = self._check_evaluation = checks
        self._divides: bool | None = None
        """Whether the loss returns sums and counts; None before the first step."""
        self._telling: tuple[torch.Tensor, dist.Work] | None = None
        """What this rank is telling the others."""
        self._collect = collect
        self._lane = LaneOfRank(self._program.lanes[self._position], self.device)
        self._carry = carry or self._direct
        self._in_order = runs_in_order(self.device) if in_order is None else in_order
        self._transports: dict[int, Transport] = {}
        """By channel, as the next two."""
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._shares = [plan.samples] * plan.replicas
        """Samples of each replica in this step."""
        self._sums = True
        """Whether replicas sum the gradients of a step."""
        self._courses: dict[int, Course] = {}
        """By the number of samples."""
        self._connect()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Meanwhile replicas do not sum the gradients of their steps: the next step outside of it does, all at once.

        >>> with pipe.no_sync():
        ...     pipe.step(inputs, targets, weight=0.5)
        >>> pipe.step(more_inputs, more_targets, weight=0.5)
        """
        self._sums = False
        try:
            yield
        finally:
            self._sums = True

    # --- one step --------------------------------------------------------------------------------------------------

    def step(
        self, inputs: Value, targets: Any, update: Callable[[], object] | None = None, *, weight: float = 1.0
    ) -> torch.Tensor:
        """Forward and backward of one mini-batch; every rank gets its mean loss.

        The inputs matter on the first rank and the targets on the last; both are split along their first dimension
        into the plan's micro-batches, or fewer where there are fewer samples. With replicas, each is given its share of
        the batch, and the loss is that of all. Gradients, times `weight`, are added to those that are there: 1/4 makes
        those of four steps their mean. `update`, if given, is called as soon as this rank's gradients are complete,
        while other ranks may still be computing theirs.

        In mixed precision with fp16, a step whose gradients overflow on any rank leaves the gradients of all ranks as
        they were before it, and `update` is not called; `overflowed` says so.
        """
        lowered = self._mixed.lowered() if self._mixed is not None else nullcontext()
        with lowered, self._divided_loss():
            return self._step(inputs, targets, update, weight)

    def _divided_loss(self) -> AbstractContextManager[None]:
        return divided_loss(1 if self._slices is None else self._slices.num)

    def _step(self, inputs: Value, targets: Any, update: Callable[[], object] | None, weight: float) -> torch.Tensor:
        record, last_stage = self.recorder, self.plan.num_stages - 1
        course = self._agreed_course(inputs)
        data, answers = self._micro_batches(course, inputs, targets)
        weights = [weight * size / sum(self._shares) for size in course.plan.sizes]
        passed: dict[tuple[int, int], Value] = {}
        """Stage, micro-batch -> what its next F takes, from another stage of this rank."""
        gradients: dict[tuple[int, int], list[torch.Tensor]] = {}
        """Stage, micro-batch -> what its backward takes, from another stage of this rank or by its R."""
        losses: list[torch.Tensor] = []
        whole_loss: torch.Tensor | None = None
        earlier = self._begin_step(course, targets, weight)
        record.begin_step()  # which may wait for the device: no receive may be on it, that would wait for another rank
        self._begin_messages(course, course.posts[0], "step")
        self._lane.begin_step()
        if self.plan.shard == "parameters":
            self._begin_gathers()
        elif self._shards is not None:
            self._shards.gather()  # if the latest update came after its step
        for row, (kind, index, m) in enumerate(course.actions):
            source, target = course.sources[row], course.targets[row]
            stage = self._stages[index]
            waited_from = record.mark()
            value: Value = source.take(m) if source is not None else None
            self._lane.wait_for(course.gathers_before.get(row, ()))
            self._post(course.posts[2 * row + 1])
            if kind == "U":
                whole_loss = self._complete_gradients(losses, earlier, weight)
            self._reap()
            started = record.mark()
            if source is not None:
                value = self._gathered(value)
            if kind == "F":
                if index == 0:
                    value, data[m] = data[m], None
                elif source is None:
                    value = passed.pop((index, m))
                output = stage.forward(m, value, answers[m], weights[m])
                ended = record.mark()
                if index == last_stage:
                    losses.append(output.detach())
                elif target is not None:
                    self._send_output(index, m, output, target)
                else:
                    passed[index + 1, m] = _without_graph(output)
                del output
            elif kind == "R":
                if source is not None:
                    gradients[index, m] = value
                stage.recompute(m)
                ended = record.mark()
            elif kind in ("B", "I"):
                given = value if source is not None else gradients.pop((index, m), [])
                result = (stage.backward if kind == "B" else stage.backward_inputs)(m, given)
                ended = record.mark()
                if target is not None:
                    target.send(m, self._cut(result))
                elif index > 0:
                    gradients[index - 1, m] = result
                del given, result
            elif kind == "W":
                stage.backward_weights(m)
                ended = record.mark()
            else:
                if update is not None and not self.overflowed:
                    update()
                ended = record.mark()
                if update is not None and self.plan.shard == "optimizer":
                    self._begin_gathers()
            del value
            if row in course.sums_after and self._sums_early:
                self._begin_sum(index)
            self._post(course.posts[2 * row + 2])
            record.action(waited_from, started, ended)
            self._reap()
        for sender in self._senders.values():
            sender.finish()
        self._end_collectives(updated=update is not None)
        for stage in self._stages.values():
            stage.averages.commit(self._replicas.gather if self.plan.replicas > 1 else None)
        record.end_step(
            [
                target.delivered[action.microbatch] if target is not None else float("nan")
                for action, target in zip(course.actions, course.targets, strict=True)
            ],
            [self._lane.marks(one.action) for one in course.lane],
        )
        self._hear_out()
        self._check_step = False
        return whole_loss if whole_loss is not None else self._share_loss(losses, [], weight)

    def evaluate(self, inputs: Value, targets: Any) -> torch.Tensor:
        """The mean loss of a mini-batch in evaluation mode, without gradients; on every rank."""
        course = self._agreed_course(inputs)
        answers = self._split(course, targets, "targets") if self.is_last else []
        losses: list[torch.Tensor] = []
        counts: list[torch.Tensor] = []
        check = PlainMeanCheck(self._loss) if self._check_evaluation else None

        def judge(m: int, output: Value) -> None:
            result = self._loss(output, answers[m])
            if isinstance(result, tuple):
                losses.append(result[0].detach())
                counts.append(torch.as_tensor(result[1], dtype=torch.double, device=self.device))
            else:
                losses.append(result * (course.plan.sizes[m] / sum(self._shares)))
                if check is not None:
                    check.note(output, answers[m])

        with self._divided_loss():
            self._forwards(course, inputs, judge)
        self._check_evaluation = False
        return self._share_loss(losses, counts, 1.0)

    def predict(self, inputs: Value) -> Value | None:
        """The model's output for a mini-batch in evaluation mode, without gradients; None on all but the last rank."""
        course = self._agreed_course(inputs)
        outputs: list[Value] = [None] * course.plan.num_microbatches
        self._forwards(course, inputs, outputs.__setitem__)
        self._hear_out()
        return joined([put_together(output) for output in outputs]) if self.is_last else None

    def _forwards(self, course: Course, inputs: Value, take: Callable[[int, Value], None]) -> None:
        """The forwards of the program in evaluation mode, in their order; `take` gets each output of the last stage."""
        with self.lowered():
            self._lowered_forwards(course, inputs, take)

    def _lowered_forwards(self, course: Course, inputs: Value, take: Callable[[int, Value], None]) -> None:
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        data = self._split(course, inputs, "inputs") if self.is_first else []
        passed: dict[tuple[int, int], Value] = {}
        posts = iter(course.evaluation_posts)
        self._begin_messages(course, next(posts), "evaluate")
        try:
            with torch.no_grad():
                for (kind, index, m), source, target in zip(
                    course.actions, course.sources, course.targets, strict=True
                ):
                    if kind != "F":
                        continue
                    value = source.take(m) if source is not None else data[m] if index == 0 else passed.pop((index, m))
                    if source is not None:
                        value = self._gathered(value)
                    self._post(next(posts))
                    output = self._stages[index].evaluate(value)
                    if target is not None:
                        target.send(m, self._cut(output))
                    elif index < self.plan.num_stages - 1:
                        passed[index + 1, m] = output
                    else:
                        take(m, output)
                    self._post(next(posts))
            for sender in self._senders.values():
                sender.finish()
        finally:
            for module, was_training in modes.items():
                module.training = was_training

    def _agreed_course(self, inputs: Value) -> Course:
        """What every rank does: it follows from the first stage's inputs, whose number it tells the others."""
        mine = 0
        if self.is_first:
            lengths = {len(tensor) for tensor in flatten(inputs)[0]}
            mine = lengths.pop() if len(lengths) == 1 else -1
        self._shares = self._replicas.shares(mine) if self.is_first else [0] * self.plan.replicas
        if self.plan.num_ranks > 1:  # in host memory: no device is waited for
            told = torch.tensor(self._shares, dtype=torch.int64)
            self._tell(told, 0, self._replicas.pipeline_on_host)
            self._shares = told.tolist()
        wrong = [share for share in self._shares if not 1 <= share <= self.plan.samples]
        if wrong:
            found = f"a mini-batch of {wrong[0]} samples" if wrong[0] >= 0 else "inputs of different lengths"
            each = " in each replica" * (self.plan.replicas > 1)
            raise ValueError(
                f"{found}, but the plan was made for {self.plan.samples}{each}: expected as many, or fewer"
            )
        mine = self._shares[self.replica]
        if mine not in self._courses:
            plan = plan_for_batch(self.plan, mine)
            ends = self._senders, self._receivers
            self._courses[mine] = course_of(plan, self._position, *ends, in_order=self._in_order)
        return self._courses[mine]

    def _tell(self, told: torch.Tensor, stage: int, group: dist.ProcessGroup | None = None) -> None:
        """Every rank of the replica gets what the one that holds this stage has; it itself goes on at once."""
        group, source = group or self._replicas.pipeline, self._replicas.process_of(stage)
        if self._replicas.process != source:
            dist.broadcast(told, src=source, group=group)
            return
        self._hear_out()
        work = dist.broadcast(told, src=source, group=group, async_op=True)
        assert work is not None, "this rank belongs to the group"
        self._telling = (told, work)

    def _hear_out(self) -> None:
        """Wait until what this rank told has been heard."""
        if self._telling is not None:
            self._telling[1].wait()
            self._telling = None

    def _micro_batches(self, course: Course, inputs: Value, targets: Any) -> tuple[list[Value], list[Any]]:
        """Inputs and targets as micro-batches, where this rank needs them."""
        nothing = [None] * course.plan.num_microbatches
        return (
            self._split(course, inputs, "inputs") if self.is_first else nothing,
            self._split(course, targets, "targets") if self.is_last else list(nothing),
        )

    def _begin_step(self, course: Course, targets: Any, weight: float) -> dict[nn.Parameter, torch.Tensor]:
        """Prepare the stages. Where the step's gradients are divided at its end, those there are set aside."""
        if not weight > 0:
            raise ValueError(f"a step of weight {weight}, expected more than 0")
        for index, stage in self._stages.items():
            stage.recomputed, stage.split = course.plan.recomputed(index), course.split[index]
            dropped, unit = course.plan.dropped(index), course.plan.recompute_unit
            stage.by_layer = dropped if unit == "layer" else ()
            stage.attention = dropped if unit == "attention" else ()
            stage.repeats = RepeatCheck() if self._check_step else None
            if stage.loss is not None:
                stage.counts = []
                stage.loss_gradient = self._mixed.scale if self._mixed is not None else 1.0
                stage.sum_factor = self._sum_factor(targets, course.batch)
                stage.plain_mean = PlainMeanCheck(stage.loss) if self._check_step else None
        earlier: dict[nn.Parameter, torch.Tensor] = {}
        parts = [one.parameter for one in self._tied]
        if (
            self._divides is not False or self.plan.replicas > 1 or self._slices is not None
        ):  # what is there has been summed already
            parts = list(self.module.parameters())
        if self._mixed is not None:
            parts = self._mixed.weights
        for parameter in parts:
            if parameter.grad is not None:
                earlier[parameter], parameter.grad = parameter.grad, None
        return earlier

    def _sum_factor(self, targets: Any, samples: int) -> float:
        """The same for all replicas, so that their sums can be added; not asked for where the loss is a mean."""
        factor = power_of_two_near_mean(targets, samples)
        return factor if self._divides is False else self._replicas.highest(factor)

    @property
    def _sums_early(self) -> bool:
        """Whether a stage's gradients are summed over replicas as soon as they are complete.

        Not where replicas have different shares, so that orders may differ.
        """
        return self._sums and self.plan.replicas > 1 and len(set(self._shares)) == 1

    def _begin_sum(self, index: int) -> None:
        """The gradients of a stage are complete."""
        if self._slices is not None:
            self._slices.sum_parts(self._summed[index], self._with_gradients(index))
        self._begin_collective(Action("S", index, -1), self._replicas.begin_sum)

    def _with_gradients(self, index: int) -> list[nn.Parameter]:
        """What has the gradients of the parameters that are summed with a stage."""
        parameters = self._summed[index]
        return parameters if self._mixed is None else self._mixed.with_gradients(parameters)

    def _begin_gathers(self) -> None:
        """Parameters that replicas divide become whole, stage by stage."""
        for collective in self._program.lanes[self._position]:
            if collective.kind == "G":
                assert self._collect or self._shards, "replicas divide something"
                self._begin_collective(collective.action, self._shards.begin_gather if self._shards else None)

    def _begin_collective(self, action: Action, begin: Callable[[Sequence[nn.Parameter]], Transfers] | None) -> None:
        now = self.recorder.mark()
        if self._collect is not None and self._replicas.alike is not None:
            transfers: Transfers = [(self._collect(action, self._replicas.alike), torch.empty(0))]
        else:
            assert begin is not None, "nothing takes the place of the collective"
            transfers = begin(self._with_gradients(action.stage))
        self._lane.begin(action, now, transfers)

    def _end_collectives(self, *, updated: bool) -> None:
        """The step ends after its collectives. What replicas divide is whole again, or let go of."""
        gathers = [one.action for one in self._program.lanes[self._position] if one.kind == "G"]
        self._lane.wait_for(gathers)
        self._lane.finish()
        if self._shards is not None:
            self._shards.end_step(gathered=updated)

    def _complete_gradients(
        self, losses: list[torch.Tensor], earlier: dict[nn.Parameter, torch.Tensor], weight: float
    ) -> torch.Tensor | None:
        """Sum those of replicas and tied weights, and divide all by what the loss has counted, if it has.

        The mean loss, where it is known then.
        """
        last = self._stages.get(self.plan.num_stages - 1)
        if last is not None and self._divides is not None and self._divides != bool(last.counts):
            raise ValueError("the loss returned (sum, count) in one step and one number in another, expected the same")
        if self._sums and not self._sums_early:
            for index in self._summed:
                self._begin_sum(index)
        self._lane.wait_for([Action("S", index, -1) for index in self._summed])
        self._replicas.end_sums()
        if self._mixed is not None:
            self._mixed.raise_gradients()
        if not self.overflowed:
            if self._slices is not None and not (self._sums and self.plan.replicas > 1):
                parameters = list(self.module.parameters())
                self._slices.sum_parts(parameters, parameters)
            sum_gradients(self._tied)
        loss: torch.Tensor | None = None
        if self._divides is not False:
            whole, divisor = self._told_loss(losses, last.counts if last else [], last.sum_factor if last else 1.0)
            self._divides = not divisor.isnan() if last is None else bool(last.counts)
            loss = whole if self._divides else whole / weight
            if self._divides:
                for parameter in self.module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(divisor / weight)
        if self.plan.replicas > 1:
            self._replicas.settle(list(self.module.parameters()), earlier, summed=self._sums)
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        if self._shards is not None and self._sums:
            self._shards.take_gradients()
        return loss

    def _told_loss(
        self, losses: list[torch.Tensor], counts: list[torch.Tensor], factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole loss on every rank, and what gradients are to be divided by; NaN where the loss is a mean."""
        told = torch.full((2,), float("nan"), dtype=torch.double, device=self.device)
        if losses:
            told[0] = torch.stack(losses).double().sum()
        if counts:
            told[1] = torch.stack(counts).sum() * factor
        if self.is_last:
            self._replicas.add(told)
        if self.plan.num_ranks > 1:
            self._tell(told, self.plan.num_stages - 1)
        return torch.where(told[1].isnan(), told[0], told[0] / told[1]), told[1]

    def _begin_messages(self, course: Course, receives: Sequence[Receive], purpose: str) -> None:
        """A step or an evaluation begins, with the receives that come first."""
        kinds = [(purpose, size) for size in course.plan.sizes]
        for sender in self._senders.values():
            sender.begin(kinds)
        for receiver in self._receivers.values():
            receiver.begin(kinds)
        self._post(receives)

    def _post(self, receives: Sequence[Receive]) -> None:
        for receive in receives:
            self._receivers[receive.channel].lane.post(receive)

    def _reap(self) -> None:
        """Let go of what has been delivered by now."""
        for sender in self._senders.values():
            sender.reap()

    def _send_output(self, index: int, m: int, output: Value, target: Sender) -> None:
        """Send it on; from now on the form of its gradient is known, which may be received."""
        output = self._cut(output)
        target.send(m, output)
        self._gradient_receivers[index].knows(m, form_of(output).gradients())

    def _cut(self, value: Value) -> Value:
        """What this process sends of a value."""
        return self._slices.cut(value) if self._slices is not None and self._slices.sends_slices else value

    def _gathered(self, value: Value) -> Value:
        """The reverse, of what arrives."""
        return self._slices.gathered(value) if self._slices is not None and self._slices.sends_slices else value

    def _share_loss(self, losses: list[torch.Tensor], counts: list[torch.Tensor], weight: float) -> torch.Tensor:
        loss, _ = self._told_loss(losses, counts, 1.0)
        self._hear_out()
        return loss / weight

    def _split(self, course: Course, value: Value, what: str) -> list[Value]:
        """The mini-batch as micro-batches, each tensor along its first dimension."""
        tensors, nesting = flatten(value)
        lengths = {len(tensor) for tensor in tensors}
        if lengths != {course.batch}:
            found = ", ".join(map(str, sorted(lengths)))
            raise ValueError(f"{what} of {found} samples, but the first stage's inputs are {course.batch}")
        if self._mixed is not None and what == "inputs":
            tensors = [self._mixed.cast(tensor) for tensor in tensors]
        pieces = [torch.split(to_device(tensor, self.device), list(course.plan.sizes)) for tensor in tensors]
        return [unflatten(nesting, [piece[m] for piece in pieces]) for m in range(course.plan.num_microbatches)]

    # --- connections -----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """A sender or a receiver for each of the program's channels that begins or ends here."""
        plan, program, position = self.plan, self._program, self._position
        M, overlap = plan.num_microbatches, plan.scenario.cluster.overlap
        numbers = communicators(program)
        if self._in_order:
            refuse_deadlock(program, plan.window, blocking=not overlap)
        groups = make_communicators(max(numbers.values(), default=-1) + 1, self.device)
        self._groups = [group for group in groups if group is not None]
        """Made here, beside the world."""
        self._gradient_receivers: dict[int, Receiver] = {}
        """By the stage that sent the output."""
        lanes: dict[object, Lane] = {}
        sides = [
            beside(self.device) for _ in groups
        ]  # where deliveries of a communicator are waited for, in their order
        for number, channel in enumerate(program.channels):
            if position not in (channel.sender, channel.receiver):
                continue
            peer = self._replicas.process_of(channel.target if channel.sender == position else channel.source)
            communicator = numbers[wire_of(channel)]
            first_tag = number * M * NUMBERS
            way = PeerToPeer(peer, groups[communicator], first_tag, communicator)
            aside = PeerToPeer(peer, self._replicas.pipeline_on_host, first_tag)
            transport = self._transports[number] = self._carry(way, channel.edge)
            if channel.sender == position:
                device = sides[communicator]
                deliveries = ByThread() if device is None else ByEvents(device)
                self._senders[number] = Sender(
                    transport, aside, deliveries, self.device, tells_form=channel.is_forward, blocking=not overlap
                )
            else:
                lane = lanes.setdefault(wire_of(channel) if self._in_order else number, Lane())
                sent = program.microbatches[number * M : (number + 1) * M].tolist()
                receiver = Receiver(transport, aside, self.device, sent, channel.is_forward, lane)
                lane.receivers[number] = self._receivers[number] = receiver
                if not channel.is_forward:
                    self._gradient_receivers[channel.target] = receiver
        if self._in_order:
            self._warm_up(numbers)

    def _warm_up(self, numbers: Mapping[tuple[int, int], int]) -> None:
        """Use every communicator once, one after the other: a first use stops the host until the peer joins, which in
        the middle of a step may need this very host."""
        for wire, _ in sorted(numbers.items(), key=lambda item: item[1]):
            channel = next(n for n, other in enumerate(self._program.channels) if wire_of(other) == wire)
            if self._position in wire:
                byte, way = torch.zeros(1, dtype=torch.uint8, device=self.device), self._transports[channel]
                (way.isend(byte, 0) if self._position == wire[0] else way.irecv(byte, 0)).wait()
        if self._mixed is not None and dist.is_initialized():
            dist.all_reduce(torch.zeros(1, device=self.device))
        self._share_loss([], [], 1.0)
        synchronize(self.device)

    def _direct(self, direct: PeerToPeer, edge: int) -> Transport:
        """Only gloo calls a message sent that has not arrived, which matters to senders that wait."""
        overlap = self.plan.scenario.cluster.overlap
        return direct if overlap or self._in_order else Acknowledged(direct)

    def close(self) -> None:
        """End the threads that wait for deliveries, let go of communicators, and finish a checkpoint being written."""
        for sender in self._senders.values():
            sender.close()
        for transport in self._transports.values():
            if isinstance(transport, Acknowledged):
                transport.close()
        self._lane.close()
        if self._checkpoints is not None:
            self._checkpoints.finish()
        for group in (*self._groups, *{one.group for one in self._tied if one.group is not None}):
            dist.destroy_process_group(group)
        self._replicas.close()


def _without_graph(value: Value) -> Value:
    """The same tensors, for another stage, which has a graph of its own."""
    tensors, nesting = flatten(value)
    return unflatten(nesting, [tensor.detach() for tensor in tensors])


def pin_to_cores() -> bool:
    """Give each rank of this machine cores of its own, as many as there are for each, and as many threads.

    A rank that wanders between cores, or shares one while another is free, cannot be predicted. Where ranks outnumber
    cores they take them in turns; returns whether that is so.
    """
    if not hasattr(os, "sched_setaffinity"):  # only Linux lets a process choose its cores
        return False
    local_rank, local_world = (int(os.environ.get(name, default)) for name, default in _LOCAL)
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // local_world)
    first = local_rank * each % len(cores)
    os.sched_setaffinity(0, cores[first : first + each])
    torch.set_num_threads(each)
    return local_world > len(cores)


_LOCAL = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
