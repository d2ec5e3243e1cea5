"""Convert a model for CTranslate2 once, and keep the converted model.

Converted models are kept in the folder `ctranslate2` inside the model folder or, if that is not
writable, in the user's cache. The name of a conversion contains a checksum of the model's files and
of the versions of nmt and CTranslate2, so a changed model is converted again.
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
from nmt.checkpoint import CONFIG, EXPORT_INFO, FORMAT_VERSION, WEIGHTS, load_info
from nmt.config import ExportConfig, ExportFormat, Quantization
from nmt.errors import ConfigError, NmtError
from nmt.export.export_model import export_model, find_unsupported
from nmt.runtime.files import remove_all_temporary
from nmt.runtime.manifest import compute_checksums
from nmt.runtime.signatures import needs_signatures

log = logging.getLogger(__name__)

MAX_POSITIONS = 2048
"""Longest source or target that a converted model can translate, in tokens; EOS counts."""
_LOCK_SECONDS = 600  # longer than any conversion takes


def check_convertible(model_folder: Path) -> None:
    """Raise a `ConfigError` for a model with an architecture that CTranslate2 does not support."""
    unsupported = find_unsupported(load_info(model_folder).model, ExportFormat.ctranslate2)
    if unsupported:
        raise ConfigError(
            f"backend=ctranslate2 does not support {' and '.join(unsupported)}; use backend=native"
        )


def convert_once(model_folder: Path, quantization: Quantization) -> Path:
    """Convert a model for CTranslate2, unless this was done before. Returns the converted folder.

    If several processes call this at the same time, one converts and the others wait. Raises a
    `ConfigError` for an architecture that CTranslate2 does not support, and a `ModelError` for a
    damaged model. Raises an `NmtError` if no folder for conversions is writable.
    """
    if needs_signatures():
        raise ConfigError(
            "verify_key: CTranslate2 needs a signed export (nmt-export sign=KEY) as model_dir; or "
            "use backend=native"
        )
    check_convertible(model_folder)
    name = f"{quantization.value}-{fingerprint_model(model_folder)}"
    caches = [model_folder / "ctranslate2", _user_cache_folder(model_folder)]
    for cache in caches:
        if (cache / name / EXPORT_INFO).exists():  # a folder gets this name when it is complete
            return cache / name
    for cache in caches:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            held_lock = FileLock(cache / ".lock").acquire(timeout=_LOCK_SECONDS)
        except Timeout:
            raise NmtError(f"{cache} is locked by another process; stop it, or wait") from None
        except (OSError, RuntimeError):  # it is not writable, or the file system has no locks
            continue
        with held_lock:  # released at the end of the block
            _convert(model_folder, cache / name, quantization)
        return cache / name
    raise NmtError(
        f"neither {caches[0]} nor {caches[1]} can be written, to convert the model for "
        "CTranslate2; set XDG_CACHE_HOME to a folder that can, or use backend=native"
    )


def remove_conversion(conversion: Path) -> None:
    """Remove a damaged conversion, so that the next `convert_once` converts the model again.

    Raises an `NmtError` if it cannot be removed, for example from a read-only model folder.
    """
    try:
        with FileLock(conversion.parent / ".lock").acquire(timeout=_LOCK_SECONDS):
            if conversion.exists():  # another process may have removed it
                shutil.rmtree(conversion)
    except (OSError, RuntimeError) as error:  # RuntimeError: the file system has no locks
        raise NmtError(
            f"{conversion} is damaged and cannot be removed ({error}); remove it, or use "
            "backend=native"
        ) from None


def _convert(model_folder: Path, conversion: Path, quantization: Quantization) -> None:
    """Convert a model to the folder `conversion`. The caller holds the lock of its parent folder.

    Does nothing if another process converted the model while this process waited for the lock.
    Removes temporary files of killed processes, and conversions of earlier versions of the model.
    """
    remove_all_temporary(conversion.parent)
    if (conversion / EXPORT_INFO).exists():
        return
    start_time = time.monotonic()
    config = ExportConfig(quantization=quantization, max_positions=MAX_POSITIONS)
    export_model(model_folder, conversion, config)
    for folder in conversion.parent.glob(f"{quantization.value}-*"):
        if folder != conversion:
            shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - start_time
    log.info(
        "converted %s for CTranslate2 in %.1f s; kept in %s", model_folder, seconds, conversion
    )


def fingerprint_model(model_folder: Path) -> str:
    """Return a checksum of the files of a model, and of the versions of nmt and CTranslate2."""
    tokenizer_files = [path.name for path in model_folder.glob("tokenizer.*")]
    names = [CONFIG, WEIGHTS, *sorted(tokenizer_files)]
    checksums = compute_checksums(model_folder, names)
    versions = [__version__, str(FORMAT_VERSION), importlib.metadata.version("ctranslate2")]
    content = "\n".join([*versions, *names, *checksums])
    return xxhash.xxh3_128_hexdigest(content.encode())


def _user_cache_folder(model_folder: Path) -> Path:
    """Return the folder in the user's cache for the conversions of a model."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path_hash = xxhash.xxh3_128_hexdigest(os.fsencode(model_folder.resolve()))
    return Path(cache_home) / "nmt" / "ctranslate2" / path_hash
