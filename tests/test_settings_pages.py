"""The pages of the reference are current: every setting of every command in docs/settings/, the
Python interface in docs/api/, and the errors in docs/errors.md.
"""

from __future__ import annotations

import inspect
import re
from types import ModuleType

import pytest
from pages import ROOT, import_script

import nmt
from nmt import errors
from nmt.cli.arguments import read_arguments
from nmt.cli.commands import COMMANDS
from nmt.config import Range


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The script that writes docs/settings/."""
    return import_script("reference")


@pytest.fixture(scope="module")
def api() -> ModuleType:
    """The script that writes docs/api/."""
    return import_script("api")


def read_page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_a_command_is_current_and_names_every_setting(
    reference: ModuleType, name: str
) -> None:
    page = read_page(f"settings/{name}.md")
    for setting in COMMANDS[name].settings:
        assert page.count(f"| `{setting.key}` |") == 1
    assert page == reference.render_page(COMMANDS[name]), "run python scripts/reference.py"


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (Range(low=0, below=1), "≥ 0, &lt; 1"),
        (Range(above=0), "> 0"),
        (Range(low=1, high=1000), "≥ 1, ≤ 1,000"),
        (Range(), ""),
    ],
)
def test_ranges_are_shown_as_signs(reference: ModuleType, bounds: Range, text: str) -> None:
    assert reference.describe_range(bounds) == text


def test_the_pages_of_the_python_interface_are_current(api: ModuleType) -> None:
    for name in api.PAGES:
        assert read_page(f"api/{name}.md") == api.render_page(name), "run python scripts/api.py"


def test_the_python_interface_has_all_names_that_are_imported_from_nmt_and_all_methods(
    api: ModuleType,
) -> None:
    text = "".join(api.render_page(name) for name in api.PAGES)
    for name in dir(nmt):
        assert name.startswith("__") or f"## `nmt.{name}`\n" in text
    methods = re.findall(r"^\| `(?:Translator)?\.(\w+)\(", read_page("python.md"), re.MULTILINE)
    assert len(methods) == 6
    for method in methods:
        assert f"### `Translator.{method}`\n" in text


def test_every_exception_and_exit_status_is_explained() -> None:
    page = read_page("errors.md")
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, Exception):
            assert f"| `{name}` |" in page, name
        elif name.startswith("EXIT_"):
            assert f"\n| {value} | " in page, name


def test_the_explained_messages_are_those_of_the_code() -> None:
    page = read_page("errors.md")
    [arguments, message] = re.findall(r"^(?:\$ )?nmt-train(?:: | )(.+)$", page, re.MULTILINE)
    with pytest.raises(errors.ConfigError) as error:
        read_arguments([arguments], COMMANDS["train"])
    assert message == str(error.value)
    code = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "nmt").rglob("*.py")))
    code = re.sub(r"['\"]\s*\n\s*f?['\"]", "", code)  # join literals that span several lines
    rows = re.findall(r"^\| (`.*?`) \| ", page[page.index("## Messages") :], re.MULTILINE)
    assert len(rows) > 50
    for explained in re.findall(r"`([^`]+)`", " ".join(rows)):
        assert is_in_code(explained, code), explained


def is_in_code(message: str, code: str) -> bool:
    """Return whether the parts of a message between `...` are in the code near each other."""
    fragments = message.split("...")
    pattern = re.compile("[^\n]{0,200}?".join(map(re.escape, fragments)))
    longest = max(fragments, key=len)
    start = code.find(longest)
    while start >= 0:
        if pattern.search(code, max(start - 300, 0), start + 300):
            return True
        start = code.find(longest, start + 1)
    return False
