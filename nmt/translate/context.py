"""Translate a line together with the lines before it, with a model of documents (`data.context`).

The model reads the lines with separators between them. The translation of the last line follows
the last separator of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nmt.data.languages import SEPARATOR
from nmt.translate.results import LineResult
from nmt.translate.windows import Window


def add_context(window: Window, context: int) -> list[list[str]]:
    """Return each line of the window after up to `context` lines before it.

    The lines before an empty line are not used, and an empty line has no context.
    """
    lines = [*window.context, *window.lines]
    groups = []
    for i in range(len(window.context), len(lines)):
        start = i
        while lines[i].strip() and start > max(i - context, 0) and lines[start - 1].strip():
            start -= 1
        groups.append(lines[start : i + 1])
    return groups


def join_lines(groups: Sequence[Sequence[str]]) -> list[str]:
    """Return the text of each group of lines, with separators between the lines."""
    return [f" {SEPARATOR} ".join(group) for group in groups]


def take_last(result: LineResult, num_lines: int) -> LineResult | None:
    """Return the result of the last of `num_lines` lines that were translated together.

    Returns None if the translation failed or is unfinished, has a wrong number of separators, or
    has no text after the last one. From a line that was translated by itself,
    separators are removed.
    """
    if result.error is not None:
        return result if num_lines == 1 else None
    best = result.translations[0]
    texts = [text.strip() for text in result.text.split(SEPARATOR)]
    if num_lines == 1:
        last_text = " ".join(filter(None, texts))
    elif len(texts) == num_lines and texts[-1] and best.finished:
        last_text = texts[-1]
    else:
        return None
    return replace(result, translations=[replace(best, text=last_text)])
