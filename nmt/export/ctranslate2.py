"""Export to CTranslate2: assign the weights to its `TransformerSpec`, a tree of layers, which
quantizes them and writes `model.bin`.
"""

# D d_model, F d_ff, V vocab, P max_positions, H heads, K max_distance

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
from nmt.export.huggingface import make_position_table
from nmt.model.positions import Alibi
from nmt.model.transformer import NORM_EPS, alignment_layer

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]  # the weights, by our names
_ACTIVATIONS = {
    Activation.relu: "RELU",
    Activation.gelu: "GELU",
    Activation.silu: "SWISH",
    Activation.swiglu: "SWISH",  # for the gate
}


def write_ctranslate2(
    folder: Path,
    info: ModelInfo,
    tensors: dict[str, Tensor],
    tokenizers: Tokenizers,
    config: ExportConfig,
) -> None:
    """Write `model.bin`, `config.json` and the vocabularies into `folder`.

    These are `shared_vocabulary.json`, or for separate vocabularies `source_vocabulary.json` and
    `target_vocabulary.json`. Raises `NmtError` if CTranslate2 is not installed.
    """
    spec = build_spec(info, tensors, tokenizers, config.max_positions)
    spec.optimize(quantization=config.quantization.value)
    spec.save(str(folder))


def build_spec(
    info: ModelInfo, tensors: dict[str, Tensor], tokenizers: Tokenizers, max_positions: int
) -> Any:
    """Return a valid `TransformerSpec` with the weights and vocabularies of a model.

    Raises `NmtError` if CTranslate2 is not installed.
    """
    model = info.model
    weights: Arrays = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    spec = _new_spec(model)
    _set_stack(spec.encoder, "encoder", model, weights)
    _set_positions(spec.encoder, "encoder", model, tensors, max_positions)
    _set_stack(spec.decoder, "decoder", model, weights)
    _set_positions(spec.decoder, "decoder", model, tensors, max_positions)
    src_embedding = "embedding.weight" if info.src_vocab_size is None else "src_embedding.weight"
    spec.encoder.embeddings[0].weight = weights[src_embedding]  # (V, D)
    spec.decoder.embeddings.weight = weights["embedding.weight"]  # (V, D)
    output_layer = "embedding.weight" if model.tied_output else "output_weight"
    spec.decoder.projection.weight = weights[output_layer]  # (V, D)
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
    return spec


def _new_spec(model: ModelConfig) -> Any:
    """Return a `TransformerSpec` of this architecture, without weights."""
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
        "rotary_dim": 0 if model.positions is Positions.rotary else None,  # 0 means all dimensions
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


def _set_stack(stack: Any, stack_name: str, model: ModelConfig, weights: Arrays) -> None:
    """Assign the weights of the layers of the encoder or decoder."""
    stack.scale_embeddings = model.scale_embedding
    for i, layer in enumerate(stack.layer):
        _set_layer(layer, weights, f"{stack_name}_layers.{i}")
    if model.norm is Norm.pre:
        _set_norm(stack.layer_norm, weights, f"{stack_name}_norm")


def _set_positions(
    stack: Any, stack_name: str, model: ModelConfig, tensors: dict[str, Tensor], max_positions: int
) -> None:
    """Assign the positional encoding of the encoder or decoder.

    This is a table that is added to embeddings, or tables in the self-attention of each layer.
    """
    if model.positions.is_added:
        table = make_position_table(model, stack_name, tensors, max_positions).float()
        stack.position_encodings.encodings = table.numpy()  # (P, D)
    elif model.positions is Positions.relative:
        for i, layer in enumerate(stack.layer):
            position_embeddings = f"{stack_name}_layers.{i}.self_attention.relation"
            keys = tensors[f"{position_embeddings}.keys"].float()  # (2K+1, D/H)
            values = tensors[f"{position_embeddings}.values"].float()  # (2K+1, D/H)
            layer.self_attention.relative_position_keys = keys.numpy()
            layer.self_attention.relative_position_values = values.numpy()
    elif model.positions is Positions.alibi:
        _set_alibi(stack, model, max_positions, is_bidirectional=stack_name == "encoder")


def _set_alibi(
    stack: Any, model: ModelConfig, max_positions: int, *, is_bidirectional: bool
) -> None:
    """Assign the biases of ALiBi as the relative attention bias of T5.

    CTranslate2 has ALiBi in decoders only. T5 has a table with a bias for each head and each bucket
    of distances. The first half of the buckets are single distances, so with `2 * max_positions`
    buckets, every distance has a bucket of its own.
    """
    num_buckets = 2 * max_positions
    distances = torch.arange(num_buckets)[None]  # (1, 2P)
    bias = Alibi(model).bias(torch.zeros(()), distances)[:, 0].T  # (2P, H)
    if is_bidirectional:  # one half of the table for tokens before, one for tokens after
        bias = torch.cat([bias, bias])  # (4P, H)
    for layer in stack.layer:
        attention = layer.self_attention
        attention.relative_attention_bias = bias.contiguous().numpy()
        attention.relative_attention_max_distance = np.dtype("int32").type(num_buckets)


def _set_layer(layer: Any, weights: Arrays, layer_name: str) -> None:
    """Assign the weights of one layer of the encoder, or of the decoder with cross-attention."""
    attention = layer.self_attention
    attention_name = f"{layer_name}.self_attention"
    _set_linear(attention.linear[0], weights, f"{attention_name}.in_projection")  # (3D, D)
    _set_linear(attention.linear[1], weights, f"{attention_name}.out_projection")  # (D, D)
    _set_norm(attention.layer_norm, weights, f"{attention_name}_norm")
    if hasattr(attention, "q_norm"):
        _set_norm(attention.q_norm, weights, f"{attention_name}.query_norm")  # (D/H,)
        _set_norm(attention.k_norm, weights, f"{attention_name}.key_norm")
    if hasattr(layer, "attention"):
        _set_cross_attention(layer.attention, weights, f"{layer_name}.cross_attention")
    inner = layer.ffn.linear_0
    if hasattr(layer.ffn, "linear_0_noact"):  # with a gate, which has the activation
        _set_linear(layer.ffn.linear_0, weights, f"{layer_name}.feed_forward.gate")  # (F, D)
        inner = layer.ffn.linear_0_noact
    _set_linear(inner, weights, f"{layer_name}.feed_forward.inner")  # (F, D)
    _set_linear(layer.ffn.linear_1, weights, f"{layer_name}.feed_forward.outer")  # (D, F)
    _set_norm(layer.ffn.layer_norm, weights, f"{layer_name}.feed_forward_norm")


def _set_cross_attention(attention: Any, weights: Arrays, name: str) -> None:
    """Assign a cross-attention: a linear layer for queries and one for keys and values."""
    if hasattr(attention, "q_norm"):  # our QK norm is in self-attention only
        del attention.q_norm, attention.k_norm
    queries, keys_values, output = attention.linear
    weight = weights[f"{name}.in_projection.weight"]  # (3D, D)
    bias = weights[f"{name}.in_projection.bias"]  # (3D,)
    d_model = weight.shape[1]
    queries.weight = weight[:d_model]
    queries.bias = bias[:d_model]
    keys_values.weight = weight[d_model:]  # (2D, D)
    keys_values.bias = bias[d_model:]
    _set_linear(output, weights, f"{name}.out_projection")
    _set_norm(attention.layer_norm, weights, f"{name}_norm")


def _set_linear(linear: Any, weights: Arrays, name: str) -> None:
    """Assign the weight of a linear layer, and its bias if it has one."""
    linear.weight = weights[f"{name}.weight"]
    if f"{name}.bias" in weights:
        linear.bias = weights[f"{name}.bias"]


def _set_norm(norm: Any, weights: Arrays, name: str) -> None:
    """Assign the scale of a normalization layer, and its bias if it has one."""
    norm.gamma = weights[f"{name}.weight"]
    if f"{name}.bias" in weights:  # an RMS norm has none
        norm.beta = weights[f"{name}.bias"]
