"""Wrap the prose of the Markdown files at 110 columns: `python scripts/wrap.py FILE ...`.

Tables, code, headings and lines without spaces stay unchanged.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

COLUMNS = 110
KEPT = re.compile(r"    |\||#|```|$|<!--|!\[")  # the start of a line that is no prose
ITEM = re.compile(r"( *(?:[-*]|\d+\.) +)\S")
HELD = "\x00"  # replaces a space at which no line may be broken


def wrap(text: str) -> str:
    """Return the text with each paragraph and list item wrapped."""
    done: list[str] = []
    paragraph: list[str] = []
    is_code = False
    for line in [*text.split("\n"), ""]:
        starts = bool(KEPT.match(line)) and not (paragraph and line.startswith("    "))
        if paragraph and (is_code or starts or ITEM.match(line)):
            done += _fill(paragraph)
            paragraph = []
        is_code ^= line.startswith("```")
        if is_code or starts:
            done.append(line)
        else:
            paragraph.append(line)
    return "\n".join(done[:-1])


def _fill(lines: list[str]) -> list[str]:
    item = ITEM.match(lines[0])
    indent = item[1] if item else re.match(" *", lines[0])[0]  # type: ignore[index]
    text = " ".join(line.strip() for line in lines)[len(indent.strip()) :].strip()
    text = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", HELD), text)
    text = re.sub(r" (?=([-+*=#>|]|\d+\.)( |$))", HELD, text)  # would begin a list, heading, table
    filled = textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(HELD, " ") for line in filled]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(wrap(path.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
