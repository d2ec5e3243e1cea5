"""Runs `nmt-score`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from nmt.cli.streams import find_output, write_lines
from nmt.config import OutputFormat, ScoreConfig, ScoreMeasure
from nmt.data.text import Pair, pair_lines, read_input
from nmt.distributed import set_num_threads
from nmt.search.hypotheses import Hypothesis
from nmt.translate.translator import Translator


def run(config: ScoreConfig, config_yaml: str) -> None:
    """Score the pairs of `src` and `tgt` in windows; write one line each."""
    assert config.src is not None
    assert config.tgt is not None
    find_output(config.output)
    set_num_threads(config.num_threads)
    translator = Translator.load(
        config.model_dir,
        device=config.device,
        dtype=config.dtype,
        backend=config.backend,
        combine=config.combine,
        num_threads=config.num_threads,
    )
    lines = (read_input(config.src), read_input(config.tgt))
    names = tuple("stdin" if name == "-" else name for name in (config.src, config.tgt))
    pairs = pair_lines(*lines, names=(names[0], names[1]))
    write_lines(_score(pairs, translator, config), config.output)


def _score(pairs: Iterator[Pair], translator: Translator, config: ScoreConfig) -> Iterator[str]:
    names = ("length_penalty", "normalization", "word_reward", "coverage_penalty", "alignment")
    settings = {name: getattr(config, name) for name in names}
    translator.backend.check(translator.search_config(**settings), scoring=True)
    index = 0
    while window := list(islice(pairs, config.window_lines)):
        sources, targets = zip(*window, strict=True)
        found = translator.score_hypotheses(
            sources, targets, max_tokens=config.max_tokens, **settings
        )
        for hypothesis, source in zip(found, sources, strict=True):
            yield _format(hypothesis, source, index, translator, config)
            index += 1


def _format(
    hypothesis: Hypothesis, source: str, index: int, translator: Translator, config: ScoreConfig
) -> str:
    tokenizer = translator.tokenizer
    content: dict[str, Any] = {
        "index": index,
        ScoreMeasure.log_prob.value: hypothesis.log_prob,
        ScoreMeasure.per_token.value: hypothesis.log_prob / max(len(hypothesis.tokens), 1),
        ScoreMeasure.score.value: hypothesis.score,
        "tokens": tokenizer.tgt.pieces(hypothesis.tokens[:-1]),
        "token_log_probs": hypothesis.token_log_probs,
    }
    if config.format is OutputFormat.text:
        return str(content[config.measure.value])
    if hypothesis.alignment is not None:
        ids = [*tokenizer.src.encode(source), tokenizer.src.eos_id]
        content["source_tokens"] = tokenizer.src.pieces(ids)
        content["alignment"] = hypothesis.alignment
    return json.dumps(content, ensure_ascii=False)
