"""Every command in the README and the docs is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nmt.cli.commands import COMMANDS
from nmt.cli.compose import check_argument
from nmt.cli.help import command_help

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINE = re.compile(r"^(?:    |\$ )?(?:.*\| )?(nmt-\w+|nmt \w+)((?: [^|<>#&;]*)?)", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """Return the commands that stand in indented blocks and in --help, by page."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        blocks = [line[4:] for line in text.split("\n") if line.startswith("    ")]
        found += [(page.name, match[0]) for line in blocks if (match := LINE.match(line))]
    for command in COMMANDS.values():
        found += [("--help", example) for example in command.examples]
    return found


def test_the_readme_shows_every_command() -> None:
    shown = " ".join(text for page, text in commands() if page == "README.md")
    assert all(f"nmt-{name}" in shown for name in COMMANDS)


@pytest.mark.parametrize(("page", "text"), commands())
def test_a_documented_command_is_accepted(page: str, text: str) -> None:
    match = LINE.match(text)
    assert match is not None
    command = COMMANDS[match[1][4:]]
    for argument in shlex.split(match[2]):
        check_argument(argument, command)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_is_read_and_written_and_every_setting(name: str) -> None:
    text = command_help(COMMANDS[name])
    assert re.search(r"^reads:  \w.*^writes: \w", text, re.MULTILINE | re.DOTALL)
    assert "examples:" in text
    hidden = [key for key in COMMANDS[name].schema.__dataclass_fields__ if f"  {key}" not in text]
    assert not hidden
