"""Runs `nmt-evaluate`: on translations in a file, or on those that a model makes of a file, or of
each corpus in the test set of a data folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from nmt import evaluate as metrics
from nmt.config import EvaluateConfig, Metric, OutputFormat, resolve
from nmt.data.text import read_input
from nmt.evaluate import Comparison, Score


@dataclass(frozen=True)
class _Test:
    """What is scored together."""

    references: list[list[str]]
    tokenize: str  # of BLEU
    hypotheses: list[str]  # none where a model is still to translate the sources
    sources: list[str]
    direction: dict[str, Any]  # that the model is asked for
    corpus: str = ""


def evaluate(config: EvaluateConfig) -> None:
    """Score the hypotheses and, with a baseline, test the difference; print text or JSON."""
    scores: list[Score] = []
    comparisons: list[Comparison] = []
    baseline = None if config.baseline is None else list(read_input(config.baseline))
    for test in _translated(config, baseline) if config.model_dir else [_given(config)]:
        how: dict[str, Any] = {"tokenize": test.tokenize, "metrics": config.metrics}
        how |= {"lowercase": config.lowercase, "force": config.force}
        found = metrics.evaluate(test.hypotheses, test.references, **how)
        scores += [replace(s, name=f"{test.corpus} {s.name}".strip()) for s in found]
        if baseline is not None:
            kind = metrics.Significance(
                method=config.method, num_samples=config.num_samples, seed=config.seed
            )
            comparisons = metrics.compare(
                test.hypotheses, test.references, baseline=baseline, test=kind, **how
            )
    if config.format is OutputFormat.json:
        print(json.dumps(metrics.as_json(scores, comparisons), indent=2))
    else:
        print(metrics.as_table(scores, comparisons))


def _given(config: EvaluateConfig) -> _Test:
    """Return the test whose translations are in a file."""
    assert config.hypotheses is not None
    tokenize = _tokenizer(config, config.tgt_lang)
    references = [list(read_input(path)) for path in config.references]
    return _Test(references, tokenize, list(read_input(config.hypotheses)), [], {})


def _translated(config: EvaluateConfig, baseline: list[str] | None) -> list[_Test]:
    """Return the tests with the translations of the model."""
    from nmt.data.languages import default_directions
    from nmt.runtime.distributed import set_num_threads
    from nmt.translate.translator import Translator

    assert config.model_dir is not None
    set_num_threads(config.num_threads)
    translator = Translator.load(config.model_dir, device=config.device)
    tests = []
    if config.src is None:
        from nmt.data.binary import read_held_out

        assert config.data_dir is not None
        for text in read_held_out(resolve(config.data_dir), config.split.value):
            asked = {"src_tag": text.direction.src_tag, "tgt_tag": text.direction.tgt_tag}
            tokenize = _tokenizer(config, config.tgt_lang or text.direction.tgt_lang)
            tests.append(_Test([text.targets], tokenize, [], text.sources, asked, text.corpus))
    else:
        asked = {"src_lang": config.src_lang, "tgt_lang": config.tgt_lang}
        languages = {direction.tgt_lang for direction in default_directions(translator.directions)}
        only = languages.pop() if len(languages) == 1 else ""
        tokenize = _tokenizer(config, config.tgt_lang or only)
        references = [list(read_input(path)) for path in config.references]
        sources = list(read_input(config.src))
        metrics.check_lines({"src": sources}, references, force=True)
        tests.append(_Test(references, tokenize, [], sources, asked))
    for test in tests:  # now, not after a long translation
        given = {} if baseline is None else {"baseline": baseline}
        metrics.check_lines(given, test.references, force=config.force)
    return [
        replace(test, hypotheses=translator.translate(test.sources, **test.direction))
        for test in tests
    ]


def _tokenizer(config: EvaluateConfig, language: str) -> str:
    """Return BLEU's tokenizer; a missing one is an error now, not after a long translation."""
    tokenize = config.tokenize or metrics.tokenizer_for(language)
    if Metric.bleu in config.metrics:
        metrics.bleu_metric(tokenize)
    return tokenize
