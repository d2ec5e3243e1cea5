"""The pruned choice of continuations against sorting everything."""

from __future__ import annotations

import pytest
import torch

from nmt.model.fast.cache import Grid
from nmt.model.fast.top import NEVER, Continuations, best_continuations, likeliest


@pytest.mark.parametrize("seed", range(60))
def test_the_best_are_those_of_a_stable_sort_of_all(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bounds = (4, 6, 300, 9)
    batch, beams, vocab, count = (
        int(torch.randint(1, bound, (), generator=generator)) for bound in bounds
    )
    counts = torch.randint(1, beams + 1, (batch,), generator=generator)  # rows of each sentence
    sentences = torch.arange(batch).repeat_interleave(counts)
    log_probs = torch.randn(len(sentences), vocab, generator=generator)
    sums = torch.randn(len(sentences), generator=generator).round()
    if seed % 3 == 0:
        log_probs = log_probs.round()  # ties
    if seed % 4 == 0:
        log_probs[:, ::2] = NEVER  # forbidden tokens
    if seed % 5 == 0:
        sums[1:] = NEVER  # rows without use
    found = best_continuations(sums, log_probs, Grid(sentences, batch), count)
    for sentence in range(batch):
        rows = (sentences == sentence).nonzero().squeeze(1)
        totals = (sums[rows].unsqueeze(1) + log_probs[rows]).flatten()
        values, order = totals.sort(descending=True, stable=True)
        usable = (values > NEVER)[:count]
        best = Continuations(*(column[sentence, : len(usable)][usable] for column in found))
        assert torch.equal(best.sums, values[:count][usable])
        assert (found.sums[sentence, int(usable.sum()) :] == NEVER).all()
        assert torch.equal(best.rows, rows[order[:count][usable] // vocab])
        assert torch.equal(best.tokens, order[:count][usable] % vocab)
        assert torch.equal(best.log_probs, log_probs[best.rows, best.tokens])


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 128, 1000])
def test_the_likeliest_token_is_the_first_of_the_highest(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    log_probs = torch.randn(50, vocab, generator=generator).mul(2).round()
    expected = [row.index(max(row)) for row in log_probs.tolist()]
    assert likeliest(log_probs).tolist() == expected
