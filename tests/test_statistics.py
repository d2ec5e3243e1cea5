"""Statistics of text against slow counts: one line, one word, one character at a time."""

from __future__ import annotations

import json
import random
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import chain, product
from typing import Any

import numpy as np
from dirt import make_chunk
from tiny import sentences

from nmt.data.tokenizer import Tokenizer
from nmt.preprocess.characters import CharacterStatistics, normal_form
from nmt.preprocess.chunks import Format
from nmt.preprocess.clean_chunk import CleanChunk, PairCounts
from nmt.preprocess.statistics import (
    NUM_BINS,
    NUM_EXACT_LENGTHS,
    NUM_EXAMPLES,
    HeldOutFinder,
    Overlap,
    Statistics,
    bin_starts,
    count_chunk,
    length_bins,
    token_kinds,
)

ODD = "aB é\u0301ßﬁ \u00a0\u2003\u3000\u200b.,!?-'\"`$ \ue000\ufffd你好Привет😀ＡΣς\u0378\x01"


def odd_lines(count: int, seed: int) -> list[str]:
    """Draw lines of odd characters, some empty, some twice."""
    draw = random.Random(seed)
    distinct = ["".join(draw.choices(ODD, k=draw.randint(0, 12))) for _ in range(count)]
    return [draw.choice(distinct) if draw.random() < 0.3 else line for line in distinct]


def encode(tokenizer: Tokenizer, lines: Sequence[str]) -> tuple[Any, Any]:
    """Return flat ids and offsets."""
    ids = tokenizer.encode_batch(lines)
    flat = np.array(list(chain.from_iterable(ids)), np.uint16)
    return flat, np.cumsum([0, *map(len, ids)])


def measure(
    tokenizer: Tokenizer,
    src: list[str],
    tgt: list[str],
    held_out: HeldOutFinder | None = None,
    cut: int = 1000,
) -> Statistics:
    """Count the pairs in chunks of `cut`."""
    kinds = token_kinds(tokenizer)
    total = Statistics()
    for start in range(0, max(1, len(src)), cut):
        src_lines = src[start : start + cut]
        tgt_lines = tgt[start : start + cut]
        size = len(src_lines)
        chunk = make_chunk([[b""] * size] * 2, Format.pair, first_line=start + 1)
        counts = PairCounts(size, size)
        cleaned = CleanChunk(chunk, src_lines, tgt_lines, np.arange(size), counts)
        encoded = encode(tokenizer, src_lines), encode(tokenizer, tgt_lines)
        total.merge(count_chunk(cleaned, encoded, (kinds, kinds), held_out))
    return total


def test_characters_and_words_are_counted_as_by_python() -> None:
    for seed in range(20):
        lines = odd_lines(30, seed)
        codes = CharacterStatistics(lines)
        assert codes.tally() == Counter(map(ord, "".join(lines)))
        assert codes.num_words() == sum(len(line.split()) for line in lines)


def slow_normal_form(text: str) -> str:
    """Normalize the whole line, as `normal_form` describes."""
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


def test_signatures_are_equal_if_and_only_if_normal_forms_are() -> None:
    lines = [*odd_lines(400, seed=2), "", "...", "a b", "A, B!", "ab c"]
    signatures = CharacterStatistics(lines).signatures().tolist()
    assert len(signatures) == len(lines)
    by_form: dict[str, int] = {}
    for line, signature in zip(lines, signatures, strict=True):
        # a signature ignores the order of characters
        form = "".join(sorted(normal_form(line)))
        assert by_form.setdefault(form, signature) == signature
    assert len(set(by_form.values())) == len(by_form)


def test_counts_equal_counts_of_single_lines(tokenizer: Tokenizer) -> None:
    src = odd_lines(60, seed=3)
    tgt = sentences(60)
    statistics = measure(tokenizer, src, tgt)
    lengths = []
    for lines, side in zip((src, tgt), statistics.sides, strict=True):
        ids = list(map(tokenizer.encode, lines))
        tokens = list(chain.from_iterable(ids))
        assert side.tokens == len(tokens)
        assert side.unknown_tokens == tokens.count(tokenizer.unk_id)
        num_bytes = sum(piece.startswith("<0x") for piece in tokenizer.pieces(tokens))
        assert side.byte_tokens == num_bytes
        lengths.append([len(line) + 1 for line in ids])
        assert side.longest == max(lengths[-1])
    assert statistics.sides[0].byte_tokens > 0
    assert statistics.pairs.kept == 60
    expected: Counter[int] = Counter()
    for src_length, tgt_length in zip(lengths[0], lengths[1], strict=True):
        expected[src_length * NUM_BINS + tgt_length] += 1
    assert statistics.num_pairs_by_bins == expected


def test_every_length_has_a_bin_and_each_short_length_its_own() -> None:
    lengths = np.concatenate([np.arange(5000), [99_999, 500_000]])
    bins = length_bins(lengths)
    starts = bin_starts()
    assert (starts[bins] <= lengths).all()
    assert (lengths < starts[bins + 1]).all()
    assert (bins[:NUM_EXACT_LENGTHS] == lengths[:NUM_EXACT_LENGTHS]).all()
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


KIND_SIDES = {"pairs": (0, 1), "sources": (0,), "targets": (1,)}


def is_same(pair: Sequence[str], row: Sequence[str], strictness: str, kind: str) -> bool:
    """Compare a pair with a held-out pair."""
    for side in KIND_SIDES[kind]:
        form = slow_normal_form(pair[side])
        is_same_form = form != "" and form == slow_normal_form(row[side])
        if pair[side] != row[side] and not (strictness == "normalised" and is_same_form):
            return False
    return True


def test_overlap_agrees_with_comparing_all_pairs(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    lines = [*LINES, *(draw.choice(LINES) for _ in range(40))]
    src, tgt = map(list, zip(*lines, strict=True))
    overlaps = measure(tokenizer, src, tgt, HeldOutFinder(HELD)).overlaps
    for split, strictness, kind in product(HELD, ("exact", "normalised"), KIND_SIDES):
        rows = list(zip(*HELD[split], strict=True))
        expected = Overlap()
        for number, pair in enumerate(lines, start=1):
            matches = [i for i, row in enumerate(rows) if is_same(pair, row, strictness, kind)]
            if matches:
                expected.matches += 1
                expected.rows.update(matches)
                example = {"file": "a.src", "line": number, "held_out_line": matches[0] + 1}
                expected.examples.append(example)
        del expected.examples[NUM_EXAMPLES:]
        name = f"{split} {strictness} {kind}"
        assert overlaps.get(name, Overlap()) == expected, name


def test_statistics_do_not_depend_on_chunks_or_on_json(
    tokenizer: Tokenizer,
) -> None:
    src = odd_lines(57, seed=4) + [pair[0] for pair in LINES]
    tgt = sentences(57) + [pair[1] for pair in LINES]
    expected = json.dumps(measure(tokenizer, src, tgt, HeldOutFinder(HELD)).to_json())
    for cut in (1, 2, 13):
        statistics = measure(tokenizer, src, tgt, HeldOutFinder(HELD), cut)
        assert json.dumps(statistics.to_json()) == expected, cut
    read = Statistics.from_json(json.loads(expected))
    assert json.dumps(read.to_json()) == expected
    merged = Statistics()
    for _ in range(50):
        merged.merge(read)
    assert json.dumps(read.to_json()) == expected  # merging changes only its target
    assert merged.pairs.kept == 50 * len(src)
    assert len(json.dumps(merged.to_json())) < 1.5 * len(expected)  # does not grow with the corpus
    assert merged.num_pairs_by_bins.keys() == read.num_pairs_by_bins.keys()
    assert merged.sides[1].characters.total() == 50 * sum(map(len, tgt))
    empty = measure(tokenizer, [], [], HeldOutFinder(HELD))
    assert empty.to_json() == Statistics().to_json()
