"""Constraints of search: no control symbols, a minimum length, a forced prefix."""

from __future__ import annotations

from itertools import pairwise

import pytest
from searching import (
    Sentence,
    ToySettings,
    ToyStepper,
    assert_same,
    config,
    enumerate_hypotheses,
    find,
    score_by_formula,
    source_ids,
    toy_log_probs,
    toy_source,
)
from tiny import BOS, EOS, PAD, UNK, tiny_model
from torch import Tensor

from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.search.hypotheses import Beam
from nmt.search.request import SearchRequest
from nmt.search.search import search
from nmt.search.stepper import ModelStepper

CONTROL_TEXT = "the </s> a <pad> <s> <unk> house</s>"
PREFIXES: list[list[int]] = [[4, 5], [], [5], [UNK, 4, 4, 5, 5, 4, 4]]


@pytest.mark.parametrize("alpha", [-0.5, 0.6])
def test_a_forced_prefix_leaves_the_best_of_those_that_start_with_it(alpha: float) -> None:
    source, settings = toy_source(4, 2, 3, 5), config(400, alpha)
    found = find(ToyStepper(), source, settings, prefixes=PREFIXES)
    for row, (hypotheses, prefix) in enumerate(zip(found[:3], PREFIXES[:3], strict=True)):
        everything = enumerate_hypotheses(source_ids(source, row), 5, settings)
        size = len(prefix)
        assert_same(hypotheses, [h for h in everything if h.tokens[:size] == prefix])


@pytest.mark.parametrize("beam_size", [1, 4])
def test_a_prefix_beyond_the_limit_may_still_end(beam_size: int) -> None:
    stepper = ToyStepper(ToySettings(eos_bonus=30.0))
    source, settings = toy_source(4, 2, 3, 5), config(beam_size)
    best = find(stepper, source, settings, prefixes=PREFIXES)[3][0]
    assert best.tokens == [*PREFIXES[3], EOS]
    assert best.finished
    assert len(best.tokens) > settings.max_length_b
    assert_same(
        [best], [score_by_formula(tuple(best.tokens), source_ids(source, 3), settings, stepper.toy)]
    )


def test_control_symbols_in_a_prefix_are_refused() -> None:
    for control in (PAD, BOS, EOS):
        with pytest.raises(ConfigError, match=f"prefix of sentence 1 contains id {control}"):
            find(ToyStepper(), toy_source(3, 4), config(2), prefixes=[[4], [4, control]])


@pytest.mark.parametrize("beam_size", [1, 3])
def test_no_translation_is_shorter_than_the_least_length(beam_size: int) -> None:
    source = toy_source(4, 2, 6)
    eager = ToyStepper(ToySettings(eos_bonus=9.0))
    short = find(eager, source, config(beam_size, b=9))
    found = find(eager, source, config(beam_size, b=9, min_length=4))
    assert {len(h[0].tokens) for h in short} == {1}
    assert {len(h[0].tokens) for h in found} == {5}
    assert all(h.finished for hypotheses in found for h in hypotheses[:1])
    beyond = find(eager, source, config(beam_size, b=2, min_length=4))
    assert [h[0].tokens for h in beyond] == [h[0].tokens for h in found]


def test_a_further_rule_is_one_function() -> None:
    source, settings = toy_source(4, 3), config(400)

    class NoRepetition:
        can_join = False

        def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
            if beam.length:
                log_probs.scatter_(1, beam.tokens[:, -1:], float("-inf"))
            return log_probs

    found = find(ToyStepper(), source, settings, constraints=[NoRepetition()])
    for row, hypotheses in enumerate(found):
        everything = enumerate_hypotheses(source_ids(source, row), 5, settings)
        allowed = [h for h in everything if all(a != b for a, b in pairwise(h.tokens))]
        assert len(allowed) < len(everything)
        assert_same(hypotheses, allowed)


def test_a_further_rule_sees_each_hypothesis_with_its_sentence() -> None:
    source = toy_source(4, 2, 6)
    seen: set[tuple[int, Sentence]] = set()

    class Watcher:
        can_join = False

        def __call__(self, log_probs: Tensor, beam: Beam) -> Tensor:
            for row, sentence in enumerate(beam.sentences.tolist()):
                tokens = tuple(beam.tokens[row].tolist())
                if beam.total_log_probs[row] > float("-inf"):
                    seen.add((sentence, tokens))
                    expected = toy_log_probs(source_ids(source, sentence), (BOS, *tokens))[4]
                    assert float(log_probs[row, 4]) == pytest.approx(expected, abs=1e-5)
            return log_probs

    find(ToyStepper(), source, config(3, a=1.0, b=3), constraints=[Watcher()])
    assert {sentence for sentence, _ in seen} == {0, 1, 2}
    assert len(seen) > 20


# --- text is never control


@pytest.mark.parametrize("beam_size", [1, 3])
def test_control_symbols_spelt_out_stay_text(tokenizer: Tokenizer, beam_size: int) -> None:
    rows = [tokenizer.encode(CONTROL_TEXT), tokenizer.encode("the house")]
    control = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id}
    assert not control & set(rows[0])
    assert tokenizer.decode(rows[0]) == CONTROL_TEXT
    model = tiny_model(2, sharpness=2.0, vocab_size=tokenizer.vocab_size)
    request = SearchRequest(rows, config(beam_size, a=1.0, b=8), prefixes=rows)
    found = search(ModelStepper(model), request, tokenizer)
    for hypotheses, prefix in zip(found, rows, strict=True):
        for h in hypotheses:
            assert h.tokens[: len(prefix)] == prefix
            assert not {tokenizer.pad_id, tokenizer.bos_id} & set(h.tokens)
            assert tokenizer.eos_id not in h.tokens[:-1]
            assert tokenizer.decode(h.tokens[:-1]).startswith(tokenizer.decode(prefix))
