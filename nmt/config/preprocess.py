"""Settings of corpora, tokenizer and `nmt-preprocess`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from nmt.config.options import DEFAULT_DATA_DIR, LARGEST_SEED, check_ranges, option, require
from nmt.errors import ConfigError

NORMALIZATIONS = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity")
_RESERVED = re.compile("<pad>|<unk>|<s>|</s>|<0x[0-9A-F]{2}>")  # pieces of every tokenizer


class Corpus(str, Enum):
    """Where parallel text comes from."""

    files = "files"
    numbers = "numbers"
    copy = "copy"


class Invalid(str, Enum):
    """What happens to a line that is not UTF-8."""

    error = "error"  # file, line and byte are named, and nothing is written
    # the broken bytes become U+FFFD, and are counted
    replace = "replace"  # type: ignore[assignment]  # shadows str.replace
    drop = "drop"  # the training pair is dropped and counted; held-out lines are replaced


class Duplicates(str, Enum):
    """Which training pairs count as seen before; the first of them is kept."""

    keep = "keep"  # none
    pair = "pair"  # those with both sides the same
    src = "src"  # those with the same source
    tgt = "tgt"  # those with the same target


class TokenizerType(str, Enum):
    """How SentencePiece cuts text."""

    bpe = "bpe"  # Sennrich et al. (2016), as in the paper
    unigram = "unigram"  # Kudo (2018)


def _check_symbol(key: str, symbol: str) -> None:
    """Raise a `ConfigError` for what cannot be one piece of a tokenizer."""
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

    src: list[str] | None = option(None, "source text: file, glob, list or - (stdin)")
    tgt: list[str] | None = option(None, "target text, aligned with src line by line")
    tsv: list[str] | None = option(None, "both sides in one file, with tabs between columns")
    columns: list[int] = option([1, 2], "columns of the TSV with source and target, from 1")
    jsonl: list[str] | None = option(None, "both sides in one file, one JSON object per line")
    fields: list[str] = option(
        [], "fields of JSON or dataset with source and target; empty: src_lang, tgt_lang"
    )
    dataset: str | None = option(None, "Hugging Face dataset: hub name, local folder or file")
    dataset_config: str | None = option(None, "its configuration, for example de-en")
    dataset_split: str | None = option(None, "its split, for example train")

    def __post_init__(self) -> None:
        given = self.given
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
    def given(self) -> list[str]:
        """The settings that name a source."""
        return [k for k in ("src", "tsv", "jsonl", "dataset") if getattr(self, k) is not None]


@dataclass(kw_only=True)
class HeldOutConfig(SplitConfig):
    """A validation or test set, of its own text or taken out of the training text."""

    num_pairs: float | None = option(
        None, "pairs to take out of train instead; below 1: this share of them", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self)
        number = self.num_pairs or 1
        rule = "must be a whole number, or a share below 1"
        require(number < 1 or number == int(number), "num_pairs", number, rule)

    @property
    def given(self) -> list[str]:
        """The settings that name a source."""
        return super().given + ["num_pairs"] * (self.num_pairs is not None)


@dataclass(kw_only=True)
class CorpusConfig(SplitConfig):
    """One of several training corpora."""

    weight: float = option(  # stands in the index of the data folder alone
        1.0,
        "how often an epoch contains each pair; 0 leaves the corpus out",
        low=0,
        on_resume="free",
    )
    src_lang: str | None = option(None, "its source language, where corpora differ")
    tgt_lang: str | None = option(None, "its target language, where corpora differ; sets src_tag")
    src_tag: str | None = option(None, "symbol before every source, for example <2de>")
    tgt_tag: str | None = option(None, "symbol before every target, never part of a translation")
    valid: SplitConfig = option(SplitConfig, "its validation pairs")
    test: SplitConfig = option(SplitConfig, "its test pairs")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self)
        for key in ("src_tag", "tgt_tag"):
            if (tag := getattr(self, key)) is not None:
                _check_symbol(key, tag)

    @property
    def is_tagged(self) -> bool:
        """Whether a symbol stands before its sources or targets."""
        return any(value is not None for value in (self.tgt_lang, self.src_tag, self.tgt_tag))


@dataclass(kw_only=True)
class FilterConfig:
    """Which training pairs are left out, beside those with an empty side or longer than max_length.

    Held-out pairs always stay.
    """

    nul: bool = option(True, "drop pairs with a NUL character; false replaces it with a space")
    max_ratio: float = option(0.0, "largest ratio of both sides' numbers of tokens; 0 disables")
    identical: bool = option(False, "drop pairs whose sides are the same text")
    duplicates: Duplicates = option(Duplicates.keep, "drop repeated pair, src or tgt; keep: none")
    max_unknown: float = option(1.0, "largest share of unknown or byte tokens", low=0, high=1)
    max_foreign: float = option(1.0, "largest share of letters of other scripts", low=0, high=1)
    src_scripts: list[str] = option([], "scripts of the source, e.g. Latin; empty: by language")
    tgt_scripts: list[str] = option([], "scripts of the target; empty: by language")
    language: bool = option(False, "drop pairs in other languages (pip install nmt[langid])")

    def __post_init__(self) -> None:
        valid = self.max_ratio == 0 or self.max_ratio >= 1
        require(valid, "filter.max_ratio", self.max_ratio, "must be 0 or at least 1")
        check_ranges(self, "filter.")

    @property
    def drops_duplicates(self) -> bool:
        """Whether pairs that came before are dropped."""
        return self.duplicates is not Duplicates.keep


@dataclass(kw_only=True)
class DataConfig:
    """Where the sentence pairs come from."""

    corpus: Corpus = option(Corpus.files, "files (or datasets), or a corpus included in nmt")
    src_lang: str = option("src", "source language code; names fields of datasets")
    tgt_lang: str = option("tgt", "target language code; also picks BLEU's tokenizer")
    train: SplitConfig = option(SplitConfig, "training pairs")
    corpora: dict[str, CorpusConfig] = option(dict, "several named training corpora, by name")
    context: int = option(
        0, "lines before each pair, on both sides, at most; <sep> between", low=0, high=100
    )
    temperature: float = option(  # stands in the index of the data folder alone
        1.0,
        "above 1: evens out the corpora: weight * size^(1/temperature)",
        low=1,
        on_resume="free",
    )
    valid: HeldOutConfig = option(HeldOutConfig, "validation pairs")
    test: HeldOutConfig = option(HeldOutConfig, "test pairs, copied as text into the data folder")
    invalid: Invalid = option(Invalid.error, "lines that are not UTF-8: error, replace or drop")
    made_by: str | None = option(
        None, "command that makes the files, named when they are missing", on_resume="free"
    )

    def __post_init__(self) -> None:
        check_ranges(self, "data.")
        for name in self.corpora:
            valid = re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None
            require(valid, "data.corpora", name, "a name has only letters, digits, _, . and -")
        if self.corpora and self.train.given:
            raise ConfigError(
                "data.train and data.corpora are both given; make the first one of the second: "
                "+data.corpora.NAME.src=FILE"
            )
        taken = [n for n in (self.valid.num_pairs, self.test.num_pairs) if n is not None]
        is_possible = min(taken, default=1) >= 1 or sum(taken) < 1
        rule = "must both be numbers, or both be shares, below 1 together"
        require(is_possible, "num_pairs of data.valid and data.test", taken, rule)
        given = [f"data.{s}" for s in ("train", "valid", "test") if getattr(self, s).given]
        given += ["data.corpora"] * bool(self.corpora)
        rule = f"has all its text; leave out {', '.join(given)}, or set data=files"
        require(self.corpus is Corpus.files or not given, "data.corpus", self.corpus, rule)
        if self.corpora and all(corpus.is_tagged for corpus in self.corpora.values()):
            for split in ("valid", "test"):
                if set(getattr(self, split).given) - {"num_pairs"}:
                    raise ConfigError(
                        f"data.{split} has no tag, and each of data.corpora has one; give "
                        f"data.corpora.NAME.{split} in its place"
                    )


@dataclass(kw_only=True)
class TokenizerConfig:
    """The SentencePiece model (section 5.1 of the paper: joint BPE, about 37,000 tokens)."""

    model: str | None = option(None, "SentencePiece .model, or model folder, to take over")
    tgt_model: str | None = option(None, "that of the target, when separate")
    type: TokenizerType = option(TokenizerType.bpe, "bpe or unigram")
    separate: bool = option(False, "one model per language, of vocab_size pieces each")
    vocab_size: int = option(37000, "pieces shared by both languages, control symbols included")
    byte_fallback: bool = option(True, "unknown characters become bytes instead of <unk>")
    symbols: list[str] = option([], "pieces that are never cut, for example {url} or <2de>")
    normalization: str = option("nmt_nfkc", "SentencePiece rule: nmt_nfkc, nfkc, identity, ..._cf")
    character_coverage: float = option(1.0, "share of characters with a piece", low=0.98, high=1)
    max_sentences: int = option(1_000_000, "lines sampled for training the tokenizer", low=1)

    def __post_init__(self) -> None:
        low = 261 if self.byte_fallback else 5
        rule = f"must be at least {low} (bytes, control symbols and one piece)"
        require(self.vocab_size >= low, "tokenizer.vocab_size", self.vocab_size, rule)
        check_ranges(self, "tokenizer.")
        key = "tokenizer.normalization"
        rule = "must be one of " + ", ".join(NORMALIZATIONS)
        require(self.normalization in NORMALIZATIONS, key, self.normalization, rule)
        for symbol in self.symbols:
            _check_symbol("tokenizer.symbols", symbol)
        lacks_one = self.separate and self.model is not None and self.tgt_model is None
        key = "tokenizer.separate=true with tokenizer.model"
        require(not lacks_one, key, self.model, "give tokenizer.tgt_model too")
        has_both = self.separate and self.model is not None
        rule = "needs tokenizer.model and tokenizer.separate=true"
        require(self.tgt_model is None or has_both, "tokenizer.tgt_model", self.tgt_model, rule)


@dataclass(kw_only=True)
class PreprocessConfig:
    """Settings of `nmt-preprocess`."""

    data: DataConfig = option(DataConfig, "the corpus")
    tokenizer: TokenizerConfig = option(TokenizerConfig, "the subword model")
    filter: FilterConfig = option(FilterConfig, "which training pairs are left out")
    data_dir: str = option(DEFAULT_DATA_DIR, "folder to write", on_resume="free")
    experiment: str | None = option(
        None, "name or YAML file of settings for all commands", on_resume="free"
    )
    max_length: int = option(256, "longest training sentence, in tokens, EOS included", low=2)
    keep_text: bool = option(False, "store the text with the ids (columns src_text, tgt_text)")
    report_only: bool = option(
        False, "read the corpus, print the report, write nothing else", on_resume="free"
    )
    shard_pairs: int = option(100_000, "pairs read for one file of the data folder", low=1)
    scheduler: str | None = option(
        None,
        "address of a Dask scheduler whose workers share the work, such as tcp://host:8786",
        on_resume="free",
    )
    seed: int = option(0, "for sampling and data=copy", low=0, high=LARGEST_SEED)
    num_threads: int = option(
        0, "processes that encode; 0: one per CPU core", low=0, high=1024, on_resume="free"
    )

    def __post_init__(self) -> None:
        check_ranges(self)
