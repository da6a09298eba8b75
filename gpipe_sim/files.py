"""Files at the boundary: read with line numbers, report every mistake at once, write whole or not at all.

A mistake in a file is a `Problem`, printed as ``file:line: field: found, expected``. They are gathered and raised
together as one `InputError`, which the command line turns into exit status 2.
"""

import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, SequenceNode

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
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(map(str, self.problems)))


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
    return ".".join(map(str, path))


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """``"did you mean 'stages'?"`` when something known is close, else the whole list.

    Names that begin with the word come first (``a100`` is short for a100-40gb or a100-80gb), whatever their case.
    """
    known, typed = list(known), str(word).lower()
    close = [name for name in known if name.lower().startswith(typed)] if typed else []
    if not close:
        lower = {name.lower(): name for name in known}
        close = [lower[name] for name in get_close_matches(typed, lower, n=1)]
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"expected one of {', '.join(known)}" if len(known) > 1 else f"expected {known[0]}"


def read_text(path: Path) -> str:
    """The file's text; an `InputError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise InputError([Problem(str(path), "", "is not text in UTF-8")]) from error


def parse_yaml(text: str, file: str) -> Document:
    """YAML 1.2 with line numbers; a duplicate key or a syntax error is an `InputError`."""
    problems: list[Problem] = []
    try:
        try:
            tree = YAML(typ="rt", pure=True).load(text)
        except DuplicateKeyError:  # note them all, then go on with the rest of the file
            problems = list(_duplicates(YAML().compose(text), (), file))
            tolerant = YAML(typ="rt", pure=True)
            tolerant.allow_duplicate_keys = True
            tree = tolerant.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise InputError(
            [Problem(f"{file}:{mark.line + 1 if mark else 1}", "", f"not YAML: {error.problem}")]
        ) from error
    except (YAMLError, ValueError, KeyError, TypeError, RecursionError) as error:
        # ruamel lets the errors of converting a scalar through: a date with a 13th month, "!!int abc"
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError([Problem(f"{file}:1", "", f"not YAML: {first_line}")]) from error
    document = Document(file, None, {(): f"{file}:1"}, problems)
    document.data = _plain(tree, (), document)
    return document


def _duplicates(node: Any, path: FieldPath, file: str) -> Iterator[Problem]:
    """Every key that a mapping of the file has twice."""
    if isinstance(node, MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                where = f"{file}:{key.start_mark.line + 1}"
                yield Problem(where, dotted((*path, key.value)), "is given twice, expected once")
            seen.add(key.value)
            yield from _duplicates(value, (*path, key.value), file)
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            yield from _duplicates(value, (*path, index), file)


def _plain(node: Any, path: FieldPath, document: Document) -> Any:
    """Copy ruamel's tree to plain values, noting the line of every key and item on the way."""
    if isinstance(node, CommentedMap):
        for key in node:
            line = node.lc.key(key)[0] if key in (node.lc.data or {}) else node.lc.line
            document.places[(*path, key)] = f"{document.file}:{line + 1}"
        return {key: _plain(value, (*path, key), document) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        for index in range(len(node)):
            document.places[(*path, index)] = f"{document.file}:{node.lc.item(index)[0] + 1}"
        return [_plain(value, (*path, index), document) for index, value in enumerate(node)]
    for plain in (bool, int, float, str):  # ruamel's scalars are subclasses that remember how they were written
        if isinstance(node, plain):
            return plain(node)
    return node


def read_yaml(path: Path) -> Document:
    """A YAML file as a `Document`."""
    return parse_yaml(read_text(path), str(path))


def read_json(path: Path) -> Document:
    """A JSON file as a `Document` without places, which are looked up only if something is wrong."""
    text = read_text(path)
    try:
        return Document(str(path), json.loads(text))
    except json.JSONDecodeError as error:
        raise InputError([Problem(f"{path}:{error.lineno}", "", f"not JSON: {error.msg}")]) from error
    except (ValueError, RecursionError) as error:
        raise InputError([Problem(f"{path}:1", "", f"not JSON that can be read: {error}")]) from error


class Strict(BaseModel):
    """A section of a file: exact types, no unknown keys, and a hint when a key is only misspelt."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="wrap")
    @classmethod
    def _explain_unknown_keys(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        unknown = [key for key in data if key not in cls.model_fields] if isinstance(data, dict) else []
        if not unknown:
            return handler(data)
        errors: list[InitErrorDetails] = []
        for key in unknown:
            kind = PydanticCustomError("unknown_key", "{hint}", {"hint": did_you_mean(key, cls.model_fields)})
            errors.append(InitErrorDetails(type=kind, loc=(key,), input=data[key]))
        try:
            handler({key: value for key, value in data.items() if key not in unknown})
        except ValidationError as error:
            errors += [_again(detail) for detail in error.errors(include_url=False)]
        raise ValidationError.from_exception_data(cls.__name__, errors)


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


def shown(value: object) -> str:
    """A value as the file has it: YAML's words for nothing and for truth, Python's quotes for text."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, str | int | float | list | dict) else str(value)


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
    "string_too_short": "some text",
}


def yaml_text(data: Any) -> str:
    """Plain data as YAML."""
    stream, yaml = io.StringIO(), YAML()
    yaml.width = 120
    yaml.dump(data, stream)
    return stream.getvalue()


def write_text(path: Path, text: str) -> None:
    """Replace the file whole: whoever reads it sees the old text or the new, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
