"""Add hints (`nmt.data.hints`) to training pairs, for terms that word alignment finds in them."""

# L links between source and target pieces, V vocabulary size

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import regex  # type: ignore[import-untyped]

from nmt.data.hints import Term, add_hints, check_hint_symbols
from nmt.data.lemmas import Lemmas
from nmt.data.tokenizer import Tokenizers
from nmt.data.vocabulary import user_symbols
from nmt.data.word_alignment import Array, WordAligner
from nmt.data.word_links import mark_word_starts

MAX_TERMS = 3  # maximum number of hints in a training pair
_MAX_WORDS = 3  # maximum number of source words of a term in training
_MAX_EXTRA_WORDS = 1  # a target may have this many words more than its source term
_COPY_PROB = 0.5  # probability that a random word replaces the target of a term in training
# Probability that a hint has lemmas in training, unless a random word replaces its target. Hints
# with lemmas teach a model to inflect the terms of dictionaries. The other hints teach it that a
# term may already have the right form.
_LEMMA_PROB = 0.7
_MAX_PARTS = 3  # maximum number of pieces of a random word
# Matches from the first to the last letter or digit. In `regex`, but not in `re`, \w includes the
# vowel signs of languages such as Hindi.
_WITHOUT_PUNCTUATION = regex.compile(r"\w(?:.*\w)?")
# signs of placeholders, tags and addresses: words with them get no hints
_EXCLUDED_SIGNS = r"[{}<>%$@]|://|www\."


class _PhrasePair(NamedTuple):
    """A source span and a target span of words, without links to words outside of the pair."""

    src_start: int
    src_end: int
    tgt_start: int
    tgt_end: int

    def overlaps(self, other: _PhrasePair) -> bool:
        """Return whether two pairs have a word in common."""
        shares_src_word = self.src_start < other.src_end and other.src_start < self.src_end
        shares_tgt_word = self.tgt_start < other.tgt_end and other.tgt_start < self.tgt_end
        return shares_src_word or shares_tgt_word


class HintSampler:
    """Samples terms of training pairs from their word alignment, and adds hints for them."""

    def __init__(
        self, tokenizers: Tokenizers, aligner: WordAligner, lemmas: Lemmas | None = None
    ) -> None:
        """With probability `_LEMMA_PROB`, a hint has the `lemmas` of its target words."""
        check_hint_symbols("augment.terminology", tokenizers.src)
        self._tokenizers = tokenizers
        self._aligner = aligner
        self._lemmas = lemmas
        self._src_starts = mark_word_starts(tokenizers.src)  # (V,)
        self._tgt_starts = mark_word_starts(tokenizers.tgt)
        pieces = [piece.removeprefix("▁") for piece in tokenizers.tgt.all_pieces()]
        self._word_parts = [piece for piece in pieces if piece.isalpha()]
        symbols = set(user_symbols(tokenizers.src.model))
        symbols.update(user_symbols(tokenizers.tgt.model))
        patterns = [_EXCLUDED_SIGNS]
        patterns += [re.escape(symbol) for symbol in sorted(symbols)]
        self._exclusion_pattern = re.compile("|".join(patterns))

    def __call__(
        self,
        pairs: Sequence[tuple[str, str]],
        rngs: Sequence[Random],
        ids: Sequence[tuple[list[int], list[int]] | None] | None = None,
    ) -> list[tuple[str, str]]:
        """Draw up to `MAX_TERMS` terms of each pair, and add hints for them to the source.

        The probability of a word is proportional to its length, since long words are more often
        terms. Words with a symbol of the vocabulary, a placeholder or an address get no hints. For
        some terms, a random word replaces the target, both in the hint and in the target text. The
        model thus learns to copy targets that it would not choose. The hints of a pair depend only
        on its texts and on its generator in `rngs`. `ids` has the ids of pairs that are already
        encoded, and None for other pairs.
        """
        if ids is None:
            ids = [None] * len(pairs)
        all_links = self._link_words(pairs, ids)
        hinted_pairs = []
        for (src, tgt), links, rng in zip(pairs, all_links, rngs, strict=True):
            hinted_pairs.append(self._add_hints(src, tgt, links, rng))
        return hinted_pairs

    def _add_hints(
        self, src: str, tgt: str, links: set[tuple[int, int]], rng: Random
    ) -> tuple[str, str]:
        """Add hints to a pair. Each of `links` is a source word and a target word."""
        src_words = list(re.finditer(r"\S+", src))
        tgt_words = list(re.finditer(r"\S+", tgt))
        phrases = self._sample_phrases(src_words, tgt_words, links, rng)
        terms = []
        # from the end of `tgt`, so that a replacement does not move the spans of later iterations
        for phrase in sorted(phrases, key=lambda phrase: phrase.tgt_start, reverse=True):
            src_span = _strip_punctuation(src, src_words[phrase.src_start : phrase.src_end])
            tgt_span = _strip_punctuation(tgt, tgt_words[phrase.tgt_start : phrase.tgt_end])
            if src_span is None or tgt_span is None:
                continue
            target = tgt[tgt_span.start : tgt_span.stop]
            if self._word_parts and rng.random() < _COPY_PROB:
                num_parts = rng.randint(1, _MAX_PARTS)
                target = "".join(rng.choices(self._word_parts, k=num_parts))
                text_before = tgt[: tgt_span.start]
                text_after = tgt[tgt_span.stop :]
                tgt = text_before + target + text_after
            elif self._lemmas is not None and rng.random() < _LEMMA_PROB:
                target = self._lemmas.lemmatize(target)
            terms.append(Term(src_span.start, src_span.stop, target))
        return add_hints(src, sorted(terms)), tgt

    def _sample_phrases(
        self,
        src_words: list[re.Match[str]],
        tgt_words: list[re.Match[str]],
        links: set[tuple[int, int]],
        rng: Random,
    ) -> list[_PhrasePair]:
        """Sample up to `MAX_TERMS` phrase pairs that do not overlap."""
        excluded_src = self._find_excluded(src_words)
        excluded_tgt = self._find_excluded(tgt_words)
        linked_words = {src for src, _ in links}
        first_words = sorted(linked_words - excluded_src)
        if not first_words:
            return []
        lengths = [len(src_words[i][0]) for i in first_words]
        phrases: list[_PhrasePair] = []
        for _ in range(rng.randint(1, MAX_TERMS)):
            [first_word] = rng.choices(first_words, weights=lengths)
            num_words = rng.randint(1, _MAX_WORDS)
            phrase = _find_phrase(links, first_word, num_words)
            if phrase is None or any(phrase.overlaps(other) for other in phrases):
                continue
            src_span = range(phrase.src_start, phrase.src_end)
            tgt_span = range(phrase.tgt_start, phrase.tgt_end)
            if excluded_src.isdisjoint(src_span) and excluded_tgt.isdisjoint(tgt_span):
                phrases.append(phrase)
        return phrases

    def _find_excluded(self, words: list[re.Match[str]]) -> set[int]:
        """Return the numbers of the words of a text that get no hint."""
        # A search in the whole text is faster than one in each word, and most texts have no match.
        if not words or self._exclusion_pattern.search(words[0].string) is None:
            return set()
        excluded = set()
        for number, word in enumerate(words):
            if self._exclusion_pattern.search(word[0]) is not None:
                excluded.add(number)
        return excluded

    def _link_words(
        self,
        pairs: Sequence[tuple[str, str]],
        ids: Sequence[tuple[list[int], list[int]] | None],
    ) -> list[set[tuple[int, int]]]:
        """Return the linked words of each pair as (source word, target word).

        Aligns all pairs at once, since most of the time of a single pair would be overhead.
        """
        all_links: list[set[tuple[int, int]]] = [set() for _ in pairs]
        indices = []  # the index in `pairs` of each pair in `id_pairs`
        id_pairs = []
        word_numbers = []  # for source and target, the number of the word of each piece
        for i, (src, tgt) in enumerate(pairs):
            encoded = ids[i]
            if encoded is None:
                encoded = (self._tokenizers.src.encode(src), self._tokenizers.tgt.encode(tgt))
            src_numbers = _number_words(encoded[0], self._src_starts, src)
            tgt_numbers = _number_words(encoded[1], self._tgt_starts, tgt)
            if src_numbers and tgt_numbers:
                indices.append(i)
                id_pairs.append(encoded)
                word_numbers.append((src_numbers, tgt_numbers))
        if not indices:
            return all_links
        has_joint_ids = self._tokenizers.src_vocab_size is None  # None: a joint vocabulary
        # (L, 3): index in `id_pairs`, target piece, source piece
        links = self._aligner.align(id_pairs, has_joint_ids=has_joint_ids)
        for pair_index, tgt_piece, src_piece in links.tolist():
            src_numbers, tgt_numbers = word_numbers[pair_index]
            link = (src_numbers[src_piece], tgt_numbers[tgt_piece])
            all_links[indices[pair_index]].add(link)
        return all_links


def _number_words(ids: list[int], starts_word: Array, text: str) -> list[int]:
    """Return for each id of a text the number of its word. White space separates words.

    Returns [] for an empty text, which an earlier augmentation may leave. Also returns [] if the
    tokenizer divides the text into another number of words.

    Args:
        ids: the encoded text.
        starts_word: which pieces of the vocabulary begin a word (V,).
        text: the text.
    """
    if not ids:
        return []
    num_words_begun = np.cumsum(starts_word[ids])  # up to each piece
    # at least 0, since the first word may begin without a space
    numbers: list[int] = np.maximum(num_words_begun - 1, 0).tolist()
    num_words = numbers[-1] + 1
    if num_words != len(text.split()):
        return []
    return numbers


def _find_phrase(links: set[tuple[int, int]], src_start: int, num_words: int) -> _PhrasePair | None:
    """Return the phrase pair with the longest source span that begins with the word `src_start`.

    The span has at most `num_words` words. The first and the last word of the span are linked, and
    no word of the pair has a link to a word outside of the pair (Koehn et al., 2003). The word
    `src_start` must be linked. Returns None if there is no such pair.
    """
    for src_end in range(src_start + num_words, src_start, -1):  # longer spans first
        # not empty, since the word `src_start` is linked
        linked_tgt = {tgt for src, tgt in links if src_start <= src < src_end}
        tgt_start = min(linked_tgt)
        tgt_end = max(linked_tgt) + 1
        linked_src = {src for src, tgt in links if tgt_start <= tgt < tgt_end}
        is_consistent = min(linked_src) == src_start and max(linked_src) == src_end - 1
        num_src_words = src_end - src_start
        num_tgt_words = tgt_end - tgt_start
        num_extra_words = num_tgt_words - num_src_words
        if is_consistent and num_extra_words <= _MAX_EXTRA_WORDS:
            return _PhrasePair(src_start, src_end, tgt_start, tgt_end)
    return None


def _strip_punctuation(text: str, words: list[re.Match[str]]) -> range | None:
    """Return the range of characters of consecutive words without the punctuation around them.

    Returns None if the words are only punctuation.
    """
    start = words[0].start()
    end = words[-1].end()
    match = _WITHOUT_PUNCTUATION.search(text, start, end)
    if match is None:
        return None
    return range(match.start(), match.end())
