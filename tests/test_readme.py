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


def blocks(page: Path) -> list[str]:
    """Return the lines of indented blocks, continued ones joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line[4:] for line in text.split("\n") if line.startswith("    ")]


def test_documented_commands_are_accepted() -> None:
    found = [(page.name, match) for page in PAGES for b in blocks(page) if (match := LINE.match(b))]
    for command in COMMANDS.values():
        matches = [LINE.match(example) for example in command.examples]
        found += [("--help", match) for match in matches if match is not None]
        assert len(found) >= len(command.examples)
        shown = [match[1] for page, match in found if page == "README.md"]
        assert f"nmt-{command.name}" in shown, f"README.md does not show nmt-{command.name}"
    for page, match in found:
        name = match[1][4:]
        assert name in COMMANDS, f"{page}: {match[0]}"
        read_arguments(shlex.split(match[2]), COMMANDS[name])


def test_lines_of_prose_are_wrapped() -> None:
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        lines = [] if GENERATED.match(name) else page.read_text(encoding="utf-8").split("\n")
        is_code = False
        for number, line in enumerate(lines, start=1):
            is_code ^= line.startswith("```")
            is_free = is_code or line.startswith(("    ", "|", "```")) or " " not in line.strip()
            assert is_free or len(line) <= COLUMNS, f"{name}:{number} has {len(line)} columns"
