"""Runs `nmt-score`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from nmt.cli.lines import check_output, write_lines
from nmt.config import OutputFormat, ScoreConfig, ScoreMeasure, SearchConfig
from nmt.data.text import Pair, pair_lines, read_input
from nmt.distributed import set_num_threads
from nmt.search.hypotheses import ControlIds, Hypothesis
from nmt.translate.loading import LoadedModel, load_models
from nmt.translate.scoring import score_hypotheses

EMPTY = Hypothesis([], 0.0, 0.0, True, [])  # as translating an empty line gives


def run(config: ScoreConfig, config_yaml: str) -> None:
    """Score the pairs of `src` and `tgt` in windows; write one line each."""
    assert config.src is not None
    assert config.tgt is not None
    check_output(config.output)
    set_num_threads(config.num_threads)
    model = load_models(
        config.model_dir, device=config.device, dtype=config.dtype, combine=config.combine
    )
    lines = (read_input(config.src), read_input(config.tgt))
    names = tuple("stdin" if name == "-" else name for name in (config.src, config.tgt))
    pairs = pair_lines(*lines, names=(names[0], names[1]))
    write_lines(_score(pairs, model, config), config.output)


def _score(pairs: Iterator[Pair], model: LoadedModel, config: ScoreConfig) -> Iterator[str]:
    search, index = _search_config(model.defaults, config), 0
    while window := list(islice(pairs, config.window_lines)):
        for hypothesis, source in _score_window(window, model, search, config.max_tokens):
            yield _format(hypothesis, source, index, model, config)
            index += 1


def _search_config(defaults: SearchConfig, config: ScoreConfig) -> SearchConfig:
    names = ("length_penalty", "normalization", "word_reward", "coverage_penalty")
    given = {name: getattr(config, name) for name in names}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(defaults, alignment=config.alignment, **changes)


def _score_window(
    window: list[Pair], model: LoadedModel, search: SearchConfig, max_tokens: int
) -> Iterator[tuple[Hypothesis, list[int]]]:
    """Yield each pair's hypothesis and source ids; two empty lines are certain, and score 0."""
    tokenizer = model.tokenizer
    src_texts, tgt_texts = zip(*window, strict=True)
    sources = tokenizer.src.encode_batch(src_texts)
    targets = tokenizer.tgt.encode_batch(tgt_texts)
    filled = [i for i, (s, t) in enumerate(zip(sources, targets, strict=True)) if s or t]
    found = [EMPTY] * len(window)
    hypotheses = score_hypotheses(
        model.stepper,
        [sources[i] for i in filled],
        [targets[i] for i in filled],
        search,
        ControlIds.of(tokenizer),
        max_tokens=max_tokens,
    )
    for i, hypothesis in zip(filled, hypotheses, strict=True):
        found[i] = hypothesis
    yield from zip(found, sources, strict=True)


def _format(
    hypothesis: Hypothesis, source: list[int], index: int, model: LoadedModel, config: ScoreConfig
) -> str:
    per_token = hypothesis.log_prob / max(len(hypothesis.tokens), 1)
    content: dict[str, Any] = {
        "index": index,
        ScoreMeasure.log_prob.value: hypothesis.log_prob,
        ScoreMeasure.per_token.value: per_token,
        ScoreMeasure.score.value: hypothesis.score,
        "tokens": model.tokenizer.tgt.pieces(hypothesis.tokens[:-1]),
        "token_log_probs": hypothesis.token_log_probs,
    }
    if config.format is OutputFormat.text:
        return str(content[config.measure.value])
    if hypothesis.alignment is not None:
        tokenizer = model.tokenizer.src
        content["source_tokens"] = tokenizer.pieces([*source, tokenizer.eos_id])
        content["alignment"] = hypothesis.alignment
    return json.dumps(content, ensure_ascii=False)
