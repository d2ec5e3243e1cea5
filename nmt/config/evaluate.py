"""Settings of `nmt-evaluate`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from nmt.config.options import OutputFormat, option
from nmt.config.rerank import RerankConfig, RerankScore, find_program
from nmt.config.runtime import VERIFY_KEY_HELP, RuntimeConfig
from nmt.config.search import SearchOverrides
from nmt.errors import ConfigError

# settings that have an effect only with a model, or only with a baseline
_ONLY_WITH_MODEL = ("split", "src_lang", "device", "by_length")
_ONLY_WITH_BASELINE = ("method", "num_samples", "seed")


class Metric(str, Enum):
    """Metrics with sacreBLEU's defaults.

    The best score is 100, and the worst is 0. TER is the exception: it is the number of edits per
    100 words of the reference, so a lower score is better.
    """

    bleu = "bleu"  # BLEU, Papineni et al. (2002)
    chrf = "chrf"  # chrF2, Popović (2015)
    chrfpp = "chrfpp"  # chrF2++, Popović (2017): adds word unigrams and bigrams
    ter = "ter"  # TER, Snover et al. (2006)


class HeldOutSplit(str, Enum):
    """Held-out sets of a data folder."""

    test = "test"
    valid = "valid"


class Perturbation(Enum):
    """Changes of the lines of a test set that imitate careless writing."""

    upper = "upper"  # source and references in capitals
    title = "title"  # source and references with the first letter of each word capital
    lower = "lower"  # source and references without capitals
    # source and references without their final punctuation, if both end with the same mark
    punct = "punct"
    typos = "typos"  # four typos in each source
    noise = "noise"  # a random word, emoji, symbol or address after source and references


class SignificanceMethod(str, Enum):
    """Tests of whether the scores of two systems differ significantly."""

    bootstrap = "bootstrap"  # Koehn (2004)
    approximate_randomization = "approximate_randomization"  # Riezler and Maxwell (2005)


@dataclass(kw_only=True)
class EvaluateConfig(SearchOverrides, RerankConfig, RuntimeConfig):
    """Settings of `nmt-evaluate`."""

    hypotheses: list[str] = option(
        [],
        "detokenized translations, one per line, or - for stdin; [a,b,c] compares b and c with a",
    )
    references: list[str] = option([], "reference files, aligned line by line: r.de or [r1,r2]")
    baseline: str | None = option(None, "translations of another system to compare with")
    model_dir: list[str] | None = option(
        None,
        "model, or ensemble [a,b], that translates src; a folder or pattern of runs prints a table",
    )
    src: str | None = option(None, "source text for model_dir, glossary or metric_command")
    data_dir: str | None = option(
        None, "data folder; model_dir translates its test set instead of src"
    )
    split: HeldOutSplit = option(HeldOutSplit.test, "test or valid set of data_dir")
    perturb: list[Perturbation] = option(
        [], "also translate perturbed text: upper, title, lower, punct, typos, noise"
    )
    by_length: bool = option(
        False, "also score groups of sources by length: 1 to 3 words, 4 to 10, ..."
    )
    metrics: list[Metric] = option(
        [Metric.bleu, Metric.chrf, Metric.ter], "bleu, chrf, chrfpp, ter"
    )
    tune: bool = option(
        False,
        "find weights for rerank=noisy_channel: the smallest ones whose score in the first of the "
        "metrics is almost the best",
    )
    metric_command: str | None = option(
        None, "command that reads JSON lines of src, mt and refs, and prints a number for each"
    )
    lemmas: str | None = option(
        None, "file of lines FORM<TAB>LEMMA, so that all forms of a term of the glossary count"
    )
    src_lang: str = option("", "source language, if the model has several")
    tgt_lang: str = option(
        "", "target language; chooses the BLEU tokenizer, 13a for most languages"
    )
    tokenize: str | None = option(
        None, "BLEU tokenizer of sacreBLEU; null: the tokenizer for tgt_lang"
    )
    lowercase: bool = option(False, "ignore case, as TER always does")
    method: SignificanceMethod = option(
        SignificanceMethod.approximate_randomization,
        "significance test: approximate_randomization (p < 0.05), or bootstrap (p < 0.025)",
    )
    num_samples: int = option(1000, "resamples of the significance test", low=40, high=1_000_000)
    seed: int = option(
        12345, "seed of the significance test and of sampling", low=1, high=2**32 - 1
    )
    verify_key: str | None = option(None, VERIFY_KEY_HELP)
    force: bool = option(
        False, "also score text that looks tokenized, which is an error by default"
    )
    format: OutputFormat = option(OutputFormat.text, "text or json")

    def check(self) -> None:
        super().check()
        has_hypotheses = bool(self.hypotheses)
        has_model = self.model_dir is not None
        has_one_input = has_hypotheses != has_model
        if not has_one_input:
            raise ConfigError("give either hypotheses=FILE or model_dir=FOLDER with src=FILE")
        self.require(bool(self.metrics), "metrics", "name at least one")
        if self.metric_command is not None:
            is_program = find_program(self.metric_command) is not None
            self.require(is_program, "metric_command", "starts a program that is not installed")
        if has_model:
            self._check_with_model()
        else:
            self.require(bool(self.references), "references", "name at least one")
            self._check_without_model()
        if self.lemmas is not None:
            self.require(bool(self.glossary), "lemmas", "needs glossary=FILE")
        if self.tune:
            is_noisy_channel = self.rerank is RerankScore.noisy_channel
            self.require(is_noisy_channel, "tune", "needs rerank=noisy_channel")
            self.require(self.baseline is None, "baseline", "does not work with tune=true")
        compares_systems = self.baseline is not None or len(self.hypotheses) > 1
        if not compares_systems:
            self._require_defaults(_ONLY_WITH_BASELINE, without="baseline")
        if self.src is not None:
            is_default = self.split is HeldOutSplit.test
            self.require(is_default, "split", "is a set of data_dir; leave out src")
        inputs = [*self.hypotheses, self.baseline, self.src, *self.references]
        num_stdin = inputs.count("-")
        if num_stdin > 1:
            raise ConfigError(
                "only one of hypotheses, baseline, src and references can be - (stdin); give files "
                "to the others"
            )

    def _check_with_model(self) -> None:
        """Raise a `ConfigError` for settings that do not fit the translation by a model.

        `nmt.cli.evaluate` checks that `src` or `data_dir` is set, since a folder of runs in
        `model_dir` does not need it.
        """
        if self.src is None:  # translates a set of `data_dir` with its own references and languages
            for key in ("baseline", "references", "src_lang"):
                self.require(not getattr(self, key), key, "needs src=FILE")
        else:
            self.require(bool(self.references), "references", "name at least one")
        scores_several_sets = self.by_length or bool(self.perturb)
        if scores_several_sets:
            problem = "does not work with perturb or by_length"
            self.require(self.baseline is None, "baseline", problem)
            self.require(not self.tune, "tune", problem)

    def _check_without_model(self) -> None:
        """Raise a `ConfigError` for settings that have no effect on files of hypotheses."""
        search_keys = {setting.name for setting in fields(SearchOverrides)}
        search_keys |= {setting.name for setting in fields(RerankConfig)}
        # not only for search: significance tests use `seed`, and counts of terms use `glossary`
        unused_search_keys = search_keys - {"seed", "glossary"}
        self.require(not self.perturb, "perturb", "does nothing without model_dir")
        unused_keys = (*_ONLY_WITH_MODEL, *sorted(unused_search_keys))
        self._require_defaults(unused_keys, without="model_dir")
        if self.glossary:
            self.require(self.src is not None, "glossary", "needs src=FILE to find terms")
        # without a model, only `glossary` and `metric_command` read `src`
        reads_src = bool(self.glossary) or self.metric_command is not None
        if not reads_src:
            self._require_defaults(("src",), without="model_dir")

    def _require_defaults(self, keys: tuple[str, ...], *, without: str) -> None:
        """Raise a `ConfigError` unless the settings `keys` have their default values.

        Call this if the setting `without` is not set and `keys` have no effect without it.
        """
        for key in keys:
            # the class of a dataclass has the defaults as attributes, except for lists
            default = getattr(type(self), key)
            value = getattr(self, key)
            self.require(value == default, key, f"does nothing without {without}")
