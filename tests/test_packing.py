"""Packed sentences and batches of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conftest import tiny_model
from torch import Tensor

from nmt.data.tokenizer import Tokenizer
from nmt.model.fast.packing import pack
from nmt.training.loss import Objective
from nmt.training.microbatches import Batch, make_batch

Pairs = list[tuple[list[int], list[int]]]


def test_padding_and_back_is_the_same() -> None:
    for lengths in ([3, 7, 1, 5], [4, 4, 4], [6], [1, 1], [2, 0, 5, 0]):
        packed, x = pack(lengths), torch.randn(sum(lengths), 2, 3)
        padded = packed.pad(x)
        assert padded.shape == (len(lengths), max(lengths), 2, 3)
        assert torch.equal(packed.unpad(padded), x)
        assert torch.equal(packed.unpad(packed.scatter(x)), x)
        for row, part, zeros in zip(padded, x.split(lengths), packed.scatter(x), strict=True):
            assert torch.equal(row[: len(part)], part)
            assert (zeros[len(part) :] == 0).all()
        places = [place for length in lengths for place in range(length)]
        assert packed.positions.tolist() == places
        assert packed.offsets.dtype is torch.int32  # as kernels of a GPU want them
        assert packed.offsets.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        assert packed.is_full == (len(set(lengths)) == 1)


# --- batches


def draw_pairs(seed: int, count: int, longest: int = 13) -> Pairs:
    draw = random.Random(seed)

    def ids() -> list[int]:
        return [draw.randrange(4, 300) for _ in range(draw.randint(1, longest))]

    return [(ids(), ids()) for _ in range(count)]


def test_targets_are_shifted_by_one(tokenizer: Tokenizer) -> None:
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    batch = make_batch([([10, 11, 12], [20, 21]), ([13], [22, 23, 24, 25])], tokenizer)
    assert batch.src.tolist() == [10, 11, 12, eos, 13, eos]
    assert batch.tgt_in.tolist() == [bos, 20, 21, bos, 22, 23, 24, 25]
    assert batch.tgt_out.tolist() == [20, 21, eos, 22, 23, 24, 25, eos]
    assert batch.sources.offsets.tolist() == [0, 4, 6]
    assert batch.targets.offsets.tolist() == [0, 3, 8]
    assert (batch.num_tokens, batch.num_src_tokens) == (3 + 5, 4 + 2)


def sums_and_gradients(tokenizer: Tokenizer, batch: Batch, **changes: Any) -> list[Tensor]:
    model = tiny_model(vocab_size=tokenizer.vocab_size, **changes).train()
    objective = Objective(model, smoothing=0.1)
    loss, nll = objective(batch)
    loss.backward()
    return [loss.detach(), nll, *(w.grad for w in objective.parameters() if w.grad is not None)]


@pytest.mark.parametrize("round_to", [8, 64])
@pytest.mark.parametrize("num_pairs", [1, 2, 7])
def test_rounding_changes_neither_loss_nor_gradient(
    tokenizer: Tokenizer, num_pairs: int, round_to: int
) -> None:
    pairs = draw_pairs(0, num_pairs)
    plain, rounded = (make_batch(pairs, tokenizer, round_to=r) for r in (1, round_to))
    for ids in (rounded.src, rounded.tgt_in, rounded.tgt_out):
        assert len(ids) % round_to == 0
    assert rounded.sources.num_sentences == rounded.targets.num_sentences > num_pairs
    assert rounded.sources.longest == plain.sources.longest  # or attention would be padded more
    assert rounded.targets.longest == plain.targets.longest
    assert (rounded.num_tokens, rounded.num_src_tokens) == (plain.num_tokens, plain.num_src_tokens)
    expected, found = (sums_and_gradients(tokenizer, batch) for batch in (plain, rounded))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_batch_is_the_sum_of_its_pairs(tokenizer: Tokenizer, norm: str) -> None:
    pairs = draw_pairs(1, 6)
    found = sums_and_gradients(tokenizer, make_batch(pairs, tokenizer, round_to=32), norm=norm)
    alone = [sums_and_gradients(tokenizer, make_batch([p], tokenizer), norm=norm) for p in pairs]
    expected = [torch.stack(parts).sum(0) for parts in zip(*alone, strict=True)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
