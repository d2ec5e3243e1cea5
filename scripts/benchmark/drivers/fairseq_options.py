"""The sizes of a model as fairseq's options, for both drivers of fairseq."""

from __future__ import annotations

from typing import Any


def model_options(model: dict[str, Any]) -> list[str]:
    """Return the options for the sizes of the encoder and the decoder."""
    words = []
    for side in ("encoder", "decoder"):
        words += [
            f"--{side}-layers={model[f'num_{side}_layers']}",
            f"--{side}-embed-dim={model['d_model']}",
            f"--{side}-ffn-embed-dim={model['d_ff']}",
            f"--{side}-attention-heads={model['num_heads']}",
        ]
    return words
