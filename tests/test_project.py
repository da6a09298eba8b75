"""The project keeps its own promises: one-way dependencies, a complete table of contents, no stray references."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

import gpipe_sim

ROOT = Path(__file__).parents[1]


def test_the_table_of_contents_agrees_with_all():
    public = {name for name, value in vars(gpipe_sim).items() if not name.startswith("_") and not _is_module(value)}
    assert public == set(gpipe_sim.__all__)


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


@pytest.mark.parametrize("path", sorted((ROOT / "gpipe_sim").glob("*.py")), ids=lambda path: path.stem)
def test_the_simulator_depends_on_no_other_package_but_in_its_command(path):
    others = {name.split(".")[0] for name in imports(path)} & {"torch", "dash", "plotly", "gpipe_exec", "dashboard"}
    assert others == set() if path.stem != "cli" else others <= {"gpipe_exec", "dashboard"}


@pytest.mark.parametrize(("package", "last"), [("gpipe_sim", "cli"), ("gpipe_exec", "profiler")])
def test_the_map_of_the_code_is_complete_and_no_file_imports_a_later_one(package, last):
    text = (ROOT / "docs" / "background" / "code.md").read_text()
    table = re.findall(r"^\| `(\w+)\.py` \|", text[text.index(f"`{package}/`, in reading order") :], re.MULTILINE)
    table = table[: table.index(last) + 1]
    files = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}
    assert set(table) == files
    for position, name in enumerate(table):
        if name == "cli":  # the command knows everything
            continue
        found = {
            module.split(".")[1]
            for module in imports(ROOT / package / f"{name}.py")
            if module.startswith(f"{package}.")
        }
        assert found & files <= set(table[:position]), name


def test_no_file_names_an_absolute_path_or_a_registry():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    pattern = re.compile(r"/(work|root|home)/|pypi\.org|\.\./shared")
    for name in tracked:
        if Path(name).suffix in (".py", ".md", ".toml", ".txt", ".yaml", "") and name != "tests/test_project.py":
            assert not pattern.search((ROOT / name).read_text(errors="ignore")), name
