"""What a run must remember to go on as if nothing had happened, and how it is stored beside the
weights.

`trainer.pt` holds tensors and primitives alone; it is read with `weights_only=True`. Randomness
needs no place in it: dropout is drawn from (seed, place in the data, rank).
"""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmt import checkpoint
from nmt.config import Schedule, TrainConfig, resolve
from nmt.data.mixing import Mix
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ConfigError, ModelError

log = logging.getLogger(__name__)
FORMAT_VERSION = 2  # 1 had the state of the generators and no `world_size`
FILE = "trainer.pt"


@dataclass
class TrainerState:
    """Counters and scores of a run."""

    update: int = 0  # updates of the weights that are done
    epoch: int = 0  # from 0
    update_in_epoch: int = 0  # updates of this epoch that are done or were left out
    best: list[tuple[float, int]] = field(default_factory=list)  # (badness, update), best first
    bad_validations: int = 0  # since the last best one
    bad_updates: int = 0  # left out in a row, for what was not finite
    validated: int = 0  # update of the last validation

    @property
    def place(self) -> tuple[int, int, int]:
        """Where the run is; another place is another state of the weights or of the data."""
        return self.update, self.epoch, self.update_in_epoch


def pack_state(state: TrainerState) -> dict[str, Any]:
    """Turn the state into primitives."""
    return {**asdict(state), "best": [list(pair) for pair in state.best]}


def unpack_state(content: Mapping[str, Any]) -> TrainerState:
    """Undo `pack_state`."""
    best = [(float(badness), int(update)) for badness, update in content["best"]]
    return TrainerState(**{**content, "best": best})


def save_state(folder: Path, content: dict[str, Any]) -> None:
    """Write `trainer.pt` to a checkpoint folder."""
    torch.save({"format_version": FORMAT_VERSION, **content}, folder / FILE)


def load_state(folder: Path) -> dict[str, Any]:
    """Read `trainer.pt`; a missing, damaged or newer one is a `ModelError`."""
    path = folder / FILE
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ModelError(
            f"{path} does not exist; the folder is no checkpoint to go on from"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError):
        raise ModelError(
            f"{path} is damaged; remove {folder} to go on from the one before"
        ) from None
    if content["format_version"] > FORMAT_VERSION:
        version = content["format_version"]
        raise ModelError(
            f"{path} has format_version {version}, this nmt reads {FORMAT_VERSION}; update nmt"
        )
    if content["format_version"] == 1:
        content["learner"] = {"optimizer": content["optimizer"], "precision": {}}
    return content


def load_newest(run_dir: Path) -> dict[str, Any] | None:
    """Read the newest checkpoint that can be read, with its `weights` and `folder`; None when the
    run has none yet.
    """
    folders = checkpoint.list_checkpoints(run_dir)
    for folder in reversed(folders):
        try:
            content = load_state(folder)
            return {**content, "weights": checkpoint.load_weights(folder), "folder": str(folder)}
        except ModelError as error:
            log.warning("%s; trying the checkpoint before", error)
    if folders:
        raise ModelError(f"no checkpoint in {run_dir} can be read; choose another run_dir")
    return None


def weights_to_begin_with(config: TrainConfig, tokenizer: Tokenizers) -> dict[str, Tensor]:
    """Read the weights that `init_from` names; they must be of the same tokenizer and shapes."""
    folder = checkpoint.find_model(resolve(str(config.init_from)))
    info = checkpoint.load_info(folder)
    if info.tokenizer_sha256 != tokenizer.sha256:
        raise ModelError(
            f"init_from={folder}: its tokenizer is not the one of data_dir={config.data_dir}; "
            "preprocess the data with the tokenizer of that model"
        )
    weights = checkpoint.load_weights(folder)
    checkpoint.build_model(replace(info, model=config.model), weights, torch.device("cpu"))
    log.info("begin with the weights of %s", folder)
    return weights


def seed_everything(seed: int) -> None:
    """Seed python's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)


def seed_update(seed: int, state: TrainerState, rank: int) -> None:
    """Seed the dropout of one update on one rank, whatever was drawn before."""
    key = (seed, state.epoch, state.update_in_epoch, rank)
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))


def fingerprint(config: TrainConfig, meta: Mapping[str, Any], mix: Mix) -> dict[str, Any]:
    """Return what must not change between the parts of one run, as flat names and primitives."""
    flat: dict[str, Any] = {
        "data": meta["data_sha256"][:16],
        "tokenizer": meta["tokenizer_sha256"][:16],
        "mix": str(mix),
        "seed": config.seed,
        "max_tokens": config.max_tokens,
        "tokens_per_update": config.tokens_per_update,
        "label_smoothing": config.label_smoothing,
        "ema_decay": config.ema_decay,
        "init_from": config.init_from,
    }
    if config.optimizer.schedule is Schedule.cosine:
        flat["max_updates"] = config.max_updates
    for group in ("model", "optimizer"):
        for name, value in asdict(getattr(config, group)).items():
            flat[f"{group}.{name}"] = getattr(value, "value", value)
    return flat


def check_fingerprint(folder: str, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise a `ConfigError` that names what differs between a checkpoint and this run.

    Settings that the nmt of the checkpoint did not have yet are not compared.
    """
    changed = [key for key in now if key in saved and saved[key] != now[key]]
    if changed:
        differences = ", ".join(f"{key} was {saved[key]}, is {now[key]}" for key in changed)
        raise ConfigError(
            f"{folder} belongs to another run ({differences}); choose another run_dir, "
            "or give these settings their old values to go on"
        )
