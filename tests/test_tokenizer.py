"""Tokenizers, trained or taken over from other projects: text never becomes a control symbol, every
character survives, ids stay, and errors say what to change.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tiny import sentences, tokenizer_config, train_sentencepiece

from nmt.config import CorpusConfig, DataConfig, PreprocessConfig, TokenizerConfig, TokenizerType
from nmt.data.languages import LanguagePair, find_directions
from nmt.data.tokenizer import (
    MappedTokenizer,
    Tokenizer,
    Vocabulary,
    find_tokenizers,
    load_tokenizers,
    save_tokenizers,
)
from nmt.data.vocabulary import (
    load_with_symbols,
    open_tokenizers,
    train_tokenizer,
    train_tokenizers,
)
from nmt.errors import ConfigError, DataError, ModelError
from nmt.search.constraints import forbidden_ids

SUBWORD_TYPES = (TokenizerType.bpe, TokenizerType.unigram)
TYPED = ["<s> </s> <pad> <unk> ▁", "</s>", "a</s>b", "<s>", "<pad><pad>", "<0x0A>"]
RARE = ["😀 👩‍👩‍👧", "漢字 かな", "ᚠᚢᚦ", "𓀀𓁐", "Ωμέγα", "x́", "ﷺ", "🇩🇪"]


@pytest.mark.parametrize("separate", [False, True])
def test_a_vocabulary_is_rounded_up_with_ids_of_no_text(
    separate: bool, tokenizer: Tokenizer
) -> None:
    settings = TokenizerConfig(vocab_size=301, separate=separate, vocab_multiple=64)
    padded = train_tokenizers(PreprocessConfig(tokenizer=settings), lambda side: sentences(60))
    settings = TokenizerConfig(vocab_size=301, separate=separate)
    exact = train_tokenizers(PreprocessConfig(tokenizer=settings), lambda side: sentences(60))
    for side in (padded.src, padded.tgt):
        assert (side.vocab_size, side.used_size) == (320, 301)
        assert side.unused_ids == list(range(301, 320))
        assert side.decode(side.unused_ids) == ""
        assert side.encode("<unused 301>") == exact.src.encode("<unused 301>")
        assert forbidden_ids(side) == [side.pad_id, side.bos_id, *range(301, 320)]
    assert padded.tgt.encode_batch(sentences(9)) == exact.tgt.encode_batch(sentences(9))
    assert (tokenizer.unused_ids, tokenizer.used_size) == ([], tokenizer.vocab_size)


@pytest.mark.parametrize("separate", [False, True])
def test_reserved_symbols_are_single_pieces_and_change_no_text(separate: bool) -> None:
    tokenizers = []
    for settings in (
        TokenizerConfig(vocab_size=303, separate=separate, reserved=3),
        TokenizerConfig(vocab_size=300, separate=separate),
    ):
        config = PreprocessConfig(tokenizer=settings)
        tokenizers.append(train_tokenizers(config, lambda side: sentences(60)))
    with_reserved, without = tokenizers
    for side in ("src", "tgt"):
        tokenizer = getattr(with_reserved, side)
        plain = getattr(without, side)
        for number in range(3):
            symbol = f"<reserved{number}>"
            id = tokenizer.all_pieces().index(symbol)
            assert tokenizer.encode(f"{symbol} the tree").count(id) == 1
        for text in sentences(20, seed=4):
            pieces = tokenizer.pieces(tokenizer.encode(text))
            assert pieces == plain.pieces(plain.encode(text))


def test_control_symbols_typed_as_text_stay_text(tokenizer: Tokenizer) -> None:
    training = ["<s> the </s> tree <pad> <unk>"] * 50 + sentences(100)
    for trained in (tokenizer, train_tokenizer(training, tokenizer_config())):
        for text in TYPED:
            (in_batch,) = trained.encode_batch([text], num_threads=1)
            for ids in (trained.encode(text), in_batch, trained.encode(f"the {text} tree")):
                assert ids, text
                assert not set(ids) & set(trained.control_ids), text
            assert trained.decode(trained.encode(text)) == text.replace("▁", " ").strip()


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
    assert tokenizer.encode_batch(texts, num_threads=2) == list(map(tokenizer.encode, texts))
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.encode("") == tokenizer.encode("  ") == []
    with pytest.raises(DataError, match=r"text 'bad\\ud800' has half .* at character 3"):
        tokenizer.encode_batch(["fine", "bad\ud800"])


def test_control_symbols_and_line_breaks_vanish_from_decoded_text(tokenizer: Tokenizer) -> None:
    framed = [tokenizer.bos_id, *tokenizer.encode("a"), tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(framed) == "a"
    pieces = tokenizer.all_pieces()
    for value in range(256):
        text = tokenizer.decode([*framed, pieces.index(f"<0x{value:02X}>"), *framed])
        assert not set(text) & set("\r\n")
        assert value not in (10, 13) or text.split() == ["a", "a"]


# --- training


def test_a_text_begins_with_its_language_or_the_one_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    names = [*tokenizer.all_pieces(), "__en__", "__de__", "__fr__"]
    en, de, fr = range(tokenizer.vocab_size, len(names))
    vocabulary = Vocabulary(names, *tokenizer.control_ids, src_prefix=[en], tgt_prefix=[de])
    mapped = MappedTokenizer(tokenizer.model, vocabulary, [en])
    ids = tokenizer.encode("the tree")
    encoded = mapped.encode_batch(["the tree", "__fr__ the tree", "__fr__", ""])
    assert encoded == [[en, *ids], [fr, *ids], [fr], []]
    assert mapped.decode([fr, *ids]) == "the tree"
    # without tags, as in the vocabulary
    first, *directions = find_directions([], "en", "de", mapped)
    assert first == LanguagePair("en", "de")
    assert len(set(directions)) == 6
    assert LanguagePair("fr", "en", "__fr__", "__en__") in directions


def test_only_a_complete_tag_is_encoded_as_one_piece(tokenizer: Tokenizer) -> None:
    names = [*tokenizer.all_pieces(), ">>fra<<", ">"]
    tag_id, bracket_id = range(tokenizer.vocab_size, len(names))
    mapped = MappedTokenizer(tokenizer.model, Vocabulary(names, *tokenizer.control_ids), [])
    assert mapped.encode(">>fra<< the tree") == [tag_id, *tokenizer.encode("the tree")]
    for text in (">>", ">> the tree", ">>fra the tree", ">>deu<< the tree"):
        ids = mapped.encode(text)
        assert not {tag_id, bracket_id} & set(ids), text
        assert len(ids) == len(tokenizer.encode(text)), text


def test_the_error_for_too_large_a_vocabulary_names_the_largest_that_works() -> None:
    for kind in SUBWORD_TYPES:
        config = tokenizer_config(type=kind, vocab_size=9000)
        with pytest.raises(ConfigError, match=r"vocab_size=9000 is too large") as caught:
            train_tokenizer(corpus(), config)
        assert "\n" not in str(caught.value)
        largest = int(re.findall(r"vocab_size=(\d+)", str(caught.value))[-1])
        config = tokenizer_config(type=kind, vocab_size=largest)
        assert train_tokenizer(corpus(), config).vocab_size == largest
        with pytest.raises(ConfigError, match=f"largest possible is {largest}"):
            train_tokenizer(corpus(), tokenizer_config(type=kind, vocab_size=largest + 1))


def test_the_default_vocabulary_fits_the_text(caplog: pytest.LogCaptureFixture) -> None:
    lines = {"src": corpus(), "tgt": corpus()}
    config = PreprocessConfig(tokenizer=TokenizerConfig())
    with caplog.at_level(logging.INFO):
        size = train_tokenizers(config, lines.__getitem__).tgt.vocab_size
    with pytest.raises(ConfigError, match=f"the largest possible is {size}:"):
        train_tokenizer(corpus() * 2, tokenizer_config(vocab_size=37_000, type=TokenizerType.bpe))
    message = f"too small for 37000 pieces; training again with tokenizer.vocab_size={size}"
    assert message in caplog.text
    draw = random.Random(1)
    many_words = ["".join(draw.choices("abcdefgh", k=9)) for _ in range(4000)]
    texts: dict[str, list[str]] = {"src": many_words, "tgt": []}
    assert train_tokenizers(config, texts.__getitem__).tgt.vocab_size == 8000
    too_large = PreprocessConfig(tokenizer=TokenizerConfig(vocab_size=37_000))
    with pytest.raises(ConfigError, match="vocab_size=37000 is too large"):
        train_tokenizers(too_large, lines.__getitem__)


def test_the_error_for_too_small_a_vocabulary_names_a_size_that_works() -> None:
    letters = "".join(map(chr, range(0x4E00, 0x4E64)))
    alphabet = [" ".join(letters)] * 90
    with pytest.raises(ConfigError, match=r"vocab_size=300 is too small") as caught:
        train_tokenizer(alphabet, tokenizer_config(vocab_size=300))
    assert "\n" not in str(caught.value)
    match = re.search(r"set tokenizer.vocab_size=(\d+) or more", str(caught.value))
    assert match
    assert train_tokenizer(alphabet, tokenizer_config(vocab_size=int(match[1])))
    symbols = [f"<{number}>" for number in range(200)]
    with pytest.raises(ConfigError, match=r"too small .* set tokenizer.vocab_size=(\d+) or more"):
        train_tokenizer(sentences(200), tokenizer_config(vocab_size=300), symbols)
    with pytest.raises(DataError, match="cannot be trained on this corpus: ") as no_text:
        train_tokenizer([], tokenizer_config())
    assert "\n" not in str(no_text.value)


def test_training_is_a_function_of_the_corpus_alone_on_any_number_of_processors() -> None:
    text = corpus()
    for kind in SUBWORD_TYPES:
        config = tokenizer_config(type=kind, vocab_size=320)
        alone = train_tokenizer(text, config).model
        with ThreadPoolExecutor(3) as pool:  # which fight for processors
            models = pool.map(lambda c: train_tokenizer(iter(text), c).model, [config] * 3)
            assert set(models) == {alone}, kind
        assert train_tokenizer(text[500:], config).model != alone, kind
        if kind is TokenizerType.unigram and hasattr(os, "sched_setaffinity"):
            all_of_them = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {min(all_of_them)})
            try:
                assert train_tokenizer(text, config).model == alone
            finally:
                os.sched_setaffinity(0, all_of_them)


def test_lines_too_long_to_train_on_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        long = ["ü " * 21_845, "ü " * 21_845 + "u", "ü " * 21_846]
        train_tokenizer([*sentences(200), *long], tokenizer_config())
    assert "not trained on 1 of 203 sentences, which have more than 65536 bytes" in caplog.text
    caplog.clear()
    train_tokenizer(sentences(200), tokenizer_config())
    assert not caplog.text


# --- choices


def corpus() -> list[str]:
    """Write sentences of 400 made-up words, some frequent and some rare."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 8))) for _ in range(400)]
    lines = []
    for _ in range(1000):
        ranks = [int(400 * draw.random() ** 3) for _ in range(6)]
        lines.append(" ".join(map(words.__getitem__, ranks)))
    return lines


def test_every_kind_of_model_gives_its_own_text_back_normalized_by_its_rule() -> None:
    for kind, byte_fallback in itertools.product(SUBWORD_TYPES, (True, False)):
        config = tokenizer_config(type=kind, byte_fallback=byte_fallback, vocab_size=300)
        tokenizer = train_tokenizer(corpus(), config)
        assert tokenizer.vocab_size == 300
        for text in corpus()[:20]:
            assert tokenizer.decode(tokenizer.encode(text)) == text, (kind, byte_fallback)
        assert len(tokenizer.byte_ids) == 256 * byte_fallback
        assert (tokenizer.unk_id in tokenizer.encode("abc ω")) is not byte_fallback
    rules = {"identity": "ﬁn Ａ", "nmt_nfkc": "fin A", "nfkc": "fin A", "nfkc_cf": "fin a"}
    for rule, text in rules.items():
        tokenizer = train_tokenizer(sentences(200), tokenizer_config(normalization=rule))
        assert tokenizer.decode(tokenizer.encode("ﬁn Ａ")) == text, rule


# --- symbols


SYMBOLS = ["{url}", "<2de>", "a,b", 'q"u', "ﬁx", "'", "日本", "|||", "NUMBER", "\\n"]


def test_symbols_are_never_cut_nor_rewritten(tmp_path: Path) -> None:
    text = [*corpus(), *(f"abc{symbol} {symbol}def" for symbol in SYMBOLS)]
    tokenizers = [adopt(tmp_path, foreign(byte_fallback=True), [*SYMBOLS, "{url}"])]
    for kind in SUBWORD_TYPES:
        config = tokenizer_config(type=kind, vocab_size=320, normalization="nfkc_cf")
        tokenizers.append(train_tokenizer(text, config, SYMBOLS))
    arounds = ("{}", "ab{}cd", "{0}{0}", "see {}.", "{} <s> {}")
    for tokenizer, symbol, around in itertools.product(tokenizers, SYMBOLS, arounds):
        sentence = around.format(symbol, symbol)
        pieces = tokenizer.pieces(tokenizer.encode(sentence))
        assert pieces.count(symbol) == sentence.count(symbol), sentence
        assert tokenizer.decode(tokenizer.encode(sentence)) == sentence
    for tokenizer in tokenizers:
        mixed = tokenizer.pieces(tokenizer.encode("FIX NUMBER number"))
        assert set(mixed) & set(SYMBOLS) == {"NUMBER"}
        assert mixed.count("NUMBER") == 1


def test_invalid_symbols_are_refused(tmp_path: Path) -> None:
    for symbol in ("", "a b", "a\u00a0b", "▁x", "<s>", "<0x0A>", "<unk>", "\0"):
        with pytest.raises(ConfigError, match=r"tokenizer\.symbols"):
            TokenizerConfig(symbols=["{url}", symbol])
        with pytest.raises(ConfigError, match="src_tag"):
            CorpusConfig(src_tag=symbol)
    assert TokenizerConfig(symbols=["{url}", "<s", "<0x0a>"])
    for symbol in ("ee", "e", "▁the", "<s>", "<unk>"):  # which mean something else already
        with pytest.raises(ConfigError, match=r"cannot be a symbol of .*foreign") as caught:
            adopt(tmp_path, foreign(), [symbol])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("separate", [True, False])
def test_tags_of_corpora_are_symbols_of_their_side(separate: bool) -> None:
    corpora = {
        "news": CorpusConfig(src=["a"], tgt=["b"], src_tag="<2de>"),
        "web": CorpusConfig(src=["c"], tgt=["d"], src_tag="<2de>", tgt_tag="<web>"),
    }
    settings = tokenizer_config(separate=separate, symbols=["{url}"], vocab_size=300)
    config = PreprocessConfig(data=DataConfig(corpora=corpora), tokenizer=settings)
    src_lines = corpus()
    tgt_lines = sentences(200)
    lines = {"src": src_lines, "tgt": tgt_lines}
    pair = train_tokenizers(config, lines.__getitem__)
    symbols = ["{url}", "<2de>", "<web>"]
    src_symbols = ["{url}", "<2de>"] if separate else symbols
    tgt_symbols = ["{url}", "<web>"] if separate else symbols
    for side, side_symbols in ((pair.src, src_symbols), (pair.tgt, tgt_symbols)):
        for symbol in symbols:
            pieces = side.pieces(side.encode(f"a{symbol}b"))
            assert (symbol in pieces) == (symbol in side_symbols)
    assert (pair.src.model == pair.tgt.model) is not separate
    if separate:  # each has only its own side
        assert pair.src.model == train_tokenizer(src_lines, settings, src_symbols).model
        assert pair.tgt.model == train_tokenizer(tgt_lines, settings, tgt_symbols).model


# --- models of other people

KINDS: dict[str, dict[str, Any]] = {
    "SentencePiece's own ids": {},
    "T5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "Gemma": {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "byte_fallback": True},
    "nothing but unknown": {"bos_id": -1, "eos_id": -1},
    "unigram": {"model_type": "unigram", "vocab_size": 30},
    "characters": {"model_type": "char", "vocab_size": 22},
    "words": {"model_type": "word", "vocab_size": 14},
    "padding typed as text": {"user_defined_symbols": ["<pad>", "{url}"]},
    "other names": {"bos_piece": "[BOS]", "eos_piece": "[EOS]", "pad_piece": "[PAD]"},
}


def foreign(**options: Any) -> bytes:
    """Train a model of 70 pieces and 256 bytes, as SentencePiece does by default."""
    num_bytes = 256 if options.get("byte_fallback") else 0
    return train_sentencepiece(**{"vocab_size": 70 + num_bytes, **options})


def adopt(folder: Path, model: bytes, symbols: Sequence[str] = ()) -> Tokenizer:
    """Take over a model through a file."""
    (folder / "foreign.model").write_bytes(model)
    return load_with_symbols(folder / "foreign.model", symbols)


def test_ids_stay_and_what_is_missing_is_added_at_the_end(tmp_path: Path) -> None:
    for kind, options in KINDS.items():
        model = foreign(**options)
        original = sentencepiece.SentencePieceProcessor(model_proto=model)
        tokenizer = adopt(tmp_path, model, ["<2de>"])
        old = list(map(original.id_to_piece, range(original.vocab_size())))
        assert tokenizer.all_pieces()[: len(old)] == old, kind
        ids = [original.pad_id(), original.unk_id(), original.bos_id(), original.eos_id()]
        for old_id, new_id in zip(ids, tokenizer.control_ids, strict=True):
            assert new_id == old_id if old_id >= 0 else new_id > len(old), kind
        assert len(set(tokenizer.control_ids)) == 4, kind
        assert tokenizer.vocab_size == len(old) + 1 + ids.count(-1), kind
        for text in sentences(30, seed=2):
            assert tokenizer.encode(text) == original.encode(text), kind
            assert tokenizer.decode(tokenizer.encode(text)) == text, kind
        pad, unk, bos, eos = tokenizer.control_ids
        for name in ["<pad>", "<s>", "</s>", *tokenizer.pieces([pad, bos, eos])]:  # as text
            assert not {pad, bos, eos} & set(tokenizer.encode(f"the {name} tree {name}")), kind
        framed = [bos, *tokenizer.encode("the tree"), eos, pad, pad]
        assert tokenizer.decode(framed) == "the tree", kind
        assert unk not in framed, kind


def test_the_result_is_a_model_for_every_reader_of_such_files(tmp_path: Path) -> None:
    tokenizer = adopt(tmp_path, foreign(), ["{url}", "<2de>"])
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.model)
    assert Tokenizer.load(tmp_path / "tokenizer.model").sha256 == tokenizer.sha256
    reader = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert reader.pad_id() == 72
    assert reader.is_control(72)
    protobuf = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    content = protobuf.ModelProto.FromString(tokenizer.model)
    assert content.trainer_spec.pad_id == 72
    assert content.trainer_spec.pad_piece == "<pad>"
    assert [(p.piece, p.type) for p in content.pieces[70:]] == [
        ("{url}", 4),
        ("<2de>", 4),
        ("<pad>", 3),
    ]


def test_our_own_model_is_taken_over_byte_for_byte(tmp_path: Path) -> None:
    trained = train_tokenizer(sentences(200), tokenizer_config(), ["{url}"])
    assert adopt(tmp_path, trained.model).model == trained.model
    assert adopt(tmp_path, trained.model, ["{url}"]).model == trained.model  # which it has already
    appended = adopt(tmp_path, foreign(), ["{url}"]).model
    assert adopt(tmp_path, appended, ["{url}"]).model == appended


def test_a_folder_whose_tokenizer_is_another_is_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_tokenizers(tmp_path, tokenizer)
    assert load_tokenizers(tmp_path, tokenizer.sha256).sha256 == tokenizer.sha256
    unrelated = train_tokenizer(sentences(200, seed=1), tokenizer_config())
    with pytest.raises(ModelError, match="has changed since the folder was made"):
        load_tokenizers(tmp_path, unrelated.sha256)


def test_the_tokenizer_of_a_run_is_the_one_of_its_model(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = PreprocessConfig(tokenizer=TokenizerConfig(model=str(tmp_path / "run")))
    with pytest.raises(ModelError, match="run"):
        open_tokenizers(config)
    for name in ("checkpoints/latest", "average"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "tokenizer.model").write_bytes(tokenizer.model)
        assert find_tokenizers(tmp_path / "run") == tmp_path / "run" / name
        assert open_tokenizers(config).src.model == tokenizer.model, name
        assert find_tokenizers(tmp_path / "run" / name) == tmp_path / "run" / name


def test_a_file_that_is_no_model_or_lacks_symbols_is_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "foreign.model"
    for content in (None, b"", b"text", b"\xff" * 99, b'{"model": "bpe"}'):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ModelError, match=str(path)) as caught:
            open_tokenizers(PreprocessConfig(tokenizer=tokenizer_config(model=str(path))))
        assert "\n" not in str(caught.value)
        with pytest.raises(ModelError, match=str(path)):
            Tokenizer.load(path)
    with pytest.raises(ModelError, match=f"{tmp_path} cannot be read: Is a directory"):
        load_with_symbols(tmp_path)
    for kind in ("SentencePiece's own ids", "T5"):
        path.write_bytes(foreign(**KINDS[kind]))
        with pytest.raises(ModelError, match="give it to nmt-preprocess as tokenizer.model"):
            Tokenizer.load(path)


def test_settings_name_models_and_tags(tmp_path: Path) -> None:
    for side, size in (("src", 60), ("tgt", 70)):
        (tmp_path / f"{side}.model").write_bytes(foreign(vocab_size=size))
    names = {"model": str(tmp_path / "src.model"), "tgt_model": str(tmp_path / "tgt.model")}
    data = DataConfig(corpora={"a": CorpusConfig(src=["a"], tgt=["b"], src_tag="<2de>")})
    settings = TokenizerConfig(separate=True, symbols=["{url}"], **names)
    tokenizers = open_tokenizers(PreprocessConfig(data=data, tokenizer=settings))
    assert tokenizers.src.all_pieces()[60:] == ["{url}", "<2de>", "<pad>"]
    assert tokenizers.tgt.all_pieces()[70:] == ["{url}", "<pad>"]
    settings = TokenizerConfig(symbols=["{url}"], model=names["model"])
    joint = open_tokenizers(PreprocessConfig(data=data, tokenizer=settings))
    assert joint.src is joint.tgt
    assert joint.src.model == tokenizers.src.model
