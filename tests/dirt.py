"""Hostile bytes, each line with its number, and a slow implementation of the cleaning rules."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nmt.config import PreprocessConfig
from nmt.preprocess.chunks import Chunk, DataSource, Format
from nmt.preprocess.clean import clean
from nmt.preprocess.clean_chunk import CleanChunk
from nmt.preprocess.filters import drop_by_text

PIECES = [
    *(text.encode() for text in ("a", "Wort", "größer", "猫", "😀", " ", "\u00a0", "‘", "\u200b")),
    *(text.encode() for text in '\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\ufeff\x1f\x01\t"\\'),
    *(b"\r\r", b"\0", b"\xe9"),  # the last in Latin-1
    b"\xff\xfe",  # of UTF-16
    b"\xe2\x80",  # a character cut short
    b"\xed\xa0\x80",  # half of a surrogate pair
    b"\xc0\x80",  # NUL in two bytes
    b"\xf4\x90\x80\x80",  # beyond Unicode
]
BREAKS = {"\r": "CR", "\v": "VT", "\f": "FF", "\x1c": "FS", "\x1d": "GS", "\x1e": "RS"}
BREAKS |= {"\x85": "NEL", "\u2028": "U+2028", "\u2029": "U+2029"}
SURROGATE = re.compile("[\ud800-\udfff]")
LineLocation = tuple[str, int, int | None]


def hostile_line(draw: random.Random, number: int) -> bytes:
    """Draw a line without its end: clean, empty, or a number between odd bytes."""
    kind = draw.random()
    if kind < 0.4:
        return f"clean line #{number}#".encode()
    if kind < 0.5:
        return draw.choice([b"", b" ", b"\r", b"\xef\xbb\xbf", "\u3000\u2028".encode()])
    prefix = b"".join(draw.choices(PIECES, k=draw.randint(0, 3)))
    suffix = b"".join(draw.choices(PIECES, k=draw.randint(0, 3)))
    return prefix + b"#%d#" % number + suffix


def hostile_record(draw: random.Random, number: int) -> bytes:
    """Draw a line of JSON, sometimes an invalid one."""
    odd = [*"abcdefghijklé\n\r\0\u2028\ufeff", "\ud83d", "\udc00"]
    src = "".join(draw.choices(odd, k=3))
    tgt = "".join(draw.choices(odd, k=3))
    good = {"src": f"{src}#{number}#", "tgt": f"#{number}#{tgt}", "id": number}
    kind = draw.random()
    if kind < 0.1:
        return draw.choice([b"", b"[]", b"{", b"null", b"5", b'{"src": "x"}', b"\xff", b'"src"'])
    if kind < 0.2:
        good[draw.choice(["src", "tgt"])] = draw.choice([None, 5, ["x"], {"de": "x"}])
    record = {"translation": good} if draw.random() < 0.3 else good
    line = json.dumps(record, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    return draw.choice([b"", b"", b"\xef\xbb\xbf", b" "]) + line + draw.choice([b"", b"\r"])


def make_chunk(
    lines: list[list[bytes]], format: Format, first_line: int = 1, **more: object
) -> Chunk:
    """Make a chunk of one file, or of two for a pair; `lines` are without ends."""
    names = ("a.src", "b.tgt") if format is Format.pair else ("both",)
    source = DataSource("", format, tuple(Path(name) for name in names), names, **more)
    raw = tuple(b"".join(line + b"\n" for line in side) for side in lines)
    num_pairs = len(lines[0])
    return Chunk(source, first_line - 1, first_line, num_pairs, raw, ())


def clean_and_filter(
    chunk: Chunk,
    config: PreprocessConfig,
    *,
    held_out: bool = False,
    repeated: np.ndarray | None = None,  # type: ignore[type-arg]
) -> CleanChunk:
    """Clean a chunk and apply the filters of text."""
    cleaned = clean(chunk, config, held_out=held_out)
    if not held_out:
        drop_by_text(cleaned, config, repeated)
    return cleaned


@dataclass
class CleanResult:
    """The pairs that stay, with line numbers, and the counts."""

    pairs: list[tuple[int, str, str]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    locations: dict[str, list[LineLocation]] = field(default_factory=dict)

    def note(self, counter: Counter[str], name: str, number: int, location: LineLocation) -> None:
        """Add to a counter, and remember the line unless it is known."""
        if number:
            counter[name] += number
            if location not in self.locations.setdefault(name, []):
                self.locations[name].append(location)


@dataclass
class Row:
    """A pair; `broken` has file, first invalid byte and number of invalid bytes of each side."""

    texts: list[str] = field(default_factory=list)
    broken: list[tuple[str, int | None, int]] = field(default_factory=list)
    is_malformed: bool = False


def read_pair(raw: tuple[bytes, ...], line: int, result: CleanResult) -> Row:
    """Read a line of two files."""
    row = Row()
    for file, side in zip(("a.src", "b.tgt"), raw, strict=True):
        row.texts.append(_read_line(side, file, line, result, row))
    return row


def read_tsv(
    raw: tuple[bytes, ...], line: int, result: CleanResult, columns: tuple[int, int]
) -> Row:
    """Read a line with tabs."""
    row = Row()
    cells = _read_line(raw[0], "both", line, result, row).split("\t")
    row.is_malformed = len(cells) < max(columns)
    row.texts = [cells[c - 1] if c <= len(cells) else "" for c in columns]
    return row


def read_json(raw: tuple[bytes, ...], line: int, result: CleanResult) -> Row:
    """Read a line of JSON with the fields src and tgt."""
    row = Row()
    text = _read_line(raw[0], "both", line, result, row)
    try:
        record = json.loads(text, strict=False)
    except ValueError:
        record = None
    if isinstance(record, dict) and isinstance(record.get("translation"), dict):
        record = record["translation"]
    for name in ("src", "tgt"):
        value = record.get(name) if isinstance(record, dict) else None
        row.is_malformed |= not isinstance(value, str)
        row.texts.append(_read_value(value if isinstance(value, str) else "", line, result, row))
    return row


def _read_value(value: str, line: int, result: CleanResult, row: Row) -> str:
    result.note(result.replaced, "LF", value.count("\n"), ("both", line, None))
    halves = SURROGATE.findall(value)
    if halves:
        byte, number = row.broken[0][1:] if row.broken else (None, 0)
        row.broken = [("both", byte, number + len(halves))]
    value = SURROGATE.sub("\ufffd", value)
    return clean_text(value.replace("\n", " "), "both", line, result)


def _read_line(raw: bytes, file: str, line: int, result: CleanResult, row: Row) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        escaped = raw.decode("utf-8", "surrogateescape")
        row.broken.append((file, error.start + 1, len(SURROGATE.findall(escaped))))
        text = raw.decode("utf-8", "replace")
    return clean_text(text, file, line, result)


def clean_text(text: str, file: str, line: int, result: CleanResult) -> str:
    """Apply the rules for characters, one after the other."""
    location = (file, line, None)
    if text.startswith("\ufeff"):
        result.note(result.replaced, "BOM", 1, location)
        text = text[1:]
    if text.endswith("\r"):
        result.note(result.replaced, "CRLF", 1, location)
        text = text[:-1]
    for character, name in BREAKS.items():
        result.note(result.replaced, name, text.count(character), location)
        text = text.replace(character, " ")
    return text
