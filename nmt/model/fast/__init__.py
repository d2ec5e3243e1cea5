"""Optimized drop-in replacements for the layers of `nmt.model`.

They add packing and a KV cache. `accelerate` gives a model these layers, which changes its results
by rounding only. Only this package uses private operators of torch, each of them with a public
operator as a fallback.
"""

# B sentences, S source length; N source tokens, M target tokens of packed sentences
# R live hypotheses of the search, one row each; H heads, D d_model, V vocab

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmt.model.attention import AttentionContext, AttentionWeights, MultiHeadAttention
from nmt.model.fast.attention import FastAttention
from nmt.model.fast.decode import DecodingState, StepDecoder
from nmt.model.fast.layers import (
    FastDropout,
    FastFeedForward,
    FastLinear,
    ReorderedWeights,
    frozen_linear,
    has_bfloat16_kernels,
    linear,
    reorder,
)
from nmt.model.fast.packing import PackedContext, Packing, pack
from nmt.model.fast.single import SingleState, SingleTransformer, can_decode_single
from nmt.model.fast.ssru import FastSsru, register_operators
from nmt.model.layers import FeedForward
from nmt.model.ssru import Ssru
from nmt.model.transformer import Transformer

_CPU_ENCODER_TOKENS = 1024  # about this many tokens are encoded at a time, to fit a CPU's caches


class FastTransformer(Transformer):
    """A `Transformer` that also takes packed sentences, and decodes step by step with a cache."""

    # class attributes, since `accelerate` does not call `__init__`
    # copies of the output matrix in oneDNN's layout, set by `prepare_for_inference`
    reordered_weights: ReorderedWeights | None = None
    step_decoder: StepDecoder | None = None  # the first `start` builds it for frozen weights
    # decodes a single sentence; the first `start_single` builds it
    single_transformer: SingleTransformer | None = None

    @property
    def drops_eos(self) -> bool:
        """Whether the encoder does not read the EOS of a source (`model.source_eos` is False)."""
        return not self.config.source_eos

    def encoded_lengths(self, src_lengths: Tensor) -> Tensor:
        """Return the numbers of tokens that the encoder reads; `src_lengths` (B,) include EOS."""
        return src_lengths - 1 if self.drops_eos else src_lengths

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | AttentionContext | Packing,
        tgt: Tensor,
        tgt_mask: Tensor | AttentionContext | Packing,
        attention_out: AttentionWeights | None = None,
    ) -> Tensor:
        """Return hidden states (M, D) that predict the token after each target token.

        If the masks are packings, `src` (N,) and `tgt` (M,) have the tokens of all sentences one
        after the other, and each sentence attends only to itself and its source. If they are
        boolean masks, see `Transformer.forward`.
        """
        if not isinstance(src_mask, Packing) or not isinstance(tgt_mask, Packing):
            return super().forward(src, src_mask, tgt, tgt_mask, attention_out)  # type: ignore[arg-type]
        src_context = PackedContext.of(src_mask, src_mask)
        memory = self.encode(src, src_context, attention_out)  # (N, D)
        tgt_context = PackedContext.of(tgt_mask, tgt_mask, is_causal=True)
        cross_context = PackedContext.of(tgt_mask, src_mask)
        return self.decode(tgt, tgt_context, memory, cross_context, attention_out)

    def start(self, src: Tensor, src_lengths: Tensor) -> DecodingState:
        """Encode source ids (B, S), padded on the right; `src_lengths` (B,) exclude the padding.

        Returns a decoding state with one empty hypothesis for each sentence.
        """
        memory, packing = self.encode_padded(src, src_lengths)
        return DecodingState(self._get_step_decoder(), memory, packing)

    def start_single(self, src: Tensor, src_lengths: Tensor) -> DecodingState | SingleState:
        """Like `start`, but faster, for one sentence (1, S) with few hypotheses.

        The state holds at most `MAX_ROWS` hypotheses. It supports neither `join` nor
        `attention_out`.
        """
        if not self._may_copy_weights() or not can_decode_single(self):
            return self.start(src, src_lengths)
        if self.single_transformer is None:
            weight = self.output_matrix
            example_input = weight[:1]  # (1, D), like hidden states
            weight, bias = reorder(self.reordered_weights, weight, self.output_bias, example_input)
            self.single_transformer = SingleTransformer(self, frozen_linear(weight, bias))
        num_tokens = int(self.encoded_lengths(src_lengths))
        return self.single_transformer.start(src[0, :num_tokens])

    def encode_padded(self, src: Tensor, src_lengths: Tensor) -> tuple[Tensor, Packing]:
        """Pack and encode padded source ids (B, S); return the memory (N, D) and its packing."""
        lengths = self.encoded_lengths(src_lengths)  # (B,)
        num_chunks = 1
        if src.device.type == "cpu":
            num_chunks += int(lengths.sum()) // _CPU_ENCODER_TOKENS
        src_chunks = src.chunk(num_chunks)
        length_chunks = lengths.chunk(num_chunks)
        memories = []
        for chunk_src, chunk_lengths in zip(src_chunks, length_chunks, strict=True):
            packing = pack(chunk_lengths.tolist()).to(src.device)
            chunk_src = chunk_src[:, : packing.longest]  # drop columns with only padding
            packed_src = packing.unpad(chunk_src)
            memories.append(self.encode(packed_src, PackedContext.of(packing, packing)))
        return torch.cat(memories), pack(lengths.tolist()).to(src.device)

    def step(
        self,
        tokens: Tensor,
        state: DecodingState,
        attention_out: AttentionWeights | None = None,
    ) -> Tensor:
        """Append a token to each live hypothesis, ids (R,); return hidden states (R, D).

        `attention_out` receives the weights of cross-attention (R, H, 1, S), padded with zeros.
        """
        num_rows = len(tokens)
        tokens = F.pad(tokens, (0, state.grid.num_padded_rows - num_rows))  # add filler rows
        state.advance()
        x = self.embed_target(tokens, state.positions)
        x = state.decoder.step(x, state, attention_out)
        return self.decoder_norm(x)[:num_rows]  # type: ignore[no-any-return]

    def join(self, state: DecodingState, src: Tensor, src_lengths: Tensor) -> None:
        """Add sentences to `state`, which has made at least one step; arguments as in `start`."""
        state.join(self.start(src, src_lengths))

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., D) to unnormalized log-probabilities (..., V)."""
        weight, bias = reorder(self.reordered_weights, self.output_matrix, self.output_bias, hidden)
        return linear(hidden, weight, bias)

    def _get_step_decoder(self) -> StepDecoder:
        """Return the decoder of a new state. All states share it if the weights are frozen."""
        if not self._may_copy_weights():
            return StepDecoder(self.decoder_layers, is_frozen=False)
        if self.step_decoder is None:
            self.step_decoder = StepDecoder(self.decoder_layers, is_frozen=True)
        return self.step_decoder

    def _may_copy_weights(self) -> bool:
        """Return whether decoding may use copies of the weights.

        This requires that `prepare_for_inference` was called for a float32 model on a CPU, and that
        neither gradients nor autocast need the original weights.
        """
        weight = self.embedding.weight
        return (
            self.reordered_weights is not None
            and weight.device.type == "cpu"
            and weight.dtype is torch.float32
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )


FAST_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    Transformer: FastTransformer,
    MultiHeadAttention: FastAttention,
    Ssru: FastSsru,
    FeedForward: FastFeedForward,
    nn.Linear: FastLinear,
    nn.Dropout: FastDropout,
}


def accelerate(model: Transformer) -> FastTransformer:
    """Replace the classes of `model` and its modules by `FAST_CLASSES`, in place; return the model.

    Parameters, buffers, hooks and the names in the state dict stay the same.
    """
    for module in model.modules():
        fast_class = FAST_CLASSES.get(type(module))
        if fast_class is not None:
            module.__class__ = fast_class
        if isinstance(module, FastSsru):
            register_operators()
    return cast(FastTransformer, model)


def prepare_for_inference(model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.dtype:
    """Prepare a model for inference: from now on its weights must not change.

    Linear layers may then keep copies of their weights in oneDNN's layout, made at their first
    use. With `dtype=bfloat16`, on CPUs with bfloat16 instructions, linear layers compute in
    bfloat16. Logits stay float32, since in bfloat16 many of them would be equal.

    Returns the dtype for autocast: `dtype`, or float32 if the linear layers convert their inputs to
    bfloat16 themselves.
    """
    device = next(model.parameters()).device
    layers_use_bfloat16 = (
        dtype is torch.bfloat16 and device.type == "cpu" and has_bfloat16_kernels()
    )
    for module in model.modules():
        if isinstance(module, FastTransformer):
            module.reordered_weights = ReorderedWeights()
            module.step_decoder = None
            module.single_transformer = None
        elif isinstance(module, FastLinear):
            module.reordered_weights = ReorderedWeights(
                torch.bfloat16 if layers_use_bfloat16 else torch.float32
            )
    if layers_use_bfloat16:
        return torch.float32
    return dtype
