"""Loads a folder of `nmt-export format=ctranslate2` for backend=ctranslate2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nmt.checkpoint import load_export_info, load_tokenizer
from nmt.config import DType, ExportFormat
from nmt.distributed import find_device
from nmt.errors import DeviceError, ModelError, NmtError
from nmt.translate.backend import Loaded
from nmt.translate.ctranslate2 import CTranslate2Backend


def load_ctranslate2(folder: Path, *, device: str, dtype: DType, num_threads: int) -> Loaded:
    """Load an exported folder.

    `dtype=bfloat16` computes in that type; otherwise weights are computed with as they are stored.
    Raises `ModelError` for another folder, `DeviceError` for a device or type that is not there.
    """
    info, export = load_export_info(folder)
    if export.format is not ExportFormat.ctranslate2:
        raise ModelError(
            f"{folder} is an export of format={export.format.value}; "
            "backend=ctranslate2 needs one of format=ctranslate2"
        )
    tokenizer = load_tokenizer(folder, info)
    engine = _load_engine(folder, device, dtype, num_threads or torch.get_num_threads())
    max_tokens = _fastest_batch(engine, info.model.d_model)
    backend = CTranslate2Backend(engine, tokenizer, export.max_positions, max_tokens)
    return Loaded(backend, tokenizer, info.search)


def _load_engine(folder: Path, device: str, dtype: DType, num_threads: int) -> Any:
    try:
        import ctranslate2
    except ImportError:
        raise NmtError("backend=ctranslate2 needs CTranslate2; pip install nmt[export]") from None
    place = find_device(device)
    if place.type == "mps":
        if device != "auto":
            raise DeviceError(f"device={device}: CTranslate2 has no mps; use device=cpu")
        place = torch.device("cpu")
    index = place.index or 0
    types = ctranslate2.get_supported_compute_types(place.type, index)
    if dtype is DType.bfloat16 and "bfloat16" not in types:
        raise DeviceError(
            f"dtype=bfloat16: CTranslate2 has none on this {place.type}; use dtype=float32"
        )
    try:
        return ctranslate2.Translator(
            str(folder),
            device=place.type,
            device_index=index,
            compute_type="bfloat16" if dtype is DType.bfloat16 else "default",
            inter_threads=num_threads if place.type == "cpu" else 1,
            intra_threads=1,  # several threads in one product take twice the processor time
        )
    except RuntimeError as error:
        raise ModelError(f"{folder} cannot be loaded by CTranslate2: {error}") from None


def _fastest_batch(engine: Any, d_model: int) -> int:
    """Return the bound on a batch, rows * beam * longest source, that was fastest.

    On a processor, of widths 192 to 512: int8 wants batches that stay in its caches. GPUs were not
    measured.
    """
    if engine.device != "cpu":
        return 65536
    return min(6144, max(1536, 4 * d_model)) if "int8" in engine.compute_type else 6144
