"""Encoding by words: the same ids as SentencePiece gives for whole lines."""

from __future__ import annotations

import io
import itertools
import random

import numpy as np
import pytest
import sentencepiece
from tiny import sentences, tokenizer_config

from nmt.config import TokenizerType
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.preprocess import encode
from nmt.preprocess.encode import Ids, LineEncoder, cuts_at_spaces

# whatever a normaliser may drop, join, split, or take for a space; and spaces themselves
ODD = "\u00a0\u3000\u2009\u200b\u200d\u00ad\u0301\u0308\u00a8\uffe3\u0385\u1fc1\t\x01\x1a\x00"
LETTERS = "ab häüÄZ0.,-'’…①ﬁ½ΩйНあカ한漢😀<s>\\{}" + ODD + "  "


def hostile_lines(count: int, seed: int) -> list[str]:
    """Draw lines in which words and odd characters come again."""
    draw = random.Random(seed)
    known = ["house", "{url}", "<2de>", "</s>", "größer", "", " "]
    lines = ["", " ", "a  b", " a", "a "]
    for _ in range(count):
        odd = ["".join(draw.choices(LETTERS, k=3)) for _ in range(6)]
        parts = draw.choices(known + odd, k=draw.randint(0, 12))
        lines.append(draw.choice([" ", "  ", ""]).join(parts))
    return lines


def assert_same(encoder: LineEncoder, tokenizer: Tokenizer, lines: list[str]) -> None:
    """Compare with SentencePiece line by line."""
    ids = encoder.encode(lines)
    expected = tokenizer.encode_batch(lines, 1)
    assert ids.lengths.tolist() == [len(line) for line in expected]
    parts = np.split(ids.flat, ids.offsets[1:-1])
    for line, part, want in zip(lines, parts, expected, strict=True):
        assert part.tolist() == want, repr(line)


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
    ids = Ids(np.arange(6), np.array([0, 2, 2, 5, 6]))
    some = ids.select(np.array([False, True, True, True]))
    assert (some.flat.tolist(), some.offsets.tolist()) == ([2, 3, 4, 5], [0, 0, 3, 4])


def test_a_line_with_the_sign_of_a_space_is_encoded_whole() -> None:
    tokenizer = train_tokenizer(sentences(200), tokenizer_config(normalization="identity"))
    lines = ["a▁ a", "▁ a", "▁", "house tree"]
    by_words = [id for word in lines[0].split() for id in tokenizer.encode(word)]
    assert tokenizer.encode(lines[0]) != by_words  # so words alone would be wrong
    assert_same(LineEncoder(tokenizer), tokenizer, lines)


def test_rare_words_are_forgotten_and_cut_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "_MAX_CACHED_WORDS", 40)
    encoder = LineEncoder(tokenizer)
    for seed in range(6):
        lines = ["the house", *hostile_lines(50, seed), "the house"]
        assert_same(encoder, tokenizer, lines)
        of_these = len({word for line in lines for word in line.split(" ")}) + 1
        assert len(encoder._words) <= 20 + of_these
        assert {"the", "house"} <= encoder._words.keys()
    cut = []
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts, _: cut.extend(texts) or [])
    encoder.encode(["the house", "house the"])  # used last: not cut again
    assert cut == []


def test_models_whose_words_do_not_stand_alone_encode_whole_lines() -> None:
    """Unigram models, whose sums round; models with a piece over a space or that keep spaces."""
    config = tokenizer_config(type=TokenizerType.unigram, vocab_size=285)
    tokenizers = [train_tokenizer(sentences(200), config)]
    for option in ({"split_by_whitespace": False}, {"remove_extra_whitespaces": False}):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences(200)),
            model_writer=model,
            model_type="bpe",
            vocab_size=330,
            byte_fallback=True,
            pad_id=3,
            minloglevel=2,
            **option,
        )
        tokenizers.append(Tokenizer(model.getvalue()))
    for tokenizer in tokenizers:
        assert not cuts_at_spaces(tokenizer)
        assert_same(LineEncoder(tokenizer), tokenizer, hostile_lines(50, 0))
