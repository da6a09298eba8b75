"""The project keeps its own promises: one-way dependencies, a complete table of contents, no stray references."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpipe_sim
from gpipe_sim import contents

ROOT = Path(__file__).parents[1]


def test_the_table_of_contents_agrees_with_all():
    public = {name for name, value in vars(contents).items() if not name.startswith("_") and not _is_module(value)}
    assert public == set(contents.__all__) == set(gpipe_sim.__all__)
    assert all(getattr(gpipe_sim, name) is getattr(contents, name) for name in contents.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = gpipe_sim.nothing


def test_the_command_says_its_help_without_the_simulator():
    ends = "atexit.register(lambda: print({'numpy', 'simpy', 'torch'} & set(sys.modules)))"
    asked = f"import atexit, sys, gpipe_sim.cli; {ends}; gpipe_sim.cli.main(['--help'])"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == "set()"


def _is_module(value: object) -> bool:
    return type(value).__name__ == "module"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "gpipe_sim").rglob("*.py")), ids=lambda path: path.stem)
def test_the_simulator_depends_on_no_other_package_but_in_its_command(path):
    others = {name.split(".")[0] for name in imports(path)} & {"torch", "dash", "plotly", "gpipe_exec", "dashboard"}
    is_command = path.stem == "cli" or path.parent.name == "commands"
    assert others == set() if not is_command else others <= {"gpipe_exec", "dashboard"}


def modules(package: str) -> list[str]:
    """Every module of a package but its commands, by its path, such as ``plan/program``."""
    folder = ROOT / package
    paths = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.py")]
    return [path for path in paths if not path.endswith("__init__") and not path.startswith("commands/")]


@pytest.mark.parametrize("package", ["gpipe_sim", "gpipe_exec"])
def test_the_map_of_the_code_is_complete_and_no_file_imports_a_later_one(package):
    text = (ROOT / "docs" / "background" / "code.md").read_text()
    section = text.split(f"## `{package}/`")[1].split("\n## ")[0]
    table = re.findall(r"^\| `([\w/]+)\.py` \|", section, re.MULTILINE)
    assert sorted(table) == sorted(modules(package))
    for position, name in enumerate(table):
        if name == "cli":  # the command knows everything
            continue
        known = {
            module.removeprefix(f"{package}.").replace(".", "/")
            for module in imports(ROOT / package / f"{name}.py")
            if module.startswith(f"{package}.")
        }
        assert known & set(table) <= set(table[:position]), name


def test_no_file_names_an_absolute_path_or_a_registry():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    pattern = re.compile(r"/(work|root|home)/|pypi\.org|\.\./shared")
    for name in tracked:
        if Path(name).suffix in (".py", ".md", ".toml", ".txt", ".yaml", "") and name != "tests/test_project.py":
            assert not pattern.search((ROOT / name).read_text(errors="ignore")), name
