"""The one table: headlines of all benchmarks of a run of `make bench`, each with how to repeat it.

Run with: .venv/bin/python benchmarks/table.py build/bench
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rows import load

ORDER = ("simulator", "planner", "rivals", "cuts", "execution", "accuracy", "regret")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the benchmarks left their headlines, NAME.json each")
    folder = parser.parse_args().folder
    files = sorted(folder.glob("*.json"), key=lambda path: (*ORDER, path.stem).index(path.stem))
    if not files:
        raise SystemExit(f"table.py: error: there are no headlines in {folder}, expected those of `make bench`")
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(title="theirs / ours, in one run on this machine; more than 1: ours is faster", title_justify="left")
    for heading, justify in (("what was run", "left"), ("against", "left"), ("ours", "right"), ("theirs", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("goal")
    notes: list[str] = []
    for path in files:
        table.add_section()
        for row in load(path):
            if row.note and row.note not in notes:
                notes.append(row.note)
            mark = f" [{notes.index(row.note) + 1}]" if row.note else ""
            goal = {True: "held", False: "MISSED", None: ""}[row.held]
            ratio = "-" if row.ratio is None else f"{row.ratio:.3g}x"
            table.add_row(row.what, row.peer + mark, row.ours, row.theirs, ratio, goal)
    console.print(table, markup=False)
    for number, note in enumerate(notes, start=1):
        console.print(f"[{number}] {note}", markup=False, highlight=False)
    console.print("to repeat a part:", highlight=False)
    for command in dict.fromkeys(row.repeat for path in files for row in load(path)):
        console.print(f"  {command}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
