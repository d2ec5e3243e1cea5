"""SentencePiece models of other people: their ids stay, what they lack is added, or a line says why
they cannot be used.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from conftest import sentences, tokenizer_config

from nmt.config import CorpusConfig, DataConfig, PreprocessConfig, TokenizerConfig
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import adopt_tokenizer, open_tokenizers, train_tokenizer
from nmt.errors import ConfigError, ModelError

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
    """Train a model as SentencePiece does by default."""
    model = io.BytesIO()
    settings = {"model_type": "bpe", "vocab_size": 70, "minloglevel": 2, **options}
    if settings.get("byte_fallback"):
        settings["vocab_size"] += 256
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(200)), model_writer=model, **settings
    )
    return model.getvalue()


def adopt(folder: Path, model: bytes, *symbols: str) -> Tokenizer:
    """Take over a model through a file."""
    (folder / "foreign.model").write_bytes(model)
    return adopt_tokenizer(folder / "foreign.model", symbols)


def test_ids_stay_and_what_is_missing_is_added_at_the_end(tmp_path: Path) -> None:
    for kind, options in KINDS.items():
        model = foreign(**options)
        before = sentencepiece.SentencePieceProcessor(model_proto=model)
        tokenizer = adopt(tmp_path, model, "<2de>")
        old = [before.id_to_piece(i) for i in range(before.vocab_size())]
        assert tokenizer.all_pieces()[: len(old)] == old, kind
        ids = [before.pad_id(), before.unk_id(), before.bos_id(), before.eos_id()]
        for was, now in zip(ids, tokenizer.control_ids, strict=True):
            assert now == was if was >= 0 else now > len(old), kind
        assert len(set(tokenizer.control_ids)) == 4, kind
        assert tokenizer.vocab_size == len(old) + 1 + sum(was < 0 for was in ids), kind
        for text in sentences(30, seed=2):
            assert tokenizer.encode(text) == before.encode(text), kind
            assert tokenizer.decode(tokenizer.encode(text)) == text, kind


def test_typed_control_symbols_stay_text(tmp_path: Path) -> None:
    for kind, options in KINDS.items():
        tokenizer = adopt(tmp_path, foreign(**options))
        pad, unk, bos, eos = tokenizer.control_ids
        for name in ["<pad>", "<s>", "</s>", *tokenizer.pieces([pad, bos, eos])]:
            ids = tokenizer.encode(f"the {name} tree {name}")
            assert not {pad, bos, eos} & set(ids), (kind, name)
        framed = [bos, *tokenizer.encode("the tree"), eos, pad, pad]
        assert tokenizer.decode(framed) == "the tree", kind
        assert unk not in framed, kind


def test_the_result_is_a_model_for_every_reader_of_such_files(tmp_path: Path) -> None:
    tokenizer = adopt(tmp_path, foreign(), "{url}", "<2de>")
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


def test_symbols_that_are_added_are_never_cut(tmp_path: Path) -> None:
    tokenizer = adopt(tmp_path, foreign(byte_fallback=True), "{url}", "<2de>", "ﬁ", "{url}")
    for text in ("{url}", "a{url}b", "<2de> the tree", "<2de>{url}ﬁ"):
        pieces = tokenizer.pieces(tokenizer.encode(text))
        assert sum(map(pieces.count, ("{url}", "<2de>", "ﬁ"))) == sum(
            map(text.count, ("{url}", "<2de>", "ﬁ"))
        )
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_our_own_model_is_taken_over_byte_for_byte(tmp_path: Path) -> None:
    own = train_tokenizer(sentences(200), tokenizer_config(), ["{url}"])
    assert adopt(tmp_path, own.model).model == own.model
    assert adopt(tmp_path, own.model, "{url}").model == own.model  # which it has already
    again = adopt(tmp_path, foreign(), "{url}").model
    assert adopt(tmp_path, again, "{url}").model == again


@pytest.mark.parametrize("symbol", ["ee", "e", "▁the", "<s>", "<unk>"])
def test_a_piece_that_means_something_else_is_no_symbol(symbol: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be a symbol of tokenizer\.model=") as caught:
        adopt(tmp_path, foreign(), symbol)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"text", b"\xff" * 99, b'{"model": "bpe"}'])
def test_a_file_that_is_no_model_is_refused_in_a_line(
    content: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "foreign.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)) as caught:
        open_tokenizers(PreprocessConfig(tokenizer=tokenizer_config(model=str(path))))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=f"tokenizer.model={tmp_path}: Is a directory"):
        adopt_tokenizer(tmp_path)


def test_a_model_that_lacks_symbols_is_refused_in_a_data_folder(tmp_path: Path) -> None:
    for kind in ("SentencePiece's own ids", "T5"):
        (tmp_path / "tokenizer.model").write_bytes(foreign(**KINDS[kind]))
        with pytest.raises(ModelError, match="give it to nmt-preprocess as tokenizer.model"):
            Tokenizer.load(tmp_path / "tokenizer.model")


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
