"""Choose and load the engine of backend=auto.

A command knows all its settings before it loads a model, and loads only the engine that
`choose_engine` returns. In contrast, `Translator.load` does not know the settings of later calls.
So it returns an `AutoBackend`, which loads the native engine at the first call that CTranslate2
does not support.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from nmt.checkpoint import EXPORT_INFO, find_model, load_info
from nmt.config import Combine, DType, Engine, Quantization, SearchConfig, resolve_path
from nmt.errors import ConfigError, DeviceError, ModelError, NmtError
from nmt.export.conversion import convert_once, fingerprint_model
from nmt.translate.engines.auto_backend import AutoBackend, describe_reason
from nmt.translate.engines.base import Backend, LoadedModel
from nmt.translate.engines.ctranslate2 import (
    default_quantization,
    find_placement,
    load_ctranslate2,
)
from nmt.translate.engines.native import load_models

log = logging.getLogger(__name__)


class EngineChoice(NamedTuple):
    """The engine that backend=auto chooses, and the number format of converted weights."""

    backend: Engine
    quantization: Quantization | None
    """None for the native engine. For an exported folder, the format in the settings, if any."""


def load_auto(
    folders: Sequence[str | Path],
    *,
    device: str,
    dtype: DType,
    combine: Combine | str,
    num_threads: int,
    quantization: Quantization | None,
) -> LoadedModel:
    """Load a model with the engine that `choose_engine` chooses.

    If that is CTranslate2, the native engine takes the calls that CTranslate2 does not support, see
    `AutoBackend`.
    """
    choice = choose_engine(folders, device=device, dtype=dtype, quantization=quantization)
    if choice.backend is Engine.native:
        return load_models(folders, device=device, dtype=dtype, combine=combine)
    folder = resolve_path(folders[0])
    loaded = load_ctranslate2(
        folder,
        device=device,
        dtype=dtype,
        num_threads=num_threads,
        quantization=choice.quantization,
    )
    if (folder / EXPORT_INFO).exists():  # an export, which the native engine cannot load
        return loaded
    model_folder = find_model(folder)
    fingerprint = fingerprint_model(model_folder)

    def load_native() -> Backend:
        if fingerprint_model(model_folder) != fingerprint:
            raise ModelError(f"{model_folder} has changed since it was loaded; load it again")
        return load_models([model_folder], device=device, dtype=dtype).backend

    backend = AutoBackend(loaded.backend, load_info(model_folder).model, load_native)
    return loaded._replace(backend=backend)


def choose_engine(
    folders: Sequence[str | Path],
    *,
    device: str,
    dtype: DType,
    quantization: Quantization | None,
    check_settings: Callable[[SearchConfig], None] = lambda config: None,
) -> EngineChoice:
    """Return the engine that backend=auto chooses. Log the reason for choosing the native engine.

    `check_settings` is called with the search settings of the model, and raises a `ConfigError` for
    settings that CTranslate2 does not support. If CTranslate2 is chosen, the model is converted,
    unless this was done before.
    """
    try:
        placement = find_placement(device, dtype)
        if placement.device_type != "cpu":
            raise DeviceError(f"CTranslate2 was not measured on {placement.device_type}")
        if len(folders) != 1:
            raise ConfigError("CTranslate2 has no ensembles")
        folder = resolve_path(folders[0])
        if (folder / EXPORT_INFO).exists():
            return EngineChoice(Engine.ctranslate2, quantization)
        model_folder = find_model(folder)
        check_settings(load_info(model_folder).search)
        quantization = quantization or default_quantization(dtype)
        convert_once(model_folder, quantization)
    except ModelError:  # the model is damaged, so the native engine cannot load it either
        raise
    except NmtError as error:
        log.info("backend=auto: native, since %s", describe_reason(error))
        return EngineChoice(Engine.native, None)
    return EngineChoice(Engine.ctranslate2, quantization)
