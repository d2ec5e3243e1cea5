"""The encoder-decoder of "Attention Is All You Need" with one matrix for both embeddings and the
output; the source has one for itself where vocabularies are separate.

It knows token ids and lengths, but neither the tokenizer nor any loss or search.
"""

# B batch, S source, T target, D d_model, V vocab, H heads; R rows, the live hypotheses

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmt.config import ModelConfig
from nmt.model.attention import AttentionRecord
from nmt.model.cache import DecoderCache
from nmt.model.dropout import Dropout
from nmt.model.layers import LAYER_NORM_EPS, DecoderLayer, EncoderLayer, sinusoidal_positions
from nmt.model.products import Embedding
from nmt.options import Norm

NUM_POSITIONS = 512  # the table starts with so many rows and doubles when a longer sentence comes


@dataclass
class Memory:
    """The encoded source as the decoder needs it: `layers` holds keys and values (B, H, S, D/H) of
    each decoder layer.
    """

    hidden: Tensor  # (B, S, D)
    mask: Tensor | None  # (B, 1, 1, S), True = may be attended to; None when nothing is padded
    layers: list[tuple[Tensor, Tensor]]


class Transformer(nn.Module):
    """Encoder, decoder and the shared embedding.

    With `src_vocab_size` the source has a vocabulary, and an embedding, of its own.

    `encode`, `decode` and `step` are all that training and search call. Embeddings are scaled by
    sqrt(D) on their way in (section 3.4) and used unscaled, without a bias, on their way out. With
    `activation_checkpointing` training keeps what goes into each layer alone, and computes the
    inside of the layer again on the way back (Chen et al., 2016): same gradients, less memory.
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
        self.embedding = Embedding(vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        self.src_embedding: nn.Embedding | None = None
        if src_vocab_size is not None:
            self.src_embedding = nn.Embedding(src_vocab_size, config.d_model)
            nn.init.normal_(self.src_embedding.weight, std=config.d_model**-0.5)
        share = config.dropout if config.embedding_dropout is None else config.embedding_dropout
        self.dropout = Dropout(share)
        self.encoder_layers = nn.ModuleList(
            EncoderLayer(config) for _ in range(config.num_encoder_layers)
        )
        self.decoder_layers = nn.ModuleList(
            DecoderLayer(config) for _ in range(config.num_decoder_layers)
        )
        self.encoder_norm = self._final_norm()
        self.decoder_norm = self._final_norm()
        self.positions: Tensor
        # the table of positional encodings is not stored with the weights
        table = sinusoidal_positions(NUM_POSITIONS, self.config.d_model, self.config.positions)
        self.register_buffer("positions", table, persistent=False)

    def encode(self, src: Tensor, src_lengths: Tensor) -> Memory:
        """Encode source ids (B, S), right-padded, of `src_lengths` (B,) real tokens each."""
        is_real = torch.arange(src.size(1), device=src.device) < src_lengths.unsqueeze(1)  # (B, S)
        mask = None if _is_full(is_real) else is_real[:, None, None, :]  # (B, 1, 1, S)
        x = self._embed(src, self.src_embedding or self.embedding, start=0)  # (B, S, D)
        for layer in self.encoder_layers:
            x = self._run(layer, x, mask)
        hidden = self.encoder_norm(x)  # (B, S, D)
        layers = [
            layer.cross_attention.project_memory(hidden)  # type: ignore[operator, union-attr]
            for layer in self.decoder_layers
        ]
        return Memory(hidden, mask, layers)

    def decode(self, tgt: Tensor, memory: Memory, record: AttentionRecord | None = None) -> Tensor:
        """Decode target ids (B, T) to hidden states (B, T, D); position t sees targets up to t
        alone.

        Padding on the right needs no mask: no real position looks to its right. `record` names a
        layer and is given its attention to the source.
        """
        x = self._embed(tgt, self.embedding, start=0)  # (B, T, D)
        for i, layer in enumerate(self.decoder_layers):
            watched = record if record is not None and record.layer == i else None
            x = self._run(layer, x, memory.layers[i], memory.mask, watched)
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    def step(
        self, tokens: Tensor, cache: DecoderCache, record: AttentionRecord | None = None
    ) -> Tensor:
        """Decode the newest token of each live hypothesis, ids (R,), to hidden states (R, D), and
        add it to `cache`; `record` as in `decode`.
        """
        num_rows = len(tokens)
        tokens = F.pad(tokens, (0, cache.grid.num_collected - num_rows))  # (R, and some for speed)
        x = self._embed(tokens.unsqueeze(1), self.embedding, start=cache.num_positions)  # (R, 1, D)
        x = x.squeeze(1)  # (R, D)
        cache.add_position()
        for i, layer in enumerate(self.decoder_layers):
            watched = record if record is not None and record.layer == i else None
            x = layer.step(x, cache, i, watched)  # type: ignore[operator]
        return self.decoder_norm(x)[:num_rows]  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., D) to unnormalised log-probabilities (..., V)."""
        return self.embedding.logits(hidden)

    def forward(self, src: Tensor, src_lengths: Tensor, tgt_in: Tensor) -> Tensor:
        """Return hidden states (B, T, D) that predict what follows each of `tgt_in` (B, T)."""
        return self.decode(tgt_in, self.encode(src, src_lengths))

    def _run(self, layer: nn.Module, *inputs: Any) -> Tensor:
        if self.activation_checkpointing and self.training:
            return checkpoint(layer, *inputs, use_reentrant=False)  # type: ignore[no-any-return]
        return layer(*inputs)  # type: ignore[no-any-return]

    def _embed(self, ids: Tensor, embedding: nn.Embedding, *, start: int) -> Tensor:
        end = start + ids.size(1)
        positions = self.positions  # another thread may replace the table meanwhile
        if end > positions.size(0):
            table = sinusoidal_positions(2 * end, self.config.d_model, self.config.positions)
            positions = self.positions = table.to(positions)
        scaled = embedding(ids) * math.sqrt(self.config.d_model)  # (B, T, D)
        return self.dropout(scaled + positions[start:end])  # type: ignore[no-any-return]

    def _final_norm(self) -> nn.Module:
        if self.config.norm is Norm.post:
            return nn.Identity()
        return nn.LayerNorm(self.config.d_model, eps=LAYER_NORM_EPS)


def _is_full(is_real: Tensor) -> bool:
    """Say whether nothing is padded, where the answer costs no wait for the device."""
    is_cheap = is_real.device.type == "cpu" and not torch.compiler.is_compiling()
    return is_cheap and bool(is_real.all())


def alignment_layer(num_decoder_layers: int) -> int:
    """Return the decoder layer, from 0, whose attention to the source tells the word alignment.

    Of six layers or more the last but one aligns best (Garg et al., 2019); of two or three the
    last, as docs/search.md shows.
    """
    return num_decoder_layers - (2 if num_decoder_layers >= 6 else 1)


def num_parameters(model: nn.Module) -> int:
    """Count the parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
