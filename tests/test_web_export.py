"""The page of format=web: its tokenizer against SentencePiece's, and all in headless Chromium."""

from __future__ import annotations

import functools
import http.server
import io
import itertools
import json
import random
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from browser import PATIENCE_SECONDS, complaints, needs_browser, requests_of, start_browser
from exporting import HOSTILE, exported, random_model, short_sentences, trained_model
from npm import needs_node, run_script, unpack_package
from serving import change_config
from tiny import sentences

from nmt.config import Decoder, ExportConfig, ExportFormat, Quantization
from nmt.data.text import replace_line_breaks
from nmt.data.tokenizer import MappedTokenizer, Tokenizer, TokenizerPair, Vocabulary
from nmt.errors import ConfigError, ModelError
from nmt.export.export_model import export_model
from nmt.export.web import _write_file_list, read_vocabulary
from nmt.translate.long_lines import split_line
from nmt.translate.results import Translation
from nmt.translate.translator import Translator

POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; worker-src 'self'; manifest-src 'self'; base-uri 'none'"
)
ALPHABET = [
    *map(chr, range(32, 0x250)),
    *map(chr, range(0x300, 0x370)),  # combining marks
    *map(chr, range(0x3040, 0x3100)),
    *map(chr, range(0x4E00, 0x4E80)),
    *"\u200b\u200d\u3000\ufeff\u2581😀👨가\u1100\u1161①ﬁＡ\u212b\u1e9b\u0323",
]


TOKENIZE = """
import fs from "node:fs";
import { Tokenizer } from "./tokenizer.js";
const { vocabulary, lines, rows } = JSON.parse(fs.readFileSync(0));
const tokenizer = new Tokenizer(vocabulary);
const ids = lines.map((line) => tokenizer.encode(line));
console.log(JSON.stringify({ ids, texts: rows.map((row) => tokenizer.decode(row)) }));
"""


def train(**options: Any) -> Tokenizer:
    """Train a SentencePiece model on sentences with some rare characters."""
    model = io.BytesIO()
    options = {"model_type": "bpe", "vocab_size": 400, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*sentences(300), "Ärger Ölförderung naïve café 12,50 € カナ 漢字"]),
        model_writer=model,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return Tokenizer(model.getvalue())


@needs_node
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=pytest.mark.slow if is_in_ci else pytest.mark.long)
        for options, is_in_ci in (
            ({"byte_fallback": True}, True),
            ({"model_type": "unigram", "byte_fallback": True}, False),
            ({"model_type": "unigram", "user_defined_symbols": ["<2de>", "<sep>", "the"]}, True),
            ({"user_defined_symbols": ["<2de>"], "remove_extra_whitespaces": False}, False),
            ({"normalization_rule_name": "identity", "add_dummy_prefix": False}, False),
            ({"model_type": "unigram", "treat_whitespace_as_suffix": True}, False),
            ({"normalization_rule_name": "nmt_nfkc_cf"}, False),
        )
    ],
    ids=str,
)
def test_2000_lines_have_the_ids_of_sentencepiece_and_ids_its_text(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    tokenizer = train(**options)
    draw = random.Random(1)
    lines = [*HOSTILE, "", " ", "  a", "a  b ", "\u3000x\u3000", "<2de> the <sep><2de>"]
    lines += sentences(1000)
    while len(lines) < 2000:
        lines.append("".join(draw.choices(ALPHABET, k=draw.randint(1, 30))))
    lines = [replace_line_breaks(line) for line in lines]
    ids = [tokenizer.encode(line) for line in lines]
    rows = list(ids)
    for _ in range(1000):
        rows.append(draw.choices(range(tokenizer.vocab_size), k=draw.randint(0, 12)))
        rows.append(draw.choices(tokenizer.byte_ids or [1], k=draw.randint(1, 6)))
    data = {"vocabulary": read_vocabulary(tokenizer), "lines": lines, "rows": rows}
    result = run_script(tmp_path, TOKENIZE, data)
    assert result["ids"] == ids
    assert result["texts"] == [tokenizer.decode(row) for row in rows]


SPLIT = """
import fs from "node:fs";
import { splitLine, splitText } from "./sentences.js";
import { Tokenizer } from "./tokenizer.js";
const { vocabulary, texts, lines, max } = JSON.parse(fs.readFileSync(0));
const tokenizer = new Tokenizer(vocabulary);
const encode = (line) => tokenizer.encode(line);
const parts = lines.map((line) => splitLine(line, max, encode));
console.log(JSON.stringify({ texts: texts.map(splitText), parts }));
"""


@needs_node
@pytest.mark.slow
def test_texts_and_long_lines_are_split_as_by_the_server(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    from nmt.documents.texts import parse_plain_text

    texts = [
        "One. Two!  Three?\n\n Four, e.g. this. “Five.” Six",
        "第一句。第二句！（三）。 End",
        "\n  \n",
        "no end",
    ]
    draw = random.Random(3)
    lines = [*texts, "x" * 500, "漢字、" * 90]
    for _ in range(100):
        words = draw.choices([*sentences(30), "a, b; c", "z." * 9, "(d). ", "—"], k=30)
        lines.append(draw.choice([" ", "", ", "]).join(words))
    lines = [replace_line_breaks(line) for line in lines]
    max_tokens = 20
    data = {
        "vocabulary": read_vocabulary(tokenizer),
        "texts": texts,
        "lines": lines,
        "max": max_tokens,
    }
    result = run_script(tmp_path, SPLIT, data)
    for text, split in zip(texts, result["texts"], strict=True):
        expected = parse_plain_text(text)
        assert split == {"sentences": expected.sentences, "gaps": expected.gaps}
    for line, line_parts in zip(lines, result["parts"], strict=True):
        assert line_parts == split_line(line, max_tokens, tokenizer.encode_batch)


@pytest.fixture(scope="session")
def npm_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked npm packages that the page and its tests need."""
    folder = tmp_path_factory.mktemp("npm")
    unpack_package("onnxruntime-web@1.30.0", folder)
    unpack_package("axe-core@4.14.1", folder)
    return folder


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files with the policy of the page, which then also holds in the worker."""

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class StaticServer:
    """A web server for the files of a folder; it can be stopped and started on the same port."""

    def __init__(self, folder: Path) -> None:
        self._make_handler = functools.partial(Handler, directory=str(folder))
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start to serve."""
        address = ("127.0.0.1", self.port)
        self._server = http.server.ThreadingHTTPServer(address, self._make_handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Stop, so that connections are refused."""
        self._server.shutdown()
        self._server.server_close()


class WebPage:
    """The exported page in a browser."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser = browser
        self.url = url
        self.open()

    def open(self) -> None:
        """Load the page, and wait until the model is loaded."""
        self.browser.get(self.url)
        self.wait_for("document.body.dataset.ready === 'true'")

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page."""
        return self.browser.execute_script(script, *arguments)

    def wait_for(self, claim: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until an expression of JavaScript is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"return {claim}"):
            message = self.run("return document.getElementById('error')?.textContent")
            assert time.monotonic() < deadline, (claim, message)
            time.sleep(0.02)

    def translate(self, text: str) -> str:
        """Replace the text of the input field, and return the translation."""
        self.run(
            """
            const input = document.getElementById("input");
            input.value = arguments[0];
            input.dispatchEvent(new Event("input"));
            document.getElementById("output").classList.add("stale");
            """,
            text,
        )
        self.wait_for("!document.getElementById('output').classList.contains('stale')")
        return str(self.run("return document.getElementById('output').textContent"))

    def choose(self, element: str, value: int) -> None:
        """Choose an option of a select element."""
        self.run(
            """
            const select = document.getElementById(arguments[0]);
            select.value = arguments[1];
            select.dispatchEvent(new Event("change"));
            """,
            element,
            value,
        )

    def translate_file(self, path: Path, downloads: Path) -> str:
        """Translate a file by the page's file chooser; return the text of the download."""
        download = downloads / f"{path.stem}.yy{path.suffix}"
        download.unlink(missing_ok=True)
        self.run("document.getElementById('download').hidden = true")
        self.browser.find_element("id", "file").send_keys(str(path))
        self.wait_for("!document.getElementById('download').hidden")
        self.browser.find_element("id", "download").click()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not download.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return download.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def browser(downloads: Path) -> Iterator[Any]:
    yield from start_browser(downloads)


@pytest.fixture
def open_page(
    tmp_path: Path, browser: Any, npm_packages: Path
) -> Iterator[Callable[..., tuple[WebPage, StaticServer]]]:
    """A function that exports a model and opens its page, in a subfolder of a web server.

    In the end, no page has written to the console or asked another address.
    """
    server = StaticServer(tmp_path)
    requests_of(browser)
    browser.get_log("browser")

    def export_and_open(model: Path, **options: Any) -> tuple[WebPage, StaticServer]:
        runtime = str(npm_packages / "onnxruntime-web")
        config = ExportConfig(format=ExportFormat.web, runtime=runtime, **options)
        folder = tmp_path / f"site/{model.name}-{config.quantization.value}"
        folder.parent.mkdir(exist_ok=True)
        export_model(model, folder, config)
        url = f"http://127.0.0.1:{server.port}/{folder.relative_to(tmp_path).as_posix()}/"
        return WebPage(browser, url), server

    yield export_and_open
    urls = requests_of(browser)
    assert urls
    own_urls = (f"http://127.0.0.1:{server.port}/", "blob:")
    assert [url for url in urls if not url.startswith(own_urls)] == []
    assert not complaints(browser)
    browser.get("about:blank")
    server.stop()


def search_greedily(folder: Path, tokenizer: Tokenizer, line: str) -> str:
    """Translate a line with the models of an export in ONNX Runtime for Python."""
    onnxruntime = pytest.importorskip("onnxruntime")
    encoder = onnxruntime.InferenceSession(folder / "model/encoder.onnx")
    decoder = onnxruntime.InferenceSession(folder / "model/decoder.onnx")
    ids = tokenizer.encode(line)
    source = np.array([[*ids, tokenizer.eos_id]])
    mask = np.ones(source.shape, dtype=bool)
    keys, values = encoder.run(None, {"source": source, "source_mask": mask})
    inputs = {"source_mask": mask, "source_keys": keys, "source_values": values}
    inputs |= {"past_keys": keys[:, :, :, :0], "past_values": values[:, :, :, :0]}
    tokens = [tokenizer.bos_id]
    while tokens[-1] != tokenizer.eos_id and len(tokens) < len(ids) + 50:
        inputs["tokens"] = np.array(tokens[-1:])
        names = ["log_probs", "keys", "values"]
        log_probs, inputs["past_keys"], inputs["past_values"] = decoder.run(names, inputs)
        tokens.append(int(log_probs.argmax()))
    return tokenizer.decode(tokens)


@needs_browser
@needs_node
def test_the_page_translates_what_is_typed(
    open_page: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = random_model(tmp_path / "model", tokenizer, seed=3)
    page, _ = open_page(model, quantization=Quantization.float32)
    translator = Translator.load(model, device="cpu", backend="native")
    page.choose("beam", 1)
    for line in ("the house", "THE SMALL GREEN TREE"):
        assert page.translate(line) == translator.translate([line], beam_size=1)[0]


@needs_browser
@needs_node
@pytest.mark.slow
def test_the_page_gives_the_text_of_native_search(
    open_page: Any, trained_models: dict[str, Path], tmp_path: Path, downloads: Path
) -> None:
    capitals = ["THE GREEN HOUSE", "The Small Green Tree", "the house 😀", "http://a.b/c a@b.cd"]
    lines = [*short_sentences(15), *HOSTILE, *capitals, "", "the " * 300]
    lines = [replace_line_breaks(line) for line in lines]
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for model in trained_models.values():
        page, _ = open_page(model)
        translator = Translator.load(model, device="cpu", backend="native")
        for beam_size in (1, 4):
            page.choose("beam", beam_size)
            translations = page.translate_file(path, downloads).split("\n")
            assert translations == [*translator.translate(lines, beam_size=beam_size), ""]


@needs_browser
@needs_node
@pytest.mark.slow
def test_weights_in_float16_hardly_change_the_text(
    open_page: Any, trained_models: dict[str, Path], tmp_path: Path, downloads: Path
) -> None:
    model = trained_models["post-sinusoidal"]
    lines = short_sentences(100)
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    page, _ = open_page(model, quantization=Quantization.float16)
    page.choose("beam", 4)
    *translations, _ = page.translate_file(path, downloads).split("\n")
    expected = Translator.load(model, device="cpu", backend="native").translate(lines, beam_size=4)
    num_equal = sum(ours == theirs for ours, theirs in zip(translations, expected, strict=True))
    assert num_equal >= 98


def aligned_words(tokenizer: Tokenizer, line: str, translation: Translation) -> list[set[str]]:
    """Return the words of a line that each word of its translation is aligned with."""
    assert translation.alignment is not None
    source_words = [
        piece.startswith("\u2581") for piece in tokenizer.pieces(tokenizer.encode(line))
    ]
    words = list(itertools.accumulate(source_words))  # the number of the word of each source token
    partners: list[set[str]] = []
    for piece, position in zip(translation.tokens, translation.alignment, strict=True):
        if piece.startswith("\u2581"):
            partners.append(set())
        if position < len(words):  # else the EOS of the source
            partners[-1].add(line.split()[words[position] - 1])
    return partners


@needs_browser
@needs_node
@pytest.mark.parametrize(
    "shift",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.long)],
)
def test_the_page_shows_the_alignment_of_native_search(
    open_page: Any,
    trained_models: dict[str, Path],
    tokenizer: Tokenizer,
    tmp_path: Path,
    shift: bool,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(trained_models["post-sinusoidal"], model)
    config = json.loads((model / "config.json").read_text())
    change_config(model, model=config["model"] | {"alignment_shift": shift})
    page, _ = open_page(model)
    translator = Translator.load(model, device="cpu", backend="native")
    lines = short_sentences(10)
    num_words = 0
    results = translator.n_best(lines, beam_size=4, alignment=True)
    for line, translations in zip(lines, results, strict=True):
        translation = translations[0]
        assert page.translate(line) == translation.text
        labels = page.run(
            "return [...document.querySelectorAll('#alignment .words:last-child .word')]"
            ".map((word) => word.getAttribute('aria-label'))"
        )
        expected = aligned_words(tokenizer, line, translation)
        for label, partners in zip(labels, expected, strict=True):
            _, names = label.split(": ")
            shown_partners = set(names.removeprefix("goes with ").split(", ")) - {"no partner"}
            assert shown_partners == partners, (line, label)
            num_words += 1
    assert num_words > 10


@needs_browser
@needs_node
@pytest.mark.long
def test_int8_gives_the_text_of_onnx_runtime_for_python(
    open_page: Any, trained_models: dict[str, Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    page, _ = open_page(trained_models["post-sinusoidal"], quantization=Quantization.int8)
    page.choose("beam", 1)
    [folder] = (tmp_path / "site").iterdir()
    num_equal = 0
    for line in short_sentences(100):
        num_equal += page.translate(line) == search_greedily(folder, tokenizer, line)
    assert num_equal >= 95  # the toy model has near ties, which rounding decides


@needs_browser
@needs_node
@pytest.mark.long
def test_settings_of_search_mean_what_they_mean_in_native_search(
    open_page: Any, tokenizer: Tokenizer, tmp_path: Path, downloads: Path
) -> None:
    lines = short_sentences(20)
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    settings = [
        {"normalization": "average", "min_length": 4, "no_repeat_ngram": 2},
        {"length_penalty": 1.5, "word_reward": 0.4, "stop": "exact", "max_length_b": 9},
        {"normalization": "none", "repetition_penalty": 1.5, "loop_guard": False},
    ]
    trained = trained_model(tmp_path / "trained", tokenizer)
    for number, search in enumerate(settings):
        model = tmp_path / f"model {number}"
        shutil.copytree(trained, model)
        change_config(model, search=search)
        page, _ = open_page(model)
        expected = Translator.load(model, device="cpu", backend="native").translate(lines)
        assert page.translate_file(path, downloads) == "".join(f"{line}\n" for line in expected)


@needs_browser
@needs_node
@pytest.mark.slow
def test_a_student_with_ssrus_translates_as_native_search(
    open_page: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    # trained, since the hypotheses of random weights have nearly equal scores
    model = trained_model(tmp_path / "model", tokenizer, decoder=Decoder.ssru)
    page, _ = open_page(model)
    translator = Translator.load(model, device="cpu", backend="native")
    for beam_size in (1, 4):
        page.choose("beam", beam_size)
        for line in ("small green", "the tree sees", "a house"):
            [expected] = translator.translate([line], beam_size=beam_size)
            assert page.translate(line) == expected, (beam_size, line)


@needs_browser
@needs_node
@pytest.mark.slow
def test_the_translation_of_an_older_text_is_not_shown(
    open_page: Any, trained_models: dict[str, Path]
) -> None:
    page, _ = open_page(trained_models["post-sinusoidal"])
    old_translation = page.translate("small green")
    new_translation = page.translate("a house")
    page.run(
        """
        window.shown = [];
        const output = document.getElementById("output");
        const remember = () => window.shown.push(output.textContent);
        new MutationObserver(remember).observe(output, { childList: true });
        const input = document.getElementById("input");
        input.value = "small green";
        document.getElementById("beam").dispatchEvent(new Event("change")); // translates at once
        input.value = "a house";
        input.dispatchEvent(new Event("input"));
        """
    )
    page.wait_for(f"window.shown.includes({json.dumps(new_translation)})")
    assert old_translation not in page.run("return window.shown")


@needs_browser
@needs_node
@pytest.mark.slow
def test_two_vocabularies_and_directions_with_tags(
    open_page: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    small = train(vocab_size=120)
    model = random_model(tmp_path / "model", TokenizerPair(small, tokenizer), seed=5)
    pairs = [("xx", "yy"), ("xx", "zz")]
    tags = [{"src_tag": "the", "tgt_tag": "house"}, {"src_tag": "a", "tgt_tag": "tree"}]
    directions = []
    for (src_lang, tgt_lang), tag in zip(pairs, tags, strict=True):
        directions.append({"src_lang": src_lang, "tgt_lang": tgt_lang, **tag})
    change_config(model, directions=directions)
    page, _ = open_page(model)
    translator = Translator.load(model, device="cpu", backend="native")
    translations = []
    for number, (_, tgt_lang) in enumerate(pairs):
        page.choose("direction", number)
        translations.append(page.translate("small green"))
        assert translations[-1] == translator.translate(["small green"], tgt_lang=tgt_lang)[0]
    assert translations[0] != translations[1]


@needs_browser
@needs_node
@pytest.mark.slow
def test_after_the_first_load_it_works_without_a_network_until_a_new_version_is_there(
    open_page: Any, trained_models: dict[str, Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = shutil.copytree(trained_models["post-sinusoidal"], tmp_path / "model")
    page, server = open_page(model)
    old_translation = page.translate("the small house. a tree")
    assert old_translation
    server.stop()
    page.open()
    assert page.translate("the small house. a tree") == old_translation
    server.start()
    shutil.rmtree(model)
    random_model(model, tokenizer, seed=7)
    page, _ = open_page(model)  # still the old version, which fetches the new one
    page.wait_for("(await navigator.serviceWorker.getRegistration()).waiting !== null")
    (tmp_path / "favicon.ico").touch()
    page.browser.get(f"http://127.0.0.1:{server.port}/")  # closes the page
    page.wait_for("(await caches.keys()).length === 1")
    page.open()
    assert page.translate("the small house. a tree") != old_translation


@needs_browser
@needs_node
@pytest.mark.long
def test_a_file_can_be_dropped_and_only_text_is_accepted(
    open_page: Any, trained_models: dict[str, Path]
) -> None:
    page, _ = open_page(trained_models["post-sinusoidal"])
    drop = """
        const transfer = new DataTransfer();
        transfer.items.add(new File([new Uint8Array(arguments[1])], arguments[0]));
        const event = new DragEvent("drop", { dataTransfer: transfer, bubbles: true });
        document.body.dispatchEvent(event);
    """
    page.run(drop, "words.txt", list(b"the house\r\n\na tree"))
    page.wait_for("!document.getElementById('download').hidden")
    label = page.run("return document.getElementById('download').textContent")
    assert label == "Download words.yy.txt"
    page.run("document.querySelector('main').style.paddingTop = '2000px'; scrollTo(0, 0)")
    page.run(drop, "picture.png", [0x89, 0x50, 0xFF, 0xFE])
    page.wait_for(
        "document.getElementById('file-state').textContent"
        ".includes('picture.png is not a text file in UTF-8')"
    )
    assert page.run(
        "return document.getElementById('file-state').getBoundingClientRect().top < innerHeight"
    )


@needs_browser
@needs_node
@pytest.mark.slow
def test_pasted_text_is_translated_without_a_delay(
    open_page: Any, trained_models: dict[str, Path]
) -> None:
    page, _ = open_page(trained_models["post-sinusoidal"])
    insert = """
        const [text, inputType] = arguments;
        document.getElementById("input").value = text;
        document.getElementById("input").dispatchEvent(new InputEvent("input", { inputType }));
        return document.getElementById("output").classList.contains("stale");
    """
    for text, input_type, is_translated in (
        ("the house", "insertFromPaste", True),
        ("the tree", "insertText", False),
    ):
        assert page.run(insert, text, input_type) == is_translated
        page.wait_for("document.getElementById('output').textContent !== ''")
        page.wait_for("!document.getElementById('output').classList.contains('stale')")


@needs_browser
@needs_node
@pytest.mark.slow
def test_it_fits_phones_and_desktops_and_axe_finds_nothing_serious(
    open_page: Any, trained_models: dict[str, Path], npm_packages: Path
) -> None:
    page, _ = open_page(trained_models["post-sinusoidal"])
    assert page.translate("the green house")
    page.run("document.getElementById('alignment-box').open = true")
    axe = (npm_packages / "axe-core/axe.min.js").read_text(encoding="utf-8")
    backgrounds = set()
    for width in (390, 1280):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
            backgrounds.add(page.run("return getComputedStyle(document.body).backgroundColor"))
            results = page.run(f"{axe}; return axe.run()")
            findings = [*results["violations"], *results["incomplete"]]
            serious = [v["id"] for v in findings if v["impact"] in ("serious", "critical")]
            assert not serious
    assert len(backgrounds) == 2
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_version_of_a_page_changes_with_the_content_of_each_file_that_it_loads(
    tmp_path: Path,
) -> None:
    def make_version(contents: dict[str, str]) -> str:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        for name, content in contents.items():
            (folder / name).write_text(content, encoding="utf-8")
        _write_file_list(folder)
        return (folder / "files.js").read_text(encoding="utf-8").splitlines()[0]

    page = {"index.html": "page", "decoder.onnx": "weights", "LICENSE.txt": "terms"}
    version = make_version(page)
    assert re.fullmatch('const VERSION = "[0-9a-f]{16}";', version)
    assert make_version(page) == version
    assert make_version(page | {"LICENSE.txt": "other terms"}) == version
    for name in ("index.html", "decoder.onnx"):
        assert make_version(page | {name: "new"}) != version, name


def test_settings_that_the_web_page_lacks_are_refused_by_name(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match="format=web takes float32, float16 or int8"):
        ExportConfig(format=ExportFormat.web, quantization=Quantization.bfloat16)
    model = random_model(tmp_path / "model", tokenizer)
    with pytest.raises(ConfigError, match="type npm install onnxruntime-web, or"):
        exported(model, ExportFormat.web, runtime=str(tmp_path))
    dist = tmp_path / "dist"
    dist.mkdir()
    for name in ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"):
        (dist / name).touch()
    vocabulary = Vocabulary(tokenizer.all_pieces(), *tokenizer.control_ids)
    mapped = MappedTokenizer(tokenizer.model, vocabulary, [])
    imported = random_model(tmp_path / "imported", TokenizerPair(mapped, mapped, True))
    with pytest.raises(ModelError, match="BPE and unigram models .* use format=onnx"):
        exported(imported, ExportFormat.web, runtime=str(tmp_path))
    for search, name in (
        ({"coverage_penalty": 0.2}, "coverage_penalty"),
        ({"suppress": ["<unk>"]}, "suppress"),
        ({"beam_size": 4, "beam_groups": 2}, "beam_groups"),
    ):
        change_config(model, search=search)
        with pytest.raises(ModelError, match=f"does not support the model's setting {name};"):
            exported(model, ExportFormat.web, runtime=str(tmp_path))
