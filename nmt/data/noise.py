"""Change training pairs at random: noise on tokens, and subword sampling (BPE-dropout, or samples
of a unigram model).

The changes depend only on (seed, update, row), so that they are the same for every number of ranks
and after resuming. A row is the index of a pair.
"""

# N source tokens, M target tokens of a pair, both without EOS; V vocabulary

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
from nmt.data.languages import SEPARATOR, LanguagePair
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.data.vocabulary import ModelProto, read_proto
from nmt.errors import ConfigError

Floats = np.ndarray[Any, np.dtype[np.float64]]
_NUM_SEGMENTATIONS = 64  # random segmentations of each word, of which every occurrence uses one
_MAX_CACHED_SEGMENTATIONS = 1 << 18  # 80 MB


class TokenNoise:
    """Adds noise to pairs.

    Tags and prefixes at the start of a side and the separators of lines stay unchanged.
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
        self.src_prefixes = [tokenizers.src.prefix]  # ids that stay unchanged at the start
        self.tgt_prefixes = [tokenizers.tgt.prefix]
        for direction in directions:
            self.src_prefixes.append(tokenizers.src.encode(direction.src_tag))
            self.tgt_prefixes.append(tokenizers.tgt.encode(direction.tgt_tag))

    def __call__(self, src: Ids, tgt: Ids, update: int, row: int) -> tuple[Ids, Ids]:
        """Return the source with dropped, masked and moved tokens, and the target with tokens
        replaced by UNK. The decoder reads this target; it still learns to predict the original one.
        """
        # the spawn key makes this seed differ from the seed of SubwordSampling
        seed = np.random.SeedSequence((self.seed, update, row), spawn_key=(1,))
        rng = np.random.default_rng(seed)
        noisy_src = np.array(src)  # (N,)
        prefix_length = _prefix_length(noisy_src, self.src_prefixes)
        changed = self._change_source(noisy_src[prefix_length:], rng.random((3, len(noisy_src))))
        noisy_src = np.concatenate([noisy_src[:prefix_length], changed])
        noisy_tgt = np.array(tgt)  # (M,)
        is_hidden = rng.random(len(noisy_tgt)) < self.config.word_dropout
        is_hidden &= noisy_tgt != self.tgt_separator_id
        is_hidden[: _prefix_length(noisy_tgt, self.tgt_prefixes)] = False
        noisy_tgt[is_hidden] = self.tgt_unk_id
        return noisy_src, noisy_tgt

    def _change_source(self, ids: Any, draws: Floats) -> Any:
        """Drop, mask and move some of the ids (N,).

        The rows of `draws`, (3, N or more), are uniform from 0 to 1, one for each of these changes.
        """
        config = self.config
        draws = draws[:, : len(ids)]
        is_separator = ids == self.src_separator_id
        drop_draws = np.where(is_separator, -1, draws[0])
        stays = is_separator | (drop_draws >= config.drop)
        if not (stays & ~is_separator).any():  # keep the token with the largest draw
            stays |= drop_draws == drop_draws.max(initial=-1)
        ids = ids[stays]
        is_separator = is_separator[stays]
        is_masked = draws[1, stays] < config.mask
        ids[is_masked & ~is_separator] = self.src_unk_id
        # Sort tokens by position + noise below `swap` + 1. Each line and each separator has another
        # index, so that no token moves to another line.
        line_indices = 2 * is_separator.cumsum() - is_separator
        sort_keys = np.arange(len(ids)) + (draws[2, stays] + line_indices) * (config.swap + 1)
        return ids[np.argsort(sort_keys, kind="stable")]


def _find_separator_id(tokenizer: Tokenizer) -> int:
    """Return the id of the separator of lines, or -1 if the tokenizer has none."""
    pieces = tokenizer.all_pieces()
    return pieces.index(SEPARATOR) if SEPARATOR in pieces else -1


def _prefix_length(ids: Ids, prefixes: list[list[int]]) -> int:
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
        """See `WordSegmenter` for `alpha` and the errors that it raises."""
        self.seed = seed
        self.src_segmenter = WordSegmenter(tokenizers.src, alpha)
        self.tgt_segmenter = self.src_segmenter
        if tokenizers.tgt is not tokenizers.src:
            self.tgt_segmenter = WordSegmenter(tokenizers.tgt, alpha)

    def __call__(self, src: Ids, tgt: Ids, update: int, row: int) -> tuple[Ids, Ids]:
        """Return other ids of the same text for the source (N,) and the target (M,).

        They are usually more ids than before.
        """
        rng = np.random.default_rng(np.random.SeedSequence((self.seed, update, row)))
        src = self.src_segmenter.segment(src, rng)
        return src, self.tgt_segmenter.segment(tgt, rng)


class WordSegmenter:
    """Draws random segmentations of the words of one tokenizer.

    With BPE, each possible merge is skipped with probability `alpha`, again in every step
    (Provilkov et al., 2020, algorithm 1). With a unigram model, segmentations are drawn by their
    probabilities to the power of `alpha` (Kudo, 2018).

    A word starts at a piece that begins with a space. Bytes, control symbols and user-defined
    symbols, such as tags, are words of their own and stay unchanged. Raises `ConfigError` for other
    kinds of tokenizers.
    """

    def __init__(self, tokenizer: Tokenizer, alpha: float) -> None:
        self.alpha = alpha
        self.pieces = tokenizer.all_pieces()
        proto = read_proto(tokenizer.model)
        model_type = proto.trainer_spec.model_type
        trainer_spec = ModelProto().trainer_spec
        is_bpe = model_type == trainer_spec.BPE
        is_unigram = model_type == trainer_spec.UNIGRAM
        if not (is_bpe or is_unigram) or tokenizer.vocabulary is not None:
            raise ConfigError(
                f"subword_sampling={alpha}: needs a bpe or unigram tokenizer, and no imported "
                "vocabulary"
            )
        self.draw_pieces = self._draw_merges if is_bpe else self._draw_path
        # log-probabilities, or for BPE the negative rank of the merge
        normal = ModelProto.SentencePiece.NORMAL
        self.scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == normal}
        self.ids = {piece: i for i, piece in enumerate(self.pieces) if piece in self.scores}
        self.longest = max(map(len, self.scores), default=0)
        self.is_fixed = np.array([piece not in self.scores for piece in self.pieces])  # (V,)
        begins_with_space = np.array([piece.startswith("▁") for piece in self.pieces])  # (V,)
        self.begins_word = begins_with_space | self.is_fixed  # (V,)
        self.segment_word = functools.lru_cache(_MAX_CACHED_SEGMENTATIONS)(self._segment_word)

    def segment(self, ids: Ids, rng: np.random.Generator) -> Ids:
        """Return other ids of the same text as `ids` (N,)."""
        array: Any = np.asarray(ids)
        is_start = self.begins_word[array]  # (N,)
        is_start[1:] |= self.is_fixed[array[:-1]]
        is_start[:1] = True
        starts = np.flatnonzero(is_start).tolist()
        variants = rng.integers(_NUM_SEGMENTATIONS, size=len(starts)).tolist()
        id_list = array.tolist()
        bounds = itertools.pairwise([*starts, len(id_list)])
        new_ids: list[int] = []
        for variant, (start, end) in zip(variants, bounds, strict=True):
            new_ids += self.segment_word(variant, tuple(id_list[start:end]))
        return np.array(new_ids, dtype=array.dtype)

    def _segment_word(self, variant: int, ids: tuple[int, ...]) -> list[int]:
        """Return the ids of segmentation number `variant` of a word."""
        if self.is_fixed[ids[0]]:
            return list(ids)
        text = "".join(self.pieces[i] for i in ids)
        pieces = self.draw_pieces(text, Random(f"{variant} {text}"))
        return [self.ids[piece] for piece in pieces] or list(ids)

    def _draw_merges(self, text: str, rng: Random) -> list[str]:
        """Merge characters to pieces, in each step the merge with the highest score.

        The leftmost of equal merges comes first. Returns no pieces if a character is no piece.
        """
        symbols = list(text)
        while True:
            candidates = []  # (score, -position): the leftmost of equal scores is the maximum
            for i in range(len(symbols) - 1):
                piece = symbols[i] + symbols[i + 1]
                if piece in self.scores and rng.random() >= self.alpha:
                    candidates.append((self.scores[piece], -i))
            if not candidates:
                break
            _, negative_position = max(candidates)
            position = -negative_position
            symbols[position : position + 2] = [symbols[position] + symbols[position + 1]]
        return symbols if all(symbol in self.scores for symbol in symbols) else []

    def _draw_path(self, text: str, rng: Random) -> list[str]:
        """Draw a segmentation with forward filtering and backward sampling.

        Returns no pieces if the text has no segmentation.
        """
        log_sums = {0: 0.0}  # by end: log of the sum over the segmentations of text[:end]
        last_starts: dict[int, list[int]] = {}  # by end: possible starts of the last piece
        last_probabilities: dict[int, list[float]] = {}  # by end: their probabilities
        for end in range(1, len(text) + 1):
            starts = []
            logs = []
            for start in range(max(0, end - self.longest), end):
                piece = text[start:end]
                if start in log_sums and piece in self.scores:
                    starts.append(start)
                    logs.append(log_sums[start] + self.alpha * self.scores[piece])
            if logs:
                highest = max(logs)
                log_sums[end] = highest + math.log(sum(math.exp(x - highest) for x in logs))
                last_starts[end] = starts
                last_probabilities[end] = [math.exp(x - log_sums[end]) for x in logs]
        pieces = []
        end = len(text)
        while end in last_starts:
            start = rng.choices(last_starts[end], last_probabilities[end])[0]
            pieces.append(text[start:end])
            end = start
        return pieces[::-1]
