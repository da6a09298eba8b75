"""Results that are kept to be used again: bounded by what they hold, and not only by how many they are."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Kept(Generic[Key, Value]):
    """A function of one argument that keeps its last results; the last `least` of them however large they are."""

    def __init__(
        self, make: Callable[[Key], Value], cells: Callable[[Key], int], room: int, most: int, least: int
    ) -> None:
        self._make, self._cells, self._room, self._most, self._least = make, cells, room, most, least
        self._found: OrderedDict[Key, Value] = OrderedDict()
        self._lock = Lock()
        self.__doc__, self.__name__ = make.__doc__, make.__name__

    def __call__(self, key: Key) -> Value:
        """What was made of it before, or now; by two threads at once, if they ask at once."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        value = self._make(key)
        with self._lock:
            self._found[key] = value
            self._found.move_to_end(key)
            held = self.held_cells()
            while len(self._found) > self._least and (len(self._found) > self._most or held > self._room):
                held -= self._cells(self._found.popitem(last=False)[0])
        return value

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def held_cells(self) -> int:
        """Of all results that are kept."""
        return sum(map(self._cells, self._found))

    def cache_clear(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            self._found.clear()


def kept(
    cells: Callable[[Key], int], *, room: int, most: int, least: int = 2
) -> Callable[[Callable[[Key], Value]], Kept[Key, Value]]:
    """Keep results as long as they are `most`, and their cells within `room`."""
    return lambda make: Kept(make, cells, room, most, least)
