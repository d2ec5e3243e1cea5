"""Lines translated with those before them, by a model of documents (`data.context`).

The translation of a line is what stands after the last separator. Where their number is not that of
the lines before, or the lines together are too long, the line is translated alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nmt.data.languages import SEPARATOR
from nmt.translate.lines import LineResult, Window


def add_context(window: Window, context: int) -> list[list[str]]:
    """Return each line of the window after the lines before it, `context` at most, as far as there
    is no empty one between them; an empty line has none.
    """
    lines = [*window.before, *window.lines]
    groups = []
    for i in range(len(window.before), len(lines)):
        start = i
        while lines[i].strip() and start > max(i - context, 0) and lines[start - 1].strip():
            start -= 1
        groups.append(lines[start : i + 1])
    return groups


def join_lines(groups: Sequence[Sequence[str]]) -> list[str]:
    """Return the text of each group of lines, with separators."""
    return [f" {SEPARATOR} ".join(group) for group in groups]


def take_last(result: LineResult, num_lines: int) -> LineResult | None:
    """Return the result of the last of `num_lines` lines that were translated together, None where
    its translation does not tell. That of one line has no separators.
    """
    if result.error is not None:
        return result if num_lines == 1 else None
    best, parts = result.translations[0], [p.strip() for p in result.text.split(SEPARATOR)]
    if num_lines > 1 and (len(parts) != num_lines or not parts[-1] or not best.finished):
        return None
    text = parts[-1] if num_lines > 1 else " ".join(filter(None, parts))
    return replace(result, translations=[replace(best, text=text)])
