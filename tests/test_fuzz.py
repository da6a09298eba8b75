"""Readers against mutated and hostile files: an `InputError` or something usable, never anything else, never a flood.

Tests marked `search` try new examples in every run, so that what they find need not be the last change's doing: `make
fuzz` runs them, and searches on guided by coverage. What it has found is among the examples here.
"""

import itertools
import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fuzz.targets import GRAPH, SCENARIO, TRANSFORMER, make_targets, seeds, small_plan, use
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans import layers, plan

from gpipe_sim.base import limits
from gpipe_sim.base.files import Document, InputError, _place, parse_json, parse_yaml, read_text, without_blocks
from gpipe_sim.cost.pipedream import import_pipedream
from gpipe_sim.cost.profile import load_profile
from gpipe_sim.make.making import make_plan
from gpipe_sim.make.planfile import load_plan
from gpipe_sim.plan.orders import SCHEDULES
from gpipe_sim.plan.plan import Plan
from gpipe_sim.plan.program import rank_actions
from gpipe_sim.runs.directory import parse_measured
from gpipe_sim.scenario.reading import parse_scenario
from gpipe_sim.search.advise import advise, remedies, sensitivities
from gpipe_sim.search.choices import space_of
from gpipe_sim.step.jitter import jitter_factors
from gpipe_sim.step.simulate import simulate

ROOT = Path(__file__).parents[1]
NAMES = ("scenario", "plan", "profile", "pipedream", "run", "trace")

HOSTILE_VALUES = (
    *("null", "true", "~", "[]", "{}", '""', "-1", "0", "0.5", "1e-320", "1e308", "-1e308", "1e400", ".nan", ".inf"),
    *("NaN", "Infinity", str(10**9), str(10**18), "9" * 400, "9" * 5000, "0x" + "f" * 5000, "0o17", "1_000"),
    *('"\\0"', '"\\ud800"', '"\\e[2J"', "é\u202e", "x" * 10_000, "[/red]", "[red]", "2020-13-45", "2020-01-01", "1:30"),
    *("inf GB/s", "nan s", "-1 ms", "1e400 s", "1e308 s", "1e-300 B/s", "1e30 B", "all", "auto", "measured", "cpu"),
    *("&a [*a]", "*nowhere", "<<: 1", "!!binary x", "!!python/object:os.system x", "!!set {a}", "!!omap [a: 1]"),
    *("!!int abc", "!!timestamp []", "[[[[1]]]]", "{1: {2: 3}}", "{[1, 2]: 3}", "? {a: 1}\n: 2", "[1, 2, 3, 4]"),
    *("[" * 60, "[" * 60 + "]" * 60, "{a: " * 60, "|\n x", ">-\n x", "'", '"', "# x", "---", "...", "%YAML 1.1", "\t"),
)
HOSTILE_BYTES = (
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xc3(",
    b"\r",
    b"\n\n",
    b"\xe2\x80\xa8",
    b"&a ",
    b"*a",
    b"--",
    b",",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def targets(folder):
    return make_targets(folder)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_mutated_is_accepted_before(name, folder, targets):
    assert all(targets[name](seed) for seed in seeds(folder)[name])


VALUE = re.compile(r"(?<=[:\[,={] )[^\s,;\[\]{}:]+|(?<=[:=\[])[^\s,;\[\]{}:\"]+")
"""Most scalars of the files, where they stand in the text."""
KEY = re.compile(r"[\w\"]+(?=:|=| --)")


@st.composite
def mutations(draw: st.DrawFn, seed: bytes) -> bytes:
    """A few small changes to a valid file: values, keys, lines, bytes, its end."""
    content = seed
    for _ in range(draw(st.integers(1, 3))):
        text = content.decode(errors="replace")
        kind = draw(st.sampled_from(["value", "value", "value", "key", "line", "bytes", "cut"]))
        places = list((VALUE if kind == "value" else KEY).finditer(text)) if kind in ("value", "key") else []
        if places:
            place = places[draw(st.integers(0, len(places) - 1))]
            other = places[draw(st.integers(0, len(places) - 1))][0]
            new = draw(st.sampled_from(HOSTILE_VALUES) if kind == "value" else st.sampled_from(["", other, "x", "<<"]))
            if draw(st.integers(0, 3)) == 0:
                new = other
            content = (text[: place.start()] + new + text[place.end() :]).encode(errors="replace")
        elif kind == "line":
            lines = text.splitlines(keepends=True) or [""]
            index = draw(st.integers(0, len(lines) - 1))
            lines[index] = draw(st.sampled_from(["", lines[index] * 2, lines[index][2:], " " + lines[index]]))
            content = "".join(lines).encode(errors="replace")
        else:
            at = draw(st.integers(0, len(content)))
            extra = draw(st.sampled_from(HOSTILE_BYTES)) if kind == "bytes" else b""
            rest = content[at + draw(st.integers(0, 2)) :] if kind == "bytes" else b""
            content = content[:at] + extra + rest
    return content


@pytest.mark.search
@pytest.mark.parametrize("name", NAMES)
def test_a_mutated_file_is_refused_with_a_message_or_used(name, folder, targets):
    valid = seeds(folder)[name]

    @settings(max_examples=120, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(valid).flatmap(mutations))
    def mutate(content: bytes) -> None:
        targets[name](content)

    mutate()


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_mean_nothing_are_refused(name, targets):
    for content in (
        b"",
        b"\0",
        b"\xff\xfe\x00",
        b"\x89PNG\r\n",
        b"[",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b"1",
        b"NaN",
        b'"x',
    ):
        assert not targets[name](content)


# --- what would be large -------------------------------------------------------------------------------------------


def laughs(opening: str, between: str, closing: str) -> str:
    lines = [f"a0: &a0 {opening}{between.join('x' * 9) if opening == '[' else 'x: 1'}{closing}"]
    for level in range(1, 12):
        inside = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(
            f"a{level}: &a{level} " + (f"[{inside}]" if opening == "[" else f"{{<<: [{inside}], y{level}: 1}}")
        )
    return "\n".join(lines)


def scenario_with(old: bytes, new: bytes, text: bytes = SCENARIO) -> bytes:
    assert old in text
    return text.replace(old, new)


VALUES = ", ".join(map(str, range(1, 200))).encode()
LARGE = {
    "aliases": (laughs("[", ", ", "]").encode(), f"more than {limits.YAML_VALUES} values"),
    "merges": (laughs("{", "", "}").encode(), f"more than {limits.YAML_VALUES} values"),
    "self": (b"a: &a [1, *a]", "contains itself"),
    "depth": (b"a: " + b"[" * 100_000, f"more than {limits.YAML_DEPTH} levels"),
    "mappings": (b"".join(b" " * n + b"a:\n" for n in range(1000)), f"more than {limits.YAML_DEPTH} levels"),
    "values": (b"a: [" + b"1, " * 60_000 + b"1]", f"more than {limits.YAML_VALUES} values"),
    "keys": (b"\n".join(b"k%d: 1" % n for n in range(2_000)), "these are the first 50"),
    "bytes": (b"#" * (limits.FILE_BYTES + 1), "larger than 64 MiB"),
    "hex": (scenario_with(b"batch: 8", b"batch: 0x" + b"f" * 100_000), "a number of about"),
    "repeat": (scenario_with(b"repeat: 2", b"repeat: 1000000000"), f"at most {limits.LAYERS}"),
    "layers": (scenario_with(b"layers: 4", b"layers: 999999999", TRANSFORMER), f"at most {limits.LAYERS}"),
    "stages": (scenario_with(b"stages: 3", b"stages: 1" + b"0" * 18), "at most 1000000000"),
    "batch": (
        scenario_with(b"batch: 8", b"batch: 1" + b"0" * 15).replace(b"[2, 3]", b"1" + b"0" * 12),
        "at most 1000000000",
    ),
    "cells": (
        scenario_with(b"batch: 8", b"batch: 1" + b"0" * 9).replace(b"[2, 3]", b"1" + b"0" * 9),
        f"at most {limits.CELLS}",
    ),
    "sweep": (
        scenario_with(b"[2, 3]", b"[" + VALUES + b"]").replace(b"window: 2", b"window: [" + VALUES + b"]"),
        f"at most {limits.POINTS}",
    ),
    "samples": (scenario_with(b"samples: 2", b"samples: 1000000000"), f"at most {limits.SAMPLES}"),
    "seconds": (scenario_with(b"3 ms", b"1e308 s"), "at most 1e+18 s"),
    "weights": (scenario_with(b"hidden: 64", b"hidden: 1000000000", TRANSFORMER), "would hold more than"),
    "slow": (scenario_with(b"12 GB/s", b"1e-300 B/s"), "above zero"),
}


def test_a_file_that_would_be_large_is_refused_within_bounded_memory(tmp_path):
    """All in one process that may not have more than 2 GiB."""
    for name, (content, _) in LARGE.items():
        (tmp_path / f"{name}.yaml").write_bytes(content)
    files = [tmp_path / f"{name}.yaml" for name in LARGE]
    command = [sys.executable, "-m", "gpipe_sim.cli", "simulate", *map(str, files), "/dev/zero"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env={"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30)),
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


EXPANDING = r"""
import io, sys, zipfile
from pathlib import Path
from dashboard.jobs.archive import unpack_run
from fuzz.targets import seeds, small_plan
from gpipe_sim.base.files import InputError, read_json
from gpipe_sim.cost.profile import load_profile
from gpipe_sim.make.planfile import load_plan
from gpipe_sim.base import limits
from gpipe_sim.runs.directory import parse_measured

folder = Path(sys.argv[1])
plan, valid = small_plan(folder), seeds(folder)
profile, planned = (valid[name][0].decode() for name in ("profile", "plan"))
run = '{"format": "gpipe-measured-1", "device": "cpu", "engine": "gpipe", "steps": [%s]}'
many = 1_000_000

def unpack(path):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("plan.yaml", planned)
        archive.write(path, "measured.json")
    (folder / "runs").mkdir(exist_ok=True)
    try:
        unpack_run(stream.getvalue(), folder / "runs", "x.zip")
    finally:
        assert not list((folder / "runs").iterdir()), "nothing is kept before it is valid"

def measured(path):
    return parse_measured(read_json(path), plan)

for name, read, text in (
    ("empty steps", unpack, run % ",".join(["{}"] * 20_000_000)),
    ("lists", measured, run % ",".join(["[]"] * 900_000)),
    ("entries", measured, run % ",".join(["0"] * 5_000_000)),
    ("no steps", unpack, run % ",".join(["0"] * many)),
    ("no ranks", measured, run % ("[" + ",".join(["0"] * many) + "]")),
    ("no rows", measured, run % ('[{"start_s": [' + ",".join(['"x"'] * many) + "]}]")),
    ("no layers", load_profile, profile.replace('"layers": [', '"layers": [' + "0," * many)),
    ("notes", load_profile, profile.replace('"environment": {', '"environment": {' + '"a": 1, ' * 10 + ",".join(
        f'"{n}": 1' for n in range(300_000)))),
    ("sizes", load_profile, profile.replace('"sizes": [', '"sizes": [' + "9," * many)),
    ("comment", load_plan, planned + "#" + "x" * 60_000_000),
    ("quote", load_plan, 'a: "\nprofile: |\n' + ("  " + "x" * 100 + "\n") * 20_000 + '"'),
    ("comments", load_plan, planned + "# a" + "\n# a" * limits.YAML_LINES_BESIDE),
    ("block", load_plan, planned + "\nother: |\n  x" + "\n  x" * (limits.YAML_LINES - 100_000) + "\n"),
    ("lines", load_plan, planned.replace("profile: |", "profile: |\n  x" + "\n" * 30_000_000)),
    ("profile", load_plan, planned.replace("profile: |", "profile: |\n" + "  [[[[[[[[[[0\n" * 110_000)),
):
    path = folder / f"{name}.yaml"
    path.write_text(text)
    del text
    try:
        read(path)
        print(name, "was read")
    except InputError as error:
        assert len(str(error)) < 20_000
        print(name, "|", error)
"""
"""Files that are small, or no larger than allowed, and would take gigabytes or minutes to read."""


def test_memory_and_time_are_bounded_by_what_a_file_expands_to(tmp_path):
    """Each within 1.5 GiB, all within seconds; the parent's own patience is for a machine that is busy."""
    done = subprocess.run(
        [sys.executable, "-c", EXPANDING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 * 2**29, 3 * 2**29)),
    )
    assert done.returncode == 0, done.stderr
    told = dict(line.split(" | ") for line in done.stdout.splitlines() if " | " in line)
    for name, message in {
        "empty steps": f"has more than {limits.JSON_LISTS} lists",
        "lists": f"expected at most {limits.STEPS} entries",
        "entries": f"has more than {limits.JSON_VALUES} entries",
        "no steps": "steps.0: found 0, expected a list",
        "no ranks": "steps.0.0: found 0, expected a mapping",
        "no rows": "start_s.0: found 'x', expected a number",
        "no layers": "layers.0: found 0, expected a mapping",
        "notes": f"expected at most {limits.NOTES}",
        "sizes": "expected ascending sizes",
        "comment": f"has more than {limits.YAML_CHARACTERS} characters beside",
        "quote": "no value of the whole file",
        "comments": f"has more than {limits.YAML_LINES_BESIDE} lines beside its blocks of text",
        "block": "other: unknown key",
        "lines": f"has more than {limits.YAML_LINES} lines",
        "profile": f"has more than {limits.JSON_LISTS} lists",
    }.items():
        assert message in told[name]


@pytest.mark.parametrize("name", [name for name in LARGE if name != "bytes"])
def test_a_limit_is_told_where_it_is_met(name):
    content, message = LARGE[name]
    with pytest.raises(InputError) as raised:
        make_plan(parse_scenario(parse_yaml(content.decode(), "s.yaml"))[0])
    assert message in str(raised.value)
    assert len(str(raised.value)) < 20_000
    assert str(raised.value).startswith("s.yaml:")


LINE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=6)


@given(
    st.lists(LINE, min_size=1, max_size=6), st.sampled_from(["", "\n", "\n\n", "\nb: 1", "\n\nb: 1\n", "\n# x\nb: 2"])
)
def test_a_block_of_text_is_read_as_yaml_reads_it(lines, rest):
    """Whether it is long enough to be read without YAML or not, with the same lines of what comes after it."""
    text = "a: |\n" + "\n".join(f"  {line}" if line else "" for line in lines) + rest
    try:
        expected = parse_yaml(text, "f")
    except InputError:
        expected = None
    short, blocks = without_blocks(text)
    if expected is not None and blocks:
        found = parse_yaml(short, "f")
        assert found.data | {block.key: block.text for block in blocks} == expected.data
        moved = {path: _place("f", int(place.partition(":")[2]) - 1, blocks) for path, place in found.places.items()}
        assert moved == expected.places


def test_a_file_too_large_is_not_read(tmp_path):
    (tmp_path / "large").write_bytes(LARGE["bytes"][0])
    for path in (tmp_path / "large", Path("/dev/zero")):
        with pytest.raises(InputError, match="larger than 64 MiB"):
            read_text(path)


def test_aliases_and_merges_that_stay_small_are_welcome():
    text = SCENARIO.decode().replace(
        "link: {bandwidth: [10 GB/s, inf GB/s], latency: 5 us}", "link: &link {<<: {latency: 1 us}, bandwidth: 1 GB/s}"
    )
    text = text.replace("links: {1: {bandwidth: 12 GB/s, latency: 9 us}}", "links: {1: *link}")
    assert len(parse_scenario(parse_yaml(text, "s.yaml"))) == 2


def test_a_search_over_a_huge_batch_has_few_candidates():
    text = TRANSFORMER.replace(b"batch: 4", b"batch: 1000000000").replace(b"microbatches: 2, ", b"").decode()
    space = space_of(list(parse_scenario(parse_yaml(text, "s.yaml"))))
    assert len(space.microbatches) < 1000
    assert max(space.microbatches) <= limits.CELLS


# --- found by search -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (b'path: "a\\0b"', r"path: has the control character '\\x00', expected text that can be printed"),
        (b"path: " + b"x" * 5000, "there is no file"),
        (b'path: "\\ud800"', "half of a surrogate pair"),
    ],
)
def test_a_path_that_no_file_can_have_is_told(new, message):
    text = SCENARIO.replace(b"kind: layers", b"kind: profile\n  " + new).decode()
    text = re.sub(r"  layers:\n.*?(?=batch)", "", text, flags=re.DOTALL)
    with pytest.raises(InputError, match=message):
        make_plan(parse_scenario(parse_yaml(text, "s.yaml"))[0])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("microbatches: 2", "microbatches: 5", "the batch of 4"),
        ("schedule: gpipe", "schedule: naive", "expected 1"),
        ("rank: 1", "rank: 0", "puts 2 stages on a rank, expected 1 for gpipe"),
        ("stages: 2", "stages: [1, 2]", "2 plans, expected the one of this file"),
        ('"gpipe-profile-1"', "[" * 100_000, "nested too deep"),
        ("layers: 4\n  rank: 1", "layers: 3\n  rank: 1", "expected the profile's 7"),
    ],
)
def test_a_plan_file_that_contradicts_itself_is_told(old, new, message, folder):
    text = seeds(folder)["plan"][0].decode()
    assert old in text, text[:700]
    (folder / "plan.yaml").write_text(text.replace(old, new))
    with pytest.raises(InputError, match=message):
        load_plan(folder / "plan.yaml")


@pytest.mark.parametrize("text", [r'"\e[2J"', r'"a\rb"', r'"\x7f"', r'"\x9b2J"', r'"\b"'])
def test_what_a_terminal_would_obey_is_refused_in_names_and_in_keys(text):
    for content in (f"name: {text}\n", f"{text}: 1\n", f"plan: {{stages: [{text}]}}"):
        with pytest.raises(InputError, match=r"^s\.yaml:1: [\w.: ]*has the control character '\\[xr]"):
            parse_yaml(content, "s.yaml")


def test_lines_and_tabs_are_text():
    text = parse_yaml('name: "é\\t\\n漢"\r\nprofile: |\r\n  {}\r\n  {}\r\n', "s.yaml").data
    assert text == {"name": "é\t\n漢", "profile": "{}\n{}\n"}


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "9" * 10_000, r'["\ud800"]', r'{"\udfff": 1}', r'["\u001b[2J"]', '["\x9b2J"]', r'{"\f": 1}']
)
def test_json_that_cannot_be_used_is_told(text):
    with pytest.raises(InputError, match=r"f\.json"):
        parse_json(text, "f.json")


def test_a_profile_names_the_line_of_a_number_that_is_too_large(folder):
    profile = json.loads(seeds(folder)["profile"][0])
    profile["layers"][3]["forward_s"][0] = 1e300
    (folder / "profile.json").write_text(json.dumps(profile, indent=1))
    with pytest.raises(
        InputError, match=r"profile.json:\d+: layers.3.forward_s.0: found 1e\+300, expected at most 1e\+18"
    ):
        load_profile(folder / "profile.json")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("forward_compute_time=1.5", "forward_compute_time=nan", "found 'nan', expected a number from 0"),
        ("forward_compute_time=1.5", "forward_compute_time=-1", "found '-1', expected a number from 0"),
        ("activation_size=16.0", "activation_size=1e400", "found '1e400', expected a number from 0"),
        ("node4 -- Linear", "node2 -- Linear", "is given twice"),
        ("\tnode1 -- node4", "\tnode4 -- node2", "wait for each other"),
    ],
)
def test_a_graph_that_cannot_be_is_told(old, new, message, folder):
    assert old in GRAPH.decode()
    (folder / "graph.txt").write_text(GRAPH.decode().replace(old, new))
    with pytest.raises(InputError, match=message):
        import_pipedream(folder / "graph.txt", 4)


def test_a_long_chain_of_views_is_followed_without_recursion(folder):
    costs = "forward_compute_time=1.0, backward_compute_time=1.0, activation_size=[8.0; 8.0], parameter_size=0.0"
    names = [f"node{'9' * 30}{n}" for n in range(5000)]
    lines = [f"{name} -- {'Linear' if n == 0 else '__getitem__(0)'} -- {costs}" for n, name in enumerate(names)]
    lines += [f"\t{a} -- {b}" for a, b in itertools.pairwise(names)]
    (folder / "chain.txt").write_text("\n".join(lines))
    assert import_pipedream(folder / "chain.txt", 4).num_layers == 5000


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [("end_s", -1.0, "before its start"), ("start_s", 1e300, "at most 1e"), ("send_end_s", "x", "a number")],
)
def test_a_measured_step_that_cannot_be_is_told(column, value, message, folder, targets):
    measured = json.loads(seeds(folder)["run"][0])
    measured["steps"][0][0][column][1] = value
    with pytest.raises(InputError, match=message):
        parse_measured(Document("measured.json", measured), small_plan(folder))


# --- the simulator -------------------------------------------------------------------------------------------------

scales = st.floats(-18, 15).map(lambda exponent: 10.0**exponent)
amounts = st.one_of(st.just(0.0), scales)


@st.composite
def extreme_plans(draw: st.DrawFn) -> Plan:
    """Figures of any size side by side, from nothing at all to ages; whatever a scenario may share, block or jitter."""
    K, nodes = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    schedule = draw(st.sampled_from(list(SCHEDULES)))
    M = 1 if schedule == "naive" else draw(st.integers(1, 6))
    model = layers(
        [draw(scales), *draw(st.lists(amounts, min_size=K - 1, max_size=K - 1))],
        draw(st.lists(amounts, min_size=K, max_size=K)),
        draw(st.lists(amounts, min_size=K, max_size=K)),
        draw(st.lists(amounts, min_size=K, max_size=K)),
        parameters=draw(amounts),
        overhead=draw(amounts),
    )

    def link() -> dict[str, str]:
        return {"bandwidth": f"{max(1e-6, draw(scales))!r} B/s", "latency": f"{draw(amounts)!r} s"}

    cluster = {"nodes": nodes, "devices_per_node": -(-K // nodes), "network": link(), "link": link()}
    cluster |= {"overlap": draw(st.booleans()), "cores": draw(st.integers(1, 3))}
    cluster |= {"slowdown": {draw(st.integers(0, K - 1)): draw(st.floats(1e-6, 1e6))}}
    if draw(st.booleans()):
        cluster |= {"jitter": {"cv": draw(st.floats(0, 10)), "samples": 2, "seed": draw(st.integers(0, 2**64 - 1))}}
    return plan(
        model,
        M,
        batch=M * draw(st.integers(1, 3)) + draw(st.integers(0, M - 1)),
        cluster=cluster,
        schedule=schedule,
        checkpoint={
            "per_stage": draw(st.lists(st.sampled_from(["never", "always", "except_last"]), min_size=K, max_size=K))
        },
        recompute=draw(st.sampled_from(["early", "on_demand"])),
        backward=draw(st.sampled_from(["reverse", "fifo"])),
        window=draw(st.sampled_from([1, 2, "all"])),
        placement=draw(st.permutations(range(K))),
    )


@pytest.mark.search
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(extreme_plans())
def test_any_valid_plan_ends_and_conserves_work_and_memory(made):
    has_jitter = made.scenario.cluster.jitter is not None
    step = simulate(made, sample=1 if has_jitter else None)
    factors = jitter_factors(made, [1])
    crowded = bool(made.crowded_nodes)
    for timeline, actions in zip(step.ranks, rank_actions(made), strict=True):
        assert timeline.actions == actions, "each action once, in its order"
        assert len(set(actions)) == len(actions)
        assert np.isfinite(timeline.start_s).all()
        assert (timeline.end_s >= timeline.start_s).all()
        (stage,), end = timeline.stages, float(timeline.end_s[-1])
        seconds = {"F": made.forward_s[stage], "R": made.recompute_s[stage], "B": made.backward_s[stage]}
        work = sum(float((values * factors[kind][stage, :, 0]).sum()) for kind, values in seconds.items())
        rounding = 1e-9 * end  # what a clock that shows the end cannot resolve
        assert timeline.busy_s() >= work - rounding
        if not crowded:
            assert timeline.busy_s() <= work + rounding
    costs = made.profile.at(max(made.sizes))
    lost = 1e-9 * made.num_microbatches * float((costs.saved_bytes + costs.output_bytes).sum())  # to rounding
    for curve in step.memory:
        held = {
            part: values for part, values in curve.parts.items() if part not in ("parameters", "optimizer", "inputs")
        }
        for part, values in held.items():
            assert values[-1] <= 1e-9 * values.max() + lost, part
            assert values.min() >= -1e-9 * values.max() - lost, part


@pytest.mark.search
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(extreme_plans())
def test_any_valid_plan_is_explained_in_finite_numbers(made):
    use(made)


@pytest.mark.search
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(extreme_plans(), scales, st.booleans())
def test_any_valid_scenario_is_planned_in_a_bounded_number_of_questions(made, memory, enumerates):
    """With the plan left open, except that no NIC and no core is shared: that is slow, and searched in the same way."""
    data = made.scenario.document.data
    cluster = data["cluster"] | {"nodes": 1, "devices_per_node": min(3, made.num_stages), "cores": 3, "slowdown": {}}
    cluster |= {"device": {"memory": f"{memory!r} B"}}
    choices = {"window": data["plan"]["window"]} | ({} if enumerates else {"microbatches": made.num_microbatches})
    space = space_of(list(parse_scenario(Document("s.yaml", data | {"cluster": cluster, "plan": choices}))))
    space = replace(space, beyond=space.beyond[:1])  # one of the other schedules is enough to break something
    questions = itertools.count(1)

    def advance() -> None:
        assert next(questions) < 1000, "the search goes on and on"

    with pytest.MonkeyPatch.context() as patched:
        if not enumerates:
            patched.setattr("gpipe_sim.search.question.PROVE_WORK", 0)
        advice = advise(space, advance)
    sentences = [advice.reason, *(sensitivities(advice) if advice.fits else remedies(space, advice.recommended))]
    assert not any("nan" in sentence for sentence in sentences)
    use(advice.recommended.plan)
