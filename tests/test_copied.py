"""Emoji and addresses at the ends of lines, which are copied."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from growth import assert_linear_time
from npm import needs_node, run_script
from serving import loaded, running
from test_extension import languages_model
from toy import command
from translating import write_model

from nmt import Translator
from nmt.translate.copied import CopiedEnds, split_ends
from nmt.translate.options import LineOptions
from nmt.translate.prepared_lines import PreparedLine
from nmt.translate.restoring import restore_line
from nmt.translate.results import LineResult, Translation
from nmt.translate.windows import Window, encode_window

ENDS = {
    "A house 👍": ("", " 👍", "A house"),
    "A house.👍👍  ": ("", "👍👍  ", "A house."),
    "👉 Read this: https://example.org": ("👉 ", " https://example.org", "Read this:"),
    "Visit https://example.org/a?b=1.": ("", " https://example.org/a?b=1.", "Visit"),
    "Write to me@example.org www.example.org 🎉": (
        "",
        " me@example.org www.example.org 🎉",
        "Write to",
    ),
    "1️⃣ First 👨‍👩‍👧": ("1️⃣ ", " 👨‍👩‍👧", "First"),
    "♪ La la ♪": ("♪ ", " ♪", "La la"),
    "很好👍": ("", "👍", "很好"),
    "看看 https://例子.cn": ("", " https://例子.cn", "看看"),
    " \t👍 A house": (" \t👍 ", "", "A house"),
    "☎︎ Call us ☎︎": ("☎︎ ", " ☎︎", "Call us"),
    "VISIT WWW.EXAMPLE.ORG": ("", " WWW.EXAMPLE.ORG", "VISIT"),
    "Get it: Git+Https://example.org/a": ("", " Git+Https://example.org/a", "Get it:"),
}
WITHOUT_ENDS = [
    "",
    "A house.",
    "A small 👍 house",
    "https://example.org is a page",
    "Read this (https://example.org)",
    "© 2020 A house™",
    "Is it red ?",
    "👍",
    "👍 https://example.org",
    "Is it at www.example.org?",
    "Read this (see https://example.org/a)",
    "Room 10\ufe0f\u20e3",
    "@ home",
    "mail @ home \t",
    "Hello  ",
    "Über  ",
]


def test_emoji_and_addresses_at_the_ends_of_a_line_are_found() -> None:
    for line, (start, end, rest) in ENDS.items():
        assert split_ends(line) == (CopiedEnds(start, end), rest), line
        assert start + rest + end == line
    for line in WITHOUT_ENDS:
        assert split_ends(line) == (CopiedEnds(), line), line


ADDRESS = CopiedEnds("", " www.example.org")
RESTORED = [
    (ADDRESS, "Visit", "Besuchen Sie.", "Besuchen Sie www.example.org"),
    (ADDRESS, "A house.", "Ein Haus.", "Ein Haus. www.example.org"),
    (ADDRESS, "And so on", "Und so weiter...", "Und so weiter... www.example.org"),
    (CopiedEnds("🎉 ", "👍"), "A house", "Ein Haus.", "🎉 Ein Haus.👍"),
]


@pytest.mark.parametrize(("ends", "middle", "translation", "expected"), RESTORED)
def test_a_full_stop_is_removed_only_before_an_address(
    ends: CopiedEnds, middle: str, translation: str, expected: str
) -> None:
    [result] = restore(ends, middle, Translation(translation, 0.0, 0.0, [], finished=True))
    assert result.text == expected


def restore(ends: CopiedEnds, middle: str, translation: Translation) -> list[Translation]:
    """Return a translation of the middle of a line after `restore_line`."""
    line = PreparedLine(f"{ends.start}{middle}{ends.end}", middle, ends=ends)
    source_tokens = ["▁Visit", "</s>"] if translation.alignment is not None else []
    result = LineResult([translation], source_tokens=source_tokens)
    return restore_line(result, line).translations


def test_the_token_of_a_removed_full_stop_is_removed() -> None:
    translation = Translation(
        "Besuchen Sie.",
        score=-0.6,
        log_prob=-0.6,
        tokens=["▁Besuchen", "▁Sie", "."],
        finished=True,
        token_log_probs=[-0.1, -0.1, -0.2, -0.2],
        alignment=[0, 0, 1],
    )
    [restored] = restore(ADDRESS, "Visit", translation)
    assert restored.text == "Besuchen Sie www.example.org"
    assert restored.tokens == ["▁Besuchen", "▁Sie", "▁www.example.org"]
    assert restored.token_log_probs == [-0.1, -0.1, 0.0, -0.2]
    assert restored.alignment == [0, 0, 2]
    # some engines have no log-probabilities of tokens
    [restored] = restore(ADDRESS, "Visit", replace(translation, token_log_probs=[]))
    assert restored.token_log_probs == []
    # a longer token loses its last character
    tokens = ["▁Besuchen", "▁Sie."]
    joined = replace(translation, tokens=tokens, alignment=[0, 0], token_log_probs=[])
    [restored] = restore(ADDRESS, "Visit", joined)
    assert restored.text == "Besuchen Sie www.example.org"
    assert restored.tokens == ["▁Besuchen", "▁Sie", "▁www.example.org"]
    # a space before the full stop is removed too
    spaced = replace(translation, text="Besuchen Sie .")
    [restored] = restore(ADDRESS, "Visit", spaced)
    assert restored.text == "Besuchen Sie www.example.org"


@pytest.mark.parametrize("case", ["👍", "👍 ", "a@b.c ", "a ", "1", "👍a", " "])
@pytest.mark.parametrize("end", ["", "a", "é"])
def test_the_ends_of_a_line_are_found_in_linear_time(case: str, end: str) -> None:
    assert_linear_time(lambda size: split_ends(end + case * size + end), 100_000, (case, end))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("copied") / "model")


def test_only_the_rest_of_a_line_is_translated(model: Path) -> None:
    translator = Translator.load(model, device="cpu", backend="native")
    [house, tree] = translator.translate(["The small house", "A tree"])
    lines = ["The small house 👍", "🎉 A tree", "THE SMALL HOUSE www.example.org", "A tree"]
    expected = [f"{house} 👍", f"🎉 {tree}", f"{house.upper()} www.example.org", tree]
    assert translator.translate(lines) == expected
    assert translator.translate(lines, copy_symbols=False)[:2] != expected[:2]
    # all translations of a line have the ends
    [n_best] = translator.n_best(lines[:1], beam_size=2)
    assert [translation.text[-2:] for translation in n_best] == [" 👍", " 👍"]
    # a prefix is the start of the translation of the whole line
    assert translator.translate(lines[:1], prefixes=["The"])[0].startswith("The")
    assert translator.translate(lines[:1], prefixes=[""]) == expected[:1]


def test_the_server_copies_the_ends_of_sentences(model: Path) -> None:
    translator = Translator.load(model, device="cpu", backend="native")
    [house] = translator.translate(["The small house"])
    with running(loaded(model)) as server:
        answer = server.post("/v1/translate", text="The small house 👍", source="en", target="de")
    assert answer.json["translations"][0]["text"] == f"{house} 👍"


def test_terms_of_a_glossary_at_the_ends_are_translated(model: Path) -> None:
    translator = Translator.load(model, device="cpu", backend="native")
    lines = ["The house www.example.org", "The house www.example.net"]
    options = LineOptions(required_terms=("www.example.org\twww.example.de",))
    encoded = encode_window(Window(0, lines), translator.tokenizer, options)
    assert [line.text for line in encoded.lines] == [lines[0], "The house"]
    expected_ends = [CopiedEnds(), CopiedEnds("", " www.example.net")]
    assert [line.ends for line in encoded.lines] == expected_ends


def test_the_ids_before_text_without_a_tag_count_as_tag() -> None:
    tokenizers = languages_model()
    assert len(tokenizers.src.prefix_ids) == 1
    encoded = encode_window(Window(0, ["👉 The house"]), tokenizers, LineOptions())
    assert encoded.lines[0].num_tag_tokens == 1


@needs_node
def test_the_web_page_copies_the_same_ends(tmp_path: Path) -> None:
    script = """
    import { readFileSync } from "node:fs";
    import { addEnds, splitEnds } from "./copied.js";
    const lines = JSON.parse(readFileSync(0));
    const results = lines.map((line) => {
      const ends = splitEnds(line);
      return [ends.start, ends.middle, ends.end, addEnds("Ein Haus.", ends)];
    });
    console.log(JSON.stringify(results));
    """
    lines = [
        *ENDS,
        *WITHOUT_ENDS,
        "👍" * 300 + " a",
        "a" + "👍" * 300,
        "👍 " * 20 + "a" + " 👍" * 20,
    ]
    expected = []
    for line in lines:
        ends, middle = split_ends(line)
        translation = Translation("Ein Haus.", 0.0, 0.0, [], finished=True)
        [restored] = restore(ends, middle, translation)
        expected.append([ends.start, middle, ends.end, restored.text])
    assert run_script(tmp_path, script, lines) == expected


def test_copied_ends_are_aligned_with_themselves(model: Path) -> None:
    translator = Translator.load(model, device="cpu", backend="native")
    [plain] = translator.n_best(["The small house"], alignment=True)
    [aligned] = translator.n_best(["👉 The small house 👍 🎉"], alignment=True)
    assert aligned.source_tokens == ["▁👉", *plain.source_tokens, "▁👍", "▁🎉"]
    for translation, plain_translation in zip(aligned, plain, strict=True):
        assert translation.tokens == ["▁👉", *plain_translation.tokens, "▁👍", "▁🎉"]
        alignment = translation.alignment
        assert alignment is not None
        assert plain_translation.alignment is not None
        num_source_tokens = len(plain.source_tokens)
        assert alignment[0] == 0
        assert alignment[1:-2] == [position + 1 for position in plain_translation.alignment]
        assert alignment[-2:] == [num_source_tokens + 1, num_source_tokens + 2]
        assert len(translation.token_log_probs) == len(plain_translation.token_log_probs) + 3
        assert sum(translation.token_log_probs) == pytest.approx(plain_translation.log_prob)


def test_a_copied_start_follows_the_language_tag() -> None:
    translation = Translation(
        "Haus",
        score=-0.1,
        log_prob=-0.1,
        tokens=["▁<2de>", "▁Haus"],
        finished=True,
        alignment=[0, 1],
    )
    ends = CopiedEnds("👉 ", "")
    line = PreparedLine("👉 house", "<2de> house", ends=ends, num_tag_tokens=1)
    result = LineResult([translation], source_tokens=["▁<2de>", "▁house", "</s>"])
    restored = restore_line(result, line, num_target_tag_tokens=1)
    assert restored.source_tokens == ["▁<2de>", "▁👉", "▁house", "</s>"]
    assert restored.translations[0].tokens == ["▁<2de>", "▁👉", "▁Haus"]
    assert restored.translations[0].alignment == [0, 1, 2]


def test_tags_of_documents_stay_at_copied_ends(model: Path, tmp_path: Path) -> None:
    page = "<p>👉 The <b>small</b> house <i>🎉</i></p><p>A tree https://example.org</p>"
    Path(tmp_path / "page.html").write_text(page, "utf-8")
    output = tmp_path / "page.de.html"
    settings = [f"model_dir={model}", f"input={tmp_path / 'page.html'}", f"output={output}"]
    assert command("translate", settings, ["backend=native", "device=cpu"]) == 0
    translated = output.read_text("utf-8")
    assert translated.startswith("<p>👉 ")
    assert " <i>🎉</i></p><p>" in translated
    assert translated.endswith(" https://example.org</p>")
