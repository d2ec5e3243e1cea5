"""Export to CTranslate2: copy the weights into its `TransformerSpec`, which writes the file format
and quantizes.
"""

# D d_model, F d_ff, V vocab, P positions, H heads, K max_distance

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmt.checkpoint import ModelInfo
from nmt.config import Activation, ExportConfig, ModelConfig, Norm, NormLayer, Positions
from nmt.data.tokenizer import Tokenizers
from nmt.errors import NmtError
from nmt.export.huggingface import position_table
from nmt.model.positions import Alibi
from nmt.model.transformer import NORM_EPS, alignment_layer

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
_ACTIVATIONS = {
    Activation.relu: "RELU",
    Activation.gelu: "GELU",
    Activation.silu: "SWISH",
    Activation.swiglu: "SWISH",  # of the gate
}


def write_ctranslate2(
    folder: Path,
    info: ModelInfo,
    tensors: dict[str, Tensor],
    tokenizers: Tokenizers,
    config: ExportConfig,
) -> None:
    """Write `model.bin`, `config.json` and `shared_vocabulary.json` into `folder`; for separate
    vocabularies `source_vocabulary.json` and `target_vocabulary.json`.

    Raises `NmtError` with the command that installs CTranslate2 if it is missing.
    """
    model = info.model
    weights: Arrays = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    spec = _new_spec(model)
    for name, stack in {"encoder": spec.encoder, "decoder": spec.decoder}.items():
        _fill_positions(stack, name, model, tensors, config.max_positions)
        stack.scale_embeddings = model.scale_embedding
        for i, layer in enumerate(stack.layer):
            _fill_layer(layer, weights, f"{name}_layers.{i}")
        if model.norm is Norm.pre:
            _fill(stack.layer_norm, weights, f"{name}_norm")
    src_embedding = "embedding.weight" if info.src_vocab_size is None else "src_embedding.weight"
    spec.encoder.embeddings[0].weight = weights[src_embedding]  # (V, D)
    spec.decoder.embeddings.weight = weights["embedding.weight"]  # (V, D)
    output = "embedding.weight" if model.tied_output else "output_weight"
    spec.decoder.projection.weight = weights[output]  # (V, D)
    if model.output_bias:
        spec.decoder.projection.bias = weights["output_bias"]  # (V,)
    tgt = tokenizers.tgt
    pieces = tgt.all_pieces()
    spec.register_source_vocabulary(tokenizers.src.all_pieces())
    spec.register_target_vocabulary(pieces)
    spec.config.unk_token = pieces[tgt.unk_id]  # control symbols have one name on both sides
    spec.config.bos_token = pieces[tgt.bos_id]
    spec.config.decoder_start_token = pieces[tgt.bos_id]
    spec.config.eos_token = pieces[tgt.eos_id]
    spec.config.add_source_eos = model.source_eos
    spec.config.layer_norm_epsilon = NORM_EPS
    spec.validate()
    spec.optimize(quantization=config.quantization.value)
    spec.save(str(folder))


def _new_spec(model: ModelConfig) -> Any:
    """Build the `TransformerSpec` of this architecture, without weights."""
    try:
        from ctranslate2.specs import TransformerSpec, common_spec, transformer_spec
    except ImportError:
        raise NmtError("format=ctranslate2 needs CTranslate2; pip install nmt[export]") from None
    options = {
        "pre_norm": model.norm is Norm.pre,
        "activation": common_spec.Activation[_ACTIVATIONS[model.activation]],
        "ffn_glu": model.activation is Activation.swiglu,
        "rms_norm": model.norm_layer is NormLayer.rms,
        "num_heads_kv": model.num_kv_heads,
        "qk_norm": model.qk_norm,
        "relative_position": model.positions is Positions.relative,
        "relative_attention_bias": model.positions is Positions.alibi,
        "rotary_dim": 0 if model.positions is Positions.rotary else None,  # 0: all of a head
    }
    encoder = transformer_spec.TransformerEncoderSpec(
        model.num_encoder_layers, model.num_heads, **options
    )
    decoder = transformer_spec.TransformerDecoderSpec(
        model.num_decoder_layers,
        model.num_heads,
        alignment_layer=alignment_layer(model.num_decoder_layers),
        alignment_heads=model.num_heads,
        **options,
    )
    return TransformerSpec(encoder, decoder)


def _fill_positions(
    stack: Any, name: str, model: ModelConfig, tensors: dict[str, Tensor], max_positions: int
) -> None:
    """Fill the position table that is added to embeddings, or the position weights of each layer's
    self-attention.

    CTranslate2 has ALiBi in decoders only, so ALiBi is written as T5's relative position bias: one
    number for each head and distance below `2 * max_positions`.
    """
    if model.positions.is_added:
        table = position_table(model, name, tensors, max_positions).float()
        stack.position_encodings.encodings = table.numpy()  # (P, D)
    elif model.positions is Positions.relative:
        for i, layer in enumerate(stack.layer):
            relation = f"{name}_layers.{i}.self_attention.relation"
            keys = tensors[f"{relation}.keys"].float()  # (2K+1, D/H)
            values = tensors[f"{relation}.values"].float()
            layer.self_attention.relative_position_keys = keys.numpy()
            layer.self_attention.relative_position_values = values.numpy()
    elif model.positions is Positions.alibi:
        # T5 gives the smaller half of all distances a bias each; an encoder has both directions
        num_distances = 2 * max_positions
        distances = torch.arange(num_distances)[None]  # (1, 2P)
        bias = Alibi(model).bias(torch.zeros(()), distances)[:, 0].T  # (2P, H)
        if name == "encoder":
            bias = torch.cat([bias, bias])
        for layer in stack.layer:
            attention = layer.self_attention
            attention.relative_attention_bias = bias.contiguous().numpy()
            attention.relative_attention_max_distance = np.dtype("int32").type(num_distances)


def _fill_layer(spec: Any, weights: Arrays, name: str) -> None:
    """Fill one layer of the encoder, or of the decoder with its cross-attention."""
    attention = f"{name}.self_attention"
    _fill(spec.self_attention.linear[0], weights, f"{attention}.in_projection")  # (3D, D)
    _fill(spec.self_attention.linear[1], weights, f"{attention}.out_projection")
    _fill(spec.self_attention.layer_norm, weights, f"{attention}_norm")
    if hasattr(spec.self_attention, "q_norm"):
        _fill(spec.self_attention.q_norm, weights, f"{attention}.query_norm")  # (D/H,)
        _fill(spec.self_attention.k_norm, weights, f"{attention}.key_norm")
    if hasattr(spec, "attention"):
        _fill_cross_attention(spec.attention, weights, f"{name}.cross_attention")
    inner = spec.ffn.linear_0
    if hasattr(spec.ffn, "linear_0_noact"):  # a gated layer
        inner = spec.ffn.linear_0_noact
        _fill(spec.ffn.linear_0, weights, f"{name}.feed_forward.gate")  # (F, D)
    _fill(inner, weights, f"{name}.feed_forward.inner")  # (F, D)
    _fill(spec.ffn.linear_1, weights, f"{name}.feed_forward.outer")  # (D, F)
    _fill(spec.ffn.layer_norm, weights, f"{name}.feed_forward_norm")


def _fill_cross_attention(spec: Any, weights: Arrays, name: str) -> None:
    """Fill a cross-attention: CTranslate2 has one layer for queries and one for keys and values."""
    if hasattr(spec, "q_norm"):  # our QK norm is in self-attention only
        del spec.q_norm, spec.k_norm
    queries, keys_values, output = spec.linear
    weight = weights[f"{name}.in_projection.weight"]  # (3D, D)
    bias = weights[f"{name}.in_projection.bias"]  # (3D,)
    d_model = weight.shape[1]
    queries.weight = weight[:d_model]
    queries.bias = bias[:d_model]
    keys_values.weight = weight[d_model:]  # (2D, D)
    keys_values.bias = bias[d_model:]
    _fill(output, weights, f"{name}.out_projection")
    _fill(spec.layer_norm, weights, f"{name}_norm")


def _fill(spec: Any, weights: Arrays, name: str) -> None:
    """Fill a linear layer (weight, bias) or a norm (gamma, beta); an RMS norm has no bias."""
    is_norm = hasattr(spec, "gamma")
    setattr(spec, "gamma" if is_norm else "weight", weights[f"{name}.weight"])
    if f"{name}.bias" in weights:
        setattr(spec, "beta" if is_norm else "bias", weights[f"{name}.bias"])
