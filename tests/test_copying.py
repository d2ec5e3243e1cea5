"""The copy corpus: targets equal sources, splits are disjoint, the seed decides everything."""

from __future__ import annotations

import pytest

from nmt.data import copying

SPLITS = copying.generate()


def test_every_target_is_its_source() -> None:
    assert all(src == tgt for pairs in SPLITS.values() for src, tgt in pairs)


def test_splits_have_their_sizes_and_share_no_sentence() -> None:
    assert {name: len(pairs) for name, pairs in SPLITS.items()} == copying.SIZES
    sources = [src for pairs in SPLITS.values() for src, _ in pairs]
    assert len(set(sources)) == len(sources)


def test_sentences_are_short_rows_of_known_symbols() -> None:
    for src, _ in SPLITS["train"]:
        symbols = src.split(" ")
        assert copying.MIN_SYMBOLS <= len(symbols) <= copying.MAX_SYMBOLS
        assert set(symbols) <= set(copying.SYMBOLS)


@pytest.mark.parametrize("seed", [0, 7])
def test_corpus_is_a_function_of_the_seed(seed: int) -> None:
    assert copying.generate(seed) == copying.generate(seed)
    assert copying.generate(seed) != copying.generate(seed + 1)
