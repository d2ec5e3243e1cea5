"""backend=auto: CTranslate2 where it supports the request, else the native engine.

A command knows all its settings before it loads a model, and loads only the engine that
`choose_engine` returns. In contrast, `Translator.load` does not know the settings of later calls.
So it returns an `AutoBackend`, which loads the native engine at the first call that CTranslate2
does not support.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from nmt.checkpoint import EXPORT_INFO, find_model, load_info
from nmt.config import Combine, DType, Engine, ModelConfig, Quantization, SearchConfig, resolve_path
from nmt.errors import ConfigError, DataError, DeviceError, ModelError, NmtError
from nmt.export.conversion import convert_once, fingerprint_model
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import Ids, SearchRequest
from nmt.translate.engines.base import Backend, LoadedModel
from nmt.translate.engines.ctranslate2 import (
    default_quantization,
    find_placement,
    load_ctranslate2,
)
from nmt.translate.engines.native import NativeBackend, load_models

log = logging.getLogger(__name__)


class EngineChoice(NamedTuple):
    """The engine that backend=auto chooses, and the number format of converted weights."""

    backend: Engine
    quantization: Quantization | None
    """None for the native engine. For an exported folder, the format in the settings, if any."""


class AutoBackend:
    """Searches with CTranslate2 where it supports the request, else natively. Scores natively.

    Args:
        fast: the CTranslate2 engine.
        model_config: the architecture of the model.
        load_native: loads the native engine; called at the first use of the engine.
    """

    def __init__(
        self, fast: Backend, model_config: ModelConfig, load_native: Callable[[], Backend]
    ) -> None:
        self.max_tokens = fast.max_tokens
        self.num_workers = fast.num_workers
        self.model_config = model_config
        self._fast = fast
        self._load_native = load_native
        self._native: NativeBackend | None = None
        self._lock = threading.Lock()
        self._logged_reasons: set[str] = set()

    @property
    def native(self) -> NativeBackend:
        """The native engine, which is loaded at the first use."""
        with self._lock:
            if self._native is None:
                backend = self._load_native()
                assert isinstance(backend, NativeBackend)
                self._native = backend
            return self._native

    def check(self, config: SearchConfig, *, scoring: bool = False) -> None:
        """Accept every setting, since the native engine supports all settings."""

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """See `Backend.search`."""
        try:
            # all three raise an error for what CTranslate2 does not support
            check_reproducible(request.config)
            self._fast.check(request.config)
            return self._fast.search(request)
        except (ConfigError, DataError) as error:
            self._log_reason(error)
            return self.native.search(request)

    def score(
        self, sources: Sequence[Ids], targets: Sequence[Ids], config: SearchConfig, max_tokens: int
    ) -> list[Hypothesis]:
        """See `Backend.score`. Scores natively, since quantization changes scores."""
        return self.native.score(sources, targets, config, max_tokens)

    def _log_reason(self, error: NmtError) -> None:
        """Log once why the native engine takes a call."""
        reason = _to_reason(error)
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            log.info("backend=auto: native, since %s", reason)


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
        log.info("backend=auto: native, since %s", _to_reason(error))
        return EngineChoice(Engine.native, None)
    return EngineChoice(Engine.ctranslate2, quantization)


def check_reproducible(config: SearchConfig) -> None:
    """Raise a `ConfigError` for sampling: CTranslate2 does not repeat samples for a seed."""
    if config.sampling:
        raise ConfigError("sampling=true: CTranslate2 draws other samples with the same seed")


def _to_reason(error: NmtError) -> str:
    """Return the message of an error without the advice after the semicolon."""
    return str(error).partition("; ")[0]
