"""Export to a page that translates in the browser: static files only, without a server.

`index.html` loads ONNX Runtime Web, the model of `nmt.export.onnx` and the vocabulary from its own
folder. A service worker keeps all files, so that the page works offline after the first load. The
scripts are in `web_static/`: SentencePiece, search and the page in plain JavaScript.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from torch import Tensor

import nmt
from nmt.checkpoint import ModelInfo
from nmt.config import ExportConfig, SearchConfig, resolve_path
from nmt.data.languages import LanguagePair, encode_tag
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ConfigError, ModelError
from nmt.export.onnx import write_onnx
from nmt.runtime.reading import read_regular_file

_STATIC = Path(__file__).with_name("web_static")
# style and icon of the server's page, which the exported page uses too
_SERVER_STATIC = Path(nmt.__file__).parent / "serve" / "static"
_RUNTIME_SCRIPT = "ort.wasm.bundle.min.mjs"
_RUNTIME_BINARY = "ort-wasm-simd-threaded.wasm"
_MAX_SOURCE_LENGTH = 256  # in tokens, EOS included; the page splits longer sentences
_UNSUPPORTED_SETTINGS = (  # fields of `SearchConfig`
    "coverage_penalty",
    "forbid",
    "suppress",
    "glossary",
    "protect",
    "alternatives",
    "sampling",
    "allow_source_repeats",
)
_SEGMENTATIONS = {1: "unigram", 2: "bpe"}  # the keys are `TrainerSpec.ModelType`
_ModelProto: Any = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]


def write_web(
    folder: Path,
    info: ModelInfo,
    weights: dict[str, Tensor],
    tokenizers: Tokenizers,
    config: ExportConfig,
) -> None:
    """Write the page, its scripts, the runtime and the model into `folder`.

    Raises `ModelError` for a tokenizer or search setting that the scripts do not support. Raises
    `ConfigError` if `config.runtime` is not the npm package onnxruntime-web. Also raises the errors
    of `write_onnx`.
    """
    runtime = _find_runtime(resolve_path(config.runtime))
    _check_search(info.search)
    source_vocabulary = read_vocabulary(tokenizers.src)
    target_vocabulary = read_vocabulary(tokenizers.tgt)
    max_positions = min(config.max_positions, _count_positions(info.search))
    settings = {
        "directions": _make_directions(info, tokenizers),
        "search": asdict(info.search),
        "source_eos": info.model.source_eos,
        "alignment_shift": info.model.alignment_shift,
        "source_eos_id": tokenizers.src.eos_id,
        "target_bos_id": tokenizers.tgt.bos_id,
        "target_eos_id": tokenizers.tgt.eos_id,
        "max_source_length": min(_MAX_SOURCE_LENGTH, max_positions),
        "max_positions": max_positions,
        "has_joint_vocabulary": tokenizers.src is tokenizers.tgt,
    }

    model_folder = folder / "model"
    model_folder.mkdir()
    onnx_config = replace(config, max_positions=max_positions)
    write_onnx(model_folder, info, weights, tokenizers, onnx_config)
    _write_json(model_folder / "settings.json", settings)
    _write_json(model_folder / "source.json", source_vocabulary)
    if tokenizers.src is not tokenizers.tgt:
        _write_json(model_folder / "target.json", target_vocabulary)
    _copy_runtime(runtime, folder / "runtime")
    for path in sorted(_STATIC.iterdir()):
        shutil.copyfile(path, folder / path.name)
    for name in ("page.css", "icon.svg", "alignment.js"):
        shutil.copyfile(_SERVER_STATIC / name, folder / name)
    _write_file_list(folder)


def _find_runtime(folder: Path) -> Path:
    """Return the folder `dist` of the npm package onnxruntime-web."""
    dist = folder / "dist"
    for name in (_RUNTIME_SCRIPT, _RUNTIME_BINARY):
        if not (dist / name).is_file():
            raise ConfigError(
                f"runtime={folder}: {dist / name} does not exist; type npm install "
                "onnxruntime-web, or give runtime=FOLDER of this npm package (1.22 or later)"
            )
    return dist


def _check_search(search: SearchConfig) -> None:
    """Raise a `ModelError` for a search setting of the model that the scripts do not support."""
    unsupported = [name for name in _UNSUPPORTED_SETTINGS if getattr(search, name)]
    if search.beam_groups > 1:
        unsupported.append("beam_groups")
    if unsupported:
        raise ModelError(
            f"format=web does not support the model's setting {' and '.join(unsupported)}; change "
            "it in config.json of the model"
        )


def _count_positions(search: SearchConfig) -> int:
    """Return the number of positions that the encoder and the decoder need.

    A line is divided into parts of up to `_MAX_SOURCE_LENGTH` tokens. The search settings limit the
    length of the translation of a part.
    """
    max_target_length = int(search.max_length_a * _MAX_SOURCE_LENGTH) + search.max_length_b
    min_target_length = search.min_length + 1  # with EOS
    return max(max_target_length, min_target_length, _MAX_SOURCE_LENGTH)


def read_vocabulary(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the pieces and rules of a SentencePiece model, as `tokenizer.js` reads them.

    Raises a `ModelError` for a model that is neither BPE nor unigram, and for ids that differ from
    SentencePiece's.
    """
    proto = _ModelProto.FromString(tokenizer.model)
    segmentation = _SEGMENTATIONS.get(proto.trainer_spec.model_type)
    if segmentation is None or tokenizer.is_imported:
        raise ModelError(
            "format=web supports BPE and unigram models of SentencePiece with their own ids, and "
            "this model has another tokenizer; use format=onnx"
        )
    normalizer = proto.normalizer_spec
    return {
        "type": segmentation,
        "pieces": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces],
        "types": [piece.type for piece in proto.pieces],
        "unk_id": tokenizer.unk_id,
        "unk_surface": proto.trainer_spec.unk_surface,
        "normalizer": {
            "charsmap": base64.b64encode(normalizer.precompiled_charsmap).decode("ascii"),
            "add_dummy_prefix": normalizer.add_dummy_prefix,
            "remove_extra_whitespaces": normalizer.remove_extra_whitespaces,
            "escape_whitespaces": normalizer.escape_whitespaces,
            "treat_whitespace_as_suffix": proto.trainer_spec.treat_whitespace_as_suffix,
        },
    }


def _make_directions(info: ModelInfo, tokenizers: Tokenizers) -> list[dict[str, Any]]:
    """Return the languages of each direction, its source tag, and the ids of its target tag."""
    pairs = info.directions
    if not pairs:
        pairs = [LanguagePair(info.src_lang, info.tgt_lang)]
    directions = []
    for pair in pairs:
        prefix = encode_tag(tokenizers.tgt, pair.tgt_tag)
        direction = {
            "source": pair.src_lang,
            "target": pair.tgt_lang,
            "source_tag": pair.src_tag,
            "target_prefix": prefix,
        }
        directions.append(direction)
    return directions


def _copy_runtime(dist: Path, folder: Path) -> None:
    """Copy ONNX Runtime Web and its licenses. Compresses the WebAssembly to a quarter."""
    import onnxruntime  # has the texts of the licenses, which the npm package lacks

    folder.mkdir()
    (folder / _RUNTIME_SCRIPT).write_bytes(read_regular_file(dist / _RUNTIME_SCRIPT))
    binary = gzip.compress(read_regular_file(dist / _RUNTIME_BINARY), compresslevel=9, mtime=0)
    (folder / f"{_RUNTIME_BINARY}.gz").write_bytes(binary)
    for name in ("LICENSE", "ThirdPartyNotices.txt"):
        shutil.copyfile(Path(onnxruntime.__file__).with_name(name), folder / name)


def _write_file_list(folder: Path) -> None:
    """Write `files.js`, which lists the files of the page and their version.

    The version is a checksum of their contents. The service worker imports `files.js`. When the
    version changes, it fetches all files again.
    """
    urls = []
    checksum = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_license = path.suffix in ("", ".txt")
        is_page_file = path.is_file() and not is_license
        if is_page_file and name != "service_worker.js":
            url = "./" if name == "index.html" else name
            urls.append(url)
            checksum.update(name.encode("utf-8") + b"\0" + path.read_bytes())
    version = checksum.hexdigest()[:16]
    content = f'const VERSION = "{version}";\nconst FILES = {json.dumps(urls)};\n'
    (folder / "files.js").write_text(content, encoding="utf-8", newline="\n")


def _write_json(path: Path, content: Any) -> None:
    """Write compact JSON."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    path.write_text(text, encoding="utf-8", newline="\n")
