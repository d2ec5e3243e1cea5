"""What decoding remembers: rows on their grid, and columns that are shared and dropped."""

# R rows, B sentences, W beams of the widest, T target positions

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB_SIZE, hidden_states, random_source, tiny_model

from nmt.config import Norm
from nmt.model.fast.cache import DecoderCache, Grid

LENGTHS = [5, 20, 1, 9]


@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 3, 2], [1], [4], [0, 3, 0, 1], [8] * 5])
def test_rows_go_to_their_cells_and_come_back(counts: list[int]) -> None:
    sentences = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    grid = Grid(sentences, len(counts))
    rows = torch.randn(len(sentences), 3)
    cells = grid.spread(rows)
    assert cells.shape == (len(counts), max(counts), 3)
    expected = iter(rows)
    for sentence, count in enumerate(counts):
        assert all(torch.equal(cells[sentence, beam], next(expected)) for beam in range(count))
        assert grid.is_empty[sentence].tolist() == [beam >= count for beam in range(max(counts))]
    assert torch.equal(grid.collect(cells)[: len(rows)], rows)
    assert len(grid.collect(cells)) == grid.num_collected >= len(rows)


@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_any_walk_through_the_cache_equals_decoding_at_once(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(norm=list(Norm)[seed % 2])
    (src, lengths), widest = random_source(LENGTHS), 1 + seed
    memory = model.encode(src, lengths)
    cache = DecoderCache(memory.layers, memory.mask)
    sentences = torch.arange(len(LENGTHS))
    history = torch.zeros(len(sentences), 0, dtype=torch.long)
    num_columns = []
    for t in range(40):
        tokens = torch.randint(4, VOCAB_SIZE, (len(sentences),), generator=generator)
        history = torch.cat([history, tokens.unsqueeze(1)], dim=1)  # (R, T)
        found = model.step(tokens, cache)
        expected = hidden_states(model, src[sentences], lengths[sentences], history)[:, -1]
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
    memory = model.encode(*random_source(LENGTHS))
    cache = DecoderCache(memory.layers, memory.mask)
    model.step(torch.tensor([1, 1, 1, 1]), cache)
    cache.reorder(torch.tensor([0, 1, 2, 3]))
    assert len(cache.memory[0][0]) == 4
    cache.reorder(torch.tensor([1, 3]))
    assert len(cache.memory[0][0]) == len(cache.memory_bias) == 2
