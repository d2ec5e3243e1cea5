"""Run `nmt-evaluate`: score translations in a file, or let a model translate a file or a held-out
set of a data folder and score its translations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from nmt import evaluate as metrics
from nmt.config import Engine, EvaluateConfig, Metric, OutputFormat, resolve
from nmt.data.text import read_input
from nmt.evaluate import Comparison, Score


@dataclass(frozen=True)
class _TestSet:
    """Hypotheses and references that are scored together."""

    references: list[list[str]]
    tokenize: str  # BLEU's tokenizer
    hypotheses: list[str] = field(default_factory=list)  # empty until a model has translated
    sources: list[str] = field(default_factory=list)
    direction: dict[str, Any] = field(default_factory=dict)  # arguments of the translator
    corpus: str = ""  # name of the corpus in a data folder, before the name of each score


def evaluate(config: EvaluateConfig) -> None:
    """Print the scores of the hypotheses and, with a baseline, tests of the differences."""
    scores: list[Score] = []
    comparisons: list[Comparison] = []
    baseline = None if config.baseline is None else list(read_input(config.baseline))
    for test_set in _read_test_sets(config, baseline):
        options: dict[str, Any] = {
            "tokenize": test_set.tokenize,
            "metrics": config.metrics,
            "lowercase": config.lowercase,
            "force": config.force,
        }
        for score in metrics.evaluate(test_set.hypotheses, test_set.references, **options):
            name = f"{test_set.corpus} {score.name}" if test_set.corpus else score.name
            scores.append(replace(score, name=name))
        if baseline is not None:
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
        tokenize=_choose_tokenizer(config, config.tgt_lang),
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
        languages = {direction.tgt_lang for direction in default_directions(translator.directions)}
        only_language = languages.pop() if len(languages) == 1 else ""
        test_set = _TestSet(
            references=[list(read_input(path)) for path in config.references],
            tokenize=_choose_tokenizer(config, config.tgt_lang or only_language),
            sources=list(read_input(config.src)),
            direction={"src_lang": config.src_lang, "tgt_lang": config.tgt_lang},
        )
        metrics.check_lines({"src": test_set.sources}, test_set.references, force=True)
        test_sets = [test_set]
    other_systems = {} if baseline is None else {"baseline": baseline}
    for test_set in test_sets:  # checked before the translation, which may take long
        metrics.check_lines(other_systems, test_set.references, force=config.force)
    translated = []
    for test_set in test_sets:
        hypotheses = translator.translate(test_set.sources, **test_set.direction)
        translated.append(replace(test_set, hypotheses=hypotheses))
    return translated


def _read_held_out(config: EvaluateConfig) -> list[_TestSet]:
    """Return the corpora of a held-out set of the data folder, without hypotheses."""
    from nmt.data.binary import read_held_out

    assert config.data_dir is not None
    return [
        _TestSet(
            references=[text.targets],
            tokenize=_choose_tokenizer(config, config.tgt_lang or text.direction.tgt_lang),
            sources=text.sources,
            direction={"src_tag": text.direction.src_tag, "tgt_tag": text.direction.tgt_tag},
            corpus=text.corpus,
        )
        for text in read_held_out(resolve(config.data_dir), config.split.value)
    ]


def _choose_tokenizer(config: EvaluateConfig, language: str) -> str:
    """Return the name of BLEU's tokenizer; raise a `ConfigError` if it is not installed."""
    tokenize = config.tokenize or metrics.tokenizer_for(language)
    if Metric.bleu in config.metrics:
        metrics.bleu_metric(tokenize)
    return tokenize
