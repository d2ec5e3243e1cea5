"""Score translations with BLEU, chrF and TER, and test the difference to a baseline.

All functions take lists of detokenized lines. sacreBLEU computes all numbers except the confidence
interval of a difference and the lower bound on a p-value.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import regex  # type: ignore[import-untyped]
from sacrebleu.metrics.base import Metric as SacreMetric
from sacrebleu.metrics.bleu import BLEU, BLEUScore
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER, TERScore
from sacrebleu.significance import PairedTest
from tabulate import tabulate

from nmt.command_metric import COMMAND_SCORE, CommandMetric
from nmt.config import Metric, SignificanceMethod
from nmt.errors import ConfigError, DataError, suggest_names, to_one_line

log = logging.getLogger(__name__)

MAX_TOKENIZED_LINES = 100
"""A text counts as tokenized if more lines than this end in " .", as in sacreBLEU."""
NUM_INTERVAL_SAMPLES = 1000
"""Number of bootstrap resamples for the intervals that sacreBLEU does not compute itself."""
NUM_TUNING_SAMPLES = 200
"""Number of bootstrap resamples for a standard error."""

_TABULATE_OPTIONS: dict[str, Any] = {"tablefmt": "plain", "disable_numparse": True}

Lines = Sequence[str]
_Counts = npt.NDArray[np.float64]
_SPACE_TOKENIZERS = ("13a", "intl", "none")  # BLEU tokenizers that split words only at spaces
# Settings for scripts without spaces between words. The keys are patterns of characters. Japanese
# comes first, since its texts also contain Han characters.
_UNSPACED_SCRIPTS = {
    r"[\p{Hiragana}\p{Katakana}]": "tgt_lang=ja (pip install nmt[ja])",
    r"\p{Han}": "tgt_lang=zh",
    r"[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]": "tokenize=char",
}
_MAX_UNSPACED_SHARE = 0.3  # share of such letters above which a warning is logged
_NUM_CHECKED_LINES = 1000  # lines whose script is checked
_BLEU_TOKENIZERS = {  # the keys are languages; all other languages use 13a
    "zh": "zh",
    "zho": "zh",
    "cmn": "zh",
    "yue": "zh",
    "ja": "ja-mecab",
    "jpn": "ja-mecab",
    "ko": "ko-mecab",
    "kor": "ko-mecab",
}


@dataclass(frozen=True)
class Score:
    """The value of one metric for one system."""

    name: str  # sacreBLEU's name: BLEU, chrF2, chrF2++ or TER
    value: float  # points from 0 to 100; TER has no maximum
    signature: str
    detail: dict[str, float]  # components of the value, lengths in tokens; empty for chrF


@dataclass(frozen=True, kw_only=True)
class Significance:
    """Settings of the paired test."""

    method: SignificanceMethod = SignificanceMethod.approximate_randomization
    num_samples: int = 1000
    """Bootstrap resamples or random trials, at least 40. p is at least 1 / (num_samples + 1)."""
    seed: int = 12345  # 1 or more, since sacreBLEU takes 0 for "no seed"


@dataclass(frozen=True)
class Comparison:
    """One metric of a system and of a baseline, in points, with 95 % confidence intervals.

    The fields that end in `_mean` and `_ci` come from bootstrap resamples: the interval of a score
    is mean ± ci.
    """

    name: str
    baseline: float
    baseline_mean: float
    baseline_ci: float
    system: float
    system_mean: float
    system_ci: float
    difference: float  # system minus baseline; a negative one is better for TER
    difference_low: float
    difference_high: float
    p_value: float  # two-sided; SignificanceMethod.bootstrap is one-sided, so compare it with 0.025
    signature: str


DEFAULT_METRICS = (Metric.bleu, Metric.chrf, Metric.ter)


def choose_bleu_tokenizer(language: str) -> str:
    """Return the BLEU tokenizer for a target language such as `de`, `zh_CN` or `jpn_Jpan`."""
    primary = re.split("[-_]", language.strip().lower())[0]
    return _BLEU_TOKENIZERS.get(primary, "13a")


def build_bleu_metric(tokenize: str, *, lowercase: bool = False) -> BLEU:
    """Build BLEU. Raises `ConfigError` for a tokenizer that is unknown or not installed."""
    if tokenize not in BLEU.TOKENIZERS:
        suggestion = suggest_names(tokenize, BLEU.TOKENIZERS)
        raise ConfigError(f"tokenize={tokenize} is not a tokenizer of sacreBLEU; {suggestion}")
    try:
        # `force` silences a warning about tokenized text: `check_lines` raises an error instead
        return BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
    except (RuntimeError, OSError) as error:  # an extra is missing, or a model cannot be fetched
        reason = to_one_line(error)
        if tokenize in ("ja-mecab", "ko-mecab"):
            reason = f"run: pip install nmt[{tokenize[:2]}]"
        raise ConfigError(f"tokenize={tokenize} is not available here; {reason}") from error


def warn_about_script(lines: Lines, tokenize: str) -> None:
    """Log a warning if BLEU would not split a text into words, as its script has no spaces."""
    if tokenize not in _SPACE_TOKENIZERS:
        return
    text = "".join(lines[:_NUM_CHECKED_LINES])
    num_letters = len(regex.findall(r"[\p{L}\p{M}]", text))
    for pattern, settings in _UNSPACED_SCRIPTS.items():
        share = len(regex.findall(pattern, text)) / max(num_letters, 1)
        if share > _MAX_UNSPACED_SHARE:
            log.warning(
                "%.0f %% of the letters are in a script that tokenize=%s does not split into "
                "words, so BLEU compares whole lines: set %s",
                100 * share,
                tokenize,
                settings,
            )
            return


def evaluate(
    hypotheses: Lines,
    references: Sequence[Lines],
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
    metrics: Sequence[Metric] = DEFAULT_METRICS,
    command_metric: CommandMetric | None = None,
    force: bool = False,
) -> list[Score]:
    """Score detokenized hypotheses against one or more sets of references, line by line.

    `tokenize` affects BLEU only. TER always ignores case. Raises `DataError` for unequal numbers of
    lines, for empty input and, without `force`, for text that looks tokenized.
    """
    check_lines({"hypotheses": hypotheses}, references, force=force)
    if Metric.bleu in metrics:
        warn_about_script(references[0], tokenize)
    built_metrics = _build_metrics(metrics, tokenize, lowercase, command_metric)
    return [_score(metric, hypotheses, references) for metric in built_metrics]


def bleu(hypotheses: Lines, references: Sequence[Lines], *, tokenize: str = "13a") -> float:
    """Return BLEU. Accepts text that looks tokenized, since untrained models produce it."""
    check_lines({"hypotheses": hypotheses}, references, force=True)
    return _score(build_bleu_metric(tokenize), hypotheses, references).value


def compare(
    hypotheses: Lines,
    references: Sequence[Lines],
    *,
    baseline: Lines,
    test: Significance = Significance(),  # noqa: B008  # frozen
    tokenize: str = "13a",
    lowercase: bool = False,
    metrics: Sequence[Metric] = DEFAULT_METRICS,
    command_metric: CommandMetric | None = None,
    force: bool = False,
) -> list[Comparison]:
    """Test with sacreBLEU's PairedTest whether a system differs from a baseline.

    Intervals come from bootstrap resampling, also with approximate randomization.

    sacreBLEU 2.6 does not count trials whose difference equals the observed one, so that its
    p-value is too small for nearly identical systems. This function returns a p-value of at least
    2^(1-k), where k is the number of lines whose counts differ: at least two of the 2^k ways to
    swap these lines give exactly the observed difference. With 1000 samples, this matters only for
    k <= 10.
    """
    check_lines({"hypotheses": hypotheses, "baseline": baseline}, references, force=force)
    built_metrics = _build_metrics(metrics, tokenize, lowercase, command_metric)
    paired_test = _build_paired_test(hypotheses, baseline, references, built_metrics, test)
    signatures, results = paired_test()
    comparisons = []
    for name, metric in paired_test.metrics.items():
        # `_build_paired_test` gives sacreBLEU the baseline first
        baseline_result, system_result = cast(list[Any], results[name])
        baseline_counts = _line_counts(metric, baseline, references)
        system_counts = _line_counts(metric, hypotheses, references)
        is_changed = (baseline_counts != system_counts).any(axis=1)  # (lines,)
        num_changed = int(is_changed.sum())
        smallest_p_value = min(1.0, 2.0 ** (1 - num_changed))
        low, high = _difference_interval(metric, baseline_counts, system_counts, seed=test.seed)
        comparison = Comparison(
            name=name,
            baseline=float(baseline_result.score),
            baseline_mean=float(baseline_result.mean),
            baseline_ci=float(baseline_result.ci),
            system=float(system_result.score),
            system_mean=float(system_result.mean),
            system_ci=float(system_result.ci),
            difference=float(system_result.score - baseline_result.score),
            difference_low=low,
            difference_high=high,
            p_value=float(max(system_result.p_value, smallest_p_value)),
            signature=str(signatures[name]),
        )
        comparisons.append(comparison)
    return comparisons


def _build_paired_test(
    hypotheses: Lines,
    baseline: Lines,
    references: Sequence[Lines],
    metrics: Sequence[SacreMetric],
    test: Significance,
) -> PairedTest:
    """Build sacreBLEU's test, which returns signatures and results by metric when it is called."""
    test_type = "ar"
    num_interval_samples = NUM_INTERVAL_SAMPLES
    if test.method is SignificanceMethod.bootstrap:
        test_type = "bs"
        num_interval_samples = -1  # this test computes intervals from its own resamples
    with patch.dict(os.environ, {"SACREBLEU_SEED": str(test.seed)}):  # the constructor reads it
        return PairedTest(
            [("baseline", baseline), ("system", hypotheses)],
            # any different keys: sacreBLEU replaces them by the names of the metrics' scores
            {str(number): metric for number, metric in enumerate(metrics)},
            references,
            test_type=test_type,
            n_samples=test.num_samples,
            n_ar_confidence=num_interval_samples,
        )


def _line_counts(metric: SacreMetric, lines: Lines, references: Sequence[Lines]) -> _Counts:
    """Return the statistics of each line, (lines, counts). Their sum over lines gives the score.

    Calls a private method of sacreBLEU's metrics, since there is no public one.
    """
    return np.asarray(metric._extract_corpus_statistics(lines, references), dtype=np.float64)


def _score_counts(metric: SacreMetric, counts: _Counts) -> float:
    """Return the score of lines with these statistics, (lines, counts)."""
    return float(metric._compute_score_from_stats(counts.sum(axis=0).tolist()).score)


class CandidateCounts:
    """Scores a corpus whose translations are chosen among several candidates for each line.

    Args:
        candidates: the candidates of each line, at least one.
        references: the sets of references.
        metric: the metric that scores the corpus.
        tokenize: the tokenizer of BLEU.
        lowercase: whether to ignore case.
    """

    def __init__(
        self,
        candidates: Sequence[Lines],
        references: Sequence[Lines],
        *,
        metric: Metric,
        tokenize: str = "13a",
        lowercase: bool = False,
    ) -> None:
        self.name = metric.value
        self._metric = _build_metric(metric, tokenize, lowercase)
        self._sign = -1 if metric is Metric.ter else 1
        # each candidate of each line has a row, first all candidates of line 0, then of line 1, ...
        candidate_by_row: list[str] = []
        line_by_row: list[int] = []
        self._first_row_by_line = np.empty(len(candidates), dtype=np.int64)
        for i, line_candidates in enumerate(candidates):
            self._first_row_by_line[i] = len(candidate_by_row)
            candidate_by_row += line_candidates
            line_by_row += [i] * len(line_candidates)
        references_by_row = []
        for reference in references:
            references_by_row.append([reference[line] for line in line_by_row])
        # (rows, counts)
        self._counts = _line_counts(self._metric, candidate_by_row, references_by_row)
        # how often each resample has each line, (NUM_TUNING_SAMPLES, lines)
        num_lines = len(candidates)
        line_probs = np.ones(num_lines) / max(num_lines, 1)
        line_frequencies = np.random.default_rng(seed=1).multinomial(
            num_lines, line_probs, size=NUM_TUNING_SAMPLES
        )
        self._line_frequencies = line_frequencies.astype(np.float64)

    def score(self, choice: npt.NDArray[np.int64]) -> float:
        """Return the score of the corpus; higher is better.

        `choice` (lines,) has the index of a candidate for each line.
        """
        rows = self._first_row_by_line + choice
        return self._sign * _score_counts(self._metric, self._counts[rows])

    def score_resamples(self, choice: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the score of each of `NUM_TUNING_SAMPLES` bootstrap resamples of the lines."""
        counts = self._counts[self._first_row_by_line + choice]  # (lines, counts)
        scores = []
        for resample_counts in self._line_frequencies @ counts:
            scores.append(self._sign * _score_counts(self._metric, resample_counts[np.newaxis]))
        return np.array(scores)


def as_table(scores: Sequence[Score], comparisons: Sequence[Comparison] = ()) -> str:
    """Format scores as text, one per line, followed by a table of comparisons."""
    rows = [
        [score.name, f"{score.value:.{_num_digits(score.name)}f}", score.signature]
        for score in scores
    ]
    table: str = tabulate(rows, colalign=("left", "right", "left"), **_TABULATE_OPTIONS)
    if not comparisons:
        return table
    headers = [
        "",
        "baseline (mean ± 95 % CI)",
        "system (mean ± 95 % CI)",
        "difference [95 % CI]",
        "p",
        "signature",
    ]
    rows = []
    for result in comparisons:
        digits = _num_digits(result.name)
        interval = f"[{result.difference_low:+.{digits}f}, {result.difference_high:+.{digits}f}]"
        baseline_interval = f"{result.baseline_mean:.{digits}f} ± {result.baseline_ci:.{digits}f}"
        system_interval = f"{result.system_mean:.{digits}f} ± {result.system_ci:.{digits}f}"
        row = [
            result.name,
            f"{result.baseline:.{digits}f} ({baseline_interval})",
            f"{result.system:.{digits}f} ({system_interval})",
            f"{result.difference:+.{digits}f} {interval}",
            f"{result.p_value:.4f}",
            result.signature,
        ]
        rows.append(row)
    return f"{table}\n\n{tabulate(rows, headers=headers, **_TABULATE_OPTIONS)}"


def _num_digits(name: str) -> int:
    """Return the number of decimals: more for scores of a command, which may be from 0 to 1."""
    return 4 if name.endswith(COMMAND_SCORE) else 2


def as_json(scores: Sequence[Score], comparisons: Sequence[Comparison] = ()) -> dict[str, Any]:
    """Convert to plain values for `json.dumps`. Keys are the fields of the dataclasses."""
    return {
        "unit": "points",
        "confidence": 0.95,
        "scores": [asdict(score) for score in scores],
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }


def check_lines(systems: Mapping[str, Lines], references: Sequence[Lines], *, force: bool) -> None:
    """Raise `DataError` unless every system and reference set has the same number of lines.

    Without `force`, also raises it for text that looks tokenized, since its scores would not be
    comparable.
    """
    assert not any(isinstance(lines, str) for lines in references), "each must be a list of lines"
    if not references:
        raise DataError("no references to score against; give at least one file of them")
    for name, lines in systems.items():
        if not lines:
            raise DataError(f"{name}: 0 lines, nothing to score; give a file that is not empty")
        for set_number, reference_lines in enumerate(references, start=1):
            # sacreBLEU would ignore surplus lines without a warning
            if len(reference_lines) != len(lines):
                raise DataError(
                    f"{name}: {len(lines)} lines, reference set {set_number}: "
                    f"{len(reference_lines)}; they must match line by line: give the whole "
                    "translation of the same test set"
                )
    if not force:
        for name, lines in systems.items():
            _check_detokenized(name, lines)
        for lines in references:
            _check_detokenized("references", lines)


def _check_detokenized(name: str, lines: Lines) -> None:
    """Raise a `DataError` if many lines end in a space and a period."""
    num_tokenized = sum(line.rstrip().endswith(" .") for line in lines)
    if num_tokenized > MAX_TOKENIZED_LINES:
        raise DataError(
            f'{name}: {num_tokenized} of {len(lines)} lines end in " .", so the text looks '
            "tokenized; detokenize it, or set force=true to score it as it is"
        )


def _build_metrics(
    metrics: Sequence[Metric],
    tokenize: str,
    lowercase: bool,
    command_metric: CommandMetric | None,
) -> list[SacreMetric]:
    """Build the metrics of sacreBLEU, and append the metric of a command, if there is one."""
    built_metrics = [_build_metric(metric, tokenize, lowercase) for metric in metrics]
    if command_metric is not None:
        built_metrics.append(command_metric)
    return built_metrics


def _build_metric(metric: Metric, tokenize: str, lowercase: bool) -> SacreMetric:
    """Build the metric of sacreBLEU; only BLEU uses `tokenize`."""
    if metric is Metric.bleu:
        return build_bleu_metric(tokenize, lowercase=lowercase)
    if metric is Metric.ter:
        return TER()
    word_order = 2 if metric is Metric.chrfpp else 0
    return CHRF(word_order=word_order, lowercase=lowercase)


def _score(metric: SacreMetric, hypotheses: Lines, references: Sequence[Lines]) -> Score:
    """Compute one metric over all lines, including the components of its value."""
    score = metric.corpus_score(hypotheses, references)
    detail: dict[str, float] = {}
    if isinstance(score, BLEUScore):
        for order, precision in enumerate(score.precisions, start=1):
            detail[f"precision_{order}"] = precision
        detail["brevity_penalty"] = score.bp
        detail["length_ratio"] = score.ratio
        detail["hypothesis_tokens"] = score.sys_len
        detail["reference_tokens"] = score.ref_len
    elif isinstance(score, TERScore):
        detail = {"num_edits": score.num_edits, "reference_tokens": score.ref_length}
    return Score(score.name, float(score.score), str(metric.get_signature()), detail)


def _difference_interval(
    metric: SacreMetric, baseline: _Counts, system: _Counts, *, seed: int
) -> tuple[float, float]:
    """Return the 95 % confidence interval of the score of the system minus the baseline's score.

    Computes percentiles of the difference over paired bootstrap resamples. The interval cannot be
    computed from the intervals of the two scores.
    """
    rng = np.random.default_rng(seed)
    num_lines = len(system)
    differences = []
    for _ in range(NUM_INTERVAL_SAMPLES):
        lines = rng.integers(num_lines, size=num_lines)  # both systems get the same lines
        system_score = _score_counts(metric, system[lines])
        baseline_score = _score_counts(metric, baseline[lines])
        differences.append(system_score - baseline_score)
    low, high = np.percentile(differences, [2.5, 97.5])
    return float(low), float(high)
