"""Noise on the token ids of training pairs: a function of (seed, epoch, row) alone, so that it is
the same for every number of ranks and after resuming.
"""

# N source tokens, M target tokens of a pair, both without EOS

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from nmt.config import NoiseConfig
from nmt.data.batch import Ids
from nmt.data.languages import LanguagePair
from nmt.data.tokenizer import Tokenizers

Draws = np.ndarray[Any, np.dtype[np.float64]]


class TokenNoise:
    """Draws the noise of pairs. Tags at the start of a side, and ids that every text of an imported
    model begins with, stay as they are.
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
        self.src_starts = [src.prefix, *(src.encode(pair.src_tag) for pair in pairs)]
        self.tgt_starts = [tgt.prefix, *(tgt.encode(pair.tgt_tag) for pair in pairs)]

    def __call__(self, src: Ids, tgt: Ids, epoch: int, row: int) -> tuple[Ids, Ids]:
        """Return a source with noise and what the decoder reads in place of the target."""
        key = np.random.SeedSequence((self.seed, epoch, row), spawn_key=(1,))  # 0: of cuts
        draw = np.random.default_rng(key)
        src, tgt = np.array(src), np.array(tgt)  # (N,) (M,), copies
        start = _count_kept(src, self.src_starts)
        src = np.concatenate([src[:start], self._change(src[start:], draw.random((3, len(src))))])
        start = _count_kept(tgt, self.tgt_starts)
        is_hidden = draw.random(len(tgt)) < self.config.word_dropout
        tgt[start:][is_hidden[start:]] = self.unk_ids[1]
        return src, tgt

    def _change(self, ids: Any, draws: Draws) -> Any:
        """Leave out, mask and move some of the ids (N,); `draws` (3, N or more) are uniform."""
        config, draws = self.config, draws[:, : len(ids)]
        stays = draws[0] >= config.drop
        if not stays.any():  # of a source something remains
            stays = draws[0] == draws[0].max(initial=0)
        ids, (_, masks, moves) = ids[stays], draws[:, stays]
        ids[masks < config.mask] = self.unk_ids[0]
        # keys differ by more than 1 + swap between tokens that are further apart
        return ids[np.argsort(np.arange(len(ids)) + moves * (config.swap + 1), kind="stable")]


def _count_kept(ids: Ids, starts: list[list[int]]) -> int:
    """Return the length of the longest of `starts` that the ids begin with."""
    return max((len(s) for s in starts if list(ids[: len(s)]) == s), default=0)
