"""Train the SentencePiece models of a data folder, or open existing models.

Training is deterministic: the same text in the same order gives the same bytes.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from nmt.config import WORD_TYPES, PreprocessConfig, TokenizerConfig, resolve_path
from nmt.data.languages import corpus_direction
from nmt.data.tokenizer import (
    LANGUAGE_PATTERN,
    Tokenizer,
    TokenizerPair,
    Tokenizers,
    find_tokenizers,
    load_tokenizers,
    read_model,
    unused_piece,
)
from nmt.data.word_vocabulary import train_word_tokenizer
from nmt.errors import ConfigError, DataError, NmtError, to_one_line

log = logging.getLogger(__name__)
ModelProto: Any = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
_Piece = ModelProto.SentencePiece  # the message for one piece: its text, score and type
# Ids of control symbols in the models that this module trains. Other models may have other ids.
PAD = 0
UNK = 1
BOS = 2
EOS = 3
# options of SentencePiece's trainer
_CONTROL_ID_OPTIONS: dict[str, Any] = {
    "pad_id": PAD,
    "unk_id": UNK,
    "bos_id": BOS,
    "eos_id": EOS,
}
_MAX_SENTENCE_BYTES = 1 << 16
_NUM_THREADS = 16  # not the number of cores, since unigram models depend on the number of threads
# error messages of SentencePiece
_TOO_LARGE = re.compile(r"Vocabulary size too high \(\d+\).*?value <= (\d+)")
_TOO_SMALL = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")
# pieces that `load_with_symbols` adds if a model lacks them, keyed by role
_CONTROL_PIECES = {"pad": "<pad>", "bos": "<s>", "eos": "</s>"}
ReadSide = Callable[[Literal["src", "tgt"]], Iterable[str]]
"""A function that yields the sentences of one side of the text."""
_DEFAULT_VOCAB_SIZE = 37_000  # the size in the paper
_SMALL_VOCAB_SIZE = 8_000  # used if the text is too small for the default
_OPUS_MT_TAG = re.compile(">>.*<<")  # a target language, such as ">>fra<<"


def train_tokenizers(config: PreprocessConfig, read_side: ReadSide) -> Tokenizers:
    """Train one model on both sides, or with `tokenizer.separate` one model for each side.

    The tags of the corpora become symbols. Raises the errors of `train_tokenizer`.
    """
    src_symbols, tgt_symbols = list_symbols(config)
    multiple = config.tokenizer.vocab_multiple
    if not config.tokenizer.separate:
        tokenizer = _train_with_suitable_size(
            lambda: chain(read_side("src"), read_side("tgt")),
            config.tokenizer,
            src_symbols + tgt_symbols,
        )
        return pad_vocabulary(tokenizer, multiple)
    src = _train_with_suitable_size(lambda: read_side("src"), config.tokenizer, src_symbols)
    tgt = _train_with_suitable_size(lambda: read_side("tgt"), config.tokenizer, tgt_symbols)
    return TokenizerPair(pad_vocabulary(src, multiple), pad_vocabulary(tgt, multiple))


def _train_with_suitable_size(
    read: Callable[[], Iterable[str]], config: TokenizerConfig, symbols: Sequence[str]
) -> Tokenizer:
    """Train a model. Without `vocab_size`, use the default size, or a smaller one for a small text.

    `read` is called once for each training. Gowda and May (2020) find that about 8,000 pieces are
    best for small corpora.
    """
    if config.type in WORD_TYPES:
        return train_word_tokenizer(read(), config, symbols, _CONTROL_ID_OPTIONS)
    if config.vocab_size is not None:
        return train_tokenizer(read(), config, symbols)
    try:
        return train_tokenizer(read(), replace(config, vocab_size=_DEFAULT_VOCAB_SIZE), symbols)
    except _VocabularyTooLarge as error:
        largest_possible_size = error.largest
    smaller_size = min(_SMALL_VOCAB_SIZE, largest_possible_size)
    log.info(
        "the text is too small for %d pieces; training again with tokenizer.vocab_size=%d",
        _DEFAULT_VOCAB_SIZE,
        smaller_size,
    )
    return train_tokenizer(read(), replace(config, vocab_size=smaller_size), symbols)


def open_tokenizers(config: PreprocessConfig) -> Tokenizers:
    """Load the models that the settings `tokenizer.model` and `tokenizer.tgt_model` name.

    Adds the symbols of the settings to SentencePiece models, see `load_with_symbols`. In a model
    folder, the tokenizers must already have all symbols, unless `tokenizer.extend` is set.
    """
    src_symbols, tgt_symbols = list_symbols(config)
    assert config.tokenizer.model is not None
    src_path = resolve_path(config.tokenizer.model)
    multiple = config.tokenizer.vocab_multiple
    if src_path.is_dir():
        return _open_model_folder(config, src_path)
    if config.tokenizer.tgt_model is None:
        return pad_vocabulary(load_with_symbols(src_path, src_symbols + tgt_symbols), multiple)
    tgt_path = resolve_path(config.tokenizer.tgt_model)
    src = pad_vocabulary(load_with_symbols(src_path, src_symbols), multiple)
    tgt = pad_vocabulary(load_with_symbols(tgt_path, tgt_symbols), multiple)
    src_names = " ".join(src.pieces(src.control_ids))
    tgt_names = " ".join(tgt.pieces(tgt.control_ids))
    if src_names != tgt_names:
        raise ConfigError(
            f"{src_path} has the control symbols {src_names}, but {tgt_path} has {tgt_names}; "
            "choose two models with the same control symbols"
        )
    if src.control_ids != tgt.control_ids:
        log.warning(
            "the control symbols of the two models have different ids, so export to huggingface "
            "will not work"
        )
    return TokenizerPair(src, tgt)


def _open_model_folder(config: PreprocessConfig, folder: Path) -> Tokenizers:
    """Load the tokenizers of a model folder or run.

    Raises a `ConfigError` if they lack a symbol of the settings, unless `tokenizer.extend` is set.
    """
    tokenizers = load_tokenizers(find_tokenizers(folder))
    if config.tokenizer.tgt_model is not None:
        raise ConfigError(
            f"tokenizer.model={folder} is a model folder with the tokenizers of both sides; leave "
            "out tokenizer.tgt_model and tokenizer.separate"
        )
    src_symbols, tgt_symbols = list_symbols(config)
    if config.tokenizer.extend is not None:  # `extend_tokenizers` adds the missing symbols
        return tokenizers
    missing = set()
    for tokenizer, symbols in ((tokenizers.src, src_symbols), (tokenizers.tgt, tgt_symbols)):
        missing_in_vocabulary = set(symbols) - set(tokenizer.all_pieces())
        missing.update(missing_in_vocabulary)
        # the SentencePiece model of an imported model has other pieces than its vocabulary
        missing.update(symbols_missing_in_model(tokenizer, symbols))
    if missing:
        raise ConfigError(
            f"tokenizer.model={folder} has no piece {min(missing)}; leave the symbol or tag out, "
            "or set tokenizer.extend=0, which adds only symbols and tags"
        )
    return tokenizers


def list_symbols(config: PreprocessConfig) -> tuple[list[str], list[str]]:
    """Return the symbols of source and target.

    Both have the symbols in the settings, `tokenizer.reserved` spare symbols and, if pairs have a
    context, the separator of lines. The tags of each side follow.
    """
    src_symbols = list(config.tokenizer.symbols)
    src_symbols += [f"<reserved{number}>" for number in range(config.tokenizer.reserved)]
    if config.data.context > 0:
        src_symbols.append(config.data.separator)
    tgt_symbols = list(src_symbols)
    for name in config.data.corpora:
        direction = corpus_direction(config.data, name)
        if direction.src_tag:
            src_symbols.append(direction.src_tag)
        if direction.tgt_tag:
            tgt_symbols.append(direction.tgt_tag)
    return src_symbols, tgt_symbols


def train_tokenizer(
    sentences: Iterable[str], config: TokenizerConfig, symbols: Sequence[str] = ()
) -> Tokenizer:
    """Train one model on all `sentences`. `symbols` are pieces that are never divided.

    Raises a `ConfigError` with the largest possible size if the corpus is too small for the
    vocabulary size. Raises a `DataError` for a corpus without text.
    """
    assert config.vocab_size is not None
    model = io.BytesIO()
    num_sentences = 0
    num_too_long = 0

    def yield_and_count() -> Iterator[str]:
        nonlocal num_sentences, num_too_long
        for sentence in sentences:
            num_sentences += 1
            # a character has at most 4 bytes, so most sentences need not be encoded to be measured
            may_be_too_long = len(sentence) * 4 > _MAX_SENTENCE_BYTES
            if may_be_too_long and len(sentence.encode("utf-8")) > _MAX_SENTENCE_BYTES:
                num_too_long += 1
            yield sentence

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=yield_and_count(),
            model_writer=model,
            model_type=config.type.value,
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            normalization_rule_name=config.normalization,
            byte_fallback=config.byte_fallback,
            user_defined_symbols=list(dict.fromkeys(symbols)),
            input_sentence_size=0,  # 0: use all sentences
            max_sentence_length=_MAX_SENTENCE_BYTES,
            num_threads=_NUM_THREADS,
            minloglevel=2,
            **_CONTROL_ID_OPTIONS,
        )
    except RuntimeError as error:
        raise _explain_failure(to_one_line(error), config.vocab_size) from None
    if num_too_long:
        log.warning(
            "the tokenizer was not trained on %d of %d sentences, which have more than %d bytes",
            num_too_long,
            num_sentences,
            _MAX_SENTENCE_BYTES,
        )
    return Tokenizer(model.getvalue())


class _VocabularyTooLarge(ConfigError):
    """Raised if the text has too few words for a vocabulary size. `largest` is the largest size."""

    def __init__(self, vocab_size: int, largest: int) -> None:
        super().__init__(
            f"tokenizer.vocab_size={vocab_size} is too large for this corpus; the largest possible "
            f"is {largest}: set tokenizer.vocab_size={largest} or less"
        )
        self.largest = largest


def _explain_failure(message: str, vocab_size: int) -> NmtError:
    """Turn an error message of SentencePiece's trainer into an error with advice."""
    key = f"tokenizer.vocab_size={vocab_size}"
    too_large = _TOO_LARGE.search(message)
    if too_large is not None:
        return _VocabularyTooLarge(vocab_size, largest=int(too_large[1]))
    too_small = _TOO_SMALL.search(message)
    if too_small is not None:
        smallest = too_small[1]
        return ConfigError(
            f"{key} is too small for the characters of this corpus; "
            f"set tokenizer.vocab_size={smallest} or more, or tokenizer.character_coverage below 1"
        )
    return DataError(f"the tokenizer cannot be trained on this corpus: {message}")


def has_word_pieces(model: bytes) -> bool:
    """Return whether the pieces of a SentencePiece model are whole words."""
    trainer_spec = read_proto(model).trainer_spec
    return bool(trainer_spec.model_type == trainer_spec.WORD)


def user_symbols(model: bytes) -> list[str]:
    """Return the user-defined symbols of a SentencePiece model, such as tags."""
    pieces = read_proto(model).pieces
    return [piece.piece for piece in pieces if piece.type == _Piece.USER_DEFINED]


def find_symbol_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of user-defined symbols and of language pieces, in order."""
    symbols = set(user_symbols(tokenizer.model))
    symbol_ids = {*tokenizer.prefix_ids, *tokenizer.language_ids.values()}
    symbol_ids.update(i for i, piece in enumerate(tokenizer.all_pieces()) if piece in symbols)
    return sorted(symbol_ids)


def load_with_symbols(path: Path, symbols: Sequence[str] = ()) -> Tokenizer:
    """Load the SentencePiece model at `path`, and append missing control symbols and `symbols`.

    No id changes, and text without a symbol is segmented as before. Raises a `ModelError` for an
    invalid file, and a `ConfigError` for a symbol that the model has as an ordinary piece.
    """
    tokenizer = Tokenizer(read_model(path))
    pieces = set(tokenizer.all_pieces())
    model_symbols = user_symbols(tokenizer.model)
    for symbol in symbols:
        if symbol in pieces and symbol not in model_symbols:
            raise ConfigError(
                f"{symbol} cannot be a symbol of {path}, which has it as an ordinary or control "
                "piece; choose another name for the symbol or tag"
            )
    distinct_symbols = dict.fromkeys(symbols)
    added = [symbol for symbol in distinct_symbols if symbol not in pieces]
    model = append_symbols(tokenizer.model, added)
    ids_by_role = {"pad": tokenizer.pad_id, "bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    for role, piece in _CONTROL_PIECES.items():
        if ids_by_role[role] >= 0:  # -1: the model has no such symbol
            continue
        if piece in pieces:  # an ordinary piece, which text may be segmented into
            piece = f"<nmt:{role}>"
        new_id = tokenizer.vocab_size + len(added)
        model += serialize_piece(piece, _Piece.CONTROL)
        # The fields of `trainer_spec` say which id and piece a control symbol has. Appending a
        # message replaces the fields that it sets; see `serialize_piece`.
        trainer_spec = ModelProto().trainer_spec
        setattr(trainer_spec, f"{role}_id", new_id)
        setattr(trainer_spec, f"{role}_piece", piece)
        model += ModelProto(trainer_spec=trainer_spec).SerializePartialToString()
        added.append(piece)
    if added:
        log.info("%s: added %s to its pieces", path, " ".join(added))
    return Tokenizer(model)


def pad_vocabulary(tokenizer: Tokenizer, multiple: int) -> Tokenizer:
    """Append unused control symbols until the size of the vocabulary is divisible by `multiple`.

    GPUs multiply matrices faster if their sizes are multiples of 8.
    """
    model = tokenizer.model
    size = tokenizer.vocab_size
    num_unused = -size % multiple  # distance to the next multiple: -37 % 8 = 3
    for piece_id in range(size, size + num_unused):
        model += serialize_piece(unused_piece(piece_id), _Piece.CONTROL)
    return Tokenizer(model)


def symbols_missing_in_model(tokenizer: Tokenizer, symbols: Sequence[str]) -> list[str]:
    """Return the symbols that must be added to the SentencePiece model of a tokenizer.

    These are the symbols that the model lacks, apart from the language pieces of M2M100 and NLLB
    and the tags of OPUS-MT. `MappedTokenizer` encodes such pieces and tags itself.
    """
    pieces = {piece.piece for piece in read_proto(tokenizer.model).pieces}
    missing = [symbol for symbol in dict.fromkeys(symbols) if symbol not in pieces]
    if tokenizer.is_imported:
        missing = [symbol for symbol in missing if not _OPUS_MT_TAG.fullmatch(symbol)]
    if tokenizer.language_ids:
        missing = [symbol for symbol in missing if not LANGUAGE_PATTERN.fullmatch(symbol)]
    return missing


def append_symbols(model: bytes, symbols: Sequence[str]) -> bytes:
    """Append symbols to the pieces of a SentencePiece model, which must not have them."""
    return model + b"".join(serialize_piece(symbol, _Piece.USER_DEFINED) for symbol in symbols)


def serialize_piece(name: str, piece_type: int, score: float = 0.0) -> bytes:
    """Return the bytes of one piece. Appending them to the bytes of a model adds the piece.

    Protobuf merges messages whose bytes are concatenated: lists grow, other values are replaced.
    """
    piece = _Piece(piece=name, score=score, type=piece_type)
    content: bytes = ModelProto(pieces=[piece]).SerializePartialToString()
    return content


def read_proto(model: bytes) -> Any:
    """Parse a SentencePiece model into its protobuf message."""
    return ModelProto.FromString(model)
