"""What the README shows is what the program prints."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_sim.files import parse_yaml
from gpipe_sim.sweep import parse_scenario

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.splitlines()[0][2:60])
def test_a_command_of_the_readme_prints_what_stands_there(block):
    command, expected = block.removeprefix("$ gpipe ").split("\n", 1)
    done = subprocess.run(
        [BIN / "gpipe", *shlex.split(command)],
        cwd=ROOT,
        env={"COLUMNS": "100", "PATH": str(BIN), "PYTHONIOENCODING": "utf-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if "expected" in expected else subprocess.DEVNULL,
        text=True,
        check=False,
    )
    assert [line.rstrip() for line in done.stdout.strip().splitlines()] == expected.rstrip().splitlines()


def test_the_python_of_the_readme_runs(monkeypatch, capsys):
    (block,) = blocks("python")
    monkeypatch.chdir(ROOT)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[0].startswith("4 0.336")


def test_the_scenario_of_the_readme_is_right():
    (block,) = blocks("yaml")
    assert len(parse_scenario(parse_yaml(block.replace("[always, ..., never]", "[always, never]"), "README.md"))) == 8
