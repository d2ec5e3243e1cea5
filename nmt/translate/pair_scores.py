"""Score given translations with a model."""

from __future__ import annotations

from collections.abc import Sequence

from nmt.config import SearchConfig
from nmt.data.languages import Tags, encode_sources, tag_lines
from nmt.data.tokenizer import Tokenizers
from nmt.search.hypotheses import Hypothesis
from nmt.translate.engines.base import Backend

MAX_SCORE_TOKENS = 4096
"""Default size of a batch: number of pairs * longest side, in tokens."""
EMPTY_PAIR = Hypothesis([], log_prob=0.0, score=0.0, finished=True, token_log_probs=[])
"""The result of `score_pairs` for two empty lines; compared by identity."""


def score_pairs(
    backend: Backend,
    tokenizer: Tokenizers,
    sources: Sequence[str],
    targets: Sequence[str],
    config: SearchConfig,
    *,
    tags: Tags,
    max_tokens: int = MAX_SCORE_TOKENS,
    first_line: int = 0,
) -> list[Hypothesis]:
    """Score each target as the translation of its source; return its token ids with EOS.

    Lines are scored whole, however long. `tags` precede the lines of both sides. `max_tokens`
    bounds a batch. `first_line` is the number of lines before these, for error messages.
    """
    source_ids = encode_sources(tokenizer.src, sources, tags, first_line=first_line)
    target_ids = tokenizer.tgt.encode_batch(tag_lines(targets, tags.tgt))
    # sources without text have no ids; targets without text have the ids of their tag
    empty_target = tokenizer.tgt.encode(tags.tgt)
    indices = []  # pairs with text on at least one side
    for i, ids in enumerate(source_ids):
        if ids or target_ids[i] != empty_target:
            indices.append(i)
    scored_hypotheses = backend.score(
        [source_ids[i] for i in indices], [target_ids[i] for i in indices], config, max_tokens
    )
    hypotheses = [EMPTY_PAIR] * len(source_ids)
    for i, hypothesis in zip(indices, scored_hypotheses, strict=True):
        hypotheses[i] = hypothesis
    return hypotheses
