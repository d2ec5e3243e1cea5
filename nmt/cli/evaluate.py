"""Run `nmt-evaluate`: score translations in a file, or translations that a model makes.

The model translates a source file, or a held-out set of a data folder.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from nmt import evaluate as metrics
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
from nmt.evaluate import Comparison, Score

_WORD_BOUNDS = (1, 4, 11, 21, 41, math.inf)  # of the parts of a test set by length


@dataclass(frozen=True)
class _TestSet:
    """Hypotheses and references that are scored together."""

    references: list[list[str]]
    bleu_tokenizer: str
    hypotheses: list[str] = field(default_factory=list)  # empty until a model has translated
    sources: list[str] = field(default_factory=list)
    translate_options: dict[str, Any] = field(default_factory=dict)  # languages or their tags
    label: str = ""  # corpus, perturbation or lengths; printed before the names of scores


def evaluate(config: EvaluateConfig) -> None:
    """Print the scores of the hypotheses and, with a baseline, tests of the differences."""
    scores: list[Score] = []
    comparisons: list[Comparison] = []
    baseline = None if config.baseline is None else list(read_input(config.baseline))
    for test_set in _read_test_sets(config, baseline):
        options: dict[str, Any] = {
            "tokenize": test_set.bleu_tokenizer,
            "metrics": config.metrics,
            "lowercase": config.lowercase,
            "force": config.force,  # score text that looks tokenized
        }
        for score in metrics.evaluate(test_set.hypotheses, test_set.references, **options):
            name = f"{test_set.label} {score.name}" if test_set.label else score.name
            scores.append(replace(score, name=name))
        if baseline is not None:  # then there is a single test set
            significance = metrics.Significance(
                method=config.method, num_samples=config.num_samples, seed=config.seed
            )
            comparisons += metrics.compare(
                test_set.hypotheses,
                test_set.references,
                baseline=baseline,
                test=significance,
                **options,
            )
    if config.format is OutputFormat.json:
        print(json.dumps(metrics.as_json(scores, comparisons), indent=2))
    else:
        print(metrics.as_table(scores, comparisons))


def _read_test_sets(config: EvaluateConfig, baseline: list[str] | None) -> list[_TestSet]:
    """Return the test sets with their hypotheses, from a file or from a model."""
    if config.hypotheses is None:
        return _translate_test_sets(config, baseline)
    test_set = _TestSet(
        references=[list(read_input(path)) for path in config.references],
        bleu_tokenizer=_choose_tokenizer(config, config.tgt_lang),
        hypotheses=list(read_input(config.hypotheses)),
    )
    return [test_set]


def _translate_test_sets(config: EvaluateConfig, baseline: list[str] | None) -> list[_TestSet]:
    """Translate the test sets with the model, after checking that they can be scored."""
    from nmt.data.languages import default_directions
    from nmt.runtime.distributed import set_num_threads
    from nmt.translate.translator import Translator

    assert config.model_dir is not None
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
    # the texts that the hypotheses will be scored with, before a translation that may take long
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
    """Return a test set with changed text; lines draw random numbers of their own."""
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
    """Divide a translated test set into the lines whose sources have few words, more, and so on."""
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
    tokenize = config.tokenize or metrics.tokenizer_for(language)  # sacreBLEU's name for it
    if Metric.bleu in config.metrics:
        metrics.bleu_metric(tokenize)  # raises the error
    return tokenize
