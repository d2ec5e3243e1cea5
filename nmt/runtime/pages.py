"""HTML pages: templates that extend page.html.j2, how numbers and text stand in them, and axes."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def page_templates(folder: Path) -> Environment:
    """Return the templates in `folder`, which extend page.html.j2."""
    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(percent=percent, ticks=ticks)
    return environment


def _shown(value: object) -> object:
    """Format numbers; show characters that hide, or turn the text around, as codes."""
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
    if type(value) is str:  # not HTML that a macro has made
        return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in value)
    return value


def percent(part: float, whole: float = 1.0, digits: int = 2) -> str:
    """Format a share; nothing of nothing is 0 %."""
    return f"{part / whole if whole else 0:.{digits}%}"


def ticks(end: int, most: int) -> range:
    """Return about `most` round numbers from 0 to `end`, as the marks of an axis."""
    steps = (digit * 10**power for power in range(19) for digit in (1, 2, 5))
    return range(0, end + 1, next(step for step in steps if step * most >= end))
