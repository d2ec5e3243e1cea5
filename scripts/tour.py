"""Set the line numbers of the links of the code tour, docs/tour*.md, or check them.

    python scripts/tour.py [--check]

The pages explain code in the order of the Annotated Transformer. A link such as
[`attend`](../FILE#L1-L9) leads to a class, a function or a constant. If the paragraph of such a
link begins with "Code:", the site shows the linked code next to the text (`with_code`). A link such
as [`x + y`](../FILE#L1) leads to a line of the code that its section links.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from generated import write_or_check

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs/tour.md", ROOT / "docs/tour-training.md"]
SHOWN = "Code: "
_LINK = re.compile(r"\[`([^`]+)`\]\(\.\./([\w/]+\.py)(?:#L(\d+)(?:-L(\d+))?)?\)")
_NAME = re.compile(r"[\w.]+")
_HEADING = re.compile(r"(?=^#)", re.MULTILINE)


@dataclass(frozen=True)
class Lines:
    """Lines of a file, counted from 1; `end` is included."""

    file: str  # relative to the repository
    start: int
    end: int

    @property
    def url(self) -> str:
        """The address of the lines, relative to docs/."""
        suffix = f"-L{self.end}" if self.end > self.start else ""
        return f"../{self.file}#L{self.start}{suffix}"


@functools.cache
def find_definitions(file: str) -> dict[str, Lines]:
    """Return the lines of the classes, functions, methods and constants of a file, by name."""
    definitions = {}

    def add(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            start = node.lineno
            names = []
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = [node.name]
                start = min([start, *(decorator.lineno for decorator in node.decorator_list)])
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            assert node.end_lineno is not None
            for name in names:
                definitions[prefix + name] = Lines(file, start, node.end_lineno)
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{prefix}{node.name}.")

    add(ast.parse((ROOT / file).read_text(encoding="utf-8")).body, "")
    return definitions


@functools.cache
def read_lines(file: str) -> list[str]:
    """Return the lines of a file of the repository."""
    return (ROOT / file).read_text(encoding="utf-8").split("\n")


def split_sections(text: str) -> list[str]:
    """Divide a page before each heading."""
    return _HEADING.split(text)


def find_linked(section: str) -> list[Lines]:
    """Return the definitions that a section links. Raises LookupError for an unknown name."""
    linked = []
    for name, file, *_ in _LINK.findall(section):
        if _NAME.fullmatch(name):
            definitions = find_definitions(file)
            if name not in definitions:
                raise LookupError(f"code tour: {file} does not define {name}")
            linked.append(definitions[name])
    return linked


def find_line(code: str, file: str, linked: list[Lines]) -> Lines:
    """Return the line of `file` that contains `code`, within the definitions `linked`.

    Raises LookupError if there is no such line, or more than one.
    """
    numbers = set()
    for lines in linked:
        if lines.file == file:
            for number in range(lines.start, lines.end + 1):
                if code in read_lines(file)[number - 1]:
                    numbers.add(number)
    if len(numbers) != 1:
        raise LookupError(f"code tour: {len(numbers)} lines of its section contain {code!r}")
    (number,) = numbers
    return Lines(file, number, number)


def set_line_numbers(text: str) -> str:
    """Return the page with the current line numbers in its links."""
    sections = []
    for section in split_sections(text):
        linked = find_linked(section)

        def replace(match: re.Match[str], linked: list[Lines] = linked) -> str:
            name = match[1]
            file = match[2]
            if _NAME.fullmatch(name):
                lines = find_definitions(file)[name]
            else:
                lines = find_line(name, file, linked)
            return f"[`{name}`]({lines.url})"

        sections.append(_LINK.sub(replace, section))
    return "".join(sections)


def with_code(text: str) -> str:
    """Return the page for the site: the code of each section next to its text."""
    sections = []
    for section in split_sections(text):
        heading, _, body = section.partition("\n")
        paragraphs = body.split("\n\n")
        blocks = "\n".join(show_code(section))
        if blocks:
            prose_paragraphs = [text for text in paragraphs if not text.startswith(SHOWN)]
            prose = "\n\n".join(prose_paragraphs).strip("\n")
            body = (
                f'\n<div class="tour" markdown>\n<div markdown>\n\n{prose}\n\n</div>\n'
                f"<div markdown>\n\n{blocks}\n</div>\n</div>\n\n"
            )
        sections.append(f"{heading}\n{body}")
    return "".join(sections)


def show_code(section: str) -> Iterator[str]:
    """Yield the code that a section shows as Markdown, with its explained lines highlighted."""
    explained = set()
    for name, file, start, _ in _LINK.findall(section):
        if not _NAME.fullmatch(name):
            explained.add((file, int(start)))
    for paragraph in section.split("\n\n"):
        if not paragraph.startswith(SHOWN):
            continue
        for lines in find_linked(paragraph):
            highlighted = []  # numbers in the block, from 1
            for number in range(lines.start, lines.end + 1):
                if (lines.file, number) in explained:
                    highlighted.append(str(number - lines.start + 1))
            highlight = f' hl_lines="{" ".join(highlighted)}"' if highlighted else ""
            options = f'title="{lines.file}" linenums="{lines.start}"{highlight}'
            code = "\n".join(read_lines(lines.file)[lines.start - 1 : lines.end])
            yield f"```python {options}\n{code}\n```\n"


def main() -> int:
    """Rewrite or check the pages."""
    pages = {page: set_line_numbers(page.read_text(encoding="utf-8")) for page in PAGES}
    return write_or_check(__doc__ or "", pages)


if __name__ == "__main__":
    sys.exit(main())
