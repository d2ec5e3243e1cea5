"""Code in the README and the docs: commands in indented and `shell` blocks, and fenced blocks of
Python and YAML; and the scripts that make pages.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLES_OF_COMMANDS = [ROOT / "docs/paper.md", ROOT / "docs/how-to/debug-training.md"]
# pages whose Python test_page_commands.py runs
PAGES_WITH_PYTHON = [
    "README.md",
    "docs/ctranslate2.md",
    "docs/pictures.md",
    "docs/python.md",
    "docs/how-to/glossary.md",
]
_FORMULA = " = "
_FILE_PLACEHOLDER = "SUBSTITUTED{}"


def import_script(name: str) -> ModuleType:
    """Import a module of scripts/ once more; it may import other modules of the folder."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        sys.modules.pop(name, None)
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def fenced_blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def shell_lines(page: Path) -> list[str]:
    """Return the commands in the indented blocks and the fenced `shell` blocks of a page, in order.

    Formulas and comments are left out.
    """
    text = page.read_text(encoding="utf-8")
    text = re.sub(r" *\\\n *", " ", text)

    def indent_shell(match: re.Match[str]) -> str:
        return textwrap.indent(match[2], "    ") if match[1] == "shell" else ""

    text = re.sub(r"^```(\w*)\n(.*?)^```$", indent_shell, text, flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^    (.+)$", text, re.MULTILINE)
    return [line for line in lines if _FORMULA not in line and not line.startswith("#")]


def table_lines(page: Path) -> list[str]:
    """Return the commands of nmt in the tables of a page."""
    rows = re.findall(r"^\| .*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [line for row in rows for line in re.findall(r"`(nmt-[^`]+ [^`]+)`", row)]


@dataclass(frozen=True)
class ShellCommand:
    """A command of nmt, as a shell reads it."""

    name: str  # without "nmt-"
    arguments: list[str]
    piped_from: str  # the command line before the pipe, or ""
    stdin: str  # file after <, or ""
    stdout: str  # file after >, or ""
    substituted: dict[str, str]  # command lines in <(...), by the file name in `arguments`


def parse_command(line: str) -> ShellCommand | None:
    """Read a line of shell; return None if it does not run a command of nmt."""
    substituted: dict[str, str] = {}

    def substitute(match: re.Match[str]) -> str:
        name = _FILE_PLACEHOLDER.format(len(substituted))
        substituted[name] = match[1]
        return name

    line = re.sub(r"<\((.*?)\)", substitute, line)
    piped_from, _, command = line.rpartition(" | ")
    if not re.match(r"nmt[- ]\w", command):
        return None
    words = shlex.split(command.removeprefix("nmt").lstrip("- "), comments=True)
    files = {"<": "", ">": ""}
    for sign in files:
        if sign in words:
            position = words.index(sign)
            files[sign] = words[position + 1]
            del words[position : position + 2]
    name, *arguments = words
    return ShellCommand(
        name=name,
        arguments=arguments,
        piped_from=piped_from,
        stdin=files["<"],
        stdout=files[">"],
        substituted=substituted,
    )
