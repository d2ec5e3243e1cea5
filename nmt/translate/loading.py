"""From model folders to what search and scoring work with; several folders are an ensemble."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nmt.checkpoint import build_model, find_model, load_info, load_tokenizer, load_weights
from nmt.config import Combine, DType, SearchConfig, choose, resolve
from nmt.data.tokenizer import Tokenizers
from nmt.distributed import find_device, find_dtype, keep_freed_memory
from nmt.errors import ConfigError, ModelError
from nmt.model.fast import freeze
from nmt.search.ensemble import EnsembleStepper
from nmt.search.stepper import Model, ModelStepper

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """One model, or an ensemble, ready to use."""

    stepper: Model
    tokenizer: Tokenizers
    defaults: SearchConfig  # of the first folder


def load_models(
    folders: Sequence[str | Path],
    *,
    device: str = "auto",
    dtype: DType | str = DType.float32,
    combine: Combine | str = Combine.probabilities,
) -> LoadedModel:
    """Load runs, checkpoints or model folders; more than one are an ensemble.

    Raises `ModelError` for a folder that is none or has another tokenizer than the first, and
    `DeviceError` for a device that is not there.
    """
    if not folders:
        raise ConfigError("model_dir=[]: name at least one run, checkpoint or model folder")
    place = find_device(device)
    number_format = find_dtype(choose(DType, "dtype", dtype), place)
    found = [find_model(resolve(folder)) for folder in folders]
    infos = [load_info(folder) for folder in found]
    for folder, info in zip(found, infos, strict=True):
        if info.tokenizer_sha256 != infos[0].tokenizer_sha256:
            raise ModelError(
                f"{folder} has another tokenizer than {found[0]}; an ensemble needs models "
                "trained on the same data folder"
            )
    if place.type == "cpu":
        keep_freed_memory()
    steppers: list[Model] = []
    for folder, info in zip(found, infos, strict=True):
        model = build_model(info, load_weights(folder), place)
        freeze(model)
        steppers.append(ModelStepper(model, number_format))
        log.info("model %s, %d updates, on %s", folder, info.updates, place)
    stepper = steppers[0] if len(steppers) == 1 else EnsembleStepper(steppers, combine)
    return LoadedModel(stepper, load_tokenizer(found[0], infos[0]), infos[0].search)
