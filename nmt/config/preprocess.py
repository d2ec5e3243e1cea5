"""Settings of `nmt-preprocess`, and of the filters of training pairs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nmt.config.corpora import DataConfig
from nmt.config.options import DEFAULT_DATA_DIR, LARGEST_SEED, Settings, option, require_valid
from nmt.config.tokenizer import TokenizerConfig


class Duplicates(str, Enum):
    """Which training pairs to drop as duplicates of an earlier pair."""

    keep = "keep"  # none
    pair = "pair"  # pairs with the same source and target
    src = "src"  # pairs with the same source
    tgt = "tgt"  # pairs with the same target


@dataclass(kw_only=True)
class FilterConfig(Settings):
    """Rules for dropping training pairs.

    Empty pairs and pairs longer than `max_length` are always dropped. Held-out pairs never are.
    """

    key_prefix = "filter."
    max_ratio: float = option(
        0.0,
        "drop a pair if one side has more than this many times the tokens of the other; 0 disables",
    )
    min_score: float | None = option(
        None, "drop pairs with a lower score; needs data.train.score", low=-(10**6), high=10**6
    )
    identical: bool = option(False, "drop pairs whose source equals the target")
    numbers: bool = option(False, "drop pairs whose sides have different numbers")
    urls: bool = option(False, "drop pairs whose sides have different web or e-mail addresses")
    currency: bool = option(
        False, "drop pairs whose sides both have currency signs, but different ones"
    )
    min_letters: float = option(
        0.0,
        "minimum share of letters in each side; spaces do not count",
        low=0,
        high=1,
    )
    max_word_length: int = option(
        0, "maximum characters of a word, between spaces; 0 disables", low=0
    )
    duplicates: Duplicates = option(
        Duplicates.keep,
        "drop pairs with the same pair, src or tgt as another; the pair with the best score stays, "
        "or else the first; keep drops none",
    )
    max_unknown: float = option(1.0, "maximum share of unknown and byte tokens", low=0, high=1)
    max_foreign: float = option(1.0, "maximum share of letters of other scripts", low=0, high=1)
    src_scripts: list[str] = option(
        [], "scripts of the source, such as Latin; empty: the scripts of its language"
    )
    tgt_scripts: list[str] = option([], "scripts of the target; empty: the scripts of its language")
    language: bool = option(False, "drop pairs in other languages (pip install nmt[langid])")

    def check(self) -> None:
        is_valid = self.max_ratio == 0 or self.max_ratio >= 1
        self.require(is_valid, "max_ratio", "must be 0 or at least 1")

    @property
    def drops_duplicates(self) -> bool:
        """Whether repeated pairs are dropped."""
        return self.duplicates is not Duplicates.keep


@dataclass(kw_only=True)
class PreprocessConfig(Settings):
    """Settings of `nmt-preprocess`."""

    data: DataConfig = option(DataConfig, "the text")
    tokenizer: TokenizerConfig = option(TokenizerConfig, "the subword tokenizer")
    filter: FilterConfig = option(FilterConfig, "which training pairs are dropped")
    data_dir: str = option(DEFAULT_DATA_DIR, "folder to write", on_resume="accept")
    overwrite: bool = option(
        False, "replace a data folder of other text or settings", on_resume="accept"
    )
    experiment: str | None = option(
        None, "name or YAML file of settings for all commands", on_resume="accept"
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
        on_resume="accept",
    )
    seed: int = option(
        0, "seed for sampling lines and pairs, and for data=copy", low=0, high=LARGEST_SEED
    )
    num_threads: int = option(
        0, "worker processes; 0: one per CPU core", low=0, high=1024, on_resume="accept"
    )

    def check(self) -> None:
        can_filter = self.data.has_scores or self.filter.min_score is None
        problem = (
            "needs scores: data.train.score=COLUMN of data.train.tsv, or data.train.scores=FILE"
        )
        require_valid(can_filter, "filter.min_score", self.filter.min_score, problem)
