"""Settings of corpora, tokenizer and `nmt-preprocess`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from nmt.config.options import DEFAULT_DATA_DIR, LARGEST_SEED, Settings, option, require_valid
from nmt.errors import ConfigError

NORMALIZATIONS = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity")
# control symbols and bytes, which are pieces of every tokenizer
_RESERVED = re.compile("<pad>|<unk>|<s>|</s>|<0x[0-9A-F]{2}>")


class Corpus(str, Enum):
    """Where the parallel text comes from: files or datasets, or a corpus included in nmt."""

    files = "files"
    numbers = "numbers"  # included: number names
    copy = "copy"  # included: sequences to copy


class Invalid(str, Enum):
    """How to treat a line that is not UTF-8."""

    error = "error"  # stop and name file, line and byte
    # replace invalid bytes with U+FFFD, and count them
    replace = "replace"  # type: ignore[assignment]  # shadows str.replace
    drop = "drop"  # drop and count the training pair; replace in held-out lines


class Duplicates(str, Enum):
    """Which training pairs to drop as duplicates of an earlier pair."""

    keep = "keep"  # none
    pair = "pair"  # pairs with the same source and target
    src = "src"  # pairs with the same source
    tgt = "tgt"  # pairs with the same target


class TokenizerType(str, Enum):
    """How SentencePiece segments text into pieces."""

    bpe = "bpe"  # Sennrich et al. (2016), as in the paper
    unigram = "unigram"  # Kudo (2018)
    word = "word"  # words and punctuation marks, as in the Annotated Transformer
    space = "space"  # the tokens between spaces, for text that is tokenized already


WORD_TYPES = (TokenizerType.word, TokenizerType.space)
"""Types of tokenizers whose pieces are whole words. Other words are unknown."""
_DEFAULT_MIN_FREQ = 2


def _check_symbol(key: str, symbol: str) -> None:
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


SEPARATORS = ("<sep>", "__sep__")
"""The symbols between the lines of a text, in models that translate with context. The second is the
one of Mozilla's models."""


@dataclass(kw_only=True)
class SplitConfig(Settings):
    """Source of sentence pairs: files or one Hugging Face dataset.

    A setting for files takes a name, a pattern with * and ?, or a list of these; - is stdin. The
    files of a pattern are read in the order of their names. Files may be compressed: .gz, .bz2, .xz
    or .zst.
    """

    src: list[str] | None = option(None, "source text: file, glob, list or - (stdin)")
    tgt: list[str] | None = option(None, "target text, aligned with src line by line")
    tsv: list[str] | None = option(None, "both sides in one file, with tabs between columns")
    columns: list[int] = option(
        [1, 2], "columns of the TSV with source, target and, if there is one, alignment, from 1"
    )
    alignments: list[str] | None = option(
        None, "word alignment of src and tgt: links of words in each line, such as 0-0 1-2"
    )
    tmx: list[str] | None = option(None, "both sides in a translation memory (TMX)")
    xliff: list[str] | None = option(None, "both sides in an XLIFF file, version 1.2 or 2")
    keep_codes: bool = option(
        False, "keep the codes in the text of TMX and XLIFF, such as the content of <ph>"
    )
    jsonl: list[str] | None = option(None, "both sides in one file, one JSON object per line")
    fields: list[str] = option(
        [],
        "JSON or dataset fields with source, target and, if there is one, alignment; empty: "
        "src_lang and tgt_lang",
    )
    score: str | None = option(
        None, "score of each pair: a column of the TSV, from 1, or a JSON field, such as a or a.b"
    )
    scores: list[str] | None = option(
        None, "scores of src and tgt, line by line: numbers, or JSON objects with the field score"
    )
    dataset: str | None = option(None, "Hugging Face dataset: hub name, local folder or file")
    dataset_config: str | None = option(None, "its configuration, for example de-en")
    dataset_split: str | None = option(None, "its split, for example train")

    def check(self) -> None:
        keys = self.source_keys
        if len(keys) > 1:
            raise ConfigError(f"{keys[0]} and {keys[1]} are both given for one split; keep one")
        if self.tgt is None:
            self.require(self.src is None, "src", "is given without tgt; give both sides")
        if self.src is None:
            self.require(self.tgt is None, "tgt", "is given without src; give both sides")
        if self.src is None:
            rule = "needs src and tgt; a TSV or JSON has the alignment in a third column or field"
            self.require(self.alignments is None, "alignments", rule)
        for key in ("src", "tgt", "tsv", "jsonl", "tmx", "xliff", "scores", "alignments"):
            self.require(getattr(self, key) != [], key, "must name at least one file")
        are_columns = len(self.columns) in (2, 3) and min(self.columns) >= 1
        rule = "must be two numbers from 1: source, target; or three, with the alignment"
        self.require(are_columns, "columns", rule)
        rule = "must be two: source, target; or three, with the alignment"
        self.require(len(self.fields) in (0, 2, 3), "fields", rule)
        if self.scores is not None:
            self.require(self.src is not None, "scores", "needs src and tgt, line by line")
        if self.score is not None:
            is_bitext = self.tsv is not None or self.jsonl is not None
            is_valid = is_bitext or self.scores is not None
            self.require(is_valid, "score", "needs tsv, jsonl or scores")
        if self.tsv is not None and self.score is not None:
            is_column = self.score.isdecimal() and int(self.score) >= 1
            self.require(is_column, "score", "must be the number of a column of the TSV, from 1")

    @property
    def has_scores(self) -> bool:
        """Whether pairs have scores."""
        return self.score is not None or self.scores is not None

    @property
    def has_alignment(self) -> bool:
        """Whether the text comes with a word alignment.

        A third column is one in a TSV, and a third field in JSON or a dataset.
        """
        if self.tsv is not None:
            return len(self.columns) == 3
        if self.jsonl is not None or self.dataset is not None:
            return len(self.fields) == 3
        return self.alignments is not None

    @property
    def source_keys(self) -> list[str]:
        """Names of the settings that name the text; `check` allows at most one for a split."""
        keys = ("src", "tsv", "jsonl", "tmx", "xliff", "dataset")
        return [key for key in keys if getattr(self, key) is not None]


@dataclass(kw_only=True)
class HeldOutConfig(SplitConfig):
    """A validation or test set: separate text, or pairs taken out of the training text."""

    num_pairs: float | None = option(
        None, "number of pairs to take out of train instead; below 1: a share of its pairs", above=0
    )

    def check(self) -> None:
        super().check()
        if self.num_pairs is not None and self.num_pairs >= 1:
            is_whole = self.num_pairs == int(self.num_pairs)
            self.require(is_whole, "num_pairs", "must be a whole number, or a share below 1")

    @property
    def source_keys(self) -> list[str]:
        """Names of the settings that name the text; `check` allows at most one for a split."""
        keys = super().source_keys
        if self.num_pairs is not None:
            keys.append("num_pairs")
        return keys


@dataclass(kw_only=True)
class CorpusConfig(SplitConfig):
    """One of several training corpora."""

    weight: float = option(  # a change rewrites only the index of the data folder
        1.0,
        "how often an epoch contains each pair; 0 leaves the corpus out",
        low=0,
        on_resume="free",
    )
    src_lang: str | None = option(None, "source language, if corpora differ in it")
    tgt_lang: str | None = option(None, "target language, if corpora differ in it; sets src_tag")
    src_tag: str | None = option(None, "tag before every source line, such as <2de>")
    tgt_tag: str | None = option(
        None, "tag before every target line; it is not part of a translation"
    )
    valid: SplitConfig = option(SplitConfig, "validation pairs of the corpus")
    test: SplitConfig = option(SplitConfig, "test pairs of the corpus")

    def check(self) -> None:
        super().check()
        for key in ("src_tag", "tgt_tag"):
            tag = getattr(self, key)
            if tag is not None:
                _check_symbol(key, tag)

    @property
    def is_tagged(self) -> bool:
        """Whether source or target lines get a tag."""
        # tgt_lang sets src_tag, see `corpus_direction`
        settings = (self.tgt_lang, self.src_tag, self.tgt_tag)
        return any(setting is not None for setting in settings)


@dataclass(kw_only=True)
class FilterConfig(Settings):
    """Rules for training pairs to drop.

    Empty pairs and pairs longer than `max_length` are always dropped, held-out pairs never.
    """

    prefix = "filter."
    max_ratio: float = option(0.0, "maximum ratio of the token counts of both sides; 0 disables")
    min_score: float | None = option(
        None, "drop pairs with a lower score; needs data.train.score", low=-(10**6), high=10**6
    )
    identical: bool = option(False, "drop pairs whose source equals the target")
    numbers: bool = option(False, "drop pairs whose sides have different numbers")
    urls: bool = option(False, "drop pairs whose sides have different web or e-mail addresses")
    currency: bool = option(False, "drop pairs whose sides both have currency signs, but others")
    min_letters: float = option(
        0.0,
        "minimum share of letters among the characters of a side, without spaces",
        low=0,
        high=1,
    )
    max_word_length: int = option(
        0, "maximum characters of a word, between spaces; 0 disables", low=0
    )
    duplicates: Duplicates = option(
        Duplicates.keep,
        "drop pairs that repeat a pair, src or tgt, except the one with the best score, or the "
        "first; keep: drop none",
    )
    max_unknown: float = option(1.0, "maximum share of unknown and byte tokens", low=0, high=1)
    max_foreign: float = option(1.0, "maximum share of letters of other scripts", low=0, high=1)
    src_scripts: list[str] = option([], "scripts of the source, such as Latin; empty: by language")
    tgt_scripts: list[str] = option([], "scripts of the target; empty: by language")
    language: bool = option(False, "drop pairs in other languages (pip install nmt[langid])")

    def check(self) -> None:
        is_valid = self.max_ratio == 0 or self.max_ratio >= 1
        self.require(is_valid, "max_ratio", "must be 0 or at least 1")

    @property
    def drops_duplicates(self) -> bool:
        """Whether repeated pairs are dropped."""
        return self.duplicates is not Duplicates.keep


@dataclass(kw_only=True)
class DataConfig(Settings):
    """Text of the training, validation and test sets."""

    prefix = "data."
    corpus: Corpus = option(
        Corpus.files, "files (or datasets), or a corpus that comes with nmt: numbers, copy"
    )
    src_lang: str = option("src", "source language code; names fields of datasets")
    tgt_lang: str = option("tgt", "target language code; also chooses BLEU's tokenizer")
    train: SplitConfig = option(SplitConfig, "training pairs")
    corpora: dict[str, CorpusConfig] = option(dict, "several named training corpora, by name")
    context: int = option(
        0,
        "maximum number of preceding lines on both sides of a pair",
        low=0,
        high=100,
    )
    separator: str = option(
        SEPARATORS[0],
        "symbol between the lines of a context: <sep>, or __sep__ as in Mozilla's models",
    )
    temperature: float = option(  # a change rewrites only the index of the data folder
        1.0,
        "above 1: evens out the corpora: weight * size^(1/temperature)",
        low=1,
        on_resume="free",
    )
    valid: HeldOutConfig = option(HeldOutConfig, "validation pairs")
    test: HeldOutConfig = option(HeldOutConfig, "test pairs, copied as text into the data folder")
    invalid: Invalid = option(Invalid.error, "lines that are not UTF-8: error, replace or drop")
    max_stream_gb: float = option(
        16.0,
        "maximum size of a text from stdin or a pipe, unpacked, in GB",
        above=0,
        on_resume="free",
    )
    license: str | None = option(  # a change rewrites only the report
        None,
        "license of the text, such as cc-by-4.0, for the README.md of models",
        on_resume="free",
    )
    made_by: str | None = option(
        None,
        "command that makes the files, for the message when they are missing",
        on_resume="free",
    )

    def check(self) -> None:
        rule = f"must be {' or '.join(SEPARATORS)}"
        self.require(self.separator in SEPARATORS, "separator", rule)
        for name in self.corpora:
            is_valid_name = re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None
            rule = "the name of a corpus has only letters, digits, _, . and -"
            require_valid(is_valid_name, "data.corpora", name, rule)
        if self.corpora and self.train.source_keys:
            raise ConfigError(
                "data.train and data.corpora are both given; name the first corpus too: "
                "data.corpora.NAME.src=FILE"
            )
        self._check_num_pairs()
        for split in (self.train, *self.corpora.values()):
            rule = "does not work with an alignment of words"
            self.require(not (self.context and split.has_alignment), "context", rule)
        is_drawn = any(split.num_pairs is not None for split in (self.valid, self.test))
        rule = (
            "does not work with num_pairs, whose pairs are not documents; give files of documents"
        )
        self.require(not (self.context and is_drawn), "context", rule)
        splits = {"train": self.train, "valid": self.valid, "test": self.test}
        text_keys = [f"data.{name}" for name, split in splits.items() if split.source_keys]
        if self.corpora:
            text_keys.append("data.corpora")
        if self.corpus is not Corpus.files:
            rule = f"has all its text; leave out {', '.join(text_keys)}, or set data=files"
            self.require(not text_keys, "corpus", rule)
        self._check_tags()

    @property
    def has_scores(self) -> bool:
        """Whether pairs of a training corpus have scores."""
        corpora = [self.train, *self.corpora.values()]
        return any(corpus.has_scores for corpus in corpora)

    def train_split(self, corpus: str) -> SplitConfig:
        """Return the settings of a training corpus, which is "" for `data.train`."""
        return self.corpora[corpus] if corpus else self.train

    def _check_num_pairs(self) -> None:
        """Raise a `ConfigError` unless both `num_pairs` are numbers, or shares below 1 together."""
        splits = (self.valid, self.test)
        counts = [split.num_pairs for split in splits if split.num_pairs is not None]
        if any(count < 1 for count in counts):
            require_valid(
                sum(counts) < 1,
                "num_pairs of data.valid and data.test",
                counts,
                "must both be numbers, or both be shares, below 1 together",
            )

    def _check_tags(self) -> None:
        """Raise a `ConfigError` for a held-out set without a tag if all corpora have one."""
        if not self.corpora or not all(corpus.is_tagged for corpus in self.corpora.values()):
            return
        for name, split in (("valid", self.valid), ("test", self.test)):
            if split.source_keys and split.num_pairs is None:
                raise ConfigError(
                    f"data.{name} has no tag, but every corpus in data.corpora has one; give "
                    f"data.corpora.NAME.{name} instead"
                )


@dataclass(kw_only=True)
class TokenizerConfig(Settings):
    """The SentencePiece model (section 5.1 of the paper: joint BPE, about 37,000 tokens)."""

    prefix = "tokenizer."
    model: str | None = option(
        None, "SentencePiece .model, or folder of a model, to use instead of training one"
    )
    tgt_model: str | None = option(None, "separate: SentencePiece .model of the target")
    extend: int | None = option(
        None,
        "add missing symbols and tags to tokenizer.model, and up to this number of pieces of the "
        "new text; null: add none",
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
        "pieces, control symbols included; null: 37,000, or for less text at most 8,000; all words "
        "with type=word or space",
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
            rule = f"must be at least {min_size} (bytes, control symbols and one piece)"
            self.require(self.vocab_size >= min_size, "vocab_size", rule)
        is_known = self.normalization in NORMALIZATIONS
        self.require(is_known, "normalization", f"must be one of {', '.join(NORMALIZATIONS)}")
        if self.type in WORD_TYPES:
            is_lowercase = self.normalization.endswith("_cf")
            rule = f"does not work with tokenizer.type={self.type.value}; change the text instead"
            self.require(not is_lowercase, "normalization", rule)
        else:
            rule = "needs tokenizer.type=word or tokenizer.type=space"
            self.require(self.min_freq == _DEFAULT_MIN_FREQ, "min_freq", rule)
        for symbol in self.symbols:
            _check_symbol("tokenizer.symbols", symbol)
        if self.separate and self.model is not None:
            rule = "is of one side with tokenizer.separate=true; give tokenizer.tgt_model=FILE too"
            self.require(self.tgt_model is not None, "model", rule)
        else:
            rule = "needs tokenizer.model=FILE and tokenizer.separate=true"
            self.require(self.tgt_model is None, "tgt_model", rule)
        is_extensible = self.extend is None or self.model is not None
        self.require(is_extensible, "extend", "needs tokenizer.model=RUN, a model to extend")

    @property
    def learns_from_text(self) -> bool:
        """Whether the training text is needed to make the tokenizer."""
        return self.model is None or bool(self.extend)


@dataclass(kw_only=True)
class PreprocessConfig(Settings):
    """Settings of `nmt-preprocess`."""

    data: DataConfig = option(DataConfig, "the text")
    tokenizer: TokenizerConfig = option(TokenizerConfig, "the subword tokenizer")
    filter: FilterConfig = option(FilterConfig, "which training pairs are dropped")
    data_dir: str = option(DEFAULT_DATA_DIR, "folder to write", on_resume="free")
    overwrite: bool = option(
        False, "replace a data folder of other text or settings", on_resume="free"
    )
    experiment: str | None = option(
        None, "name or YAML file of settings for all commands", on_resume="free"
    )
    max_length: int = option(
        256, "maximum tokens of a training sentence, EOS included; longer pairs are dropped", low=2
    )
    keep_text: bool = option(
        False, "store the text with the token ids (columns src_text, tgt_text)"
    )
    shard_pairs: int = option(100_000, "training pairs per file of the data folder", low=1)
    scheduler: str | None = option(
        None,
        "address of a Dask scheduler whose workers share the work, such as tcp://host:8786",
        on_resume="free",
    )
    seed: int = option(
        0, "for sampling lines and pairs, and for data=copy", low=0, high=LARGEST_SEED
    )
    num_threads: int = option(
        0, "worker processes; 0: one per CPU core", low=0, high=1024, on_resume="free"
    )

    def check(self) -> None:
        has_scores = self.data.has_scores or self.filter.min_score is None
        rule = "needs scores: data.train.score=COLUMN of data.train.tsv, or data.train.scores=FILE"
        require_valid(has_scores, "filter.min_score", self.filter.min_score, rule)
