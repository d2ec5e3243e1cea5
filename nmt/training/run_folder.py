"""The folder of a run: its lock, its config, and whether a checkpoint in it belongs to the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nmt.config import Schedule, TrainConfig, settings_to_compare, settings_to_log
from nmt.data.batching import TokenBatchSampler
from nmt.data.binary import DataInfo
from nmt.errors import ConfigError
from nmt.runtime.files import disk_errors, remove_all_temporary, replace_file
from nmt.runtime.manifest import MANIFEST, render_manifest
from nmt.runtime.reading import read_regular

log = logging.getLogger(__name__)
_LOCK_SECONDS = 10  # the ranks of a killed run need a moment to notice and to end


def run_dir_errors(run_dir: Path) -> AbstractContextManager[None]:
    """Turn a disk error during the block into one line that says what to do."""
    return disk_errors(f"run_dir={run_dir}", "fix this, or choose another run_dir")


@contextmanager
def lock_run_dir(run_dir: Path, *, timeout_seconds: int) -> Iterator[None]:
    """Create and lock `run_dir` during the block, and remove the leftovers of a killed run.

    Other ranks wait at most `timeout_seconds` for this one. Raises `ConfigError` if another run
    holds the lock.
    """
    if (run_dir / "meta.json").exists():  # its manifest would be overwritten
        raise ConfigError(f"run_dir={run_dir} is a data folder; choose another run_dir")
    with run_dir_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            lock_seconds = min(_LOCK_SECONDS, timeout_seconds / 2)
            lock = FileLock(run_dir / ".lock").acquire(timeout=lock_seconds)
        except Timeout:
            raise ConfigError(
                f"run_dir={run_dir}: another nmt-train uses it; wait for it, stop it, or choose "
                "another run_dir"
            ) from None
    with lock:
        remove_all_temporary(run_dir / "checkpoints")
        yield


def save_config(run_dir: Path, config_yaml: str) -> None:
    """Write `config.yaml` and its manifest, unless both are up to date.

    The old manifest is removed first: a config without a manifest is valid, with a wrong one not.
    """
    path = run_dir / "config.yaml"
    manifest = run_dir / MANIFEST
    if not path.exists() or read_regular(path) != config_yaml.encode():
        manifest.unlink(missing_ok=True)
        with replace_file(path) as temporary:
            temporary.write_bytes(config_yaml.encode())
    rendered = render_manifest(run_dir, [path])
    if not manifest.exists() or read_regular(manifest) != rendered:
        with replace_file(manifest) as temporary:
            temporary.write_bytes(rendered)


def make_fingerprint(
    config: TrainConfig, meta: DataInfo, samplers: Mapping[int, TokenBatchSampler]
) -> dict[str, Any]:
    """Return the data and the settings that a resumed run is compared with, as primitives.

    `samplers` hold the effective weights of the corpora by the update after which they apply. The
    settings are those that declare `on_resume="refuse"`, the default, or "log".
    """
    mixtures = [f"after update {start}: {sampler.mix}" for start, sampler in samplers.items()]
    return {
        "data": meta.data_sha256[:16],
        "tokenizer": meta.tokenizer_sha256[:16],
        "mixture": "; ".join(mixtures),
        **settings_to_compare(config),
    }


def check_fingerprint(folder: str, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Compare the fingerprint of a checkpoint with the current one.

    Log changes of settings that declare `on_resume="log"`; raise a `ConfigError` for other changes.
    """
    defaults = settings_to_compare(TrainConfig())  # of settings that only one of the two has
    old = defaults | saved
    new = defaults | current
    changes = {}
    for key in current | old:
        if old.get(key) != new.get(key):
            changes[key] = f"{key} was {old.get(key)}, is {new.get(key)}"
    logged = settings_to_log(TrainConfig())
    refused = [change for key, change in changes.items() if key not in logged]
    if refused:
        raise ConfigError(
            f"{folder} belongs to another run ({', '.join(refused)}); choose another run_dir, "
            "or give these settings their old values to resume it"
        )
    for key in sorted(logged & changes.keys()):
        log.info("resuming with a changed setting: %s", changes[key])
    if "max_updates" in changes:
        _log_new_end(Schedule(current["optimizer.schedule"]), current["max_updates"])


def _log_new_end(schedule: Schedule, max_updates: int) -> None:
    if schedule in (Schedule.noam, Schedule.inverse_sqrt, Schedule.constant):
        log.info("max_updates does not change the learning rate of schedule=%s", schedule.value)
    else:
        log.info("the learning rate now falls until update %d", max_updates)
