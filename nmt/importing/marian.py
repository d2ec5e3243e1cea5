"""Import a model of Marian (Junczys-Dowmunt et al., 2018) from a `.npz` file.

The file holds the weights, and the settings as YAML. Marian starts decoding from an embedding of
zeros. The import adds a padding piece with this embedding, so that decoding starts from padding. A
large negative output bias makes the probability of padding 0.
"""

# V rows of an embedding, D d_model, P positions

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from nmt.config import Activation, Decoder, ImportConfig, ModelConfig, Norm, Positions
from nmt.data.tokenizer import Tokenizer, read_model
from nmt.errors import ModelError, to_one_line
from nmt.importing.piece_ids import (
    SideVocabulary,
    SpecialIds,
    add_ids,
    find_id,
    find_spm,
    make_tokenizers,
    read_yaml_vocabulary,
    sort_pieces,
)
from nmt.importing.settings import ImportedModel, Settings, read_text
from nmt.importing.weights import (
    EmbeddingLayout,
    Rule,
    TensorFile,
    drop_tied_copies,
    make_state_dict,
)
from nmt.model.positions import sinusoidal_positions
from nmt.runtime.metadata import parse_yaml
from nmt.runtime.reading import check_regular, list_zip_members

_SETTINGS_ARRAY = "special:model.yml"  # the name of the array with the bytes of the settings
_DECODERS = {"self-attention": Decoder.attention, "rnn": Decoder.ssru}
_ACTIVATIONS = {"relu": Activation.relu, "swish": Activation.silu}
# Marian's operations before a sub-layer, after it, and after the stack: d is dropout, a adds the
# residual, and n normalizes
_NORMS = {
    ("", "dan", ""): Norm.post,
    ("n", "da", "n"): Norm.pre,
}
_MAX_ARRAYS = 1 << 13
_NUMBER_TYPES = ("i1", "u1", "i2", "i4", "i8", "f2", "f4", "f8")  # kind and bytes
_ARRAY_DTYPES = [np.dtype(name) for name in _NUMBER_TYPES]
_MAX_COMPRESSION = 20  # a file that unpacks to more than 20 times its size is refused
_PAD = "<pad>"
_PADDING_BIAS = -1e4  # far below every logit, and above the minimum of float16
_SPM_NAMES = (("source.spm", "target.spm"), ("vocab.spm", "vocab.spm"))
_NEW_TYPE = "transformer-new"  # the newer of Marian's two implementations of the Transformer
_TYPES = ("transformer", _NEW_TYPE)
_POSITION_TABLES = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")
_MAX_POSITION_OFFSET = 3  # the largest offset that is tried on a position table
# Rename the tensors of `transformer-new`, whose names are expressions in C++, to the names that
# `make_state_dict` expects. A feed-forward network is a list of layers: Linear, activation, dropout
# and Linear. With ReLU, the first three are fused into one layer.
_NEW_RULES: list[Rule] = [
    (r"^TransformerBatch(En|De)coder->", ""),
    (r"->layers->at\((\d+)\)->as<marian::nn::Transformer\w+>\(\)->", r".layers.\1."),
    (r"filterBlock->layers->at\(0\)->as<[\w:]+>\(\)->", "fc1."),
    (r"filterBlock->layers->at\([13]\)->as<[\w:]+>\(\)->", "fc2."),
    (r"(selfAttention|autoRegressive)Block->(pre|post)processor->norm->", "self_attn_layer_norm."),
    (r"crossAttentionBlock->(pre|post)processor->norm->", "encoder_attn_layer_norm."),
    (r"filterBlock->(pre|post)processor->norm->", "final_layer_norm."),
    (r"^(encoder|decoder)->postprocessor->norm->", r"\1.layer_norm."),
    (r"(selfAttention|autoRegressive)Block->selfAttention->", "self_attn."),
    (r"crossAttentionBlock->crossAttention->", "encoder_attn."),
    (r"\.([qkv])Proj->", r".\1_proj."),
    (r"\.oProj->", ".out_proj."),
    (r"^(encoder|decoder)->positionEmbedding->embeddings$", r"\1.embed_positions.weight"),
]
# Rename the tensors of `transformer`, and the embeddings of both. Later rules read the results
# of earlier ones: decoder_l1_self_Wq becomes decoder.layers.0.self_Wq, then ...self_attn.Wq, then
# ...self_attn.q_proj.W, and at last decoder.layers.0.self_attn.q_proj.weight.
_RULES: list[Rule] = [
    (r"^Wemb$", "shared.weight"),
    (r"^(encoder|decoder)_Wemb$", r"\1.embed_tokens.weight"),
    (r"^decoder_ff_logit_out_Wt?$", "output.weight"),
    (r"_l(\d+)_", lambda match: f".layers.{int(match[1]) - 1}."),  # Marian counts layers from 1
    (r"\.rnn_(ffn_)?ln_", ".ssru_layer_norm."),
    (r"\.rnn_W$", ".ssru.candidate.W"),
    (r"\.rnn_([Wb])f$", r".ssru.forget_gate.\1"),
    (r"\.self_Wo_ln_", ".self_attn_layer_norm."),
    (r"\.context_Wo_ln_", ".encoder_attn_layer_norm."),
    (r"\.ffn_ffn_ln_", ".final_layer_norm."),
    (r"_top_ln_", ".layer_norm."),
    (r"layer_norm\.scale(_pre)?$", "layer_norm.weight"),
    (r"layer_norm\.bias_pre$", "layer_norm.bias"),
    (r"\.self_([Wb].)$", r".self_attn.\1"),
    (r"\.context_([Wb].)$", r".encoder_attn.\1"),
    (r"\.ffn_([Wb])([12])$", r".fc\2.\1"),
    (r"_attn\.([Wb])([qkv])$", r"_attn.\2_proj.\1"),
    (r"_attn\.([Wb])o$", r"_attn.out_proj.\1"),
    (r"\.W$", ".weight"),
    (r"\.b$", ".bias"),
]


def read(path: Path, config: ImportConfig) -> ImportedModel:
    """Read the model in a `.npz` file. `path` is this file or its folder.

    The folder also has the SentencePiece models. It has `.yml` files with the vocabularies too, if
    the ids differ from SentencePiece's. Raises `ModelError` for an architecture that nmt does not
    have, such as a recurrent decoder other than SSRUs, and for files that do not belong together.
    """
    folder = path if path.is_dir() else path.parent
    decoder_settings = _read_decoder_settings(path, folder)
    path = _find_weights(path, decoder_settings.get_file_names("models"))
    arrays = _load_arrays(path)
    settings_bytes = arrays.pop(_SETTINGS_ARRAY).tobytes().rstrip(b"\0")
    settings_text = settings_bytes.decode("utf-8", errors="replace")
    settings = Settings(path, _parse_settings(path, settings_text))
    tensors_by_name = {name: _to_tensor(name, array) for name, array in arrays.items()}
    tensors = TensorFile(path, tensors_by_name)
    tensors.rename([*_NEW_RULES, *_RULES])
    tensors.rename_or_drop_output_bias("decoder_ff_logit_out_b")
    embeddings_without_padding = drop_tied_copies(tensors)
    embeddings = _add_padding(tensors, embeddings_without_padding)
    src_spm, tgt_spm = find_spm(folder, config, _SPM_NAMES)
    src_vocabulary, tgt_vocabulary = _find_vocabularies(
        folder, decoder_settings, (src_spm, tgt_spm)
    )
    model = _convert_architecture(settings, tensors, has_tied_output=embeddings.has_tied_output)
    return ImportedModel(
        model=model,
        tokenizers=make_tokenizers(
            _make_side_vocabulary(src_spm, src_vocabulary, embeddings.num_src_rows),
            _make_side_vocabulary(tgt_spm, tgt_vocabulary, embeddings.vocab_size),
            shares_embedding=embeddings.shares_embedding,
        ),
        weights=make_state_dict(tensors, model, embeddings),
        search=decoder_settings.make_search_config(  # Marian normalizes by length^normalize
            beam_size_name="beam-size", exponent_name="normalize", default_exponent=0.0
        ),
        src_lang=config.src_lang,
        tgt_lang=config.tgt_lang,
    )


def _read_decoder_settings(path: Path, folder: Path) -> Settings:
    """Read the search settings and the file names of the weights and vocabularies.

    OPUS-MT calls the file `decoder.yml`, and Marian itself `WEIGHTS.decoder.yml`. Returns empty
    settings if neither file exists.
    """
    decoder_path = folder / "decoder.yml"
    if not decoder_path.exists():
        weights_path = _find_weights(path, model_names=[])  # no settings name files
        decoder_path = Path(f"{weights_path}.decoder.yml")
    if not decoder_path.exists():
        return Settings(decoder_path, {})
    text = read_text(decoder_path)
    return Settings(decoder_path, _parse_settings(decoder_path, text))


def _find_weights(path: Path, model_names: list[str]) -> Path:
    """Return the file with the weights: `path`, or the `.npz` file in the folder `path`.

    If the folder holds several, takes the file in `model_names`. Raises `ModelError` if no file or
    several remain, and for Marian's binary format.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
    named_files = [file for file in files if file.name in model_names]
    if named_files:
        files = named_files
    training_state_suffixes = (".optimizer.npz", ".progress.npz")
    files = [file for file in files if not file.name.endswith(training_state_suffixes)]
    if len(files) != 1:
        advice = "give input=FILE"
        if any(path.glob("*.bin")):
            advice = "Marian's binary format (.bin) is not imported"
        raise ModelError(
            f"{path} must hold one .npz file of Marian, but holds {_list_names(files)}; {advice}"
        )
    if files[0].suffix != ".npz":
        raise ModelError(f"{files[0]}: the binary format of Marian is not imported, only .npz")
    return files[0]


def _load_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read all arrays of a `.npz`.

    Raises `ModelError` for arrays of Python objects, which could run code, and for files that would
    fill the memory when unpacked.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            members = list_zip_members(file, max_members=_MAX_ARRAYS)
        num_bytes = sum(member.file_size for member in members)
        if num_bytes > _MAX_COMPRESSION * path.stat().st_size:
            raise ValueError(f"it unpacks to {num_bytes:,} bytes")
        arrays = {}
        with np.load(path, allow_pickle=False) as content:
            for name in content.files:
                array = content[name]  # bytes if the member is not an array
                if not isinstance(array, np.ndarray) or array.dtype not in _ARRAY_DTYPES:
                    raise ValueError(f"{name} is not an array of numbers")
                arrays[name] = array
    # numpy and zipfile raise many types for damaged files, such as MemoryError and TokenError
    except Exception as error:
        reason = to_one_line(error, 100)
        raise ModelError(f"{path} is not an .npz of numbers ({reason}); copy it again") from None
    if _SETTINGS_ARRAY not in arrays or arrays[_SETTINGS_ARRAY].itemsize != 1:
        raise ModelError(f"{path} lacks {_SETTINGS_ARRAY}; it is not a model of Marian")
    return arrays


def _parse_settings(path: Path, text: str) -> dict[str, Any]:
    """Parse YAML from the file `path`. Raises `ModelError` if it is not a mapping."""
    try:
        content = parse_yaml(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        raise ModelError(f"{path}: the settings are not YAML; copy the file again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: the settings are not a mapping; copy the file again")
    return content


def _list_names(files: list[Path]) -> str:
    if not files:
        return "none"
    return ", ".join(file.name for file in files)


def _to_tensor(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    """Convert an array: transpose matrices (in, out), and reshape vectors (1, n) to (n,).

    Embeddings (V, D) and position tables (P, D) are not transposed, nor are output layers whose
    name ends with "Wt".
    """
    tensor = torch.from_numpy(array)
    if tensor.dim() == 1 or name.endswith(("Wemb", "->embeddings")):
        return tensor
    if tensor.dim() == 2 and tensor.size(0) == 1:
        return tensor[0]
    if name.endswith("Wt"):
        return tensor
    return tensor.T.contiguous()


def _add_padding(tensors: TensorFile, embeddings: EmbeddingLayout) -> EmbeddingLayout:
    """Add a row for padding to embeddings, output layer and output bias. Returns the new sizes."""
    matrix_names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "output.weight")
    for name in matrix_names:
        if name in tensors:  # `drop_tied_copies` may have dropped it
            matrix = tensors.get_matrix(name)  # (V, D)
            padded_matrix = F.pad(matrix, (0, 0, 0, 1))  # (V + 1, D)
            tensors.add(name, padded_matrix)
    bias = torch.zeros(embeddings.vocab_size)
    if "output.bias" in tensors:
        bias = tensors.take("output.bias", embeddings.vocab_size)
    tensors.add("output.bias", F.pad(bias, (0, 1), value=_PADDING_BIAS))
    src_vocab_size = embeddings.src_vocab_size
    if src_vocab_size is not None:
        src_vocab_size += 1
    return EmbeddingLayout(
        vocab_size=embeddings.vocab_size + 1,
        src_vocab_size=src_vocab_size,
        has_tied_output=embeddings.has_tied_output,
    )


def _find_vocabularies(
    folder: Path, decoder_settings: Settings, spm_paths: tuple[Path, Path]
) -> tuple[Path, Path]:
    """Return the files with the pieces of source and target.

    These are the `.yml` files that `decoder.yml` names, or else the `.yml` files in the folder, or
    else the SentencePiece models.
    """
    names = decoder_settings.get_file_names("vocabs")
    files = [folder / name for name in names]
    if not files:
        files = sorted(folder.glob("*vocab*.yml"))
    # Marian takes either `.yml` files or the SentencePiece models, which `spm_paths` names.
    uses_yaml = bool(files) and files[0].suffix != ".spm"
    if not uses_yaml:
        return spm_paths
    if len(files) > 2:
        raise ModelError(
            f"{folder} holds several vocabularies ({_list_names(files)}); remove the files "
            "of other models"
        )
    # Files of the folder are sorted: "source" before "target", and "src" before "tgt" and "trg".
    is_first_of_source = re.search("src|source", files[0].name) is not None
    if not names and len(files) == 2 and not is_first_of_source:
        raise ModelError(
            f"{folder}: which vocabulary belongs to the source is unknown; write a decoder.yml "
            f"with the line vocabs: [{files[0].name}, {files[1].name}], the source's first"
        )
    return files[0], files[-1]  # one file for both sides if they share a vocabulary


def _make_side_vocabulary(spm_path: Path, vocabulary_path: Path, size: int) -> SideVocabulary:
    """Return the vocabulary of one side, with `size` pieces.

    The last piece is padding, which is not in the file. Decoding starts from it.
    """
    if vocabulary_path.suffix == ".yml":
        pieces_and_ids = read_yaml_vocabulary(vocabulary_path)
    else:
        tokenizer = Tokenizer(read_model(vocabulary_path))
        pieces_and_ids = add_ids(tokenizer.all_pieces())
    pieces = sort_pieces(vocabulary_path, pieces_and_ids, size - 1)
    has_pad_piece = _PAD in pieces
    pieces.append("<nmt:pad>" if has_pad_piece else _PAD)
    id_of_piece = {piece: i for i, piece in enumerate(pieces)}
    folder = vocabulary_path.parent  # for error messages
    pad_id = size - 1
    special_ids = SpecialIds(
        pad=pad_id,
        unk=find_id(id_of_piece, "<unk>", folder),
        decoder_start=pad_id,
        eos=find_id(id_of_piece, "</s>", folder),
    )
    return SideVocabulary(spm_path, pieces, special_ids)


def _convert_norm(settings: Settings) -> Norm:
    """Return whether the model is pre-norm or post-norm. Raises `ModelError` if it is neither."""
    names = ("transformer-preprocess", "transformer-postprocess", "transformer-postprocess-top")
    operations = tuple(settings.get(name, "") for name in names)
    if operations not in _NORMS:
        valid = " or ".join(str(supported) for supported in _NORMS)
        raise settings.make_error(", ".join(names), operations, valid)
    return _NORMS[operations]


def _convert_positions(settings: Settings, tensors: TensorFile) -> dict[str, Any]:
    """Return the settings of our model that concern positions. Drops a table that nmt computes.

    Marian computes `sinusoidal_concat`. For the same models, transformers computes
    `sinusoidal_halves`, and so does CTranslate2 if the file has no table. The type
    `transformer-new` can read a table, and then does not scale the embeddings.
    """
    if not settings.get_bool("transformer-train-position-embeddings", False):
        tensors.drop("Wpos")  # a table that only ct2-marian-converter reads
        return {"positions": Positions.sinusoidal_concat}
    if settings.get("type") != _NEW_TYPE:
        raise settings.make_error("transformer-train-position-embeddings", True, "false")
    num_positions = len(tensors.get_matrix(_POSITION_TABLES[0]))
    tensors.get_matrix(_POSITION_TABLES[1])  # raises `ModelError` if it is missing
    for offset in range(_MAX_POSITION_OFFSET + 1):
        for layout in (Positions.sinusoidal_halves, Positions.sinusoidal_concat):
            compute_table = partial(
                sinusoidal_positions,
                d_model=settings.get_int("dim-emb"),
                layout=layout,
                offset=offset,
            )
            if any(tensors.differs_from_table(name, compute_table) for name in _POSITION_TABLES):
                continue
            for name in _POSITION_TABLES:
                tensors.drop(name)
            return {"positions": layout, "position_offset": offset, "scale_embedding": False}
    return {
        "positions": Positions.learned,
        "num_positions": num_positions,
        "scale_embedding": False,
    }


def _convert_architecture(
    settings: Settings, tensors: TensorFile, *, has_tied_output: bool
) -> ModelConfig:
    """Convert the architecture. Raises `ModelError` for a setting that nmt does not have."""
    settings.require_choice("type", _TYPES, "transformer")
    expected: dict[str, Any] = {  # a dictionary, since a keyword argument has no hyphens
        "transformer-no-projection": False,
        "transformer-tied-layers": [],
        "transformer-ffn-depth": 2,
        "transformer-pool": False,
        "transformer-disable-position-embeddings": False,
        "transformer-attention-mask": "default",  # not ALiBi
        "transformer-alibi-shift": False,
        "transformer-no-bias": False,
        "transformer-no-affine": False,
        "right-left": False,
        "lemma-dim-emb": 0,
        "input-types": [],
    }
    settings.require_values(**expected)
    settings.require_choice("transformer-postprocess-emb", ("", "d"), "d")  # d is dropout
    norm = _convert_norm(settings)
    ffn_depth = settings.get("transformer-decoder-ffn-depth", 0)
    if ffn_depth not in (0, 2):  # 0 means the depth of the encoder
        raise settings.make_error("transformer-decoder-ffn-depth", ffn_depth, "2")
    d_ff = settings.get_int("transformer-dim-ffn")
    decoder = settings.get_choice("transformer-decoder-autoreg", _DECODERS, "self-attention")
    if decoder is Decoder.ssru:
        ssru_settings = {
            "type": "transformer",
            "dec-cell": "ssru",
            "layer-normalization": False,
            "transformer-rnn-projection": False,
        }
        settings.require_values(**ssru_settings)
    return settings.make_model_config(
        num_encoder_layers=settings.get_int("enc-depth"),
        num_decoder_layers=settings.get_int("dec-depth"),
        decoder=decoder,
        d_model=settings.get_int("dim-emb"),
        d_ff=d_ff,
        decoder_d_ff=settings.get_int("transformer-decoder-dim-ffn", 0) or d_ff,
        num_heads=settings.get_int("transformer-heads"),
        dropout=settings.get_dropout("transformer-dropout"),
        attention_dropout=settings.get_dropout("transformer-dropout-attention"),
        activation_dropout=settings.get_dropout("transformer-dropout-ffn"),
        norm=norm,
        activation=settings.get_choice("transformer-ffn-activation", _ACTIVATIONS),
        tied_output=has_tied_output,
        output_bias=True,
        **_convert_positions(settings, tensors),
    )
