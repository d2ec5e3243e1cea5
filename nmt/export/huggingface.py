"""A model in Hugging Face transformers: weights, config and tokenizer files, written without that
library. Post-norm models become MarianMT; pre-norm ones Pegasus, which is MarianMT with pre-norm,
or M2M100 where they have its positions, which that computes itself.

MarianMT has all sines of the positional encoding before all cosines. For a model that interleaves
them, the D dimensions of everything that is added to the residual stream are reordered alike.
"""

# D d_model, F d_ff, V vocab, P positions

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt.checkpoint import ModelInfo, save_weights
from nmt.config import Activation, ExportConfig, ModelConfig, Norm, Positions
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ModelError
from nmt.model.transformer import sinusoidal_positions
from nmt.model.variants import lengthen
from nmt.runtime.files import write_json
from nmt.search.hypotheses import ControlIds

Weights = dict[str, Tensor]
_MAX_LENGTH = 512  # tokens that `generate` writes by default
_HEADS = ("q_proj", "k_proj", "v_proj")
MARIAN, M2M100, PEGASUS = "marian", "m2m_100", "pegasus"  # `model_type`
_CLASSES = {
    MARIAN: "MarianMTModel",
    M2M100: "M2M100ForConditionalGeneration",
    PEGASUS: "PegasusForConditionalGeneration",
}
ACTIVATIONS = {Activation.relu: "relu", Activation.gelu: "gelu", Activation.silu: "silu"}


def write_huggingface(
    folder: Path, info: ModelInfo, weights: Weights, tokenizer: Tokenizers, config: ExportConfig
) -> None:
    """Write what `AutoModelForSeq2SeqLM` and `AutoTokenizer` read into `folder`.

    Raises a `ModelError` for separate vocabularies that number control symbols differently, and
    for those of a pre-norm model.
    """
    kind = model_type(info, tokenizer)
    if kind != MARIAN and info.src_vocab_size is not None:
        raise ModelError(
            "the model has model.norm=pre and a vocabulary for each language, and transformers has "
            "no such class; use format=ctranslate2"
        )
    if tokenizer.src.control_ids != tokenizer.tgt.control_ids:
        raise ModelError(
            f"the vocabularies have control symbols at {tokenizer.src.control_ids} and "
            f"{tokenizer.tgt.control_ids}, and transformers needs them at one place; "
            "use format=ctranslate2"
        )
    dtype = getattr(torch, config.quantization.value)
    tensors = rename_weights(kind, info, weights, config.max_positions)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_weights(folder / "model.safetensors", tensors)
    tgt = tokenizer.tgt
    special = {"pad_token_id": tgt.pad_id, "bos_token_id": tgt.bos_id, "eos_token_id": tgt.eos_id}
    special["decoder_start_token_id"] = tgt.bos_id
    write_json(folder / "config.json", _architecture(kind, info, special, config))
    generation = {  # defaults of `generate`, as close to ours as its rules allow (docs/export.md)
        "num_beams": info.search.beam_size,
        "length_penalty": info.search.length_exponent,
        "max_length": min(_MAX_LENGTH, config.max_positions),
        "bad_words_ids": [[token] for token in ControlIds.of(tokenizer).never],
        **special,
    }
    if tokenizer.tgt.prefix:
        generation["forced_bos_token_id"] = tokenizer.tgt.prefix[0]
    write_json(folder / "generation_config.json", generation)
    _write_tokenizer(folder, info, tokenizer, config.max_positions)


def model_type(info: ModelInfo, tokenizer: Tokenizers) -> str:
    """Return which model of transformers this is."""
    config = info.model
    if config.norm is Norm.post:
        return MARIAN
    is_m2m100 = (
        config.positions is Positions.sinusoidal_concat
        and config.position_offset == tokenizer.tgt.pad_id + 1
        and not config.output_bias
    )
    return M2M100 if is_m2m100 else PEGASUS


def rename_weights(kind: str, info: ModelInfo, weights: Weights, max_positions: int) -> Weights:
    """Rename and, where the layout requires it, permute `weights` for the model `kind`.

    The tables of positions are included where they are read: MarianMT would compute those of the
    paper itself, but not those of Tensor2Tensor.
    """
    config = info.model
    order = torch.arange(config.d_model)  # of the dimensions, all sines before all cosines: (D,)
    if config.positions is Positions.sinusoidal:
        order = torch.cat([order[0::2], order[1::2]])
    embedding = weights["embedding.weight"][:, order]  # (V, D)
    found: Weights = {}
    if kind != M2M100:
        bias = weights.get("output_bias", torch.zeros(embedding.size(0)))
        found["final_logits_bias"] = bias[None]  # (1, V)
    if not config.tied_output:
        found["lm_head.weight"] = weights["output_weight"][:, order]  # (V, D)
        # without tying, transformers reads the copies as well
        if info.src_vocab_size is None:
            for stack in ("encoder", "decoder"):
                found[f"model.{stack}.embed_tokens.weight"] = embedding.clone()
    if info.src_vocab_size is None:
        found["model.shared.weight"] = embedding
    else:
        found["model.encoder.embed_tokens.weight"] = weights["src_embedding.weight"][:, order]
        found["model.decoder.embed_tokens.weight"] = embedding
    depths = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    for stack, depth in depths.items():
        if kind != M2M100:
            table = positions_table(config, stack, weights, max_positions)  # (P, D)
            found[f"model.{stack}.embed_positions.weight"] = table[:, order].clone()
        if config.norm is Norm.pre:
            found |= _reordered(weights, f"{stack}_norm", f"model.{stack}.layer_norm", order)
        for i in range(depth):
            found.update(_layer(weights, f"{stack}_layers.{i}", f"model.{stack}.layers.{i}", order))
    return found


def positions_table(config: ModelConfig, stack: str, weights: Weights, length: int) -> Tensor:
    """Return what the encoder or the decoder adds to embeddings at so many positions, (P, D)."""
    if config.positions is Positions.learned:
        return lengthen(weights[f"{stack}_positions"], length)[:length]
    layout = config.positions, config.position_offset
    return sinusoidal_positions(length, config.d_model, *layout)


def _layer(weights: Weights, ours: str, theirs: str, order: Tensor) -> Weights:
    """Rename the weights of one layer; inside heads and feed-forward nothing is reordered."""
    found: Weights = {}
    for part, name in (("self_attention", "self_attn"), ("cross_attention", "encoder_attn")):
        own, other = f"{ours}.{part}", f"{theirs}.{name}"
        if f"{own}.in_projection.weight" in weights:
            parts = weights[f"{own}.in_projection.weight"].chunk(3)  # of (3D, D)
            biases = weights[f"{own}.in_projection.bias"].chunk(3)
            for head, weight, bias in zip(_HEADS, parts, biases, strict=True):
                found[f"{other}.{head}.weight"] = weight[:, order]  # (D, D)
                found[f"{other}.{head}.bias"] = bias.clone()  # (D,)
            found |= _reordered(weights, f"{own}.out_projection", f"{other}.out_proj", order)
            found |= _reordered(weights, f"{own}_norm", f"{other}_layer_norm", order)
    found[f"{theirs}.fc1.weight"] = weights[f"{ours}.feed_forward.inner.weight"][:, order]  # (F, D)
    found[f"{theirs}.fc1.bias"] = weights[f"{ours}.feed_forward.inner.bias"]
    found |= _reordered(weights, f"{ours}.feed_forward.outer", f"{theirs}.fc2", order)
    name = f"{theirs}.final_layer_norm"
    return found | _reordered(weights, f"{ours}.feed_forward_norm", name, order)


def _reordered(weights: Weights, ours: str, theirs: str, order: Tensor) -> Weights:
    """Rename a linear layer or norm whose output goes to the residual stream: (D, ...), (D,)."""
    return {f"{theirs}.{kind}": weights[f"{ours}.{kind}"][order] for kind in ("weight", "bias")}


def _architecture(
    kind: str, info: ModelInfo, special: dict[str, int], export: ExportConfig
) -> dict[str, Any]:
    config = info.model
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "is_encoder_decoder": True,
        "vocab_size": info.src_vocab_size or info.vocab_size,
        "decoder_vocab_size": info.vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.num_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": ACTIVATIONS[config.activation],
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "max_position_embeddings": export.max_positions,
        "scale_embedding": config.scale_embedding,
        "share_encoder_decoder_embeddings": info.src_vocab_size is None,
        "tie_word_embeddings": config.tied_output,
        "torch_dtype": export.quantization.value,
        **special,
        "forced_eos_token_id": None,
        "use_cache": True,
    }


def _write_tokenizer(
    folder: Path, info: ModelInfo, tokenizer: Tokenizers, max_positions: int
) -> None:
    (folder / "source.spm").write_bytes(tokenizer.src.model)
    (folder / "target.spm").write_bytes(tokenizer.tgt.model)
    is_separate = info.src_vocab_size is not None
    sides = {"vocab.json": tokenizer.src, "target_vocab.json": tokenizer.tgt}
    for name, side in list(sides.items())[: 1 + is_separate]:
        write_json(folder / name, {piece: i for i, piece in enumerate(side.all_pieces())})
    pad, unk, bos, eos = tokenizer.tgt.pieces(tokenizer.tgt.control_ids)
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": info.src_lang,
        "target_lang": info.tgt_lang,
        **{"pad_token": pad, "unk_token": unk, "bos_token": bos, "eos_token": eos},
        "model_max_length": max_positions,
        "separate_vocabs": is_separate,
        "split_special_tokens": True,  # "</s>" in a user's text is text
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)
