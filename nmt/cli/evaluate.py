"""Run `nmt-evaluate`: score translations from files or from a model.

A model translates a source file, or a held-out set of a data folder. For several training runs, the
command prints a table of the runs, with the scores that training has recorded.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from nmt import evaluate as scoring
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
from nmt.data.lemmas import read_lemmas
from nmt.data.text import read_input
from nmt.errors import ConfigError
from nmt.evaluate import Comparison, Score
from nmt.visualize.run_table import find_runs, run_table, summarize_run

if TYPE_CHECKING:
    from nmt.data.languages import LanguagePair
    from nmt.translate.translator import Translator

log = logging.getLogger(__name__)

# by_length: the first groups have 1 to 3 and 4 to 10 source words
_LENGTH_BOUNDS = (1, 4, 11, 21, 41, math.inf)


@dataclass(frozen=True)
class _TestSet:
    """Hypotheses and references that are scored together."""

    references: list[list[str]]  # one list of lines for each reference file
    bleu_tokenizer: str
    hypotheses: list[str] = field(default_factory=list)  # empty until a model has translated
    sources: list[str] = field(default_factory=list)
    unperturbed_sources: list[str] = field(default_factory=list)  # empty if nothing was perturbed
    translate_options: dict[str, Any] = field(default_factory=dict)  # languages or language tags
    label: str = ""  # the corpus, system, perturbation or length group, as shown in the output

    def add_label(self, name: str) -> str:
        """Return the label and a name, such as the name of a metric."""
        return f"{self.label} {name}".strip()


def evaluate(config: EvaluateConfig) -> None:
    """Print scores of the hypotheses and, with a baseline, significance tests of the differences.

    The baseline is the file `baseline`, or the first of several files of hypotheses. If `model_dir`
    names a folder of runs or a pattern, prints a table of the runs instead.
    """
    if config.lemmas is not None:
        _read_lemmas(config.lemmas)  # raises an error before anything is translated
    runs = _runs_to_compare(config)
    if runs:
        _compare_runs(config, runs)
        return
    if config.tune:
        _tune(config)
        return
    baseline = None if config.baseline is None else list(read_input(config.baseline))
    test_sets = _read_test_sets(config, baseline)
    scores: list[Score] = []
    for test_set in test_sets:
        scores += _score(config, test_set)
    if baseline is None and len(config.hypotheses) > 1:
        baseline = test_sets.pop(0).hypotheses  # removed, not to be compared with itself
        log.info("the baseline is %s", config.hypotheses[0])
    comparisons: list[Comparison] = []
    if baseline is not None:
        for test_set in test_sets:
            comparisons += _compare(config, test_set, baseline)
    if config.format is OutputFormat.json:
        print(json.dumps(scoring.as_json(scores, comparisons), indent=2))
    else:
        print(scoring.as_table(scores, comparisons))


def _score(config: EvaluateConfig, test_set: _TestSet) -> list[Score]:
    """Score the hypotheses of a test set; the names of scores begin with the label of the set."""
    options = _metric_options(config, test_set)
    scores = []
    for score in scoring.evaluate(test_set.hypotheses, test_set.references, **options):
        scores.append(replace(score, name=test_set.add_label(score.name)))
    if config.glossary:
        scores.append(_score_terms(config, test_set))
    return scores


# read once for all test sets
_read_lemmas = functools.lru_cache(maxsize=1)(read_lemmas)


def _score_terms(config: EvaluateConfig, test_set: _TestSet) -> Score:
    """Return the percentage of the glossary's terms that the hypotheses contain."""
    from nmt.search.glossary import count_terms, load_glossary

    glossary = load_glossary(tuple(config.search_changes()["glossary"]))
    lemmas = None if config.lemmas is None else _read_lemmas(config.lemmas)
    count = count_terms(glossary, test_set.sources, test_set.hypotheses, lemmas)
    return Score(
        name=test_set.add_label("terms"),
        value=100 * count.num_translated / max(count.num_terms, 1),
        signature=f"{count.num_translated} of {count.num_terms}",
        detail={"kept": count.num_translated, "total": count.num_terms},
    )


def _compare(config: EvaluateConfig, test_set: _TestSet, baseline: list[str]) -> list[Comparison]:
    """Test whether the hypotheses of a test set differ from a baseline."""
    significance = scoring.Significance(
        method=config.method, num_samples=config.num_samples, seed=config.seed
    )
    options = _metric_options(config, test_set)
    comparisons = []
    for comparison in scoring.compare(
        test_set.hypotheses,
        test_set.references,
        baseline=baseline,
        test=significance,
        **options,
    ):
        comparisons.append(replace(comparison, name=test_set.add_label(comparison.name)))
    return comparisons


def _metric_options(config: EvaluateConfig, test_set: _TestSet) -> dict[str, Any]:
    """Return the common arguments of `scoring.evaluate` and `scoring.compare`."""
    return {
        "tokenize": test_set.bleu_tokenizer,
        "metrics": config.metrics,
        "command_metric": _command_metric(config, test_set),
        "lowercase": config.lowercase,
        "force": config.force,  # score text that looks tokenized
    }


def _command_metric(config: EvaluateConfig, test_set: _TestSet) -> CommandMetric | None:
    """Return the metric that the command `metric_command` computes, or None if it is not set."""
    if config.metric_command is None:
        return None
    return CommandMetric(config.metric_command, test_set.sources)


# --- weights of a reranker


def _tune(config: EvaluateConfig) -> None:
    """Print weights for rerank=noisy_channel, and the scores with and without reranking.

    `find_weights` chooses the weights by the first metric of the settings.
    """
    from nmt.translate.tune_weights import choose_by_weights, find_weights

    translator = _load_translator(config)
    test_sets = _read_originals(config, translator)
    if len(test_sets) > 1:
        raise ConfigError("tune=true: the data folder has several corpora; give src and references")
    [test_set] = test_sets
    scoring.check_lines({}, test_set.references, force=config.force)  # {}: no hypotheses yet
    candidates = translator.n_best(
        test_set.sources, **test_set.translate_options, **_translate_options(config)
    )
    candidate_texts = []
    for n_best in candidates:
        candidate_texts.append([translation.text for translation in n_best])
    candidate_counts = scoring.CandidateCounts(
        candidate_texts,
        test_set.references,
        metric=config.metrics[0],
        tokenize=test_set.bleu_tokenizer,
        lowercase=config.lowercase,
    )
    best_of_search = []
    choice_of_search = []  # for each line, the index of this translation among the candidates
    for n_best in candidates:
        # the translation that is chosen without reranking
        best_translation = max(
            n_best, key=lambda translation: (translation.finished, translation.score)
        )
        best_of_search.append(best_translation)
        choice_of_search.append(n_best.index(best_translation))
    score_of_search = candidate_counts.score(np.array(choice_of_search))
    weights = find_weights(candidates, candidate_counts, min_score=score_of_search)
    systems = {"search": best_of_search, "reranked": choose_by_weights(candidates, weights)}
    scores: list[Score] = []
    for label, translations in systems.items():
        hypotheses = [translation.text for translation in translations]
        scores += _score(config, replace(test_set, hypotheses=hypotheses, label=label))
    if config.format is OutputFormat.json:
        print(json.dumps(scoring.as_json(scores) | {"weights": asdict(weights)}, indent=2))
    else:
        print(scoring.as_table(scores))
        print(f"\nreverse_weight={weights.reverse_weight} length_weight={weights.length_weight}")


# --- several runs


def _runs_to_compare(config: EvaluateConfig) -> list[Path]:
    """Return the runs that the folder or pattern `model_dir` names, or [] if it names a model."""
    if config.model_dir is None or len(config.model_dir) > 1:
        return []  # several folders are an ensemble
    runs = find_runs(config.model_dir)
    if runs == [resolve_path(config.model_dir[0])]:
        return []  # the folder is a run, whose model is evaluated
    return runs


def _compare_runs(config: EvaluateConfig, runs: list[Path]) -> None:
    """Print a table of runs, with scores on the test set if the settings name one."""
    if config.baseline is not None:
        raise ConfigError(f"baseline={config.baseline}: compares with one model, not with runs")
    has_test_set = config.src is not None or config.data_dir is not None
    summaries = []
    for run_dir in runs:
        scores: list[Score] = []
        if has_test_set:
            log.info("translating with %s", os.path.relpath(run_dir))
            run_config = replace(config, model_dir=[str(run_dir)])
            for test_set in _translate_test_sets(run_config, baseline=None):
                scores += _score(config, test_set)
        summaries.append(summarize_run(run_dir, scores))
    if config.format is OutputFormat.json:
        print(json.dumps([summary.as_json() for summary in summaries], indent=2))
    else:
        print(run_table(summaries))


# --- test sets


def _read_test_sets(config: EvaluateConfig, baseline: list[str] | None) -> list[_TestSet]:
    """Return the test sets with their hypotheses, from files or from a model.

    There is one test set for each file of hypotheses. Their references are equal.
    """
    if not config.hypotheses:
        return _translate_test_sets(config, baseline)
    references = [list(read_input(path)) for path in config.references]
    bleu_tokenizer = _choose_tokenizer(config, config.tgt_lang)
    sources = []  # only needed for a glossary or metric_command
    if config.src is not None:
        sources = list(read_input(config.src))
        _check_source(sources, references)
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
    translator = _load_translator(config)
    originals = _read_originals(config, translator)
    test_sets = list(originals)
    for test_set in originals:
        test_sets += [_perturb(test_set, change, config.seed) for change in config.perturb]
    # check the references before the translation, which may take long
    systems = {} if baseline is None else {"baseline": baseline}
    for test_set in test_sets:
        scoring.check_lines(systems, test_set.references, force=config.force)
    translated = []
    for test_set in test_sets:
        hypotheses = translator.translate(
            test_set.sources, **test_set.translate_options, **_translate_options(config)
        )
        translated_set = replace(test_set, hypotheses=hypotheses)
        translated.append(translated_set)
        if config.by_length:
            translated += _divide_by_length(translated_set)
    return translated


def _load_translator(config: EvaluateConfig) -> Translator:
    """Load the model in `model_dir`."""
    from nmt.runtime.distributed import set_num_threads
    from nmt.translate.translator import Translator

    assert config.model_dir is not None
    if config.src is None and config.data_dir is None:
        raise ConfigError(
            f"model_dir={config.model_dir[0]}: needs src=FILE or data_dir=FOLDER to translate"
        )
    set_num_threads(config.num_threads)
    return Translator.load(config.model_dir, device=config.device, backend=Engine.native)


def _read_originals(config: EvaluateConfig, translator: Translator) -> list[_TestSet]:
    """Return the test sets that the settings name, without hypotheses and unperturbed."""
    if config.src is None:
        return _read_held_out(config)
    return [_read_source_file(config, config.src, translator.directions)]


def _translate_options(config: EvaluateConfig) -> dict[str, Any]:
    """Return the settings of search and reranking as keyword arguments of a translator."""
    options = config.search_changes()
    if config.enabled_reranking is not None:
        options |= vars(config.enabled_reranking)
    return options


def _read_source_file(
    config: EvaluateConfig, src: str, directions: Sequence[LanguagePair]
) -> _TestSet:
    """Return the test set of a source file and `references`, without hypotheses.

    `directions` are the directions of the model. If they have one target language, the settings
    need no `tgt_lang`.
    """
    from nmt.data.languages import default_directions

    tgt_lang = config.tgt_lang
    model_languages = {pair.tgt_lang for pair in default_directions(directions)}
    if not tgt_lang and len(model_languages) == 1:
        [tgt_lang] = model_languages
    test_set = _TestSet(
        references=[list(read_input(path)) for path in config.references],
        bleu_tokenizer=_choose_tokenizer(config, tgt_lang),
        sources=list(read_input(src)),
        translate_options={"src_lang": config.src_lang, "tgt_lang": config.tgt_lang},
    )
    _check_source(test_set.sources, test_set.references)
    return test_set


def _check_source(sources: list[str], references: list[list[str]]) -> None:
    """Raise an error unless source and references have the same number of lines."""
    # force=True: the source is not scored, so it may look tokenized
    scoring.check_lines({"src": sources}, references, force=True)


def _perturb(test_set: _TestSet, change: Perturbation, seed: int) -> _TestSet:
    """Return a test set with perturbed text; each line has its own random generator."""
    sources = []
    references: list[list[str]] = [[] for _ in test_set.references]
    for i, source in enumerate(test_set.sources):
        rng = Random(f"{change.value} {seed} {i}")
        line_references = [lines[i] for lines in test_set.references]
        perturbed_source, perturbed_references = perturb.perturb_line(
            source, line_references, change, rng
        )
        sources.append(perturbed_source)
        for lines, line in zip(references, perturbed_references, strict=True):
            lines.append(line)
    label = test_set.add_label(change.value)
    return replace(
        test_set,
        sources=sources,
        unperturbed_sources=test_set.sources,
        references=references,
        label=label,
    )


def _divide_by_length(test_set: _TestSet) -> list[_TestSet]:
    """Divide a translated test set into groups by the number of words in the unperturbed source."""
    sources = test_set.unperturbed_sources or test_set.sources
    word_counts = [len(source.split()) for source in sources]
    groups = []
    for low, high in itertools.pairwise(_LENGTH_BOUNDS):
        indices = [i for i, count in enumerate(word_counts) if low <= count < high]
        if not indices:
            continue
        length_range = f"{low} words or more" if high == math.inf else f"{low} to {high - 1} words"
        references = []
        for lines in test_set.references:
            references.append([lines[i] for i in indices])
        group = replace(
            test_set,
            sources=[test_set.sources[i] for i in indices],
            unperturbed_sources=[],  # a group is not divided again
            hypotheses=[test_set.hypotheses[i] for i in indices],
            references=references,
            label=test_set.add_label(f"{length_range} (n={len(indices)})"),
        )
        groups.append(group)
    return groups


def _read_held_out(config: EvaluateConfig) -> list[_TestSet]:
    """Return a test set without hypotheses for each corpus of a held-out set of the data folder."""
    from nmt.data.binary import read_held_out

    assert config.data_dir is not None
    test_sets = []
    for corpus in read_held_out(resolve_path(config.data_dir), config.split.value):
        direction = corpus.direction
        test_set = _TestSet(
            references=[corpus.targets],
            bleu_tokenizer=_choose_tokenizer(config, config.tgt_lang or direction.tgt_lang),
            sources=corpus.sources,
            translate_options={"src_tag": direction.src_tag, "tgt_tag": direction.tgt_tag},
            label=corpus.corpus,  # its name; "" for a corpus without a name
        )
        test_sets.append(test_set)
    return test_sets


def _choose_tokenizer(config: EvaluateConfig, language: str) -> str:
    """Return the name of BLEU's tokenizer in sacreBLEU.

    Raises a `ConfigError` if the tokenizer is not installed.
    """
    bleu_tokenizer = config.tokenize or scoring.choose_bleu_tokenizer(language)
    if Metric.bleu in config.metrics:
        scoring.build_bleu_metric(bleu_tokenizer)  # only to raise the error
    return bleu_tokenizer
