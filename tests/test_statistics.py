"""Statistics of text against slow counts: one line, one word, one character at a time."""

from __future__ import annotations

import json
import random
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from dirt import make_chunk
from tiny import sentences

from nmt.data.tokenizer import Tokenizer
from nmt.preprocess.characters import CodePoints, normal_form
from nmt.preprocess.chunks import Format
from nmt.preprocess.clean import CleanChunk, PairCounts
from nmt.preprocess.statistics import (
    EXACT_LENGTHS,
    NUM_BINS,
    NUM_EXAMPLES,
    HeldOut,
    Overlap,
    Statistics,
    bin_starts,
    length_bins,
    token_kinds,
)
from nmt.preprocess.statistics import measure as measure_chunk

ODD = "aB é\u0301ßﬁ \u00a0\u2003\u3000\u200b.,!?-'\"`$ \ue000\ufffd你好Привет😀ＡΣς\u0378\x01"


def odd_lines(count: int, seed: int) -> list[str]:
    """Draw lines of odd characters, some empty, some that come twice."""
    draw = random.Random(seed)
    lines = ["".join(draw.choices(ODD, k=draw.randint(0, 12))) for _ in range(count)]
    return [draw.choice(lines) if draw.random() < 0.3 else line for line in lines]


def encode(tokenizer: Tokenizer, lines: Sequence[str]) -> tuple[Any, Any]:
    """Return flat ids and offsets."""
    ids = tokenizer.encode_batch(lines)
    flat = np.array([token for line in ids for token in line], np.uint16)
    return flat, np.cumsum([0, *map(len, ids)])


def measure(
    tokenizer: Tokenizer,
    src: list[str],
    tgt: list[str],
    held_out: HeldOut | None = None,
    cut: int = 1000,
) -> Statistics:
    """Count the pairs in chunks of `cut`."""
    kinds = token_kinds(tokenizer)
    total = Statistics()
    for start in range(0, max(1, len(src)), cut):
        chunk = src[start : start + cut], tgt[start : start + cut]
        encoded = encode(tokenizer, chunk[0]), encode(tokenizer, chunk[1])
        size = len(chunk[0])
        place = make_chunk([[b""] * size] * 2, Format.pair, first_line=start + 1)
        cleaned = CleanChunk(place, *chunk, np.arange(size), PairCounts(size, size))
        total.merge(measure_chunk(cleaned, encoded, (kinds, kinds), held_out))
    return total


def test_characters_and_words_are_those_that_python_counts() -> None:
    for seed in range(20):
        lines = odd_lines(30, seed)
        codes = CodePoints(lines)
        assert codes.tally() == Counter(map(ord, "".join(lines)))
        assert codes.num_words() == sum(len(line.split()) for line in lines)


def slow_normal_form(text: str) -> str:
    """Do what `normal_form` promises, on the whole line."""
    for _ in range(2):
        text = unicodedata.normalize("NFKD", text).casefold()
    text = unicodedata.normalize("NFKD", text)
    dropped = ("P", "Z", "C", "Sk")
    return "".join(c for c in text if not unicodedata.category(c).startswith(dropped))


def test_case_punctuation_spaces_and_composition_do_not_matter() -> None:
    assert normal_form(" »Straße, 5!« ") == normal_form("STRASSE\u00a05")
    assert normal_form("caf\u00e9") == normal_form("cafe\u0301") != normal_form("cafe")
    for line in odd_lines(300, seed=1):
        assert unicodedata.normalize("NFKD", normal_form(line)) == slow_normal_form(line)


def test_signatures_agree_where_normal_forms_do_and_else_differ() -> None:
    lines = [*odd_lines(400, seed=2), "", "...", "a b", "A, B!", "ab c"]
    signatures = CodePoints(lines).signatures().tolist()
    assert len(signatures) == len(lines)
    by_form: dict[str, int] = {}
    for line, signature in zip(lines, signatures, strict=True):
        # the order of characters is all that a signature does not see
        form = "".join(sorted(normal_form(line)))
        assert by_form.setdefault(form, signature) == signature
    assert len(set(by_form.values())) == len(by_form)


def test_counts_are_those_of_single_lines(tokenizer: Tokenizer) -> None:
    src, tgt = odd_lines(60, seed=3), sentences(60)
    statistics = measure(tokenizer, src, tgt)
    lengths = []
    for lines, side in zip((src, tgt), statistics.sides, strict=True):
        ids = [tokenizer.encode(line) for line in lines]
        tokens = [token for line in ids for token in line]
        assert side.tokens == len(tokens)
        assert side.unknown_tokens == tokens.count(tokenizer.unk_id)
        assert side.byte_tokens == sum(
            piece.startswith("<0x") for piece in tokenizer.pieces(tokens)
        )
        assert side.longest == max(len(line) + 1 for line in ids)
        lengths.append([len(line) + 1 for line in ids])
    assert statistics.sides[0].byte_tokens > 0
    assert statistics.pairs.kept == 60
    found = {divmod(key, NUM_BINS): count for key, count in statistics.lengths.items()}
    assert found == Counter(zip(*lengths, strict=True))


def test_every_length_has_one_bin_and_short_ones_their_own() -> None:
    lengths = np.concatenate([np.arange(5000), [99_999, 500_000]])
    bins, starts = length_bins(lengths), bin_starts()
    assert (starts[bins] <= lengths).all()
    assert (lengths < starts[bins + 1]).all()
    assert (bins[:EXACT_LENGTHS] == lengths[:EXACT_LENGTHS]).all()
    assert length_bins(np.array([10**9]))[0] == NUM_BINS - 1


HELD = {
    "valid": (["A b.", "only src", "...", "twice", "twice"], ["c d", "other", "!", "x", "y"]),
    "test": (["new", "A b."], ["neu", "C D"]),
}
LINES = [
    ("A b.", "c d"),
    ("a B", "C, d!"),
    ("only src", "x"),
    ("ONLY SRC", "nothing"),
    ("b a", "d c"),
    ("...", "!"),
    (",,", "?"),
    ("twice", "y"),
    ("neu", "new"),
    ("", ""),
]


def is_same(pair: Sequence[str], row: Sequence[str], strictness: str, side: int) -> bool:
    """Compare two lines."""
    if pair[side] == row[side]:
        return True
    form = slow_normal_form(pair[side])
    return strictness == "normalised" and form != "" and form == slow_normal_form(row[side])


def test_overlap_is_what_comparing_all_with_all_finds(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    lines = [*LINES, *(draw.choice(LINES) for _ in range(40))]
    src, tgt = map(list, zip(*lines, strict=True))
    statistics = measure(tokenizer, src, tgt, HeldOut(HELD))
    kinds = {"pairs": (0, 1), "sources": (0,), "targets": (1,)}
    for split, strictness, kind in product(HELD, ("exact", "normalised"), kinds):
        rows, name = [*zip(*HELD[split], strict=True)], f"{split} {strictness} {kind}"
        seen, places = set(), []
        for number, pair in enumerate(lines, start=1):
            hits = [
                i
                for i, row in enumerate(rows)
                if all(is_same(pair, row, strictness, side) for side in kinds[kind])
            ]
            seen |= set(hits)
            if hits:
                places.append({"file": "a.src", "line": number, "held_out_line": hits[0] + 1})
        assert Overlap(len(places), seen, places[:NUM_EXAMPLES]) == statistics.overlaps.get(
            name, Overlap()
        ), name


def test_statistics_do_not_depend_on_how_text_is_cut_nor_on_a_json_file(
    tokenizer: Tokenizer,
) -> None:
    src = odd_lines(57, seed=4) + [pair[0] for pair in LINES]
    tgt = sentences(57) + [pair[1] for pair in LINES]
    whole = json.dumps(measure(tokenizer, src, tgt, HeldOut(HELD)).to_json())
    for cut in (1, 2, 13):
        found = measure(tokenizer, src, tgt, HeldOut(HELD), cut)
        assert json.dumps(found.to_json()) == whole, cut
    read = Statistics.from_json(json.loads(whole))
    assert json.dumps(read.to_json()) == whole
    often = Statistics()
    for _ in range(50):
        often.merge(read)
    assert json.dumps(read.to_json()) == whole  # stays as it was
    assert often.pairs.kept == 50 * len(src)
    assert len(json.dumps(often.to_json())) < 1.5 * len(whole)  # does not grow with the corpus
    assert often.lengths.keys() == read.lengths.keys()
    assert often.sides[1].characters.total() == 50 * sum(map(len, tgt))
    empty = measure(tokenizer, [], [], HeldOut(HELD))
    assert empty.to_json() == Statistics().to_json()
