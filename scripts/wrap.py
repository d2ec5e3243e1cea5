"""Wrap the paragraphs of Markdown files at 110 columns: `python scripts/wrap.py FILE ...`.

Tables, code, headings and lines without spaces stay unchanged.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

COLUMNS = 110
NO_PARAGRAPH = re.compile(r"    |\||#|```|$|<!--|!\[")  # the start of code, a table, a heading, ...
LIST_ITEM = re.compile(r"( *(?:[-*]|\d+\.) +)\S")
UNBREAKABLE_SPACE = "\x00"  # replaces a space at which no line may be broken


def wrap(text: str) -> str:
    """Return the text with each paragraph and list item wrapped."""
    wrapped: list[str] = []
    paragraph: list[str] = []
    is_code = False
    for line in [*text.split("\n"), ""]:  # the empty line ends the last paragraph
        is_continuation = bool(paragraph) and line.startswith("    ")
        is_unchanged = bool(NO_PARAGRAPH.match(line)) and not is_continuation
        if paragraph and (is_code or is_unchanged or LIST_ITEM.match(line)):
            wrapped += _fill(paragraph)
            paragraph = []
        if line.startswith("```"):
            is_code = not is_code
        if is_code or is_unchanged:
            wrapped.append(line)
        else:
            paragraph.append(line)
    return "\n".join(wrapped[:-1])


def _fill(lines: list[str]) -> list[str]:
    """Wrap a paragraph or a list item."""
    item = LIST_ITEM.match(lines[0])
    indent = " " * (len(lines[0]) - len(lines[0].lstrip(" ")))
    if item is not None:
        indent = item[1]  # also has the marker of the item
    marker = indent.strip()  # such as - or 1.; empty for a paragraph
    text = " ".join(line.strip() for line in lines).removeprefix(marker).strip()
    text = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", UNBREAKABLE_SPACE), text)
    # a line must not begin with what Markdown takes for a list item, a heading or a table
    text = re.sub(r" (?=([-+*=#>|]|\d+\.)( |$))", UNBREAKABLE_SPACE, text)
    wrapped = textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(UNBREAKABLE_SPACE, " ") for line in wrapped]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(wrap(path.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
