"""The folder of a run: its lock, its config file, and the fingerprint that identifies the run."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nmt.config import (
    Schedule,
    TrainConfig,
    resolve_path,
    settings_that_may_change,
    settings_to_compare,
)
from nmt.data.batching import TokenBatchSampler
from nmt.data.binary import DataInfo
from nmt.errors import ConfigError
from nmt.runtime.files import disk_errors, remove_all_temporary, replace_file
from nmt.runtime.manifest import MANIFEST, render_manifest
from nmt.runtime.reading import read_regular_file

log = logging.getLogger(__name__)
_LOCK_SECONDS = 10  # how long to wait for the lock: a killed run may still be ending


def run_dir_errors(run_dir: Path) -> AbstractContextManager[None]:
    """Turn an `OSError` in the block into an `NmtError` with one line that says what to do."""
    return disk_errors(f"run_dir={run_dir}", "fix this, or choose another run_dir")


@contextmanager
def lock_run_dir(run_dir: Path, *, timeout_seconds: int) -> Iterator[None]:
    """Create `run_dir`, lock it during the block, and remove temporary files of a killed run.

    Only rank 0 calls it. It waits for the lock at most half of `timeout_seconds`, since the other
    ranks wait for rank 0 at most `timeout_seconds`. Raises `ConfigError` if another run holds the
    lock.
    """
    if (run_dir / "meta.json").exists():  # `save_config` would overwrite the data's manifest
        raise ConfigError(f"run_dir={run_dir} is a data folder; choose another run_dir")
    with run_dir_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            lock_seconds = min(_LOCK_SECONDS, timeout_seconds / 2)
            acquired_lock = FileLock(run_dir / ".lock").acquire(timeout=lock_seconds)
        except Timeout:
            raise ConfigError(
                f"run_dir={run_dir}: another nmt-train uses it; wait for it, stop it, or choose "
                "another run_dir"
            ) from None
    with acquired_lock:  # released at the end of the block
        remove_all_temporary(run_dir / "checkpoints")
        yield


def save_config(run_dir: Path, config_yaml: str) -> None:
    """Write `config.yaml` and its checksum manifest, unless both are up to date.

    Removes the old manifest before the config changes. If the process is killed in between, the
    folder has a config without a manifest, which is valid.
    """
    path = run_dir / "config.yaml"
    manifest = run_dir / MANIFEST
    content = config_yaml.encode()
    if not path.exists() or read_regular_file(path) != content:
        manifest.unlink(missing_ok=True)
        with replace_file(path) as temporary:
            temporary.write_bytes(content)
    manifest_content = render_manifest(run_dir, [path])
    if not manifest.exists() or read_regular_file(manifest) != manifest_content:
        with replace_file(manifest) as temporary:
            temporary.write_bytes(manifest_content)


def make_fingerprint(
    config: TrainConfig, data_info: DataInfo, samplers: Mapping[int, TokenBatchSampler]
) -> dict[str, Any]:
    """Return the data and the settings of a run, to compare them when the run is resumed.

    `samplers` has the sampler of each stage, keyed by the update after which the stage starts.
    The fingerprint has no weights of corpora, but the mixtures that the samplers compute from
    these weights. Settings with `on_resume="accept"` are left out.
    """
    mixtures = [f"after update {start}: {sampler.mix}" for start, sampler in samplers.items()]
    fingerprint = {
        "data": data_info.data_sha256[:16],
        "tokenizer": data_info.tokenizer_sha256[:16],
        "mixture": "; ".join(mixtures),
        **settings_to_compare(config),
    }
    if config.lemmas is not None:
        # `augment.terminology` uses the content of the file; its path does not matter
        content = read_regular_file(resolve_path(config.lemmas))
        fingerprint["lemmas"] = hashlib.sha256(content).hexdigest()[:16]
    return fingerprint


def check_fingerprint(folder: str, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Compare the fingerprint of the checkpoint `folder` with the current one.

    Logs changed settings with `on_resume="log"`; raises a `ConfigError` if anything else changed.
    """
    # a checkpoint of another version of nmt may have more or fewer settings
    defaults = settings_to_compare(TrainConfig())
    saved_values = defaults | saved
    current_values = defaults | current
    changes = {}  # key: description of the change
    for key in current | saved_values:
        saved_value = saved_values.get(key)
        current_value = current_values.get(key)
        if saved_value != current_value:
            changes[key] = f"{key} was {saved_value}, is {current_value}"
    allowed_keys = settings_that_may_change(TrainConfig())
    refused_changes = [change for key, change in changes.items() if key not in allowed_keys]
    if refused_changes:
        raise ConfigError(
            f"{folder} belongs to another run ({', '.join(refused_changes)}); choose another "
            "run_dir, or give these settings their old values to resume it. A new run can start "
            f"with its weights: init_from={folder}"
        )
    for key in sorted(changes):
        log.info("resuming with a changed setting: %s", changes[key])
    if "max_updates" in changes:
        _log_new_end(Schedule(current["optimizer.schedule"]), current["max_updates"])


def _log_new_end(schedule: Schedule, max_updates: int) -> None:
    """Log whether a new `max_updates` changes the learning rate."""
    if schedule in (Schedule.noam, Schedule.inverse_sqrt, Schedule.constant):
        log.info("max_updates does not change the learning rate of schedule=%s", schedule.value)
    else:
        log.info("the learning rate now falls until update %d", max_updates)
