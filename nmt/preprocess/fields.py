r"""Takes source and target out of the lines of a TSV or JSONL file.

TSV: columns stand between tabs; there is no quoting, and a quotation mark is text. JSONL: an object
a line, the fields at its top or in its "translation", as in datasets of the hub; a value is text.

A line can lack a side: too few columns, no JSON, no object, no such field, null or a number there.
That is an error with its place; with data.invalid=drop the pair is dropped and counted, or stays if
it is held out, with empty text for what it lacks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nmt.preprocess.cleaned import Where
from nmt.preprocess.counts import Counts
from nmt.preprocess.lines import SURROGATES, Fault, Faults

# control characters inside strings are no reason to lose a line; NUL has its own filter
_DECODER = json.JSONDecoder(strict=False)


@dataclass
class Sides:
    """Both sides of a chunk, and what is wrong in which rows."""

    src: list[str]
    tgt: list[str]
    malformed: dict[int, Fault] = field(default_factory=dict)
    broken: Faults = field(default_factory=lambda: ({}, {}))  # not UTF-8
    num_broken: int = 0  # bytes, or halves of pairs


def take_columns(lines: list[str], columns: Sequence[int]) -> Sides:
    """Take two columns, numbered from 1, of lines with tabs."""
    first, second = (column - 1 for column in columns)
    last = max(first, second)
    rows = [line.split("\t", last + 1) for line in lines]
    malformed = {
        row: Fault(None, f"{len(cells)} of {last + 1} columns")
        for row, cells in enumerate(rows)
        if len(cells) <= last
    }
    for row in malformed:
        rows[row] += [""] * (last + 1 - len(rows[row]))
    return Sides([cells[first] for cells in rows], [cells[second] for cells in rows], malformed)


def take_fields(lines: list[str], names: Sequence[str], where: Where, counts: Counts) -> Sides:
    r"""Take two fields of lines of JSON; \n in them becomes a space, and is counted."""
    sides = Sides([], [])
    for row, line in enumerate(lines):
        record, wrong = _parse(line)
        values = [record.get(name) for name in names]
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, str):
                wrong = wrong or f'no text in the field "{name}"'
        if wrong:
            sides.malformed[row] = Fault(None, wrong)
        src, tgt = (value if isinstance(value, str) else "" for value in values)
        sides.src.append(src)
        sides.tgt.append(tgt)
    sides.src = _mend(sides.src, names[0], sides, where, counts)
    sides.tgt = _mend(sides.tgt, names[1], sides, where, counts)
    return sides


def _parse(line: str) -> tuple[dict[str, Any], str | None]:
    """Return the fields of a record, and what is wrong with it."""
    try:
        record = _DECODER.decode(line)
    except (ValueError, RecursionError):
        return {}, "no JSON"
    if not isinstance(record, dict):
        return {}, "no JSON object"
    inner = record.get("translation")
    return (inner if isinstance(inner, dict) else record), None


def _mend(texts: list[str], name: str, sides: Sides, where: Where, counts: Counts) -> list[str]:
    """Replace what JSON can spell and a line of UTF-8 cannot hold."""
    joined = "".join(texts)
    if "\n" in joined:
        rows = [row for row, text in enumerate(texts) if "\n" in text]
        counts.replace("LF", joined.count("\n"), [where.place(row) for row in rows])
        texts = [text.replace("\n", " ") for text in texts]
    if SURROGATES.search(joined):
        sides.num_broken += sum(len(part) for part in SURROGATES.findall(joined))
        for row, text in enumerate(texts):
            if SURROGATES.search(text):
                message = f'half a surrogate pair in the field "{name}"'
                sides.broken[0].setdefault(row, Fault(None, message))
                texts[row] = SURROGATES.sub(lambda part: "\ufffd" * len(part[0]), text)
    return texts
