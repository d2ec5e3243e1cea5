"""Makes the tokenizers of a data folder: trains SentencePiece models, or takes over existing ones.

The same text in the same order gives the same bytes, whatever the machine does besides.
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

from nmt.config import PreprocessConfig, TokenizerConfig, resolve
from nmt.data.languages import SEPARATOR, corpus_direction
from nmt.data.tokenizer import (
    SeparateTokenizers,
    Tokenizer,
    Tokenizers,
    load_tokenizers,
    read_model,
)
from nmt.errors import ConfigError, DataError

log = logging.getLogger(__name__)
PAD, UNK, BOS, EOS = range(4)  # for training; elsewhere they are read from the model
_MAX_SENTENCE_BYTES = 1 << 16
# the model holds this number, and unigram's sums depend on it: never the number of processors
_NUM_THREADS = 16
_TOO_LARGE = re.compile(r"Vocabulary size too high \(\d+\).*?value <= (\d+)")
_TOO_SMALL = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")
# sentencepiece_model.proto: types of pieces, the field of trainer settings, and in it those of
# the id and name of each control symbol
_CONTROL, _USER_DEFINED, _TRAINER_SPEC = 3, 4, 2
_CONTROLS = {"pad": (43, 48, "<pad>"), "bos": (41, 46, "<s>"), "eos": (42, 47, "</s>")}


def train_tokenizers(
    config: PreprocessConfig, sources: Iterable[str], targets: Iterable[str]
) -> Tokenizers:
    """Train on a sample of the corpus: one model on both sides, or one on each when separate.

    The tags of the corpora become symbols. Raises what `train_tokenizer` raises.
    """
    src_symbols, tgt_symbols = _symbols(config)
    if not config.tokenizer.separate:
        both = chain(sources, targets)
        return train_tokenizer(both, config.tokenizer, src_symbols + tgt_symbols)
    return SeparateTokenizers(
        train_tokenizer(sources, config.tokenizer, src_symbols),
        train_tokenizer(targets, config.tokenizer, tgt_symbols),
    )


def open_tokenizers(config: PreprocessConfig) -> Tokenizers:
    """Take over the models that `tokenizer.model` (and `tgt_model`) name, see `adopt_tokenizer`; of
    a model folder all that it has, unchanged.
    """
    src_symbols, tgt_symbols = _symbols(config)
    assert config.tokenizer.model is not None
    src_path = resolve(config.tokenizer.model)
    if src_path.is_dir():
        tokenizers = load_tokenizers(src_path)
        if config.tokenizer.tgt_model is not None:
            raise ConfigError(f"tokenizer.tgt_model: {src_path} has both; leave out separate, too")
        missing = {*src_symbols} - {*tokenizers.src.all_pieces()}
        missing |= {*tgt_symbols} - {*tokenizers.tgt.all_pieces()}
        if missing:
            raise ConfigError(
                f"tokenizer.model={src_path} has no piece {sorted(missing)[0]}, and a model's "
                "vocabulary cannot grow; leave the symbol or tag out"
            )
        return tokenizers
    if config.tokenizer.tgt_model is None:
        return adopt_tokenizer(src_path, src_symbols + tgt_symbols)
    tgt_path = resolve(config.tokenizer.tgt_model)
    src, tgt = adopt_tokenizer(src_path, src_symbols), adopt_tokenizer(tgt_path, tgt_symbols)
    src_names, tgt_names = (" ".join(one.pieces(one.control_ids)) for one in (src, tgt))
    if src_names != tgt_names:
        raise ConfigError(
            f"{src_path} calls its control symbols {src_names}, {tgt_path} {tgt_names}; "
            "take two models with the same names"
        )
    if src.control_ids != tgt.control_ids:
        log.warning("the control symbols of the models differ in id: no export to huggingface")
    return SeparateTokenizers(src, tgt)


def _symbols(config: PreprocessConfig) -> tuple[list[str], list[str]]:
    """Return the symbols of source and target: those of the settings, the corpora's tags, and the
    separator of lines where pairs have a context.
    """
    directions = [corpus_direction(config.data, name) for name in config.data.corpora]
    tags = [d.src_tag for d in directions], [d.tgt_tag for d in directions]
    symbols = [*config.tokenizer.symbols, *[SEPARATOR] * (config.data.context > 0)]
    src, tgt = ([*symbols, *filter(None, side)] for side in tags)
    return src, tgt


def train_tokenizer(
    sentences: Iterable[str], config: TokenizerConfig, symbols: Sequence[str] = ()
) -> Tokenizer:
    """Train one model on all `sentences`; `symbols` are pieces that are never cut.

    Raises a `ConfigError` that names the largest possible vocabulary when the corpus is too small
    for the one asked for, and a `DataError` for a corpus without text.
    """
    model, num_read, num_long = io.BytesIO(), 0, 0

    def counted() -> Iterator[str]:
        nonlocal num_read, num_long
        for sentence in sentences:
            num_read += 1
            if len(sentence) * 4 > _MAX_SENTENCE_BYTES:  # no character has more bytes
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
            input_sentence_size=0,  # all: the sample is drawn before
            max_sentence_length=_MAX_SENTENCE_BYTES,
            num_threads=_NUM_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        message, key = " ".join(str(error).split()), f"tokenizer.vocab_size={config.vocab_size}"
        if found := _TOO_LARGE.search(message):
            raise ConfigError(
                f"{key} is too large for this corpus; the largest possible is {found[1]}: "
                f"set tokenizer.vocab_size={found[1]} or less"
            ) from None
        if found := _TOO_SMALL.search(message):
            raise ConfigError(
                f"{key} is too small for the characters of this corpus; "
                f"set it to {found[1]} or more, or tokenizer.character_coverage below 1"
            ) from None
        raise DataError(f"the tokenizer cannot be trained on this corpus: {message}") from None
    if num_long:
        text = "the tokenizer was trained without %d of %d sentences, longer than %d bytes"
        log.warning(text, num_long, num_read, _MAX_SENTENCE_BYTES)
    return Tokenizer(model.getvalue())


def adopt_tokenizer(path: Path, symbols: Sequence[str] = ()) -> Tokenizer:
    """Take over the SentencePiece model at `path`, whoever trained it.

    Control symbols that it lacks, and `symbols`, become pieces after its last one: no id changes
    and no text without a symbol is cut otherwise. Raises a `ModelError` for a file that is no
    model, and a `ConfigError` for a symbol that is an ordinary piece of it already.
    """
    model = read_model(path)
    found = Tokenizer(model)
    old = set(found.all_pieces())
    added = [symbol for symbol in dict.fromkeys(symbols) if symbol not in old]
    for symbol in symbols:
        if symbol not in added and not _is_symbol(model, symbol):
            raise ConfigError(
                f"{symbol} cannot be a symbol of {path}, which has it as an ordinary or control "
                "piece; name the symbol or tag otherwise"
            )
    appended = b"".join(_piece(symbol, _USER_DEFINED) for symbol in added)
    for kind, (id_field, name_field, name) in _CONTROLS.items():
        if getattr(found, f"{kind}_id") < 0:
            # the name may belong to a piece that text can become
            name = f"<nmt:{kind}>" if name in old else name
            new_id = found.vocab_size + len(added)
            spec = _field(id_field, new_id) + _field(name_field, name)
            appended += _piece(name, _CONTROL) + _field(_TRAINER_SPEC, spec)
            added.append(name)
    if added:
        log.info("%s: added %s to its pieces", path, " ".join(added))
    return Tokenizer(model + appended)


def _is_symbol(model: bytes, piece: str) -> bool:
    """Say whether a piece of the model is one that is never cut."""
    pattern = re.escape(_field(1, piece)) + rb"\x15.{4}" + re.escape(_field(3, _USER_DEFINED))
    return re.search(pattern, model, re.DOTALL) is not None


# A model is a message of protocol buffers: bytes after its end add to its lists and replace its
# values, as protobuf's encoding guide says of repeated fields and of embedded messages.
# SentencePiece has classes for it, which need the package protobuf that it does not bring along.


def model_fields(message: bytes) -> dict[int, list[Any]]:
    """Return the values of each field of a model, or of a message in it, by number."""
    fields: dict[int, list[Any]] = {}
    stream = io.BytesIO(message)

    def varint() -> int:
        byte = stream.read(1)[0]
        return byte if byte < 128 else (byte & 127) | varint() << 7

    while stream.tell() < len(message):
        number, kind = divmod(varint(), 8)
        value = varint() if kind == 0 else stream.read({1: 8, 5: 4}.get(kind) or varint())
        fields.setdefault(number, []).append(value)
    return fields


def _piece(name: str, kind: int) -> bytes:
    score = b"\x15\x00\x00\x00\x00"  # field 2, a float32 of 0
    return _field(1, _field(1, name) + score + _field(3, kind))


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode("utf-8") if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    if value < 128:
        return bytes([value])
    return bytes([value & 127 | 128]) + _varint(value >> 7)
