"""Read and write model folders: weights in safetensors, a JSON config and the tokenizers.

Every checkpoint of a run is a model folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nmt.config import ExportFormat, ModelConfig, Quantization, SearchConfig, require_valid
from nmt.data.languages import LanguagePair, target_tags
from nmt.data.tokenizer import Tokenizers, load_tokenizers, save_tokenizers
from nmt.errors import ModelError, to_one_line
from nmt.model.fast import FastTransformer, accelerate
from nmt.model.transformer import Transformer
from nmt.runtime.files import describe_folder_problem, replace_folder, write_json
from nmt.runtime.manifest import log_missing_manifest, verify_checksums
from nmt.runtime.metadata import pop_version, read_json, to_dataclass
from nmt.runtime.reading import open_regular
from nmt.runtime.signatures import verify_signature

FORMAT_VERSION = 1
# Names of files. An export has nmt.json, since its config.json may belong to another tool.
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
EXPORT_INFO = "nmt.json"
_MAX_HEADER_BYTES = 1 << 22  # the safetensors header of a deep model has 0.3 MB
_MAX_VOCAB_SIZE = (1 << 24) - 1
_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")


@dataclass
class ModelInfo:
    """The content of `config.json`, apart from the format version."""

    model: ModelConfig
    search: SearchConfig
    vocab_size: int  # size of the target's vocabulary; see `src_vocab_size`
    src_lang: str
    tgt_lang: str
    tokenizer_sha256: str
    updates: int  # training updates; an average has the number of its newest checkpoint
    src_vocab_size: int | None = None  # None if source and target share a vocabulary
    directions: list[LanguagePair] = field(default_factory=list)  # empty without language tags

    def __post_init__(self) -> None:
        self._check_size("vocab_size", self.vocab_size)
        if self.src_vocab_size is not None:
            self._check_size("src_vocab_size", self.src_vocab_size)
        require_valid(self.updates >= 0, "updates", self.updates, "must not be negative")

    @staticmethod
    def _check_size(key: str, size: int) -> None:
        is_valid = 1 <= size <= _MAX_VOCAB_SIZE
        require_valid(is_valid, key, size, f"must be from 1 to {_MAX_VOCAB_SIZE:,}")

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values for JSON. Leaves out optional fields that are not set."""
        content = asdict(self)
        for name in ("src_vocab_size", "directions"):
            if not content[name]:
                del content[name]
        return content


@dataclass(frozen=True)
class ExportInfo:
    """The settings of an export, in `nmt.json` of an exported folder."""

    format: ExportFormat
    quantization: Quantization
    max_positions: int  # length in tokens of the longest sentence that fits


def save_model(
    folder: Path,
    weights: dict[str, Tensor],
    info: ModelInfo,
    tokenizers: Tokenizers,
    write_extra_files: Callable[[Path], None] | None = None,
) -> None:
    """Write a model folder and replace `folder` with it when it is complete.

    `write_extra_files` is called with the temporary path of the folder and may add files to it.
    """
    with replace_folder(folder, marker=CONFIG) as temporary:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_weights(temporary / WEIGHTS, tensors)
        write_json(temporary / CONFIG, {"format_version": FORMAT_VERSION, **info.to_json()})
        save_tokenizers(temporary, tokenizers)
        if write_extra_files is not None:
            write_extra_files(temporary)


def save_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors as safetensors; raise an `OSError` on a full disk."""
    try:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from None


def load_info(folder: Path) -> ModelInfo:
    """Read `config.json`.

    Raises `ModelError` if the folder is not a model or its format is newer.
    """
    _check_is_model(folder)
    verify_signature(folder)
    log_missing_manifest(folder)
    info, _ = _read_info(folder / CONFIG)
    return info


def _check_is_model(folder: Path) -> None:
    """Raise `ModelError` for an export, and for a folder without `config.json`."""
    if (folder / EXPORT_INFO).exists():
        raise ModelError(
            f"{folder} is an export (nmt-export); give the model it was exported from, or for "
            "format=ctranslate2 use nmt-translate backend=ctranslate2 "
            f"{shlex.quote(f'model_dir={folder}')}"
        )
    if not (folder / CONFIG).exists():
        problem = describe_folder_problem(folder, "is not a model folder (no config.json)")
        raise ModelError(f"{folder} {problem}; give a run, a checkpoint or a model folder")


def load_export_info(folder: Path) -> tuple[ModelInfo, ExportInfo]:
    """Read `nmt.json`, which an exported folder has."""
    path = folder / EXPORT_INFO
    verify_signature(folder)
    verify_checksums(folder)
    log_missing_manifest(folder)
    info, export_content = _read_info(path)
    return info, to_dataclass(ExportInfo, export_content, path, "export")


def _read_info(path: Path) -> tuple[ModelInfo, object]:
    """Read the `config.json` of a model folder, or the `nmt.json` of an export.

    Also returns the content of `ExportInfo` in `nmt.json`, as plain values; {} for a model folder.
    """
    verify_checksums(path.parent, path.name)
    content = read_json(path)
    pop_version(content, path, FORMAT_VERSION)
    export_content = content.pop("export", {})
    return to_dataclass(ModelInfo, content, path), export_content


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights to memory; raise `ModelError` for a missing or damaged file."""
    path = folder / WEIGHTS
    verify_checksums(folder, WEIGHTS)
    weights = load_tensors(path)
    for name, tensor in weights.items():
        tensor_sum = tensor.sum(dtype=torch.float64)  # finite only if all numbers are
        if not torch.isfinite(tensor_sum):
            raise ModelError(f"{path}: {name} holds numbers that are not finite; use another model")
        # safetensors maps the file to memory: without a copy, a later change of the file would
        # change the weights, or crash this process
        weights[name] = tensor.clone()
    return weights


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; raise `ModelError` if it is missing or damaged.

    Refuses files with a large header, which limits the number of tensors to about 40,000.
    """
    try:
        with open_regular(path) as file:
            header_size = file.read(8)  # the file begins with the size of its header
        num_header_bytes = int.from_bytes(header_size, "little")
        if num_header_bytes > _MAX_HEADER_BYTES:
            raise ModelError(
                f"{path} has a header of {num_header_bytes:,} bytes; it is not a model"
            )
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; copy the model folder again") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged ({error}); copy it again, or use another") from None


def load_model_tokenizers(folder: Path, info: ModelInfo) -> Tokenizers:
    """Read the tokenizers of source and target.

    Raises `ModelError` if their checksum differs from the one in `info`.
    """
    return load_tokenizers(folder, info.tokenizer_sha256, target_tags(info.directions))


def build_model(
    info: ModelInfo, weights: dict[str, Tensor] | None, device: torch.device
) -> FastTransformer:
    """Build the accelerated Transformer of `info` with `weights`.

    Raises `ModelError` if the names or shapes of the weights do not match. If `weights` is None,
    the parameters are uninitialized, and take no physical memory until a value is written to them.
    """
    with _SkipInitialization():
        model = Transformer(info.model, info.vocab_size, src_vocab_size=info.src_vocab_size)
    try:
        if weights is not None:
            model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        reason = to_one_line(error, 200)
        raise ModelError(f"the weights do not fit the model's config: {reason}") from None
    return accelerate(model.to(device))


class _SkipInitialization(TorchFunctionMode):
    """Skips the random initialization of weights, which takes long and would be overwritten.

    The device `meta` would have the same effect, but makes torch import its compiler.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the tensor of an initialization unchanged; call all other functions."""
        kwargs = kwargs or {}
        is_random_method = func in (torch.Tensor.normal_, torch.Tensor.uniform_)
        is_init_function = getattr(func, "__module__", None) == "torch.nn.init"
        if not is_random_method and not is_init_function:
            return func(*args, **kwargs)
        if args:
            return args[0]
        return kwargs["tensor"]


def find_model(folder: Path) -> Path:
    """Return `folder` if it is a model folder, or the newest model of a run folder.

    The newest model is the average, unless the newest checkpoint has more updates and was written
    later. Raises `ModelError` if there is no model.
    """
    if (folder / CONFIG).exists():
        return folder.resolve()
    models = _find_run_models(folder)
    if not models:
        _check_is_model(folder)  # always raises, since there is no config.json
    if "average" not in models or "checkpoints/latest" not in models:
        return next(iter(models.values()))  # `_find_run_models` lists the preferred one first
    average = models["average"]
    latest = models["checkpoints/latest"]
    has_more_updates = _read_num_updates(latest) > _read_num_updates(average)
    is_written_later = _write_time(latest) > _write_time(average)
    if has_more_updates and is_written_later:
        return latest
    return average


def describe_other_models(folder: Path, used_model: Path) -> str:
    """Describe for the log the models of a run folder other than `used_model`.

    Returns "" if there are none, or if `used_model` is the average, which is the usual choice.
    """
    if (folder / CONFIG).exists() or used_model == (folder / "average").resolve():
        return ""
    descriptions = []
    for name, path in _find_run_models(folder).items():
        if path != used_model:
            descriptions.append(f"{name} ({_read_num_updates(path)} updates)")
    if not descriptions:
        return ""
    return "; not used: " + ", ".join(descriptions)


def _find_run_models(run_dir: Path) -> dict[str, Path]:
    """Return the models of a run folder, the preferred one first.

    Maps the name of a model in the folder, such as checkpoints/best, to its resolved path.
    """
    models = {}
    for name in ("average", "checkpoints/latest", "checkpoints/best"):
        if (run_dir / name / CONFIG).exists():
            models[name] = (run_dir / name).resolve()
    return models


def _read_num_updates(folder: Path) -> int:
    """Return the number of training updates of a model."""
    info, _ = _read_info(folder / CONFIG)
    return info.updates


def _write_time(folder: Path) -> int:
    """Return when the config of a model was written, in nanoseconds."""
    return (folder / CONFIG).stat().st_mtime_ns


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, without leftovers of interrupted writes."""
    checkpoints = []
    for folder in (run_dir / "checkpoints").glob("step-*"):
        if _CHECKPOINT_NAME.fullmatch(folder.name) and (folder / CONFIG).exists():
            checkpoints.append(folder)
    return sorted(checkpoints, key=parse_checkpoint_update)


def checkpoint_dir(run_dir: Path, update: int) -> Path:
    """Return the path of the checkpoint that is saved after `update` updates."""
    return run_dir / "checkpoints" / f"step-{update:08d}"


def parse_checkpoint_update(folder: Path) -> int:
    """Read the number of updates from a checkpoint's name."""
    match = _CHECKPOINT_NAME.fullmatch(folder.name)
    assert match, f"{folder} is not a checkpoint folder"
    return int(match[1])
