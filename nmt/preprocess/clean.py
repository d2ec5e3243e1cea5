r"""Turns the bytes of a chunk into pairs of text, and counts everything that it changes or drops.

- A line ends at the byte \n and nowhere else.
- Bytes that are not UTF-8 are found by line and byte; each broken part becomes U+FFFD, as section
  3.9 of the Unicode standard recommends (substitution of maximal subparts).
- One U+FEFF (BOM) at the start of a line is stripped, and one \r at its end.
- What other tools take for the end of a line, inside of one, becomes a space.
- TSV: columns stand between tabs; there is no quoting, and a quotation mark is text. JSONL: an
  object a line, the fields at its top or in its "translation", as in datasets of the hub. A line
  that lacks a side is malformed: too few columns, no JSON, no object, no text in a field.

Held-out pairs are repaired, and none is ever dropped. Filters and tokens are not known here.
"""

# N pairs of a chunk that are kept

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nmt.config import Invalid, PreprocessConfig
from nmt.errors import DataError
from nmt.preprocess.chunks import Chunk, Format, Place

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Rows = np.ndarray[Any, np.dtype[np.int64]]

NUM_EXAMPLES = 5
NOT_UTF8 = "not UTF-8"
MALFORMED = "malformed line"
OVERLONG = "line too large"
_BREAKS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_NAMES_OF_BREAKS = ("CR", "VT", "FF", "FS", "GS", "RS", "NEL", "U+2028", "U+2029")
_RULES = (  # kind, the character it is about, what is replaced, by what
    ("BOM", "\ufeff", re.compile(r"\A\ufeff"), ""),
    ("CRLF", "\r", re.compile(r"\r\Z"), ""),
    *((kind, c, re.compile(c), " ") for kind, c in zip(_NAMES_OF_BREAKS, _BREAKS, strict=True)),
)
_SURROGATE = re.compile("[\ud800-\udfff]")
# control characters inside strings are no reason to lose a line; NUL has its own filter
_JSON = json.JSONDecoder(strict=False)


@dataclass
class PairCounts:
    """What became of some pairs; sums over chunks with `merge`, in the order of reading."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # pairs, by reason
    replaced: Counter[str] = field(default_factory=Counter)  # characters or bytes, by kind
    examples: dict[str, list[Place]] = field(default_factory=dict)  # the first, by reason and kind

    def count(self, counter: Counter[str], name: str, number: int, places: list[Place]) -> None:
        """Count what was dropped or replaced in one chunk, if anything; `places` are the first, but
        later ones of the chunk may have been found before.
        """
        if number:
            counter[name] += number
            known = dict.fromkeys(self.examples.get(name, []) + places)
            self.examples[name] = sorted(known, key=lambda place: place.line)[:NUM_EXAMPLES]

    def merge(self, other: PairCounts) -> None:
        """Add the counts of pairs that come after these."""
        self.read += other.read
        self.kept += other.kept
        self.dropped.update(other.dropped)
        self.replaced.update(other.replaced)
        for name, places in other.examples.items():
            self.examples[name] = (self.examples.get(name, []) + places)[:NUM_EXAMPLES]

    def reasons(self) -> str:
        """Return how many were dropped and why, most first, with the first place of each."""
        return ", ".join(
            f"{number} {reason} ({self.examples[reason][0]} first)"
            for reason, number in self.dropped.most_common()
        )

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> PairCounts:
        """Make the counts whose `vars` were written as JSON."""
        dropped, replaced = Counter(plain["dropped"]), Counter(plain["replaced"])
        examples = {k: [Place(*place) for place in v] for k, v in plain["examples"].items()}
        return cls(plain["read"], plain["kept"], dropped, replaced, examples)


@dataclass
class Cleaned:
    """The pairs of a chunk that are kept so far."""

    chunk: Chunk
    src: list[str]
    tgt: list[str]
    rows: Rows  # (N,) where in the chunk each pair was, from 0
    counts: PairCounts

    @property
    def lines(self) -> Rows:
        """The line of each pair in its file (N,), from 1."""
        return self.rows + self.chunk.first_line

    def drop(
        self, reason: str, *at_sides: Mask, at_bytes: Mapping[_Spot, _Fault] | None = None
    ) -> Mask:
        """Drop pairs for something in the source (N,) or target (N,); return which stay (N,).

        `at_bytes` has the first byte to blame, for rows and sides where it is known.
        """
        keep: Mask = ~np.logical_or.reduce(at_sides)
        dropped = np.flatnonzero(~keep)
        if len(dropped) == 0:
            return keep
        places = []
        for i in dropped[:NUM_EXAMPLES].tolist():
            row, side = spot = int(self.rows[i]), int(not at_sides[0][i])
            byte = at_bytes[spot].byte if at_bytes else None
            places.append(self.chunk.place(row, side, byte))
        self.counts.kept -= len(dropped)
        self.counts.count(self.counts.dropped, reason, len(dropped), places)
        stay = np.flatnonzero(keep).tolist()
        self.src, self.tgt = [self.src[i] for i in stay], [self.tgt[i] for i in stay]
        self.rows = self.rows[keep]
        return keep


_Spot = tuple[int, int]  # row of a chunk, from 0, and side: 0 for the source, 1 for the target


class _Fault(NamedTuple):
    """What is wrong with a line."""

    byte: int | None  # the first to blame, from 1
    message: str


def clean(chunk: Chunk, config: PreprocessConfig, *, held_out: bool) -> Cleaned:
    """Read the pairs of a chunk and drop those that cannot be read; held-out pairs all stay.

    Raises `DataError`, with file and line, where `data.invalid` asks for it.
    """
    reader = _Reader(chunk)
    src, tgt = reader.read()
    cleaned = Cleaned(chunk, src, tgt, np.arange(chunk.num_pairs), reader.counts)
    places = [(line - chunk.first_line, side) for line, side in chunk.overlong]
    _settle(cleaned, OVERLONG, dict.fromkeys(places, _Fault(None, OVERLONG)), repair=held_out)
    invalid = config.data.invalid
    if reader.broken and invalid is Invalid.error:
        (row, side), fault = min(reader.broken.items())
        how = "convert the file, for example with iconv -f latin1 -t utf-8"
        raise DataError(
            f"{chunk.place(row, side)}: {fault.message}; {how if fault.byte else 'fix the line'}, "
            "or set data.invalid=replace or drop"
        )
    repair = held_out or invalid is Invalid.replace
    _settle(cleaned, NOT_UTF8, reader.broken, repair=repair, number=reader.num_broken)
    if reader.malformed and invalid is not Invalid.drop:
        (row, _), fault = min(reader.malformed.items())
        raise DataError(
            f"{chunk.place(row)}: {fault.message}; fix the line, or leave such lines out with "
            "data.invalid=drop"
        )
    _settle(cleaned, MALFORMED, reader.malformed, repair=held_out)
    if held_out or not config.filter.nul:
        for side, lines in enumerate((cleaned.src, cleaned.tgt)):
            reader.replace(lines, "NUL", re.compile("\0"), " ", side, cleaned.rows)
    return cleaned


def _settle(
    cleaned: Cleaned,
    reason: str,
    faults: dict[_Spot, _Fault],
    *,
    repair: bool,
    number: int | None = None,
) -> None:
    """Drop rows of the chunk with a fault, or count `number` (or the faults) as replaced."""
    if repair:
        places = [cleaned.chunk.place(*spot, faults[spot].byte) for spot in sorted(faults)]
        number = len(faults) if number is None else number
        cleaned.counts.count(cleaned.counts.replaced, reason, number, places)
    elif faults:
        rows = [[row for row, at in faults if at == side] for side in (0, 1)]
        cleaned.drop(reason, *(np.isin(cleaned.rows, some) for some in rows), at_bytes=faults)


def _substitute(lines: list[str], pattern: re.Pattern[str], by: str) -> tuple[int, list[int]]:
    """Replace `pattern` in lines; return how often, and the rows that had it."""
    rows, number = [row for row, line in enumerate(lines) if pattern.search(line)], 0
    for row in rows:
        lines[row], times = pattern.subn(by, lines[row])
        number += times
    return number, rows


class _Reader:
    """Reads the text of one chunk, and notes what is wrong with it."""

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self.counts = PairCounts(read=chunk.num_pairs, kept=chunk.num_pairs)
        self.broken: dict[_Spot, _Fault] = {}  # not UTF-8; of a file with both sides all at side 0
        self.num_broken = 0  # bytes, or halves of surrogate pairs
        self.malformed: dict[_Spot, _Fault] = {}

    def read(self) -> tuple[list[str], list[str]]:
        """Return sources and targets; what is broken is repaired, what is lacking is empty."""
        lines = [self._clean(self._decode(side), side) for side in range(len(self._chunk.raw))]
        format = self._chunk.source.format
        if format is Format.pair:
            return lines[0], lines[1]
        take = self._take_columns if format is Format.tsv else self._take_fields
        sides = take(lines[0])
        for line, side in self._chunk.overlong:
            self.malformed.pop((line - self._chunk.first_line, side), None)
        return sides

    def _decode(self, side: int) -> str:
        r"""Decode the lines of one file, still in one piece, the last \n left out."""
        raw = self._chunk.raw[side].removesuffix(b"\n")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            lines = raw.split(b"\n")
        texts = []
        for row, line in enumerate(lines):
            try:
                texts.append(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                byte, value = error.start + 1, line[error.start]
                self.broken[row, side] = _Fault(byte, f"byte {byte} (0x{value:02x}) is not UTF-8")
                escaped = line.decode("utf-8", "surrogateescape")
                self.num_broken += len(_SURROGATE.findall(escaped))
                texts.append(line.decode("utf-8", "replace"))
        return "\n".join(texts)

    def _clean(self, text: str, side: int) -> list[str]:
        r"""Cut text at \n and apply the rules on the other characters that end or begin lines."""
        lines = text.split("\n")
        for kind, character, pattern, by in _RULES:
            if character in text:
                self.replace(lines, kind, pattern, by, side)
        return lines

    def _take_columns(self, lines: list[str]) -> tuple[list[str], list[str]]:
        """Take two columns, numbered from 1, of lines with tabs."""
        first, second = self._chunk.source.columns
        last = max(first, second)
        rows = [line.split("\t", last) for line in lines]
        for row, cells in enumerate(rows):
            if len(cells) < last:
                self.malformed[row, 0] = _Fault(None, f"{len(cells)} of {last} columns")
                cells += [""] * (last - len(cells))
        return [cells[first - 1] for cells in rows], [cells[second - 1] for cells in rows]

    def _take_fields(self, lines: list[str]) -> tuple[list[str], list[str]]:
        """Take two fields of lines of JSON."""
        sides: tuple[list[str], list[str]] = ([], [])
        for row, line in enumerate(lines):
            record, wrong = _parse(line)
            for texts, name in zip(sides, self._chunk.source.fields, strict=True):
                value = record.get(name)
                if not isinstance(value, str):
                    wrong, value = wrong or f'no text in the field "{name}"', ""
                texts.append(value)
            if wrong:
                self.malformed[row, 0] = _Fault(None, wrong)
        fields = zip(sides, self._chunk.source.fields, strict=True)
        src, tgt = (self._clean_field(texts, name) for texts, name in fields)
        return src, tgt

    def _clean_field(self, texts: list[str], name: str) -> list[str]:
        """Replace what JSON can spell and a line of UTF-8 cannot hold; apply the rules again."""
        self.replace(texts, "LF", re.compile("\n"), " ", 0)
        number, rows = _substitute(texts, _SURROGATE, "\ufffd")
        self.num_broken += number
        for row in rows:
            fault = _Fault(None, f'half a surrogate pair in the field "{name}"')
            self.broken.setdefault((row, 0), fault)
        return self._clean("\n".join(texts), 0)

    def replace(
        self,
        lines: list[str],
        kind: str,
        pattern: re.Pattern[str],
        by: str,
        side: int,
        rows: Rows | None = None,
    ) -> None:
        """Replace `pattern` in lines of one side, all of the chunk or those in `rows`; count it."""
        number, found = _substitute(lines, pattern, by)
        first = found[:NUM_EXAMPLES] if rows is None else rows[found[:NUM_EXAMPLES]].tolist()
        places = [self._chunk.place(row, side) for row in first]
        self.counts.count(self.counts.replaced, kind, number, places)


def _parse(line: str) -> tuple[dict[str, Any], str | None]:
    """Return the fields of a record, and what is wrong with it."""
    try:
        record = _JSON.decode(line)
    except (ValueError, RecursionError):
        return {}, "no JSON"
    if not isinstance(record, dict):
        return {}, "no JSON object"
    inner = record.get("translation")
    return (inner if isinstance(inner, dict) else record), None
