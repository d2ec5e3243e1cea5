"""Convert a model for CTranslate2 once, and keep the result.

The conversion is kept in the folder `ctranslate2` inside the model folder or, where that cannot be
written, in the user's cache. The name of a conversion has a checksum of the model's files and of
the versions that wrote it, so a changed model is converted again.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import shutil
import time
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from nmt import __version__
from nmt.checkpoint import CONFIG, EXPORTED, FORMAT_VERSION, WEIGHTS, load_info
from nmt.config import ExportConfig, ExportFormat, Quantization
from nmt.errors import ConfigError, NmtError
from nmt.export.export_model import export_model, find_unsupported
from nmt.runtime.files import remove_all_temporary
from nmt.runtime.manifest import compute_checksums
from nmt.runtime.signatures import needs_signatures

log = logging.getLogger(__name__)

MAX_POSITIONS = 2048
"""The longest source or target of a conversion, in tokens with EOS."""
_LOCK_SECONDS = 600  # more than any conversion takes


def check_convertible(model_folder: Path) -> None:
    """Raise a `ConfigError` for a model with an architecture that CTranslate2 does not support."""
    unsupported = find_unsupported(load_info(model_folder).model, ExportFormat.ctranslate2)
    if unsupported:
        raise ConfigError(
            f"backend=ctranslate2 does not support {' and '.join(unsupported)}; use backend=native"
        )


def convert_once(model_folder: Path, quantization: Quantization) -> Path:
    """Return a folder with a conversion of the model for CTranslate2; make it if there is none.

    Several processes may call this at the same time: one converts, the others wait for it. Raises
    a `ConfigError` for an architecture that CTranslate2 does not support, a `ModelError` for a
    damaged model, and an `NmtError` if no folder for conversions can be written.
    """
    if needs_signatures():
        raise ConfigError(
            "verify_key: CTranslate2 needs a signed export (nmt-export sign=KEY) as model_dir; or "
            "use backend=native"
        )
    check_convertible(model_folder)
    name = f"{quantization.value}-{fingerprint_model(model_folder)}"
    folders = [model_folder / "ctranslate2", _user_cache(model_folder)]
    for folder in folders:
        if (folder / name / EXPORTED).exists():  # folders get their name when they are complete
            return folder / name
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / ".lock").acquire(timeout=_LOCK_SECONDS)
        except Timeout:
            raise NmtError(f"{folder} is locked by another process; stop it, or wait") from None
        except (OSError, RuntimeError):  # RuntimeError: the file system has no locks
            continue
        with lock:
            _convert(model_folder, folder / name, quantization)
        return folder / name
    raise NmtError(
        f"neither {folders[0]} nor {folders[1]} can be written, to convert the model for "
        "CTranslate2; set XDG_CACHE_HOME to a folder that can, or use backend=native"
    )


def remove_conversion(folder: Path) -> None:
    """Remove a damaged conversion, so that the next call of `convert_once` makes another.

    Raises an `NmtError` if it cannot be removed, as in a read-only model folder.
    """
    try:
        with FileLock(folder.parent / ".lock").acquire(timeout=_LOCK_SECONDS):
            if folder.exists():  # else another process has removed it
                shutil.rmtree(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the file system has no locks
        raise NmtError(
            f"{folder} is damaged and cannot be removed ({error}); remove it, or use backend=native"
        ) from None


def _convert(model_folder: Path, folder: Path, quantization: Quantization) -> None:
    """Convert the model unless another process did it while this one waited for the lock.

    Removes what killed processes left behind, and conversions of earlier contents of the model.
    """
    remove_all_temporary(folder.parent)
    if (folder / EXPORTED).exists():
        return
    start_seconds = time.monotonic()
    config = ExportConfig(quantization=quantization, max_positions=MAX_POSITIONS)
    export_model(model_folder, folder, config)
    for conversion in folder.parent.glob(f"{quantization.value}-*"):
        if conversion != folder:
            shutil.rmtree(conversion, ignore_errors=True)
    seconds = time.monotonic() - start_seconds
    log.info("converted %s for CTranslate2 in %.1f s; kept in %s", model_folder, seconds, folder)


def fingerprint_model(model_folder: Path) -> str:
    """Return a checksum of the files of a model, and of the versions that affect a conversion."""
    tokenizer_files = [path.name for path in model_folder.glob("tokenizer.*")]
    names = [CONFIG, WEIGHTS, *sorted(tokenizer_files)]
    checksums = compute_checksums(model_folder, names)
    versions = [__version__, str(FORMAT_VERSION), importlib.metadata.version("ctranslate2")]
    content = "\n".join([*versions, *names, *checksums])
    return xxhash.xxh3_128_hexdigest(content.encode())


def _user_cache(model_folder: Path) -> Path:
    """Return the folder in the user's cache for the conversions of a model."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    model_path = os.fsencode(model_folder.resolve())
    return Path(cache) / "nmt" / "ctranslate2" / xxhash.xxh3_128_hexdigest(model_path)
