"""Model folders: weights in safetensors, config in JSON, the tokenizer; every checkpoint is one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nmt.config import ExportFormat, ModelConfig, Quantization, SearchConfig, require
from nmt.data.languages import LanguagePair, target_tags
from nmt.data.tokenizer import Tokenizers, load_tokenizers, save_tokenizers
from nmt.errors import ModelError
from nmt.model.fast import FastTransformer, accelerate
from nmt.model.transformer import Transformer
from nmt.runtime.files import replace_folder, write_json
from nmt.runtime.manifest import note_unverified, verify
from nmt.runtime.metadata import pop_version, read_json, to_dataclass

FORMAT_VERSION = 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"
EXPORTED = "nmt.json"  # our own file in a folder of nmt-export, whose config.json is another's
_STEP = re.compile(r"step-(\d{8,})")


@dataclass
class ModelInfo:
    """What `config.json` says beside the format version."""

    model: ModelConfig
    search: SearchConfig
    vocab_size: int  # of the target; the source has the same unless src_vocab_size is given
    src_lang: str
    tgt_lang: str
    tokenizer_sha256: str
    updates: int  # updates of training behind the weights; of the newest one for an average
    src_vocab_size: int | None = None  # where the source has a vocabulary of its own
    directions: list[LanguagePair] = field(default_factory=list)  # where tags ask for them

    def __post_init__(self) -> None:
        for key in ("vocab_size", "src_vocab_size"):
            size = getattr(self, key)
            require(size is None or 0 < size < 1 << 24, key, size, "must be from 1 to 16,777,215")
        require(self.updates >= 0, "updates", self.updates, "must not be negative")

    def content(self) -> dict[str, Any]:
        """Return what is written: all that is known, as primitives."""
        content = asdict(self)
        optional: dict[str, Any] = {"src_vocab_size": None, "directions": []}
        return {k: v for k, v in content.items() if k not in optional or v != optional[k]}


@dataclass(frozen=True)
class ExportInfo:
    """What `nmt.json` of an exported folder says beside the `ModelInfo` of its model."""

    format: ExportFormat
    quantization: Quantization
    max_positions: int  # tokens of the longest sentence that fits


def save_model(
    folder: Path, weights: dict[str, Tensor], info: ModelInfo, tokenizer: Tokenizers,
    extra: Callable[[Path], None] | None = None,
) -> None:  # fmt: skip
    """Write a model folder in one step; `extra` may add files before it is renamed into place."""
    with replace_folder(folder, marker=CONFIG) as temporary:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_weights(temporary / WEIGHTS, tensors)
        write_json(temporary / CONFIG, {"format_version": FORMAT_VERSION, **info.content()})
        save_tokenizers(temporary, tokenizer)
        if extra is not None:
            extra(temporary)


def save_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors as safetensors; raise an `OSError` on a full disk."""
    try:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from None


def load_info(folder: Path) -> ModelInfo:
    """Read `config.json`; a folder that is none of ours, or a newer format, is a `ModelError`."""
    if (folder / EXPORTED).is_file():
        raise ModelError(
            f"{folder} is an export (nmt-export); give the model that it was made of, or for "
            "format=ctranslate2 use nmt-translate backend=ctranslate2"
        )
    if not (folder / CONFIG).is_file():
        what = "is no model folder (no config.json)" if folder.is_dir() else "does not exist"
        raise ModelError(f"{folder} {what}; give a run, a checkpoint or a model folder")
    note_unverified(folder)
    return _read_info(folder / CONFIG)[0]


def load_export_info(folder: Path) -> tuple[ModelInfo, ExportInfo]:
    """Read `nmt.json` of an exported folder; any other folder is a `ModelError`."""
    path = folder / EXPORTED
    if not path.is_file():
        what = "is no exported folder (no nmt.json)" if folder.is_dir() else "does not exist"
        remedy = f"make one with nmt-export model_dir={folder} format=ctranslate2"
        raise ModelError(f"{folder} {what}; {remedy}")
    verify(folder)
    note_unverified(folder)
    info, export = _read_info(path)
    return info, to_dataclass(ExportInfo, export, path, "export")


def _read_info(path: Path) -> tuple[ModelInfo, object]:
    """Read the info of a model and, in `nmt.json`, what is said of the export."""
    verify(path.parent, path.name)
    content = read_json(path)
    pop_version(content, path, FORMAT_VERSION)
    export = content.pop("export", {})
    return to_dataclass(ModelInfo, content, path), export


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights to memory; a missing or truncated file is a `ModelError`."""
    path = folder / WEIGHTS
    verify(folder, WEIGHTS)
    try:
        weights = safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; copy the model folder again") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged ({error}); use another checkpoint") from None
    for name, tensor in weights.items():
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise ModelError(f"{path}: {name} holds numbers that are not finite; use another")
    return weights


def load_tokenizer(folder: Path, info: ModelInfo) -> Tokenizers:
    """Read the tokenizer, or both; what is not the model's is a `ModelError`."""
    return load_tokenizers(folder, info.tokenizer_sha256, target_tags(info.directions))


def build_model(
    info: ModelInfo, weights: dict[str, Tensor] | None, device: torch.device
) -> FastTransformer:
    """Make the Transformer of `info` with `weights`, accelerated; names and shapes must match.
    Without weights they are undefined, and take no memory until somebody writes them.
    """
    with _NoDraws():
        model = Transformer(info.model, info.vocab_size, src_vocab_size=info.src_vocab_size)
    try:
        if weights is not None:
            model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"the weights do not fit the model's config: {reason}") from None
    return accelerate(model.to(device))


class _NoDraws(TorchFunctionMode):
    """Leaves new weights undefined. With the device `meta`, torch would import its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.normal_, torch.Tensor.uniform_):
            return args[0]
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def find_model(folder: Path) -> Path:
    """Return `folder`, or of a run's folder its newest model: the average, unless the newest
    checkpoint has more updates and was written later; then that checkpoint.
    """
    if (folder / CONFIG).is_file():
        return folder.resolve()
    found = _run_models(folder)
    if not found:
        load_info(folder)
    average, latest = found.get("average"), found.get("checkpoints/latest")
    if average is None or latest is None:
        return next(iter(found.values()))
    (old_updates, old_time), (new_updates, new_time) = map(_age, (average, latest))
    return latest if new_updates > old_updates and new_time > old_time else average


def other_models(folder: Path, taken: Path) -> str:
    """Return, for the log, which models of a run's folder are there beside the one `taken`."""
    found = {} if (folder / CONFIG).is_file() else _run_models(folder)
    others = [f"{n} ({_age(path)[0]} updates)" for n, path in found.items() if path != taken]
    return f"; not taken: {', '.join(others)}" if others else ""


def _run_models(folder: Path) -> dict[str, Path]:
    parts = ("average", "checkpoints/latest", "checkpoints/best")
    return {name: (folder / name).resolve() for name in parts if (folder / name / CONFIG).is_file()}


def _age(folder: Path) -> tuple[int, int]:
    """Return the updates behind a model, and when it was written."""
    return _read_info(folder / CONFIG)[0].updates, (folder / CONFIG).stat().st_mtime_ns


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first; leftovers of an interrupted write are none."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted(f for f in folders if _STEP.fullmatch(f.name) and (f / CONFIG).is_file())


def checkpoint_dir(run_dir: Path, update: int) -> Path:
    """Name the checkpoint after `update` updates."""
    return run_dir / "checkpoints" / f"step-{update:08d}"


def checkpoint_update(folder: Path) -> int:
    """Read the number of updates from a checkpoint's name."""
    found = _STEP.fullmatch(folder.name)
    assert found, f"{folder} is no checkpoint folder"
    return int(found[1])
