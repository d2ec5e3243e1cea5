"""What decoding remembers: rows on their grid, columns that are shared and dropped; and the choice
of the best continuations.
"""

# R rows, B sentences, W beams of the widest, T target positions

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB_SIZE, hidden_states, plain, random_source, tiny_model

from nmt.config import Norm
from nmt.model.fast.cache import Grid
from nmt.model.fast.top import NEVER, Continuations, best_continuations, likeliest

LENGTHS = [5, 20, 1, 9]


def test_rows_go_to_their_cells_and_come_back() -> None:
    for counts in ([2, 2, 2], [1, 3, 2], [1], [4], [0, 3, 0, 1], [8] * 5):
        sentences = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        grid = Grid(sentences, len(counts))
        rows = torch.randn(len(sentences), 3)
        cells = grid.spread(rows)
        assert cells.shape == (len(counts), max(counts), 3)
        expected = iter(rows)
        for sentence, count in enumerate(counts):
            assert all(torch.equal(cells[sentence, i], next(expected)) for i in range(count))
            assert grid.is_empty[sentence].tolist() == [i >= count for i in range(max(counts))]
        assert torch.equal(grid.collect(cells)[: len(rows)], rows), counts
        assert len(grid.collect(cells)) == grid.num_collected >= len(rows)


@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_any_walk_through_the_cache_equals_the_plain_model(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(norm=list(Norm)[seed % 2])
    oracle, (src, lengths), widest = plain(model), random_source(LENGTHS), 1 + seed
    cache = model.start(src, lengths)
    sentences = torch.arange(len(LENGTHS))
    history = torch.zeros(len(sentences), 0, dtype=torch.long)
    num_columns = []
    for t in range(40):
        tokens = torch.randint(4, VOCAB_SIZE, (len(sentences),), generator=generator)
        history = torch.cat([history, tokens.unsqueeze(1)], dim=1)  # (R, T)
        found = model.step(tokens, cache)
        expected = hidden_states(oracle, src[sentences], lengths[sentences], history)[:, -1]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        num_columns.append(cache.visible.size(1))
        # each sentence goes on with some of its rows, sooner or later with none
        ends = torch.rand(len(LENGTHS), generator=generator) < 0.03
        rows = []
        for sentence in sentences.unique().tolist():
            own = (sentences == sentence).nonzero().squeeze(1)
            count = int(torch.randint(1, widest + 1, (), generator=generator))
            picks = torch.randint(0, len(own), (0 if ends[sentence] and t else count,))
            rows += own[picks].tolist()
        if not rows:
            break
        sentences, history = sentences[rows], history[rows]
        cache.reorder(torch.tensor(rows))
    assert t > 20
    if widest > 1:
        assert num_columns[-1] < 1.5 * (t + 1 + 4 * widest) + 32 < widest * 40 + 32


@torch.no_grad()
def test_sentences_that_ended_leave_the_memory() -> None:
    model = tiny_model()
    cache = model.start(*random_source(LENGTHS))
    model.step(torch.tensor([1, 1, 1, 1]), cache)
    cache.reorder(torch.tensor([0, 1, 2, 3]))
    assert {len(keys) for keys, _ in cache.sources.values()} == {4}
    cache.reorder(torch.tensor([1, 3]))
    assert {len(keys) for keys, _ in cache.sources.values()} == {2}
    assert len(cache.source_bias) == 2


# --- the best continuations, against sorting everything


def test_the_best_are_those_of_a_stable_sort_of_all() -> None:
    for seed in range(60):
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
            assert torch.equal(best.sums, values[:count][usable]), seed
            assert (found.sums[sentence, int(usable.sum()) :] == NEVER).all(), seed
            assert torch.equal(best.rows, rows[order[:count][usable] // vocab]), seed
            assert torch.equal(best.tokens, order[:count][usable] % vocab), seed
            assert torch.equal(best.log_probs, log_probs[best.rows, best.tokens]), seed


def test_the_likeliest_token_is_the_first_of_the_highest() -> None:
    for vocab in (1, 5, 63, 64, 65, 128, 1000):
        generator = torch.Generator().manual_seed(vocab)
        log_probs = torch.randn(50, vocab, generator=generator).mul(2).round()
        expected = [row.index(max(row)) for row in log_probs.tolist()]
        assert likeliest(log_probs).tolist() == expected, vocab
