"""The pages of the documentation as programs: what they show is run, in order, and compared with what they say.

A fenced block says by its first line what it is:

    ```console                commands after `$`, each with the output that it must have
    ```console measured       the same, but figures differ from run to run: any number stands for any other
    ```console status=2       the last command must fail with that status; its messages are shown too
    ```console columns=120    in a terminal of that width instead of 100
    ```sh                     commands that must succeed, their output not shown
    ```sh server              a command that serves a page until it is interrupted
    ```sh elsewhere           for another machine: not run here, but its options must exist
    ```yaml, ```python        a scenario that must be valid, a program that must run
    ```yaml file=x.yaml       a file that the reader writes at this point
    ```text output            what the program before it must print
    ```text                   anything else

In expected output a line `...` stands for any lines, and `...` in a line for anything. Lines of `make` are looked up in
the Makefile. Everything runs in a folder of its own that looks like the project's, so that the project's stays clean.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
}
_GOES_ON = re.compile(r"<!-- goes on from ([^\s#]+)(?:#(\S+))? -->")

_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"[+-]?\d[\d.,]*( (?:[kMGT]i?)?B/?s?| [num]?s\b|%)?")


def page_before(name):
    """A page that needs what another has made says so, in a comment: that page, and the section at which this one goes
    on; None for its end. None if the page needs nothing."""
    if found := _GOES_ON.search(PAGES[name]):
        return str((ROOT / name).parent.joinpath(found[1]).resolve().relative_to(ROOT)), found[2]
    return None


def anchor_of(heading):
    """A heading's anchor, as git hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def line_of(name, section):
    """The line at which a page's section begins."""
    lines = enumerate(PAGES[name].splitlines(), 1)
    found = [number for number, line in lines if line[:1] == "#" and anchor_of(line.lstrip("# ")) == section]
    assert len(found) == 1, f"{name} has {len(found)} sections {section}"
    return found[0]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    line: int
    language: str
    options: tuple[str, ...]
    text: str

    def option(self, name):
        """The value of ``name=value`` in its first line."""
        return next((option.split("=", 1)[1] for option in self.options if option.startswith(f"{name}=")), None)

    @property
    def commands(self):
        """Commands and the output that stands below each; a line that ends in a backslash goes on in the next."""
        if self.language == "sh":
            lines = self.text.replace("\\\n", " ").splitlines()
            return [(line.split("  #")[0].strip(), "") for line in lines if line.strip() and line[0] != "#"]
        first, *rest = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        assert not first.strip(), f"line {self.line}: a console block begins with a command"
        return [tuple((part + "\n").replace("\\\n", " ").split("\n", 1)) for part in rest]


def blocks(page):
    """The fenced blocks of a page's text, in order."""
    for match in _FENCE.finditer(page):
        language, *options = match["info"].split() or [""]
        yield Block(page.count("\n", 0, match.start()) + 1, language, tuple(options), match["text"])


def new_workspace(path, after=None):
    """A folder with what a reader has at hand, or a copy of the one in which another page has been read."""
    if after is not None:
        return Path(shutil.copytree(after, path))
    for name in ("examples", "scenarios", "tests/data"):
        shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
    tools = path / ".tools"
    tools.mkdir()
    modules = {"gpipe": "-m gpipe_sim.cli", "torchrun": "-m torch.distributed.run", "python": ""}
    for name, module in modules.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (tools / name).chmod(0o755)
    return path


def environment(workspace, columns="100"):
    """A terminal in which the project's own commands are found."""
    return {
        "COLUMNS": columns,
        "PATH": f"{workspace / '.tools'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
        "HOME": str(workspace),
        "OMP_NUM_THREADS": "1",
    }


def read(name, workspace, lines=range(10**9)):
    """Do what a page tells, or some lines of it, and return what is not as it says."""
    problems, printed = [], ""
    for block in blocks(PAGES[name]):
        if block.line not in lines:
            continue
        where = f"{name}:{block.line}"
        if file := block.option("file"):
            (workspace / file).write_text(block.text)
        elif block.language == "python":
            (workspace / ".program.py").write_text(block.text)
            done = _shell("python .program.py", workspace)
            printed = done.stdout
            problems += [f"{where}: {done.stderr}"] if done.returncode else []
        elif block.language == "text" and "output" in block.options:
            problems += [f"{where}: {found}" for found in difference(block.text, printed, measured=False)]
        elif block.language == "sh" and "server" in block.options:
            ((command, _),) = block.commands
            problems += [f"{where}: {found}" for found in _serve(command, workspace)]
        elif block.language in ("sh", "console") and "elsewhere" not in block.options:
            problems += [f"{where}: {found}" for found in _run(block, workspace)]
    return problems


def _run(block, workspace):
    status = int(block.option("status") or 0)
    for number, (command, expected) in enumerate(block.commands, 1):
        if command.startswith("make "):
            continue  # `test_docs` looks for its target
        done = _shell(command, workspace, block.option("columns") or "100")
        wanted = status if number == len(block.commands) else 0
        if done.returncode != wanted:
            yield f"$ {command}\nstatus {done.returncode}, expected {wanted}\n{done.stdout}{done.stderr}"
        elif block.language == "console":
            shown = done.stdout + (done.stderr if wanted else "")
            for found in difference(expected, shown, measured="measured" in block.options):
                yield f"$ {command}\n{found}"


def _shell(command, workspace, columns="100"):
    return subprocess.run(
        ["bash", "-c", command],
        cwd=workspace,
        env=environment(workspace, columns),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


def _serve(command, workspace):
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        cwd=workspace,
        env=environment(workspace),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = re.search(r"http://\S+", process.stderr.readline())
        if address is None:
            yield f"$ {command}\nserves no page"
        else:
            with urllib.request.urlopen(address[0], timeout=600) as answer:
                if answer.status != 200:
                    yield f"$ {command}\nanswers {answer.status}"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=600)


def difference(expected, found, *, measured):
    """Nothing if the output is as expected, otherwise both."""
    pattern = r"\n".join(_pattern(line, measured) for line in _lines(expected))
    pattern = pattern.replace(r"<any lines>\n", r"(?:.*\n)*?").replace(r"\n<any lines>", r"(?:\n.*)*?")
    if not re.fullmatch(pattern, "\n".join(_squeezed(line, measured) for line in _lines(found))):
        yield f"expected\n{expected}\nfound\n{found}"


def _lines(text):
    return [line.rstrip() for line in text.strip("\n").rstrip().splitlines()]


def _squeezed(line, measured):
    """A line without its figures, and without what is as wide as they are."""
    if not measured:
        return line
    return re.sub(r"[ ─━]+", " ", _NUMBER.sub("#", line)).replace(" #", "#")


def _pattern(line, measured):
    if line.strip() == "...":
        return "<any lines>"
    return ".*".join(re.escape(part) for part in re.split(r" ?\.\.\. ?", _squeezed(line, measured)))
