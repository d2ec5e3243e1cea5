"""Export to CTranslate2.

The weights are assigned to a `TransformerSpec` of CTranslate2, a tree of layers. The spec quantizes
the weights and writes `model.bin`.
"""

# D d_model, E size of the keys of all heads together (less than D if heads share keys), F d_ff,
# V vocab, P max_positions, H heads, K max_distance
# A stack is the encoder or the decoder of the spec.

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
from nmt.model.alignment import alignment_layer
from nmt.model.layers import NORM_EPS
from nmt.model.positions import Alibi

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]  # weights under the names of nmt
_ACTIVATIONS = {
    Activation.relu: "RELU",
    Activation.gelu: "GELU",
    Activation.silu: "SWISH",
    Activation.swiglu: "SWISH",  # CTranslate2 applies it to the gate
}


def write_ctranslate2(
    folder: Path,
    info: ModelInfo,
    weights: dict[str, Tensor],
    tokenizers: Tokenizers,
    config: ExportConfig,
) -> None:
    """Write `model.bin`, `config.json` and the vocabulary files into `folder`.

    A joint vocabulary is in `shared_vocabulary.json`, separate vocabularies are in
    `source_vocabulary.json` and `target_vocabulary.json`. Raises `NmtError` if CTranslate2 is not
    installed.
    """
    spec = build_spec(info, weights, tokenizers, config.max_positions)
    spec.optimize(quantization=config.quantization.value)
    spec.save(str(folder))


def build_spec(
    info: ModelInfo, weights: dict[str, Tensor], tokenizers: Tokenizers, max_positions: int
) -> Any:
    """Return a valid `TransformerSpec` with the weights and vocabularies of a model.

    Raises `NmtError` if CTranslate2 is not installed.
    """
    model_config = info.model
    # layers take NumPy arrays; `_set_positions` takes `weights`, since it computes with torch
    arrays: Arrays = {name: tensor.float().numpy() for name, tensor in weights.items()}
    spec = _new_spec(model_config)
    _set_stack(spec.encoder, "encoder", model_config, arrays)
    _set_positions(spec.encoder, "encoder", model_config, weights, max_positions)
    _set_stack(spec.decoder, "decoder", model_config, arrays)
    _set_positions(spec.decoder, "decoder", model_config, weights, max_positions)
    src_embedding = "embedding.weight" if info.src_vocab_size is None else "src_embedding.weight"
    spec.encoder.embeddings[0].weight = arrays[src_embedding]  # (V, D)
    spec.decoder.embeddings.weight = arrays["embedding.weight"]  # (V, D)
    output_matrix = "embedding.weight" if model_config.tied_output else "output_weight"
    spec.decoder.projection.weight = arrays[output_matrix]  # (V, D)
    if model_config.output_bias:
        spec.decoder.projection.bias = arrays["output_bias"]  # (V,)
    tgt = tokenizers.tgt
    tgt_pieces = tgt.all_pieces()
    spec.register_source_vocabulary(tokenizers.src.all_pieces())
    spec.register_target_vocabulary(tgt_pieces)
    # these symbols have the same names in the source vocabulary
    spec.config.unk_token = tgt_pieces[tgt.unk_id]
    spec.config.bos_token = tgt_pieces[tgt.bos_id]
    spec.config.decoder_start_token = tgt_pieces[tgt.bos_id]
    spec.config.eos_token = tgt_pieces[tgt.eos_id]
    spec.config.add_source_eos = model_config.source_eos
    spec.config.layer_norm_epsilon = NORM_EPS
    spec.validate()
    return spec


def _new_spec(model_config: ModelConfig) -> Any:
    """Return a `TransformerSpec` of this architecture. It has no weights yet."""
    try:
        from ctranslate2.specs import TransformerSpec, common_spec, transformer_spec
    except ImportError:
        raise NmtError("format=ctranslate2 needs CTranslate2; pip install nmt[export]") from None
    options = {
        "pre_norm": model_config.norm is Norm.pre,
        "activation": common_spec.Activation[_ACTIVATIONS[model_config.activation]],
        "ffn_glu": model_config.activation is Activation.swiglu,
        "rms_norm": model_config.norm_layer is NormLayer.rms,
        "num_heads_kv": model_config.num_kv_heads,
        "qk_norm": model_config.qk_norm,
        "relative_position": model_config.positions is Positions.relative,
        "relative_attention_bias": model_config.positions is Positions.alibi,
    }
    if model_config.positions is Positions.rotary:
        options["rotary_dim"] = 0  # 0 stands for all dimensions of a head
    encoder = transformer_spec.TransformerEncoderSpec(
        model_config.num_encoder_layers, model_config.num_heads, **options
    )
    decoder = transformer_spec.TransformerDecoderSpec(
        model_config.num_decoder_layers,
        model_config.num_heads,
        alignment_layer=alignment_layer(model_config.num_decoder_layers),
        alignment_heads=model_config.alignment_heads or model_config.num_heads,
        **options,
    )
    return TransformerSpec(encoder, decoder)


def _set_stack(stack: Any, stack_name: str, model_config: ModelConfig, arrays: Arrays) -> None:
    """Assign the embedding scale, the layers and the final norm of the encoder or decoder."""
    stack.scale_embeddings = model_config.scale_embedding
    for i, layer in enumerate(stack.layer):
        _set_layer(layer, arrays, f"{stack_name}_layers.{i}")
    if model_config.norm is Norm.pre:
        _set_norm(stack.layer_norm, arrays, f"{stack_name}_norm")


def _set_positions(
    stack: Any,
    stack_name: str,
    model_config: ModelConfig,
    weights: dict[str, Tensor],
    max_positions: int,
) -> None:
    """Assign the positional encoding of the encoder or decoder.

    An encoding that is added to embeddings has one table for the stack. Others have a table in the
    self-attention of each layer. Rotary positions have no table.
    """
    if model_config.positions.is_added_to_embeddings:
        table = make_position_table(model_config, stack_name, weights, max_positions).float()
        stack.position_encodings.encodings = table.numpy()  # (P, D)
    elif model_config.positions is Positions.relative:
        for i, layer in enumerate(stack.layer):
            prefix = f"{stack_name}_layers.{i}.self_attention.relation"
            keys = weights[f"{prefix}.keys"].float()  # (2K+1, D/H)
            values = weights[f"{prefix}.values"].float()  # (2K+1, D/H)
            layer.self_attention.relative_position_keys = keys.numpy()
            layer.self_attention.relative_position_values = values.numpy()
    elif model_config.positions is Positions.alibi:
        _set_alibi(stack, model_config, max_positions, is_bidirectional=stack_name == "encoder")


def _set_alibi(
    stack: Any, model_config: ModelConfig, max_positions: int, *, is_bidirectional: bool
) -> None:
    """Assign the biases of ALiBi in the form of T5's relative attention biases.

    CTranslate2 has ALiBi in decoders only, but T5's biases in both stacks. T5's biases are a table
    with a bias for each bucket of distances and each head. For each direction, to earlier or to
    later tokens, the first half of the buckets holds one distance each: 0, 1, 2, ... So with
    `2 * max_positions` buckets, all distances below `max_positions` have a bucket of their own.
    """
    num_buckets = 2 * max_positions
    distances = torch.arange(num_buckets)[None]  # (1, 2P)
    # `Alibi.bias` only uses the dtype and the device of the queries
    queries = torch.zeros(())
    bias = Alibi(model_config).bias(queries, distances)  # (H, 1, 2P)
    table = bias.squeeze(1).T  # (2P, H)
    if is_bidirectional:
        # buckets of earlier tokens, then buckets of later tokens, with the same biases
        table = torch.cat([table, table])  # (4P, H)
    bias_array = table.contiguous().numpy()
    for layer in stack.layer:
        attention = layer.self_attention
        attention.relative_attention_bias = bias_array
        # CTranslate2 needs the type int32
        attention.relative_attention_max_distance = np.int32(num_buckets)


def _set_layer(layer: Any, arrays: Arrays, layer_name: str) -> None:
    """Assign the weights of one layer. A layer of the decoder also has cross-attention."""
    attention = layer.self_attention
    attention_name = f"{layer_name}.self_attention"
    _set_linear(attention.linear[0], arrays, f"{attention_name}.in_projection")  # (D + 2E, D)
    _set_linear(attention.linear[1], arrays, f"{attention_name}.out_projection")  # (D, D)
    _set_norm(attention.layer_norm, arrays, f"{attention_name}_norm")
    if hasattr(attention, "q_norm"):
        _set_norm(attention.q_norm, arrays, f"{attention_name}.query_norm")  # (D/H,)
        _set_norm(attention.k_norm, arrays, f"{attention_name}.key_norm")
    if hasattr(layer, "attention"):
        _set_cross_attention(layer.attention, arrays, f"{layer_name}.cross_attention")
    # CTranslate2 applies the activation to `linear_0`, and a gated layer also has `linear_0_noact`
    is_gated = hasattr(layer.ffn, "linear_0_noact")
    if is_gated:
        _set_linear(layer.ffn.linear_0, arrays, f"{layer_name}.feed_forward.gate")  # (F, D)
        _set_linear(layer.ffn.linear_0_noact, arrays, f"{layer_name}.feed_forward.inner")  # (F, D)
    else:
        _set_linear(layer.ffn.linear_0, arrays, f"{layer_name}.feed_forward.inner")  # (F, D)
    _set_linear(layer.ffn.linear_1, arrays, f"{layer_name}.feed_forward.outer")  # (D, F)
    _set_norm(layer.ffn.layer_norm, arrays, f"{layer_name}.feed_forward_norm")


def _set_cross_attention(attention: Any, arrays: Arrays, name: str) -> None:
    """Assign a cross-attention: one linear layer for queries, another for keys and values."""
    if hasattr(attention, "q_norm"):  # nmt normalizes queries and keys in self-attention only
        del attention.q_norm
        del attention.k_norm
    queries, keys_values, output = attention.linear
    weight = arrays[f"{name}.in_projection.weight"]  # (D + 2E, D)
    bias = arrays[f"{name}.in_projection.bias"]  # (D + 2E,)
    d_model = weight.shape[1]
    queries.weight = weight[:d_model]  # (D, D)
    queries.bias = bias[:d_model]
    keys_values.weight = weight[d_model:]  # (2E, D)
    keys_values.bias = bias[d_model:]
    _set_linear(output, arrays, f"{name}.out_projection")
    _set_norm(attention.layer_norm, arrays, f"{name}_norm")


def _set_linear(linear: Any, arrays: Arrays, name: str) -> None:
    """Assign the weight of a linear layer, and its bias if it has one."""
    linear.weight = arrays[f"{name}.weight"]
    if f"{name}.bias" in arrays:
        linear.bias = arrays[f"{name}.bias"]


def _set_norm(norm: Any, arrays: Arrays, name: str) -> None:
    """Assign the scale of a normalization layer, and its bias if it has one."""
    norm.gamma = arrays[f"{name}.weight"]
    if f"{name}.bias" in arrays:  # an RMS norm has none
        norm.beta = arrays[f"{name}.bias"]
