"""How training pairs differ each time they come: words that are cut into other pieces (BPE-dropout,
samples of a unigram model), and noise on tokens. Both are functions of (seed, update, row) alone,
so that they are the same for every number of ranks and after resuming.
"""

# N source tokens, M target tokens of a pair, both without EOS

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from operator import add
from random import Random
from struct import unpack
from typing import Any

import numpy as np

from nmt.config import NoiseConfig
from nmt.data.batch import Ids
from nmt.data.languages import SEPARATOR, LanguagePair
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.data.vocabulary import model_fields
from nmt.errors import ConfigError

Draws = np.ndarray[Any, np.dtype[np.float64]]
_UNIGRAM, _BPE, _WORD_PIECE = 1, 2, 1  # of sentencepiece_model.proto
_CUTS = 64  # of each word with the same pieces, among which its occurrences draw
_REMEMBERED = 1 << 18  # cuts, which take 80 MB


class TokenNoise:
    """Draws the noise of pairs. Tags at the start of a side, ids that every text of an imported
    model begins with, and what separates the lines of a document stay as they are.
    """

    def __init__(
        self,
        config: NoiseConfig,
        seed: int,
        tokenizer: Tokenizers,
        directions: Iterable[LanguagePair],
    ) -> None:
        self.config, self.seed = config, seed
        src, tgt, pairs = tokenizer.src, tokenizer.tgt, list(directions)
        self.unk_ids = src.unk_id, tgt.unk_id
        places = ({p: i for i, p in enumerate(side.all_pieces())} for side in (src, tgt))
        self.separators = [place.get(SEPARATOR, -1) for place in places]
        self.src_starts = [src.prefix, *(src.encode(pair.src_tag) for pair in pairs)]
        self.tgt_starts = [tgt.prefix, *(tgt.encode(pair.tgt_tag) for pair in pairs)]

    def __call__(self, src: Ids, tgt: Ids, number: int, row: int) -> tuple[Ids, Ids]:
        """Return a source with noise and what the decoder reads in place of the target."""
        key = np.random.SeedSequence((self.seed, number, row), spawn_key=(1,))  # 0: of cuts
        draw = np.random.default_rng(key)
        src, tgt = np.array(src), np.array(tgt)  # (N,) (M,), copies
        start = _count_kept(src, self.src_starts)
        src = np.concatenate([src[:start], self._change(src[start:], draw.random((3, len(src))))])
        start = _count_kept(tgt, self.tgt_starts)
        is_hidden = draw.random(len(tgt)) < self.config.word_dropout
        is_hidden &= tgt != self.separators[1]
        tgt[start:][is_hidden[start:]] = self.unk_ids[1]
        return src, tgt

    def _change(self, ids: Any, draws: Draws) -> Any:
        """Leave out, mask and move some of the ids (N,); `draws` (3, N or more) are uniform."""
        config, draws = self.config, draws[:, : len(ids)]
        is_separator = ids == self.separators[0]
        words = np.where(is_separator, -1, draws[0])
        stays = is_separator | (words >= config.drop)
        if (stays == is_separator).all():  # of a source something remains
            stays |= words == words.max(initial=-1)
        ids, is_separator, (_, masks, moves) = ids[stays], is_separator[stays], draws[:, stays]
        ids[~is_separator & (masks < config.mask)] = self.unk_ids[0]
        lines = 2 * is_separator.cumsum() - is_separator
        # keys differ by more than 1 + swap between tokens that are further apart, or of two lines
        keys = np.arange(len(ids)) + (moves + lines) * (config.swap + 1)
        return ids[np.argsort(keys, kind="stable")]


def _count_kept(ids: Ids, starts: list[list[int]]) -> int:
    """Return the length of the longest of `starts` that the ids begin with."""
    return max((len(s) for s in starts if list(ids[: len(s)]) == s), default=0)


class SubwordSampling:
    """Cuts pairs anew, with draws of its own: those of SentencePiece differ between processes."""

    def __init__(self, tokenizers: Tokenizers, amount: float, seed: int) -> None:
        """See `WordCutter` for `amount`, and for what is raised."""
        self.seed, one = seed, WordCutter(tokenizers.src, amount)
        is_joint = tokenizers.tgt is tokenizers.src
        self.cutters = one, one if is_joint else WordCutter(tokenizers.tgt, amount)

    def __call__(self, src: Ids, tgt: Ids, number: int, row: int) -> tuple[Ids, Ids]:
        """Return ids of the same text as the source's (N,) and the target's (M,), usually more."""
        draw = np.random.default_rng(np.random.SeedSequence((self.seed, number, row)))
        src, tgt = (c.cut(ids, draw) for c, ids in zip(self.cutters, (src, tgt), strict=True))
        return src, tgt


class WordCutter:
    """Cuts the words of one tokenizer: by BPE that leaves out each possible merge with the
    probability `amount`, again in every step (Provilkov et al., 2020, algorithm 1), or by unigram
    probabilities to the power of `amount` (Kudo, 2018).

    A word reaches from a piece that begins with a space to the next. Bytes, control symbols and
    user-defined ones, such as tags, stay, and separate words. Raises `ConfigError` for a tokenizer
    of neither kind.
    """

    def __init__(self, tokenizer: Tokenizer, amount: float) -> None:
        self.amount, self.pieces = amount, tokenizer.all_pieces()
        model = model_fields(tokenizer.model)
        (kind,) = model_fields(b"".join(model.get(2, []))).get(3, [_UNIGRAM])[-1:]  # of the trainer
        if kind not in (_UNIGRAM, _BPE) or tokenizer.vocabulary is not None:
            rule = "needs a bpe or unigram tokenizer, and no imported vocabulary"
            raise ConfigError(f"subword_sampling={amount}: {rule}")
        self.draw_pieces = self._merge if kind == _BPE else self._walk
        self.scores = {  # log-probabilities, or for BPE the order of merges
            piece[1][0].decode("utf-8"): unpack("<f", piece.get(2, [bytes(4)])[-1])[0]
            for piece in map(model_fields, model[1])
            if piece.get(3, [_WORD_PIECE])[-1] == _WORD_PIECE
        }
        self.ids = {piece: i for i, piece in enumerate(self.pieces) if piece in self.scores}
        self.longest = max(map(len, self.scores), default=0)
        self.is_fixed = np.array([piece not in self.scores for piece in self.pieces])  # (V,)
        self.is_first = np.array([piece.startswith("▁") for piece in self.pieces]) | self.is_fixed
        self.cut_word = functools.lru_cache(_REMEMBERED)(self._cut_word)

    def cut(self, given: Ids, draw: np.random.Generator) -> Ids:
        """Return other ids of the same text as those `given` (N,)."""
        ids: Any = np.asarray(given)
        begins = self.is_first[ids]  # (N,)
        begins[1:] |= self.is_fixed[ids[:-1]]
        begins[:1] = True
        starts = [*np.flatnonzero(begins).tolist(), len(ids)]
        numbers = draw.integers(_CUTS, size=len(starts) - 1).tolist()
        found: list[int] = []
        for number, start, end in zip(numbers, starts, starts[1:], strict=False):
            found += self.cut_word(number, *ids[start:end].tolist())
        return np.array(found, dtype=ids.dtype)

    def _cut_word(self, number: int, *ids: int) -> list[int]:
        """Return the ids of a word in cut `number`."""
        if self.is_fixed[ids[0]]:
            return list(ids)
        text = "".join(self.pieces[i] for i in ids)
        found = self.draw_pieces(text, Random(f"{number} {text}"))
        return [self.ids[piece] for piece in found] if found else list(ids)

    def _merge(self, text: str, draw: Random) -> list[str]:
        """Merge characters, the pair with the highest score first, of equals the left one."""
        symbols, scores = list(text), self.scores
        while True:
            joined = enumerate(map(add, symbols, symbols[1:]))
            kept = [(i, s) for i, s in joined if s in scores and draw.random() >= self.amount]
            if not kept:
                return symbols if all(symbol in scores for symbol in symbols) else []
            place, piece = max(kept, key=lambda pair: scores[pair[1]])
            symbols[place : place + 2] = [piece]

    def _walk(self, text: str, draw: Random) -> list[str]:
        """Draw a path from the end of the word to its start, after summing over all of them."""
        sums = {0: 0.0}  # log of the sum over the ways to cut so many characters, where there are
        ways: dict[int, list[tuple[int, float]]] = {}  # starts of their last piece, with shares
        for end in range(1, len(text) + 1):
            spans = ((i, text[i:end]) for i in range(max(0, end - self.longest), end) if i in sums)
            logs = [
                (i, sums[i] + self.amount * self.scores[s]) for i, s in spans if s in self.scores
            ]
            if logs:
                highest = max(value for _, value in logs)
                sums[end] = highest + math.log(sum(math.exp(v - highest) for _, v in logs))
                ways[end] = [(i, math.exp(value - sums[end])) for i, value in logs]
        pieces, end = [], len(text)
        while end in ways:
            starts, shares = zip(*ways[end], strict=True)
            (start,) = draw.choices(starts, shares)
            pieces.append(text[start:end])
            end = start
        return pieces[::-1]
