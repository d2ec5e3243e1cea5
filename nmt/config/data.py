"""Settings of corpora, tokenizer and `nmt-preprocess`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nmt.config.options import (
    DEFAULT_DATA_DIR,
    Corpus,
    Duplicates,
    Invalid,
    Step,
    TokenizerType,
    option,
    require,
)
from nmt.errors import ConfigError

NORMALIZATIONS = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity")
_RESERVED = re.compile("<pad>|<unk>|<s>|</s>|<0x[0-9A-F]{2}>")  # pieces of every tokenizer


def _check_symbol(key: str, symbol: str) -> None:
    """Refuse what cannot be one piece of a tokenizer."""
    spaces = any(c.isspace() or c in "\0\u2581" for c in symbol)  # U+2581 is a space in pieces
    rule = "must be text without spaces, for example <2de>"
    require(symbol != "" and not spaces, key, symbol, rule)
    rule = "is a control symbol or byte of every tokenizer; name it otherwise"
    require(not _RESERVED.fullmatch(symbol), key, symbol, rule)


@dataclass(kw_only=True)
class SplitConfig:
    """Where pairs come from: files or one Hugging Face dataset.

    A file name may hold * and ? or be a list of names, all in that order (those of a pattern in the
    order of their names); - is stdin. Files are plain, .gz, .xz or .zst.
    """

    src: list[str] | None = option(
        None, "source text, one sentence a line: file, glob, list or - (stdin)"
    )
    tgt: list[str] | None = option(None, "target text, aligned with src line by line")
    tsv: list[str] | None = option(None, "both sides in one file, with tabs between columns")
    columns: list[int] = option([1, 2], "columns of the TSV with source and target, from 1")
    jsonl: list[str] | None = option(None, "both sides in one file, a JSON object a line")
    fields: list[str] = option(
        [], "fields of JSON or dataset with source and target; empty: src_lang, tgt_lang"
    )
    dataset: str | None = option(None, "Hugging Face dataset: hub name, local folder or file")
    dataset_config: str | None = option(None, "its configuration, for example de-en")
    dataset_split: str | None = option(None, "its split, for example train")

    def __post_init__(self) -> None:
        given = [k for k in ("src", "tsv", "jsonl", "dataset") if getattr(self, k) is not None]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} are both given for one split; keep one")
        if (self.src is None) != (self.tgt is None):
            have, lack = ("src", "tgt") if self.tgt is None else ("tgt", "src")
            value = ",".join(self.src or self.tgt or [])
            raise ConfigError(
                f"{have}={value} is given without {lack}; give both sides of the pair"
            )
        for key in ("src", "tgt", "tsv", "jsonl"):
            require(getattr(self, key) != [], key, "[]", "must name at least one file")
        valid = len(self.columns) == 2 and min(self.columns) >= 1
        require(valid, "columns", self.columns, "must be two numbers from 1: source, target")
        require(len(self.fields) in (0, 2), "fields", self.fields, "must be two: source, target")

    @property
    def given(self) -> bool:
        """Whether any source is named."""
        return any(value is not None for value in (self.src, self.tsv, self.jsonl, self.dataset))


@dataclass(kw_only=True)
class CorpusConfig(SplitConfig):
    """One of several training corpora."""

    weight: float = option(1.0, "how often training sees each pair in an epoch; 0 leaves it out")
    src_tag: str | None = option(None, "put before every source, for example <2de>")
    tgt_tag: str | None = option(None, "put before every target")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.weight >= 0, "weight", self.weight, "must not be negative")
        for key in ("src_tag", "tgt_tag"):
            if (tag := getattr(self, key)) is not None:
                _check_symbol(key, tag)


@dataclass(kw_only=True)
class FilterConfig:
    """Which training pairs are left out, beside those with an empty side or longer than max_length.

    Held-out pairs always stay.
    """

    nul: bool = option(True, "drop pairs with a NUL character; false puts a space there")
    max_ratio: float = option(0.0, "most tokens of one side for each token of the other; 0: any")
    identical: bool = option(False, "drop pairs whose sides are the same text")
    duplicates: Duplicates = option(
        Duplicates.keep, "drop what came before: keep (drop none), pair, src or tgt"
    )
    max_unknown: float = option(1.0, "largest share of unknown or byte tokens on a side")
    max_foreign: float = option(1.0, "largest share of letters outside the side's scripts")
    src_scripts: list[str] = option([], "scripts of the source, e.g. Latin; empty: by language")
    tgt_scripts: list[str] = option([], "scripts of the target; empty: by language")
    language: bool = option(
        False, "drop pairs not in src_lang and tgt_lang (pip install nmt[langid])"
    )

    def __post_init__(self) -> None:
        valid = self.max_ratio == 0 or self.max_ratio >= 1
        require(valid, "filter.max_ratio", self.max_ratio, "must be 0 or at least 1")
        for key in ("max_unknown", "max_foreign"):
            value = getattr(self, key)
            require(0 <= value <= 1, f"filter.{key}", value, "must be from 0 to 1")


@dataclass(kw_only=True)
class DataConfig:
    """Where the sentence pairs come from."""

    corpus: Corpus = option(Corpus.files, "files (or datasets), or a corpus that nmt brings along")
    src_lang: str = option("src", "source language code; names fields of datasets")
    tgt_lang: str = option("tgt", "target language code; also picks BLEU's tokenizer")
    train: SplitConfig = option(SplitConfig, "training pairs")
    corpora: dict[str, CorpusConfig] = option(dict, "several named training corpora, by name")
    temperature: float = option(
        1.0, "above 1 evens out the shares of corpora in training: weight * size^(1/temperature)"
    )
    valid: SplitConfig = option(SplitConfig, "validation pairs")
    test: SplitConfig = option(SplitConfig, "test pairs, copied as text into the data folder")
    invalid: Invalid = option(Invalid.error, "lines that are not UTF-8: error, replace or drop")
    made_by: str | None = option(None, "command that makes the files, named when they are missing")

    def __post_init__(self) -> None:
        key = "data.temperature"
        require(self.temperature >= 1, key, self.temperature, "must be at least 1")
        for name in self.corpora:
            valid = re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None
            require(valid, "data.corpora", name, "a name has letters, digits, _, . and - alone")
        if self.corpora and self.train.given:
            raise ConfigError(
                "data.train and data.corpora are both given; make the former one of the latter: "
                "+data.corpora.NAME.src=FILE"
            )


@dataclass(kw_only=True)
class TokenizerConfig:
    """The SentencePiece model (section 5.1 of the paper: joint BPE, about 37,000 tokens)."""

    model: str | None = option(None, "use this SentencePiece .model instead of training one")
    tgt_model: str | None = option(None, "that of the target, when separate")
    type: TokenizerType = option(TokenizerType.bpe, "bpe or unigram")
    separate: bool = option(False, "one model for each language, of vocab_size pieces each")
    vocab_size: int = option(37000, "pieces shared by both languages, control symbols included")
    byte_fallback: bool = option(True, "unknown characters become bytes instead of <unk>")
    symbols: list[str] = option([], "pieces that are never cut, for example {url} or <2de>")
    normalization: str = option("nmt_nfkc", "SentencePiece rule: nmt_nfkc, nfkc, identity, ..._cf")
    character_coverage: float = option(1.0, "share of characters with a piece; the rest are bytes")
    max_sentences: int = option(1_000_000, "lines that the tokenizer is trained on, sampled")

    def __post_init__(self) -> None:
        low = 261 if self.byte_fallback else 5
        rule = f"must be at least {low} (bytes, control symbols and one piece)"
        require(self.vocab_size >= low, "tokenizer.vocab_size", self.vocab_size, rule)
        key = "tokenizer.character_coverage"
        rule = "must be from 0.98 to 1"
        require(0.98 <= self.character_coverage <= 1, key, self.character_coverage, rule)
        key = "tokenizer.max_sentences"
        require(self.max_sentences >= 1, key, self.max_sentences, "must be at least 1")
        key = "tokenizer.normalization"
        rule = "must be one of " + ", ".join(NORMALIZATIONS)
        require(self.normalization in NORMALIZATIONS, key, self.normalization, rule)
        for symbol in self.symbols:
            _check_symbol("tokenizer.symbols", symbol)
        self._check_models()

    def _check_models(self) -> None:
        has_both = self.model is not None and self.tgt_model is not None
        if self.separate and self.model is not None and not has_both:
            raise ConfigError(
                f"tokenizer.separate=true with tokenizer.model={self.model}: "
                "give tokenizer.tgt_model too"
            )
        if self.tgt_model is not None and not (self.separate and has_both):
            raise ConfigError(
                f"tokenizer.tgt_model={self.tgt_model}: needs tokenizer.model and "
                "tokenizer.separate=true"
            )


@dataclass(kw_only=True)
class PreprocessConfig:
    """Settings of `nmt-preprocess`."""

    data: DataConfig = option(DataConfig, "the corpus")
    tokenizer: TokenizerConfig = option(TokenizerConfig, "the subword model")
    filter: FilterConfig = option(FilterConfig, "which training pairs are left out")
    data_dir: str = option(DEFAULT_DATA_DIR, "folder to write")
    max_length: int = option(256, "longer training sentences are dropped; tokens, EOS included")
    keep_text: bool = option(False, "store the text beside the ids (columns src_text, tgt_text)")
    report_only: bool = option(False, "look at the corpus, print the report, write nothing else")
    shard_pairs: int = option(1_000_000, "pairs read for one file of the data folder")
    step: Step = option(Step.all, "all, or on several machines: plan, then shard, then merge")
    shard: str | None = option(None, "part of this job, for example 3/64; means step=shard")
    seed: int = option(0, "for sampling and data=copy")
    num_threads: int = option(0, "processes that encode; 0 takes all processors")

    def __post_init__(self) -> None:
        require(self.max_length >= 2, "max_length", self.max_length, "must be at least 2")
        valid = 0 <= self.num_threads <= 1024
        require(valid, "num_threads", self.num_threads, "must be from 0 to 1024")
        require(self.seed >= 0, "seed", self.seed, "must not be negative")
        require(self.shard_pairs >= 1, "shard_pairs", self.shard_pairs, "must be at least 1")
        self._check_shard()

    def _check_shard(self) -> None:
        if self.shard is None:
            require(self.step is not Step.shard, "step", self.step, "needs shard=NUMBER/COUNT")
            return
        numbers = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        valid = numbers is not None and 1 <= int(numbers[1]) <= int(numbers[2])
        require(valid, "shard", self.shard, "must be NUMBER/COUNT from 1/COUNT, for example 3/64")
        valid = self.step in (Step.all, Step.shard)
        require(valid, "step", self.step, f"does not go with shard={self.shard}")
        require(not self.report_only, "report_only", True, "looks at the whole corpus; drop shard")
