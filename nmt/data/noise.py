"""Random changes to training pairs: subword sampling (BPE-dropout or samples of a unigram model),
and noise on tokens.

Both depend only on (seed, update, row), so that they are the same for every number of ranks and
after resuming.
"""

# N source tokens, M target tokens of a pair, both without EOS; V vocabulary

from __future__ import annotations

import functools
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

Draws = np.ndarray[Any, np.dtype[np.float64]]
_NUM_SEGMENTATIONS = 64  # of each word, from which its occurrences draw
_MAX_CACHED = 1 << 18  # segmentations, which take 80 MB


class TokenNoise:
    """Adds noise to pairs.

    Tags and prefixes at the start of a side and the separators of the lines of a document stay
    unchanged.
    """

    def __init__(
        self,
        config: NoiseConfig,
        seed: int,
        tokenizer: Tokenizers,
        directions: Iterable[LanguagePair],
    ) -> None:
        self.config = config
        self.seed = seed
        self.src_unk_id = tokenizer.src.unk_id
        self.tgt_unk_id = tokenizer.tgt.unk_id
        self.src_separator = _find_separator(tokenizer.src)
        self.tgt_separator = _find_separator(tokenizer.tgt)
        self.src_prefixes = [tokenizer.src.prefix]  # ids that stay unchanged at the start
        self.tgt_prefixes = [tokenizer.tgt.prefix]
        for direction in directions:
            self.src_prefixes.append(tokenizer.src.encode(direction.src_tag))
            self.tgt_prefixes.append(tokenizer.tgt.encode(direction.tgt_tag))

    def __call__(self, src: Ids, tgt: Ids, update: int, row: int) -> tuple[Ids, Ids]:
        """Return a source with noise, and the target that the decoder reads."""
        # SubwordSampling has the same key without a spawn key
        key = np.random.SeedSequence((self.seed, update, row), spawn_key=(1,))
        generator = np.random.default_rng(key)
        src = np.array(src)  # (N,), a copy
        tgt = np.array(tgt)  # (M,), a copy
        start = _prefix_length(src, self.src_prefixes)
        noisy = self._change_source(src[start:], generator.random((3, len(src))))
        start_tgt = _prefix_length(tgt, self.tgt_prefixes)
        is_hidden = generator.random(len(tgt)) < self.config.word_dropout
        is_hidden &= tgt != self.tgt_separator
        is_hidden[:start_tgt] = False
        tgt[is_hidden] = self.tgt_unk_id
        return np.concatenate([src[:start], noisy]), tgt

    def _change_source(self, ids: Any, draws: Draws) -> Any:
        """Drop, mask and move some of the ids (N,); `draws` (3, N or more) are uniform."""
        config = self.config
        drops, masks, moves = draws[:, : len(ids)]  # (N,) each
        is_separator = ids == self.src_separator
        drops = np.where(is_separator, -1, drops)
        stays = is_separator | (drops >= config.drop)
        if (stays == is_separator).all():  # keep at least one token
            stays |= drops == drops.max(initial=-1)
        ids = ids[stays]
        is_separator = is_separator[stays]
        ids[~is_separator & (masks[stays] < config.mask)] = self.src_unk_id
        # Tokens are sorted by position + noise. Tokens more than `swap` positions apart never
        # change places, nor do tokens of different lines.
        lines = 2 * is_separator.cumsum() - is_separator
        keys = np.arange(len(ids)) + (moves[stays] + lines) * (config.swap + 1)
        return ids[np.argsort(keys, kind="stable")]


def _find_separator(tokenizer: Tokenizer) -> int:
    """Return the id of the separator of lines, or -1."""
    pieces = tokenizer.all_pieces()
    return pieces.index(SEPARATOR) if SEPARATOR in pieces else -1


def _prefix_length(ids: Ids, prefixes: list[list[int]]) -> int:
    """Return the length of the longest of `prefixes` that the ids begin with."""
    return max((len(p) for p in prefixes if list(ids[: len(p)]) == p), default=0)


class SubwordSampling:
    """Draws a new segmentation of the words of a pair for every update.

    SentencePiece's own sampling is not used: it differs between processes.
    """

    def __init__(self, tokenizers: Tokenizers, amount: float, seed: int) -> None:
        """See `WordCutter` for `amount` and the errors that it raises."""
        self.seed = seed
        self.src_cutter = WordCutter(tokenizers.src, amount)
        self.tgt_cutter = self.src_cutter
        if tokenizers.tgt is not tokenizers.src:
            self.tgt_cutter = WordCutter(tokenizers.tgt, amount)

    def __call__(self, src: Ids, tgt: Ids, update: int, row: int) -> tuple[Ids, Ids]:
        """Return ids of the same text as the source (N,) and the target (M,), usually more."""
        generator = np.random.default_rng(np.random.SeedSequence((self.seed, update, row)))
        src = self.src_cutter.cut(src, generator)
        return src, self.tgt_cutter.cut(tgt, generator)


class WordCutter:
    """Segments the words of one tokenizer into other pieces.

    With BPE each possible merge is skipped with probability `amount`, again in every step
    (Provilkov et al., 2020, algorithm 1). With a unigram model segmentations are drawn by their
    probabilities to the power of `amount` (Kudo, 2018).

    A word reaches from a piece that begins with a space to the next. Bytes, control symbols and
    user-defined symbols, such as tags, stay unchanged and separate words. Raises `ConfigError` for
    other kinds of tokenizers.
    """

    def __init__(self, tokenizer: Tokenizer, amount: float) -> None:
        self.amount = amount
        self.pieces = tokenizer.all_pieces()
        proto = read_proto(tokenizer.model)
        trainer = ModelProto().trainer_spec
        model_type = proto.trainer_spec.model_type
        if model_type not in (trainer.UNIGRAM, trainer.BPE) or tokenizer.vocabulary is not None:
            raise ConfigError(
                f"subword_sampling={amount}: needs a bpe or unigram tokenizer, and no imported "
                "vocabulary"
            )
        is_bpe = model_type == trainer.BPE
        self.draw_pieces = self._draw_merges if is_bpe else self._draw_path
        # log-probabilities, or for BPE the negative rank of the merge
        normal = ModelProto.SentencePiece.NORMAL
        self.scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == normal}
        self.ids = {piece: i for i, piece in enumerate(self.pieces) if piece in self.scores}
        self.longest = max(map(len, self.scores), default=0)
        self.is_fixed = np.array([piece not in self.scores for piece in self.pieces])  # (V,)
        self.is_first = np.array([piece.startswith("▁") for piece in self.pieces]) | self.is_fixed
        self.cut_word = functools.lru_cache(_MAX_CACHED)(self._cut_word)

    def cut(self, ids: Ids, generator: np.random.Generator) -> Ids:
        """Return other ids of the same text as `ids` (N,)."""
        array: Any = np.asarray(ids)
        begins_word = self.is_first[array]  # (N,)
        begins_word[1:] |= self.is_fixed[array[:-1]]
        begins_word[:1] = True
        starts = np.flatnonzero(begins_word).tolist()
        numbers = generator.integers(_NUM_SEGMENTATIONS, size=len(starts)).tolist()
        values = array.tolist()
        cut_ids: list[int] = []
        for number, start, end in zip(numbers, starts, [*starts[1:], len(values)], strict=True):
            cut_ids += self.cut_word(number, tuple(values[start:end]))
        return np.array(cut_ids, dtype=array.dtype)

    def _cut_word(self, number: int, ids: tuple[int, ...]) -> list[int]:
        """Return the ids of segmentation `number` of a word."""
        if self.is_fixed[ids[0]]:
            return list(ids)
        text = "".join(self.pieces[i] for i in ids)
        pieces = self.draw_pieces(text, Random(f"{number} {text}"))
        return [self.ids[piece] for piece in pieces] or list(ids)

    def _draw_merges(self, text: str, draw: Random) -> list[str]:
        """Merge characters; of the possible merges the highest score first, then the left one.

        Returns no pieces if a character has none.
        """
        symbols = list(text)
        while True:
            merges = []  # score, negative position, so that the left one of equals is the maximum
            for i in range(len(symbols) - 1):
                piece = symbols[i] + symbols[i + 1]
                if piece in self.scores and draw.random() >= self.amount:
                    merges.append((self.scores[piece], -i))
            if not merges:
                break
            position = -max(merges)[1]
            symbols[position : position + 2] = [symbols[position] + symbols[position + 1]]
        return symbols if all(symbol in self.scores for symbol in symbols) else []

    def _draw_path(self, text: str, draw: Random) -> list[str]:
        """Draw a segmentation backwards, after a forward pass that sums over all of them."""
        log_sums = {0: 0.0}  # by end: log of the sum over the segmentations of text[:end]
        last_starts: dict[int, list[int]] = {}  # by end: the starts of the last piece
        last_shares: dict[int, list[float]] = {}  # their probabilities
        for end in range(1, len(text) + 1):
            logs = {}
            for start in range(max(0, end - self.longest), end):
                piece = text[start:end]
                if start in log_sums and piece in self.scores:
                    logs[start] = log_sums[start] + self.amount * self.scores[piece]
            if logs:
                highest = max(logs.values())
                total = sum(math.exp(value - highest) for value in logs.values())
                log_sums[end] = highest + math.log(total)
                last_starts[end] = list(logs)
                last_shares[end] = [math.exp(value - log_sums[end]) for value in logs.values()]
        pieces = []
        end = len(text)
        while end in last_starts:
            start = draw.choices(last_starts[end], last_shares[end])[0]
            pieces.append(text[start:end])
            end = start
        return pieces[::-1]
