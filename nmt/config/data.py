"""Settings of corpora, tokenizer and `nmt-preprocess`."""

from __future__ import annotations

from dataclasses import dataclass

from nmt.errors import ConfigError
from nmt.options import DEFAULT_DATA_DIR, Corpus, option, require


@dataclass(kw_only=True)
class SplitConfig:
    """One part (train, valid or test) of a corpus of files or of a Hugging Face dataset."""

    src: str | None = option(None, "source text, one sentence a line; plain or .gz")
    tgt: str | None = option(None, "target text, aligned with src line by line")
    tsv: str | None = option(None, "both sides in one file: source, tab, target; plain or .gz")
    dataset: str | None = option(None, "Hugging Face dataset: hub name or local folder")
    dataset_config: str | None = option(None, "its configuration, for example de-en")
    dataset_split: str | None = option(None, "its split, for example train")

    def __post_init__(self) -> None:
        given = [k for k in ("src", "tsv", "dataset") if getattr(self, k) is not None]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} are both given for one split; keep one")
        if (self.src is None) != (self.tgt is None):
            have, lack = ("src", "tgt") if self.tgt is None else ("tgt", "src")
            value = self.src or self.tgt
            raise ConfigError(
                f"{have}={value} is given without {lack}; give both sides of the pair"
            )

    @property
    def given(self) -> bool:
        """Whether any source is named."""
        return any(value is not None for value in (self.src, self.tsv, self.dataset))


@dataclass(kw_only=True)
class DataConfig:
    """Where the sentence pairs come from."""

    corpus: Corpus = option(Corpus.files, "files (or datasets), or a corpus that nmt brings along")
    src_lang: str = option("src", "source language code; names fields of datasets, picks texts")
    tgt_lang: str = option("tgt", "target language code; also picks BLEU's tokenizer")
    train: SplitConfig = option(SplitConfig, "training pairs")
    valid: SplitConfig = option(SplitConfig, "validation pairs")
    test: SplitConfig = option(SplitConfig, "test pairs, copied as text into the data folder")
    cache_dir: str = option("data/cache", "where downloaded corpora are kept")


@dataclass(kw_only=True)
class TokenizerConfig:
    """The joint SentencePiece BPE model (section 5.1 of the paper: about 37,000 tokens)."""

    vocab_size: int = option(37000, "pieces shared by both languages, control symbols included")
    normalization: str = option("nmt_nfkc", "SentencePiece rule: nmt_nfkc, nfkc, identity, ..._cf")
    character_coverage: float = option(1.0, "share of characters with a piece; the rest are bytes")
    max_sentences: int = option(1_000_000, "sentences that the tokenizer is trained on, sampled")

    def __post_init__(self) -> None:
        key, low = "tokenizer.vocab_size", 261
        rule = f"must be at least {low} (256 bytes and the control symbols)"
        require(self.vocab_size >= low, key, self.vocab_size, rule)
        key = "tokenizer.character_coverage"
        rule = "must be from 0.98 to 1"
        require(0.98 <= self.character_coverage <= 1, key, self.character_coverage, rule)
        key = "tokenizer.max_sentences"
        require(self.max_sentences >= 1, key, self.max_sentences, "must be at least 1")
        names = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity")
        key = "tokenizer.normalization"
        rule = "must be one of " + ", ".join(names)
        require(self.normalization in names, key, self.normalization, rule)


@dataclass(kw_only=True)
class PreprocessConfig:
    """Settings of `nmt-preprocess`."""

    data: DataConfig = option(DataConfig, "the corpus")
    tokenizer: TokenizerConfig = option(TokenizerConfig, "the subword model")
    data_dir: str = option(DEFAULT_DATA_DIR, "folder to write")
    max_length: int = option(256, "longer training sentences are dropped; tokens, EOS included")
    seed: int = option(0, "for generated corpora and sampling")
    num_threads: int = option(0, "processor threads; 0 takes all")

    def __post_init__(self) -> None:
        require(self.max_length >= 2, "max_length", self.max_length, "must be at least 2")
        valid = 0 <= self.num_threads <= 1024
        require(valid, "num_threads", self.num_threads, "must be from 0 to 1024")
        require(self.seed >= 0, "seed", self.seed, "must not be negative")
