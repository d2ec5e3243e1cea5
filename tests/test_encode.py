"""Encoding word by word gives the same ids as encoding whole lines with SentencePiece."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from tiny import sentences, tokenizer_config, train_sentencepiece

from nmt.config import TokenizerType
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.preprocess import encode
from nmt.preprocess.encode import EncodedLines, LineEncoder, cuts_at_spaces

# characters that a normalizer may drop, join, split or turn into a space; and spaces
ODD = "\u00a0\u3000\u2009\u200b\u200d\u00ad\u0301\u0308\u00a8\uffe3\u0385\u1fc1\t\x01\x1a\x00"
LETTERS = "ab häüÄZ0.,-'’…①ﬁ½ΩйНあカ한漢😀<s>\\{}" + ODD + "  "


def hostile_lines(count: int, seed: int) -> list[str]:
    """Draw lines that repeat words and odd characters."""
    draw = random.Random(seed)
    words = ["house", "{url}", "<2de>", "</s>", "größer", "", " "]
    lines = ["", " ", "a  b", " a", "a "]
    for _ in range(count):
        odd = ["".join(draw.choices(LETTERS, k=3)) for _ in range(6)]
        line_words = draw.choices(words + odd, k=draw.randint(0, 12))
        lines.append(draw.choice([" ", "  ", ""]).join(line_words))
    return lines


def assert_same(encoder: LineEncoder, tokenizer: Tokenizer, lines: list[str]) -> None:
    """Compare with SentencePiece line by line."""
    ids = encoder.encode(lines)
    expected = tokenizer.encode_batch(lines, 1)
    assert ids.lengths.tolist() == list(map(len, expected))
    for i, line in enumerate(lines):
        assert ids.flat[ids.offsets[i] : ids.offsets[i + 1]].tolist() == expected[i], repr(line)


def test_words_encode_as_whole_lines_do() -> None:
    for normalization, byte_fallback in itertools.product(
        ("nmt_nfkc", "nfkc_cf", "identity"), (True, False)
    ):
        config = tokenizer_config(
            normalization=normalization,
            byte_fallback=byte_fallback,
            vocab_size=330 if byte_fallback else 74,
        )
        tokenizer = train_tokenizer(sentences(200), config, ("{url}", "<2de>"))
        assert cuts_at_spaces(tokenizer)
        encoder = LineEncoder(tokenizer)
        for seed in range(2):
            assert_same(encoder, tokenizer, hostile_lines(300, seed))
        assert encoder.encode([""]).offsets.tolist() == [0, 0]
        assert encoder.encode([]).offsets.tolist() == [0]


def test_selected_lines_keep_their_ids() -> None:
    ids = EncodedLines(np.arange(6), np.array([0, 2, 2, 5, 6]))
    selected = ids.select(np.array([False, True, True, True]))
    assert selected.flat.tolist() == [2, 3, 4, 5]
    assert selected.offsets.tolist() == [0, 0, 3, 4]


def test_a_line_with_the_sign_of_a_space_is_encoded_whole() -> None:
    tokenizer = train_tokenizer(sentences(200), tokenizer_config(normalization="identity"))
    lines = ["a▁ a", "▁ a", "▁", "house tree"]
    by_words = [id for word in lines[0].split() for id in tokenizer.encode(word)]
    assert tokenizer.encode(lines[0]) != by_words  # so encoding words would be wrong
    assert_same(LineEncoder(tokenizer), tokenizer, lines)


def test_rare_words_are_forgotten_and_cut_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "_MAX_CACHED_WORDS", 40)
    encoder = LineEncoder(tokenizer)
    for seed in range(6):
        lines = ["the house", *hostile_lines(50, seed), "the house"]
        assert_same(encoder, tokenizer, lines)
        num_words = len(set(" ".join(lines).split(" "))) + 1  # and the end of a line
        assert len(encoder._ids_by_word) <= 20 + num_words
        assert {"the", "house"} <= encoder._ids_by_word.keys()
    cut: list[str] = []

    def record(texts: list[str], num_threads: int) -> list[list[int]]:
        cut.extend(texts)
        return [[] for _ in texts]

    monkeypatch.setattr(tokenizer, "encode_batch", record)
    encoder.encode(["the house", "house the"])  # recent words are not cut again
    assert cut == []


def test_models_that_cannot_encode_words_one_by_one_encode_lines() -> None:
    """Unigram models round their sums; the others have pieces across a space, or keep spaces."""
    config = tokenizer_config(type=TokenizerType.unigram, vocab_size=285)
    tokenizers = [train_tokenizer(sentences(200), config)]
    for option in ({"split_by_whitespace": False}, {"remove_extra_whitespaces": False}):
        model = train_sentencepiece(vocab_size=330, byte_fallback=True, pad_id=3, **option)
        tokenizers.append(Tokenizer(model))
    for tokenizer in tokenizers:
        assert not cuts_at_spaces(tokenizer)
        assert_same(LineEncoder(tokenizer), tokenizer, hostile_lines(50, 0))
