"""Change the text of training pairs at random (docs/augment.md).

The changes imitate the typos, capitals and symbols of real text, so that a model learns to
translate such text. They depend only on the seed, the number of the update and the index of the
pair. So they are the same for every number of ranks, and after resuming.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from nmt.config import AugmentConfig
from nmt.data import perturb
from nmt.data.batch import Ids
from nmt.data.languages import LanguagePair
from nmt.data.lemmas import Lemmas
from nmt.data.noise import find_prefix_length
from nmt.data.terminology import HintSampler
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.data.vocabulary import user_symbols
from nmt.data.word_alignment import WordAligner

PairChange = Callable[[str, str, Random], tuple[str, str]]
"""Changes the texts of source and target, drawing from a random number generator."""


class TextAugmenter:
    """Changes the text of pairs, and adds hints: translations of words, see `HintSampler`.

    Tags and prefixes at the start of a side, and all user-defined symbols, stay unchanged. A whole
    pair stays unchanged if it has an unknown token, or would exceed `max_length` (EOS included).
    """

    def __init__(
        self,
        config: AugmentConfig,
        seed: int,
        tokenizers: Tokenizers,
        directions: Iterable[LanguagePair],
        max_length: int,
        aligner: WordAligner | None = None,
        lemmas: Lemmas | None = None,
    ) -> None:
        """`aligner` is required for `config.terminology`, which also uses `lemmas`, if any."""
        self.config = config
        self.seed = seed
        self._hint_sampler: HintSampler | None = None
        if config.terminology:
            assert aligner is not None
            self._hint_sampler = HintSampler(tokenizers, aligner, lemmas)
        directions = list(directions)
        src_tags = [direction.src_tag for direction in directions]
        tgt_tags = [direction.tgt_tag for direction in directions]
        self.src_codec = TextCodec(tokenizers.src, src_tags, max_length)
        self.tgt_codec = TextCodec(tokenizers.tgt, tgt_tags, max_length)
        case_probabilities = [config.upper, config.title, config.lower]
        unchanged_probability = 1 - sum(case_probabilities)
        case_probabilities.append(unchanged_probability)
        self._cumulative_case_probabilities = list(itertools.accumulate(case_probabilities))
        self._case_changes: list[PairChange | None] = []
        for case in ("upper", "title", "lower"):
            change_text = perturb.CASES[case]
            self._case_changes.append(functools.partial(self._change_case, change_text))
        self._case_changes.append(None)
        # changes that are drawn independently, with their probabilities
        self._other_changes: tuple[tuple[float, PairChange], ...] = (
            (config.punct, _remove_end_marks),
            (config.typos, self._add_typos),
            (config.spaces, _misplace_space),
            (config.inline_noise, _insert_word_to_copy),
            (config.noise, _replace_by_words_to_copy),
        )

    def __call__(
        self, pairs: Sequence[tuple[Ids, Ids]], update: int, rows: Sequence[int]
    ) -> list[tuple[Ids, Ids]]:
        """Draw changes, apply them to the text of pairs, and return the new ids.

        `update` is the number of the update, and `rows` has the index of each pair in the training
        set. A pair that does not change is returned as the same object.
        """
        changed_pairs: dict[int, _PairText] = {}  # keyed by the index in `pairs`
        for i, (pair, row) in enumerate(zip(pairs, rows, strict=True)):
            rng = Random(f"augment {self.seed} {update} {row}")
            changed_pair = self._change_text(pair, rng)
            if changed_pair is not None:
                changed_pairs[i] = changed_pair
        self._add_hints([pair for pair in changed_pairs.values() if pair.gets_hints])
        new_pairs = list(pairs)
        for i, changed_pair in changed_pairs.items():
            new_src = self.src_codec.encode(changed_pair.src_prefix_ids, changed_pair.src)
            new_tgt = self.tgt_codec.encode(changed_pair.tgt_prefix_ids, changed_pair.tgt)
            if new_src and new_tgt:
                new_pairs[i] = (new_src, new_tgt)
        return new_pairs

    def _change_text(self, pair: tuple[Ids, Ids], rng: Random) -> _PairText | None:
        """Return a pair's text after all changes but hints, or None if the pair stays unchanged."""
        changes = self._draw_changes(rng)
        gets_hints = self._hint_sampler is not None and rng.random() < self.config.terminology
        if not changes and not gets_hints:
            return None
        decoded_src = self.src_codec.decode(pair[0])
        decoded_tgt = self.tgt_codec.decode(pair[1])
        src = decoded_src.text
        tgt = decoded_tgt.text
        if not src or not tgt:
            return None
        for change in changes:
            src, tgt = change(src, tgt, rng)
        unchanged_ids = None
        if not changes:
            unchanged_ids = (decoded_src.ids, decoded_tgt.ids)
        return _PairText(
            src_prefix_ids=decoded_src.prefix_ids,
            src=src,
            tgt_prefix_ids=decoded_tgt.prefix_ids,
            tgt=tgt,
            unchanged_ids=unchanged_ids,
            rng=rng,
            gets_hints=gets_hints,
        )

    def _add_hints(self, pairs: Sequence[_PairText]) -> None:
        """Add hints to pairs. This is the last change, since hints are for the changed words."""
        if self._hint_sampler is None:
            return
        texts = [(pair.src, pair.tgt) for pair in pairs]
        rngs = [pair.rng for pair in pairs]
        hinted_texts = self._hint_sampler(texts, rngs, [pair.unchanged_ids for pair in pairs])
        for pair, (src, tgt) in zip(pairs, hinted_texts, strict=True):
            pair.src = src
            pair.tgt = tgt

    def _draw_changes(self, rng: Random) -> list[PairChange]:
        """Draw the changes of a pair: at most one change of case, and others independently."""
        changes: list[PairChange] = []
        [case_change] = rng.choices(
            self._case_changes, cum_weights=self._cumulative_case_probabilities
        )
        if case_change is not None:
            changes.append(case_change)
        for probability, change in self._other_changes:
            if rng.random() < probability:
                changes.append(change)
        return changes

    def _change_case(
        self, change_text: Callable[[str], str], src: str, tgt: str, rng: Random
    ) -> tuple[str, str]:
        """Change the case of both sides, but not of symbols.

        Changes nothing unless most letters of the source have a case.
        """
        if not perturb.has_case(src):
            return src, tgt
        src_segments = self.src_codec.split_at_symbols(src)
        tgt_segments = self.tgt_codec.split_at_symbols(tgt)
        for segments in (src_segments, tgt_segments):
            for i in range(0, len(segments), 2):  # symbols have odd indices
                segments[i] = change_text(segments[i])
        return "".join(src_segments), "".join(tgt_segments)

    def _add_typos(self, src: str, tgt: str, rng: Random) -> tuple[str, str]:
        """Make at least one and at most `MAX_TYPOS` typos in the source."""
        segments = self.src_codec.split_at_symbols(src)
        i = rng.randrange(0, len(segments), 2)  # an even index, since symbols have odd indices
        segments[i] = perturb.add_typos(segments[i], rng.randint(1, perturb.MAX_TYPOS), rng)
        return "".join(segments), tgt


@dataclass
class _PairText:
    """The text of a pair, which the changes replace, and its prefixes, which stay unchanged."""

    src_prefix_ids: list[int]
    src: str
    tgt_prefix_ids: list[int]
    tgt: str
    unchanged_ids: tuple[list[int], list[int]] | None
    """The ids of source and target, see `DecodedText.ids`, or None if the texts have changed."""
    rng: Random
    gets_hints: bool


def _remove_end_marks(src: str, tgt: str, rng: Random) -> tuple[str, str]:
    """Remove the final punctuation of both sides."""
    return perturb.remove_end_marks(src, tgt)


def _misplace_space(src: str, tgt: str, rng: Random) -> tuple[str, str]:
    """Change the space around a punctuation mark of the source."""
    return perturb.misplace_space(src, rng), tgt


def _insert_word_to_copy(src: str, tgt: str, rng: Random) -> tuple[str, str]:
    """Insert the same random word into both sides."""
    return perturb.insert_word(src, tgt, perturb.draw_word_to_copy(rng), rng)


def _replace_by_words_to_copy(src: str, tgt: str, rng: Random) -> tuple[str, str]:
    """Replace both sides by the same random words."""
    words = perturb.draw_words_to_copy(rng)
    return words, words


class DecodedText(NamedTuple):
    """One side of a pair, as ids and as text."""

    prefix_ids: list[int]  # the ids of tags and prefixes, which stay unchanged
    ids: list[int]
    """The prefix of the tokenizer, then the other ids: as if the tokenizer had encoded `text`."""
    text: str  # empty if there is an unknown token: `<unk>` does not say which text it was


class TextCodec:
    """Converts one side of pairs from ids to text and back, without its tags and prefixes."""

    def __init__(self, tokenizer: Tokenizer, tags: Iterable[str], max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length  # maximum number of tokens of a side, EOS included
        # ids that a side may begin with: the tokenizer's own prefix, and tags
        self.prefixes = [tokenizer.prefix_ids]
        for tag in tags:
            self.prefixes.append(tokenizer.encode(tag))
        symbols = [re.escape(symbol) for symbol in user_symbols(tokenizer.model)]
        self.symbol_pattern = re.compile("(?!)")  # never matches
        if symbols:
            alternatives = "|".join(symbols)
            self.symbol_pattern = re.compile(f"({alternatives})")

    def decode(self, ids: Ids) -> DecodedText:
        """Separate the ids of the prefix, and decode the other ids."""
        all_ids = np.asarray(ids).tolist()
        prefix_length = find_prefix_length(all_ids, self.prefixes)
        prefix_ids = all_ids[:prefix_length]
        text_ids = all_ids[prefix_length:]
        text = ""
        if self.tokenizer.unk_id not in text_ids:
            text = self.tokenizer.decode(text_ids)
        return DecodedText(prefix_ids, [*self.tokenizer.prefix_ids, *text_ids], text)

    def encode(self, prefix_ids: list[int], text: str) -> list[int]:
        """Return `prefix_ids` and the ids of a text.

        Returns [] if the text is empty, or if an id is unknown or there are too many ids.
        """
        ids = self.tokenizer.encode(text)
        prefix_length = find_prefix_length(ids, self.prefixes)
        text_ids = ids[prefix_length:]
        num_tokens = len(prefix_ids) + len(text_ids) + 1  # with EOS
        is_too_long = num_tokens > self.max_length
        if not text_ids or is_too_long or self.tokenizer.unk_id in text_ids:
            return []
        return [*prefix_ids, *text_ids]

    def split_at_symbols(self, text: str) -> list[str]:
        """Split a text at user-defined symbols. The segments with odd indices are the symbols."""
        return self.symbol_pattern.split(text)
