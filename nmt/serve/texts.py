"""Texts as sentences and what stands between them: cut for the engine, joined again afterwards."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from nmt.data.text import on_one_line
from nmt.translate.batch_search import Segment
from nmt.translate.long_lines import join_parts, sentence_ends
from nmt.translate.results import LineResult


class SourceText(Protocol):
    """A text in some format, whose sentences are translated."""

    @property
    def sentences(self) -> list[str]:
        """What is translated, one line each."""

    @property
    def needs_alignment(self) -> bool:
        """Whether `render` needs to know which source tokens the target tokens attend to."""

    def render(self, results: Sequence[LineResult], rank: int = 0) -> str:
        """Return the text with translation number `rank` of each of its sentences."""


@dataclass(frozen=True)
class PlainText:
    """A plain text; spaces and line ends between its sentences are kept."""

    sentences: list[str]
    gaps: list[str]
    """White space before each sentence, and after the last one."""

    needs_alignment = False

    def render(self, results: Sequence[LineResult], rank: int = 0) -> str:
        """See `SourceText.render`."""
        return "".join(text for text, _ in self.placed(results, rank)) + self.gaps[-1]

    def placed(self, results: Sequence[LineResult], rank: int = 0) -> Iterator[tuple[str, int]]:
        """Yield the translation of each sentence with the gap before it, and that gap's length."""
        previous = ""
        for i, (gap, result) in enumerate(zip(self.gaps, results, strict=False)):
            text = translation_text(result, rank)
            if i and not gap:  # sentences of Chinese or Japanese, translated to other scripts
                gap = join_parts([previous, text])[len(previous) : -len(text) or None]
            yield gap + text, len(gap)
            previous = text or previous


def plain_text(text: str, *, split_sentences: bool = True) -> PlainText:
    """Cut a text at line ends and, with `split_sentences`, at the ends of sentences."""
    sentences: list[str] = []
    gaps: list[list[str]] = [[]]
    for number, line in enumerate(text.split("\n")):
        if number:
            gaps[-1].append("\n")
        ends = sentence_ends(line) if split_sentences else ()
        starts = [0, *ends, len(line)]
        for start, end in zip(starts, starts[1:], strict=False):
            piece = line[start:end]
            content = piece.strip()
            if not content:
                gaps[-1].append(piece)
                continue
            place = piece.index(content)
            gaps[-1].append(piece[:place])
            sentences.append(on_one_line(content))
            gaps.append([piece[place + len(content) :]])
    return PlainText(sentences, list(map("".join, gaps)))


def translation_text(result: LineResult, rank: int = 0) -> str:
    """Return translation number `rank` of a sentence, or its last where it has fewer."""
    translations = result.translations
    return translations[min(rank, len(translations) - 1)].text if translations else ""


def without_forced_start(result: LineResult, segments: Sequence[Segment]) -> LineResult:
    """Drop the forced start from the tokens of a line of one segment; no text holds it."""
    num_forced = len(segments[0].prefix) if len(segments) == 1 else 0
    if not num_forced:
        return result
    translations = [
        replace(
            found,
            tokens=found.tokens[num_forced:],
            token_log_probs=found.token_log_probs[num_forced:],
            alignment=found.alignment and found.alignment[num_forced:],
        )
        for found in result.translations
    ]
    return replace(result, translations=translations)


def is_emoji_only(text: str) -> bool:
    """Say whether a text holds symbols and white space alone, which no model needs to translate."""
    if text[:1].isalnum():  # nearly all texts
        return False
    joined = "".join(text.split())
    kinds = {unicodedata.category(character) for character in joined}
    return bool(kinds & {"So", "Sk"}) and kinds <= {"So", "Sk", "Mn", "Cf", "Cs", "Co"}


def token_spans(pieces: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Return where in `text` each SentencePiece piece stands, as characters from, to.

    Normalization may have changed the text; places are then those of the same share of it. A piece
    of no visible character, such as EOS, has an empty span.
    """
    shown = [_visible(piece) for piece in pieces]
    total = sum(map(len, shown))
    places = [i for i, character in enumerate(text) if not character.isspace()]
    scale = len(places) / total if total else 0.0
    spans, done = [], 0
    for piece in shown:
        start, end = (int(value * scale + 1e-9) for value in (done, done + len(piece)))
        done += len(piece)
        if not piece or start >= len(places):
            spans.append((len(text), len(text)))
        else:
            spans.append((places[start], places[max(end, start + 1) - 1] + 1))
    return spans


def _visible(piece: str) -> str:
    if piece in ("</s>", "<s>", "<pad>"):
        return ""
    if len(piece) == 6 and piece.startswith("<0x"):  # a byte; a character of others has 2 to 4
        value = int(piece[3:5], 16)
        return "" if 0x80 <= value < 0xC0 else "?"
    return "".join(piece.replace("\u2581", " ").split())
