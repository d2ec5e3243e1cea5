"""Export to a package of Argos Translate, which argos-translate and LibreTranslate can install.

The package is a zip file of a CTranslate2 model, its SentencePiece model and `metadata.json`.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

from torch import Tensor

from nmt.checkpoint import ModelInfo
from nmt.config import ExportConfig
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ModelError, NmtError
from nmt.export.ctranslate2 import write_ctranslate2

_PACKAGE_VERSION = "1.0"  # Argos compares versions to find updates
_MIN_ARGOS_VERSION = "1.9"
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest date of the zip format


def write_argos(
    folder: Path,
    info: ModelInfo,
    weights: dict[str, Tensor],
    tokenizers: Tokenizers,
    config: ExportConfig,
) -> None:
    """Write `translate-FROM_TO-1_0.argosmodel` into `folder`.

    Argos has one SentencePiece model and adds nothing to a text. Raises `ModelError` for a model
    with two SentencePiece models, or with a language id or tag before each text. Raises `NmtError`
    if babel, which has the names of languages, is not installed.
    """
    try:
        from nmt.data.language_codes import language_name
    except ImportError:
        raise NmtError("format=argos needs babel; pip install nmt[export]") from None
    # one direction without a tag is enough
    needs_tags = bool(info.directions) and all(pair.has_tag for pair in info.directions)
    has_prefix = bool(tokenizers.src.prefix_ids or tokenizers.tgt.prefix_ids)
    has_two_models = tokenizers.src.model != tokenizers.tgt.model
    if has_two_models or needs_tags or has_prefix:
        raise ModelError(
            "a package of Argos has one SentencePiece model for both languages, and this model "
            "has two, or a language or tag before each text; use format=ctranslate2"
        )
    model_folder = folder / "model"
    model_folder.mkdir()
    write_ctranslate2(model_folder, info, weights, tokenizers, config)
    version = _PACKAGE_VERSION.replace(".", "_")
    package_name = f"translate-{info.src_lang}_{info.tgt_lang}-{version}"
    metadata = {
        "package_version": _PACKAGE_VERSION,
        "argos_version": _MIN_ARGOS_VERSION,
        "type": "translate",
        "from_code": info.src_lang,
        "from_name": language_name(info.src_lang),
        "to_code": info.tgt_lang,
        "to_name": language_name(info.tgt_lang),
    }
    metadata_json = json.dumps(metadata, indent=2).encode("utf-8")
    with zipfile.ZipFile(folder / f"{package_name}.argosmodel", "w") as archive:
        _add_file(archive, f"{package_name}/metadata.json", metadata_json)
        _add_file(archive, f"{package_name}/sentencepiece.model", tokenizers.src.model)
        for path in sorted(model_folder.iterdir()):
            _add_file(archive, f"{package_name}/model/{path.name}", path.read_bytes())
    shutil.rmtree(model_folder)


def _add_file(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Add a file with fixed date and permissions, so that equal models give equal archives."""
    zip_info = zipfile.ZipInfo(name, date_time=_ZIP_DATE)
    zip_info.external_attr = 0o644 << 16  # permissions: everybody may read the unpacked file
    archive.writestr(zip_info, content)
