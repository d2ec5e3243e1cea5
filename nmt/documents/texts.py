"""Split texts into sentences to translate, and join the translations."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Protocol

from nmt.data.text import replace_line_breaks
from nmt.translate.long_lines import sentence_ends, space_between
from nmt.translate.results import LineResult

# categories of Unicode
_SYMBOLS = {"So", "Sk"}  # such as emoji
_SYMBOL_MODIFIERS = {"Mn", "Cf", "Cs", "Co"}  # marks, format, surrogate and private characters
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # such as <0xE2>
_MAX_WINDOW_TEXTS = 1024  # also counts texts without sentences
_MAX_WINDOW_CHARACTERS = 1 << 16  # limits windows of long sentences
_ROUNDING = 1e-9  # added before rounding down, so that 2.999999999999 counts as 3


class Translatable(Protocol):
    """Sentences to translate, and whether their translations need an alignment."""

    @property
    def sentences(self) -> list[str]:
        """The sentences, each on one line."""

    @property
    def needs_alignment(self) -> bool:
        """Whether `render` needs to know which source token each target token attends to."""


def list_sentences(texts: Iterable[Translatable]) -> list[str]:
    """Return the sentences of all texts, in order."""
    return list(chain.from_iterable(text.sentences for text in texts))


class SourceText(Translatable, Protocol):
    """A text in some format whose sentences are translated."""

    def render(self, results: Sequence[LineResult], rank: int = 0, prefix: str = "") -> str:
        """Return the text with translation number `rank` of each sentence.

        `prefix` is the text, such as a language tag, that the model read before each sentence. A
        text with markup needs it to find the words of source tokens. Other texts ignore it.
        """


@dataclass(frozen=True)
class WrappedText:
    """Base class of texts that render another text in a format of their own."""

    text: SourceText

    @property
    def sentences(self) -> list[str]:
        """See `Translatable.sentences`."""
        return self.text.sentences

    @property
    def needs_alignment(self) -> bool:
        """See `Translatable.needs_alignment`."""
        return self.text.needs_alignment


@dataclass(frozen=True)
class PlainText:
    """A plain text. White space and line ends between its sentences are kept."""

    sentences: list[str]
    gaps: list[str]
    """White space before each sentence and after the last one."""

    @property
    def needs_alignment(self) -> bool:
        """See `Translatable.needs_alignment`: a plain text needs none."""
        return False

    def render(self, results: Sequence[LineResult], rank: int = 0, prefix: str = "") -> str:
        """See `SourceText.render`."""
        translations = [get_translation_text(result, rank) for result in results]
        *gaps, final_gap = self.target_gaps(translations)
        text = ""
        for gap, translation in zip(gaps, translations, strict=True):
            text += gap + translation
        return text + final_gap

    def target_gaps(self, translations: Sequence[str]) -> list[str]:
        """Return the white space before each translation and after the last one.

        The gaps of the source are kept. If the source has no gap between two sentences, as in
        Chinese and Japanese, a space is inserted if the script of the translations uses spaces.
        """
        gaps = list(self.gaps)
        previous = ""
        for i, translation in enumerate(translations):
            if i > 0 and not gaps[i]:
                gaps[i] = space_between(previous, translation)
            previous = translation or previous
        return gaps


def make_untranslated(text: str) -> PlainText:
    """Return a text without sentences to translate, such as markup. It renders as `text`."""
    return PlainText(sentences=[], gaps=[text])


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
            segment = line[start:end]
            sentence = segment.strip()
            if not sentence:
                gap += segment
                continue
            leading_space = segment.removesuffix(segment.lstrip())
            trailing_space = segment.removeprefix(segment.rstrip())
            gaps.append(gap + leading_space)
            sentences.append(replace_line_breaks(sentence))
            gap = trailing_space
    return PlainText(sentences, [*gaps, gap])


def get_translation_text(result: LineResult, rank: int = 0) -> str:
    """Return translation number `rank` of a sentence, or its last one if it has fewer."""
    if not result.translations:
        return ""
    last_rank = len(result.translations) - 1
    return result.translations[min(rank, last_rank)].text


def remove_target_tag(result: LineResult, num_tag_tokens: int) -> LineResult:
    """Remove the first `num_tag_tokens` tokens, the tag of the target language, from a result.

    Only tokens, their probabilities and alignments contain the tag; the text of a translation never
    does. A long line, which was translated in several segments, is not changed.
    """
    if num_tag_tokens == 0 or result.num_segments != 1:
        return result
    translations = []
    for translation in result.translations:
        alignment = translation.alignment
        if alignment is not None:
            alignment = alignment[num_tag_tokens:]
        translations.append(
            replace(
                translation,
                tokens=translation.tokens[num_tag_tokens:],
                token_log_probs=translation.token_log_probs[num_tag_tokens:],
                alignment=alignment,
            )
        )
    return replace(result, translations=translations)


def is_symbols_only(text: str) -> bool:
    """Return whether a text has only symbols, such as emoji, which need no translation.

    White space between the symbols is allowed.
    """
    if text[:1].isalnum():  # nearly all texts
        return False
    categories = {unicodedata.category(character) for character in "".join(text.split())}
    has_symbol = bool(categories & _SYMBOLS)
    return has_symbol and categories <= _SYMBOLS | _SYMBOL_MODIFIERS


def find_token_spans(tokens: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Return the characters of `text` that each SentencePiece token covers, as (start, end).

    Normalization may change the number of characters. Offsets in the tokens are therefore scaled
    to the length of the text. Tokens without a visible character, such as EOS, get an empty span.
    """
    visible_lengths = [_visible_length(token) for token in tokens]
    num_visible = sum(visible_lengths)
    # positions in `text` of its visible characters
    visible_positions = [i for i, character in enumerate(text) if not character.isspace()]
    scale = len(visible_positions) / num_visible if num_visible else 0.0
    spans = []
    offset = 0  # number of visible characters of the tokens so far
    for length in visible_lengths:
        start = int(offset * scale + _ROUNDING)
        offset += length
        end = int(offset * scale + _ROUNDING)  # at most the number of visible characters
        if length == 0 or start >= len(visible_positions):
            spans.append((len(text), len(text)))
        else:
            # a token covers at least one character, even if `start` equals `end`
            last_index = max(start, end - 1)
            spans.append((visible_positions[start], visible_positions[last_index] + 1))
    return spans


def _visible_length(token: str) -> int:
    """Return the number of characters that a SentencePiece token shows in a text."""
    if token in ("</s>", "<s>", "<pad>"):
        return 0
    if token == "<unk>":
        return 1  # exact for translations, and for nearly all unknown tokens of sources
    if _BYTE_TOKEN.fullmatch(token):
        byte = int(token[3:5], 16)  # the two digits of <0xE2>
        # UTF-8 writes a character as one first byte and bytes from 0x80 to 0xBF, which continue it
        is_continuation = 0x80 <= byte <= 0xBF
        return 0 if is_continuation else 1
    return len("".join(token.replace("\u2581", " ").split()))


def split_into_windows(
    source_texts: Iterable[SourceText], max_sentences: int
) -> Iterator[list[SourceText]]:
    """Yield consecutive texts in windows of up to `max_sentences` sentences and 65,536 characters.

    A text that exceeds these limits gets a window of its own. A window has at most 1,024 texts.
    """
    window: list[SourceText] = []
    num_sentences = 0
    num_characters = 0
    for source_text in source_texts:
        num_sentences += len(source_text.sentences)
        num_characters += sum(map(len, source_text.sentences))
        is_full = (
            num_sentences > max_sentences
            or num_characters > _MAX_WINDOW_CHARACTERS
            or len(window) == _MAX_WINDOW_TEXTS
        )
        if window and is_full:
            yield window
            window = []
            num_sentences = len(source_text.sentences)
            num_characters = sum(map(len, source_text.sentences))
        window.append(source_text)
    if window:
        yield window
