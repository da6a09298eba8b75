"""Work that takes longer than a moment: it shows how far it is, and whatever is asked next takes its place.

Each page has a token of its own, unguessable, and under it at most one piece of work of each kind. Asking for the same
again looks at how far it is; asking for something else ends the old one at its next advance.

    ask(token, "space", key)     done within a moment?   -> the result
                                 otherwise               -> how far it is; the page asks again a little later
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

from dash.exceptions import PreventUpdate

MOMENT_S = 0.25
"""What takes no longer is simply waited for."""
_MOST = 64
"""Pages times kinds whose last work is remembered."""


class SupersededError(PreventUpdate):
    """Something else was asked meanwhile: the page has no more use for an answer."""


@dataclass
class Task:
    """One piece of work, under way or done."""

    key: Any
    """What it was asked for."""
    total: int | None = None
    """Advances until it is done, where that is known."""
    done: float = 0
    result: Any = None
    error: Exception | None = None
    began_s: float = field(default_factory=monotonic)
    ended: Event = field(default_factory=Event)
    superseded: Event = field(default_factory=Event)

    def advance(self, share: float = 1) -> None:
        """One thing more is done, or a share of it."""
        if self.superseded.is_set():
            raise SupersededError
        self.done += share

    @property
    def has_result(self) -> bool:
        """Whether it came to its end, and was not left before; what was left is begun anew when it is asked for."""
        return self.ended.is_set() and not isinstance(self.error, SupersededError)

    def value(self) -> Any:
        """What came out of it, or the error in which it ended."""
        if self.error is not None:
            raise self.error
        return self.result

    @property
    def seconds(self) -> float:
        """Since it began."""
        return monotonic() - self.began_s


@dataclass
class Tasks:
    """The work of all pages."""

    _tasks: OrderedDict[tuple[str, str], Task] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def ask(
        self, token: str, kind: str, key: Hashable, work: Callable[[Task], Any], patience_s: float = MOMENT_S
    ) -> Task:
        """The work with this key: found, or begun in place of another; waited for, but only for a moment."""
        with self._lock:
            task = self._tasks.get((token, kind))
            if task is None or task.key != key:
                if task is not None:
                    task.superseded.set()
                task = self._tasks[token, kind] = Task(key)
                Thread(target=_run, args=(task, work), daemon=True).start()
            self._tasks.move_to_end((token, kind))
            while len(self._tasks) > _MOST:
                self._tasks.popitem(last=False)[1].superseded.set()
        task.ended.wait(patience_s)
        return task

    def leave(self, token: str, *kinds: str) -> None:
        """End the page's work of these kinds, for something else; what is asked for again begins anew."""
        with self._lock:
            for kind in kinds:
                if (task := self._tasks.get((token, kind))) is not None and not task.ended.is_set():
                    task.superseded.set()
                    del self._tasks[token, kind]

    def known(self, token: str, kind: str) -> Task | None:
        """The page's last work of this kind."""
        with self._lock:
            return self._tasks.get((token, kind))


def _run(task: Task, work: Callable[[Task], Any]) -> None:
    try:
        task.result = work(task)
    except Exception as error:  # told to whoever asks
        task.error = error
    finally:
        task.ended.set()
