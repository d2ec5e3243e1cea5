"""Cleaning whole chunks equals a slow implementation of the rules that cleans line by line."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dirt import (
    CleanResult,
    LineLocation,
    Row,
    clean_and_filter,
    hostile_line,
    hostile_record,
    make_chunk,
    read_json,
    read_pair,
    read_tsv,
)

from nmt.config import DataConfig, InvalidLinePolicy, PreprocessConfig
from nmt.errors import DataError
from nmt.preprocess import chunks
from nmt.preprocess.chunks import DataSource, Format, read_chunks
from nmt.preprocess.clean import MALFORMED, NOT_UTF8, OVERLONG
from nmt.preprocess.clean_chunk import NUM_EXAMPLES, CleanChunk, PairCounts

EMPTY = "empty side"
NUL = "NUL character"
SEEDS = range(12)
Reader = Callable[[tuple[bytes, ...], int, CleanResult], Row]
POLICIES = [  # invalid, held_out
    (InvalidLinePolicy.replace, False),
    (InvalidLinePolicy.drop, False),
    (InvalidLinePolicy.drop, True),
]


def settings(invalid: InvalidLinePolicy = InvalidLinePolicy.error) -> PreprocessConfig:
    return PreprocessConfig(data=DataConfig(invalid=invalid))


def slow_clean(
    lines: list[list[bytes]], read: Reader, config: PreprocessConfig, *, held_out: bool
) -> CleanResult:
    """Clean one pair after the other."""
    result = CleanResult()
    for number, raw in enumerate(zip(*lines, strict=True), start=1):
        row = read(raw, number, result)
        files = ("a.src", "b.tgt") if len(raw) == 2 else ("both", "both")
        reasons = []
        for file, byte, size in row.broken:
            location = (file, number, byte)
            if held_out or config.data.invalid is InvalidLinePolicy.replace:
                result.note(result.replaced, NOT_UTF8, size, location)
            else:
                reasons.append((NOT_UTF8, location))
        if row.is_malformed and held_out:
            result.note(result.replaced, MALFORMED, 1, (files[0], number, None))
        elif row.is_malformed:
            reasons.append((MALFORMED, (files[0], number, None)))
        locations = [(file, number, None) for file in files]
        if held_out:
            replace_nul(row, locations, result)
        else:
            reasons += find_faults(row, locations)
        if reasons:
            result.note(result.dropped, reasons[0][0], 1, reasons[0][1])
        else:
            result.pairs.append((number, row.texts[0], row.texts[1]))
    return result


def find_faults(row: Row, locations: list[LineLocation]) -> list[tuple[str, LineLocation]]:
    """Return the reasons for which the filters drop a training pair, in their order."""
    sides = list(zip(locations, row.texts, strict=True))
    faults = [(NUL, location) for location, text in sides if "\0" in text]
    return faults + [(EMPTY, location) for location, text in sides if not text.strip()]


def replace_nul(row: Row, locations: list[LineLocation], result: CleanResult) -> None:
    """Replace NUL in a held-out pair."""
    for side, location in enumerate(locations):
        text = row.texts[side]
        result.note(result.replaced, "NUL", text.count("\0"), location)
        row.texts[side] = text.replace("\0", " ")


def assert_same(
    chunks: list[CleanChunk], counts: PairCounts, result: CleanResult, num_read: int
) -> None:
    pairs: list[tuple[int, str, str]] = []
    for chunk in chunks:
        pairs += zip(chunk.line_numbers.tolist(), chunk.src, chunk.tgt, strict=True)
    assert pairs == result.pairs
    assert (counts.read, counts.kept) == (num_read, len(pairs))
    assert counts.dropped == dict(result.dropped)
    assert counts.replaced == dict(result.replaced)
    assert counts.examples.keys() == result.locations.keys()
    for name, locations in result.locations.items():
        assert counts.examples[name] == locations[:NUM_EXAMPLES]
    assert counts.read == counts.kept + sum(counts.dropped.values())


def hostile_pairs(seed: int, number: int = 60) -> list[list[bytes]]:
    draw = random.Random(seed)
    return [[hostile_line(draw, n) for n in range(1, number + 1)] for _ in range(2)]


def hostile_tsv(seed: int) -> list[list[bytes]]:
    draw = random.Random(seed)
    lines = []
    for src, tgt in zip(*hostile_pairs(seed), strict=True):
        num_columns = draw.choice([1, 2, 3, 4, 4, 4])
        lines.append(b"\t".join([b"x", src, tgt, b"y"][:num_columns]))
    return [lines]


def hostile_json(seed: int) -> list[list[bytes]]:
    draw = random.Random(seed)
    return [[hostile_record(draw, n) for n in range(1, 61)]]


def assert_cleaned_line_by_line(
    format: Format,
    draw: Callable[[int], list[list[bytes]]],
    read: Reader,
    policies: list[tuple[InvalidLinePolicy, bool]],
    **source: Any,
) -> None:
    """Compare with cleaning one pair after the other, under each policy."""
    for (invalid, held_out), seed in itertools.product(policies, SEEDS):
        config = settings(invalid)
        lines = draw(seed)
        cleaned = clean_and_filter(make_chunk(lines, format, **source), config, held_out=held_out)
        expected = slow_clean(lines, read, config, held_out=held_out)
        assert_same([cleaned], cleaned.counts, expected, 60)
        if held_out:
            assert cleaned.line_numbers.tolist() == list(range(1, 61))
        for texts in (cleaned.src, cleaned.tgt):
            for line, text in zip(cleaned.line_numbers, texts, strict=True):
                assert set(re.findall(r"#(\d+)#", text)) <= {str(line)}
                assert len((text + "x").splitlines()) == 1
                text.encode("utf-8")


def test_chunks_are_cleaned_as_line_by_line() -> None:
    assert_cleaned_line_by_line(Format.pair, hostile_pairs, read_pair, POLICIES)
    for columns in ((2, 3), (3, 1)):
        read = functools.partial(read_tsv, columns=columns)
        assert_cleaned_line_by_line(Format.tsv, hostile_tsv, read, POLICIES[1:], columns=columns)
    assert_cleaned_line_by_line(Format.jsonl, hostile_json, read_json, POLICIES[1:])


def test_counts_do_not_depend_on_how_a_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = hostile_pairs(3, number=200)
    paths = (tmp_path / "a.src", tmp_path / "b.tgt")
    for path, side in zip(paths, lines, strict=True):
        path.write_bytes(b"\n".join(side))  # the last line has no end
    source = DataSource("", Format.pair, paths, ("a.src", "b.tgt"))
    config = settings(InvalidLinePolicy.drop)
    expected = slow_clean(lines, read_pair, config, held_out=False)
    for size in (1, 7, 1000):
        monkeypatch.setattr(chunks, "PAIRS_PER_CHUNK", size)
        cleaned = [clean_and_filter(chunk, config) for chunk in read_chunks([source])]
        total = PairCounts()
        for chunk in cleaned:
            total.merge(PairCounts.from_json(json.loads(json.dumps(vars(chunk.counts)))))
        assert_same(cleaned, total, expected, 200)


def test_broken_bytes_are_an_error_that_names_the_first_with_file_line_and_byte() -> None:
    lines = [
        [b"fine", b"\xef\xbb\xbffine", b"caf\xe9"],
        [b"fine", "größer \xff".encode() + b"\xff", b""],
    ]
    for held_out in (False, True):
        with pytest.raises(
            DataError, match=r"^b\.tgt:2: byte 12 \(0xff\) is not UTF-8; .*invalid="
        ):
            clean_and_filter(make_chunk(lines, Format.pair), settings(), held_out=held_out)


MALFORMED_LINES = [
    (Format.tsv, b"one", r"1 of 2 columns"),
    (Format.jsonl, b"{", "no JSON"),
    (Format.jsonl, b"[" * 100_000, "no JSON"),
    (Format.jsonl, b"", "no JSON"),
    (Format.jsonl, b"[1]", "no JSON object"),
    (Format.jsonl, b'{"src": "x"}', 'no text in the field "tgt"'),
    (Format.jsonl, b'{"src": null, "tgt": "x"}', 'no text in the field "src"'),
    (Format.jsonl, b'{"src": "x", "tgt": "\\ud83d"}', 'half a surrogate pair in the field "tgt"'),
]


def test_a_malformed_line_is_an_error_or_is_dropped() -> None:
    for format, line, problem in MALFORMED_LINES:
        good = b"a\tb" if format is Format.tsv else b'{"src": "a", "tgt": "b"}'
        chunk = make_chunk([[good, line, good]], format, first_line=11)
        expected = rf"^both:12: {problem}; fix the line, .*data\.invalid="
        with pytest.raises(DataError, match=expected):
            clean_and_filter(chunk, settings(InvalidLinePolicy.error))
        cleaned = clean_and_filter(chunk, settings(InvalidLinePolicy.drop))
        assert (cleaned.line_numbers.tolist(), cleaned.tgt) == ([11, 13], ["b", "b"]), problem
        held_out = clean_and_filter(chunk, settings(InvalidLinePolicy.drop), held_out=True)
        assert held_out.tgt[::2] == ["b", "b"], problem


def test_the_first_malformed_line_is_named_whatever_is_wrong_with_it() -> None:
    chunk = make_chunk([[b"a\tb\t-", b"a", b"a\tb\t1"]], Format.tsv, score="3")
    with pytest.raises(DataError, match="^both:1: no score"):
        clean_and_filter(chunk, settings())


def test_json_with_other_fields_names_them_and_the_setting() -> None:
    lines = [b'{"id": 7, "en": "a", "de": "b", "note": "c"}', b'{"src": "a", "id": "b", "de": "c"}']
    chunk = make_chunk([lines[:1]], Format.jsonl, settings_key="data.corpora.news")
    expected = (
        'both:1: no text in the field "src"; it has en, de, note; name the fields of source and '
        "target, such as data.corpora.news.fields=[en,de]"
    )
    with pytest.raises(DataError) as error:
        clean_and_filter(chunk, settings())
    assert str(error.value) == expected
    with pytest.raises(DataError, match='in the field "tgt"; fix the line'):
        clean_and_filter(make_chunk([lines[1:]], Format.jsonl), settings())


def test_other_characters_stay() -> None:
    """Joiners, marks, all spaces, a U+FEFF inside a line, and control characters in JSON strings
    are text.
    """
    text = "a\u200b\u200d\u00a0\u3000\u0301\u2060\ufeffb 😀\x01\x1f\u00ad\ufffd\uffff\U0010ffff"
    cleaned = clean_and_filter(make_chunk([[text.encode()]] * 2, Format.pair), settings())
    assert cleaned.src == cleaned.tgt == [text]
    assert not cleaned.counts.replaced
    line = b'{"src": "a\tb\x01", "tgt": "c\x0be"}'
    cleaned = clean_and_filter(make_chunk([[line]], Format.jsonl), settings())
    assert (cleaned.src, cleaned.tgt) == (["a\tb\x01"], ["c e"])


def test_an_overlong_line_is_dropped_or_empty_and_a_duplicate_is_dropped() -> None:
    chunk = make_chunk([[b"a", b"", b"c", b"d"]] * 2, Format.pair)
    repeated = np.array([False, True, False, True])
    counts = clean_and_filter(chunk, settings(), repeated=repeated).counts
    assert counts.dropped == {EMPTY: 1, "duplicate": 1}
    assert counts.examples["duplicate"] == [("a.src", 4, None)]
    chunk = make_chunk([[b"a", b"", b"c"], [b"x", b"y", b"z"]], Format.pair, first_line=5)
    files = ("a.src", "b.tgt")
    for (side, file), held_out in itertools.product(enumerate(files), (False, True)):
        chunk = dataclasses.replace(chunk, overlong=((6, side),))
        src = ["a", "", "c"] if held_out else ["a", "c"]
        cleaned = clean_and_filter(chunk, settings(), held_out=held_out)
        assert cleaned.src == src
        counts = cleaned.counts.replaced if held_out else cleaned.counts.dropped
        assert counts == {OVERLONG: 1}
        assert cleaned.counts.examples == {OVERLONG: [(file, 6, None)]}
