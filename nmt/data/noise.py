"""Change training pairs at random: noise on tokens, and subword sampling.

Subword sampling is BPE-dropout, or draws samples of a unigram model. The changes depend only on the
seed, the number of the update and the index of the pair. So they are the same for every number of
ranks, and after resuming.
"""

# V vocabulary size, N source tokens and M target tokens, without EOS
# T source tokens after the prefix, K of these T tokens that are not dropped

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from random import Random
from typing import Any

import numpy as np

from nmt.config import NoiseConfig
from nmt.data.batch import Ids
from nmt.data.hints import DONE, SOURCE, TARGET
from nmt.data.languages import LanguagePair, find_line_separator
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.data.vocabulary import ModelProto, read_proto
from nmt.errors import ConfigError

Floats = np.ndarray[Any, np.dtype[np.float64]]
_SEGMENTATIONS_PER_WORD = 64
"""Number of random segmentations of a word. Each occurrence of the word draws one of them. The
number is small, so that most of them are in the cache.
"""
_MAX_CACHED_SEGMENTATIONS = 1 << 18  # this many take about 80 MB


class TokenNoise:
    """Adds noise to pairs.

    Tags and prefixes at the start of a side, separators of lines, and hints (`augment.terminology`)
    stay unchanged.
    """

    def __init__(
        self,
        config: NoiseConfig,
        seed: int,
        tokenizers: Tokenizers,
        directions: Iterable[LanguagePair],
    ) -> None:
        self.config = config
        self.seed = seed
        self.src_unk_id = tokenizers.src.unk_id
        self.tgt_unk_id = tokenizers.tgt.unk_id
        self.src_separator_id = _find_separator_id(tokenizers.src)
        self.tgt_separator_id = _find_separator_id(tokenizers.tgt)
        src_ids = {piece: i for i, piece in enumerate(tokenizers.src.all_pieces())}
        # the symbols of hints, such as "SOURCE house TARGET Haus DONE"; -1 for a symbol that the
        # vocabulary lacks
        self.source_symbol_id = src_ids.get(SOURCE, -1)
        self.target_symbol_id = src_ids.get(TARGET, -1)
        self.done_symbol_id = src_ids.get(DONE, -1)
        # ids that stay unchanged at the start of a side
        self.src_prefixes = [tokenizers.src.prefix_ids]
        self.tgt_prefixes = [tokenizers.tgt.prefix_ids]
        for direction in directions:
            self.src_prefixes.append(tokenizers.src.encode(direction.src_tag))
            self.tgt_prefixes.append(tokenizers.tgt.encode(direction.tgt_tag))

    def __call__(self, src: Ids, tgt: Ids, update: int, row: int) -> tuple[Ids, Ids]:
        """Drop, mask and move tokens of the source, and replace tokens of the target by UNK.

        The decoder reads the changed target, but learns to predict the original one. `update` is
        the number of the update, and `row` the index of the pair in the training set.
        """
        # the spawn key makes these random numbers independent of the ones in `SubwordSampling`
        seed = np.random.SeedSequence((self.seed, update, row), spawn_key=(1,))
        rng = np.random.default_rng(seed)
        src_ids = np.array(src)  # (N,)
        # Draws numbers for N tokens, but uses only the first T. Otherwise, the length of the prefix
        # would change the numbers that are drawn for the target.
        src_draws = rng.random((3, len(src_ids)))  # (3, N)
        src_prefix_length = find_prefix_length(src_ids, self.src_prefixes)
        src_prefix = src_ids[:src_prefix_length]
        text_ids = src_ids[src_prefix_length:]  # (T,)
        text_draws = src_draws[:, : len(text_ids)]  # (3, T)
        noisy_src = np.concatenate([src_prefix, self._add_source_noise(text_ids, text_draws)])
        noisy_tgt = np.array(tgt)  # (M,)
        tgt_prefix_length = find_prefix_length(noisy_tgt, self.tgt_prefixes)
        is_replaced = rng.random(len(noisy_tgt)) < self.config.word_dropout  # (M,)
        is_replaced[noisy_tgt == self.tgt_separator_id] = False
        is_replaced[:tgt_prefix_length] = False
        noisy_tgt[is_replaced] = self.tgt_unk_id
        return noisy_src, noisy_tgt

    def _add_source_noise(self, ids: Any, draws: Floats) -> Any:
        """Drop tokens of `ids` (T,), replace others by UNK, and move the remaining ones.

        `draws` (3, T) are uniform random numbers from 0 to 1: one row for dropping, one for masking
        and one for moving. `config.drop` and `config.mask` are probabilities; `config.swap` is the
        largest distance that a token moves.
        """
        drop_draws = draws[0]
        mask_draws = draws[1]
        move_draws = draws[2]
        is_separator = ids == self.src_separator_id
        is_fixed = is_separator | self._mark_hints(ids)  # (T,), tokens without noise
        is_kept = self._choose_kept_tokens(is_fixed, drop_draws)
        kept_ids = ids[is_kept]  # (K,), as all arrays from here
        is_fixed = is_fixed[is_kept]
        is_masked = mask_draws[is_kept] < self.config.mask
        kept_ids[is_masked & ~is_fixed] = self.src_unk_id
        order = _draw_order(is_fixed, move_draws[is_kept], max_distance=self.config.swap)
        return kept_ids[order]

    def _mark_hints(self, ids: Any) -> Any:
        """Return a mask (T,), True for the symbols and the target words of hints.

        A hint consists of SOURCE, the source words, TARGET, the target words and DONE.
        """
        is_done_symbol = ids == self.done_symbol_id
        num_targets = (ids == self.target_symbol_id).cumsum()  # (T,), TARGET up to each position
        num_dones = is_done_symbol.cumsum()  # (T,), DONE up to each position
        is_in_target = num_targets > num_dones  # True from TARGET up to the token before DONE
        return is_in_target | (ids == self.source_symbol_id) | is_done_symbol

    def _choose_kept_tokens(self, is_fixed: Any, drop_draws: Floats) -> Any:
        """Return a mask (T,), True for tokens to keep: all fixed ones and some of the free ones.

        If there are free tokens, at least one of them is kept.
        """
        is_free = ~is_fixed
        is_kept = is_fixed | (drop_draws >= self.config.drop)
        if is_free.any() and not is_kept[is_free].any():
            # keep the free token with the largest draw
            free_draws = np.where(is_free, drop_draws, -1)
            is_kept[free_draws.argmax()] = True
        return is_kept


def _draw_order(is_fixed: Any, draws: Floats, max_distance: int) -> Any:
    """Return an order (K,) of tokens in which no token moves farther than `max_distance`.

    The tokens are sorted by their position plus noise between 0 and `max_distance` + 1. Fixed
    tokens do not move, and no token moves past them. To ensure this, the sequence is divided into
    segments: each fixed token, and the tokens between two fixed ones. The noise of segment i,
    counted from 0, is between i * (`max_distance` + 1) and (i + 1) * (`max_distance` + 1), so that
    its tokens stay behind all earlier segments.
    """
    # The index increases by 1 at each fixed token, and by 1 after it. For example, the indices of
    # two tokens, a separator and two more tokens are 0 0 1 2 2.
    num_fixed = is_fixed.cumsum()  # (K,), fixed tokens up to each position
    segment_indices = 2 * num_fixed - is_fixed
    noise = (draws + segment_indices) * (max_distance + 1)
    sort_keys = np.arange(len(draws)) + noise
    return np.argsort(sort_keys, kind="stable")


def _find_separator_id(tokenizer: Tokenizer) -> int:
    """Return the id of the separator of lines, or -1 if the tokenizer has none."""
    separator = find_line_separator(tokenizer)
    if not separator:
        return -1
    ids = tokenizer.encode(separator)  # the id of the separator, perhaps after the id of a space
    return ids[-1]


def find_prefix_length(ids: Ids, prefixes: list[list[int]]) -> int:
    """Return the length of the longest of `prefixes` that the ids begin with, or 0."""
    longest = 0
    for prefix in prefixes:
        if list(ids[: len(prefix)]) == prefix:
            longest = max(longest, len(prefix))
    return longest


class SubwordSampling:
    """Draws a new segmentation of the words of a pair for every update.

    SentencePiece's own sampling is not used, because it differs between processes.
    """

    def __init__(self, tokenizers: Tokenizers, alpha: float, seed: int) -> None:
        """Make the segmenters, see `WordSegmenter`.

        `alpha` is a probability for BPE, and an exponent for unigram models.
        """
        self.seed = seed
        self.src_segmenter = WordSegmenter(tokenizers.src, alpha)
        self.tgt_segmenter = self.src_segmenter
        if tokenizers.tgt is not tokenizers.src:
            self.tgt_segmenter = WordSegmenter(tokenizers.tgt, alpha)

    def __call__(self, src: Ids, tgt: Ids, update: int, row: int) -> tuple[Ids, Ids]:
        """Segment the texts of source (N,) and target (M,) at random, and return the new ids.

        There are usually more ids than before. `update` is the number of the update, and `row` the
        index of the pair in the training set.
        """
        rng = np.random.default_rng(np.random.SeedSequence((self.seed, update, row)))
        sampled_src = self.src_segmenter.segment(src, rng)
        sampled_tgt = self.tgt_segmenter.segment(tgt, rng)
        return sampled_src, sampled_tgt


class WordSegmenter:
    """Draws random segmentations of the words of one tokenizer.

    With BPE, every step skips each possible merge with probability `alpha` (Provilkov et al., 2020,
    algorithm 1). With a unigram model, segmentations are drawn by their probabilities to the power
    of `alpha` (Kudo, 2018). Raises `ConfigError` for other types of tokenizers.

    A word starts at a piece that begins with a space. Bytes, control symbols and user-defined
    symbols, such as tags, are words of their own and stay unchanged.
    """

    def __init__(self, tokenizer: Tokenizer, alpha: float) -> None:
        self.alpha = alpha
        self.pieces = tokenizer.all_pieces()
        proto = read_proto(tokenizer.model)
        trainer_spec = proto.trainer_spec
        self.is_bpe = trainer_spec.model_type == trainer_spec.BPE
        is_supported = self.is_bpe or trainer_spec.model_type == trainer_spec.UNIGRAM
        if not is_supported or tokenizer.is_imported:
            raise ConfigError(
                f"subword_sampling={alpha}: needs a bpe or unigram tokenizer, and no imported "
                "vocabulary"
            )
        normal = ModelProto.SentencePiece.NORMAL
        # log-probabilities in a unigram model; in BPE, earlier merges have higher scores
        self.scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == normal}
        self.ids = {piece: i for i, piece in enumerate(self.pieces) if piece in self.scores}
        self.max_piece_length = max(map(len, self.scores), default=0)
        # (V,), True for symbols and bytes
        self.stays_unchanged = np.array([piece not in self.scores for piece in self.pieces])
        begins_with_space = np.array([piece.startswith("▁") for piece in self.pieces])  # (V,)
        self.begins_word = begins_with_space | self.stays_unchanged  # (V,)
        # A decorator of the method would make one cache for the class, which would keep all
        # segmenters in memory.
        cache = functools.lru_cache(maxsize=_MAX_CACHED_SEGMENTATIONS)
        self.segment_word = cache(self._segment_word)

    def segment(self, ids: Ids, rng: np.random.Generator) -> Ids:
        """Segment the text of `ids` (N,) at random and return the new ids."""
        array: Any = np.asarray(ids)
        if len(array) == 0:
            return np.array([], dtype=array.dtype)
        is_start = self.begins_word[array]  # (N,)
        is_start[0] = True
        # a symbol or byte is a word of its own, so the next id starts another word
        stays_unchanged = self.stays_unchanged[array]  # (N,)
        is_start[1:] |= stays_unchanged[:-1]
        word_starts = np.flatnonzero(is_start).tolist()
        variants = rng.integers(_SEGMENTATIONS_PER_WORD, size=len(word_starts)).tolist()
        id_list = array.tolist()
        word_bounds = itertools.pairwise([*word_starts, len(id_list)])
        new_ids: list[int] = []
        for variant, (start, end) in zip(variants, word_bounds, strict=True):
            new_ids += self.segment_word(variant, tuple(id_list[start:end]))
        return np.array(new_ids, dtype=array.dtype)

    def _segment_word(self, variant: int, ids: tuple[int, ...]) -> list[int]:
        """Return the ids of a word in its random segmentation with the number `variant`."""
        if self.stays_unchanged[ids[0]]:
            return list(ids)
        text = "".join(self.pieces[i] for i in ids)
        rng = Random(f"{variant} {text}")  # the same numbers for this word in every process
        draw_pieces = self._draw_bpe_pieces if self.is_bpe else self._draw_unigram_pieces
        pieces = draw_pieces(text, rng)
        if not pieces:  # the text has a character that is not a piece
            return list(ids)
        return [self.ids[piece] for piece in pieces]

    def _draw_bpe_pieces(self, text: str, rng: Random) -> list[str]:
        """Merge characters into pieces, and skip merges at random.

        Each step skips every possible merge with probability `alpha`, and applies the remaining
        merge with the highest score, the leftmost among equals. Returns an empty list if a
        character is not in the vocabulary.
        """
        pieces = list(text)
        while True:
            merge_scores = {}  # keyed by i: the score of merging the pieces at i and i + 1
            for i in range(len(pieces) - 1):
                merged = pieces[i] + pieces[i + 1]
                if merged in self.scores and rng.random() >= self.alpha:
                    merge_scores[i] = self.scores[merged]
            if not merge_scores:
                break
            best = max(merge_scores, key=merge_scores.__getitem__)  # the leftmost among equals
            merged = pieces[best] + pieces[best + 1]
            pieces[best : best + 2] = [merged]
        if not all(piece in self.scores for piece in pieces):
            return []
        return pieces

    def _draw_unigram_pieces(self, text: str, rng: Random) -> list[str]:
        """Draw a segmentation with forward filtering and backward sampling.

        Returns an empty list if the text has no segmentation.
        """
        # The weight of a segmentation is its probability to the power of `alpha`. The dictionaries
        # are keyed by the end of a prefix, text[:end].
        log_sums = {0: 0.0}  # log of the sum of the weights of all segmentations of the prefix
        last_starts: dict[int, list[int]] = {}  # possible starts of the last piece of the prefix
        last_probabilities: dict[int, list[float]] = {}  # probabilities of these starts
        for end in range(1, len(text) + 1):
            starts = []
            # for each start, the log of the total weight of the segmentations of text[:end] that
            # end with the piece text[start:end]
            log_weights = []
            for start in range(max(0, end - self.max_piece_length), end):
                piece = text[start:end]
                if start in log_sums and piece in self.scores:
                    starts.append(start)
                    piece_log_weight = self.alpha * self.scores[piece]
                    log_weights.append(log_sums[start] + piece_log_weight)
            if starts:
                log_sum = _log_sum_exp(log_weights)
                log_sums[end] = log_sum
                last_starts[end] = starts
                last_probabilities[end] = [math.exp(weight - log_sum) for weight in log_weights]
        pieces = []  # the last one first
        end = len(text)
        while end in last_starts:  # False at 0, and for a text without segmentation
            [start] = rng.choices(last_starts[end], last_probabilities[end])
            pieces.append(text[start:end])
            end = start
        return pieces[::-1]


def _log_sum_exp(values: list[float]) -> float:
    """Return log(sum(exp(values))), computed without underflow."""
    highest = max(values)
    return highest + math.log(sum(math.exp(value - highest) for value in values))
