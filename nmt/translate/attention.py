"""Attention weights of every layer and head for a sentence and its translation.

One forward pass with teacher forcing computes them.
"""

# L layers, H heads, S source tokens with EOS, T target tokens

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nmt.config import Decoder, SearchConfig
from nmt.data.languages import Tags, encode_tag
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError
from nmt.model.attention import AttentionWeights, causal_mask, padding_mask
from nmt.model.fast import FastTransformer
from nmt.search.request import Ids, SearchRequest
from nmt.search.stepper import ModelStepper
from nmt.translate.engines.auto_backend import AutoBackend
from nmt.translate.engines.base import Backend
from nmt.translate.engines.native import NativeBackend
from nmt.translate.loops import replace_loops
from nmt.translate.notebook import heat_map

KINDS = ("cross", "encoder", "decoder")  # the kinds of attention, as `PairAttention` names them

_MAX_BYTE = 255  # stands for a weight of 1 in JSON

# Matches the start of a piece that begins a word: a space (▁), or a Chinese or Japanese character,
# which counts as a word
_WORD_START = re.compile("▁|[\u2e80-\u9fff\uf900-\ufaff\uff00-\uff60]")


class AttentionMap(NamedTuple):
    """The weights of one kind of attention, and the pieces that label their rows and columns."""

    weights: Tensor  # (L, H, rows, columns)
    rows: list[str]
    columns: list[str]


@dataclass(frozen=True)
class PairAttention:
    """Attention weights of a sentence and its translation, in float32.

    L layers, H heads, S source tokens, T target tokens. Each row sums to 1. Weights of masked
    positions are exactly 0.
    """

    src: list[str]  # S source pieces; with source_eos=false, EOS only if the source is empty
    tgt: list[str]  # T pieces that the decoder reads, from BOS on; rows of `decoder`
    predicted: list[str]  # T pieces that the decoder predicts, up to EOS; rows of `cross`
    encoder: Tensor  # (L, H, S, S)
    decoder: Tensor  # (L, H, T, T); L is 0 for a decoder without self-attention
    cross: Tensor  # (L, H, T, S)

    def __repr__(self) -> str:
        """Show the pieces and the shape of `cross`."""
        shape = tuple(self.cross.shape)
        return f"PairAttention({' '.join(self.src)} | {' '.join(self.predicted)}, cross {shape})"

    def _repr_html_(self) -> str:
        """Return a map of the last layer's cross-attention, the mean of its heads."""
        mean_weights = self.cross[-1].mean(dim=0)  # (T, S), the mean over heads
        return heat_map(self.predicted, self.src, mean_weights.tolist())

    def attention_map(self, kind: str) -> AttentionMap:
        """Return the weights and pieces of one of `KINDS`."""
        if kind == "encoder":
            return AttentionMap(self.encoder, self.src, self.src)
        if kind == "decoder":
            return AttentionMap(self.decoder, self.tgt, self.tgt)
        return AttentionMap(self.cross, self.predicted, self.src)

    def as_json(self) -> dict[str, Any]:
        """Return the pieces of each side, their word numbers, and the weights, for HTML pages.

        Weights are uint8 in base64, where 255 is a weight of 1.
        """
        pieces_by_side = {"src": self.src, "tgt": self.tgt, "predicted": self.predicted}
        maps = {}
        for kind in KINDS:
            weights = self.attention_map(kind).weights
            if len(weights) == 0:
                continue
            levels = (weights * _MAX_BYTE).round().byte()
            data = base64.b64encode(levels.numpy().tobytes())
            maps[kind] = {"shape": list(weights.shape), "data": data.decode()}
        words = {name: word_numbers(pieces) for name, pieces in pieces_by_side.items()}
        return {**pieces_by_side, "words": words, "maps": maps}


def word_numbers(pieces: list[str]) -> list[int]:
    """Return for each piece the number of its word, from 0; BOS and EOS count as words."""
    numbers = [0] * len(pieces)
    for i, piece in enumerate(pieces[1:], start=1):
        is_eos = i == len(pieces) - 1 and piece == "</s>"
        is_after_bos = i == 1 and pieces[0] == "<s>"
        starts_word = is_eos or is_after_bos or _WORD_START.match(piece)
        numbers[i] = numbers[i - 1]
        if starts_word:
            numbers[i] += 1
    return numbers


def attention_model(backend: Backend) -> FastTransformer | None:
    """Return the model that computes attention weights, or None for an ensemble or CTranslate2.

    An `AutoBackend` loads its native engine for this.
    """
    if isinstance(backend, AutoBackend):
        backend = backend.native
    if not isinstance(backend, NativeBackend):
        return None
    stepper = backend.stepper
    return stepper.model if isinstance(stepper, ModelStepper) else None


def attention_shape(backend: Backend) -> dict[str, int] | None:
    """Return the numbers of layers and heads, or None for an ensemble or CTranslate2."""
    if isinstance(backend, AutoBackend):
        config = backend.model_config
    else:
        model = attention_model(backend)
        if model is None:
            return None
        config = model.config
    return {
        "encoder": config.num_encoder_layers,
        "decoder": config.num_decoder_layers if config.decoder is Decoder.attention else 0,
        "cross": config.num_decoder_layers,
        "heads": config.num_heads,
    }


def add_source_eos(src: Ids, model: FastTransformer, tokenizers: Tokenizers) -> list[int]:
    """Return source ids as the encoder reads them: with EOS, unless `source_eos` is False.

    An empty source always gets EOS, since attention needs a token to attend to.
    """
    if model.config.source_eos or not src:
        return [*src, tokenizers.src.eos_id]
    return list(src)


def search_targets(
    backend: Backend,
    tokenizers: Tokenizers,
    source_ids: Sequence[Ids],
    config: SearchConfig,
    tags: Tags,
) -> list[list[int]]:
    """Return the ids of the best translation of each source, without EOS.

    The translation of a source without ids is empty.
    """
    target_ids: list[list[int]] = [[] for _ in source_ids]
    searched = [i for i, ids in enumerate(source_ids) if ids]
    if searched:
        tag_ids = encode_tag(tokenizers.tgt, tags.tgt)
        request = SearchRequest(
            [source_ids[i] for i in searched],
            config,
            prefixes=[tag_ids] * len(searched),
            n_best=1,
        )
        # searches again where a translation loops, which means that it repeats tokens
        results = replace_loops(backend, request, backend.search(request))
        for i, hypotheses in zip(searched, results, strict=True):
            target_ids[i] = [id for id in hypotheses[0].tokens if id != tokenizers.tgt.eos_id]
    return target_ids


@torch.inference_mode()
def pair_attention(backend: Backend, tokenizers: Tokenizers, src: Ids, tgt: Ids) -> PairAttention:
    """Return the attention weights for source and target ids, both without control symbols.

    Raises `ConfigError` for an engine without access to attention weights.
    """
    model = attention_model(backend)
    if model is None:
        raise ConfigError("this engine shows no attention; use backend=native and one model")
    device = model.embedding.weight.device
    src_ids = add_source_eos(src, model, tokenizers)
    tgt_ids = [tokenizers.tgt.bos_id, *tgt]
    modules: dict[str, list[nn.Module]] = {
        "encoder": [layer.self_attention for layer in model.encoder_layers],  # type: ignore[misc]
        "decoder": [],
        "cross": [layer.cross_attention for layer in model.decoder_layers],  # type: ignore[misc]
    }
    if model.config.decoder is Decoder.attention:
        modules["decoder"] = [layer.self_attention for layer in model.decoder_layers]  # type: ignore[misc]
    attention_out: AttentionWeights = {}  # the forward pass stores the weights of these modules
    for kind_modules in modules.values():
        for module in kind_modules:
            attention_out[module] = None

    lengths = torch.tensor([len(src_ids)], device=device)  # (1,)
    src_mask = padding_mask(lengths, len(src_ids))
    tgt_mask = causal_mask(len(tgt_ids), device)
    src_batch = torch.tensor([src_ids], device=device)  # (1, S)
    tgt_batch = torch.tensor([tgt_ids], device=device)  # (1, T)
    model(src_batch, src_mask, tgt_batch, tgt_mask, attention_out)

    def stack(kind: str) -> Tensor:
        """Return the weights of all layers for one of `KINDS`, (L, H, rows, columns)."""
        weights = []  # each (1, H, rows, columns)
        for module in modules[kind]:
            layer_weights = attention_out[module]
            assert layer_weights is not None
            weights.append(layer_weights)
        if not weights:  # a decoder with SSRUs has no self-attention
            return torch.zeros(0, model.config.num_heads, len(tgt_ids), len(tgt_ids))
        return torch.cat(weights).float().cpu()

    return PairAttention(
        src=tokenizers.src.pieces(src_ids),
        tgt=tokenizers.tgt.pieces(tgt_ids),
        predicted=tokenizers.tgt.pieces([*tgt, tokenizers.tgt.eos_id]),
        encoder=stack("encoder"),
        decoder=stack("decoder"),
        cross=stack("cross"),
    )
