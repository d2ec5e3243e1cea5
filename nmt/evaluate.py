"""Scores of translations: BLEU, chrF and TER with signatures, and paired tests against a baseline.

Works on lists of detokenized lines. Every number is sacreBLEU's own, except the interval of a
difference and the lower bound on a p-value.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import regex  # type: ignore[import-untyped]
from sacrebleu.metrics.base import Metric as SacreMetric
from sacrebleu.metrics.bleu import BLEU, BLEUScore
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER, TERScore
from sacrebleu.significance import PairedTest
from tabulate import tabulate

from nmt.config import Method, Metric
from nmt.errors import ConfigError, DataError, nearest

log = logging.getLogger(__name__)

MAX_TOKENIZED_LINES = 100
"""Lines that may end in " ." before the text counts as tokenized; sacreBLEU warns there too."""
NUM_INTERVAL_SAMPLES = 1000
"""Resamples behind an interval that the paired bootstrap does not compute."""

Lines = Sequence[str]
_Counts = npt.NDArray[np.float64]
_CUTS_AT_SPACES = ("13a", "intl", "none")  # and at signs
_UNCUT = {  # by script, and what to set; Japanese has Han too
    r"[\p{Hiragana}\p{Katakana}]": "tgt_lang=ja (pip install nmt[ja])",
    r"\p{Han}": "tgt_lang=zh",
    r"[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]": "tokenize=char",
}
_MUCH, _LOOKED_AT = 0.3, 1000  # share of the letters; lines
_TOKENIZERS = {"zh zho cmn yue": "zh", "ja jpn": "ja-mecab", "ko kor": "ko-mecab"}


@dataclass(frozen=True)
class Score:
    """One metric of one system."""

    name: str  # sacreBLEU's: BLEU, chrF2, chrF2++ or TER
    value: float  # points: 0 to 100, for TER 0 and up
    signature: str
    detail: dict[str, float]  # components of the value, lengths in tokens; empty for chrF


@dataclass(frozen=True, kw_only=True)
class Significance:
    """How to run the paired test."""

    method: Method = Method.approximate_randomization
    num_samples: int = 1000  # or random trials, at least 40; p is at least 1 / (num_samples + 1)
    seed: int = 12345  # 1 or more; 0 means "no seed" to sacreBLEU


@dataclass(frozen=True)
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
    difference: float  # system minus baseline; for TER negative is better
    difference_low: float
    difference_high: float
    p_value: float  # two-sided, but from the bootstrap one-sided in effect: compare it with 0.025
    signature: str


DEFAULT_METRICS = (Metric.bleu, Metric.chrf, Metric.ter)


def tokenizer_for(language: str) -> str:
    """Name the BLEU tokenizer for a target language such as `de`, `zh_CN` or `jpn_Jpan`."""
    primary = re.split("[-_]", language.strip().lower())[0]
    return next((name for codes, name in _TOKENIZERS.items() if primary in codes.split()), "13a")


def bleu_metric(tokenize: str, *, lowercase: bool = False) -> BLEU:
    """Build BLEU; raise a ConfigError for a tokenizer that sacreBLEU lacks or cannot run here."""
    if tokenize not in BLEU.TOKENIZERS:
        hint = nearest(tokenize, BLEU.TOKENIZERS)
        raise ConfigError(f"tokenize={tokenize} is no tokenizer of sacreBLEU; {hint}")
    try:
        # `check_lines` raises what `force` silences
        return BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
    except (RuntimeError, OSError) as error:  # an extra is missing, or a model cannot be fetched
        reason = " ".join(str(error).split())
        if tokenize in ("ja-mecab", "ko-mecab"):
            reason = f"run: pip install nmt[{tokenize[:2]}]"
        raise ConfigError(f"tokenize={tokenize} is not available here; {reason}") from error


def warn_of_script(lines: Lines, tokenize: str) -> None:
    """Log a warning when most letters are of a script without spaces that BLEU would not cut."""
    if tokenize not in _CUTS_AT_SPACES:
        return
    text = "".join(lines[:_LOOKED_AT])
    num_letters = len(regex.findall(r"[\p{L}\p{M}]", text))
    for scripts, remedy in _UNCUT.items():
        share = len(regex.findall(scripts, text)) / max(num_letters, 1)
        if share > _MUCH:
            log.warning(
                "%.0f %% of the letters are in a script that tokenize=%s does not cut into words, "
                "so BLEU compares whole lines: set %s",
                100 * share,
                tokenize,
                remedy,
            )
            return


def evaluate(
    hypotheses: Lines,
    references: Sequence[Lines],
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
    metrics: Sequence[Metric] = DEFAULT_METRICS,
    force: bool = False,
) -> list[Score]:
    """Score detokenized hypotheses against one or more sets of references, a line each.

    `tokenize` affects BLEU only, and TER never looks at case. `force` accepts text that looks
    tokenized, which otherwise, like unequal counts and empty input, raises a DataError.
    """
    check_lines({"hypotheses": hypotheses}, references, force=force)
    if Metric.bleu in metrics:
        warn_of_script(references[0], tokenize)
    built = [_build(metric, tokenize, lowercase) for metric in metrics]
    return [_score(metric, hypotheses, references) for metric in built]


def bleu(hypotheses: Lines, references: Sequence[Lines], *, tokenize: str = "13a") -> float:
    """Score with BLEU alone, even text that looks tokenized, which a model may write at first."""
    check_lines({"hypotheses": hypotheses}, references, force=True)
    return _score(bleu_metric(tokenize), hypotheses, references).value


def compare(
    hypotheses: Lines,
    references: Sequence[Lines],
    *,
    baseline: Lines,
    test: Significance = Significance(),  # noqa: B008  # frozen
    tokenize: str = "13a",
    lowercase: bool = False,
    metrics: Sequence[Metric] = DEFAULT_METRICS,
    force: bool = False,
) -> list[Comparison]:
    """Test whether a system differs from a baseline, by sacreBLEU's PairedTest.

    Intervals come from bootstrap resampling with either method. sacreBLEU 2.6 gives (almost)
    identical systems the smallest possible p-value, since it counts trials that exceed the observed
    difference and not those that equal it. The p-value is therefore raised to 2^(1-k) for k lines
    whose counts differ: of the 2^k ways to swap these lines, at least two give exactly the observed
    difference. From k = 11 on (at 1000 samples) sacreBLEU's value is larger.
    """
    check_lines({"hypotheses": hypotheses, "baseline": baseline}, references, force=force)
    built = {metric.value: _build(metric, tokenize, lowercase) for metric in metrics}
    systems = [("baseline", baseline), ("system", hypotheses)]
    kind, extra = "ar", NUM_INTERVAL_SAMPLES
    if test.method is Method.bootstrap:  # which computes intervals from its own resamples
        kind, extra = "bs", -1
    seed = {key: os.environ[key] for key in ("SACREBLEU_SEED",) if key in os.environ}
    os.environ["SACREBLEU_SEED"] = str(test.seed)  # read when the test is built
    try:
        paired = PairedTest(systems, built, references, kind, test.num_samples, extra)
    finally:
        del os.environ["SACREBLEU_SEED"]
        os.environ.update(seed)
    signatures, results = paired()
    rows = []
    for name, metric in paired.metrics.items():
        # what the metric needs of each line, (lines, counts), whose sum gives the score: sacreBLEU
        # has no public function for it, but every metric has this method
        before, after = (
            np.asarray(metric._extract_corpus_statistics(lines, references), dtype=np.float64)
            for lines in (baseline, hypotheses)
        )
        num_changed = int((before != after).any(axis=1).sum())
        first, second = cast(list[Any], results[name])
        low, high = _difference_interval(metric, before, after, seed=test.seed)
        values = [getattr(r, v) for r in (first, second) for v in ("score", "mean", "ci")]
        values += [second.score - first.score, low, high]
        values.append(max(second.p_value, min(1.0, 2.0 ** (1 - num_changed))))
        columns: list[Any] = [name, *map(float, values), str(signatures[name])]
        rows.append(Comparison(*columns))
    return rows


def as_table(scores: Sequence[Score], comparisons: Sequence[Comparison] = ()) -> str:
    """Format for reading: a line per score, and a table of comparisons with their signatures."""
    table = [[s.name, f"{s.value:.2f}", s.signature] for s in scores]
    options = {"tablefmt": "plain", "disable_numparse": True}
    parts = [tabulate(table, colalign=("left", "right", "left"), **options)]
    if comparisons:
        columns = (  # of `Comparison`
            "{name}",
            "{baseline:.2f} ({baseline_mean:.2f} ± {baseline_ci:.2f})",
            "{system:.2f} ({system_mean:.2f} ± {system_ci:.2f})",
            "{difference:+.2f} [{difference_low:+.2f}, {difference_high:+.2f}]",
            "{p_value:.4f}",
            "{signature}",
        )
        rows = [[column.format(**vars(c)) for column in columns] for c in comparisons]
        score, difference = "(mean ± 95 % CI)", "difference [95 % CI]"
        headers = ["", f"baseline {score}", f"system {score}", difference, "p", "signature"]
        parts.append(tabulate(rows, headers=headers, **options))
    return "\n\n".join(parts)


def as_json(scores: Sequence[Score], comparisons: Sequence[Comparison] = ()) -> dict[str, Any]:
    """Convert to plain values for `json.dumps`: the fields of `Score` and `Comparison` as keys."""
    shown = {"scores": list(map(asdict, scores)), "comparisons": list(map(asdict, comparisons))}
    return {"unit": "points", "confidence": 0.95, **shown}


def check_lines(systems: Mapping[str, Lines], references: Sequence[Lines], *, force: bool) -> None:
    """Raise a DataError unless every reference set has a line for each of a system and, without
    `force`, for text that looks tokenized, whose scores are not comparable.
    """
    assert not any(isinstance(text, str) for text in references), "a list of lists of lines"
    if not references:
        raise DataError("no references to score against; give at least one file of them")
    for name, lines in systems.items():
        if not lines:
            raise DataError(f"{name}: 0 lines, nothing to score; give a file that is not empty")
        for number, reference in enumerate(references, start=1):
            if len(reference) != len(lines):  # sacreBLEU would silently stop at the shorter one
                raise DataError(
                    f"{name}: {len(lines)} lines, reference set {number}: {len(reference)}; they "
                    "must match line by line: give the whole translation of the same test set"
                )
    texts = [] if force else [*systems.items(), *(("references", lines) for lines in references)]
    for name, lines in texts:
        num_tokenized = sum(line.rstrip().endswith(" .") for line in lines)
        if num_tokenized > MAX_TOKENIZED_LINES:
            raise DataError(
                f'{name}: {num_tokenized} of {len(lines)} lines end in " .", so the text looks '
                "tokenized; detokenise it, or set force=true to score it as it is"
            )


def _build(metric: Metric, tokenize: str, lowercase: bool) -> SacreMetric:
    if metric is Metric.bleu:
        return bleu_metric(tokenize, lowercase=lowercase)
    if metric is Metric.ter:
        return TER()
    return CHRF(word_order=2 * (metric is Metric.chrfpp), lowercase=lowercase)


def _score(metric: SacreMetric, hypotheses: Lines, references: Sequence[Lines]) -> Score:
    score = metric.corpus_score(hypotheses, references)
    detail = {}
    if isinstance(score, BLEUScore):
        detail = {f"precision_{n}": p for n, p in enumerate(score.precisions, start=1)}
        detail |= {"brevity_penalty": score.bp, "length_ratio": score.ratio}
        detail |= {"hypothesis_tokens": score.sys_len, "reference_tokens": score.ref_len}
    elif isinstance(score, TERScore):
        detail = {"num_edits": score.num_edits, "reference_tokens": score.ref_length}
    return Score(score.name, float(score.score), str(metric.get_signature()), detail)


def _difference_interval(
    metric: SacreMetric, baseline: _Counts, system: _Counts, *, seed: int
) -> tuple[float, float]:
    """Bound system minus baseline by the 2.5th and 97.5th percentile of paired resamples; it does
    not follow from the intervals of the scores.
    """

    def value(counts: _Counts) -> float:
        return float(metric._compute_score_from_stats(counts.sum(axis=0).tolist()).score)

    rng, size = np.random.default_rng(seed), len(system)
    draws = (rng.integers(size, size=size) for _ in range(NUM_INTERVAL_SAMPLES))
    differences = [value(system[drawn]) - value(baseline[drawn]) for drawn in draws]
    low, high = np.percentile(differences, [2.5, 97.5])
    return float(low), float(high)
