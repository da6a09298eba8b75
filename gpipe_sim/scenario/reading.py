"""Scenarios by their file, their name or as a dict: overrides, and lists that stand for a sweep.

A *list* is a sweep over its values: everywhere under ``plan:`` (where ``balance``, ``placement`` and ``order`` are
lists by nature, so that a list of lists is their sweep) and for every ``bandwidth`` and ``latency`` under ``cluster:``.

    file --parse--> data --overrides--> data --expand lists--> points --validate--> Scenario, Scenario, ...

All mistakes of a file are found in one go and reported as ``file:line: field: found, expected``.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, overload

from ruamel.yaml.error import YAMLError

from gpipe_sim.base.files import (
    Document,
    FieldPath,
    InputError,
    Problem,
    did_you_mean,
    dotted,
    parse_yaml,
    read_yaml,
    yaml_text,
)
from gpipe_sim.base.limits import POINTS, PROBLEMS, shortened, shown
from gpipe_sim.scenario.catalog import LINKS, Link
from gpipe_sim.scenario.schema import Scenario
from gpipe_sim.scenario.validate import validate


@dataclass(frozen=True)
class Sweep(Sequence[Scenario]):
    """A scenario file: its name and its points, in the order of the lists, the last list varying fastest."""

    name: str
    points: tuple[Scenario, ...]

    def __len__(self) -> int:
        return len(self.points)

    @overload
    def __getitem__(self, index: int) -> Scenario: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Scenario]: ...
    def __getitem__(self, index: int | slice) -> Scenario | Sequence[Scenario]:
        return self.points[index]

    def __iter__(self) -> Iterator[Scenario]:
        return iter(self.points)

    def __repr__(self) -> str:
        return f"Sweep({self.name!r}, {len(self)} point{'s' * (len(self) > 1)})"


Source = str | Path | Mapping[str, Any]
"""A file, the name of a scenario that comes with the tool, or what would stand in a file."""


def load_scenario(source: Source, *overrides: str) -> Sweep:
    """Read a scenario; overrides are ``"plan.microbatches=32"`` as on the command line.

    >>> for scenario in load_scenario("bubble", "plan.stages=8"):
    ...     print(scenario.plan.microbatches)
    """
    return parse_scenario(read_document(source), *overrides)


def read_document(source: Source) -> Document:
    """What a person gave, as data that knows where it was written."""
    return _document_of(source) if isinstance(source, Mapping) else read_yaml(find_scenario(Path(source)))


def find_scenario(path: Path) -> Path:
    """A file as it is; a name alone that no file has, such as ``bubble``, is that of a scenario that is shipped."""
    is_name = path.name == str(path) and not path.suffix
    if not is_name or (path.exists() and not path.is_dir()):
        return path
    known = {file.stem: file for file in sorted(shipped_scenarios().glob("*.yaml"))}
    if path.name not in known:
        wanted = did_you_mean(path.name, known)
        message = f"there is no such file, nor a scenario of that name that comes with the tool, {wanted}"
        raise InputError([Problem(shortened(path), "", message)])
    return known[path.name]


def shipped_scenarios() -> Path:
    """The folder of the scenarios that come with the tool: beside the packages, or inside this one once installed."""
    inside = Path(__file__).parents[1] / "scenarios"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "scenarios"


def question_of(scenario: Path) -> str:
    """What a shipped scenario asks: the first line of its file, which is a comment."""
    return scenario.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def _document_of(data: Mapping[str, Any]) -> Document:
    """A dict goes through YAML, so that it is read as a file would be; its mistakes are told by their fields alone."""
    where = "scenario"
    try:
        text = yaml_text(_plain(data))
    except YAMLError as error:
        message = f"{shortened(error)}, expected numbers, text, true and false, in dicts and lists"
        raise InputError([Problem(where, "", message)]) from error
    document = parse_yaml(text, where)
    return Document(where, document.data, {(): where})


def _plain(node: Any) -> Any:
    """With dicts for mappings, and lists for tuples."""
    if isinstance(node, Mapping):
        return {key: _plain(value) for key, value in node.items()}
    return [_plain(value) for value in node] if isinstance(node, list | tuple) else node


def parse_scenario(document: Document, *overrides: str) -> Sweep:
    """The points of an already read document. Relative paths in it are relative to its file."""
    if not isinstance(document.data, dict):
        raise InputError([document.problem((), "expected a mapping with name, model, batch, cluster and plan")])
    document = with_overrides(document, *overrides)
    problems = list(document.problems)
    swept = []
    for path, values in list(_swept_fields(document.data)):
        if values:
            swept.append((path, values))
        else:
            problems.append(document.problem(path, "an empty list sweeps over nothing, expected at least one value"))
            _remove(document.data, path)
    num_points = prod(len(values) for _, values in swept)
    if num_points > POINTS:
        lists = " x ".join(f"{len(values)} {dotted(path)}" for path, values in swept[:8])
        message = f"sweeps over {num_points} plans ({shortened(lists)}), expected at most {POINTS}"
        raise InputError([*problems, document.problem(swept[0][0], message)])
    points: list[Scenario] = []
    for choice in itertools.product(*(range(len(values)) for _, values in swept)):
        chosen = {path: index for (path, _), index in zip(swept, choice, strict=True)}
        try:
            points.append(validate(_point(document, chosen), {dotted(p): v[chosen[p]] for p, v in swept}))
        except InputError as error:
            problems = list(dict.fromkeys([*problems, *error.problems]))
        if len(problems) > PROBLEMS:
            break
    if problems:
        raise InputError(sorted(problems, key=lambda problem: problem.line))
    return Sweep(points[0].name, tuple(points))


def with_overrides(document: Document, *overrides: str) -> Document:
    """A copy of the document with these set; what cannot be set is among its problems."""
    changed = Document(document.file, deepcopy(document.data), dict(document.places), list(document.problems))
    for override in overrides:
        try:
            _override(changed, override)
        except InputError as error:
            changed.problems += error.problems
    return changed


def _remove(data: Any, path: FieldPath) -> None:
    for part in path[:-1]:
        data = data[part]
    del data[path[-1]]


def _override(document: Document, override: str) -> None:
    """Apply ``path=value`` in place; the value is read as YAML."""
    name, equals, text = (part.strip() for part in override.partition("="))
    where = f"--set {override}"
    if not equals or not name:
        raise InputError([Problem(where, "", "expected path=value, such as plan.microbatches=32")])
    path = tuple(int(part) if part.isdecimal() and len(part) < 10 else part for part in name.split("."))
    node = document.data
    for depth, part in enumerate(path[:-1]):
        if isinstance(node, dict) and (part not in node or _is_link(node[part])):
            # A new section, or a link by its name, of which one figure is to be replaced.
            node[part] = _written_out(LINKS[node[part]]) if part in node else {}
            document.places[path[: depth + 1]] = where
        try:
            node = node[part]
        except (TypeError, IndexError):
            raise InputError(
                [Problem(where, dotted(path[: depth + 1]), "there is no such entry in the list")]
            ) from None
        if not isinstance(node, dict | list):
            raise InputError([Problem(where, dotted(path[: depth + 1]), f"is {shown(node)}, which has no keys to set")])
    try:
        node[path[-1]] = parse_yaml(text, where + " ").data
    except (TypeError, IndexError):
        raise InputError([Problem(where, name, "there is no such entry in the list")]) from None
    for old in [known for known in document.places if known[: len(path)] == path]:
        del document.places[old]
    document.places[path] = where


def _is_link(value: Any) -> bool:
    return isinstance(value, str) and value in LINKS


def _written_out(link: Link) -> dict[str, str]:
    return {"bandwidth": f"{link.bandwidth!r} B/s", "latency": f"{link.latency!r} s"}


def _swept_fields(data: Mapping[str, Any]) -> Iterator[tuple[FieldPath, list[Any]]]:
    """Every list that stands for a sweep, in the order of the file."""
    for section, content in data.items():
        if section == "plan" and isinstance(content, dict):
            for key, value in content.items():
                of_lists = {"balance": list | str, "placement": list | str, "order": list}.get(key)
                if isinstance(value, list) and (of_lists is None or any(isinstance(v, of_lists) for v in value)):
                    yield ("plan", key), value
        elif section == "cluster":
            yield from _swept_rates(content, ("cluster",))


def _swept_rates(node: Any, path: FieldPath) -> Iterator[tuple[FieldPath, list[Any]]]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("bandwidth", "latency") and isinstance(value, list):
                yield (*path, key), value
            else:
                yield from _swept_rates(value, (*path, key))


def _point(document: Document, chosen: Mapping[FieldPath, int]) -> Document:
    """The document with one value in place of each swept list, still knowing where that value was written."""

    def choose(node: Any, path: FieldPath) -> Any:
        if path in chosen:
            return node[chosen[path]]
        if isinstance(node, dict):
            return {key: choose(value, (*path, key)) for key, value in node.items()}
        return node

    places = document.places
    if chosen:
        places = dict(places)
        for path, index in chosen.items():
            places[path] = places.get((*path, index), document.where(path))
    return Document(document.file, choose(document.data, ()), places)
