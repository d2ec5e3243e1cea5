"""Pack sentence pairs into micro-batches: flat sequences of tokens without padding in between."""

# B sentence pairs, N source tokens, M target tokens, L links of an alignment; lengths count EOS

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nmt.config import TrainConfig
from nmt.data import Lengths, Rows
from nmt.data.augment import TextAugmenter
from nmt.data.batch import MICRO_BATCH_TOKENS, Ids, batch_cost, divide_by_time
from nmt.data.batching import UpdatePlan
from nmt.data.binary import ParallelData
from nmt.data.noise import SubwordSampling, TokenNoise
from nmt.data.tokenizer import Tokenizers
from nmt.data.word_alignment import WordAligner
from nmt.data.word_links import link_pieces, mark_word_starts
from nmt.model.fast.layers import ROWS_STEP
from nmt.model.fast.packing import Packing, pack
from nmt.model.fast.transfer import to_device

FILLER_ROWS: Rows = np.zeros(1, dtype=np.int64)
"""The rows of a filler, a batch that consists of the first training pair.

Every rank has to run a batch in every update. If an update has no batch for a rank, the rank runs a
filler, whose loss and gradient are set to 0.
"""


@dataclass(frozen=True)
class Batch:
    """The input of one forward pass in training.

    Sentences are packed one after the other. `tgt_in` has BOS before each target, and `tgt_out` has
    EOS after each target. There may be padding at the end.
    """

    src: Tensor  # (N,)
    src_packing: Packing
    tgt_in: Tensor  # (M,)
    tgt_out: Tensor  # (M,)
    tgt_packing: Packing
    num_src_tokens: int  # number of source tokens without padding
    num_tokens: int  # number of target tokens without padding
    lengths: Lengths  # (B, 2), lengths of the pairs without padding
    alignment: Tensor | None = None
    """Links of tokens, (L, 3): pair, target position and source position."""

    def to(self, device: torch.device) -> Batch:
        """Copy the tensors to `device`, without waiting for it."""
        return self._copy(
            copy_tensor=lambda tensor: to_device(tensor, device),
            copy_packing=lambda packing: packing.to(device),
        )

    def pin(self) -> Batch:
        """Copy the tensors to page-locked memory, which a GPU reads asynchronously."""
        return self._copy(copy_tensor=Tensor.pin_memory, copy_packing=Packing.pin)

    def _copy(
        self, copy_tensor: Callable[[Tensor], Tensor], copy_packing: Callable[[Packing], Packing]
    ) -> Batch:
        alignment = self.alignment
        if alignment is not None:
            alignment = copy_tensor(alignment)
        return replace(
            self,
            src=copy_tensor(self.src),
            src_packing=copy_packing(self.src_packing),
            tgt_in=copy_tensor(self.tgt_in),
            tgt_out=copy_tensor(self.tgt_out),
            tgt_packing=copy_packing(self.tgt_packing),
            alignment=alignment,
        )


def make_batch(
    pairs: Sequence[tuple[Ids, Ids]],
    tokenizers: Tokenizers,
    decoder_inputs: Sequence[Ids] | None = None,
    *,
    round_to: int = 1,
    source_eos: bool = True,
) -> Batch:
    """Pack pairs of source and target ids, which have no BOS or EOS yet.

    Args:
        pairs: source and target ids of each pair.
        tokenizers: they define the ids of BOS, EOS and padding.
        decoder_inputs: replace the targets in `tgt_in`; they have the same lengths.
        round_to: if above 1, N and M become multiples of it: each side gets 1 to `round_to` padding
            tokens.
        source_eos: whether sources get EOS.
    """
    sources = [src for src, _ in pairs]
    targets = [tgt for _, tgt in pairs]
    src_suffix = [tokenizers.src.eos_id] if source_eos else []
    src_lengths = [len(src) + len(src_suffix) for src in sources]
    tgt_lengths = [len(tgt) + 1 for tgt in targets]
    num_src_tokens = sum(src_lengths)
    num_tokens = sum(tgt_lengths)
    num_src_pads = 0
    num_tgt_pads = 0
    if round_to > 1:
        num_src_pads = round_to - num_src_tokens % round_to
        num_tgt_pads = round_to - num_tokens % round_to
    # padding tokens form additional pairs, in which one side may be empty
    src_pad_lengths = _divide_padding(num_src_pads, max_length=max(src_lengths))
    tgt_pad_lengths = _divide_padding(num_tgt_pads, max_length=max(tgt_lengths))
    num_pad_pairs = max(len(src_pad_lengths), len(tgt_pad_lengths))
    src_pad_lengths += [0] * (num_pad_pairs - len(src_pad_lengths))
    tgt_pad_lengths += [0] * (num_pad_pairs - len(tgt_pad_lengths))
    bos = [tokenizers.tgt.bos_id]
    eos = [tokenizers.tgt.eos_id]
    src_pads = [tokenizers.src.pad_id] * num_src_pads
    tgt_pads = [tokenizers.tgt.pad_id] * num_tgt_pads
    if decoder_inputs is None:
        decoder_inputs = targets
    inputs_with_bos = [(bos, ids) for ids in decoder_inputs]
    targets_with_eos = [(tgt, eos) for tgt in targets]
    sources_with_eos = [(src, src_suffix) for src in sources]
    return Batch(
        src=_concatenate(sources_with_eos, src_pads),
        src_packing=pack(src_lengths + src_pad_lengths),
        tgt_in=_concatenate(inputs_with_bos, tgt_pads),
        tgt_out=_concatenate(targets_with_eos, tgt_pads),
        tgt_packing=pack(tgt_lengths + tgt_pad_lengths),
        num_src_tokens=num_src_tokens,
        num_tokens=num_tokens,
        lengths=np.array([src_lengths, tgt_lengths]).T,  # (B, 2)
    )


def _divide_padding(num_pads: int, *, max_length: int) -> list[int]:
    """Return lengths of at most `max_length` that add up to `num_pads`."""
    lengths = [max_length] * (num_pads // max_length)
    remainder = num_pads % max_length
    if remainder:
        lengths.append(remainder)
    return lengths


def _concatenate(sentences: Iterable[tuple[Ids, Ids]], pads: Ids) -> Tensor:
    """Concatenate the ids of sentences, and then `pads`. Each sentence consists of two id lists."""
    arrays = list(itertools.chain.from_iterable(sentences))
    arrays.append(pads)
    # an empty list becomes a float array, which only casting="unsafe" converts to integers
    return torch.from_numpy(np.concatenate(arrays, dtype=np.int64, casting="unsafe"))


class ChangedPair(NamedTuple):
    """A training pair after all random changes, without BOS and EOS."""

    row: int  # index of the pair in the training set
    src: Ids
    tgt: Ids
    decoder_input: Ids  # replaces `tgt` in the input of the decoder, and has its length
    links: Any  # links of words (L, 2) from the data; None if unknown


class BatchMaker:
    """Makes micro-batches from rows of the training set, with subword sampling and noise."""

    def __init__(
        self,
        config: TrainConfig,
        data: ParallelData,
        tokenizers: Tokenizers,
        device: torch.device,
        noise: TokenNoise | None = None,
        aligner: WordAligner | None = None,
    ) -> None:
        """Make batches for `device`. They are in host memory, page-locked if `device` is a GPU.

        With `guided_alignment`, batches have the alignment of their pairs from the data. `aligner`
        computes the alignment of pairs that augmentation or noise has changed, and of all pairs if
        the data has no alignments. Without an aligner, these pairs have no links.
        """
        self.data = data
        self.lengths = data.lengths
        self.tokenizers = tokenizers
        self.noise = noise
        self.aligner = aligner
        self.needs_alignment = config.guided_alignment > 0
        # (V,) each: whether a token starts a word
        self.src_starts = mark_word_starts(tokenizers.src)
        self.tgt_starts = mark_word_starts(tokenizers.tgt)
        self.sampling: SubwordSampling | None = None
        if config.subword_sampling:
            self.sampling = SubwordSampling(tokenizers, config.subword_sampling, config.seed)
        self._source_eos = config.model.source_eos
        self._device_type = device.type

    def make_batches(
        self, plan: UpdatePlan, update_id: int = 0, augment: TextAugmenter | None = None
    ) -> list[list[Batch]]:
        """Return the micro-batches of each batch in `plan`, or of one filler if there is no batch.

        `update_id` is part of the seed of augmentation, sampling and noise, and must differ between
        updates.
        """
        row_batches = plan.batches
        if not row_batches:
            row_batches = [FILLER_ROWS]
        batches = []
        for rows in row_batches:
            pairs = self.change_pairs(rows, update_id, augment)
            lengths = np.array([(len(pair.src) + 1, len(pair.tgt) + 1) for pair in pairs])
            micro_batches = []
            for indices in self._divide(lengths, self.lengths[rows]):
                micro_batch_pairs = [pairs[i] for i in indices]
                micro_batches.append(self.pack_pairs(micro_batch_pairs))
            batches.append(micro_batches)
        return batches

    def split_rows(self, rows: Rows) -> list[Rows]:
        """Divide a batch into micro-batches, by the lengths before random changes."""
        lengths = self.lengths[rows]
        return [rows[indices] for indices in self._divide(lengths, lengths)]

    def _divide(self, lengths: Lengths, planned_lengths: Lengths) -> list[Rows]:
        """Return the indices of the pairs of each micro-batch.

        On a CPU, micro-batches are so small that the activations of a layer stay in the CPU's
        caches. On other devices, the batch is the only micro-batch.

        Args:
            lengths: lengths of the pairs of a batch (B, 2).
            planned_lengths: their lengths before random changes, by which the batch is sorted.
        """
        indices = np.arange(len(lengths))
        if self._device_type != "cpu":
            return [indices]
        if not np.array_equal(lengths, planned_lengths):
            # Random changes may have made a pair much longer than its neighbors, so the pairs are
            # grouped by length. The limit is larger, since each micro-batch has a fixed overhead.
            return divide_by_time(lengths, 3 * MICRO_BATCH_TOKENS // 2)
        num_micro_batches = math.ceil(batch_cost(lengths) / MICRO_BATCH_TOKENS)
        return np.array_split(indices, min(num_micro_batches, len(indices)))

    def make_micro_batch(
        self, rows: Rows, update_id: int = 0, augment: TextAugmenter | None = None
    ) -> Batch:
        """Pack the pairs of `rows` into one batch, after all random changes."""
        return self.pack_pairs(self.change_pairs(rows, update_id, augment))

    def change_pairs(
        self, rows: Rows, update_id: int = 0, augment: TextAugmenter | None = None
    ) -> list[ChangedPair]:
        """Return the pairs of `rows` after augmentation, subword sampling and noise."""
        row_list = rows.tolist()
        original_pairs: list[tuple[Ids, Ids]] = [self.data[row] for row in row_list]
        augmented_pairs = original_pairs
        if augment is not None:
            augmented_pairs = augment(original_pairs, update_id, row_list)
        changed_pairs = []
        for i, row in enumerate(row_list):
            src, tgt = augmented_pairs[i]
            links = None
            # the augmenter returns the same object for a pair that it does not change
            if self.needs_alignment and augmented_pairs[i] is original_pairs[i]:
                links = self.data.alignment(row)
            if self.sampling is not None:
                src, tgt = self.sampling(src, tgt, update_id, row)
            decoder_input = tgt
            if self.noise is not None:
                noisy_src, decoder_input = self.noise(src, tgt, update_id, row)
                if not np.array_equal(noisy_src, src):
                    links = None
                src = noisy_src
            changed_pairs.append(ChangedPair(row, src, tgt, decoder_input, links))
        return changed_pairs

    def pack_pairs(self, pairs: Sequence[ChangedPair]) -> Batch:
        """Pack pairs into one batch."""
        id_pairs = [(pair.src, pair.tgt) for pair in pairs]
        batch = make_batch(
            id_pairs,
            self.tokenizers,
            [pair.decoder_input for pair in pairs],
            round_to=ROWS_STEP,
            source_eos=self._source_eos,
        )
        if self.needs_alignment:
            token_links = self._align(id_pairs, [pair.links for pair in pairs])
            batch = replace(batch, alignment=torch.from_numpy(token_links))
        return batch.pin() if self._device_type == "cuda" else batch

    def _align(self, pairs: Sequence[tuple[Ids, Ids]], links_by_pair: Sequence[Any]) -> Any:
        """Return the links of the tokens of pairs, (L, 3): pair, target and source position.

        `links_by_pair` has the links of words in each pair, or None if `aligner` has to align the
        pair. Without an aligner, such a pair gets no links.
        """
        links = [np.empty((0, 3), dtype=np.int64)]
        unaligned = []  # indices of pairs without links of words
        for i, word_links in enumerate(links_by_pair):
            if word_links is None:
                unaligned.append(i)
                continue
            src, tgt = pairs[i]
            positions = link_pieces(word_links, self.src_starts[src], self.tgt_starts[tgt])
            links.append(np.insert(positions, 0, i, axis=1))  # column 0 is the pair
        if unaligned and self.aligner is not None:
            unaligned_pairs = [pairs[i] for i in unaligned]
            has_joint_ids = self.tokenizers.src_vocab_size is None  # None: a joint vocabulary
            computed_links = self.aligner.align(unaligned_pairs, has_joint_ids=has_joint_ids)
            # column 0 has indices in `unaligned_pairs`; replace them by the indices in `pairs`
            pair_indices = np.array(unaligned)
            computed_links[:, 0] = pair_indices[computed_links[:, 0]]
            links.append(computed_links)
        return np.concatenate(links)
