"""The settings of the layers, separately and together, for tests that loop over them."""

from __future__ import annotations

from typing import Any

from nmt.config import Activation, Decoder, Norm, NormLayer, Positions

MODERN: dict[str, Any] = {
    "norm": Norm.pre,
    "norm_layer": NormLayer.rms,
    "positions": Positions.rotary,
    "activation": Activation.swiglu,
    "qk_norm": True,
    "num_kv_heads": 2,
}
SSRU: dict[str, dict[str, Any]] = {
    "ssru": {"decoder": Decoder.ssru},
    "ssru, pre": {"decoder": Decoder.ssru, "norm": Norm.pre},
    "ssru, modern": MODERN | {"decoder": Decoder.ssru},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "learned": {"positions": Positions.learned, "num_positions": 4},  # shorter than sentences
    "learned, pre": {"positions": Positions.learned, "num_positions": 9, "norm": Norm.pre},
    "relative": {"positions": Positions.relative, "max_distance": 2},
    "rotary": {"positions": Positions.rotary},
    "alibi": {"positions": Positions.alibi},
    "rms, post": {"norm_layer": NormLayer.rms},
    "rms, pre": {"norm_layer": NormLayer.rms, "norm": Norm.pre},
    "gelu": {"activation": Activation.gelu},
    "silu": {"activation": Activation.silu},
    "swiglu": {"activation": Activation.swiglu},
    "small heads": {"head_size": 2},
    "grouped heads": {"num_kv_heads": 2},
    "one head of keys": {"num_kv_heads": 1},
    "normalized queries": {"qk_norm": True},
    "modern": MODERN,
    "modern, relative": MODERN | {"positions": Positions.relative, "max_distance": 3},
    "modern, alibi": MODERN | {"positions": Positions.alibi, "num_kv_heads": 1},
    "modern, large heads": MODERN | {"head_size": 6},
    **SSRU,
    "deep encoder": {"num_encoder_layers": 4, "num_decoder_layers": 1},
}
"""By name; models with 4 heads."""
KNOWN = ("gelu", "silu", "deep encoder", "small heads", "modern, large heads", *SSRU)
OWN = {name: changes for name, changes in VARIANTS.items() if name not in KNOWN}
"""Those whose export has code of its own; few formats support `head_size` and SSRUs."""
SINGLE = ("rotary", "alibi", "rms, pre", "swiglu", "grouped heads", "one head of keys")
SINGLE += ("normalized queries",)
"""Those whose settings are in a modern one, too; tests that take long leave them out."""
