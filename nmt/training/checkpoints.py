"""The folder of a run: its checkpoints, how they are written while training goes on, and resuming.

A checkpoint is a model folder (`nmt.checkpoint`) with one more file, `trainer.pt`: tensors and
primitives alone. It has no state of random generators: dropout depends on (seed, position, rank).
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from nmt import checkpoint
from nmt.checkpoint import checkpoint_dir, list_checkpoints
from nmt.config import (
    Part,
    Schedule,
    SearchConfig,
    TrainConfig,
    resolve,
    settings_to_compare,
    settings_to_log,
)
from nmt.data.binary import DataInfo
from nmt.data.mixing import Mix
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.errors import ConfigError, ModelError, NmtError
from nmt.runtime.files import (
    disk_errors,
    remove_folder,
    remove_leftovers,
    replace_file,
    replace_link,
)
from nmt.runtime.manifest import MANIFEST, render_manifest, verify
from nmt.runtime.metadata import pop_version, to_dataclass

log = logging.getLogger(__name__)
FORMAT_VERSION = 2  # 1 had the state of the generators and no `world_size`
FILE = "trainer.pt"
_LOCK_SECONDS = 10  # ranks of a killed run need a moment to notice and to end


def writing(run_dir: Path) -> AbstractContextManager[None]:
    """Turn an error of the disk into one line that says what to do."""
    return disk_errors(f"run_dir={run_dir}", "mend that, or choose another run_dir")


@contextmanager
def locked(run_dir: Path, *, timeout_seconds: int) -> Iterator[None]:
    """Make `run_dir`, remove what a killed run left half written, and lock it during the block, or
    until the process ends. Other ranks wait at most `timeout_seconds` for this one.
    """
    if (run_dir / "meta.json").exists():  # its manifest would be lost
        raise ConfigError(f"run_dir={run_dir} is a data folder; choose another run_dir")
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            seconds = min(_LOCK_SECONDS, timeout_seconds / 2)
            held = FileLock(run_dir / ".lock").acquire(timeout=seconds)
        except Timeout:
            raise ConfigError(
                f"run_dir={run_dir}: another nmt-train is at work there; wait for it, stop it, or "
                "choose another run_dir"
            ) from None
    with held:
        remove_leftovers(run_dir / "checkpoints")
        yield


def save_config(run_dir: Path, config_yaml: str) -> None:
    """Write `config.yaml`, and a manifest of it, unless they are there and the same. In between it
    has none, and is read as it is.
    """
    place, manifest, content = run_dir / "config.yaml", run_dir / MANIFEST, config_yaml.encode()
    if not place.exists() or place.read_bytes() != content:
        manifest.unlink(missing_ok=True)
        with replace_file(place) as path:
            path.write_bytes(content)
    rendered = render_manifest(run_dir, [place])
    if not manifest.exists() or manifest.read_bytes() != rendered:
        with replace_file(manifest) as path:
            path.write_bytes(rendered)


# --- the state of a run


@dataclass
class TrainerState:
    """Counters and scores of a run."""

    update: int = 0  # updates of the weights that are done
    epoch: int = 0  # from 0
    update_in_epoch: int = 0  # updates of this epoch that are done or were left out
    best: list[list[Any]] = field(default_factory=list)  # [badness, update], best first
    best_metric: str = ""  # of badness; "" in a checkpoint of an older nmt
    bad_validations: int = 0  # since the last best one
    bad_updates: int = 0  # left out in a row, for what was not finite
    validated: int = 0  # update of the last validation
    flops: float = 0.0  # of the model, for real tokens, since the start

    @property
    def position(self) -> tuple[int, int, int]:
        """How far the run is; two states of the weights or of the data differ in it."""
        return self.update, self.epoch, self.update_in_epoch


def seed_update(seed: int, state: TrainerState, rank: int) -> None:
    """Seed the dropout of one update on one rank, whatever was drawn before."""
    key = (seed, state.epoch, state.update_in_epoch, rank)
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))


def fingerprint(config: TrainConfig, meta: DataInfo, mixes: dict[int, Mix]) -> dict[str, Any]:
    """Return the data and the settings that a resumed run is compared with, as primitives.

    `mixes` holds the effective weights of the corpora by the update after which they apply. The
    settings are those that declare `on_resume="refuse"`, the default, or "log".
    """
    mixtures = [f"after update {update}: {mix}" for update, mix in mixes.items()]
    return {
        "data": meta.data_sha256[:16],
        "tokenizer": meta.tokenizer_sha256[:16],
        "mixture": "; ".join(mixtures),
        **settings_to_compare(config),
    }


def check_fingerprint(folder: str, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare the fingerprint of a checkpoint with the one of this run.

    Log changes of settings that declare `on_resume="log"`; raise a `ConfigError` for other changes.
    """
    defaults = settings_to_compare(TrainConfig())  # of settings that one of the two does not have
    before, after = defaults | saved, defaults | now
    changed = [key for key in now | before if before.get(key) != after.get(key)]
    changes = {key: f"{key} was {before.get(key)}, is {after.get(key)}" for key in changed}
    logged = settings_to_log(TrainConfig())
    refused = [change for key, change in changes.items() if key not in logged]
    if refused:
        raise ConfigError(
            f"{folder} belongs to another run ({', '.join(refused)}); choose another run_dir, "
            "or give these settings their old values to resume it"
        )
    for key in sorted(logged & changes.keys()):
        log.info("resuming with a changed setting: %s", changes[key])
    if "max_updates" in changed:
        schedule = Schedule(now["optimizer.schedule"])
        if schedule in (Schedule.noam, Schedule.inverse_sqrt):
            log.info("max_updates does not change the learning rate of schedule=%s", schedule.value)
        else:
            log.info("the learning rate now falls until update %d", now["max_updates"])


# --- reading


def load_newest(run_dir: Path) -> dict[str, Any] | None:
    """Read the newest intact checkpoint, with its `weights` and `folder`; None without any."""
    folders = list_checkpoints(run_dir)
    for folder in reversed(folders):
        try:
            content = load_state(folder)
            return {**content, "weights": checkpoint.load_weights(folder), "folder": str(folder)}
        except ModelError as error:
            log.warning("%s; trying the checkpoint before", error)
    if folders:
        raise ModelError(f"no checkpoint in {run_dir} can be read; choose another run_dir")
    return None


def load_state(folder: Path) -> dict[str, Any]:
    """Read `trainer.pt`; a missing, damaged or newer one is a `ModelError`."""
    path = folder / FILE
    verify(folder, FILE)
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise ValueError("no dict")
    except FileNotFoundError:
        message = f"{path} does not exist; the folder is no checkpoint to go on from"
        raise ModelError(message) from None
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError):
        message = f"{path} is damaged; remove {folder} to go on from the one before"
        raise ModelError(message) from None
    if pop_version(content, path, FORMAT_VERSION) == 1:
        content["learner"] = {"optimizer": content.get("optimizer"), "precision": {}}
    content["state"] = to_dataclass(TrainerState, content.get("state"), path, "state")
    for key in ("learner", "fingerprint"):
        if not isinstance(content.get(key), dict):
            raise ModelError(f"{path} has no {key}; remove {folder} to go on from the one before")
    return content


def adopt_model(config: TrainConfig) -> TrainConfig:
    """Return `config` with the architecture of `init_from`, but for dropouts, and with its settings
    of search where none is given; without `init_from`, as it is.

    Raises a `ConfigError` for a setting that is neither the default nor that of the folder.
    """
    if config.init_from is None:
        return config
    info, changes = None, dict[str, Any]()
    for folder in reversed(list_checkpoints(resolve(config.run_dir))):  # init_from may be gone
        with suppress(ModelError):  # of what is damaged, `load_newest` tells
            info = checkpoint.load_info(folder)
            break
    if info is None:
        info = checkpoint.load_info(folder := checkpoint.find_model(resolve(config.init_from)))
    for setting in fields(config.model):
        given, own = getattr(config.model, setting.name), getattr(info.model, setting.name)
        if "dropout" in setting.name:
            continue
        if given not in (setting.default, own):
            shown, theirs = (getattr(value, "value", value) for value in (given, own))
            raise ConfigError(
                f"model.{setting.name}={shown}: init_from={folder} has {theirs}; leave it out"
            )
        changes[setting.name] = own
    search = info.search if config.search == SearchConfig() else config.search
    return replace(config, model=replace(config.model, **changes), search=search)


def load_initial_weights(
    config: TrainConfig, tokenizer: Tokenizers, fresh: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Read the weights that `init_from` names, whose architecture `adopt_model` gave this run.

    With another tokenizer, the embeddings of pieces that both have are kept, and the other rows are
    those of `fresh`, the weights of a new model. Raises a `ConfigError` where they would stay so.
    """
    folder = checkpoint.find_model(resolve(str(config.init_from)))
    info = checkpoint.load_info(folder)
    weights = checkpoint.load_weights(folder)
    if info.tokenizer_sha256 != tokenizer.sha256:
        old = checkpoint.load_tokenizer(folder, info)
        weights = _carry_over(weights, old, fresh, tokenizer, Part.embeddings in config.freeze)
    assert all(tensor.shape == fresh[name].shape for name, tensor in weights.items())
    log.info("begin with the weights of %s", folder)
    return weights


def _carry_over(
    weights: dict[str, Tensor], old: Tokenizers, fresh: dict[str, Tensor], new: Tokenizers,
    is_frozen: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Return `weights` with the embeddings and output that `fresh` has, rows of shared pieces
    kept; with `is_frozen` there must be no others.
    """
    joint, source = "embedding.weight", "src_embedding.weight"
    carried = {name: weights.get(name, tensor) for name, tensor in fresh.items()}
    for name in sorted({joint, source, "output_weight", "output_bias"} & fresh.keys()):
        origin = name if name in weights else joint
        before, now = (old.src, new.src) if name == source else (old.tgt, new.tgt)
        rows = {piece: row for row, piece in enumerate(_named_pieces(before))}
        pairs = [(rows[p], row) for row, p in enumerate(_named_pieces(now)) if p in rows]
        there, here = torch.tensor(pairs).T
        num_new = len(fresh[name]) - len(pairs)
        if is_frozen and num_new:
            what = f"{num_new} pieces that init_from does not know would stay random"
            raise ConfigError(f"freeze=[embeddings]: {what}; leave it out")
        carried[name] = fresh[name].clone()
        carried[name][here] = weights[origin][there].to(carried[name])
        text = "%s: another vocabulary; %d of %d rows are kept, %d pieces are new"
        log.info(text, name, len(pairs), len(carried[name]), num_new)
    return carried


def _named_pieces(tokenizer: Tokenizer) -> list[str]:
    """Return all pieces; control symbols by what they do, since their text may differ."""
    pieces = list(tokenizer.all_pieces())
    for role, row in zip(("pad", "unk", "bos", "eos"), tokenizer.control_ids, strict=True):
        if row >= 0:
            pieces[row] = f"<{role}>"
    return pieces


# --- writing


class Saver:
    """Writes, links and removes checkpoints in a thread; training waits only for the copy to
    host memory. A write that fails is logged and leaves older checkpoints; the run goes on.
    """

    def __init__(self, run_dir: Path, *, update: int, keep_last: int) -> None:
        """Continue after the checkpoint of `update`; any newer one is damaged."""
        self.run_dir = run_dir
        self.update = update  # of the newest good checkpoint
        self.keep_last = keep_last
        self.failure: str | None = None  # of the newest checkpoint
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        self._pending: Future[None] = self._thread.submit(lambda: None)
        if (folder := checkpoint_dir(run_dir, update)).is_dir():  # a kill may have come before
            replace_link(run_dir / "checkpoints/latest", folder.name)

    def save(
        self, weights: dict[str, Tensor], info: checkpoint.ModelInfo, tokenizer: Tokenizers, *,
        training: dict[str, Any], best: list[int],
    ) -> None:  # fmt: skip
        """Begin to write `weights` and the content of `trainer.pt`, after the checkpoint before.

        Then older checkpoints are removed, but for the newest and those of the updates `best`.
        """
        self._pending.result()
        folder = checkpoint_dir(self.run_dir, info.updates)
        weights, training = to_host(weights), to_host(training)
        content = {"format_version": FORMAT_VERSION, **training}

        def write() -> None:
            checkpoint.save_model(
                folder, weights, info, tokenizer, extra=lambda at: torch.save(content, at / FILE)
            )
            self.update = info.updates
            replace_link(self.run_dir / "checkpoints/latest", folder.name)
            self._remove_old(best)

        self._pending = self._thread.submit(self._try, write, info.updates)

    def mark_best(self, best: list[int]) -> None:
        """Link `best` to the first of these updates, and keep the checkpoints of them all."""

        def mark() -> None:
            folder = checkpoint_dir(self.run_dir, best[0])
            if folder.exists():
                replace_link(self.run_dir / "checkpoints/best", folder.name)
            self._remove_old(best)

        self._pending.result()
        self._pending = self._thread.submit(self._try, mark, None)

    def finish(self) -> None:
        """Wait for what is being written; raise an `NmtError` when the last checkpoint failed."""
        self._pending.result()
        self._thread.shutdown()
        if self.failure is not None:
            raise NmtError(f"{self.failure}; free space or permissions, then start it again")

    def _try(self, task: Callable[[], None], update: int | None) -> None:
        failure = None
        try:
            task()
        except (OSError, safetensors.SafetensorError, RuntimeError, NmtError) as error:
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())
            newest = list_checkpoints(self.run_dir)
            good = f"{newest[-1].name} is the newest" if newest else "there is none before it"
            name = "links" if update is None else f"checkpoint of update {update}"
            failure = f"{name} in {self.run_dir} not written: {reason}; {good}"
            log.warning("%s; the run goes on", failure)
        if update is not None:
            self.failure = failure

    def _remove_old(self, best: list[int]) -> None:
        folders = {checkpoint.checkpoint_update(f): f for f in list_checkpoints(self.run_dir)}
        good = [update for update in folders if update <= self.update]
        for update, folder in folders.items():
            if update not in (*best, *good[-self.keep_last :]):
                remove_folder(folder)


def to_host(tree: Any) -> Any:
    """Copy every tensor of nested dicts and lists to host memory."""
    if isinstance(tree, Tensor):
        return torch.empty_like(tree, device="cpu").copy_(tree.detach())
    if isinstance(tree, dict):
        return {key: to_host(value) for key, value in tree.items()}
    return [to_host(value) for value in tree] if isinstance(tree, list) else tree
