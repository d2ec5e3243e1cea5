"""Run `nmt-evaluate`: score translations in a file, or translations that a model makes.

The model translates a source file, or a held-out set of a data folder. Several runs are compared in
a table, with the scores that they recorded.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from nmt import evaluate as metrics
from nmt.command_metric import CommandMetric
from nmt.config import (
    Engine,
    EvaluateConfig,
    Metric,
    OutputFormat,
    Perturbation,
    resolve_path,
)
from nmt.data import perturb
from nmt.data.text import read_input
from nmt.errors import ConfigError
from nmt.evaluate import Comparison, Score
from nmt.visualize.run_table import find_runs, run_table, summarize_run

log = logging.getLogger(__name__)

_WORD_BOUNDS = (1, 4, 11, 21, 41, math.inf)  # words of a source, for scores by length


@dataclass(frozen=True)
class _TestSet:
    """Hypotheses and references that are scored together."""

    references: list[list[str]]
    bleu_tokenizer: str
    hypotheses: list[str] = field(default_factory=list)  # empty until a model has translated
    sources: list[str] = field(default_factory=list)
    translate_options: dict[str, Any] = field(default_factory=dict)  # languages or their tags
    label: str = ""  # corpus, system, perturbation or lengths; precedes the names of scores


def evaluate(config: EvaluateConfig) -> None:
    """Print the scores of the hypotheses and, with a baseline, tests of the differences.

    For several runs, prints a table of them instead.
    """
    runs = _runs_to_compare(config)
    if runs:
        _compare_runs(config, runs)
        return
    scores: list[Score] = []
    comparisons: list[Comparison] = []
    baseline = None if config.baseline is None else list(read_input(config.baseline))
    test_sets = _read_test_sets(config, baseline)
    for test_set in test_sets:
        scores += _score(config, test_set)
    if baseline is None and len(config.hypotheses) > 1:
        baseline = test_sets.pop(0).hypotheses
        log.info("the baseline is %s", config.hypotheses[0])
    if baseline is not None:
        for test_set in test_sets:
            comparisons += _compare(config, test_set, baseline)
    if config.format is OutputFormat.json:
        print(json.dumps(metrics.as_json(scores, comparisons), indent=2))
    else:
        print(metrics.as_table(scores, comparisons))


def _score(config: EvaluateConfig, test_set: _TestSet) -> list[Score]:
    """Score the hypotheses of a test set; the label of the test set precedes the names."""
    options = _metric_options(config, test_set)
    scores = []
    for score in metrics.evaluate(test_set.hypotheses, test_set.references, **options):
        scores.append(replace(score, name=f"{test_set.label} {score.name}".strip()))
    if config.glossary:
        scores.append(_score_terms(config, test_set))
    return scores


def _score_terms(config: EvaluateConfig, test_set: _TestSet) -> Score:
    """Return the percentage of the glossary's terms that the hypotheses contain."""
    from nmt.search.glossary import count_terms, load_glossary

    glossary = load_glossary(tuple(config.search_changes()["glossary"]))
    count = count_terms(glossary, test_set.sources, test_set.hypotheses)
    return Score(
        name=f"{test_set.label} terms".strip(),
        value=100 * count.kept / max(count.total, 1),
        signature=f"{count.kept} of {count.total}",
        detail=count._asdict(),
    )


def _compare(config: EvaluateConfig, test_set: _TestSet, baseline: list[str]) -> list[Comparison]:
    """Test whether the hypotheses of a test set differ from a baseline."""
    significance = metrics.Significance(
        method=config.method, num_samples=config.num_samples, seed=config.seed
    )
    options = _metric_options(config, test_set)
    comparisons = []
    for comparison in metrics.compare(
        test_set.hypotheses,
        test_set.references,
        baseline=baseline,
        test=significance,
        **options,
    ):
        name = f"{test_set.label} {comparison.name}".strip()
        comparisons.append(replace(comparison, name=name))
    return comparisons


def _metric_options(config: EvaluateConfig, test_set: _TestSet) -> dict[str, Any]:
    """Return the arguments that `metrics.evaluate` and `metrics.compare` share."""
    return {
        "tokenize": test_set.bleu_tokenizer,
        "metrics": config.metrics,
        "command_metric": _command_metric(config, test_set),
        "lowercase": config.lowercase,
        "force": config.force,  # score text that looks tokenized
    }


def _command_metric(config: EvaluateConfig, test_set: _TestSet) -> CommandMetric | None:
    if config.metric_command is None:
        return None
    return CommandMetric(config.metric_command, test_set.sources)


# --- several runs


def _runs_to_compare(config: EvaluateConfig) -> list[Path]:
    """Return the runs that a folder or pattern in `model_dir` names; [] if it names models."""
    if config.model_dir is None or len(config.model_dir) > 1:
        return []  # several models are an ensemble
    runs = find_runs(config.model_dir)
    is_model = runs == [resolve_path(config.model_dir[0])]
    return [] if is_model else runs


def _compare_runs(config: EvaluateConfig, runs: list[Path]) -> None:
    """Print a table of runs; translate the test set with each if the settings name one."""
    has_test_set = config.src is not None or config.data_dir is not None
    if config.baseline is not None:
        raise ConfigError(f"baseline={config.baseline}: compares with one model, not with runs")
    summaries = []
    for run_dir in runs:
        scores: list[Score] = []
        if has_test_set:
            log.info("translating with %s", os.path.relpath(run_dir))
            for test_set in _translate_test_sets(replace(config, model_dir=[str(run_dir)]), None):
                scores += _score(config, test_set)
        summaries.append(summarize_run(run_dir, scores))
    if config.format is OutputFormat.json:
        print(json.dumps([summary.as_json() for summary in summaries], indent=2))
    else:
        print(run_table(summaries))


# --- test sets


def _read_test_sets(config: EvaluateConfig, baseline: list[str] | None) -> list[_TestSet]:
    """Return the test sets with their hypotheses, from files or from a model.

    Each file of hypotheses is a test set with the same references.
    """
    if not config.hypotheses:
        return _translate_test_sets(config, baseline)
    references = [list(read_input(path)) for path in config.references]
    bleu_tokenizer = _choose_tokenizer(config, config.tgt_lang)
    sources = []  # only needed for the terms of a glossary
    if config.src is not None:
        sources = list(read_input(config.src))
        metrics.check_lines({"src": sources}, references, force=True)
    test_sets = []
    for path in config.hypotheses:
        test_set = _TestSet(
            references=references,
            bleu_tokenizer=bleu_tokenizer,
            hypotheses=list(read_input(path)),
            sources=sources,
            label=path if len(config.hypotheses) > 1 else "",
        )
        test_sets.append(test_set)
    return test_sets


def _translate_test_sets(config: EvaluateConfig, baseline: list[str] | None) -> list[_TestSet]:
    """Translate the test sets with the model, after checking that they can be scored."""
    from nmt.data.languages import default_directions
    from nmt.runtime.distributed import set_num_threads
    from nmt.translate.translator import Translator

    assert config.model_dir is not None
    if config.src is None and config.data_dir is None:
        [model_dir] = config.model_dir[:1]
        raise ConfigError(f"model_dir={model_dir}: needs src=FILE or data_dir=FOLDER to translate")
    set_num_threads(config.num_threads)
    translator = Translator.load(config.model_dir, device=config.device, backend=Engine.native)
    if config.src is None:
        test_sets = _read_held_out(config)
    else:
        tgt_lang = config.tgt_lang
        model_languages = {pair.tgt_lang for pair in default_directions(translator.directions)}
        if not tgt_lang and len(model_languages) == 1:
            [tgt_lang] = model_languages
        test_set = _TestSet(
            references=[list(read_input(path)) for path in config.references],
            bleu_tokenizer=_choose_tokenizer(config, tgt_lang),
            sources=list(read_input(config.src)),
            translate_options={"src_lang": config.src_lang, "tgt_lang": config.tgt_lang},
        )
        # only compares numbers of lines: the source is not scored, so it may look tokenized
        metrics.check_lines({"src": test_set.sources}, test_set.references, force=True)
        test_sets = [test_set]
    # Check the references before the translation, which may take long
    baseline_system = {} if baseline is None else {"baseline": baseline}
    for test_set in list(test_sets):
        test_sets += [_perturb(test_set, kind, config.seed) for kind in config.perturb]
    for test_set in test_sets:
        metrics.check_lines(baseline_system, test_set.references, force=config.force)
    translated = []
    for test_set in test_sets:
        hypotheses = translator.translate(
            test_set.sources, **test_set.translate_options, **config.search_changes()
        )
        translated.append(replace(test_set, hypotheses=hypotheses))
        if config.by_length:
            translated += _divide_by_length(translated[-1])
    return translated


def _perturb(test_set: _TestSet, kind: Perturbation, seed: int) -> _TestSet:
    """Return a test set with perturbed text; each line has its own random generator."""
    sources = []
    references: list[list[str]] = [[] for _ in test_set.references]
    for i, source in enumerate(test_set.sources):
        rng = Random(f"{kind.value} {seed} {i}")
        originals = [lines[i] for lines in test_set.references]
        source, changed = perturb.perturb_line(source, originals, kind, rng)
        sources.append(source)
        for lines, line in zip(references, changed, strict=True):
            lines.append(line)
    label = f"{test_set.label} {kind.value}".strip()
    return replace(test_set, sources=sources, references=references, label=label)


def _divide_by_length(test_set: _TestSet) -> list[_TestSet]:
    """Divide a translated test set by the number of words of its sources."""
    word_counts = [len(source.split()) for source in test_set.sources]
    groups = []
    for low, high in itertools.pairwise(_WORD_BOUNDS):
        indices = [i for i, count in enumerate(word_counts) if low <= count < high]
        if not indices:
            continue
        words = f"{low} words or more" if high == math.inf else f"{low} to {high - 1} words"
        group = replace(
            test_set,
            sources=[test_set.sources[i] for i in indices],
            hypotheses=[test_set.hypotheses[i] for i in indices],
            references=[[lines[i] for i in indices] for lines in test_set.references],
            label=f"{test_set.label} {words} (n={len(indices)})".strip(),
        )
        groups.append(group)
    return groups


def _read_held_out(config: EvaluateConfig) -> list[_TestSet]:
    """Return the corpora of a held-out set of the data folder, without hypotheses."""
    from nmt.data.binary import read_held_out

    assert config.data_dir is not None
    test_sets = []
    for text in read_held_out(resolve_path(config.data_dir), config.split.value):
        languages = text.direction
        test_set = _TestSet(
            references=[text.targets],
            bleu_tokenizer=_choose_tokenizer(config, config.tgt_lang or languages.tgt_lang),
            sources=text.sources,
            translate_options={"src_tag": languages.src_tag, "tgt_tag": languages.tgt_tag},
            label=text.corpus,
        )
        test_sets.append(test_set)
    return test_sets


def _choose_tokenizer(config: EvaluateConfig, language: str) -> str:
    """Return the name of BLEU's tokenizer; raise a `ConfigError` if it is not installed."""
    tokenize = config.tokenize or metrics.choose_bleu_tokenizer(language)  # sacreBLEU's name for it
    if Metric.bleu in config.metrics:
        metrics.build_bleu_metric(tokenize)  # raises the error
    return tokenize
