"""Write docs/api/: the Python interface, from the signatures and docstrings of the code.

python scripts/api.py [--check]
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
FOLDER = ROOT / "docs/api"


@dataclass(frozen=True)
class Entry:
    """A class or function of a page."""

    file: str  # relative to the repository
    name: str
    public_name: str = ""  # the name by which it is imported, if not from its own module

    @property
    def qualified_name(self) -> str:
        """The name by which it is imported, with its module."""
        module = self.file.removesuffix(".py").replace("/", ".")
        return self.public_name or f"{module}.{self.name}"


@dataclass(frozen=True)
class Page:
    """A page of docs/api/."""

    title: str
    introduction: str
    entries: list[Entry]


PAGES = {
    "translator": Page(
        title="Python API: Translator",
        introduction="""\
[python.md](../python.md) has examples, and [Options and results](results.md) the keyword
arguments and the classes of the results. [errors.md](../errors.md) lists the exceptions.""",
        entries=[Entry("nmt/translate/translator.py", "Translator", "nmt.Translator")],
    ),
    "results": Page(
        title="Python API: options and results",
        introduction="""\
The options are the keyword arguments of the methods of [Translator](translator.md). The
[settings of nmt-translate](../settings/translate.md) have the same names and meanings, with
their defaults and ranges.""",
        entries=[
            Entry("nmt/translate/options.py", "TranslateOptions"),
            Entry("nmt/translate/options.py", "ScoreOptions"),
            Entry("nmt/config/search.py", "SearchOptions", "nmt.config.SearchOptions"),
            Entry("nmt/config/rerank.py", "RerankOptions", "nmt.config.RerankOptions"),
            Entry("nmt/translate/results.py", "Translation"),
            Entry("nmt/translate/notebook.py", "NBestList"),
            Entry("nmt/translate/attention.py", "PairAttention"),
        ],
    ),
    "training": Page(
        title="Python API: preparation, training, model",
        introduction="""\
[python.md](../python.md) has examples. `PreprocessConfig` and `TrainConfig` of `nmt.config` have
the settings of [nmt-preprocess](../settings/preprocess.md) and [nmt-train](../settings/train.md)
as fields. A group of settings is an object: `model` is a `ModelConfig`, `optimizer` an
`OptimizerConfig`, `search` a `SearchConfig`, and `data` a `DataConfig`.

Shapes: B batch, S source length, T target length, H heads, d size of a head, D `d_model`,
V vocabulary.""",
        entries=[
            Entry("nmt/preprocess/prepare.py", "prepare", "nmt.prepare"),
            Entry("nmt/cli/train.py", "train_in_process", "nmt.train"),
            Entry("nmt/model/transformer.py", "Transformer"),
            Entry("nmt/model/attention.py", "causal_mask"),
            Entry("nmt/model/attention.py", "padding_mask"),
            Entry("nmt/model/attention.py", "attend"),
            Entry("nmt/training/schedule.py", "learning_rate"),
            Entry("nmt/training/optimizer.py", "make_optimizers"),
        ],
    ),
}
# public members that only other modules of the package use
INTERNAL = {
    "Translator": [
        "translate_windows",
        "load_reranker",
        "list_src_tags",
        "find_directions",
        "score_hypotheses",
    ],
    "PairAttention": ["as_json"],
    "Transformer": ["output_matrix", "embed", "checkpointed"],
}
_SECTION = re.compile(r"^(Args|Returns|Raises):\n", re.MULTILINE)
_ARGUMENT = re.compile(r"^    (\w+): ", re.MULTILINE)
_INDENT = re.compile(r"^    (?=\S)", re.MULTILINE)

Definition = ast.ClassDef | ast.FunctionDef


def main() -> int:
    """Write the pages, or check that they are current."""
    pages = {FOLDER / f"{name}.md": render_page(name) for name in PAGES}
    return write_or_check(__doc__ or "", pages)


def render_page(name: str) -> str:
    """Return a page."""
    page = PAGES[name]
    blocks = [f"# {page.title}", page.introduction]
    for entry in page.entries:
        blocks += describe(entry)
    return "\n\n".join(blocks) + "\n"


@functools.cache
def read_lines(file: str) -> list[str]:
    """Return the lines of a file of the repository."""
    return (ROOT / file).read_text(encoding="utf-8").split("\n")


def find_definition(entry: Entry) -> Definition:
    """Return the class or function of an entry. Raises LookupError if it does not exist."""
    for node in ast.parse("\n".join(read_lines(entry.file))).body:
        if isinstance(node, Definition) and node.name == entry.name:
            return node
    raise LookupError(f"Python API: {entry.file} does not define {entry.name}")


def describe(entry: Entry) -> Iterator[str]:
    """Yield the Markdown of a class or function, and of the public members of a class."""
    node = find_definition(entry)
    yield f"## `{entry.qualified_name}`"
    if isinstance(node, ast.FunctionDef):
        signature = read_signature(entry.file, node)
        yield signature.replace(node.name, entry.qualified_name.rpartition(".")[2], 1)
        yield read_docstring(node)
        return
    yield read_docstring(node)
    yield from list_fields(entry.file, node)
    for member in node.body:
        if not isinstance(member, ast.FunctionDef) or member.name.startswith("_"):
            continue
        if member.name not in INTERNAL.get(node.name, []):
            yield f"### `{node.name}.{member.name}`"
            yield read_signature(entry.file, member)
            yield read_docstring(member)


def as_code(lines: list[str], indent: int) -> str:
    """Return lines of Python as a block, without their indentation."""
    code = "\n".join(line[indent:] for line in lines)
    return f"```python\n{code}\n```"


def read_signature(file: str, node: ast.FunctionDef) -> str:
    """Return the lines of a function before its body, with its decorators."""
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    end = node.body[0].lineno - 1  # the last line before the docstring
    return as_code(read_lines(file)[start - 1 : end], node.col_offset)


def list_fields(file: str, node: ast.ClassDef) -> Iterator[str]:
    """Yield the lines of a class's fields with their comments and docstrings, if it has any."""
    fields = []
    for statement in node.body[1:]:
        if isinstance(statement, (ast.AnnAssign, ast.Expr)):
            fields += read_lines(file)[statement.lineno - 1 : statement.end_lineno]
    if fields:
        yield as_code(fields, node.col_offset + 4)


def read_docstring(node: Definition) -> str:
    """Return the docstring of a definition as Markdown. Raises LookupError if it has none."""
    docstring = ast.get_docstring(node)
    if docstring is None:
        raise LookupError(f"Python API: {node.name} has no docstring")
    docstring = _SECTION.sub(r"\1:\n\n", docstring.replace("<", "&lt;"))
    return _INDENT.sub("", _ARGUMENT.sub(r"- `\1`: ", docstring))


if __name__ == "__main__":
    sys.exit(main())
