"""Read `metrics.jsonl`, the log of a run. Each line is a JSON object with the key `update`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from nmt.runtime.reading import open_regular

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30
_TEXT_KEYS = {"event", "batch"}  # all other keys have numbers


def read_metrics_log(path: Path) -> list[dict[str, Any]]:
    """Read the records of a log, in order.

    Logs one warning about damaged lines and skips them. Also skips a last line without a line
    break, since it is still being written. Raises `DamagedError` for more than `MAX_BYTES`.
    """
    records: list[dict[str, Any]] = []
    problems: list[str] = []
    with open_regular(path, max_bytes=MAX_BYTES) as file:
        for line_number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                records.append(parse_record(line))
            except ValueError as error:
                problems.append(f"line {line_number} ({error})")
    if problems:
        log.warning("%s: skipped %d damaged lines, first %s", path, len(problems), problems[0])
    return records


def parse_record(line: bytes) -> dict[str, Any]:
    """Parse one line of a log. Raises `ValueError` if it is damaged."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError("no JSON object")
    update = record.get("update")
    if type(update) is not int or not 0 <= update < 1 << 63:
        raise ValueError("no update")
    for name, value in record.items():
        if name not in _TEXT_KEYS and not isinstance(value, int | float):
            raise ValueError(f"{name} is not a number")
    return record
