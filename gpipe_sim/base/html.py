"""Small pieces of HTML, with which values show themselves in a notebook: no script, nothing to load.

Colours and letters follow the notebook: only bars have colours of their own.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

WIDTH = 720
"""Pixels of a chart; a narrower notebook scales it down."""
_LABEL, _ROW = 150, 22
"""Pixels beside a chart's rows for their labels, and the height of each row."""


class Bar(NamedTuple):
    """A stretch of a row, from one value to another."""

    start: float
    end: float
    colour: str
    title: str = ""
    """Shown when it is pointed at."""


def paragraph(text: str) -> str:
    """A sentence."""
    return f"<p>{escape(text)}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], most: int = 60) -> str:
    """Rows under a heading; of very many only the first are shown, and it says so."""
    found = list(rows)
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in found[:most])
    left = paragraph(f"and {len(found) - most} more") if len(found) > most else ""
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{left}"


def chart(title: str, rows: Sequence[tuple[str, Sequence[Bar], str]]) -> str:
    """Rows of bars on one axis, from 0 to the highest end: each with its label, its bars, and a note after the last."""
    highest = max((bar.end for _, bars, _ in rows for bar in bars), default=0.0) or 1.0
    note_width = 8 * max((len(note) for *_, note in rows), default=0)
    scale = (WIDTH - _LABEL - note_width) / highest
    drawn = []
    for number, (label, bars, note) in enumerate(rows):
        y = number * _ROW
        drawn.append(f'<text x="{_LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>')
        for bar in bars:
            place = f'x="{_LABEL + bar.start * scale:.2f}" width="{max((bar.end - bar.start) * scale, 0.5):.2f}"'
            told = f"<title>{escape(bar.title)}</title>" if bar.title else ""
            drawn.append(f'<rect {place} y="{y + 2}" height="{_ROW - 5}" fill="{bar.colour}">{told}</rect>')
        after = _LABEL + max((bar.end for bar in bars), default=0.0) * scale + 6
        drawn.append(f'<text x="{after:.2f}" y="{y + 15}">{escape(note)}</text>')
    height = len(rows) * _ROW
    look = f"max-width:{WIDTH}px;width:100%;font:12px sans-serif;fill:currentColor"
    name = f'role="img" aria-label="{escape(title)}"'
    return f'<svg viewBox="0 0 {WIDTH} {height}" style="{look}" {name}>{"".join(drawn)}</svg>'
