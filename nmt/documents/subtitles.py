"""Read subtitles in the format SubRip."""

from __future__ import annotations

import html
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from nmt.documents.document import Document, ReadOptions, check_count, join_texts, read_text
from nmt.documents.markup import MarkupText
from nmt.documents.texts import SourceText, WrappedText, make_untranslated
from nmt.errors import DataError
from nmt.translate.long_lines import space_between
from nmt.translate.results import LineResult

_SPACES = r"[^\S\n]*"  # any white space but a line end
# times of a cue, such as `00:01:02,500 -->`; WebVTT has a full stop, and may leave out the hours
_CUE_TIMES = rf"{_SPACES}(?:\d+:)?\d+:\d+[,.]\d+\s*-->"
# a cue may begin with its number, on a line before the times
_NEXT_CUE = rf"{_CUE_TIMES}|{_SPACES}\d+{_SPACES}\n{_CUE_TIMES}"
_CUE = re.compile(  # a line of times, and lines of text up to an empty line or the next cue
    rf"^{_CUE_TIMES}.*\n(?P<text>(?:(?!{_NEXT_CUE}){_SPACES}\S.*\n?)+)", re.MULTILINE
)
_TAG = re.compile(r"<[A-Za-z/!]")  # the start of a tag, such as <i>, </i> or <!--
_TAG_OR_QUOTE = re.compile(r"<[A-Za-z/!][^<>]*>|[\"“”‘’]")
_POSITION_TAGS = re.compile(r"^(?:\{\\[^{}]*\} *)+")  # {\an8} shows the subtitle at the top
_WORD = re.compile(r"(?:<[A-Za-z/!][^<>]*>|[^ ])+")  # a tag with its spaces belongs to a word
_SPEAKER_DASH = re.compile(r"\s*[-–—]\s")  # begins the words of another speaker: "- Yes."


@dataclass(frozen=True)
class _Subtitle(WrappedText):
    """Lines of one speaker, translated as one text and wrapped to the same number of lines."""

    position_tags: str  # these precede the text in the source
    num_lines: int
    newline: str
    has_entities: bool
    """Whether the source has entities such as &amp;. Otherwise, the translation has none either."""

    def render(self, results: Sequence[LineResult], rank: int = 0, prefix: str = "") -> str:
        """See `SourceText.render`."""
        text = self.text.render(results, rank, prefix)
        if isinstance(self.text, MarkupText) and not self.has_entities:
            text = html.unescape(text)
        return self.position_tags + _wrap(text, self.num_lines, self.newline)


def read_subtitles(text: str, options: ReadOptions) -> Document:
    """Read SubRip. Numbers, times and empty lines become texts without sentences.

    The package srt is not used: its pattern takes cubic time for a long number, so that one
    request could stop the server. Raises `DataError` if a text has no lines of times, or if its
    lines end in \\r only. A text whose subtitles are all empty does not change.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    texts: list[SourceText] = []
    position = 0
    for cue in _CUE.finditer(text):
        start = cue.start("text")
        cue_text = cue["text"].rstrip("\r\n")
        lines = cue_text.split("\n")
        texts.append(make_untranslated(text[position:start]))
        for number, speaker_lines in enumerate(_split_speakers(lines)):
            if number > 0:
                texts.append(make_untranslated(newline))
            texts.append(_read_subtitle(speaker_lines, newline, options))
        check_count(len(texts))
        position = start + len(cue_text)
    if not texts and text.strip():
        has_times = re.search(f"^{_CUE_TIMES}", text, re.MULTILINE) is not None
        has_only_returns = "\r" in text and "\n" not in text
        if not has_times or has_only_returns:
            raise DataError(
                "the file has no subtitles: each needs a line such as "
                "00:00:01,000 --> 00:00:02,500 before its text, and line ends \\n or \\r\\n"
            )
    texts.append(make_untranslated(text[position:]))
    return Document(texts, join_texts)


def _split_speakers(lines: Sequence[str]) -> list[list[str]]:
    """Start a new list at each line that begins with a dash, which marks another speaker."""
    speakers: list[list[str]] = [[]]
    for line in lines:
        if _SPEAKER_DASH.match(line) and speakers[-1]:
            speakers.append([])
        speakers[-1].append(line.strip())
    return speakers


def _read_subtitle(lines: Sequence[str], newline: str, options: ReadOptions) -> _Subtitle:
    """Return the lines of one speaker as one text."""
    line = _join_lines(lines)
    text = _POSITION_TAGS.sub("", line)
    has_tags = _TAG.search(text) is not None
    return _Subtitle(
        read_text(options, text, is_html=has_tags),
        position_tags=line.removesuffix(text),
        num_lines=len(lines),
        newline=newline,
        has_entities=html.unescape(text) != text,
    )


def _join_lines(lines: Sequence[str]) -> str:
    """Join lines with spaces, but without one between Chinese or Japanese lines."""
    joined = ""
    previous = ""
    for line in lines:
        visible = _TAG_OR_QUOTE.sub("", line)
        if not visible:
            visible = line
        joined += space_between(previous, visible) + line
        previous = visible
    return joined


def _wrap(text: str, num_lines: int, newline: str) -> str:
    """Break a text at spaces into lines of about the same length.

    A word is added to a line if at least half of the word fits.
    """
    words = deque(_WORD.findall(text))
    num_characters = sum(len(word) + 1 for word in words)  # only words that are on no line yet
    lines: list[str] = []
    for num_lines_left in range(num_lines, 0, -1):
        if not words:
            break
        target_length = (num_characters - 1) / num_lines_left
        is_last_line = num_lines_left == 1
        line = words.popleft()
        while words:
            length_with_half_word = len(line) + 1 + len(words[0]) / 2
            if length_with_half_word > target_length and not is_last_line:
                break
            line += " " + words.popleft()
        lines.append(line)
        num_characters -= len(line) + 1
    return newline.join(lines)
