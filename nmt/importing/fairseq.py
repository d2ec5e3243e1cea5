"""Import a `transformer` of fairseq from a `.pt` file next to `dict.*.txt`.

These models have the sinusoidal positions of Tensor2Tensor. Their positions count from 2, since
fairseq reserves 0 and 1 for padding. Decoding starts from EOS.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nmt.config import Activation, ImportConfig, ModelConfig, Norm, Positions, SearchConfig
from nmt.errors import ModelError
from nmt.importing.piece_ids import (
    SideVocabulary,
    SpecialIds,
    add_ids,
    find_spm,
    make_tokenizers,
    sort_pieces,
)
from nmt.importing.settings import ImportedModel, Settings, read_text
from nmt.importing.weights import (
    TensorFile,
    drop_tied_copies,
    find_pt_file,
    load_pickle,
    make_state_dict,
)

_SPM_NAMES = (  # pairs of file names: of the source and of the target
    ("source.spm", "target.spm"),
    ("sentencepiece.bpe.model", "sentencepiece.bpe.model"),
    ("sentencepiece.model", "sentencepiece.model"),
)
_ACTIVATIONS = {"relu": Activation.relu, "gelu": Activation.gelu, "swish": Activation.silu}
_CONTROL_PIECES = ["<s>", "<pad>", "</s>", "<unk>"]  # the first four ids of every vocabulary
_SPECIAL_IDS = SpecialIds(pad=1, unk=3, decoder_start=2, eos=2)


def read(path: Path, config: ImportConfig) -> ImportedModel:
    """Read the model in a `.pt` file. `path` is this file or its folder.

    The folder of the file must also contain the vocabularies (`dict.*.txt`) and the SentencePiece
    models. Raises `ModelError` for an architecture that nmt does not have, for a file with classes
    other than `argparse.Namespace`, and for files that do not belong together.
    """
    path = find_pt_file(path)
    checkpoint = load_pickle(path)
    settings = _read_settings(path, checkpoint)
    tensors = TensorFile(path, checkpoint["model"])
    tensors.rename([(r"^decoder\.output_projection\.", "output.")])
    for stack in ("encoder", "decoder"):  # fairseq stores two tensors that are not weights
        tensors.drop(f"{stack}.version")
        tensors.drop(f"{stack}.embed_positions._float_tensor")
    must_tie_output = settings.get_bool("share_decoder_input_output_embed", False)
    embeddings = drop_tied_copies(tensors, must_tie_output=must_tie_output)
    model = _convert_architecture(settings, has_tied_output=embeddings.has_tied_output)
    folder = path.parent
    # The files `dict.LANG.txt` are named after the languages of the checkpoint. The user may name
    # the languages of the imported model differently.
    dict_src_lang = settings.get_text("source_lang") or config.src_lang
    dict_tgt_lang = settings.get_text("target_lang") or config.tgt_lang
    src_pieces = _read_pieces(folder, dict_src_lang, embeddings.num_src_rows)
    tgt_pieces = _read_pieces(folder, dict_tgt_lang, embeddings.vocab_size)
    src_spm, tgt_spm = find_spm(folder, config, _SPM_NAMES)
    return ImportedModel(
        model=model,
        tokenizers=make_tokenizers(
            SideVocabulary(src_spm, src_pieces, _SPECIAL_IDS),
            SideVocabulary(tgt_spm, tgt_pieces, _SPECIAL_IDS),
            shares_embedding=embeddings.shares_embedding,
        ),
        weights=make_state_dict(tensors, model, embeddings),
        search=SearchConfig(),
        src_lang=config.src_lang or dict_src_lang,
        tgt_lang=config.tgt_lang or dict_tgt_lang,
    )


def _read_settings(path: Path, checkpoint: dict[str, Any]) -> Settings:
    """Return the settings of a checkpoint. Raises `ModelError` if it lacks settings or weights.

    Old versions of fairseq store them as `args`, and newer ones as `cfg["model"]`.
    """
    options = checkpoint.get("args")
    if not options:
        config = dict(checkpoint.get("cfg") or {})  # it may be None
        options = config.get("model")
    if isinstance(options, argparse.Namespace):
        options = vars(options)
    if not isinstance(options, dict) or not isinstance(checkpoint.get("model"), dict):
        raise ModelError(f"{path} lacks args or model; it is not a checkpoint of fairseq")
    return Settings(path, options)


def _read_pieces(folder: Path, lang: str | None, vocab_size: int) -> list[str]:
    """Return the pieces of a vocabulary: the control symbols, then the pieces in a file.

    The file is `dict.LANG.txt` or else `dict.txt`. Each line has a piece and its count. Raises
    `ModelError` if the vocabulary does not have `vocab_size` pieces.
    """
    path = folder / f"dict.{lang}.txt"
    if not path.exists():
        path = folder / "dict.txt"
    pieces = list(_CONTROL_PIECES)
    for line in read_text(path).split("\n"):
        if line:
            piece, space, _ = line.rpartition(" ")
            if not space:
                raise ModelError(
                    f"{path}: the line {line!r:.60} is not a piece and a count; copy it again"
                )
            pieces.append(piece)
    return sort_pieces(path, add_ids(pieces), vocab_size)


def _convert_architecture(settings: Settings, *, has_tied_output: bool) -> ModelConfig:
    """Convert the architecture. Raises `ModelError` for a setting that nmt does not have."""
    is_pre_norm = settings.get_bool("encoder_normalize_before", False)
    d_model = settings.get_int("encoder_embed_dim")
    d_ff = settings.get_int("encoder_ffn_embed_dim")
    num_heads = settings.get_int("encoder_attention_heads")
    settings.require_values(
        decoder_embed_dim=d_model,
        decoder_attention_heads=num_heads,
        decoder_normalize_before=is_pre_norm,
        encoder_learned_pos=False,
        decoder_learned_pos=False,
        no_token_positional_embeddings=False,
        layernorm_embedding=False,
        no_cross_attention=False,
        cross_self_attention=False,
        adaptive_input=False,
        adaptive_softmax_cutoff=None,
        encoder_layers_to_keep=None,
        decoder_layers_to_keep=None,
        no_decoder_final_norm=False,
        lang_tok_replacing_bos_eos=False,
        encoder_langtok=None,
        decoder_langtok=False,
    )
    return settings.make_model_config(
        num_encoder_layers=settings.get_int("encoder_layers"),
        num_decoder_layers=settings.get_int("decoder_layers"),
        d_model=d_model,
        d_ff=d_ff,
        decoder_d_ff=settings.get_int("decoder_ffn_embed_dim", d_ff),
        num_heads=num_heads,
        dropout=settings.get_dropout("dropout", 0.1),
        attention_dropout=settings.get_dropout("attention_dropout"),
        activation_dropout=settings.get_dropout("activation_dropout"),
        norm=Norm.pre if is_pre_norm else Norm.post,
        positions=Positions.sinusoidal_concat,
        position_offset=2,
        activation=settings.get_choice("activation_fn", _ACTIVATIONS, "relu"),
        scale_embedding=not settings.get_bool("no_scale_embedding", False),
        tied_output=has_tied_output,
    )
