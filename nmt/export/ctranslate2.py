"""A model as CTranslate2's Transformer: fills a `TransformerSpec` of that library, which then does
the file format, aliases and quantization.
"""

# D d_model, F d_ff, V vocab, P positions

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
from nmt.export.huggingface import positions_table
from nmt.model.transformer import alignment_layer
from nmt.model.variants import NORM_EPS, Alibi

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
_ACTIVATIONS = {Activation.relu: "RELU", Activation.gelu: "GELU", Activation.silu: "SWISH"}
_ACTIVATIONS[Activation.swiglu] = "SWISH"  # of the gate


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
    model, weights = info.model, {name: t.float().numpy() for name, t in tensors.items()}
    spec = _new_spec(model)
    for stack, name in ((spec.encoder, "encoder"), (spec.decoder, "decoder")):
        _set_positions(stack, name, model, tensors, config.max_positions)
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


def _new_spec(model: ModelConfig) -> Any:
    """Return CTranslate2's description of a model, without weights."""
    try:
        from ctranslate2.specs import TransformerSpec, common_spec, transformer_spec
    except ImportError:
        raise NmtError("format=ctranslate2 needs CTranslate2; pip install nmt[export]") from None
    parts = {
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
    alignment = {
        "alignment_layer": alignment_layer(model.num_decoder_layers),
        "alignment_heads": model.num_heads,
    }
    sizes = model.num_encoder_layers, model.num_heads
    encoder = transformer_spec.TransformerEncoderSpec(*sizes, **parts)
    sizes = model.num_decoder_layers, model.num_heads
    decoder = transformer_spec.TransformerDecoderSpec(*sizes, **parts, **alignment)
    return TransformerSpec(encoder, decoder)


def _set_positions(
    stack: Any, name: str, model: ModelConfig, tensors: dict[str, Tensor], max_positions: int
) -> None:
    """Fill what says where tokens stand: a table added to embeddings, or a part of self-attention.

    CTranslate2 has ALiBi in decoders alone; here it is T5's bias, one number for each head and
    distance up to `max_positions`.
    """
    layout = model.positions
    if layout.is_added:
        table = positions_table(model, name, tensors, max_positions).float()
        stack.position_encodings.encodings = table.numpy()  # (P, D)
    for i, layer in enumerate(stack.layer):
        attention = layer.self_attention
        if layout is Positions.relative:
            for kind in ("keys", "values"):  # (2K+1, D/H)
                weight = tensors[f"{name}_layers.{i}.self_attention.relation.{kind}"]
                setattr(attention, f"relative_position_{kind}", weight.float().numpy())
        elif layout is Positions.alibi:
            # T5 has the first half of the distances each for itself, and of an encoder's two sides
            places = torch.arange(2 * max_positions)[None]  # (1, 2P)
            bias = Alibi(model.num_heads).logits(torch.zeros(()), places)[:, 0].T  # (2P, H)
            bias = torch.cat([bias, bias]) if name == "encoder" else bias
            attention.relative_attention_bias = bias.contiguous().numpy()
            attention.relative_attention_max_distance = np.dtype("int32").type(2 * max_positions)


def _set_layer(spec: Any, weights: Arrays, name: str) -> None:
    """Fill one layer of the encoder, or of the decoder with its attention to the source."""
    attention = f"{name}.self_attention"
    _fill(spec.self_attention.linear[0], weights, f"{attention}.in_projection")  # (3D, D)
    _fill(spec.self_attention.linear[1], weights, f"{attention}.out_projection")
    _fill(spec.self_attention.layer_norm, weights, f"{attention}_norm")
    if hasattr(spec.self_attention, "q_norm"):
        _fill(spec.self_attention.q_norm, weights, f"{attention}.query_norm")  # (D/H,)
        _fill(spec.self_attention.k_norm, weights, f"{attention}.key_norm")
    if hasattr(spec, "attention"):
        if hasattr(spec.attention, "q_norm"):  # which ours has within a sentence alone
            del spec.attention.q_norm, spec.attention.k_norm
        attention = f"{name}.cross_attention"
        weight = weights[f"{attention}.in_projection.weight"]  # (3D, D)
        bias = weights[f"{attention}.in_projection.bias"]  # (3D,)
        queries, keys_values, output = spec.attention.linear
        d_model = weight.shape[1]
        queries.weight, queries.bias = weight[:d_model], bias[:d_model]
        keys_values.weight, keys_values.bias = weight[d_model:], bias[d_model:]  # (2D, D), (2D,)
        _fill(output, weights, f"{attention}.out_projection")
        _fill(spec.attention.layer_norm, weights, f"{attention}_norm")
    inner = spec.ffn.linear_0
    if hasattr(spec.ffn, "linear_0_noact"):
        inner = spec.ffn.linear_0_noact
        _fill(spec.ffn.linear_0, weights, f"{name}.feed_forward.gate")  # (F, D)
    _fill(inner, weights, f"{name}.feed_forward.inner")  # (F, D)
    _fill(spec.ffn.linear_1, weights, f"{name}.feed_forward.outer")  # (D, F)
    _fill(spec.ffn.layer_norm, weights, f"{name}.feed_forward_norm")


def _fill(spec: Any, weights: Arrays, name: str) -> None:
    """Fill a linear layer or a norm."""
    names = {"weight": "gamma", "bias": "beta"} if hasattr(spec, "gamma") else {}
    for ours in ("weight", "bias"):
        if f"{name}.{ours}" in weights:  # an RMS norm has no bias
            setattr(spec, names.get(ours, ours), weights[f"{name}.{ours}"])
