"""Run `nmt-evaluate`: score translations in a file, or translations that a model makes.

The model translates a source file, or a held-out set of a data folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from nmt import evaluate as metrics
from nmt.config import Engine, EvaluateConfig, Metric, OutputFormat, resolve_path
from nmt.data.text import read_input
from nmt.evaluate import Comparison, Score


@dataclass(frozen=True)
class _TestSet:
    """Hypotheses and references that are scored together."""

    references: list[list[str]]
    bleu_tokenizer: str
    hypotheses: list[str] = field(default_factory=list)  # empty until a model has translated
    sources: list[str] = field(default_factory=list)
    translate_options: dict[str, Any] = field(default_factory=dict)  # languages or their tags
    corpus: str = ""  # in a data folder of several corpora; printed before the name of a score


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
            name = f"{test_set.corpus} {score.name}" if test_set.corpus else score.name
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
    for test_set in test_sets:
        metrics.check_lines(baseline_system, test_set.references, force=config.force)
    translated = []
    for test_set in test_sets:
        hypotheses = translator.translate(
            test_set.sources, **test_set.translate_options, **config.search_changes()
        )
        translated.append(replace(test_set, hypotheses=hypotheses))
    return translated


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
            corpus=text.corpus,
        )
        test_sets.append(test_set)
    return test_sets


def _choose_tokenizer(config: EvaluateConfig, language: str) -> str:
    """Return the name of BLEU's tokenizer; raise a `ConfigError` if it is not installed."""
    tokenize = config.tokenize or metrics.tokenizer_for(language)  # sacreBLEU's name for it
    if Metric.bleu in config.metrics:
        metrics.bleu_metric(tokenize)  # raises the error
    return tokenize
