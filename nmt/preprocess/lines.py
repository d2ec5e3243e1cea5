r"""Turns bytes into lines of text: the rules that hold for every corpus, whatever its format.

- A line ends at the byte \n and nowhere else.
- Fault UTF-8 is found by line and byte; each part of it can become U+FFFD, as Unicode recommends.
- One \r before the end of a line is stripped, and one U+FEFF (BOM) at the start of a line: files
  that were joined have it in the middle too, and elsewhere it stays.
- What other tools take for the end of a line, inside of one, becomes a space.

All of a chunk is looked at in one go; only what is broken is looked at by line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from nmt.preprocess.cleaned import Where
from nmt.preprocess.counts import NUM_EXAMPLES, Counts, Place

BREAKS = {
    "\r": "CR",
    "\v": "VT",
    "\f": "FF",
    "\x1c": "FS",
    "\x1d": "GS",
    "\x1e": "RS",
    "\x85": "NEL",
    "\u2028": "U+2028",
    "\u2029": "U+2029",
}
BOM = "\ufeff"
SURROGATES = re.compile("[\ud800-\udfff]+")


class Fault(NamedTuple):
    """What is wrong with a line."""

    byte: int | None  # the first to blame, from 1
    message: str


Faults = tuple[dict[int, Fault], dict[int, Fault]]
"""Those of source and target, by row; of a file with both sides all are in the first."""


@dataclass
class Decoded:
    """The text of a chunk, lines still in one piece, and what was broken in it."""

    text: str
    broken: dict[int, Fault] = field(default_factory=dict)  # by row
    num_broken: int = 0  # bytes


def decode(raw: bytes) -> Decoded:
    r"""Decode whole lines, the last \n left out; broken parts become U+FFFD.

    A part is the longest start of a character that the bytes go on to break, as in section 3.9 of
    the Unicode standard (U+FFFD substitution of maximal subparts).
    """
    raw = raw.removesuffix(b"\n")
    try:
        return Decoded(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return _decode_broken(raw)


def _decode_broken(raw: bytes) -> Decoded:
    """Go over the lines; only broken bytes decode to surrogates."""
    lines = raw.decode("utf-8", "surrogateescape").split("\n")
    decoded = Decoded("")
    for row, line in enumerate(lines):
        if found := SURROGATES.search(line):
            byte = len(line[: found.start()].encode("utf-8")) + 1
            value = ord(found[0][0]) - 0xDC00
            decoded.broken[row] = Fault(byte, f"byte {byte} (0x{value:02x}) is not UTF-8")
            decoded.num_broken += sum(len(part) for part in SURROGATES.findall(line))
            lines[row] = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    decoded.text = "\n".join(lines)
    return decoded


def clean_breaks(text: str, where: Where, counts: Counts) -> str:
    r"""Apply the rules on \r, BOM and line breaks to lines joined by \n, and count what they do."""
    if BOM in text:
        text = _strip_bom(text, where, counts)
    if "\r" in text:
        text = _strip_cr(text, where, counts)
    for character, kind in BREAKS.items():
        if character in text:
            count_kind(text, character, kind, where, counts)
            text = text.replace(character, " ")
    return text


def count_kind(text: str, part: str, kind: str, where: Where, counts: Counts) -> None:
    r"""Count `part` in lines joined by \n, and name the first lines that have it."""
    places: list[Place] = []
    start = row = seen = 0
    while len(places) < NUM_EXAMPLES and (found := text.find(part, start)) >= 0:
        row += text.count("\n", seen, found)
        seen = found
        places.append(where.place(row))
        start = text.find("\n", found + len(part) - 1)
        if start < 0:
            break
    counts.replace(kind, text.count(part), places)


def _strip_bom(text: str, where: Where, counts: Counts) -> str:
    text = "\n" + text
    if "\n" + BOM in text:
        # with the \n in front, each line begins at the \n that is as many before it as its row
        count_kind(text, "\n" + BOM, "BOM", where, counts)
        text = text.replace("\n" + BOM, "\n")
    return text[1:]


def _strip_cr(text: str, where: Where, counts: Counts) -> str:
    text += "\n"
    if "\r\n" in text:
        count_kind(text, "\r\n", "CRLF", where, counts)
        text = text.replace("\r\n", "\n")
    return text[:-1]
