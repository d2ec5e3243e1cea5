"""Settings of the subword tokenizer, a SentencePiece model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from nmt.config.options import Settings, option, require_valid

NORMALIZATIONS = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity")
# control symbols and bytes, which are pieces of every tokenizer
_RESERVED = re.compile("<pad>|<unk>|<s>|</s>|<0x[0-9A-F]{2}>")


class TokenizerType(str, Enum):
    """How SentencePiece segments text into pieces."""

    bpe = "bpe"  # Sennrich et al. (2016), as in the paper
    unigram = "unigram"  # Kudo (2018)
    word = "word"  # words and punctuation marks, as in the Annotated Transformer
    space = "space"  # the tokens between spaces, for text that is tokenized already


WORD_TYPES = (TokenizerType.word, TokenizerType.space)
"""Types of tokenizers whose pieces are whole words. Other words are unknown."""
_DEFAULT_MIN_FREQ = 2


def check_symbol(key: str, symbol: str) -> None:
    """Raise a `ConfigError` for text that cannot be one piece of a tokenizer."""
    # SentencePiece writes a space as U+2581
    has_invalid = any(char.isspace() or char in "\0\u2581" for char in symbol)
    require_valid(
        symbol != "" and not has_invalid,
        key,
        symbol,
        "must be text without spaces, for example <2de>",
    )
    require_valid(
        not _RESERVED.fullmatch(symbol),
        key,
        symbol,
        "is a control symbol or byte of every tokenizer; choose another name",
    )


@dataclass(kw_only=True)
class TokenizerConfig(Settings):
    """The SentencePiece model (section 5.1 of the paper: joint BPE, about 37,000 tokens)."""

    key_prefix = "tokenizer."
    model: str | None = option(
        None, "SentencePiece .model, or folder of a model, to use instead of training one"
    )
    tgt_model: str | None = option(None, "separate: SentencePiece .model of the target")
    extend: int | None = option(
        None,
        "add up to this number of pieces of the new text to tokenizer.model, and symbols and tags "
        "that it lacks; null: add nothing",
        low=0,
        high=1_000_000,
    )
    type: TokenizerType = option(
        TokenizerType.bpe,
        "bpe, unigram, word (whole words and punctuation) or space (text tokenized already)",
    )
    min_freq: int = option(
        _DEFAULT_MIN_FREQ,
        "type=word or space: minimum number of occurrences of a word; rarer words are <unk>",
        low=1,
    )
    separate: bool = option(False, "one tokenizer per language, of vocab_size pieces each")
    vocab_size: int | None = option(
        None,
        "number of pieces, control symbols included; null: 37,000 (at most 8,000 for little text), "
        "or all words with type=word or space",
    )
    vocab_multiple: int = option(
        1, "round the vocabulary up to a multiple of this number, such as 8", low=1, high=1024
    )
    byte_fallback: bool = option(True, "segment unknown characters into bytes instead of <unk>")
    symbols: list[str] = option([], "text that is always one piece, such as {url} or <2de>")
    reserved: int = option(
        0,
        "number of spare symbols <reserved0>, <reserved1>, ... that later corpora can use as tags",
        low=0,
        high=1000,
    )
    normalization: str = option(
        "nmt_nfkc", "SentencePiece rule: nmt_nfkc, nfkc, identity, nmt_nfkc_cf or nfkc_cf"
    )
    character_coverage: float = option(
        1.0, "share of characters that get a piece", low=0.98, high=1
    )
    max_sentences: int = option(1_000_000, "number of lines sampled to train the tokenizer", low=1)

    def check(self) -> None:
        has_bytes = self.byte_fallback and self.type not in WORD_TYPES
        min_size = 261 if has_bytes else 5  # 256 bytes, 4 control symbols, 1 piece
        if self.vocab_size is not None:
            problem = f"must be at least {min_size} (bytes, control symbols and one piece)"
            self.require(self.vocab_size >= min_size, "vocab_size", problem)
        is_known = self.normalization in NORMALIZATIONS
        self.require(is_known, "normalization", f"must be one of {', '.join(NORMALIZATIONS)}")
        if self.type in WORD_TYPES:
            is_lowercase = self.normalization.endswith("_cf")
            problem = (
                f"does not work with tokenizer.type={self.type.value}; change the text instead"
            )
            self.require(not is_lowercase, "normalization", problem)
        else:
            problem = "needs tokenizer.type=word or tokenizer.type=space"
            self.require(self.min_freq == _DEFAULT_MIN_FREQ, "min_freq", problem)
        for symbol in self.symbols:
            check_symbol("tokenizer.symbols", symbol)
        if self.separate and self.model is not None:
            problem = (
                "is the source model with tokenizer.separate=true; give tokenizer.tgt_model too"
            )
            self.require(self.tgt_model is not None, "model", problem)
        else:
            problem = "needs tokenizer.model=FILE and tokenizer.separate=true"
            self.require(self.tgt_model is None, "tgt_model", problem)
        is_extensible = self.extend is None or self.model is not None
        self.require(is_extensible, "extend", "needs tokenizer.model=RUN, a model to extend")

    @property
    def learns_from_text(self) -> bool:
        """Whether the training text is needed to make the tokenizer."""
        return self.model is None or bool(self.extend)
