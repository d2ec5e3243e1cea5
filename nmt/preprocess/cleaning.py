"""Turns chunks of bytes into clean pairs of text, and counts everything that it changes or drops.

The rules are in lines.py (bytes), fields.py (TSV, JSONL) and filters.py. Here is their order, and
what differs for held-out pairs: these are mended, and none is ever lost. Tokens are not known here.
"""

from __future__ import annotations

import numpy as np

from nmt.config import Invalid, PreprocessConfig
from nmt.errors import DataError
from nmt.preprocess import filters
from nmt.preprocess.cleaned import Cleaned, Mask, Where
from nmt.preprocess.counts import NUM_EXAMPLES, Counts, Place
from nmt.preprocess.fields import Sides, take_columns, take_fields
from nmt.preprocess.lines import Fault, Faults, clean_breaks, decode
from nmt.preprocess.pieces import Chunk, Format, Source

NOT_UTF8 = "not UTF-8"
MALFORMED = "malformed line"
OVERLONG = "line too large"
_ICONV = "iconv -f latin1 -t utf-8"


def clean(
    chunk: Chunk, config: PreprocessConfig, *, held_out: bool, repeated: Mask | None = None
) -> Cleaned:
    """Read the pairs of a chunk and drop those that a rule or filter on text is against.

    `repeated` marks the rows of the chunk that have come before; without it duplicates stay. Held-
    out pairs all stay. Raises `DataError`, with file and line, where `data.invalid` wants it.
    """
    names = chunk.source.names
    places = (Where(names[0], chunk.first_line), Where(names[-1], chunk.first_line))
    counts = Counts(read=chunk.num_pairs, kept=chunk.num_pairs)
    read = _read_pair if chunk.source.format is Format.pair else _read_records
    sides = read(chunk, places, counts)
    cleaned = Cleaned(sides.src, sides.tgt, np.arange(chunk.num_pairs), places, counts)
    overlong = {line - chunk.first_line: Fault(None, OVERLONG) for line in chunk.overlong}
    _settle(cleaned, OVERLONG, (overlong, {}), mend=held_out)
    _settle_broken(cleaned, sides, config.data.invalid, held_out)
    _settle_malformed(cleaned, sides, config.data.invalid, held_out)
    filters.settle_nul(cleaned, mend=held_out or not config.filter.nul)
    if not held_out:
        filters.drop_by_text(cleaned, config)
        if repeated is not None:
            cleaned.drop(filters.DUPLICATE, repeated[cleaned.rows])
    return cleaned


def _read_pair(chunk: Chunk, places: tuple[Where, Where], counts: Counts) -> Sides:
    decoded = [decode(raw) for raw in chunk.raw]
    src, tgt = (
        clean_breaks(one.text, place, counts).split("\n")
        for one, place in zip(decoded, places, strict=True)
    )
    num_broken = sum(one.num_broken for one in decoded)
    return Sides(src, tgt, {}, (decoded[0].broken, decoded[1].broken), num_broken)


def _read_records(chunk: Chunk, places: tuple[Where, Where], counts: Counts) -> Sides:
    decoded = decode(chunk.raw[0])
    lines = clean_breaks(decoded.text, places[0], counts).split("\n")
    sides = _take(lines, chunk.source, places[0], counts)
    sides.broken = ({**sides.broken[0], **decoded.broken}, {})
    sides.num_broken += decoded.num_broken
    for line in chunk.overlong:
        sides.malformed.pop(line - chunk.first_line, None)
    return sides


def _take(lines: list[str], source: Source, place: Where, counts: Counts) -> Sides:
    if source.format is Format.tsv:
        return take_columns(lines, source.columns)
    sides = take_fields(lines, source.fields, place, counts)
    # JSON can spell a line break inside a value; the same rules again
    sides.src, sides.tgt = (
        clean_breaks("\n".join(side), place, counts).split("\n") for side in (sides.src, sides.tgt)
    )
    return sides


def _settle_broken(cleaned: Cleaned, sides: Sides, invalid: Invalid, held_out: bool) -> None:
    if not any(sides.broken):
        return
    if invalid is Invalid.error:
        row, side = min((row, side) for side in (0, 1) for row in sides.broken[side])
        fault = sides.broken[side][row]
        how = (
            "mend the line"
            if fault.byte is None
            else f"convert the file, for example with {_ICONV}"
        )
        raise DataError(
            f"{cleaned.places[side].place(row)}: {fault.message}; {how}, or set "
            "data.invalid=replace or drop"
        )
    mend = held_out or invalid is Invalid.replace
    _settle(cleaned, NOT_UTF8, sides.broken, mend=mend, number=sides.num_broken)


def _settle_malformed(cleaned: Cleaned, sides: Sides, invalid: Invalid, held_out: bool) -> None:
    if sides.malformed and invalid is not Invalid.drop:
        row = min(sides.malformed)
        raise DataError(
            f"{cleaned.places[0].place(row)}: {sides.malformed[row].message}; mend the line, or "
            "leave such lines out with data.invalid=drop"
        )
    _settle(cleaned, MALFORMED, (sides.malformed, {}), mend=held_out)


def _settle(
    cleaned: Cleaned,
    reason: str,
    faults: Faults,
    *,
    mend: bool,
    number: int | None = None,
) -> None:
    """Drop rows of the chunk with a fault on a side, or count `number` (or faults) as replaced."""
    found = [(row, side) for side in (0, 1) for row in faults[side]]
    if mend and found:
        places = [_place(cleaned, row, side, faults) for row, side in sorted(found)]
        cleaned.counts.replace(reason, len(found) if number is None else number, places)
    elif found:
        left = np.isin(cleaned.rows, [row for row, _ in found])
        first = {row: side for row, side in sorted(found, reverse=True)}  # the source goes first
        rows = cleaned.rows[left].tolist()
        places = [_place(cleaned, row, first[row], faults) for row in rows[:NUM_EXAMPLES]]
        cleaned.drop(reason, left, places=places)


def _place(cleaned: Cleaned, row: int, side: int, faults: Faults) -> Place:
    return cleaned.places[side].place(row, faults[side][row].byte)
