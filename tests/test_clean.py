"""Chunks are cleaned as a slow reading of the rules cleans line by line; no line is mixed up."""

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
    Row,
    Story,
    clean_and_filter,
    hostile_line,
    hostile_record,
    make_chunk,
    read_json,
    read_pair,
    read_tsv,
)

from nmt.config import DataConfig, Invalid, PreprocessConfig
from nmt.errors import DataError
from nmt.preprocess import chunks
from nmt.preprocess.chunks import Format, Source, read_chunks
from nmt.preprocess.clean import MALFORMED, NOT_UTF8, NUM_EXAMPLES, OVERLONG, CleanChunk, PairCounts

EMPTY, NUL = "empty side", "NUL character"
SEEDS = range(12)
Reader = Callable[[tuple[bytes, ...], int, Story], Row]
POLICIES = [  # invalid, held_out
    (Invalid.replace, False),
    (Invalid.drop, False),
    (Invalid.drop, True),
]


def settings(invalid: Invalid = Invalid.error) -> PreprocessConfig:
    return PreprocessConfig(data=DataConfig(invalid=invalid))


def slow_clean(
    lines: list[list[bytes]], read: Reader, config: PreprocessConfig, *, held_out: bool
) -> Story:
    """Clean one pair after the other."""
    story = Story()
    for number, raw in enumerate(zip(*lines, strict=True), start=1):
        row = read(raw, number, story)
        files = ("a.src", "b.tgt") if len(raw) == 2 else ("both", "both")
        reasons = []
        for file, byte, size in row.broken:
            location = (file, number, byte)
            if held_out or config.data.invalid is Invalid.replace:
                story.note(story.replaced, NOT_UTF8, size, location)
            else:
                reasons.append((NOT_UTF8, location))
        if row.is_malformed and held_out:
            story.note(story.replaced, MALFORMED, 1, (files[0], number, None))
        elif row.is_malformed:
            reasons.append((MALFORMED, (files[0], number, None)))
        reasons += slow_filters(row, files, number, story, held_out)
        if reasons:
            story.note(story.dropped, reasons[0][0], 1, reasons[0][1])
        else:
            story.kept.append((number, row.texts[0], row.texts[1]))
    return story


def slow_filters(row, files, number, story, held_out):  # type: ignore[no-untyped-def]
    """Return why a pair is dropped for NUL or an empty side; replace NUL in held-out pairs."""
    locations = [(file, number, None) for file in files]
    nul = [(NUL, p) for p, text in zip(locations, row.texts, strict=True) if "\0" in text]
    if held_out:
        for location, text in zip(locations, row.texts, strict=True):
            if "\0" in text:
                story.note(story.replaced, "NUL", text.count("\0"), location)
        row.texts = [text.replace("\0", " ") for text in row.texts]
        return []
    return nul + [
        (EMPTY, p) for p, text in zip(locations, row.texts, strict=True) if not text.strip()
    ]


def assert_same(parts: list[CleanChunk], counts: PairCounts, story: Story, num_read: int) -> None:
    kept = [pair for p in parts for pair in zip(p.lines.tolist(), p.src, p.tgt, strict=True)]
    assert kept == story.kept
    assert (counts.read, counts.kept) == (num_read, len(story.kept))
    assert counts.dropped == dict(story.dropped)
    assert counts.replaced == dict(story.replaced)
    assert counts.examples == {k: v[:NUM_EXAMPLES] for k, v in story.locations.items()}
    assert counts.read == counts.kept + sum(counts.dropped.values())


def hostile_pairs(seed: int, number: int = 60) -> list[list[bytes]]:
    draw = random.Random(seed)
    return [[hostile_line(draw, n) for n in range(1, number + 1)] for _ in range(2)]


def hostile_tsv(seed: int) -> list[list[bytes]]:
    draw, rows = random.Random(seed), zip(*hostile_pairs(seed), strict=True)
    cut = [1, 2, 3, 4, 4, 4]
    return [[b"\t".join([b"x", a, b, b"y"][: draw.choice(cut)]) for a, b in rows]]


def hostile_json(seed: int) -> list[list[bytes]]:
    draw = random.Random(seed)
    return [[hostile_record(draw, n) for n in range(1, 61)]]


def check(
    format: Format,
    draw: Callable[[int], list[list[bytes]]],
    read: Reader,
    policies: list[tuple[Invalid, bool]],
    **source: Any,
) -> None:
    """Compare with cleaning one pair after the other, under each policy; mix up and lose none."""
    for (invalid, held_out), seed in itertools.product(policies, SEEDS):
        config, lines = settings(invalid), draw(seed)
        cleaned = clean_and_filter(make_chunk(lines, format, **source), config, held_out=held_out)
        story = slow_clean(lines, read, config, held_out=held_out)
        assert_same([cleaned], cleaned.counts, story, 60)
        if held_out:
            assert cleaned.lines.tolist() == list(range(1, 61))
        for line, *texts in zip(cleaned.lines, cleaned.src, cleaned.tgt, strict=True):
            for text in texts:
                assert {int(n) for n in re.findall(r"#(\d+)#", text)} <= {line}
                assert len((text + "x").splitlines()) == 1
                text.encode("utf-8")


def test_chunks_are_cleaned_as_line_by_line() -> None:
    check(Format.pair, hostile_pairs, read_pair, POLICIES)
    for columns in ((2, 3), (3, 1)):
        read = functools.partial(read_tsv, columns=columns)
        check(Format.tsv, hostile_tsv, read, POLICIES[1:], columns=columns)
    check(Format.jsonl, hostile_json, read_json, POLICIES[1:])


def test_counts_do_not_depend_on_how_a_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = hostile_pairs(3, number=200)
    paths = (tmp_path / "a.src", tmp_path / "b.tgt")
    for path, side in zip(paths, lines, strict=True):
        path.write_bytes(b"\n".join(side))  # the last line has no end
    source = Source("", Format.pair, paths, ("a.src", "b.tgt"))
    config = settings(Invalid.drop)
    story = slow_clean(lines, read_pair, config, held_out=False)
    for size in (1, 7, 1000):
        monkeypatch.setattr(chunks, "PAIRS_A_CHUNK", size)
        parts = [clean_and_filter(chunk, config) for chunk in read_chunks([source])]
        total = PairCounts()
        for part in parts:
            total.merge(PairCounts.from_json(json.loads(json.dumps(vars(part.counts)))))
        assert_same(parts, total, story, 200)


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
    for format, line, what in MALFORMED_LINES:
        good = b"a\tb" if format is Format.tsv else b'{"src": "a", "tgt": "b"}'
        chunk = make_chunk([[good, line, good]], format, first_line=11)
        expected = rf"^both:12: {what}; fix the line, .*data\.invalid="
        with pytest.raises(DataError, match=expected):
            clean_and_filter(chunk, settings(Invalid.error))
        cleaned = clean_and_filter(chunk, settings(Invalid.drop))
        assert (cleaned.lines.tolist(), cleaned.tgt) == ([11, 13], ["b", "b"]), what
        held_out = clean_and_filter(chunk, settings(Invalid.drop), held_out=True)
        assert held_out.tgt[::2] == ["b", "b"], what


def test_rules_keep_text_that_no_rule_is_against() -> None:
    """Joiners, marks and spaces of all kinds, and a U+FEFF inside a line, are text; so are control
    characters inside strings of JSON.
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
    for side, held_out in itertools.product((0, 1), (False, True)):
        chunk = dataclasses.replace(chunk, overlong=((6, side),))
        src = ["a", "", "c"] if held_out else ["a", "c"]
        cleaned = clean_and_filter(chunk, settings(), held_out=held_out)
        assert cleaned.src == src
        counts = cleaned.counts.replaced if held_out else cleaned.counts.dropped
        assert counts == {OVERLONG: 1}
        assert cleaned.counts.examples == {OVERLONG: [(("a.src", "b.tgt")[side], 6, None)]}
