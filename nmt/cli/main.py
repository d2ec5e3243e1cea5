"""The entry points: `nmt NAME` and `nmt-NAME` for every command."""

from __future__ import annotations

import sys

from nmt import __version__
from nmt.cli.commands import COMMANDS
from nmt.cli.shell import guarded, main
from nmt.errors import NmtError, nearest


def nmt() -> int:
    """Dispatch `nmt NAME ...`; alone, list the commands."""
    name, rest = (sys.argv[1] if len(sys.argv) > 1 else "--help"), sys.argv[2:]
    if name in COMMANDS:
        return main(COMMANDS[name], rest)
    return guarded(lambda: _describe(name), "nmt")


def _describe(wish: str) -> None:
    if wish not in ("-h", "--help", "--version"):
        raise NmtError(f"no command {wish}; {nearest(wish, COMMANDS)}")
    print(f"nmt {__version__}" if wish == "--version" else _list_commands())


def _list_commands() -> str:
    lines = [f"  {name:<12}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "nmt: train and use Transformer translation models",
            "",
            "usage: nmt COMMAND [key=value ...]     (the same as nmt-COMMAND)",
            "",
            *lines,
            "",
            "nmt COMMAND --help shows what a command reads and writes, with examples.",
            "A first run on a corpus that comes along:",
            "  nmt-preprocess && nmt-train +model=tiny && nmt-average && nmt-translate",
        ]
    )


def preprocess() -> int:
    """Run `nmt-preprocess`."""
    return main(COMMANDS["preprocess"])


def train() -> int:
    """Run `nmt-train`."""
    return main(COMMANDS["train"])


def average() -> int:
    """Run `nmt-average`."""
    return main(COMMANDS["average"])


def translate() -> int:
    """Run `nmt-translate`."""
    return main(COMMANDS["translate"])


def evaluate() -> int:
    """Run `nmt-evaluate`."""
    return main(COMMANDS["evaluate"])


def score() -> int:
    """Run `nmt-score`."""
    return main(COMMANDS["score"])


def export() -> int:
    """Run `nmt-export`."""
    return main(COMMANDS["export"])


if __name__ == "__main__":
    sys.exit(nmt())
