"""Optimized drop-in replacements for the layers of `nmt.model.transformer`, with packing and a KV
cache.

`accelerate` gives a model these layers; results change by rounding only. Private operators
of torch are used in this package only, each with a public one to fall back on.
"""

# N source tokens, M target tokens of all sentences, one sentence after the other; R rows, the live
# hypotheses; D d_model, V vocab

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.model.fast.attention import FastAttention
from nmt.model.fast.decode import DecodingState, StepDecoder
from nmt.model.fast.layers import (
    FastDropout,
    FastFeedForward,
    FastLinear,
    Reordered,
    linear,
    multiplies_bfloat16,
    reorder,
)
from nmt.model.fast.packing import PackedContext, Packing, pack
from nmt.model.transformer import (
    AttentionContext,
    AttentionWeights,
    FeedForward,
    MultiHeadAttention,
    Transformer,
)

_ENCODED_TOKENS = 1024  # that a CPU encodes at a time, so that its caches hold their activations


class FastTransformer(Transformer):
    """A `Transformer` that also takes packed sentences, and decodes step by step with a cache."""

    reordered: Reordered | None = None  # of the output matrix, once weights are frozen
    step_decoder: StepDecoder | None = None  # with frozen weights, made by the first `start`

    @property
    def drops_eos(self) -> bool:
        """Whether the encoder does not read the EOS at the end of a source."""
        return not self.config.source_eos

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | AttentionContext | Packing,
        tgt: Tensor,
        tgt_mask: Tensor | AttentionContext | Packing,
        attention_out: AttentionWeights | None = None,
    ) -> Tensor:
        """Return hidden states (M, D) that predict the token after each target token.

        With a `Packing` as `src_mask` and `tgt_mask`, source ids are (N,) and target ids (M,), and
        a token attends to its own sentence, up to itself, and to its source. With boolean masks see
        `Transformer.forward`.
        """
        if not isinstance(src_mask, Packing) or not isinstance(tgt_mask, Packing):
            return super().forward(src, src_mask, tgt, tgt_mask, attention_out)  # type: ignore[arg-type]
        memory = self.encode(src, PackedContext.of(src_mask, src_mask), attention_out)  # (N, D)
        causal = PackedContext.of(tgt_mask, tgt_mask, is_causal=True)
        cross = PackedContext.of(tgt_mask, src_mask)
        return self.decode(tgt, causal, memory, cross, attention_out)

    def start(self, src: Tensor, src_lengths: Tensor) -> DecodingState:
        """Encode source ids (B, S), right-padded, of `src_lengths` (B,) real tokens each; return
        the state of decoding, with one hypothesis a sentence.
        """
        memory, packing = self.encode_padded(src, src_lengths)
        return DecodingState(self._choose_decoder(), memory, packing)

    def encode_padded(self, src: Tensor, src_lengths: Tensor) -> tuple[Tensor, Packing]:
        """Encode padded source ids (B, S) as packed sentences; return (N, D) and their packing."""
        lengths = src_lengths - int(self.drops_eos)  # (B,)
        is_cpu = src.device.type == "cpu"
        num_chunks = 1 + int(lengths.sum()) // _ENCODED_TOKENS if is_cpu else 1
        memory = []
        for ids, sizes in zip(src.chunk(num_chunks), lengths.chunk(num_chunks), strict=True):
            packing = pack(sizes.tolist()).to(src.device)
            tokens = packing.unpad(ids[:, : packing.longest])
            memory.append(self.encode(tokens, PackedContext.of(packing, packing)))
        return torch.cat(memory), pack(lengths.tolist()).to(src.device)

    def step(
        self, tokens: Tensor, state: DecodingState, attention_out: AttentionWeights | None = None
    ) -> Tensor:
        """Decode the newest token of each live hypothesis, ids (R,), to hidden states (R, D), and
        add it to `state`.

        `attention_out` receives the weights of cross-attention (R, H, 1, S or more, the rest 0).
        """
        num_rows = len(tokens)
        tokens = F.pad(tokens, (0, state.grid.num_collected - num_rows))  # (R, and some for speed)
        state.advance()
        x = self.embed(tokens, self.embedding, self.decoder_positions, state.positions)
        x = state.decoder.step(x, state, attention_out)
        return self.decoder_norm(x)[:num_rows]  # type: ignore[no-any-return]

    def join(self, state: DecodingState, src: Tensor, src_lengths: Tensor) -> None:
        """Add sentences to a state that has made a step at least; see `start`."""
        state.join(self.start(src, src_lengths))

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., D) to unnormalized log-probabilities (..., V)."""
        weight, bias = reorder(self.reordered, self.output_matrix, self.output_bias, hidden)
        return linear(hidden, weight, bias)

    def _choose_decoder(self) -> StepDecoder:
        """Return the decoder for steps; keep it where weights are frozen for it."""
        weight = self.embedding.weight
        is_float32_cpu = weight.device.type == "cpu" and weight.dtype is torch.float32
        is_frozen = self.reordered is not None and is_float32_cpu
        if not is_frozen or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return StepDecoder(self.decoder_layers, is_frozen=False)
        if self.step_decoder is None:
            self.step_decoder = StepDecoder(self.decoder_layers, is_frozen=True)
        return self.step_decoder


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
    """Let linear layers keep copies of their weights in the layout of oneDNN, made when first
    needed; the weights must not change after that.

    On CPUs with bfloat16 instructions, `dtype=bfloat16` runs the linear layers in bfloat16. Logits
    stay float32: in bfloat16 many would tie. Return the dtype for autocast: `dtype`, or float32
    where the layers convert by themselves.
    """
    (device,) = {parameter.device.type for parameter in model.parameters()}
    is_narrow = dtype is torch.bfloat16 and device == "cpu" and multiplies_bfloat16()
    for module in model.modules():
        if isinstance(module, FastTransformer):
            module.reordered = Reordered()
            module.step_decoder = None
        elif isinstance(module, FastLinear):
            module.reordered = Reordered(torch.bfloat16 if is_narrow else torch.float32)
    return torch.float32 if is_narrow else dtype
