"""Train the SentencePiece models of a data folder, or adopt existing ones.

Training is deterministic: the same text in the same order gives the same bytes.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from nmt.config import PreprocessConfig, TokenizerConfig, resolve
from nmt.data.languages import SEPARATOR, corpus_direction
from nmt.data.tokenizer import (
    Tokenizer,
    TokenizerPair,
    Tokenizers,
    load_tokenizers,
    read_model,
)
from nmt.errors import ConfigError, DataError, NmtError

log = logging.getLogger(__name__)
ModelProto: Any = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
PAD, UNK, BOS, EOS = range(4)  # for training; elsewhere they are read from the model
_MAX_SENTENCE_BYTES = 1 << 16
# fixed: the model stores this number, and the results of unigram training depend on it
_NUM_THREADS = 16
_TOO_LARGE = re.compile(r"Vocabulary size too high \(\d+\).*?value <= (\d+)")
_TOO_SMALL = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")
_CONTROL_NAMES = {"pad": "<pad>", "bos": "<s>", "eos": "</s>"}
_Piece = ModelProto.SentencePiece


def train_tokenizers(
    config: PreprocessConfig, sources: Iterable[str], targets: Iterable[str]
) -> Tokenizers:
    """Train one model on both sides of a sample, or with `tokenizer.separate` one on each side.

    The tags of the corpora become symbols. Raises the errors of `train_tokenizer`.
    """
    src_symbols, tgt_symbols = _symbols(config)
    if not config.tokenizer.separate:
        sentences = chain(sources, targets)
        return train_tokenizer(sentences, config.tokenizer, src_symbols + tgt_symbols)
    return TokenizerPair(
        train_tokenizer(sources, config.tokenizer, src_symbols),
        train_tokenizer(targets, config.tokenizer, tgt_symbols),
    )


def open_tokenizers(config: PreprocessConfig) -> Tokenizers:
    """Adopt the models that `tokenizer.model` and `tokenizer.tgt_model` name.

    The tokenizers of a model folder stay unchanged; see `adopt_tokenizer` for files.
    """
    src_symbols, tgt_symbols = _symbols(config)
    assert config.tokenizer.model is not None
    src_path = resolve(config.tokenizer.model)
    if src_path.is_dir():
        return _open_model_folder(config, src_path)
    if config.tokenizer.tgt_model is None:
        return adopt_tokenizer(src_path, src_symbols + tgt_symbols)
    tgt_path = resolve(config.tokenizer.tgt_model)
    src = adopt_tokenizer(src_path, src_symbols)
    tgt = adopt_tokenizer(tgt_path, tgt_symbols)
    src_names = " ".join(src.pieces(src.control_ids))
    tgt_names = " ".join(tgt.pieces(tgt.control_ids))
    if src_names != tgt_names:
        raise ConfigError(
            f"{src_path} calls its control symbols {src_names}, {tgt_path} {tgt_names}; "
            "choose two models with the same names"
        )
    if src.control_ids != tgt.control_ids:
        log.warning("the control symbols of the models differ in id: no export to huggingface")
    return TokenizerPair(src, tgt)


def _open_model_folder(config: PreprocessConfig, folder: Path) -> Tokenizers:
    """Load the tokenizers of a model folder, which must have all symbols of the settings."""
    tokenizers = load_tokenizers(folder)
    if config.tokenizer.tgt_model is not None:
        raise ConfigError(
            f"tokenizer.model={folder} is a model folder with the tokenizers of both sides; leave "
            "out tokenizer.tgt_model and tokenizer.separate"
        )
    src_symbols, tgt_symbols = _symbols(config)
    missing = set(src_symbols) - set(tokenizers.src.all_pieces())
    missing |= set(tgt_symbols) - set(tokenizers.tgt.all_pieces())
    if missing:
        raise ConfigError(
            f"tokenizer.model={folder} has no piece {min(missing)}, and a model's "
            "vocabulary cannot grow; leave the symbol or tag out"
        )
    return tokenizers


def _symbols(config: PreprocessConfig) -> tuple[list[str], list[str]]:
    """Return the symbols of source and target.

    These are the symbols in the settings, the separator of lines if pairs have a context, and the
    tags of the corpora.
    """
    symbols = list(config.tokenizer.symbols)
    if config.data.context > 0:
        symbols.append(SEPARATOR)
    directions = [corpus_direction(config.data, name) for name in config.data.corpora]
    src_tags = [direction.src_tag for direction in directions if direction.src_tag]
    tgt_tags = [direction.tgt_tag for direction in directions if direction.tgt_tag]
    return symbols + src_tags, symbols + tgt_tags


def train_tokenizer(
    sentences: Iterable[str], config: TokenizerConfig, symbols: Sequence[str] = ()
) -> Tokenizer:
    """Train one model on all `sentences`; `symbols` are pieces that are never divided.

    Raises a `ConfigError` if the corpus is too small for the vocabulary size, with the largest
    possible size, and a `DataError` for a corpus without text.
    """
    model = io.BytesIO()
    num_read = 0
    num_long = 0

    def counted() -> Iterator[str]:
        nonlocal num_read, num_long
        for sentence in sentences:
            num_read += 1
            if len(sentence) * 4 > _MAX_SENTENCE_BYTES:  # no character has more than 4 bytes
                num_long += len(sentence.encode("utf-8")) > _MAX_SENTENCE_BYTES
            yield sentence

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=counted(),
            model_writer=model,
            model_type=config.type.value,
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            normalization_rule_name=config.normalization,
            byte_fallback=config.byte_fallback,
            user_defined_symbols=list(dict.fromkeys(symbols)),
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            input_sentence_size=0,  # all: the caller has drawn the sample
            max_sentence_length=_MAX_SENTENCE_BYTES,
            num_threads=_NUM_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explain_failure(" ".join(str(error).split()), config.vocab_size) from None
    if num_long:
        log.warning(
            "the tokenizer was trained without %d of %d sentences, longer than %d bytes",
            num_long,
            num_read,
            _MAX_SENTENCE_BYTES,
        )
    return Tokenizer(model.getvalue())


def _explain_failure(message: str, vocab_size: int) -> NmtError:
    """Translate an error of SentencePiece's trainer."""
    key = f"tokenizer.vocab_size={vocab_size}"
    if match := _TOO_LARGE.search(message):
        return ConfigError(
            f"{key} is too large for this corpus; the largest possible is {match[1]}: "
            f"set tokenizer.vocab_size={match[1]} or less"
        )
    if match := _TOO_SMALL.search(message):
        return ConfigError(
            f"{key} is too small for the characters of this corpus; "
            f"set it to {match[1]} or more, or tokenizer.character_coverage below 1"
        )
    return DataError(f"the tokenizer cannot be trained on this corpus: {message}")


def adopt_tokenizer(path: Path, symbols: Sequence[str] = ()) -> Tokenizer:
    """Load the SentencePiece model at `path`, made by any tool; append missing control symbols and
    `symbols` to its pieces.

    No id changes, and text without a symbol is segmented as before. Raises a `ModelError` for an
    invalid file, and a `ConfigError` for a symbol that the model has as an ordinary piece.
    """
    model = read_model(path)
    tokenizer = Tokenizer(model)
    pieces = set(tokenizer.all_pieces())
    never_divided = {p.piece for p in read_proto(model).pieces if p.type == _Piece.USER_DEFINED}
    added: list[str] = []
    # Serialized messages merge when they are concatenated: lists grow, other values are replaced.
    # So the bytes of the model itself do not change.
    for symbol in dict.fromkeys(symbols):
        if symbol not in pieces:
            model += _serialize_piece(symbol, _Piece.USER_DEFINED)
            added.append(symbol)
        elif symbol not in never_divided:
            raise ConfigError(
                f"{symbol} cannot be a symbol of {path}, which has it as an ordinary or control "
                "piece; choose another name for the symbol or tag"
            )
    for role, name in _CONTROL_NAMES.items():
        if getattr(tokenizer, f"{role}_id") >= 0:
            continue
        if name in pieces:  # text may be segmented into this piece
            name = f"<nmt:{role}>"
        trainer = ModelProto().trainer_spec
        setattr(trainer, f"{role}_id", tokenizer.vocab_size + len(added))
        setattr(trainer, f"{role}_piece", name)
        model += _serialize_piece(name, _Piece.CONTROL)
        model += ModelProto(trainer_spec=trainer).SerializePartialToString()
        added.append(name)
    if added:
        log.info("%s: added %s to its pieces", path, " ".join(added))
    return Tokenizer(model)


def _serialize_piece(name: str, piece_type: int) -> bytes:
    """Return the bytes that append one piece to a serialized model."""
    piece = _Piece(piece=name, score=0.0, type=piece_type)
    content: bytes = ModelProto(pieces=[piece]).SerializePartialToString()
    return content


def read_proto(model: bytes) -> Any:
    """Parse a SentencePiece model into its protobuf message."""
    return ModelProto.FromString(model)
