"""What the README and the docs show is what the program does: every command runs, every path and link exists."""

import json
import re
import runpy
import shlex
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from documents import PAGES, ROOT, anchor_of, blocks, difference, line_of, new_workspace, page_before, read

from gpipe_sim.base.files import parse_yaml
from gpipe_sim.explain.predict import Prediction
from gpipe_sim.runs.compare import Comparison
from gpipe_sim.scenario.reading import load_scenario, parse_scenario

LANGUAGES = {"console", "sh", "python", "yaml", "text"}
HAS_COMMANDS = [name for name, text in PAGES.items() if re.search(r"^```(console|sh|python|yaml)", text, re.MULTILINE)]
REFERENCE = runpy.run_path(str(ROOT / "docs" / "reference.py"))


@pytest.fixture(scope="session")
def finished(request, tmp_path_factory):
    """Page -> the folder in which it has been read, and what was not as it says; each is read once, two at a time."""
    pytest.importorskip("torch", reason="the docs run plans: gpipe-planner[exec]")
    readers = ThreadPoolExecutor(2)
    reading: dict[tuple[str, str | None], Future] = {}
    stops = {page: section for page, section in filter(None, map(page_before, HAS_COMMANDS)) if section}
    """Page -> the section at which another one goes on; there the page is cut in two."""

    def finish(path, name, before, lines):
        workspace = new_workspace(path, before and before.result()[0])
        return workspace, read(name, workspace, lines)

    def begin(name, section=None):
        """All of a page, or what comes before a section."""
        if (name, section) not in reading:
            if section is None and name in stops:
                before, lines = begin(name, stops[name]), range(line_of(name, stops[name]), 10**9)
            else:
                before = page_before(name) and begin(*page_before(name))
                lines = range(line_of(name, section) if section else 10**9)
            path = tmp_path_factory.mktemp("read") / "here"
            reading[name, section] = readers.submit(finish, path, name, before, lines)
        return reading[name, section]

    def result(name):
        workspace, problems = begin(name).result()
        return workspace, [*(begin(name, stops[name]).result()[1] if name in stops else ()), *problems]

    asked = {item.callspec.params["name"] for item in request.session.items if item.originalname == READS_A_PAGE}
    for name in asked & stops.keys():
        begin(name, stops[name])
    for name in sorted(asked, key=lambda name: (name in stops or page_before(name) is not None, name)):
        begin(name)
    yield result
    readers.shutdown(cancel_futures=True)


READS_A_PAGE = "test_what_a_page_shows_is_what_happens"


@pytest.mark.parametrize("name", HAS_COMMANDS)
def test_what_a_page_shows_is_what_happens(name, finished):
    _, problems = finished(name)
    assert not problems, "\n\n".join(problems)


@pytest.mark.parametrize("name", PAGES)
def test_every_block_says_what_it_is(name):
    for block in blocks(PAGES[name]):
        assert block.language in LANGUAGES, f"{name}:{block.line}: {block.language!r}"


@pytest.mark.parametrize("name", PAGES)
def test_every_scenario_in_a_page_is_right(name):
    for block in blocks(PAGES[name]):
        if block.language == "yaml":
            document = parse_yaml(block.text.replace("[always, ..., never]", "[always, never]"), name)
            assert len(parse_scenario(document)) > 0, f"{name}:{block.line}"


def commands_for_another_machine():
    for name, text in PAGES.items():
        for block in blocks(text):
            if "elsewhere" in block.options:
                yield from (pytest.param(command, id=f"{name}:{block.line}") for command, _ in block.commands)


@pytest.mark.parametrize("command", list(commands_for_another_machine()))
def test_what_is_for_another_machine_has_options_that_exist(command):
    program, *arguments = (word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word))
    if program != "gpipe":
        assert program in ("pip", "sbatch", "scp", "torchrun"), command
        return
    from typer.main import get_command

    from gpipe_sim.cli import app

    group = get_command(app)
    subcommand = group.commands[arguments[0]]
    with subcommand.make_context(arguments[0], arguments[1:]):  # parses, and raises if it cannot
        pass


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, text in PAGES.items():
        named = {*re.findall(r"`make ([a-z]+)`", text), *re.findall(r"^make ([a-z]+)", text, re.MULTILINE)}
        assert named <= targets, name


# --- links and paths -----------------------------------------------------------------------------------------------


def anchors(text):
    """The anchors of a page's headings, as git hosts make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return set(map(anchor_of, headings))


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name}: {target}"
        if anchor:
            assert anchor in anchors(file.read_text()), f"{name}: {target}"


@pytest.mark.parametrize("name", PAGES)
def test_every_path_that_is_named_exists(name):
    """In running text; what commands read and write is proved by running them."""
    folders = "benchmarks|dashboard|docs|examples|gpipe_exec|gpipe_sim|scenarios|tests"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", PAGES[name]):
        assert (ROOT / path).exists(), f"{name}: {path}"


def test_every_page_is_in_the_index():
    index = PAGES["docs/README.md"]
    for name in PAGES:
        if name.startswith("docs/") and name != "docs/README.md":
            assert f"]({name.removeprefix('docs/')})" in index, name


def test_every_picture_is_shown_and_all_that_need_no_measuring_are_drawn_by_the_script():
    """The photograph of the page is taken by it too; how the simulator grows is drawn by `benchmarks/scale.py`."""
    drawn = set(runpy.run_path(str(ROOT / "docs" / "figures.py"))["FIGURES"])
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("**/*.png")}
    shown = {
        str(((ROOT / name).parent / found).resolve().relative_to(ROOT / "docs"))
        for name, text in PAGES.items()
        for found in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    }
    assert there == shown == drawn | {"dashboard.png", "scale.png"}


# --- the reference -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFERENCE["pages"]())
def test_the_reference_is_what_the_code_says_now(name):
    committed = (ROOT / "docs" / "reference" / name).read_text()
    assert committed == REFERENCE["pages"]()[name], "run `make docs`"


def test_the_reference_has_no_page_of_its_own():
    assert {path.name for path in (ROOT / "docs" / "reference").iterdir()} == set(REFERENCE["pages"]())


def test_the_documented_keys_of_json_are_its_keys():
    from gpipe_sim.explain.predict import predict
    from gpipe_sim.make.making import make_plan

    (scenario,) = load_scenario(ROOT / "scenarios" / "straggler.yaml", "plan.balance=auto", "cluster.jitter.samples=2")
    documented = REFERENCE["documented_keys"](Prediction.to_dict)
    assert list(documented) == list(predict(make_plan(scenario)).to_dict(tokens=1e12))


def test_the_documented_keys_of_a_comparison_are_its_keys(finished):
    workspace, _ = finished("docs/tutorial.md")
    compared = json.loads((workspace / "runs" / "first" / "compare.json").read_text())
    assert list(REFERENCE["documented_keys"](Comparison.to_dict)) == list(compared)


# --- the checks themselves -----------------------------------------------------------------------------------------


def test_output_that_differs_is_seen():
    assert not list(difference("a\n...\nz\n", "a\nb\nc\nz\n", measured=False))
    assert not list(difference("step 12 ms ... fast\n", "step 12 ms, quite fast\n", measured=False))
    assert list(difference("a\nb\n", "a\nc\n", measured=False))
    assert list(difference("step 12 ms\n", "step 13 ms\n", measured=False))
    assert not list(difference("step  12 ms +1.2%\n", "step 3.1 s -20%\n", measured=True))
    assert list(difference("step 12 ms\n", "bubble 12 ms\n", measured=True))


def test_a_page_that_is_wrong_is_found(tmp_path, monkeypatch):
    page = "```console\n$ gpipe simulate scenarios/bubble.yaml --set plan.microbatches=4\nsomething else\n```\n"
    monkeypatch.setitem(PAGES, "wrong.md", page)
    (problem,) = read("wrong.md", new_workspace(tmp_path / "here"))
    assert problem.startswith("wrong.md:1: $ gpipe simulate")
