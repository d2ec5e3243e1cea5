"""Export to Hugging Face transformers. The library need not be installed.

A post-norm model becomes a MarianMT model. A pre-norm model becomes an M2M100 model if it has the
positional encoding of M2M100, else a Pegasus model, which is MarianMT with pre-norm.

In the positional encoding of MarianMT, all sines come before all cosines. If a model interleaves
them, the export permutes the D dimensions of the residual stream, which does not change the output.
This permutes the columns of weights that read the stream, and the rows of weights and the biases
that write to it.
"""

# Shapes: D d_model, F d_ff, V vocab, P positions. A stack is "encoder" or "decoder".

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt.checkpoint import ModelInfo, save_weights
from nmt.config import Activation, ExportConfig, ModelConfig, Norm, Positions
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ModelError
from nmt.model.positions import sinusoidal_positions
from nmt.runtime.files import write_json
from nmt.search.constraints import forbidden_ids

Weights = dict[str, Tensor]
# default length limit of `generate`, lower in models with fewer positions
_MAX_GENERATED_TOKENS = 512
# `model_type` in config.json
MARIAN = "marian"
M2M100 = "m2m_100"
PEGASUS = "pegasus"
_MODEL_CLASSES = {
    MARIAN: "MarianMTModel",
    M2M100: "M2M100ForConditionalGeneration",
    PEGASUS: "PegasusForConditionalGeneration",
}
ACTIVATIONS = {Activation.relu: "relu", Activation.gelu: "gelu", Activation.silu: "silu"}


def write_huggingface(
    folder: Path, info: ModelInfo, weights: Weights, tokenizers: Tokenizers, config: ExportConfig
) -> None:
    """Write into `folder` the files that `AutoModelForSeq2SeqLM` and `AutoTokenizer` load.

    Raises `ModelError` for a pre-norm model with separate vocabularies, and for vocabularies that
    give control symbols different ids.
    """
    model_type = choose_model_type(info, tokenizers)
    if model_type != MARIAN and info.src_vocab_size is not None:
        raise ModelError(
            "the model has model.norm=pre and a vocabulary for each language, and transformers has "
            "no such class; use format=ctranslate2"
        )
    tgt = tokenizers.tgt
    if tokenizers.src.control_ids != tgt.control_ids:
        raise ModelError(
            "transformers needs the same ids of control symbols in both vocabularies, and this "
            f"model has {tokenizers.src.control_ids} and {tgt.control_ids}; use format=ctranslate2"
        )
    dtype = getattr(torch, config.quantization.value)  # the config accepts only torch's dtypes here
    renamed = rename_weights(model_type, info, weights, config.max_positions)
    converted = {name: weight.to(dtype).contiguous() for name, weight in renamed.items()}
    save_weights(folder / "model.safetensors", converted)
    special_ids = {
        "pad_token_id": tgt.pad_id,
        "bos_token_id": tgt.bos_id,
        "eos_token_id": tgt.eos_id,
        "decoder_start_token_id": tgt.bos_id,
    }
    write_json(folder / "config.json", _make_config(model_type, info, special_ids, config))
    generation_config = {  # search settings of `generate`, as close to ours as possible
        "num_beams": info.search.beam_size,
        "length_penalty": info.search.length_exponent,
        "max_length": min(_MAX_GENERATED_TOKENS, config.max_positions),
        "bad_words_ids": [[token_id] for token_id in forbidden_ids(tgt)],
        **special_ids,
    }
    if tgt.prefix_ids:  # the token that starts every translation, such as the target language
        generation_config["forced_bos_token_id"] = tgt.prefix_ids[0]
    write_json(folder / "generation_config.json", generation_config)
    _write_tokenizer(folder, info, tokenizers, config.max_positions)


def choose_model_type(info: ModelInfo, tokenizers: Tokenizers) -> str:
    """Return the `model_type` of transformers for this architecture."""
    model_config = info.model
    if model_config.norm is Norm.post:
        return MARIAN
    is_m2m100 = (
        model_config.positions is Positions.sinusoidal_concat
        and model_config.position_offset == tokenizers.tgt.pad_id + 1
        and not model_config.output_bias
    )
    return M2M100 if is_m2m100 else PEGASUS


def rename_weights(
    model_type: str, info: ModelInfo, weights: Weights, max_positions: int
) -> Weights:
    """Return the weights under the names of transformers, permuted if the positions require it.

    MarianMT and Pegasus models get position tables with all positions of this model's encoding.
    Without tables, transformers would compute Marian's encoding, with positions counted from 0.
    """
    model_config = info.model
    permutation = torch.arange(model_config.d_model)  # (D,), keeps the order
    if model_config.positions is Positions.sinusoidal:
        # moves all sines before all cosines
        permutation = torch.cat([permutation[0::2], permutation[1::2]])
    renamed = _rename_embeddings(model_type, info, weights, permutation)
    depths = {
        "encoder": model_config.num_encoder_layers,
        "decoder": model_config.num_decoder_layers,
    }
    for stack, depth in depths.items():
        if model_type != M2M100:
            table = make_position_table(model_config, stack, weights, max_positions)  # (P, D)
            renamed[f"model.{stack}.embed_positions.weight"] = table[:, permutation]
        if model_config.norm is Norm.pre:
            renamed |= _rename_output(
                weights, f"{stack}_norm", f"model.{stack}.layer_norm", permutation
            )
        for i in range(depth):
            renamed |= _rename_layer(
                weights, f"{stack}_layers.{i}", f"model.{stack}.layers.{i}", permutation
            )
    return renamed


def _rename_embeddings(
    model_type: str, info: ModelInfo, weights: Weights, permutation: Tensor
) -> Weights:
    """Rename the embeddings, the output layer and its bias, and permute the residual stream."""
    is_tied = info.model.tied_output
    embedding = weights["embedding.weight"][:, permutation]  # (V, D)
    renamed: Weights = {}
    if model_type != M2M100:
        bias = weights.get("output_bias", torch.zeros(embedding.size(0)))
        renamed["final_logits_bias"] = bias[None]  # (1, V)
    if not is_tied:
        renamed["lm_head.weight"] = weights["output_weight"][:, permutation]  # (V, D)
    if info.src_vocab_size is None:  # source and target share one embedding
        renamed["model.shared.weight"] = embedding
        if not is_tied:  # transformers then needs a copy in each stack
            renamed["model.encoder.embed_tokens.weight"] = embedding.clone()
            renamed["model.decoder.embed_tokens.weight"] = embedding.clone()
    else:
        src_embedding = weights["src_embedding.weight"][:, permutation]  # (V, D)
        renamed["model.encoder.embed_tokens.weight"] = src_embedding
        renamed["model.decoder.embed_tokens.weight"] = embedding
    return renamed


def make_position_table(
    model_config: ModelConfig, stack: str, weights: Weights, num_positions: int
) -> Tensor:
    """Return the vectors (P, D) of the first `num_positions` positions.

    Positions beyond the end of a learned table get its last vector.
    """
    if model_config.positions is Positions.learned:
        table = weights[f"{stack}_positions"]
        return table[torch.arange(num_positions).clamp(max=len(table) - 1)]
    return sinusoidal_positions(
        num_positions, model_config.d_model, model_config.positions, model_config.position_offset
    )


def _rename_layer(
    weights: Weights, our_prefix: str, their_prefix: str, permutation: Tensor
) -> Weights:
    """Rename the weights of one layer and permute the residual stream.

    Dimensions inside heads and feed-forward layers keep their order.
    """
    if f"{our_prefix}.ssru_norm.weight" in weights:
        renamed = _rename_ssru(weights, f"{our_prefix}.ssru", f"{their_prefix}.ssru", permutation)
    else:
        renamed = _rename_attention(
            weights, f"{our_prefix}.self_attention", f"{their_prefix}.self_attn", permutation
        )
    if f"{our_prefix}.cross_attention_norm.weight" in weights:
        renamed |= _rename_attention(
            weights, f"{our_prefix}.cross_attention", f"{their_prefix}.encoder_attn", permutation
        )
    inner = f"{our_prefix}.feed_forward.inner"
    renamed[f"{their_prefix}.fc1.weight"] = weights[f"{inner}.weight"][:, permutation]  # (F, D)
    renamed[f"{their_prefix}.fc1.bias"] = weights[f"{inner}.bias"]
    renamed |= _rename_output(
        weights, f"{our_prefix}.feed_forward.outer", f"{their_prefix}.fc2", permutation
    )
    return renamed | _rename_output(
        weights,
        f"{our_prefix}.feed_forward_norm",
        f"{their_prefix}.final_layer_norm",
        permutation,
    )


def _rename_ssru(
    weights: Weights, our_prefix: str, their_prefix: str, permutation: Tensor
) -> Weights:
    """Rename an SSRU and its norm.

    transformers has no SSRU. The export to Marian changes these names again.
    """
    renamed: Weights = {}
    for name in ("candidate.weight", "forget_gate.weight"):
        weight = weights[f"{our_prefix}.{name}"]  # (D, D)
        renamed[f"{their_prefix}.{name}"] = weight[permutation][:, permutation]
    bias = weights[f"{our_prefix}.forget_gate.bias"]  # (D,)
    renamed[f"{their_prefix}.forget_gate.bias"] = bias[permutation]
    return renamed | _rename_output(
        weights, f"{our_prefix}_norm", f"{their_prefix}_layer_norm", permutation
    )


def _rename_attention(
    weights: Weights, our_prefix: str, their_prefix: str, permutation: Tensor
) -> Weights:
    """Rename an attention and its norm. One projection (3D, D) becomes three (D, D)."""
    renamed: Weights = {}
    projections = weights[f"{our_prefix}.in_projection.weight"].chunk(3)
    biases = weights[f"{our_prefix}.in_projection.bias"].chunk(3)
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        renamed[f"{their_prefix}.{name}.weight"] = projections[i][:, permutation]  # (D, D)
        # safetensors refuses tensors that share memory, so this is a copy
        renamed[f"{their_prefix}.{name}.bias"] = biases[i].clone()  # (D,)
    renamed |= _rename_output(
        weights, f"{our_prefix}.out_projection", f"{their_prefix}.out_proj", permutation
    )
    return renamed | _rename_output(
        weights, f"{our_prefix}_norm", f"{their_prefix}_layer_norm", permutation
    )


def _rename_output(
    weights: Weights, our_prefix: str, their_prefix: str, permutation: Tensor
) -> Weights:
    """Rename a linear layer or norm that writes to the residual stream, and permute its output."""
    return {
        f"{their_prefix}.weight": weights[f"{our_prefix}.weight"][permutation],  # (D, ...)
        f"{their_prefix}.bias": weights[f"{our_prefix}.bias"][permutation],  # (D,)
    }


def _make_config(
    model_type: str, info: ModelInfo, special_ids: dict[str, int], config: ExportConfig
) -> dict[str, Any]:
    """Return the content of `config.json`."""
    model_config = info.model
    return {
        "architectures": [_MODEL_CLASSES[model_type]],
        "model_type": model_type,
        "is_encoder_decoder": True,
        "vocab_size": info.src_vocab_size or info.vocab_size,  # transformers: the source vocabulary
        "decoder_vocab_size": info.vocab_size,
        "d_model": model_config.d_model,
        "encoder_layers": model_config.num_encoder_layers,
        "decoder_layers": model_config.num_decoder_layers,
        "encoder_attention_heads": model_config.num_heads,
        "decoder_attention_heads": model_config.num_heads,
        "encoder_ffn_dim": model_config.d_ff,
        "decoder_ffn_dim": model_config.decoder_d_ff or model_config.d_ff,
        "activation_function": ACTIVATIONS[model_config.activation],
        "dropout": model_config.dropout,
        "attention_dropout": model_config.attention_dropout,
        "activation_dropout": model_config.activation_dropout,
        "max_position_embeddings": config.max_positions,
        "scale_embedding": model_config.scale_embedding,
        "share_encoder_decoder_embeddings": info.src_vocab_size is None,
        "tie_word_embeddings": model_config.tied_output,
        "torch_dtype": config.quantization.value,
        **special_ids,
        "forced_eos_token_id": None,
        "use_cache": True,
    }


def _write_tokenizer(
    folder: Path, info: ModelInfo, tokenizers: Tokenizers, max_positions: int
) -> None:
    """Write the files of `MarianTokenizer`."""
    (folder / "source.spm").write_bytes(tokenizers.src.model)
    (folder / "target.spm").write_bytes(tokenizers.tgt.model)
    has_separate_vocabularies = info.src_vocab_size is not None
    _write_vocabulary(folder / "vocab.json", tokenizers.src)
    if has_separate_vocabularies:
        _write_vocabulary(folder / "target_vocab.json", tokenizers.tgt)
    pad, unk, bos, eos = tokenizers.tgt.pieces(tokenizers.tgt.control_ids)
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": info.src_lang,
        "target_lang": info.tgt_lang,
        "pad_token": pad,
        "unk_token": unk,
        "bos_token": bos,
        "eos_token": eos,
        "model_max_length": max_positions,
        "separate_vocabs": has_separate_vocabularies,
        "split_special_tokens": True,  # "</s>" in a user's text is text
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)


def _write_vocabulary(path: Path, tokenizer: Tokenizer) -> None:
    """Write a JSON object that maps each piece to its id."""
    write_json(path, {piece: piece_id for piece_id, piece in enumerate(tokenizer.all_pieces())})
