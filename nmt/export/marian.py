"""Export to Marian (Junczys-Dowmunt et al., 2018): `model.npz`, vocabularies and `decoder.yml`.

Marian starts decoding from an embedding of zeros, and `nmt` from the embedding of BOS. The export
therefore subtracts the embedding of BOS from all target embeddings, so that BOS becomes zeros. The
decoder adds the embedding of BOS again: in biases of its first layer (post-norm), or in an
additional layer (pre-norm). If the output layer shares the embeddings, all logits of a step change
by the same number, which does not change the softmax. Decoders with SSRUs start from zeros in `nmt`
too, so the export does not change their embeddings.
"""

# D d_model, V vocab

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from nmt.checkpoint import ModelInfo
from nmt.config import (
    Activation,
    Decoder,
    ExportConfig,
    ExportFormat,
    ModelConfig,
    Norm,
    Positions,
)
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ModelError
from nmt.export.huggingface import MARIAN, Weights, rename_weights
from nmt.export.marian_names import Arrays, make_transformer_arrays, make_transformer_new_arrays
from nmt.search.constraints import forbidden_ids

SETTINGS = "special:model.yml"  # name of the array in model.npz that holds the settings
POSITION_TABLE = "Wpos"  # array that ct2-marian-converter reads, and that Marian ignores
ACTIVATIONS = {Activation.relu: "relu", Activation.silu: "swish"}
_FORBIDDEN_BIAS = -1e4  # output bias of ids that no translation contains


@dataclass(frozen=True)
class MarianModel:
    """The arrays, settings and vocabularies of a model in the form of Marian."""

    arrays: Arrays
    settings: bytes  # YAML and a zero byte
    src_pieces: list[str]
    tgt_pieces: list[str]
    info: ModelInfo
    """Describes `weights`. It can differ from the exported model, for example by a layer."""
    weights: Weights
    """The weights that `arrays` has, with the names of nmt. They include unused padding."""


def convert_model(
    info: ModelInfo, weights: Weights, tokenizers: Tokenizers, config: ExportConfig
) -> MarianModel:
    """Convert a model to the form of Marian.

    Raises `ModelError` if Marian cannot represent the model, because it has forced target tokens or
    other names of control symbols.
    """
    _check_vocabularies(info, tokenizers, config.format)
    src_pieces = tokenizers.src.all_pieces()
    tgt_pieces = tokenizers.tgt.all_pieces()
    if _has_unused_padding(info, weights, tokenizers):
        src_pieces = src_pieces[:-1]
        tgt_pieces = tgt_pieces[:-1]
        marian_weights = _drop_padding(weights)
    else:
        weights = _forbid_ids(info, weights, tokenizers.tgt)
        if info.model.decoder is Decoder.attention:
            info, weights = _subtract_bos(info, weights, tokenizers.tgt)
        marian_weights = weights
    arrays = _make_arrays(info, marian_weights, config)
    settings = _make_settings(info, [len(src_pieces), len(tgt_pieces)])
    if needs_new_type(info.model, config.format):
        settings |= _make_new_type_settings(info.model, config.max_positions)
    return MarianModel(
        arrays=arrays,
        settings=yaml.safe_dump(settings).encode("utf-8") + b"\0",
        src_pieces=src_pieces,
        tgt_pieces=tgt_pieces,
        info=info,
        weights=weights,
    )


def needs_new_type(model: ModelConfig, export_format: ExportFormat) -> bool:
    """Return whether Marian needs the type `transformer-new` to compute the same outputs as nmt.

    Bergamot lacks this type, and decoders with SSRUs do not need it.
    """
    if export_format is not ExportFormat.marian or model.decoder is Decoder.ssru:
        return False
    return model.norm is Norm.pre or needs_position_table(model)


def needs_position_table(model: ModelConfig) -> bool:
    """Return whether the model differs from what Marian computes without a table of positions.

    Without a table, Marian scales embeddings by sqrt(D) and adds the positions of
    `sinusoidal_concat`.
    """
    if not model.scale_embedding:
        return True
    return model.positions is not Positions.sinusoidal_concat or model.position_offset != 0


def write_marian(
    folder: Path, info: ModelInfo, weights: Weights, tokenizers: Tokenizers, config: ExportConfig
) -> None:
    """Write `model.npz`, `decoder.yml`, SentencePiece models and vocabularies into `folder`.

    Raises `ModelError` for the same reasons as `convert_model`.
    """
    model = convert_model(info, weights, tokenizers, config)
    settings = np.frombuffer(model.settings, dtype=np.int8)
    arrays = model.arrays | {SETTINGS: settings}
    np.savez(folder / "model.npz", **arrays)  # type: ignore[arg-type]
    vocabularies = _write_vocabularies(folder, tokenizers, model.src_pieces, model.tgt_pieces)
    decoder_settings = {
        "relative-paths": True,
        "models": ["model.npz"],
        "vocabs": vocabularies,
        "beam-size": info.search.beam_size,
        "normalize": info.search.length_exponent,
        "word-penalty": 0.0 - info.search.word_reward,  # 0.0, where -word_reward would be -0.0
    }
    (folder / "decoder.yml").write_text(yaml.safe_dump(decoder_settings), encoding="utf-8")


def _check_vocabularies(
    info: ModelInfo, tokenizers: Tokenizers, export_format: ExportFormat
) -> None:
    """Raise `ModelError` for vocabularies and prefixes that Marian has no form for."""
    has_target_tag = any(direction.tgt_tag for direction in info.directions)
    if has_target_tag or tokenizers.src.prefix_ids or tokenizers.tgt.prefix_ids:
        raise ModelError(
            f"format={export_format.value} does not support language tokens that nmt adds to "
            "source or target; use format=ctranslate2"
        )
    for tokenizer in (tokenizers.src, tokenizers.tgt):
        names = tokenizer.pieces([tokenizer.unk_id, tokenizer.eos_id])
        if names != ["<unk>", "</s>"]:
            raise ModelError(
                f"format={export_format.value} needs the control symbols <unk> and </s>, and this "
                f"model has {names[0]} and {names[1]}; use format=ctranslate2"
            )


def _has_unused_padding(info: ModelInfo, weights: Weights, tokenizers: Tokenizers) -> bool:
    """Return whether the last id is padding and BOS, and decoding starts from zeros.

    The import of a Marian model adds such an id, which Marian does not need.
    """
    src = tokenizers.src
    tgt = tokenizers.tgt
    is_last_in_src = src.pad_id == src.vocab_size - 1
    is_last_in_tgt = tgt.pad_id == tgt.bos_id == tgt.vocab_size - 1
    if not (is_last_in_src and is_last_in_tgt):
        return False
    if info.model.decoder is Decoder.ssru:
        return True  # an SSRU never reads the embedding of BOS, which fine-tuning may have changed
    return not weights["embedding.weight"][-1].any()


def _drop_padding(weights: Weights) -> Weights:
    """Remove the last row of embeddings, output layer and output bias."""
    names = ("src_embedding.weight", "embedding.weight", "output_weight", "output_bias")
    shortened = {name: weights[name][:-1] for name in names if name in weights}
    return weights | shortened


def _forbid_ids(info: ModelInfo, weights: Weights, tokenizer: Tokenizer) -> Weights:
    """Give the ids that no translation contains the probability 0, by the output bias."""
    bias = weights.get("output_bias", torch.zeros(info.vocab_size)).clone()  # (V,)
    bias[forbidden_ids(tokenizer)] = _FORBIDDEN_BIAS
    return weights | {"output_bias": bias}


def _subtract_bos(
    info: ModelInfo, weights: Weights, tokenizer: Tokenizer
) -> tuple[ModelInfo, Weights]:
    """Make the embedding of BOS zero, without changing the outputs of the model."""
    model = info.model
    weights = dict(weights)
    embedding = weights["embedding.weight"]  # (V, D)
    bos_embedding = embedding[tokenizer.bos_id]  # (D,)
    weights["embedding.weight"] = embedding - bos_embedding
    offset = bos_embedding  # layers add it again, to embeddings that are scaled already
    if model.scale_embedding:
        offset = bos_embedding * math.sqrt(model.d_model)
    if model.norm is Norm.post:
        _add_to_first_layer(weights, "decoder_layers.0", offset)
        if info.src_vocab_size is None:  # encoder and decoder share the embedding
            _add_to_first_layer(weights, "encoder_layers.0", offset)
        return info, weights
    if info.src_vocab_size is None:
        weights["src_embedding.weight"] = embedding  # the encoder keeps the unchanged embedding
    model = replace(model, num_decoder_layers=model.num_decoder_layers + 1)
    info = replace(info, model=model, src_vocab_size=info.src_vocab_size or info.vocab_size)
    return info, _insert_constant_layer(weights, offset)


def _add_to_first_layer(weights: Weights, layer: str, offset: Tensor) -> None:
    """Change biases of self-attention as if its layer had `offset` (D,) added to its input.

    In a post-norm layer, only self-attention and its residual connection read the input.
    """
    attention = f"{layer}.self_attention"
    projection = weights[f"{attention}.in_projection.weight"]  # (3D, D)
    weights[f"{attention}.in_projection.bias"] = (
        weights[f"{attention}.in_projection.bias"] + projection @ offset
    )
    weights[f"{attention}.out_projection.bias"] = (
        weights[f"{attention}.out_projection.bias"] + offset
    )


def _insert_constant_layer(weights: Weights, offset: Tensor) -> Weights:
    """Insert a first decoder layer that adds `offset` (D,) to its input, and nothing else.

    All its weights are 0, except for the scales of norms. So each sub-layer returns its output
    bias: `offset` in self-attention, and 0 in the others.
    """
    shifted: Weights = {}
    for name, tensor in weights.items():
        match = re.match(r"decoder_layers\.(\d+)\.", name)
        if match is None:
            shifted[name] = tensor
            continue
        index = int(match[1])
        suffix = name[match.end() :]
        shifted[f"decoder_layers.{index + 1}.{suffix}"] = tensor
        if index == 0:
            is_scale = suffix.endswith("_norm.weight")
            constant = torch.ones_like(tensor) if is_scale else torch.zeros_like(tensor)
            shifted[f"decoder_layers.0.{suffix}"] = constant
    shifted["decoder_layers.0.self_attention.out_projection.bias"] = offset
    return shifted


def _make_arrays(info: ModelInfo, weights: Weights, config: ExportConfig) -> Arrays:
    """Return the weights with the names and shapes of Marian."""
    model = info.model
    has_new_type = needs_new_type(model, config.format)
    has_position_table = has_new_type and needs_position_table(model)
    if has_position_table and model.scale_embedding:
        weights = _scale_embeddings(info, weights)
    renamed = rename_weights(MARIAN, info, weights, config.max_positions)
    if info.src_vocab_size is None:  # remove the copies of a shared embedding that MarianMT has
        renamed = {name: renamed[name] for name in renamed if "embed_tokens" not in name}
    if has_new_type:
        return make_transformer_new_arrays(model, renamed, has_position_table=has_position_table)
    arrays = make_transformer_arrays(model, renamed)
    if config.format is ExportFormat.marian and model.decoder is Decoder.attention:
        # Without the table, ct2-marian-converter computes positions with other wavelengths
        table = renamed["model.encoder.embed_positions.weight"]  # (P, D)
        arrays[POSITION_TABLE] = table.float().contiguous().numpy()
    return arrays


def _scale_embeddings(info: ModelInfo, weights: Weights) -> Weights:
    """Multiply the embeddings by sqrt(D), since Marian does not scale them with a position table.

    An output layer that is tied to the embedding grows by the same factor. The export therefore
    divides the norm before it by sqrt(D).
    """
    model = info.model
    factor = math.sqrt(model.d_model)
    scaled = dict(weights)
    for name in ("src_embedding.weight", "embedding.weight"):
        if name in weights:
            scaled[name] = weights[name] * factor
    if model.tied_output:
        norm = "decoder_norm"
        if model.norm is Norm.post:
            norm = f"decoder_layers.{model.num_decoder_layers - 1}.feed_forward_norm"
        for name in (f"{norm}.weight", f"{norm}.bias"):
            scaled[name] = weights[name] / factor
    return scaled


def _make_settings(info: ModelInfo, sizes: list[int]) -> dict[str, Any]:
    """Return the settings of the model, as Marian stores them.

    `sizes` are the sizes of the source's and the target's vocabulary.
    """
    model = info.model
    is_pre_norm = model.norm is Norm.pre
    shares_embedding = info.src_vocab_size is None
    settings: dict[str, Any] = {"transformer-decoder-autoreg": "self-attention"}
    if model.decoder is Decoder.ssru:
        settings = {
            "transformer-decoder-autoreg": "rnn",
            "dec-cell": "ssru",
            "layer-normalization": False,
        }
    return settings | {
        "type": "transformer",
        "dim-vocabs": sizes,
        "dim-emb": model.d_model,
        "enc-depth": model.num_encoder_layers,
        "dec-depth": model.num_decoder_layers,
        "transformer-heads": model.num_heads,
        "transformer-dim-ffn": model.d_ff,
        "transformer-decoder-dim-ffn": model.decoder_d_ff or model.d_ff,
        "transformer-ffn-depth": 2,
        "transformer-decoder-ffn-depth": 2,
        "transformer-ffn-activation": ACTIVATIONS[model.activation],
        # Marian's codes around each sub-layer: d is dropout, a adds the residual, n is layer norm
        "transformer-preprocess": "n" if is_pre_norm else "",
        "transformer-postprocess": "da" if is_pre_norm else "dan",
        "transformer-postprocess-top": "n" if is_pre_norm else "",
        "transformer-postprocess-emb": "d",
        "transformer-guided-alignment-layer": "last",
        "transformer-no-projection": False,
        "transformer-pool": False,
        "transformer-tied-layers": [],
        "transformer-train-position-embeddings": False,
        "transformer-dropout": model.dropout,
        "transformer-dropout-attention": model.attention_dropout,
        "transformer-dropout-ffn": model.activation_dropout,
        "tied-embeddings": model.tied_output and not shares_embedding,
        "tied-embeddings-all": model.tied_output and shares_embedding,
        "tied-embeddings-src": shares_embedding and not model.tied_output,
        "input-types": [],
        "lemma-dim-emb": 0,
        "right-left": False,
        "skip": False,
    }


def _make_new_type_settings(model: ModelConfig, max_positions: int) -> dict[str, Any]:
    """Return the settings that differ in Marian's type `transformer-new`."""
    settings: dict[str, Any] = {"type": "transformer-new"}
    if needs_position_table(model):
        settings["transformer-train-position-embeddings"] = True
        settings["max-length"] = max_positions  # rows of the table
    return settings


def _write_vocabularies(
    folder: Path, tokenizers: Tokenizers, src_pieces: list[str], tgt_pieces: list[str]
) -> list[str]:
    """Write the SentencePiece models and the vocabularies as YAML.

    Returns the names of the two vocabulary files for `decoder.yml`: the SentencePiece models if
    they give the ids of the model, else the YAML files.
    """
    (folder / "source.spm").write_bytes(tokenizers.src.model)
    (folder / "target.spm").write_bytes(tokenizers.tgt.model)
    _write_yaml_vocabulary(folder / "source.vocab.yml", src_pieces)
    _write_yaml_vocabulary(folder / "target.vocab.yml", tgt_pieces)
    if not tokenizers.src.is_imported and not tokenizers.tgt.is_imported:
        return ["source.spm", "target.spm"]
    return ["source.vocab.yml", "target.vocab.yml"]


def _write_yaml_vocabulary(path: Path, pieces: list[str]) -> None:
    lines = [f"{json.dumps(piece, ensure_ascii=False)}: {i}\n" for i, piece in enumerate(pieces)]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
