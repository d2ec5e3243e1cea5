"""Every command in the README and the docs is accepted by the command line; lines are wrapped."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from nmt.cli.arguments import read_arguments
from nmt.cli.commands import COMMANDS

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + DOCS
LINE = re.compile(
    r"^(?:    |\$ )?(?:.*\| )?(nmt-\w+|nmt \w+)((?: (?:'[^']*'|[^|<>#&;'])*)?)", re.MULTILINE
)
COLUMNS = 110
GENERATED = re.compile(r"docs/benchmarks/(?!README)|docs/paper\.md")  # not wrapped by hand


def list_commands() -> list[tuple[str, re.Match[str]]]:
    """Return the commands in indented blocks of the pages and in --help, with their page."""
    commands = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        blocks = re.findall("^    (.*)$", text, re.MULTILINE)
        commands += [(page.name, match) for match in map(LINE.match, blocks) if match]
    for command in COMMANDS.values():
        matches = map(LINE.match, command.examples)
        commands += [("--help", match) for match in matches if match]
    return commands


def test_documented_commands_are_accepted() -> None:
    commands = list_commands()
    for page, match in commands:
        name = match[1][4:]
        assert name in COMMANDS, f"{page}: {match[0]}"
        read_arguments(shlex.split(match[2]), COMMANDS[name])
    documented = [match[1] for page, match in commands if page == "README.md"]
    for name in COMMANDS:
        assert f"nmt-{name}" in documented, f"README.md does not show nmt-{name}"


def test_lines_of_prose_are_wrapped() -> None:
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        lines = [] if GENERATED.match(name) else page.read_text(encoding="utf-8").split("\n")
        is_code = False
        for number, line in enumerate(lines, start=1):
            is_code ^= line.startswith("```")
            is_free = is_code or line.startswith(("    ", "|", "```")) or " " not in line.strip()
            assert is_free or len(line) <= COLUMNS, f"{name}:{number} has {len(line)} columns"
