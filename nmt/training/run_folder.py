"""The run folder while a run is at work in it: locked, and its configuration written."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nmt.errors import ConfigError
from nmt.files import remove_leftovers, replace_file

log = logging.getLogger(__name__)
_PATIENCE_SECONDS = 10  # ranks of a killed run need a moment to notice and to end


@contextmanager
def locked(run_dir: Path, *, timeout_seconds: int) -> Iterator[None]:
    """Keep other runs out of `run_dir`, which is made, for the time of the block; clear away what a
    killed one left half done.

    Other ranks wait for this one, `timeout_seconds` at most. The lock ends with the process,
    however that ends.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run_dir / ".lock")
    try:
        lock.acquire(timeout=min(_PATIENCE_SECONDS, timeout_seconds / 2))
    except Timeout:
        raise ConfigError(
            f"run_dir={run_dir}: another nmt-train is at work there; wait for it, stop it, or "
            "choose another run_dir"
        ) from None
    try:
        remove_leftovers(run_dir / "checkpoints")
        yield
    finally:
        lock.release()


def save_config(run_dir: Path, config_yaml: str) -> None:
    """Write `config.yaml`, unless it is there and the same."""
    place = run_dir / "config.yaml"
    if not place.exists() or place.read_text(encoding="utf-8") != config_yaml:
        with replace_file(place) as path:
            path.write_text(config_yaml, encoding="utf-8", newline="\n")
