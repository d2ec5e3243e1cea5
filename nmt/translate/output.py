"""From hypotheses of segments to the translations of lines, and these as plain text or JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

from nmt.config import OutputFormat
from nmt.data.text import on_one_line
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.search.hypotheses import Hypothesis
from nmt.translate.batches import Failure, Outcome
from nmt.translate.long_lines import join_parts
from nmt.translate.windows import EncodedWindow, Segment, Window

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Translation:
    """One hypothesis as text.

    Of a line that was cut into segments, `tokens` and what belongs to them hold all segments one
    after the other, each but the last with its EOS, and the scores are sums.
    """

    text: str
    score: float  # as docs/search.md defines it
    log_prob: float  # nats, of all tokens, EOS counted
    tokens: list[str]  # pieces, without EOS
    finished: bool  # False when the length limit cut it off
    token_log_probs: list[float] = field(default_factory=list)
    """Nats, one a token, and one more for EOS when `finished`."""
    alignment: list[int] | None = None
    """For each token a position in the source tokens, from 0, each segment's EOS included."""


EMPTY = Translation("", 0.0, 0.0, [], True)


@dataclass(frozen=True)
class LineResult:
    """The translations of one line, or why there are none."""

    translations: list[Translation]
    """Best first; a single empty one for an empty line, none where `error` is set."""
    error: str | None = None
    num_parts: int = 1  # segments; more than 1 when the line was longer than `max_source_length`
    num_left_out: int = 0  # source tokens that were cut off
    source_tokens: list[str] = field(default_factory=list)
    """Pieces, each segment with its EOS; what `alignment` points to."""

    @property
    def text(self) -> str:
        """The best translation; empty where there is none."""
        return self.translations[0].text if self.translations else ""


@dataclass
class LineCounts:
    """What happened to lines, for the end of the job."""

    failed: int = 0
    met_limit: int = 0
    too_long: int = 0

    def add(self, other: LineCounts) -> None:
        """Add the counts of another part of the job."""
        self.failed += other.failed
        self.met_limit += other.met_limit
        self.too_long += other.too_long


def to_results(
    encoded: EncodedWindow,
    outcomes: Sequence[Outcome],
    tokenizer: Tokenizers,
    *,
    n_best: int,
    alignment: bool,
) -> list[LineResult]:
    """Return the result of each line of a window, from the outcomes of all its segments in turn."""
    remaining = iter(outcomes)
    results = []
    for i, segments in enumerate(encoded.segments):
        found = [next(remaining) for _ in segments]
        failed = [outcome for outcome in found if isinstance(outcome, Failure)]
        num_left_out = encoded.num_left_out.get(i, 0)
        if not segments:
            results.append(LineResult([EMPTY]))
        elif failed:
            results.append(LineResult([], failed[0].reason, len(segments), num_left_out))
        else:
            hypotheses = [outcome for outcome in found if not isinstance(outcome, Failure)]
            translations = to_translations(hypotheses, segments, tokenizer.tgt, n_best)
            ids = [t for s in segments for t in (*s.ids, tokenizer.src.eos_id)] if alignment else []
            pieces = tokenizer.src.pieces(ids)
            results.append(LineResult(translations, None, len(segments), num_left_out, pieces))
    return results


def to_translations(
    found: Sequence[list[Hypothesis]],
    segments: Sequence[Segment],
    tokenizer: Tokenizer,
    n_best: int,
) -> list[Translation]:
    """Join the hypotheses of a line's segments, each best first, to translations of the line.

    The k-th of up to `n_best` joins the k-th of each segment, or its last where it has fewer.
    """
    starts = [0, *accumulate(len(segment.ids) + 1 for segment in segments)]
    most = min(n_best, max(map(len, found)))
    ranks = ([part[min(k, len(part) - 1)] for part in found] for k in range(most))
    return [join_hypotheses(rank, starts, tokenizer) for rank in ranks]


def join_hypotheses(
    parts: Sequence[Hypothesis], starts: Sequence[int], tokenizer: Tokenizer
) -> Translation:
    """Return the translation of a line whose segments begin at `starts` in its source tokens."""
    bare = [part.tokens[:-1] if part.finished else part.tokens for part in parts]
    ids = [*chain.from_iterable(part.tokens for part in parts[:-1]), *bare[-1]]
    texts = [on_one_line(tokenizer.decode(tokens)) for tokens in bare]
    places = [
        start + place
        for part, start in zip(parts, starts, strict=False)
        for place in part.alignment or []
    ]
    return Translation(
        texts[0] if len(texts) == 1 else join_parts(text.strip() for text in texts),
        sum(part.score for part in parts),
        sum(part.log_prob for part in parts),
        tokenizer.pieces(ids),
        all(part.finished for part in parts),
        [value for part in parts for value in part.token_log_probs],
        places[: len(ids)] if parts[0].alignment is not None else None,
    )


def render(
    window: Window, results: Sequence[LineResult], output_format: OutputFormat
) -> tuple[bytes, LineCounts]:
    """Return a line of output for each line of the window, and counts; log the lines that failed.

    Plain text is the best translation, JSON one object a line.
    """
    lines = []
    for index, result in enumerate(results, start=window.first_line):
        if result.error is not None:
            message = "line %d cannot be translated and becomes empty: %s"
            log.warning(message, index + 1, result.error)
        is_text = output_format is OutputFormat.text
        line = result.text if is_text else json.dumps(_to_json(result, index), ensure_ascii=False)
        lines.append(line.encode("utf-8") + b"\n")
    best = [result.translations[0] for result in results if result.translations]
    return b"".join(lines), LineCounts(
        failed=sum(result.error is not None for result in results),
        met_limit=sum(not translation.finished for translation in best),
        too_long=sum(result.num_parts > 1 or result.num_left_out > 0 for result in results),
    )


def _to_json(result: LineResult, index: int) -> dict[str, Any]:
    content: dict[str, Any] = {"index": index}
    if result.error is not None:
        content["error"] = result.error
    if result.num_parts > 1:
        content["num_parts"] = result.num_parts
    if result.num_left_out:
        content["num_left_out"] = result.num_left_out
    if result.source_tokens:
        content["source_tokens"] = result.source_tokens
    names = ["text", "score", "log_prob", "tokens", "token_log_probs", "finished"]
    content["hypotheses"] = [
        {name: getattr(t, name) for name in names}
        | ({} if t.alignment is None else {"alignment": t.alignment})
        for t in result.translations
    ]
    return content
