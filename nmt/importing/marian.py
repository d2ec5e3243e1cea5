"""Marian's `.npz`: weights and, among them, the settings as YAML (Junczys-Dowmunt et al., 2018).

Marian starts decoding from an embedding of zeros. Here that is the row of one more piece, padding,
which the bias of the output layer keeps out of the softmax.
"""

# V vocab, D d_model; matrices are (inner, outer) there

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from nmt.config import Activation, ImportConfig, ModelConfig, Norm, Positions
from nmt.data.tokenizer import Tokenizer, read_model
from nmt.errors import ModelError
from nmt.importing.settings import Imported, Settings, read_text
from nmt.importing.vocabulary import (
    SpecialIds,
    find_id,
    list_pieces,
    make_tokenizers,
    read_yaml_vocabulary,
    spm_files,
)
from nmt.importing.weights import Sizes, Tensors, settle_embeddings, to_state

_SETTINGS = "special:model.yml"
_ACTIVATIONS = {"relu": Activation.relu, "swish": Activation.silu}
_NORMS = {  # by preprocess, postprocess and postprocess-top of a sub-layer
    ("", "dan", ""): Norm.post,
    ("n", "da", "n"): Norm.pre,
}
_MOST_COMPRESSED = 20  # times, where weights are compressed at all
_PAD, _NEVER = "<pad>", -1e4  # no logit comes near, and float16 holds it
_SPM = (("source.spm", "target.spm"), ("vocab.spm", "vocab.spm"))
_SOURCE = re.compile("src|source")
_OUTPUT, _BIAS = "decoder_ff_logit_out_W", "decoder_ff_logit_out_b"
_TOP = {
    "Wemb": "shared.weight",
    "encoder_Wemb": "encoder.embed_tokens.weight",
    "decoder_Wemb": "decoder.embed_tokens.weight",
    _OUTPUT: "output.weight",
    f"{_OUTPUT}t": "output.weight",
}
_LAYER = re.compile(r"(encoder|decoder)_l(\d+)_(self|context|ffn)_(\w+)")
_HEADS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj", "1": "fc1", "2": "fc2"}
_KINDS = {"W": "weight", "b": "bias", "scale": "weight", "bias": "bias"}
_PLACES = {"self": "self_attn", "context": "encoder_attn", "ffn": "final"}


def read(path: Path, config: ImportConfig) -> Imported:
    """Read a `.npz`, or a folder with one, beside its vocabulary: `.spm` files, or `.yml` files and
    the `.spm` files that cut text into their pieces.

    Raises a `ModelError` for an architecture that we have not, such as the SSRU of students, and
    for files that do not fit each other.
    """
    folder = path if path.is_dir() else path.parent
    file = folder / "decoder.yml"  # of OPUS-MT; Marian itself names it after the weights
    if not file.is_file():
        file = Path(f"{_find_weights(path, Settings(file, {}))}.decoder.yml")
    decoder = Settings(file, _parse(file, read_text(file)) if file.is_file() else {})
    path = _find_weights(path, decoder)
    arrays = _load(path)
    text = bytes(arrays.pop(_SETTINGS).tolist()).rstrip(b"\0").decode("utf-8", "replace")
    theirs = Settings(path, _parse(path, text))
    tensors = Tensors(path, {name: _to_tensor(name, array) for name, array in arrays.items()})
    tensors.rename(rename)
    tensors.settle_bias(_BIAS)
    sizes = _add_padding(tensors, settle_embeddings(tensors, is_tied=False))
    spm = spm_files(folder, config, *_SPM)
    src_size = sizes.src_vocab_size or sizes.vocab_size
    src, tgt = _pieces(folder, decoder, spm, src_size - 1, sizes.vocab_size - 1)
    model = _architecture(theirs, is_tied=sizes.is_tied)
    special = [_special_ids(folder, side) for side in (src, tgt)]
    is_joint = sizes.src_vocab_size is None
    return Imported(
        model=model,
        tokenizers=make_tokenizers(spm, (src, tgt), special, is_joint=is_joint),
        weights=to_state(tensors, model, sizes),
        search=decoder.search(beam_size="beam-size", exponent="normalize", default=0.0),
        src_lang=config.src_lang,
        tgt_lang=config.tgt_lang,
    )


def _find_weights(path: Path, decoder: Settings) -> Path:
    """Return the `.npz` file at `path`, in a folder that which `decoder.yml` names or the only one;
    a `ModelError` refuses the binary format.
    """
    found = [path] if path.is_file() else sorted(path.glob("*.npz"))
    named = decoder.file_names("models")
    found = [file for file in found if file.name in named] or found
    found = [f for f in found if not f.name.endswith((".optimizer.npz", ".progress.npz"))]
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        what = "; its binary format (.bin) is not imported" if any(path.glob("*.bin")) else ""
        raise ModelError(f"{path} holds not one .npz file of Marian ({names}){what}")
    if found[0].suffix != ".npz":
        raise ModelError(f"{found[0]}: the binary format of Marian is not imported, only .npz")
    return found[0]


def _load(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read all arrays of a `.npz`; none may hold Python objects, which could run code, or be so
    compressed that it fills the memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            num_bytes = sum(member.file_size for member in archive.infolist())
        if num_bytes > _MOST_COMPRESSED * path.stat().st_size:
            raise ModelError(f"{path} unpacks to {num_bytes:,} bytes; it is no model")
        with np.load(path, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ModelError(f"{path} is no .npz of numbers ({reason}); copy it again") from None
    if _SETTINGS not in arrays:
        raise ModelError(f"{path} lacks {_SETTINGS}; it is no model of Marian")
    return arrays


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        raise ModelError(f"{path}: the settings are no YAML; copy it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: the settings are no mapping; copy it again")
    return content


def _to_tensor(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    """Turn a matrix (inner, outer) around, and a vector (1, n) into (n,)."""
    tensor = torch.from_numpy(array)
    if tensor.dim() == 2 and tensor.size(0) == 1 and not name.endswith("Wemb"):
        return tensor[0]
    return tensor if name.endswith(("Wemb", "Wt")) else tensor.T.contiguous()


def rename(name: str) -> str:
    """Return fairseq's name of a tensor, for one that we have; others stay."""
    if found := _LAYER.fullmatch(name):
        stack, number, part, rest = found.groups()
        layer, place = f"{stack}.layers.{int(number) - 1}", _PLACES[part]
        if norm := re.fullmatch(r"(?:Wo|ffn)_ln_(scale|bias)(?:_pre)?", rest):
            return f"{layer}.{place}_layer_norm.{_KINDS[norm[1]]}"
        if len(rest) == 2 and rest[0] in _KINDS and rest[1] in _HEADS:
            owner = layer if part == "ffn" else f"{layer}.{place}"
            return f"{owner}.{_HEADS[rest[1]]}.{_KINDS[rest[0]]}"
    if found := re.fullmatch(r"(encoder|decoder)_top_ln_(scale|bias)", name):
        return f"{found[1]}.layer_norm.{_KINDS[found[2]]}"
    return _TOP.get(name, name)


def _add_padding(tensors: Tensors, sizes: Sizes) -> Sizes:
    """Add a row of zeros to embeddings and output, with a bias that makes it impossible."""
    src, tgt, output = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "output.weight"
    for name in (src, tgt, output):
        if name in tensors:
            tensors.add(name, F.pad(tensors.peek(name), (0, 0, 0, 1)))
    bias = torch.zeros(sizes.vocab_size)
    if "output.bias" in tensors:
        bias = tensors.take("output.bias", sizes.vocab_size)
    tensors.add("output.bias", F.pad(bias, (0, 1), value=_NEVER))
    src_size = sizes.src_vocab_size
    return Sizes(sizes.vocab_size + 1, None if src_size is None else src_size + 1, sizes.is_tied)


def _pieces(
    folder: Path, decoder: Settings, spm: tuple[Path, Path], *sizes: int
) -> tuple[list[str], list[str]]:
    """Return the pieces of source and target, padding last: of the `.yml` files that `decoder.yml`
    names or the folder holds, else of the SentencePiece models.
    """
    named = [folder / name for name in decoder.file_names("vocabs")]
    files = named or sorted(folder.glob("*vocab*.yml"))
    if not files or files[0].suffix == ".spm":
        files = list(spm)
    if len(files) > 2:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{folder} holds several vocabularies ({names}); keep those of the model")
    if (
        not named
        and len(files) == 2
        and files[0].suffix == ".yml"
        and not _SOURCE.search(files[0].name)
    ):
        raise ModelError(
            f"{folder}: which vocabulary is that of the source is unknown; write a decoder.yml "
            f"with the line vocabs: [{files[0].name}, {files[1].name}], the source's first"
        )
    found = []
    for file, size in zip((files[0], files[-1]), sizes, strict=True):
        if file.suffix == ".yml":
            ids = read_yaml_vocabulary(file)
        else:
            ids = [(piece, i) for i, piece in enumerate(Tokenizer(read_model(file)).all_pieces())]
        pieces = list_pieces(file, ids, size)
        found.append([*pieces, _PAD if _PAD not in pieces else "<nmt:pad>"])
    return found[0], found[1]


def _special_ids(folder: Path, pieces: list[str]) -> SpecialIds:
    ids, pad = {piece: i for i, piece in enumerate(pieces)}, len(pieces) - 1
    unk, eos = (find_id(ids, name, folder) for name in ("<unk>", "</s>"))
    return SpecialIds(pad=pad, unk=unk, start=pad, eos=eos)


def _architecture(theirs: Settings, *, is_tied: bool) -> ModelConfig:
    """Return our settings of theirs; what we have not is a `ModelError`."""
    wanted: dict[str, Any] = {
        "type": "transformer",
        "transformer-decoder-autoreg": "self-attention",
        "transformer-no-projection": False,
        "transformer-train-position-embeddings": False,
        "transformer-tied-layers": [],
        "transformer-ffn-depth": 2,
        "transformer-pool": False,
        "right-left": False,
        "lemma-dim-emb": 0,
        "input-types": [],
    }
    theirs.demand(**wanted)
    if theirs.get("transformer-postprocess-emb", "d") not in ("", "d"):
        raise theirs.refuse(
            "transformer-postprocess-emb", theirs.get("transformer-postprocess-emb"), "d"
        )
    names = ("transformer-preprocess", "transformer-postprocess", "transformer-postprocess-top")
    order = tuple(theirs.get(name, "") for name in names)
    if order not in _NORMS:
        raise theirs.refuse(", ".join(names), order, " or ".join(map(str, _NORMS)))
    d_ff = theirs.number("transformer-dim-ffn")
    for name, same in (("dim-ffn", d_ff), ("ffn-depth", 2)):
        if theirs.get(f"transformer-decoder-{name}", 0) not in (0, same):
            value = theirs.get(f"transformer-decoder-{name}")
            raise theirs.refuse(f"transformer-decoder-{name}", value, f"{same}, as in the encoder")
    return theirs.architecture(
        num_encoder_layers=theirs.number("enc-depth"),
        num_decoder_layers=theirs.number("dec-depth"),
        d_model=theirs.number("dim-emb"),
        d_ff=d_ff,
        num_heads=theirs.number("transformer-heads"),
        dropout=theirs.share("transformer-dropout"),
        attention_dropout=theirs.share("transformer-dropout-attention"),
        activation_dropout=theirs.share("transformer-dropout-ffn"),
        norm=_NORMS[order],
        positions=Positions.sinusoidal_halves,
        activation=theirs.choose("transformer-ffn-activation", _ACTIVATIONS),
        tied_output=is_tied,
        output_bias=True,
    )
