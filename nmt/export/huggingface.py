"""Export to Hugging Face transformers. The library need not be installed.

A post-norm model becomes a MarianMT model. A pre-norm model becomes an M2M100 model if it has the
positions that M2M100 computes, else a Pegasus model, which is MarianMT with pre-norm.

In the positional encoding of MarianMT, all sines come before all cosines. If a model interleaves
them, the export permutes the D dimensions of the residual stream in all weights that read or write
it. The permutation is called `order`.
"""

# D d_model, F d_ff, V vocab, P positions

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
_MAX_LENGTH = 512  # tokens that `generate` writes by default
# values of `model_type`
MARIAN = "marian"
M2M100 = "m2m_100"
PEGASUS = "pegasus"
_CLASSES = {
    MARIAN: "MarianMTModel",
    M2M100: "M2M100ForConditionalGeneration",
    PEGASUS: "PegasusForConditionalGeneration",
}
ACTIVATIONS = {Activation.relu: "relu", Activation.gelu: "gelu", Activation.silu: "silu"}


def write_huggingface(
    folder: Path, info: ModelInfo, weights: Weights, tokenizers: Tokenizers, config: ExportConfig
) -> None:
    """Write the files that `AutoModelForSeq2SeqLM` and `AutoTokenizer` read into `folder`.

    Raises `ModelError` for separate vocabularies of a pre-norm model, and for separate vocabularies
    with different ids of control symbols.
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
    dtype = getattr(torch, config.quantization.value)
    tensors = rename_weights(model_type, info, weights, config.max_positions)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_weights(folder / "model.safetensors", tensors)
    special_ids = {
        "pad_token_id": tgt.pad_id,
        "bos_token_id": tgt.bos_id,
        "eos_token_id": tgt.eos_id,
        "decoder_start_token_id": tgt.bos_id,
    }
    write_json(folder / "config.json", _make_config(model_type, info, special_ids, config))
    generation = {  # defaults of `generate`, as close to ours as possible (docs/export.md)
        "num_beams": info.search.beam_size,
        "length_penalty": info.search.length_exponent,
        "max_length": min(_MAX_LENGTH, config.max_positions),
        "bad_words_ids": [[token] for token in forbidden_ids(tgt)],
        **special_ids,
    }
    if tgt.prefix:
        generation["forced_bos_token_id"] = tgt.prefix[0]
    write_json(folder / "generation_config.json", generation)
    _write_tokenizer(folder, info, tokenizers, config.max_positions)


def choose_model_type(info: ModelInfo, tokenizers: Tokenizers) -> str:
    """Return the `model_type` of transformers for this architecture."""
    config = info.model
    if config.norm is Norm.post:
        return MARIAN
    is_m2m100 = (
        config.positions is Positions.sinusoidal_concat
        and config.position_offset == tokenizers.tgt.pad_id + 1
        and not config.output_bias
    )
    return M2M100 if is_m2m100 else PEGASUS


def rename_weights(
    model_type: str, info: ModelInfo, weights: Weights, max_positions: int
) -> Weights:
    """Return the weights under the names of transformers, permuted if the positions require it.

    MarianMT and Pegasus models get position tables, since transformers computes only the positional
    encoding of Marian, with positions counted from 0.
    """
    config = info.model
    order = torch.arange(config.d_model)  # (D,)
    if config.positions is Positions.sinusoidal:
        order = torch.cat([order[0::2], order[1::2]])  # all sines before all cosines
    embedding = weights["embedding.weight"][:, order]  # (V, D)
    renamed: Weights = {}
    if model_type != M2M100:
        bias = weights.get("output_bias", torch.zeros(embedding.size(0)))
        renamed["final_logits_bias"] = bias[None]  # (1, V)
    if not config.tied_output:
        renamed["lm_head.weight"] = weights["output_weight"][:, order]  # (V, D)
    if info.src_vocab_size is None:
        renamed["model.shared.weight"] = embedding
        if not config.tied_output:  # transformers then also reads a copy for encoder and decoder
            renamed["model.encoder.embed_tokens.weight"] = embedding.clone()
            renamed["model.decoder.embed_tokens.weight"] = embedding.clone()
    else:
        renamed["model.encoder.embed_tokens.weight"] = weights["src_embedding.weight"][:, order]
        renamed["model.decoder.embed_tokens.weight"] = embedding
    depths = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    for stack, depth in depths.items():
        if model_type != M2M100:
            table = position_table(config, stack, weights, max_positions)  # (P, D)
            renamed[f"model.{stack}.embed_positions.weight"] = table[:, order].clone()
        if config.norm is Norm.pre:
            renamed |= _permute_output(weights, f"{stack}_norm", f"model.{stack}.layer_norm", order)
        for i in range(depth):
            renamed |= _rename_layer(
                weights, f"{stack}_layers.{i}", f"model.{stack}.layers.{i}", order
            )
    return renamed


def position_table(config: ModelConfig, stack: str, weights: Weights, length: int) -> Tensor:
    """Return the positions (P, D) that the encoder or decoder adds to embeddings; P = `length`.

    Positions beyond a learned table use its last row.
    """
    if config.positions is Positions.learned:
        table = weights[f"{stack}_positions"]
        return table[torch.arange(length).clamp(max=len(table) - 1)]
    return sinusoidal_positions(length, config.d_model, config.positions, config.position_offset)


def _rename_layer(weights: Weights, ours: str, theirs: str, order: Tensor) -> Weights:
    """Rename the weights of one layer, from the prefix `ours` to the prefix `theirs`.

    Dimensions inside heads and feed-forward layers keep their order.
    """
    renamed = _rename_attention(weights, f"{ours}.self_attention", f"{theirs}.self_attn", order)
    if f"{ours}.cross_attention_norm.weight" in weights:
        renamed |= _rename_attention(
            weights, f"{ours}.cross_attention", f"{theirs}.encoder_attn", order
        )
    inner = f"{ours}.feed_forward.inner"
    renamed[f"{theirs}.fc1.weight"] = weights[f"{inner}.weight"][:, order]  # (F, D)
    renamed[f"{theirs}.fc1.bias"] = weights[f"{inner}.bias"]
    renamed |= _permute_output(weights, f"{ours}.feed_forward.outer", f"{theirs}.fc2", order)
    norm = f"{theirs}.final_layer_norm"
    return renamed | _permute_output(weights, f"{ours}.feed_forward_norm", norm, order)


def _rename_attention(weights: Weights, ours: str, theirs: str, order: Tensor) -> Weights:
    """Rename an attention and its norm; one projection (3D, D) becomes three (D, D)."""
    renamed: Weights = {}
    projections = weights[f"{ours}.in_projection.weight"].chunk(3)
    biases = weights[f"{ours}.in_projection.bias"].chunk(3)
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        renamed[f"{theirs}.{name}.weight"] = projections[i][:, order]  # (D, D)
        renamed[f"{theirs}.{name}.bias"] = biases[i].clone()  # (D,)
    renamed |= _permute_output(weights, f"{ours}.out_projection", f"{theirs}.out_proj", order)
    return renamed | _permute_output(weights, f"{ours}_norm", f"{theirs}_layer_norm", order)


def _permute_output(weights: Weights, ours: str, theirs: str, order: Tensor) -> Weights:
    """Rename a linear layer or norm that writes to the residual stream, and permute its output."""
    return {
        f"{theirs}.weight": weights[f"{ours}.weight"][order],  # (D, ...)
        f"{theirs}.bias": weights[f"{ours}.bias"][order],  # (D,)
    }


def _make_config(
    model_type: str, info: ModelInfo, special_ids: dict[str, int], export: ExportConfig
) -> dict[str, Any]:
    """Return the content of `config.json`."""
    config = info.model
    return {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "is_encoder_decoder": True,
        "vocab_size": info.src_vocab_size or info.vocab_size,
        "decoder_vocab_size": info.vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.num_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.decoder_d_ff or config.d_ff,
        "activation_function": ACTIVATIONS[config.activation],
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "max_position_embeddings": export.max_positions,
        "scale_embedding": config.scale_embedding,
        "share_encoder_decoder_embeddings": info.src_vocab_size is None,
        "tie_word_embeddings": config.tied_output,
        "torch_dtype": export.quantization.value,
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
    write_json(path, {piece: i for i, piece in enumerate(tokenizer.all_pieces())})
