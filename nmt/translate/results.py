"""What a line of text becomes: its translations with scores, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from nmt.data.text import on_one_line
from nmt.data.tokenizer import Tokenizer
from nmt.search.search import Hypothesis
from nmt.translate.longlines import join_parts


@dataclass(frozen=True)
class Translation:
    """One hypothesis as text.

    Of a line that was cut into parts, `tokens` and what stands beside them hold all parts one after
    the other, each but the last with its EOS, and the scores are sums.
    """

    text: str
    score: float
    """As docs/search.md defines it."""
    log_prob: float
    """Nats, of all tokens, EOS counted."""
    tokens: list[str]
    """Pieces, without EOS."""
    finished: bool
    """False when the length limit cut it off."""
    token_log_probs: list[float] = field(default_factory=list)
    """Nats, one a token, and one more for EOS when `finished`."""
    alignment: list[int] | None = None
    """For each token a position in the source tokens, from 0, each part's EOS included."""


EMPTY = Translation("", 0.0, 0.0, [], True)


@dataclass(frozen=True)
class LineResult:
    """What became of one line."""

    translations: list[Translation]
    """Best first; a single empty one for an empty line, none where `error` is set."""
    error: str | None = None
    num_parts: int = 1
    """More than 1 when the line was longer than `max_source_length`."""
    num_left_out: int = 0
    """Source tokens that were cut off."""
    source_tokens: list[str] = field(default_factory=list)
    """Pieces, each part with its EOS; what `alignment` points to."""

    @property
    def text(self) -> str:
        """The best translation; empty where there is none."""
        return self.translations[0].text if self.translations else ""

    @property
    def is_cut(self) -> bool:
        """Whether the best translation met the length limit."""
        return bool(self.translations) and not self.translations[0].finished


def to_translations(
    found: Sequence[list[Hypothesis]],
    sources: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    n_best: int,
) -> list[Translation]:
    """Turn the hypotheses of a line's parts into translations of the line.

    Args:
        found: hypotheses of each part, best first.
        sources: source ids of each part, without EOS.
        tokenizer: of the target.
        n_best: most translations to return; the k-th joins the k-th of each part, or the part's
            last where it has fewer.
    """
    most = min(n_best, max(map(len, found)))
    ranks = ([part[min(k, len(part) - 1)] for part in found] for k in range(most))
    if len(found) == 1:
        return [_translation(rank[0], tokenizer) for rank in ranks]
    starts = [0, *accumulate(len(ids) + 1 for ids in sources)]
    return [_joined(rank, starts, tokenizer) for rank in ranks]


def _translation(hypothesis: Hypothesis, tokenizer: Tokenizer) -> Translation:
    ids = _without_eos(hypothesis)
    alignment = hypothesis.alignment
    return Translation(
        on_one_line(tokenizer.decode(ids)),
        hypothesis.score,
        hypothesis.log_prob,
        tokenizer.pieces(ids),
        hypothesis.finished,
        hypothesis.token_log_probs,
        None if alignment is None else alignment[: len(ids)],
    )


def _joined(
    parts: Sequence[Hypothesis], starts: Sequence[int], tokenizer: Tokenizer
) -> Translation:
    ids = [*chain.from_iterable(part.tokens for part in parts[:-1]), *_without_eos(parts[-1])]
    texts = (on_one_line(tokenizer.decode(_without_eos(part))) for part in parts)
    places = [
        start + place
        for part, start in zip(parts, starts, strict=False)
        for place in part.alignment or []
    ]
    return Translation(
        join_parts(text.strip() for text in texts),
        sum(part.score for part in parts),
        sum(part.log_prob for part in parts),
        tokenizer.pieces(ids),
        all(part.finished for part in parts),
        [value for part in parts for value in part.token_log_probs],
        places[: len(ids)] if parts[0].alignment is not None else None,
    )


def _without_eos(hypothesis: Hypothesis) -> list[int]:
    return hypothesis.tokens[:-1] if hypothesis.finished else hypothesis.tokens
