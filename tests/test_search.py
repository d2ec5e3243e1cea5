"""Search over a toy model, compared with all sequences and with a beam search over lists."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from searching import (
    ALLOWED_SYMBOLS,
    TOY_SETTINGS,
    Sentence,
    ToySettings,
    ToyState,
    ToyStepper,
    assert_same,
    beam_by_lists,
    config,
    enumerate_hypotheses,
    find,
    normalized,
    score_by_formula,
    source_ids,
    source_rows,
    toy_log_probs,
    toy_source,
)
from tiny import BOS, EOS, UNK, VOCAB_SIZE
from torch import Tensor

from nmt.config import Normalization, Stop
from nmt.errors import ModelError
from nmt.search.request import SearchRequest

RULES: dict[str, dict[str, Any]] = {
    **{f"wu{alpha}": {"alpha": alpha} for alpha in (-0.5, 0.0, 0.6, 1.0, 2.0)},
    "average": {"normalization": Normalization.average},
    "none": {"normalization": Normalization.none},
    "reward": {"normalization": Normalization.none, "word_reward": 0.8},
    "wu reward": {"alpha": 0.6, "word_reward": 0.5},
    "wu2 reward": {"alpha": 2.0, "word_reward": 2.0},
    "fine for words": {"alpha": -0.5, "word_reward": -0.7},
    "coverage": {"alpha": 0.6, "coverage_penalty": 0.4, "alignment": True},
    "some coverage": {"alpha": 1.0, "coverage_penalty": 0.1},
    "least": {"alpha": 1.0, "min_length": 2},
    "least short": {"alpha": -0.5, "min_length": 2},
}
ONE_AND_TWO_SENTENCES = (toy_source(2), toy_source(2, 2))
"""Sources of one sentence, which `nmt.search.single` searches, and of two, for `BeamSearch`."""

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


@every_rule
def test_a_wide_beam_finds_the_best_of_all_sequences(rule: dict[str, Any]) -> None:
    """The wider beam holds all hypotheses, the other all prefixes but not all hypotheses."""
    for lengths, beam_size in (((4, 2), 400), ((3,), 4 * 81)):
        source = toy_source(*lengths)
        settings = config(beam_size, **rule)
        for row, hypotheses in enumerate(find(ToyStepper(), source, settings)):
            expected = enumerate_hypotheses(source_ids(source, row), 5, settings)
            assert len(expected) == sum(3**n for n in range(settings.min_length, 6))
            assert_same(hypotheses, expected[:beam_size])


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.long)])
@every_rule
def test_beam_search_equals_one_by_lists(rule: dict[str, Any], stride: int) -> None:
    source = toy_source(6, 2, 9, 4, 1, 3)
    limits = [2 * (length - 1) + 3 for length in source[1].tolist()]
    cases = list(itertools.product([2, 5], TOY_SETTINGS, Stop))
    for beam_size, toy, stop in cases[::stride]:
        settings = config(beam_size, a=2.0, b=3, stop=stop, **rule)
        results = find(ToyStepper(toy), source, settings)
        for row, limit in enumerate(limits):
            expected, _ = beam_by_lists(source_ids(source, row), limit, settings, toy)
            assert_same(results[row], expected, case=(beam_size, toy, stop, row))


@every_rule
def test_search_ends_with_the_first_step_after_which_nothing_better_can_come(
    rule: dict[str, Any],
) -> None:
    for length, toy, stop in itertools.product((6, 2, 9), TOY_SETTINGS, Stop):
        settings = config(3, b=12, stop=stop, **rule)
        stepper = ToyStepper(toy)
        source = toy_source(length)
        find(stepper, source, settings)
        _, num_steps = beam_by_lists(source_ids(source, 0), 12, settings, toy)
        assert len(stepper.num_rows) == num_steps, (length, toy, stop)


def test_stopping_first_takes_fewer_steps_where_longer_hypotheses_score_higher() -> None:
    for rule in RULES.values():
        num_steps = {}
        for stop in Stop:
            stepper = ToyStepper(ToySettings(eos_bonus=1.5))
            find(stepper, toy_source(6), config(3, b=40, stop=stop, **rule), n_best=1)
            num_steps[stop] = len(stepper.num_rows)
        gains_by_length = rule.get("alpha", 0.6) > 0 or rule.get("word_reward", 0) > 0
        if rule == RULES["none"] or not gains_by_length:
            assert num_steps[Stop.first] == num_steps[Stop.exact], rule
        else:
            assert num_steps[Stop.first] < num_steps[Stop.exact], rule


class TableStepper(ToyStepper):
    """Reads the log-probabilities of a prefix from a table; other tokens are impossible."""

    def __init__(self, log_probs_by_prefix: dict[Sentence, dict[int, float]]) -> None:
        super().__init__()
        self.log_probs_by_prefix = log_probs_by_prefix

    def step(self, tokens: Tensor, state: ToyState) -> Tensor:
        super().step(tokens, state)
        log_probs = torch.full((len(state.rows), VOCAB_SIZE), float("-inf"))
        for row, (_, prefix) in enumerate(state.rows):
            for token, log_prob in self.log_probs_by_prefix.get(prefix[1:], {}).items():
                log_probs[row, token] = log_prob
        return log_probs


@every_rule
def test_a_live_hypothesis_is_dropped_only_when_it_cannot_win_by_the_least(
    rule: dict[str, Any],
) -> None:
    """Two hypotheses end with 1 and 2 tokens; a third with 3 tokens is better or worse by `margin`.

    Rules with coverage are left out because the bound is not exact, and rules with a minimum length
    because they forbid the first result.
    """
    if rule.get("coverage_penalty") or rule.get("min_length"):
        return
    settings = config(3, b=3, **rule)
    margins = (-0.002, -0.00002, 0.00002, 0.002)
    for n_best, margin, source in itertools.product((1, 2), margins, ONE_AND_TWO_SENTENCES):
        finished_scores = [normalized(-2.0, 1, settings), normalized(-2.2, 2, settings)]
        score_to_beat = sorted(finished_scores, reverse=True)[n_best - 1]
        factor = normalized(1.0, 3, settings) - normalized(0.0, 3, settings)
        log_prob = (score_to_beat + margin) / factor - 3 * settings.word_reward
        first_log_prob = min(log_prob, -0.5)
        stepper = TableStepper(
            {
                (): {EOS: -2.0, 4: -2.2, 5: first_log_prob},
                (4,): {EOS: 0.0},
                (5,): {5: log_prob - first_log_prob},
                (5, 5): {EOS: 0.0},
            }
        )
        hypotheses = find(stepper, source, settings, n_best=n_best)[-1]
        is_result = [5, 5, EOS] in [h.tokens for h in hypotheses]
        assert is_result == (margin > 0), (n_best, margin, len(source[1]))
        if n_best == 1 and finished_scores[0] >= finished_scores[1] and not is_result:
            assert len(stepper.num_rows) <= 2, margin  # the score to beat is known after one step


def test_a_beam_of_one_is_greedy() -> None:
    source = toy_source(6, 2, 9, 4)
    settings = config(1, 0.6, a=1.0, b=3)
    for toy in TOY_SETTINGS:
        for row, hypotheses in enumerate(find(ToyStepper(toy), source, settings)):
            src = source_ids(source, row)
            tokens: Sentence = ()
            while len(tokens) < len(src) - 1 + 3 and EOS not in tokens:
                log_probs = toy_log_probs(src, (BOS, *tokens), toy)
                tokens = (*tokens, max(ALLOWED_SYMBOLS, key=log_probs.__getitem__))
            assert_same(hypotheses, [score_by_formula(tokens, src, settings, toy)])


# --- length limits and numbers of results


@pytest.mark.parametrize("beam_size", [1, 3])
def test_each_sentence_has_its_own_limit_and_leaves_the_batch_when_it_is_done(
    beam_size: int,
) -> None:
    settings = config(beam_size, a=1.5, b=2)
    source = toy_source(7, 1, 4)
    limits = [9 + 2, 0 + 2, 4 + 2]  # 1.5 times the length without EOS, plus 2
    assert SearchRequest(source_rows(source), settings).length_limits() == limits
    stepper = ToyStepper(ToySettings(eos_bonus=-50.0))
    for hypotheses, limit in zip(find(stepper, source, settings), limits, strict=True):
        assert len(hypotheses) == beam_size
        assert {len(h.tokens) for h in hypotheses} == {limit}
        assert not any(h.finished for h in hypotheses)
    for step, sources in enumerate(stepper.sources, start=1):
        live_rows = [row for row in range(3) if limits[row] >= step]
        assert sources == {source_ids(source, row) for row in live_rows}
        assert stepper.num_rows[step - 1] == len(live_rows) * (1 if step == 1 else beam_size)
    assert len(stepper.num_rows) == 11


@pytest.mark.slow
@every_rule
def test_a_smaller_n_best_gives_the_first_results_with_less_work(rule: dict[str, Any]) -> None:
    source = toy_source(4, 2, 7, 1)
    settings = config(4, a=1.0, b=20, **rule)
    for toy in TOY_SETTINGS:
        full_stepper = ToyStepper(toy)
        expected = find(full_stepper, source, settings)
        for n_best in (1, 2, 9):
            stepper = ToyStepper(toy)
            results = find(stepper, source, settings, n_best=n_best)
            assert results == [hypotheses[:n_best] for hypotheses in expected], (toy, n_best)
            assert sum(stepper.num_rows) <= sum(full_stepper.num_rows)
            if n_best == 1 and toy.eos_bonus > 0 and rule == RULES["wu0.6"]:
                assert sum(stepper.num_rows) < sum(full_stepper.num_rows)


# --- ties and broken models


class ConstantStepper(ToyStepper):
    """Gives all tokens the same log-probability."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def step(self, tokens: Tensor, state: ToyState) -> Tensor:
        return torch.full((super().step(tokens, state).size(0), VOCAB_SIZE), self.value)


def test_ties_are_won_by_the_first_prefix_and_the_lowest_id() -> None:
    settings = config(1, b=3, alpha=0.0)
    assert find(ConstantStepper(-3.0), toy_source(3), settings)[0][0].tokens == [UNK] * 3
    (hypotheses,) = find(ConstantStepper(-3.0), toy_source(3), replace(settings, beam_size=4))
    expected = [[EOS], [UNK, EOS], [UNK, UNK, EOS], [UNK, UNK, UNK]]
    assert [h.tokens for h in hypotheses] == expected  # the ids are UNK 1, EOS 3, 4, 5, ...


def test_results_with_equal_scores_are_in_the_order_in_which_they_ended() -> None:
    settings = config(2, b=4, alpha=0.0)
    for source in ONE_AND_TWO_SENTENCES:
        num_sentences = len(source[1])
        stepper = TableStepper({(): {EOS: -1.0, 4: -1.0}, (4,): {EOS: 0.0}})
        hypotheses = find(stepper, source, settings)[-1]
        assert [h.tokens for h in hypotheses] == [[EOS], [4, EOS]], num_sentences
        hypotheses = find(stepper, source, settings, n_best=1)[-1]
        assert [h.tokens for h in hypotheses] == [[EOS]], num_sentences
        # 2 steps, then 1: an equal score does not win
        assert stepper.num_rows == [num_sentences] * 3


def test_a_model_without_finite_log_probabilities_is_refused() -> None:
    for value, beam_size in itertools.product((float("nan"), float("-inf")), (1, 4)):
        with pytest.raises(ModelError, match="gives no probabilities"):
            find(ConstantStepper(value), toy_source(3, 2), config(beam_size))
