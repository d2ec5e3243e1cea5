"""The translation page, driven in headless Chromium as a person would use it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import (
    PATIENCE_SECONDS,
    complaints,
    move_pointer_away,
    needs_browser,
    requests_of,
    start_browser,
)
from serving import GOOD, Running, copying, loaded, running, tiny_folder

from nmt.data.tokenizer import Tokenizer
from nmt.serve.models import Models

pytestmark = [pytest.mark.slow, needs_browser]


class Page:
    """The page in a browser."""

    def __init__(self, browser: Any, server: Running) -> None:
        self.browser = browser
        self.server = server

    def open(self, path: str = "/") -> None:
        self.browser.get(f"http://127.0.0.1:{self.server.port}{path}")
        if path == "/":
            self.until("document.body.dataset.ready === 'true'")
        move_pointer_away(self.browser)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def until(self, claim: str) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not self.run(f"return {claim}"):
            assert time.monotonic() < until, (claim, self.text("output"), self.text("error"))
            time.sleep(0.02)

    def find(self, id: str) -> Any:
        return self.browser.find_element("id", id)

    def text(self, id: str) -> str:
        return str(self.run("return document.getElementById(arguments[0]).textContent", id))

    def type_at_once(self, text: str) -> None:
        """Type into the input field, so fast that the page cannot translate the first words."""
        script = """
            document.getElementById('input').focus();
            for (const character of arguments[0]) {
                document.execCommand('insertText', false, character);
            }
        """
        self.run(script, text)

    def until_output(self, text: str) -> None:
        self.until(f"document.getElementById('output').textContent === {json.dumps(text)}")
        self.until("!document.getElementById('output').classList.contains('stale')")

    def requests(self) -> set[str]:
        """Return the addresses asked for since the last call."""
        return requests_of(self.browser)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from start_browser(tmp_path_factory.mktemp("browser"))


@pytest.fixture
def page(browser: Any, tokenizer: Tokenizer) -> Iterator[Page]:
    """The page of a server that gives texts back.

    After each test, the console has no errors, and the page has sent no request elsewhere.
    """
    models, engine = copying(tokenizer)
    two_way = Models({**models.directions, ("yy", "xx"): models.directions["xx", "yy"]})
    with running(two_way) as server:
        page = Page(browser, server)
        browser.get("about:blank")  # else the page of the test before may send a request
        page.requests()
        browser.get_log("browser")
        page.engine = engine  # type: ignore[attr-defined]
        page.open()
        yield page
        assert all(url.startswith(f"http://127.0.0.1:{server.port}/") for url in page.requests())
        assert not complaints(browser)
        page.run("localStorage.clear()")
        browser.get("about:blank")


def test_it_translates_as_one_types_and_the_newest_answer_wins(page: Page) -> None:
    field = page.find("input")
    page.type_at_once("the house <b>is</b>")
    page.until_output("the house <b>is</b>")  # as text, never as markup
    assert page.run("return document.querySelectorAll('#output b').length") == 0
    count_before = page.server.metric('nmt_requests_total{method="POST",route="/v1/translate"')
    page.type_at_once(" a small green tree")
    page.until_output("the house <b>is</b> a small green tree")
    count_after = page.server.metric('nmt_requests_total{method="POST",route="/v1/translate"')
    assert count_after - count_before == 1  # when the keys have stopped
    page.engine.gate.clear()  # type: ignore[attr-defined]
    page.engine.entered.clear()  # type: ignore[attr-defined]
    field.clear()
    field.send_keys("the")
    assert page.engine.entered.wait(PATIENCE_SECONDS)  # type: ignore[attr-defined]
    field.send_keys(" tree")
    time.sleep(0.5)
    page.engine.gate.set()  # type: ignore[attr-defined]
    page.until_output("the tree")
    page.find("clear").click()
    page.until_output("")


def test_languages_are_swapped_by_button_and_keyboard(page: Page) -> None:
    page.find("input").send_keys("the tree")
    page.until_output("the tree")
    values = "[document.getElementById('source').value, document.getElementById('target').value]"
    assert page.run(f"return {values}") == ["xx", "yy"]
    page.find("swap").click()
    page.until(f"{values}.join() === 'yy,xx'")
    page.find("input").send_keys("\ue00as")  # Alt+S
    page.until(f"{values}.join() === 'xx,yy'")
    page.open()
    assert page.run(f"return {values}") == ["xx", "yy"]


def test_words_that_go_together_light_up(page: Page) -> None:
    page.find("input").send_keys("the green house. The tree")
    page.until_output("the green house. The tree")
    page.run("document.getElementById('alignment-box').open = true")
    words = page.browser.find_elements("css selector", "#alignment .words:first-child .word")
    assert [word.text for word in words] == ["the", "green", "house.", "The", "tree"]
    # Focused again each time: a translation of the first words may have been shown until now, and
    # a pointer that an earlier test left over the words takes the marks away
    word = "document.querySelectorAll('#alignment .words:first-child .word')[1]"
    focus = f"{word}.blur(), {word}.focus()"
    lit = "[...document.querySelectorAll('#alignment .lit')].map((w) => w.textContent).join()"
    page.until(f"({focus}, {lit}) === 'green,green'")
    assert words[1].get_attribute("aria-label") == "green: goes with green"
    page.until(f"({word}.blur(), {lit}) === ''")
    from selenium.webdriver import ActionChains

    ActionChains(page.browser).move_to_element(words[4]).perform()
    page.until(f"{lit}.includes('tree,tree')")


def test_an_engine_without_attention_maps_shows_its_alignment(page: Page) -> None:
    page.find("input").send_keys("the house")
    page.until_output("the house")
    page.run("document.getElementById('attention-box').open = true")
    dark = """
        const canvas = document.querySelector('#attention .enlarged');
        if (!canvas?.height) return null;
        const pen = canvas.getContext('2d'), scale = window.devicePixelRatio || 1;
        const all = pen.getImageData(0, 0, canvas.width, canvas.height);
        const place = (k) => Math.round((104 + 24 * k + 12) * scale);
        const from = (i, j) => 4 * (place(i) * canvas.width + place(j));
        const at = (i, j) => all.data.slice(from(i, j), from(i, j) + 3).join();
        return [at(0, 0), at(1, 1), at(0, 1), at(1, 0)];
    """
    page.until("document.querySelector('#attention [data-ready]') !== null")
    accent, diagonal, paper, below = page.run(dark)
    assert (accent, paper) == (diagonal, below)
    assert accent != paper
    assert page.run("return document.querySelector('#attention .heads').hidden")
    canvas = page.browser.find_element("css selector", "#attention .enlarged")
    assert canvas.get_attribute("aria-label") == ": a map of 2 rows and 3 columns"


def test_the_attention_of_any_layer_and_head_can_be_chosen(
    browser: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with running(loaded(tiny_folder(tmp_path / "model", tokenizer))) as server:
        page = Page(browser, server)
        page.open()
        page.type_at_once("the house. A tree")
        page.until("document.getElementById('output').textContent !== ''")
        page.run("document.getElementById('attention-box').open = true")
        page.until("document.querySelector('#attention [data-ready=\"0\"]') !== null")
        picture = "document.querySelector('#attention .enlarged').toDataURL()"
        seen = {page.run(f"return {picture}")}
        for selector in ("[data-layer='0'][data-head='1']", "[value=encoder]", "[value=decoder]"):
            page.run(f'document.querySelector("#attention button{selector}").click()')
            page.until(f"!{json.dumps(sorted(seen))}.includes({picture})")
            seen.add(page.run(f"return {picture}"))
        assert len(seen) == 4
        page.run(
            """
            const select = document.querySelector('#attention select');
            select.value = 1;
            select.dispatchEvent(new Event('change', {bubbles: true}));
            """
        )
        page.until("document.querySelector('#attention [data-ready=\"1\"]') !== null")
        page.run("localStorage.clear()")


def test_terms_of_the_page_and_glossaries_of_the_server_are_kept(
    browser: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    glossaries = tmp_path / "glossaries"
    glossaries.mkdir()
    (glossaries / "houses.tsv").write_text("house\ttree\n", encoding="utf-8")
    models = loaded(tiny_folder(tmp_path / "model", tokenizer))
    with running(models, glossaries=str(glossaries)) as server:
        page = Page(browser, server)
        page.open()
        page.type_at_once("the house")
        page.until("document.getElementById('output').textContent !== ''")
        plain = page.text("output")
        assert "über" not in plain
        assert "tree" not in plain
        page.run("document.getElementById('glossary-box').open = true")
        page.find("glossary-terms").send_keys("house = über")
        page.until("document.getElementById('output').textContent.includes('über')")
        set_terms = """
            const terms = document.getElementById('glossary-terms');
            terms.value = arguments[0];
            terms.dispatchEvent(new Event('input'));
        """
        page.run(set_terms, "")
        page.until_output(plain)
        page.run(
            """
            const select = document.getElementById('glossary-name');
            select.value = 'houses';
            select.dispatchEvent(new Event('change'));
            """
        )
        page.until("document.getElementById('output').textContent.includes('tree')")
        page.run(set_terms, "house")
        page.until("!document.getElementById('error').hidden")
        assert page.text("error").endswith("source = translation, not: house")
        page.run("localStorage.clear()")


def test_a_word_of_the_translation_offers_others_and_what_follows_is_translated_again(
    browser: Any, trained_model_dir: Path
) -> None:
    with running(loaded(trained_model_dir)) as server:
        page = Page(browser, server)
        page.open()
        page.type_at_once("the house\na small tree")
        text = server.translate("the house\na small tree")
        page.until_output(text)
        first_line, second_line = text.split("\n")
        words = page.browser.find_elements("css selector", "#output .choice")
        assert [word.text for word in words] == text.split()
        assert [word.get_attribute("tabindex") for word in words].count("0") == 1
        index = len(first_line.split()) + 1  # the second word of the second line
        words[index].click()
        items = "document.querySelectorAll('#choices [role=menuitem]:not([aria-disabled])')"
        page.until(f"{items}.length >= 2")
        assert words[index].get_attribute("aria-expanded") == "true"
        offered = page.run(f"return [...{items}].map((item) => item.firstChild.textContent)")
        assert len(set(offered)) == len(offered)
        assert words[index].text not in offered
        continuation = page.run(f"return {items}[1].lastChild.textContent")
        page.run("arguments[0].focus()", page.run(f"return {items}[0]"))
        page.browser.switch_to.active_element.send_keys("\ue015")  # arrow down
        page.browser.switch_to.active_element.send_keys("\ue007")  # enter
        prefix = f"{second_line.split()[0]} {offered[1]}"
        expected = f"{first_line}\n{prefix}{continuation}"
        page.until(f"document.getElementById('output').textContent === {json.dumps(expected)}")
        assert page.run("return document.getElementById('choices').hidden")
        focused = page.run("return document.activeElement.textContent")
        assert focused == offered[1]
        assert expected in page.text("history")
        answer = server.post("/v1/translate", text="a small tree", prefix=prefix, **GOOD)
        assert answer.json["translations"][0]["text"] == prefix + continuation
        page.run("localStorage.clear()")


def test_the_words_of_the_translation_are_reached_by_keyboard(
    browser: Any, trained_model_dir: Path
) -> None:
    with running(loaded(trained_model_dir)) as server:
        page = Page(browser, server)
        page.open()
        page.type_at_once("the small tree")
        text = server.translate("the small tree")
        page.until_output(text)
        assert len(text.split()) == 3
        words = page.browser.find_elements("css selector", "#output .choice")
        words[0].send_keys("\ue014")  # arrow right
        page.browser.switch_to.active_element.send_keys("\ue014")
        assert page.browser.switch_to.active_element == words[2]
        words[2].send_keys("\ue011")  # home
        assert page.browser.switch_to.active_element == words[0]
        words[0].send_keys("\ue007")  # enter
        page.until("document.activeElement.getAttribute('role') === 'menuitem'")
        assert page.find("choices").get_attribute("aria-label") == f"Instead of {words[0].text}"
        page.browser.switch_to.active_element.send_keys("\ue00c")  # escape
        assert page.run("return document.getElementById('choices').hidden")
        assert page.browser.switch_to.active_element == words[0]
        page.run("localStorage.clear()")


def test_history_stays_in_the_browser_and_can_be_deleted(page: Page) -> None:
    page.find("input").send_keys("the tree")
    page.until_output("the tree")
    page.open()
    assert "the tree" in page.text("history")
    page.run("document.getElementById('history-box').open = true")
    page.browser.find_element("css selector", "#history button").click()
    page.until_output("the tree")
    page.find("forget").click()
    assert page.run("return document.getElementById('history').children.length") == 0


def test_a_file_is_uploaded_and_fetched(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("the house\nthe tree\n" * 300)
    page.find("tab-text").send_keys("\ue014")  # arrow right
    page.until("!document.getElementById('panel-file').hidden")
    page.find("file").send_keys(str(path))
    page.browser.find_element("css selector", "#file-form [type=submit]").click()
    page.until("!document.getElementById('download').hidden")
    assert page.text("download") == "Download lines_yy.txt"
    link = page.run("return document.getElementById('download').getAttribute('href')")
    assert page.server.get(link).body == path.read_bytes()


def test_it_fits_phones_and_desktops_in_light_and_dark(page: Page) -> None:
    page.find("input").send_keys("the green house")
    page.until_output("the green house")
    backgrounds = set()
    for width in (360, 1280):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
            backgrounds.add(page.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_every_control_has_a_name(page: Page) -> None:
    nameless = page.run("""
        return [...document.querySelectorAll('button, select, textarea, input')]
            .filter((e) => !e.textContent.trim() && !e.ariaLabel && !e.labels?.length)
            .map((e) => e.id);
    """)
    assert nameless == []


def test_the_page_of_the_api_lists_every_route(page: Page) -> None:
    page.open("/docs")
    page.until("document.querySelectorAll('#routes details').length > 5")
    routes = "document.getElementById('routes').textContent"
    for path in page.server.get("/spec").json["paths"]:
        page.until(f"{routes}.includes({json.dumps(path)})")
