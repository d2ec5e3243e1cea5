"""Search on text, by the translator."""

from __future__ import annotations

import pytest
from conftest import sentences, tiny_model
from searching import Copier, config

from nmt.data.tokenizer import Tokenizer
from nmt.search.stepper import ModelStepper
from nmt.translate.translator import Translator


@pytest.fixture
def translator(tokenizer: Tokenizer) -> Translator:
    model = tiny_model(2, sharpness=2.0, vocab_size=tokenizer.vocab_size)
    return Translator(ModelStepper(model), tokenizer, config(3, a=1.0, b=8))


LINES = ["", *sentences(20, seed=8), "   ", "", "the " * 60]


@pytest.mark.parametrize("beam_size", [1, 3])
def test_lines_come_back_in_order_and_the_same_whatever_the_batch(
    translator: Translator, beam_size: int
) -> None:
    expected = [translator.translate([line], beam_size=beam_size)[0] for line in LINES]
    for max_tokens in (1, 100, 100_000):
        found = translator.translate(LINES, beam_size=beam_size, max_tokens=max_tokens)
        assert found == expected
    assert expected[0] == expected[-2] == expected[-3] == ""
    assert len(set(expected)) > 10
    settings = translator.search_config(beam_size=beam_size)
    stream = translator.n_best_stream(iter(LINES), settings, max_tokens=100, window_lines=7)
    assert [best[0].text for best in stream] == expected


def test_the_best_translation_is_the_first_of_n(translator: Translator) -> None:
    n_best = translator.n_best(LINES, translator.search_config())
    assert [best[0].text for best in n_best] == translator.translate(LINES)
    for line, translations in zip(LINES, n_best, strict=True):
        assert len(translations) == (3 if line.strip() else 1)
        scores = [t.score for t in translations if t.finished]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(("beam_size", "max_length_a"), [(1, 1.0), (3, 1.0), (1, 0.5)])
def test_a_model_that_copies_gives_back_the_text_or_what_the_limit_left_of_it(
    tokenizer: Tokenizer, beam_size: int, max_length_a: float
) -> None:
    settings = config(beam_size, a=max_length_a, b=1)
    translator = Translator(Copier(tokenizer.vocab_size), tokenizer, settings)
    lines = [line for line in LINES if line.strip()]
    for line, translations in zip(lines, translator.n_best(lines, settings), strict=True):
        best, ids = translations[0], tokenizer.encode(line)
        limit = int(max_length_a * len(ids)) + 1
        assert best.finished == (limit > len(ids))
        assert best.text == (line.strip() if best.finished else tokenizer.decode(ids[:limit]))
        assert best.tokens == tokenizer.pieces(ids[:limit])
        assert best.log_prob == pytest.approx(-0.01 * min(len(ids) + 1, limit), abs=1e-4)


def test_what_the_caller_sets_wins_over_the_models_defaults(translator: Translator) -> None:
    assert translator.search_config() == translator.defaults
    changed = translator.search_config(beam_size=1, length_penalty=0.0, max_length_b=None)
    assert (changed.beam_size, changed.length_penalty, changed.max_length_b) == (1, 0.0, 8)
