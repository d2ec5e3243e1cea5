"""A model as CTranslate2's Transformer: fills a `TransformerSpec` of that library, which then does
the file format, aliases and quantization.
"""

# D d_model, F d_ff, V vocab, P positions

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nmt.checkpoint import ModelInfo
from nmt.config import Activation, ExportConfig, Norm
from nmt.data.tokenizer import Tokenizers
from nmt.errors import NmtError
from nmt.model.transformer import alignment_layer, sinusoidal_positions
from nmt.model.variants import NORM_EPS

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
_ACTIVATIONS = {Activation.relu: "RELU", Activation.gelu: "GELU", Activation.silu: "SWISH"}


def write_ctranslate2(
    folder: Path,
    info: ModelInfo,
    tensors: dict[str, Tensor],
    tokenizer: Tokenizers,
    config: ExportConfig,
) -> None:
    """Write `model.bin`, `config.json` and `shared_vocabulary.json` into `folder`; for separate
    vocabularies `source_vocabulary.json` and `target_vocabulary.json`.

    Raises an `NmtError` that names the extra when CTranslate2 is not installed.
    """
    try:
        from ctranslate2.specs import TransformerSpec, common_spec
    except ImportError:
        raise NmtError("format=ctranslate2 needs CTranslate2; pip install nmt[export]") from None
    model, weights = info.model, {name: t.float().numpy() for name, t in tensors.items()}
    spec = TransformerSpec.from_config(
        (model.num_encoder_layers, model.num_decoder_layers),
        model.num_heads,
        pre_norm=model.norm is Norm.pre,
        activation=common_spec.Activation[_ACTIVATIONS[model.activation]],
        alignment_layer=alignment_layer(model.num_decoder_layers),
        alignment_heads=model.num_heads,
    )
    layout = model.positions, model.position_offset
    positions = sinusoidal_positions(config.max_positions, model.d_model, *layout)  # (P, D)
    for stack, name in ((spec.encoder, "encoder"), (spec.decoder, "decoder")):
        stack.position_encodings.encodings = positions.numpy()
        stack.scale_embeddings = model.scale_embedding
        for i, layer in enumerate(stack.layer):
            _set_layer(layer, weights, f"{name}_layers.{i}")
        if model.norm is Norm.pre:
            _fill(stack.layer_norm, weights, f"{name}_norm")
    source = "embedding.weight" if info.src_vocab_size is None else "src_embedding.weight"
    spec.encoder.embeddings[0].weight = weights[source]  # (V, D)
    spec.decoder.embeddings.weight = weights["embedding.weight"]  # (V, D)
    output = "embedding.weight" if model.tied_output else "output_weight"
    spec.decoder.projection.weight = weights[output]  # (V, D)
    if model.output_bias:
        spec.decoder.projection.bias = weights["output_bias"]  # (V,)
    tgt, pieces = tokenizer.tgt, tokenizer.tgt.all_pieces()
    spec.register_source_vocabulary(tokenizer.src.all_pieces())
    spec.register_target_vocabulary(pieces)
    spec.config.unk_token = pieces[tgt.unk_id]  # the source has the same names
    spec.config.bos_token = spec.config.decoder_start_token = pieces[tgt.bos_id]
    spec.config.eos_token = pieces[tgt.eos_id]
    spec.config.add_source_eos = model.source_eos
    spec.config.layer_norm_epsilon = NORM_EPS
    spec.validate()
    spec.optimize(quantization=config.quantization.value)
    spec.save(str(folder))


def _set_layer(spec: Any, weights: Arrays, name: str) -> None:
    """Fill one layer of the encoder, or of the decoder with its attention to the source."""
    attention = f"{name}.self_attention"
    _fill(spec.self_attention.linear[0], weights, f"{attention}.in_projection")  # (3D, D)
    _fill(spec.self_attention.linear[1], weights, f"{attention}.out_projection")
    _fill(spec.self_attention.layer_norm, weights, f"{attention}_norm")
    if hasattr(spec, "attention"):
        attention = f"{name}.cross_attention"
        weight = weights[f"{attention}.in_projection.weight"]  # (3D, D)
        bias = weights[f"{attention}.in_projection.bias"]  # (3D,)
        queries, keys_values, output = spec.attention.linear
        d_model = weight.shape[1]
        queries.weight, queries.bias = weight[:d_model], bias[:d_model]
        keys_values.weight, keys_values.bias = weight[d_model:], bias[d_model:]  # (2D, D), (2D,)
        _fill(output, weights, f"{attention}.out_projection")
        _fill(spec.attention.layer_norm, weights, f"{attention}_norm")
    _fill(spec.ffn.linear_0, weights, f"{name}.feed_forward.inner")  # (F, D)
    _fill(spec.ffn.linear_1, weights, f"{name}.feed_forward.outer")  # (D, F)
    _fill(spec.ffn.layer_norm, weights, f"{name}.feed_forward_norm")


def _fill(spec: Any, weights: Arrays, name: str) -> None:
    """Fill a linear layer or a norm."""
    names = ("gamma", "beta") if hasattr(spec, "gamma") else ("weight", "bias")
    for theirs, ours in zip(names, ("weight", "bias"), strict=True):
        setattr(spec, theirs, weights[f"{name}.{ours}"])
