"""The few pieces of HTML that report.html is made of.

Text of the corpus or the user reaches the page through `safe` alone.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

Cell = str | int | float | None


class Figure(str):
    """A number that is written already."""


def safe(value: object) -> str:
    """Make text safe inside HTML; characters that hide, or turn the text around, show as codes."""
    shown = (c if c.isprintable() else f"\\u{ord(c):04x}" for c in str(value))
    return html.escape("".join(shown))


def percent(part: float, whole: float = 1.0, digits: int = 2) -> Figure:
    """Write a share; nothing of nothing is 0 %."""
    return Figure(f"{part / whole if whole else 0:.{digits}%}")


def section(title: str, content: str, css: str = "") -> str:
    """Return a box with a headline."""
    return f'<section class="{css}"><h2>{safe(title)}</h2>{content}</section>'


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table that scrolls when it is too wide; what is above numbers is at their side."""
    body = [list(row) for row in rows]
    numeric = [any(_is_number(row[i]) for row in body) for i in range(len(head))]
    names = "".join(
        f'<th class="number">{safe(name)}</th>' if is_number else f"<th>{safe(name)}</th>"
        for name, is_number in zip(head, numeric, strict=True)
    )
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in body)
    return (
        f'<div class="scroll"><table><thead><tr>{names}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float | Figure)


def _cell(cell: Cell) -> str:
    if isinstance(cell, float):
        return f'<td class="number">{cell:,.2f}</td>'
    if isinstance(cell, int):
        return f'<td class="number">{cell:,}</td>'
    text = "" if cell is None else safe(cell)
    return f'<td class="number">{text}</td>' if isinstance(cell, Figure) else f"<td>{text}</td>"
