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

# Scripts without spaces between words. ー and its half-width form belong to several scripts.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\u30fc\uff70"
_UNSPACED_CHARACTER = regex.compile(rf"[{_UNSPACED}]")
_LETTERS = rf"[\w--[{_UNSPACED}]]+"  # letters, digits and marks
# letters with signs between them, such as in "well-known"
_WORD = regex.compile(rf"(?V1){_LETTERS}(?:[^\w\s]{_LETTERS})*")


class SourceWords:
    """Looks up the words of a line by the positions of tokens in its segments.

    `num_truncated` is the number of tokens that were cut off at the end of the line.
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
        # Each segment may begin with ids that are not in `pieces`, such as a tag. The number of
        # these ids is negative if instead `pieces` begins with a tag that the segments lack.
        num_ids = sum(len(segment.ids) for segment in segments) + num_truncated
        self._num_prefix_ids, remainder = divmod(num_ids - len(pieces), len(segments))
        # whether the segments have the pieces of the line; splitting may change some pieces
        self._has_same_pieces = remainder == 0

    def find_words(self, number: int, hypothesis: Hypothesis, unk_id: int) -> dict[int, str]:
        """Return the source word of each unknown token of a hypothesis, by the token's position.

        `number` is the index of the segment. Tokens that are aligned to a tag or to EOS have no
        word.
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
        """Return the words that overlap with a source token, from the first to the last.

        In scripts without spaces, returns only characters of the token itself. Returns "" for a tag
        and for EOS.
        """
        num_ids = len(self._segments[number].ids)
        is_text = self._num_prefix_ids <= src_position < num_ids
        if not is_text or not self._has_same_pieces:
            return ""
        piece_index = src_position - self._num_prefix_ids  # index in the line
        for segment in self._segments[:number]:
            piece_index += len(segment.ids) - self._num_prefix_ids
        end = self._ends[piece_index]
        start = self._ends[piece_index - 1] if piece_index else 0
        if self._text[start:end].isspace():
            end += 1  # if the piece is only a space, take the word after it
        words = []
        for match in _WORD.finditer(self._text):
            if match.start() < end and start < match.end():
                words.append(match)
        if not words:
            return self._text[start:end].strip()
        matches = [*words, *_UNSPACED_CHARACTER.finditer(self._text, start, end)]
        text_start = min(match.start() for match in matches)
        text_end = max(match.end() for match in matches)
        return self._text[text_start:text_end]
