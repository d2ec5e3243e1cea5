"""Names and shapes of tensors in Marian's two implementations of the Transformer.

The setting `type` of a model selects one of them:

- `transformer`, which all versions of Marian and Bergamot have, computes the positions of
  `sinusoidal_concat`. In a pre-norm decoder, self-attention normalizes the input of queries, but
  not the input of keys and values of earlier tokens.
- `transformer-new`, which Marian has since version 1.12.23, normalizes the input of queries, keys
  and values, and can read a table of positions. The names of its tensors are expressions in C++.
"""

# D d_model

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from nmt.config import Activation, ModelConfig, Norm
from nmt.export.huggingface import Weights

Arrays = dict[str, np.ndarray[Any, Any]]
Rule = tuple[str, str | Callable[[re.Match[str]], str]]
"""A pattern and a replacement for `re.sub`, to rename tensors of MarianMT in transformers."""
# Each rule reads the results of earlier ones.
_EMBEDDING_RULES: list[Rule] = [
    (r"^model\.shared\.weight$", "Wemb"),
    (r"^model\.(encoder|decoder)\.embed_tokens\.weight$", r"\1_Wemb"),
    (r"^final_logits_bias$", "decoder_ff_logit_out_b"),
    (r"^lm_head\.weight$", "decoder_ff_logit_out_W"),
]
_RULES: list[Rule] = [
    *_EMBEDDING_RULES,
    (r"^model\.", ""),
    (r"\.layers\.(\d+)\.", lambda match: f"_l{int(match[1]) + 1}_"),  # counts layers from 1
    # the SSRU, a recurrent unit that replaces the self-attention of a decoder
    (r"ssru_layer_norm", "rnn_ffn_ln"),
    (r"ssru\.candidate\.weight$", "rnn_W"),
    (r"ssru\.forget_gate\.weight$", "rnn_Wf"),
    (r"ssru\.forget_gate\.bias$", "rnn_bf"),
    (r"self_attn_layer_norm", "self_Wo_ln"),
    (r"encoder_attn_layer_norm", "context_Wo_ln"),
    (r"final_layer_norm", "ffn_ffn_ln"),
    (r"\.layer_norm", "_top_ln"),
    (r"_ln\.weight$", "_ln_scale"),
    (r"_ln\.bias$", "_ln_bias"),
    (r"self_attn\.", "self_"),
    (r"encoder_attn\.", "context_"),
    (r"_([qkv])_proj\.weight$", r"_W\1"),
    (r"_([qkv])_proj\.bias$", r"_b\1"),
    (r"_out_proj\.weight$", "_Wo"),
    (r"_out_proj\.bias$", "_bo"),
    (r"fc([12])\.weight$", r"ffn_W\1"),
    (r"fc([12])\.bias$", r"ffn_b\1"),
]
# For example, these rules change model.encoder.layers.0.self_attn.out_proj.weight in steps, to
#   TransformerBatchEncoder->encoder->layers.0.self_attn.out_proj.weight
#   ...layers->at(0)->as<marian::nn::TransformerEncoderLayer>()->self_attn.out_proj.weight
#   ...selfAttentionBlock.out_proj.weight
#   ...selfAttentionBlock->selfAttention->outProj->weight
#   ...selfAttentionBlock->selfAttention->oProj->weight
# `make_transformer_new_arrays` adds rules that depend on the model, for the names of norms, such as
# selfAttentionBlock_layer_norm.weight, and of feed-forward networks, such as fc1.weight.
_NEW_RULES: list[Rule] = [
    *_EMBEDDING_RULES,
    (r"^model\.encoder\.", "TransformerBatchEncoder->encoder->"),
    (r"^model\.decoder\.", "TransformerBatchDecoder->decoder->"),
    (r"->embed_positions\.weight$", "->positionEmbedding->embeddings"),
    (r"->layer_norm\.", "->postprocessor->norm->"),  # the norm after the last layer
    (r"(encoder->layers)\.(\d+)\.", r"\1->at(\2)->as<marian::nn::TransformerEncoderLayer>()->"),
    (
        r"(decoder->layers)\.(\d+)\.",
        r"\1->at(\2)->as<marian::nn::TransformerDecoderLayerWithCrossAttention>()->",
    ),
    (r"(EncoderLayer>\(\)->)self_attn", r"\1selfAttentionBlock"),
    (r"(CrossAttention>\(\)->)self_attn", r"\1autoRegressiveBlock"),
    (r"->encoder_attn", "->crossAttentionBlock"),
    (r"->final_layer_norm", "->filterBlock_layer_norm"),
    (
        r"(selfAttention|autoRegressive)Block\.([qkv]|out)_proj\.",
        r"\1Block->selfAttention->\2Proj->",
    ),
    (r"crossAttentionBlock\.([qkv]|out)_proj\.", r"crossAttentionBlock->crossAttention->\1Proj->"),
    (r"->outProj->", "->oProj->"),
]


def make_transformer_arrays(model: ModelConfig, weights: Weights) -> Arrays:
    """Return the arrays for `type: transformer`, from weights with the names of MarianMT."""
    arrays = {}
    for name, tensor in weights.items():
        if "embed_positions" in name:  # Marian computes them
            continue
        marian_name = _rename(name, _RULES)
        is_sublayer_norm = re.search("_(Wo|ffn)_ln_", marian_name) is not None
        if model.norm is Norm.pre and is_sublayer_norm:
            marian_name += "_pre"  # without this suffix, Marian would apply it after the sub-layer
            # the pre-norm of an SSRU has another name than its post-norm
            marian_name = marian_name.replace("rnn_ffn_ln", "rnn_ln")
        array = tensor.float()
        if array.dim() == 1:
            array = array[None]  # (1, D)
        elif re.search("_W.?$", marian_name):  # a linear layer, such as self_Wq or rnn_W
            array = array.T  # (in, out)
        arrays[marian_name] = array.contiguous().numpy()
    return arrays


def make_transformer_new_arrays(
    model: ModelConfig, weights: Weights, *, has_position_table: bool
) -> Arrays:
    """Return the arrays for `type: transformer-new`, from weights with the names of MarianMT.

    Unless `has_position_table`, Marian computes the positions.
    """
    # The feed-forward network is a list of layers: Linear, activation, dropout and Linear. With
    # ReLU, the first three are fused into one layer.
    inner = "at(0)->as<marian::nn::Linear>()"
    outer = "at(3)->as<marian::nn::Linear>()"
    if model.activation is Activation.relu:
        inner = "at(0)->as<marian::nn::LinearReluDropout>()"
        outer = "at(1)->as<marian::nn::Linear>()"
    norm = "preprocessor" if model.norm is Norm.pre else "postprocessor"
    rules: list[Rule] = [
        *_NEW_RULES,
        (r"->fc1\.", f"->filterBlock->layers->{inner}->"),
        (r"->fc2\.", f"->filterBlock->layers->{outer}->"),
        (r"Block_layer_norm\.", f"Block->{norm}->norm->"),
    ]
    arrays = {}
    for name, tensor in weights.items():
        if "embed_positions" in name and not has_position_table:
            continue
        marian_name = _rename(name, rules)
        array = tensor.float()
        is_output_matrix = marian_name == "decoder_ff_logit_out_W"
        if is_output_matrix or (array.dim() == 2 and marian_name.endswith("->weight")):
            array = array.T  # (in, out)
        arrays[marian_name] = array.contiguous().numpy()
    return arrays


def _rename(name: str, rules: list[Rule]) -> str:
    """Apply all rules to a name, in their order."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
