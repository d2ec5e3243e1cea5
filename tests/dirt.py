"""Hostile bytes, each line with its number, and a slow reading of the rules to compare with."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nmt.config import PreprocessConfig
from nmt.preprocess.chunks import Chunk, Format, Source
from nmt.preprocess.clean import CleanChunk, clean
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
_NAMES = ["CR", "VT", "FF", "FS", "GS", "RS", "NEL", "U+2028", "U+2029"]
BREAKS = dict(zip("\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", _NAMES, strict=True))
LineLocation = tuple[str, int, int | None]


def hostile_line(draw: random.Random, number: int) -> bytes:
    """Draw a line without its end: clean, empty, or a number among dirt."""
    kind = draw.random()
    if kind < 0.4:
        return f"clean line #{number}#".encode()
    if kind < 0.5:
        return draw.choice([b"", b" ", b"\r", b"\xef\xbb\xbf", "\u3000\u2028".encode()])
    before, after = (b"".join(draw.choices(PIECES, k=draw.randint(0, 3))) for _ in range(2))
    return before + b"#%d#" % number + after


def hostile_record(draw: random.Random, number: int) -> bytes:
    """Draw a line of JSON, more or less."""
    odd = [*"abcdefghijklé\n\r\0\u2028\ufeff", "\ud83d", "\udc00"]
    texts = ["".join(draw.choices(odd, k=3)) for _ in range(2)]
    good = {"src": f"{texts[0]}#{number}#", "tgt": f"#{number}#{texts[1]}", "id": number}
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
    source = Source("", format, tuple(Path(name) for name in names), names, **more)
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
    """Do what is done to text before it is encoded."""
    cleaned = clean(chunk, config, held_out=held_out)
    if not held_out:
        drop_by_text(cleaned, config, repeated)
    return cleaned


@dataclass
class Story:
    """What became of lines."""

    kept: list[tuple[int, str, str]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    locations: dict[str, list[LineLocation]] = field(default_factory=dict)

    def note(self, counter: Counter[str], name: str, number: int, location: LineLocation) -> None:
        """Count, and remember the line if it is another one."""
        if number:
            counter[name] += number
            if location not in self.locations.setdefault(name, []):
                self.locations[name].append(location)


@dataclass
class Row:
    """A pair as it was read: `broken` has file, first broken byte and number of them."""

    texts: list[str] = field(default_factory=list)
    broken: list[tuple[str, int | None, int]] = field(default_factory=list)
    is_malformed: bool = False


def read_pair(raw: tuple[bytes, ...], line: int, story: Story) -> Row:
    """Read a line of two files."""
    row = Row()
    for file, side in zip(("a.src", "b.tgt"), raw, strict=True):
        row.texts.append(_read_line(side, file, line, story, row))
    return row


def read_tsv(raw: tuple[bytes, ...], line: int, story: Story, columns: tuple[int, int]) -> Row:
    """Read a line with tabs."""
    row = Row()
    cells = _read_line(raw[0], "both", line, story, row).split("\t")
    row.is_malformed = len(cells) < max(columns)
    row.texts = [cells[c - 1] if c <= len(cells) else "" for c in columns]
    return row


def read_json(raw: tuple[bytes, ...], line: int, story: Story) -> Row:
    """Read a line of JSON with the fields src and tgt."""
    row = Row()
    text = _read_line(raw[0], "both", line, story, row)
    try:
        record = json.loads(text, strict=False)
    except ValueError:
        record = None
    if isinstance(record, dict) and isinstance(record.get("translation"), dict):
        record = record["translation"]
    for name in ("src", "tgt"):
        value = record.get(name) if isinstance(record, dict) else None
        row.is_malformed |= not isinstance(value, str)
        row.texts.append(_read_value(value if isinstance(value, str) else "", line, story, row))
    return row


def _read_value(value: str, line: int, story: Story, row: Row) -> str:
    story.note(story.replaced, "LF", value.count("\n"), ("both", line, None))
    halves = sum("\ud800" <= character <= "\udfff" for character in value)
    if halves:
        byte, number = row.broken[0][1:] if row.broken else (None, 0)
        row.broken = [("both", byte, number + halves)]
    value = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in value)
    return clean_text(value.replace("\n", " "), "both", line, story)


def _read_line(raw: bytes, file: str, line: int, story: Story, row: Row) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        escaped = raw.decode("utf-8", "surrogateescape")
        number = sum("\ud800" <= character <= "\udfff" for character in escaped)
        row.broken.append((file, error.start + 1, number))
        text = raw.decode("utf-8", "replace")
    return clean_text(text, file, line, story)


def clean_text(text: str, file: str, line: int, story: Story) -> str:
    """Apply the rules on characters, one after the other."""
    location = (file, line, None)
    if text.startswith("\ufeff"):
        story.note(story.replaced, "BOM", 1, location)
        text = text[1:]
    if text.endswith("\r"):
        story.note(story.replaced, "CRLF", 1, location)
        text = text[:-1]
    for character in text:
        if character in BREAKS:
            story.note(story.replaced, BREAKS[character], 1, location)
    return "".join(" " if character in BREAKS else character for character in text)
