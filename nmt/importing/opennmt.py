"""Import a model of OpenNMT-py 2 or 3 from a `.pt` file whose vocabularies are lists of pieces.

These are pre-norm models with sinusoidal positions. Their source sentences have no EOS.
"""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nmt.config import Activation, ImportConfig, ModelConfig, Norm, Positions, SearchConfig
from nmt.errors import ModelError
from nmt.importing.piece_ids import (
    SideVocabulary,
    SpecialIds,
    add_ids,
    find_id,
    find_spm,
    make_tokenizers,
    sort_pieces,
)
from nmt.importing.settings import ImportedModel, Settings
from nmt.importing.weights import (
    Rule,
    TensorFile,
    drop_tied_copies,
    find_pt_file,
    load_pickle,
    make_state_dict,
)
from nmt.model.positions import sinusoidal_positions

_SPM_NAMES = (("source.spm", "target.spm"), ("sentencepiece.model", "sentencepiece.model"))
_ACTIVATIONS = {"relu": Activation.relu, "gelu": Activation.gelu, "silu": Activation.silu}
_POSITIONS = {
    "SinusoidalInterleaved": Positions.sinusoidal,
    "SinusoidalConcat": Positions.sinusoidal_concat,
}
_ATTENTION_TYPES = ("scaled-dot", "scaled-dot-flash")  # two kernels with the same result
# Regular expressions and replacements, which give the names that `make_state_dict` expects.
# Each name goes through all rules, in this order.
_RULES: list[Rule] = [
    (r"encoder\.transformer\.(\d+)\.", r"encoder.layers.\1."),
    (r"decoder\.transformer_layers\.(\d+)\.", r"decoder.layers.\1."),
    (r"\.context_attn\.", ".encoder_attn."),
    (r"\.linear_query\.", ".q_proj."),
    (r"\.linear_keys\.", ".k_proj."),
    (r"\.linear_values\.", ".v_proj."),
    (r"\.final_linear\.", ".out_proj."),
    (r"\.feed_forward\.layer_norm\.", ".final_layer_norm."),
    (r"\.feed_forward\.w_1\.", ".fc1."),
    (r"\.feed_forward\.w_2\.", ".fc2."),
    (r"(encoder\.layers\.\d+)\.layer_norm\.", r"\1.self_attn_layer_norm."),
    (r"(decoder\.layers\.\d+)\.layer_norm_1\.", r"\1.self_attn_layer_norm."),
    (r"(decoder\.layers\.\d+)\.layer_norm_2\.", r"\1.encoder_attn_layer_norm."),
    (r"\.a_2$", ".weight"),
    (r"\.b_2$", ".bias"),
    (r"\.embeddings\.make_embedding\.emb_luts\.0\.", ".embed_tokens."),
    (r"\.embeddings\.make_embedding\.pe\.pe", ".pe"),
    (r"^generator\.(?:0\.)?", "output."),  # some files have generator.0.weight
]


def read(path: Path, config: ImportConfig) -> ImportedModel:
    """Read the model in a `.pt` file. `path` is this file or its folder.

    The folder also has the SentencePiece models. Raises `ModelError` for an architecture that nmt
    does not have, for a file with objects of Python classes other than `argparse.Namespace`, and
    for SentencePiece models that do not fit the vocabularies in the file.
    """
    path = find_pt_file(path)
    checkpoint = load_pickle(path)
    options: Any = checkpoint.get("opt")
    vocabularies: Any = checkpoint.get("vocab")
    output_layer: Any = checkpoint.get("generator")
    if isinstance(options, argparse.Namespace):
        options = vars(options)
    for mapping in (options, vocabularies, output_layer):
        if not isinstance(mapping, dict):
            raise ModelError(
                f"{path} lacks opt, vocab or generator; it is not a model of OpenNMT-py"
            )
    settings = Settings(path, options)
    weights = dict(checkpoint.get("model") or {})
    weights |= {f"generator.{name}": tensor for name, tensor in output_layer.items()}
    tensors = TensorFile(path, weights)
    tensors.rename(_RULES)
    _add_missing_biases(tensors)
    tensors.rename_or_drop_output_bias("output.bias")
    layout = drop_tied_copies(tensors)
    model = _convert_architecture(settings, tensors, has_tied_output=layout.has_tied_output)
    start_piece = settings.get("decoder_start_token", "<s>")
    if "decoder_start_token" in vocabularies:  # this takes precedence over the option
        start_piece = vocabularies["decoder_start_token"]
    src_vocabulary = vocabularies.get("src")
    tgt_vocabulary = vocabularies.get("tgt")
    src_spm, tgt_spm = find_spm(path.parent, config, _SPM_NAMES)
    src_side = _make_side_vocabulary(
        path, src_spm, src_vocabulary, layout.num_src_rows, str(start_piece)
    )
    tgt_side = _make_side_vocabulary(
        path, tgt_spm, tgt_vocabulary, layout.vocab_size, str(start_piece)
    )
    return ImportedModel(
        model=model,
        tokenizers=make_tokenizers(src_side, tgt_side, shares_embedding=layout.shares_embedding),
        weights=make_state_dict(tensors, model, layout),
        search=SearchConfig(),
        src_lang=config.src_lang,
        tgt_lang=config.tgt_lang,
    )


def _add_missing_biases(tensors: TensorFile) -> None:
    """Add the zero biases that version 3 leaves out."""
    for name in tensors.names():
        if re.search(r"(_proj|\.fc[12]|layer_norm)\.weight$", name) is None:
            continue  # a tensor without a bias, or a bias itself
        bias_name = name.removesuffix("weight") + "bias"
        if bias_name not in tensors:
            tensors.add(bias_name, torch.zeros(tensors.num_rows(name)))


def _make_side_vocabulary(
    path: Path, spm_path: Path, vocabulary: Any, num_rows: int, start_piece: str
) -> SideVocabulary:
    """Return the vocabulary of one side from its list of pieces in the file `path`.

    `num_rows` is the size of its embedding. Decoding starts from `start_piece`.
    """
    if not isinstance(vocabulary, list):
        raise ModelError(f"{path}: a vocabulary is missing, or is not a list of pieces")
    pieces_and_ids = add_ids(map(str, vocabulary))  # the list is in the order of the ids
    pieces = sort_pieces(path, pieces_and_ids, num_rows)  # appends pieces for unused rows
    id_of_piece = {piece: i for i, piece in enumerate(pieces)}
    pad_piece = "<blank>" if "<blank>" in id_of_piece else "<pad>"
    special_ids = SpecialIds(
        pad=id_of_piece.get(pad_piece, -1),  # `make_tokenizers` refuses -1
        unk=find_id(id_of_piece, "<unk>", path),
        decoder_start=find_id(id_of_piece, start_piece, path),
        eos=find_id(id_of_piece, "</s>", path),
    )
    return SideVocabulary(spm_path, pieces, special_ids)


def _convert_architecture(
    settings: Settings, tensors: TensorFile, *, has_tied_output: bool
) -> ModelConfig:
    """Convert the architecture, and remove the position tables from the tensors.

    Raises `ModelError` for a setting that nmt does not have.
    """
    settings.require_values(
        encoder_type="transformer",
        decoder_type="transformer",
        model_task="seq2seq",
        position_encoding=True,
        layer_norm="standard",
        max_relative_positions=0,
        multiquery=False,
        num_kv=0,
        parallel_residual=False,
        sliding_window=0,
        num_experts=0,
        aan_useffn=False,
    )
    settings.require_choice("self_attn_type", _ATTENTION_TYPES, "scaled-dot")
    positions = settings.get_choice("position_encoding_type", _POSITIONS, "SinusoidalInterleaved")
    # version 3 has hidden_size; older files have enc_rnn_size or rnn_size
    rnn_size = settings.get("rnn_size")
    enc_rnn_size = settings.get("enc_rnn_size", rnn_size)
    d_model = settings.get_int("hidden_size", enc_rnn_size)
    compute_table = partial(sinusoidal_positions, d_model=d_model, layout=positions)
    for stack in ("encoder", "decoder"):
        if tensors.differs_from_table(f"{stack}.pe", compute_table):
            raise ModelError(f"{settings.path}: {stack}.pe does not fit position_encoding_type")
        tensors.drop(f"{stack}.pe")
    return settings.make_model_config(
        num_encoder_layers=settings.get_int("enc_layers", settings.get("layers")),
        num_decoder_layers=settings.get_int("dec_layers", settings.get("layers")),
        d_model=d_model,
        d_ff=settings.get_int("transformer_ff"),
        num_heads=settings.get_int("heads", 8),
        dropout=settings.get_dropout("dropout", 0.1),
        attention_dropout=settings.get_dropout("attention_dropout"),
        activation_dropout=settings.get_dropout("dropout", 0.1),  # inside feed-forward layers
        norm=Norm.pre,
        positions=positions,
        activation=settings.get_choice("pos_ffn_activation_fn", _ACTIVATIONS, "relu"),
        tied_output=has_tied_output,
        output_bias="output.bias" in tensors,
        source_eos=False,
    )
