"""The site of `make docs` is whole: its links, its search, and its files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from browser import PATIENCE_SECONDS, complaints, needs_browser, requests_of, start_browser
from pages import PAGES, ROOT, import_script
from selenium.common.exceptions import ElementNotInteractableException
from selenium.webdriver.support.ui import WebDriverWait

pytestmark = pytest.mark.slow

SEARCH_ROOT = "[...document.querySelectorAll('*')].map(e => e.shadowRoot).filter(r => r).pop()"


@pytest.fixture(scope="module")
def build_docs() -> ModuleType:
    """The script."""
    return import_script("build_docs")


@pytest.fixture(scope="module")
def site(build_docs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, whose links have been checked."""
    pytest.importorskip("zensical")
    folder: Path = tmp_path_factory.mktemp("docs") / "site"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", ["build_docs.py", f"--output={folder}"])
        assert build_docs.main() == 0
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from start_browser(tmp_path_factory.mktemp("browser"))


def test_every_page_is_in_the_site_and_in_its_navigation(site: Path) -> None:
    navigation = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    for page in PAGES:
        name = (
            page.relative_to(ROOT)
            .as_posix()
            .replace("docs/benchmarks/README", "docs/benchmarks/index")
        )
        html = name.replace(".md", ".html").replace("README", "index")
        assert (site / html).is_file(), html
        entry = "index.md" if name == "README.md" else page.relative_to(ROOT).as_posix()
        assert f'"{entry}"' in navigation, f"zensical.toml: nav lacks {entry}"


def test_broken_links_anchors_and_foreign_files_are_errors(
    build_docs: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top"><a href="b.html#there">fine</a> <a href="b.html#gone">1</a>'
        '<a href="c.html">2</a> <img src="d.png"> <a href="https://example.org/x">fine</a>'
        '<script src="https://example.org/e.js"></script>'
    )
    (tmp_path / "b.html").write_text('<p id="there">')
    assert build_docs.check_links(tmp_path) == [
        "a.html: loads https://example.org/e.js",
        "a.html: b.html#gone has no such anchor",
        "a.html: c.html does not exist",
        "a.html: d.png does not exist",
    ]


@needs_browser
@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.long), 390])
def test_pages_load_only_their_own_files_and_fit_the_screen(
    site: Path, browser: Any, width: int
) -> None:
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    requests_of(browser)
    for name in ("index", "docs/tour", "docs/commands", "docs/results"):
        browser.get(f"{site.as_uri()}/{name}.html")
        page_width = browser.execute_script("return document.documentElement.scrollWidth")
        assert page_width <= width, name
    assert [url for url in requests_of(browser) if url.startswith("http")] == []
    assert complaints(browser) == []
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@needs_browser
def test_the_search_works_for_a_site_that_is_opened_as_files(site: Path, browser: Any) -> None:
    browser.set_window_size(1280, 900)
    browser.get(f"{site.as_uri()}/index.html")
    hits = search_site(browser, "activation checkpointing")
    assert any("docs/questions.html" in hit for hit in hits), hits


@needs_browser
def test_the_search_answers_questions_within_three_hits(site: Path, browser: Any) -> None:
    browser.set_window_size(1280, 900)
    browser.get(f"{site.as_uri()}/index.html")
    questions = (ROOT / "tests/questions.tsv").read_text(encoding="utf-8").splitlines()
    assert len(questions) >= 20
    for line in questions:
        question, answers = line.split("\t")
        hits = search_site(browser, question)
        pages = {hit.removeprefix(f"{site.as_uri()}/").split("?")[0] for hit in hits}
        assert pages & set(answers.split()), f"{question}: {hits}"


def search_site(browser: Any, words: str, count: int = 3) -> list[str]:
    """Enter words into the search of the open page; return the addresses of the first hits."""
    wait = WebDriverWait(
        browser, PATIENCE_SECONDS, ignored_exceptions=[ElementNotInteractableException]
    )
    root = wait.until(lambda _: browser.execute_script(f"return {SEARCH_ROOT}"))
    fields = root.find_elements("css selector", "input")
    if not fields or not fields[0].is_displayed():
        browser.execute_script("document.querySelector('[for=__search]').click()")
        wait.until(lambda _: root.find_element("css selector", "input").is_displayed())
    enter_words(browser, "")
    wait.until(lambda _: not find_hits(browser))
    enter_words(browser, words)  # at once, since a worker searches for each input
    wait.until(lambda _: find_hits(browser))
    return find_hits(browser)[:count]


def enter_words(browser: Any, words: str) -> None:
    """Replace the words in the field of the search."""
    script = f"""
        const field = {SEARCH_ROOT}.querySelector("input");
        field.value = arguments[0];
        field.dispatchEvent(new Event("input", {{bubbles: true}}));
    """
    browser.execute_script(script, words)


def find_hits(browser: Any) -> list[str]:
    """Return the addresses that the search shows."""
    script = f"return [...{SEARCH_ROOT}.querySelectorAll('a')].map((link) => link.href)"
    return list(browser.execute_script(script))
