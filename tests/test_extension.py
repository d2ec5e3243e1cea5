"""Vocabularies of finished models grow by symbols, languages and pieces of new text."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import exported, random_model, save, short_sentences
from importing import shuffled
from serving import change_config, loaded
from tiny import WORDS, sentences, tiny_model, train_sentencepiece
from torch import Tensor
from toy import TINY, command

from nmt.checkpoint import load_info, load_weights
from nmt.config import (
    ExportFormat,
    Norm,
    Part,
    Positions,
    PreprocessConfig,
    TokenizerConfig,
    TrainConfig,
)
from nmt.data.extension import extend_tokenizers, segment_new_pieces
from nmt.data.tokenizer import (
    MappedTokenizer,
    Tokenizer,
    TokenizerPair,
    Tokenizers,
    Vocabulary,
    load_tokenizers,
    save_tokenizers,
)
from nmt.data.vocabulary import append_symbols, open_tokenizers
from nmt.errors import ConfigError
from nmt.training.initial_weights import load_initial_weights
from nmt.translate.translator import Translator

NEW_WORDS = ["kuća", "kuće", "kući", "zelena", "zeleno", "thehouse", "ქართული", "ქალაქი"]
OLD_TEXT = sentences(60, seed=9)


def new_text(count: int, seed: int = 1) -> list[str]:
    """Draw sentences of words that the tokenizers of the tests split, and of known ones."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(NEW_WORDS + WORDS, k=6)) for _ in range(count)]


def read_new_text(side: str) -> list[str]:
    """Return another new text for each side."""
    return new_text(100, seed=["src", "tgt"].index(side))


def settings(**changes: Any) -> PreprocessConfig:
    return PreprocessConfig(tokenizer=TokenizerConfig(**{"model": "x", "extend": 60, **changes}))


def boundaries(tokenizer: Tokenizer, text: str) -> set[int]:
    """Return where pieces end, in characters."""
    ends: set[int] = set()
    length = 0
    for piece in tokenizer.split(text):
        length += len(piece)
        ends.add(length)
    return ends


def small_model(model_type: str, **options: Any) -> bytes:
    """Train a SentencePiece model with padding on the words of the tests."""
    sizes = {"vocab_size": 330 if options.get("byte_fallback") else 60, "pad_id": 3}
    options = {"model_type": model_type, "hard_vocab_limit": False} | sizes | options
    return train_sentencepiece(sentences(80), num_threads=1, **options)


def languages_model(model_type: str = "bpe") -> TokenizerPair:
    """Make tokenizers as NLLB has them: shuffled ids, unused rows, and languages before texts."""
    model = small_model(model_type)
    ids = shuffled([*Tokenizer(model).all_pieces(), "deu_Latn", "eng_Latn", "fra_Latn"], 3)
    pieces = [*sorted(ids, key=ids.__getitem__), "<unused 63>"]
    names = ("<pad>", "<unk>", "</s>", "</s>")
    controls = dict(zip(("pad_id", "unk_id", "bos_id", "eos_id"), map(ids.get, names), strict=True))
    prefixes = {"src_prefix": [ids["eng_Latn"]], "tgt_prefix": [ids["fra_Latn"]]}
    vocabulary = Vocabulary(pieces, **controls, **prefixes)  # type: ignore[arg-type]
    return TokenizerPair(
        MappedTokenizer(model, vocabulary, vocabulary.src_prefix),
        MappedTokenizer(model, vocabulary, vocabulary.tgt_prefix),
        shares_vocabulary=True,
    )


def test_an_extended_tokenizer_keeps_ids_and_only_joins_pieces() -> None:
    for model_type in ("bpe", "unigram"):
        for is_bytes in (False, True):
            case = model_type, is_bytes
            old = Tokenizer(small_model(model_type, byte_fallback=is_bytes))
            config = settings(symbols=["<2hr>"], vocab_multiple=8)
            new = extend_tokenizers(old, config, read_new_text)
            assert isinstance(new, Tokenizer)
            pieces = new.all_pieces()
            assert pieces[: old.vocab_size] == old.all_pieces(), case
            added = pieces[old.vocab_size : new.used_size]
            assert len(added) <= 61, case
            assert {"<2hr>", "ქ", "▁kuć", "▁kuća"} <= set(added), case
            assert new.vocab_size % 8 == 0
            for text in OLD_TEXT:
                assert new.encode(text) == old.encode(text), (case, text)
            texts = new_text(100, seed=7)
            for text in texts:
                ids = new.encode(f"<2hr> {text}")
                assert new.unk_id not in ids
                assert not set(ids) & set(new.byte_ids)
                assert new.decode(ids) == f"<2hr> {text}", case
                if not is_bytes:  # the pieces of bytes are longer than their characters
                    assert boundaries(new, text) <= boundaries(old, text), (case, text)
            num_old = sum(map(len, old.encode_batch(texts)))
            assert sum(map(len, new.encode_batch(texts))) < 0.6 * num_old, case
            segmentations = segment_new_pieces(old, new)
            assert "<2hr>" not in segmentations
            joined = segmentations["▁thehouse"]
            assert "".join(old.pieces(joined)) == "▁thehouse", case
            assert joined == old.encode("thehouse"), case


def test_the_number_of_pieces_is_a_limit_and_characters_come_first() -> None:
    old = Tokenizer(small_model("unigram"))
    text = [*new_text(100), "ǂ"]

    def extend(**changes: Any) -> list[str]:
        tokenizers = extend_tokenizers(old, settings(**changes), lambda side: text)
        return tokenizers.tgt.all_pieces()[old.vocab_size :]

    assert extend(extend=0, symbols=["{x}"]) == ["{x}"]
    characters = extend(extend=5)
    assert len(characters) == 5
    assert max(map(len, characters)) == 1
    assert "ǂ" in extend()
    assert "ǂ" not in extend(character_coverage=0.999)
    once = extend_tokenizers(old, settings(), {"src": ["zelena kuća"], "tgt": []}.__getitem__)
    assert max(map(len, once.tgt.all_pieces()[old.vocab_size :])) == 1
    words = Tokenizer(train_sentencepiece(sentences(50), model_type="word", vocab_size=14))
    with pytest.raises(ConfigError, match=r"neither bpe nor unigram; set tokenizer.extend=0"):
        extend_tokenizers(words, settings(), lambda side: text)


def test_languages_and_tags_of_imported_models_are_in_the_vocabulary_only() -> None:
    old = languages_model()
    config = settings(symbols=["hrv_Latn", ">>hrv<<", "{x}"], vocab_multiple=16)
    new = extend_tokenizers(old, config, read_new_text)
    assert isinstance(new, TokenizerPair)
    assert new.src.all_pieces() == new.tgt.all_pieces()
    assert new.src.model == new.tgt.model
    assert new.src.all_pieces()[:64] == old.src.all_pieces()
    assert new.src.vocab_size % 16 == 0
    assert {"hrv_Latn", *old.src.language_ids} == set(new.src.language_ids)
    text_pieces = Tokenizer(new.src.model).all_pieces()
    assert "{x}" in text_pieces
    assert not {"hrv_Latn", ">>hrv<<"} & set(text_pieces)
    assert new.src.pieces(new.src.encode("hrv_Latn {x} kuća")) == ["hrv_Latn", "▁", "{x}", "▁kuća"]
    for text in OLD_TEXT:
        assert new.src.encode(text) == old.src.encode(text)
        assert new.tgt.decode(new.tgt.encode(text)) == text


def test_two_models_with_a_common_vocabulary_learn_from_their_own_side() -> None:
    models = {"src": small_model("bpe", vocab_size=30), "tgt": small_model("bpe")}
    names = [Tokenizer(model).all_pieces() for model in models.values()]
    pieces = list(dict.fromkeys([*names[0], *names[1]]))
    vocabulary = Vocabulary(pieces, *map(pieces.index, ("<pad>", "<unk>", "<pad>", "</s>")))
    old = TokenizerPair(
        MappedTokenizer(models["src"], vocabulary, []),
        MappedTokenizer(models["tgt"], vocabulary, []),
        shares_vocabulary=True,
    )
    texts = {"src": ["zelena house"] * 9, "tgt": ["kuća"] * 9}
    house = pieces.index("▁house")  # of the target only
    assert house not in old.src.encode("house")
    new = extend_tokenizers(old, settings(), texts.__getitem__)
    assert new.src.all_pieces() == new.tgt.all_pieces()
    assert len(set(new.src.all_pieces())) == new.src.vocab_size
    assert new.src.encode("house") == [house]
    assert new.src.pieces(new.src.encode("zelena")) == ["▁zelena"]
    assert new.tgt.pieces(new.tgt.encode("kuća")) == ["▁kuća"]
    assert len(new.src.encode("kuća")) > 1
    separate = replace(old, shares_vocabulary=False)
    new = extend_tokenizers(separate, settings(), texts.__getitem__)
    assert "▁zelena" in new.src.all_pieces()
    assert "▁zelena" not in new.tgt.all_pieces()


def test_a_symbol_that_one_side_of_a_common_vocabulary_has_is_added_to_the_other(
    tmp_path: Path,
) -> None:
    models = [append_symbols(small_model("bpe"), ["treehouse"]), small_model("bpe")]
    pieces = [*Tokenizer(models[0]).all_pieces(), ">>hrv<<"]
    vocabulary = Vocabulary(pieces, *map(pieces.index, ("<pad>", "<unk>", "<pad>", "</s>")))
    src, tgt = (MappedTokenizer(model, vocabulary, []) for model in models)
    old = TokenizerPair(src, tgt, shares_vocabulary=True)
    assert "treehouse" not in old.tgt.split("a treehouse tree")
    save_tokenizers(tmp_path, old)
    config = settings(model=str(tmp_path), extend=None, symbols=["treehouse", ">>hrv<<"])
    with pytest.raises(ConfigError, match=r"has no piece treehouse; .* set tokenizer.extend=0"):
        open_tokenizers(config)
    config.tokenizer.extend = 0
    new = extend_tokenizers(open_tokenizers(config), config, lambda side: [])
    assert new.tgt.all_pieces() == pieces
    assert new.src.model == models[0]
    assert new.tgt.pieces(new.tgt.encode("a treehouse tree")).count("treehouse") == 1
    assert new.tgt.decode(new.tgt.encode("a treehouse tree")) == "a treehouse tree"
    save_tokenizers(tmp_path, new)
    tagged = load_tokenizers(tmp_path, removed_tags=["treehouse", ">>hrv<<"]).tgt
    for line in ("treehouse the tree", ">>hrv<< the tree"):
        assert tagged.decode(tagged.encode(line)) == "the tree"


def grow(
    folder: Path, tokenizers: Tokenizers, **changes: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of a model folder, and initial weights of training with `tokenizers`."""
    info = load_info(folder)
    sizes = {"vocab_size": tokenizers.tgt.vocab_size, "src_vocab_size": tokenizers.src_vocab_size}
    fresh = tiny_model(5, **sizes, **vars(info.model)).state_dict()
    config = TrainConfig(init_from=str(folder), model=info.model, **changes)
    return load_weights(folder), load_initial_weights(config, tokenizers, fresh)


def test_new_rows_are_means_of_old_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nmt")
    old = languages_model()
    folder = random_model(tmp_path / "m", old, output_bias=True, tied_output=False)
    config = settings(symbols=["hrv_Latn", "srp_Latn", "{x}"])
    new = extend_tokenizers(old, config, read_new_text)
    weights, new_weights = grow(folder, new, init_rows={"hrv_Latn": "deu_Latn"})
    assert "extends init_from's: " in caplog.text
    old_ids = {piece: i for i, piece in enumerate(old.tgt.all_pieces())}
    new_ids = {piece: i for i, piece in enumerate(new.tgt.all_pieces())}
    languages = list(old.tgt.language_ids.values())
    no_text = {*old.tgt.control_ids, *old.tgt.unused_ids}
    text_ids = [i for i in range(old.tgt.vocab_size) if i not in no_text]
    for name in ("embedding.weight", "output_weight", "output_bias"):
        rows = weights[name]
        new_rows = new_weights[name]
        assert torch.equal(new_rows[: len(rows)], rows), name
        assert torch.equal(new_rows[new_ids["hrv_Latn"]], rows[old_ids["deu_Latn"]]), name
        joined = [old_ids[piece] for piece in Tokenizer(old.tgt.model).split("thehouse")]
        assert len(joined) > 1
        expected = {"▁thehouse": joined, "srp_Latn": languages, "{x}": text_ids, "ქ": text_ids}
        for piece, ids in expected.items():
            torch.testing.assert_close(new_rows[new_ids[piece]], rows[ids].mean(dim=0), msg=piece)
    unchanged = {name: tensor for name, tensor in weights.items() if len(tensor) != len(old_ids)}
    assert all(torch.equal(new_weights[name], tensor) for name, tensor in unchanged.items())
    for init_rows, expected_error in (
        ({"hrv_Lat": "deu_Latn"}, r"init_rows.hrv_Lat: did you mean hrv_Latn"),
        ({"deu_Latn": "eng_Latn"}, r"init_rows.deu_Latn: "),
        ({"hrv_Latn": "xyz_Latn"}, r"init_rows.hrv_Latn=xyz_Latn: init_from has no piece xyz_Latn"),
    ):
        with pytest.raises(ConfigError, match=expected_error):
            grow(folder, new, init_rows=init_rows)
    with pytest.raises(ConfigError, match=r"freeze=\[embeddings\]: \d+ pieces .* stay untrained"):
        grow(folder, new, freeze=[Part.embeddings])
    with pytest.raises(ConfigError, match=r"init_rows: the data has no new pieces"):
        grow(folder, old, init_rows={"hrv_Latn": "deu_Latn"})


NLLB = {"norm": Norm.pre, "positions": Positions.sinusoidal_concat}


@pytest.mark.slow
def test_a_model_like_nllb_grows_by_a_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old = languages_model()
    shape = {**NLLB, "position_offset": old.tgt.pad_id + 1, "d_model": 32}
    folder = random_model(tmp_path / "nllb", old, **shape)
    for name, count in (("a", 400), ("v", 20)):
        Path(f"{name}.en").write_text("\n".join(sentences(count)), encoding="utf-8")
        Path(f"{name}.hr").write_text("\n".join(new_text(count)), encoding="utf-8")
    corpus = "data.corpora.hr"
    text = [f"{corpus}.src=a.en", f"{corpus}.tgt=a.hr", "tokenizer.model=nllb", "data_dir=d"]
    text += [f"{corpus}.valid.src=v.en", f"{corpus}.valid.tgt=v.hr", "num_threads=1"]
    text += [f"{corpus}.src_lang=en", f"{corpus}.tgt_lang=hr"]
    text += [f"{corpus}.src_tag=eng_Latn", f"{corpus}.tgt_tag=hrv_Latn"]
    assert command("preprocess", text) == 2  # a vocabulary without new pieces lacks the tag
    assert command("preprocess", text, "tokenizer.extend=80") == 0
    new = load_tokenizers(tmp_path / "d")
    ids = list(chain.from_iterable(new.tgt.encode_batch(new_text(400))))
    assert ids.count(new.tgt.unk_id) < 0.001 * len(ids)
    ids = list(chain.from_iterable(old.tgt.encode_batch(new_text(400))))
    assert ids.count(old.tgt.unk_id) > 0.1 * len(ids)
    # before training, every old direction translates as before
    _, weights = grow(folder, new, init_rows={"hrv_Latn": "deu_Latn"})
    model = tiny_model(vocab_size=new.tgt.vocab_size, **vars(load_info(folder).model))
    model.load_state_dict(weights)
    old_translator = Translator.load(folder, device="cpu", backend="native")
    grown = Translator.load(save(tmp_path / "grown", model, new), device="cpu", backend="native")
    for pair in old_translator.directions[1:]:
        tags = {"src_tag": pair.src_tag, "tgt_tag": pair.tgt_tag, "loop_guard": False}
        options = {"beam_size": 1, "max_length_a": 0, "max_length_b": 20, **tags}
        assert grown.translate(OLD_TEXT, **options) == old_translator.translate(
            OLD_TEXT, **options
        ), pair
    run = ["init_from=nllb", "data_dir=d", "run_dir=r", "valid_bleu=false", "max_updates=4"]
    run.append("init_rows={hrv_Latn:deu_Latn}")
    assert command("train", [option for option in TINY if "model." not in option], run) == 0
    tuned = Translator.load(tmp_path / "r", device="cpu", backend="native")
    assert tuned.choose_tags(src_lang="en", tgt_lang="hr")[:2] == ("eng_Latn", "hrv_Latn")
    check_exports(tmp_path / "r/checkpoints/latest")


def check_exports(folder: Path) -> None:
    """Compare a model with its exports, in a new and in an old direction."""
    import transformers

    folder = folder.resolve()
    ours = Translator.load(folder, device="cpu", backend="native")
    ctranslate2_folder = exported(folder, ExportFormat.ctranslate2)
    theirs = Translator.load(ctranslate2_folder, device="cpu", backend="ctranslate2")
    hf_folder = exported(folder, ExportFormat.huggingface)
    hf_model = transformers.AutoModelForSeq2SeqLM.from_pretrained(hf_folder)
    tgt = ours.tokenizer.tgt
    lines = [*new_text(6), *OLD_TEXT[:6]]
    for tgt_tag in ("hrv_Latn", "deu_Latn"):
        tags = {"src_tag": "eng_Latn", "tgt_tag": tgt_tag}
        options = {**tags, "beam_size": 1, "loop_guard": False}
        assert theirs.translate(lines, **options) == ours.translate(lines, **options), tgt_tag
        scores = ours.score(lines, lines[::-1], **tags)
        for score, same in zip(scores, theirs.score(lines, lines[::-1], **tags), strict=True):
            assert same.tokens == score.tokens, tgt_tag
            assert same.token_log_probs == pytest.approx(score.token_log_probs, abs=1e-3), tgt_tag
        for line, target_line, score in zip(lines, lines[::-1], scores, strict=True):
            src_ids = [*ours.tokenizer.src.encode(f"eng_Latn {line}"), tgt.eos_id]
            tgt_ids = tgt.encode(f"{tgt_tag} {target_line}")
            with torch.inference_mode():
                logits = hf_model(
                    input_ids=torch.tensor([src_ids]),
                    decoder_input_ids=torch.tensor([[tgt.bos_id, *tgt_ids]]),
                ).logits
            labels = torch.tensor([*tgt_ids, tgt.eos_id])
            log_probs = logits[0].log_softmax(dim=-1).gather(1, labels[:, None])
            assert log_probs[:, 0].tolist() == pytest.approx(score.token_log_probs, abs=1e-3)


@pytest.mark.slow
def test_a_trained_model_translates_as_before_it_grew(
    tmp_path: Path, tokenizer: Tokenizer, trained_models: dict[str, Path]
) -> None:
    folder = trained_models["post-sinusoidal"]
    lines = short_sentences(60)
    new = extend_tokenizers(tokenizer, settings(), read_new_text)
    assert new.tgt.vocab_size > tokenizer.vocab_size + 20
    _, weights = grow(folder, new)
    model = tiny_model(vocab_size=new.tgt.vocab_size, **vars(load_info(folder).model))
    model.load_state_dict(weights)
    old_translator = Translator.load(folder, device="cpu", backend="native")
    grown = Translator.load(save(tmp_path / "grown", model, new), device="cpu", backend="native")
    for beam_size in (1, 4):
        expected = old_translator.translate(lines, beam_size=beam_size)
        assert len(set(expected)) > 30
        assert grown.translate(lines, beam_size=beam_size) == expected, beam_size


def test_a_fine_tuned_model_of_languages_still_has_its_old_directions(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "m", languages_model(), **NLLB)
    direction = {"src_lang": "de", "tgt_lang": "en", "src_tag": "deu_Latn", "tgt_tag": "eng_Latn"}
    change_config(folder, src_lang="de", tgt_lang="en", directions=[direction])
    translator = Translator.load(folder, device="cpu", backend="native")
    assert translator.choose_tags()[:2] == ("deu_Latn", "eng_Latn")
    old = translator.choose_tags(src_lang="eng_Latn", tgt_lang="fra_Latn")
    assert old[:2] == ("eng_Latn", "fra_Latn")
    # a reranker chooses the direction of its reverse model by these languages
    [languages] = translator.find_directions(old)
    assert (languages.src_lang, languages.tgt_lang) == ("eng_Latn", "fra_Latn")
    [languages] = translator.find_directions(translator.choose_tags())
    assert (languages.src_lang, languages.tgt_lang) == ("de", "en")
    with pytest.raises(ConfigError, match="the model translates de to en"):
        translator.choose_tags(tgt_lang="xx")
    pairs = loaded(folder).directions.keys()
    assert {("de", "en"), ("en", "fr"), ("fr", "de")} <= pairs
    # the data folder may name no languages
    change_config(folder, directions=[direction | {"src_lang": "src", "tgt_lang": "tgt"}])
    unnamed = Translator.load(folder, device="cpu", backend="native")
    assert unnamed.choose_tags(src_lang="eng_Latn", tgt_lang="fra_Latn") == old
    assert unnamed.choose_tags(src_lang="xx", tgt_lang="yy")[:2] == ("deu_Latn", "eng_Latn")
