"""Statistics of text against slow counts: one line, one word, one character at a time."""

from __future__ import annotations

import json
import random
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from conftest import sentences

from nmt.data.tokenizer import Tokenizer
from nmt.preprocess.characters import CodePoints, normal_form
from nmt.preprocess.statistics import (
    EXACT_LENGTHS,
    NUM_BINS,
    NUM_EXAMPLES,
    HeldOut,
    Measurer,
    Statistics,
    bin_starts,
    length_bins,
)

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
    measurer = Measurer(tokenizer, tokenizer, held_out)
    total = Statistics()
    for start in range(0, len(src), cut):
        chunk = src[start : start + cut], tgt[start : start + cut]
        encoded = encode(tokenizer, chunk[0]), encode(tokenizer, chunk[1])
        lines = np.arange(start + 1, start + 1 + len(chunk[0]))
        total.merge(measurer.measure(chunk, encoded, file="a.en", lines=lines))
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
        assert side.num_tokens == len(tokens)
        assert side.num_unknown == tokens.count(tokenizer.unk_id)
        assert side.num_bytes == sum(piece.startswith("<0x") for piece in tokenizer.pieces(tokens))
        assert side.longest == max(len(line) + 1 for line in ids)
        lengths.append([len(line) + 1 for line in ids])
    assert statistics.sides[0].num_bytes > 0
    assert statistics.num_pairs == 60
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


def slow_overlap(split: str, lines: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Compare every pair with every row."""
    found: dict[str, Any] = {"rows": Counter(), "pairs": Counter(), "examples": {}}
    rows = list(zip(*HELD[split], strict=True))
    for strictness in ("exact", "normalised"):
        for kind, sides in (("pairs", (0, 1)), ("sources", (0,)), ("targets", (1,))):
            seen = set()
            for number, pair in enumerate(lines, start=1):
                hits = [
                    i
                    for i, row in enumerate(rows)
                    if all(_same(pair, row, strictness, s) for s in sides)
                ]
                seen |= set(hits)
                if hits:
                    key = f"{strictness} {kind}"
                    found["pairs"][key] += 1
                    place = {"file": "a.en", "line": number, "held_out_line": hits[0] + 1}
                    found["examples"].setdefault(key, []).append(place)
            found["rows"][f"{strictness} {kind}"] = len(seen)
    return found


def _same(pair: Sequence[str], row: Sequence[str], strictness: str, side: int) -> bool:
    if pair[side] == row[side]:
        return True
    form = slow_normal_form(pair[side])
    return strictness == "normalised" and form != "" and form == slow_normal_form(row[side])


def test_overlap_is_what_comparing_all_with_all_finds(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    lines = [*LINES, *(draw.choice(LINES) for _ in range(40))]
    src, tgt = map(list, zip(*lines, strict=True))
    statistics = measure(tokenizer, src, tgt, HeldOut(HELD))
    assert statistics.overlaps.keys() == HELD.keys()
    for split, overlap in statistics.overlaps.items():
        expected = slow_overlap(split, lines)
        assert {name: len(rows) for name, rows in overlap.seen.items()} == +expected["rows"]
        assert overlap.matches == expected["pairs"]
        first = {name: places[:NUM_EXAMPLES] for name, places in expected["examples"].items()}
        assert overlap.examples == first


def test_statistics_do_not_depend_on_how_text_is_cut(tokenizer: Tokenizer) -> None:
    src = odd_lines(57, seed=4) + [pair[0] for pair in LINES]
    tgt = sentences(57) + [pair[1] for pair in LINES]
    whole = measure(tokenizer, src, tgt, HeldOut(HELD)).to_json()
    for cut in (1, 2, 13):
        assert measure(tokenizer, src, tgt, HeldOut(HELD), cut).to_json() == whole


def test_statistics_survive_merging_and_a_json_file(tokenizer: Tokenizer) -> None:
    src, tgt = map(list, zip(*LINES, strict=True))
    parts = [measure(tokenizer, src[i:], tgt[i:], HeldOut(HELD)) for i in (0, 3)]
    texts = [json.dumps(part.to_json()) for part in parts]
    read = [Statistics.from_json(json.loads(text)) for text in texts]
    assert [json.dumps(part.to_json()) for part in read] == texts
    totals = []
    for merged in (parts, read, parts):
        totals.append(Statistics())
        for part in merged:
            totals[-1].merge(part)
    assert totals[0].to_json() == totals[1].to_json() == totals[2].to_json()
    assert [json.dumps(part.to_json()) for part in parts] == texts  # they stay as they were


def test_statistics_do_not_grow_with_the_corpus(tokenizer: Tokenizer) -> None:
    src, tgt = map(list, zip(*LINES, strict=True))
    once = measure(tokenizer, src, tgt, HeldOut(HELD))
    often = measure(tokenizer, src * 50, tgt * 50, HeldOut(HELD))
    assert often.num_pairs == 50 * once.num_pairs
    assert len(json.dumps(often.to_json())) < 1.5 * len(json.dumps(once.to_json()))


def test_no_pairs_are_no_statistics(tokenizer: Tokenizer) -> None:
    empty = (np.zeros(0, np.uint16), np.zeros(1, np.int64))
    measurer = Measurer(tokenizer, tokenizer, HeldOut(HELD))
    chunk = measurer.measure(([], []), (empty, empty), file="a", lines=np.zeros(0, np.int64))
    assert chunk.to_json() == Statistics().to_json()
