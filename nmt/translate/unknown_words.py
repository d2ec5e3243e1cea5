"""Find the source words that replace unknown tokens of a translation (`unk_replacement`).

An unknown token is replaced by the source word to which it has the highest attention (Luong et al.,
2015, "Addressing the Rare Word Problem in Neural Machine Translation", section 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import regex  # type: ignore[import-untyped]

from nmt.data.tokenizer import Tokenizer
from nmt.search.hypotheses import Hypothesis
from nmt.translate.batch_search import Segment

# letters, digits and marks; also signs such as hyphens and apostrophes between them. In scripts
# without spaces, such as Chinese, the piece itself takes the place of a word.
_UNSPACED = (  # the last two are ー and its half-width form, which many scripts share
    r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\u30fc\uff70"
)
_UNSPACED_CHARACTER = regex.compile(rf"[{_UNSPACED}]")
_LETTERS = rf"[\w--[{_UNSPACED}]]+"
_WORD = regex.compile(rf"(?V1){_LETTERS}(?:[^\w\s]{_LETTERS})*")


class SourceWords:
    """The words of a line, which are looked up by the tokens of its segments.

    `num_truncated` is the number of tokens of the line that are not in its segments.
    """

    def __init__(
        self,
        line: str,
        segments: Sequence[Segment],
        tokenizer: Tokenizer,
        num_truncated: int = 0,
    ) -> None:
        pieces = tokenizer.split(line)
        self._text = "".join(pieces).replace("▁", " ")  # the line as the tokenizer normalizes it
        self._ends = list(itertools.accumulate(map(len, pieces)))  # ends of the pieces in `_text`
        self._segments = segments
        # number of ids before the text of each segment, such as a tag; negative if the line has its
        # own tag
        num_ids = sum(len(segment.ids) for segment in segments) + num_truncated
        self._num_prefix_ids, remainder = divmod(num_ids - len(pieces), len(segments))
        self._has_same_tokens = remainder == 0  # whether the tokens of the segments are the line's

    def find_words(self, number: int, hypothesis: Hypothesis, unk_id: int) -> dict[int, str]:
        """Return the source word of each unknown token of a hypothesis, by the token's position.

        `number` is the index of the segment. A token that is aligned to a tag or to the end of the
        sentence has no word.
        """
        assert hypothesis.alignment is not None
        words = {}
        for position, token in enumerate(hypothesis.tokens):
            if token == unk_id:
                word = self._find_word(number, hypothesis.alignment[position])
                if word:
                    words[position] = word
        return words

    def _find_word(self, number: int, src_position: int) -> str:
        """Return the word of a source token, or the words of an unknown piece that has several.

        Characters of scripts without spaces that belong to the piece are returned too.

        Returns "" for a prefix and for EOS.
        """
        num_ids = len(self._segments[number].ids)
        is_word = self._num_prefix_ids <= src_position < num_ids
        if not (is_word and self._has_same_tokens):
            return ""
        piece = src_position - self._num_prefix_ids  # index in the line
        for segment in self._segments[:number]:
            piece += len(segment.ids) - self._num_prefix_ids
        end = self._ends[piece]
        start = self._ends[piece - 1] if piece else 0
        if self._text[start:end].isspace():
            end += 1  # a space that is a piece belongs to the next word
        matches = list(_UNSPACED_CHARACTER.finditer(self._text, start, end))
        has_word = False
        for match in _WORD.finditer(self._text):
            if match.start() < end and start < match.end():
                matches.append(match)
                has_word = True
        if not has_word:
            return self._text[start:end].strip()
        first = min(match.start() for match in matches)
        end = max(match.end() for match in matches)
        return self._text[first:end]
