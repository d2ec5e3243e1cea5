"""The subword tokenizer: one SentencePiece model for both languages, the only vocabulary there is.

Text goes in and ids come out, never pieces, so no text can become a control symbol.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from nmt.config import TokenizerConfig
from nmt.errors import ConfigError, DataError, ModelError

PAD, UNK, BOS, EOS = range(
    4
)  # given to SentencePiece when it trains; read from the model elsewhere
_MAX_SENTENCE_BYTES = 1 << 16
_TOO_LARGE = re.compile(r"Vocabulary size too high \(\d+\).*?value <= (\d+)")
_TOO_SMALL = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")


class Tokenizer:
    """A loaded SentencePiece model."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = self._processor.vocab_size()
        self.pad_id: int = self._processor.pad_id()
        self.unk_id: int = self._processor.unk_id()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.model`; a missing or damaged one is a `ModelError`."""
        if not path.is_file():
            raise ModelError(f"{path} does not exist; the folder is no model or data folder of nmt")
        try:
            tokenizer = cls(path.read_bytes())
        except RuntimeError:
            raise ModelError(f"{path} is no SentencePiece model; copy or make it again") from None
        if tokenizer.pad_id < 0:
            raise ModelError(f"{path} has no padding symbol; make it with nmt-preprocess")
        return tokenizer

    @property
    def sha256(self) -> str:
        """Fingerprint of the vocabulary, for checks that data and model belong together."""
        return hashlib.sha256(self.model).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Turn one sentence into ids, without BOS and EOS."""
        return self._processor.encode(text)  # type: ignore[no-any-return]

    def encode_batch(self, texts: Sequence[str], num_threads: int = -1) -> list[list[int]]:
        """Turn sentences into ids; -1 uses all processor threads.

        Raises `DataError` for a text that is none, with half of a surrogate pair in it.
        """
        try:
            ids: list[list[int]] = self._processor.encode(list(texts), num_threads=num_threads)
        except TypeError:
            raise _not_unicode(texts) from None
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into one line of text; control symbols vanish, a generated line break becomes a
        space.
        """
        text: str = self._processor.decode(list(ids))
        return text.replace("\n", " ").replace("\r", " ")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Show ids as pieces, for people to read."""
        return [self._processor.id_to_piece(i) for i in ids]


def train_tokenizer(
    sentences: Iterable[str], config: TokenizerConfig, *, seed: int, num_threads: int
) -> Tokenizer:
    """Train a BPE model with byte fallback on `sentences`.

    Raises a `ConfigError` that names the largest possible vocabulary when the corpus is too small
    for the one asked for.
    """
    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(seed)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            normalization_rule_name=config.normalization,
            byte_fallback=True,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            input_sentence_size=config.max_sentences,
            shuffle_input_sentence=True,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            num_threads=num_threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explain(error, config.vocab_size) from None
    return Tokenizer(model.getvalue())


def _explain(error: RuntimeError, vocab_size: int) -> ConfigError | DataError:
    message = " ".join(str(error).split())
    if found := _TOO_LARGE.search(message):
        return ConfigError(
            f"tokenizer.vocab_size={vocab_size} is too large for this corpus; "
            f"the largest possible is {found[1]}: set tokenizer.vocab_size={found[1]} or less"
        )
    if found := _TOO_SMALL.search(message):
        return ConfigError(
            f"tokenizer.vocab_size={vocab_size} is too small for the characters of this corpus; "
            f"set it to {found[1]} or more, or tokenizer.character_coverage below 1"
        )
    return DataError(f"the tokenizer cannot be trained on this corpus: {message}")


def _not_unicode(texts: Sequence[str]) -> Exception:
    """Name the text that SentencePiece cannot take; it says itself only that there is one."""
    for number, text in enumerate(texts):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return DataError(
                f"text {number}, from 0, has half a surrogate pair at character {error.start}; "
                "decode it with errors='replace'"
            )
    return TypeError("texts must be str")
