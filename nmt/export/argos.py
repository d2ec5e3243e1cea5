"""A model as a package of Argos Translate, which argos-translate and LibreTranslate install: a zip
with a CTranslate2 folder, the SentencePiece model of both languages and `metadata.json`.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

from torch import Tensor

from nmt.checkpoint import ModelInfo
from nmt.config import ExportConfig
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ModelError
from nmt.export.ctranslate2 import write_ctranslate2

_VERSION = "1.0"  # of the package; Argos compares it when it looks for updates
_OLDEST = "1.9"  # Argos Translate that is known to read such packages
_DATE = (1980, 1, 1, 0, 0, 0)  # of all files, so that equal models are equal packages


def write_argos(
    folder: Path,
    info: ModelInfo,
    weights: dict[str, Tensor],
    tokenizer: Tokenizers,
    config: ExportConfig,
) -> None:
    """Write `translate-FROM_TO-1_0.argosmodel` into `folder`.

    Raises a `ModelError` for a model with two SentencePiece models, or with languages or tags
    before its texts: a package has one model for both sides.
    """
    has_tags = bool(info.directions) and all(any(one.tags) for one in info.directions)
    has_prefix = has_tags or tokenizer.src.prefix or tokenizer.tgt.prefix
    if tokenizer.src.model != tokenizer.tgt.model or has_prefix:
        raise ModelError(
            "a package of Argos has one SentencePiece model for both languages, and this model "
            "has two, or a language or tag before each text; use format=ctranslate2"
        )
    model = folder / "model"
    model.mkdir()
    write_ctranslate2(model, info, weights, tokenizer, config)
    name = f"translate-{info.src_lang}_{info.tgt_lang}-{_VERSION.replace('.', '_')}"
    metadata: dict[str, Any] = {
        "package_version": _VERSION,
        "argos_version": _OLDEST,
        "type": "translate",
        "from_code": info.src_lang,
        "from_name": info.src_lang,
        "to_code": info.tgt_lang,
        "to_name": info.tgt_lang,
    }
    with zipfile.ZipFile(folder / f"{name}.argosmodel", "w") as archive:
        _add(archive, f"{name}/metadata.json", json.dumps(metadata, indent=2).encode("utf-8"))
        _add(archive, f"{name}/sentencepiece.model", tokenizer.src.model)
        for path in sorted(model.iterdir()):
            _add(archive, f"{name}/model/{path.name}", path.read_bytes())
    shutil.rmtree(model)


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, date_time=_DATE)
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, content)
