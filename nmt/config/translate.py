"""Settings of `nmt-translate`, `nmt-distill`, `nmt-backtranslate` and `nmt-score`.

All but `nmt-score` continue an interrupted job, even if settings with `on_resume="accept"` have
changed. If any other setting has changed, they start over.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from nmt.config.options import OutputFormat, normalize_stream, option
from nmt.config.rerank import RerankConfig, RerankScore
from nmt.config.runtime import Engine, InferenceConfig
from nmt.config.search import ScoringOverrides, SearchOverrides, override_search_setting
from nmt.errors import ConfigError


class Combine(str, Enum):
    """How the models of an ensemble are combined to predict the next token."""

    probabilities = "probabilities"  # the mean of their probabilities
    log_probabilities = "log_probabilities"  # the mean of their log-probabilities


class TooLong(str, Enum):
    """How to treat a line of more than `max_source_length` tokens."""

    # split at ends of sentences, else of clauses, else at spaces; join the translations
    # (mypy must ignore that this member replaces the method str.split)
    split = "split"  # type: ignore[assignment]
    truncate = "truncate"  # leave out the tokens beyond the limit; count the lines
    error = "error"  # stop and name the line


class ScoreMeasure(str, Enum):
    """What `nmt-score` writes for each pair. The first three are in nats."""

    log_prob = "log_prob"  # the sum of log-probabilities over all tokens, EOS included
    per_token = "per_token"  # log_prob divided by the number of tokens, EOS included
    score = "score"  # the score that search ranks by: normalized, with rewards and penalties
    # from 0 to 1: agreement with a model of the reverse direction, Junczys-Dowmunt (2018)
    dual = "dual"
    # in nats per token: how much more likely the target is with its source than with other sources
    contrast = "contrast"
    alignment = "alignment"  # links of words, such as 0-0 1-2


@dataclass(kw_only=True)
class LanguagePairConfig(InferenceConfig):
    """Settings of the commands that translate or score lines of one language pair."""

    combine: Combine = option(
        Combine.probabilities, "mean over an ensemble: probabilities or log_probabilities"
    )
    src_lang: str = option("", "source language, if the model has several")
    tgt_lang: str = option("", "target language, if the model has several")
    src_tag: str = option(
        "", "tag to put before every source line, such as <2de>; replaces src_lang and tgt_lang"
    )
    tgt_tag: str = option("", "tag before every target line; it is not part of the translation")

    def check(self) -> None:
        super().check()
        if len(self.model_dir) == 1:
            is_default = self.combine is Combine.probabilities
            self.require(is_default, "combine", "needs several models: model_dir=[a,b]")

    @property
    def language_options(self) -> dict[str, Any]:
        """The languages and tags, as keyword arguments for methods of a translator."""
        return {
            "src_lang": self.src_lang,
            "tgt_lang": self.tgt_lang,
            "src_tag": self.src_tag,
            "tgt_tag": self.tgt_tag,
        }


@dataclass(kw_only=True)
class FileTranslationConfig(SearchOverrides, RerankConfig, LanguagePairConfig):
    """Settings of all commands that translate files.

    Settings of search, such as `sampling`, come from `SearchOverrides`. Settings of reranking, such
    as `rerank`, come from `RerankConfig`. `backend` comes from `InferenceConfig`.
    """

    too_long: TooLong = option(
        TooLong.split, "lines longer than max_source_length: split, truncate or error"
    )
    # at least 8, since a line of one character has up to 6 tokens: a space, four bytes and EOS
    max_source_length: int = option(
        256, "maximum number of source tokens translated at once, EOS included", low=8
    )
    recase: bool = option(
        True,
        "lines in capitals or in title case: convert to ordinary case, translate, and convert the "
        "translation back",
    )
    copy_symbols: bool = option(
        True,
        "copy addresses, emoji and other symbols: lines that consist of them, and emoji and "
        "addresses at the ends of lines",
    )
    unk_replacement: bool = option(
        False,
        "replace each unknown token of a translation with the source word that it attends to most",
    )
    max_tokens: int | None = option(
        None,
        "maximum size of a batch: rows * beam * longest source; null: chosen for the device",
        low=1,
        on_resume="accept",
    )
    window_lines: int = option(
        2048, "lines that are read, sorted by length and translated together", low=1
    )
    devices: int = option(
        1,
        "processes on this machine; 0: one per GPU, or one on a CPU",
        low=0,
        high=1024,
        on_resume="accept",
    )
    scheduler: str | None = option(
        None,
        "address of a Dask scheduler whose workers translate, such as tcp://host:8786",
        on_resume="accept",
    )

    def check(self) -> None:
        super().check()
        if self.scheduler is not None:
            self.require(self.devices == 1, "devices", "does not work with scheduler")


@dataclass(kw_only=True)
class TranslateConfig(FileTranslationConfig):
    """Settings of `nmt-translate`."""

    # paths of these files may change: a resumed job compares their text
    input: str = option(
        "-", "file of text to translate, one sentence per line; -: stdin", on_resume="accept"
    )
    output: str = option(
        "-",
        "file for translations, which an interrupted job continues; -: stdout",
        on_resume="accept",
    )
    prefixes: str | None = option(
        None,
        "file of the first words of each translation, line by line; lines may be empty",
        on_resume="accept",
    )
    context: int = option(
        0,
        "number of preceding lines given to a model trained with data.context",
        low=0,
        high=100,
    )
    n_best: int = option(1, "hypotheses written per sentence", low=1)
    # settings of search: the default None keeps the value that is saved with the model
    alternatives: int | None = override_search_setting("alternatives")
    alignment: bool | None = override_search_setting("alignment")
    format: OutputFormat = option(
        OutputFormat.text,
        "text: translations, or n-best lists of Moses if n_best is above 1; json: one object per "
        "line",
    )

    def check(self) -> None:
        super().check()
        is_text = self.format is OutputFormat.text
        if is_text:
            self.require(not self.alignment, "alignment", "needs format=json")
        if self.alternatives:
            problem = "sets the number of translations itself; leave out n_best"
            self.require(self.n_best == 1, "alternatives", problem)
        if self.context > 0:
            is_possible = is_text and self.n_best == 1 and self.prefixes is None
            problem = "only works with format=text, n_best=1 and no prefixes"
            self.require(is_possible, "context", problem)
            self.require(self.rerank is RerankScore.none, "context", "does not work with rerank")
        # /dev/stdin and /dev/stdout become -
        self.input = normalize_stream(self.input)
        self.output = normalize_stream(self.output)


def _corpus_folder_option(default: str) -> Any:
    """Declare the setting `output` of a command that writes a corpus."""
    return option(default, "folder to write: src.txt, tgt.txt, summary.json", on_resume="accept")


@dataclass(kw_only=True)
class SynthesisConfig(FileTranslationConfig):
    """Settings of the commands that write a corpus of text and its translations."""

    # paths of these files may change: a resumed job compares their text
    input: list[str] | None = option(
        None, "text to translate: file, glob, list or - (stdin)", on_resume="accept"
    )
    output: str = _corpus_folder_option("data/synthetic")
    overwrite: bool = option(
        False, "replace a corpus of another model, text or settings", on_resume="accept"
    )
    max_ratio: float = option(
        3.0,
        "drop a pair if one side has more than this many times the tokens of the other; 0 disables",
    )
    max_repeats: int = option(
        4,
        "drop a pair whose translation repeats the same tokens more than this many times in a "
        "row; 0 disables",
        low=0,
    )

    def check(self) -> None:
        super().check()
        if not self.input:
            raise ConfigError("give input=FILE, the text to translate")
        self.input = [normalize_stream(file) for file in self.input]
        if self.sampling:
            # backend=auto is allowed, since it uses the native engine for sampling
            is_repeatable = self.backend is not Engine.ctranslate2
            problem = "cannot draw the same samples again after an interruption; use backend=native"
            self.require(is_repeatable, "backend", problem)
        is_valid = self.max_ratio == 0 or self.max_ratio >= 1
        self.require(is_valid, "max_ratio", "must be 0 or at least 1")


@dataclass(kw_only=True)
class DistillConfig(SynthesisConfig):
    """Settings of `nmt-distill`."""

    output: str = _corpus_folder_option("data/distilled")


@dataclass(kw_only=True)
class BacktranslateConfig(SynthesisConfig):
    """Settings of `nmt-backtranslate`."""

    output: str = _corpus_folder_option("data/backtranslated")
    tag: str = option(
        "<bt>",
        "tag that training should put before these sources; empty: none",
        on_resume="accept",
    )


@dataclass(kw_only=True)
class ScoreConfig(ScoringOverrides, LanguagePairConfig):
    """Settings of `nmt-score`."""

    src: str | None = option(None, "source text, one sentence per line; -: stdin")
    tgt: str | None = option(None, "translations of src, line by line; -: stdin")
    output: str = option("-", "file for scores; -: stdout")
    measure: ScoreMeasure = option(
        ScoreMeasure.log_prob,
        "log_prob (sum over tokens), per_token (mean), score (as search ranks), dual (agreement "
        "with reverse_model, 0 to 1), contrast (per_token minus its mean with other sources) or "
        "alignment (linked words, such as 0-0 1-2)",
    )
    contrast_lines: int = option(
        2, "measure=contrast: number of other lines that a line is compared with", low=1
    )
    reverse_model: list[str] | None = option(
        None,
        "run, checkpoint or model folder that translates back, for measure=dual or contrast; "
        "several folders are an ensemble",
    )
    format: OutputFormat = option(OutputFormat.text, "text, or json with all measures")
    alignment: bool | None = override_search_setting("alignment")
    max_tokens: int = option(4096, "maximum size of a batch: rows * longest side", low=1)
    window_lines: int = option(
        8192, "lines that are read, sorted by length and scored together", low=1
    )

    def check(self) -> None:
        super().check()
        if self.src is None or self.tgt is None:
            raise ConfigError("give src=FILE and tgt=FILE, aligned line by line")
        self.src = normalize_stream(self.src)
        self.tgt = normalize_stream(self.tgt)
        self.output = normalize_stream(self.output)
        are_both_stdin = self.src == "-" and self.tgt == "-"
        self.require(not are_both_stdin, "tgt", "src is stdin already; give tgt=FILE")
        if self.measure is ScoreMeasure.dual:
            problem = "needs reverse_model=FOLDER, a model of the other direction"
            self.require(bool(self.reverse_model), "measure", problem)
        if self.measure is ScoreMeasure.contrast:
            problem = "measure=contrast compares the lines of a window, so it needs 2 or more"
            self.require(self.window_lines > 1, "window_lines", problem)
        else:
            is_default = self.contrast_lines == ScoreConfig.contrast_lines
            self.require(is_default, "contrast_lines", "needs measure=contrast")
        if self.format is OutputFormat.text:
            self._check_text_format()
        if self.measure is ScoreMeasure.alignment:
            self.alignment = True

    def _check_text_format(self) -> None:
        """Raise a `ConfigError` for settings without effect on the output.

        `format=text` writes only the result that `measure` selects.
        """
        if self.reverse_model is not None:
            is_used = self.measure in (ScoreMeasure.dual, ScoreMeasure.contrast)
            problem = "only works with measure=dual, measure=contrast or format=json"
            self.require(is_used, "reverse_model", problem)
        if self.alignment:
            writes_alignment = self.measure is ScoreMeasure.alignment
            problem = "needs format=json, or measure=alignment"
            self.require(writes_alignment, "alignment", problem)
