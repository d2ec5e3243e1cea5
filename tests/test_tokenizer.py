"""The tokenizer: text never becomes a control symbol, every character survives, sizes explained."""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import sentences, tokenizer_config

from nmt.config import CorpusConfig, DataConfig, PreprocessConfig, TokenizerConfig, TokenizerType
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer, train_tokenizers
from nmt.errors import ConfigError, DataError, ModelError

TYPED = ["<s> </s> <pad> <unk> ▁", "</s>", "a</s>b", "<s>", "<pad><pad>", "<0x0A>"]
RARE = ["😀 👩‍👩‍👧", "漢字 かな", "ᚠᚢᚦ", "𓀀𓁐", "Ωμέγα", "x́", "ﷺ", "🇩🇪"]


def test_control_symbols_typed_as_text_stay_text(tokenizer: Tokenizer) -> None:
    for text in TYPED:
        (in_batch,) = tokenizer.encode_batch([text], num_threads=1)
        for ids in (tokenizer.encode(text), in_batch, tokenizer.encode(f"the {text} tree")):
            assert ids, text
            assert not set(ids) & set(tokenizer.control_ids), text
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ").strip()


def test_control_symbols_in_the_training_text_stay_text() -> None:
    text = ["<s> the </s> tree <pad> <unk>"] * 50 + sentences(100)
    tokenizer = train_tokenizer(text, tokenizer_config())
    ids = tokenizer.encode("<s> the </s> tree <pad> <unk>")
    assert not set(ids) & set(tokenizer.control_ids)
    assert tokenizer.decode(ids) == "<s> the </s> tree <pad> <unk>"


def test_text_comes_back_byte_for_byte_without_an_unknown(tokenizer: Tokenizer) -> None:
    exact = train_tokenizer(sentences(200), tokenizer_config(normalization="identity"))
    for text in [*RARE, *sentences(5, seed=9), "ünïcödé GROß"]:
        assert exact.unk_id not in exact.encode(text), text
        assert exact.decode(exact.encode(text)) == text
    ids = tokenizer.encode("tree 😀 ᚠ")  # emoji survive the default normalization
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids) == "tree 😀 ᚠ"


def test_a_batch_is_encoded_as_its_sentences_are(tokenizer: Tokenizer) -> None:
    texts = [*sentences(20, seed=3), "", "  "]
    assert tokenizer.encode_batch(texts, num_threads=2) == [tokenizer.encode(t) for t in texts]
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.encode("") == tokenizer.encode("  ") == []


def test_decode_never_yields_a_line_break(tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")
    byte_ids = {name: i for i, name in enumerate(tokenizer.pieces(range(tokenizer.vocab_size)))}
    assert tokenizer.decode([a, byte_ids["<0x0A>"], a]).split() == ["a", "a"]
    assert tokenizer.decode([a, byte_ids["<0x0D>"], byte_ids["<0x0A>"], a]).split() == ["a", "a"]
    for value in range(256):
        assert not set(tokenizer.decode([a, byte_ids[f"<0x{value:02X}>"], a])) & set("\r\n")


def test_control_symbols_vanish_from_decoded_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the tree")
    framed = [tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id, tokenizer.pad_id]
    assert tokenizer.decode(framed) == "the tree"


# --- training


def test_a_vocabulary_too_large_names_the_largest_which_then_works() -> None:
    for kind in TokenizerType:
        config = tokenizer_config(type=kind, vocab_size=9000)
        with pytest.raises(ConfigError, match=r"vocab_size=9000 is too large") as caught:
            train_tokenizer(corpus(), config)
        assert "\n" not in str(caught.value)
        largest = int(re.findall(r"vocab_size=(\d+)", str(caught.value))[-1])
        config = tokenizer_config(type=kind, vocab_size=largest)
        assert train_tokenizer(corpus(), config).vocab_size == largest
        with pytest.raises(ConfigError, match=f"largest possible is {largest}"):
            train_tokenizer(corpus(), tokenizer_config(type=kind, vocab_size=largest + 1))


def test_a_vocabulary_too_small_names_what_is_needed_which_then_works() -> None:
    with pytest.raises(ConfigError, match=r"vocab_size=300 is too small") as caught:
        train_tokenizer(alphabet(), tokenizer_config(vocab_size=300))
    assert "\n" not in str(caught.value)
    found = re.search(r"set it to (\d+) or more", str(caught.value))
    assert found
    config = tokenizer_config(vocab_size=int(found[1]))
    assert train_tokenizer(alphabet(), config)
    symbols = [f"<{number}>" for number in range(200)]
    with pytest.raises(ConfigError, match=r"too small .* set it to (\d+) or more"):
        train_tokenizer(sentences(200), tokenizer_config(vocab_size=300), symbols)


def alphabet() -> list[str]:
    """Write sentences of 100 different characters."""
    letters = "".join(map(chr, range(0x4E00, 0x4E64)))
    return [letters[i : i + 10] for i in range(90)]


def test_a_corpus_without_text_is_a_data_error() -> None:
    with pytest.raises(DataError) as caught:
        train_tokenizer([], tokenizer_config())
    assert "\n" not in str(caught.value)


def test_training_is_a_function_of_the_corpus_alone() -> None:
    text = corpus()
    for kind in TokenizerType:
        config = tokenizer_config(type=kind, vocab_size=320)
        alone = train_tokenizer(text, config).model
        with ThreadPoolExecutor(3) as pool:  # which fight for processors
            others = pool.map(lambda c: train_tokenizer(iter(text), c).model, [config] * 3)
            assert set(others) == {alone}, kind
        assert train_tokenizer(text[500:], config).model != alone, kind


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no choice of processors here")
def test_training_does_not_depend_on_the_number_of_processors() -> None:
    config = tokenizer_config(type=TokenizerType.unigram, vocab_size=320)
    all_of_them = os.sched_getaffinity(0)
    on_all = train_tokenizer(corpus(), config).model
    os.sched_setaffinity(0, {min(all_of_them)})
    try:
        assert train_tokenizer(corpus(), config).model == on_all
    finally:
        os.sched_setaffinity(0, all_of_them)


def test_lines_too_long_to_train_on_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train_tokenizer([*sentences(200), "ü " * 21_845, "ü " * 21_846], tokenizer_config())
    assert "without 1 of 202 sentences, longer than 65536 bytes" in caplog.text
    caplog.clear()
    train_tokenizer(sentences(200), tokenizer_config())
    assert not caplog.text


# --- choices


def corpus() -> list[str]:
    """Write sentences of 400 made-up words, some frequent and some rare."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 8))) for _ in range(400)]
    ranks = [int(400 * draw.random() ** 3) for _ in range(6000)]
    return [" ".join(words[rank] for rank in ranks[i : i + 6]) for i in range(0, 6000, 6)]


def test_every_kind_of_model_gives_its_own_text_back() -> None:
    for kind, byte_fallback in itertools.product(TokenizerType, (True, False)):
        config = tokenizer_config(type=kind, byte_fallback=byte_fallback, vocab_size=300)
        tokenizer = train_tokenizer(corpus(), config)
        assert tokenizer.vocab_size == 300
        for text in corpus()[:20]:
            assert tokenizer.decode(tokenizer.encode(text)) == text, (kind, byte_fallback)
        assert len(tokenizer.byte_ids) == 256 * byte_fallback
        assert (tokenizer.unk_id in tokenizer.encode("abc ω")) is not byte_fallback


def test_normalization_is_what_the_rule_says() -> None:
    rules = {"identity": "ﬁn Ａ", "nmt_nfkc": "fin A", "nfkc": "fin A", "nfkc_cf": "fin a"}
    for rule, text in rules.items():
        tokenizer = train_tokenizer(sentences(200), tokenizer_config(normalization=rule))
        assert tokenizer.decode(tokenizer.encode("ﬁn Ａ")) == text, rule


# --- symbols


SYMBOLS = ["{url}", "<2de>", "a,b", 'q"u', "ﬁx", "'", "日本", "|||", "NUMBER", "\\n"]


def test_symbols_are_never_cut_nor_rewritten() -> None:
    text = [*corpus(), *(f"abc{symbol} {symbol}def" for symbol in SYMBOLS)]
    for kind in TokenizerType:
        config = tokenizer_config(type=kind, vocab_size=320, normalization="nfkc_cf")
        tokenizer = train_tokenizer(text, config, SYMBOLS)
        for symbol, around in itertools.product(
            SYMBOLS, ("{}", "ab{}cd", "{0}{0}", "see {}.", "{} <s> {}")
        ):
            shown = around.format(symbol, symbol)
            pieces = tokenizer.pieces(tokenizer.encode(shown))
            assert pieces.count(symbol) == shown.count(symbol), shown
            assert tokenizer.decode(tokenizer.encode(shown)) == shown
        mixed = tokenizer.pieces(tokenizer.encode("FIX NUMBER number"))
        assert [piece for piece in mixed if piece in SYMBOLS] == ["NUMBER"]  # others are other text


def test_what_cannot_be_a_symbol_is_refused() -> None:
    for symbol in ("", "a b", "a\u00a0b", "▁x", "<s>", "<0x0A>", "<unk>", "\0"):
        with pytest.raises(ConfigError, match=r"tokenizer\.symbols"):
            TokenizerConfig(symbols=["{url}", symbol])
        with pytest.raises(ConfigError, match="src_tag"):
            CorpusConfig(src_tag=symbol)
    assert TokenizerConfig(symbols=["{url}", "<s", "<0x0a>"])


@pytest.mark.parametrize("separate", [True, False])
def test_tags_of_corpora_are_symbols_of_their_side(separate: bool) -> None:
    corpora = {
        "news": CorpusConfig(src=["a"], tgt=["b"], src_tag="<2de>"),
        "web": CorpusConfig(src=["c"], tgt=["d"], src_tag="<2de>", tgt_tag="<web>"),
    }
    config = PreprocessConfig(
        data=DataConfig(corpora=corpora),
        tokenizer=tokenizer_config(separate=separate, symbols=["{url}"], vocab_size=300),
    )
    tokenizers = train_tokenizers(config, corpus(), sentences(200))
    found = [[s for s in ("{url}", "<2de>", "<web>") if _is_whole(s, side)] for side in
             (tokenizers.src, tokenizers.tgt)]  # fmt: skip
    everything = ["{url}", "<2de>", "<web>"]
    assert found == ([["{url}", "<2de>"], ["{url}", "<web>"]] if separate else [everything] * 2)
    is_same = tokenizers.src.model == tokenizers.tgt.model
    assert is_same is not separate


def _is_whole(symbol: str, tokenizer: Tokenizer) -> bool:
    return symbol in tokenizer.pieces(tokenizer.encode(f"a{symbol}b"))


def test_separate_models_know_their_own_side_alone() -> None:
    config = PreprocessConfig(tokenizer=tokenizer_config(separate=True, vocab_size=300))
    tokenizers = train_tokenizers(config, iter(corpus()), iter(sentences(200)))
    assert tokenizers.src.model == train_tokenizer(corpus(), config.tokenizer).model
    assert tokenizers.tgt.model == train_tokenizer(sentences(200), config.tokenizer).model


# --- files


def test_a_saved_tokenizer_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.model)
    loaded = Tokenizer.load(tmp_path / "tokenizer.model")
    assert loaded.sha256 == tokenizer.sha256
    assert loaded.encode("the tree") == tokenizer.encode("the tree")


def test_a_file_that_is_no_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    for content in (None, b"", b"text", b"\xff" * 99):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ModelError, match=re.escape(str(path))):
            Tokenizer.load(path)


def test_half_a_surrogate_pair_is_named_by_text_and_character(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="text 1, from 0, has half .* at character 3"):
        tokenizer.encode_batch(["fine", "bad\ud800"])
