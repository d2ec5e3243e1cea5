"""Jinja templates of HTML pages, and the functions that format their numbers and axes."""

from __future__ import annotations

import functools
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@functools.cache  # compiling the templates takes longer than rendering a page
def load_page_templates(folder: Path) -> Environment:
    """Return the environment that loads templates of `folder`, which extend page.html.j2."""
    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        finalize=_format_value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(percent=percent, ticks=ticks)
    return environment


def _format_value(value: object) -> object:
    """Format a number, or a text of the user's data.

    Characters that are invisible or change the direction of text become Unicode escapes.
    """
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if type(value) is str:  # the HTML of a macro is an instance of a subclass
        return "".join(map(_escape_unprintable, value))
    return value


def _escape_unprintable(character: str) -> str:
    """Return an unprintable character as a Unicode escape, and other characters unchanged."""
    return character if character.isprintable() else f"\\u{ord(character):04x}"


def percent(numerator: float, denominator: float = 1.0, digits: int = 2) -> str:
    """Format a ratio as a percentage; 0 % if the denominator is 0."""
    ratio = numerator / denominator if denominator else 0
    return f"{ratio:.{digits}%}"


def ticks(end: int, max_ticks: int) -> range:
    """Return round numbers from 0 to `end` for an axis, at most `max_ticks` above 0."""
    step = 1
    while step * max_ticks < end:  # 1, 2, 5, 10, 20, 50, ...
        starts_with_2 = str(step).startswith("2")
        step = step * 5 // 2 if starts_with_2 else step * 2
    return range(0, end + 1, step)
