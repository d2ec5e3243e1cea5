"""What there is to know of a command before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """One command: what `--help` says of it, its settings, and where the code is that runs it."""

    name: str
    summary: str
    reads: str
    writes: str
    examples: tuple[str, ...]
    schema: type[Any]
    module: str  # imported only when the command runs: it may need torch
    groups: tuple[str, ...] = ()  # config groups that help mentions
