"""The encoder-decoder of "Attention Is All You Need" with one matrix for both embeddings and the
output; the source has one for itself where vocabularies are separate.

It knows token ids and lengths, but neither the tokenizer nor any loss or search.
"""

# B sentences, S source, D d_model, V vocab, H heads; R rows, the live hypotheses
# N source tokens and M target tokens of all sentences, one sentence after the other

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmt.config import ModelConfig, Norm
from nmt.model.attention import AttentionRecord
from nmt.model.cache import DecoderCache
from nmt.model.dropout import Dropout
from nmt.model.layers import LAYER_NORM_EPS, DecoderLayer, EncoderLayer, sinusoidal_positions
from nmt.model.packing import Packing, pack
from nmt.model.products import Embedding

NUM_POSITIONS = 512  # the table starts with so many rows and doubles when a longer sentence comes


@dataclass
class Memory:
    """The encoded source as decoding needs it: `layers` holds keys and values (B, H, S, D/H) of
    each decoder layer.
    """

    mask: Tensor | None  # (B, 1, 1, S), True = may be attended to; None when nothing is padded
    layers: list[tuple[Tensor, Tensor]]


class Transformer(nn.Module):
    """Encoder, decoder and the shared embedding.

    With `src_vocab_size` the source has a vocabulary, and an embedding, of its own.

    Training and scoring call it as a whole; search calls `encode` and `step`. Embeddings are
    scaled by sqrt(D) on their way in (section 3.4) and used unscaled, without a bias, on their way
    out. With `activation_checkpointing` training keeps what goes into each layer alone, and
    computes the inside of the layer again on the way back (Chen et al., 2016): same gradients, less
    memory.
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

    def forward(
        self,
        src: Tensor,
        sources: Packing,
        tgt: Tensor,
        targets: Packing,
        record: AttentionRecord | None = None,
    ) -> Tensor:
        """Return hidden states (M, D) that predict what follows each of the target ids `tgt` (M,).

        `src` are source ids (N,); the packings say which tokens form a sentence. A token sees those
        before it in its own sentence, and its source. `record` names a layer and is given its
        attention to the source.
        """
        memory = self._encode(src, sources)  # (N, D)
        x = self._embed(tgt, self.embedding, self._positions_of(targets))  # (M, D)
        for i, layer in enumerate(self.decoder_layers):
            watched = record if record is not None and record.layer == i else None
            x = self._run(layer, x, targets, memory, sources, watched)
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    def encode(self, src: Tensor, src_lengths: Tensor) -> Memory:
        """Encode source ids (B, S), right-padded, of `src_lengths` (B,) real tokens each."""
        sources = pack(src_lengths.tolist()).to(src.device)
        hidden = self._encode(sources.unpad(src[:, : sources.longest]), sources)  # (N, D)
        layers = [
            layer.cross_attention.project_memory(hidden, sources)  # type: ignore[operator, union-attr]
            for layer in self.decoder_layers
        ]
        return Memory(None if sources.is_full else sources.mask, layers)

    def _encode(self, src: Tensor, sources: Packing) -> Tensor:
        embedding = self.src_embedding or self.embedding
        x = self._embed(src, embedding, self._positions_of(sources))  # (N, D)
        for layer in self.encoder_layers:
            x = self._run(layer, x, sources)
        return self.encoder_norm(x)  # type: ignore[no-any-return]

    def step(
        self, tokens: Tensor, cache: DecoderCache, record: AttentionRecord | None = None
    ) -> Tensor:
        """Decode the newest token of each live hypothesis, ids (R,), to hidden states (R, D), and
        add it to `cache`; `record` as in `forward`.
        """
        num_rows, place = len(tokens), cache.num_positions
        tokens = F.pad(tokens, (0, cache.grid.num_collected - num_rows))  # (R, and some for speed)
        x = self._embed(tokens, self.embedding, self._position_table(place + 1)[place])  # (R, D)
        cache.add_position()
        for i, layer in enumerate(self.decoder_layers):
            watched = record if record is not None and record.layer == i else None
            x = layer.step(x, cache, i, watched)  # type: ignore[operator]
        return self.decoder_norm(x)[:num_rows]  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., D) to unnormalised log-probabilities (..., V)."""
        return self.embedding.logits(hidden)

    def _run(self, layer: nn.Module, *inputs: Any) -> Tensor:
        if self.activation_checkpointing and self.training:
            return checkpoint(layer, *inputs, use_reentrant=False)  # type: ignore[no-any-return]
        return layer(*inputs)  # type: ignore[no-any-return]

    def _embed(self, ids: Tensor, embedding: nn.Embedding, positions: Tensor) -> Tensor:
        """Map ids (...) to (..., D); `positions` are the encodings to add."""
        scaled = embedding(ids) * math.sqrt(self.config.d_model)
        return self.dropout(scaled + positions)  # type: ignore[no-any-return]

    def _positions_of(self, packing: Packing) -> Tensor:
        return self._position_table(packing.longest).index_select(0, packing.positions)  # (N, D)

    def _position_table(self, length: int) -> Tensor:
        """Return the encodings (at least `length`, D)."""
        positions = self.positions  # another thread may replace the table meanwhile
        if length > positions.size(0):
            table = sinusoidal_positions(2 * length, self.config.d_model, self.config.positions)
            positions = self.positions = table.to(positions)
        return positions

    def _final_norm(self) -> nn.Module:
        if self.config.norm is Norm.post:
            return nn.Identity()
        return nn.LayerNorm(self.config.d_model, eps=LAYER_NORM_EPS)


def alignment_layer(num_decoder_layers: int) -> int:
    """Return the decoder layer, from 0, whose attention to the source tells the word alignment.

    Of six layers or more the last but one aligns best (Garg et al., 2019); of two or three the
    last, as docs/search.md shows.
    """
    return num_decoder_layers - (2 if num_decoder_layers >= 6 else 1)


def num_parameters(model: nn.Module) -> int:
    """Count the parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
