"""Export a model to the format of another library.

The folder of an export has the converted model, its tokenizer, `nmt.json`, and a README that shows
how to translate with it in Python. `SUPPORTED` lists the architectures that each format supports.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from nmt.checkpoint import (
    EXPORT_INFO,
    FORMAT_VERSION,
    ModelInfo,
    build_model,
    load_info,
    load_model_tokenizers,
    load_weights,
)
from nmt.config import (
    Activation,
    Decoder,
    ExportConfig,
    ExportFormat,
    ModelConfig,
    Norm,
    NormLayer,
    Positions,
    resolve_path,
)
from nmt.data.tokenizer import (
    JOINT_MODEL,
    SRC_MODEL,
    SRC_VOCABULARY,
    TGT_MODEL,
    TGT_VOCABULARY,
    VOCABULARY,
    MappedTokenizer,
    Tokenizer,
    Tokenizers,
    save_tokenizers,
)
from nmt.errors import ConfigError
from nmt.export import argos, bergamot, ctranslate2, huggingface, marian, onnx, web
from nmt.export.shortlist import learn_shortlist, write_ctranslate2_shortlist
from nmt.model_card import CARD, render_card
from nmt.runtime.files import replace_folder, write_json
from nmt.runtime.signatures import sign_folder

_WRITERS = {
    ExportFormat.ctranslate2: ctranslate2.write_ctranslate2,
    ExportFormat.huggingface: huggingface.write_huggingface,
    ExportFormat.argos: argos.write_argos,
    ExportFormat.onnx: onnx.write_onnx,
    ExportFormat.marian: marian.write_marian,
    ExportFormat.web: web.write_web,
    ExportFormat.bergamot: bergamot.write_bergamot,
}
_LIBRARIES = {  # names of libraries on the Hugging Face Hub
    ExportFormat.ctranslate2: "ctranslate2",
    ExportFormat.huggingface: "transformers",
    ExportFormat.argos: "argostranslate",
    ExportFormat.onnx: "onnx",
    ExportFormat.marian: "marian",
    ExportFormat.web: "onnx",
    ExportFormat.bergamot: "marian",
}
Support: TypeAlias = dict[str, list[Any] | None]
"""The supported values of each setting of the architecture, or `_ANY_VALUE`."""
_ANY_VALUE = None

_COMMON_SUPPORT: Support = {
    "num_encoder_layers": _ANY_VALUE,
    "num_decoder_layers": _ANY_VALUE,
    "d_model": _ANY_VALUE,
    "d_ff": _ANY_VALUE,
    "decoder_d_ff": _ANY_VALUE,
    "num_heads": _ANY_VALUE,
    "position_offset": _ANY_VALUE,
    "num_positions": _ANY_VALUE,
    "max_distance": _ANY_VALUE,
    "scale_embedding": _ANY_VALUE,
    "tied_output": _ANY_VALUE,
    "output_bias": _ANY_VALUE,
    "norm": _ANY_VALUE,
    "alignment_heads": _ANY_VALUE,
    "alignment_shift": _ANY_VALUE,
    "decoder": [Decoder.attention],
}
_CTRANSLATE2_SUPPORT: Support = _COMMON_SUPPORT | {
    "positions": [
        Positions.sinusoidal,
        Positions.sinusoidal_concat,
        Positions.sinusoidal_halves,
        Positions.learned,
        Positions.relative,
        Positions.rotary,
        Positions.alibi,
    ],
    "activation": [Activation.relu, Activation.gelu, Activation.silu, Activation.swiglu],
    "norm_layer": [NormLayer.layer, NormLayer.rms],
    "num_kv_heads": _ANY_VALUE,
    "qk_norm": _ANY_VALUE,
    "source_eos": _ANY_VALUE,
}
_MARIAN_SUPPORT: Support = _COMMON_SUPPORT | {
    "positions": [layout for layout in Positions if layout.is_added_to_embeddings],
    "activation": list(marian.ACTIVATIONS),
    "norm_layer": [NormLayer.layer],
    "num_kv_heads": [None],
    "qk_norm": [False],
    "decoder": _ANY_VALUE,
}
_ONNX_SUPPORT: Support = {setting.name: _ANY_VALUE for setting in dataclasses.fields(ModelConfig)}
# The state of an SSRU (simpler simple recurrent unit) has d_model numbers, which are divided into
# the heads of the cache. So all heads together must have d_model numbers, which is the default.
_ONNX_SSRU_SUPPORT: Support = {"head_size": [None], "num_kv_heads": [None]}
_MARIAN_SSRU_SUPPORT: Support = {
    "positions": [Positions.sinusoidal_concat],
    "position_offset": [0],
    "scale_embedding": [True],
}
_SSRU_SUPPORT = {
    ExportFormat.onnx: _ONNX_SSRU_SUPPORT,
    ExportFormat.web: _ONNX_SSRU_SUPPORT,
    ExportFormat.marian: _MARIAN_SSRU_SUPPORT,
    ExportFormat.bergamot: _MARIAN_SSRU_SUPPORT,
}
"""The settings that formats support differently in models with SSRUs."""
SUPPORTED: dict[ExportFormat, Support] = {
    ExportFormat.ctranslate2: _CTRANSLATE2_SUPPORT,
    # source_eos is missing: it must be true, since tokenizers of transformers always add EOS
    ExportFormat.huggingface: _COMMON_SUPPORT
    | {
        "positions": [layout for layout in Positions if layout.is_added_to_embeddings],
        "activation": list(huggingface.ACTIVATIONS),
        "norm_layer": [NormLayer.layer],
        "num_kv_heads": [None],
        "qk_norm": [False],
    },
    ExportFormat.argos: _CTRANSLATE2_SUPPORT,
    ExportFormat.onnx: _ONNX_SUPPORT,
    ExportFormat.marian: _MARIAN_SUPPORT,
    ExportFormat.web: _ONNX_SUPPORT,
    # In browsermt/marian-dev, the feed-forward layers of encoder and decoder have the same size.
    # In pre-norm self-attention, it normalizes only the input of queries, not of keys and values.
    ExportFormat.bergamot: _MARIAN_SUPPORT
    | {
        "positions": [layout for layout in Positions if layout.is_sinusoidal],
        "position_offset": [0],
        "scale_embedding": [True],
        "decoder_d_ff": [None],
        "norm": [Norm.post],
    },
}
"""What each format supports. A setting that is missing here must have its default."""


def export_model(folder: Path, output: Path, config: ExportConfig) -> None:
    """Convert the model in `folder` to `config.format`. After an error, `output` is unchanged.

    Raises `ConfigError` for an architecture that the format does not support. Raises `ModelError`
    if `folder` is not a model folder. Raises `NmtError` if `output` exists but is not an export, or
    if a Python package is missing.
    """
    info = load_info(folder)
    _check_supported(info.model, config.format)
    tokenizers = load_model_tokenizers(folder, info)
    model = build_model(info, load_weights(folder), torch.device("cpu"))  # checks names and shapes
    with replace_folder(output, marker=EXPORT_INFO) as temporary:
        _WRITERS[config.format](temporary, info, dict(model.state_dict()), tokenizers, config)
        save_tokenizers(temporary, tokenizers)
        if config.shortlist_data is not None:
            data_dir = resolve_path(config.shortlist_data)
            _write_shortlist(temporary, config.format, data_dir, info, tokenizers)
        content = {
            "format_version": FORMAT_VERSION,
            "export": {
                "format": config.format,
                "quantization": config.quantization,
                "max_positions": config.max_positions,
            },
            **info.to_json(),
        }
        write_json(temporary / EXPORT_INFO, content)
        card = render_card(
            folder,
            info,
            render_readme(info, tokenizers, config),
            library=_LIBRARIES[config.format],
            tags=(config.format.value,),
        )
        (temporary / CARD).write_text(card, encoding="utf-8", newline="\n")
        if config.sign is not None:  # the signature covers all other files, so it comes last
            sign_folder(temporary, resolve_path(config.sign))


def _check_supported(model: ModelConfig, export_format: ExportFormat) -> None:
    """Raise a `ConfigError` if a format does not support an architecture."""
    unsupported = find_unsupported(model, export_format)
    if not unsupported:
        return
    message = f"format={export_format.value} does not support {' and '.join(unsupported)}"
    alternatives = [
        f"format={alternative.value}"
        for alternative in SUPPORTED
        if not find_unsupported(model, alternative)
    ]
    if alternatives:
        message += f"; use {' or '.join(alternatives)}"
    raise ConfigError(message)


def _write_shortlist(
    folder: Path,
    export_format: ExportFormat,
    data_dir: Path,
    info: ModelInfo,
    tokenizers: Tokenizers,
) -> None:
    """Learn a shortlist from the data folder `data_dir`, and write it in the format's form."""
    candidates = learn_shortlist(data_dir, tokenizers, info.tokenizer_sha256)
    if export_format is ExportFormat.bergamot:
        path = folder / bergamot.shortlist_file_name(info)
        path.write_bytes(bergamot.encode_shortlist(candidates, tokenizers))
    else:
        write_ctranslate2_shortlist(folder, candidates, tokenizers)


def find_unsupported(model: ModelConfig, export_format: ExportFormat) -> list[str]:
    """Describe each setting that a format does not support: its value and the supported values.

    Dropout affects training only, so it is never listed. A setting that is missing from `SUPPORTED`
    must have its default.
    """
    unsupported = []
    support = SUPPORTED[export_format]
    if model.decoder is Decoder.ssru:
        support = support | _SSRU_SUPPORT.get(export_format, {})
    default_head_size = model.d_model // model.num_heads
    if model.head_size == default_head_size:
        model = dataclasses.replace(model, head_size=None)  # the same architecture
    for setting in dataclasses.fields(model):
        if "dropout" in setting.name:
            continue
        value = getattr(model, setting.name)
        supported = support.get(setting.name, [setting.default])
        if supported is not _ANY_VALUE and value not in supported:
            names = ", ".join(map(_format_value, supported))
            unsupported.append(f"model.{setting.name}={_format_value(value)} (only {names})")
    return unsupported


def describe_exports(model: ModelConfig) -> str:
    """Return a line for each format: whether it supports the architecture, or why not."""
    lines = []
    for export_format in SUPPORTED:
        unsupported = find_unsupported(model, export_format)
        answer = "yes"
        if unsupported:
            answer = f"no, {', '.join(unsupported)}"
        lines.append(f"export to {export_format.value}: {answer}")
    return "\n".join(lines)


def _format_value(value: Any) -> str:
    """Write a value as in YAML, such as null, true or rotary."""
    return json.dumps(value).strip('"')  # removes the quotes of texts


@functools.cache  # compiling the template takes longer than rendering it
def _readme_template() -> Template:
    """Return the template of README.md."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["literal"] = json.dumps  # a JSON string is also a string literal of Python
    return environment.get_template("readme.md.j2")


def render_readme(info: ModelInfo, tokenizers: Tokenizers, config: ExportConfig) -> str:
    """Return the README.md of an exported folder, from `readme.md.j2`."""
    # file names of SentencePiece models, keyed by the variable of the README's code that loads them
    tokenizer_files = {"source": SRC_MODEL, "target": TGT_MODEL}
    if isinstance(tokenizers, Tokenizer):
        tokenizer_files = {"tokenizer": JOINT_MODEL}
    src = tokenizers.src
    tgt = tokenizers.tgt
    directions = [direction for direction in info.directions if direction.has_tag]
    if src.language_ids and directions:
        # The tags of M2M100 and NLLB are ids, which the README's code cannot encode from text. So
        # the README shows the first direction, with the ids of its tags.
        src = _set_language(src, directions[0].src_tag)
        tgt = _set_language(tgt, directions[0].tgt_tag)
        directions = []
    bergamot_settings = {}
    if config.format is ExportFormat.bergamot:
        bergamot_settings = bergamot.make_settings(info, tokenizers, config)
    has_joint_vocabulary = info.src_vocab_size is None
    vocabulary_files = (SRC_VOCABULARY, TGT_VOCABULARY)
    if has_joint_vocabulary:
        vocabulary_files = (VOCABULARY, VOCABULARY)
    return _readme_template().render(
        info=info,
        config=config,
        opset=onnx.OPSET,
        needs_new_marian_type=marian.needs_new_type(info.model, config.format),
        needs_marian_position_table=marian.needs_position_table(info.model),
        bergamot_settings=bergamot_settings,
        tokenizer_files=tokenizer_files,
        has_position_table=info.model.positions in (Positions.sinusoidal_concat, Positions.learned),
        has_byte_fallback=bool(src.byte_ids),
        src=src,
        tgt=tgt,
        vocabulary_files=vocabulary_files,
        is_imported=tgt.is_imported,
        directions=directions,
        has_prefix=bool(src.prefix_ids or tgt.prefix_ids),
        src_prefix=src.pieces(src.prefix_ids),
        tgt_prefix=tgt.pieces(tgt.prefix_ids),
        pad=tgt.pieces([tgt.pad_id])[0],
        bos=tgt.pieces([tgt.bos_id])[0],
    )


def _set_language(tokenizer: Tokenizer, language: str) -> Tokenizer:
    """Return a tokenizer of M2M100 or NLLB that puts `language` before every text.

    If `language` is "", the `prefix_ids` do not change.
    """
    assert tokenizer.vocabulary is not None
    prefix_ids = tokenizer.prefix_ids
    if language:
        prefix_ids = tokenizer.encode(language)
    return MappedTokenizer(tokenizer.model, tokenizer.vocabulary, prefix_ids)
