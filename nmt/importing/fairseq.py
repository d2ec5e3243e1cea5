"""fairseq's `.pt` of the model `transformer`, beside `dict.*.txt`: with Tensor2Tensor's positions,
counted from 2, and EOS to start decoding from.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nmt.config import Activation, ImportConfig, ModelConfig, Norm, Positions, SearchConfig
from nmt.errors import ModelError
from nmt.importing.settings import Imported, Settings, read_text
from nmt.importing.vocabulary import SpecialIds, list_pieces, make_tokenizers, spm_files
from nmt.importing.weights import (
    Tensors,
    find_pickle,
    load_pickle,
    settle_embeddings,
    to_state,
)

_SPM = (
    ("source.spm", "target.spm"),
    ("sentencepiece.bpe.model", "sentencepiece.bpe.model"),
    ("sentencepiece.model", "sentencepiece.model"),
)
_ACTIVATIONS = {"relu": Activation.relu, "gelu": Activation.gelu, "swish": Activation.silu}
_CONTROL = ["<s>", "<pad>", "</s>", "<unk>"]  # the first four ids of every vocabulary
_SPECIAL = SpecialIds(pad=1, unk=3, start=2, eos=2)


def read(path: Path, config: ImportConfig) -> Imported:
    """Read a `.pt`, or a folder with one, beside its vocabularies and SentencePiece model.

    Raises a `ModelError` for an architecture that we have not, for a file that holds other classes
    than `argparse.Namespace`, and for files that do not fit each other.
    """
    path = find_pickle(path)
    content = load_pickle(path)
    options = content.get("args") or dict(content.get("cfg") or {}).get("model")
    options = vars(options) if isinstance(options, argparse.Namespace) else options
    if not isinstance(options, dict) or not isinstance(content.get("model"), dict):
        raise ModelError(f"{path} lacks args or model; it is no checkpoint of fairseq")
    theirs = Settings(path, options)
    tensors = Tensors(path, content["model"])
    tensors.rename(lambda name: name.replace("decoder.output_projection.", "output."))
    for stack in ("encoder", "decoder"):
        for name in ("version", "embed_positions._float_tensor"):
            tensors.drop(f"{stack}.{name}")
    sizes = settle_embeddings(
        tensors, is_tied=theirs.flag("share_decoder_input_output_embed", False)
    )
    model = _architecture(theirs, is_tied=sizes.is_tied)
    folder = path.parent
    src_lang = theirs.text("source_lang") or config.src_lang
    tgt_lang = theirs.text("target_lang") or config.tgt_lang
    src = _pieces(folder, src_lang, sizes.src_vocab_size or sizes.vocab_size)
    tgt = _pieces(folder, tgt_lang, sizes.vocab_size)
    is_joint = sizes.src_vocab_size is None
    if is_joint and src != tgt:
        raise ModelError(f"{path} has one embedding, and {folder} two vocabularies")
    spm = spm_files(folder, config, *_SPM)
    special = [_SPECIAL, _SPECIAL]
    return Imported(
        model=model,
        tokenizers=make_tokenizers(spm, (src, tgt), special, is_joint=is_joint),
        weights=to_state(tensors, model, sizes),
        search=SearchConfig(),
        src_lang=config.src_lang or src_lang,
        tgt_lang=config.tgt_lang or tgt_lang,
    )


def _pieces(folder: Path, lang: str | None, size: int) -> list[str]:
    """Return the pieces of a `dict.LANG.txt`, a piece and its count a line, after the control
    symbols.
    """
    path = folder / f"dict.{lang}.txt"
    path = path if path.is_file() else folder / "dict.txt"
    lines = [line for line in read_text(path).split("\n") if line]
    if any(" " not in line for line in lines):
        raise ModelError(f"{path}: a line has no piece with a count; copy it again")
    pieces = [*_CONTROL, *(line.rsplit(" ", 1)[0] for line in lines)]
    return list_pieces(path, [(piece, i) for i, piece in enumerate(pieces)], size)


def _architecture(theirs: Settings, *, is_tied: bool) -> ModelConfig:
    """Return our settings of theirs; what we have not is a `ModelError`."""
    sizes = {}
    for name in ("embed_dim", "ffn_embed_dim", "attention_heads"):
        sizes[name] = theirs.number(f"encoder_{name}")
        theirs.demand(**{f"decoder_{name}": sizes[name]})
    is_pre_norm = theirs.flag("encoder_normalize_before", False)
    theirs.demand(
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
    return theirs.architecture(
        num_encoder_layers=theirs.number("encoder_layers"),
        num_decoder_layers=theirs.number("decoder_layers"),
        d_model=sizes["embed_dim"],
        d_ff=sizes["ffn_embed_dim"],
        num_heads=sizes["attention_heads"],
        dropout=theirs.share("dropout", 0.1),
        attention_dropout=theirs.share("attention_dropout"),
        activation_dropout=theirs.share("activation_dropout"),
        norm=Norm.pre if is_pre_norm else Norm.post,
        positions=Positions.sinusoidal_concat,
        position_offset=2,
        activation=theirs.choose("activation_fn", _ACTIVATIONS, "relu"),
        scale_embedding=not theirs.flag("no_scale_embedding", False),
        tied_output=is_tied,
    )
