"""Fair sharing: work that proceeds at a rate set by who else is using the same resource.

Cores shared by ranks and a NIC shared by messages are the same thing: tasks with an amount of work, resources with a
capacity, and max-min fair rates (no task can get more without another that has no more getting less).

    two flows of 1 GB on a 1 GB/s NIC, the second one starting at 0.5 s

    flow a  ======----------        full rate alone, half rate together
    flow b        ----------=====
            0    0.5        1.5  2
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from simpy import Environment, Event

Resource = TypeVar("Resource", bound=Hashable)


@dataclass(slots=True, eq=False)
class _Task(Generic[Resource]):
    remaining: float
    limit: float
    uses: Collection[Resource]
    done: Event
    rate: float = 0.0


class FairShare(Generic[Resource]):
    """Resources with their capacities; a task runs at the fair share of the scarcest resource that it uses."""

    def __init__(self, env: Environment, capacity: Mapping[Resource, float]) -> None:
        self._env = env
        self._capacity = capacity
        self._tasks: list[_Task[Resource]] = []
        self._since = 0.0
        self._next: Event | None = None

    def run(self, work: float, limit: float, uses: Collection[Resource]) -> Event:
        """An event that succeeds when the work is done, at no more than `limit` however free the resources are."""
        self._elapse()
        task = _Task(work, limit, uses, Event(self._env))
        self._tasks.append(task)
        self._reschedule()
        return task.done

    def _elapse(self) -> None:
        """Credit everyone with the work done since the rates last changed."""
        passed = self._env.now - self._since
        for task in self._tasks:
            task.remaining -= task.rate * passed
        self._since = self._env.now

    def _reschedule(self) -> None:
        """Set the fair rates and wake up when the first task ends."""
        self._set_rates()
        if not self._tasks:
            self._next = None
            return
        wait = max(0.0, min(task.remaining / task.rate for task in self._tasks))
        self._next = wake = self._env.timeout(wait)
        assert wake.callbacks is not None, "a fresh timeout has not been processed"
        wake.callbacks.append(self._finish)

    def _finish(self, wake: Event) -> None:
        if wake is not self._next:  # the rates have changed since this wake-up was set
            return
        self._elapse()
        # Whoever would end within rounding of now ends now: equal tasks end together.
        ended = [task for task in self._tasks if task.remaining <= task.rate * 1e-12 * self._env.now]
        self._tasks = [task for task in self._tasks if task not in ended]
        for task in ended:
            task.done.succeed()
        self._reschedule()

    def _set_rates(self) -> None:
        """Progressive filling: raise all rates together; whoever meets a limit, or a full resource, stays there."""
        free = dict(self._capacity)
        rising = list(self._tasks)
        while rising:
            users = {name: sum(name in task.uses for task in rising) for name in free}
            share = {name: free[name] / count for name, count in users.items() if count}
            level = min([*share.values(), *(task.limit for task in rising)])
            full = {name for name, each in share.items() if each <= level}
            for task in [task for task in rising if task.limit <= level or full.intersection(task.uses)]:
                task.rate = level
                rising.remove(task)
                for name in task.uses:
                    free[name] -= level
