"""What one rank holds of a model: its stages, their parameters, and the state that is saved and loaded.

Layers and parameters have the names of the whole model, so that a checkpoint of any plan can be read under any other.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpipe_exec.devices.accelerator import default_device
from gpipe_exec.engine.checkpoint import (
    CheckpointError,
    Checkpoints,
    as_tensor,
    forms,
    from_tensor,
    optimizer_state,
    optimizer_tensors,
    random_states,
    set_random_states,
)
from gpipe_exec.engine.losses import Loss
from gpipe_exec.engine.materialize import materialize
from gpipe_exec.engine.precision import mixed_of
from gpipe_exec.engine.replicas import Replicas
from gpipe_exec.engine.shards import Shards, refuse_shards
from gpipe_exec.engine.slices import Slices, plain_name, refuse_tensor, whole_loss
from gpipe_exec.engine.stage import Stage
from gpipe_exec.engine.tied import shared_parameters, tie
from gpipe_sim.plan.plan import Plan, only_what_runs
from gpipe_sim.plan.program import program_of
from gpipe_sim.scenario.schema import Precision


class Held:
    """The part of a model that one rank of a plan holds."""

    def __init__(
        self,
        layers: nn.Sequential | Sequence[nn.Module],
        plan: Plan,
        loss: Loss,
        *,
        device: torch.device | str | None,
        precision: Precision | None,
        divides: bool,
    ) -> None:
        """`divides` says whether replicas divide what the plan says, and do not only take the time for it."""
        only_what_runs(plan, "the engine")
        refuse_shards(plan, precision)
        if divides:
            refuse_tensor(plan)
        if len(layers) != plan.profile.num_layers:
            raise ValueError(f"the model has {len(layers)} layers, but the plan was made for {plan.profile.num_layers}")
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != plan.world:
            found = f"{world} process{'es' * (world > 1)}"
            each = f"{plan.replicas} replicas of {plan.num_ranks}" if plan.replicas > 1 else f"{plan.num_ranks}"
            more = f", each of {plan.tensor} members" if plan.tensor > 1 else ""
            one = "member" if plan.tensor > 1 else "rank"
            raise ValueError(f"{found} for a plan of {each} ranks{more}, expected one for each {one}")
        self.plan = plan
        self.device = torch.device(device) if device is not None else default_device()
        self._replicas = Replicas(plan, self.device)
        self._position, self.replica = self._replicas.position, self._replicas.replica
        self.rank = plan.ranks.index(plan.pipeline[self._position])
        """Its number in the pipeline, in the order of `Plan.ranks`."""
        self.stage_indices = plan.stages_of(plan.ranks[self.rank])
        self._program = program_of(plan)
        self.actions = self._program.order[self._position]
        names = [name for name, _ in layers.named_children()] if isinstance(layers, nn.Sequential) else None
        self._names = names or [str(index) for index in range(len(layers))]
        self._has_own_names = bool(getattr(layers, "own_names", False))
        self._state_names = {
            self._called(f"{name}.{key}")
            for name, layer in zip(self._names, layers, strict=True)
            for key in layer.state_dict(keep_vars=True)
        }
        """Of the whole model."""
        self._refuse_different_plans()
        own = [layer for index in self.stage_indices for layer in range(len(layers))[plan.stages[index]]]
        if self.device.type != "meta":
            materialize(layers, self._names, own, self.device)
        self._first_names = {
            name: called[0] for called in shared_parameters(layers, self._names, plan).values() for name in called
        }
        """Name -> the name under which an optimizer's state of a tied parameter is saved."""
        self._tied = [
            one for one in tie(layers, self._names, plan, self.device) if self._replicas.process in one.processes
        ]
        self._slices: Slices | None = None
        if self._replicas.tensor is not None and divides:
            self._slices = slices = Slices(self._replicas.tensor, sequence=plan.scenario.plan.sequence_split)
            for index in own:
                layers[index].to(self.device)
                slices.divide(layers[index], self._names[index], is_last=index == len(layers) - 1)
            self._tied = [one._replace(parameter=slices.now(one.parameter)) for one in self._tied]
            loss = whole_loss(loss)
        self._loss = loss
        self.module = nn.Sequential()
        self._stages = {index: self._make_stage(layers, index) for index in self.stage_indices}
        self._summed = self._stages_to_sum()
        """Stage -> parameters whose gradients replicas sum with its own, in the order of the sums."""
        self._mixed = mixed_of(plan, self.module, precision)
        self._replicas.start_alike(self.module)
        self._shards: Shards | None = None
        if self._replicas.alike is not None and plan.shard != "none" and divides:
            stays_whole = plan.shard == "optimizer"
            stages = self._summed.values()
            self._shards = Shards(stages, self._replicas.alike, self.replica, stays_whole=stays_whole)
        self._checkpoints: Checkpoints | None = None

    def _make_stage(self, layers: nn.Sequential | Sequence[nn.Module], index: int) -> Stage:
        """One of this rank's stages; its layers have the names of the whole model, here and in `module`."""
        own = nn.Sequential()
        for layer in range(len(layers))[self.plan.stages[index]]:
            own.add_module(self._names[layer], layers[layer].to(self.device))
            self.module.add_module(self._names[layer], layers[layer])
        attention = self.plan.profile.table.get("attention_bytes")
        return Stage(
            module=own,
            device=self.device,
            is_first=index == 0,
            loss=self._loss if index == self.plan.num_stages - 1 else None,
            recomputed=(),
            has_attention=attention is not None and bool(attention[self.plan.stages[index]].any()),
            name=f"stage {index} on rank {self.rank}",
        )

    def _stages_to_sum(self) -> dict[int, list[nn.Parameter]]:
        """What stages of this rank have in common is summed once, with the last of them."""
        order = [one.stage for one in self._program.lanes[self._position] if one.kind == "S"]
        last = {parameter: stage for stage in order for parameter in self._stages[stage].module.parameters()}
        return {stage: [parameter for parameter in last if last[parameter] == stage] for stage in order}

    @property
    def is_first(self) -> bool:
        """Whether this rank takes the inputs."""
        return 0 in self._stages

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.plan.num_stages - 1 in self._stages

    def parameters(self) -> list[nn.Parameter]:
        """Of this rank's stages, for its optimizer; the pieces of them that it updates, where replicas divide it."""
        return list(map(self._piece, self.module.parameters()))

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The same with their names in the whole model."""
        named = self.module.named_parameters()
        return [(self._called(name), self._piece(parameter)) for name, parameter in named]

    def _piece(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer of this replica updates of a parameter: all of it, unless replicas divide it."""
        return parameter if self._shards is None else self._shards.pieces[parameter]

    def _called(self, name: str) -> str:
        """The whole model's name for something in `module`: layers of a module that was split keep its own names."""
        return plain_name(name).partition(".")[2] if self._has_own_names else plain_name(name)

    def parameter_groups(self, options: Callable[[str, nn.Parameter], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Groups for an optimizer: parameters with equal `options(name, parameter)` together.

        Every rank gets the same groups in the same order, if need be without parameters, so that a schedule of learning
        rates finds them by number.

        >>> torch.optim.AdamW(pipe.parameter_groups(lambda name, p: {"weight_decay": 0.0 if p.dim() == 1 else 0.1}))
        """
        chosen = [(dict(options(name, parameter)), parameter) for name, parameter in self.named_parameters()]
        found: list[list[dict[str, Any]]] = [[] for _ in range(self.plan.num_ranks)]
        mine = [kind for number, (kind, _) in enumerate(chosen) if kind not in [other for other, _ in chosen[:number]]]
        if self.plan.num_ranks > 1:
            dist.all_gather_object(found, mine, group=self._replicas.pipeline)
        else:
            found = [mine]
        kinds: list[dict[str, Any]] = []
        for rank in self.plan.placement:
            kinds += [kind for kind in found[self.plan.ranks.index(rank)] if kind not in kinds]
        return [kind | {"params": [p for other, p in chosen if other == kind]} for kind in kinds] or [{"params": []}]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As torch's, of the gradients of all stages; returns their norm before, on every rank."""
        elsewhere = self._tied_elsewhere()
        counted = [p for p in self.module.parameters() if self._slices is None or self._slices.is_counted(p)]
        pieces = [piece for piece in map(self._piece, counted) if piece not in elsewhere]
        mine = [piece.grad for piece in pieces if piece.grad is not None and piece.numel()]
        norm = torch.nn.utils.get_total_norm(mine, norm_type).to(self.device, torch.double)
        # Replicas have the same gradients, or pieces of them.
        groups = [self._replicas.pipeline if self._shards is None else None]
        if self._slices is not None and self._shards is None:
            groups.append(self._slices.group)
        if self.plan.num_ranks > 1 or self._shards is not None or self._slices is not None:
            for group in groups:
                if norm_type == float("inf"):
                    dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
                else:
                    norm = norm**norm_type
                    dist.all_reduce(norm, group=group)
                    norm = norm ** (1 / norm_type)
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def _tied_elsewhere(self) -> set[nn.Parameter]:
        """Those that another rank of this replica counts as its own."""
        return {self._piece(one.parameter) for one in self._tied if one.processes[0] != self._replicas.process}

    @property
    def overflowed(self) -> bool:
        """Whether the gradients of the latest step were dropped on all ranks, because one did not fit into fp16."""
        return self._mixed is not None and self._mixed.overflowed

    def lowered(self) -> AbstractContextManager[None]:
        """Meanwhile the layers have the weights that they compute with."""
        return self._mixed.lowered() if self._mixed is not None else self._whole()

    def _refuse_different_plans(self) -> None:
        """Ranks that cut the model differently would wait for each other forever."""
        if self.plan.world > 1:
            plan, order = self.plan, program_of(self.plan).order
            digest = hashlib.sha256(b"".join(a.kinds + a.stages.tobytes() + a.microbatches.tobytes() for a in order))
            shape = (plan.balance, plan.placement, plan.num_microbatches, plan.replicas, plan.shard, plan.tensor)
            mine = (*shape, plan.scenario.plan.sequence_split, plan.schedule, digest.hexdigest()[:12])
            all_plans: list[Any] = [None] * self.plan.world
            dist.all_gather_object(all_plans, mine)
            if any(other != mine for other in all_plans):
                raise ValueError(f"the ranks have different plans, expected one plan file for all: {all_plans}")

    def _whole(self) -> AbstractContextManager[None]:
        """Meanwhile parameters that replicas divide are whole."""
        return self._shards.whole() if self._shards is not None else nullcontext()

    # --- state -----------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> None:
        """Training mode, or evaluation mode, of this rank's layers."""
        self.module.train(mode)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state as the one-process module has it; empty but on rank 0 of the first replica.

        It comes to rank 0 a tensor's rank at a time, in host memory. `save` needs no rank to hold all of it.
        """
        with self._whole():
            mine = {plain_name(name): tensor.cpu() for name, tensor in self._state() if not self.replica}
        if self.replica > 0 or self._replicas.member > 0:
            return {}
        if self.plan.num_ranks == 1:
            return {self._called(name): tensor for name, tensor in mine.items()}
        parts: list[dict[str, torch.Tensor] | None] | None = [None] * self.plan.num_ranks if self.rank == 0 else None
        dist.gather_object(mine, parts, dst=0, group=self._replicas.pipeline)
        merged = {name: tensor for part in parts or () if part for name, tensor in part.items()}
        order = {name: place for place, name in enumerate(self._names)}
        in_order = sorted(merged, key=lambda name: order[name.split(".")[0]])
        return {self._called(name): merged[name] for name in in_order}

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of `module`, one after the other, whole; all members of a tensor group take part in each."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name, tensor in self.module.state_dict().items():
            parameter = parameters.get(name) if self._slices is not None else None
            yield name, tensor if parameter is None or self._slices is None else self._slices.whole(parameter, tensor)

    def _own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """What this member of a tensor group holds of something in `module`."""
        parameter = dict(self.module.named_parameters(remove_duplicate=False)).get(name)
        return whole if self._slices is None or parameter is None else self._slices.own(parameter, whole)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part of the whole model's state, as the module in one process saves it."""
        unknown = sorted(set(state) - self._state_names)
        if unknown:
            raise ValueError(f"the state has {', '.join(unknown[:5])}, which the model has not")
        with self._whole():
            own = {name: self._called(name) for name in self.module.state_dict()}
            found = {name: self._own_part(name, state[called]) for name, called in own.items() if called in state}
            self.module.load_state_dict(found)

    def save(
        self,
        folder: Path | str,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        position: Mapping[str, Any] | None = None,
        *,
        keep: int = 2,
        wait: bool = True,
    ) -> None:
        """Write a checkpoint of model, optimizer, random states and position (anything that JSON can hold).

        Every rank calls it, and writes its own part. Without `wait` it is written while training goes on, from copies
        in host memory. The last `keep` checkpoints are kept.
        """
        with self._whole():
            self._save(Path(folder), optimizer, step, position, keep=keep, wait=wait)

    def _save(
        self,
        folder: Path,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        position: Mapping[str, Any] | None,
        *,
        keep: int,
        wait: bool,
    ) -> None:
        tensors: dict[str, torch.Tensor] = {}
        writes = self.replica == 0 and self._replicas.member == 0
        if self.replica == 0:
            tensors = {f"model.{self._called(name)}": tensor for name, tensor in self._state() if writes}
        if optimizer is not None and (self.replica == 0 or self._shards is not None):
            names, elsewhere = self._names_of_parameters(), self._tied_elsewhere()
            mine = {names[parameter] for parameter in names if parameter not in elsewhere}
            found = self._whole_states(optimizer_tensors(optimizer, names))
            tensors |= {key: value for key, value in found if _parameter_of(key) in mine and writes}
        process = self._replicas.process
        tensors |= {f"random.{process}.{name}": state for name, state in random_states(self.device).items()}
        if process == 0:
            own: dict[str, float] = {"step": step, "ranks": self.plan.world}
            if self._mixed is not None:
                own["loss_scale"] = self._mixed.scale
            tensors["position"] = as_tensor(dict(position or {}) | own)
        self._checkpointing().save(folder, tensors, step, keep=keep, wait=wait)

    def load(self, folder: Path | str, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
        """Go on from the last whole checkpoint of a folder, of any plan; its position, or None where there is none.

        Random states are taken over where the number of ranks is the same.
        """
        path = self._checkpointing().latest(Path(folder))
        if path is None:
            return None
        with self._whole():
            return self._load(path, optimizer)

    def _load(self, path: Path, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        there = forms(path)
        state = self.module.state_dict()
        model = {f"model.{self._called(name)}": self._to_read(name, tensor) for name, tensor in state.items()}
        for name, tensor in model.items():
            if name not in there or there[name].shape != tensor.shape:
                found = f"of shape {tuple(there[name].shape)}" if name in there else "not there"
                raise CheckpointError(
                    f"{path}: not a checkpoint of this model: {name.removeprefix('model.')} is {found}, "
                    f"expected shape {tuple(tensor.shape)}"
                )
        names = self._names_of_parameters()
        mine = set(names.values())
        wanted = {
            name: torch.empty_like(form, device="cpu")
            for name, form in there.items()
            if name == "position"
            or name.startswith(f"random.{self._replicas.process}.")
            or (optimizer is not None and name.startswith("optimizer.") and _parameter_of(name) in mine)
        }
        self._checkpointing().read(path, model | wanted)
        if self._slices is not None:
            for name, tensor in state.items():
                tensor.copy_(self._own_part(name, model[f"model.{self._called(name)}"]))
        position: dict[str, Any] = from_tensor(wanted.pop("position"))
        scale = position.pop("loss_scale", None)
        if self._mixed is not None and scale is not None:
            self._mixed.scale = scale
        if optimizer is not None:
            optimizer.load_state_dict(optimizer_state(optimizer, names, self._own_states(wanted)))
        if position.pop("ranks") == self.plan.world:
            states = {name.split(".", 2)[2]: state for name, state in wanted.items() if name.startswith("random.")}
            set_random_states(states, self.device)
        return position

    def _to_read(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What a checkpoint is read into: something in `module` itself, or all of what is a slice there."""
        parameter = dict(self.module.named_parameters(remove_duplicate=False)).get(name)
        if self._slices is None or parameter is None:
            return tensor
        return torch.empty(self._slices.whole_shape(parameter), dtype=tensor.dtype)

    def _checkpointing(self) -> Checkpoints:
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self._replicas.process, self.plan.world)
        return self._checkpoints

    def _names_of_parameters(self) -> dict[nn.Parameter, str]:
        named = [(plain_name(name), parameter) for name, parameter in self.module.named_parameters()]
        return {self._piece(parameter): self._called(self._first_names.get(name, name)) for name, parameter in named}

    def _whole_states(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """An optimizer's tensors as if neither replicas nor tensor groups divided anything, one after the other."""
        of = self._parameters_by_name()
        for key, found in tensors.items():
            parameter, name, value = of[_parameter_of(key)], key.rpartition("/")[2], found
            if self._shards is not None:
                value = self._shards.whole_state(parameter, name, value)
            if self._slices is not None and value.is_floating_point() and name != "step":
                value = self._slices.whole(parameter, value)
            yield key, value

    def _own_states(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The reverse: those of this replica's pieces, and of this member's slices."""
        if self._shards is None and self._slices is None:
            return tensors
        of, own = self._parameters_by_name(), dict[str, torch.Tensor]()
        for key, found in tensors.items():
            if not key.startswith("optimizer."):
                continue
            parameter, name, value = of[_parameter_of(key)], key.rpartition("/")[2], found
            if self._slices is not None and value.is_floating_point() and name != "step":
                value = self._slices.own(parameter, value).clone()
            own[key] = value if self._shards is None else self._shards.own_state(parameter, name, value)
        return own

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        names = self._names_of_parameters()
        return {names[self._piece(parameter)]: parameter for parameter in self.module.parameters()}


def _parameter_of(key: str) -> str:
    """Of a tensor of an optimizer's state, by its name in a checkpoint."""
    return key.removeprefix("optimizer.").rpartition("/")[0]
