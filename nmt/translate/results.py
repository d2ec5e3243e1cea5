"""Build the translations of lines from hypotheses, and write them as text or JSON.

A window is a group of lines that are translated together. A segment is a line, or a part of a long
line, which is searched as one sentence.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from nmt.config import OutputFormat
from nmt.data.hints import remove_hints
from nmt.data.languages import Tags, split_tag
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.search.hypotheses import Hypothesis
from nmt.search.protect import lacks_protected
from nmt.translate.batch_search import Failure, SearchResult, Segment
from nmt.translate.long_lines import join_parts
from nmt.translate.windows import EncodedWindow, Window

if TYPE_CHECKING:
    from nmt.translate.unknown_words import SourceWords

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Translation:
    """A translation of a line: text, tokens and scores.

    For a line that was split into segments, scores are sums over the segments. `tokens` contains
    the tokens of all segments in order, with an EOS between two segments.
    """

    text: str
    score: float  # defined in docs/search.md
    log_prob: float  # sum over the tokens in nats, EOS included
    tokens: list[str]  # without the EOS at the end of the line
    finished: bool  # False if the length limit cut it off
    token_log_probs: list[float] = field(default_factory=list)
    """One log-probability per token in nats, and one for EOS if `finished`."""
    alignment: list[int] | None = None
    """For each token, the index of its source token in the `source_tokens` of the line."""
    searched_again: bool = False
    """Whether a segment was searched a second time, without repeats: its first translation had
    repeated tokens or was cut off."""
    rerank_score: float | None = None
    """The score by which a reranker ordered the candidates; defined in docs/search.md."""
    reverse_log_prob: float | None = None
    """Log-probability of the source given this translation, in nats, by a reverse model. Only set
    with rerank=noisy_channel."""
    lacks_protected: bool = False
    """Whether a placeholder, tag or address of the line is missing. Only rerankers check this, and
    only with the setting `protect`."""

    @property
    def completeness(self) -> int:
        """A number by which candidates are ranked before their score: 3 is the best, 0 the worst.

        The first criterion is whether the translation is finished, the second whether it has all
        placeholders, tags and addresses.
        """
        completeness = 0
        if self.finished:
            completeness += 2
        if not self.lacks_protected:
            completeness += 1
        return completeness

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including EOS if the translation is finished."""
        if self.finished:
            return len(self.tokens) + 1
        return len(self.tokens)

    def __repr__(self) -> str:
        """Show the text and the values that differ between the translations of a line."""
        values = f"{self.text!r}, score={self.score:.4g}, log_prob={self.log_prob:.4g}"
        if not self.finished:
            values += ", finished=False"
        return f"Translation({values})"


EMPTY = Translation(text="", score=0.0, log_prob=0.0, tokens=[], finished=True)
"""The translation of an empty line."""


@dataclass(frozen=True)
class LineResult:
    """The translations of a line, or the reason why it has no translation."""

    translations: list[Translation]
    """Best first. `EMPTY` for an empty line; an empty list if `error` is set."""
    error: str | None = None
    num_segments: int = 1  # more than 1 if the line was split
    num_truncated: int = 0  # number of source tokens removed from the end
    source_tokens: list[str] = field(default_factory=list)
    """Pieces of all segments, with the EOS of each; only set with `alignment`."""

    @property
    def text(self) -> str:
        """The text of the best translation, or "" without translations."""
        return self.translations[0].text if self.translations else ""

    @property
    def was_too_long(self) -> bool:
        """Whether the line was split or truncated."""
        return self.num_segments > 1 or self.num_truncated > 0


@dataclass
class LineCounts:
    """Numbers of lines, for the report at the end of a job."""

    failed: int = 0  # lines that were not translated
    met_limit: int = 0  # lines whose best translation is unfinished
    too_long: int = 0  # lines that were split or truncated
    searched_again: int = 0  # lines with a segment that was searched without repeats
    lost_protected: int = 0  # lines whose translation lacks a placeholder, tag or address

    def add(self, counts: LineCounts) -> None:
        """Add the counts of further lines. Also adds up the fields of subclasses."""
        for counter in fields(counts):
            total = getattr(self, counter.name) + getattr(counts, counter.name)
            setattr(self, counter.name, total)


def build_line_results(
    encoded: EncodedWindow,
    search_results: Sequence[SearchResult],
    tokenizers: Tokenizers,
    *,
    n_best: int,
    alignment: bool,
    unk_replacement: bool = False,
) -> list[LineResult]:
    """Return the result of each line of a window, before `nmt.translate.restoring`.

    `search_results` holds the results of all segments of the window in order. With
    `unk_replacement`, their hypotheses must have an alignment.
    """
    line_results = []
    start = 0  # index in `search_results` of the line's first segment
    for i, segments in enumerate(encoded.segments):
        end = start + len(segments)
        results_of_line = search_results[start:end]
        start = end
        if not segments:  # an empty line, or one that is copied
            line_results.append(LineResult([EMPTY]))
            continue
        num_truncated = encoded.num_truncated[i]
        reasons = [result.reason for result in results_of_line if isinstance(result, Failure)]
        if reasons:
            failed_line = LineResult([], reasons[0], len(segments), num_truncated)
            line_results.append(failed_line)
            continue
        hypotheses = [result for result in results_of_line if not isinstance(result, Failure)]
        source_words = None
        if unk_replacement:
            # here, since it imports `regex`, which other translations do not need
            from nmt.translate.unknown_words import SourceWords

            source_words = SourceWords(
                encoded.lines[i].text, segments, tokenizers.src, num_truncated
            )
        translations = _join_segments(segments, hypotheses, tokenizers.tgt, n_best, source_words)
        source_tokens: list[str] = []
        if alignment:
            source_tokens = _source_tokens(segments, tokenizers.src)
            if encoded.has_hints:
                source_tokens, translations = _leave_out_hints(source_tokens, translations)
        elif unk_replacement:  # only `SourceWords` needed the alignment
            translations = [replace(translation, alignment=None) for translation in translations]
        line_result = LineResult(
            translations,
            num_segments=len(segments),
            num_truncated=num_truncated,
            source_tokens=source_tokens,
        )
        line_results.append(line_result)
    return line_results


def _source_tokens(segments: Sequence[Segment], tokenizer: Tokenizer) -> list[str]:
    """Return the pieces of all segments, with the EOS of each."""
    ids: list[int] = []
    for segment in segments:
        ids += [*segment.ids, tokenizer.eos_id]
    return tokenizer.pieces(ids)


def _leave_out_hints(
    source_tokens: Sequence[str], translations: Sequence[Translation]
) -> tuple[list[str], list[Translation]]:
    """Remove hints (`nmt.data.hints`) from the source tokens, and update the alignments."""
    without_hints = remove_hints(source_tokens)
    aligned = []
    for translation in translations:
        assert translation.alignment is not None
        alignment = [without_hints.positions[position] for position in translation.alignment]
        aligned.append(replace(translation, alignment=alignment))
    return without_hints.pieces, aligned


def _join_segments(
    segments: Sequence[Segment],
    hypotheses: Sequence[list[Hypothesis]],
    tokenizer: Tokenizer,
    n_best: int,
    source_words: SourceWords | None,
) -> list[Translation]:
    """Return up to `n_best` translations of a line from the hypotheses of each segment.

    The k-th translation joins the k-th best hypothesis of each segment. A segment with fewer than k
    hypotheses contributes its last. Words of `source_words` replace unknown tokens.
    """
    segment_starts = [0]  # positions in the source tokens of the line
    for segment in segments:
        segment_starts.append(segment_starts[-1] + segment.num_tokens)
    num_translations = min(n_best, max(len(n_best_list) for n_best_list in hypotheses))
    translations = []
    for k in range(num_translations):
        selected = []
        for n_best_list in hypotheses:
            rank = min(k, len(n_best_list) - 1)
            selected.append(n_best_list[rank])
        translations.append(_join_hypotheses(selected, segment_starts, tokenizer, source_words))
    return translations


def _join_hypotheses(
    hypotheses: Sequence[Hypothesis],
    segment_starts: Sequence[int],
    tokenizer: Tokenizer,
    source_words: SourceWords | None,
) -> Translation:
    """Return the translation of a line from one hypothesis per segment.

    `segment_starts` are the positions of the segments in the source tokens of the line.
    """
    texts = []
    ids: list[int] = []
    token_log_probs: list[float] = []
    alignment: list[int] = []
    for number, hypothesis in enumerate(hypotheses):
        start = segment_starts[number]
        without_eos = hypothesis.tokens[:-1] if hypothesis.finished else hypothesis.tokens
        if source_words is not None and tokenizer.unk_id in without_eos:
            words = source_words.find_words(number, hypothesis, tokenizer.unk_id)
            texts.append(tokenizer.decode_replacing(without_eos, words))
        else:
            texts.append(tokenizer.decode(without_eos))
        ids += hypothesis.tokens
        token_log_probs += hypothesis.token_log_probs
        if hypothesis.alignment is not None:
            alignment += [start + position for position in hypothesis.alignment]
    if hypotheses[-1].finished:
        del ids[-1]  # the EOS of the line
    # like `tokens`, the alignment does not include this EOS
    alignment_without_eos = None
    if hypotheses[0].alignment is not None:
        alignment_without_eos = alignment[: len(ids)]
    text = texts[0]  # the translation of a single segment keeps the spaces at its ends
    if len(texts) > 1:
        text = join_parts(text.strip() for text in texts)
    return Translation(
        text=text,
        score=sum(hypothesis.score for hypothesis in hypotheses),
        log_prob=sum(hypothesis.log_prob for hypothesis in hypotheses),
        tokens=tokenizer.pieces(ids),
        finished=all(hypothesis.finished for hypothesis in hypotheses),
        token_log_probs=token_log_probs,
        alignment=alignment_without_eos,
        searched_again=any(hypothesis.searched_again for hypothesis in hypotheses),
    )


def render(
    window: Window,
    results: Sequence[LineResult],
    *,
    output_format: OutputFormat,
    n_best: int,
    protect: bool = False,
    tags: Tags = Tags(),  # noqa: B008  # immutable
) -> tuple[bytes, LineCounts]:
    """Return the encoded output for a window, and the counts of its lines; log lines that failed.

    As text, a line becomes its best translation or, with `n_best` above 1, an n-best list in the
    format of Moses. As JSON, a line becomes one object. With `protect`, counts the translations
    that lack a placeholder, tag or address of the line. The language tag at the start of a line,
    one of `tags.src_choices`, does not count.
    """
    lines = []
    counts = LineCounts()
    for i, result in enumerate(results):
        index = window.first_line + i  # from 0
        if result.error is not None:
            message = "line %d could not be translated; wrote an empty line: %s"
            log.warning(message, index + 1, result.error)
            counts.failed += 1
        elif not result.translations[0].finished:
            counts.met_limit += 1
        if result.was_too_long:
            counts.too_long += 1
        if result.translations and result.translations[0].searched_again:
            counts.searched_again += 1
        _, text = split_tag(window.lines[i], tags)
        if protect and lacks_protected(text, result.text):
            counts.lost_protected += 1
        if output_format is OutputFormat.json:
            lines.append(json.dumps(_result_to_json(result, index), ensure_ascii=False))
        elif n_best == 1:
            lines.append(result.text)
        else:
            translations = result.translations if result.translations else [EMPTY]
            for translation in translations:
                lines.append(f"{index} ||| {_translation_to_moses(translation)}")
    return "".join(f"{line}\n" for line in lines).encode(), counts


def _translation_to_moses(translation: Translation) -> str:
    """Return the text, features and score of a translation in the format of Moses."""
    features = f"log_prob={translation.log_prob}"
    score = translation.score
    if translation.rerank_score is not None:
        features += f" score={translation.score}"
        score = translation.rerank_score
    if translation.reverse_log_prob is not None:
        features += f" reverse_log_prob={translation.reverse_log_prob}"
    return f"{translation.text} ||| {features} ||| {score}"


def _result_to_json(result: LineResult, index: int) -> dict[str, Any]:
    """Return the JSON object of a line, without fields that have their default value."""
    record: dict[str, Any] = {"index": index}
    if result.error is not None:
        record["error"] = result.error
    if result.num_segments > 1:
        record["num_parts"] = result.num_segments
    if result.num_truncated:
        record["num_left_out"] = result.num_truncated
    if result.source_tokens:
        record["source_tokens"] = result.source_tokens
    record["hypotheses"] = [
        _translation_to_json(translation) for translation in result.translations
    ]
    return record


def result_from_json(record: dict[str, Any]) -> LineResult:
    """Return the result of a line from the object that `format=json` writes for it."""
    return LineResult(
        [Translation(**hypothesis) for hypothesis in record["hypotheses"]],
        error=record.get("error"),
        num_segments=record.get("num_parts", 1),
        num_truncated=record.get("num_left_out", 0),
        source_tokens=record.get("source_tokens", []),
    )


def _translation_to_json(translation: Translation) -> dict[str, Any]:
    """Return the JSON object of a translation."""
    record = {
        "text": translation.text,
        "score": translation.score,
        "log_prob": translation.log_prob,
        "tokens": translation.tokens,
        "token_log_probs": translation.token_log_probs,
        "finished": translation.finished,
    }
    if translation.alignment is not None:
        record["alignment"] = translation.alignment
    if translation.searched_again:
        record["searched_again"] = True
    if translation.rerank_score is not None:
        record["rerank_score"] = translation.rerank_score
    if translation.reverse_log_prob is not None:
        record["reverse_log_prob"] = translation.reverse_log_prob
    return record
