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


def test_every_file_is_in_the_map_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    for path in sorted((ROOT / "gpipe_sim").glob("*.py")):
        if path.stem != "__init__":
            assert f"`{path.name}`" in readme, path


def test_no_file_names_an_absolute_path_or_a_registry():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    pattern = re.compile(r"/(work|root|home)/|pypi\.org|\.\./shared")
    for name in tracked:
        if Path(name).suffix in (".py", ".md", ".toml", ".txt", ".yaml", "") and name != "tests/test_project.py":
            assert not pattern.search((ROOT / name).read_text(errors="ignore")), name
