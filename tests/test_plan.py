"""The sample that a tokenizer is trained on: the pairs with the smallest keys, in any order."""

from __future__ import annotations

import numpy as np

from nmt.config import TokenizerConfig
from nmt.preprocess.plan import Sample, sample_keys, sample_size

NUM_PAIRS = 20_000


def draw(size: int, cuts: list[int]) -> tuple[list[str], list[str]]:
    """Sample pairs that are numbered, added in parts, as far as their keys are below the limit."""
    sample = Sample(size)
    for start, end in zip([0, *cuts], [*cuts, NUM_PAIRS], strict=True):
        numbers = np.arange(start, end)
        keys = sample_keys(1, "news", numbers)
        chosen = numbers[keys < sample.limit]
        lines = list(map(str, chosen))
        sample.add(keys[keys < sample.limit], lines, [f"-{line}" for line in lines])
    return sample.take()


def test_the_smallest_keys_are_drawn_in_order_of_reading() -> None:
    keys = sample_keys(1, "news", np.arange(NUM_PAIRS))
    for size in (1, 700, NUM_PAIRS - 1, NUM_PAIRS, 10 * NUM_PAIRS):
        expected = np.sort(np.argsort(keys)[:size])
        for cuts in ([], [1], list(range(50, NUM_PAIRS, 50))):
            src, tgt = draw(size, cuts)
            assert src == list(map(str, expected)), (size, cuts[:2])
            assert tgt == [f"-{line}" for line in src]
    assert Sample(0).limit == 0  # asks for nothing


def test_seeds_and_corpora_draw_other_pairs() -> None:
    numbers = np.arange(NUM_PAIRS)
    keys = [sample_keys(*key, numbers) for key in ((1, "a"), (2, "a"), (1, "b"))]
    first = [set(np.argsort(k)[:1000].tolist()) for k in keys]
    assert all(len(one & other) < 150 for one, other in zip(first, first[1:], strict=False))
    assert all(len(np.unique(k)) == NUM_PAIRS for k in keys)


def test_every_part_of_the_corpus_has_its_share() -> None:
    numbers = np.array([int(line) for line in draw(2000, [7])[0]])
    shares = np.bincount(numbers // (NUM_PAIRS // 10))
    assert shares.min() > 130  # of 200; 5 standard deviations
    assert shares.max() < 270


def test_a_sample_gives_no_more_lines_than_asked_for() -> None:
    assert sample_size(TokenizerConfig(max_sentences=9)) == 4  # of both sides
    assert sample_size(TokenizerConfig(max_sentences=1)) == 1
    assert sample_size(TokenizerConfig(max_sentences=9, separate=True)) == 9  # of each side
    assert sample_size(TokenizerConfig(model="given.model")) == 0
