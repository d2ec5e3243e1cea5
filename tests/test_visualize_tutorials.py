"""Pictures of the tutorials: attention step by step, training targets, a search in motion."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import complaints, needs_browser, requests_of, start_browser
from exporting import random_model
from tiny import plain, tiny_config, tiny_model
from variants import VARIANTS

from nmt.config import ModelConfig, Positions, SearchConfig, Theme, VisualizeConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.model.attention import MultiHeadAttention, PaddedContext, padding_mask
from nmt.model.positions import TokenPositions
from nmt.model.transformer import count_parameters
from nmt.search.stepper import ModelStepper
from nmt.translate.translator import Translator
from nmt.visualize import (
    attention_steps,
    decoding,
    multi_head,
    search_tree,
    steps_page,
    targets,
    theory,
)
from nmt.visualize.style import Style

LIGHT = Style(Theme.light)
LINE = "the green house"


@pytest.fixture
def model_dir(tmp_path: Path, tokenizer: Tokenizer) -> str:
    """A model folder with random weights."""
    return str(random_model(tmp_path / "model", tokenizer))


def texts_of(figure: Any) -> list[str]:
    """Return the texts inside the panels of a figure."""
    return [text.get_text() for axes in figure.axes for text in axes.texts]


# --- attention step by step


@pytest.mark.parametrize("name", ["plain", *VARIANTS])
def test_the_steps_compute_the_output_of_the_attention_layer(name: str) -> None:
    model = plain(tiny_model(3, **VARIANTS.get(name, {})))
    src_ids = [5, 9, 7, 6, 2]
    src = torch.tensor([src_ids])
    context = PaddedContext(padding_mask(torch.tensor([5]), 5), TokenPositions.up_to(5, src.device))
    x = model.embed(src, model.embedding, model.encoder_positions, context.positions)
    for index, layer in enumerate(model.encoder_layers):
        steps = attention_steps.compute_steps(model, src_ids, index)
        attention_out: dict[Any, Any] = {layer.self_attention: None}
        layer_input = layer.sublayer_input(layer.self_attention_norm, x)
        expected = layer.self_attention(layer_input, layer_input, context, attention_out)
        weights = attention_out[layer.self_attention]
        assert torch.allclose(steps.x, x[0], atol=1e-6)
        assert torch.allclose(steps.weights, weights[0], atol=1e-6)
        assert torch.allclose(steps.scaled_scores.softmax(dim=-1), weights[0], atol=1e-6)
        assert torch.allclose(steps.attention, expected[0], atol=1e-5)
        output = layer.add_and_norm(layer.self_attention_norm, x, expected)
        assert torch.allclose(steps.output, output[0], atol=1e-5)
        x = layer(x, context)


def test_the_figure_of_steps_shows_the_scores_of_the_chosen_word(
    model_dir: str, tokenizer: Tokenizer
) -> None:
    config = VisualizeConfig(
        src=LINE, words=["house"], layers=[2], heads=[3], model_dir=[model_dir]
    )
    figure = attention_steps.draw_steps(config, LIGHT)
    translator = Translator.load(model_dir, backend="native")
    [pair] = translator.attention([LINE], ["the"])
    query = attention_steps.find_token(pair.src, ["house"])
    assert "".join(pair.src[query:]).startswith("▁house")
    weights = pair.encoder[1, 2, query]
    written = texts_of(figure)
    for weight in weights.tolist():
        assert f"{weight:.2f}" in written
    assert tokenizer.pieces(tokenizer.encode(LINE)) == pair.src[:-1]


def test_the_page_of_steps_writes_every_step(model_dir: str) -> None:
    config = VisualizeConfig(
        src=LINE, words=["house"], layers=[2], heads=[3], model_dir=[model_dir]
    )
    token = attention_steps.follow_token(config)
    sections = steps_page.make_sections(token)
    [scores] = sections["scores"]
    for i, (label, cells) in enumerate(scores.rows):
        expected = [t[2, token.query, i] for t in (token.steps.scores, token.steps.scaled_scores)]
        expected.append(token.steps.weights[2, token.query, i])
        assert label == token.pieces[i]
        assert [cell.text for cell in cells] == [f"{v:.2f}".replace("-", "−") for v in expected]
        assert [cell.is_negative for cell in cells if cell.color_percent] == [
            value < 0 for value, cell in zip(expected, cells, strict=True) if cell.color_percent
        ]
    [summed] = sections["sum"]
    assert summed.rows[summed.marked_row][0] == "sum z"
    weighted = token.steps.weights[2, token.query, 1] * token.steps.v[2, 1, 3]
    assert summed.rows[1][1][3].text == f"{weighted:.2f}".replace("-", "−")
    assert summed.rows[-1][1][0].text == sections["heads"][0].rows[2][1][0].text
    [norm] = sections["norm"]
    assert [label for label, _ in norm.rows] == ["x", "attention", "x + attention", "layer norm"]
    page = steps_page.steps_page(config)
    for tables in sections.values():
        for table in tables:
            for _, cells in table.rows:
                assert all(f">{cell.text}</td>" in page for cell in cells)
    assert "<script" not in page
    assert max(cell.color_percent for _, cells in summed.rows for cell in cells) == 60


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [9]}, r"layers=\[9\]: give one number from 1 to 2"),
        ({"heads": [1, 2]}, r"heads=\[1, 2\]: give one number from 1 to 4"),
        ({"words": ["tree"]}, "words=tree: src has the tokens"),
        ({"words": ["the", "house"]}, "what=steps follows one word"),
        ({"src": "the green house " * 20}, "tokens, 40 can be drawn"),
    ],
)
def test_steps_refuse_what_they_cannot_draw(
    model_dir: str, changes: dict[str, Any], message: str
) -> None:
    config = VisualizeConfig(**{"src": LINE, "model_dir": [model_dir], **changes})
    with pytest.raises(ConfigError, match=message):
        attention_steps.draw_steps(config, LIGHT)


def test_the_boxes_of_multi_head_attention_have_all_its_parameters() -> None:
    for config in (tiny_config(), tiny_config(num_kv_heads=2), tiny_config(head_size=6)):
        attention = MultiHeadAttention(config, is_self=False)
        boxes = multi_head.linear_boxes(config)
        assert sum(box.num_parameters for box in boxes) == count_parameters(attention)
    figure = multi_head.draw_multi_head(VisualizeConfig(), LIGHT)
    assert "8 heads of 64" in texts_of(figure)


def test_small_tables_of_positions_have_their_numbers() -> None:
    model = ModelConfig(d_model=4, num_heads=1)
    figure = theory.draw_positions(VisualizeConfig(model=model, length=10), LIGHT)
    table = theory.sinusoidal_positions(10, 4, Positions.sinusoidal)
    written = [text.get_text() for text in figure.axes[0].texts]
    assert written == [f"{value:.2f}" for value in table.flatten().tolist()]


# --- targets


def test_training_targets_equal_the_smoothing_of_the_loss() -> None:
    for smoothing in (0.0, 0.1, 0.4):
        rows = targets.smoothed_targets([2, 0], 5, smoothing)
        assert torch.allclose(rows[0], theory.smoothed_target(smoothing, 2, 5), atol=1e-6)
        assert torch.allclose(rows[1], theory.smoothed_target(smoothing, 0, 5), atol=1e-6)


def test_probabilities_are_those_that_score_the_translation(
    model_dir: str, tokenizer: Tokenizer
) -> None:
    config = VisualizeConfig(src=LINE, tgt="das Haus", model_dir=[model_dir])
    figure = targets.draw_probabilities(config, LIGHT)
    targets_table, untrained, trained = (axes.get_images()[0].get_array() for axes in figure.axes)
    translator = Translator.load(model_dir, backend="native")
    [scored] = translator.score([LINE], ["das Haus"])
    ids = [*tokenizer.encode("das Haus"), tokenizer.eos_id]
    columns = list(dict.fromkeys(ids))
    for row, token in enumerate(ids):
        log_prob = np.log(trained[row, columns.index(token)])
        assert log_prob == pytest.approx(scored.token_log_probs[row], abs=1e-4)
    for table in (targets_table, untrained, trained):
        assert np.allclose(table.sum(axis=1), 1, atol=1e-5)
    assert not np.allclose(untrained, trained, atol=0.01)


def test_one_hot_vectors_belong_to_the_pieces_of_the_words(
    model_dir: str, tokenizer: Tokenizer
) -> None:
    config = VisualizeConfig(words=["house", "the", "house"], model_dir=[model_dir])
    figure = targets.draw_vocabulary(config, LIGHT)
    ids = list(dict.fromkeys([*tokenizer.encode("house"), *tokenizer.encode("the")]))
    [axes] = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert [int(label.split()[-1]) for label in labels] == ids
    assert (axes.get_images()[0].get_array() == np.eye(len(ids))).all()


# --- a search in motion


@pytest.fixture
def translator(tokenizer: Tokenizer) -> Translator:
    """A random model whose searches end at the length limit."""
    model = tiny_model(5, sharpness=2.0, vocab_size=tokenizer.vocab_size)
    config = SearchConfig(beam_size=3, max_length_a=0, max_length_b=6, loop_guard=False)
    return Translator(ModelStepper(model), tokenizer, config)


def test_an_element_of_the_drawing_appears_at_its_step(translator: Translator) -> None:
    record, hypotheses = search_tree.record_search(translator, LINE, 3)
    drawing = decoding.search_and_draw(translator, LINE, 3)
    num_nodes = len({*record.log_probs, *(tuple(h.tokens) for h in hypotheses)})
    branches = [element for element in drawing.elements if element.path]
    assert len(branches) == num_nodes - 1  # all but the root
    num_tokens = len(hypotheses[0].tokens)
    best_boxes = [e for e in drawing.elements if e.css_class == "best" and e.width]
    assert len(best_boxes) == 2 * num_tokens + 1  # in the translation and in the tree, and the root
    assert max(element.first_step for element in drawing.elements) == record.num_steps
    for step in range(1, num_tokens + 1):
        heat = [e.opacity for e in drawing.elements if e.is_brief and e.first_step == step]
        assert sum(heat) == pytest.approx(1, abs=1e-5)  # the attention of this token
    for element in drawing.elements:
        assert element.x + element.width <= drawing.width
        assert element.y + element.height <= drawing.height


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    for browser in start_browser(tmp_path_factory.mktemp("browser")):
        browser.set_window_size(1280, 1000)
        yield browser


HOSTILE = 'the <b>green</b> & "house" \'</svg><script>document.title = 1</script>'
NUM_VISIBLE = """
return [...document.querySelectorAll(".drawing [class*=from-]")]
  .filter((element) => getComputedStyle(element).visibility === "visible").length;
"""


@pytest.mark.slow
@needs_browser
def test_the_page_of_a_search_plays_and_goes_step_by_step(
    browser: Any, translator: Translator, tmp_path: Path
) -> None:
    path = tmp_path / "search.html"
    drawing = decoding.search_and_draw(translator, HOSTILE, 2)
    path.write_text(decoding.render(decoding.PAGE_TEMPLATE, drawing, HOSTILE), encoding="utf-8")
    requests_of(browser)
    browser.get(path.as_uri())
    assert browser.find_element("css selector", "h1").text == HOSTILE
    body = browser.find_element("css selector", "body")
    num_steps = int(browser.find_element("id", "step").get_attribute("max"))
    counts = [browser.execute_script(NUM_VISIBLE)]
    for _ in range(num_steps):
        body.send_keys("\ue014")  # arrow to the right
        counts.append(browser.execute_script(NUM_VISIBLE))
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert browser.find_element("id", "number").text == f"step {num_steps} of {num_steps}"
    browser.find_element("id", "back").click()
    assert browser.find_element("id", "number").text == f"step {num_steps - 1} of {num_steps}"
    script = "const play = document.getElementById('play'); play.click(); return play.textContent"
    assert browser.execute_script(script) == "Stop"  # at once, since it soon arrives at the end
    assert requests_of(browser) <= {path.as_uri()}
    assert not complaints(browser)


@pytest.mark.slow
@needs_browser
def test_the_page_of_steps_fits_a_phone(browser: Any, model_dir: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.html"
    config = VisualizeConfig(src=LINE, model_dir=[model_dir])
    path.write_text(steps_page.steps_page(config), encoding="utf-8")
    requests_of(browser)
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert requests_of(browser) <= {path.as_uri()}
    assert not complaints(browser)


@pytest.mark.slow
@needs_browser
def test_the_svg_of_a_search_moves_without_a_script(
    browser: Any, translator: Translator, tmp_path: Path
) -> None:
    path = tmp_path / "search.svg"
    drawing = decoding.search_and_draw(translator, HOSTILE, 2)
    path.write_text(decoding.render(decoding.SVG_TEMPLATE, drawing, HOSTILE), encoding="utf-8")
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")
    assert not re.search("<script|href|url\\(", path.read_text(encoding="utf-8"))
    browser.get(path.as_uri())
    counts = []
    for share in (0.0, 0.5, 0.99):
        browser.execute_script(
            "for (const animation of document.getAnimations()) {"
            "  animation.pause();"
            "  animation.currentTime = arguments[0] * animation.effect.getTiming().duration;"
            "}",
            share,
        )
        counts.append(browser.execute_script(NUM_VISIBLE))
    assert counts[0] < counts[1] < counts[2]
