"""Replicas: D copies of the pipeline, each with its share of the batch, whose gradients are summed.

Processes are a mesh of K ranks by D replicas by T members of a tensor group (`slices`), as `Plan` numbers them, here
with T = 1:

    process     replica 0   1
    rank 0              0   1     dp: hold the same stages, and sum their gradients
    rank 1              2   3
    rank 2              4   5     pp: the ranks of one replica, which send each other messages

A stage's gradients are complete after its last backward, or W. From there on they are summed, all buckets of it at
once, while the rank goes on with its other stages; the update waits for them. Replicas may have different shares, as
in the last batch of an epoch: losses are weighted by samples of all, so that sums, not means, are exact.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpipe_exec.devices.groups import Group, host_group, make_groups
from gpipe_exec.engine.buckets import Bucket, buckets_of, together
from gpipe_exec.engine.transport import Transfers
from gpipe_sim.plan.plan import Plan


class Replicas:
    """Where this process stands among all, and what it does together with those that hold the same stages."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        """Every process makes it at the same time."""
        self.num, self._plan, self._device = plan.replicas, plan, device
        self._made: set[dist.ProcessGroup] = set()
        self.process = dist.get_rank() if dist.is_initialized() else 0
        self.position, self.replica = plan.place_of(self.process)
        self.member = plan.member_of(self.process)
        """Of a tensor group. Members do the same, each with those of its number elsewhere."""
        self.tensor: DeviceMesh | None = None
        """The tensor group; None where it is one process."""
        self.pipeline: dist.ProcessGroup | None = None
        """The ranks of this replica; None is the world."""
        self.pipeline_on_host: dist.ProcessGroup | None = None
        """The same for messages in host memory."""
        self.alike: dist.ProcessGroup | None = None
        """Those that hold the same stages; None where there is no other."""
        self._alike_on_host: dist.ProcessGroup | None = None
        self._found: list[tuple[Sequence[nn.Parameter], torch.Tensor]] = []
        """Of each summed stage: its parameters, and how many replicas have a gradient of each."""
        self._own: dict[nn.Parameter, torch.Tensor] = {}
        """Gradients of this replica alone, of steps that were not summed; void once a parameter has another."""
        if plan.replicas > 1 or plan.tensor > 1:
            members = range(plan.tensor)
            positions = [plan.pipeline.index(rank) for rank in plan.ranks]
            numbers = torch.tensor(
                [[[plan.process(k, d, t) for t in members] for d in range(plan.replicas)] for k in positions]
            )
            ways = [numbers.movedim(dimension, 0).flatten(1).T.tolist() for dimension in range(3)]
            pp, dp, tp = (_own(make_groups(groups, device)) for groups in ways)
            # The tensor group stays for the life of the process: what DTensor has once worked out for a mesh of these
            # processes it keeps, with the name of that mesh's group, also for the meshes of later pipelines.
            self._made = {group for pair in (pp, dp) for group in pair}
            self.pipeline, self.pipeline_on_host = pp
            if plan.replicas > 1:
                self.alike, self._alike_on_host = dp
            if plan.tensor > 1:
                self.tensor = DeviceMesh.from_group(tp.device, device.type, mesh_dim_names=("tp",))
        elif (host := host_group(device)) is not None:
            self.pipeline_on_host = host
            self._made = {host}

    def process_of(self, stage: int) -> int:
        """The process that holds a stage of this replica."""
        return self._plan.process(self._plan.positions[stage], self.replica, self.member)

    def start_alike(self, module: nn.Module) -> None:
        """Everyone begins with the first replica's weights. This also uses their communicator for the first time, which
        stops the host until all have joined, in each of the ways in which it is used later."""
        if self.alike is not None:
            number = torch.zeros(1, device=self._device)
            dist.all_reduce(number, group=self.alike)
            for tensor in (number, *module.state_dict().values()):
                dist.broadcast(tensor, src=self._plan.process(self.position, 0, self.member), group=self.alike)

    def shares(self, samples: int) -> list[int]:
        """Of all replicas, in samples. Ranks of the same stage ask each other at the same time."""
        if self._alike_on_host is None:
            return [samples]
        found = torch.zeros(self.num, dtype=torch.int64)
        found[self.replica] = samples
        dist.all_reduce(found, group=self._alike_on_host)
        return [int(share) for share in found.tolist()]

    def close(self) -> None:
        """Nothing is done together any more."""
        for group in self._made:
            dist.destroy_process_group(group)

    def add(self, values: torch.Tensor) -> None:
        """Sum a few numbers over the replicas, in place."""
        if self.alike is not None:
            dist.all_reduce(values, group=self.alike)

    def highest(self, value: float) -> float:
        """Of all replicas."""
        if self._alike_on_host is None:
            return value
        found = torch.tensor([value], dtype=torch.double)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._alike_on_host)
        return float(found)

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Those of every replica, in their order."""
        if self.alike is None:
            return [values]
        found = [torch.empty_like(values) for _ in range(self.num)]
        dist.all_gather(found, values, group=self.alike)
        return found

    def begin_sum(self, parameters: Sequence[nn.Parameter]) -> Transfers:
        """From now on the gradients of these are summed; nobody may touch them until `end_sums`.

        All replicas begin their sums in the same order.
        """
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        if not wanted:
            return []
        there = torch.tensor([p.grad is not None for p in wanted], dtype=torch.int64, device=self._device)
        for parameter in wanted:
            if parameter.grad is None:  # another replica may have one
                parameter.grad = torch.zeros_like(parameter)
        self._found.append((wanted, there))
        transfers = []
        for tensor in (there, *map(_gradients_together, buckets_of(wanted))):
            work = dist.all_reduce(tensor, group=self.alike, async_op=True)
            assert work is not None, "this process is among those that hold the same stages"
            transfers.append((work, tensor))
        return transfers

    def end_sums(self) -> None:
        """They have ended. What no replica has a gradient of has none."""
        for parameters, there in self._found:
            for parameter, count in zip(parameters, there.tolist(), strict=True):
                if not count:
                    parameter.grad = None
        self._found = []

    def settle(
        self, parameters: Sequence[nn.Parameter], earlier: dict[nn.Parameter, torch.Tensor], *, summed: bool
    ) -> None:
        """Make gradients of `earlier` steps such that this step's can be added to them: both summed over the replicas,
        or neither. Every replica has a gradient of each parameter where they are not."""
        for parameter in parameters:
            gradient = earlier.get(parameter)
            is_own = gradient is not None and self._own.get(parameter) is gradient
            if summed:
                if is_own:
                    dist.all_reduce(gradient, group=self.alike)
                continue
            if gradient is None and parameter.requires_grad:
                gradient = earlier[parameter] = torch.zeros_like(parameter)
            elif gradient is not None and not is_own:
                gradient.div_(self.num)  # its sum is what it was
            if gradient is not None:
                self._own[parameter] = gradient
        if summed:
            self._own.clear()


def _gradients_together(bucket: Bucket) -> torch.Tensor:
    """The gradients of a bucket in one tensor, of which they are parts from now on."""
    flat = together([parameter.grad for parameter in bucket.parameters if parameter.grad is not None])
    for parameter, gradient in zip(bucket.parameters, bucket.views(flat), strict=True):
        parameter.grad = gradient
    return flat


def _own(groups: Iterable[Group | None]) -> Group:
    """The one among them that this process is in."""
    (found,) = (group for group in groups if group is not None)
    return found
