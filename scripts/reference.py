"""Write docs/settings/: for each command, a page with all of its settings, from nmt/config.

python scripts/reference.py [--check]
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

from generated import write_or_check

from nmt.cli.commands import COMMANDS, NAME, Command, Setting
from nmt.config import Range

FOLDER = Path(__file__).resolve().parents[1] / "docs/settings"
RESUMED = {"accept": "may change", "log": "may change, logged", "refuse": ""}
EXPLAINED = {
    "preprocess": "[preprocess.md](../preprocess.md)",
    "train": "[training.md](../training.md)",
    "average": "[training.md](../training.md)",
    "translate": "[translate.md](../translate.md) and [search.md](../search.md)",
    "distill": "[synthesis.md](../synthesis.md)",
    "backtranslate": "[synthesis.md](../synthesis.md)",
    "evaluate": "[evaluation.md](../evaluation.md)",
    "score": "[score.md](../score.md)",
    "export": "[export.md](../export.md)",
    "import": "[import.md](../import.md)",
    "serve": "[serve.md](../serve.md)",
    "visualize": "[pictures.md](../pictures.md)",
}


def main() -> int:
    """Write the pages, or check that they are current."""
    pages = {FOLDER / f"{command.name}.md": render_page(command) for command in COMMANDS.values()}
    return write_or_check(__doc__ or "", pages)


def render_page(command: Command) -> str:
    """Return the page of a command: a table for each group of settings."""
    groups: dict[str, list[Setting]] = {}
    for setting in command.settings:
        groups.setdefault(find_group(setting), []).append(setting)
    lines = [
        f"# Settings of nmt-{command.name}",
        "",
        f"{command.summary} See {EXPLAINED[command.name]}.",
        "",
        f"- Reads {command.reads}.",
        f"- Writes {command.writes}.",
    ]
    columns = ["setting", "default", "values", "meaning"]
    if command.can_resume:
        columns.append("when resumed")
    for group, settings in groups.items():
        title = f"`{group}.*`" if group else "Settings without a group"
        lines += ["", f"## {title}", "", as_row(columns), as_row(["---"] * len(columns))]
        for setting in settings:
            default = setting.default.removeprefix("[").removesuffix("]")
            cells = [
                f"`{setting.key}`",
                f"`{default}`" if default else "",
                describe_values(command, setting),
                setting.help.replace("|", "\\|").replace("<", "&lt;"),
                RESUMED[setting.resume_rule],
            ]
            lines.append(as_row(cells[: len(columns)]))
    return "\n".join(lines) + "\n"


def as_row(cells: list[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def find_group(setting: Setting) -> str:
    """Return the group of a setting, such as `optimizer` or `data.train`; "" for no group."""
    names = setting.key.removesuffix(f".{NAME}").split(".")
    return ".".join(names[:-1])


def describe_values(command: Command, setting: Setting) -> str:
    """Return the choices of a setting, or its type and range."""
    hint = setting.type_hint
    value_type = hint  # for the hints `int | None` and `list[int]`, this becomes `int`
    if typing.get_origin(hint) in (typing.Union, types.UnionType, list):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        value_type = members[0]
    names = {str: "text", bool: "`true`, `false`", int: "integer", float: "number"}
    if dataclasses.is_dataclass(value_type):
        text = "group"
    elif isinstance(value_type, type) and issubclass(value_type, Enum):
        text = ", ".join(f"`{choice.value}`" for choice in value_type)
    elif value_type in names:
        text = names[value_type]
    else:
        text = getattr(value_type, "__name__", str(value_type))
    if typing.get_origin(hint) is list:
        text = f"list of {text}"
    return f"{text} {describe_range(find_range(command.schema, setting.key))}".strip()


def find_range(schema: type[Any], key: str) -> Range:
    """Return the range that a setting declares. `key` is its key in the group `schema`."""
    name, _, inner_key = key.removeprefix(f"{NAME}.").partition(".")
    hint = typing.get_type_hints(schema)[name]
    if inner_key and inner_key != NAME:
        group = hint
        if typing.get_args(hint):  # a mapping of names to groups, such as dict[str, CorpusConfig]
            group = typing.get_args(hint)[1]
        return find_range(group, inner_key)
    metadata = schema.__dataclass_fields__[name].metadata
    return typing.cast(Range, metadata["range"])


def describe_range(bounds: Range) -> str:
    """Return a range in signs, such as "> 0, ≤ 1"; "" for a range without bounds."""
    signs = {"≥": bounds.low, ">": bounds.above, "≤": bounds.high, "<": bounds.below}
    limits = [(sign, limit) for sign, limit in signs.items() if limit is not None]
    texts = [f"{sign} {limit:,}" for sign, limit in limits if limit < sys.maxsize // 2]
    return ", ".join(texts).replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
