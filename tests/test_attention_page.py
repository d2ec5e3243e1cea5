"""The attention page, opened from disk in headless Chromium: its maps, its text, its requests."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import (
    PATIENCE_SECONDS,
    complaints,
    move_pointer_away,
    needs_browser,
    requests_of,
    start_browser,
)
from tiny import tiny_model

import nmt
from nmt.config import SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.model.attention import MultiHeadAttention
from nmt.search.stepper import ModelStepper
from nmt.translate.attention import PairAttention
from nmt.translate.translator import Translator
from nmt.visualize.attention_page import render_page

STATIC = Path(nmt.__file__).parent / "serve/static"
HOSTILE = [
    "</script><script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title = 'taken'\"> & \"quotes\" 'single' `back` ${1}",
    "<!-- {{ 7 * 7 }} {% raw %} \\u003c \u2028 line",
    "שלום עולם مرحبا بالعالم",
    "😀 👩‍👩‍👧 你好 ▁ <0x41>",
]


READ_WEIGHTS = """
const pair = readPair(JSON.parse(process.argv[1]));
const { weights } = pair.pick("cross", 0, 0, process.argv[2] === "words");
console.log(JSON.stringify(Array.from(weights)));
"""
READ_MASKS = """
const masks = {};
for (const kind of Object.keys(KIND_TITLES)) {
  const map = new AttentionMap(kind, ["a", "b", "c"], ["a", "b", "c"], new Float32Array(9));
  masks[kind] = [0, 1, 2].map((row) => [0, 1, 2].map((column) => map.isMasked(row, column)));
}
console.log(JSON.stringify(masks));
"""
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node (Debian: nodejs)")


def attention(
    tokenizer: Tokenizer, pairs: list[tuple[str, str]], num_heads: int = 8
) -> list[PairAttention]:
    """Return the attention, with clear preferences, of a model as deep as base but narrow."""
    model = tiny_model(
        1,
        vocab_size=tokenizer.vocab_size,
        num_encoder_layers=6,
        num_decoder_layers=6,
        d_model=32,
        num_heads=num_heads,
    )
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, MultiHeadAttention):
                module.in_projection.weight.mul_(4)
    translator = Translator(ModelStepper(model), tokenizer, SearchConfig())
    return translator.attention([src for src, _ in pairs], [tgt for _, tgt in pairs])


def make_text(tokenizer: Tokenizer, num_tokens: int) -> str:
    """Return a text of `num_tokens`, EOS included."""
    text = "the green house sees a größer tree the"
    while len(tokenizer.encode(text)) < num_tokens - 1:
        text += " the"
    assert len(tokenizer.encode(text)) == num_tokens - 1
    return text


class View:
    """The page in a browser."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.browser = browser
        self.path = path

    def open(self, pairs: list[PairAttention]) -> None:
        """Open the page of pairs and wait until everything is drawn."""
        self.path.write_text(render_page(pairs, "a model"), encoding="utf-8")
        self.browser.get(self.path.as_uri())
        self.wait_until_drawn()
        move_pointer_away(self.browser)

    def wait_until_drawn(self) -> None:
        """Wait until everything of a pair is drawn."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not self.run("return document.querySelector('#attention').dataset.ready"):
            assert time.monotonic() < until
            time.sleep(0.02)

    def seconds(self) -> float:
        """Return the CPU time of the page's process so far."""
        self.browser.execute_cdp_cmd("Performance.enable", {})
        metrics = self.browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return sum(metric["value"] for metric in metrics if metric["name"] == "ProcessTime")

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page."""
        return self.browser.execute_script(script, *arguments)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return list(self.run(script, selector))

    def keys(self, keys: str) -> None:
        self.browser.find_element("css selector", "#attention").send_keys(keys)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    for browser in start_browser(tmp_path_factory.mktemp("browser")):
        browser.set_window_size(1280, 1500)
        yield browser


@pytest.fixture
def view(browser: Any, tmp_path: Path) -> Iterator[View]:
    """The page from disk; in every test, it loads nothing else and logs no errors."""
    requests_of(browser)
    view = View(browser, tmp_path / "attention.html")
    yield view
    assert requests_of(browser) <= {view.path.as_uri()}
    assert not complaints(browser)
    browser.get("about:blank")


@pytest.mark.slow
@needs_browser
def test_pointing_at_a_token_says_what_it_attends_to(view: View, tokenizer: Tokenizer) -> None:
    from selenium.webdriver import ActionChains

    [pair] = attention(tokenizer, [("the green house", "a größer tree")])
    view.open([pair])
    assert view.texts(".tokens.right .token") == pair.predicted
    assert view.texts(".tokens:not(.right) .token") == pair.src
    head_mean = pair.cross[5].mean(dim=0)
    tokens = view.browser.find_elements("css selector", ".tokens.right .token")
    ActionChains(view.browser).move_to_element(tokens[1]).perform()
    best = int(head_mean[1].argmax())
    expected = f"{pair.predicted[1]} attends to {pair.src[best]} {head_mean[1, best]:.2f}"
    assert view.texts(".said")[0].startswith(expected[:-1])  # bytes have no second digit
    canvas = view.browser.find_element("css selector", ".enlarged")
    box = canvas.rect
    x = round(104 + 24 * 2.5 - box["width"] / 2)  # column 2, row 0
    y = round(104 + 24 * 0.5 - box["height"] / 2)
    ActionChains(view.browser).move_to_element_with_offset(canvas, x, y).perform()
    [text] = view.texts(".said")
    assert text.startswith(f"{pair.predicted[0]} attends to {pair.src[2]}: ")
    assert float(text.split(": ")[1]) == pytest.approx(float(head_mean[0, 2]), abs=0.004)
    ActionChains(view.browser).click().move_by_offset(0, 24).perform()  # the click keeps it
    assert view.texts(".said") == [text]
    view.keys("\ue00c")  # Escape
    assert view.texts(".said")[0].startswith("Point at")


@pytest.mark.slow
@needs_browser
def test_clicks_and_keys_choose_kind_layer_and_head(view: View, tokenizer: Tokenizer) -> None:
    [pair] = attention(tokenizer, [("the green house", "größer")])
    view.open([pair])
    assert len(view.texts(".heads button")) == 6 * 9  # and the means of heads
    assert view.texts("h3") == ["Target to source, layer 6, mean of heads"]
    view.browser.find_element("css selector", "[data-layer='2'][data-head='4']").click()
    assert view.texts("h3") == ["Target to source, layer 3, head 5"]
    for keys, title in (
        ("\ue013", "Target to source, layer 2, head 5"),  # up
        ("\ue014", "Target to source, layer 2, head 6"),  # right
        ("\ue014\ue014\ue014", "Target to source, layer 2, head 1"),
        ("2", "Within the source, layer 2, head 1"),
        ("3m", "Within the target, layer 2, mean of heads"),
    ):
        view.keys(keys)
        assert view.texts("h3") == [title]
        pressed = "[...document.querySelectorAll('.heads [aria-pressed=true]')].length"
        assert view.run(f"return {pressed}") == 1
    rows = view.browser.find_elements("css selector", ".tokens.right .token")
    view.run("arguments[0].focus()", rows[0])  # BOS attends only to itself
    assert view.texts(".said") == ["<s> attends to <s> 1.00"]
    colors = view.run(
        """
        const canvas = document.querySelector("[data-layer='0'][data-head='0'] canvas");
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, 1);
        return Array.from({ length: canvas.width }, (_, j) => data.slice(4 * j, 4 * j + 3).join());
        """
    )
    assert len(set(colors[1:])) == 1  # later tokens are gray, not the color of 0
    assert colors[1] not in (colors[0], "255,255,255")


@pytest.mark.long
@needs_browser
def test_several_heads_are_shown_in_colors_of_their_own(view: View, tokenizer: Tokenizer) -> None:
    [pair] = attention(tokenizer, [("the green house", "größer")], num_heads=4)
    view.open([pair])
    view.keys("h")
    assert view.texts("h3") == ["Target to source, layer 6, head 1, head 2, head 3, head 4"]
    assert view.texts(".legend button") == ["head 1", "head 2", "head 3", "head 4"]
    colors = view.run(
        "return [...document.querySelectorAll('.legend button')].map("
        "(button) => getComputedStyle(button).borderTopColor)"
    )
    assert len(set(colors)) == 4
    for head in (0, 2):
        view.browser.find_elements("css selector", ".legend button")[head].click()
    assert view.texts("h3") == ["Target to source, layer 6, head 2, head 4"]
    rows = view.browser.find_elements("css selector", ".tokens.right .token")
    view.run("arguments[0].focus()", rows[0])
    mean = pair.cross[5, [1, 3], 0].mean(dim=0)  # of the heads that are shown
    best = int(mean.argmax())
    expected = f"{pair.predicted[0]} attends to {pair.src[best]} {mean[best]:.2f}"
    assert view.texts(".said")[0].startswith(expected[:-1])  # bytes have no second digit
    view.browser.find_element("css selector", "[data-layer='5'][data-head='0']").click()
    assert view.texts("h3") == ["Target to source, layer 6, head 1, head 2, head 4"]
    view.keys("m")
    assert view.texts("h3") == ["Target to source, layer 6, mean of heads"]
    assert not view.texts(".legend button")


@pytest.mark.slow
@needs_browser
def test_keys_work_from_the_first_moment_and_after_clicks(view: View, tokenizer: Tokenizer) -> None:
    from selenium.webdriver import ActionChains

    def press(keys: str) -> str:
        """Press keys wherever the focus is, and return the title of the enlarged map."""
        ActionChains(view.browser).send_keys(keys).perform()
        [title] = view.texts("h3")
        return title

    def click(selector: str) -> None:
        view.browser.find_elements("css selector", selector)[0].click()

    up = "\ue013"
    view.open(attention(tokenizer, [("the green house", "größer"), ("a tree", "the house")]))
    assert press(up) == "Target to source, layer 5, mean of heads"
    for key, kind in (("2", "Within the source"), ("3", "Within the target")):
        assert press(key) == f"{kind}, layer 5, mean of heads"
    assert press("1" + up) == "Target to source, layer 4, mean of heads"
    layer = 4
    for selector in (
        ".kinds button",
        "[data-layer='2'][data-head='-1']",
        "canvas.enlarged",
        ".token",
        ".choices > button",
        "h1",
    ):
        click(selector)
        layer -= 1 if layer > 1 else -5
        assert press(up) == f"Target to source, layer {layer}, mean of heads", selector
    click(".kinds button")
    focused = "return document.activeElement.value"
    assert view.run(focused) == "cross"
    press("3")
    assert view.run(focused) == "decoder"
    assert press(up).startswith("Within the target")


@pytest.mark.slow
@needs_browser
def test_pieces_are_merged_to_words(view: View, tokenizer: Tokenizer) -> None:
    [pair] = attention(tokenizer, [("the größergreen", "über unbekannt 你")])
    view.open([pair])
    view.keys("w")
    assert view.texts(".tokens:not(.right) .token") == ["the", "größergreen", "</s>"]
    assert view.texts(".tokens.right .token") == ["über", "unbekannt", "你", "</s>"]
    numbers = torch.tensor(pair.as_json()["words"]["predicted"])
    rows = pair.cross[5].mean(dim=0)[numbers == 1].mean(dim=0)  # (S,) of unbekannt
    token = view.browser.find_elements("css selector", ".tokens.right .token")[1]
    view.run("arguments[0].focus()", token)
    [text] = view.texts(".said")
    share = float(text.split("größergreen ")[1].split(",")[0])
    assert share == pytest.approx(float(rows[1:-1].sum()), abs=0.02)


@needs_node
def test_weights_of_words_are_sums_over_columns_and_means_over_rows() -> None:
    pair = {
        "src": ["\u2581the", "\u2581gr", "een"],
        "tgt": ["<s>", "\u2581g", "r\u00fcn"],
        "predicted": ["\u2581g", "r\u00fcn", "</s>"],
        "words": {"src": [0, 1, 1], "tgt": [0, 1, 1], "predicted": [0, 0, 1]},
        "maps": {"cross": {"shape": [1, 1, 3, 3], "data": [51, 102, 102, 153, 51, 51, 255, 0, 0]}},
    }
    script = (STATIC / "attention_maps.js").read_text(encoding="utf-8") + READ_WEIGHTS
    expected = {"pieces": [0.2, 0.4, 0.4, 0.6, 0.2, 0.2, 1, 0, 0], "words": [0.4, 0.6, 1, 0]}
    for unit, weights in expected.items():
        command = ["node", "--eval", script, json.dumps(pair), unit]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert json.loads(output) == pytest.approx(weights), unit


@needs_node
def test_only_later_tokens_of_the_target_are_masked() -> None:
    script = (STATIC / "attention_maps.js").read_text(encoding="utf-8") + READ_MASKS
    output = subprocess.run(["node", "--eval", script], capture_output=True, text=True, check=True)
    masks = json.loads(output.stdout)
    nothing = [[False] * 3] * 3
    later = [[False, True, True], [False, False, True], [False, False, False]]
    assert masks == {"cross": nothing, "encoder": nothing, "decoder": later}


@pytest.mark.slow
@needs_browser
def test_hostile_text_stays_text(view: View, tokenizer: Tokenizer) -> None:
    pairs = attention(tokenizer, [(line, line[::-1]) for line in HOSTILE])
    view.open(pairs)
    for i, pair in enumerate(pairs):
        view.run(
            """
            delete document.querySelector('#attention').dataset.ready;
            const select = document.querySelector('select');
            select.value = arguments[0];
            select.dispatchEvent(new Event('change'));
            """,
            i,
        )
        view.wait_until_drawn()
        assert view.texts(".tokens:not(.right) .token") == pair.src, HOSTILE[i]
    assert view.run("return document.title").startswith("Attention: ")
    counts = "[document.scripts.length, document.images.length]"
    assert view.run(f"return {counts}") == [2, 0]


@pytest.mark.long
@needs_browser
def test_base_is_drawn_in_a_second_and_big_stays_usable(view: View, tokenizer: Tokenizer) -> None:
    from selenium.webdriver import ActionChains

    for num_tokens, heads, most_bytes, most_seconds in ((30, 8, 300e3, 1), (100, 16, 6e6, 4)):
        line = make_text(tokenizer, num_tokens)
        pairs = attention(tokenizer, [(line, line)], heads)
        start = view.seconds()
        view.open(pairs)
        assert view.path.stat().st_size <= most_bytes, num_tokens
        assert 0 < view.seconds() - start < most_seconds, num_tokens
        token = view.browser.find_elements("css selector", ".tokens.right .token")[3]
        start = view.seconds()
        ActionChains(view.browser).move_to_element(token).perform()
        assert " attends to " in view.texts(".said")[0]
        assert view.seconds() - start < 2, num_tokens


@pytest.mark.slow
def test_pages_hold_the_pairs_and_load_nothing(tokenizer: Tokenizer) -> None:
    pairs = attention(tokenizer, [(line, line) for line in HOSTILE])
    page = render_page(pairs, "a </title> model")
    start = page.index('id="pairs">') + len('id="pairs">')
    content = json.loads(page[start : page.index("</script>", start)])
    assert content == [pair.as_json() for pair in pairs]
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
