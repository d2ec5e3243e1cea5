"""Settings of the text: training corpora, validation set and test set."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from nmt.config.options import Settings, option, require_valid
from nmt.config.tokenizer import check_symbol
from nmt.errors import ConfigError

LINE_SEPARATORS = ("<sep>", "__sep__")
"""Symbols that separate the lines of a text, for models that translate with context. The second
symbol is for Mozilla's models.
"""


class Corpus(str, Enum):
    """The user's own text in files or datasets, or a corpus that comes with nmt."""

    files = "files"
    numbers = "numbers"  # included: number names
    copy = "copy"  # included: sequences to copy


class InvalidLinePolicy(str, Enum):
    """How to treat a line that is not UTF-8."""

    error = "error"  # stop and name file, line and byte
    # replace invalid bytes with U+FFFD, and count them
    # (mypy must ignore that this member replaces the method str.replace)
    replace = "replace"  # type: ignore[assignment]
    drop = "drop"  # drop the training pair, and count it; in held-out lines, as `replace`


class SplitBy(str, Enum):
    """The text whose hash decides whether `num_pairs` takes a pair out of the training text."""

    pair = "pair"  # source and target
    src = "src"  # the source; if num_pairs is a share, new translations of a sentence join its set
    tgt = "tgt"  # the target


@dataclass(kw_only=True)
class SplitConfig(Settings):
    """Where the text of a training corpus or of a held-out set is: files or a Hugging Face dataset.

    A setting for files takes a name, a pattern with * and ?, or a list of these; - is stdin. The
    files of a pattern are read in the order of their names. Files may be compressed: .gz, .bz2, .xz
    or .zst.
    """

    src: list[str] | None = option(None, "source text: file, glob, list or - (stdin)")
    tgt: list[str] | None = option(None, "target text, aligned with src line by line")
    tsv: list[str] | None = option(None, "both sides in one file, with tabs between columns")
    columns: list[int] = option(
        [1, 2],
        "columns of the TSV, counted from 1: source, target, and optionally alignment",
    )
    alignments: list[str] | None = option(
        None, "word alignment of src and tgt: links of words in each line, such as 0-0 1-2"
    )
    tmx: list[str] | None = option(None, "both sides in a translation memory (TMX)")
    xliff: list[str] | None = option(None, "both sides in an XLIFF file, version 1.2 or 2")
    keep_codes: bool = option(
        False, "keep formatting codes in the text of TMX and XLIFF, such as the content of <ph>"
    )
    jsonl: list[str] | None = option(None, "both sides in one file, one JSON object per line")
    fields: list[str] = option(
        [],
        "names of the JSON or dataset fields with source, target and, optionally, alignment; by "
        "default, the values of src_lang and tgt_lang",
    )
    score: str | None = option(
        None,
        "column of the TSV, from 1, or JSON field, such as a or a.b, with a score of each pair",
    )
    scores: list[str] | None = option(
        None, "files with a score for each line: a number, or a JSON object with the field score"
    )
    dataset: str | None = option(None, "Hugging Face dataset: hub name, local folder or file")
    dataset_config: str | None = option(None, "configuration of the dataset, for example de-en")
    dataset_split: str | None = option(None, "split of the dataset, for example train")

    def check(self) -> None:
        keys = self.text_keys
        if len(keys) > 1:
            raise ConfigError(f"{keys[0]} and {keys[1]} are both given for one split; keep one")
        if self.src is not None:
            self.require(self.tgt is not None, "src", "is given without tgt; give both sides")
        if self.tgt is not None:
            self.require(self.src is not None, "tgt", "is given without src; give both sides")
        if self.alignments is not None:
            problem = (
                "needs src and tgt; a TSV or JSON has the alignment in a third column or field"
            )
            self.require(self.src is not None, "alignments", problem)
        for key in ("src", "tgt", "tsv", "jsonl", "tmx", "xliff", "scores", "alignments"):
            is_empty_list = getattr(self, key) == []
            self.require(not is_empty_list, key, "must name at least one file")
        are_valid_columns = len(self.columns) in (2, 3) and min(self.columns) >= 1
        problem = "must be two numbers from 1: source, target; or three, with the alignment"
        self.require(are_valid_columns, "columns", problem)
        problem = "must be two: source, target; or three, with the alignment"
        self.require(len(self.fields) in (0, 2, 3), "fields", problem)
        self._check_scores()

    def _check_scores(self) -> None:
        """Raise a `ConfigError` for scores that do not fit the source of the text."""
        if self.scores is not None:
            self.require(self.src is not None, "scores", "needs src and tgt, line by line")
        if self.score is not None:
            has_columns_or_fields = (
                self.tsv is not None or self.jsonl is not None or self.scores is not None
            )
            self.require(has_columns_or_fields, "score", "needs tsv, jsonl or scores")
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

        In a TSV, the alignment is the third column; in JSON or a dataset, the third field.
        """
        if self.tsv is not None:
            return len(self.columns) == 3
        if self.jsonl is not None or self.dataset is not None:
            return len(self.fields) == 3
        return self.alignments is not None

    @property
    def text_keys(self) -> list[str]:
        """The settings that name the text; `check` allows at most one of them."""
        keys = ("src", "tsv", "jsonl", "tmx", "xliff", "dataset")
        return [key for key in keys if getattr(self, key) is not None]


@dataclass(kw_only=True)
class HeldOutConfig(SplitConfig):
    """A validation or test set: separate text, or pairs taken out of the training text."""

    num_pairs: float | None = option(
        None,
        "instead of files: number of pairs to take out of train; below 1: share of its pairs",
        above=0,
    )

    def check(self) -> None:
        super().check()
        if self.num_pairs is not None and self.num_pairs >= 1:
            is_whole = self.num_pairs == int(self.num_pairs)
            self.require(is_whole, "num_pairs", "must be a whole number, or a share below 1")

    @property
    def text_keys(self) -> list[str]:
        """The settings that name the text or take it from train; `check` allows at most one."""
        keys = super().text_keys
        if self.num_pairs is not None:
            keys.append("num_pairs")
        return keys


@dataclass(kw_only=True)
class CorpusConfig(SplitConfig):
    """One of several training corpora."""

    weight: float = option(  # if it is changed, only the index of the data folder is written again
        1.0,
        "how often an epoch contains each pair; 0 leaves the corpus out",
        low=0,
        on_resume="accept",
    )
    src_lang: str | None = option(None, "source language, if corpora differ in it")
    tgt_lang: str | None = option(
        None, "target language, if corpora differ in it; its tag becomes src_tag"
    )
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
                check_symbol(key, tag)

    @property
    def is_tagged(self) -> bool:
        """Whether source or target lines get a tag. `tgt_lang` gives source lines a tag."""
        settings = (self.tgt_lang, self.src_tag, self.tgt_tag)
        return any(setting is not None for setting in settings)


@dataclass(kw_only=True)
class DataConfig(Settings):
    """Text of the training, validation and test sets.

    The training text is `train`, or several named `corpora`. `corpus` chooses a corpus that comes
    with nmt instead, including its validation and test sets.
    """

    key_prefix = "data."
    corpus: Corpus = option(
        Corpus.files, "files (or datasets), or a corpus that comes with nmt: numbers, copy"
    )
    src_lang: str = option(
        "src", "source language code; also the name of the source field of a dataset"
    )
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
        LINE_SEPARATORS[0],
        "symbol between the lines of a context: <sep>, or __sep__ as in Mozilla's models",
    )
    # if it is changed, only the index of the data folder is written again
    temperature: float = option(
        1.0,
        "above 1: makes the shares of corpora more equal: weight * size^(1/temperature)",
        low=1,
        on_resume="accept",
    )
    valid: HeldOutConfig = option(HeldOutConfig, "validation pairs")
    test: HeldOutConfig = option(HeldOutConfig, "test pairs, copied as text into the data folder")
    split_by: SplitBy = option(
        SplitBy.pair, "text whose hash decides which pairs num_pairs takes: pair, src or tgt"
    )
    invalid: InvalidLinePolicy = option(
        InvalidLinePolicy.error, "lines that are not UTF-8: error, replace or drop"
    )
    max_stream_gb: float = option(
        16.0,
        "maximum size of a text from stdin or a pipe, unpacked, in GB",
        above=0,
        on_resume="accept",
    )
    license: str | None = option(  # if it is changed, only the report is written again
        None,
        "license of the text, such as cc-by-4.0, for the README.md of models",
        on_resume="accept",
    )
    made_by: str | None = option(
        None,
        "command that makes the files; shown in the error if they are missing",
        on_resume="accept",
    )

    def check(self) -> None:
        problem = f"must be {' or '.join(LINE_SEPARATORS)}"
        self.require(self.separator in LINE_SEPARATORS, "separator", problem)
        for name in self.corpora:
            is_valid_name = re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None
            problem = "the name of a corpus has only letters, digits, _, . and -"
            require_valid(is_valid_name, "data.corpora", name, problem)
        if self.corpora and self.train.text_keys:
            raise ConfigError(
                "data.train and data.corpora are both given; name the first corpus too: "
                "data.corpora.NAME.src=FILE"
            )
        self._check_num_pairs()
        self._check_context()
        splits = {"train": self.train, "valid": self.valid, "test": self.test}
        splits_with_text = [f"data.{name}" for name, split in splits.items() if split.text_keys]
        if self.corpora:
            splits_with_text.append("data.corpora")
        if self.corpus is not Corpus.files:
            problem = (
                f"comes with its text; leave out {', '.join(splits_with_text)}, or set data=files"
            )
            self.require(not splits_with_text, "corpus", problem)
        self._check_tags()

    @property
    def has_scores(self) -> bool:
        """Whether pairs of a training corpus have scores."""
        corpora = [self.train, *self.corpora.values()]
        return any(corpus.has_scores for corpus in corpora)

    def train_split(self, corpus: str) -> SplitConfig:
        """Return the settings of the corpus with this name in `corpora`, or of `train` for ""."""
        if corpus:
            return self.corpora[corpus]
        return self.train

    def _check_context(self) -> None:
        """Raise a `ConfigError` if there are texts that cannot have a `context`."""
        if not self.context:
            return
        for split in (self.train, *self.corpora.values()):
            problem = "does not work with an alignment of words"
            self.require(not split.has_alignment, "context", problem)
        takes_pairs_from_train = any(
            split.num_pairs is not None for split in (self.valid, self.test)
        )
        problem = (
            "does not work with num_pairs, which takes single pairs; give files of documents for "
            "data.valid and data.test"
        )
        self.require(not takes_pairs_from_train, "context", problem)

    def _check_num_pairs(self) -> None:
        """Raise a `ConfigError` if one `num_pairs` is a share and the other one a number.

        Two shares must also add up to less than 1.
        """
        splits = (self.valid, self.test)
        sizes = [split.num_pairs for split in splits if split.num_pairs is not None]
        has_share = any(size < 1 for size in sizes)
        if has_share:
            require_valid(
                sum(sizes) < 1,  # false if the other size is a number of pairs
                "num_pairs of data.valid and data.test",
                sizes,
                "must both be numbers of pairs, or shares that add up to less than 1",
            )

    def _check_tags(self) -> None:
        """Raise a `ConfigError` if all corpora have tags, but `valid` or `test` names files.

        The lines of these files would have no tag.
        """
        all_are_tagged = all(corpus.is_tagged for corpus in self.corpora.values())
        if not self.corpora or not all_are_tagged:
            return
        for name, split in (("valid", self.valid), ("test", self.test)):
            takes_pairs_from_train = split.num_pairs is not None  # with their tags
            if split.text_keys and not takes_pairs_from_train:
                raise ConfigError(
                    f"data.{name} has no tag, but every corpus in data.corpora has one; give "
                    f"data.corpora.NAME.{name} instead"
                )
