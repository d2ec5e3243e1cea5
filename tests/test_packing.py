"""Packed sentences against padded ones, and against each sentence by itself."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import tiny_model
from torch import Tensor

from nmt.data.tokenizer import Tokenizer
from nmt.model.fast import packing
from nmt.model.fast.packing import attend, pack
from nmt.training.batch import Batch, make_batch
from nmt.training.objective import Objective

Pairs = list[tuple[list[int], list[int]]]
LENGTHS = [[3, 7, 1, 5], [4, 4, 4], [6], [1, 1], [2, 0, 5, 0]]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_padding_and_back_is_the_same(lengths: list[int]) -> None:
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


def slow_attention(queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Tensor:
    """Equation 1 for one sentence, (T, H, D/H) and (S, H, D/H)."""
    logits = torch.einsum("thd,shd->hts", queries, keys) / math.sqrt(queries.size(-1))
    if causal:
        logits = logits + torch.full(logits.shape[1:], -math.inf).triu(1)
    return torch.einsum("hts,shd->thd", logits.softmax(-1), values)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize(
    ("targets", "sources", "causal"),
    [
        ([3, 7, 1, 5], [3, 7, 1, 5], False),
        ([3, 7, 1, 5], [3, 7, 1, 5], True),
        ([4, 4, 4], [4, 4, 4], True),
        ([3, 7, 1, 5], [6, 2, 4, 1], False),
        ([3, 1, 2], [5, 5, 5], False),
    ],
)
def test_attention_over_packed_sentences_is_that_of_each_sentence(
    targets: list[int],
    sources: list[int],
    causal: bool,
    is_fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "_takes_cpu_kernel", lambda _: is_fused)
    torch.manual_seed(0)
    shapes = [(sum(lengths), 2, 8) for lengths in (targets, sources, sources)]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    found = attend(*inputs, pack(targets), pack(sources), causal=causal)
    parts = zip(inputs[0].split(targets), *(x.split(sources) for x in inputs[1:]), strict=True)
    expected = torch.cat([slow_attention(*part, causal=causal) for part in parts])
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((y * weights).sum(), inputs) for y in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_a_gradient_through_sentences_without_tokens_is_a_number() -> None:
    x = torch.randn(7, 2, 8, requires_grad=True)
    keys = torch.randn(9, 2, 8, requires_grad=True)
    found = attend(x, keys, keys, pack([4, 3]), pack([9, 0]), causal=False)
    found[:4].sum().backward()  # the second sentence counts nothing
    alone = attend(x[:4], keys, keys, pack([4]), pack([9]), causal=False)
    torch.testing.assert_close(found[:4], alone)
    assert x.grad is not None
    assert keys.grad is not None
    assert (x.grad[4:] == 0).all()
    expected = torch.autograd.grad(alone.sum(), [x, keys])
    torch.testing.assert_close([x.grad, keys.grad], list(expected))


def test_backward_keeps_no_padded_tensor() -> None:
    lengths, saved = [10, 1, 1, 1], []
    queries, keys, values = (torch.randn(13, 2, 8, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attend(queries, keys, values, pack(lengths), pack(lengths), causal=True)
    assert max(x.numel() for x in saved) == 13 * 2 * 8


def flash_by_loops(
    queries: Tensor, keys: Tensor, values: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
    max_q: int, max_k: int, *, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Do what torch's varlen_attn promises, a sentence at a time."""
    out = torch.zeros_like(queries)
    assert cu_seq_q.dtype is cu_seq_k.dtype is torch.int32
    spans = [itertools.pairwise(ends.tolist()) for ends in (cu_seq_q, cu_seq_k)]
    for (start, end), (first, last) in zip(*spans, strict=True):
        assert end - start <= max_q
        assert last - first <= max_k
        causal = {(-1, 0): True, (-1, -1): False}[window_size]
        parts = queries[start:end], keys[first:last], values[first:last]
        out[start:end] = slow_attention(*(x.float() for x in parts), causal=causal).to(out.dtype)
    return out


@torch.inference_mode()  # a translation may be the first to ask
def test_an_attention_over_variable_lengths_is_tried_out_against_padding() -> None:
    def blind(*args: Any, window_size: tuple[int, int]) -> Tensor:
        return flash_by_loops(*args, window_size=(-1, -1))

    assert packing._agrees(flash_by_loops, torch.device("cpu"))
    assert not packing._agrees(blind, torch.device("cpu"))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_model_with_attention_over_variable_lengths_is_the_one_that_pads(
    tokenizer: Tokenizer, norm: str
) -> None:
    model = tiny_model(vocab_size=tokenizer.vocab_size, d_model=32, norm=norm)
    batch = make_batch(draw_pairs(3, 9), tokenizer, round_to=64)
    hidden = []
    for flash in (None, flash_by_loops):
        sources, targets = (replace(p, flash=flash) for p in (batch.sources, batch.targets))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden.append(model(batch.src, sources, batch.tgt_in, targets)[: batch.num_tokens])
    torch.testing.assert_close(hidden[1], hidden[0], atol=0.1, rtol=0.05)
    assert not torch.equal(*hidden)  # other kernels round otherwise


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
