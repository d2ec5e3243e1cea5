"""A batch of sentence pairs as flat streams of tokens, without padding between them."""

# B sentence pairs, N source tokens, M target tokens; EOS is part of a sentence

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nmt.data.batch import Ids
from nmt.data.tokenizer import Tokenizers
from nmt.model.fast.packing import Packing, pack


@dataclass(frozen=True)
class Batch:
    """What one forward pass of training reads: `tgt_in` is BOS + target, `tgt_out` is target + EOS,
    sentence after sentence.

    The tokens from `num_src_tokens` and `num_tokens` on are padding: last sentences that round N
    and M up.
    """

    src: Tensor  # (N,)
    sources: Packing
    tgt_in: Tensor  # (M,)
    tgt_out: Tensor  # (M,)
    targets: Packing
    num_src_tokens: int
    num_tokens: int  # real target tokens, EOS included

    def to(self, device: torch.device) -> Batch:
        """Copy the tensors to `device`, without a wait where they are pinned."""
        return self._map(
            lambda x: x.to(device, non_blocking=True), lambda packing: packing.to(device)
        )

    def pin(self) -> Batch:
        """Copy the tensors to memory that a GPU reads by itself."""
        return self._map(Tensor.pin_memory, Packing.pin)

    def _map(
        self, change: Callable[[Tensor], Tensor], change_packing: Callable[[Packing], Packing]
    ) -> Batch:
        src, tgt_in, tgt_out = map(change, (self.src, self.tgt_in, self.tgt_out))
        sources, targets = map(change_packing, (self.sources, self.targets))
        return replace(
            self, src=src, tgt_in=tgt_in, tgt_out=tgt_out, sources=sources, targets=targets
        )


def make_batch(
    pairs: Sequence[tuple[Ids, Ids]], tokenizer: Tokenizers, *, round_to: int = 1
) -> Batch:
    """Lay pairs of ids without BOS and EOS one after the other.

    With `round_to` above 1 there are 1 to `round_to` padding tokens a side, which make N and M
    multiples of it.
    """
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    src_lengths = [len(row) + 1 for row in sources]
    tgt_lengths = [len(row) + 1 for row in targets]
    num_src_tokens, num_tokens = sum(src_lengths), sum(tgt_lengths)
    src_padding, tgt_padding = _missing(num_src_tokens, round_to), _missing(num_tokens, round_to)
    cuts = _cut(src_padding, max(src_lengths)), _cut(tgt_padding, max(tgt_lengths))
    for src_length, tgt_length in itertools.zip_longest(*cuts, fillvalue=0):
        src_lengths.append(src_length)
        tgt_lengths.append(tgt_length)
    src_ids, tgt_ids = tokenizer.src, tokenizer.tgt
    bos, eos = [tgt_ids.bos_id], [tgt_ids.eos_id]
    return Batch(
        src=_join([(row, [src_ids.eos_id]) for row in sources], src_padding, src_ids.pad_id),
        sources=pack(src_lengths),
        tgt_in=_join([(bos, row) for row in targets], tgt_padding, tgt_ids.pad_id),
        tgt_out=_join([(row, eos) for row in targets], tgt_padding, tgt_ids.pad_id),
        targets=pack(tgt_lengths),
        num_src_tokens=num_src_tokens,
        num_tokens=num_tokens,
    )


def _missing(num_tokens: int, round_to: int) -> int:
    return round_to - num_tokens % round_to if round_to > 1 else 0


def _cut(num_tokens: int, longest: int) -> list[int]:
    """Cut padding into sentences that are no longer than the real ones."""
    return [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]


def _join(rows: Sequence[tuple[Ids, Ids]], num_padding: int, pad_id: int) -> Tensor:
    """Lay ids one after the other and padding after them (N,)."""
    parts = [part for row in rows for part in row]
    parts.append([pad_id] * num_padding)
    # numpy takes an empty list for floats
    return torch.from_numpy(np.concatenate(parts, dtype=np.int64, casting="unsafe"))
