"""The word alignment of a model: the cross-attention of one decoder layer."""

# B sentences, H heads, T target positions, S source positions

from __future__ import annotations

from typing import cast

from torch import Tensor

from nmt.config import ModelConfig
from nmt.model.attention import MultiHeadAttention
from nmt.model.transformer import DecoderLayer, Transformer


def alignment_layer(num_decoder_layers: int) -> int:
    """Return the index of the decoder layer whose cross-attention aligns words best.

    With six or more layers, this is the second to last one (Garg et al., 2019). With two or three,
    it is the last one (docs/search.md).
    """
    if num_decoder_layers >= 6:
        return num_decoder_layers - 2
    return num_decoder_layers - 1


def alignment_attention(model: Transformer) -> MultiHeadAttention:
    """Return the cross-attention of `alignment_layer`."""
    layer_index = alignment_layer(len(model.decoder_layers))
    layer = cast(DecoderLayer, model.decoder_layers[layer_index])
    return layer.cross_attention


def mean_alignment(weights: Tensor, config: ModelConfig) -> Tensor:
    """Return the mean (B, T, S) of the weights (B, H, T, S) of the heads that align words."""
    return weights[:, : config.alignment_heads].mean(dim=1)
