"""Score given translations with a model."""

from __future__ import annotations

from collections.abc import Sequence

from nmt.config import SearchConfig
from nmt.data.languages import Tags, encode_sources, tag_lines
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.search.hypotheses import Hypothesis
from nmt.translate.engines.base import Backend
from nmt.translate.results import EMPTY, Translation

MAX_SCORE_TOKENS = 4096
"""Default size of a batch: its number of pairs times the tokens of its longest line."""
EMPTY_PAIR = Hypothesis([], log_prob=0.0, score=0.0, finished=True, token_log_probs=[])
"""The result of `score_pairs` for two empty lines. Compare it with `is`."""


def score_pairs(
    backend: Backend,
    tokenizers: Tokenizers,
    sources: Sequence[str],
    targets: Sequence[str],
    config: SearchConfig,
    *,
    tags: Tags,
    max_tokens: int = MAX_SCORE_TOKENS,
    first_line: int = 0,
) -> list[Hypothesis]:
    """Score each target as the translation of its source, and return its token ids with EOS.

    Two empty lines are returned as `EMPTY_PAIR`. Lines are not split, however long. `tags` precede
    the lines of both sides. `max_tokens` bounds the size of a batch. `first_line` is the number of
    lines before `sources`, for error messages.
    """
    source_ids = encode_sources(tokenizers.src, sources, tags, first_line=first_line)
    target_ids = tokenizers.tgt.encode_batch(tag_lines(targets, tags.tgt))
    # an empty source has no ids; an empty target has the ids of its tag
    empty_target_ids = tokenizers.tgt.encode(tags.tgt)
    indices = []  # pairs with text on at least one side
    for i, ids in enumerate(source_ids):
        if ids or target_ids[i] != empty_target_ids:
            indices.append(i)
    scored_hypotheses = backend.score(
        [source_ids[i] for i in indices], [target_ids[i] for i in indices], config, max_tokens
    )
    hypotheses = [EMPTY_PAIR] * len(source_ids)
    for i, hypothesis in zip(indices, scored_hypotheses, strict=True):
        hypotheses[i] = hypothesis
    return hypotheses


def scored_translation(text: str, hypothesis: Hypothesis, tokenizer: Tokenizer) -> Translation:
    """Return the translation for a target, given its hypothesis from `score_pairs`."""
    if hypothesis is EMPTY_PAIR:
        return EMPTY
    alignment = hypothesis.alignment
    # as in search, scores include EOS, but tokens and alignment do not
    return Translation(
        text=text,
        score=hypothesis.score,
        log_prob=hypothesis.log_prob,
        tokens=tokenizer.pieces(hypothesis.tokens[:-1]),
        finished=True,
        token_log_probs=hypothesis.token_log_probs,
        alignment=None if alignment is None else alignment[:-1],
    )
