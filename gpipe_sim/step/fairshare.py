"""Fair sharing: work that proceeds at a rate set by who else is using the same resource.

Cores shared by ranks and a NIC shared by messages are the same thing: tasks with an amount of work, resources with a
capacity, and max-min fair rates (no task can get more without another that has no more getting less).

    two flows of 1 GB on a 1 GB/s NIC, the second one starting at 0.5 s

    flow a  ======----------        full rate alone, half rate together
    flow b        ----------=====
            0    0.5        1.5  2

When a task comes or goes, the rates of those change that share a resource with it, or with one that does, and so on:
only they are looked at, so that a step through a thousand NICs costs a thousand times one, not a million.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from simpy import Environment, Event

Resource = TypeVar("Resource", bound=Hashable)
_OVER = float("-inf")


@dataclass(slots=True, eq=False)
class _Task(Generic[Resource]):
    number: int
    remaining: float
    limit: float
    uses: Collection[Resource]
    done: Event
    since: float
    """When `remaining` was right."""
    rate: float = 0.0
    end: float = float("inf")
    """When it will be done at this rate."""


class FairShare(Generic[Resource]):
    """Resources with their capacities; a task runs at the fair share of the scarcest resource that it uses."""

    def __init__(self, env: Environment, capacity: Mapping[Resource, float]) -> None:
        self._env = env
        self._capacity = capacity
        self._users: dict[Resource, dict[int, _Task[Resource]]] = {name: {} for name in capacity}
        self._numbers = count()
        self._ends: list[tuple[float, int, _Task[Resource]]] = []
        """A heap; an entry whose time is not its task's end any more is void."""
        self._next: Event | None = None

    def run(self, work: float, limit: float, uses: Collection[Resource]) -> Event:
        """An event that succeeds when the work is done, at no more than `limit` however free the resources are."""
        task = _Task(next(self._numbers), work, limit, uses, Event(self._env), self._env.now)
        for name in uses:
            self._users[name][task.number] = task
        self._share_again(self._connected([task]))
        self._wake_up()
        return task.done

    def _connected(self, tasks: Iterable[_Task[Resource]]) -> list[_Task[Resource]]:
        """These tasks and all that share a resource with one of them, or with one that does; oldest first."""
        found = {task.number: task for task in tasks}
        names = {name for task in found.values() for name in task.uses}
        waiting = list(names)
        while waiting:
            for number, task in self._users[waiting.pop()].items():
                if number not in found:
                    found[number] = task
                    new = [name for name in task.uses if name not in names]
                    names.update(new)
                    waiting += new
        return [found[number] for number in sorted(found)]

    def _share_again(self, tasks: list[_Task[Resource]]) -> None:
        """Set the fair rates of these tasks; those whose rate changes are credited with the work done before."""
        now = self._env.now
        for task, rate in zip(tasks, self._fair_rates(tasks), strict=True):
            if rate == task.rate:
                continue
            task.remaining -= task.rate * (now - task.since)
            task.since, task.rate = now, rate
            task.end = now + max(0.0, task.remaining / rate)
            heappush(self._ends, (task.end, next(self._numbers), task))

    def _wake_up(self) -> None:
        """Come back when the first task ends."""
        ends = self._ends
        while ends and ends[0][0] != ends[0][2].end:
            heappop(ends)
        if not ends:
            self._next = None
            return
        self._next = wake = self._env.timeout(max(0.0, ends[0][0] - self._env.now))
        assert wake.callbacks is not None, "a fresh timeout has not been processed"
        wake.callbacks.append(self._finish)

    def _finish(self, wake: Event) -> None:
        if wake is not self._next:  # the rates have changed since this wake-up was set
            return
        # Whoever would end within rounding of now ends now: equal tasks end together.
        soon, ended = self._env.now * (1 + 1e-12), []
        while self._ends and self._ends[0][0] <= soon:
            end, _, task = heappop(self._ends)
            if end == task.end:
                task.end = _OVER
                ended.append(task)
        for task in ended:
            for name in task.uses:
                del self._users[name][task.number]
        self._share_again([task for task in self._connected(ended) if task.end != _OVER])
        for task in sorted(ended, key=lambda task: task.number):
            task.done.succeed()
        self._wake_up()

    def _fair_rates(self, tasks: list[_Task[Resource]]) -> list[float]:
        """Progressive filling: raise all rates together; whoever meets a limit, or a full resource, stays there."""
        users = Counter(name for task in tasks for name in task.uses)
        free = {name: self._capacity[name] for name in users}
        rates: dict[int, float] = {}
        rising = tasks
        while rising:
            share = {name: free[name] / number for name, number in users.items() if number}
            level = min([*share.values(), *(task.limit for task in rising)])
            full = {name for name, each in share.items() if each <= level}
            still = []
            for task in rising:
                if task.limit <= level or not full.isdisjoint(task.uses):
                    rates[task.number] = level
                    for name in task.uses:
                        free[name] -= level
                        users[name] -= 1
                else:
                    still.append(task)
            rising = still
        return [rates[task.number] for task in tasks]
