"""The lane of one rank: collectives under way beside its actions, and when each began and ended."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from gpipe_exec.devices.accelerator import Mark, beside
from gpipe_exec.engine.transport import ByEvents, ByThread, Deliveries, Pending, Transfers
from gpipe_sim.plan.actions import Action
from gpipe_sim.plan.lanes import Lane

Collect = Callable[[Action, dist.ProcessGroup], Pending]
"""Begins a collective of a rehearsal, which takes its time and moves no gradients or parameters."""


class LaneOfRank:
    """What this rank does together with others that hold the same stages, in the order of the program's lane."""

    def __init__(self, lane: Lane, device: torch.device) -> None:
        streams = beside(device)
        self._deliveries: Deliveries | None = None
        if lane:
            self._deliveries = ByThread() if streams is None else ByEvents(streams)
        self._numbers = {collective.action: number for number, collective in enumerate(lane)}
        self._under_way: dict[Action, tuple[Mark, Transfers]] = {}

    def begin_step(self) -> None:
        """Nothing has begun yet."""
        self._under_way = {}

    def begin(self, action: Action, now: Mark, transfers: Transfers) -> None:
        """A collective is under way from now on."""
        assert self._deliveries is not None, "there are other replicas"
        self._under_way[action] = (now, transfers)
        self._deliveries.put(self._numbers[action], transfers)

    def wait_for(self, actions: Sequence[Action]) -> None:
        """Let this rank's compute go on when these have ended, as far as they have begun."""
        for action in actions:
            for pending, _ in self._under_way.get(action, (0.0, ()))[1]:
                pending.wait()

    def finish(self) -> None:
        """Everything that has begun has ended, or will without the host."""
        if self._deliveries is not None:
            self._deliveries.finish()
        self._under_way = {action: (began, ()) for action, (began, _) in self._under_way.items()}

    def marks(self, action: Action) -> tuple[Mark, Mark]:
        """When a collective of this step began and ended; NaN where there was none."""
        if self._deliveries is None or action not in self._under_way:
            return float("nan"), float("nan")
        return self._under_way[action][0], self._deliveries.at[self._numbers[action]]

    def close(self) -> None:
        """End the thread that waits."""
        if self._deliveries is not None:
            self._deliveries.close()
