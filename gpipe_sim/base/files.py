"""Files at the boundary: read with line numbers, report every mistake at once, write whole or not at all.

A mistake in a file is a `Problem`, printed as ``file:line: field: found, expected``. They are gathered and raised
together as one `InputError`, which the command line turns into exit status 2.
"""

import io
import json
import os
import re
import uuid
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.scalarstring import LiteralScalarString

from gpipe_sim.base import limits
from gpipe_sim.base.limits import shortened, shown

FieldPath = tuple[str | int, ...]


class Problem(NamedTuple):
    """One mistake: where it stands, which field it is, and what would be right."""

    where: str
    field: str
    message: str

    @property
    def line(self) -> int:
        """The line number in `where`, 0 if it has none."""
        line = self.where.rpartition(":")[2]
        return int(line) if line.isdecimal() else 0

    def __str__(self) -> str:
        return f"{self.where}: {self.field}: {self.message}" if self.field else f"{self.where}: {self.message}"


class InputError(ValueError):
    """What the user gave is wrong; every problem found is in `problems`."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(islice(_different(problems), limits.PROBLEMS + 1))
        lines = [str(problem) for problem in self.problems[: limits.PROBLEMS]]
        if len(self.problems) > len(lines):
            lines.append(f"and more: these are the first {limits.PROBLEMS}")
        super().__init__("\n".join(lines))


def _different(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Each once, in their order; no more are looked for than are taken."""
    seen: set[Problem] = set()
    for problem in problems:
        if problem not in seen:
            seen.add(problem)
            yield problem


@dataclass
class Document:
    """Plain data read from a file, and where each part of it was written."""

    file: str
    data: Any
    places: dict[FieldPath, str] = field(default_factory=dict)
    """Field path -> ``file:line``, or the override that set it."""
    problems: list[Problem] = field(default_factory=list)
    """What was already wrong when the file was read."""

    def where(self, path: FieldPath) -> str:
        """The place of a field or, if it is not there, of the nearest thing around it."""
        for length in range(len(path), -1, -1):
            if place := self.places.get(path[:length]):
                return place
        return f"{self.file}:1"

    def problem(self, path: FieldPath, message: str) -> Problem:
        """A located `Problem` about the field at that path."""
        return Problem(self.where(path), dotted(path), message)


def dotted(path: FieldPath) -> str:
    """``("cluster", "links", 2, "latency")`` -> ``"cluster.links.2.latency"``"""
    return ".".join(part if isinstance(part, str) and len(part) < 50 else shortened(part) for part in path)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """``"did you mean 'stages'?"`` when something known is close, else the whole list.

    Names that begin with the word come first (``a100`` is short for a100-40gb or a100-80gb), whatever their case, and
    without longer forms of such a name (a100-80gb-attained).
    """
    known, typed = list(known), shortened(word).lower()
    close = [name for name in known if name.lower().startswith(typed)] if typed else []
    close = [name for name in close if not any(name.startswith(f"{shorter}-") for shorter in close)]
    if not close:
        lower = {name.lower(): name for name in known}
        close = [lower[name] for name in get_close_matches(typed, lower, n=1)]
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"expected one of {', '.join(known)}" if len(known) > 1 else f"expected {known[0]}"


def read_text(path: Path) -> str:
    """The file's text; an `InputError` if it cannot be read."""
    try:
        with open(path, "rb") as file:
            content = file.read(limits.FILE_BYTES + 1)
        if len(content) > limits.FILE_BYTES:
            message = f"is larger than {limits.FILE_BYTES // 2**20} MiB, expected less"
            raise InputError([Problem(str(path), "", message)])
        return content.decode("utf-8")
    except OSError as error:
        raise InputError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise InputError([Problem(str(path), "", "is not text in UTF-8")]) from error
    except ValueError as error:  # a path with a null byte
        if isinstance(error, InputError):
            raise
        raise InputError([Problem(shortened(path), "", f"cannot be read: {error}")]) from error


class _BoundedComposer(Composer):
    """Refuses what would grow without bounds when it is read: depth, number of values, aliases that multiply them.

    a: &a [x, x, x]          4 values
    b: &b [*a, *a, *a]       13, since each alias counts as all that it stands for
    c: [*b, *b, *b]          40, and so on: nine such lines would be a million
    """

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader)
        self._levels = self._values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """One value and all that is in it."""
        event, before = self.parser.peek_event(), self._values
        is_alias = isinstance(event, AliasEvent)
        self._levels += 1
        if self._levels > limits.YAML_DEPTH:
            self._refuse(event, f"nested more than {limits.YAML_DEPTH} levels deep, expected fewer")
        node = super().compose_node(parent, index)
        self._levels -= 1
        if is_alias and id(node) not in self._sizes:
            self._refuse(event, f"the alias {event.anchor!r} contains itself, expected one of something before it")
        self._values += self._sizes[id(node)] if is_alias else 1
        self._sizes.setdefault(id(node), self._values - before)
        if self._values > limits.YAML_VALUES:
            counted = "aliases counted as all that they stand for"
            self._refuse(event, f"has more than {limits.YAML_VALUES} values, {counted}, expected fewer")
        return node

    def _refuse(self, event: Any, problem: str) -> None:
        raise ComposerError(None, None, problem, event.start_mark)


def _bounded_yaml() -> YAML:
    yaml = YAML(typ="rt", pure=True)
    yaml.Composer = _BoundedComposer
    return yaml


def parse_yaml(text: str, file: str) -> Document:
    """YAML 1.2 with line numbers; a duplicate key, a syntax error or something without bounds is an `InputError`."""
    problems: list[Problem] = []
    blocks: list[_Block] = []
    num_lines = text.count("\n")
    _refuse_more(file, num_lines, limits.YAML_LINES, "lines")
    if len(text) > limits.YAML_CHARACTERS or num_lines > limits.YAML_LINES_BESIDE:
        text, blocks = without_blocks(text)
        _refuse_more(file, len(text), limits.YAML_CHARACTERS, "characters beside its blocks of text")
        _refuse_more(file, text.count("\n"), limits.YAML_LINES_BESIDE, "lines beside its blocks of text")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an anchor that is given twice: the later one counts
            try:
                tree = _bounded_yaml().load(text)
            except DuplicateKeyError:  # note them all, then go on with the rest of the file
                problems = list(_duplicates(_bounded_yaml().compose(text), (), file, blocks))
                tolerant = _bounded_yaml()
                tolerant.allow_duplicate_keys = True
                tree = tolerant.load(text)
        document = Document(file, None, {(): f"{file}:1"}, problems)
        document.data = _plain(tree, (), document, blocks)
        _put_back(blocks, tree, document)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise InputError(
            [Problem(_place(file, mark.line if mark else 0, blocks), "", f"not YAML: {shortened(error.problem)}")]
        ) from error
    except InputError:
        raise
    except _RUAMEL_LETS_THROUGH as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError([Problem(f"{file}:1", "", f"not YAML: {shortened(first_line)}")]) from error
    return document


def _refuse_more(file: str, found: int, most: int, what: str) -> None:
    if found > most:
        raise InputError([Problem(f"{file}:1", "", f"has more than {most} {what}, expected fewer")])


class _Block(NamedTuple):
    """A block of text under a key of the whole file, read without YAML's help, and what stands in its place."""

    key: str
    text: str
    stand_in: str
    line: int
    """Where that stands, counted from 0 in the text that YAML reads."""
    num_left_out: int
    """Lines of the file that YAML does not read, of this block and all before it."""


_BLOCK = re.compile(r"^(\w+): \|\n((?:  [!-~][ -~]*\n)(?:  [ -~]*\n|\n)*+)(?=[^ \n]|\Z)", re.MULTILINE)
"""All of it plain characters, indented by two, until a line that is not indented."""


def without_blocks(text: str) -> tuple[str, list[_Block]]:
    """The text with a short line in place of every block.

    YAML reads each character of a block by itself: a second for some megabytes, which are those of a profile.
    """
    blocks: list[_Block] = []
    parts: list[str] = []
    end = line = left_out = 0
    for found in _BLOCK.finditer(text):
        lines, name = found[2].splitlines(), uuid.uuid4().hex
        before = text[end : found.start()]
        line, left_out, end = line + before.count("\n") + 1, left_out + len(lines) - 1, found.end()
        content = "\n".join(one[2:] for one in lines).rstrip("\n") + "\n"
        blocks.append(_Block(found[1], content, name, line, left_out))
        parts += [before, f"{found[1]}: |\n  {name}\n"]
        line += 1
    return "".join([*parts, text[end:]]), blocks


def _place(file: str, line: int, blocks: Sequence[_Block]) -> str:
    """``file:line``, from a line that YAML counts from 0 in a text without blocks."""
    before = bisect_left(blocks, line, key=lambda block: block.line)
    return f"{file}:{line + 1 + (blocks[before - 1].num_left_out if before else 0)}"


def _put_back(blocks: Sequence[_Block], tree: Any, document: Document) -> None:
    """What looked like a block must have been one, and not a part of something that only looks so, such as a quote."""
    for key, text, stand_in, *_ in blocks:
        found = tree.get(key) if isinstance(tree, CommentedMap) else None
        if not isinstance(found, LiteralScalarString) or found != f"{stand_in}\n":
            message = f"has a block of text under {key!r} that is no value of the whole file, expected it there, once"
            raise InputError([*document.problems, Problem(f"{document.file}:1", "", message)])
        document.data[key] = text


_RUAMEL_LETS_THROUGH = (
    YAMLError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Its own errors when it converts a scalar or a tag: a date with a 13th month, ``!!int abc``, ``!!timestamp []``."""


def _duplicates(node: Any, path: FieldPath, file: str, blocks: Sequence[_Block]) -> Iterator[Problem]:
    """Every key that a mapping of the file has twice."""
    if isinstance(node, MappingNode):
        seen = set()
        for key, value in node.value:
            name = key.value if isinstance(key, ScalarNode) else "?"
            if name in seen and name not in ("?", "<<"):
                where = _place(file, key.start_mark.line, blocks)
                yield Problem(where, dotted((*path, name)), "is given twice, expected once")
            seen.add(name)
            yield from _duplicates(value, (*path, name), file, blocks)
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            yield from _duplicates(value, (*path, index), file, blocks)


def _plain(node: Any, path: FieldPath, document: Document, blocks: Sequence[_Block]) -> Any:
    """Copy ruamel's tree to plain values, noting the line of every key and item on the way."""
    if isinstance(node, CommentedMap):
        lines = node.lc.data or {}
        for key in node:
            line = node.lc.key(key)[0] if key in lines else node.lc.line
            document.places[(*path, key)] = _place(document.file, line or 0, blocks)
        return {
            _plain(key, path, document, blocks): _plain(value, (*path, key), document, blocks)
            for key, value in node.items()
        }
    if isinstance(node, CommentedSeq):
        lines = node.lc.data or {}
        for index in range(len(node)):
            line = node.lc.item(index)[0] if index in lines else node.lc.line
            document.places[(*path, index)] = _place(document.file, line or 0, blocks)
        return [_plain(value, (*path, index), document, blocks) for index, value in enumerate(node)]
    for plain in (bool, int, float, str):  # ruamel's scalars are subclasses that remember how they were written
        if isinstance(node, plain):
            value = plain(node)
            if isinstance(value, str) and (wrong := _unprintable(value)):
                raise InputError([document.problem(path, wrong)])
            return value
    return node


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What an escape such as ``"\\e"`` or ``"\\ud800"`` makes: commands to a terminal, which could clear it or write
over it, and halves of characters, which cannot be written again."""


def _unprintable(text: str) -> str | None:
    """What is wrong with a text that could not be shown as it is."""
    found = _UNPRINTABLE.search(text)
    if found is None:
        return None
    if found[0] >= "\ud800":
        return "has half of a surrogate pair, expected text in UTF-8"
    return f"has the control character {found[0]!r}, expected text that can be printed"


def read_yaml(path: Path) -> Document:
    """A YAML file as a `Document`."""
    return parse_yaml(read_text(path), str(path))


def read_json(path: Path) -> Document:
    """A JSON file as a `Document` without places, which are looked up only if something is wrong."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, file: str) -> Document:
    """JSON that is neither too deep nor too large, nor has text that could not be shown or written again."""
    lists = text.count("[") + text.count("{")
    _refuse_more(file, lists, limits.JSON_LISTS, "lists and mappings")
    _refuse_more(file, lists + text.count(","), limits.JSON_VALUES, "entries")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError([Problem(f"{file}:{error.lineno}", "", f"not JSON: {error.msg}")]) from error
    except (ValueError, RecursionError) as error:
        problem = "nested too deep" if isinstance(error, RecursionError) else shortened(error)
        raise InputError([Problem(f"{file}:1", "", f"not JSON that can be read: {problem}")]) from error
    if _ESCAPED.search(text):  # rare, and slow to be sure about
        _refuse_unprintable(data, (), Document(file, data))
    return Document(file, data)


_ESCAPED = re.compile(r"\\u(?:[dD][89a-fA-F]|00[01789])|\\[bfr]|[\x7f-\x9f]")
"""How JSON may write them."""


def _refuse_unprintable(node: Any, path: FieldPath, document: Document) -> None:
    if len(path) > limits.JSON_DEPTH:
        raise InputError([document.problem((), f"nested more than {limits.JSON_DEPTH} levels deep, expected fewer")])
    if isinstance(node, str) and (wrong := _unprintable(node)):
        raise InputError([document.problem(path, wrong)])
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        _refuse_unprintable(key, path, document)
        _refuse_unprintable(value, (*path, key), document)


class Strict(BaseModel):
    """A section of a file: exact types, no unknown keys, and a hint when a key is only misspelt."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="wrap")
    @classmethod
    def _explain_unknown_keys(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        known = cls.model_fields
        unknown = [key for key in data if key not in known] if isinstance(data, dict) else []
        if not unknown:
            return handler(data)
        errors: list[InitErrorDetails] = []
        for key in unknown[: limits.PROBLEMS + 1]:
            kind = PydanticCustomError("unknown_key", "{hint}", {"hint": did_you_mean(key, known)})
            errors.append(InitErrorDetails(type=kind, loc=(_part(key),), input=data[key]))
        try:
            handler({key: value for key, value in data.items() if key in known})
        except ValidationError as error:
            errors += [_again(detail) for detail in error.errors(include_url=False)]
        raise ValidationError.from_exception_data(cls.__name__, errors)


def _part(key: object) -> str | int:
    """A key as a part of a field's path, whatever YAML made of it: a date, nothing, a list."""
    return key if isinstance(key, str) or (type(key) is int and abs(key) < 2**63) else shortened(key)


def _again(detail: ErrorDetails) -> InitErrorDetails:
    """A finding in the form in which it can be raised again."""
    if detail["type"] == "unknown_key":
        kind: str | PydanticCustomError = PydanticCustomError("unknown_key", "{hint}", detail.get("ctx"))
    else:
        kind = detail["type"]
    return InitErrorDetails(type=kind, loc=detail["loc"], input=detail["input"], ctx=detail.get("ctx", {}))


def problems_of(error: ValidationError, document: Document, root: FieldPath) -> list[Problem]:
    """Pydantic's findings in our words: ``found X, expected Y``, each at its line."""
    return [
        document.problem(root + tuple(part for part in detail["loc"] if part != "[key]"), _message(detail))
        for detail in error.errors(include_url=False)
    ]


def _message(detail: ErrorDetails) -> str:
    kind, found, context = detail["type"], shown(detail["input"]), detail.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "unknown_key":
        return f"unknown key, {context['hint']}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        choices = [part.strip("'") for part in context["expected"].replace(" or ", ", ").split(", ")]
        return f"found {found}, {did_you_mean(detail['input'], choices)}"
    limits = {name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()}
    return f"found {found}, expected {_EXPECTED.get(kind, detail['msg']).format(**limits)}"


_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "finite_number": "a finite number",
    "too_short": "at least {min_length} entry",
    "too_long": "at most {max_length} entries",
    "string_too_short": "some text",
}


def yaml_text(data: Any) -> str:
    """Plain data as YAML."""
    stream, yaml = io.StringIO(), YAML()
    yaml.width = 120
    yaml.dump(data, stream)
    return stream.getvalue()


def write_text(path: Path, text: str) -> None:
    """Replace the file whole: whoever reads it sees the old text or the new, never a half.

    What a link points to is replaced, not the link. What is no file, such as ``/dev/stdout``, is written to; a pipe
    that nobody reads is an `OSError`, and not waited at.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(handle, True)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}.part")
    # The system itself takes from these permissions what the user does not want to give.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
