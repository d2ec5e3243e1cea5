"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017) on one page of plain torch.

It goes from small to large: masks, positions, attention, feed-forward, a layer of the encoder and
of the decoder, the model. Sections, equations, figures and tables are those of the paper.

    model = Transformer(ModelConfig(), vocab_size=8000)
    hidden = model(src, padding_mask(src_lengths, S), tgt, causal_mask(T))  # (B, T, D)
    logits = model.logits(hidden)  # (B, T, V)

The model knows token ids and masks, but neither the tokenizer nor any loss or search. Training and
translation run it with the kernels of `nmt.model.fast`, which tests compare with this page.
"""

# B batch, S source length, T target length (in attention: T queries, S keys)
# D d_model, H heads, D/H the dimensions of a head (d_k = d_v in the paper), F d_ff, V vocab

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmt.config import Activation, ModelConfig, Norm, Positions
from nmt.model import variants
from nmt.model.variants import Relation, new_norm

NUM_POSITIONS = 512  # rows of the first table of positions; it grows when a longer sentence comes

Mask = Any
"""What may be attended to: a boolean tensor that broadcasts to (B, H, T, S), True = may be attended
to. The layers pass it on to attention as it is; `nmt.model.fast` has masks of other kinds.
"""

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.relu: torch.relu,
    Activation.gelu: F.gelu,
    Activation.silu: F.silu,
    Activation.swiglu: F.silu,  # of the gate
}

AttentionRecord = dict[nn.Module, Tensor | None]
"""Its keys are the `MultiHeadAttention` modules to watch; a forward pass adds their weights, the
softmax (B, H, T, S) before dropout.
"""


# --- masks (section 3.2.3)


def padding_mask(lengths: Tensor, width: int) -> Tensor:
    """Show the tokens of sentences of `lengths` (B,), padded on the right to `width`, (B, 1, 1, S).

    An empty sentence shows its first position, since a softmax over nothing is not a number.
    """
    visible = torch.arange(width, device=lengths.device) < lengths.clamp(min=1)[:, None]  # (B, S)
    return visible[:, None, None, :]  # (B, 1, 1, S)


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """Show each position itself and those before it, (T, T), to "prevent leftward information flow
    in the decoder". Padding on the right is hidden from all real tokens, too.
    """
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


# --- positions (section 3.5)


def sinusoidal_positions(length: int, d_model: int, layout: Positions, offset: int = 0) -> Tensor:
    """Compute the encodings (length, D) of the positions from `offset` on, in float32.

    `sinusoidal_concat` and `sinusoidal_halves` have all sines first, then the cosines; the former
    over the D/2 wavelengths of Tensor2Tensor, which reach 2 pi * 10000 with the last.
    """
    half = d_model // 2
    pos = torch.arange(offset, offset + length, dtype=torch.float64).unsqueeze(1)  # (length, 1)
    i = torch.arange(half, dtype=torch.float64)  # (D/2,)
    if layout is Positions.sinusoidal_concat:
        angle = pos * torch.exp(-math.log(10000.0) * i / max(half - 1, 1))  # (length, D/2)
    else:
        # PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) the cosine
        angle = pos * torch.exp(-math.log(10000.0) * 2 * i / d_model)  # (length, D/2)
    parts = [angle.sin(), angle.cos()]
    is_paper = layout is Positions.sinusoidal
    table = torch.stack(parts, dim=-1).flatten(1) if is_paper else torch.cat(parts, dim=-1)
    return table.float()  # (length, D)


# --- attention (section 3.2, figure 2)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, dropout: nn.Module | None = None,
    relation: Relation | None = None, places: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute scaled dot-product attention (section 3.2.1, left half of figure 2).

    Args:
        queries: (B, H, T, D/H).
        keys: (B, H, S, D/H).
        values: (B, H, S, D/H).
        mask: boolean, broadcasts to (B, H, T, S), True = may be attended to.
        dropout: applied to the weights.
        relation: adds what follows from the distances of keys, with `places`.
        places: the distances, (T, S) or (B, T, S).

    Returns the attended values (B, H, T, D/H) and the weights (B, H, T, S), at least float32.
    """
    # equation 1: Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V
    logits = queries @ keys.transpose(-2, -1) / math.sqrt(queries.size(-1))  # (B, H, T, S)
    if relation is not None and places is not None:
        logits = logits + relation.logits(queries, places)
    logits = logits.masked_fill(~mask, float("-inf"))
    dtype = torch.promote_types(logits.dtype, torch.float32)
    weights = torch.softmax(logits, dim=-1, dtype=dtype)  # (B, H, T, S)
    dropped = (weights if dropout is None else dropout(weights)).to(values.dtype)
    heads = dropped @ values  # (B, H, T, D/H)
    if relation is not None and places is not None:
        heads = heads + relation.heads(dropped, places)
    return heads, weights  # (B, H, T, D/H), (B, H, T, S)


class MultiHeadAttention(nn.Module):
    """Attention by `num_heads` heads side by side (section 3.2.2, right half of figure 2):
    MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V
    W_i^V).

    The W_i^Q of all heads are one D x D matrix, and so are the W_i^K and the W_i^V. These three are
    the blocks of `in_projection`; those of keys and values are smaller with fewer `num_kv_heads`.
    Attention within a sentence (`is_self`) may know of distances. Dropout is of the weights.
    """

    def __init__(self, config: ModelConfig, *, is_self: bool) -> None:
        super().__init__()
        d_model, self.num_heads = config.d_model, config.num_heads
        self.head_size = d_model // self.num_heads
        kv_size = (config.num_kv_heads or self.num_heads) * self.head_size
        self.sizes = [d_model, kv_size, kv_size]  # of queries, keys and values of all heads
        self.is_rotary = is_self and config.positions is Positions.rotary
        self.relation = variants.new_relation(config) if is_self else None
        self.query_norm = variants.new_head_norm(config) if is_self else None
        self.key_norm = variants.new_head_norm(config) if is_self else None
        self.dropout = nn.Dropout(config.attention_dropout)
        self.in_projection = nn.Linear(d_model, sum(self.sizes))
        self.out_projection = nn.Linear(d_model, d_model)
        # over the 3D x D matrix: each block has 1 / sqrt(2) of its own bound, and learns faster
        nn.init.xavier_uniform_(self.in_projection.weight)
        nn.init.xavier_uniform_(self.out_projection.weight)
        nn.init.zeros_(self.in_projection.bias)
        nn.init.zeros_(self.out_projection.bias)

    def forward(
        self, x: Tensor, memory: Tensor, mask: Mask, record: AttentionRecord | None = None
    ) -> Tensor:
        """Let `x` (B, T, D) attend to `memory` (B, S, D), which is `x` in self-attention."""
        weights = torch.split(self.in_projection.weight, self.sizes)
        biases = torch.split(self.in_projection.bias, self.sizes)
        queries, keys, values = (
            self._split_heads(F.linear(y, weight, bias))
            for y, weight, bias in zip((x, memory, memory), weights, biases, strict=True)
        )  # (B, H, T, D/H), 2 x (B, H or fewer, S, D/H)
        places = variants.distances(x.size(1), memory.size(1), x.device)  # (T, S)
        queries, keys = self.place(queries, keys, -places[:, 0])  # the same positions
        keys, values = (variants.repeat_heads(y, self.num_heads, dim=1) for y in (keys, values))
        heads, shares = attend(
            queries, keys, values, mask, self.dropout, self.relation, places
        )  # (B, H, T, D/H)
        if record is not None and self in record:
            record[self] = shares
        joined = heads.transpose(1, 2).flatten(2)  # (B, T, D)
        return self.out_projection(joined)  # type: ignore[no-any-return]

    def place(self, queries: Tensor, keys: Tensor, positions: Tensor | None) -> list[Tensor]:
        """Normalize queries and keys (..., D/H), and turn them by `positions` (...), if set."""
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        if not self.is_rotary or positions is None:
            return [queries, keys]
        return [variants.rotate(queries, positions), variants.rotate(keys, positions)]

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)  # (B, H, T, D/H)


# --- layers (section 3.1, figure 1)


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W1 + b1) W2 + b2 at every position (section 3.3, equation 2); `dropout` is
    applied after the max, for which another `activation` may stand.

    With SwiGLU that is silu(x Wg + bg) * (x W1 + b1) (Shazeer, 2020, equation 6, with biases); Wg,
    the `gate`, is a matrix of its own.
    """

    def __init__(
        self, d_model: int, d_ff: int, dropout: float, activation: Activation = Activation.relu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        # as torch draws them: with d_ff = 4 d_model the outer weights have 0.46 of Xavier's bound
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)
        is_gated = activation is Activation.swiglu
        self.gate = nn.Linear(d_model, d_ff) if is_gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        hidden = ACTIVATIONS[self.activation](self.inner(x) if self.gate is None else self.gate(x))
        if self.gate is not None:
            hidden = hidden * self.inner(x)  # (..., F)
        return self.outer(self.dropout(hidden))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """What both kinds of layers share: sub-layers, each with dropout, residual sum and norm.

    Post-norm is LayerNorm(x + Sublayer(x)) (section 3.1). Pre-norm is x + Sublayer(LayerNorm(x)),
    as in the Annotated Transformer; it trains without warm-up (Xiong et al., 2020) and in deep
    stacks.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_post_norm = config.norm is Norm.post
        self.dropout = nn.Dropout(config.dropout)
        self.self_attention = MultiHeadAttention(config, is_self=True)
        self.self_attention_norm = new_norm(config.norm_layer, config.d_model)
        sizes = (config.d_model, config.d_ff, config.activation_dropout)
        self.feed_forward = FeedForward(*sizes, config.activation)
        self.feed_forward_norm = new_norm(config.norm_layer, config.d_model)

    def before(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return what a sub-layer reads of `x`."""
        return x if self.is_post_norm else norm(x)

    def after(self, norm: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Add `y`, which a sub-layer made of `x`, with residual dropout (section 5.4)."""
        x = x + self.dropout(y)
        return norm(x) if self.is_post_norm else x


class EncoderLayer(Layer):
    """Self-attention, then feed-forward (left half of figure 1)."""

    def forward(self, x: Tensor, sources: Mask, record: AttentionRecord | None = None) -> Tensor:
        """Map (B, S, D) to (B, S, D)."""
        y = self.before(self.self_attention_norm, x)
        y = self.self_attention(y, y, sources, record)
        x = self.after(self.self_attention_norm, x, y)
        y = self.feed_forward(self.before(self.feed_forward_norm, x))
        return self.after(self.feed_forward_norm, x, y)


class DecoderLayer(Layer):
    """Causal self-attention, attention to the source, feed-forward (right half of figure 1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.cross_attention = MultiHeadAttention(config, is_self=False)
        self.cross_attention_norm = new_norm(config.norm_layer, config.d_model)

    def forward(
        self,
        x: Tensor,
        targets: Mask,
        memory: Tensor,
        sources: Mask,
        record: AttentionRecord | None = None,
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D), given the encoder's output `memory` (B, S, D)."""
        y = self.before(self.self_attention_norm, x)
        y = self.self_attention(y, y, targets, record)
        x = self.after(self.self_attention_norm, x, y)
        y = self.before(self.cross_attention_norm, x)
        y = self.cross_attention(y, memory, sources, record)  # "encoder-decoder attention", 3.2.3
        x = self.after(self.cross_attention_norm, x, y)
        y = self.feed_forward(self.before(self.feed_forward_norm, x))
        return self.after(self.feed_forward_norm, x, y)


# --- the model (figure 1)


class Transformer(nn.Module):
    """Encoder, decoder and the embedding that both share with the output (section 3.4).

    With `src_vocab_size` the source has a vocabulary, and an embedding, of its own. With
    `activation_checkpointing` training keeps only the inputs of layers and computes the rest again
    in the backward pass (Chen et al., 2016): same gradients, less memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        src_vocab_size: int | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        d_model = config.d_model
        self.embedding_scale = math.sqrt(d_model) if config.scale_embedding else 1.0
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.src_embedding: nn.Embedding | None = None
        if src_vocab_size is not None:
            self.src_embedding = nn.Embedding(src_vocab_size, d_model)
            nn.init.normal_(self.src_embedding.weight, std=d_model**-0.5)
        self.output_weight: nn.Parameter | None = None  # where it is not the embedding
        if not config.tied_output:
            self.output_weight = nn.Parameter(torch.empty(vocab_size, d_model))
            nn.init.normal_(self.output_weight, std=d_model**-0.5)
        self.output_bias: nn.Parameter | None = None
        if config.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(vocab_size))
        share = config.dropout if config.embedding_dropout is None else config.embedding_dropout
        self.dropout = nn.Dropout(share)
        self.encoder_layers = nn.ModuleList(
            EncoderLayer(config) for _ in range(config.num_encoder_layers)
        )
        self.decoder_layers = nn.ModuleList(
            DecoderLayer(config) for _ in range(config.num_decoder_layers)
        )
        self.encoder_positions = variants.new_positions(config)  # (P, D) or None
        self.decoder_positions = variants.new_positions(config)
        # in pre-norm nothing has normalized the sums of the last layer yet
        norms = [new_norm(config.norm_layer, d_model) for _ in range(2)]
        is_pre_norm = config.norm is Norm.pre
        self.encoder_norm = norms[0] if is_pre_norm else nn.Identity()
        self.decoder_norm = norms[1] if is_pre_norm else nn.Identity()
        self.positions: Tensor
        # not stored with the weights
        table = self.new_positions(NUM_POSITIONS)
        self.register_buffer("positions", table, persistent=False)

    def forward(
        self,
        src: Tensor,
        sources: Mask,
        tgt: Tensor,
        targets: Mask,
        record: AttentionRecord | None = None,
    ) -> Tensor:
        """Return hidden states (B, T, D) that predict what follows each of the target ids.

        Args:
            src: source ids (B, S).
            sources: source tokens that may be attended to, see `padding_mask`.
            tgt: target ids (B, T), the first is BOS.
            targets: what each target token may attend to, see `causal_mask`.
            record: is given the attention weights of the modules that are its keys.
        """
        memory = self.encode(src, sources, record)  # (B, S, D)
        return self.decode(tgt, targets, memory, sources, record)

    def encode(self, src: Tensor, sources: Mask, record: AttentionRecord | None = None) -> Tensor:
        """Map source ids (B, S) to the encoder's output (B, S, D)."""
        embedding = self.src_embedding or self.embedding
        x = self.embed(src, embedding, sources, self.encoder_positions)  # (B, S, D)
        for layer in self.encoder_layers:
            x = self.runner(layer)(x, sources, record)
        return self.encoder_norm(x)  # type: ignore[no-any-return]

    def decode(
        self,
        tgt: Tensor,
        targets: Mask,
        memory: Tensor,
        sources: Mask,
        record: AttentionRecord | None = None,
    ) -> Tensor:
        """Map target ids (B, T) to hidden states (B, T, D), given the encoder's output `memory`."""
        x = self.embed(tgt, self.embedding, targets, self.decoder_positions)  # (B, T, D)
        for layer in self.decoder_layers:
            x = self.runner(layer)(x, targets, memory, sources, record)
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    @property
    def output_matrix(self) -> Tensor:
        """The output layer (V, D): the embedding of the target (section 3.4), or one of its own."""
        return self.embedding.weight if self.output_weight is None else self.output_weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., D) to unnormalized log-probabilities (..., V); a tied output is
        unscaled (section 3.4).
        """
        return F.linear(hidden, self.output_matrix, self.output_bias)

    def embed(
        self, ids: Tensor, embedding: nn.Embedding, mask: Mask, learned: Tensor | None = None
    ) -> Tensor:
        """Map ids (B, T) to (B, T, D): embeddings times sqrt(d_model) (section 3.4) plus positions
        (section 3.5), the `learned` ones or sines, with dropout on the sum (section 5.4).
        """
        x = embedding(ids) * self.embedding_scale
        if self.config.positions.is_added:
            x = x + self.positions_of(ids, mask, learned)
        return self.dropout(x)  # type: ignore[no-any-return]

    def positions_of(self, ids: Tensor, mask: Mask, learned: Tensor | None = None) -> Tensor:
        """Return the encodings (T, D) of the positions of `ids` (B, T); only masks of
        `nmt.model.fast` say where tokens are.
        """
        return self.position_table(ids.size(1), learned)[: ids.size(1)]

    def position_table(self, length: int, learned: Tensor | None = None) -> Tensor:
        """Return the encodings (at least `length`, D)."""
        if learned is not None:
            return variants.lengthen(learned, length)
        positions = self.positions  # another thread may replace the table meanwhile
        if length > positions.size(0):
            positions = self.positions = self.new_positions(2 * length).to(positions)
        return positions

    def new_positions(self, length: int) -> Tensor:
        """Compute the sines (length, D) of the first positions; none for other positions."""
        layout, offset = self.config.positions, self.config.position_offset
        length = length if layout.is_sinusoidal else 0
        return sinusoidal_positions(length, self.config.d_model, layout, offset)

    def runner(self, layer: nn.Module) -> Callable[..., Tensor]:
        """Return what runs `layer`: the layer, or its checkpoint."""
        if self.activation_checkpointing and self.training:
            return functools.partial(checkpoint, layer, use_reentrant=False)
        return layer


def alignment_layer(num_decoder_layers: int) -> int:
    """Return the decoder layer, from 0, whose attention to the source gives the word alignment.

    Of six layers or more the last but one aligns best (Garg et al., 2019); of two or three the
    last, as docs/search.md shows.
    """
    return num_decoder_layers - (2 if num_decoder_layers >= 6 else 1)


def num_parameters(model: nn.Module) -> int:
    """Count the parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
