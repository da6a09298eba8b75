"""Import profiles in PipeDream's text format: measured layers of a graph that need not be a chain.

    node4 -- Embedding(32320, 1024) -- forward_compute_time=0.073, ..., activation_size=6291456.0, parameter_size=...
    node7 -- LSTM(2048, 1024) -- ..., activation_size=[6291456.0; 131072.0; 131072.0], ...
        node4 -- node5

Times are in milliseconds for the whole profiled batch, whose size the file does not say. Nodes become layers in
topological order. Cutting the order anywhere, what crosses the cut is every *distinct* output that is made before it
and used after it, so a skip connection is carried along from stage to stage:

    a --> b --> c --> d      cut after b: outputs of a and b      cut after c: outputs of a and c
     `---------------^
"""

import re
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np

from gpipe_sim.base.files import InputError, Problem, read_text
from gpipe_sim.base.limits import AMOUNT, LAYERS, shortened, shown
from gpipe_sim.cost.profile import Profile, column

_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<what>.*) -- "
    r"forward_compute_time=(?P<forward>[^,]+), backward_compute_time=(?P<backward>[^,]+), "
    r"activation_size=(?P<sizes>[^,]+), parameter_size=(?P<parameters>[^,]+)"
)
_EDGE = re.compile(r"\s+(?P<source>\S+) -- (?P<target>\S+)")
_ITEM = re.compile(r"__getitem__\((\d+)\)")
_VIEW = re.compile(r"__getitem__|View|Size|.*\(inplace\)")
"""What keeps no storage of its own: its output lies in its input's."""

Output = tuple[str, int]
"""A node's output, by its place among the several that a node may have."""


@dataclass
class _Node:
    what: str
    forward_s: float
    backward_s: float
    outputs: list[float]
    """Bytes of each output."""
    parameter_bytes: float


def import_pipedream(path: Path, batch: int) -> Profile:
    """Read a ``graph.txt`` that was profiled with `batch` samples."""
    nodes, edges = _parse(path)
    order = _topological(path, nodes, edges)
    layers = [nodes[name] for name in order]
    is_input = [layer.what.startswith(("Input", "hidden")) for layer in layers]
    crossing = _crossing(order, nodes, edges)

    nothing = np.zeros((len(layers), 1))
    return Profile(
        source="imported",
        device="unknown",
        dtype="fp32",
        names=tuple(f"{name}:{node.what.split('(')[0]}" for name, node in zip(order, layers, strict=True)),
        sizes=(batch,),
        table={
            # The time of an input node is that of loading the data.
            "forward_s": column(0.0 if given else n.forward_s for n, given in zip(layers, is_input, strict=True)),
            "backward_s": column(0.0 if given else n.backward_s for n, given in zip(layers, is_input, strict=True)),
            "saved_bytes": column(0.0 if _VIEW.match(node.what) else sum(node.outputs) for node in layers),
            "output_bytes": column(crossing),
            "workspace_no_grad_bytes": nothing,
            "workspace_forward_bytes": nothing,
            "workspace_backward_bytes": nothing,
            "workspace_accumulate_bytes": nothing,
        },
        parameter_bytes=np.array([node.parameter_bytes for node in layers]),
        optimizer_s=np.zeros(len(layers)),
        environment={"imported": path.name, "batch": str(batch)},
    )


def _parse(path: Path) -> tuple[dict[str, _Node], list[tuple[str, str]]]:
    nodes: dict[str, _Node] = {}
    edges: list[tuple[str, str]] = []
    problems: list[Problem] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        where = f"{path}:{number}"
        if edge := _EDGE.fullmatch(line):
            for end in (edge["source"], edge["target"]):
                if end not in nodes:
                    problems.append(Problem(where, shortened(end), "found in an edge, expected a node listed above it"))
            edges.append((edge["source"], edge["target"]))
        elif node := _NODE.fullmatch(line):
            name = shortened(node["name"])
            if node["name"] in nodes:
                problems.append(Problem(where, name, "is given twice, expected once"))
            try:
                nodes[node["name"]] = _Node(
                    what=node["what"],
                    forward_s=_number(node["forward"]) / 1e3,
                    backward_s=_number(node["backward"]) / 1e3,
                    outputs=[_number(size) for size in node["sizes"].strip("[]").split(";", _MOST_OUTPUTS)],
                    parameter_bytes=_number(node["parameters"]),
                )
            except ValueError as error:
                problems.append(Problem(where, name, str(error)))
        elif line.strip():
            problems.append(Problem(where, "", f"found {line.strip()[:40]!r}, expected a node or an edge"))
        if max(len(nodes), len(edges) / _MOST_EDGES) > LAYERS:
            message = f"is longer than {LAYERS} nodes with {_MOST_EDGES} edges each, expected fewer"
            raise InputError([*problems, Problem(where, "", message)])
    if not nodes and not problems:
        problems.append(Problem(f"{path}:1", "", "has no nodes, expected PipeDream's graph.txt"))
    if problems:
        raise InputError(problems)
    return nodes, edges


_MOST_OUTPUTS = 100
_MOST_EDGES = 20


def _number(text: str) -> float:
    """What a node says of itself: neither negative, nor infinite, nor absurd."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= AMOUNT:
        raise ValueError(f"found {shown(text)}, expected a number from 0 to {AMOUNT:.0e}")
    return number


def _topological(path: Path, nodes: dict[str, _Node], edges: list[tuple[str, str]]) -> list[str]:
    """Inputs before users; of those that may come next, the lowest number, which follows the model's own code."""
    waits = dict.fromkeys(nodes, 0)
    users: dict[str, list[str]] = {name: [] for name in nodes}
    for source, target in edges:
        waits[target] += 1
        users[source].append(target)

    def key(name: str) -> tuple[int, str]:
        digits = re.sub(r"\D", "", name)[:18]
        return int(digits) if digits else 0, name

    ready = [key(name) for name, count in waits.items() if count == 0]
    heapify(ready)
    order: list[str] = []
    while ready:
        name = heappop(ready)[1]
        order.append(name)
        for user in users[name]:
            waits[user] -= 1
            if waits[user] == 0:
                heappush(ready, key(user))
    if len(order) < len(nodes):
        done = {*order}
        stuck = ", ".join(name for name in nodes if name not in done)
        raise InputError([Problem(str(path), shortened(stuck), "wait for each other, expected a graph without cycles")])
    return order


def _crossing(order: list[str], nodes: dict[str, _Node], edges: list[tuple[str, str]]) -> list[float]:
    """Bytes that cross the cut after each node: each distinct output made up to there and used beyond.

    ``__getitem__(i)`` makes nothing new: it is output i of the node before it.
    """
    position = {name: index for index, name in enumerate(order)}
    before: dict[str, list[str]] = {name: [] for name in nodes}
    for source, target in edges:
        before[target].append(source)

    outputs_of: dict[str, list[Output]] = {}
    items = {name: _ITEM.fullmatch(nodes[name].what) for name in nodes}
    for name in order:  # parents come before those that take one of their outputs
        item = items[name]
        if item is None:
            outputs_of[name] = [(name, index) for index in range(len(nodes[name].outputs))]
        else:
            index = int(item[1][:9])
            outputs_of[name] = [output for parent in before[name] for output in outputs_of[parent][index:][:1]]

    last_use: dict[Output, int] = {}
    for source, target in edges:
        for output in outputs_of[target if items[target] else source]:
            last_use[output] = max(last_use.get(output, 0), position[target])
    totals = np.zeros(len(order) + 1)
    for (name, index), used in last_use.items():
        totals[position[name]] += nodes[name].outputs[index]
        totals[used] -= nodes[name].outputs[index]
    return [float(total) for total in np.cumsum(totals)[:-1]]
