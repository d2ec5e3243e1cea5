"""Attention of any layer and head for a sentence and its translation, from one teacher-forced pass
through the plain attention of the model.
"""

# S source tokens with EOS, T target tokens, H heads

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nmt.errors import ConfigError
from nmt.model.fast import FastTransformer
from nmt.model.transformer import AttentionRecord, causal_mask, padding_mask
from nmt.search.stepper import ModelStepper
from nmt.translate.backend import NativeBackend
from nmt.translate.translator import Translator

KINDS = ("encoder", "decoder", "cross")
_MAX_TOKENS = 256  # of either side


@dataclass(frozen=True)
class AttentionMap:
    """The attention of one layer and head, or the mean of its heads."""

    rows: list[str]
    """What attends. With kind cross, the token that is predicted with that attention."""
    columns: list[str]  # what is attended to
    weights: list[list[float]]  # each row sums to 1, to rounding


def find_shape(translator: Translator) -> dict[str, int] | None:
    """Return the layers of each kind and the heads; None for an engine that does not show them."""
    model = _find_model(translator)
    if model is None:
        return None
    decoder = model.config.num_decoder_layers
    layers = {"encoder": model.config.num_encoder_layers, "decoder": decoder, "cross": decoder}
    return {**layers, "heads": model.config.num_heads}


@torch.inference_mode()
def attention_map(
    translator: Translator, source: str, target: str, *, kind: str, layer: int, head: int | None
) -> AttentionMap:
    """Return the attention of layer and head, counted from 0, when the model reads `source` and
    predicts `target`; `head` None is the mean of all.

    Raises `ConfigError` for an engine, kind, layer or head that is not there, and for a text that
    is too long.
    """
    model, shape = _find_model(translator), find_shape(translator)
    if model is None or shape is None:
        raise ConfigError("this model's engine shows no attention; use backend=native, one model")
    _check("kind", kind, KINDS)
    _check("layer", layer, range(shape[kind]))
    _check("head", head, (None, *range(shape["heads"])))
    src_tokenizer, tgt_tokenizer = translator.tokenizer.src, translator.tokenizer.tgt
    src = [*src_tokenizer.encode(source), src_tokenizer.eos_id]
    tgt = [tgt_tokenizer.bos_id, *tgt_tokenizer.encode(target)]
    longest = max(len(src), len(tgt))
    if longest > _MAX_TOKENS:
        raise ConfigError(f"{longest} tokens are more than {_MAX_TOKENS}; give a shorter sentence")
    weights = _record(model, src, tgt, _module(model, kind, layer))[0]  # (H, T or S, T or S)
    chosen = weights.mean(dim=0) if head is None else weights[head]
    read = tgt_tokenizer.pieces(tgt)
    predicted = tgt_tokenizer.pieces([*tgt[1:], tgt_tokenizer.eos_id])
    sources = src_tokenizer.pieces(src)
    rows = {"encoder": sources, "decoder": read, "cross": predicted}[kind]
    columns = read if kind == "decoder" else sources
    return AttentionMap(rows, columns, [[round(w, 4) for w in row] for row in chosen.tolist()])


def _find_model(translator: Translator) -> FastTransformer | None:
    backend = translator.backend
    stepper = backend.stepper if isinstance(backend, NativeBackend) else None
    return stepper.model if isinstance(stepper, ModelStepper) else None


def _check(name: str, value: object, valid: Sequence[Any]) -> None:
    if value not in valid or isinstance(value, bool):
        last = valid[-1] if valid else None
        raise ConfigError(f"{name}={value}: no such {name}; the last one is {last}")


def _module(model: FastTransformer, kind: str, layer: int) -> nn.Module:
    layers = model.encoder_layers if kind == "encoder" else model.decoder_layers
    name = "cross_attention" if kind == "cross" else "self_attention"
    found: nn.Module = getattr(layers[layer], name)
    return found


def _record(model: FastTransformer, src: list[int], tgt: list[int], module: nn.Module) -> Tensor:
    """Return the weights (1, H, queries, keys) of a module, with a batch of one sentence."""
    device = model.embedding.weight.device
    record: AttentionRecord = {module: None}
    lengths = torch.tensor([len(src) - model.num_unread], device=device)
    sources = padding_mask(lengths, len(src))
    targets = causal_mask(len(tgt), device)
    model(
        torch.tensor([src], device=device),
        sources,
        torch.tensor([tgt], device=device),
        targets,
        record,
    )
    weights = record[module]
    assert weights is not None
    return weights
