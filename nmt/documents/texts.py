"""Split texts into sentences to translate, and join the translations."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from nmt.data.text import replace_line_breaks
from nmt.translate.long_lines import join_parts, sentence_ends
from nmt.translate.results import LineResult

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_MAX_WINDOW_TEXTS = 1024  # limits windows of texts that have few or no sentences
_MAX_WINDOW_CHARACTERS = 1 << 16  # limits windows of long sentences


class Translatable(Protocol):
    """Sentences to translate, and the translations that they need."""

    @property
    def sentences(self) -> list[str]:
        """The sentences, each on one line."""

    @property
    def needs_alignment(self) -> bool:
        """Whether to find out which source tokens the target tokens attend to."""


class SourceText(Translatable, Protocol):
    """A text in some format whose sentences are translated."""

    def render(self, results: Sequence[LineResult], rank: int = 0, prefix: str = "") -> str:
        """Return the text with translation number `rank` of each sentence.

        `prefix` is the text that the model read before each sentence.
        """


@dataclass(frozen=True)
class WrappedText:
    """Base class of texts that render another text in a format of their own."""

    text: SourceText

    @property
    def sentences(self) -> list[str]:
        """See `SourceText`."""
        return self.text.sentences

    @property
    def needs_alignment(self) -> bool:
        """See `SourceText`."""
        return self.text.needs_alignment


@dataclass(frozen=True)
class PlainText:
    """A plain text. White space and line ends between its sentences are kept."""

    sentences: list[str]
    gaps: list[str]
    """White space before each sentence and after the last one."""

    needs_alignment = False

    def render(self, results: Sequence[LineResult], rank: int = 0, prefix: str = "") -> str:
        """See `SourceText.render`."""
        translations = [get_translation_text(result, rank) for result in results]
        gaps = self.target_gaps(translations)
        text = ""
        for gap, translation in zip(gaps, translations, strict=False):
            text += gap + translation
        return text + gaps[-1]

    def target_gaps(self, translations: Sequence[str]) -> list[str]:
        """Return the white space before each translation and after the last one.

        These are the gaps of the source. Only Chinese and Japanese sentences follow each other
        without a gap; their translations get a space if the script of the target has spaces.
        """
        gaps = list(self.gaps)
        previous = ""
        for i, translation in enumerate(translations):
            if i > 0 and not gaps[i]:
                joined = join_parts([previous, translation])
                gaps[i] = joined.removeprefix(previous).removesuffix(translation)
            previous = translation or previous
        return gaps


def parse_plain_text(text: str, *, split_sentences: bool = True) -> PlainText:
    """Cut a text at line ends and, with `split_sentences`, at the ends of sentences."""
    sentences: list[str] = []
    gaps: list[str] = []
    gap = ""
    for line_number, line in enumerate(text.split("\n")):
        if line_number > 0:
            gap += "\n"
        ends = sentence_ends(line) if split_sentences else ()
        for start, end in pairwise([0, *ends, len(line)]):
            sentence = line[start:end].strip()
            if not sentence:
                gap += line[start:end]
                continue
            space_before, _, space_after = line[start:end].partition(sentence)
            gaps.append(gap + space_before)
            sentences.append(replace_line_breaks(sentence))
            gap = space_after
    return PlainText(sentences, [*gaps, gap])


def get_translation_text(result: LineResult, rank: int = 0) -> str:
    """Return translation number `rank` of a sentence, or its last one if it has fewer."""
    translations = result.translations
    return translations[min(rank, len(translations) - 1)].text if translations else ""


def remove_forced_start(result: LineResult, num_forced: int) -> LineResult:
    """Remove `num_forced` tokens, which the text omits, from the start of a line of one segment."""
    if num_forced == 0 or result.num_segments != 1:
        return result
    translations = [
        replace(
            translation,
            tokens=translation.tokens[num_forced:],
            token_log_probs=translation.token_log_probs[num_forced:],
            alignment=translation.alignment and translation.alignment[num_forced:],
        )
        for translation in result.translations
    ]
    return replace(result, translations=translations)


def is_emoji_only(text: str) -> bool:
    """Return whether a text has only symbols and white space, which need no translation."""
    if text[:1].isalnum():  # nearly all texts
        return False
    # symbols, and the marks, joiners and private characters that emoji may contain
    categories = {unicodedata.category(character) for character in "".join(text.split())}
    return bool(categories & {"So", "Sk"}) and categories <= {"So", "Sk", "Mn", "Cf", "Cs", "Co"}


def find_token_spans(tokens: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Return the characters of `text` that each SentencePiece token covers, as (start, end).

    Normalization may change the number of characters. Offsets in the tokens are therefore scaled
    to the length of the text. Tokens without a visible character, such as EOS, get an empty span.
    """
    visible_lengths = [_visible_length(token) for token in tokens]
    num_visible = sum(visible_lengths)
    positions = [i for i, character in enumerate(text) if not character.isspace()]
    scale = len(positions) / num_visible if num_visible else 0.0
    spans = []
    offset = 0  # number of visible characters of the tokens so far
    for length in visible_lengths:
        start = int(offset * scale + 1e-9)  # 1e-9, since a whole number may be rounded down
        offset += length
        end = int(offset * scale + 1e-9)
        if length == 0 or start >= len(positions):
            spans.append((len(text), len(text)))
        else:
            spans.append((positions[start], positions[max(end, start + 1) - 1] + 1))
    return spans


def _visible_length(token: str) -> int:
    """Return the number of characters that a SentencePiece token shows in a text."""
    if token in ("</s>", "<s>", "<pad>"):
        return 0
    if token == "<unk>":  # usually a single character, and always one in a translation
        return 1
    if _BYTE_TOKEN.fullmatch(token):  # one byte of a UTF-8 character
        is_continuation = 0x80 <= int(token[3:5], 16) < 0xC0
        return 0 if is_continuation else 1
    return len("".join(token.replace("\u2581", " ").split()))


def group_texts(
    source_texts: Iterable[SourceText], max_sentences: int
) -> Iterator[list[SourceText]]:
    """Group texts into windows of up to `max_sentences` sentences and 65,536 characters, or of one
    text that has more.
    """
    window: list[SourceText] = []
    num_sentences = 0
    num_characters = 0
    for source_text in source_texts:
        num_sentences += len(source_text.sentences)
        num_characters += sum(map(len, source_text.sentences))
        is_too_large = num_sentences > max_sentences or num_characters > _MAX_WINDOW_CHARACTERS
        if window and (is_too_large or len(window) == _MAX_WINDOW_TEXTS):
            yield window
            window = []
            num_sentences = len(source_text.sentences)
            num_characters = sum(map(len, source_text.sentences))
        window.append(source_text)
    if window:
        yield window
