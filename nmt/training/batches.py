"""Micro-batches: sentence pairs as flat streams of tokens without padding between them."""

# B sentence pairs, N source tokens, M target tokens; EOS is part of a sentence

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nmt.config import TrainConfig
from nmt.data import Lengths, Rows
from nmt.data.batch import MICRO_BATCH_TOKENS, Ids, batch_cost
from nmt.data.batching import Update
from nmt.data.binary import ParallelData
from nmt.data.noise import SubwordSampling, TokenNoise
from nmt.data.tokenizer import Tokenizers
from nmt.model.fast.layers import ROWS_STEP
from nmt.model.fast.packing import Packing, pack
from nmt.model.fast.transfer import send

FILLER_ROWS: Rows = np.zeros(1, dtype=np.int64)  # for a rank without a batch; counts nothing


@dataclass(frozen=True)
class Batch:
    """The input of one forward pass in training: `tgt_in` is BOS + target and `tgt_out` is target +
    EOS, sentence after sentence. Padding tokens at the end round N and M up.
    """

    src: Tensor  # (N,)
    src_packing: Packing
    tgt_in: Tensor  # (M,)
    tgt_out: Tensor  # (M,)
    tgt_packing: Packing
    num_src_tokens: int  # without padding
    num_tokens: int  # target tokens without padding, EOS included
    lengths: Lengths  # (B, 2) of the sentences without padding, EOS included

    def to(self, device: torch.device) -> Batch:
        """Copy the tensors to `device`, without waiting for it."""
        return self._map(lambda x: send(x, device), lambda packing: packing.to(device))

    def pin(self) -> Batch:
        """Copy the tensors to page-locked memory, which a GPU reads asynchronously."""
        return self._map(Tensor.pin_memory, Packing.pin)

    def _map(
        self, copy: Callable[[Tensor], Tensor], copy_packing: Callable[[Packing], Packing]
    ) -> Batch:
        return replace(
            self,
            src=copy(self.src),
            src_packing=copy_packing(self.src_packing),
            tgt_in=copy(self.tgt_in),
            tgt_out=copy(self.tgt_out),
            tgt_packing=copy_packing(self.tgt_packing),
        )


def make_batch(
    pairs: Sequence[tuple[Ids, Ids]],
    tokenizer: Tokenizers,
    decoder_inputs: Sequence[Ids] | None = None,
    *,
    round_to: int = 1,
    source_eos: bool = True,
) -> Batch:
    """Pack pairs of ids without special symbols.

    `decoder_inputs` replace the targets in `tgt_in`. With `round_to` above 1, each side gets 1 to
    `round_to` padding tokens, which make N and M multiples of it. Without `source_eos`, sources end
    with their last token.
    """
    sources = []
    targets = []
    for src, tgt in pairs:
        sources.append(src)
        targets.append(tgt)
    src_end = [tokenizer.src.eos_id] if source_eos else []
    src_lengths = [len(src) + len(src_end) for src in sources]
    tgt_lengths = [len(tgt) + 1 for tgt in targets]
    num_src_tokens = sum(src_lengths)
    num_tokens = sum(tgt_lengths)
    src_padding = round_to - num_src_tokens % round_to if round_to > 1 else 0
    tgt_padding = round_to - num_tokens % round_to if round_to > 1 else 0
    # padding becomes sentences no longer than the longest, the same number of them on both sides
    src_extra = _divide(src_padding, max(src_lengths))
    tgt_extra = _divide(tgt_padding, max(tgt_lengths))
    num_extra = max(len(src_extra), len(tgt_extra))
    src_extra += [0] * (num_extra - len(src_extra))
    tgt_extra += [0] * (num_extra - len(tgt_extra))
    bos = [tokenizer.tgt.bos_id]
    eos = [tokenizer.tgt.eos_id]
    src_pads = [tokenizer.src.pad_id] * src_padding
    tgt_pads = [tokenizer.tgt.pad_id] * tgt_padding
    return Batch(
        src=_concatenate(((src, src_end) for src in sources), src_pads),
        src_packing=pack(src_lengths + src_extra),
        tgt_in=_concatenate(((bos, ids) for ids in decoder_inputs or targets), tgt_pads),
        tgt_out=_concatenate(((tgt, eos) for tgt in targets), tgt_pads),
        tgt_packing=pack(tgt_lengths + tgt_extra),
        num_src_tokens=num_src_tokens,
        num_tokens=num_tokens,
        lengths=np.array([src_lengths, tgt_lengths]).T,
    )


def _divide(num_tokens: int, longest: int) -> list[int]:
    """Divide tokens into sentences of at most `longest`; return their lengths."""
    return [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]


def _concatenate(sentences: Iterable[tuple[Ids, Ids]], padding: Ids) -> Tensor:
    arrays = [*itertools.chain.from_iterable(sentences), padding]
    # unsafe, because numpy takes an empty list for floats
    return torch.from_numpy(np.concatenate(arrays, dtype=np.int64, casting="unsafe"))


class BatchMaker:
    """Turns rows of the training set into micro-batches, with subword sampling and noise."""

    def __init__(
        self,
        config: TrainConfig,
        data: ParallelData,
        tokenizer: Tokenizers,
        device: torch.device,
        noise: TokenNoise | None = None,
    ) -> None:
        """Make batches in host memory, pinned for a GPU `device`."""
        self.data = data
        self.lengths = data.lengths
        self.tokenizer = tokenizer
        self.noise = noise
        self.sampling: SubwordSampling | None = None
        if config.subword_sampling:
            self.sampling = SubwordSampling(tokenizer, config.subword_sampling, config.seed)
        self._source_eos = config.model.source_eos
        self._device_type = device.type

    def make(self, plan: Update, draw: int = 0) -> list[list[Batch]]:
        """Return the micro-batches of each batch of this rank, or of a filler if it has none.

        `draw` is the number that, with the seed and the row, determines sampling and noise.
        """
        batches = []
        for rows in plan.batches or [FILLER_ROWS]:
            micro_batches = []
            for micro_batch_rows in self.split(rows):
                micro_batches.append(self.make_micro_batch(micro_batch_rows, draw))
            batches.append(micro_batches)
        return batches

    def split(self, rows: Rows) -> list[Rows]:
        """Split a batch so that, on a CPU, the activations of a layer stay in its caches."""
        if self._device_type != "cpu":
            return [rows]
        count = -(-batch_cost(self.lengths[rows]) // MICRO_BATCH_TOKENS)
        return np.array_split(rows, min(count, len(rows)))

    def make_micro_batch(self, rows: Rows, draw: int = 0) -> Batch:
        """Return the pairs of `rows` as one batch."""
        pairs: list[tuple[Ids, Ids]] = []
        decoder_inputs: list[Ids] = []
        for row in rows.tolist():
            pair: tuple[Ids, Ids] = self.data[row]
            src, tgt = pair
            if self.sampling is not None:
                src, tgt = self.sampling(src, tgt, draw, row)
            decoder_input = tgt
            if self.noise is not None:
                src, decoder_input = self.noise(src, tgt, draw, row)
            pairs.append((src, tgt))
            decoder_inputs.append(decoder_input)
        batch = make_batch(
            pairs,
            self.tokenizer,
            decoder_inputs,
            round_to=ROWS_STEP,
            source_eos=self._source_eos,
        )
        return batch.pin() if self._device_type == "cuda" else batch
