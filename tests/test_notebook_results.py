"""Translations and attention have a short repr, and HTML for a notebook."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from exporting import random_model

from nmt import Translator
from nmt.data.tokenizer import Tokenizer
from nmt.translate.notebook import NBestList
from nmt.translate.results import Translation

LINES = ["the small tree", "red <b> & house", ""]


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Translator:
    folder = random_model(tmp_path_factory.mktemp("notebook") / "model", tokenizer)
    return Translator.load(folder, backend="native")


def cells(table: str) -> list[str]:
    """Return the texts of the cells of a table."""
    return [html.unescape(text) for text in re.findall(r"<td[^>]*>(.*?)</td>", table)]


def test_an_n_best_list_is_a_list_and_shows_every_text_and_score(translator: Translator) -> None:
    for n_best in translator.n_best(LINES, beam_size=3):
        assert n_best == list(n_best)
        cell_texts = cells(n_best._repr_html_())
        for number, translation in enumerate(n_best):
            rank, text, score = cell_texts[3 * number : 3 * number + 3]
            assert (rank, text) == (str(number + 1), translation.text)
            assert float(score) == pytest.approx(translation.score, abs=5e-4)


def test_the_table_of_an_alignment_names_the_source_token_of_each_token(
    translator: Translator,
) -> None:
    [n_best] = translator.n_best(LINES[:1], beam_size=2, alignment=True)
    best = n_best[0]
    assert best.alignment is not None
    table = n_best._repr_html_().split("</table>")[1]
    sources = [n_best.source_tokens[i] for i in best.alignment[: len(best.tokens)]]
    assert cells(table) == [*best.tokens, *sources]


def test_text_cannot_add_tags() -> None:
    translation = Translation("<script>", 0.0, 0.0, ["<x>"], finished=True, alignment=[0])
    html = NBestList([translation], ["<y>"])._repr_html_()
    assert not re.search("<(script|x|y)>", html)


def test_the_map_of_an_attention_has_the_mean_weights_of_the_last_layer(
    translator: Translator,
) -> None:
    [pair] = translator.attention(LINES[:1])
    cell_texts = cells(pair._repr_html_())
    weights = pair.cross[-1].mean(dim=0)
    width = len(pair.src) + 1
    assert len(cell_texts) == len(pair.predicted) * width
    for row, token in enumerate(pair.predicted):
        assert cell_texts[row * width] == token
        numbers = [float(text) for text in cell_texts[row * width + 1 : (row + 1) * width]]
        assert numbers == pytest.approx(weights[row].tolist(), abs=5.1e-3)


def test_reprs_are_one_short_line(translator: Translator, tmp_path: Path) -> None:
    [[translation]] = translator.n_best(LINES[:1], beam_size=1)
    [pair] = translator.attention(LINES[:1])
    for result in (translator, translation, pair):
        assert "\n" not in repr(result)
        assert len(repr(result)) < 500
    assert repr(translation.text) in repr(translation)
    assert "NativeBackend" in repr(translator)
