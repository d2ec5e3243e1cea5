"""The pruned choice of continuations against sorting everything."""

from __future__ import annotations

import pytest
import torch

from nmt.inference.top import NEVER, best_continuations, likeliest


@pytest.mark.parametrize("seed", range(60))
def test_the_best_are_those_of_a_stable_sort_of_all(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bounds = (4, 6, 300, 9)
    batch, beams, vocab, count = (
        int(torch.randint(1, bound, (), generator=generator)) for bound in bounds
    )
    log_probs = torch.randn(batch * beams, vocab, generator=generator)
    sums = torch.randn(batch, beams, generator=generator).round()
    if seed % 3 == 0:
        log_probs = log_probs.round()  # ties
    if seed % 4 == 0:
        log_probs[:, ::2] = NEVER  # forbidden tokens
    if seed % 5 == 0:
        sums[:, 1:] = NEVER  # beams without use
    totals, places = best_continuations(sums, log_probs, count)
    everything = (sums.view(-1, 1) + log_probs).view(batch, -1)
    values, order = everything.sort(dim=1, descending=True, stable=True)
    assert torch.equal(totals, values[:, :count])
    usable = totals > NEVER
    assert torch.equal(places[usable], order[:, :count][usable])


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 128, 1000])
def test_the_likeliest_token_is_the_first_of_the_highest(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    log_probs = torch.randn(50, vocab, generator=generator).mul(2).round()
    expected = [row.index(max(row)) for row in log_probs.tolist()]
    assert likeliest(log_probs).tolist() == expected
