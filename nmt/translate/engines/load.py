"""Load models with the engine that the setting `backend` names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nmt.config import Combine, DType, Engine, Quantization, resolve_path
from nmt.errors import ConfigError
from nmt.translate.engines.base import LoadedModel
from nmt.translate.engines.native import load_models


def load_engine(
    folders: Sequence[str | Path],
    engine: Engine,
    *,
    device: str,
    dtype: DType,
    combine: Combine,
    num_threads: int,
    quantization: Quantization | None,
) -> LoadedModel:
    """Load a run, a checkpoint or a model folder with an engine; several form an ensemble.

    The native engine does not use `num_threads` and `quantization`, and CTranslate2 does not use
    `combine`. Raises a `ConfigError` for an ensemble with CTranslate2.
    """
    if engine is Engine.native:
        return load_models(folders, device=device, dtype=dtype, combine=combine)
    # here, since both engines import the exporters, which the native engine does not need
    from nmt.translate.engines.auto import load_auto
    from nmt.translate.engines.ctranslate2 import load_ctranslate2

    if engine is Engine.auto:
        return load_auto(
            folders,
            device=device,
            dtype=dtype,
            combine=combine,
            num_threads=num_threads,
            quantization=quantization,
        )
    if len(folders) != 1:
        raise ConfigError(
            f"model_dir names {len(folders)} folders: backend=ctranslate2 has no ensembles; "
            "give one folder, or backend=native"
        )
    return load_ctranslate2(
        resolve_path(folders[0]),
        device=device,
        dtype=dtype,
        num_threads=num_threads,
        quantization=quantization,
    )
