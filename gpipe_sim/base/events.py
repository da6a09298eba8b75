"""The events of a trace, one after the other, from a file that may have millions of them.

    {"schemaVersion": 1, ..., "traceEvents": [ {...}, {...}, ... ], "traceName": "..."}
                               `-- handed on one by one, and forgotten --'

What is in memory at any time is a piece of the file and one value of it, however large the file is.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from gpipe_sim.base import limits
from gpipe_sim.base.files import InputError, Problem

_PIECE = 2**18
"""Bytes that are read at a time."""
_SPACE = " \t\n\r"
_DECODER = json.JSONDecoder()


def read_trace(file: Path, keep: Callable[[dict[str, Any]], None], wanted: Collection[str]) -> dict[str, Any]:
    """Hand every event of a file, compressed if its name ends so, to `keep`; return what is wanted of the rest.

    ``traceEvents`` among it is None: it was there.
    """
    try:
        with cast(BinaryIO, gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb")) as stream:
            return _Reader(file, stream).read(keep, wanted)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError([Problem(str(file), "", f"cannot be read: {error}")]) from error


class _Reader:
    """What has been read and not been used yet, and where that is."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self.file, self.stream = file, stream
        self.text, self.at, self.line, self.size = "", 0, 1, 0
        self.decode = codecs.getincrementaldecoder("utf-8-sig")()
        self.is_whole = False

    def read(self, keep: Callable[[dict[str, Any]], None], wanted: Collection[str]) -> dict[str, Any]:
        """The object that the file is; a file that is something else has nothing that is wanted."""
        found: dict[str, Any] = {}
        if self._next() != "{":
            self._value()
            return found
        for _ in self._entries("{", "}"):
            if self._next() != '"':
                raise self._wrong()
            key = self._value()
            self._take(":")
            if key == "traceEvents" and self._next() == "[":
                for _ in self._entries("[", "]"):
                    event = self._value()
                    if isinstance(event, dict):
                        keep(event)
                found[key] = None
            elif key == "traceEvents":
                raise self._wrong("has traceEvents that are no list")
            else:
                value = self._value()
                if key in wanted:
                    found[key] = value
        if self._next():
            raise self._wrong()
        return found

    def _entries(self, opening: str, closing: str) -> Iterator[None]:
        """Before each entry of a list or mapping."""
        self._take(opening)
        if self._next() == closing:
            self._take(closing)
            return
        while True:
            yield
            if self._next() == closing:
                self._take(closing)
                return
            self._take(",")

    def _next(self) -> str:
        """The next character that is no space, which stays; nothing at the end."""
        while True:
            while self.at < len(self.text):
                character = self.text[self.at]
                if character not in _SPACE:
                    return character
                self.at += 1
            if not self._more():
                return ""

    def _take(self, character: str) -> None:
        if self._next() != character:
            raise self._wrong()
        self.at += 1

    def _value(self) -> Any:
        """The next value. A number at the end of a piece may go on in the next; anything else says where it ends."""
        self._next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except RecursionError as error:
                raise self._wrong() from error
            except ValueError as error:
                if len(self.text) - self.at > limits.EVENT_CHARACTERS:
                    what = f"has an entry of more than {limits.EVENT_CHARACTERS} characters, or is not JSON"
                    raise self._wrong(what) from error
                if not self._more():
                    raise self._wrong() from error
                continue
            if end < len(self.text) or isinstance(value, dict | list | str) or not self._more():
                self.at = end
                return value

    def _more(self) -> bool:
        """Read another piece, after what has not been used; whether there was one."""
        if self.is_whole:
            return False
        piece = self.stream.read(_PIECE)
        self.size += len(piece)
        if self.size > limits.TRACE_BYTES:
            message = f"is larger than {limits.TRACE_BYTES // 2**20} MiB, expected less: profile fewer steps"
            raise InputError([Problem(str(self.file), "", message)])
        self.line += self.text.count("\n", 0, self.at)
        try:
            self.text = self.text[self.at :] + self.decode.decode(piece, final=not piece)
        except ValueError as error:
            raise self._wrong() from error
        self.at, self.is_whole = 0, not piece
        return bool(piece)

    def _wrong(self, what: str = "is not JSON") -> InputError:
        line = self.line + self.text.count("\n", 0, self.at)
        return InputError([Problem(f"{self.file}:{line}", "", f"{what}, expected a trace of torch's profiler")])
