"""The floors of nmt/, and rules of its code that a parser can check."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "nmt"
TEXTS = {p.relative_to(ROOT): p.read_text("utf-8") for p in sorted(ROOT.rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}
ONLY_IN_CLI = {"hydra", "omegaconf"}
NOT_ON_WINDOWS = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
UNIX_SIGNALS = re.compile("SIG(ALRM|CHLD|CONT|HUP|KILL|QUIT|STOP|USR1|USR2)")


def floors() -> list[set[str]]:
    """Return the rows of the table in CONTRIBUTING.md: the names in nmt/ on each floor, from 0."""
    text = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(rows)))
    return [set(re.findall(r"`nmt/(\w+(?:\.py|/))`", names)) for _, names in rows]


@functools.cache
def imports(tree: ast.AST) -> set[str]:
    """Return the modules that a module imports, those of nmt with the name that is taken."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            module = node.module or ""
            found |= {f"{module}.{a.name}" if module == "nmt" else module for a in node.names}
    return found


def test_the_table_of_floors_lists_what_is_in_nmt_and_each_once() -> None:
    listed = [name for names in floors() for name in sorted(names)]
    there = {f"{p.name}/" for p in ROOT.iterdir() if (p / "__init__.py").exists()}
    there |= {p.name for p in ROOT.glob("*.py") if p.name != "__init__.py"}
    assert sorted(listed) == sorted(there)


def test_modules_import_only_lower_floors_and_their_own_package() -> None:
    floor = {re.sub(r"\.py$|/$", "", name): i for i, row in enumerate(floors()) for name in row}
    for path, tree in TREES.items():
        own = path.with_suffix("").parts[0]
        for name in imports(tree):
            other = name.split(".")[1] if name.startswith("nmt.") else None
            if own == "__init__" or other in (None, own, "configs", "__version__"):
                continue
            assert floor[other] < floor[own], f"{path} imports {name}"
            assert other != "config" or name == "nmt.config", f"{path} imports {name}"


def test_only_the_command_line_imports_hydra() -> None:
    for path, tree in TREES.items():
        names = {name.split(".")[0] for name in imports(tree)}
        assert path.parts[0] == "cli" or not names & ONLY_IN_CLI, path


def test_every_module_can_be_imported_on_windows() -> None:
    for path, tree in TREES.items():
        nodes: list[ast.AST] = [tree]
        while nodes:
            node = nodes.pop()
            if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.Try, ast.If)):
                continue  # does not run when the module is imported, or is guarded
            nodes += ast.iter_child_nodes(node)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert not imports(node) & NOT_ON_WINDOWS, f"{path}:{node.lineno}"
            is_signal = isinstance(node, ast.Attribute) and UNIX_SIGNALS.fullmatch(node.attr)
            assert not is_signal, f"{path}: {ast.unparse(node)}"


@functools.cache
def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.slow
def test_modules_and_public_functions_are_documented() -> None:
    for path, tree in TREES.items():
        assert ast.get_docstring(tree), f"{path} has no docstring"
        private = [c for c in tree.body if isinstance(c, ast.ClassDef) and c.name.startswith("_")]
        outer = [*private, *functions(tree)]
        inner = {id(f) for node in outer for f in ast.walk(node) if f != node}
        for node in functions(tree):
            is_open = node.name.startswith("_") or id(node) in inner or path.name == "__init__.py"
            is_open = is_open or node.name in ("forward", "backward")
            assert is_open or ast.get_docstring(node), f"{path}: {node.name} has no docstring"


def test_no_leftovers() -> None:
    for path, tree in TREES.items():
        assert not re.search(r"TODO|FIXME|XXX|NotImplementedError", TEXTS[path]), path
        handlers = [n for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler)]
        assert all(handler.type is not None for handler in handlers), f"bare except in {path}"
