"""Scales of activations in int8, measured on training pairs.

A matrix multiplication in int8 rounds its input to 127 steps on each side of zero. Bergamot finds
the largest activation of each input while it translates. With fixed values in the model, Bergamot
is faster. This module measures such values, as `--dump-quantmult` and
`scripts/alphas/extract_stats.py` of browsermt/marian-dev do.
"""

# S source length, T target length, D d_model; the batch has one pair

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from nmt.checkpoint import ModelInfo
from nmt.data.batch import pad, pad_source
from nmt.data.shuffle import shuffle_pairs
from nmt.data.tokenizer import Tokenizers
from nmt.export.shortlist import open_training_pairs
from nmt.model.attention import causal_mask, padding_mask
from nmt.model.transformer import DecoderLayer, Layer, Transformer

OUTPUT = "none"  # Marian's name of the output matrix, if a shortlist has selected its rows
_NUM_PAIRS = 300
_NUM_DEVIATIONS = 1.1


class MatrixInput(NamedTuple):
    """An argument of a module, and the matrices that are multiplied with it."""

    module: nn.Module
    argument: int  # index of the argument of `module.forward`
    matrices: list[str]  # names in Marian


@torch.no_grad()
def measure_activations(
    info: ModelInfo, weights: dict[str, Tensor], tokenizers: Tokenizers, data_dir: Path
) -> dict[str, float]:
    """Return the activation that int8 maps to 127 for each matrix, by its name in Marian.

    This is the mean of the largest absolute activations of `_NUM_PAIRS` pairs plus 1.1 standard
    deviations. Larger activations are clipped. Raises `ConfigError` if the data folder was made
    with a different tokenizer.
    """
    pairs = open_training_pairs("calibration_data", data_dir, info.tokenizer_sha256)
    model = _build_model(info, weights)
    # a value per pair, keyed by the name of the matrix
    largest_activations: dict[str, list[float]] = defaultdict(list)
    for matrix_input in _find_inputs(model):
        hook = _record_largest(matrix_input, largest_activations)
        matrix_input.module.register_forward_pre_hook(hook)
    for src_ids, tgt_ids in itertools.islice(shuffle_pairs(pairs), _NUM_PAIRS):
        src, src_lengths = pad_source([src_ids], tokenizers)  # (1, S)
        tgt = pad([tgt_ids], pad_id=tokenizers.tgt.pad_id, bos=tokenizers.tgt.bos_id)  # (1, T)
        src_mask = padding_mask(src_lengths, src.size(1))
        hidden = model(src, src_mask, tgt, causal_mask(tgt.size(1)))  # (1, T, D)
        largest_activations[OUTPUT].append(hidden.abs().max().item())
    limits = {}
    for name, values in largest_activations.items():
        limits[name] = float(np.mean(values) + _NUM_DEVIATIONS * np.std(values))
    return limits


def _build_model(info: ModelInfo, weights: dict[str, Tensor]) -> Transformer:
    """Build the model. `weights` may have an output bias that the config lacks."""
    config = replace(info.model, output_bias="output_bias" in weights)
    model = Transformer(config, info.vocab_size, src_vocab_size=info.src_vocab_size)
    model.load_state_dict(weights)
    return model.eval()


def _record_largest(
    matrix_input: MatrixInput, largest_activations: dict[str, list[float]]
) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Return a hook that adds the largest absolute activation of each call for all matrices."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        value = arguments[matrix_input.argument].abs().max().item()
        for name in matrix_input.matrices:
            largest_activations[name].append(value)

    return hook


def _find_inputs(model: Transformer) -> Iterator[MatrixInput]:
    """Yield the inputs of all matrices but the output matrix."""
    for stack, layers in (("encoder", model.encoder_layers), ("decoder", model.decoder_layers)):
        for number, module in enumerate(layers, start=1):
            layer = cast(Layer, module)
            name = f"{stack}_l{number}"
            yield MatrixInput(layer.feed_forward.inner, 0, [f"{name}_ffn_W1"])
            yield MatrixInput(layer.feed_forward.outer, 0, [f"{name}_ffn_W2"])
            if layer.ssru is not None:
                yield MatrixInput(layer.ssru, 0, [f"{name}_rnn_W", f"{name}_rnn_Wf"])
            else:
                attention = layer.self_attention
                names = [f"{name}_self_W{letter}" for letter in "qkv"]
                yield MatrixInput(attention, 0, names)
                yield MatrixInput(attention.out_projection, 0, [f"{name}_self_Wo"])
            if isinstance(layer, DecoderLayer):
                attention = layer.cross_attention
                yield MatrixInput(attention, 0, [f"{name}_context_Wq"])
                memory_names = [f"{name}_context_Wk", f"{name}_context_Wv"]
                yield MatrixInput(attention, 1, memory_names)
                yield MatrixInput(attention.out_projection, 0, [f"{name}_context_Wo"])
