"""Scores of translations: BLEU, chrF and TER with signatures, and paired tests against a baseline.

Knows lists of detokenised lines; nothing of files, models or command lines. Every number is
sacreBLEU's own, but for the interval of a difference and the lower bound on a p-value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.base import Metric as SacreMetric
from sacrebleu.metrics.bleu import BLEU, BLEUScore
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER, TERScore
from sacrebleu.significance import PairedTest

from nmt.config import Method, Metric
from nmt.errors import ConfigError, DataError, nearest

MAX_TOKENISED_LINES = 100
"""Lines that may end in " ." before the text counts as tokenised; sacreBLEU warns there too."""
NUM_INTERVAL_SAMPLES = 1000
"""Resamples behind an interval that the paired bootstrap does not yield by the way."""

Lines = Sequence[str]
_Counts = npt.NDArray[np.float64]
_TOKENIZER_OF_LANGUAGE = (
    dict.fromkeys(("zh", "zho", "cmn", "yue"), "zh")
    | dict.fromkeys(("ja", "jpn"), "ja-mecab")
    | dict.fromkeys(("ko", "kor"), "ko-mecab")
)
_EXTRA_OF_TOKENIZER = {"ja-mecab": "sacrebleu[ja]", "ko-mecab": "sacrebleu[ko]"}


@dataclass(frozen=True)
class Score:
    """One metric of one system."""

    name: str
    """sacreBLEU's name: BLEU, chrF2, chrF2++ or TER."""
    value: float
    """Points: 0 to 100, for TER 0 and up."""
    signature: str
    detail: dict[str, float]
    """What the value is made of: for BLEU and TER lengths in tokens, empty for chrF."""


@dataclass(frozen=True, kw_only=True)
class Significance:
    """How to run the paired test."""

    method: Method = Method.approximate_randomization
    num_samples: int = 1000
    """Resamples or random trials, at least 40; no p-value is below 1 / (num_samples + 1)."""
    seed: int = 12345
    """1 or more; 0 means "no seed" to sacreBLEU."""

    def __post_init__(self) -> None:
        if self.num_samples < 40:
            raise ConfigError(f"num_samples={self.num_samples} is too few; set 40 or more")
        if self.seed < 1:
            raise ConfigError(f"seed={self.seed} would not be repeatable; set 1 or more")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One metric of a system and of its baseline, in points; all intervals are of 95 %.

    `_mean` and `_ci` come from bootstrap resamples: the interval of a score is mean +- ci.
    """

    name: str
    baseline: float
    baseline_mean: float
    baseline_ci: float
    system: float
    system_mean: float
    system_ci: float
    difference: float
    """System minus baseline; for TER negative is better."""
    difference_low: float
    difference_high: float
    p_value: float
    """Two-sided, but from the bootstrap one-sided in effect: compare it with 0.025, not 0.05."""
    signature: str


DEFAULT_METRICS = (Metric.bleu, Metric.chrf, Metric.ter)
_DEFAULT_TEST = Significance()
_PAIRED_TEST = {  # sacreBLEU's name, and the resamples for intervals where the test itself has none
    Method.bootstrap: ("bs", -1),
    Method.approximate_randomization: ("ar", NUM_INTERVAL_SAMPLES),
}


def tokenizer_for(language: str) -> str:
    """Name the BLEU tokenizer for a target language such as `de`, `zh_CN` or `jpn_Jpan`."""
    primary = re.split("[-_]", language.strip().lower())[0]
    return _TOKENIZER_OF_LANGUAGE.get(primary, "13a")


def check_tokenizer(tokenize: str) -> None:
    """Raise a ConfigError unless `tokenize` is a sacreBLEU tokenizer that works here."""
    _bleu_metric(tokenize)


def evaluate(
    hypotheses: Lines,
    references: Sequence[Lines],
    *,
    tokenize: str = "13a",
    metrics: Sequence[Metric] = DEFAULT_METRICS,
    force: bool = False,
) -> list[Score]:
    """Score detokenised hypotheses against one or more sets of references, a line each.

    `tokenize` concerns BLEU alone. `force` accepts text that looks tokenised, which otherwise, like
    counts that differ and empty input, raises a DataError.
    """
    check_aligned(hypotheses, references)
    if not force:
        _check_detokenised("hypotheses", hypotheses)
        _check_detokenised("references", *references)
    return [_score(_build(metric, tokenize), hypotheses, references) for metric in metrics]


def bleu(hypotheses: Lines, references: Sequence[Lines], *, tokenize: str = "13a") -> float:
    """Score with BLEU alone, tokenised-looking or not: a young model may end every line in " ."."""
    check_aligned(hypotheses, references)
    return _score(_bleu_metric(tokenize), hypotheses, references).value


def compare(
    hypotheses: Lines,
    references: Sequence[Lines],
    *,
    baseline: Lines,
    test: Significance = _DEFAULT_TEST,
    tokenize: str = "13a",
    metrics: Sequence[Metric] = DEFAULT_METRICS,
    force: bool = False,
) -> list[Comparison]:
    """Test whether a system differs from a baseline, by sacreBLEU's PairedTest.

    Intervals come from bootstrap resampling with either method. sacreBLEU 2.6 gives (almost)
    identical systems the smallest p-value there is, as it counts trials that beat the observed
    difference and not those that equal it. So the p-value is raised to 2^(1-k) for k lines whose
    counts differ: of the 2^k ways to swap these lines, at least two give just the observed
    difference. From k = 11 on (at 1000 samples) sacreBLEU's value stands.
    """
    check_aligned(hypotheses, references)
    check_aligned(baseline, references, name="baseline")
    if not force:
        _check_detokenised("hypotheses", hypotheses)
        _check_detokenised("baseline", baseline)
        _check_detokenised("references", *references)
    built = {metric.value: _build(metric, tokenize) for metric in metrics}
    systems = [("baseline", baseline), ("system", hypotheses)]
    kind, extra = _PAIRED_TEST[test.method]
    with _sacrebleu_seed(test.seed):
        paired = PairedTest(systems, built, references, kind, test.num_samples, extra)
    signatures, results = paired()
    rows = []
    for name, metric in paired.metrics.items():
        counts = [_line_counts(metric, lines, references) for lines in (baseline, hypotheses)]
        interval = _difference_interval(metric, counts[0], counts[1], seed=test.seed)
        floor, signature = _smallest_p_value(counts[0], counts[1]), str(signatures[name])
        rows.append(_comparison(name, results[name], interval, floor=floor, signature=signature))
    return rows


def as_table(scores: Sequence[Score], comparisons: Sequence[Comparison] = ()) -> str:
    """Lay out for reading: a line a score, two a comparison, each with its signature."""
    lines = [f"{s.name:<8}{s.value:7.2f}  {s.signature}" for s in scores]
    return "\n".join([*lines, *map(_comparison_lines, comparisons)])


def as_json(scores: Sequence[Score], comparisons: Sequence[Comparison] = ()) -> dict[str, Any]:
    """Turn into plain values for `json.dumps`: the fields of `Score` and `Comparison` as keys."""
    return {
        "unit": "points",
        "confidence": 0.95,
        "scores": [asdict(score) for score in scores],
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }


def check_aligned(lines: Lines, references: Sequence[Lines], *, name: str = "hypotheses") -> None:
    """Raise a DataError unless every reference set has a line for each of `lines`."""
    assert not any(isinstance(text, str) for text in references), "a list of lists of lines"
    if not references:
        raise DataError("no references to score against; give at least one file of them")
    if not lines:
        raise DataError(f"{name}: 0 lines, nothing to score; give a file that is not empty")
    for number, reference in enumerate(references, start=1):
        if len(reference) != len(lines):  # sacreBLEU would silently stop at the shorter one
            raise DataError(
                f"{name}: {len(lines)} lines, reference set {number}: {len(reference)}; they must "
                "match line by line: give the whole translation of the same test set"
            )


def _check_detokenised(name: str, *texts: Lines) -> None:
    """Raise a DataError for text that looks tokenised: its scores would compare with none."""
    for lines in texts:
        num_tokenised = sum(line.rstrip().endswith(" .") for line in lines)
        if num_tokenised > MAX_TOKENISED_LINES:
            raise DataError(
                f'{name}: {num_tokenised} of {len(lines)} lines end in " .", so the text looks '
                "tokenised; detokenise it, or set force=true to score it as it is"
            )


def _build(metric: Metric, tokenize: str) -> SacreMetric:
    if metric is Metric.bleu:
        return _bleu_metric(tokenize)
    if metric is Metric.ter:
        return TER()
    return CHRF(word_order=2 if metric is Metric.chrfpp else 0)


def _bleu_metric(tokenize: str) -> BLEU:
    if tokenize not in BLEU.TOKENIZERS:
        hint = nearest(tokenize, BLEU.TOKENIZERS)
        raise ConfigError(f"tokenize={tokenize} is no tokenizer of sacreBLEU; {hint}")
    try:
        return BLEU(tokenize=tokenize, force=True)  # force: `_check_detokenised` speaks instead
    except (RuntimeError, OSError) as error:  # an extra is missing, or a model cannot be fetched
        extra = _EXTRA_OF_TOKENIZER.get(tokenize)
        reason = f"run: pip install '{extra}'" if extra else " ".join(str(error).split())
        raise ConfigError(f"tokenize={tokenize} is not available here; {reason}") from error


def _score(metric: SacreMetric, hypotheses: Lines, references: Sequence[Lines]) -> Score:
    score = metric.corpus_score(hypotheses, references)
    return Score(score.name, float(score.score), str(metric.get_signature()), _detail(score))


def _detail(score: object) -> dict[str, float]:
    if isinstance(score, BLEUScore):
        return {
            **{f"precision_{n}": p for n, p in enumerate(score.precisions, start=1)},
            "brevity_penalty": score.bp,
            "length_ratio": score.ratio,
            "hypothesis_tokens": score.sys_len,
            "reference_tokens": score.ref_len,
        }
    if isinstance(score, TERScore):
        return {"num_edits": score.num_edits, "reference_tokens": score.ref_length}
    return {}


@contextmanager
def _sacrebleu_seed(seed: int) -> Iterator[None]:
    """Set the environment variable that PairedTest takes its seed from when it is built."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        del os.environ["SACREBLEU_SEED"]
        if before is not None:
            os.environ["SACREBLEU_SEED"] = before


def _line_counts(metric: SacreMetric, lines: Lines, references: Sequence[Lines]) -> _Counts:
    """Count what the metric needs of each line: (lines, counts); their sum gives the score.

    Nothing public yields this, so here and in `_difference_interval` we call methods that sacreBLEU
    has each metric implement. The interval of a difference cannot be had from the two scores'.
    """
    return np.asarray(metric._extract_corpus_statistics(lines, references), dtype=np.float64)


def _difference_interval(
    metric: SacreMetric, baseline: _Counts, system: _Counts, *, seed: int
) -> tuple[float, float]:
    """Bound system minus baseline by the 2.5th and 97.5th percentile of paired resamples."""

    def value(counts: _Counts) -> float:
        return float(metric._compute_score_from_stats(counts.sum(axis=0).tolist()).score)

    rng = np.random.default_rng(seed)
    size = len(system)
    draws = (rng.integers(size, size=size) for _ in range(NUM_INTERVAL_SAMPLES))
    differences = [value(system[drawn]) - value(baseline[drawn]) for drawn in draws]
    low, high = np.percentile(differences, [2.5, 97.5])
    return float(low), float(high)


def _smallest_p_value(baseline: _Counts, system: _Counts) -> float:
    """Bound the p-value from below: 2^(1-k) for k lines that differ, 1 for none."""
    return min(1.0, 2.0 ** (1 - int((baseline != system).any(axis=1).sum())))


def _comparison(
    name: str, results: list[Any], interval: tuple[float, float], *, floor: float, signature: str
) -> Comparison:
    baseline, system = results
    return Comparison(
        name=name,
        baseline=float(baseline.score),
        baseline_mean=float(baseline.mean),
        baseline_ci=float(baseline.ci),
        system=float(system.score),
        system_mean=float(system.mean),
        system_ci=float(system.ci),
        difference=float(system.score - baseline.score),
        difference_low=interval[0],
        difference_high=interval[1],
        p_value=max(float(system.p_value), floor),
        signature=signature,
    )


def _comparison_lines(c: Comparison) -> str:
    return (
        f"{c.name:<8}baseline {c.baseline:.2f} ({c.baseline_mean:.2f} ± {c.baseline_ci:.2f})"
        f"  system {c.system:.2f} ({c.system_mean:.2f} ± {c.system_ci:.2f})"
        f"  difference {c.difference:+.2f} [{c.difference_low:+.2f}, {c.difference_high:+.2f}]"
        f"  p = {c.p_value:.4f}\n{'':8}{c.signature}"
    )
