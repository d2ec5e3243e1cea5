"""Micro-batches: sentence pairs as flat streams of tokens without padding between them."""

# B sentence pairs, N source tokens, M target tokens; EOS is part of a sentence

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nmt.data import Lengths
from nmt.data.batch import Ids
from nmt.data.tokenizer import Tokenizers
from nmt.model.fast.packing import Packing, pack
from nmt.model.fast.transfer import send


@dataclass(frozen=True)
class Batch:
    """What one forward pass of training reads: `tgt_in` is BOS + target, `tgt_out` is target + EOS,
    sentence after sentence. From `num_src_tokens` and `num_tokens` on, padding rounds N and M up.
    """

    src: Tensor  # (N,)
    sources: Packing
    tgt_in: Tensor  # (M,)
    tgt_out: Tensor  # (M,)
    targets: Packing
    num_src_tokens: int
    num_tokens: int  # real target tokens, EOS included
    lengths: Lengths  # of the real sentences, EOS included, (B, 2)

    def to(self, device: torch.device) -> Batch:
        """Copy the tensors to `device`, without waiting for it."""
        return self._map(lambda x: send(x, device), lambda p: p.to(device))

    def pin(self) -> Batch:
        """Copy the tensors to page-locked memory, which a GPU reads asynchronously."""
        return self._map(Tensor.pin_memory, Packing.pin)

    def _map(self, one: Callable[[Tensor], Tensor], other: Callable[[Packing], Packing]) -> Batch:
        tensors = {name: one(getattr(self, name)) for name in ("src", "tgt_in", "tgt_out")}
        packings = {name: other(getattr(self, name)) for name in ("sources", "targets")}
        return replace(self, **tensors, **packings)  # type: ignore[arg-type]


def make_batch(
    pairs: Sequence[tuple[Ids, Ids]], tokenizer: Tokenizers, inputs: Sequence[Ids] | None = None, *,
    round_to: int = 1, source_eos: bool = True,
) -> Batch:  # fmt: skip
    """Concatenate pairs of ids that have no BOS and EOS yet; the decoder reads `inputs`, which are
    as long as the targets, in their place.

    With `round_to` above 1 each side gets 1 to `round_to` padding tokens, which make N and M
    multiples of it. Without `source_eos` sources end with their last token.
    """
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    src_end = [tokenizer.src.eos_id] if source_eos else []
    src_lengths = [len(row) + len(src_end) for row in sources]
    tgt_lengths = [len(row) + 1 for row in targets]
    num_src_tokens, num_tokens = sum(src_lengths), sum(tgt_lengths)
    lengths = np.array([src_lengths, tgt_lengths]).T  # (B, 2)
    src_padding = round_to - num_src_tokens % round_to if round_to > 1 else 0
    tgt_padding = round_to - num_tokens % round_to if round_to > 1 else 0
    longest = lengths.max(axis=0).tolist()
    # padding becomes sentences that are no longer than the real ones, equally many on both sides
    cuts = _cut(src_padding, longest[0]), _cut(tgt_padding, longest[1])
    added = list(itertools.zip_longest(*cuts, fillvalue=0))
    bos, eos = [tokenizer.tgt.bos_id], [tokenizer.tgt.eos_id]
    src_pads, tgt_pads = [tokenizer.src.pad_id] * src_padding, [tokenizer.tgt.pad_id] * tgt_padding
    return Batch(
        src=_concatenate([ids for row in sources for ids in (row, src_end)], src_pads),
        sources=pack([*src_lengths, *(src for src, _ in added)]),
        tgt_in=_concatenate([ids for row in inputs or targets for ids in (bos, row)], tgt_pads),
        tgt_out=_concatenate([ids for row in targets for ids in (row, eos)], tgt_pads),
        targets=pack([*tgt_lengths, *(tgt for _, tgt in added)]),
        num_src_tokens=num_src_tokens,
        num_tokens=num_tokens,
        lengths=lengths,
    )


def _cut(num_tokens: int, longest: int) -> list[int]:
    return [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]


def _concatenate(parts: Sequence[Ids], padding: Ids) -> Tensor:
    # numpy takes an empty list for floats
    return torch.from_numpy(np.concatenate([*parts, padding], dtype=np.int64, casting="unsafe"))
