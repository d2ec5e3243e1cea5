"""What a run must remember to go on as if nothing had happened, and how it is stored beside the
weights.

`trainer.pt` holds tensors and primitives alone; it is read with `weights_only=True`.
"""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from nmt.config import TrainConfig
from nmt.errors import ConfigError, ModelError
from nmt.options import Schedule

log = logging.getLogger(__name__)
FORMAT_VERSION = 1
FILE = "trainer.pt"


@dataclass
class TrainerState:
    """Counters and scores of a run."""

    update: int = 0
    epoch: int = 0  # from 0
    update_in_epoch: int = 0  # updates of this epoch that are done
    best: list[tuple[float, int]] = field(default_factory=list)  # (badness, update), best first
    bad_validations: int = 0  # since the last best one


def save_state(
    folder: Path, state: TrainerState, optimizer: torch.optim.Optimizer, fingerprint: dict[str, Any]
) -> None:
    """Write `trainer.pt` to a checkpoint folder."""
    content = {
        "format_version": FORMAT_VERSION,
        "state": {**asdict(state), "best": [list(pair) for pair in state.best]},
        "optimizer": optimizer.state_dict(),
        "rng": random_state(),
        "fingerprint": fingerprint,
    }
    torch.save(content, folder / FILE)


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
    return content


def restore(content: dict[str, Any], optimizer: torch.optim.Optimizer) -> TrainerState:
    """Put a loaded `trainer.pt` back into effect and return its counters."""
    optimizer.load_state_dict(content["optimizer"])
    set_random_state(content["rng"])
    state = dict(content["state"])
    state["best"] = [(float(badness), int(update)) for badness, update in state["best"]]
    return TrainerState(**state)


def random_state() -> dict[str, Any]:
    """Return the state of torch's generators, which dropout draws from."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """Undo `random_state`."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def seed_everything(seed: int) -> None:
    """Seed python's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)


def fingerprint(config: TrainConfig, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must not change between the parts of one run, as flat names and primitives."""
    flat: dict[str, Any] = {
        "data": meta["data_sha256"][:16],
        "tokenizer": meta["tokenizer_sha256"][:16],
        "seed": config.seed,
        "max_tokens": config.max_tokens,
        "tokens_per_update": config.tokens_per_update,
        "label_smoothing": config.label_smoothing,
    }
    if config.optimizer.schedule is Schedule.cosine:
        flat["max_updates"] = config.max_updates
    for group in ("model", "optimizer"):
        for name, value in asdict(getattr(config, group)).items():
            flat[f"{group}.{name}"] = getattr(value, "value", value)
    return flat


def check_fingerprint(folder: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise a `ConfigError` that names what differs between a checkpoint and this run."""
    changed = [key for key in now if saved.get(key) != now[key]]
    if changed:
        differences = ", ".join(f"{key} was {saved.get(key)}, is {now[key]}" for key in changed)
        raise ConfigError(
            f"{folder} belongs to another run ({differences}); choose another run_dir"
        )
