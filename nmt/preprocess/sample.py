"""A random sample of pairs that is drawn in one pass and is the same whoever reads which part.

Each pair has a key that is a hash of the seed, the corpus and its number there; the sample are the
pairs with the smallest keys (bottom-k sampling; Cohen and Kaplan, 2007).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from nmt.config import TokenizerConfig

Keys = np.ndarray[Any, np.dtype[np.uint64]]
_SPARE = 1.2  # how far the sample may outgrow its size before it is cut
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


def sample_keys(seed: int, corpus: str, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> Keys:
    """Return the keys of the pairs with these numbers in their corpus, (N,).

    The mixing function is that of SplitMix64 (Steele et al., 2014), a bijection: no two pairs of a
    corpus have the same key.
    """
    digest = hashlib.blake2b(f"{seed} {corpus}".encode(), digest_size=8).digest()
    keys = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys += np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def sample_size(config: TokenizerConfig) -> int:
    """Return the number of pairs that give a tokenizer at most `max_sentences` lines."""
    return config.max_sentences if config.separate else max(1, config.max_sentences // 2)


class Sample:
    """The pairs with the `size` smallest keys among those that were added, in that order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: Keys = np.empty(0, dtype=np.uint64)
        self._pairs: list[tuple[str, str]] = []
        self.limit = _ALL if size else np.uint64(0)
        """Pairs with this key or a larger one need not be added; it falls as the sample fills."""

    def add(self, keys: Keys, src: list[str], tgt: list[str]) -> None:
        """Add pairs with their keys."""
        self._keys = np.concatenate([self._keys, keys])
        self._pairs.extend(zip(src, tgt, strict=True))
        if len(self._pairs) > _SPARE * self._size + 1000:
            self._cut()

    def take(self) -> tuple[list[str], list[str]]:
        """Return the sampled sources and targets, in the order of adding, and forget them."""
        self._cut()
        src, tgt = [pair[0] for pair in self._pairs], [pair[1] for pair in self._pairs]
        self._pairs = []
        return src, tgt

    def _cut(self) -> None:
        if len(self._pairs) <= self._size:
            return
        self.limit = np.partition(self._keys, self._size)[self._size]
        stay = np.flatnonzero(self._keys < self.limit)
        self._keys = self._keys[stay]
        self._pairs = [self._pairs[i] for i in stay.tolist()]
