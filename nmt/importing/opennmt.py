"""OpenNMT-py's `.pt`: pre-norm transformers with the paper's positions, of versions 2 and 3 whose
vocabulary is a list of pieces. Their sources have no EOS.
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
from nmt.importing.settings import Imported, Settings
from nmt.importing.vocabulary import (
    SpecialIds,
    find_id,
    list_pieces,
    make_tokenizers,
    spm_files,
)
from nmt.importing.weights import (
    Tensors,
    find_pickle,
    load_pickle,
    settle_embeddings,
    to_state,
)
from nmt.model.transformer import sinusoidal_positions

_SPM = (("source.spm", "target.spm"), ("sentencepiece.model", "sentencepiece.model"))
_ACTIVATIONS = {"relu": Activation.relu, "gelu": Activation.gelu, "silu": Activation.silu}
_POSITIONS = {
    "SinusoidalInterleaved": Positions.sinusoidal,
    "SinusoidalConcat": Positions.sinusoidal_concat,
}
_NAMES = (  # ours are fairseq's
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
    (r"^generator\.(?:0\.)?", "output."),
)


def read(path: Path, config: ImportConfig) -> Imported:
    """Read a `.pt`, or a folder with one, beside the SentencePiece model that cuts its text.

    Raises a `ModelError` for an architecture that we have not, for a file that holds other classes
    than `argparse.Namespace`, and for files that do not fit each other.
    """
    path = find_pickle(path)
    content = load_pickle(path)
    options, vocab, output = (content.get(name) for name in ("opt", "vocab", "generator"))
    if isinstance(options, argparse.Namespace):
        options = vars(options)
    if not (isinstance(options, dict) and isinstance(vocab, dict) and isinstance(output, dict)):
        raise ModelError(f"{path} lacks opt, vocab or generator; it is no model of OpenNMT-py")
    theirs = Settings(path, options)
    weights = dict(content.get("model") or {})
    weights |= {f"generator.{k}": v for k, v in output.items()}
    tensors = Tensors(path, weights)
    tensors.rename(rename)
    _add_zeros(tensors)
    has_bias = tensors.settle_bias("output.bias")
    sizes = settle_embeddings(tensors, is_tied=False)
    model = _architecture(theirs, tensors, is_tied=sizes.is_tied, has_bias=has_bias)
    src_size = sizes.src_vocab_size or sizes.vocab_size
    src, tgt = (
        list_pieces(path, _numbered(path, vocab, name), size)
        for name, size in (("src", src_size), ("tgt", sizes.vocab_size))
    )
    start = str(vocab.get("decoder_start_token", theirs.get("decoder_start_token", "<s>")))
    special = [_special_ids(path, pieces, start) for pieces in (src, tgt)]
    is_joint = sizes.src_vocab_size is None
    if is_joint and src != tgt:
        raise ModelError(f"{path} has one embedding and two vocabularies")
    spm = spm_files(path.parent, config, *_SPM)
    return Imported(
        model=model,
        tokenizers=make_tokenizers(spm, (src, tgt), special, is_joint=is_joint),
        weights=to_state(tensors, model, sizes),
        search=SearchConfig(),
        src_lang=config.src_lang,
        tgt_lang=config.tgt_lang,
    )


def rename(name: str) -> str:
    """Return fairseq's name of a tensor."""
    for pattern, new in _NAMES:
        name = re.sub(pattern, new, name)
    return name


def _add_zeros(tensors: Tensors) -> None:
    """Add the biases that version 3 leaves out."""
    for name in tensors.names():
        bias = name.removesuffix("weight") + "bias"
        is_linear = re.search(r"_proj\.weight$|\.fc[12]\.weight$|layer_norm\.weight$", name)
        if is_linear and bias not in tensors:
            tensors.add(bias, torch.zeros(tensors.num_rows(name)))


def _numbered(path: Path, vocab: dict[str, Any], name: str) -> list[tuple[str, int]]:
    pieces = vocab.get(name)
    if not isinstance(pieces, list):
        raise ModelError(f"{path}: the vocabulary {name} is no list of pieces")
    return [(str(piece), i) for i, piece in enumerate(pieces)]


def _special_ids(path: Path, pieces: list[str], start: str) -> SpecialIds:
    ids = {piece: i for i, piece in enumerate(pieces)}
    pad = ids.get("<blank>", ids.get("<pad>", -1))
    unk, first, eos = (find_id(ids, name, path) for name in ("<unk>", start, "</s>"))
    return SpecialIds(pad=pad, unk=unk, start=first, eos=eos)


def _architecture(
    theirs: Settings, tensors: Tensors, *, is_tied: bool, has_bias: bool
) -> ModelConfig:
    """Return our settings of theirs; what we have not is a `ModelError`."""
    heads, relative = theirs.number("heads", 8), theirs.get("max_relative_positions", 0)
    wanted: dict[str, Any] = {
        "encoder_type": "transformer",
        "decoder_type": "transformer",
        "model_task": "seq2seq",
        "position_encoding": True,
        "layer_norm": "standard",
        "multiquery": False,
        "num_kv": 0,
        "parallel_residual": False,
        "sliding_window": 0,
        "num_experts": 0,
        "aan_useffn": False,
    }
    theirs.demand(**wanted)
    kernels = dict.fromkeys(("scaled-dot", "scaled-dot-flash"))  # of the same attention
    theirs.choose("self_attn_type", kernels, "scaled-dot")
    if relative not in (0, None):
        raise theirs.refuse("max_relative_positions", relative, "0")
    layout = theirs.choose("position_encoding_type", _POSITIONS, "SinusoidalInterleaved")
    d_model = theirs.number("hidden_size", theirs.get("enc_rnn_size", theirs.get("rnn_size")))
    compute = partial(sinusoidal_positions, d_model=d_model, layout=layout)
    for stack in ("encoder", "decoder"):
        if not tensors.has_positions(f"{stack}.pe", compute):
            raise ModelError(f"{theirs.path}: {stack}.pe are not the positions of its settings")
        tensors.drop(f"{stack}.pe")
    return theirs.architecture(
        num_encoder_layers=theirs.number("enc_layers", theirs.get("layers")),
        num_decoder_layers=theirs.number("dec_layers", theirs.get("layers")),
        d_model=d_model,
        d_ff=theirs.number("transformer_ff"),
        num_heads=heads,
        dropout=theirs.share("dropout", 0.1),
        attention_dropout=theirs.share("attention_dropout"),
        activation_dropout=theirs.share("dropout", 0.1),  # its feed-forward layers have it too
        norm=Norm.pre,
        positions=layout,
        activation=theirs.choose("pos_ffn_activation_fn", _ACTIVATIONS, "relu"),
        tied_output=is_tied,
        output_bias=has_bias,
        source_eos=False,
    )
