"""Runs `nmt-evaluate`."""

from __future__ import annotations

import json

from nmt.config import EvaluateConfig, OutputFormat
from nmt.data.text import read_input
from nmt.evaluate import (
    Significance,
    as_json,
    as_table,
    check_tokenizer,
    compare,
    evaluate,
    tokenizer_for,
)


def run(config: EvaluateConfig, config_yaml: str) -> None:
    """Score the hypotheses and, with a baseline, test the difference; print text or JSON."""
    tokenize = config.tokenize or tokenizer_for(config.tgt_lang)
    check_tokenizer(tokenize)
    references = [list(read_input(path)) for path in config.references]
    hypotheses = list(read_input(config.hypotheses)) if config.hypotheses else _translate(config)
    scores = evaluate(
        hypotheses, references, tokenize=tokenize, metrics=config.metrics, force=config.force
    )
    comparisons = []
    if config.baseline is not None:
        comparisons = compare(
            hypotheses,
            references,
            baseline=list(read_input(config.baseline)),
            test=Significance(
                method=config.method, num_samples=config.num_samples, seed=config.seed
            ),
            tokenize=tokenize,
            metrics=config.metrics,
            force=config.force,
        )
    if config.format is OutputFormat.json:
        print(json.dumps(as_json(scores, comparisons), indent=2))
    else:
        print(as_table(scores, comparisons))


def _translate(config: EvaluateConfig) -> list[str]:
    # torch, which scoring alone does not need
    from nmt.distributed import set_num_threads
    from nmt.translate.translator import Translator

    assert config.model_dir is not None
    assert config.src is not None
    set_num_threads(config.num_threads)
    return Translator.load(config.model_dir, device=config.device).translate(
        list(read_input(config.src))
    )
