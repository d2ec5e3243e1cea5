"""The floors of nmt/, and rules of the house that a parser can check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "nmt"
FLOORS = [
    {"errors"},
    {"config", "files", "progress"},
    {"distributed", "evaluate", "data", "model"},
    {"checkpoint", "preprocess", "search"},
    {"translate", "average", "export"},
    {"training", "visualize", "serve"},
    {"cli"},
]
MODULES = sorted(ROOT.rglob("*.py"))
ONLY_IN_CLI = {"hydra", "omegaconf"}


def _room(parts: tuple[str, ...]) -> str:
    return parts[0] if parts else ""


def _imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            module = node.module or ""
            found |= {f"{module}.{a.name}" if module == "nmt" else module for a in node.names}
    return found


def _floor(room: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if room in rooms)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_imports_only_lower_floors_and_its_own_package(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts == ("__init__",):
        return
    room = _room(parts)
    for name in _imports(ast.parse(path.read_text(encoding="utf-8"))):
        if name.startswith("nmt.") and name not in ("nmt.configs", "nmt.__version__"):
            other = name.split(".")[1]
            allowed = other == room or _floor(other) < _floor(room)
            allowed |= (room, other) == ("config", "options")
            assert allowed, f"{path} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_command_line_knows_hydra(path: Path) -> None:
    if path.relative_to(ROOT).parts[0] == "cli":
        return
    names = {name.split(".")[0] for name in _imports(ast.parse(path.read_text(encoding="utf-8")))}
    assert not names & ONLY_IN_CLI


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short_and_documented(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert text.count("\n") <= 450
    assert ast.get_docstring(tree), "a module says what it is for"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, node.name
            public = not node.name.startswith("_") and path.name != "__init__.py"
            hook = node.name in ("forward", "backward") or _is_nested(tree, node)
            assert hook or not public or ast.get_docstring(node), f"{node.name} has no docstring"
            handlers = [n for n in ast.walk(node) if isinstance(n, ast.ExceptHandler)]
            assert all(h.type is not None for h in handlers), f"bare except in {node.name}"


def _is_nested(tree: ast.Module, node: ast.FunctionDef) -> bool:
    """Say whether `node` is a method of a private class, or a function inside another."""
    private = [c for c in tree.body if isinstance(c, ast.ClassDef) and c.name.startswith("_")]
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f is not node]
    return any(node in ast.walk(outer) for outer in (*private, *functions))


def test_no_leftovers() -> None:
    for path in MODULES:
        assert not re.search(r"TODO|FIXME|XXX|NotImplementedError", path.read_text("utf-8")), path
