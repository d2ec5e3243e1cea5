"""Fast kernels in the places of the plain ones of `nmt.model.transformer`, and what they need:
packed sentences without padding, a cache for decoding, and the choice of the best continuations.

`accelerate` is the one way in. What is computed stays the same, to rounding. Private operators of
torch are used in this package alone, each where torch has it, with a public one to fall back on.
"""

# N source tokens of all sentences, one sentence after the other; R rows, the live hypotheses

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.model.fast.attention import FastAttention
from nmt.model.fast.cache import DecoderCache
from nmt.model.fast.layers import (
    FastDropout,
    FastFeedForward,
    FastLinear,
    Reordered,
    linear,
    multiplies_bfloat16,
    reorder,
)
from nmt.model.fast.packing import PackedMask, Packing, pack
from nmt.model.fast.step import FrozenLayer, freeze_layer, step_through
from nmt.model.transformer import (
    AttentionRecord,
    DecoderLayer,
    FeedForward,
    Mask,
    MultiHeadAttention,
    Transformer,
)

_PIECE = 1024  # source tokens that a CPU encodes at a time, so that its cache holds them


class FastTransformer(Transformer):
    """A `Transformer` that also takes packed sentences, and decodes step by step with a cache."""

    reordered: Reordered | None = None  # of the output matrix, as in `FastLinear`
    layers: list[FrozenLayer] | None = None  # of the decoder, once a step asked for them

    @property
    def num_unread(self) -> int:
        """Tokens at the end of a source that the encoder does not read: EOS, or none."""
        return int(not self.config.source_eos)

    def forward(
        self,
        src: Tensor,
        sources: Mask,
        tgt: Tensor,
        targets: Mask,
        record: AttentionRecord | None = None,
    ) -> Tensor:
        """Return hidden states (M, D) that predict what follows each of the target ids.

        With a `Packing` each for `sources` and `targets`, source ids are (N,) and target ids (M,),
        and a token sees those before it in its own sentence, and its source. With boolean masks see
        `Transformer.forward`.
        """
        across = sources
        if isinstance(sources, Packing):
            across = PackedMask(targets, sources)
            sources = PackedMask(sources, sources)
            targets = PackedMask(targets, targets, is_causal=True)
        memory = self.encode(src, sources, record)  # (N, D)
        return self.decode(tgt, targets, memory, across, record)

    def start(self, src: Tensor, src_lengths: Tensor) -> DecoderCache:
        """Encode source ids (B, S), right-padded, of `src_lengths` (B,) real tokens each; return
        the state of decoding, with one hypothesis a sentence.
        """
        lengths = src_lengths - self.num_unread  # (B,)
        count = 1 + int(lengths.sum()) // _PIECE if src.device.type == "cpu" else 1
        memory = []
        for ids, sizes in zip(src.chunk(count), lengths.chunk(count), strict=True):
            some = pack(sizes.tolist()).to(src.device)
            ids = some.unpad(ids[:, : some.longest])  # (N / count,)
            memory.append(self.encode(ids, PackedMask(some, some)))
        return DecoderCache(torch.cat(memory), pack(lengths.tolist()).to(src.device))

    def step(
        self, tokens: Tensor, cache: DecoderCache, record: AttentionRecord | None = None
    ) -> Tensor:
        """Decode the newest token of each live hypothesis, ids (R,), to hidden states (R, D), and
        add it to `cache`; `record` is given weights (R, H, 1, S or more, with zeros at the end).
        """
        num_rows = len(tokens)
        tokens = F.pad(tokens, (0, cache.grid.num_collected - num_rows))  # (R, and some for speed)
        cache.add_position()
        layers = self.frozen_layers() if record is None and cache.sources else []
        if layers:
            x = self.embed(tokens, self.embedding, cache, self.decoder_positions)
            return self.decoder_norm(step_through(layers, x, cache))[:num_rows]  # type: ignore[no-any-return]
        return self.decode(tokens, cache, cache.memory, cache, record)[:num_rows]

    def frozen_layers(self) -> list[FrozenLayer]:
        """Return the layers of the decoder as `step_through` takes them, or none if it cannot."""
        weight = self.embedding.weight
        is_frozen = self.reordered is not None and not torch.is_grad_enabled()
        is_plain = weight.device.type == "cpu" and weight.dtype is torch.float32
        if not is_frozen or not is_plain or torch.is_autocast_enabled("cpu"):
            return []
        if self.layers is None:
            found = [freeze_layer(cast(DecoderLayer, layer)) for layer in self.decoder_layers]
            self.layers = [layer for layer in found if layer is not None]
        return self.layers if len(self.layers) == len(self.decoder_layers) else []

    def join(self, cache: DecoderCache, src: Tensor, src_lengths: Tensor) -> None:
        """Add sentences to a cache that has decoded a position at least; see `start`."""
        more = self.start(src, src_lengths)
        for module in cache.sources:
            more.add_source(module, *cast(FastAttention, module).read(more.memory))
        cache.join(more)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., D) to unnormalized log-probabilities (..., V)."""
        weight, bias = self.output_matrix, self.output_bias
        return linear(hidden, *reorder(self.reordered, weight, bias, hidden))

    def positions_of(self, ids: Tensor, mask: Mask, learned: Tensor | None = None) -> Tensor:
        """Return the encodings to add to the embeddings of `ids`: (N, D), or (D,) in decoding
        sentences that began together.
        """
        if isinstance(mask, PackedMask):
            packing = mask.queries
            table = self.position_table(packing.longest, learned)
            return table.index_select(0, packing.positions)
        if isinstance(mask, DecoderCache):
            table = self.position_table(mask.num_positions, learned)
            if mask.starts is None:
                return table[mask.num_positions - 1]
            return table.index_select(0, mask.ages())
        return super().positions_of(ids, mask, learned)


FAST: dict[type[nn.Module], type[nn.Module]] = {
    Transformer: FastTransformer,
    MultiHeadAttention: FastAttention,
    FeedForward: FastFeedForward,
    nn.Linear: FastLinear,
    nn.Dropout: FastDropout,
}


def accelerate(model: Transformer) -> FastTransformer:
    """Give `model` and its modules their fast classes, in place; return it.

    Parameters, buffers, hooks and the names in the state dict stay. The fast classes have no state
    of their own, so that several threads may use one model.
    """
    for module in model.modules():
        module.__class__ = FAST.get(type(module), type(module))
    return cast(FastTransformer, model)


def freeze(model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.dtype:
    """Let linear layers use copies of the weights in the library's own order, made when they are
    first needed; the weights must not change any more.

    With `dtype` bfloat16, on a CPU that multiplies it, copies and products of the layers are
    bfloat16, and all else float32; logits too, of which many would be equal. Returns the format
    that autocast is to give the products: `dtype`, or float32, since the layers see to it.
    """
    (device,) = {parameter.device.type for parameter in model.parameters()}
    is_narrow = dtype is torch.bfloat16 and device == "cpu" and multiplies_bfloat16()
    for module in model.modules():
        if isinstance(module, FastTransformer):
            module.reordered, module.layers = Reordered(), None
        elif isinstance(module, FastLinear):
            module.reordered = Reordered(dtype if is_narrow else torch.float32)
    return torch.float32 if is_narrow else dtype
