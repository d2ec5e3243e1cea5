"""The floors of nmt/, and rules of its code that a parser can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "nmt"
TREES = {p.relative_to(ROOT): ast.parse(p.read_text("utf-8")) for p in sorted(ROOT.rglob("*.py"))}
ONLY_IN_CLI = {"hydra", "omegaconf"}
NOT_ON_WINDOWS = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
UNIX_SIGNALS = re.compile("SIG(ALRM|CHLD|CONT|HUP|KILL|QUIT|STOP|USR1|USR2)")


def floors() -> list[set[str]]:
    """Return the rows of the table in CONTRIBUTING.md: the names in nmt/ on each floor, from 0."""
    text = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(rows)))
    return [set(re.findall(r"`nmt/(\w+(?:\.py|/))`", names)) for _, names in rows]


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
            assert other != "config" or name in ("nmt.config",), f"{path} imports {name}"


def test_only_the_command_line_imports_hydra() -> None:
    for path, tree in TREES.items():
        names = {name.split(".")[0] for name in imports(tree)}
        assert path.parts[0] == "cli" or not names & ONLY_IN_CLI, path


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is imported, on every system: those in functions, and
    those guarded by `try` or `if`, do not.
    """
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda, ast.Try, ast.If)):
            yield child
            yield from at_import(child)


def test_every_module_can_be_imported_on_windows() -> None:
    for path, tree in TREES.items():
        for node in at_import(tree):
            names = set()
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {node.module}
            assert not names & NOT_ON_WINDOWS, f"{path}:{node.lineno} imports {names}"
            is_signal = isinstance(node, ast.Attribute) and UNIX_SIGNALS.fullmatch(node.attr)
            assert not is_signal, f"{path}:{node.lineno} uses {node.attr}"


def test_modules_and_public_functions_are_documented() -> None:
    for path, tree in TREES.items():
        assert ast.get_docstring(tree), f"{path} has no docstring"
        private = [c for c in tree.body if isinstance(c, ast.ClassDef) and c.name.startswith("_")]
        functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
        inner = {id(f) for outer in (*private, *functions) for f in ast.walk(outer) if f != outer}
        for node in functions:
            is_open = node.name.startswith("_") or id(node) in inner or path.name == "__init__.py"
            is_open = is_open or node.name in ("forward", "backward")
            assert is_open or ast.get_docstring(node), f"{path}: {node.name} has no docstring"


def test_no_leftovers() -> None:
    for path, tree in TREES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not re.search(r"TODO|FIXME|XXX|NotImplementedError", text), path
        handlers = [n for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler)]
        assert all(handler.type is not None for handler in handlers), f"bare except in {path}"


# --- limits, for the packages of the toolkit itself; those on top of it get limits of their own

ON_TOP = {"serve", "visualize"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 80
SMALL_FILE_LINES, MAX_SMALL_FILES = 60, 8
TINY_FUNCTION_LINES, MAX_TINY_ONCE = 7, 30
MAX_FILES, MAX_LINES = 95, 12_500


def own() -> dict[Path, str]:
    """Return the text of every module within the limits."""
    return {
        path: (ROOT / path).read_text(encoding="utf-8")
        for path in TREES
        if path.parts[0] not in ON_TOP
    }


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(TREES[path]) if isinstance(node, ast.FunctionDef)]


def num_lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


@pytest.mark.last
def test_files_and_functions_stay_within_their_limits() -> None:
    for path in TREES:
        assert (ROOT / path).read_text("utf-8").count("\n") <= MAX_FILE_LINES, path
        for node in functions(path):
            assert num_lines(node) <= MAX_FUNCTION_LINES, f"{path}: {node.name}"


@pytest.mark.last
def test_the_toolkit_stays_within_its_size() -> None:
    sizes = {path: text.count("\n") for path, text in own().items()}
    assert len(sizes) <= MAX_FILES
    small = [p for p, n in sizes.items() if n < SMALL_FILE_LINES and p.name != "__init__.py"]
    assert len(small) <= MAX_SMALL_FILES, small
    assert sum(sizes.values()) <= MAX_LINES


@pytest.mark.last
def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, Path] = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert places.setdefault(node.name, path) == path, f"{node.name} is in {path} too"


@pytest.mark.last
def test_few_tiny_functions_are_used_once() -> None:
    """A private function that is called once and tiny is mostly better where it is called."""
    tiny = []
    for path, text in own().items():
        for node in functions(path):
            is_private = node.name.startswith("_") and not node.name.startswith("__")
            num_uses = len(re.findall(rf"(?<!\w){re.escape(node.name)}\b", text)) - 1
            if is_private and num_uses == 1 and num_lines(node) < TINY_FUNCTION_LINES:
                tiny.append(f"{path}: {node.name}")
    assert len(tiny) <= MAX_TINY_ONCE, tiny
