"""The layers of nmt/, and rules of its code that a parser can check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "nmt"
TEXTS = {p.relative_to(ROOT): p.read_text("utf-8") for p in sorted(ROOT.rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}
ONLY_IN_CLI = {"hydra", "omegaconf"}
NOT_ON_WINDOWS = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
UNIX_SIGNALS = re.compile("SIG(ALRM|CHLD|CONT|HUP|KILL|QUIT|STOP|USR1|USR2)")


def read_layers() -> list[list[str]]:
    """Return the rows of the table in CONTRIBUTING.md: the modules of each layer, from 0."""
    text = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(rows)))
    return [re.findall(r"`nmt/(\w+(?:\.py|/))`", names) for _, names in rows]


def imported_modules(tree: ast.AST) -> set[str]:
    """Return the modules that a module or statement imports; of `nmt` itself the name that is."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            is_root = node.module == "nmt"
            modules |= {f"nmt.{alias.name}" for alias in node.names} if is_root else {node.module}
    return modules


def test_the_table_of_layers_lists_every_module_once() -> None:
    packages = [f"{path.parent.name}/" for path in ROOT.glob("*/__init__.py")]
    modules = [path.name for path in ROOT.glob("*.py") if path.name != "__init__.py"]
    assert sorted(sum(read_layers(), [])) == sorted(packages + modules)


def test_modules_import_only_lower_layers_and_their_own_package() -> None:
    layer_of = {
        re.sub(r"\.py$|/$", "", name): layer
        for layer, names in enumerate(read_layers())
        for name in names
    }
    for path, tree in TREES.items():
        package = path.with_suffix("").parts[0]
        names = [name for name in imported_modules(tree) if name.startswith("nmt.")]
        for name in names if package != "__init__" else []:
            imported = name.split(".")[1]
            if imported in (package, "configs", "__version__"):
                continue
            assert layer_of[imported] < layer_of[package], f"{path} imports {name}"
            assert imported != "config" or name == "nmt.config", f"{path} imports {name}"


def test_no_module_takes_part_in_a_cycle_of_imports() -> None:
    imports = {}
    for path, tree in TREES.items():
        name = ".".join(["nmt", *path.with_suffix("").parts])
        imports[name.removesuffix(".__init__")] = imported_modules(tree)
    while ready := {name for name, needed in imports.items() if not needed & imports.keys()}:
        imports = {name: needed for name, needed in imports.items() if name not in ready}
    assert not imports.keys()


def test_only_the_command_line_imports_hydra() -> None:
    for path, tree in TREES.items():
        packages = {name.split(".")[0] for name in imported_modules(tree)}
        assert path.parts[0] == "cli" or not packages & ONLY_IN_CLI, path


def test_every_module_can_be_imported_on_windows() -> None:
    for path, tree in TREES.items():
        nodes: list[ast.AST] = [tree]
        while nodes:
            node = nodes.pop()
            if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.Try, ast.If)):
                continue  # does not run at import, or is guarded
            nodes += ast.iter_child_nodes(node)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert not imported_modules(node) & NOT_ON_WINDOWS, f"{path}:{node.lineno}"
            is_signal = isinstance(node, ast.Attribute) and UNIX_SIGNALS.fullmatch(node.attr)
            assert not is_signal, f"{path}: {ast.unparse(node)}"


@pytest.mark.slow
def test_modules_and_public_functions_are_documented() -> None:
    for path, tree in TREES.items():
        assert ast.get_docstring(tree), f"{path} has no docstring"
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        private = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.startswith("_")]
        inner = {
            id(node) for outer in functions + private for node in ast.walk(outer) if node != outer
        }
        for node in functions:
            is_private = node.name.startswith("_") or node.name in ("forward", "backward", "check")
            if not (is_private or id(node) in inner or path.name == "__init__.py"):
                assert ast.get_docstring(node), f"{path}: {node.name} has no docstring"


def test_no_leftovers() -> None:
    for path, tree in TREES.items():
        assert not re.search(r"TODO|FIXME|XXX|NotImplementedError", TEXTS[path]), path
        handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
        assert all(handler.type is not None for handler in handlers), f"bare except in {path}"
