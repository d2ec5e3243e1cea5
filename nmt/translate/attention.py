"""Attention of every layer and head when a model reads a sentence and predicts its translation: one
teacher-forced pass through the plain attention.
"""

# L layers, H heads, S source tokens with EOS, T target tokens

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError
from nmt.model.fast import FastTransformer
from nmt.model.transformer import AttentionWeights, causal_mask, padding_mask
from nmt.search.stepper import ModelStepper
from nmt.translate.engines.base import Backend, Ids
from nmt.translate.engines.native import NativeBackend

KINDS = ("cross", "encoder", "decoder")

# a piece that begins a word: after a space, or of a script that sets no spaces
_NEW_WORD = re.compile("▁|[\u2e80-\u9fff\uf900-\ufaff\uff00-\uff60]")


@dataclass(frozen=True)
class PairAttention:
    """Attention weights of a pair in float32, each row a sum of 1; what a token may not attend to
    is exactly 0.
    """

    src: list[str]  # S pieces, EOS last where the model reads it
    tgt: list[str]  # T pieces that the decoder reads, BOS first: the rows of `decoder`
    predicted: list[str]  # T pieces that it predicts there, EOS last: the rows of `cross`
    encoder: Tensor  # (L, H, S, S)
    decoder: Tensor  # (L, H, T, T)
    cross: Tensor  # (L, H, T, S)

    def as_json(self) -> dict[str, Any]:
        """Return what the attention view of the pages reads: pieces, the number of the word that
        each belongs to, and the maps as uint8 in base64, of which 255 is a weight of 1.
        """
        sides = {"src": self.src, "tgt": self.tgt, "predicted": self.predicted}
        maps = {}
        for kind in KINDS:
            weights: Tensor = getattr(self, kind)
            data = base64.b64encode((weights * 255).round().byte().numpy().tobytes())
            maps[kind] = {"shape": list(weights.shape), "data": data.decode()}
        return {**sides, "words": {k: word_numbers(v) for k, v in sides.items()}, "maps": maps}


def word_numbers(pieces: list[str]) -> list[int]:
    """Return the number of the word that each piece is of; BOS and EOS are one each."""
    numbers = [0] * len(pieces)
    for i, piece in enumerate(pieces[1:], start=1):
        is_end = i == len(pieces) - 1 and piece == "</s>"
        after_start = i == 1 and pieces[0] == "<s>"
        is_new = is_end or after_start or bool(_NEW_WORD.match(piece))
        numbers[i] = numbers[i - 1] + is_new
    return numbers


def attention_model(backend: Backend) -> FastTransformer | None:
    """Return the model whose attention can be shown; None for an ensemble or another engine."""
    stepper = backend.stepper if isinstance(backend, NativeBackend) else None
    return stepper.model if isinstance(stepper, ModelStepper) else None


def attention_shape(backend: Backend) -> dict[str, int] | None:
    """Return the number of layers of each kind and of heads; None where none can be shown."""
    model = attention_model(backend)
    if model is None:
        return None
    config = model.config
    decoder = config.num_decoder_layers
    layers = {"encoder": config.num_encoder_layers, "decoder": decoder, "cross": decoder}
    return {**layers, "heads": config.num_heads}


@torch.inference_mode()
def pair_attention(backend: Backend, tokenizer: Tokenizers, src: Ids, tgt: Ids) -> PairAttention:
    """Return the attention for source and target ids, both without control symbols.

    Raises `ConfigError` for an engine that does not show it.
    """
    model = attention_model(backend)
    if model is None:
        raise ConfigError("this engine shows no attention; use backend=native and one model")
    read = [tokenizer.tgt.bos_id, *tgt]
    device = model.embedding.weight.device
    end = [tokenizer.src.eos_id] if model.config.source_eos or not src else []
    sources = torch.tensor([[*src, *end]], device=device)
    targets = torch.tensor([read], device=device)
    stacks: dict[str, list[nn.Module]] = {
        "encoder": [layer.self_attention for layer in model.encoder_layers],  # type: ignore[misc]
        "decoder": [layer.self_attention for layer in model.decoder_layers],  # type: ignore[misc]
        "cross": [layer.cross_attention for layer in model.decoder_layers],  # type: ignore[misc]
    }
    attention_out: AttentionWeights = {
        module: None for stack in stacks.values() for module in stack
    }
    lengths = torch.tensor([sources.size(1) - int(model.drops_eos)], device=device)
    visible = padding_mask(lengths, sources.size(1))
    model(sources, visible, targets, causal_mask(len(read), device), attention_out)
    weights = {
        kind: torch.cat([found for module in stack if (found := attention_out[module]) is not None])
        for kind, stack in stacks.items()
    }
    return PairAttention(
        src=tokenizer.src.pieces(sources[0].tolist()),
        tgt=tokenizer.tgt.pieces(read),
        predicted=tokenizer.tgt.pieces([*tgt, tokenizer.tgt.eos_id]),
        **{kind: part.float().cpu() for kind, part in weights.items()},
    )
